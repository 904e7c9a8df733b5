"""Questions to libraries, each in a process of its own, as a broken library may crash or hang when it is loaded.

python -m gradsync.doctor.probes NAME   # prints the answer as JSON on its last line
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gradsync.environment import without_launcher
from gradsync.errors import GradsyncError

_LONGEST_TEXT = 4000
_END_SECONDS = 1.0
_REAP_SECONDS = 10.0


def ask_all(mpiexec: str | None, nvidia_smi: str | None, deadline_seconds: float) -> dict[str, dict[str, Any]]:
    """Asks all questions at the same time; returns the answers by name, {"error": ...} for a missing one.

    Args:
        mpiexec, nvidia_smi: paths, or None.
        deadline_seconds: after which processes that have not answered are killed.
    """
    commands = {name: [sys.executable, "-m", __name__, name] for name in _QUESTIONS}
    if mpiexec is not None:
        commands["mpiexec"] = [mpiexec, "--version"]
    if nvidia_smi is not None:
        commands["topology"] = [nvidia_smi, "topo", "-m"]
    started: dict[str, subprocess.Popen[str] | OSError] = {}
    for name, command in commands.items():
        try:
            started[name] = _start(command)
        except OSError as error:
            started[name] = error
    deadline = time.monotonic() + deadline_seconds
    return {name: _answer(name, process, deadline, deadline_seconds) for name, process in started.items()}


def call(command: Sequence[str], deadline_seconds: float) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, in a session of its own and without a launcher's variables.

    Raises:
        OSError: the command cannot be started.
        subprocess.TimeoutExpired: the command did not end by the deadline; it was killed, with all that it had started.
    """
    with _start(command) as process:
        _called.append(process)
        try:
            out, err = process.communicate(timeout=deadline_seconds)
        except subprocess.TimeoutExpired:
            _end(process)
            raise
        finally:
            _called.remove(process)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


_called: list[subprocess.Popen[str]] = []  # by threads that wait for them


def kill_called() -> None:
    """Kills the commands that other threads have called: Ctrl-C does not reach them in their sessions."""
    for process in _called.copy():  # threads remove theirs meanwhile
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=without_launcher(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # so that it can be killed with its children, if it is a script
    )


def _answer(
    name: str, process: subprocess.Popen[str] | OSError, deadline: float, deadline_seconds: float
) -> dict[str, Any]:
    if isinstance(process, OSError):
        return {"error": str(process)}
    try:
        out, err = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        _end(process)
        return {"error": f"no answer within {deadline_seconds:.0f} s"}
    if name not in _QUESTIONS:
        return {"text": (out or err)[:_LONGEST_TEXT], "exit_code": process.returncode}
    if process.returncode:
        return {"error": _last_words(process.returncode, err)}
    try:
        found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return {"error": f"it answered {out.strip()[-200:]!r}"}
    return found


def _end(process: subprocess.Popen[str]) -> None:
    """Kills a process and its children, without a wait for a child that has left the session with the output."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=_END_SECONDS)
    with contextlib.suppress(subprocess.TimeoutExpired):  # on a busy machine its end takes longer than a second
        process.wait(_REAP_SECONDS)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def _last_words(exit_code: int, stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    last = f": {lines[-1]}" if lines else ""
    if exit_code < 0:
        return f"loading it ended the process with {signal.Signals(-exit_code).name}{last}"
    return f"loading it ended with exit code {exit_code}{last}"


def _ask_numpy() -> dict[str, Any]:
    import numpy

    found: dict[str, Any] = {"version": numpy.__version__}
    _note(found, "msgpack", lambda: list(importlib.import_module("msgpack").version))
    return found


def _ask_mpi() -> dict[str, Any]:
    from gradsync.communicators.mpi.mpi_job import load_mpi

    mpi = load_mpi()
    import mpi4py

    lines = mpi.Get_library_version().strip("\0 \n").splitlines()
    return {
        "version": mpi4py.__version__,
        "library": " ".join(lines[0].partition(",")[0].replace("Version:", "").split()),
        "thread_level": mpi.Query_thread(),
    }


def _ask_cupy() -> dict[str, Any]:
    """Asks step by step: a later step fails if an earlier one did."""
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


_QUESTIONS: Mapping[str, Callable[[], dict[str, Any]]] = {"numpy": _ask_numpy, "cupy": _ask_cupy, "mpi": _ask_mpi}


def main() -> None:
    """Answers one question."""
    try:
        answer = _QUESTIONS[sys.argv[1]]()
    except (ImportError, GradsyncError) as error:
        answer = {"error": str(error), "missing": isinstance(error, ModuleNotFoundError)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
