"""Agreement of a group's members on their next collective; NCCL communicators ask for it.

NCCL cannot carry a digest of the collective, so its communicators ask the rendezvous server. Each communicator is a
group that numbers its collectives: position 0, 1, 2, ... If a rank's next collective is the one that the common history
predicts, the rank launches it without asking. Otherwise the rank asks the server whether all members run the same
collective: it sends the digest of its collective, and waits for the decision.

This module is part of the server's core, without I/O. The server decides on a position when every member has reported
the digest of its collective there. A member reports the digest in its own question or, if it has already launched the
collective, in a LAUNCHED frame. The server forwards the first question about a position to the other members. A member
that has launched its collective at this position answers with LAUNCHED; every other member asks the server too before
it launches.

A launched collective cannot be taken back. Suppose that one member has launched a collective, and another member asks
about a different one at the same position. Then the server answers LAUNCHED at once to every question about this
position or a later one. If both collectives are equal, the member that has launched counts as a member that has asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from gradsync.rendezvous.frames import REFUSED, Decision, FrameType, Send, event_key, is_under
from gradsync.rendezvous.roster import Members, Roster, list_members, never_arrived
from gradsync.rendezvous.store import Keys, Request, Wait, WaitTable

MAX_GROUPS = 16_384
MAX_OPEN_POSITIONS = 16_384  # in one group
_REMEMBERED_DECISIONS = 16  # in one group, for members that had cancelled their question before the decision


def _decide(request: Request, decision: Decision, position: int) -> Send:
    """Answers a question with a decision, and with the position where the decision was made."""
    return request.reply((int(decision), position))


class Agreement:
    """The open agreement on one position of a group.

    Args:
        group: the group of the members. Its `positions` holds this agreement from the first report to the decision.
        position: the number of the collective.
    """

    def __init__(self, group: Group, position: int) -> None:
        self.group = group
        self.position = position
        self.waits: dict[int, Wait] = {}  # by rank: the questions of the members that have asked
        self.digests: dict[int, int] = {}  # by rank, of the members that have asked or launched
        self.is_forwarded = False  # whether a question was forwarded to the other members
        self._reports: Counter[int] = Counter()  # digest -> the number of members that reported it
        self._cancelled: set[int] = set()  # ranks that have asked and then cancelled their question

    def ask(self, wait: Wait, digest: int) -> None:
        """Records a member that waits for the decision."""
        self.waits[wait.request.rank] = wait
        self.report(wait.request.rank, digest)
        self._cancelled.discard(wait.request.rank)

    def report(self, rank: int, digest: int) -> None:
        """Records a member's digest."""
        self.digests[rank] = digest
        self._reports[digest] += 1

    def withdraw(self, wait: Wait) -> None:
        """Removes a member's question, as if the member had not asked yet."""
        del self.waits[wait.request.rank]
        digest = self.digests.pop(wait.request.rank)
        self._reports[digest] -= 1
        if not self._reports[digest]:
            del self._reports[digest]
        self._cancelled.add(wait.request.rank)
        if not self.digests:
            del self.group.positions[self.position]

    def absent_ranks(self) -> Iterator[int]:
        """Iterates over the members that have not reported."""
        return (rank for rank in self.group.ranks if rank not in self.digests)

    def missing_ranks(self, _wait: Wait) -> tuple[int, ...]:
        """Returns the members that never reported; if there are none, the members that cancelled their question."""
        return never_arrived(self.absent_ranks(), self._cancelled)

    def launched_ranks(self) -> tuple[int, ...]:
        """Returns the members that have launched already."""
        return tuple(rank for rank in self.digests if rank not in self.waits)

    def decision(self) -> Decision | None:
        """Returns the decision, or None while it is open.

        MISMATCH needs the reports of all members, because a member that has not reported yet may have launched its
        collective; the decision is then LAUNCHED.
        """
        differ = len(self._reports) > 1
        if differ and len(self.digests) > len(self.waits):
            return Decision.LAUNCHED
        if len(self.digests) < len(self.group.ranks):
            return None
        return Decision.MISMATCH if differ else Decision.AGREED


@dataclass(eq=False, slots=True)
class Group:
    """The members of one group, and its open agreements by position."""

    name: str
    ranks: Members
    positions: dict[int, Agreement] = field(default_factory=dict)
    launched_from: int | None = None  # the lowest position that got the decision LAUNCHED
    decided: dict[int, Decision] = field(default_factory=dict)  # the last positions with another decision

    def remember(self, position: int, decision: Decision) -> None:
        """Keeps a decision for members that ask again; drops the oldest decision if there are too many."""
        self.decided[position] = decision
        if len(self.decided) > _REMEMBERED_DECISIONS:
            del self.decided[next(iter(self.decided))]

    def open(self, position: int) -> Agreement | None:
        """Returns the open agreement on a position, or a new one; None if too many are open."""
        agreement = self.positions.get(position)
        if agreement is None and len(self.positions) < MAX_OPEN_POSITIONS:
            agreement = self.positions[position] = Agreement(self, position)
        return agreement


class AgreementService:
    """The agreements of a generation, by group and position.

    Args:
        roster: the members.
        waits: the server's table of open waits.
        keys: the key-value store, in which the service puts the descriptions of launched collectives.
    """

    def __init__(self, roster: Roster, waits: WaitTable, keys: Keys) -> None:
        self._roster = roster
        self._waits = waits
        self._keys = keys
        self._groups: dict[str, Group] = {}

    def ask(self, request: Request, name: str, ranks: Members, position: int, digest: int) -> list[Send]:
        """Handles a member's question about a position; once all members have reported, all get the decision."""
        group = self._find(request, name, ranks)
        if isinstance(group, Send):
            return [group]
        if group.launched_from is not None and position >= group.launched_from:
            return [_decide(request, Decision.LAUNCHED, group.launched_from)]
        if position in group.decided:
            return [_decide(request, group.decided[position], position)]
        agreement = group.open(position)
        if agreement is None:
            text = f"group {name!r} has more than {MAX_OPEN_POSITIONS} positions that are not agreed on yet"
            return [request.refuse(text, REFUSED)]
        if request.rank in agreement.digests:
            return [self._refuse_second(request, agreement)]
        agreement.ask(self._waits.add(request, agreement), digest)
        return [*self._forward(agreement), *self._conclude(agreement)]

    def report_launched(self, rank: int, name: str, position: int, digest: int, description: str) -> list[Send]:
        """Records the collective that a member has launched already, from a LAUNCHED frame, which gets no answer.

        A report is ignored if the rank is not a member, or has reported for this position before.
        """
        group = self._groups.get(name)
        if group is None or rank not in group.ranks or position in group.decided:
            return []
        is_open = group.launched_from is None or position < group.launched_from
        agreement = group.open(position) if is_open else None
        if agreement is not None and rank in agreement.digests:
            return []
        sends = self._keys.publish(event_key(name, position, rank), description.encode())
        if agreement is not None:
            agreement.report(rank, digest)
            sends += self._conclude(agreement)
        return sends

    def forget(self, prefix: str) -> None:
        """Removes the groups that all members have left."""
        for name in [name for name in self._groups if is_under(name, prefix)]:
            del self._groups[name]

    def rank_left(self, rank: int) -> list[Send]:
        """Fails the agreements that still need a rank that has left."""
        groups = [group for group in self._groups.values() if rank in group.ranks]
        agreements = [a for group in groups for a in group.positions.values() if rank not in a.digests]
        return [send for agreement in agreements for send in self._fail(agreement, rank)]

    def _find(self, request: Request, name: str, ranks: Members) -> Group | Send:
        """Returns the group, or a refusal if the group has other members or if there are too many groups."""
        group = self._groups.get(name)
        if group is None:
            if len(self._groups) >= MAX_GROUPS:
                return request.refuse(f"more than {MAX_GROUPS} groups in one generation", REFUSED)
            group = self._groups[name] = Group(name, ranks)
        if group.ranks != ranks:
            who, listed = self._roster.label(request.rank), list_members(group.ranks)
            return request.refuse(f"group {name!r} has ranks {listed}, {who} asked with ranks {list_members(ranks)}")
        return group

    def _refuse_second(self, request: Request, agreement: Agreement) -> Send:
        did = "asked about" if request.rank in agreement.waits else "launched"
        what = f"its collective at position {agreement.position} of group {agreement.group.name!r}"
        text = f"{self._roster.label(request.rank)} has already {did} {what}; a rank asks once, before it launches"
        return request.refuse(text)

    def _forward(self, agreement: Agreement) -> list[Send]:
        """Forwards the first question about a position to the members that have not reported."""
        if agreement.is_forwarded:
            return []
        agreement.is_forwarded = True
        fields = (agreement.group.name, agreement.position)
        absent = set(agreement.absent_ranks())
        return [Send(m.connection, FrameType.ASKED, fields) for rank, m in self._roster.present() if rank in absent]

    def _conclude(self, agreement: Agreement) -> list[Send]:
        """Sends the decision if it is known, or a failure if a member that is still needed has left."""
        decision = agreement.decision()
        if decision is Decision.LAUNCHED:
            return self._break_off(agreement.group, agreement.position)
        if decision is not None:
            return self._finish(agreement, decision, agreement.position)
        left = self._roster.first_left(agreement.absent_ranks())
        return [] if left is None else self._fail(agreement, left)

    def _break_off(self, group: Group, position: int) -> list[Send]:
        """Answers LAUNCHED to every open and future question about this position or a later one."""
        group.launched_from = position
        agreements = [a for a in group.positions.values() if a.position >= position]
        return [send for agreement in agreements for send in self._finish(agreement, Decision.LAUNCHED, position)]

    def _finish(self, agreement: Agreement, decision: Decision, position: int) -> list[Send]:
        del agreement.group.positions[agreement.position]
        if decision is not Decision.LAUNCHED:
            agreement.group.remember(agreement.position, decision)
        if decision is Decision.AGREED:  # descriptions are needed only after a mismatch
            for rank in agreement.launched_ranks():
                self._keys.discard(event_key(agreement.group.name, agreement.position, rank))
        waits, agreement.waits = agreement.waits, {}  # ends the cycle of references, so both are freed at once
        for wait in waits.values():
            self._waits.close(wait)
        return [_decide(wait.request, decision, position) for wait in waits.values()]

    def _fail(self, agreement: Agreement, left: int) -> list[Send]:
        need = f"the agreement on position {agreement.position} of group {agreement.group.name!r} needs this rank"
        failure = self._roster.left_failure(left, need)
        waits = list(agreement.waits.values())
        for wait in waits:
            self._waits.close(wait)
            agreement.withdraw(wait)
        return [wait.request.fail(failure) for wait in waits]
