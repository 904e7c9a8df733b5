"""The report of `gradsync trace`: first the rank, the collective and the arrays of each problem, then all ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise, takewhile, zip_longest
from pathlib import Path
from statistics import median

from gradsync.diagnostics.chrome_trace import chrome_trace, clock_offsets
from gradsync.diagnostics.compare import Call, History, Wait, circle, circle_text, first_divergence
from gradsync.diagnostics.dump import Dump, Entry, Group, printable, read_dumps
from gradsync.diagnostics.recorder import names_text, seconds_text
from gradsync.errors import InvalidArgument, name_ranks

_MOST_RANKS = 3
_LEAST_SHARE = 0.005
_MOST_ARRAYS = 8


def report_dumps(paths: Sequence[str], out: str | None) -> int:
    """Prints a report on dumps. If `out` is given, this function also writes a Chrome trace of the dumps.

    Args:
        paths: the paths of dumps, or of folders that contain dumps.
        out: the path of the Chrome trace; None writes no Chrome trace.

    Returns:
        The exit code: 1 if a rank raised an exception, a collective or message failed, ranks differ, or ranks wait for
        each other in a circle; otherwise 0. A rank that is only late does not make the exit code 1, because ranks are
        late in a healthy run too.

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
        print(f"{out}: open this file in https://ui.perfetto.dev or chrome://tracing")
    return int(bool(_problems(latest)) or any("failed" in _states(dump) for dump in latest))


def report(dumps: Sequence[Dump], earlier: Sequence[Dump] = ()) -> list[str]:
    """Returns the lines of the report.

    The first lines describe exceptions, differences between ranks, ranks that wait in a circle, and late ranks. If
    there is no exception, difference or circle, lines on the time of a traced run follow. The last lines describe each
    group, each rank and the dumps that are left out.

    Args:
        dumps: one dump of each rank.
        earlier: the other dumps, which the report names but does not use.
    """
    groups = _groups(dumps)
    lines = problems = _problems(dumps)
    for name, of_ranks in groups.items():
        lines = [*lines, *_late_ranks(name, of_ranks, dumps), *_missing_dumps(name, of_ranks)]
    is_good_trace = not lines and all(len(dump.steps) > 1 and _states(dump) <= {"ended"} for dump in dumps)
    if not problems:
        lines = [*lines, *_time_spent(dumps)]
    if not problems and not is_good_trace:
        lines.append("no rank differs from another in the collectives that can be compared")
    lines += [_progress(name, of_ranks) for name, of_ranks in groups.items()]
    lines += [line for dump in dumps for line in _whereabouts(dump, says_why=not is_good_trace)]
    lines += [f"{Path(dump.path).name} is left out: {_why_left_out(dump)}" for dump in earlier]
    return [printable(line) for line in lines]


def _groups(dumps: Sequence[Dump]) -> dict[str, dict[int, Group]]:
    """Returns, for the name of each group, the group as each rank's dump shows it, by rank.

    Groups of a single rank are left out if there are several dumps.
    """
    groups: dict[str, dict[int, Group]] = {}
    for dump in dumps:
        for name, group in dump.groups.items():
            if len(group.ranks) > 1 or len(dumps) == 1:
                groups.setdefault(name, {})[_rank(dump)] = group
    return groups


def _rank(dump: Dump) -> int:
    return 0 if dump.rank is None else dump.rank


def _states(dump: Dump) -> set[str]:
    """Returns the states of the rank's collectives and messages."""
    return {entry.state for group in dump.groups.values() for entry in group.entries}


# Problems.


def _problems(dumps: Sequence[Dump]) -> list[str]:
    """Returns lines about exceptions, differences between ranks, and ranks that wait for each other in a circle."""
    lines = _raised(dumps)
    groups = _groups(dumps)
    for name, of_ranks in groups.items():
        lines += _differences(name, of_ranks)
    waits = [
        Wait(rank, name, entry.number, group.calls[entry.call].what, _not_begun(entry, group, of_ranks))
        for name, of_ranks in groups.items()
        for rank, group in of_ranks.items()
        for entry in group.collectives()
        if entry.state != "ended"  # a collective that failed at its deadline shows for whom the rank waited
    ]
    waiting = circle(waits)
    return lines if waiting is None else [*lines, circle_text(waiting)]


def _raised(dumps: Sequence[Dump]) -> list[str]:
    """Returns a text for each exception that ended ranks, the earliest first, with the line of code that raised it."""
    by_error: dict[str, list[int]] = {}
    for dump in sorted(dumps, key=lambda dump: dump.wall_seconds):
        if dump.raised_at:
            what = re.sub(rf"\brank {dump.rank}/\d+: ", "", dump.reason, count=1)
            by_error.setdefault(f"failed: {what}, at {dump.raised_at}", []).append(_rank(dump))
    return [f"{name_ranks(sorted(ranks))} {text}" for text, ranks in by_error.items()]


def _differences(name: str, of_ranks: dict[int, Group]) -> list[str]:
    """Returns lines with the first collective in which the ranks of a group differ, and with its first different array.

    There is no second line if the first line already shows the difference.
    """
    histories = {rank: _history(group) for rank, group in of_ranks.items()}
    divergence = first_divergence(name, histories)
    if divergence is None:
        return []
    sides = [(ranks, _lines(of_ranks[ranks[0]], divergence.number)) for _, ranks in divergence.sides]
    have_arrays = all(len(lines) > 1 for _, lines in sides)
    if not have_arrays and len({call.what for call, _ in divergence.sides}) == len(divergence.sides):
        return [divergence.text()]  # this text already shows the difference
    compared = list(zip_longest(*(lines for _, lines in sides), fillvalue="(nothing)"))
    # The first line of a description contains the number of arrays, so the first lines are compared last.
    different = next((each for each in [*compared[1:], *compared[:1]] if len(set(each)) > 1), compared[0])
    pairs = zip(sides, different, strict=True)
    return [divergence.text(), *(f"  {name_ranks(ranks)}: {line}" for (ranks, _), line in pairs)]


def _history(group: Group) -> History:
    return {entry.number: Call(entry.call, group.calls[entry.call].what) for entry in group.collectives()}


def _lines(group: Group, number: int) -> tuple[str, ...]:
    """Returns the description of the collective with this number."""
    return next(group.calls[entry.call].lines for entry in group.collectives() if entry.number == number)


def _not_begun(entry: Entry, group: Group, of_ranks: dict[int, Group]) -> tuple[int, ...]:
    """Returns the members with a dump that have not begun a collective."""
    return tuple(rank for rank in group.ranks if rank in of_ranks and of_ranks[rank].begun < entry.number)


# Late ranks and ranks without a dump.


def _late_ranks(name: str, of_ranks: dict[int, Group], dumps: Sequence[Dump]) -> list[str]:
    """Returns lines about late ranks: the collective that they have not begun, its arrays, and the lines of code."""
    lines = []
    for begun in sorted({group.begun for group in of_ranks.values()})[:-1]:
        late = sorted(rank for rank, group in of_ranks.items() if group.begun == begun)
        ahead = {rank: group for rank, group in of_ranks.items() if group.begun > begun}
        missed = [(group, each) for group in ahead.values() for each in group.collectives() if each.number == begun + 1]
        if missed:  # otherwise no rank remembers this collective
            what, *arrays = _described(*missed[0])
            where = f"#{begun + 1} of group {name!r}, {what}, which {_have(sorted(ahead))} begun"
            lines += [f"{_have(late)} not begun {where}", *arrays]
            shown = [dump for dump in dumps if _rank(dump) in late[:_MOST_RANKS]]
            lines += [f"  rank {dump.rank}{place[1:]}" for dump in shown for place in _place(dump)]
    return lines


def _missing_dumps(name: str, of_ranks: dict[int, Group]) -> list[str]:
    """Returns lines that name the ranks without a dump, and the collective that the other ranks did not end."""
    missing = _without_dump(of_ranks)
    unended = [
        (entry.number, rank, entry)
        for rank, group in of_ranks.items()
        for entry in group.collectives()
        if entry.state != "ended"
    ]
    if not missing or not unended:
        return []
    number, rank, entry = max(unended, key=lambda each: each[0])
    ranks = [rank for each, rank, _ in unended if each == number]
    what, *arrays = _described(of_ranks[rank], entry)
    where = f"{name_ranks(ranks)} did not end #{number} of group {name!r}, {what}"
    return [f"there is no dump of {name_ranks(missing)}; {where}", *arrays]


def _without_dump(of_ranks: dict[int, Group]) -> list[int]:
    return sorted({rank for group in of_ranks.values() for rank in group.ranks} - of_ranks.keys())


def _described(group: Group, entry: Entry) -> list[str]:
    """Returns a collective in one line, and a second line with the arrays that its description lists."""
    call = group.calls[entry.call]
    arrays = names_text(call.lines[1:], _MOST_ARRAYS)[1:-1]
    return [call.what, *([f"  with {arrays}"] if arrays else [])]


def _have(ranks: Sequence[int]) -> str:
    return f"{name_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'}"


# The time of a traced run.


def _time_spent(dumps: Sequence[Dump]) -> list[str]:
    """Returns lines with the shares of time in the traced steps, and with the rank for which others waited longest.

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
        lines.append(f"of {len(by_rank)} ranks, the two with the most and the least time outside of gradsync:")
        by_rank = [by_rank[0], by_rank[-1]]
    for shares, dump in sorted(by_rank, key=lambda told: _rank(told[1])):
        named = sorted(shares.items(), key=lambda share: -share[1])
        parts = ", ".join(f"{100 * share:.0f} % {name}" for name, share in named if share >= _LEAST_SHARE)
        lines.append(f"  rank {dump.rank}: {parts}")
    return [*lines, *_who_came_last(traced)]


def _ends_of_steps(dump: Dump) -> list[float]:
    return sorted(step.ended for step in dump.steps)


def _shares(dump: Dump) -> dict[str, float]:
    """Returns the share of time of each phase of a rank's collectives, and the share outside of gradsync.

    Collectives other than all-reduce have no phases, and small all-reduces over shared memory have none. The share "in
    small collectives" is the whole time of all collectives without phases, including the time in which the rank waits.
    """
    first, *_, last = _ends_of_steps(dump)
    spans = [(phase.name, phase.began, phase.ended) for phase in dump.phases]
    with_phases = {(phase.group, phase.number) for phase in dump.phases}
    spans += [
        ("in small collectives", entry.began, _end(entry))
        for name, group in dump.groups.items()
        for entry in group.collectives()
        if (name, entry.number) not in with_phases
    ]
    taken: dict[str, float] = {}
    for name, began, ended in spans:
        inside = min(ended, last) - max(began, first)
        if inside > 0:
            taken[name] = taken.get(name, 0.0) + inside
    shares = {name: seconds / (last - first) for name, seconds in taken.items()} if last > first else {}
    return {"outside of gradsync": max(0.0, 1.0 - sum(shares.values())), **shares}


def _end(entry: Entry) -> float:
    return entry.began if entry.ended is None else entry.ended


def _who_came_last(traced: Sequence[Dump]) -> list[str]:
    """Returns a list with one line about the rank that came last and cost the other ranks the most time.

    For each collective, the line counts the time between the beginnings of the last rank and of the last but one. The
    list is empty if the dumps of two ranks have no collective in common.
    """
    began: dict[tuple[str, int, str], dict[int, float]] = {}
    for dump, offset in zip(traced, clock_offsets(traced), strict=True):
        first = _ends_of_steps(dump)[0]
        for name, group in dump.groups.items():
            for entry in group.collectives():
                if entry.began >= first:
                    began.setdefault((name, entry.number, entry.call), {})[_rank(dump)] = entry.began + offset
    met = [ranks for ranks in began.values() if len(ranks) > 1]
    late: dict[int, list[float]] = {}
    for ranks in met:
        *_, (before, _), (latest, last) = sorted((at, rank) for rank, at in ranks.items())
        late.setdefault(last, []).append(latest - before)
    if not late:
        return []
    rank, lateness = max(late.items(), key=lambda told: sum(told[1]))
    steps = max(len(dump.steps) for dump in traced) - 1
    during = f"in {steps} steps" if steps > 1 else "in 1 step"
    came = f"rank {rank} came last to {len(lateness)} of {len(met)} collectives"
    return [f"  {came}: the others waited {seconds_text(sum(lateness))} for this rank {during}"]


# Each group and each rank.


def _progress(name: str, of_ranks: dict[int, Group]) -> str:
    """Returns a line with the number of collectives that ranks have begun."""
    begun: dict[int, list[int]] = {}
    for rank, group in of_ranks.items():
        begun.setdefault(group.begun, []).append(rank)
    (most, first), *behind = sorted(begun.items(), reverse=True)
    parts = [f"group {name!r}: {_have(first)} begun {most} collectives"]
    parts += [f"{_have(ranks)} begun {count}" for count, ranks in behind]
    if missing := _without_dump(of_ranks):
        parts.append(f"no dump of {name_ranks(missing)}")
    return "; ".join(parts)


def _whereabouts(dump: Dump, *, says_why: bool) -> list[str]:
    """Returns lines with a rank's last collective, its duration, the line of code, and the reason for the dump."""
    who = f"rank {dump.rank} (pid {dump.pid} on {dump.host})"
    entries = [(name, group, entry) for name, group in dump.groups.items() for entry in group.entries]
    told = [
        f"{who} is in {group.calls[entry.call].what}, {'after ' if entry.is_message else ''}#{entry.number} of group "
        f"{name!r}, for {seconds_text(max(dump.monotonic_seconds - entry.began, 0.0))}"
        for name, group, entry in entries
        if entry.state == "runs"
    ]
    if not told and not entries:
        told = [f"{who} has begun no collective"]
    elif not told:
        _, group, last = max(entries, key=lambda each: _end(each[2]))
        verb = "failed in" if last.state == "failed" else "is not in a collective; its last call was"
        since = seconds_text(max(dump.monotonic_seconds - _end(last), 0.0))
        told = [f"{who} {verb} {group.calls[last.call].what}, {since} before the dump"]
    return [*told, *_place(dump), *([f"  dumped because: {dump.reason}"] if says_why else [])]


def _place(dump: Dump) -> list[str]:
    """Returns the line of code that raised the rank's exception; without an exception, the line that the rank runs."""
    if dump.raised_at:
        return [f"  at {dump.raised_at}"]
    _, *lines = dump.stacks.splitlines() or [""]  # the main thread comes first
    calls = [line.strip() for line in takewhile(lambda line: line.startswith("  "), lines) if line[2:3].strip()]
    return [f"  at {call}" for call in calls if not call.startswith(dump.package)][:1]


def _why_left_out(dump: Dump) -> str:
    return "it does not name its rank" if dump.rank is None else f"there is a later dump of rank {dump.rank}"
