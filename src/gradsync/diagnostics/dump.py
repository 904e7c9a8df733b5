"""A dump: the JSON file to which a rank writes its last collectives and the stacks of its threads.

The classes Dump, Group, Entry and Call, and the named tuples of tracing.py, are the schema of the file. An object of
these classes becomes a JSON object with the same fields, and a named tuple becomes a JSON list. `write_dump` writes a
dump; `read_dumps` reads dumps for `gradsync trace`, and checks every field. triggers.py decides when a process writes a
dump.
"""

from __future__ import annotations

import functools
import os
import reprlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, is_dataclass
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from gradsync.diagnostics import tracing
from gradsync.diagnostics.recorder import Entry as Recorded
from gradsync.diagnostics.recorder import FlightRecorder, recorders
from gradsync.diagnostics.stacks import stack_report
from gradsync.diagnostics.tracing import Arrival, Phase, TracedStep
from gradsync.environment import RANK, value_of
from gradsync.errors import InvalidArgument
from gradsync.machine import boot_id, run_with_timeout

if TYPE_CHECKING:
    from pathlib import Path  # pathlib takes long to import, and few processes write a file

#: The value of the field "format" of every dump. Other JSON files do not have this value.
FORMAT = "gradsync flight recorder 2"
_FORMAT_OF_0_1 = "gradsync flight recorder 1"
#: A field of every Chrome trace. `gradsync trace --out` may have written such a file into the folder of the dumps.
CHROME_TRACE_KEY = "traceEvents"
_MAX_DESCRIPTION_LINES = 1000
_BYTES_PER_SECOND = 10e6  # a dump of this size adds one second to the time limit for writing the dump

State = Literal["runs", "ended", "failed"]


@dataclass(frozen=True)
class Call:
    """The description of a collective, or of a message between two ranks.

    Attributes:
        what: the collective in one line.
        lines: everything that the ranks must agree on: first the collective in one line, then a line for each array; at
            most 1000 lines.
    """

    what: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """A collective or a message of the dump's rank.

    Attributes:
        number: the number of the collective in its group, from 1; a message has the number of the collective before it,
            or 0 if there is none.
        call: the key of the description in Group.calls. Ranks that call the same collective have equal keys.
        is_message: whether this is a message between two ranks, and not a collective.
        state: "runs", "ended" or "failed".
        began, ended: when the entry began and ended, in seconds on the rank's monotonic clock. `ended` is None if the
            entry has not ended.
    """

    number: int
    call: str
    is_message: bool
    state: State
    began: float
    ended: float | None


@dataclass(frozen=True)
class Group:
    """A group, as one rank has seen it.

    Attributes:
        ranks: the world ranks of the members.
        begun: the number of collectives that the rank has begun.
        entries: the last collectives and messages, the oldest first.
        calls: the descriptions of the entries, each under the key Entry.call.
    """

    ranks: tuple[int, ...]
    begun: int
    entries: tuple[Entry, ...]
    calls: dict[str, Call]

    def collectives(self) -> list[Entry]:
        """Returns the entries that are not messages."""
        return [entry for entry in self.entries if not entry.is_message]


@dataclass(frozen=True)
class Dump:
    """The content of one dump.

    Attributes:
        format: the text of FORMAT.
        path: the path of the file.
        reason: the reason for the dump.
        raised_at: the line of code that raised the exception that ended this rank; "" if no exception ended the rank,
            or if a failed collective caused the exception.
        rank: the world rank; None if the process has not joined a group, and neither GRADSYNC_RANK nor RANK is set.
        pid, host: the id of the process, and the name of its machine.
        clock: a text that is equal for ranks with the same monotonic clock.
        monotonic_seconds, wall_seconds: the time of the dump, on the rank's monotonic clock and on its wall clock.
        package: gradsync's folder on the rank's machine. The report shows the innermost line of a stack outside of this
            folder.
        stacks: the result of stack_report().
        groups: the groups by name.
        phases, arrivals, steps: the events of the trace; empty without a trace.
    """

    format: str
    path: str
    reason: str
    raised_at: str
    rank: int | None
    pid: int
    host: str
    clock: str
    monotonic_seconds: float
    wall_seconds: float
    package: str
    stacks: str
    groups: dict[str, Group]
    phases: tuple[Phase, ...]
    arrivals: tuple[Arrival, ...]
    steps: tuple[TracedStep, ...]


# Writing.


def write_dump(path: Path, reason: str, seconds: float, raised_at: str = "") -> Path:
    """Writes a dump, and returns the path of its file.

    Args:
        path: the path of a file that ends in .json, or of a folder. If the path is a folder, the name of the file
            contains rank and pid.
        reason: the reason for the dump.
        seconds: the time limit for writing. write_dump() adds one second for each 10 MB (10**7 bytes) of the dump.
        raised_at: see Dump.raised_at.

    Raises:
        InvalidArgument: the file cannot be written, or cannot be written within the time limit.
    """
    import json  # imported here to keep the start of a rank short: few processes write a dump
    import socket

    rank, pid = _rank(), os.getpid()
    if path.suffix != ".json":
        path = path / f"gradsync-rank{'unknown' if rank is None else rank}-pid{pid}.json"
    tracer = tracing.active or tracing.Tracer()
    dump = Dump(
        FORMAT,
        str(path),
        reason,
        raised_at,
        rank,
        pid,
        socket.gethostname(),
        boot_id() or socket.gethostname(),  # each container has a host name of its own, but the clock of its machine
        time.monotonic(),
        time.time(),
        os.path.join(os.path.dirname(os.path.dirname(__file__)), ""),
        stack_report(),
        {recorder.group: _group(recorder) for recorder in recorders()},
        tuple(tracer.phases),
        tuple(tracer.arrivals),
        tuple(tracer.steps),
    )
    text = json.dumps(dump, default=vars, separators=(",", ":"))
    try:
        write_whole(path, text, seconds + len(text) / _BYTES_PER_SECOND)
    except OSError as error:
        raise InvalidArgument(f"the dump cannot be written to {path}: {error.strerror or error}") from error
    return path


def _group(recorder: FlightRecorder) -> Group:
    entries = recorder.entries()
    calls: dict[str, Call] = {}
    for entry in entries:
        if (key := _key(entry)) not in calls:
            calls[key] = Call(entry.what.headline(), tuple(entry.what.lines()[:_MAX_DESCRIPTION_LINES]))
    ranks = (0,) if recorder.place is None else tuple(recorder.place.ranks)
    return Group(ranks, recorder.begun, tuple(map(_entry, entries)), calls)


def _entry(entry: Recorded) -> Entry:
    state: State = "failed" if entry.failed else "runs" if entry.ended is None else "ended"
    return Entry(entry.number, _key(entry), entry.what.is_message, state, entry.began, entry.ended)


def _key(entry: Recorded) -> str:
    return f"{entry.what.digest:016x}"


def _rank() -> int | None:
    """Returns the world rank of this process; None if unknown.

    The rank comes from the largest group. If this group has only one rank, the launcher's variable has precedence.
    """
    places = [recorder.place for recorder in recorders() if recorder.place is not None]
    largest = max(places, key=lambda place: len(place.ranks), default=None)
    text = value_of(os.environ, RANK) or value_of(os.environ, "RANK") or ""
    if largest is not None and (len(largest.ranks) > 1 or not text.isdecimal()):
        return largest.ranks[largest.rank]
    return int(text) if text.isascii() and text.isdecimal() else None


def write_whole(path: Path, text: str, seconds: float) -> None:
    """Replaces a file atomically, so that a reader finds the old or the new content. Makes the folder if needed.

    Args:
        path: the path of the file.
        text: the new content of the file.
        seconds: the time limit. A write that takes longer continues in the background.

    Raises:
        OSError: the file cannot be written.
        TimeoutError: the time limit was reached.
    """
    write = functools.partial(_write_and_rename, path, text)
    try:
        run_with_timeout(write, "gradsync-file", seconds)
    except TimeoutError as error:
        if error.errno is not None:  # the file system itself has raised this error
            raise
        raise TimeoutError(f"the write did not end within {seconds:.3g} s") from None
    except RuntimeError:  # no thread can be started: there are too many, or the interpreter is ending
        write()


def _write_and_rename(path: Path, text: str) -> None:
    temporary = _temporary_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _temporary_path(path: Path) -> Path:
    """Returns the path of a temporary file in the same folder. The caller renames the file once it is complete."""
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.{time.monotonic_ns()}")


# Reading. A dump may be cut off, damaged or edited by hand, so the functions check every field.


def read_dumps(paths: Iterable[Path]) -> tuple[list[Dump], list[Dump]]:
    """Reads the dumps of a run.

    Args:
        paths: the paths of dumps, or of folders that contain dumps.

    Returns:
        The latest dump of each rank, in the order of ranks; and the other dumps, which are older or do not name their
        rank.

    Raises:
        InvalidArgument: there are no dumps, a file cannot be read, is not a dump or is damaged, or no dump contains a
            rank.
    """
    paths = list(paths)
    contents = [(file, content) for path in paths for file, content in _contents(path)]
    if not contents:
        raise InvalidArgument(
            f"there are no dumps in {', '.join(map(str, paths))}: a dump is a *.json file that gradsync has written"
        )
    dumps = sorted((_dump(file, content) for file, content in contents), key=lambda dump: dump.wall_seconds)
    latest = {dump.rank: dump for dump in dumps if dump.rank is not None}
    if not latest:
        raise InvalidArgument(
            f"no dump in {', '.join(map(str, paths))} contains a rank: all were written before init_process_group()"
        )
    return [latest[rank] for rank in sorted(latest)], [dump for dump in dumps if dump not in latest.values()]


def _contents(path: Path) -> Iterator[tuple[Path, Any]]:
    """Yields the path and the content of a file, or of each JSON file in a folder, except Chrome traces."""
    if not path.is_dir():
        yield path, _content(path)
        return
    for file in sorted(path.glob("*.json")):
        content = _content(file)
        if not (isinstance(content, dict) and CHROME_TRACE_KEY in content):
            yield file, content


def _content(path: Path) -> Any:
    import json

    if path.exists() and not path.is_file():
        raise InvalidArgument(f"{path} is not a dump: it needs to be a regular file")  # opening a FIFO would block
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror}") from error
    except (RecursionError, ValueError) as error:
        raise InvalidArgument(f"{path} is no dump of gradsync's flight recorder: it is not JSON ({error})") from error


def _dump(path: Path, content: Any) -> Dump:
    if isinstance(content, dict) and content.get("format") == _FORMAT_OF_0_1:
        raise InvalidArgument(f"{path} was written by gradsync 0.1: read it with `gradsync trace` of that version")
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InvalidArgument(
            f"{path} is no dump of gradsync's flight recorder: it has no field 'format' with the value {FORMAT!r}"
        )
    try:
        dump: Dump = _decode(Dump, content | {"path": str(path)}, "")
        for name, group in dump.groups.items():
            for number, entry in enumerate(group.entries):
                place = f"groups.{name}.entries[{number}].call"
                _need(entry.call in group.calls, "one of the calls", entry.call, place)
    except DamagedError as error:
        raise InvalidArgument(f"{path} is damaged: {printable(str(error))}; leave out this file") from None
    return dump


class DamagedError(ValueError):
    """A field of a dump is missing or does not follow the schema; the text names the field and its value."""


#: The rule for the values of each plain type: the words after "needs to be" in an error, and the check.
_RULES: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    str: ("a text", lambda value: isinstance(value, str)),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("an integer of at least 0", lambda value: type(value) is int and 0 <= value < 2**63),
    # All floats are times. The limit excludes infinity and numbers such as 1e308, whose sums are infinite.
    float: ("a time in seconds", lambda value: type(value) in (int, float) and 0 <= value < 2**40),
    State: ("'runs', 'ended' or 'failed'", lambda value: value in ("runs", "ended", "failed")),
}
_fields = functools.cache(get_type_hints)


def _decode(kind: Any, value: Any, place: str) -> Any:
    """Converts a JSON value to a type of the schema.

    Args:
        kind: the type.
        value: the value that was read from JSON.
        place: the position of the value in the file, such as "groups.world.begun"; "" for the whole file.

    Raises:
        DamagedError: the value does not have the type.
    """
    if kind in _RULES:
        needed, accepts = _RULES[kind]
        _need(accepts(value), needed, value, place)
        return value
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return None if value is None else _decode(inner[0], value, place)
    if origin is tuple:
        _need(isinstance(value, list), "a list", value, place)
        return tuple([_decode(inner[0], each, f"{place}[{number}]") for number, each in enumerate(value)])
    if origin is dict:
        _need(isinstance(value, dict), "an object", value, place)
        return {name: _decode(inner[1], each, f"{place}.{name}") for name, each in value.items()}
    fields, is_object = _fields(kind), is_dataclass(kind)
    if is_object:
        _need(isinstance(value, dict), "an object", value, place)
        for name in fields:
            if name not in value:
                raise DamagedError(f"{place or 'the file'} has no field {name!r}")
        before = f"{place}." if place else ""
        return kind(*[_decode(each, value[name], before + name) for name, each in fields.items()])
    _need(isinstance(value, list) and len(value) == len(fields), f"a list of {len(fields)} fields", value, place)
    columns = enumerate(zip(fields.values(), value, strict=True))
    return kind(*[_decode(each, cell, f"{place}[{number}]") for number, (each, cell) in columns])


def _need(holds: bool, needed: str, value: Any, place: str) -> None:
    if not holds:
        raise DamagedError(f"{place} needs to be {needed}, got {reprlib.repr(value)}")


def printable(line: str) -> str:
    """Returns a line with escapes for characters that cannot be printed, because a dump may contain any text."""
    return "".join([c if c.isprintable() else c.encode("unicode_escape").decode() for c in line])
