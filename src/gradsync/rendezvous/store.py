"""The store of one generation: keys, whose readers may wait; barriers and exchanges; the ranks that left each group.

This module is part of the server's core, without I/O. A method that answers requests, such as Keys.get, returns the
messages that the server must send now. A request that cannot be answered yet opens a wait. The server has no deadline
for waits: the client sends CANCEL at its own deadline, and the answer names the missing ranks, as far as they are
known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
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
from gradsync.rendezvous.roster import Failure, Members, Roster, list_members, members_of, never_arrived

MAX_STORED_BYTES = 64 * 1024**2


@dataclass(eq=False, slots=True)
class Request:
    """One request of one rank, with methods that make the answer to it.

    Attributes:
        connection, rank, sequence: the connection and the rank that asked, and the number of the message.
        now: when the request arrived, in monotonic seconds.
        target: the object for which the request waits, while the request is in the `WaitTable`.
    """

    connection: int
    rank: int
    sequence: int
    now: float
    target: WaitTarget = field(init=False)

    def reply(self, value: bytes | Sequence[int] | None = None) -> Send:
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
    """An object that requests wait for: the keys, an exchange, or a generation that forms."""

    def withdraw(self, request: Request) -> None:
        """Removes this request, as if it had never arrived."""

    def missing_ranks(self, request: Request) -> tuple[int, ...]:
        """Returns the ranks that a request waits for, as far as they are known.

        If some missing ranks never arrived, the result leaves out the ranks that arrived and then cancelled their wait.
        The reason: several ranks may wait until the same deadline. The first of these ranks that cancels its wait had
        arrived, so the answers to the other ranks do not name this rank.
        """


class WaitTable:
    """All requests that wait, by connection and sequence."""

    def __init__(self) -> None:
        self._by_connection: dict[int, dict[int, Request]] = {}

    def add(self, request: Request, target: WaitTarget) -> None:
        """Lets a request wait for its target."""
        request.target = target
        self._by_connection.setdefault(request.connection, {})[request.sequence] = request

    def close(self, request: Request) -> None:
        """Removes a request from this table, because it is answered or withdrawn. Idempotent."""
        self._by_connection.get(request.connection, {}).pop(request.sequence, None)

    def find(self, connection: int, sequence: int) -> Request | None:
        """Returns the waiting request with this sequence, or None."""
        return self._by_connection.get(connection, {}).get(sequence)

    def close_all(self, connection: int) -> list[Request]:
        """Ends the waits of one connection and returns its requests, in their order."""
        return list(self._by_connection.pop(connection, {}).values())

    def count(self, connection: int) -> int:
        """Returns the number of a connection's waiting requests."""
        return len(self._by_connection.get(connection, ()))


class Keys:
    """The key-value store, and the `WaitTarget` of reads of keys that are not set yet."""

    def __init__(self, roster: Roster, waits: WaitTable) -> None:
        self._roster = roster
        self._waits = waits
        self._values: dict[str, bytes] = {}
        self._reads: dict[str, dict[Request, int | None]] = {}  # key -> waiting read -> the rank that sets the key
        self._stored_bytes = 0

    def set(self, request: Request, key: str, value: bytes) -> list[Send]:
        """Stores a value. If the store is full, the answer is a refusal."""
        old = self._values.get(key)
        growth = len(value) - len(old) if old is not None else len(key) + len(value)
        if self._stored_bytes + growth > MAX_STORED_BYTES:
            text = (
                f"no room for key {key!r} ({len(value)} bytes): the rendezvous stores at most {MAX_STORED_BYTES} bytes "
                "in one generation; delete keys that are no longer needed"
            )
            return [request.refuse(text, REFUSED)]
        self._stored_bytes += growth
        self._values[key] = value
        reads = self._reads.pop(key, {})
        for read in reads:
            self._waits.close(read)
        return [request.reply(), *(read.reply(value) for read in reads)]

    def get(self, request: Request, key: str, from_rank: int | None) -> list[Send]:
        """Answers with the value, now or when the key is set; with a failure if no remaining rank will set the key."""
        value = self._values.get(key)
        if value is not None:
            return [request.reply(value)]
        if from_rank is not None and from_rank >= self._roster.world_size:
            return [request.refuse(f"from_rank needs a rank from 0 to {self._roster.world_size - 1}, got {from_rank}")]
        gone = self._who_cannot_set(from_rank)
        if gone is not None:
            return [self._fail(request, key, gone)]
        self._reads.setdefault(key, {})[request] = from_rank
        self._waits.add(request, self)
        return []

    def withdraw(self, request: Request) -> None:
        """Removes a read."""
        key = self._key_of(request)
        del self._reads[key][request]
        if not self._reads[key]:
            del self._reads[key]

    def missing_ranks(self, request: Request) -> tuple[int, ...]:
        """Returns the rank that should set the key, if the reader gave one."""
        from_rank = self._reads[self._key_of(request)][request]
        return () if from_rank is None else (from_rank,)

    def delete(self, request: Request, key: str) -> list[Send]:
        """Removes a key and all keys under it."""
        self.forget(key)
        return [request.reply()]

    def forget(self, prefix: str) -> None:
        """Removes the key `prefix`, and all keys that begin with "prefix/"."""
        for key in [key for key in self._values if is_under(key, prefix)]:
            self._stored_bytes -= len(key) + len(self._values.pop(key))

    def rank_left(self) -> list[Send]:
        """Fails the reads of keys that no remaining rank will set."""
        sends = []
        waiting = [(key, read, setter) for key, reads in self._reads.items() for read, setter in reads.items()]
        for key, read, setter in waiting:
            gone = self._who_cannot_set(setter)
            if gone is not None:
                self._waits.close(read)
                self.withdraw(read)
                sends.append(self._fail(read, key, gone))
        return sends

    def _key_of(self, request: Request) -> str:
        return next(key for key, reads in self._reads.items() if request in reads)

    def _who_cannot_set(self, from_rank: int | None) -> int | None:
        """If a key can never be set because a rank has left, returns that rank; None if the key may still be set."""
        if from_rank is not None and from_rank in self._roster.left:
            return from_rank
        return next(reversed(self._roster.left)) if self._roster.one_remains() else None

    def _fail(self, request: Request, key: str, gone: int) -> Send:
        need = f"key {key!r} is not set, and no other rank remains to set it"
        if not self._roster.one_remains():
            need = f"key {key!r} is not set, and only this rank sets it"
        return request.fail(self._roster.left_failure(gone, need))


class Exchange:
    """One exchange: its members wait until all members have arrived, each with a value.

    Args:
        name, ranks: the name and the members.
        table: the server's table of waiting requests.
        open_ones: the open exchanges by name and members. The exchange removes itself from there when it ends, or when
            all members that had arrived have withdrawn.

    Attributes:
        name, ranks: see Args.
        waits: the requests of the members that have arrived, by rank.
        values: the values of the members that have arrived, by rank.
    """

    def __init__(
        self, name: str, ranks: Members, table: WaitTable, open_ones: dict[tuple[str, Members], Exchange]
    ) -> None:
        self.name = name
        self.ranks = ranks
        self.waits: dict[int, Request] = {}
        self.values: dict[int, bytes] = {}
        self._table = table
        self._open_ones = open_ones
        self._cancelled: set[int] = set()  # ranks that have arrived and then cancelled their wait
        open_ones[name, ranks] = self

    @property
    def is_complete(self) -> bool:
        """Whether all members have arrived."""
        return len(self.values) == len(self.ranks)

    def arrive(self, request: Request, value: bytes) -> None:
        """Records an arrival; the request waits."""
        self.waits[request.rank] = request
        self.values[request.rank] = value
        self._table.add(request, self)
        self._cancelled.discard(request.rank)

    def withdraw(self, request: Request) -> None:
        """Removes a member's arrival, as if the member had not arrived yet."""
        del self.waits[request.rank], self.values[request.rank]
        self._cancelled.add(request.rank)
        if not self.values:
            del self._open_ones[self.name, self.ranks]

    def absent_ranks(self) -> Iterator[int]:
        """Iterates over the members that have not arrived."""
        return (rank for rank in self.ranks if rank not in self.values)

    def missing_ranks(self, _request: Request) -> tuple[int, ...]:
        """Returns the members that never arrived; if there are none, the members that cancelled their wait."""
        return never_arrived(self.absent_ranks(), self._cancelled)

    def close(self) -> list[Request]:
        """Ends the exchange; returns the requests that waited."""
        del self._open_ones[self.name, self.ranks]
        requests, self.waits = list(self.waits.values()), {}  # {}, because each request refers to its target in a cycle
        for request in requests:
            self._table.close(request)
        return requests


class Exchanges:
    """The open exchanges of a generation, by name and members. A barrier is an exchange of empty values."""

    def __init__(self, roster: Roster, waits: WaitTable) -> None:
        self._roster = roster
        self._waits = waits
        self._open: dict[tuple[str, Members], Exchange] = {}

    def arrive(self, request: Request, name: str, ranks: list[int] | None, value: bytes) -> list[Send]:
        """Records a rank's arrival and value; the last arrival releases all ranks."""
        members = members_of(ranks, self._roster.world_size)
        if members is None or request.rank not in members:
            label, given = self._roster.label(request.rank), list_members(members or ranks or ())
            return [request.refuse(f"{name!r} needs existing ranks that include {label}, got {given}")]
        if len(value) * len(members) > MAX_EXCHANGED_BYTES:
            limit = MAX_EXCHANGED_BYTES // len(members)
            needed = f"with {len(members)} ranks needs values of at most {limit} bytes each, got {len(value)} bytes"
            return [request.refuse(f"exchange {name!r} {needed}")]
        exchange = self._open.get((name, members))
        if exchange is None:
            exchange = Exchange(name, members, self._waits, self._open)
        if request.rank in exchange.waits:
            return [request.refuse(f"{self._roster.label(request.rank)} already waits in {name!r}")]
        exchange.arrive(request, value)
        if exchange.is_complete:
            return _release(exchange)
        left = self._roster.first_left(exchange.absent_ranks())
        return [] if left is None else self._fail(exchange, left)

    def rank_left(self, rank: int) -> list[Send]:
        """Fails the exchanges that still need a rank that has left."""
        waiting = [exchange for exchange in self._open.values() if rank in exchange.ranks]
        return [send for exchange in waiting for send in self._fail(exchange, rank)]

    def _fail(self, exchange: Exchange, left: int) -> list[Send]:
        failure = self._roster.left_failure(left, f"{exchange.name!r} needs this rank")
        return [request.fail(failure) for request in exchange.close()]


def _release(exchange: Exchange) -> list[Send]:
    """Answers the members with all values. If all values are empty, as at a barrier, the answer has no list."""
    values = [value for _, value in sorted(exchange.values.items())]
    requests = exchange.close()
    if not any(values):
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
    """The ranks that have left each group, and the number of collectives that each rank had begun in the group.

    A member that has waited too long for other members asks which members have left. Once every member has left the
    group or the world, the server removes the group's keys, because a run may make many groups.

    Args:
        roster: the members of the generation.
        forget: a function that takes a group's name, and removes the group's keys.
    """

    def __init__(self, roster: Roster, forget: Callable[[str], None]) -> None:
        self._roster = roster
        self._forget = forget
        self._left: dict[tuple[str, Members], dict[int, int]] = {}

    def leave(self, request: Request, name: str, ranks: list[int] | None, position: int) -> None:
        """Records that a member has left a group. A LEAVE frame gets no answer, so a wrong LEAVE frame is ignored."""
        members = members_of(ranks, self._roster.world_size) or ()
        if request.rank not in members:
            return
        self._left.setdefault((name, members), {}).setdefault(request.rank, position)
        self._remove_if_empty(name, members)

    def rank_left(self, rank: int) -> None:
        """Removes the groups that all members have left, now that this rank has left the world."""
        for name, members in [group for group in self._left if rank in group[1]]:
            self._remove_if_empty(name, members)

    def _remove_if_empty(self, name: str, members: Members) -> None:
        left = self._left[name, members]
        if all(rank in left or rank in self._roster.left for rank in members):
            del self._left[name, members]
            self._forget(name)

    def left_ranks(self, request: Request, name: str, ranks: list[int] | None) -> list[Send]:
        """Answers with the members that have left a group, each followed by its number of begun collectives."""
        left = sorted(self._left.get((name, members_of(ranks, self._roster.world_size) or ()), {}).items())
        return [request.reply([number for rank_and_position in left for number in rank_and_position])]
