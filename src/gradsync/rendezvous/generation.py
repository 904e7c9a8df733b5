"""One generation of ranks: who is in it, what they share, and which part of it answers which request.

Part of the server's core, without I/O: `protocol` decides who is in a generation and when it ends, and hands the
requests of its members over to it.
"""

from __future__ import annotations

from gradsync.rendezvous.absence import Absences, Claim
from gradsync.rendezvous.agreement_places import Agreements
from gradsync.rendezvous.events import Send
from gradsync.rendezvous.forgetting import Forgetting
from gradsync.rendezvous.keys import Keys
from gradsync.rendezvous.members import Members, are_known, list_members, members_of
from gradsync.rendezvous.messages import REFUSED, FrameType, Message
from gradsync.rendezvous.places import Barriers, GroupIds
from gradsync.rendezvous.roster import Roster
from gradsync.rendezvous.waiting import Failure, Request, Wait, WaitTable

#: What members tell without asking for an answer.
HEARD = (FrameType.PASSED, FrameType.WAITING, FrameType.STATUS, FrameType.FORGET, FrameType.HISTORY)


class Generation:
    """One generation: its members, what they share, and what went wrong.

    Args:
        world_size: how many ranks it needs.
        waits: the server's table of open waits.
        called: what messages call a member.
        host: the rank that hosts the server, where it ends the server when not all join in its time.
    """

    def __init__(self, world_size: int, waits: WaitTable, called: str = "rank", host: int | None = None) -> None:
        self.roster = Roster(world_size, called)
        self.number: int | None = None  # counted once formed
        self.failure: Failure | None = None
        self._world_size = world_size
        self._waits = waits
        self._host = host
        self._keys = Keys(self.roster, waits)
        self._barriers = Barriers(self.roster, waits)
        self._ids = GroupIds(self.roster, waits)
        self._agreements = Agreements(self.roster, waits, self._keys)
        self._forgetting = Forgetting(self.roster, (self._keys, self._barriers, self._ids, self._agreements))
        self.absences = Absences(self.roster, waits)

    def withdraw(self, wait: Wait) -> None:
        """Takes a join back (this is the place where a joining rank waits)."""
        self.roster.give_up(wait.request.rank)

    def end_with(self, wait: Wait) -> list[Wait]:
        """Withdraws a wait whose deadline has come; returns it, and those that end with it.

        When the host joins no longer, nobody does: the others hear who is missing before the server is gone.
        """
        ended = [wait]
        if wait.place is self and wait.request.rank == self._host:
            for _, member in self.roster.present():
                ended += self._waits.close_all(member.connection)
        for each in ended:
            each.place.withdraw(each)
        return ended

    def missing_ranks(self) -> tuple[int, ...]:
        """Returns the ranks that hold up the forming of this generation."""
        return self.roster.missing_ranks()

    @property
    def is_running(self) -> bool:
        """Whether it has formed and not failed."""
        return self.number is not None and self.failure is None

    def serve(self, request: Request, message: Message) -> list[Send]:
        """Answers a request that concerns what the members share."""
        if message.type is FrameType.SET:
            return self._keys.set(request, *message.fields)
        if message.type is FrameType.GET:
            return self._keys.get(request, *message.fields)
        if message.type is FrameType.ADD:
            return self._keys.add(request, *message.fields)
        if message.type is FrameType.DELETE:
            return self._keys.delete(request, *message.fields)
        if message.type is FrameType.ABSENT:
            return self.absences.hear_absence(self._claim(request, message), request.now)
        return self._serve_group(request, message)

    def next_deadline(self) -> float | None:
        """Returns when `absences` are to be advanced, or None."""
        return self.absences.next_deadline() if self.is_running else None

    def hear(self, request: Request, message: Message) -> list[Send]:
        """Takes in what a member tells without asking for an answer."""
        if not self.is_running:
            return []
        if message.type is FrameType.PASSED:
            return self._agreements.hear_passed(request.rank, *message.fields)
        if message.type is FrameType.WAITING:
            self.absences.hear_waiting(self._claim(request, message), request.now)
        elif message.type is FrameType.FORGET:
            scope, ranks = message.fields
            members = self._members(ranks)
            if self._are_members(members):  # there is no answer that could refuse it
                self._forgetting.hear(request.rank, scope, members)
        elif message.type is FrameType.HISTORY:
            self.absences.hear_history(request.rank, *message.fields)
        else:
            inquiry, positions, text = message.fields
            self.absences.hear_status(request.rank, inquiry, positions, text, request.now)
        return []

    def rank_left(self, rank: int) -> list[Send]:
        """Fails the waits that need a rank which has left in good order."""
        self.roster.mark_left(rank)
        self._forgetting.rank_left(rank)
        return [
            *self._barriers.rank_left(rank),
            *self._ids.rank_left(rank),
            *self._agreements.rank_left(rank),
            *self._keys.rank_left(),
        ]

    def _serve_group(self, request: Request, message: Message) -> list[Send]:
        """Answers the requests that name members."""
        if message.type is FrameType.BARRIER:
            name, ranks, timeout_ms = message.fields
            members = self._members(ranks)
            if not self._are_members(members) or request.rank not in members:
                return [self._refuse_outsider(request, f"barrier {name!r}", members)]
            return self._barriers.arrive(request, name, members, timeout_ms)
        if message.type is FrameType.AGREE:
            group, position, digest, ranks, timeout_ms = message.fields
            members = self._members(ranks)
            if not self._are_members(members) or request.rank not in members:
                return [self._refuse_outsider(request, f"group {group!r}", members)]
            return self._agreements.ask(request, group, members, position, digest, timeout_ms)
        if message.type in (FrameType.PUT_ID, FrameType.GET_ID):
            group, root, ranks, last = message.fields
            members = self._members(ranks)
            if not self._are_members(members):
                listed = list_members(members)
                return [request.refuse(f"group {group!r} needs ranks below {self._world_size}, got {listed}")]
            serve = self._ids.put if message.type is FrameType.PUT_ID else self._ids.get
            return serve(request, group, root, members, last)
        return [request.refuse(f"{message.type.name} is not a request of a joined rank", REFUSED)]

    def _claim(self, request: Request, message: Message) -> Claim:
        group, ranks, position, what, waited_ms, missing = message.fields
        if missing is not None:
            missing = tuple(r for r in missing if r in self.roster.members and r != request.rank) or None
        members = self._members(ranks)
        if not self._are_members(members):
            members = tuple(rank for rank in members if rank in self.roster.members)
        return Claim(request.rank, group, members, position, what, waited_ms / 1000.0, missing)

    def _members(self, ranks: list[int] | None) -> Members:
        return members_of(ranks, self._world_size)

    def _are_members(self, members: Members) -> bool:
        return are_known(members, self._world_size)

    def _refuse_outsider(self, request: Request, what: str, members: Members) -> Send:
        listed, who = list_members(members), self.roster.label(request.rank)
        return request.refuse(f"{what} of ranks {listed} does not include {who}")
