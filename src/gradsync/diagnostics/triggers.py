"""Decides when a process writes its dump: on demand, at a failure, at Ctrl-C, on SIGUSR2, and when a trace ends.

`gs.dump_flight_recorder()` and `gs.trace()` always write a dump. At the other events a process writes one only if
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
from typing import TYPE_CHECKING

from gradsync.diagnostics import tracing
from gradsync.diagnostics.dump import write_dump
from gradsync.diagnostics.recorder import recorders
from gradsync.environment import DUMP_DIR, TRACE
from gradsync.errors import CollectiveTimeout, InvalidArgument, PlanMismatch, RankFailed, describe, headline, raised_at

if TYPE_CHECKING:
    from pathlib import Path  # which takes long to load, and few processes write a file

# The time limits of the file system: while a failure waits to be reported, and otherwise.
_URGENT_SECONDS, _PATIENT_SECONDS = 2.0, 60.0
_OF_A_COLLECTIVE = (CollectiveTimeout, RankFailed, PlanMismatch)

_log = logging.getLogger("gradsync")


def dump_flight_recorder(path: str | os.PathLike[str] | None = None) -> Path:
    """Writes this process's last collectives, and the stacks of its threads, to a JSON file.

    It is not a collective, and any thread may call it at any time. `gradsync trace FOLDER` compares the files of all
    ranks.

    Args:
        path: a file that ends in .json, or a folder, which is made if needed; in it the file is named after rank and
            pid. None is the folder of GRADSYNC_DUMP_DIR, or else the current folder.

    Returns:
        The path of the file.

    Raises:
        InvalidArgument: the file cannot be written, or its file system has hung for a minute.
    """
    from pathlib import Path

    folder = Path(DUMP_DIR.read() or ".") if path is None else Path(path)
    return write_dump(folder, "dump_flight_recorder() was called", None, _PATIENT_SECONDS)


@contextlib.contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[None]:
    """Records when each bucket of the block was packed, waited for, reduced and split.

    It is not a collective; `gradsync trace` shows the ranks that have traced. The end of the block writes a dump. In
    the block the recorder remembers 16,384 collectives.

    Args:
        path: as for dump_flight_recorder.

    Raises:
        InvalidArgument: a trace of this process is on already, or the file cannot be written. If the block itself
            raises an error, that error is raised.
    """
    from pathlib import Path

    if tracing.active is not None:
        raise InvalidArgument(f"gs.trace({os.fspath(path)!r}): this process is traced already")
    tracer = tracing.start()
    succeeded = False
    try:
        yield
        succeeded = True
    finally:
        tracing.stop()
        try:
            write_dump(Path(path), "the traced block has ended", tracer, _PATIENT_SECONDS)
        except InvalidArgument as error:
            if succeeded:
                raise
            _log.warning("no trace: %s", describe(error))  # the block's own error is raised


def arm() -> None:
    """Turns on dumps or a trace, if GRADSYNC_DUMP_DIR or GRADSYNC_TRACE is set.

    A signal handler that the program has installed is kept; a handler that it installs later replaces this one.
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
                signal.signal(signal.SIGUSR2, _on_request)
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, _on_interrupt)
    if traced is not None and _traced_folder is None:
        _traced_folder = Path(os.path.abspath(traced))
        tracing.start()
        import atexit

        atexit.register(write_trace)


def dump_because(failure: str, raised_at: str = "") -> None:
    """Writes a dump if GRADSYNC_DUMP_DIR is set; never raises.

    If Ctrl-C has made a dump, and no other collective has begun since, that dump is kept: it shows the rank's line of
    code at the time of Ctrl-C.
    """
    with _in_turn():
        if _interrupted_at is None or _has_begun_since(_interrupted_at):
            _dump_now(failure, raised_at)


def dump_at_failure(error: BaseException) -> None:
    """Writes a dump for an error of a collective; other ranks report the same failure."""
    if isinstance(error, _OF_A_COLLECTIVE):
        _dump_because_of(error, raised_at="")


def dump_at_exception(error: BaseException) -> None:
    """Writes a dump for any other error that ends this rank; an error of a collective has a dump already."""
    if not isinstance(error, _OF_A_COLLECTIVE):
        _dump_because_of(error, raised_at="" if _follows_a_failure(error) else str(raised_at(error) or ""))


def _follows_a_failure(error: BaseException) -> bool:
    """Whether an error was raised because of an error of a collective, or while that error was handled."""
    seen: set[int] = set()
    earlier = error.__cause__ or error.__context__
    while earlier is not None and id(earlier) not in seen:
        if isinstance(earlier, _OF_A_COLLECTIVE):
            return True
        seen.add(id(earlier))
        earlier = earlier.__cause__ or earlier.__context__
    return False


def write_trace() -> None:
    """Writes the trace if GRADSYNC_TRACE is set; a later call replaces the file."""
    if _traced_folder is not None and recorders():
        try:
            write_dump(_traced_folder, f"{TRACE} is set", None, _PATIENT_SECONDS)
        except Exception as error:
            _log.warning("no trace: %s", describe(error))


def _dump_because_of(error: BaseException, raised_at: str) -> None:
    if _folder is not None:  # else no text is needed
        dump_because(headline(error).rstrip(":"), raised_at)


def _dump_now(reason: str, raised_at: str = "") -> None:
    if _folder is not None:
        try:
            write_dump(_folder, reason, None, _URGENT_SECONDS, raised_at)
        except Exception as error:
            _log.warning("no dump of the flight recorder: %s", describe(error))


@contextlib.contextmanager
def _in_turn() -> Iterator[None]:
    """Lets threads write their dumps one after the other; the last dump stays."""
    is_in_turn = _turn.acquire(timeout=_URGENT_SECONDS)
    try:
        yield
    finally:
        if is_in_turn:
            _turn.release()


def _has_begun_since(moment: float) -> bool:
    return any(last.began > moment for recorder in recorders() if (last := recorder.last) is not None)


def _on_request(number: int, _frame: FrameType | None) -> None:
    _dump_in_handler(number, "SIGUSR2 came")


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    """Writes a dump before the stack unwinds, then raises KeyboardInterrupt; a second Ctrl-C raises it at once."""
    global _interrupted_at
    try:
        _interrupted_at = time.monotonic()
        _dump_in_handler(number, "Ctrl-C came (SIGINT)")
    finally:  # also if the warning fails, because the interrupted code was writing to the same stream
        import signal

        signal.default_int_handler(number, frame)


def _dump_in_handler(number: int, reason: str) -> None:
    """Writes a dump, unless this signal has interrupted its own handler, which could repeat without end."""
    if number in _handled:
        return
    _handled.add(number)
    try:
        with _in_turn():
            _dump_now(reason)
    finally:
        _handled.discard(number)


_turn = threading.RLock()  # re-entrant: a signal handler may interrupt the thread that holds the lock
_handled: set[int] = set()  # the signals whose handlers the main thread is running
_interrupted_at: float | None = None  # the time at which Ctrl-C made a dump
_folder: Path | None = None
_traced_folder: Path | None = None


def _forget_after_fork() -> None:
    """Forgets the folders: the child of a fork is not a rank, and must not replace its parent's files."""
    global _folder, _traced_folder, _interrupted_at, _turn
    _folder = _traced_folder = _interrupted_at = None
    _turn = threading.RLock()
    _handled.clear()
    tracing.stop()


os.register_at_fork(after_in_child=_forget_after_fork)
