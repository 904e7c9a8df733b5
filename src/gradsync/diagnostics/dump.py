"""A dump: the JSON file to which a rank writes its last collectives and the stacks of its threads.

SCHEMA describes the fields of the file. `snapshot` and `write_dump` make a dump; `read_dumps` reads and checks dumps
for `gradsync trace`. triggers.py decides when a dump is written.
"""

from __future__ import annotations

import math
import os
import re
import reprlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from gradsync.diagnostics import tracing
from gradsync.diagnostics.recorder import Entry, FlightRecorder, names_text, recorders
from gradsync.diagnostics.stacks import stack_report
from gradsync.diagnostics.tracing import Arrival, Phase, TracedStep
from gradsync.environment import RANK, value_of
from gradsync.errors import InvalidArgument
from gradsync.machine import machine_identity, run_with_timeout

if TYPE_CHECKING:
    from pathlib import Path  # pathlib takes long to import, and few processes write a file

#: The value of the field "format" of every dump. Other JSON files do not have this value.
FORMAT = "gradsync flight recorder 1"
#: A field of every Chrome trace. `gradsync trace --out` may have written such a file into the folder of the dumps.
CHROME_TRACE_KEY = "traceEvents"
_MAX_DESCRIPTION_LINES = 1000
_BYTES_PER_SECOND = 10e6  # the lowest speed of a file system for which write_dump waits


# The schema. A dump may be cut off, damaged or edited by hand, so every field is checked.


class Rule(NamedTuple):
    """A rule for the value of a field.

    Attributes:
        needed: the description of an allowed value, which follows the words "needs to be" in an error.
        accepts: a function that returns whether a value is allowed.
    """

    needed: str
    accepts: Callable[[Any], bool]


class OptionalField(NamedTuple):
    """The schema of a field that may be left out."""

    schema: Any


class ByName(NamedTuple):
    """The schema of an object in which all names follow one rule, and all values have the same schema."""

    name: Rule
    schema: Any


def _is_integer(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_moment(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 2**40  # sums of several such times are exact and finite


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))


def _or_none(rule: Rule) -> Rule:
    return Rule(f"{rule.needed}, or null", lambda value: value is None or rule.accepts(value))


def _list_of(rule: Rule, which: str) -> Rule:
    return Rule(f"a list of {which}", lambda value: isinstance(value, list) and all(map(rule.accepts, value)))


_TEXT = Rule("a text", lambda value: isinstance(value, str))
_TEXTS = _list_of(_TEXT, "texts")
_TRUTH = Rule("true or false", lambda value: isinstance(value, bool))
_INTEGER = Rule("an integer of at least 0", _is_integer)
_MOMENT = Rule("a moment in seconds", _is_moment)
_STATE = Rule("'runs', 'ended' or 'failed'", lambda value: value in ("runs", "ended", "failed"))
_DIGEST = Rule("16 hexadecimal digits", lambda value: re.fullmatch("[0-9a-f]{16}", value) is not None)
# In dumps of versions before 0.2, a number below 0 means several buckets that were reduced together.
_BUCKET_NUMBER = Rule("an integer", lambda value: type(value) is int and abs(value) < 2**63)
_PLAIN = Rule(
    "a text, a number, or a list of them",
    lambda value: all(map(_is_plain, value)) if isinstance(value, list) else _is_plain(value),
)
_ANY_NAME = Rule("a text", lambda _: True)

#: The schema of a dump. A dict stands for an object with these fields; the object may have more fields. A list with one
#: schema stands for a list of such values. A tuple of rules stands for a list with one value for each rule.
SCHEMA: dict[str, Any] = {
    "format": _TEXT,
    "reason": _TEXT,
    "rank": _or_none(_INTEGER),  # the world rank; null if the rank has not joined, and no launcher has set it
    "pid": _INTEGER,
    "host": _TEXT,
    "machine": _TEXT,
    "monotonic_seconds": _MOMENT,  # the time of the dump, by the monotonic clock and by the wall clock
    "wall_seconds": _MOMENT,
    "groups": [
        {
            "group": _TEXT,
            "ranks": _list_of(_INTEGER, "integers of at least 0"),
            "begun": _INTEGER,
            "entries": [
                {
                    "number": _INTEGER,
                    "call": _TEXT,  # a digest, which is a name in the object "calls"
                    "state": _STATE,
                    "began": _MOMENT,
                    "ended": _or_none(_MOMENT),
                    "is_message": OptionalField(_TRUTH),
                }
            ],
        }
    ],
    "calls": ByName(_DIGEST, ByName(_ANY_NAME, _PLAIN)),
    "stacks": _TEXT,
    "raised_at": OptionalField(_TEXT),  # the line of code that raised the exception which ended this rank
    "package": _TEXT,  # the folder of gradsync; lines of a stack in other folders belong to the program
    "trace": OptionalField(
        {
            "phases": [(_TEXT, _INTEGER, _TEXT, _MOMENT, _MOMENT)],
            "arrivals": [(_TEXT, _TEXT, _MOMENT)],
            "steps": [(_TEXT, _INTEGER, _MOMENT, _MOMENT)],
            "left_out": _INTEGER,
        }
    ),
}
_CALL = {"what": _TEXT, "description": _TEXTS}
_BUCKET = {**_CALL, "bucket": _BUCKET_NUMBER, "gradients": _TEXTS, "collective": _TEXT, "detail": _TEXT}


class DamagedError(ValueError):
    """A field of a dump is missing or does not follow the schema; the text names the field and its value."""


def check(value: Any, schema: Any, place: str = "") -> None:
    """Raises DamagedError if a value does not follow a schema.

    Args:
        value: a value that was read from JSON.
        schema: the schema; see SCHEMA.
        place: the position of the value in the file, such as "groups[0].begun"; "" for the whole file.
    """
    if isinstance(schema, Rule):
        if not schema.accepts(value):
            raise _refused(place, schema.needed, value)
    elif isinstance(schema, list):
        if not isinstance(value, list):
            raise _refused(place, "a list", value)
        for number, each in enumerate(value):
            check(each, schema[0], f"{place}[{number}]")
    elif type(schema) is tuple:
        if not isinstance(value, list) or len(value) != len(schema):
            raise _refused(place, f"a list of {len(schema)} fields", value)
        for column, (rule, each) in enumerate(zip(schema, value, strict=True)):
            if not rule.accepts(each):  # there may be half a million rows: a text is made only for a wrong value
                raise _refused(f"{place}[{column}]", rule.needed, each)
    elif not isinstance(value, dict):
        raise _refused(place or "the file", "an object", value)
    elif isinstance(schema, ByName):
        for name, each in value.items():
            if not schema.name.accepts(name):
                raise _refused(f"each name in {place}", schema.name.needed, name)
            check(each, schema.schema, f"{place}.{name}")
    else:
        for name, each in schema.items():
            if name in value:
                inner = each.schema if isinstance(each, OptionalField) else each
                check(value[name], inner, f"{place}.{name}" if place else name)
            elif not isinstance(each, OptionalField):
                raise DamagedError(f"{place or 'the file'} has no field {name!r}")


def _refused(place: str, needed: str, value: Any) -> DamagedError:
    return DamagedError(f"{place} needs to be {needed}, got {reprlib.repr(value)}")


# Writing.


def snapshot(reason: str, tracer: tracing.Tracer | None = None, raised_at: str = "") -> dict[str, Any]:
    """Returns the content of a dump, which follows SCHEMA.

    Args:
        reason: the reason for the dump.
        tracer: the tracer with the events of a trace; None means the active tracer, if there is one.
        raised_at: the line of code that raised the exception which ends this rank; "" if there is none.
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
    if raised_at:
        content["raised_at"] = raised_at
    return content if tracer is None else content | {"trace": tracer.content()}


def _group(recorder: FlightRecorder, calls: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns the part of a dump for one group, and adds the group's collectives to `calls`, under their digests."""
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
        description = what.lines()[:_MAX_DESCRIPTION_LINES]
        calls[digest] = {"what": what.headline(), **what.facts(), "description": description}
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
    """Returns the world rank of this process, from its largest group or else from its launcher; None if unknown."""
    places = [recorder.place for recorder in recorders() if recorder.place is not None]
    largest = max(places, key=lambda place: len(place.ranks), default=None)
    text = value_of(os.environ, RANK) or value_of(os.environ, "RANK") or ""
    if largest is not None and (len(largest.ranks) > 1 or not text.isdecimal()):
        return largest.ranks[largest.rank]
    return int(text) if text.isascii() and text.isdecimal() else None


def write_dump(path: Path, reason: str, tracer: tracing.Tracer | None, seconds: float, raised_at: str = "") -> Path:
    """Writes a dump, and returns the path of its file.

    Args:
        path: the path of a file that ends in .json, or of a folder. If the path is a folder, the name of the file
            contains rank and pid.
        reason, tracer, raised_at: see `snapshot`.
        seconds: the time limit for writing. A large dump gets more time.

    Raises:
        InvalidArgument: the file cannot be written, or cannot be written within the time limit.
    """
    import json  # imported here to keep the start of a rank short: few processes write a dump

    content = snapshot(reason, tracer, raised_at)
    if path.suffix != ".json":
        rank = "unknown" if content["rank"] is None else content["rank"]
        path = path / f"gradsync-rank{rank}-pid{content['pid']}.json"
    text = json.dumps(content, separators=(",", ":"))
    try:
        write_whole(path, text, seconds + len(text) / _BYTES_PER_SECOND)
    except OSError as error:
        raise InvalidArgument(f"the flight recorder cannot be written to {path}: {error.strerror or error}") from error
    return path


def write_whole(path: Path, text: str, seconds: float) -> None:
    """Replaces a file atomically, so that a reader finds the old or the new content. Makes the folder if needed.

    Args:
        path: the path of the file.
        text: the new content of the file.
        seconds: the time limit. A write that takes longer continues in the background.

    Raises:
        OSError: the file cannot be written.
        TimeoutError: the time limit was reached, or an earlier write to this folder still hangs.
    """
    if path.parent in _hanging and not _hanging[path.parent].is_set():
        raise TimeoutError("an earlier write to this folder has not ended yet")
    returned = threading.Event()

    def write() -> None:
        try:
            _write_and_rename(path, text)
        finally:
            returned.set()

    try:
        run_with_timeout(write, "gradsync-file", seconds)
    except TimeoutError:
        if returned.is_set():  # the file system itself has raised this error
            raise
        _hanging[path.parent] = returned
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


# [folder] -> the event of a write that took too long. The event is set once the write has returned.
_hanging: dict[Path, threading.Event] = {}


os.register_at_fork(after_in_child=_hanging.clear)


# Reading.


class DumpedCall(NamedTuple):
    """A collective or a message, as it was read from a dump.

    Attributes:
        number: the number of the collective in its group; a message has the number of the collective before it.
        digest: a number that is equal on ranks that call the same collective.
        what: the description of the collective or message.
        state: the state of the collective or message: "runs", "ended" or "failed".
        began: the time at which the collective or message began, in seconds on the machine's monotonic clock.
        ended: the time at which the collective or message ended, on the same clock; None if it has not ended.
        is_message: whether this is a message between two ranks, and not a collective.
        facts: the parts of the description: operation, dtype, shape or gradients, root or peer.
    """

    number: int
    digest: int
    what: str
    state: str
    began: float
    ended: float | None
    is_message: bool
    facts: dict[str, Any]


class DumpedGroup(NamedTuple):
    """A group, as it was read from the dump of one rank.

    Attributes:
        name: the name of the group.
        ranks: the world ranks of the members.
        begun: the number of collectives that the rank has begun.
        calls: the last collectives and messages, the oldest first.
    """

    name: str
    ranks: tuple[int, ...]
    begun: int
    calls: tuple[DumpedCall, ...]


class Dump(NamedTuple):
    """The content of one dump.

    Attributes:
        path: the path of the file.
        rank, pid, host, machine, reason, stacks, package, raised_at: see SCHEMA.
        at: the time of the dump, in seconds on the machine's monotonic clock.
        wall_at: the time of the dump, in seconds on the wall clock.
        groups: the groups by name.
        phases, arrivals, steps: the traced phases of collectives, arrivals of gradients, and training steps.
        left_out: the number of events for which the trace had no room.
    """

    path: Path
    rank: int | None
    pid: int
    host: str
    machine: str
    reason: str
    stacks: str
    package: str
    at: float
    wall_at: float
    groups: dict[str, DumpedGroup]
    phases: tuple[Phase, ...]
    arrivals: tuple[Arrival, ...]
    steps: tuple[TracedStep, ...]
    left_out: int
    raised_at: str = ""


def read_dumps(paths: Iterable[Path]) -> tuple[list[Dump], list[Dump]]:
    """Reads the dumps of a run.

    Args:
        paths: the paths of dumps, or of folders that contain dumps.

    Returns:
        The latest dump of each rank, in the order of ranks; and the other dumps, which are older or do not name their
        rank.

    Raises:
        InvalidArgument: there are no dumps, a file is not a dump, or no dump contains a rank.
    """
    paths = list(paths)
    contents = [(file, content) for path in paths for file, content in _contents(path)]
    if not contents:
        raise InvalidArgument(
            f"there are no dumps in {', '.join(map(str, paths))}: no *.json that gradsync has written"
        )
    dumps = sorted((_dump(file, content) for file, content in contents), key=lambda dump: dump.wall_at)
    latest = {dump.rank: dump for dump in dumps if dump.rank is not None}
    if not latest:
        raise InvalidArgument(
            f"no dump in {', '.join(map(str, paths))} contains a rank: all were written before init_process_group()"
        )
    kept = sorted(latest.values(), key=lambda dump: dump.rank or 0)
    return kept, [dump for dump in dumps if dump not in kept]


def _contents(path: Path) -> Iterator[tuple[Path, Any]]:
    """Yields the path and the content of a file, or of each JSON file in a folder.

    Chrome traces, which `gradsync trace --out` may have written into the folder, are left out.
    """
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
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InvalidArgument(
            f"{path} is no dump of gradsync's flight recorder: it has no field 'format' with the value {FORMAT!r}"
        )
    try:
        check(content, SCHEMA)
        for digest, facts in content["calls"].items():
            check(facts, _BUCKET if "bucket" in facts else _CALL, f"calls.{digest}")
        groups = [_dumped_group(group, f"groups[{n}]", content["calls"]) for n, group in enumerate(content["groups"])]
    except DamagedError as error:
        raise InvalidArgument(f"{path} is damaged: {printable(str(error))}; leave out this file") from None
    trace = content.get("trace") or tracing.Tracer().content()
    return Dump(
        path,
        content["rank"],
        content["pid"],
        content["host"],
        content["machine"],
        content["reason"],
        content["stacks"],
        content["package"],
        content["monotonic_seconds"],
        content["wall_seconds"],
        {group.name: group for group in groups},
        tuple([Phase(*row) for row in trace["phases"]]),
        tuple([Arrival(*row) for row in trace["arrivals"]]),
        tuple([TracedStep(*row) for row in trace["steps"]]),
        trace["left_out"],
        content.get("raised_at", ""),
    )


def printable(line: str) -> str:
    """Returns a line with escapes for control characters, because a dump may contain any text."""
    return "".join([c if c.isprintable() else c.encode("unicode_escape").decode() for c in line])


def _dumped_group(content: dict[str, Any], place: str, calls: dict[str, dict[str, Any]]) -> DumpedGroup:
    found = []
    for number, entry in enumerate(content["entries"]):
        digest = entry["call"]
        if digest not in calls:
            raise _refused(f"{place}.entries[{number}].call", "one of the calls", digest)
        found.append(
            DumpedCall(
                entry["number"],
                int(digest, 16),
                call_text(calls[digest]),
                entry["state"],
                entry["began"],
                entry["ended"],
                entry.get("is_message", False),
                calls[digest],
            )
        )
    return DumpedGroup(content["group"], tuple(content["ranks"]), content["begun"], tuple(found))


def call_text(facts: dict[str, Any]) -> str:
    """Returns the description of a collective, such as "all_reduce(mean) of bucket 3 [conv1.weight, 12 more]"."""
    if "bucket" not in facts:
        return str(facts["what"])
    names = names_text(facts["gradients"], shown=1)
    which = f"bucket {facts['bucket']}" if facts["bucket"] >= 0 else "several buckets"  # they are adjacent in memory
    callback = f" (callback {facts['callback']})" if "callback" in facts else ""
    return f"{facts['collective']}({facts['detail']}) of {which} {names}{callback}"
