"""Stuck collectives: warnings while ranks wait, and at the deadline one report for all ranks.

This module is part of the server's core, without I/O; each generation has one `StuckCollectives`. When the first rank
reports that its collective has reached its deadline, the server asks every member for its status (an inquiry). After
the answers, or after 5 s, the generation fails with the same report for all ranks. If a rank did not answer, the
server first inspects its process, which may be stopped (SIGSTOP).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gradsync.diagnostics.compare import Call, History, Wait, circle, circle_text, first_divergence
from gradsync.errors import name_ranks
from gradsync.rendezvous.frames import (
    MAX_STATUS_GROUPS,
    OF_MESSAGES,
    STUCK,
    Action,
    Calls,
    FrameType,
    Inspect,
    Notice,
    Send,
    clip_text,
)
from gradsync.rendezvous.liveness import Peers, ProcessState
from gradsync.rendezvous.roster import Failure, Members, Roster, failure_room_bytes, members_of
from gradsync.rendezvous.store import Request, WaitTable

ANSWER_SECONDS = 5.0  # more than a busy machine takes to run one thread of each rank
_WARNING_SECONDS = 0.3  # the time from the first report to the notice, because waiting ranks report one by one
_INSPECTION_SECONDS = 0.05
_MAX_COLLECTIVES = 1024
_MAX_NOTICED = 4
_MAX_REPORTS = 32
_MAX_SUMMARY_BYTES = 8192
_NO_ANSWER = "(it did not answer the server's status request in time)"
_NO_ANSWERS = {
    ProcessState.RUNNING: f"(it did not answer, but it {ProcessState.RUNNING.value}: {ProcessState.RUNNING.detail})",
    ProcessState.UNKNOWN: "(it did not answer; its process cannot be seen from the server)",
}

#: A rank's status, by group: the number of collectives that the rank has begun, and its last collectives.
Status = Mapping[str, tuple[int, Sequence[tuple[int, int, str, bool]]]]


@dataclass(frozen=True, slots=True)
class StuckCollective:
    """Ranks that wait in a collective, send or receive.

    Attributes:
        group, members: the group's name and members.
        position: the number of the collective; OF_MESSAGES for a send or receive.
        what: the collective in words.
        waited_seconds: how long the ranks have waited.
        waiting: the ranks that wait. In a rank's own report, this rank.
        missing: the ranks for which the waiting ranks wait; empty if the server does not know these ranks.
    """

    group: str
    members: Members
    position: int
    what: str
    waited_seconds: float
    waiting: tuple[int, ...]
    missing: tuple[int, ...]


Reports = dict[int, StuckCollective]  # rank -> its own report


@dataclass(slots=True)
class Inquiry:
    """One status request to all members, and the answers that have arrived.

    Attributes:
        reports: the reports of the ranks that have reached their deadline in the stuck collective, the earliest first.
        due_at: when the inquiry ends, in monotonic seconds.
        unanswered: the ranks that have not answered.
        texts, calls: the answers, by rank.
        has_inspected: whether the processes of the ranks that did not answer have been inspected.
    """

    reports: Reports
    due_at: float
    unanswered: set[int]
    texts: dict[int, str] = field(default_factory=dict)
    calls: dict[int, Calls] = field(default_factory=dict)
    has_inspected: bool = False


class StuckCollectives:
    """Finds the ranks of a generation that wait in a collective, and the ranks for which these ranks wait.

    Args:
        roster: the members.
        waits: the members' open requests at the server.
    """

    def __init__(self, roster: Roster, waits: WaitTable) -> None:
        self._roster = roster
        self._waits = waits
        # By group and position: the ranks that wait in one collective, or in sends and receives (OF_MESSAGES).
        self._reports: dict[tuple[str, int], Reports] = {}
        self._due: dict[tuple[str, int], float] = {}  # when each notice is due, the earliest first
        self._inquiry: Inquiry | None = None  # the only one, because the generation fails when it ends

    def next_deadline(self) -> float | None:
        """Returns when to call `advance`, in monotonic seconds, or None."""
        notice_at = next(iter(self._due.values()), None)
        if self._inquiry is None or notice_at is None:
            return notice_at if self._inquiry is None else self._inquiry.due_at
        return min(notice_at, self._inquiry.due_at)

    def report(
        self,
        request: Request,
        group: str,
        ranks: list[int] | None,
        position: int,
        what: str,
        waited_ms: int,
        missing: list[int] | None,
        is_over: bool,
    ) -> list[Send]:
        """Records that a rank waits for other ranks in a collective, or has waited there until its deadline.

        Each collective gets one notice, 0.3 s after the first report; sends and receives may get more than one notice.
        At the first deadline, the server asks every member for its status.
        """
        known, rank = self._roster.members, request.rank
        members = members_of(ranks, self._roster.world_size) or tuple(other for other in ranks or () if other in known)
        others = tuple(other for other in missing or () if other in known and other != rank)
        stuck = StuckCollective(group, members, position, what, waited_ms / 1000.0, (rank,), others)
        if not is_over:
            self._warn(stuck, request.now)
        elif self._inquiry is None:
            asked = self._roster.present()
            self._inquiry = Inquiry({rank: stuck}, request.now + ANSWER_SECONDS, {rank for rank, _ in asked})
            return [Send(member.connection, FrameType.STATUS_REQUEST, ()) for _, member in asked]
        else:
            first = _first(self._inquiry.reports)
            if (group, position) == (first.group, first.position):
                self._inquiry.reports[rank] = stuck
        return []

    def _warn(self, stuck: StuckCollective, now: float) -> None:
        key = stuck.group, stuck.position
        if key not in self._reports or (stuck.position == OF_MESSAGES and key not in self._due):
            if len(self._reports) >= _MAX_COLLECTIVES:
                oldest = next(iter(self._reports))
                del self._reports[oldest]
                self._due.pop(oldest, None)
            self._reports[key] = {}
            self._due[key] = now + _WARNING_SECONDS
        self._reports[key].setdefault(stuck.waiting[0], stuck)

    def record_status(self, request: Request, status: Status, text: str) -> list[Send]:
        """Records a rank's status; if an inquiry is open, the status is the rank's answer."""
        rank, inquiry = request.rank, self._inquiry
        self._roster.members[rank].positions = {group: begun for group, (begun, _) in status.items()}
        if inquiry is not None and rank in inquiry.unanswered:
            inquiry.unanswered.discard(rank)
            inquiry.texts[rank] = text
            inquiry.calls[rank] = {group: calls for group, (_, calls) in status.items() if calls}
            if not inquiry.unanswered:
                inquiry.due_at = request.now
        return []

    def advance(self, now: float, peers: Peers) -> list[Action] | Failure:
        """Returns the notices and inspections that are due, or the failure that ends the generation."""
        inquiry = self._inquiry
        if inquiry is not None and now >= inquiry.due_at:
            silent = [
                (r, self._roster.members[r]) for r in sorted(inquiry.unanswered) if self._roster.members[r].is_present
            ]
            if not silent or inquiry.has_inspected:
                states = {rank: peers.last_state(member.connection) for rank, member in silent}
                return self._conclude(inquiry, {rank: state for rank, state in states.items() if state is not None})
            # The watch of silent processes (liveness.py) inspects a process only after a longer silence.
            inquiry.has_inspected, inquiry.due_at = True, now + _INSPECTION_SECONDS
            return [Inspect(member.connection, member.local_pid) for _, member in silent]
        notices: list[Action] = []
        for key in [key for key, due_at in self._due.items() if due_at <= now]:
            del self._due[key]
            notices.append(Notice(_notice_text(self._roster, self._all_stuck(self._reports[key]))))
        return notices

    def _conclude(self, inquiry: Inquiry, states: dict[int, ProcessState]) -> Failure:
        for rank, state in states.items():
            if state.is_fatal:
                return self._roster.silence(rank, state, f"it did not answer for {ANSWER_SECONDS:g} s")
        all_stuck = self._all_stuck(inquiry.reports)
        stuck = all_stuck[0]
        members = {group: _first(reports).members for (group, _), reports in self._reports.items()}
        members[stuck.group] = stuck.members
        in_messages: Reports = {}
        if stuck.position == OF_MESSAGES:
            in_messages = {**self._reports.get((stuck.group, OF_MESSAGES), {}), **inquiry.reports}
        lines = _disagreements(inquiry.calls, members, in_messages)
        text = _report_text(self._roster, all_stuck, inquiry.texts, states, lines)
        culprit = min(stuck.missing, key=self._by_blame, default=next(iter(inquiry.reports)))
        return Failure(culprit, self._roster.phase, text, STUCK, stuck.missing)

    def _all_stuck(self, reports: Reports) -> list[StuckCollective]:
        """Returns the stuck collective with all its waiting and missing ranks, or each stuck send and receive."""
        first = _first(reports)
        if first.position == OF_MESSAGES:
            return list(reports.values())
        waiting = {*reports, *self._reports.get((first.group, first.position), ())}
        begun = self._begun(first)
        missing = first.missing or [r for r, count in begun.items() if count < first.position and r not in waiting]
        waiting |= {r for r, count in begun.items() if count >= first.position and self._roster.members[r].is_present}
        waiting -= set(missing)
        return [replace(first, waiting=tuple(sorted(waiting or reports)), missing=tuple(sorted(missing)))]

    def _by_blame(self, rank: int) -> tuple[bool, int]:
        """Returns the sort key of a missing rank; the rank with the smallest key is the culprit.

        A rank that waits for an answer of the server comes last, because other ranks delay it.
        """
        return self._waits.count(self._roster.members[rank].connection) > 0, rank

    def _begun(self, stuck: StuckCollective) -> dict[int, int]:
        """Returns the number of collectives of the group that each member has begun, where this number is known.

        If a member has reported the largest allowed number of groups, this group may be missing from its report.
        """
        reported = {rank: self._roster.members[rank].positions for rank in stuck.members}
        return {
            rank: positions.get(stuck.group, 0)
            for rank, positions in reported.items()
            if stuck.group in positions or len(positions) < MAX_STATUS_GROUPS
        }


def _first(reports: Reports) -> StuckCollective:
    return next(iter(reports.values()))


def _notice_text(roster: Roster, all_stuck: Sequence[StuckCollective]) -> str:
    """Returns the notice about ranks that wait in a collective, or in sends and receives.

    For one wait and at most one late rank, the notice has one line. Otherwise the notice has a line for each wait (at
    most four) and a line for each late rank.
    """
    all_stuck = all_stuck[:_MAX_NOTICED]
    waiting = {rank for stuck in all_stuck for rank in stuck.waiting}
    where = {
        rank: _state_text(roster, rank, stuck)
        for stuck in all_stuck
        for rank in stuck.missing[:_MAX_NOTICED]
        if rank not in waiting
    }
    noticed = [_waited(stuck, "has waited" if len(stuck.waiting) == 1 else "have waited") for stuck in all_stuck]
    parts = [*noticed, *where.values()]
    return ("; " if len(all_stuck) == 1 and len(where) < 2 else "\n  ").join(parts)


def _report_text(
    roster: Roster,
    all_stuck: Sequence[StuckCollective],
    reports: dict[int, str],
    states: dict[int, ProcessState],
    disagreements: Sequence[str] = (),
) -> str:
    """Returns the text of the failure: a summary, the reports of at most 32 ranks (the missing ranks last), and advice.

    Args:
        roster: the members.
        all_stuck: the stuck collective, or every send and receive that has reached its deadline, the earliest first.
        reports: each rank's answer, by rank.
        states: the last inspected states of ranks that have not answered.
        disagreements: lines about ranks whose histories differ, and about ranks that wait for each other in a circle.
    """
    stuck = all_stuck[0]
    of_missing = _grouped(roster, stuck.missing, reports, states)
    others = [rank for rank, _ in roster.present() if rank not in stuck.missing]
    of_others = _grouped(roster, others, reports, states)
    shown_missing = of_missing[:_MAX_REPORTS]
    shown = [*of_others[: _MAX_REPORTS - len(shown_missing)], *shown_missing]
    left_out = len(of_missing) + len(of_others) - len(shown)
    summary = clip_text("\n".join([*map(_waited, all_stuck), *disagreements]), _MAX_SUMMARY_BYTES)
    tail = f"\n\nand {left_out} more reports, left out here" if left_out else ""
    if stuck.missing and not disagreements:
        tail += (
            f"\n\n{name_ranks(stuck.missing)} did not arrive at {stuck.what}: see the report of each missing rank "
            "above. If ranks need more time, pass a longer collective_timeout_seconds to init_process_group()"
        )
    sections = [(_heading(roster, ranks, stuck), text) for ranks, text in shown]
    return _fit(summary, sections, tail, failure_room_bytes(len(stuck.missing)))


def _waited(stuck: StuckCollective, verb: str = "waited") -> str:
    """Returns e.g. "rank 0 waited 5 s in all_reduce #57 for rank 1"."""
    text = f"{name_ranks(stuck.waiting)} {verb} {stuck.waited_seconds:.3g} s in {stuck.what}"
    if stuck.missing:
        return f"{text} for {name_ranks(stuck.missing)}"
    return f"{text}; as far as the server knows, every rank has begun it"


def _name(roster: Roster, rank: int) -> str:
    process = roster.process(rank)
    return f"rank {rank} ({process})" if process else f"rank {rank}"


def _state_text(roster: Roster, rank: int, stuck: StuckCollective) -> str:
    who = _name(roster, rank)
    member = roster.members[rank]
    if not member.is_present:
        return f"{who} has left"
    begun = member.positions.get(stuck.group)
    progress = "" if begun is None else f", and has begun {begun} collective{'' if begun == 1 else 's'}"
    return f"{who} is {roster.phase}{progress}"  # joining or running


def _grouped(
    roster: Roster, ranks: Sequence[int], reports: dict[int, str], states: dict[int, ProcessState]
) -> list[tuple[list[int], str]]:
    """Returns the reports of these ranks; equal reports are listed once, with all their ranks."""
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        text = reports.get(rank)
        if text is None and not roster.members[rank].is_present:
            text = "(it has left, by an orderly close)"
        elif text is None:
            text = _NO_ANSWERS.get(states.get(rank, ProcessState.GONE), _NO_ANSWER)
        groups.setdefault(text, []).append(rank)
    return [(ranks, text) for text, ranks in groups.items()]


def _heading(roster: Roster, ranks: list[int], stuck: StuckCollective) -> str:
    is_missing = ranks[0] in stuck.missing
    if len(ranks) > 1:
        who = name_ranks(ranks)
    else:
        who = _state_text(roster, ranks[0], stuck) if is_missing else _name(roster, ranks[0])
    return f"missing: {who}" if is_missing else who


def _fit(summary: str, sections: list[tuple[str, str]], tail: str, max_bytes: int) -> str:
    """Returns summary, sections and tail in at most `max_bytes`.

    The sections get equal shares of the space. If a section needs less than its share, later sections get more.
    """
    room = max_bytes - len((summary + tail).encode())
    parts = [summary]
    for index, (heading, text) in enumerate(sections):
        share = room // (len(sections) - index)
        part = clip_text(f"\n\n{heading}:\n{_indent(text)}", share)
        room -= len(part.encode())
        parts.append(part)
    return "".join([*parts, tail])


def _indent(text: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in text.strip("\n").splitlines())


def _disagreements(
    by_rank: Mapping[int, Calls], members: Mapping[str, Members], in_messages: Mapping[int, StuckCollective]
) -> list[str]:
    """Returns a line for each group whose ranks called different collectives, and a line if ranks wait in a circle.

    Args:
        by_rank: the last collectives of each rank.
        members: the members of each known group.
        in_messages: the ranks that wait in sends and receives.
    """
    by_group: dict[str, dict[int, History]] = {}
    for rank, of_rank in by_rank.items():
        for group, calls in of_rank.items():
            by_group.setdefault(group, {})[rank] = {number: Call(digest, what) for number, digest, what, _ in calls}
    found = [first_divergence(group, histories) for group, histories in sorted(by_group.items())]
    lines = [divergence.text() for divergence in found if divergence is not None]
    waits = [Wait(rank, stuck.group, 0, stuck.what, stuck.missing) for rank, stuck in sorted(in_messages.items())]
    waits += [
        Wait(rank, group, number, what, _behind(rank, number, by_group[group], members.get(group, ())))
        for rank, of_rank in sorted(by_rank.items())
        for group, calls in of_rank.items()
        for number, _, what, is_inside in calls
        if is_inside
    ]
    round_about = circle(waits)
    return lines if round_about is None else [*lines, circle_text(round_about)]


def _behind(rank: int, number: int, histories: Mapping[int, History], members: Members) -> tuple[int, ...]:
    """Returns the members that are known not to have begun the collective with this number."""
    begun = {other: max(history, default=0) for other, history in histories.items() if other != rank}
    return tuple(other for other in members if begun.get(other, number) < number)
