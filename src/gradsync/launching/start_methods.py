"""How a rank process comes to life: spawned as a fresh interpreter, or forked from this process or a fork server.

All three end in the same place, `rank_main`, the fresh interpreter by its `main`, the forks by `enter`: the process
forks once more, and the parent guards the child. The fresh interpreter has the rank's environment from its first
instruction on; the other two change theirs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from gradsync.launching.in_rank.guard import GuardDescriptors
from gradsync.launching.signal_inbox import kept_in_fork
from gradsync.launching.targets import Target

# The rank must import the launcher's own gradsync, whatever the current directory holds.
_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
_preparing = threading.Lock()
_OUT_OF_THE_WAY = 256  # a number above those of a process that has opened little
_SHIM = f"""\
import sys
if sys.path[:1] == ['']: del sys.path[0]
sys.path.insert(0, {_PACKAGE_PARENT!r})
from gradsync.launching.in_rank.rank_main import main
del sys.path[0]
main()"""


@dataclass(frozen=True)
class RankStart:
    """What a rank process starts with.

    Attributes:
        rank: its rank.
        target: what it runs.
        record: descriptor of the start record, see `rank_process.start_record`.
        environ: its environment.
        descriptors: its ends of the pipes.
        streams: descriptors that become its standard input, output and error.
    """

    rank: int
    target: Target
    record: int
    environ: dict[str, str]
    descriptors: GuardDescriptors
    streams: tuple[int, ...]


@dataclass(frozen=True)
class StartedProcess:
    """A process that has been started, and becomes a rank's guard.

    Attributes:
        pid: its process id.
        reap: waits for its end and gives its exit code.
        sentinel: descriptor that becomes readable when it has ended; -1 before Linux 5.3.
    """

    pid: int
    reap: Callable[[], int]
    sentinel: int = -1


def start_process(method: str, start: RankStart) -> StartedProcess:
    """Starts a rank process by one of START_METHODS."""
    started = _STARTERS[method](start)
    try:
        return replace(started, sentinel=os.pidfd_open(started.pid))
    except (AttributeError, OSError):  # an old kernel, or no descriptor is left: the end of its pipe tells
        return started


def _spawn(start: RankStart) -> StartedProcess:
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    numbers = ",".join(map(str, (start.rank, os.getpid(), start.record, *start.descriptors)))
    standard_input, output, error = start.streams
    # The rank inherits the mask, and unblocks SIGINT where it can handle it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process = subprocess.Popen(
            [sys.executable, *flags, "-c", _SHIM, numbers, *start.target.command_line],
            env=start.environ,
            stdin=standard_input,
            stdout=output,
            stderr=error,
            pass_fds=(start.record, *start.descriptors, *start.target.descriptors),
            # A session of its own: a terminal's Ctrl-C reaches the launcher only, which forwards it once.
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return StartedProcess(process.pid, process.wait)


def _fork(start: RankStart) -> StartedProcess:
    launcher_pid = os.getpid()
    for stream in (sys.stdout, sys.stderr):  # else each rank would write what still lies in the buffer
        with contextlib.suppress(Exception):
            stream.flush()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with kept_in_fork(start.descriptors):
            pid = os.fork()
        if pid == 0:
            try:
                _enter(start, launcher_pid)
            finally:
                os._exit(70)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return StartedProcess(pid, lambda: _reap_child(pid))


def _reap_child(pid: int) -> int:
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:  # the program reaps its children itself, or ignores SIGCHLD
        return 0


def _fork_from_server(start: RankStart) -> StartedProcess:
    import multiprocessing

    inherited = start.target.descriptors
    passed = [_Passed(d) for d in (*inherited, start.record, *start.descriptors, *start.streams)]
    arguments = (start.rank, os.getpid(), start.environ, inherited, *passed)
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_enter_from_server, args=arguments, name=f"gradsync-rank-{start.rank}")
    with _no_import_of_main():
        process.start()
    pid = process.pid or 0

    def reap() -> int:
        process.join()
        code = process.exitcode or 0
        process.close()
        return code

    return StartedProcess(pid, reap)


@contextlib.contextmanager
def _no_import_of_main() -> Iterator[None]:
    """Keeps multiprocessing from importing `__main__`: a rank does so, under guard and with its own environment."""
    from multiprocessing import spawn

    def prepare_otherwise(name: str) -> dict[str, Any]:
        data = prepare(name)
        mine = threading.get_ident() == this_thread
        return {key: value for key, value in data.items() if not (mine and key.startswith("init_main"))}

    with _preparing:
        prepare, this_thread = spawn.get_preparation_data, threading.get_ident()
        spawn.get_preparation_data = prepare_otherwise
        try:
            yield
        finally:
            spawn.get_preparation_data = prepare


class _Passed:
    """A descriptor among the arguments of a process that a fork server starts: there it is the copy's number."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing.reduction import DupFd

        return _take_passed, (DupFd(self._descriptor),)


def _take_passed(passed: Any) -> int:
    descriptor: int = passed.detach()
    return descriptor


def _enter_from_server(
    rank: int, launcher_pid: int, environ: dict[str, str], numbers: tuple[int, ...], *passed: int
) -> NoReturn:
    """Goes on as the rank process, in a child of the fork server.

    Args:
        rank, launcher_pid, environ: as in `RankStart`.
        numbers: those that the target's descriptors have in the launcher, and in its pickled call.
        passed: copies of these descriptors, and of all that a `RankStart` has, in its order.
    """
    import fcntl

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    # Out of the way first: a copy may have a number that another one is to get.
    moved = [fcntl.fcntl(d, fcntl.F_DUPFD_CLOEXEC, _OUT_OF_THE_WAY) for d in passed]
    for descriptor in passed:
        os.close(descriptor)
    for number, descriptor in zip(numbers, moved, strict=False):
        os.dup2(descriptor, number, inheritable=False)
        os.close(descriptor)
    record, *rest = moved[len(numbers) :]
    own = len(GuardDescriptors._fields)
    descriptors, streams = GuardDescriptors(*rest[:own]), tuple(rest[own:])
    _enter(RankStart(rank, Target({}, ()), record, environ, descriptors, streams), launcher_pid)


def _enter(start: RankStart, launcher_pid: int) -> NoReturn:
    """Goes on as the rank process, in a forked child."""
    from gradsync.launching.in_rank import rank_main

    os.setsid()
    for number, descriptor in enumerate(start.streams):
        os.dup2(descriptor, number)
    for descriptor in start.streams:
        if descriptor >= len(start.streams):
            os.close(descriptor)
    os.environ.clear()
    os.environ.update(start.environ)
    rank_main.enter(start.rank, launcher_pid, start.descriptors, start.record, start.target.call)


_STARTERS: dict[str, Callable[[RankStart], StartedProcess]] = {
    "spawn": _spawn,
    "fork": _fork,
    "forkserver": _fork_from_server,
}
#: Names of the start methods.
START_METHODS = tuple(_STARTERS)
