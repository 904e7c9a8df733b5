"""Decides when a process writes its dump: on demand, at a failure, at Ctrl-C, on SIGUSR2, and when a trace ends.

`gs.dump_flight_recorder()` and `gs.trace()` always write a dump. In the other cases, a process writes a dump only if
GRADSYNC_DUMP_DIR or GRADSYNC_TRACE names a folder.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from gradsync.diagnostics import tracing
from gradsync.diagnostics.dump import write_dump
from gradsync.diagnostics.recorder import recorders
from gradsync.environment import DUMP_DIR, TRACE
from gradsync.errors import CollectiveTimeout, InvalidArgument, PlanMismatch, RankFailed, describe, headline, raised_at

if TYPE_CHECKING:
    from pathlib import Path  # pathlib takes long to import, and few processes write a file

# The time limits for writing a dump at a failure or a signal, and for writing any other dump. The first limit is short,
# because the report of a failure waits until its dump is written.
_URGENT_SECONDS, _PATIENT_SECONDS = 2.0, 60.0
_OF_A_COLLECTIVE = (CollectiveTimeout, RankFailed, PlanMismatch)

_log = logging.getLogger("gradsync")


def dump_flight_recorder(path: str | os.PathLike[str] | None = None) -> Path:
    """Writes this process's last collectives, and the stacks of its threads, to a JSON file.

    This function is not a collective, and any thread may call it at any time. `gradsync trace FOLDER` compares the
    files of all ranks.

    Args:
        path: the path of a folder, which is made if needed, or of a file that ends in .json. In a folder each rank
            writes a file of its own, because the name of the file contains rank and pid. If several ranks pass the same
            file, only the dump of the rank that writes last remains. None means the folder that GRADSYNC_DUMP_DIR
            names, or the current folder if this variable is not set.

    Returns:
        The path of the file.

    Raises:
        InvalidArgument: `path` is not a path, or the file cannot be written, or cannot be written within a minute. A
            large dump gets more time.
    """
    folder = _path_of("dump_flight_recorder", DUMP_DIR.read() or "." if path is None else path)
    return write_dump(folder, "dump_flight_recorder() was called", _PATIENT_SECONDS)


@contextlib.contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[None]:
    """Records the times of steps, gradients, collectives and their phases inside a `with` block.

    The phases of an all-reduce are, for example, packing, waiting, reducing and splitting. Small all-reduces over
    shared memory, and other collectives, have no phases. A trace is not a collective, so one rank may record a trace
    alone. At the end of the block, the process writes a dump. Inside the block, the flight recorder keeps at least the
    last 16,384 collectives and messages of each group.

    Args:
        path: the path of the dump; see dump_flight_recorder.

    Raises:
        InvalidArgument: `path` is not a path, a trace of this process is already on, or the file cannot be written. If
            the block itself raises an error, the caller gets that error, and not an error from writing the trace.
    """
    where = _path_of("trace", path)
    if tracing.active is not None:
        raise InvalidArgument(f"gs.trace({str(where)!r}): a trace of this process is already on")
    tracing.start()
    succeeded = False
    try:
        yield
        succeeded = True
    finally:
        try:
            write_dump(where, "the traced block has ended", _PATIENT_SECONDS)
        except InvalidArgument as error:
            if succeeded:
                raise
            _log.warning("the trace was not written: %s", describe(error))  # the error of the block is raised
        finally:
            tracing.stop()


def _path_of(function: str, path: Any) -> Path:
    from pathlib import Path

    if not isinstance(path, (str, os.PathLike)):
        raise InvalidArgument(f"{function} needs a path as text or as a Path, got {path!r}")
    return Path(path)


def arm() -> None:
    """Turns on dumps or a trace, if GRADSYNC_DUMP_DIR or GRADSYNC_TRACE is set.

    gradsync does not replace a signal handler that the program has installed. A signal handler that the program
    installs later replaces gradsync's handler.
    """
    global _folder, _traced_folder
    folder, traced = DUMP_DIR.read(), TRACE.read()
    if folder is None and traced is None:
        return
    from pathlib import Path

    if folder is not None and _folder is None:
        import signal  # imported here to keep the start of a rank short: few processes need it

        _folder = Path(os.path.abspath(folder))
        if threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:
                signal.signal(signal.SIGUSR2, _on_signal)
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, _on_signal)
    if traced is not None and _traced_folder is None:
        _traced_folder = Path(os.path.abspath(traced))
        tracing.start()
        import atexit

        atexit.register(write_trace)


def dump_because(failure: str, raised_at: str = "") -> None:
    """Writes a dump if GRADSYNC_DUMP_DIR is set, and never raises an error.

    If Ctrl-C has caused a dump, and no collective has begun since then, this function writes nothing. The dump that
    Ctrl-C has caused shows the rank's line of code at the time of Ctrl-C.
    """
    _dump(failure, raised_at, replaces_interrupt=False)


def dump_at_failure(error: BaseException) -> None:
    """Writes a dump if GRADSYNC_DUMP_DIR is set, and the error is CollectiveTimeout, RankFailed or PlanMismatch."""
    if _folder is not None and isinstance(error, _OF_A_COLLECTIVE):
        dump_because(_first_line(error))


def dump_at_exception(error: BaseException) -> None:
    """Writes a dump for an error that ends this rank, if GRADSYNC_DUMP_DIR is set.

    For CollectiveTimeout, RankFailed and PlanMismatch, dump_at_failure has already written a dump, so this function
    does nothing.
    """
    if _folder is not None and not isinstance(error, _OF_A_COLLECTIVE):
        dump_because(_first_line(error), "" if _follows_a_failure(error) else str(raised_at(error) or ""))


def _first_line(error: BaseException) -> str:
    return headline(error).rstrip(":")


def _follows_a_failure(error: BaseException) -> bool:
    """Whether an error was raised because a collective failed, or while the program handled such a failure."""
    seen: set[int] = set()
    earlier = error.__cause__ or error.__context__
    while earlier is not None and id(earlier) not in seen:
        if isinstance(earlier, _OF_A_COLLECTIVE):
            return True
        seen.add(id(earlier))
        earlier = earlier.__cause__ or earlier.__context__
    return False


def write_trace() -> None:
    """Writes the trace if GRADSYNC_TRACE is set and there is a flight recorder. A later call replaces the file."""
    if _traced_folder is not None and recorders():
        try:
            write_dump(_traced_folder, f"{TRACE} is set", _PATIENT_SECONDS)
        except Exception as error:
            _log.warning("the trace was not written: %s", describe(error))


def _dump(reason: str, raised_at: str = "", *, replaces_interrupt: bool = True) -> None:
    """Writes a dump if GRADSYNC_DUMP_DIR is set, and never raises an error.

    If another thread writes a dump, this function first waits up to 2 seconds for that thread, so that the file
    contains the dump that was requested last. If the file system did not respond to the last dump in time, this
    function does not wait for the file system again.
    """
    global _is_hanging
    if _folder is None:
        return
    is_held = _turn.acquire(timeout=_URGENT_SECONDS)
    try:
        if replaces_interrupt or _interrupted_at is None or _has_begun_since(_interrupted_at):
            write_dump(_folder, reason, 0.0 if _is_hanging else _URGENT_SECONDS, raised_at)
            _is_hanging = False
    except Exception as error:
        _is_hanging = isinstance(error.__cause__, TimeoutError)
        _log.warning("the dump of the flight recorder was not written: %s", describe(error))
    finally:
        if is_held:
            _turn.release()


def _has_begun_since(moment: float) -> bool:
    return any(last.began > moment for recorder in recorders() if (last := recorder.last) is not None)


def _on_signal(number: int, frame: FrameType | None) -> None:
    """Writes a dump. After Ctrl-C, this function then raises KeyboardInterrupt; a second Ctrl-C raises it at once."""
    import signal

    global _interrupted_at
    is_interrupt = number == signal.SIGINT
    if is_interrupt:
        _interrupted_at = time.monotonic()
    try:
        if number not in _handled:  # otherwise the signal could interrupt its own handler again and again
            _handled.add(number)
            try:
                _dump("Ctrl-C was received (SIGINT)" if is_interrupt else "SIGUSR2 was received")
            finally:
                _handled.discard(number)
    finally:  # also if the warning fails, which happens if the interrupted code was writing to the same stream
        if is_interrupt:
            signal.default_int_handler(number, frame)


_turn = threading.RLock()  # re-entrant: a signal handler may interrupt the thread that holds the lock
_handled: set[int] = set()  # the signals whose handlers the main thread is running
_interrupted_at: float | None = None  # the time of the last Ctrl-C, in time.monotonic() seconds
_folder: Path | None = None
_is_hanging = False  # whether the file system of the folder did not respond to the last dump in time
_traced_folder: Path | None = None


def _forget_after_fork() -> None:
    """Forgets the folders, because the child of a fork is not a rank, and must not replace its parent's files."""
    global _folder, _is_hanging, _traced_folder, _interrupted_at, _turn
    _folder = _traced_folder = _interrupted_at = None
    _is_hanging = False
    _turn = threading.RLock()
    _handled.clear()
    tracing.stop()


os.register_at_fork(after_in_child=_forget_after_fork)
