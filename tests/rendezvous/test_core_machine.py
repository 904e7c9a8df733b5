"""The server's core beside a reference model, under every order of events. Hypothesis shortens what differs.

This file names a private module, because the core is the protocol: it has no sockets and no clock, so that hypothesis
can drive it through orders of events that no network brings about in an hour.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from gradsync.rendezvous.frames import (
    THE_WORLD,
    Close,
    Ended,
    Event,
    FrameType,
    Inspect,
    Inspected,
    Lost,
    Message,
    Received,
    Send,
    Tick,
    check_fields,
)
from gradsync.rendezvous.liveness import ProcessState
from gradsync.rendezvous.protocol import RendezvousCore
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from rendezvous.reference_model import ALL, CLOSED, WORLD_SIZE, Model, Sent, Wait

RANKS = st.integers(0, WORLD_SIZE - 1)
NAMES = st.sampled_from(["a", "b"])
KEYS = st.sampled_from(["a", "a/x", "b"])
VALUES = st.sampled_from([b"", b"7", b"text"])
MEMBERS = st.sampled_from([None, [0, 1], [1, 2], [0, 1, 2]])
NUMBERS = st.integers(0, 2)
QUIET_STEPS = 8  # between two that end something: else most requests would meet a generation that has failed
PID = 100


class CoreMachine(RuleBasedStateMachine):
    """Does the same with both, and compares what they send after each step."""

    core_class = RendezvousCore

    def __init__(self) -> None:
        super().__init__()
        self.core = self.core_class(WORLD_SIZE, machine="m")
        self.model = Model()
        self.now = 100.0
        self.states: dict[int, ProcessState] = {}  # what a look at a connection finds
        self.connections = self.sequences = self.quiet_steps = 0
        self.out: dict[int, list[Sent]] = defaultdict(list)

    @initialize(is_formed=st.booleans())
    def begin(self, is_formed: bool) -> None:
        if is_formed:
            self.join_all()

    # Joining and ending.

    @rule(rank=RANKS)
    def join(self, rank: int) -> None:
        self.connections += 1
        connection = self.connections
        self.model.join(rank, self.send(connection, FrameType.JOIN, rank, WORLD_SIZE, "m", "h", PID + rank))

    @rule()
    def join_all(self) -> None:
        for rank in ALL:
            if not self.model.find(rank):
                self.join(rank)

    @precondition(lambda self: any(g.waits_of(rank) for g in self.model.generations for rank in ALL))
    @rule(data=st.data())
    def come_to_a_deadline(self, data: st.DataObject) -> None:
        generations = self.model.generations
        waits = [(rank, wait) for g in generations for rank in sorted(g.present) for wait in g.waits_of(rank)]
        rank, wait = data.draw(st.sampled_from(waits))
        self.send(wait.connection, FrameType.CANCEL, wait.sequence)
        self.model.cancel(rank, wait)

    @rule(rank=RANKS)
    def cancel_what_has_ended(self, rank: int) -> None:
        if self.model.find(rank):
            self.ask(rank, FrameType.CANCEL, 0)

    @precondition(lambda self: self.quiet_steps >= QUIET_STEPS)
    @rule(rank=RANKS, how=st.sampled_from(["leave", "die", "fall silent", "report"]), culprit=st.none() | RANKS)
    def end(self, rank: int, how: str, culprit: int | None) -> None:
        generation = self.model.find(rank)
        if generation is None:
            return
        connection = generation.members[rank]
        self.quiet_steps = 0
        if how == "leave":
            if culprit is not None:  # who reads what the rank that leaves never sets
                self.get(culprit, "never", rank)
            self.send(connection, FrameType.LEAVE, THE_WORLD, None, 0)
            self.model.leave(rank)
            if culprit is not None:
                self.get(culprit, "never", rank)
        elif how == "die":
            self.handle(Lost(connection, "reset"))
            self.model.lose(rank)
        elif how == "report":
            self.send(connection, FrameType.REPORT_FAILURE, "it failed", culprit)
            self.model.report(rank, culprit)
        elif generation.failure is None:
            self.states[connection] = ProcessState.STOPPED
            self.pass_silently(rank)
            self.model.fall_silent(rank)

    @rule(rank=RANKS)
    def be_silent_and_alive(self, rank: int) -> None:
        self.pass_silently(rank)

    @precondition(lambda self: self.quiet_steps >= QUIET_STEPS and not self.model.ended)
    @rule(rank=RANKS)
    def end_process(self, rank: int) -> None:
        self.handle(Ended(rank, "ended with exit code 0"))
        self.model.end_process(rank)
        self.quiet_steps = 0

    # Requests.

    @rule(rank=RANKS, key=KEYS, value=VALUES, reader=st.none() | RANKS)
    def set(self, rank: int, key: str, value: bytes, reader: int | None) -> None:
        if self.model.find(rank):
            self.model.set(rank, self.ask(rank, FrameType.SET, key, value), key, value)
            if reader is not None:
                self.get(reader, key, None)

    @rule(rank=RANKS, key=KEYS, from_rank=st.none() | RANKS)
    def get(self, rank: int, key: str, from_rank: int | None) -> None:
        if self.model.find(rank):
            self.model.get(rank, self.ask(rank, FrameType.GET, key, from_rank), key, from_rank)

    @rule(rank=RANKS, key=NAMES, below=KEYS, reader=RANKS)
    def delete(self, rank: int, key: str, below: str, reader: int) -> None:
        """Deletes a key and what is under it; a reader looks whether it has gone, or stayed."""
        if self.model.find(rank):
            self.set(rank, below, b"1", None)
            self.model.delete(rank, self.ask(rank, FrameType.DELETE, key), key)
            self.get(reader, below, None)

    @rule(rank=RANKS, name=NAMES, members=MEMBERS, value=VALUES)
    def exchange(self, rank: int, name: str, members: list[int] | None, value: bytes) -> None:
        if self.model.find(rank):
            wait = self.ask(rank, FrameType.EXCHANGE, name, members, value)
            self.model.exchange(rank, wait, name, tuple(members or ALL), value)

    @rule(name=NAMES, value=VALUES)
    def exchange_of_all(self, name: str, value: bytes) -> None:
        for rank in ALL:
            self.exchange(rank, name, None, value and b"%d" % rank)

    @rule(rank=RANKS, name=NAMES, members=MEMBERS, position=NUMBERS)
    def leave_group(self, rank: int, name: str, members: list[int] | None, position: int) -> None:
        if self.model.find(rank):
            self.ask(rank, FrameType.LEAVE, name, members, position)
            self.model.leave_group(rank, name, tuple(members or ALL), position)

    @rule(rank=RANKS, name=NAMES, members=MEMBERS)
    def left_ranks(self, rank: int, name: str, members: list[int] | None) -> None:
        if self.model.find(rank):
            wait = self.ask(rank, FrameType.LEFT_RANKS, name, members)
            self.model.left_ranks(rank, wait, name, tuple(members or ALL))

    @precondition(lambda self: self.quiet_steps >= QUIET_STEPS)
    @rule(
        rank=RANKS,
        missing=st.none() | st.sets(RANKS).map(sorted),
        begun=st.fixed_dictionaries(dict.fromkeys(ALL, NUMBERS)),
        silent=st.none() | RANKS,
        is_stopped=st.booleans(),
    )
    def stuck(
        self, rank: int, missing: list[int] | None, begun: dict[int, int], silent: int | None, is_stopped: bool
    ) -> None:
        generation = self.model.find(rank)
        if generation is None or not generation.is_running:
            return
        self.quiet_steps = 0
        self.ask(rank, FrameType.STUCK, "g", None, 2, "all_reduce #2", 5000, missing, True)
        for other in sorted(generation.present - {silent}):
            self.ask(other, FrameType.STATUS, {"g": (begun[other], ())}, "its report")
        if silent in generation.present:
            self.states[generation.members[silent]] = ProcessState.STOPPED if is_stopped else ProcessState.RUNNING
        self.model.stuck(rank, 2, tuple(missing or ()), begun, silent, is_stopped=is_stopped)
        self.pass_silently(silent)

    # What has to hold.

    @invariant()
    def both_send_the_same(self) -> None:
        out, self.out = self.out, defaultdict(list)
        assert {connection: sorted(messages, key=repr) for connection, messages in out.items()} == self.model.take()
        self.quiet_steps += 1

    @invariant()
    def the_core_sleeps_when_nobody_is_there(self) -> None:
        if not self.model.generations:
            assert self.core.next_deadline() is None

    # The world around the core.

    def send(self, connection: int, frame_type: FrameType, *fields: Any) -> Wait:
        check_fields(frame_type, fields)
        self.sequences += 1
        self.handle(Received(connection, Message(frame_type, self.sequences, fields)))
        return Wait(connection, self.sequences)

    def ask(self, rank: int, frame_type: FrameType, *fields: Any) -> Wait:
        generation = self.model.find(rank)
        assert generation is not None
        return self.send(generation.members[rank], frame_type, *fields)

    def handle(self, event: Event) -> None:
        for action in self.core.handle(self.now, event):
            if isinstance(action, Send):
                check_fields(action.type, action.fields)
                if action.type is not FrameType.PULSE:
                    self.out[action.connection].append(without_texts(action.type, *action.fields))
            elif isinstance(action, Close):
                self.out[action.connection].append(CLOSED)
                self.handle(Lost(action.connection, "closed by the server"))
            elif isinstance(action, Inspect):
                self.handle(Inspected(action.peer, self.states.get(action.peer, ProcessState.RUNNING)))

    def pass_silently(self, rank: int | None) -> None:
        """Lets eight seconds pass, in which all ranks but this one send heartbeats."""
        for _ in range(16):
            self.now += 0.5
            for other in ALL:
                if other != rank and self.model.find(other):
                    self.ask(other, FrameType.HEARTBEAT, {"g": self.model.find(other).begun.get(other, 0)})
            while (due := self.core.next_deadline()) is not None and due <= self.now:
                self.handle(Tick())


def without_texts(frame_type: FrameType, *fields: Any) -> Sent:
    if frame_type is FrameType.FAILED:
        sequence, kind, rank, _, missing, _ = fields
        return frame_type, sequence, kind, rank, tuple(missing)
    if frame_type is FrameType.REPLY and isinstance(fields[1], list | tuple):
        return frame_type, fields[0], tuple(fields[1])
    shown = {FrameType.REFUSED: (0,), FrameType.TIMED_OUT: (0, 1), FrameType.VALUES: (0, 2)}
    return frame_type, *(fields[at] for at in shown.get(frame_type, range(len(fields))))


# Time is no matter here: a busy machine may take long to draw an example.
SETTINGS = settings(max_examples=150, stateful_step_count=50, suppress_health_check=[HealthCheck.too_slow])
TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = SETTINGS


# What the machine would see of a core that is wrong.


# Members that have gone mad: any message that fits its schema, in any order.
