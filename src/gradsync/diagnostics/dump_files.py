"""Dumps of the flight recorder, read back: one for each rank of a run. See dump.py, which writes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gradsync.diagnostics.compare import Call, History
from gradsync.diagnostics.dump import FORMAT
from gradsync.diagnostics.dump_fields import (
    BUCKET,
    DIGEST,
    INTEGER,
    INTEGER_OR_NONE,
    INTEGERS,
    MOMENT,
    MOMENT_OR_NONE,
    STATE,
    TEXT,
    TEXTS,
    TRUTH,
    DamagedError,
    Fields,
)
from gradsync.diagnostics.recorder import names_text
from gradsync.diagnostics.tracing import Arrival, Phase, Step, Tracer
from gradsync.errors import InvalidArgument

#: What the traces that `gradsync trace --out` writes hold their events by.
CHROME_TRACE_KEY = "traceEvents"


class DumpedCall(NamedTuple):
    """A collective, or a message, of a dump.

    Attributes:
        number: in its group; of a message, that of the collective before it.
        digest: equal on two ranks that mean the same.
        what: to read.
        state: "runs", "ended" or "failed".
        began, ended: in the monotonic seconds of its machine; `ended` is None while it runs.
        is_message: whether it is a message.
        facts: operation, dtype, shape or gradients, root or peer.
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
    """What one rank remembers of a communicator.

    Attributes:
        name: of the group.
        ranks: its members, as the world counts.
        begun: how many collectives the rank has begun.
        calls: the last ones, oldest first.
    """

    name: str
    ranks: tuple[int, ...]
    begun: int
    calls: tuple[DumpedCall, ...]

    def history(self, rank: int) -> History:
        """Returns its collectives by number, for comparison."""
        calls = {call.number: Call(call.digest, call.what) for call in self.calls if not call.is_message}
        return History(rank, self.begun, calls)


class Dump(NamedTuple):
    """One file.

    Attributes:
        path: of the file.
        rank: as the world counts; None where it was written before the ranks had met, and no launcher told.
        pid, host, machine, reason, stacks: of the process; see gradsync.diagnostics.dump.
        package: where its gradsync lies: tells which lines of the stacks are not of the program.
        at: when it was written, in monotonic seconds of its machine.
        wall_at: the same moment by the wall clock.
        groups: by name.
        phases, arrivals, steps: of a trace.
        left_out: events that the trace had no room for.
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
    steps: tuple[Step, ...]
    left_out: int


def read_dumps(paths: Iterable[Path]) -> tuple[list[Dump], list[Dump]]:
    """Reads the dumps of a run.

    Args:
        paths: files, or folders of them.

    Returns:
        The latest dump of each rank, by rank, and those that an earlier start of the ranks, or none of them, has left.

    Raises:
        InvalidArgument: there are none, one is no dump, or none tells its rank.
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
            f"no dump in {', '.join(map(str, paths))} tells its rank: all were written before init_process_group()"
        )
    kept = sorted(latest.values(), key=lambda dump: dump.rank or 0)
    return kept, [dump for dump in dumps if dump not in kept]


def _contents(path: Path) -> Iterator[tuple[Path, Any]]:
    """Gives a file, or those of a folder but the picture of an earlier `gradsync trace`, which may lie beside them."""
    if not path.is_dir():
        yield path, _content(path)
        return
    for file in sorted(path.glob("*.json")):
        content = _content(file)
        if not (isinstance(content, dict) and CHROME_TRACE_KEY in content):
            yield file, content


def _content(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror}") from error
    except (RecursionError, ValueError) as error:
        raise InvalidArgument(f"{path} is no dump of gradsync's flight recorder: it is not JSON ({error})") from error


def _dump(path: Path, content: Any) -> Dump:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InvalidArgument(f"{path} is no dump of gradsync's flight recorder: it needs format {FORMAT!r}")
    try:
        return _parsed(path, Fields(content))
    except DamagedError as error:
        raise InvalidArgument(f"{path} is damaged: {error}; leave it out") from None


def _parsed(path: Path, content: Fields) -> Dump:
    calls = {digest: _facts(facts) for digest, facts in content.fields("calls").fields_by_name(DIGEST).items()}
    trace = content.fields("trace") if "trace" in content else Fields(Tracer().content())
    groups = [_group(group, calls) for group in content.list_of_fields("groups")]
    return Dump(
        path,
        content.get("rank", INTEGER_OR_NONE),
        content.get("pid", INTEGER),
        content.get("host", TEXT),
        content.get("machine", TEXT),
        content.get("reason", TEXT),
        content.get("stacks", TEXT),
        content.get("package", TEXT),
        content.get("monotonic_seconds", MOMENT),
        content.get("wall_seconds", MOMENT),
        {group.name: group for group in groups},
        trace.rows("phases", Phase, (TEXT, INTEGER, TEXT, MOMENT, MOMENT)),
        trace.rows("arrivals", Arrival, (TEXT, TEXT, MOMENT)),
        trace.rows("steps", Step, (TEXT, INTEGER, MOMENT, MOMENT)),
        trace.get("left_out", INTEGER),
    )


def _facts(facts: Fields) -> dict[str, Any]:
    """Returns what a collective is, with what `what_text` and the report look at."""
    of_bucket = {"bucket": BUCKET, "gradients": TEXTS, "collective": TEXT, "detail": TEXT} if "bucket" in facts else {}
    for name, rule in {"what": TEXT, "description": TEXTS, **of_bucket}.items():
        facts.get(name, rule)
    return facts.plain()


def _group(content: Fields, calls: dict[str, dict[str, Any]]) -> DumpedGroup:
    return DumpedGroup(
        content.get("group", TEXT),
        tuple(content.get("ranks", INTEGERS)),
        content.get("begun", INTEGER),
        tuple(_call(entry, calls) for entry in content.list_of_fields("entries")),
    )


def _call(entry: Fields, calls: dict[str, dict[str, Any]]) -> DumpedCall:
    digest = entry.get("call", TEXT)
    if digest not in calls:
        raise entry.refused("call", "one of the calls", digest)
    return DumpedCall(
        entry.get("number", INTEGER),
        int(digest, 16),
        what_text(calls[digest]),
        entry.get("state", STATE),
        entry.get("began", MOMENT),
        entry.get("ended", MOMENT_OR_NONE),
        entry.get("is_message", TRUTH) if "is_message" in entry else False,
        calls[digest],
    )


def what_text(facts: dict[str, Any]) -> str:
    """Returns a collective to read: of a bucket "all_reduce(mean) of bucket 3 [conv1.weight, 12 more]"."""
    if "bucket" not in facts:
        return str(facts["what"])
    names = names_text(facts["gradients"], shown=1)
    which = f"bucket {facts['bucket']}" if facts["bucket"] >= 0 else "several buckets"  # side by side in memory
    callback = f" (callback {facts['callback']})" if "callback" in facts else ""
    return f"{facts['collective']}({facts['detail']}) of {which} {names}{callback}"
