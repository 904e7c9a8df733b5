"""The report of `gradsync trace`: first the rank, the collective and the gradients of each problem, then all ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise, takewhile, zip_longest
from pathlib import Path
from statistics import median

from gradsync.diagnostics.chrome_trace import Clock, chrome_trace
from gradsync.diagnostics.compare import (
    Call,
    Divergence,
    History,
    Wait,
    circle,
    circle_text,
    compared,
    first_divergence,
)
from gradsync.diagnostics.dump import Dump, DumpedCall, DumpedGroup, printable, read_dumps
from gradsync.diagnostics.recorder import names_text, seconds_text
from gradsync.errors import InvalidArgument, name_ranks


def report_dumps(paths: Sequence[str], out: str | None) -> int:
    """Prints a report on dumps, and writes the Chrome trace of the dumps.

    Args:
        paths: the paths of dumps, or of folders that contain dumps.
        out: the path of the Chrome trace; None writes no Chrome trace.

    Returns:
        The exit code: 1 if a rank raised an exception, a collective failed, ranks differ, or ranks wait for each other
        in a circle; otherwise 0. A rank that is only late does not make the exit code 1, because in a healthy run some
        rank is always late.

    Raises:
        InvalidArgument: there are no dumps, a dump cannot be read, or the Chrome trace cannot be written.
    """
    latest, earlier = read_dumps(map(Path, paths))
    print("\n".join(report(latest, earlier)))
    if out is not None:
        try:
            Path(out).write_text(json.dumps(chrome_trace(latest)))
        except OSError as error:
            raise InvalidArgument(f"--out {out!r} cannot be written: {error.strerror}") from None
        print(f"{out}: open it in https://ui.perfetto.dev or chrome://tracing")
    calls = [call for dump in latest for group in dump.groups.values() for call in group.calls]
    has_failed = any(dump.raised_at for dump in latest) or any(call.state == "failed" for call in calls)
    return int(has_failed or bool(divergences(latest)) or circle(waits(latest)) is not None)


def report(dumps: Sequence[Dump], earlier: Sequence[Dump] = ()) -> list[str]:
    """Returns the lines of the report.

    The lines describe exceptions, differences between ranks, ranks that wait in a circle, and late ranks; then each
    group and each rank.

    Args:
        dumps: one dump of each rank.
        earlier: the other dumps, which the report names but does not use.
    """
    groups = _groups(dumps)
    lines = _raised(dumps)
    lines += [line for name, of_ranks in groups.items() for line in _differences(name, of_ranks)]
    waiting = circle(waits(dumps))
    if waiting is not None:
        lines.append(circle_text(waiting))
    is_explained = bool(lines)
    lines += [line for name, of_ranks in groups.items() for line in _behind(name, of_ranks, dumps)]
    lines += [line for name, of_ranks in groups.items() for line in _missing(name, of_ranks)]
    is_good_trace = not lines and _is_good_trace(dumps)
    if not is_explained:
        lines += time_spent(dumps)
        if not is_good_trace:
            lines.append("no rank differs from another in the collectives that can be compared")
    for name, of_ranks in groups.items():
        lines += _progress(name, of_ranks)
    lines += [line for dump in dumps for line in _whereabouts(dump, says_why=not is_good_trace)]
    lines += _left_out(dumps, earlier)
    return [printable(line) for line in lines]


def _raised(dumps: Sequence[Dump]) -> list[str]:
    """Returns a text for each exception that ended ranks, the earliest first, with the line of code that raised it."""
    by_error: dict[str, list[int]] = {}
    for dump in sorted(dumps, key=lambda dump: dump.wall_at):
        if dump.raised_at:
            what = re.sub(rf"\brank {dump.rank}/\d+: ", "", dump.reason, count=1)
            by_error.setdefault(f"failed: {what}, at {dump.raised_at}", []).append(_rank(dump))
    return [f"{name_ranks(sorted(ranks))} {text}" for text, ranks in by_error.items()]


def time_spent(dumps: Sequence[Dump]) -> list[str]:
    """Returns lines with the shares of time in the traced steps, and with the rank that the others waited for longest.

    There are no lines if no rank has traced two steps. The first step is left out, because gradsync makes its buffers
    and plans during this step. The shares are fractions of the time from the end of the first step to the end of the
    last step.
    """
    traced = [dump for dump in dumps if len(dump.steps) > 1]
    if not traced:
        return []
    periods = [after - before for dump in traced for before, after in pairwise(_ends_of_steps(dump))]
    lines = [f"{max(len(dump.steps) for dump in traced)} steps, {seconds_text(median(periods))} each at the median"]
    by_rank = sorted(((_shares(dump), dump) for dump in traced), key=lambda told: -told[0]["outside of gradsync"])
    if len(by_rank) > _MOST_RANKS:
        lines.append(f"of {len(by_rank)} ranks, the one that waited least and the one that waited most:")
        by_rank = [by_rank[0], by_rank[-1]]
    for shares, dump in sorted(by_rank, key=lambda told: _rank(told[1])):
        named = sorted(shares.items(), key=lambda share: -share[1])
        parts = ", ".join(f"{100 * share:.0f} % {name}" for name, share in named if share >= _LEAST_SHARE)
        lines.append(f"  rank {dump.rank}: {parts}")
    return [*lines, *_who_came_last(traced)]


_MOST_RANKS = 3
_LEAST_SHARE = 0.005


def _ends_of_steps(dump: Dump) -> list[float]:
    return sorted(step.ended for step in dump.steps)


def _shares(dump: Dump) -> dict[str, float]:
    """Returns the share of time of each phase of a rank's collectives, and the share outside of gradsync.

    A small collective has no phases. The share "in small collectives" is the whole time of all small collectives,
    including the time in which the rank waits.
    """
    first, *_, last = _ends_of_steps(dump)
    spans = [(phase.name, phase.began, phase.ended) for phase in dump.phases]
    with_phases = {(phase.group, phase.number) for phase in dump.phases}
    spans += [
        ("in small collectives", call.began, _end(call))
        for group in dump.groups.values()
        for call in group.calls
        if not call.is_message and (group.name, call.number) not in with_phases
    ]
    taken: dict[str, float] = {}
    for name, began, ended in spans:
        inside = min(ended, last) - max(began, first)
        if inside > 0:
            taken[name] = taken.get(name, 0.0) + inside
    shares = {name: seconds / (last - first) for name, seconds in taken.items()} if last > first else {}
    return {"outside of gradsync": max(0.0, 1.0 - sum(shares.values())), **shares}


def _is_good_trace(dumps: Sequence[Dump]) -> bool:
    """Whether all ranks traced steps and ended all their collectives, so that the report needs only the times."""
    calls = [call for dump in dumps for group in dump.groups.values() for call in group.calls]
    return all(len(dump.steps) > 1 for dump in dumps) and all(call.state == "ended" for call in calls)


def _who_came_last(traced: Sequence[Dump]) -> list[str]:
    """Returns a line that names the rank for which the other ranks waited longest.

    The line is based on the times at which the ranks began the same collectives.
    """
    clock = Clock(traced)
    began: dict[tuple[str, int, int], dict[int, float]] = {}
    for dump in traced:
        first = _ends_of_steps(dump)[0]
        for group in dump.groups.values():
            for call in group.calls:
                if not call.is_message and call.began >= first:
                    at = clock.microseconds(dump, call.began)
                    began.setdefault((group.name, call.number, call.digest), {})[_rank(dump)] = at
    met = [ranks for ranks in began.values() if len(ranks) > 1]
    late: dict[int, list[float]] = {}
    for ranks in met:
        *_, (before, _), (latest, last) = sorted((at, rank) for rank, at in ranks.items())
        late.setdefault(last, []).append((latest - before) / 1e6)
    if not late:
        return []
    rank, lateness = max(late.items(), key=lambda told: sum(told[1]))
    waited = seconds_text(sum(lateness))
    steps = max(len(dump.steps) for dump in traced) - 1
    during = f"in {steps} steps" if steps > 1 else "in 1 step"
    came = f"rank {rank} came last to {len(lateness)} of {len(met)} collectives"
    return [f"  {came}: the others waited {waited} for it {during}"]


def _missing(name: str, of_ranks: dict[int, DumpedGroup]) -> list[str]:
    """Returns lines that name the ranks without a dump, and the collective that the other ranks did not end."""
    missing = sorted(_without_dump(of_ranks))
    unended: dict[int, tuple[DumpedCall, list[int]]] = {}
    for rank, group in of_ranks.items():
        for call in group.calls:
            if call.state != "ended" and not call.is_message:
                unended.setdefault(call.number, (call, []))[1].append(rank)
    if not missing or not unended:
        return []
    number, (call, ranks) = max(unended.items())
    where = f"{name_ranks(ranks)} did not end #{number} of group {name!r}, {call.what}"
    return [f"there is no dump of {name_ranks(missing)}; {where}", *_gradients(call)]


def _gradients(call: DumpedCall) -> list[str]:
    names = call.facts["gradients"] if "bucket" in call.facts else []  # a flush has only their number here
    return [f"  gradients: {names_text(names, _MOST_GRADIENTS)[1:-1]}"] if names else []


def divergences(dumps: Sequence[Dump]) -> list[Divergence]:
    """Returns the first difference in each group whose ranks differ."""
    found = [
        first_divergence(name, [_history(rank, group) for rank, group in of_ranks.items()])
        for name, of_ranks in _groups(dumps).items()
    ]
    return [divergence for divergence in found if divergence is not None]


def waits(dumps: Iterable[Dump]) -> list[Wait]:
    """Returns each wait of a rank in a collective that has not ended, with the members that have not begun it."""
    dumps = list(dumps)
    begun = {(_rank(dump), group.name): group.begun for dump in dumps for group in dump.groups.values()}
    return [
        Wait(
            _rank(dump),
            group.name,
            call.number,
            call.what,
            tuple(other for other in group.ranks if begun.get((other, group.name), call.number) < call.number),
        )
        for dump in dumps
        for group in dump.groups.values()
        for call in group.calls
        if call.state != "ended" and not call.is_message  # a collective that failed at its deadline was a wait too
    ]


def _groups(dumps: Sequence[Dump]) -> dict[str, dict[int, DumpedGroup]]:
    """Returns [name][rank] -> the group in that rank's dump.

    Groups of a single rank are left out if there are several dumps.
    """
    names = list(dict.fromkeys(name for dump in dumps for name in dump.groups))
    groups = {
        name: {
            _rank(dump): dump.groups[name]
            for dump in dumps
            if name in dump.groups and (len(dump.groups[name].ranks) > 1 or len(dumps) == 1)
        }
        for name in names
    }
    return {name: of_ranks for name, of_ranks in groups.items() if of_ranks}


def _differences(name: str, of_ranks: dict[int, DumpedGroup]) -> list[str]:
    divergence = first_divergence(name, [_history(rank, group) for rank, group in of_ranks.items()])
    if divergence is None:
        return []
    calls = [(ranks, _call(of_ranks[ranks[0]], divergence.number)) for _, ranks in divergence.sides]
    are_buckets = all("gradients" in call.facts for _, call in calls)
    same_words = len({call.what for call, _ in divergence.sides}) < len(divergence.sides)
    return [divergence.text(), *(_first_different_lines(calls, are_buckets) if are_buckets or same_words else [])]


def _first_different_lines(calls: Sequence[tuple[Sequence[int], DumpedCall]], are_buckets: bool) -> list[str]:
    """Compares descriptions of one collective. Returns the first line that differs, from each description.

    The first line of a bucket's description has the number of gradients, and each other line describes one gradient.
    This function compares the number of gradients last.
    """
    descriptions = [call.facts["description"] for _, call in calls]
    lines = list(zip_longest(*descriptions, fillvalue="(no further gradient)" if are_buckets else "(nothing)"))
    for line in [*lines[1:], *lines[:1]] if are_buckets else lines:
        if len(set(line)) > 1:
            return [f"  {name_ranks(ranks)}: {text}" for (ranks, _), text in zip(calls, line, strict=True)]
    return []


def _call(group: DumpedGroup, number: int) -> DumpedCall:
    return next(call for call in group.calls if call.number == number and not call.is_message)


_MOST_GRADIENTS = 8


def _behind(name: str, of_ranks: dict[int, DumpedGroup], dumps: Sequence[Dump]) -> list[str]:
    """Returns lines about late ranks: the collective that they have not begun, its gradients, and the lines of code."""
    lines = []
    counts = sorted({group.begun for group in of_ranks.values()})
    for begun in counts[:-1]:
        behind = sorted(rank for rank, group in of_ranks.items() if group.begun == begun)
        ahead = {rank: group for rank, group in of_ranks.items() if group.begun > begun}
        missed = [c for g in ahead.values() for c in g.calls if c.number == begun + 1 and not c.is_message]
        if not missed:  # no rank remembers it
            continue
        has = "has" if len(behind) == 1 else "have"
        begun_by = f"{name_ranks(sorted(ahead))} {'has' if len(ahead) == 1 else 'have'}"
        missing = f"#{begun + 1} of group {name!r}, {missed[0].what}"
        lines.append(f"{name_ranks(behind)} {has} not begun {missing}, which {begun_by} begun")
        lines += _gradients(missed[0])
        lines += [
            f"  rank {d.rank}{place[1:]}" for d in dumps if _rank(d) in behind[:_MOST_RANKS] for place in _place(d)
        ]
    return lines


def _history(rank: int, group: DumpedGroup) -> History:
    """Returns a rank's collectives by number, so that they can be compared."""
    calls = {call.number: Call(call.digest, call.what) for call in group.calls if not call.is_message}
    return History(rank, group.begun, calls)


def _without_dump(of_ranks: dict[int, DumpedGroup]) -> set[int]:
    return {rank for group in of_ranks.values() for rank in group.ranks} - of_ranks.keys()


def _progress(name: str, of_ranks: dict[int, DumpedGroup]) -> list[str]:
    """Returns a line with the number of collectives that ranks have begun, and the collectives that were compared."""
    begun: dict[int, list[int]] = {}
    for rank, group in of_ranks.items():
        begun.setdefault(group.begun, []).append(rank)
    *behind, (most, first) = sorted(begun.items())
    line = f"group {name!r}: {name_ranks(first)} {'has' if len(first) == 1 else 'have'} begun {most} collectives"
    for count, ranks in reversed(behind):
        line += f"; {name_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} begun {count}"
    numbers = compared([_history(rank, group) for rank, group in of_ranks.items()])
    if len(of_ranks) > 1:
        line += (
            f"; compared: #{numbers[0]} to #{numbers[-1]}" if numbers else "; no two ranks remember the same collective"
        )
        if numbers and numbers[0] > 1:
            line += ", earlier collectives are not remembered"
    missing = sorted(_without_dump(of_ranks))
    if missing:
        line += f"; no dump of {name_ranks(missing)}"
    return [line]


def _whereabouts(dump: Dump, *, says_why: bool) -> list[str]:
    """Returns lines with a rank's last collective, its duration, the line of code, and the reason for the dump."""
    who = f"rank {dump.rank} (pid {dump.pid} on {dump.host})"
    running = [(group, call) for group in dump.groups.values() for call in group.calls if call.state == "runs"]
    last = max((call for group in dump.groups.values() for call in group.calls), key=_end, default=None)
    if running:
        told = [f"{who} is in {_running(group, call, dump.at)}" for group, call in running]
    elif last is None:
        told = [f"{who} has begun no collective"]
    else:
        verb = "failed in" if last.state == "failed" else "is not in a collective; its last one was"
        told = [f"{who} {verb} {last.what}, {seconds_text(max(dump.at - _end(last), 0.0))} before the dump"]
    return [*told, *_place(dump), *([f"  dumped because: {dump.reason}"] if says_why else [])]


def _place(dump: Dump) -> list[str]:
    """Returns the line of code that raised the rank's exception; without one, the line that the rank is running."""
    if dump.raised_at:
        return [f"  at {dump.raised_at}"]
    _, *lines = dump.stacks.splitlines() or [""]  # the main thread comes first
    calls = [line.strip() for line in takewhile(lambda line: line.startswith("  "), lines) if line[2:3].strip()]
    return [f"  at {call}" for call in calls if not call.startswith(dump.package)][:1]


def _running(group: DumpedGroup, call: DumpedCall, at: float) -> str:
    place = f"after #{call.number}" if call.is_message else f"#{call.number}"
    return f"{call.what}, {place} of group {group.name!r}, for {seconds_text(max(at - call.began, 0.0))}"


def _end(call: DumpedCall) -> float:
    return call.began if call.ended is None else call.ended


def _left_out(dumps: Sequence[Dump], earlier: Sequence[Dump]) -> list[str]:
    lines = [f"{dump.path.name} is left out: " + _why_left_out(dump) for dump in earlier]
    full = [dump for dump in dumps if dump.left_out]
    return [*lines, *(f"rank {dump.rank}: the trace had no room for {dump.left_out} more events" for dump in full)]


def _why_left_out(dump: Dump) -> str:
    return "it does not name its rank" if dump.rank is None else f"there is a later dump of rank {dump.rank}"


def _rank(dump: Dump) -> int:
    return 0 if dump.rank is None else dump.rank
