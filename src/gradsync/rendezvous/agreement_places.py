"""Where the ranks of one generation agree on what they do next: one place for each position of each group.

Part of the server's core, without I/O, beside `places`; `agreements` says what it is for. A rank that asks waits
until every member has reported the digest of what it does at that position: by asking too, or by telling that it
has gone ahead already and with what. The first question is passed on to the other members, so that one which would
not ask by itself does, or tells.

A member that went ahead with something else than another one asks about cannot take it back: from that position on
everybody gets PASSED, at once. A member that went ahead with the same is as good as one that asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from gradsync.rendezvous.agreements import Verdict, event_key
from gradsync.rendezvous.events import Send
from gradsync.rendezvous.keys import Keys
from gradsync.rendezvous.members import Members, list_members
from gradsync.rendezvous.messages import REFUSED, FrameType
from gradsync.rendezvous.roster import Roster
from gradsync.rendezvous.scopes import is_under
from gradsync.rendezvous.waiting import Request, Wait, WaitTable

MAX_GROUPS = 16_384
MAX_OPEN_POSITIONS = 16_384  # of one group
_REMEMBERED_VERDICTS = 16  # of one group, for members who had stopped waiting when the verdict came


class Agreement:
    """One position of one group, on which its members have begun to agree.

    Args:
        group: the group; the agreement stands among its positions while any member has reported.
        position: which of its collectives.
    """

    def __init__(self, group: Group, position: int) -> None:
        self.group = group
        self.position = position
        self.waits: dict[int, Wait] = {}  # of the members who ask
        self.digests: dict[int, int] = {}  # of these, and of the members who have gone ahead
        self.is_passed_on = False  # whether the other members know of the question
        self._reports: Counter[int] = Counter()  # how many members have reported each digest
        self._gave_up: set[int] = set()  # asked, and stopped waiting

    def ask(self, wait: Wait, digest: int) -> None:
        """Records a member that waits for the verdict."""
        self.waits[wait.request.rank] = wait
        self.report(wait.request.rank, digest)
        self._gave_up.discard(wait.request.rank)

    def report(self, rank: int, digest: int) -> None:
        """Records what a member does."""
        self.digests[rank] = digest
        self._reports[digest] += 1

    def withdraw(self, wait: Wait) -> None:
        """Takes a question back: the agreement goes on as if that rank had not come yet."""
        del self.waits[wait.request.rank]
        digest = self.digests.pop(wait.request.rank)
        self._reports[digest] -= 1
        if not self._reports[digest]:
            del self._reports[digest]
        self._gave_up.add(wait.request.rank)
        if not self.digests:
            del self.group.positions[self.position]

    def absent_ranks(self) -> Iterator[int]:
        """Returns the members who have not reported, one after the other."""
        return (rank for rank in self.group.ranks if rank not in self.digests)

    def missing_ranks(self) -> tuple[int, ...]:
        """Returns the members who never reported; when there are none, those that gave up."""
        absent = tuple(self.absent_ranks())
        return tuple(rank for rank in absent if rank not in self._gave_up) or absent

    def passed_ranks(self) -> tuple[int, ...]:
        """Returns the members who have gone ahead."""
        return tuple(rank for rank in self.digests if rank not in self.waits)

    def verdict(self) -> Verdict | None:
        """Returns the verdict, or None while it is open.

        Members who differ wait for the last one nevertheless: it may have gone ahead.
        """
        differ = len(self._reports) > 1
        if differ and len(self.digests) > len(self.waits):
            return Verdict.PASSED
        if len(self.digests) < len(self.group.ranks):
            return None
        return Verdict.DIFFERENT if differ else Verdict.SAME


@dataclass(eq=False, slots=True)
class Group:
    """The members of one group, and the positions on which they have begun to agree."""

    name: str
    ranks: Members
    positions: dict[int, Agreement] = field(default_factory=dict)
    passed_from: int | None = None  # the lowest position that got the verdict PASSED
    decided: dict[int, Verdict] = field(default_factory=dict)  # the last positions with another verdict

    def remember(self, position: int, verdict: Verdict) -> None:
        """Keeps a verdict for who asks again, and forgets the oldest."""
        self.decided[position] = verdict
        if len(self.decided) > _REMEMBERED_VERDICTS:
            del self.decided[next(iter(self.decided))]

    def open(self, position: int) -> Agreement | None:
        """Returns the agreement on a position, a new one where there is none; None when too many are open."""
        agreement = self.positions.get(position)
        if agreement is None and len(self.positions) < MAX_OPEN_POSITIONS:
            agreement = self.positions[position] = Agreement(self, position)
        return agreement


class Agreements:
    """The agreements of a generation, by group and position.

    Args:
        roster: the members.
        waits: the server's table of open waits.
        keys: where the descriptions of those who have gone ahead are stored, within the keys' bounds.
    """

    def __init__(self, roster: Roster, waits: WaitTable, keys: Keys) -> None:
        self._roster = roster
        self._waits = waits
        self._keys = keys
        self._groups: dict[str, Group] = {}

    def ask(
        self, request: Request, name: str, ranks: Members, position: int, digest: int, timeout_ms: int
    ) -> list[Send]:
        """Lets a member ask whether all do the same at a position; the last report brings the verdict for all."""
        group = self._find(request, name, ranks)
        if isinstance(group, Send):
            return [group]
        if group.passed_from is not None and position >= group.passed_from:
            return [request.decide(Verdict.PASSED, group.passed_from)]
        if position in group.decided:
            return [request.decide(group.decided[position], position)]
        agreement = group.open(position)
        if agreement is None:
            text = f"group {name!r} has more than {MAX_OPEN_POSITIONS} positions that are not agreed on yet"
            return [request.refuse(text, REFUSED)]
        if request.rank in agreement.digests:
            return [self._refuse_second(request, agreement)]
        agreement.ask(self._waits.add(request, timeout_ms, agreement), digest)
        return [*self._pass_on(agreement), *self._settle(agreement)]

    def hear_passed(self, rank: int, name: str, position: int, digest: int, description: str) -> list[Send]:
        """Takes in that a member has gone ahead, and with what. It needs no answer, so it is never refused.

        The word of a rank that is no member, or that waits at this very position, means nothing and is left out.
        """
        group = self._groups.get(name)
        if group is None or rank not in group.ranks or position in group.decided:
            return []
        is_open = group.passed_from is None or position < group.passed_from
        agreement = group.open(position) if is_open else None
        if agreement is not None and rank in agreement.digests:
            return []
        sends = self._keys.publish(event_key(name, position, rank), description.encode())
        if agreement is not None:
            agreement.report(rank, digest)
            sends += self._settle(agreement)
        return sends

    def forget(self, scope: str) -> None:
        """Drops the groups under a name that nobody uses any more."""
        for name in [name for name in self._groups if is_under(name, scope)]:
            del self._groups[name]

    def rank_left(self, rank: int) -> list[Send]:
        """Fails the agreements that still need a rank which has left."""
        groups = [group for group in self._groups.values() if rank in group.ranks]
        agreements = [a for group in groups for a in group.positions.values() if rank not in a.digests]
        return [send for agreement in agreements for send in self._fail(agreement, rank)]

    def _find(self, request: Request, name: str, ranks: Members) -> Group | Send:
        """Returns the group, or the refusal of a request that does not fit it."""
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
        what = "already waits" if request.rank in agreement.waits else "said that it has passed, and cannot ask,"
        where = f"at position {agreement.position} of group {agreement.group.name!r}"
        return request.refuse(f"{self._roster.label(request.rank)} {what} {where}")

    def _pass_on(self, agreement: Agreement) -> list[Send]:
        """Tells the other members, once, that there is a question at this position."""
        if agreement.is_passed_on:
            return []
        agreement.is_passed_on = True
        fields = (agreement.group.name, agreement.position)
        absent = set(agreement.absent_ranks())
        return [Send(m.connection, FrameType.ASKED, fields) for rank, m in self._roster.present() if rank in absent]

    def _settle(self, agreement: Agreement) -> list[Send]:
        """Gives the verdict, where it is known or cannot come any more."""
        verdict = agreement.verdict()
        if verdict is Verdict.PASSED:
            return self._break_off(agreement.group, agreement.position)
        if verdict is not None:
            return self._finish(agreement, verdict, agreement.position)
        left = self._roster.first_left(agreement.absent_ranks())
        return [] if left is None else self._fail(agreement, left)

    def _break_off(self, group: Group, position: int) -> list[Send]:
        """Gives PASSED to all who ask about this position or a later one, now or ever."""
        group.passed_from = position
        agreements = [a for a in group.positions.values() if a.position >= position]
        return [send for agreement in agreements for send in self._finish(agreement, Verdict.PASSED, position)]

    def _finish(self, agreement: Agreement, verdict: Verdict, position: int) -> list[Send]:
        del agreement.group.positions[agreement.position]
        if verdict is not Verdict.PASSED:
            agreement.group.remember(agreement.position, verdict)
        if verdict is Verdict.SAME:  # nobody will ask for the descriptions
            for rank in agreement.passed_ranks():
                self._keys.discard(event_key(agreement.group.name, agreement.position, rank))
        waits, agreement.waits = agreement.waits, {}  # they refer to each other: only so they go at once
        for wait in waits.values():
            self._waits.close(wait)
        return [wait.request.decide(verdict, position) for wait in waits.values()]

    def _fail(self, agreement: Agreement, left: int) -> list[Send]:
        need = f"position {agreement.position} of group {agreement.group.name!r} needs its word"
        failure = self._roster.left_failure(left, need)
        waits = list(agreement.waits.values())
        for wait in waits:
            self._waits.close(wait)
            agreement.withdraw(wait)
        return [wait.request.fail(failure) for wait in waits]
