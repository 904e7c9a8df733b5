"""The store of one generation: keys, whose readers may wait; barriers and exchanges; the ranks that left each group.

This module is part of the server's core, without I/O. Each request method returns the messages to send now. A request
that cannot be answered yet opens a wait. The server has no deadline for waits: the client sends CANCEL at its own
deadline, and the answer names the missing ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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
from gradsync.rendezvous.roster import Failure, Members, Roster, list_members, members_of, never_arrived

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
    """A request that waits for its target; for a key that is not set, also the key and the rank that should set it."""

    request: Request
    target: WaitTarget
    key: str = ""
    from_rank: int | None = None


class WaitTable:
    """All open waits, by connection and sequence."""

    def __init__(self) -> None:
        self._by_connection: dict[int, dict[int, Wait]] = {}

    def add(self, wait: Wait) -> Wait:
        """Opens a wait, and returns it."""
        self._by_connection.setdefault(wait.request.connection, {})[wait.request.sequence] = wait
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


class Keys:
    """The key-value store, and the `WaitTarget` of reads of keys that are not set yet."""

    def __init__(self, roster: Roster, waits: WaitTable) -> None:
        self._roster = roster
        self._waits = waits
        self._values: dict[str, bytes] = {}
        self._reads: dict[str, list[Wait]] = {}
        self._stored_bytes = 0

    def set(self, request: Request, key: str, value: bytes, replaces: bool) -> list[Send]:
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
        self._reads.setdefault(key, []).append(self._waits.add(Wait(request, self, key, from_rank)))
        return []

    def withdraw(self, wait: Wait) -> None:
        """Removes a read."""
        self._reads[wait.key].remove(wait)
        if not self._reads[wait.key]:
            del self._reads[wait.key]

    def missing_ranks(self, wait: Wait) -> tuple[int, ...]:
        """Returns the rank that should set the key, if the reader gave one."""
        return () if wait.from_rank is None else (wait.from_rank,)

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
        for wait in [wait for reads in self._reads.values() for wait in reads]:
            gone = self._who_cannot_set(wait.from_rank)
            if gone is not None:
                self._waits.close(wait)
                self.withdraw(wait)
                sends.append(self._fail(wait.request, wait.key, gone))
        return sends

    def _who_cannot_set(self, from_rank: int | None) -> int | None:
        """If a key can never be set because a rank has left, returns that rank; None if the key may still be set."""
        if from_rank is not None and from_rank in self._roster.left:
            return from_rank
        return self._roster.left[-1] if self._roster.one_remains() else None

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
        reads = self._reads.pop(key, [])
        for wait in reads:
            self._waits.close(wait)
        return [wait.request.reply(self._values[key]) for wait in reads]


class Gathering:
    """Members that wait until all of them have arrived, each with a value: at a barrier, exchange or agreement.

    Args:
        ranks: the members.
        waits: the server's table of open waits.

    Attributes:
        ranks: the members.
        waits: the waits of the members that have arrived, by rank.
        values: the values of the members that have arrived, by rank.
    """

    def __init__(self, ranks: Members, waits: WaitTable) -> None:
        self.ranks = ranks
        self.waits: dict[int, Wait] = {}
        self.values: dict[int, Any] = {}
        self._table = waits
        self._cancelled: set[int] = set()  # ranks that have arrived and then cancelled their wait

    @property
    def is_complete(self) -> bool:
        """Whether all members have arrived."""
        return len(self.values) == len(self.ranks)

    def arrive(self, request: Request, value: Any) -> None:
        """Records an arrival, and opens the member's wait."""
        self.waits[request.rank] = self._table.add(Wait(request, self))
        self.values[request.rank] = value
        self._cancelled.discard(request.rank)

    def withdraw(self, wait: Wait) -> None:
        """Removes a member's arrival, as if the member had not arrived yet."""
        del self.waits[wait.request.rank], self.values[wait.request.rank]
        self._cancelled.add(wait.request.rank)

    def absent_ranks(self) -> Iterator[int]:
        """Iterates over the members that have not arrived."""
        return (rank for rank in self.ranks if rank not in self.values)

    def missing_ranks(self, _wait: Wait) -> tuple[int, ...]:
        """Returns the members that never arrived; if there are none, the members that cancelled their wait."""
        return never_arrived(self.absent_ranks(), self._cancelled)

    def close(self) -> list[Request]:
        """Ends all waits; returns their requests."""
        waits, self.waits = list(self.waits.values()), {}
        for wait in waits:
            self._table.close(wait)
        return [wait.request for wait in waits]


class Barriers:
    """The open barriers and exchanges of a generation, by name, members, and whether it is an exchange."""

    def __init__(self, roster: Roster, waits: WaitTable) -> None:
        self._roster = roster
        self._waits = waits
        self._barriers: dict[tuple[str, Members, bool], Gathering] = {}

    def arrive(self, request: Request, name: str, ranks: list[int] | None, value: bytes | None = None) -> list[Send]:
        """Records a rank's arrival, and its value in an exchange; the last arrival releases all ranks."""
        what = "barrier" if value is None else "exchange"
        members = members_with(request, ranks, self._roster, f"{what} {name!r}")
        if isinstance(members, Send):
            return [members]
        if value is not None and len(value) * len(members) > MAX_EXCHANGED_BYTES:
            limit = MAX_EXCHANGED_BYTES // len(members)
            needed = f"with {len(members)} ranks needs values of at most {limit} bytes each, got {len(value)} bytes"
            return [request.refuse(f"{what} {name!r} {needed}")]
        key = name, members, value is not None
        barrier = self._barriers.get(key)
        if barrier is None:
            if len(self._barriers) >= MAX_BARRIERS:
                return [request.refuse(f"more than {MAX_BARRIERS} barriers are open at the same time", REFUSED)]
            barrier = self._barriers[key] = Gathering(members, self._waits)
        if request.rank in barrier.waits:
            return [request.refuse(f"{self._roster.label(request.rank)} already waits in {what} {name!r}")]
        barrier.arrive(request, value)
        if barrier.is_complete:
            del self._barriers[key]
            return _release(barrier)
        left = self._roster.first_left(barrier.absent_ranks())
        return [] if left is None else self._fail(key, left)

    def forget(self, prefix: str) -> None:
        """Removes the barriers of a group that all members have left."""
        for key in [key for key in self._barriers if is_under(key[0], prefix)]:
            del self._barriers[key]

    def rank_left(self, rank: int) -> list[Send]:
        """Fails the barriers that still need a rank that has left."""
        waiting = [key for key, barrier in self._barriers.items() if barrier.waits and rank in barrier.ranks]
        return [send for key in waiting for send in self._fail(key, rank)]

    def _fail(self, key: tuple[str, Members, bool], left: int) -> list[Send]:
        failure = self._roster.left_failure(left, f"barrier {key[0]!r} needs this rank")
        return [request.fail(failure) for request in self._barriers.pop(key).close()]


def _release(barrier: Gathering) -> list[Send]:
    """Answers the members of a barrier, or with all values the members of an exchange."""
    values = [value for _, value in sorted(barrier.values.items())]
    requests = barrier.close()
    if values[0] is None:
        return [request.reply() for request in requests]
    pieces = _pieces(values)
    return [
        Send(request.connection, FrameType.VALUES, (request.sequence, piece is pieces[-1], piece))
        for request in requests
        for piece in pieces
    ]


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

    def leave(self, request: Request, name: str, ranks: list[int] | None, position: int) -> None:
        """Records that a member has left a group. A LEAVE frame gets no answer, so a wrong one is ignored."""
        group = name, members_of(ranks, self._roster.world_size) or ()
        if request.rank not in group[1] or (group not in self._left and len(self._left) >= _MAX_NAMES_LEFT):
            return
        self._left.setdefault(group, {}).setdefault(request.rank, position)
        self._remove_if_empty(group)

    def left_ranks(self, request: Request, name: str, ranks: list[int] | None) -> list[Send]:
        """Answers with the members that have left a group, and the number of collectives that each had begun in it."""
        left = sorted(self._left.get((name, members_of(ranks, self._roster.world_size) or ()), {}).items())
        return [request.reply([number for rank_and_position in left for number in rank_and_position])]

    def rank_left(self, rank: int) -> None:
        """Records that a rank has left the world."""
        for group in [group for group in self._left if rank in group[1]]:
            self._remove_if_empty(group)

    def _remove_if_empty(self, group: tuple[str, Members]) -> None:
        name, members = group
        left = self._left[group]
        if len(left) < len(members) and not self._roster.left:
            return
        if any(rank not in left and self._roster.is_present(rank) for rank in members):
            return
        del self._left[group]
        for remove in self._removers:
            remove(name)


def members_with(request: Request, ranks: list[int] | None, roster: Roster, what: str) -> Members | Send:
    """Returns the members that a request names; a refusal if the asking rank is none of them, or one does not exist."""
    members = members_of(ranks, roster.world_size)
    if members is not None and request.rank in members:
        return members
    label, given = roster.label(request.rank), list_members(members or ranks or ())
    return request.refuse(f"{what} needs existing ranks that include {label}, got {given}")
