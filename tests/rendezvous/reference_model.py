"""What the server's core promises its ranks, in the simplest form: dicts, no clock, and no sockets.

A generation is the set of ranks that have joined together; it forms when all have, and ends at its first failure. Each
method of `Model` is one event. What every connection is to be sent is in `out`, until it is taken.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gradsync.rendezvous.frames import DEATH, SILENCE, STUCK, FrameType

WORLD_SIZE = 3
ALL = tuple(range(WORLD_SIZE))


class Wait(NamedTuple):
    """A request without an answer."""

    connection: int
    sequence: int


Sent = tuple[Any, ...]  # a message without its texts
CLOSED: Sent = ("closed",)  # the server ends the connection


class Failure(NamedTuple):
    kind: int
    rank: int
    missing: tuple[int, ...] = ()


@dataclass
class Exchange:
    """Who has arrived, with a value; a barrier is an exchange of empty values."""

    arrived: dict[int, tuple[Wait, bytes]] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)


@dataclass
class Generation:
    number: int | None = None
    failure: Failure | None = None
    members: dict[int, int] = field(default_factory=dict)  # rank -> connection, also of those that have left or died
    joins: dict[int, Wait] = field(default_factory=dict)
    present: set[int] = field(default_factory=set)
    cancelled: set[int] = field(default_factory=set)
    left: list[int] = field(default_factory=list)
    values: dict[str, bytes] = field(default_factory=dict)
    reads: dict[Wait, tuple[str, int, int | None]] = field(default_factory=dict)  # key, by whom, and from whom
    exchanges: dict[tuple[str, tuple[int, ...]], Exchange] = field(default_factory=dict)
    departed: dict[tuple[str, tuple[int, ...]], dict[int, int]] = field(default_factory=dict)
    begun: dict[int, int] = field(default_factory=dict)  # collectives, as far as the server knows

    @property
    def is_running(self) -> bool:
        return self.number is not None and self.failure is None

    def waits_of(self, rank: int) -> list[Wait]:
        found = [self.joins[rank]] if rank in self.joins else []
        found += [wait for wait, (_, reader, _) in self.reads.items() if reader == rank]
        return found + [each.arrived[rank][0] for each in self.exchanges.values() if rank in each.arrived]

    def withdraw(self, wait: Wait) -> None:
        """Forgets a wait, as if it had not begun."""
        self.reads.pop(wait, None)
        for rank in [rank for rank, join in self.joins.items() if join == wait]:
            del self.joins[rank], self.members[rank]
            self.present.discard(rank)
            self.cancelled.add(rank)
        for key, exchange in list(self.exchanges.items()):
            for rank in [rank for rank, (other, _) in exchange.arrived.items() if other == wait]:
                del exchange.arrived[rank]
                exchange.cancelled.add(rank)
            if not exchange.arrived:
                del self.exchanges[key]


class Model:
    """The generations: the present one first, then those that wait until it has ended."""

    def __init__(self) -> None:
        self.out: dict[int, list[Sent]] = defaultdict(list)
        self.generations: list[Generation] = []
        self.formed = 0
        self.ended: list[int] = []  # ranks whose processes have ended, says their launcher

    def take(self) -> dict[int, list[Sent]]:
        """Returns what was to be sent since the last call, by connection."""
        out, self.out = self.out, defaultdict(list)
        return {connection: sorted(messages, key=repr) for connection, messages in out.items()}

    def find(self, rank: int) -> Generation | None:
        """Returns the generation of which this rank is a member now."""
        return next((generation for generation in self.generations if rank in generation.present), None)

    # Joining and ending.

    def join(self, rank: int, wait: Wait) -> None:
        for generation in self.generations:
            if rank not in generation.members:
                break
            if rank in generation.present:
                return self._refuse_join(FrameType.REFUSED, wait)
        else:
            generation = Generation()
            self.generations.append(generation)
        if generation.failure is not None:
            return self._refuse_join(FrameType.FAILED, wait, *generation.failure)
        generation.members[rank], generation.joins[rank] = wait.connection, wait
        generation.present.add(rank)
        generation.cancelled.discard(rank)
        return self._advance()

    def lose(self, rank: int) -> None:
        generation = self._end_waits(rank)
        generation.present.discard(rank)
        self._fail(generation, Failure(DEATH, rank))
        self._advance()

    def leave(self, rank: int) -> None:
        found = self.find(rank)
        assert found is not None
        self.out[found.members[rank]].append(CLOSED)
        was_joining = rank in found.joins
        generation = self._end_waits(rank, is_cancelled=True)
        if not was_joining:
            generation.present.discard(rank)
            generation.left.append(rank)
            if generation.is_running:
                self._fail_what_needs(generation, rank)
        self._advance()

    def report(self, rank: int, culprit: int | None) -> None:
        generation = self.find(rank)
        assert generation is not None
        blamed = rank if culprit is None or culprit not in generation.members else culprit
        self._fail(generation, Failure(DEATH, blamed))
        self._advance()

    def fall_silent(self, rank: int) -> None:
        generation = self.find(rank)
        assert generation is not None
        self._fail(generation, Failure(SILENCE, rank))
        self._advance()

    def end_process(self, rank: int) -> None:
        self.ended.append(rank)
        self._advance()

    def cancel(self, rank: int, wait: Wait) -> None:
        """Comes to a deadline."""
        generation = self.find(rank)
        assert generation is not None
        if wait not in generation.waits_of(rank):
            return
        missing: tuple[int, ...] = ()
        is_join = generation.joins.get(rank) == wait
        if is_join:
            missing = _missing(ALL, generation.members, generation.cancelled)
        elif wait in generation.reads:
            setter = generation.reads[wait][2]
            missing = () if setter is None else (setter,)
        for (_, members), exchange in generation.exchanges.items():
            if wait in [other for other, _ in exchange.arrived.values()]:
                missing = _missing(members, exchange.arrived, exchange.cancelled)
        generation.withdraw(wait)
        self._send(wait, FrameType.TIMED_OUT, missing)
        if is_join:
            self.out[wait.connection].append(CLOSED)
        self._advance()

    # Requests of a generation that runs.

    def set(self, rank: int, wait: Wait, key: str, value: bytes) -> None:
        if generation := self._running(rank, wait):
            self._send(wait, FrameType.REPLY, None)
            generation.values[key] = value
            for read in [read for read, (other, _, _) in generation.reads.items() if other == key]:
                del generation.reads[read]
                self._send(read, FrameType.REPLY, value)

    def get(self, rank: int, wait: Wait, key: str, from_rank: int | None) -> None:
        if not (generation := self._running(rank, wait)):
            return
        if key in generation.values:
            self._send(wait, FrameType.REPLY, generation.values[key])
        else:
            generation.reads[wait] = key, rank, from_rank
            self._fail_reads(generation)

    def delete(self, rank: int, wait: Wait, key: str) -> None:
        if generation := self._running(rank, wait):
            self._send(wait, FrameType.REPLY, None)
            _forget(generation, key)

    def exchange(self, rank: int, wait: Wait, name: str, members: tuple[int, ...], value: bytes) -> None:
        if not (generation := self._running(rank, wait)):
            return
        exchange = generation.exchanges.get((name, members), Exchange())
        if rank not in members or rank in exchange.arrived:
            self._send(wait, FrameType.REFUSED)
            return
        generation.exchanges[name, members] = exchange
        exchange.arrived[rank] = wait, value
        exchange.cancelled.discard(rank)
        if len(exchange.arrived) == len(members):
            del generation.exchanges[name, members]
            values = [exchange.arrived[member][1] for member in members]
            answer = (FrameType.VALUES, values) if any(values) else (FrameType.REPLY, None)
            for arrived, _ in exchange.arrived.values():
                self._send(arrived, *answer)
        elif gone := [member for member in members if member in generation.left and member not in exchange.arrived]:
            self._fail_exchange(generation, (name, members), gone[0])

    def leave_group(self, rank: int, name: str, members: tuple[int, ...], position: int) -> None:
        generation = self.find(rank)
        if generation is not None and generation.is_running and rank in members:
            generation.departed.setdefault((name, members), {}).setdefault(rank, position)
            self._forget_groups(generation)

    def left_ranks(self, rank: int, wait: Wait, name: str, members: tuple[int, ...]) -> None:
        if generation := self._running(rank, wait):
            departed = sorted(generation.departed.get((name, members), {}).items())
            self._send(wait, FrameType.REPLY, tuple(number for pair in departed for number in pair))

    def stuck(
        self,
        rank: int,
        position: int,
        missing: tuple[int, ...],
        begun: dict[int, int],
        silent: int | None,
        *,
        is_stopped: bool,
    ) -> None:
        """A rank reaches the deadline of a collective: all are asked what they have begun, and all but one answer."""
        generation = self.find(rank)
        assert generation is not None
        for other in generation.present:
            self.out[generation.members[other]].append((FrameType.STATUS_REQUEST,))
        generation.begun |= {other: begun[other] for other in generation.present if other != silent}
        if is_stopped and silent in generation.present:
            self._fail(generation, Failure(SILENCE, silent))
        else:
            late = [other for other in ALL if generation.begun.get(other, 0) < position and other != rank]
            absent = tuple(sorted(other for other in missing if other != rank)) or tuple(late)
            blamed = min(absent, key=lambda other: (bool(generation.waits_of(other)), other), default=rank)
            self._fail(generation, Failure(STUCK, blamed, absent))
        self._advance()

    # What follows from an event.

    def _advance(self) -> None:
        self.generations = [generation for generation in self.generations if generation.present]
        first = self.generations[0] if self.generations else None
        if first is None or first.number is not None or first.failure is not None:
            return
        if len(first.members) == WORLD_SIZE:
            first.number = self.formed = self.formed + 1
            for wait in first.joins.values():
                self._send(wait, FrameType.REPLY, (first.number,))
            first.joins.clear()
        elif gone := [rank for rank in self.ended if rank not in first.members]:
            self._fail(first, Failure(DEATH, gone[0]))
            self._advance()

    def _fail(self, generation: Generation, failure: Failure) -> None:
        """The first failure of a generation stays, and all its members get it."""
        if generation.failure is not None:
            return
        generation.failure = failure
        generation.joins.clear()
        generation.reads.clear()
        generation.exchanges.clear()
        for rank in generation.present:
            self._send(Wait(generation.members[rank], 0), FrameType.FAILED, *failure)

    def _fail_what_needs(self, generation: Generation, rank: int) -> None:
        self._forget_groups(generation)
        for key in [key for key in generation.exchanges if rank in key[1]]:
            self._fail_exchange(generation, key, rank)
        self._fail_reads(generation)

    def _fail_exchange(self, generation: Generation, key: tuple[str, tuple[int, ...]], rank: int) -> None:
        for wait, _ in generation.exchanges.pop(key).arrived.values():
            self._send(wait, FrameType.FAILED, DEATH, rank, ())

    def _fail_reads(self, generation: Generation) -> None:
        """Fails the reads of keys that no remaining rank will set."""
        for wait, (_, _, setter) in list(generation.reads.items()):
            gone = setter if setter in generation.left else None
            if gone is None and len(generation.left) >= WORLD_SIZE - 1:
                gone = generation.left[-1]
            if gone is not None:
                del generation.reads[wait]
                self._send(wait, FrameType.FAILED, DEATH, gone, ())

    def _forget_groups(self, generation: Generation) -> None:
        """Forgets the keys of groups that all members have left."""
        for (name, members), departed in list(generation.departed.items()):
            if all(member in departed or member in generation.left for member in members):
                del generation.departed[name, members]
                _forget(generation, name)

    def _end_waits(self, rank: int, *, is_cancelled: bool = False) -> Generation:
        generation = self.find(rank)
        assert generation is not None
        for wait in generation.waits_of(rank):
            if is_cancelled or wait != generation.joins.get(rank):
                generation.withdraw(wait)
        generation.joins.pop(rank, None)
        return generation

    def _running(self, rank: int, wait: Wait) -> Generation | None:
        """Returns the rank's generation; answers where it has failed, or has not formed."""
        generation = self.find(rank)
        assert generation is not None
        if generation.failure is not None:
            self._send(wait, FrameType.FAILED, *generation.failure)
        elif generation.number is None:
            self._send(wait, FrameType.REFUSED)
        return generation if generation.is_running else None

    def _send(self, wait: Wait, frame_type: FrameType, *values: object) -> None:
        self.out[wait.connection].append((frame_type, wait.sequence, *values))

    def _refuse_join(self, frame_type: FrameType, wait: Wait, *values: object) -> None:
        self._send(wait, frame_type, *values)
        self.out[wait.connection].append(CLOSED)


def _missing(members: tuple[int, ...], arrived: object, cancelled: set[int]) -> tuple[int, ...]:
    """Returns who never arrived; if there is nobody, who has arrived and given up."""
    absent = tuple(member for member in members if member not in arrived)  # type: ignore[operator]
    return tuple(member for member in absent if member not in cancelled) or absent


def _forget(generation: Generation, prefix: str) -> None:
    for key in [key for key in generation.values if key == prefix or key.startswith(f"{prefix}/")]:
        del generation.values[key]
