"""Agreement of a group's members on their next collective; NCCL communicators use this service.

NCCL cannot carry a digest of the collective, so its communicators ask the rendezvous server. Each communicator is a
group that numbers its collectives: position 0, 1, 2, ... Two ranks that exchange messages are a group too, for each
direction. If the common history predicts a rank's next collective, the rank launches this collective without asking,
except in debug mode. Otherwise the rank asks the server whether all members run the same collective: the rank sends the
digest of its collective, and waits for the decision.

This module is part of the server's core, without I/O. The server decides on a position at the latest when every member
has reported the digest of its collective there. A member reports the digest in its own question or, if it has already
launched the collective, in a LAUNCHED frame. The server forwards the first question about a position to the members
that have not reported yet. A member that has launched its collective at this position answers with LAUNCHED; every
other member asks the server too before it launches.

A rank cannot withdraw a launched collective. Suppose that one member has launched a collective, and another member asks
about a different collective at the same position. Then the server answers LAUNCHED at once to every question about this
position or a later position. If both collectives are equal, the member that has launched counts as a member that has
asked.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gradsync.rendezvous.frames import Decision, FrameType, Send, is_under
from gradsync.rendezvous.roster import Members, Roster, list_members
from gradsync.rendezvous.store import Gathering, Request, WaitTable, members_with

_REMEMBERED_DECISIONS = 16  # for each group; members that had cancelled their question before the decision ask again


def _decide(request: Request, decision: Decision, position: int) -> Send:
    """Answers a question with a decision, and with the position where the decision was made."""
    return request.reply((int(decision), position))


class Agreement(Gathering):
    """The open agreement on one position of a group. The value of a member is the digest of its collective.

    A member that has launched its collective has a value, but no wait.

    Args:
        group: the group of the members. Its `positions` holds this agreement from the first report to the decision.
        position: the number of the collective.
        waits: the server's table of waiting requests.
    """

    def __init__(self, group: Group, position: int, waits: WaitTable) -> None:
        super().__init__(group.ranks, waits, group.positions, position)
        self.group = group
        self.position = position
        self.is_forwarded = False  # whether a question was forwarded to the other members

    def decision(self) -> Decision | None:
        """Returns the decision, or None while the decision is open.

        MISMATCH needs the reports of all members: if a member that has not reported yet has launched its collective,
        the decision is LAUNCHED.
        """
        has_launched = len(self.values) > len(self.waits)
        if not has_launched and not self.is_complete:
            return None
        differ = len(set(self.values.values())) > 1
        if differ and has_launched:
            return Decision.LAUNCHED
        if not self.is_complete:
            return None
        return Decision.MISMATCH if differ else Decision.AGREED


@dataclass(eq=False, slots=True)
class Group:
    """The members of one group, and its open agreements by position."""

    name: str
    ranks: Members
    positions: dict[int, Agreement] = field(default_factory=dict)
    launched_from: int | None = None  # the lowest position that got the decision LAUNCHED
    decided: dict[int, Decision] = field(default_factory=dict)  # the last decisions AGREED and MISMATCH, by position

    def remember(self, position: int, decision: Decision) -> None:
        """Keeps a decision for members that ask again; drops the oldest decision if there are too many."""
        self.decided[position] = decision
        if len(self.decided) > _REMEMBERED_DECISIONS:
            del self.decided[next(iter(self.decided))]

    def open(self, position: int, waits: WaitTable) -> Agreement:
        """Returns the open agreement on a position, or a new one."""
        agreement = self.positions.get(position)
        return Agreement(self, position, waits) if agreement is None else agreement


class AgreementService:
    """The agreements of a generation, by group and position.

    Args:
        roster: the members.
        waits: the server's table of open waits.
    """

    def __init__(self, roster: Roster, waits: WaitTable) -> None:
        self._roster = roster
        self._waits = waits
        self._groups: dict[str, Group] = {}

    def ask(self, request: Request, name: str, position: int, digest: int, ranks: list[int] | None) -> list[Send]:
        """Handles a member's question about a position. If the question decides, all waiting members get the answer."""
        group = self._find(request, name, ranks)
        if isinstance(group, Send):
            return [group]
        if group.launched_from is not None and position >= group.launched_from:
            return [_decide(request, Decision.LAUNCHED, group.launched_from)]
        if position in group.decided:
            return [_decide(request, group.decided[position], position)]
        agreement = group.open(position, self._waits)
        if request.rank in agreement.values:
            return [self._refuse_second(request, agreement)]
        agreement.arrive(request, digest)
        return [*self._forward(agreement), *self._conclude(agreement)]

    def report_launched(self, request: Request, name: str, position: int, digest: int) -> list[Send]:
        """Records the collective that a member has launched already, from a LAUNCHED frame, which gets no answer.

        A report is ignored if the rank is not a member, or has reported for this position before, or if the server has
        decided on this position.
        """
        group, rank = self._groups.get(name), request.rank
        if group is None or rank not in group.ranks or position in group.decided:
            return []
        if group.launched_from is not None and position >= group.launched_from:
            return []
        agreement = group.open(position, self._waits)
        if rank in agreement.values:
            return []
        agreement.values[rank] = digest
        return self._conclude(agreement)

    def forget(self, prefix: str) -> None:
        """Removes the group with the name `prefix`, and all groups whose names begin with "prefix/"."""
        for name in [name for name in self._groups if is_under(name, prefix)]:
            del self._groups[name]

    def rank_left(self, rank: int) -> list[Send]:
        """Fails the agreements that still need a rank that has left."""
        groups = [group for group in self._groups.values() if rank in group.ranks]
        agreements = [a for group in groups for a in group.positions.values() if rank not in a.values]
        return [send for agreement in agreements for send in self._fail(agreement, rank)]

    def _find(self, request: Request, name: str, ranks: list[int] | None) -> Group | Send:
        """Returns the group, or a refusal if the named members do not exist, lack this rank, or are not the group's."""
        members = members_with(request, ranks, self._roster, f"group {name!r}")
        if isinstance(members, Send):
            return members
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = Group(name, members)
        if group.ranks != members:
            who, listed = self._roster.label(request.rank), list_members(group.ranks)
            return request.refuse(f"group {name!r} has ranks {listed}, {who} asked with ranks {list_members(members)}")
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
        if decision is not Decision.LAUNCHED:
            agreement.group.remember(agreement.position, decision)
        return [_decide(request, decision, position) for request in agreement.close()]

    def _fail(self, agreement: Agreement, left: int) -> list[Send]:
        need = f"the agreement on position {agreement.position} of group {agreement.group.name!r} needs this rank"
        return agreement.fail(self._roster.left_failure(left, need))
