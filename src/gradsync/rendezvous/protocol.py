"""The server's core: generations, and who is in them. (now, event) -> actions, without I/O.

No sockets, no clock, no randomness: `event_loop` feeds it, tests and model checkers can too. A connection joins as one
rank of the earliest generation that has not had that rank yet; a generation forms when all its ranks have joined and
the one before has ended, and ends when all its connections are gone. A connection lost without a goodbye poisons its
generation: every member is told at once, and every later request is answered with the same failure. So does a member
that was found stopped or out of reach, after a silence, and one that does not come to a collective in time.
"""

from __future__ import annotations

from gradsync.rendezvous import verdict_texts
from gradsync.rendezvous.events import Action, Close, Event, Lost, Notice, OfProcess, Probe, Probed, Received, Send
from gradsync.rendezvous.generation import HEARD, Generation
from gradsync.rendezvous.joining import Joining
from gradsync.rendezvous.messages import REFUSED, TO_GENERATION, FrameType, Message
from gradsync.rendezvous.roster import RUNNING_PHASE, MemberState
from gradsync.rendezvous.silence import Judgement, SilenceTable
from gradsync.rendezvous.waiting import Failure, Request, WaitTable

MAX_WAITS_PER_CONNECTION = 64


class RendezvousCore:
    """Decides what the server does.

    Args:
        world_size: ranks in every generation.
        machine: the server's own, see `machine_identity`; "" where that is not known.
        pid: the server's own.
        earlier_generations: how many an earlier server of this run has formed.
        called: what messages call a member.
        host: the rank that hosts the server; when it waits no longer for others to join, nobody does.

    Attributes:
        formed_count: number of the generation that was formed last.
    """

    def __init__(
        self,
        world_size: int,
        *,
        machine: str = "",
        pid: int = 0,
        earlier_generations: int = 0,
        called: str = "rank",
        host: int | None = None,
    ) -> None:
        self._world_size = world_size
        self._host = host
        self._called = called
        self._machine = machine
        self._pid = pid
        self._generations: list[Generation] = []  # the present one first
        self._seats: dict[int, tuple[Generation, int]] = {}  # connection -> generation, rank
        self._waits = WaitTable()
        self._silences = SilenceTable()
        self.formed_count = earlier_generations
        self._joining = Joining()

    def handle(self, now: float, event: Event) -> list[Action]:
        """Takes one event and returns what to do, in order.

        Args:
            now: monotonic seconds; never less than in the call before.
            event: what happened.
        """
        self._silences.restart_if_late(now)
        if isinstance(event, Received):
            if event.message.type is FrameType.HEARTBEAT and event.connection in self._seats:
                return self._hear_heartbeat(now, event.connection, event.message)
            actions = self._receive(now, event.connection, event.message)
        elif isinstance(event, Lost):
            actions = self._lose(event.connection, event.cause)
        elif isinstance(event, Probed):
            actions = self._judge(now, event)
        elif isinstance(event, OfProcess):
            self._joining.hear(now, event)
            actions = []
        else:
            actions = [*self._expire(now), *self._look_at_silent(now), *self._advance_absences(now)]
        return actions + self._advance_generations(now)

    def next_deadline(self) -> float | None:
        """Returns when the next Tick is due, in monotonic seconds, or None."""
        absence_due = self._generations[0].next_deadline() if self._generations else None
        due = (self._waits.next_deadline(), self._joining.next_deadline(), self._silences.next_deadline(), absence_due)
        return min((time_due for time_due in due if time_due is not None), default=None)

    def _receive(self, now: float, connection: int, message: Message) -> list[Action]:
        seat = self._seats.get(connection)
        if seat is None:  # other messages of such a connection were sent before it was refused or timed out
            return self._join(now, connection, message) if message.type is FrameType.JOIN else [Close(connection)]
        generation, rank = seat
        request = Request(connection, rank, message.sequence, now)
        return self._hear(now, connection) + self._handle_message(request, generation, message)

    def _hear_heartbeat(self, now: float, connection: int, message: Message) -> list[Action]:
        """Takes a sign of life. Nearly all messages are: it changes no generation, so none needs to be looked at."""
        generation, rank = self._seats[connection]
        generation.roster.members[rank].positions = message.fields[0]
        return [*self._hear(now, connection), Send(connection, FrameType.PULSE, ())]

    def _hear(self, now: float, connection: int) -> list[Action]:
        """Notes that a rank was heard of; returns what is to be said about that."""
        if not self._silences.hear(connection, now):
            return []
        generation, rank = self._seats[connection]
        return [Notice(verdict_texts.revival(generation.roster, rank))]

    def _handle_message(self, request: Request, generation: Generation, message: Message) -> list[Action]:
        connection, rank = request.connection, request.rank
        if message.type is FrameType.BYE:
            return self._say_goodbye(connection, generation, rank)
        if message.type is FrameType.CANCEL:
            return self._cancel(connection, message.fields[0])
        if message.type is FrameType.REPORT_FAILURE:
            return self._report(request, generation, *message.fields)
        if message.type is FrameType.INTRODUCE:
            return self._introduce(request, generation, message)
        if message.type in HEARD:
            return [*generation.hear(request, message)]
        if message.type is FrameType.ABSENT and generation.failure is not None:
            return [generation.failure.tell(connection, TO_GENERATION)]
        return [*self._serve(request, generation, message)]

    def _join(self, now: float, connection: int, message: Message) -> list[Action]:
        version, rank, world_size, timeout_ms = message.fields
        request = Request(connection, rank, message.sequence, now)
        refusal = verdict_texts.join_refusal(self._world_size, version, rank, world_size, self._called)
        if refusal:
            return [request.refuse(refusal, REFUSED), Close(connection)]
        for generation in self._generations:
            member = generation.roster.members.get(rank)
            if member is None:
                break
            if member.state is MemberState.PRESENT:
                roster = generation.roster
                alive = f"{roster.label(rank)} has joined already and is alive (in {roster.phase!r})"
                refusal = f"{alive}; each {self._called} joins once"
                return [request.refuse(refusal, REFUSED), Close(connection)]
        else:
            generation = Generation(self._world_size, self._waits, self._called, self._host)
            self._generations.append(generation)
        if generation.failure is not None:
            return [request.fail(generation.failure), Close(connection)]
        generation.roster.seat(rank, connection)
        self._seats[connection] = (generation, rank)
        self._waits.add(request, timeout_ms, generation)
        return [Send(connection, FrameType.SEATED, (message.sequence, self._machine, self._pid))]

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
        generation.roster.mark_dead(rank, connection)
        return self._poison(generation, verdict_texts.death(generation.roster, rank, cause))

    def _report(self, request: Request, generation: Generation, reason: str, culprit: int | None) -> list[Action]:
        failure = verdict_texts.reported(generation.roster, request.rank, reason, culprit)
        return [request.reply(), *self._poison(generation, failure, reporter=request.rank)]

    def _introduce(self, request: Request, generation: Generation, message: Message) -> list[Action]:
        """Learns which process a rank is; from now on its silence means something."""
        machine, host, pid = message.fields
        member = generation.roster.members[request.rank]
        member.pid = pid
        member.host = "" if machine and machine == self._machine else host or "another machine"
        if generation.failure is None:
            self._silences.begin(request.connection, request.now)
        return []

    def _look_at_silent(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for connection in self._silences.take_due(now):
            generation, rank = self._seats[connection]
            # Something that its machine has to acknowledge, even if its process cannot.
            actions.append(Send(connection, FrameType.PULSE, ()))
            actions.append(Probe(connection, generation.roster.members[rank].local_pid))
        return actions

    def _judge(self, now: float, event: Probed) -> list[Action]:
        """Takes what was found of a silent rank, or of one that did not answer an inquiry."""
        if event.connection not in self._seats:
            return []
        generation, rank = self._seats[event.connection]
        generation.absences.hear_finding(rank, event.finding, now)
        judgement = self._silences.judge(event.connection, now, event.finding)
        if judgement is Judgement.NONE:
            return []
        silent_seconds = self._silences.silent_seconds(event.connection, now)
        if judgement is Judgement.SLOW:
            return [Notice(verdict_texts.slowness(generation.roster, rank, event.finding, silent_seconds))]
        evidence = f"not heard of for {silent_seconds:.1f} s"
        failure = verdict_texts.silence(generation.roster, rank, event.finding, evidence)
        notices = [] if len(generation.roster.present()) > 1 else [Notice(failure.text)]  # nobody else would say so
        return [*self._poison(generation, failure), *notices]

    def _poison(self, generation: Generation, failure: Failure, *, reporter: int | None = None) -> list[Action]:
        """Ends a generation for all its members; the first cause stays. The reporter is told in what it waits for."""
        if generation.failure is not None:
            return []
        generation.failure = failure
        sends: list[Action] = []
        for rank, member in generation.roster.present():
            self._silences.end(member.connection)
            waits = self._waits.close_all(member.connection)
            if rank == reporter:
                sends += [wait.request.fail(failure) for wait in waits]
            else:
                sends.append(failure.tell(member.connection, TO_GENERATION))
        return sends

    def _advance_absences(self, now: float) -> list[Action]:
        """Goes on with what ranks say that wait; with the clock only, so that a late server overlooks no answer."""
        due_at = self._generations[0].next_deadline() if self._generations else None
        if due_at is None or now < due_at:
            return []
        generation = self._generations[0]
        outcome = generation.absences.advance(now)
        return self._poison(generation, outcome) if isinstance(outcome, Failure) else outcome

    def _unseat(self, connection: int) -> None:
        """Takes a connection out of its generation; its waits are withdrawn."""
        del self._seats[connection]
        self._silences.end(connection)
        for wait in self._waits.close_all(connection):
            wait.place.withdraw(wait)

    def _expire(self, now: float) -> list[Action]:
        actions: list[Action] = []
        while (wait := self._waits.pop_due(now)) is not None:
            generation, _ = self._seats[wait.request.connection]
            missing = wait.place.missing_ranks()
            where = generation.roster.whereabouts(missing)
            for ended in generation.end_with(wait):
                actions.append(ended.request.time_out(missing, where))
                if ended.place is generation:
                    self._unseat(ended.request.connection)
                    actions.append(Close(ended.request.connection))
        return actions

    def _advance_generations(self, now: float) -> list[Action]:
        """Drops generations that have ended, forms the present one when it is complete."""
        self._generations = [g for g in self._generations if not g.roster.is_deserted()]
        head = self._generations[0] if self._generations else None
        if head is None or head.number is not None or head.failure is not None:
            self._joining.rest()
            return []
        if head.roster.is_complete():
            return self._form(head)
        failure = self._joining.failure(head.roster)
        return self._joining.take_due(now, head.roster) if failure is None else self._poison(head, failure)

    def _form(self, generation: Generation) -> list[Action]:
        generation.number = self.formed_count = self.formed_count + 1
        generation.roster.phase = RUNNING_PHASE
        self._joining.rest()
        actions: list[Action] = []
        for _, member in generation.roster.present():
            waits = self._waits.close_all(member.connection)
            actions += [wait.request.reply(generation.number) for wait in waits]
        return actions
