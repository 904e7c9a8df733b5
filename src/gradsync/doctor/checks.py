"""The checks of `gradsync doctor`. Each check gets the facts about this machine and returns its findings."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gradsync import environment
from gradsync.communicators.nccl.library import version_text
from gradsync.doctor.facts import CUPY_PACKAGES, Facts
from gradsync.errors import BackendUnavailable, InvalidArgument, size_text
from gradsync.machine import BLAS_VARIABLES, count_gpus, visible_gpus


class Status(enum.StrEnum):
    """How serious a finding is."""

    OK = "ok"
    WARNING = "warning"
    UNUSABLE = "not usable here"
    BROKEN = "broken"


OK, WARNING, UNUSABLE, BROKEN = Status


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        status: how serious the finding is. BROKEN means that gradsync does not work here, or that the tried backend
            does not work. UNUSABLE means that a backend needs something that this machine lacks.
        text: the result of the check, in words.
        advice: the commands or steps that solve the problem; "" for no advice.
        what: the name of the checked thing, such as "NumPy", which the report shows before the text. examine() replaces
            "" by the name of the check.
    """

    status: Status
    text: str
    advice: str = ""
    what: str = ""


_OLDEST_PYTHON, _OLDEST_NUMPY = (3, 11), (2, 1)


def check_python(here: Facts) -> Finding:
    """Checks that Python is new enough, and that the system is Linux."""
    version, path = here.python
    text = f"{version} on {here.system} {here.machine}, {path}"
    if _numbers(version)[:2] < _OLDEST_PYTHON:
        return Finding(BROKEN, text, "gradsync needs Python 3.11 or newer: create a venv with a newer Python")
    if here.system != "linux":
        advice = "ranks run on Linux only: use a Linux machine, a Linux container, or WSL2 on Windows"
        return Finding(BROKEN, text, advice)
    return Finding(OK, text)


def check_numpy(here: Facts) -> Finding:
    """Checks that NumPy is new enough.

    If NumPy cannot be imported, `gradsync doctor` raises an error before it runs the checks.
    """
    if _numbers(here.numpy)[:2] < _OLDEST_NUMPY:
        text = f"{here.numpy}; gradsync needs NumPy 2.1 or newer"
        return Finding(WARNING, text, "pip install --upgrade 'numpy>=2.1'")
    return Finding(OK, here.numpy)


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:2]
    return tuple(int(part) if part.isdigit() else 0 for part in parts)


def check_kernels(here: Facts) -> Finding:
    """Checks which kernels the backend shm runs, and whether this processor can run them."""
    answer = here.answers.get("kernels", {"error": "no answer"})
    if "error" in answer:
        return Finding(BROKEN, answer["error"], "install gradsync again: pip install . (-e . in a clone)")
    from gradsync.communicators.shared_memory.compiled import Kernels  # imported here: it fails where the answer is one
    from gradsync.communicators.shared_memory.segment import check_platform

    running = Kernels(**answer)
    try:
        check_platform(running, here.machine)
    except BackendUnavailable as error:
        return Finding(UNUSABLE, str(error), "otherwise use --backend mpi, or nccl with GPUs")
    if running.kind == "C":
        return Finding(OK, f"in C: {running.file}")
    text = f"shared memory runs in plain NumPy, slower than in C: {running.why_plain}"
    return Finding(WARNING, text, running.remedy)


_ENOUGH_BYTES = 256 * 1024**2  # Docker's default of 64 MB is too small


def check_anonymous_memory(here: Facts) -> Finding:
    """Checks that memfd_create works. The backend shm allocates its shared memory with this system call."""
    if here.memory_error:
        return Finding(BROKEN, f"memfd: {here.memory_error}", "free memory, or raise the container's limit")
    return Finding(OK, "memfd works")


def check_shared_memory_folder(here: Facts) -> Finding:
    """Checks the size and the free space of /dev/shm."""
    if here.shared_memory_bytes is None:
        text = "/dev/shm does not exist: MPI and NCCL need it, the backend shm does not"
        return Finding(UNUSABLE, text, "mount -t tmpfs tmpfs /dev/shm")
    size_bytes, free_bytes = here.shared_memory_bytes
    text = f"{size_text(size_bytes)}, {size_text(free_bytes)} free"
    if size_bytes < _ENOUGH_BYTES:
        advice = "start the container with --shm-size=1g (or --ipc=host); as root: mount -o remount,size=1g /dev/shm"
        text += ": too small for NCCL, and for MPI with large arrays; the backend shm does not need it"
        return Finding(WARNING, text, advice)
    if free_bytes < _ENOUGH_BYTES // 4:
        text += ": NCCL and MPI may run out of space there"
        return Finding(WARNING, text, "see which files fill it: ls -l /dev/shm")
    return Finding(OK, text)


def check_threads(here: Facts) -> Finding:
    """Checks the number of cores, and that OMP_NUM_THREADS and similar variables ask for no more threads than cores."""
    cores = "1 core" if here.cores == 1 else f"{here.cores} cores"
    found = {name: here.environ[name] for name in BLAS_VARIABLES if here.environ.get(name)}
    settings = ", ".join(f"{name}={value}" for name, value in found.items())
    too_many = [name for name, value in found.items() if value.isdecimal() and int(value) > here.cores]
    if too_many:
        text = f"{cores}, but {settings}: each rank starts more threads than there are cores"
        advice = f"unset {' '.join(too_many)}: gradsync run then divides the cores among its ranks"
        return Finding(WARNING, text, advice)
    if here.cores == 1:
        text = "1 core: if several ranks share it, each collective waits for the kernel's scheduler"
        return Finding(WARNING, text, "use -n 1, or give the container more cores: docker run --cpus=4")
    return Finding(OK, f"{cores}; {settings or 'gradsync run divides them among its ranks (OMP_NUM_THREADS)'}")


def check_container(here: Facts) -> Finding:
    """Checks how many cores the control groups (cgroups) allow."""
    cores = _cores_allowed(here)
    if cores is None:
        return Finding(OK, "no limit of cores")
    if cores >= here.cores - 0.5:
        return Finding(OK, f"limited to {cores:.1f} cores")
    seen = f"limited to {cores:.1f} cores, though {here.cores} cores are visible"
    advice = f"start at most {max(int(cores), 1)} ranks, or give the container more cores: docker run --cpus=N"
    return Finding(WARNING, f"{seen}: if more ranks than these cores run, the kernel pauses some ranks", advice)


def _cores_allowed(here: Facts) -> float | None:
    """Returns the number of cores that the control group of this process may use; None without a limit."""
    lines = (here.read("/proc/self/cgroup") or "").splitlines()
    own = next((line.removeprefix("0::").rstrip("/") for line in lines if line.startswith("0::")), "")
    # Inside a container, the root control group has the limits of the container.
    limit = here.read(f"/sys/fs/cgroup{own}/cpu.max") or here.read("/sys/fs/cgroup/cpu.max") or ""
    quota, _, period = limit.partition(" ")
    if not quota:  # cgroup version 1
        quota = here.read("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") or ""
        period = here.read("/sys/fs/cgroup/cpu/cpu.cfs_period_us") or ""
    if not (quota.isdigit() and period.isdigit() and int(period)):
        return None
    return int(quota) / int(period)


def check_network(here: Facts) -> Finding:
    """Checks the loopback interface, which the ranks of one machine use to join."""
    if here.loopback_error:
        advice = "as root: ip link set lo up; a sandbox may forbid sockets"
        return Finding(BROKEN, f"no port of 127.0.0.1 can be opened: {here.loopback_error}", advice)
    return Finding(OK, "ports of 127.0.0.1 can be opened")


_INSTALL = "on a machine without an MPI: pip install mpi4py mpich; on a cluster: load its MPI, then pip install mpi4py"
_MARKS = {"Open MPI": ("open mpi", "openrte", "prte", "open-mpi"), "MPICH": ("hydra", "mpich"), "Intel": ("intel",)}


def check_mpi(here: Facts) -> Finding:
    """Checks that mpi4py can be imported, and that an mpiexec of the same MPI exists."""
    if "mpi4py" not in here.packages and here.answers.get("mpi", {}).get("version") is None:
        return Finding(UNUSABLE, "mpi4py is not installed: only the backend mpi needs it", _INSTALL)
    answer = here.answers.get("mpi", {"error": "no answer"})
    if "error" in answer:
        return Finding(UNUSABLE, f"mpi4py is installed, but does not load: {_first_line(answer)}", _INSTALL)
    loaded = f"mpi4py {answer['version']} over {answer['library']}"
    if here.mpiexec is None:
        advice = "put that MPI's bin folder on the PATH (module load ...), or: pip install mpich"
        return Finding(UNUSABLE, f"{loaded}, but mpiexec, which starts the ranks, is not on the PATH", advice)
    theirs, ours = _vendor(here.answers.get("mpiexec", {}).get("text", "")), _vendor(answer["library"])
    if theirs and ours and theirs != ours and {theirs, ours} != {"MPICH", "Intel"}:
        text = f"{loaded}, but {here.mpiexec} belongs to {theirs}: each rank would be alone in its own MPI_COMM_WORLD"
        return Finding(WARNING, text, f"use the mpiexec of {ours}: put its bin folder first on the PATH")
    return Finding(OK, f"{loaded}; {here.mpiexec}")


def _first_line(answer: Any) -> str:
    return str(answer["error"]).strip().splitlines()[0][:200]


def _vendor(text: str) -> str:
    """Returns the MPI implementation that a version text names: "Open MPI", "MPICH" or "Intel"; "" if unknown."""
    lower = text.lower()
    if "intel" in lower:
        return "Intel"
    return next((vendor for vendor, marks in _MARKS.items() if any(mark in lower for mark in marks)), "")


def check_driver(here: Facts) -> Finding:
    """Checks that the machine has an NVIDIA GPU, and shows the version of its driver."""
    if not here.has_gpu:
        return Finding(UNUSABLE, "no NVIDIA GPU found: only the backend nccl needs one")
    version = re.search(
        r"(?:Kernel Module|NVRM version).*?(\d+\.\d+(?:\.\d+)?)", here.read("/proc/driver/nvidia/version") or ""
    )
    driver = here.answers.get("cupy", {}).get("driver")
    text = version[1] if version else "unknown version"
    if driver:
        text += f", which supports CUDA up to {cuda_version(driver)}"
    return Finding(OK, text)


def check_gpus(here: Facts) -> Finding | None:
    """Checks which GPUs this process may use, and whether they can access each other's memory."""
    if not here.has_gpu:
        return None  # check_driver reports that there is no GPU
    visible = visible_gpus(here.environ)
    if visible == ():
        value = here.environ["CUDA_VISIBLE_DEVICES"]
        return Finding(UNUSABLE, f"CUDA_VISIBLE_DEVICES={value!r} hides all GPUs", "unset CUDA_VISIBLE_DEVICES")
    count = count_gpus(here.environ, str(here.root / "dev"))
    devices: list[dict[str, Any]] = here.answers.get("cupy", {}).get("devices", [])
    if not devices:
        return Finding(OK, f"{count} found by their device files; install CuPy to see their names and memory")
    names = sorted({device["name"] for device in devices})
    text = f"{len(devices)} x {', '.join(names)}, {devices[0]['memory_bytes'] / 1024**3:.0f} GB"
    if visible is not None and len(devices) < len(visible):
        text += f"; CUDA_VISIBLE_DEVICES={here.environ['CUDA_VISIBLE_DEVICES']} names {len(visible)} GPUs"
        return Finding(WARNING, text, "list only GPUs of this machine: nvidia-smi -L shows them")
    if len(devices) > 1 and not all(len(device["peers"]) == len(devices) - 1 for device in devices):
        text += "; not all GPUs can access each other's memory, so NCCL copies through host memory"
        advice = "on a virtual machine: give the machine all GPUs of one switch; check with: nvidia-smi topo -p2p r"
        return Finding(WARNING, text, advice)
    return Finding(OK, text)


def cuda_version(number: int) -> str:
    """Returns a version number of CUDA as text: 12090 becomes "12.9"."""
    return f"{number // 1000}.{number % 1000 // 10}"


_OLDEST_CUPY = 14


def check_cupy(here: Facts) -> Finding:
    """Checks that one package of CuPy is installed, that it loads, is new enough, and fits the driver."""
    installed = _cupy_packages(here)
    answer = here.answers.get("cupy", {"error": "no answer"})
    if len(installed) > 1:
        shown = ", ".join(f"{name} {here.packages[name]}" for name in installed)
        text = f"{len(installed)} packages install CuPy into one folder: {shown}; Python loads a mixture of their files"
        then = _install(here) if here.has_gpu else "install the package for your driver"
        return Finding(WARNING, text, f"pip uninstall -y {' '.join(installed)}; then {then}")
    if not installed and "file" not in answer:
        advice = _install(here) if here.has_gpu else ""
        return Finding(UNUSABLE, "not installed: only the backend nccl needs it", advice)
    package = installed[0] if installed else "cupy"
    if "error" in answer:
        text = f"{package} does not load: {answer['error']}"
        return Finding(UNUSABLE, text, f"pip install --force-reinstall {package}")
    name = f"{package} {answer['version']}"
    if int(answer["version"].partition(".")[0]) < _OLDEST_CUPY:
        advice = f"pip uninstall -y {package}; then {_install(here)}"
        return Finding(UNUSABLE, f"{name}; gradsync needs CuPy {_OLDEST_CUPY} or newer", advice)
    return _loaded(here, name, answer)


def _cupy_packages(here: Facts) -> list[str]:
    """Returns the names of the installed packages that contain the module cupy."""
    return [name for name in CUPY_PACKAGES if name in here.packages]


def _loaded(here: Facts, name: str, answer: Mapping[str, Any]) -> Finding:
    runtime = f"{name}, CUDA runtime {cuda_version(answer['runtime'])}" if "runtime" in answer else name
    if not here.has_gpu:
        advice = "on a machine with a GPU: install NVIDIA's driver; for a container: docker run --gpus all"
        return Finding(UNUSABLE, f"{runtime}; this machine has no NVIDIA driver", advice)
    if "count" not in answer:
        text = f"{runtime}; CuPy sees no GPU: {answer.get('count_error', 'unknown reason')}"
        return Finding(UNUSABLE, text, "compare the CUDA versions of nvidia-smi and of the CuPy package")
    driver = answer.get("driver", 0)
    if "runtime" in answer and driver and driver // 1000 < answer["runtime"] // 1000:
        text = f"{runtime}, but the driver supports CUDA only up to {cuda_version(driver)}"
        advice = f"update the driver, or: pip uninstall -y {name.split()[0]}; then {_install(here)}"
        return Finding(WARNING, text, advice)
    if "nvrtc" not in answer:
        text = f"{runtime}; NVRTC, which compiles CuPy's kernels, is missing"
        return Finding(UNUSABLE, text, f"{_install(here)} (it includes NVRTC)")
    return Finding(OK, runtime)


def _install(here: Facts) -> str:
    """Returns the command that installs CuPy for the driver's CUDA version, or for CUDA 12 if no version is known."""
    driver = here.answers.get("cupy", {}).get("driver", 0)
    if driver:
        return f"pip install 'gradsync[cuda{13 if driver >= 13000 else 12}]'"
    return "pip install 'gradsync[cuda12]' (cuda13 where nvidia-smi shows CUDA 13)"


def check_nccl(here: Facts) -> Finding | None:
    """Checks that CuPy has loaded NCCL, that CuPy was built with the same major version, and NCCL_COMM_BLOCKING."""
    answer: Any = here.answers.get("cupy", {})
    if "file" not in answer:
        return None  # check_cupy reports the problem
    if here.environ.get("NCCL_COMM_BLOCKING") == "0":
        text = "NCCL_COMM_BLOCKING=0 is set, but CuPy supports only blocking communicators"
        return Finding(UNUSABLE, text, "unset NCCL_COMM_BLOCKING")
    found = answer.get("nccl")
    wheel = "nvidia-nccl-cu13" if "cupy-cuda13x" in here.packages else "nvidia-nccl-cu12"
    if not found or not found.get("available"):
        error = answer.get("nccl_error", "CuPy could not load libnccl.so.2")
        return Finding(UNUSABLE, error, f"pip install {wheel}")
    text = f"{version_text(found['version'])} from {found['path']}, CuPy was built with {version_text(found['build'])}"
    if found["version"] // 10000 != found["build"] // 10000:
        return Finding(WARNING, f"{text}: the major versions differ", f"pip install --upgrade {wheel}")
    return Finding(OK, text)


def check_variables(here: Facts) -> list[Finding]:
    """Checks the GRADSYNC_* environment variables.

    Returns:
        One finding for each wrong variable. If all variables are right, one finding that shows them.
    """
    refused = [
        Finding(BROKEN, str(error), f"unset {name}", name)
        for name, error in environment.refused_variables(here.environ)
    ]
    unknown = [_unknown(name, meant) for name, meant in environment.unknown_variables(here.environ).items()]
    if unknown or refused:
        return [*refused, *unknown]
    present = sorted(name for name in here.environ if name.startswith("GRADSYNC_"))
    shown = ", ".join(name if name == environment.SECRET else f"{name}={here.environ[name]}" for name in present)
    return [Finding(OK, shown or "no GRADSYNC_* variable is set")]


def _unknown(name: str, meant: str | None) -> Finding:
    advice = f"unset {name}" if meant is None else f'export {meant}="${name}"; unset {name}'
    return Finding(WARNING, environment.describe_unknown(meant), advice, name)


def check_launcher(here: Facts) -> Finding:
    """Checks that no environment variable gives this shell a rank, because then each script would run as this rank."""
    try:
        environment.read_master_port(here.environ)
    except InvalidArgument as error:
        return Finding(BROKEN, str(error), "unset MASTER_PORT")
    try:
        place = environment.read_environment(dict(here.environ))
    except InvalidArgument as error:
        return Finding(BROKEN, str(error).replace("\n", " "), "unset the environment variables that this error names")
    if place is None:
        return Finding(OK, "this shell is not inside a launched job")
    setter = {"RANK": "torchrun or you", "gradsync": "gradsync run"}.get(place.source, place.source)
    text = f"this shell is rank {place.rank} of {place.world_size}, according to variables that {setter} set"
    names = [name for name in ("RANK", "WORLD_SIZE", environment.RANK, environment.WORLD_SIZE) if name in here.environ]
    advice = "inside a job these variables are right" + (f"; elsewhere: unset {' '.join(names)}" if names else "")
    return Finding(WARNING, text, advice)


Check = Callable[[Facts], Finding | list[Finding] | None]

#: The checks, by the name of the line in the report, in the order of the report.
CHECKS: dict[str, Check] = {
    "Python": check_python,
    "NumPy": check_numpy,
    "kernels": check_kernels,
    "shared memory": check_anonymous_memory,
    "/dev/shm": check_shared_memory_folder,
    "cores": check_threads,
    "container": check_container,
    "network": check_network,
    "MPI": check_mpi,
    "driver": check_driver,
    "GPUs": check_gpus,
    "CuPy": check_cupy,
    "NCCL": check_nccl,
    "launcher": check_launcher,
    "GRADSYNC_*": check_variables,
}
