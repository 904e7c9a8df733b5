"""Ranks that wait in a collective, and those that do not come: notices on the way, one verdict at the deadline.

Part of the server's core, without I/O, one for each generation. The first rank whose collective has reached its
deadline starts an inquiry: every member is asked what it does. The answers, or a moment without them, bring the
verdict, which is the same for all. A rank that did not answer is looked at first: it may be stopped.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gradsync.rendezvous import absence_report, verdict_texts
from gradsync.rendezvous.absence_report import Absence
from gradsync.rendezvous.disagreement import Told, disagreements
from gradsync.rendezvous.events import Action, Notice, Probe, Send
from gradsync.rendezvous.finding import Finding
from gradsync.rendezvous.members import Members
from gradsync.rendezvous.messages import MAX_TOLD_GROUPS, OF_MESSAGES, FrameType
from gradsync.rendezvous.roster import Roster
from gradsync.rendezvous.waiting import Failure, WaitTable

ANSWER_SECONDS = 0.4
_GATHER_SECONDS = 0.3  # from the first report to the notice: the ranks that wait report one after the other
_LOOK_SECONDS = 0.05
_MAX_WAITS = 1024


@dataclass(frozen=True, slots=True)
class Claim:
    """What a rank says that waits: in which collective of whom, how long by now, and for whom, where it knows.

    The position is OF_MESSAGES in a message between two ranks.
    """

    rank: int
    group: str
    members: Members
    position: int
    what: str
    waited_seconds: float
    missing: tuple[int, ...] | None


@dataclass(slots=True)
class Gathering:
    """The ranks that have told that they wait in one collective, or in messages at the same time.

    The operator is told of it at `due_at`, once.
    """

    first: Claim
    due_at: float
    claims: dict[int, Claim]
    is_told: bool = False


@dataclass(slots=True)
class Inquiry:
    """One question to all members, and what has come back."""

    number: int
    claim: Claim
    claims: dict[int, Claim]
    due_at: float
    unanswered: set[int]
    reports: dict[int, str] = field(default_factory=dict)
    histories: dict[int, Told] = field(default_factory=dict)
    looked_at: set[int] = field(default_factory=set)
    findings: dict[int, Finding] = field(default_factory=dict)


class Absences:
    """Who waits for whom in one generation.

    Args:
        roster: the members.
        waits: what they wait for at the server.
    """

    def __init__(self, roster: Roster, waits: WaitTable) -> None:
        self._roster = roster
        self._waits = waits
        self._gatherings: dict[tuple[str, int], Gathering] = {}
        self._notice_at: float | None = None
        self._inquiry: Inquiry | None = None
        self._inquiry_count = 0

    def next_deadline(self) -> float | None:
        """Returns when `advance` is to be called, or None."""
        due = [self._notice_at, None if self._inquiry is None else self._inquiry.due_at]
        return min((time_due for time_due in due if time_due is not None), default=None)

    def hear_waiting(self, claim: Claim, now: float) -> None:
        """Takes in that a rank waits; the operator is told a moment later, once for each collective and message."""
        key = claim.group, claim.position
        gathering = self._gatherings.get(key)
        if gathering is not None and not (gathering.is_told and claim.position == OF_MESSAGES):
            gathering.claims[claim.rank] = claim
            return
        if len(self._gatherings) >= _MAX_WAITS:
            del self._gatherings[next(iter(self._gatherings))]
        due_at = now + _GATHER_SECONDS
        self._gatherings[key] = Gathering(claim, due_at, {claim.rank: claim})
        self._notice_at = due_at if self._notice_at is None else min(self._notice_at, due_at)

    def hear_absence(self, claim: Claim, now: float) -> list[Send]:
        """Takes in that a rank's collective has reached its deadline; asks all members what they do, once."""
        inquiry = self._inquiry
        if inquiry is not None:
            if (claim.group, claim.position) == (inquiry.claim.group, inquiry.claim.position):
                inquiry.claims[claim.rank] = claim
            return []
        self._inquiry_count += 1
        number = self._inquiry_count
        asked = self._roster.present()
        unanswered = {rank for rank, _ in asked}
        self._inquiry = Inquiry(number, claim, {claim.rank: claim}, now + ANSWER_SECONDS, unanswered)
        return [Send(member.connection, FrameType.INQUIRE, (number,)) for _, member in asked]

    def hear_history(self, rank: int, number: int, history: Told) -> None:
        """Takes in what a rank remembers, which it tells before its status."""
        inquiry = self._inquiry
        if inquiry is not None and number == inquiry.number and rank in inquiry.unanswered:
            inquiry.histories[rank] = history

    def hear_status(self, rank: int, number: int, positions: dict[str, int], text: str, now: float) -> None:
        """Takes in what a rank says that it does."""
        self._roster.members[rank].positions = positions
        inquiry = self._inquiry
        if inquiry is None or number != inquiry.number or rank not in inquiry.unanswered:
            return
        inquiry.unanswered.discard(rank)
        inquiry.reports[rank] = text
        if not inquiry.unanswered:
            inquiry.due_at = now

    def hear_finding(self, rank: int, finding: Finding, now: float) -> None:
        """Takes in what was found of a rank that did not answer."""
        inquiry = self._inquiry
        if inquiry is not None and rank in inquiry.looked_at:
            inquiry.findings[rank] = finding
            if len(inquiry.findings) == len(inquiry.looked_at):
                inquiry.due_at = now

    def advance(self, now: float) -> list[Action] | Failure:
        """Returns what is due now: notices, looks at silent ranks, or the verdict that ends the generation."""
        actions: list[Action] = [*self._take_notices(now)]
        inquiry = self._inquiry
        if inquiry is None or now < inquiry.due_at:
            return actions
        silent = self._silent_ranks(inquiry)
        if not silent or inquiry.looked_at:
            return self._conclude(inquiry)
        inquiry.looked_at = set(silent)
        inquiry.due_at = now + _LOOK_SECONDS
        members = [self._roster.members[rank] for rank in silent]
        return [*actions, *(Probe(member.connection, member.local_pid) for member in members)]

    def _silent_ranks(self, inquiry: Inquiry) -> list[int]:
        """Returns the members that have not answered, though they have not left."""
        return sorted(rank for rank in inquiry.unanswered if self._roster.is_present(rank))

    def _take_notices(self, now: float) -> list[Notice]:
        if self._notice_at is None or now < self._notice_at:
            return []
        notices = []
        for gathering in self._gatherings.values():
            if not gathering.is_told and gathering.due_at <= now:
                gathering.is_told = True
                absences = self._absences(gathering.first, gathering.claims)
                notices.append(Notice(absence_report.notice(self._roster, absences)))
        self._notice_at = min((g.due_at for g in self._gatherings.values() if not g.is_told), default=None)
        return notices

    def _conclude(self, inquiry: Inquiry) -> Failure:
        for rank, finding in sorted(inquiry.findings.items()):
            if finding.is_fatal:
                evidence = f"it did not answer for {ANSWER_SECONDS:g} s"
                return verdict_texts.silence(self._roster, rank, finding, evidence)
        absences = self._absences(inquiry.claim, inquiry.claims)
        missing = absences[0].missing
        culprit = min(missing, key=self._by_blame, default=inquiry.claim.rank)
        members = {name: gathering.first.members for (name, _), gathering in self._gatherings.items()}
        members[inquiry.claim.group] = inquiry.claim.members
        told = disagreements(inquiry.histories, members)
        text = absence_report.report(self._roster, absences, inquiry.reports, inquiry.findings, told)
        return Failure(culprit, self._roster.phase, text, missing)

    def _absences(self, first: Claim, claims: dict[int, Claim]) -> list[Absence]:
        """Works out who waits and who is missing: in the collective, or in each of the messages."""
        if first.position != OF_MESSAGES:
            return [self._absence(first, set(claims))]
        return [
            Absence(claim.group, claim.position, claim.what, claim.waited_seconds, (claim.rank,), claim.missing or ())
            for claim in claims.values()
        ]

    def _absence(self, claim: Claim, claimants: set[int]) -> Absence:
        gathering = self._gatherings.get((claim.group, claim.position))
        waiting = claimants | set(gathering.claims if gathering is not None else ())
        begun = self._begun(claim)
        missing = claim.missing
        if missing is None:
            missing = tuple(rank for rank, count in begun.items() if count < claim.position and rank not in waiting)
        waiting |= {r for r, count in begun.items() if count >= claim.position and self._roster.is_present(r)}
        waiting -= set(missing)
        return Absence(
            claim.group,
            claim.position,
            claim.what,
            claim.waited_seconds,
            tuple(sorted(waiting or claimants)),
            tuple(sorted(missing)),
        )

    def _by_blame(self, rank: int) -> tuple[bool, int]:
        """Orders missing ranks: one that waits at the server is held up by another, which comes first."""
        return self._waits.count(self._roster.members[rank].connection) > 0, rank

    def _begun(self, claim: Claim) -> dict[int, int]:
        """Returns how many collectives of its group each member has begun, where that is known.

        A rank that tells of as many groups as it may could be anywhere in those that it leaves out.
        """
        told = {rank: self._roster.members[rank].positions for rank in claim.members}
        return {
            rank: positions.get(claim.group, 0)
            for rank, positions in told.items()
            if claim.group in positions or len(positions) < MAX_TOLD_GROUPS
        }
