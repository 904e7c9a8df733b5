"""The server's core: generations, and who is in them. (now, event) -> actions, without I/O.

No sockets, no clock, no randomness: `event_loop` feeds it, tests and model checkers can too. A connection joins
as one rank of the earliest generation that has not had that rank yet; a generation forms when all its ranks
have joined and the one before has ended, and ends when all its connections are gone. A connection lost
without a goodbye poisons its generation: every member is told at once, and every later request is answered
with the same failure.
"""

from __future__ import annotations

from gradsync.rendezvous.events import Action, Close, Event, Lost, Notice, Received, Send
from gradsync.rendezvous.generation import Generation
from gradsync.rendezvous.messages import PROTOCOL_VERSION, REFUSED, TO_GENERATION, FrameType, Message
from gradsync.rendezvous.roster import RUNNING_PHASE, MemberState, Roster
from gradsync.rendezvous.waiting import Failure, Request, WaitTable

NOTICE_INTERVAL_SECONDS = 5.0
MAX_WAITS_PER_CONNECTION = 64


class RendezvousCore:
    """Decides what the server does.

    Args:
        world_size: ranks in every generation.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._generations: list[Generation] = []  # the present one first
        self._seats: dict[int, tuple[Generation, int]] = {}  # connection -> generation, rank
        self._waits = WaitTable()
        self._formed_count = 0
        self._notice_at: float | None = None

    def handle(self, now: float, event: Event) -> list[Action]:
        """Takes one event and returns what to do, in order.

        Args:
            now: monotonic seconds; never less than in the call before.
            event: what happened.
        """
        if isinstance(event, Received):
            actions = self._receive(now, event.connection, event.message)
        elif isinstance(event, Lost):
            actions = self._lose(event.connection, event.cause)
        else:
            actions = self._expire(now)
        return actions + self._advance_generations(now)

    def next_deadline(self) -> float | None:
        """Returns when the next Tick is due, in monotonic seconds, or None."""
        due = [t for t in (self._waits.next_deadline(), self._notice_at) if t is not None]
        return min(due, default=None)

    def _receive(self, now: float, connection: int, message: Message) -> list[Action]:
        seat = self._seats.get(connection)
        if message.type is FrameType.JOIN and seat is None:
            return self._join(now, connection, message)
        if seat is None:
            return [Close(connection)]  # what a connection sent after it was refused or timed out
        generation, rank = seat
        request = Request(connection, rank, message.sequence, now)
        if message.type is FrameType.BYE:
            return self._say_goodbye(connection, generation, rank)
        if message.type is FrameType.SET_PHASE:
            generation.roster.members[rank].phase = message.fields[0]
            return []
        if message.type is FrameType.PASSED:
            return [*generation.hear_passed(rank, message)]
        if message.type is FrameType.CANCEL:
            return self._cancel(connection, message.fields[0])
        if message.type is FrameType.REPORT_FAILURE:
            return self._report(request, generation, message.fields[0])
        return [*self._serve(request, generation, message)]

    def _join(self, now: float, connection: int, message: Message) -> list[Action]:
        version, rank, world_size, timeout_ms = message.fields
        request = Request(connection, rank, message.sequence, now)
        refusal = self._check_join(version, rank, world_size)
        if refusal:
            return [request.refuse(refusal, REFUSED), Close(connection)]
        for generation in self._generations:
            member = generation.roster.members.get(rank)
            if member is None:
                break
            if member.state is MemberState.PRESENT:
                who = generation.roster.label(rank)
                refusal = f"{who} has joined already and is alive (in {member.phase!r}); each rank joins once"
                return [request.refuse(refusal, REFUSED), Close(connection)]
        else:
            generation = Generation(self._world_size, self._waits)
            self._generations.append(generation)
        if generation.failure is not None:
            return [request.fail(generation.failure), Close(connection)]
        generation.roster.seat(rank, connection)
        self._seats[connection] = (generation, rank)
        self._waits.add(request, timeout_ms, generation)
        return [Send(connection, FrameType.SEATED, (message.sequence,))]

    def _check_join(self, version: int, rank: int, world_size: int) -> str:
        """Returns why this join cannot be accepted, with both values, or an empty text."""
        if version != PROTOCOL_VERSION:
            return (
                f"the server speaks protocol version {PROTOCOL_VERSION}, rank {rank} version {version}; "
                "run the same version of gradsync on every rank"
            )
        if world_size != self._world_size:
            return f"the server expects world_size {self._world_size}, rank {rank} came with {world_size}"
        if rank >= self._world_size:
            return f"the server expects ranks 0 to {self._world_size - 1}, got rank {rank}"
        return ""

    def _serve(self, request: Request, generation: Generation, message: Message) -> list[Send]:
        """Answers a request that needs a generation which has formed and not failed."""
        if generation.failure is not None:
            return [request.fail(generation.failure)]
        if generation.number is None:
            return [request.refuse("this connection has not joined a complete generation yet", REFUSED)]
        if self._waits.count(request.connection) >= MAX_WAITS_PER_CONNECTION:
            return [request.refuse("too many requests of this connection wait already", REFUSED)]
        return generation.serve(request, message)

    def _cancel(self, connection: int, sequence: int) -> list[Action]:
        wait = self._waits.find(connection, sequence)
        if wait is None or isinstance(wait.place, Generation):
            return []
        self._waits.close(wait)
        wait.place.withdraw(wait)
        return []

    def _say_goodbye(self, connection: int, generation: Generation, rank: int) -> list[Action]:
        self._unseat(connection)
        if generation.is_running:
            return [*generation.rank_left(rank), Close(connection)]
        if rank in generation.roster.members:
            generation.roster.mark_left(rank)
        return [Close(connection)]

    def _lose(self, connection: int, cause: str) -> list[Action]:
        if connection not in self._seats:
            return []
        generation, rank = self._seats[connection]
        self._unseat(connection)
        member = generation.roster.mark_dead(rank, connection)
        text = (
            f"{generation.roster.label(rank)} died in phase {member.phase!r}: "
            f"its control connection was lost without a goodbye ({cause})"
        )
        return self._poison(generation, Failure(rank, member.phase, text), spare=None)

    def _report(self, request: Request, generation: Generation, reason: str) -> list[Action]:
        phase = generation.roster.members[request.rank].phase
        text = f"{generation.roster.label(request.rank)} failed in phase {phase!r}: {reason}"
        failure = Failure(request.rank, phase, text)
        return [request.reply(), *self._poison(generation, failure, spare=request.rank)]

    def _poison(self, generation: Generation, failure: Failure, *, spare: int | None) -> list[Action]:
        """Ends a generation for all its members; the first cause stays. `spare` is not told: it told us."""
        if generation.failure is not None:
            return []
        generation.failure = failure
        sends: list[Action] = []
        for rank, member in generation.roster.present():
            for wait in self._waits.of_connection(member.connection):
                self._waits.close(wait)
            if rank != spare:
                sends.append(failure.tell(member.connection, TO_GENERATION))
        return sends

    def _unseat(self, connection: int) -> None:
        """Takes a connection out of its generation; its waits are withdrawn."""
        del self._seats[connection]
        for wait in self._waits.of_connection(connection):
            self._waits.close(wait)
            wait.place.withdraw(wait)

    def _expire(self, now: float) -> list[Action]:
        actions: list[Action] = []
        while (wait := self._waits.pop_due(now)) is not None:
            generation, _ = self._seats[wait.request.connection]
            missing = wait.place.missing_ranks()
            wait.place.withdraw(wait)
            actions.append(wait.request.time_out(missing, generation.roster.whereabouts(missing)))
            if wait.place is generation:
                del self._seats[wait.request.connection]
                actions.append(Close(wait.request.connection))
        return actions

    def _advance_generations(self, now: float) -> list[Action]:
        """Drops generations that have ended, forms the present one when it is complete."""
        self._generations = [g for g in self._generations if not g.roster.is_deserted()]
        if not self._generations:
            self._notice_at = None
            return []
        head = self._generations[0]
        if head.number is not None or head.failure is not None:
            self._notice_at = None
            return []
        if head.roster.is_complete():
            return self._form(head)
        return self._notice(now, head.roster)

    def _form(self, generation: Generation) -> list[Action]:
        self._formed_count += 1
        generation.number = self._formed_count
        self._notice_at = None
        actions: list[Action] = []
        for _, member in generation.roster.present():
            member.phase = RUNNING_PHASE
            for wait in self._waits.of_connection(member.connection):
                self._waits.close(wait)
                actions.append(wait.request.reply(generation.number))
        return actions

    def _notice(self, now: float, roster: Roster) -> list[Action]:
        """Names the ranks that keep the others waiting, every few seconds."""
        if self._notice_at is None:
            self._notice_at = now + NOTICE_INTERVAL_SECONDS
        if now < self._notice_at:
            return []
        self._notice_at = now + NOTICE_INTERVAL_SECONDS
        where = roster.whereabouts(roster.missing_ranks())
        return [Notice(f"{len(roster.members)} of {self._world_size} ranks have joined; waiting for {where}")]
