"""The doctor's checks on machines that are made up: what each says, and what it has one type.

They know the doctor's private names: most of these machines cannot be had for a test.
"""

from dataclasses import replace

import pytest

from gradsync.backends import BACKENDS
from gradsync.doctor import CHECKS, Facts, Status, examine

GIGABYTE = 1024**3
CUPY = {
    "version": "14.2.0",
    "runtime": 12090,
    "driver": 12080,
    "count": 2,
    "nvrtc": [12, 9],
    "devices": [
        {"name": "NVIDIA H100", "memory_bytes": 80 * 1024**3, "peers": 1},
        {"name": "NVIDIA H100", "memory_bytes": 80 * 1024**3, "peers": 1},
    ],
    "nccl": {"version": "2.32.3", "build": "2.25.1", "path": "/site/nvidia/nccl/lib/libnccl.so.2"},
}
KERNELS = {"kind": "C", "layout": 1, "file": "/site/gradsync/_kernels.abi3.so"}
PLAIN = {
    "kind": "NumPy",
    "layout": 1,
    "file": "/site/plain.py",
    "why_plain": "they were not built",
    "remedy": "get gcc",
}
MPI = {"version": "4.1.2", "library": "MPICH 5.0.2"}


@pytest.fixture
def healthy(tmp_path):
    """A machine with two GPUs on which all is well."""
    files = {
        "dev/nvidia0": "",
        "dev/nvidia1": "",
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5",
    }
    write(tmp_path, files)
    return Facts(
        root=tmp_path,
        packages=["cupy-cuda12x"],
        answers={
            "kernels": KERNELS,
            "cupy": CUPY,
            "mpi": MPI,
            "mpiexec": {"text": "HYDRA build details:\n    Version: 5.0.2"},
        },
        shared_memory_bytes=(16 * GIGABYTE, 15 * GIGABYTE),
        mpiexec="/usr/bin/mpiexec",
    )


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def findings(here):
    return {finding.what: finding for finding in examine(here)}


def changed(here, **answers):
    return replace(here, answers={**here.answers, **answers})


def test_a_healthy_machine_has_nothing_to_do(healthy):
    found = findings(healthy)
    assert {finding.status for finding in found.values()} == {Status.OK}
    assert not any(finding.advice for finding in found.values())
    assert set(found) == set(CHECKS)
    assert found["GPUs"].text == "2 x NVIDIA H100, 80 GB; driver 550.54.15, which supports CUDA up to 12.8"
    assert found["CuPy"].text == "cupy-cuda12x 14.2.0, CUDA runtime 12.9"
    assert found["NCCL"].text == ("2.32.3 from /site/nvidia/nccl/lib/libnccl.so.2, CuPy was built with 2.25.1")


# What is broken, which line tells, how, with which words, and what to do.
BROKEN = [
    ({"system": "darwin"}, "Python", "broken", "darwin", "Linux only"),
    ({"machine": "riscv64"}, "kernels", "not usable here", "riscv64", "--backend mpi"),
    ({"shared_memory_bytes": None}, "/dev/shm", "not usable here", "does not exist", "mount -t tmpfs tmpfs /dev/shm"),
    ({"shared_memory_bytes": (64 * 1024**2,) * 2}, "/dev/shm", "warning", "64 MB, 64 MB free: too small", "--shm-size"),
    ({"shared_memory_bytes": (GIGABYTE, 4096)}, "/dev/shm", "warning", "4 KB free: NCCL and MPI may", "ls -l /dev/shm"),
    ({"cores": 1}, "cores", "warning", "wait for each other", "use -n 1"),
    ({"environ": {"OMP_NUM_THREADS": "64"}}, "cores", "warning", "more threads than", "unset OMP_NUM_THREADS:"),
    ({"environ": {"MASTER_PORT": "99999"}}, "launcher", "broken", "MASTER_PORT", "unset the environment variables"),
    ({"mpiexec": None}, "MPI", "not usable here", "is not on the PATH", "pip install mpich"),
    ({"environ": {"CUDA_VISIBLE_DEVICES": ""}}, "GPUs", "not usable here", "hides all", "unset CUDA_VISIBLE_DEVICES"),
    ({"environ": {"CUDA_VISIBLE_DEVICES": "0,1,7"}}, "GPUs", "warning", "names 3 GPUs", "nvidia-smi -L"),
    ({"environ": {"NCCL_COMM_BLOCKING": "0"}}, "NCCL", "not usable here", "only blocking", "unset NCCL_COMM"),
    (
        {"environ": {"RANK": "1", "WORLD_SIZE": "4"}},
        "launcher",
        "warning",
        "rank 1 of 4, according to variables that torchrun or you",
        "unset RANK WORLD_SIZE",
    ),
    (
        {"environ": {"RANK": "1"}},
        "launcher",
        "broken",
        "WORLD_SIZE",
        "unset the environment variables that this error names",
    ),
    (
        {"environ": {"GRADSYNC_BACKED": "shm"}},
        "GRADSYNC_BACKED",
        "warning",
        "did you mean GRADSYNC_BACKEND?",
        'export GRADSYNC_BACKEND="$GRADSYNC_BACKED"; unset GRADSYNC_BACKED',
    ),
    (
        {"environ": {"GRADSYNC_TRACE_DIR": "traced"}},
        "GRADSYNC_TRACE_DIR",
        "warning",
        "did you mean GRADSYNC_TRACE?",
        "unset GRADSYNC_TRACE_DIR",
    ),
    ({"environ": {"GRADSYNC_HEARTBEAT": "1"}}, "GRADSYNC_HEARTBEAT", "warning", "lists all", "unset"),
    ({"environ": {"GRADSYNC_DUMP_DIR": "x"}}, "GRADSYNC_DUMP_DIR", "broken", "report", "unset GRADSYNC_DUMP_DIR"),
    (
        {"environ": {"GRADSYNC_ALLOW_SHARED_GPU": "true"}},
        "GRADSYNC_ALLOW_SHARED_GPU",
        "broken",
        "0 or 1, got 'true'",
        "unset GRADSYNC_ALLOW_SHARED_GPU",
    ),
    ({"environ": {"GRADSYNC_XYZZY": "1"}}, "GRADSYNC_XYZZY", "warning", "lists all", "unset GRADSYNC_XYZZY"),
    ({"environ": {"GRADSYNC_BACKEND": "gloo"}}, "GRADSYNC_BACKEND", "broken", BACKENDS[-1], "unset GRADSYNC_BACKEND"),
    ({"environ": {"GRADSYNC_LOG": "loud"}}, "GRADSYNC_LOG", "broken", "'loud'", "unset GRADSYNC_LOG"),
    ({"environ": {"GRADSYNC_SECRET": "xyz"}}, "GRADSYNC_SECRET", "broken", "GRADSYNC_SECRET", "unset GRADSYNC_SECRET"),
    (
        {"packages": ["cupy-cuda12x", "cupy-cuda13x"]},
        "CuPy",
        "warning",
        "2 packages install CuPy into one folder",
        "pip uninstall -y cupy-cuda12x cupy-cuda13x; then pip install 'gradsync[cuda12]'",
    ),
]


@pytest.mark.parametrize(("change", "what", "status", "text", "advice"), BROKEN, ids=lambda value: str(value)[:40])
def test_what_is_broken_is_named_with_what_to_do(healthy, change, what, status, text, advice):
    finding = findings(replace(healthy, **change))[what]
    assert finding.status.value == status
    assert text in finding.text
    assert advice in finding.advice


# Likewise of what libraries answer.
ANSWERS = [
    ("kernels", PLAIN, "kernels", "warning", "plain NumPy, slower than in C: they were not built", "get gcc"),
    ("kernels", {"error": "killed by SIGILL"}, "kernels", "broken", "SIGILL", "install gradsync again"),
    ("mpi", {"error": "no libmpi.so"}, "MPI", "not usable here", "no libmpi.so", "an MPI: pip install mpi4py mpich"),
    ("mpiexec", {"text": "mpiexec (OpenRTE) 4.1"}, "MPI", "warning", "belongs to Open MPI", "use the mpiexec of MPICH"),
    (
        "cupy",
        {"error": "the process that imported the library was killed by SIGSEGV"},
        "CuPy",
        "not usable here",
        "SIGSEGV",
        "pip install",
    ),
    (
        "cupy",
        {**CUPY, "version": "13.6.0"},
        "CuPy",
        "not usable here",
        "CuPy 14 or newer",
        "pip install 'gradsync[cuda",
    ),
    (
        "cupy",
        {**CUPY, "driver": 11080},
        "CuPy",
        "warning",
        "supports CUDA only up to 11.8",
        "pip uninstall -y cupy-cuda12x",
    ),
    ("cupy", {**CUPY, "nccl": False}, "NCCL", "not usable here", "could not load", "nvidia-nccl-cu12"),
    ("cupy", {k: v for k, v in CUPY.items() if k != "nvrtc"}, "CuPy", "not usable here", "NVRTC", "includes it"),
    (
        "cupy",
        {k: v for k, v in CUPY.items() if k != "count"},
        "CuPy",
        "not usable here",
        "CuPy sees no GPU",
        "nvidia-smi",
    ),
    (
        "cupy",
        {**CUPY, "devices": [{**d, "peers": 0} for d in CUPY["devices"]]},
        "GPUs",
        "warning",
        "not all GPUs can access",
        "nvidia-smi topo",
    ),
]


@pytest.mark.parametrize(("name", "answer", "what", "status", "text", "advice"), ANSWERS, ids=lambda v: str(v)[:30])
def test_what_libraries_answer_is_judged(healthy, name, answer, what, status, text, advice):
    finding = findings(changed(healthy, **{name: answer}))[what]
    assert finding.status.value == status
    assert text in finding.text
    assert advice in finding.advice


def test_aarch64_needs_the_kernels_in_c(healthy):
    assert findings(replace(healthy, machine="aarch64"))["kernels"].status is Status.OK
    finding = findings(changed(replace(healthy, machine="aarch64"), kernels=PLAIN))["kernels"]
    assert finding.status is Status.UNUSABLE
    assert "get gcc" in finding.text


def test_without_a_gpu_nothing_is_wrong(tmp_path):
    here = Facts(root=tmp_path, answers={"cupy": {"error": "No module named 'cupy'"}})
    found = findings(here)
    assert found["GPUs"].status is found["CuPy"].status is Status.UNUSABLE
    assert (found["GPUs"].advice, found["CuPy"].advice) == ("", "")
    assert "NCCL" not in found


def test_cupy_without_a_driver_says_so(healthy, tmp_path):
    for device in (tmp_path / "dev").iterdir():
        device.unlink()
    found = findings(healthy)
    assert "this machine has no NVIDIA driver" in found["CuPy"].text
    assert "docker run --gpus all" in found["CuPy"].advice
    assert found["NCCL"].status is Status.OK


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"sys/fs/cgroup/cpu.max": "150000 100000"}, "limited to 1.5 cores, though 8 are visible"),
        ({"proc/self/cgroup": "0::/job", "sys/fs/cgroup/job/cpu.max": "200000 100000"}, "limited to 2 cores"),
    ],
)
def test_a_container_with_limits(healthy, tmp_path, files, words):
    write(tmp_path, files)
    finding = findings(healthy)["cores"]
    assert words in finding.text
    assert (finding.status, "docker run" in finding.advice) == (Status.WARNING, True)


def test_a_check_that_fails_is_a_line(healthy):
    def fails(_here):
        raise ZeroDivisionError("by nothing")

    [finding] = examine(healthy, {"something": fails})
    assert (finding.what, finding.status) == ("something", Status.WARNING)
    assert "ZeroDivisionError: by nothing" in finding.text


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_no_check_stumbles_over_a_machine_that_tells_nothing(check, tmp_path):
    check(Facts(root=tmp_path / "nowhere"))
