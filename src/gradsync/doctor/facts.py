"""Collects the facts about this machine. The checks use only these facts, so that a test can describe any machine.

Loading a broken library may crash or hang the process, so a subprocess examines each library:

    python -m gradsync.doctor.facts NAME   # NAME is kernels, mpi or cupy; the last line of the output is JSON
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from gradsync.environment import find_mpiexec, without_launcher
from gradsync.errors import GradsyncError
from gradsync.machine import usable_cores

_Result = TypeVar("_Result")

_LONGEST_TEXT = 4000
#: The packages that contain the module `cupy`. If two of them are installed, they overwrite each other's files.
CUPY_PACKAGES = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x", "cupy-cuda110", "cupy-cuda111", "cupy-cuda112")


@dataclass(frozen=True)
class Facts:
    """The facts about a machine.

    Attributes:
        environ: the environment variables.
        root: the folder that contains /proc, /sys and /dev; it differs from "/" only in tests.
        system, machine: the operating system and the processor, such as "linux" and "x86_64".
        python: the version of Python and the path of its executable.
        numpy: the version of NumPy.
        packages: by name: the versions of the installed packages of CuPy and of mpi4py.
        cores: the number of cores that this process may use.
        answers: the answers that ask_all() returned.
        shared_memory_bytes: the size and the free space of /dev/shm in bytes; None if /dev/shm cannot be examined.
        memory_error: the error if memfd_create failed; "" if memfd_create worked.
        loopback_error: the error if no socket could listen on 127.0.0.1; "" if a socket could listen there.
        mpiexec: the path of mpiexec; None if mpiexec is not on the PATH.
    """

    environ: Mapping[str, str] = field(default_factory=dict)
    root: Path = Path("/")
    system: str = "linux"
    machine: str = "x86_64"
    python: tuple[str, str] = ("3.12.0", "/usr/bin/python3")
    numpy: str = "2.4.0"
    packages: Mapping[str, str] = field(default_factory=dict)
    cores: int = 8
    answers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    shared_memory_bytes: tuple[int, int] | None = None
    memory_error: str = ""
    loopback_error: str = ""
    mpiexec: str | None = None

    def read(self, path: str) -> str | None:
        """Returns the text of a file below `root`, without surrounding whitespace; None if the file cannot be read."""
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace").strip()
        except OSError:
            return None

    @property
    def has_gpu(self) -> bool:
        """Whether a device file of NVIDIA's driver exists, for Linux or for WSL2 on Windows."""
        devices = self.root / "dev"
        return any(devices.glob("nvidia[0-9]*")) or (devices / "dxg").exists()


def collect_facts(deadline_seconds: float) -> Facts:
    """Collects the facts about this machine.

    Args:
        deadline_seconds: the time limit for the subprocesses of ask_all().
    """
    import numpy  # imported here, because the subprocesses that import this module need no NumPy

    mpiexec = find_mpiexec()
    return Facts(
        environ=dict(os.environ),
        system=sys.platform,
        machine=platform.machine(),
        python=(platform.python_version(), sys.executable),
        numpy=numpy.__version__,
        packages=_packages(),
        cores=usable_cores(),
        answers=ask_all(mpiexec, deadline_seconds),
        shared_memory_bytes=_shared_memory_bytes(),
        memory_error=_memory_error(),
        loopback_error=_loopback_error(),
        mpiexec=mpiexec,
    )


def _packages() -> dict[str, str]:
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        with contextlib.suppress(Exception):  # packages with damaged metadata are left out
            name = str(distribution.metadata["Name"]).lower().replace("_", "-")
            if name in (*CUPY_PACKAGES, "mpi4py"):
                found.setdefault(name, distribution.version)  # Python imports the first such package on sys.path
    return found


def _shared_memory_bytes() -> tuple[int, int] | None:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    return found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail


def _memory_error() -> str:
    try:
        from gradsync.communicators.shared_memory.segment import check_allocation  # imported here, as it may fail

        check_allocation(1 << 20)
    except (GradsyncError, OSError) as error:
        return str(error)
    except ImportError:  # of the kernels, which have a line of their own
        return ""
    return ""


def _loopback_error() -> str:
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(1)
    except OSError as error:
        return str(error)
    return ""


# -- Subprocesses that examine libraries -----------------------------------------------------------------------------


def ask_all(mpiexec: str | None, deadline_seconds: float) -> dict[str, dict[str, Any]]:
    """Runs all subprocesses that examine libraries and programs, in parallel.

    Args:
        mpiexec: the path of mpiexec; None if mpiexec is not on the PATH.
        deadline_seconds: the time limit, after which the subprocesses are killed.

    Returns:
        One dictionary under each of the keys "kernels", "mpi" and "cupy"; with a path of mpiexec, also under the key
        "mpiexec". A library that could not be loaded, or gave no answer in time, has the dictionary {"error": message}.
    """
    commands = {name: [sys.executable, "-m", __name__, name] for name in _QUESTIONS}
    if mpiexec is not None:
        commands["mpiexec"] = [mpiexec, "--version"]
    answers = in_parallel(lambda name: _answer(name, commands[name], deadline_seconds), tuple(commands))
    return dict(zip(commands, answers, strict=True))


def in_parallel(function: Callable[[str], _Result], names: Sequence[str]) -> list[_Result]:
    """Calls a function with each name, each on its own thread. Ctrl-C kills the commands that call() is running."""
    with ThreadPoolExecutor(len(names)) as pool:
        try:
            return list(pool.map(function, names))
        except BaseException:  # if the processes continued, the pool would wait until the deadline
            for process in _called.copy():  # a copy, because threads remove processes from the list meanwhile
                _kill(process)
            raise


def call(
    command: Sequence[str], deadline_seconds: float, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command in its own session, without the environment variables of launchers, and waits for its end.

    Args:
        command: the program and its arguments.
        deadline_seconds: the time limit.
        variables: environment variables to add for the command.

    Raises:
        OSError: the command cannot be started.
        subprocess.TimeoutExpired: the command ran until the deadline; it and its children were killed.
    """
    with subprocess.Popen(
        command,
        env=without_launcher() | dict(variables or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # so that killpg() reaches the children of the command too
    ) as process:
        _called.append(process)
        try:
            out, err = process.communicate(timeout=deadline_seconds)
        except subprocess.TimeoutExpired:
            _kill(process)
            raise
        finally:
            _called.remove(process)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


_called: list[subprocess.Popen[str]] = []  # the processes that call() is running


def _kill(process: subprocess.Popen[str]) -> None:
    """Kills a process of call(), and its children. Ctrl-C does not reach these processes in their own session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _answer(name: str, command: Sequence[str], deadline_seconds: float) -> dict[str, Any]:
    try:
        done = call(command, deadline_seconds)
    except OSError as error:
        return {"error": str(error)}
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {deadline_seconds:.0f} s"}
    if name not in _QUESTIONS:
        return {"text": (done.stdout or done.stderr)[:_LONGEST_TEXT]}
    if done.returncode:
        return {"error": _exit_error(done.returncode, done.stderr)}
    try:
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return {"error": f"the answer is not JSON: {done.stdout.strip()[-200:]!r}"}
    return found


def _exit_error(exit_code: int, stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    last = f": {lines[-1]}" if lines else ""
    if exit_code < 0:
        return f"the process that imported the library was killed by {signal.Signals(-exit_code).name}{last}"
    return f"the process that imported the library ended with exit code {exit_code}{last}"


def _ask_kernels() -> dict[str, Any]:
    from gradsync.communicators.shared_memory.compiled import RUNNING

    return RUNNING._asdict()


def _ask_mpi() -> dict[str, Any]:
    from gradsync.communicators.mpi.job import load_mpi

    mpi = load_mpi()
    import mpi4py

    lines = mpi.Get_library_version().strip("\0 \n").splitlines()
    return {
        "version": mpi4py.__version__,
        "library": " ".join(lines[0].partition(",")[0].replace("Version:", "").split()),
    }


def _ask_cupy() -> dict[str, Any]:
    """Examines CuPy. If one query fails, this function records the error and continues with the next query."""
    import cupy

    found: dict[str, Any] = {"version": cupy.__version__, "file": cupy.__file__}
    runtime = cupy.cuda.runtime
    _note(found, "runtime", runtime.runtimeGetVersion)
    _note(found, "driver", runtime.driverGetVersion)
    _note(found, "count", runtime.getDeviceCount)
    _note(found, "nvrtc", lambda: list(cupy.cuda.nvrtc.getVersion()))
    _note(found, "devices", lambda: [_device(runtime, number, found["count"]) for number in range(found["count"])])
    _note(found, "nccl", _nccl)
    return found


def _note(found: dict[str, Any], name: str, ask: Callable[[], Any]) -> None:
    try:
        found[name] = ask()
    except Exception as error:
        found[f"{name}_error"] = f"{type(error).__name__}: {error}"


def _device(runtime: Any, number: int, count: int) -> dict[str, Any]:
    properties = runtime.getDeviceProperties(number)
    return {
        "name": properties["name"].decode(errors="replace"),
        "memory_bytes": int(properties["totalGlobalMem"]),
        "peers": [other for other in range(count) if other != number and runtime.deviceCanAccessPeer(number, other)],
    }


def _nccl() -> dict[str, Any]:
    from gradsync.communicators.nccl.library import library_path

    from cupy.cuda import nccl  # isort: skip

    if not nccl.available:
        return {"available": False}
    version = nccl.get_version()  # loads the library
    return {"available": True, "version": version, "build": nccl.get_build_version(), "path": library_path()}


_QUESTIONS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "kernels": _ask_kernels,
    "mpi": _ask_mpi,
    "cupy": _ask_cupy,
}


def main() -> None:
    """Examines the library that the command line names, and prints the answer as JSON."""
    try:
        answer = _QUESTIONS[sys.argv[1]]()
    except (ImportError, GradsyncError) as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
