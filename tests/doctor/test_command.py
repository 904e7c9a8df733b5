"""`gradsync doctor` as a whole, on this machine, whole and broken in various ways; nothing here is made up."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import gradsync as gs

SOURCES = str(Path(gs.__file__).parents[1])
STAND_IN = str(Path(__file__).parents[1] / "fake_cupy")
LIMIT_SECONDS = 100

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the doctor looks at Linux"),
    pytest.mark.timeout(LIMIT_SECONDS),
]


def doctor(*arguments, path=(), before=(), **variables):
    """Runs the doctor; returns its exit code and what it found."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GRADSYNC_")}
    environ = {**kept, "PYTHONPATH": os.pathsep.join([*map(str, path), SOURCES]), **variables}
    command = [*before, sys.executable, "-m", "gradsync", "doctor", "--json", *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS)
    assert done.stderr == ""
    found = json.loads(done.stdout)
    found["lines"] = {finding["what"]: finding for finding in found["findings"]}
    return done.returncode, found


def test_shared_memory_works_here():
    code, found = doctor("--backend", "shm", "--timeout", "60")
    assert (code, found["ready"], found["working"]) == (0, True, ["shm"])
    assert found["trials"]["shm"]["text"] == "works: 2 ranks summed arrays of 16 MB"


def test_the_stand_in_is_not_taken_for_a_gpu():
    code, found = doctor("--backend", "nccl", path=[STAND_IN])
    assert code == 1
    assert found["trials"]["nccl"]["text"] == "this machine has no NVIDIA GPU"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
            "the process that imported the library was killed by SIGSEGV",
        ),
        (
            "raise OSError('libcuda.so.1: cannot open')",
            "the process that imported the library ended with exit code 1: OSError: libcuda.so.1",
        ),
        ("raise ImportError('libcublas is missing')", "libcublas is missing"),
    ],
)
def test_a_library_that_dies_when_it_is_loaded_is_a_line(tmp_path, source, text):
    (tmp_path / "cupy.py").write_text(source)
    (tmp_path / "cupy_cuda12x-14.2.0.dist-info").mkdir()
    (tmp_path / "cupy_cuda12x-14.2.0.dist-info" / "METADATA").write_text("Name: cupy-cuda12x\nVersion: 14.2.0\n")
    _, found = doctor("--no-try", path=[tmp_path])
    assert f"cupy-cuda12x does not load: {text}" in found["lines"]["CuPy"]["text"]


def test_variables_that_are_wrong_are_named():
    variables = {"GRADSYNC_BACKED": "shm", "GRADSYNC_LOG": "loud", "RANK": "1", "WORLD_SIZE": "4"}
    code, found = doctor("--no-try", **variables)
    assert code == 1
    assert found["verdict"] == "Not ready: fix GRADSYNC_LOG first."
    assert found["lines"]["GRADSYNC_BACKED"]["text"].endswith("did you mean GRADSYNC_BACKEND?")
    assert found["lines"]["launcher"]["advice"].endswith("unset RANK WORLD_SIZE")


def test_a_tiny_shared_memory_folder_is_told():
    namespace = ["unshare", "--map-root-user", "--mount"]
    try:
        made = subprocess.run([*namespace, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"no mount namespaces here: {error}")
    if made.returncode:
        pytest.skip(f"no mount namespaces here: {made.stderr.strip()}")
    script = 'mount -t tmpfs -o size=4m tmpfs /dev/shm && exec "$@"'
    _, found = doctor("--no-try", before=[*namespace, "sh", "-c", script, "sh"])
    assert found["lines"]["/dev/shm"]["text"].startswith("4 MB, 4 MB free: too small for NCCL")
    assert "--shm-size=1g" in found["lines"]["/dev/shm"]["advice"]


@pytest.mark.parametrize("module", ["numpy", "rich"])
def test_without_what_gradsync_stands_on_it_says_what_to_type(tmp_path, module):
    (tmp_path / f"{module}.py").write_text("raise ImportError('damaged')")
    done = subprocess.run(
        [sys.executable, "-m", "gradsync", "doctor", "--no-try"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), SOURCES])},
        capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith(
        "gradsync: error: a library that gradsync needs does not load here (damaged): pip install"
    )


def test_without_mpiexec_mpi_is_not_tried(tmp_path):
    pytest.importorskip("mpi4py")
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.symlink_to(sys.executable)  # whose own folder may have an mpiexec beside it
    code = f"import sys; sys.executable = {str(python)!r}; from gradsync.cli import main; main()"
    packages = os.pathsep.join([SOURCES, sysconfig.get_paths()["purelib"]])
    environ = {**os.environ, "PATH": str(tmp_path), "PYTHONPATH": packages}
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor", "--backend", "mpi", "--json"],
        env=environ, capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert found["trials"]["mpi"]["status"] == "not usable here"
    assert found["verdict"] == "Not ready: mpi was requested, but does not work here."
