"""The core beside a reference model, under every order of joins, requests, goodbyes, deaths and deadlines.

Hypothesis chooses the steps, and shortens a run in which the two differ.
"""

from __future__ import annotations

from typing import Any

import pytest
from core_bench import Bench
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from reference_model import WORLD_SIZE, ReferenceModel, Told, Waiting

from gradsync.rendezvous import store
from gradsync.rendezvous.frames import FrameType
from gradsync.rendezvous.protocol import RendezvousCore
from gradsync.rendezvous.store import Keys

RANKS = st.integers(0, WORLD_SIZE - 1)
QUIET_STEPS = 8  # between two that end something: else most requests would meet a generation that has failed
KEYS = st.sampled_from(["a", "b"])
VALUES = st.sampled_from([b"", b"7", b"-3", b"text"])
# Where what a message tells beside its sequence begins, of the types of which the model tells more.
_VALUE_AT = {FrameType.REPLY: 2, FrameType.FAILED: 3, FrameType.VALUES: 3}


class CoreMachine(RuleBasedStateMachine):
    """Does the same with both, and compares what they tell after each step."""

    @initialize(is_formed=st.booleans())
    def begin(self, is_formed: bool) -> None:
        self.bench = Bench(WORLD_SIZE)
        self.model = ReferenceModel()
        self.next_connection = 0
        self.quiet_steps = 0
        if is_formed:
            self.join_all()

    @rule(rank=RANKS)
    def join(self, rank: int) -> None:
        if rank in self.model.present or rank in self.model.joining or self._would_meet_a_failure(rank):
            return
        self.next_connection += 1
        sequence = self.bench.join(self.next_connection, rank)
        self.model.join(rank, Waiting(self.next_connection, sequence))

    @rule()
    def join_all(self) -> None:
        for rank in range(WORLD_SIZE):
            self.join(rank)

    @rule(rank=RANKS, key=KEYS, value=VALUES)
    def set(self, rank: int, key: str, value: bytes) -> None:
        if rank in self.model.present:
            self.model.set(self._send(rank, FrameType.SET, key, value), key, value)

    @rule(rank=RANKS, key=KEYS, from_rank=st.none() | RANKS)
    def get(self, rank: int, key: str, from_rank: int | None) -> None:
        if rank in self.model.present:
            self.model.get(rank, self._send(rank, FrameType.GET, key, from_rank), key, from_rank)

    @rule(rank=RANKS, key=KEYS)
    def delete(self, rank: int, key: str) -> None:
        if rank in self.model.present:
            self.model.delete(self._send(rank, FrameType.DELETE, key), key)

    @rule(rank=RANKS, name=KEYS)
    def barrier(self, rank: int, name: str) -> None:
        if rank in self.model.present:
            self.model.barrier(rank, self._send(rank, FrameType.EXCHANGE, name, None, b""), name)

    @rule(name=KEYS)
    def barrier_of_all(self, name: str) -> None:
        for rank in range(WORLD_SIZE):
            self.barrier(rank, name)

    @rule(rank=RANKS, value=VALUES)
    def exchange(self, rank: int, value: bytes) -> None:
        if rank in self.model.present:
            self.model.exchange(rank, self._send(rank, FrameType.EXCHANGE, "x", None, value), value)

    @rule()
    def exchange_of_all(self) -> None:
        for rank in range(WORLD_SIZE):
            self.exchange(rank, b"%d" % rank)

    @precondition(lambda self: self.model.waits())
    @rule(data=st.data())
    def come_to_a_deadline(self, data: st.DataObject) -> None:
        _, wait = data.draw(st.sampled_from(self.model.waits()))
        self.bench.cancel(wait.connection, wait.sequence)
        self.model.cancel(wait)

    @precondition(lambda self: self.model.joining)
    @rule(data=st.data())
    def stop_waiting_to_join(self, data: st.DataObject) -> None:
        wait = data.draw(st.sampled_from(sorted(self.model.joining.values())))
        self.bench.cancel(wait.connection, wait.sequence)
        self.model.cancel(wait)

    @precondition(lambda self: self.quiet_steps >= QUIET_STEPS)
    @rule(rank=RANKS)
    def leave(self, rank: int) -> None:
        if rank in self.model.present:
            connection = self.model.present[rank]
            self.bench.leave(connection)
            self.bench.lose(connection)  # it closes in answer
            self.model.leave(rank)
            self.quiet_steps = 0

    @precondition(lambda self: self.quiet_steps >= QUIET_STEPS)
    @rule(rank=RANKS)
    def die(self, rank: int) -> None:
        if rank in self.model.present:
            self.bench.lose(self.model.present[rank])
            self.model.die(rank)
            self.quiet_steps = 0

    @precondition(lambda self: self.quiet_steps >= QUIET_STEPS)
    @rule(rank=RANKS, culprit=st.none() | RANKS)
    def report(self, rank: int, culprit: int | None) -> None:
        if rank in self.model.present:
            self._send(rank, FrameType.REPORT_FAILURE, "it failed", culprit)
            self.model.report(rank, culprit)
            self.quiet_steps = 0

    @invariant()
    def both_tell_the_same(self) -> None:
        told = {c: sorted(map(_shortened, self.bench.take(c)), key=repr) for c in list(self.bench.inbox)}
        assert told == self.model.take()
        self.quiet_steps += 1

    @invariant()
    def the_core_sleeps_when_nobody_waits(self) -> None:
        if not self.model.waits() and not self.model.joining:
            assert self.bench.core.next_deadline() is None

    def _send(self, rank: int, frame_type: FrameType, *fields: Any) -> Waiting:
        connection = self.model.present[rank]
        return Waiting(connection, self.bench.send(connection, frame_type, *fields))

    def _would_meet_a_failure(self, rank: int) -> bool:
        """Whether it died while others are there still: it may join the next generation, which has tests of its own."""
        return self.model.culprit is not None and bool(self.model.present)


def _shortened(message: tuple[Any, ...]) -> Told:
    place = _VALUE_AT.get(message[0])
    return message[:2] if place is None else (*message[:2], message[place])


SETTINGS = settings(max_examples=60, stateful_step_count=50, deadline=None)
BROKEN_SETTINGS = settings(SETTINGS, max_examples=300, phases=[Phase.generate], derandomize=True, database=None)
TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = SETTINGS


def _the_barrier_forgets_one(patch: pytest.MonkeyPatch) -> None:
    original = store._release
    patch.setattr(store, "_release", lambda barrier: original(barrier)[1:])


def _a_deleted_key_is_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Keys, "forget", lambda self, prefix: None)


def _a_second_failure_is_told(patch: pytest.MonkeyPatch) -> None:
    original = RendezvousCore._fail_generation

    def poison(self: RendezvousCore, generation: Any, failure: Any, **options: Any) -> Any:
        generation.failure = None
        return original(self, generation, failure, **options)

    patch.setattr(RendezvousCore, "_fail_generation", poison)


@pytest.mark.parametrize("mutation", [_the_barrier_forgets_one, _a_deleted_key_is_kept, _a_second_failure_is_told])
def test_the_machine_notices_a_broken_core(mutation, monkeypatch) -> None:
    mutation(monkeypatch)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(CoreMachine, settings=BROKEN_SETTINGS)
