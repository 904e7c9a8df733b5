"""The rendezvous client: a rank joins a generation, and shares keys, barriers and failures with the other ranks.

One class is for the world and for groups, which are some of its ranks. A group's name is the beginning of the names of
its keys, barriers and groups.
"""

from __future__ import annotations

import math
import operator
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn

from gradsync.arguments import DEFAULT_TIMEOUT_SECONDS, check_seconds
from gradsync.errors import (
    CollectiveTimeout,
    InvalidArgument,
    RendezvousError,
    RendezvousTimeout,
    name_ranks,
)
from gradsync.machine import machine_identity
from gradsync.rendezvous.connection import (
    AT_ONCE_SECONDS,
    FAILURE_WITHIN_SECONDS,
    Callbacks,
    Connection,
    dial,
)
from gradsync.rendezvous.sockets import ConnectionLost
from gradsync.rendezvous.wire import (
    MAX_NAME_BYTES,
    MAX_RANKS,
    MAX_VALUE_BYTES,
    Calls,
    Kind,
    check_secret,
    clip_text,
    is_under,
)

_JOIN_ATTEMPTS = 50


class RendezvousClient:
    """A rank's membership in one generation (made by `connect`), or in a group of its ranks (made by `group`).

    Any number of threads may use one client; each call that waits has its own deadline. Once the generation has failed,
    every call that waits for an answer raises this failure. `group` and `get` take ranks of this client. The other
    methods, the reports and the errors use ranks of the world.

    Attributes:
        rank, world_size: this rank's number, and the number of members.
        numbers: of a world that was rebuilt, the ranks at launch of its ranks; None if they have kept them.
        world_ranks: the world rank of each member, in the order of the members' ranks in this group.
        name: the group's name; "" is the world.
        label: this rank in messages, e.g. "rank 1/4", or "rank 1/2 of group 'pair' (rank 2 of the world)".
        generation: the generation's number, counted by the server from 1.
        address: the server's address.
        ends_with_its_groups: whether this client of a world closes once all groups that were made from it are closed.
        has_failed: returns whether the generation has failed, or this rank has reported a failure; for loops, as it
            takes 0.1 us.
    """

    def __init__(
        self,
        connection: Connection,
        world_ranks: tuple[int, ...],
        rank: int,
        *,
        generation: int,
        numbers: tuple[int, ...] | None = None,
        world: RendezvousClient | None = None,
        name: str = "",
    ) -> None:
        self.rank = rank
        self.world_size = len(world_ranks)
        self.world_ranks = world_ranks
        self.numbers = numbers
        self.name = name
        self.generation = generation
        self.address = connection.address
        self.has_failed = connection.has_failed
        self.label = connection.label
        self._world = world
        self._connection = connection
        self._members: list[int] | None = None  # None: all ranks
        if world is not None:
            self.label = f"rank {rank}/{self.world_size} of group {name!r} (rank {world_ranks[rank]} of the world)"
            self._members = sorted(world_ranks)
        self._has_left = False
        self.ends_with_its_groups = False
        self._groups: set[str] = set()  # of a world: those that have not been closed

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        secret: bytes,
        rank: int,
        world_size: int,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        shown_seconds: float | None = None,
        reach_seconds: float | None = None,
        world: str = "",
        last: RendezvousClient | None = None,
        min_ranks: int = 0,
    ) -> RendezvousClient:
        """Joins the next generation: connects, authenticates, and waits until all ranks have joined.

        Every rank must call `connect` once per generation. With `last` it rebuilds the world: it waits until all who
        are left of the last generation have come, and the ranks get new numbers. A rank that joins a world whose others
        run already waits until they rebuild it, also beyond its timeout.

        Args:
            address: the server's address, "host:port" or "[IPv6]:port".
            secret: the run's secret, at least 16 bytes.
            rank: this rank's number at launch, from 0.
            world_size: the number of launched ranks.
            timeout_seconds: the time limit for connecting and joining together.
            shown_seconds: the timeout to name in error texts, if it is not `timeout_seconds`.
            reach_seconds: the time limit for reaching the server, if it is shorter.
            world: the name of the world; a server has any number, and "" is the launcher's.
            last: this rank's client of the last generation, still open; the new generation replaces it.
            min_ranks: with `last`, how many ranks are needed at least; 0 is half of the last generation if it spans
                several machines, else 1.

        Raises:
            InvalidArgument: an argument is malformed or out of its range.
            RendezvousTimeout: the server was not reached, and why; or not all ranks joined, and `missing_ranks` has
                those that did not.
            AuthenticationError: the server does not know the secret.
            RendezvousError: the server refused this rank, or another service holds the port.
            RankFailed: another rank died, was paused (SIGSTOP) or reported a failure while the generation was forming.
        """
        check_seconds("connect", "timeout_seconds", timeout_seconds)
        shown_seconds = timeout_seconds if shown_seconds is None else shown_seconds
        deadline = time.monotonic() + timeout_seconds
        rank, world_size = operator.index(rank), operator.index(world_size)
        if not 0 <= rank < world_size:
            raise InvalidArgument(f"connect needs a rank from 0 to world_size - 1 = {world_size - 1}, got {rank}")
        secret = check_secret(secret)
        label = f"rank {rank}/{world_size}"
        process = machine_identity(), clip_text(socket.gethostname(), MAX_NAME_BYTES), os.getpid()
        attempts_left = _JOIN_ATTEMPTS
        while True:
            attempts_left -= 1
            until = deadline if reach_seconds is None else min(deadline, time.monotonic() + reach_seconds)
            connection = dial(address, secret=secret, deadline=until, label=label, shown_seconds=shown_seconds)
            try:
                seconds = max(deadline - time.monotonic(), 0.0)
                after = None if last is None else last.generation
                fields = world, rank, world_size, after, min_ranks, *process
                operation = "joining" if last is None else "rebuild"
                number, numbers = connection.ask(operation, seconds, Kind.JOIN, *fields, shown_seconds=shown_seconds)
                if numbers is None:
                    return cls(connection, tuple(range(world_size)), rank, generation=number)
                size, new_rank = len(numbers), numbers.index(rank)
                connection.label = f"rank {new_rank}/{size}"
                return cls(connection, tuple(range(size)), new_rank, generation=number, numbers=tuple(numbers))
            except BaseException as error:
                connection.abandon()
                if isinstance(error, RendezvousTimeout) and error.missing_ranks == (rank,):
                    # The others run. They take this rank in when they rebuild, and so it waits as long as they run.
                    deadline, attempts_left = time.monotonic() + timeout_seconds, _JOIN_ATTEMPTS
                    continue
                # A server that is flooded with connections may drop a connection that has not authenticated yet.
                is_dropped = isinstance(error, RendezvousError) and isinstance(error.__cause__, ConnectionLost)
                if not is_dropped or connection.is_accepted or not attempts_left:
                    raise
                continue

    def group(self, members: Sequence[int], name: str) -> RendezvousClient:
        """Returns this rank's client for a group of these members. All members must call `group` with equal arguments.

        "name/" comes before the name of each of its keys, barriers and groups, unless that is `name` itself, or begins
        with "name/" already.

        Args:
            members: ranks of this client, in the order in which they become rank 0, 1, 2 ... of the group.
            name: a name not used before in this generation; at most 500 bytes.

        Raises:
            InvalidArgument: this rank is not a member, or a member is named twice or does not exist.
        """
        numbers = [operator.index(member) for member in members]
        fits = all(0 <= member < self.world_size for member in numbers) and len(set(numbers)) == len(numbers)
        if not fits or self.rank not in numbers:
            raise InvalidArgument(
                f"{self.label}: the members of group {name!r} need to be distinct, from 0 to "
                f"{self.world_size - 1}, and to include this rank, got {numbers}"
            )
        world_ranks, world = tuple([self.world_ranks[member] for member in numbers]), self._world or self
        world._groups.add(name)
        return RendezvousClient(
            self._connection,
            world_ranks,
            numbers.index(self.rank),
            generation=self.generation,
            world=world,
            name=name,
        )

    def __enter__(self) -> RendezvousClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Keys, exchanges and barriers.

    def set(self, key: str, value: bytes) -> None:
        """Stores a value under a key, for all members; replaces an earlier value.

        Args:
            key: the key's name.
            value: at most 60 KiB.

        Raises:
            InvalidArgument: the key or the value has the wrong type or is too long.
            RendezvousError: the server is gone, does not answer, or has no room for the value.
            RankFailed, CollectiveTimeout: the generation has failed.
        """
        operation = f"set {key!r}"
        data = self._checked_value(operation, value)
        self._connection.ask(operation, AT_ONCE_SECONDS, Kind.SET, self._scoped(key), data)

    def get(self, key: str, *, from_rank: int | None = None, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> bytes:
        """Waits until a key is set, and returns its value.

        Args:
            key: the key's name.
            from_rank: the member that sets the key, if known: the error at the deadline names it, and the wait fails
                as soon as it leaves the world.
            timeout_seconds: this rank's deadline.

        Raises:
            RendezvousTimeout: the key was not set by the deadline; `missing_ranks` has the world rank of `from_rank`.
            RankFailed: a rank died, `from_rank` has left the world, or every other rank has left the world.
        """
        setter = None if from_rank is None else self.world_ranks[from_rank]
        [value] = self._connection.ask(f"get {key!r}", timeout_seconds, Kind.GET, self._scoped(key), setter)
        return bytes(value)

    def delete(self, key: str) -> None:
        """Removes a key, and all keys that begin with "key/"."""
        self._connection.ask(f"delete {key!r}", AT_ONCE_SECONDS, Kind.DELETE, self._scoped(key))

    def exchange(
        self,
        name: str,
        value: bytes,
        *,
        root: int | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> list[bytes]:
        """Returns the values of all members, by rank. Every member must call `exchange`, with the same name.

        Args:
            name: the exchange's name.
            value: at most 60 KiB; without a root at most 512 KiB divided by the number of members. The values of all
                exchanges that have not ended, and of all keys, have at most 64 MiB.
            root: the member that gets the values. The others do not wait, and get []. None: all get them.
            timeout_seconds: this rank's deadline.

        Raises:
            InvalidArgument: the value is too long, or a later call of this rank has taken the place of this one.
            RendezvousTimeout: `missing_ranks` has the ranks that did not arrive; the text has their states.
            RankFailed: a rank died, or a member has left the world.
        """
        operation = f"exchange {name!r}"
        data, to = self._checked_value(operation, value), None if root is None else self.world_ranks[root]
        found = self._connection.ask(
            operation, timeout_seconds, Kind.EXCHANGE, self._scoped(name), self._members, data, to
        )
        if root is not None and root != self.rank:
            return []
        if not found:  # all values are empty
            return [b""] * self.world_size
        by_world_rank = dict(zip(sorted(self.world_ranks), found[0], strict=True))
        return [by_world_rank[rank] for rank in self.world_ranks]

    def barrier(self, name: str = "", *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> None:
        """Waits until every member has called `barrier` with the same name. A name can be used again.

        A barrier is an exchange of empty values: do not use one name for a barrier and an exchange at the same time. A
        rank that reaches its deadline no longer counts as arrived, and may call `barrier` again. Raises the errors of
        `exchange`.
        """
        fields = self._scoped(name), self._members, b"", None
        self._connection.ask(f"barrier {name!r}", timeout_seconds, Kind.EXCHANGE, *fields)

    def _checked_value(self, operation: str, value: Any) -> bytes:
        if not isinstance(value, (bytes, bytearray, memoryview)) or len(value) > MAX_VALUE_BYTES:
            given = f"{len(value)} bytes" if isinstance(value, (bytes, bytearray, memoryview)) else type(value).__name__
            raise InvalidArgument(
                f"{self.label}: {operation}: value needs to be bytes of length 0 to {MAX_VALUE_BYTES}, got {given}"
            )
        return bytes(value)

    # Leaving.

    def announce_left(self, name: str, position: int) -> None:
        """Reports that this rank has left a communicator after `position` collectives; never waits and never raises.

        Once all members have left it, or the world, the server removes its keys.
        """
        self._connection.departed.pop(self._scoped(name), None)
        self._post(Kind.LEAVE, self._scoped(name), self._members, operator.index(position))

    def left_ranks(self, name: str) -> dict[int, int]:
        """Returns the world ranks that have left the communicator, and their positions. It never waits."""
        return dict(self._connection.departed.get(self._scoped(name), {}))

    def close(self) -> None:
        """Leaves the group, or the world, which goes on without this rank. A second call does nothing.

        A group's client does not wait. The world's waits up to 1 s for the server, and up to 2.2 s for its own threads.
        Threads that wait in a request of the world, or of one of its groups, get CommunicatorClosed.
        """
        if self._world is None:
            self._connection.close()
        elif not self._has_left:
            self._has_left = True
            self.announce_left(self.name, 0)
            self._world._groups.discard(self.name)
            if self._world.ends_with_its_groups and not self._world._groups:
                self._world.close()

    def abandon(self) -> None:
        """Closes the connection without LEAVE, after a failure. A second call does nothing."""
        self._connection.abandon()

    # Failures.

    def check(self) -> None:
        """Raises the failure of the generation, if it has failed; never waits. Later calls raise the same failure.

        Raises:
            RankFailed: a rank of this generation died, was paused (SIGSTOP), was unreachable or reported a failure.
            CollectiveTimeout: a rank did not arrive at a collective in time.
            RendezvousError: the server is gone.
            CommunicatorClosed: this client was closed.
        """
        self._connection.raise_failure()

    def explain_loss(self, text: str) -> None:
        """Sets what errors add when the server is gone, such as who hosted it."""
        self._connection.if_lost = f"; {text}"

    def describe_with(
        self,
        positions: Callable[[], Mapping[str, int]],
        report: Callable[[], tuple[str, Calls]],
    ) -> None:
        """Sets what describes this rank to the server and the other ranks.

        Both run in threads of this client, and must be quick. If `report` raises, the error's text is the report; an
        error of `positions` is ignored.

        Args:
            positions: returns the number of collectives that this rank has begun in each group, for at most 16 groups;
                called every two seconds, and before `report`.
            report: returns a text about this rank, which errors of the other ranks show, shortened to 16 KiB; and its
                last collectives by group, at most 128: number, digest, description (at most 200 bytes), and whether it
                still runs.
        """
        self._connection.callbacks = Callbacks(positions, report)

    def report_waiting(
        self, group: str, position: int, what: str, waited_seconds: float, missing: Sequence[int] | None
    ) -> None:
        """Reports that this rank waits for others in a collective, of which the server logs one notice. It never waits.

        Args:
            group: the group's name, as in what `positions` returns (`describe_with`).
            position: the number of the collective in the group, from 1; 0 for a send or receive.
            what: the collective in words, with its number, e.g. "all_reduce #57".
            waited_seconds: how long this rank has waited in it.
            missing: the world ranks for which this rank waits. None if it does not know them: the server then names
                those that have begun fewer collectives.
        """
        self._post(Kind.WAITING, *self._wait_fields(group, position, what, waited_seconds, missing), False)

    def report_stuck(
        self, group: str, position: int, what: str, waited_seconds: float, missing: Sequence[int] | None
    ) -> NoReturn:
        """Fails the generation because a collective has reached its deadline, and raises this failure.

        The server asks every rank for its status, for at most 5 s. Then all ranks, the missing ones too, get the same
        error, in their current or next call. The arguments are those of `report_waiting`.

        Raises:
            CollectiveTimeout: `missing_ranks` has the ranks that did not arrive; the text has the reports of all. If
                the server does not answer within 10 s, it has only this rank's view.
            RankFailed: a rank was found dead or paused (SIGSTOP), or has failed before.
            RendezvousError: the server is gone.
            CommunicatorClosed: this client was closed.
        """
        fields = self._wait_fields(group, position, what, waited_seconds, missing)
        self._connection.await_failure(Kind.WAITING, *fields, True)
        missing_names = f" for {name_ranks(missing)}" if missing else ""
        raise CollectiveTimeout(
            f"{self._connection.label}: waited {waited_seconds:.3g} s in {what}{missing_names}; the server "
            f"at {self.address} did not answer within {FAILURE_WITHIN_SECONDS:g} s, so this rank cannot say what the "
            "other ranks are doing",
            missing_ranks=tuple(missing or ()),
        )

    def report_failure(self, reason: str, *, culprit: int | None = None) -> None:
        """Fails the generation: every rank gets RankFailed with this rank and the reason.

        Does nothing if the generation has failed before. It never waits, so error handlers can call it.

        Args:
            reason: the text of the failure; shortened to 4 KiB.
            culprit: the world rank that caused this rank's failure, which RankFailed then names.
        """
        self._connection.report_failure(reason, culprit)

    def _post(self, kind: Kind, *fields: object) -> None:
        """Sends a message that needs no answer, unless the generation has failed."""
        if self._connection.failure is None:
            self._connection.post(kind, *fields)

    def _wait_fields(
        self, group: str, position: int, what: str, waited_seconds: float, missing: Sequence[int] | None
    ) -> tuple[object, ...]:
        """Returns the fields of a WAITING message but for the last one, whether the deadline has come."""
        members = self._members
        absent = None if missing is None else sorted({operator.index(rank) for rank in missing})
        if len(members or ()) + len(absent or ()) > MAX_RANKS:  # both lists might not fit one frame
            members = None
        waited_ms = max(0, math.ceil(waited_seconds * 1000.0))
        what = clip_text(what, MAX_NAME_BYTES)
        return self._scoped(group), members, operator.index(position), what, waited_ms, absent

    def _scoped(self, name: str) -> str:
        if not isinstance(name, str):
            raise InvalidArgument(f"{self.label}: a name needs to be text, got {type(name).__name__}")
        return name if not self.name or is_under(name, self.name) else f"{self.name}/{name}"
