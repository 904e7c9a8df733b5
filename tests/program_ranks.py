"""Runs very many short programs, each in new rank processes as a user's would run; for tests only.

A process that has imported everything forks the ranks of each program, which costs milliseconds. A rank executes its
program as its main module: an error is not caught, exit functions run, and the exit code is the interpreter's.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import linecache
import os
import pickle
import pkgutil
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import gradsync as gs
from gradsync.rendezvous.server import RendezvousServer

STAND_IN = Path(__file__).parent / "fake_cupy"
_START_SECONDS = 60.0


class Ending(NamedTuple):
    """How a rank ended.

    Attributes:
        notes: what the program has noted, in order.
        error: type, whether gradsync made that type, and text of the error that ended it; None where there is none.
        exit_code: of the process; negative: the signal; None where it did not end before the deadline.
        output: stdout and stderr.
    """

    notes: list[tuple[str, Any]]
    error: tuple[str, bool, str] | None
    exit_code: int | None
    output: str


class ProgramRanks:
    """Forks the ranks of one program after the other.

    Args:
        backend: of the programs: "shm", "local", or "stand-in", which is NCCL over the stand-in for CuPy.
    """

    def __init__(self, backend: str) -> None:
        ours, theirs = os.pipe(), os.pipe()
        for descriptor in (theirs[0], ours[1]):
            os.set_inheritable(descriptor, True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GRADSYNC_")}
        environment["OMP_NUM_THREADS"] = environment["OPENBLAS_NUM_THREADS"] = "1"
        self._process = subprocess.Popen(
            [sys.executable, __file__, backend, str(theirs[0]), str(ours[1])],
            pass_fds=(theirs[0], ours[1]),
            env=environment,
        )
        os.close(theirs[0])
        os.close(ours[1])
        self._jobs = Connection(theirs[1], readable=False)
        self._endings = Connection(ours[0], writable=False)
        self._backend = backend

    def run(self, sources: list[str], *, deadline_seconds: float, environment: dict[str, str]) -> list[Ending]:
        """Runs a program, given as the source of each rank, and returns how its ranks ended."""
        if self._backend == "local":
            self._jobs.send((sources, {"GRADSYNC_BACKEND": "local"} | environment, deadline_seconds))
            return self._received(deadline_seconds)
        world_size = len(sources)
        secret = secrets.token_bytes(32)
        with RendezvousServer(world_size, secret=secret) as server:
            common = {
                "GRADSYNC_WORLD_SIZE": str(world_size),
                "GRADSYNC_LOCAL_WORLD_SIZE": str(world_size),
                "GRADSYNC_ADDRESS": server.address,
                "GRADSYNC_HOSTED": "1",
                "GRADSYNC_SECRET": secret.hex(),
                "FAKE_CUPY_DEVICES": str(world_size),
            }
            self._jobs.send((sources, common | environment, deadline_seconds))
            return self._received(deadline_seconds)

    def close(self) -> None:
        """Ends the process."""
        self._jobs.close()
        self._process.wait()
        self._endings.close()

    def _received(self, deadline_seconds: float) -> list[Ending]:
        if not self._endings.poll(deadline_seconds + _START_SECONDS):
            self._process.kill()
            raise AssertionError("the process that forks the ranks does not answer")
        return [Ending(*ending) for ending in self._endings.recv()]


def _serve(backend: str, jobs: Connection, endings: Connection) -> tuple[Any, ...] | None:
    """Forks ranks until the parent closes; returns in each rank, with what it has to run, and in the end with None."""
    while True:
        try:
            sources, environment, deadline_seconds = jobs.recv()
        except EOFError:
            return None
        pipes, pids, outputs = [], [], []
        for rank, source in enumerate(sources):
            theirs, ours = os.pipe()
            output = os.memfd_create("output")
            pid = os.fork()
            if pid == 0:
                jobs.close()
                endings.close()
                for other in (theirs, *pipes):
                    os.close(other)
                os.dup2(output, 1)
                os.dup2(output, 2)
                os.environ.update(environment)
                if backend != "local":
                    os.environ.update(GRADSYNC_RANK=str(rank), GRADSYNC_LOCAL_RANK=str(rank))
                return source, ours
            os.close(ours)
            pipes.append(theirs)
            pids.append(pid)
            outputs.append(output)
        endings.send(_endings_of(pids, pipes, outputs, time.monotonic() + deadline_seconds))


def _endings_of(pids: list[int], pipes: list[int], outputs: list[int], deadline: float) -> list[tuple[Any, ...]]:
    reports = dict.fromkeys(pipes, b"")
    waiting = set(pipes)
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pipe in select.select(waiting, [], [], left)[0]:
            if chunk := os.read(pipe, 1 << 20):
                reports[pipe] += chunk
            else:
                waiting.discard(pipe)
    endings = []
    for pid, pipe, output in zip(pids, pipes, outputs, strict=True):
        if pipe in waiting:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        notes, error = pickle.loads(reports[pipe]) if reports[pipe] else ([], None)
        text = os.pread(output, 100_000, 0).decode(errors="replace")
        endings.append((notes, error, None if pipe in waiting else os.waitstatus_to_exitcode(status), text))
        os.close(pipe)
        os.close(output)
    return endings


def _run(source: str, report: int) -> NoReturn:
    """Executes a rank's program in the main module, and ends the process as the interpreter would."""
    notes: list[tuple[str, Any]] = []
    error, exit_code = None, 0
    namespace = vars(sys.modules["__main__"])
    namespace["note"] = lambda what, value: notes.append((what, value))
    linecache.cache["program.py"] = (len(source), None, source.splitlines(keepends=True), "program.py")
    try:
        exec(compile(source, "program.py", "exec"), namespace)
    except BaseException as caught:
        error, exit_code = (type(caught).__name__, isinstance(caught, gs.GradsyncError), str(caught)), 1
        sys.last_type, sys.last_value, sys.last_traceback = type(caught), caught, caught.__traceback__
        sys.excepthook(type(caught), caught, caught.__traceback__)
    view = memoryview(pickle.dumps((notes, error)))
    while view:
        view = view[os.write(report, view) :]
    # What the interpreter does at its end, but for taking modules apart, which would cost a tenth of a second.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.PyDLL(None).exit(exit_code)
    raise AssertionError("exit() has returned")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    if sys.argv[1] == "stand-in":
        sys.path.insert(0, str(STAND_IN))
        importlib.import_module("cupy")
    for _name in gs.__all__:
        getattr(gs, _name)
    for _module in pkgutil.walk_packages(gs.__path__, "gradsync."):
        if _module.name.split(".")[1] not in ("__main__", "bench", "doctor", "launching"):
            with contextlib.suppress(ImportError):
                importlib.import_module(_module.name)
    gc.freeze()
    _job = _serve(
        sys.argv[1], Connection(int(sys.argv[2]), writable=False), Connection(int(sys.argv[3]), readable=False)
    )
    if _job is not None:
        _run(*_job)
