"""The words for ranks that do not come to a collective: the notice while others wait, and the report at the deadline.

Part of the server's core, without I/O, used by `absence`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradsync.errors import name_ranks
from gradsync.rendezvous.finding import Finding
from gradsync.rendezvous.messages import clip_text
from gradsync.rendezvous.roster import MemberState, Roster
from gradsync.rendezvous.waiting import verdict_room_bytes

_MAX_NOTICED = 4
_MAX_REPORTS = 32
_MAX_SUMMARY_BYTES = 8192
_NO_ANSWER = "(it did not answer within the time of the inquiry)"
_NO_ANSWERS = {
    Finding.RUNNING: f"(it did not answer, though it {Finding.RUNNING.value}: {Finding.RUNNING.detail})",
    Finding.UNKNOWN: "(it did not answer; its process cannot be seen from the server)",
}


@dataclass(frozen=True, slots=True)
class Absence:
    """Who waits where, for how long, for whom. `position` is OF_MESSAGES in a message between two ranks."""

    group: str
    position: int
    what: str
    waited_seconds: float
    waiting: tuple[int, ...]
    missing: tuple[int, ...]


def notice(roster: Roster, absences: Sequence[Absence]) -> str:
    """Returns the line for the operator while ranks wait: in one collective, or in messages, each in its own."""
    absences = absences[:_MAX_NOTICED]
    waiting = {rank for absence in absences for rank in absence.waiting}
    where = {
        rank: _whereabouts(roster, rank, absence)
        for absence in absences
        for rank in absence.missing[:_MAX_NOTICED]
        if rank not in waiting
    }
    return "; ".join([", ".join(map(_noticed, absences)), *where.values()])


def _noticed(absence: Absence) -> str:
    verb = "waits" if len(absence.waiting) == 1 else "wait"
    since = f"since {absence.waited_seconds:.3g} s"
    who = f"{name_ranks(absence.waiting)} {verb} in {absence.what}"
    if not absence.missing:
        return f"{who} {since}; every rank has begun it"
    return f"{who} for {name_ranks(absence.missing)} {since}"


def report(
    roster: Roster,
    absences: Sequence[Absence],
    reports: dict[int, str],
    findings: dict[int, Finding],
    disagreements: Sequence[str] = (),
) -> str:
    """Returns the text of the verdict: a summary, then what each rank says it does, the missing ones first.

    Args:
        roster: the members.
        absences: who waited for whom; of messages all that have reached the deadline, the first one first.
        reports: what each rank has answered.
        findings: what was found of ranks that have not answered.
        disagreements: where the ranks' histories differ, and who waits for whom in a circle.
    """
    absence = absences[0]
    sections = [
        (_heading(roster, ranks, absence), text)
        for ranks, text in _grouped(roster, absence.missing, reports, findings)
        + _grouped(roster, _others(roster, absence), reports, findings)
    ]
    summary = clip_text("\n".join([*map(_summary, absences), *disagreements]), _MAX_SUMMARY_BYTES)
    return _fit(summary, sections, verdict_room_bytes(len(absence.missing)))


def _summary(absence: Absence) -> str:
    text = f"{name_ranks(absence.waiting)} waited {absence.waited_seconds:.3g} s in {absence.what}"
    return f"{text} for {name_ranks(absence.missing)}" if absence.missing else f"{text}, which every rank has begun"


def _others(roster: Roster, absence: Absence) -> list[int]:
    return [rank for rank, _ in roster.present() if rank not in set(absence.missing)]


def _whereabouts(roster: Roster, rank: int, absence: Absence) -> str:
    process = roster.process(rank)
    who = f"rank {rank} ({process})" if process else f"rank {rank}"
    member = roster.members[rank]
    if member.state is not MemberState.PRESENT:
        return f"{who} has left"
    begun = member.positions.get(absence.group)
    progress = "" if begun is None else f", and has begun {begun} collective{'' if begun == 1 else 's'}"
    return f"{who} is in phase {roster.phase!r}{progress}"


def _grouped(
    roster: Roster, ranks: Sequence[int], reports: dict[int, str], findings: dict[int, Finding]
) -> list[tuple[list[int], str]]:
    """Returns these ranks' reports, equal ones once, with the ranks that gave them."""
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        text = reports.get(rank)
        if text is None and roster.members[rank].state is not MemberState.PRESENT:
            text = "(it has left, by an orderly close)"
        elif text is None:
            text = _NO_ANSWERS.get(findings.get(rank, Finding.GONE), _NO_ANSWER)
        groups.setdefault(text, []).append(rank)
    return [(ranks, text) for text, ranks in groups.items()]


def _heading(roster: Roster, ranks: list[int], absence: Absence) -> str:
    if ranks[0] in absence.missing and len(ranks) == 1:
        return f"missing: {_whereabouts(roster, ranks[0], absence)}"
    if len(ranks) > 1:
        return f"{'missing: ' if ranks[0] in absence.missing else ''}{name_ranks(ranks)}"
    process = roster.process(ranks[0])
    return f"rank {ranks[0]} ({process})" if process else f"rank {ranks[0]}"


def _fit(summary: str, sections: list[tuple[str, str]], max_bytes: int) -> str:
    """Returns summary and sections in so many bytes; a short section leaves its share to the later ones."""
    left_out = len(sections) - _MAX_REPORTS
    sections = sections[:_MAX_REPORTS]
    tail = f"\n\nand {left_out} more reports, left out here" if left_out > 0 else ""
    room = max_bytes - len((summary + tail).encode())
    parts = [summary]
    for index, (heading, text) in enumerate(sections):
        share = room // (len(sections) - index)
        part = clip_text(f"\n\n{heading}:\n{_indent(text)}", share)
        room -= len(part.encode())
        parts.append(part)
    return "".join(parts) + tail


def _indent(text: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in text.strip("\n").splitlines())
