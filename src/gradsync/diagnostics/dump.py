"""What a process writes down for a look at it afterwards: its last collectives of every group, and its stacks.

One JSON file a rank, written at once and whole: when somebody calls `gs.dump_flight_recorder()`, when a collective
fails, when an exception ends this rank's part, when another rank misses this one, at Ctrl-C, and when SIGUSR2 asks; all
but the first where GRADSYNC_DUMP_DIR names a folder. With `gs.trace()`, or GRADSYNC_TRACE, the phases of the
collectives are in it too. `gradsync trace` reads the files.
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
from gradsync.diagnostics.recorder import Entry, FlightRecorder, recorders
from gradsync.diagnostics.stacks import stack_report
from gradsync.environment import DUMP_DIR, RANK, TRACE
from gradsync.errors import CollectiveTimeout, InvalidArgument, PlanMismatch, RankFailed, describe, headline
from gradsync.launchers import value_of
from gradsync.machine import machine_identity, run_with_timeout

if TYPE_CHECKING:
    from pathlib import Path  # which takes long to load, and hardly any process writes a file

#: What a dump calls itself, so that nothing else is taken for one.
FORMAT = "gradsync flight recorder 1"
_MAX_DESCRIPTION_LINES = 1000
# How long the file system may take: while a failure waits to be told, and else; a larger dump has more.
_URGENT_SECONDS, _PATIENT_SECONDS, _BYTES_PER_SECOND = 2.0, 60.0, 10e6
_TOLD = (CollectiveTimeout, RankFailed, PlanMismatch)

_log = logging.getLogger("gradsync")


def dump_flight_recorder(path: str | os.PathLike[str] | None = None) -> Path:
    """Writes the last collectives of every group of this process to a JSON file, and where its threads are.

    Not collective, and any thread may call it at any time. `gradsync trace FOLDER` compares the files of all ranks.

    Args:
        path: a file that ends in .json, or a folder, made where it is not there, in which the file is named after rank
            and pid; None is the folder that GRADSYNC_DUMP_DIR names, or the current one.

    Returns:
        The file.

    Raises:
        InvalidArgument: it cannot be written, or its file system hangs: that takes a minute.
    """
    from pathlib import Path

    folder = Path(DUMP_DIR.read() or ".") if path is None else Path(path)
    return _write(folder, "dump_flight_recorder() was called")


@contextlib.contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[None]:
    """Notes, within the block, when each bucket was packed, waited for, reduced and split.

    Not collective; `gradsync trace` shows the ranks that did it. At the end of the block a dump is written. While it
    lasts the recorder remembers 16,384 collectives.

    Args:
        path: as for dump_flight_recorder.

    Raises:
        InvalidArgument: somebody traces already, or the file cannot be written, as for dump_flight_recorder; where the
            block raises, what it raises.
    """
    from pathlib import Path

    if tracing.active is not None:
        raise InvalidArgument(f"gs.trace({os.fspath(path)!r}): this process is traced already")
    tracer = tracing.start()
    has_ended_well = False
    try:
        yield
        has_ended_well = True
    finally:
        tracing.stop()
        try:
            _write(Path(path), "the traced block has ended", tracer)
        except InvalidArgument as error:
            if has_ended_well:
                raise
            _log.warning("no trace: %s", describe(error))  # what has ended the block is the news


def arm() -> None:
    """Does what the environment asks for: dumps at failures, Ctrl-C and SIGUSR2, a trace at the end of the process.

    A handler of these signals that the program has already stays, and one that comes later takes the place of this one.
    """
    global _folder, _traced_folder
    folder, traced = DUMP_DIR.read(), TRACE.read()
    if folder is None and traced is None:
        return
    from pathlib import Path

    if folder is not None and _folder is None:
        import signal  # here: most processes never come this far, and start-up counts

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


def dump_because(failure: str) -> None:
    """Writes a dump where the environment asks for them; never raises.

    Not where Ctrl-C has made one and nothing has begun since: where the ranks were then is what is to be looked into.
    """
    with _in_turn():
        if _interrupted_at is None or _has_begun_since(_interrupted_at):
            _dump_now(failure)


def dump_at_failure(error: BaseException) -> None:
    """Does so for a failure of a collective that other ranks have a part in."""
    if isinstance(error, _TOLD):
        _dump_because_of(error)


def dump_at_exception(error: BaseException) -> None:
    """Does so for what ends this rank's part in the run; of such a failure there is a dump already."""
    if not isinstance(error, _TOLD):
        _dump_because_of(error)


def write_trace() -> None:
    """Writes what GRADSYNC_TRACE asks for; may be called again, when there is more."""
    if _traced_folder is not None and recorders():
        try:
            _write(_traced_folder, f"{TRACE} is set")
        except Exception as error:
            _log.warning("no trace: %s", describe(error))


def snapshot(reason: str, tracer: tracing.Tracer | None = None) -> dict[str, Any]:
    """Returns what a dump consists of.

    Args:
        reason: why it is made.
        tracer: whose events it has too; None: those of who traces now, if anybody does.
    """
    import socket

    tracer = tracer or tracing.active
    calls: dict[str, dict[str, Any]] = {}
    groups = [_group(recorder, calls) for recorder in recorders()]
    content: dict[str, Any] = {
        "format": FORMAT,
        "reason": reason,
        "rank": _rank(),
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "machine": machine_identity(),
        "monotonic_seconds": time.monotonic(),
        "wall_seconds": time.time(),
        "groups": groups,
        "calls": calls,
        "stacks": stack_report(),
        "package": os.path.join(os.path.dirname(os.path.dirname(__file__)), ""),
    }
    return content if tracer is None else content | {"trace": tracer.content()}


def _group(recorder: FlightRecorder, calls: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns one group's part; `calls` grows by what its collectives are, by digest."""
    place = recorder.place
    return {
        "group": recorder.group,
        "rank": 0 if place is None else place.rank,
        "ranks": [0] if place is None else list(place.ranks),
        "backend": "" if place is None else place.backend,
        "begun": recorder.begun,
        "entries": [_entry(entry, calls) for entry in recorder.entries()],
    }


def _entry(entry: Entry, calls: dict[str, dict[str, Any]]) -> dict[str, Any]:
    what = entry.what
    digest = f"{what.digest:016x}"
    if digest not in calls:
        lines = what.describe().splitlines()
        calls[digest] = {"what": what.headline(), **what.facts(), "description": lines[:_MAX_DESCRIPTION_LINES]}
    state = "failed" if entry.failed else "runs" if entry.ended is None else "ended"
    of_message = {"is_message": True} if what.is_message else {}
    return {
        "number": entry.number,
        "call": digest,
        "state": state,
        "began": entry.began,
        "ended": entry.ended,
        **of_message,
    }


def _rank() -> int | None:
    """Returns the number of this process in the world: as its largest group has it, else as its launcher says."""
    places = [recorder.place for recorder in recorders() if recorder.place is not None]
    largest = max(places, key=lambda place: len(place.ranks), default=None)
    text = value_of(os.environ, RANK) or value_of(os.environ, "RANK") or ""
    if largest is not None and (len(largest.ranks) > 1 or not text.isdecimal()):
        return largest.ranks[largest.rank]
    return int(text) if text.isascii() and text.isdecimal() else None


def _write(path: Path, reason: str, tracer: tracing.Tracer | None = None, *, is_urgent: bool = False) -> Path:
    import json

    content = snapshot(reason, tracer)
    if path.suffix != ".json":
        rank = "unknown" if content["rank"] is None else content["rank"]
        path = path / f"gradsync-rank{rank}-pid{content['pid']}.json"
    text = json.dumps(content, separators=(",", ":"))
    seconds = (_URGENT_SECONDS if is_urgent else _PATIENT_SECONDS) + len(text) / _BYTES_PER_SECOND
    try:
        write_whole(path, text, seconds)
    except OSError as error:
        raise InvalidArgument(f"the flight recorder cannot be written to {path}: {error.strerror or error}") from error
    return path


def _dump_because_of(error: BaseException) -> None:
    if _folder is not None:  # else nothing needs to be put into words
        dump_because(headline(error).rstrip(":"))


def _dump_now(reason: str) -> None:
    if _folder is not None:
        try:
            _write(_folder, reason, is_urgent=True)
        except Exception as error:
            _log.warning("no dump of the flight recorder: %s", describe(error))


@contextlib.contextmanager
def _in_turn() -> Iterator[None]:
    """Lets the dumps of several threads be made one after the other: the last to be begun is the one that stays."""
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
    """Makes a dump before anything unwinds, and interrupts as ever; at once when it comes again."""
    global _interrupted_at
    try:
        _interrupted_at = time.monotonic()
        _dump_in_handler(number, "Ctrl-C came (SIGINT)")
    finally:  # also where the warning cannot be written, as what it interrupts may be writing to the same stream
        import signal

        signal.default_int_handler(number, frame)


def _dump_in_handler(number: int, reason: str) -> None:
    """Makes a dump; the same signal, coming again meanwhile, makes no other one within it, and so on without end."""
    if number in _handled:
        return
    _handled.add(number)
    try:
        with _in_turn():
            _dump_now(reason)
    finally:
        _handled.discard(number)


def write_whole(path: Path, text: str, seconds: float) -> None:
    """Writes a file, and the folders that lead to it, so that whoever reads meanwhile finds the one before or this one.

    Args:
        path: the file.
        text: what it holds from then on.
        seconds: how long it may take. What takes longer is given up, and goes on behind the scenes.

    Raises:
        OSError: it cannot be written; TimeoutError: not in time, or one that was given up in this folder still hangs.
    """
    if path.parent in _given_up and not _given_up[path.parent].is_set():
        raise TimeoutError("the file system has not taken an earlier file yet")
    returned = threading.Event()

    def write() -> None:
        try:
            _write_beside(path, text)
        finally:
            returned.set()

    try:
        run_with_timeout(write, "gradsync-file", seconds)
    except TimeoutError:
        if returned.is_set():  # the file system's own error
            raise
        _given_up[path.parent] = returned
        raise TimeoutError(f"the file system has not taken it within {seconds:.3g} s") from None
    except RuntimeError:  # no thread can be started: there are too many, or the interpreter ends (Python 3.12)
        write()


def _write_beside(path: Path, text: str) -> None:
    beside = _beside(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        beside.write_text(text)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _beside(path: Path) -> Path:
    """Returns where the file grows: a name of its own beside it."""
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.{time.monotonic_ns()}")


_turn = threading.RLock()  # a signal's handler may come while its own thread has it
_handled: set[int] = set()  # the signals in whose handlers the main thread is
_interrupted_at: float | None = None  # when a dump was made because of Ctrl-C
_folder: Path | None = None
_traced_folder: Path | None = None
_given_up: dict[Path, threading.Event] = {}  # by folder: whether the write that was given up has returned after all


def _forget_after_fork() -> None:
    """The child is no rank; it must not write over what its parent does."""
    global _folder, _traced_folder, _interrupted_at, _turn
    _folder = _traced_folder = _interrupted_at = None
    _turn = threading.RLock()
    _handled.clear()
    _given_up.clear()
    tracing.stop()


os.register_at_fork(after_in_child=_forget_after_fork)
