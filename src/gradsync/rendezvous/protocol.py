"""The server's core: generations, their members, and a handler for each frame.

`RendezvousCore.handle` takes the time and an event, and returns actions. The core has no sockets, no clock and no
randomness, so tests and model checkers can call the core without a server. A connection joins as one rank. It joins the
earliest open generation that this rank has not joined before. The core refuses the join of a rank that is still
connected to a generation. A generation forms when all its ranks have joined and the generation before has ended. A
generation ends when all its connections have ended.

A generation fails in these cases: a connection ends without a LEAVE; a member reports a failure; a silent member is
found stopped (SIGSTOP), gone or unreachable; or a member does not arrive at a collective in time. A generation that has
not formed yet also fails when the process of a missing rank has ended or is stopped. Every connected member gets the
failure at once, and again as the answer to every later request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gradsync.rendezvous.frames import (
    REFUSED,
    THE_WORLD,
    TO_GENERATION,
    Action,
    Close,
    Ended,
    Event,
    FrameType,
    Inspect,
    Inspected,
    Lost,
    Message,
    Notice,
    Received,
    Send,
    Started,
)
from gradsync.rendezvous.liveness import Judgement, Peers, process_key
from gradsync.rendezvous.roster import RUNNING_PHASE, Failure, Member, Roster, join_refusal
from gradsync.rendezvous.store import Departures, Exchanges, Keys, Request, WaitTable
from gradsync.rendezvous.stuck import StuckCollectives

MAX_WAITS_PER_CONNECTION = 64
_NOTICE_INTERVAL_SECONDS = 5.0


class Generation:
    """One generation: its members, their store and its failure; the `WaitTarget` of the ranks that join."""

    def __init__(self, world_size: int, waits: WaitTable) -> None:
        self.roster = Roster(world_size)
        self.number: int | None = None  # None until the generation forms
        self.failure: Failure | None = None
        self.keys = Keys(self.roster, waits)
        self.exchanges = Exchanges(self.roster, waits)
        self.departures = Departures(self.roster, self.keys.forget)
        self.stuck = StuckCollectives(self.roster, waits)

    @property
    def is_running(self) -> bool:
        """Whether the generation has formed and not failed."""
        return self.number is not None and self.failure is None

    @property
    def is_forming(self) -> bool:
        """Whether the generation has neither formed nor failed."""
        return self.number is None and self.failure is None

    def withdraw(self, request: Request) -> None:
        """Removes a rank that has cancelled its join."""
        self.roster.cancel(request.rank)

    def missing_ranks(self, _request: Request) -> tuple[int, ...]:
        """Returns the ranks that have not joined."""
        return self.roster.missing_ranks()

    def rank_left(self, rank: int) -> list[Send]:
        """Fails the waits that need a rank that has left the world; removes the groups that all members have left."""
        self.departures.rank_left(rank)
        return [*self.exchanges.rank_left(rank), *self.keys.rank_left()]


class RendezvousCore:
    """Turns each event into the server's actions.

    Args:
        world_size: the number of launched ranks.
        machine: the server's `machine_identity`; "" if unknown.
        host: the rank that hosts the server; None if no rank does. When the host cancels its join, the joins of all
            waiting ranks end too.

    Attributes:
        formed_count: the number of the last generation that formed; 0 before the first.
    """

    def __init__(self, world_size: int, *, machine: str = "", host: int | None = None) -> None:
        self._world_size = world_size
        self._host = host
        self._machine = machine
        self._generations: list[Generation] = []  # the current generation first
        self._member_of: dict[int, tuple[Generation, int]] = {}  # connection -> generation, rank
        self._waits = WaitTable()
        self._peers = Peers()
        self._pids: dict[int, int] = {}  # rank -> process id, as its launcher has reported
        self._ended: dict[int, str] = {}  # rank -> how its process ended, as its launcher has reported
        self._forming: Generation | None = None  # the generation whose missing ranks the core watches and reports
        self._notice_at: float | None = None
        self.formed_count = 0

    def handle(self, now: float, event: Event) -> list[Action]:
        """Handles one event and returns the actions, in order.

        Args:
            now: monotonic seconds; never less than in the call before.
            event: the event.
        """
        self._peers.reset_if_late(now)
        if isinstance(event, Received):
            message, member = event.message, self._member_of.get(event.connection)
            if member is not None:
                actions = self._receive(now, event.connection, message, *member)
                if message.type not in _CHANGING:  # most messages neither form nor end a generation
                    return actions
            elif message.type is FrameType.JOIN:
                actions = self._join(now, event.connection, message)
            else:  # the connection was refused or timed out while this message was on its way
                return [Close(event.connection)]
        elif isinstance(event, Lost):
            actions = self._lose(event.connection, event.cause)
        elif isinstance(event, Inspected):
            actions = self._judge(now, event)
        elif isinstance(event, Started):
            self._pids[event.rank] = event.pid
            self._watch(now, event.rank)
            actions = []
        elif isinstance(event, Ended):
            self._ended[event.rank] = event.how
            actions = []
        else:
            actions = [*self._inspect_silent(now), *self._advance_stuck(now), *self._name_missing(now)]
        return actions + self._advance_generations(now)

    def next_deadline(self) -> float | None:
        """Returns when the next Tick is due, in monotonic seconds, or None."""
        due = [self._notice_at, self._peers.next_deadline()]
        due += [generation.stuck.next_deadline() for generation in self._generations if generation.is_running]
        return min((time_due for time_due in due if time_due is not None), default=None)

    def _receive(
        self, now: float, connection: int, message: Message, generation: Generation, rank: int
    ) -> list[Action]:
        """Passes a member's message to its handler, if the state of the generation allows it."""
        request = Request(connection, rank, message.sequence, now)
        actions: list[Action] = []
        if self._peers.note_alive(connection, now):
            actions.append(Notice(f"{generation.roster.name(rank)} responds again"))
        if (handler := _OF_CORE.get(message.type)) is not None:
            return actions + handler(self, generation, request, *message.fields)
        if (noted := _NOTED.get(message.type)) is not None:
            return [*actions, *noted(generation)(request, *message.fields)] if generation.is_running else actions
        if generation.failure is not None:
            return [*actions, request.fail(generation.failure)]
        if message.type not in _ANSWERED:
            refusal = "a rank that has joined cannot send this request"
        elif generation.number is None:
            refusal = "this connection has not joined a complete generation yet"
        elif self._waits.count(connection) >= MAX_WAITS_PER_CONNECTION:
            refusal = f"this rank already has {MAX_WAITS_PER_CONNECTION} requests that wait, which is the limit"
        else:
            return [*actions, *_ANSWERED[message.type](generation)(request, *message.fields)]
        return [*actions, request.refuse(refusal, REFUSED)]

    # Joining, leaving, failing.

    def _join(self, now: float, connection: int, message: Message) -> list[Action]:
        rank, world_size, machine, host, pid = message.fields
        request = Request(connection, rank, message.sequence, now)
        refusal = join_refusal(self._world_size, rank, world_size)
        for generation in self._generations:
            member = generation.roster.members.get(rank)
            if member is None:  # all ranks are members of a generation that has formed
                break
            if member.is_present:
                roster = generation.roster
                alive = f"{roster.label(rank)} has joined already and is alive ({roster.phase})"
                refusal = refusal or f"{alive}; each rank joins once"
        else:
            generation = Generation(self._world_size, self._waits)
        if refusal:
            return [request.refuse(refusal, REFUSED), Close(connection)]
        if generation.failure is not None:
            return [request.fail(generation.failure), Close(connection)]
        if generation not in self._generations:
            self._generations.append(generation)
        host = "" if machine and machine == self._machine else host or "another machine"
        generation.roster.add(rank, Member(connection, pid or None, host))
        self._member_of[connection] = (generation, rank)
        self._waits.add(request, generation)
        self._peers.end(process_key(rank))
        if pid:
            self._peers.begin(connection, now)
        return [Send(connection, FrameType.PULSE, ())]

    def _leave(
        self, generation: Generation, request: Request, name: str, ranks: list[int] | None, position: int
    ) -> list[Action]:
        """Records that a rank has left a group, or the world."""
        if name != THE_WORLD:
            if generation.is_running:
                generation.departures.leave(request, name, ranks, position)
            return []
        self._remove_connection(request.connection)
        if request.rank in generation.roster.members:  # otherwise the rank was still joining, and is removed by now
            generation.roster.members[request.rank].is_present = False
            generation.roster.left[request.rank] = None
            if generation.is_running:
                return [*generation.rank_left(request.rank), Close(request.connection)]
        return [Close(request.connection)]

    def _lose(self, connection: int, cause: str) -> list[Action]:
        if connection not in self._member_of:
            return []
        generation, rank = self._member_of[connection]
        generation.roster.members[rank].is_present = False
        self._remove_connection(connection)
        return self._fail_generation(generation, generation.roster.death(rank, cause))

    def _report_failure(
        self, generation: Generation, request: Request, reason: str, culprit: int | None
    ) -> list[Action]:
        return self._fail_generation(generation, generation.roster.reported(request.rank, reason, culprit))

    def _fail_generation(self, generation: Generation, failure: Failure) -> list[Action]:
        """Fails a generation and sends the failure to all its members; the first failure stays."""
        if generation.failure is not None:
            return []
        generation.failure = failure
        for _, member in generation.roster.present():
            self._peers.end(member.connection)
            self._waits.close_all(member.connection)  # the FAILED frame answers all these waits
        return [failure.send(member.connection, TO_GENERATION) for _, member in generation.roster.present()]

    def _cancel(self, generation: Generation, request: Request, sequence: int) -> list[Action]:
        """Ends a wait whose caller has reached its deadline or was interrupted; the answer names the missing ranks."""
        cancelled = self._waits.find(request.connection, sequence)
        if cancelled is None:  # the request's answer is already on its way
            return []
        is_join = cancelled.target is generation
        missing = cancelled.target.missing_ranks(cancelled)
        where = generation.roster.states_text(missing)
        ended = [cancelled]
        self._waits.close(cancelled)
        if is_join and request.rank == self._host:
            # The server ends after the host has cancelled its join. Before the server ends, every other rank gets the
            # names of the missing ranks.
            for _, member in generation.roster.present():
                ended += self._waits.close_all(member.connection)
        actions: list[Action] = []
        for each in ended:
            each.target.withdraw(each)
            actions.append(each.time_out(missing, where))
            if is_join:
                self._remove_connection(each.connection)
                actions.append(Close(each.connection))
                self._watch(request.now, each.rank)
        return actions

    def _remove_connection(self, connection: int) -> None:
        """Removes a connection from its generation, and withdraws its waits."""
        del self._member_of[connection]
        self._peers.end(connection)
        for request in self._waits.close_all(connection):
            request.target.withdraw(request)

    # Generations.

    def _advance_generations(self, now: float) -> list[Action]:
        """Drops ended generations. Forms the next generation once all its ranks have joined.

        If the process of a missing rank has ended, fails this generation.
        """
        self._generations = [g for g in self._generations if not g.roster.is_empty()]
        first = self._generations[0] if self._generations else None
        forming = first if first is not None and first.is_forming else None
        if forming is not self._forming:
            self._forming = forming
            self._peers.end_processes()
            self._notice_at = None if forming is None else now + _NOTICE_INTERVAL_SECONDS
            for rank in self._pids:
                self._watch(now, rank)
        if forming is None:
            return []
        roster = forming.roster
        if roster.is_complete():
            return self._form(forming)
        for rank, how in self._ended.items():
            if rank not in roster.members:
                return self._fail_generation(forming, roster.ended(rank, how)) + self._advance_generations(now)
        return []

    def _form(self, generation: Generation) -> list[Action]:
        generation.number = self.formed_count = self.formed_count + 1
        generation.roster.phase = RUNNING_PHASE
        self._forming = self._notice_at = None
        self._peers.end_processes()
        actions: list[Action] = []
        for _, member in generation.roster.present():
            [request] = self._waits.close_all(member.connection)
            actions.append(request.reply((generation.number,)))
        return actions

    def _name_missing(self, now: float) -> list[Action]:
        """Logs the ranks that have not joined, every few seconds."""
        if self._forming is None or self._notice_at is None or now < self._notice_at:
            return []
        self._notice_at = now + _NOTICE_INTERVAL_SECONDS
        return [Notice(self._forming.roster.incomplete_text())]

    # Processes to inspect.

    def _watch(self, now: float, rank: int) -> None:
        """Begins to watch the process of a rank that has not joined."""
        forming = self._forming
        if forming is not None and rank in self._pids and rank not in forming.roster.members:
            self._peers.begin(process_key(rank), now)

    def _inspect_silent(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for key in self._peers.due_peers(now):
            if key < 0:
                actions.append(Inspect(key, self._pids[process_key(key)]))
                continue
            generation, rank = self._member_of[key]
            # The peer's kernel acknowledges this frame even if its process does not run.
            actions.append(Send(key, FrameType.PULSE, ()))
            actions.append(Inspect(key, generation.roster.members[rank].local_pid))
        return actions

    def _judge(self, now: float, event: Inspected) -> list[Action]:
        """Handles the inspected state of a rank that is silent, has not sent its status, or has not joined."""
        if event.peer < 0:
            return self._judge_process(now, event)
        if event.peer not in self._member_of:
            return []
        generation, rank = self._member_of[event.peer]
        judgement = self._peers.judge(event.peer, now, event.state)
        if judgement is Judgement.NONE:
            return []
        silent_seconds = self._peers.silent_seconds(event.peer, now)
        if judgement is Judgement.SLOW:
            return [Notice(event.state.slow_text(generation.roster.name(rank), silent_seconds))]
        failure = generation.roster.silence(rank, event.state, f"no sign of life for {silent_seconds:.1f} s")
        notices = [] if len(generation.roster.present()) > 1 else [Notice(failure.text)]  # no other rank can report it
        return [*self._fail_generation(generation, failure), *notices]

    def _judge_process(self, now: float, event: Inspected) -> list[Action]:
        if self._forming is None or self._peers.judge(event.peer, now, event.state) is not Judgement.LOST:
            return []
        rank = process_key(event.peer)
        seconds = self._peers.silent_seconds(event.peer, now)
        failure = self._forming.roster.stopped_before_joining(rank, self._pids[rank], event.state, seconds)
        return self._fail_generation(self._forming, failure)

    def _heartbeat(self, generation: Generation, request: Request, positions: dict[str, int]) -> list[Action]:
        generation.roster.members[request.rank].positions = positions
        return [Send(request.connection, FrameType.PULSE, ())]

    # Collectives that do not end.

    def _advance_stuck(self, now: float) -> list[Action]:
        """Logs warnings about stuck collectives, and ends the wait for the ranks' status at its deadline.

        The end of this wait fails the generation with the report, after a look at the processes that sent no status.

        Called only after a Tick: a server that runs late must first read the answers that have arrived.
        """
        actions: list[Action] = []
        for generation in self._generations:
            due_at = generation.stuck.next_deadline() if generation.is_running else None
            if due_at is not None and due_at <= now:
                outcome = generation.stuck.advance(now, self._peers)
                if isinstance(outcome, Failure):
                    outcome = self._fail_generation(generation, outcome)
                actions += outcome
        return actions


Handler = Callable[..., "list[Action]"]  # (core, generation, request, *fields)
Service = Callable[["Generation"], Callable[..., Sequence[Action]]]  # the result takes (request, *fields)

#: The frames that the core itself handles, in every state of the generation.
_OF_CORE: dict[FrameType, Handler] = {
    FrameType.HEARTBEAT: RendezvousCore._heartbeat,
    FrameType.CANCEL: RendezvousCore._cancel,
    FrameType.REPORT_FAILURE: RendezvousCore._report_failure,
    FrameType.LEAVE: RendezvousCore._leave,
}
#: The frames that get no answer. The core ignores them if the generation does not run.
_NOTED: dict[FrameType, Service] = {
    FrameType.STATUS: lambda generation: generation.stuck.record_status,
    FrameType.STUCK: lambda generation: generation.stuck.report,
}
#: The requests. If the generation does not run, the answer is its failure, or a refusal.
_ANSWERED: dict[FrameType, Service] = {
    FrameType.SET: lambda generation: generation.keys.set,
    FrameType.GET: lambda generation: generation.keys.get,
    FrameType.DELETE: lambda generation: generation.keys.delete,
    FrameType.EXCHANGE: lambda generation: generation.exchanges.arrive,
    FrameType.LEFT_RANKS: lambda generation: generation.departures.left_ranks,
}
#: The frames of a member after which a generation may form or end.
_CHANGING = (FrameType.CANCEL, FrameType.REPORT_FAILURE, FrameType.LEAVE)
