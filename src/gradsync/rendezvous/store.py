"""The store of one generation: keys, whose readers may wait; barriers and exchanges; the ranks that left each group.

This module is part of the server's core, without I/O. Each request method returns the messages to send now. A request
that cannot be answered yet opens a wait. The server has no deadline for waits: the client sends CANCEL at its own
deadline, and the answer names the missing ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from gradsync.rendezvous.frames import (
    INVALID,
    MAX_EXCHANGED_BYTES,
    MAX_VALUE_BYTES,
    REFUSED,
    FrameType,
    Send,
    clip_text,
    is_under,
)
from gradsync.rendezvous.roster import Failure, Members, Roster, list_members, never_arrived

MAX_STORED_BYTES = 64 * 1024**2
MAX_BARRIERS = 65_536
_MAX_NAMES_LEFT = 16_384  # groups that some members have left; others keep their entries until the generation ends


@dataclass(slots=True)  # not frozen: every message makes one, and a frozen object takes three times as long to make
class Request:
    """One request of one rank, with methods that make the answer to it; treat it as immutable."""

    connection: int
    rank: int
    sequence: int
    now: float

    def reply(self, value: bool | bytes | Sequence[int] | None = None) -> Send:
        """Answers with a value."""
        return Send(self.connection, FrameType.REPLY, (self.sequence, value))

    def refuse(self, text: str, kind: int = INVALID) -> Send:
        """Refuses the request."""
        return Send(self.connection, FrameType.REFUSED, (self.sequence, kind, clip_text(text)))

    def fail(self, failure: Failure) -> Send:
        """Answers with a failure."""
        return failure.send(self.connection, self.sequence)

    def time_out(self, missing_ranks: Iterable[int], states_text: str) -> Send:
        """Answers a CANCEL, which the caller sends at its deadline, with the missing ranks."""
        return Send(self.connection, FrameType.TIMED_OUT, (self.sequence, tuple(missing_ranks), clip_text(states_text)))


class WaitTarget(Protocol):
    """An object that requests wait for: a key, a barrier, an agreement, or a generation that forms."""

    def withdraw(self, wait: Wait) -> None:
        """Removes this wait, as if the request had never arrived."""

    def missing_ranks(self, wait: Wait) -> tuple[int, ...]:
        """Returns the ranks that an open wait waits for, as far as they are known.

        Ranks that arrived and then cancelled their wait are named only if no others are missing. Otherwise, when
        several waits reach the same deadline one after the other, a later wait would name the rank of an earlier one.
        """


@dataclass(eq=False, slots=True)
class Wait:
    """A request that waits for its target. `from_rank` is the rank that should set a key, if the reader gave one."""

    request: Request
    target: WaitTarget
    from_rank: int | None = None


class WaitTable:
    """All open waits, by connection and sequence."""

    def __init__(self) -> None:
        self._by_connection: dict[int, dict[int, Wait]] = {}

    def add(self, request: Request, target: WaitTarget, from_rank: int | None = None) -> Wait:
        """Opens a wait, and returns it."""
        wait = Wait(request, target, from_rank)
        self._by_connection.setdefault(request.connection, {})[request.sequence] = wait
        return wait

    def close(self, wait: Wait) -> None:
        """Removes a wait from this table, because it is answered or withdrawn. Idempotent."""
        waits = self._by_connection.get(wait.request.connection)
        if waits is not None and waits.get(wait.request.sequence) is wait:
            del waits[wait.request.sequence]
            if not waits:
                del self._by_connection[wait.request.connection]

    def find(self, connection: int, sequence: int) -> Wait | None:
        """Returns the open wait of a request, or None."""
        return self._by_connection.get(connection, {}).get(sequence)

    def close_all(self, connection: int) -> list[Wait]:
        """Ends the open waits of one connection and returns them, in the order of their requests."""
        return list(self._by_connection.pop(connection, {}).values())

    def count(self, connection: int) -> int:
        """Returns the number of a connection's open waits."""
        return len(self._by_connection.get(connection, ()))


class _KeyReads:
    """The reads that wait for one key; `table` holds this object while at least one read waits."""

    def __init__(self, key: str, table: dict[str, _KeyReads]) -> None:
        self.waits: list[Wait] = []
        self._key = key
        self._table = table

    def withdraw(self, wait: Wait) -> None:
        """Removes this read."""
        self.waits.remove(wait)
        if not self.waits:
            del self._table[self._key]

    def missing_ranks(self, wait: Wait) -> tuple[int, ...]:
        """Returns the rank that should set the key, if the reader gave one."""
        return () if wait.from_rank is None else (wait.from_rank,)


class Keys:
    """The key-value store. A read of a key that is not set waits until the key is set."""

    def __init__(self, roster: Roster, waits: WaitTable) -> None:
        self._roster = roster
        self._waits = waits
        self._values: dict[str, bytes] = {}
        self._reads: dict[str, _KeyReads] = {}
        self._stored_bytes = 0

    def set(self, request: Request, key: str, value: bytes, *, replaces: bool) -> list[Send]:
        """Stores a value, unless `replaces` is False and the key has one; answers whether it was stored."""
        if not replaces and key in self._values:
            return [request.reply(False)]
        if not self._store(key, value):
            text = (
                f"no room for key {key!r} ({len(value)} bytes): the rendezvous stores at most {MAX_STORED_BYTES} bytes "
                "in one generation; delete keys that are no longer needed"
            )
            return [request.refuse(text, REFUSED)]
        return [request.reply(True), *self._answer_reads(key)]

    def get(self, request: Request, key: str, from_rank: int | None) -> list[Send]:
        """Answers with the value, now or when the key is set."""
        value = self._values.get(key)
        if value is not None:
            return [request.reply(value)]
        if from_rank is not None and from_rank >= self._roster.world_size:
            return [request.refuse(f"from_rank needs a rank from 0 to {self._roster.world_size - 1}, got {from_rank}")]
        gone = self._who_cannot_set(from_rank)
        if gone is not None:
            return [self._fail(request, key, gone)]
        reads = self._reads.setdefault(key, _KeyReads(key, self._reads))
        reads.waits.append(self._waits.add(request, reads, from_rank))
        return []

    def delete(self, request: Request, key: str) -> list[Send]:
        """Removes a key, and answers whether the key was set."""
        return [request.reply(self.discard(key))]

    def publish(self, key: str, value: bytes) -> list[Send]:
        """Stores a value that the server itself sets, and answers the waiting reads; drops it if there is no space."""
        return self._answer_reads(key) if self._store(key, value) else []

    def discard(self, key: str) -> bool:
        """Removes a key; returns whether the key was set."""
        value = self._values.pop(key, None)
        if value is None:
            return False
        self._stored_bytes -= len(key) + len(value)
        return True

    def forget(self, prefix: str) -> None:
        """Removes the keys of a group that all members have left."""
        for key in [key for key in self._values if is_under(key, prefix)]:
            self.discard(key)

    def rank_left(self) -> list[Send]:
        """Fails the reads of keys that no remaining rank will set."""
        sends = []
        for key, reads in list(self._reads.items()):
            for wait in list(reads.waits):
                gone = self._who_cannot_set(wait.from_rank)
                if gone is not None:
                    self._waits.close(wait)
                    reads.withdraw(wait)
                    sends.append(self._fail(wait.request, key, gone))
        return sends

    def _who_cannot_set(self, from_rank: int | None) -> int | None:
        """If a key can never be set because a rank has left, returns that rank; None if the key may still be set."""
        if from_rank is not None and self._roster.has_left(from_rank):
            return from_rank
        return self._roster.last_to_leave() if self._roster.one_remains() else None

    def _fail(self, request: Request, key: str, gone: int) -> Send:
        need = f"key {key!r} is not set, and no other rank remains to set it"
        if not self._roster.one_remains():
            need = f"key {key!r} is not set, and only this rank sets it"
        return request.fail(self._roster.left_failure(gone, need))

    def _store(self, key: str, value: bytes) -> bool:
        old = self._values.get(key)
        growth = len(value) - len(old) if old is not None else len(key) + len(value)
        if self._stored_bytes + growth > MAX_STORED_BYTES:
            return False
        self._stored_bytes += growth
        self._values[key] = value
        return True

    def _answer_reads(self, key: str) -> list[Send]:
        reads = self._reads.pop(key, None)
        if reads is None:
            return []
        for wait in reads.waits:
            self._waits.close(wait)
        return [wait.request.reply(self._values[key]) for wait in reads.waits]


class Barrier:
    """One barrier or exchange. It ends when the last member has arrived, which releases all members.

    Attributes:
        key: the name, the members, and whether this is an exchange.
        arrived: the waits of the members that have arrived, by rank.
        values: in an exchange, the values of the members that have arrived, by rank.
    """

    def __init__(self, key: tuple[str, Members, bool]) -> None:
        self.key = key
        self.name, self.ranks, self.is_exchange = key
        self.arrived: dict[int, Wait] = {}
        self.values: dict[int, bytes] = {}
        self._cancelled: set[int] = set()  # ranks that have arrived and then cancelled their wait

    def arrive(self, wait: Wait, value: bytes | None) -> bool:
        """Records an arrival; returns whether it was the last one."""
        rank = wait.request.rank
        self.arrived[rank] = wait
        if value is not None:
            self.values[rank] = value
        self._cancelled.discard(rank)
        return len(self.arrived) == len(self.ranks)

    def withdraw(self, wait: Wait) -> None:
        """Removes a member's arrival, as if the member had not arrived yet."""
        del self.arrived[wait.request.rank]
        self.values.pop(wait.request.rank, None)
        self._cancelled.add(wait.request.rank)

    def absent_ranks(self) -> Iterator[int]:
        """Iterates over the members that do not wait at this barrier now."""
        return (rank for rank in self.ranks if rank not in self.arrived)

    def missing_ranks(self, _wait: Wait) -> tuple[int, ...]:
        """Returns the ranks that never arrived; if there are none, the ranks that cancelled their wait."""
        return never_arrived(self.absent_ranks(), self._cancelled)


class Barriers:
    """The open barriers and exchanges of a generation, by name and members."""

    def __init__(self, roster: Roster, waits: WaitTable) -> None:
        self._roster = roster
        self._waits = waits
        self._barriers: dict[tuple[str, Members, bool], Barrier] = {}

    def arrive(self, request: Request, name: str, ranks: Members, value: bytes | None = None) -> list[Send]:
        """Records a rank's arrival, and its value in an exchange; the last arrival releases all ranks."""
        what = "barrier" if value is None else "exchange"
        if value is not None and len(value) * len(ranks) > MAX_EXCHANGED_BYTES:
            limit = MAX_EXCHANGED_BYTES // len(ranks)
            needed = f"with {len(ranks)} ranks needs values of at most {limit} bytes each, got {len(value)} bytes"
            return [request.refuse(f"{what} {name!r} {needed}")]
        key = name, ranks, value is not None
        barrier = self._barriers.get(key)
        if barrier is None:
            if len(self._barriers) >= MAX_BARRIERS:
                return [request.refuse(f"more than {MAX_BARRIERS} barriers are open at the same time", REFUSED)]
            barrier = self._barriers[key] = Barrier(key)
        if request.rank in barrier.arrived:
            return [request.refuse(f"{self._roster.label(request.rank)} already waits in {what} {name!r}")]
        if barrier.arrive(self._waits.add(request, barrier), value):
            return self._release(barrier)
        left = self._roster.first_left(barrier.absent_ranks())
        return [] if left is None else self._fail(barrier, left)

    def forget(self, prefix: str) -> None:
        """Removes the barriers of a group that all members have left."""
        for key in [key for key in self._barriers if is_under(key[0], prefix)]:
            del self._barriers[key]

    def rank_left(self, rank: int) -> list[Send]:
        """Fails the barriers that still need a rank that has left."""
        waiting = [barrier for barrier in self._barriers.values() if barrier.arrived and rank in barrier.ranks]
        return [send for barrier in waiting for send in self._fail(barrier, rank)]

    def _release(self, barrier: Barrier) -> list[Send]:
        waits = self._close(barrier)
        if not barrier.is_exchange:
            return [wait.request.reply() for wait in waits]
        pieces = _pieces([value for _, value in sorted(barrier.values.items())])
        return [
            Send(wait.request.connection, FrameType.VALUES, (wait.request.sequence, piece is pieces[-1], piece))
            for wait in waits
            for piece in pieces
        ]

    def _fail(self, barrier: Barrier, left: int) -> list[Send]:
        failure = self._roster.left_failure(left, f"barrier {barrier.name!r} needs this rank")
        return [wait.request.fail(failure) for wait in self._close(barrier)]

    def _close(self, barrier: Barrier) -> list[Wait]:
        """Removes a barrier that has ended; returns the waits of the members that had arrived."""
        del self._barriers[barrier.key]
        for wait in barrier.arrived.values():
            self._waits.close(wait)
        return list(barrier.arrived.values())


def _pieces(values: list[bytes]) -> list[list[bytes]]:
    """Splits the values into lists that each fit into one frame."""
    pieces: list[list[bytes]] = [[]]
    room = MAX_VALUE_BYTES
    for value in values:
        room -= len(value) + 5  # the header that msgpack adds
        if room < 0 and pieces[-1]:
            pieces.append([])
            room = MAX_VALUE_BYTES - len(value) - 5
        pieces[-1].append(value)
    return pieces


class Departures:
    """The ranks that have left each group, and the number of collectives that each of them had begun in it.

    A member whose wait for other members takes too long asks which of them have left. Once every member has left the
    group or the world, the server removes the group's entries, because a run may make many groups.

    Args:
        roster: the members of the generation; a rank that has left the world has left every group.
        removers: functions that take a group's name; each removes one kind of the group's entries.
    """

    def __init__(self, roster: Roster, removers: Iterable[Callable[[str], None]]) -> None:
        self._roster = roster
        self._removers = tuple(removers)
        self._left: dict[tuple[str, Members], dict[int, int]] = {}

    def leave(self, request: Request, name: str, members: Members, position: int) -> None:
        """Records that a member has left a group. A LEAVE frame gets no answer, so a wrong one is ignored."""
        group = name, members
        if request.rank not in members or (group not in self._left and len(self._left) >= _MAX_NAMES_LEFT):
            return
        self._left.setdefault(group, {}).setdefault(request.rank, position)
        self._remove_if_empty(group)

    def left_ranks(self, request: Request, name: str, members: Members) -> list[Send]:
        """Answers with the members that have left a group, and the number of collectives that each had begun in it."""
        left = sorted(self._left.get((name, members), {}).items())
        return [request.reply([number for rank_and_position in left for number in rank_and_position])]

    def rank_left(self, rank: int) -> None:
        """Records that a rank has left the world."""
        for group in [group for group in self._left if rank in group[1]]:
            self._remove_if_empty(group)

    def _remove_if_empty(self, group: tuple[str, Members]) -> None:
        name, members = group
        left = self._left[group]
        if len(left) < len(members) and not self._roster.any_left:
            return
        if any(rank not in left and self._roster.is_present(rank) for rank in members):
            return
        del self._left[group]
        for remove in self._removers:
            remove(name)


def outsider_refusal(roster: Roster, request: Request, what: str, members: Iterable[int]) -> Send:
    """Refuses a request for a group that does not include the asking rank, or includes ranks that do not exist."""
    label = roster.label(request.rank)
    return request.refuse(f"{what} needs existing ranks that include {label}, got {list_members(members)}")
