"""The rendezvous client: a rank joins a generation, and shares keys, barriers and failures with the others.

The process group and the communicators use it. One class serves the world and the groups. A group has some of the
ranks. Its name is put before the names of its keys, barriers and groups.
"""

from __future__ import annotations

import contextlib
import math
import operator
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn

from gradsync.arguments import DEFAULT_TIMEOUT_SECONDS
from gradsync.errors import CollectiveTimeout, GradsyncError, InvalidArgument, name_ranks
from gradsync.machine import machine_identity
from gradsync.rendezvous.connection import (
    AT_ONCE_SECONDS,
    FAILURE_WITHIN_SECONDS,
    Callbacks,
    Connection,
    OnAsked,
    check_timeout,
)
from gradsync.rendezvous.dialling import dial
from gradsync.rendezvous.frames import (
    MAX_MACHINE_BYTES,
    MAX_WHAT_BYTES,
    NEXT_GENERATION,
    Calls,
    Decision,
    FrameType,
    clip_text,
    is_under,
)
from gradsync.rendezvous.handshake import check_secret
from gradsync.rendezvous.liveness import heartbeat_seconds
from gradsync.rendezvous.sockets import ConnectionLost

_JOIN_ATTEMPTS = 50
_MAX_LISTED_RANKS = 16_384


class RendezvousClient:
    """A rank's membership of one generation, made by `connect`, or of a group of its ranks, made by `group`.

    Any number of threads may use it, each call with its own deadline. Every call returns its result or raises a typed
    error. Once the generation has failed, every call raises that failure. The methods of a group take ranks of the
    group; errors and reports name ranks of the world.

    Attributes:
        rank, world_size: this rank's number, and the number of members.
        world_ranks: the rank in the world of each member, by the member's rank here.
        name: the group's name; "" is the world.
        label: this rank in messages, e.g. "rank 1/4", or "rank 1/2 of group 'pair' (rank 2 of the world)".
        generation: the generation's number, counted by the server from 1.
        most_advanced: the rank that passed the largest `steps` to `connect`.
        address: the server's address.
        own_host: this machine's own address on its connection to the server.
        has_failed: a function that returns whether the generation has failed or this rank has reported a failure. It
            takes 0.1 us, for loops in which `check` would be too slow.
    """

    def __init__(
        self,
        connection: Connection,
        world_ranks: tuple[int, ...],
        rank: int,
        *,
        generation: int,
        world: RendezvousClient | None = None,
        name: str = "",
        most_advanced: int = 0,
    ) -> None:
        self.rank = rank
        self.world_size = len(world_ranks)
        self.world_ranks = world_ranks
        self.name = name
        self.generation = generation
        self.most_advanced = most_advanced
        self.address = connection.address
        self.own_host = connection.own_host
        self.has_failed = connection.has_failed
        self.label = connection.label
        self._world = world
        self._connection = connection
        self._members: list[int] | None = None  # None: all ranks
        if world is not None:
            self.label = f"rank {rank}/{self.world_size} of group {name!r} (rank {world_ranks[rank]} of the world)"
            self._members = sorted(world_ranks)
        self._launched_positions: dict[str, int] = {}
        self._has_left = False

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        secret: bytes,
        rank: int,
        world_size: int,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        noun: str = "rank",
        generation: int = NEXT_GENERATION,
        min_ranks: int | None = None,
        steps: int = 0,
        start: str | None = None,
    ) -> RendezvousClient:
        """Joins the next generation: connects, authenticates, and waits until all ranks have joined.

        Every rank must call `connect` once per generation. With `min_ranks`, after a failure, the generation forms from
        the ranks that join: at the first rank's deadline, or once all others are known to have ended. These ranks are
        then numbered anew, in their old order.

        Args:
            address: the server's address, "host:port" or "[IPv6]:port".
            secret: the run's secret, at least 16 bytes.
            rank: this rank's number at launch, from 0.
            world_size: the number of launched ranks.
            timeout_seconds: one deadline for connecting and joining.
            noun: the word for a member in messages, the same as the server's.
            generation: the number of the generation to join; 0 is the one that forms next. The server refuses a rank
                whose generation has formed without it.
            min_ranks: the smallest number of ranks to form a generation with; None needs all. Needs `generation`.
            steps: the number of training steps that this rank has completed.
            start: the name of the start that this rank belongs to, if launchers share the server, see `begin_start`.

        Raises:
            InvalidArgument: an argument is out of its range.
            RendezvousTimeout: the server was not reached (the text has the address and the last cause), or
                not all ranks joined (`missing_ranks` names them).
            AuthenticationError: the server does not know the secret.
            RendezvousError: the server refused this rank, or another service holds the port.
            RankFailed: another rank died while the generation was forming.
        """
        deadline = time.monotonic() + check_timeout(timeout_seconds)
        rank, world_size = operator.index(rank), operator.index(world_size)
        if not 0 <= rank < world_size:
            raise InvalidArgument(f"connect needs a rank from 0 to world_size - 1 = {world_size - 1}, got {rank}")
        if min_ranks is not None and generation == NEXT_GENERATION:
            raise InvalidArgument("connect with min_ranks needs generation=, the number after the failed generation's")
        secret = check_secret(secret)
        label = f"{noun} {rank}/{world_size}"
        host = clip_text(socket.gethostname(), MAX_MACHINE_BYTES)
        process = machine_identity(), host, os.getpid()
        attempts_left = _JOIN_ATTEMPTS
        while True:
            attempts_left -= 1
            connection = dial(address, secret=secret, deadline=deadline, label=label, generation=generation)
            try:
                connection.start(heartbeat_seconds(world_size))
                joined = connection.ask(
                    "joining",
                    max(deadline - time.monotonic(), 0.0),
                    FrameType.JOIN,
                    *(rank, world_size, generation, *process, min_ranks, steps, start),
                    shown_seconds=timeout_seconds,
                )
            except BaseException as error:
                connection.abandon()
                # A server that is flooded with connections may drop one that has not authenticated yet.
                if not isinstance(error.__cause__, ConnectionLost) or connection.is_accepted or not attempts_left:
                    raise
                continue
            number, own_rank, size, most_advanced = joined
            connection.label = f"{noun} {own_rank}/{size}"
            return cls(connection, tuple(range(size)), own_rank, generation=number, most_advanced=most_advanced)

    def group(self, members: Sequence[int], name: str) -> RendezvousClient:
        """Returns this rank's client for a group of the members. All of them must call it, with the same arguments.

        The group puts "name/" before the name of each of its keys, barriers and groups, unless that is `name` itself or
        begins with "name/".

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
        world_ranks = tuple([self.world_ranks[member] for member in numbers])
        return RendezvousClient(
            self._connection,
            world_ranks,
            numbers.index(self.rank),
            generation=self.generation,
            world=self._world or self,
            name=name,
        )

    def __enter__(self) -> RendezvousClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Keys, exchanges and barriers.

    def set(self, key: str, value: bytes, *, replace: bool = True) -> bool:
        """Stores a value under a key, for all members; returns whether it was stored.

        Args:
            key: the key's name.
            value: at most 60 KiB.
            replace: whether to replace an existing value; otherwise the first value stays.

        Raises:
            InvalidArgument: the key or the value does not fit.
            RankFailed, CollectiveTimeout, RendezvousError: the generation or the server has failed.
        """
        data = bytes(value) if isinstance(value, (bytearray, memoryview)) else value
        return bool(self._ask_at_once(f"set {key!r}", FrameType.SET, self._scoped(key), data, replace))

    def get(self, key: str, *, from_rank: int | None = None, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> bytes:
        """Returns the value of a key; waits until it is set.

        Args:
            key: the key's name.
            from_rank: the member that sets the key. A timeout names this rank, and the wait ends if the rank leaves.
            timeout_seconds: this rank's deadline.

        Raises:
            RendezvousTimeout: the key was not set by the deadline; `missing_ranks` has `from_rank`.
            RankFailed: a rank died, `from_rank` has left, or every other rank has left.
        """
        setter = None if from_rank is None else self.world_ranks[from_rank]
        operation = f"get {key!r}"
        return bytes(self._connection.ask(operation, timeout_seconds, FrameType.GET, self._scoped(key), setter))

    def delete(self, key: str) -> bool:
        """Removes a key; returns whether it was there."""
        return bool(self._ask_at_once(f"delete {key!r}", FrameType.DELETE, self._scoped(key)))

    def exchange(self, name: str, value: bytes, *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> list[bytes]:
        """Returns the values of all members, by rank. Every member must call it, with the same name.

        Args:
            name: the exchange's name.
            value: at most 60 KiB, and at most 512 KiB divided by the number of members.
            timeout_seconds: this rank's deadline.

        Raises:
            InvalidArgument: the value is too long.
            RendezvousTimeout: `missing_ranks` has the ranks that did not arrive; the text has their states.
            RankFailed: a rank died, or a member has left.
        """
        fields = self._scoped(name), self._members, bytes(value)
        values = self._connection.ask(f"exchange {name!r}", timeout_seconds, FrameType.EXCHANGE, *fields)
        by_world_rank = dict(zip(sorted(self.world_ranks), values, strict=True))
        return [by_world_rank[rank] for rank in self.world_ranks]

    def barrier(self, name: str = "", *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> None:
        """Waits until every member has arrived. Every member must call it, with the same name, which can be used again.

        A rank that reaches its deadline no longer counts as arrived, and may call it again. Raises the errors of
        `exchange`.
        """
        operation = f"barrier {name!r}"
        self._connection.ask(operation, timeout_seconds, FrameType.BARRIER, self._scoped(name), self._members)

    # Agreement on the next collective.

    def agree(
        self,
        group: str,
        position: int,
        digest: int,
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        arriving: tuple[list[object], object] | None = None,
    ) -> Decision:
        """Asks whether all members run the same collective at a position of their group, and returns the decision.

        Returns once every member has called it for this position, or has reported through `follow` that it has launched
        already. AGREED: all digests are equal. MISMATCH: the digests differ, and no member has launched. LAUNCHED: a
        member has launched a collective with another digest. The server sends LAUNCHED at once, also for every later
        position of the group; `launched_position` gives the first such position.

        Args:
            group: the group's name, at most 960 bytes.
            position: the number of the collective in the group, from 0.
            digest: the digest of this rank's next collective, an unsigned integer of 64 bits.
            timeout_seconds: this rank's deadline.
            arriving: a list and an item. The item is appended when the decision arrives, before any thread wakes. So
                the list has the order of the server, which threads that ask at the same time could not know otherwise.

        Raises:
            InvalidArgument: an argument is out of its range, the members differ from an earlier call's, or this rank
                already waits at this position.
            RendezvousTimeout: `missing_ranks` has the members that did not report; the text has their states.
            RankFailed: a rank died, or a member that has not reported has left.
        """
        name = self._scoped(group)
        fields = name, operator.index(position), operator.index(digest), self._members
        operation = f"agree {name!r} at position {position}"
        asked = FrameType.AGREE, *fields
        decision, decided_at = self._connection.ask(operation, timeout_seconds, *asked, arriving=arriving)
        if decision == Decision.LAUNCHED:
            self._launched_positions[name] = decided_at
        return Decision(decision)

    def launched_position(self, group: str) -> int | None:
        """Returns the first position at which a member launched another collective; None before a decision LAUNCHED.

        It may be lower than the position that this rank asked about; then this rank has launched there too.
        """
        return self._launched_positions.get(self._scoped(group))

    def follow(self, group: str, on_asked: OnAsked) -> None:
        """Sets the callback that answers when another member asks about a position.

        Call `follow` before the group's first collective: questions that arrive earlier are dropped. `on_asked` runs in
        a thread of this client. It must be quick, must not raise, and must not wait for the server.

        Args:
            group: the group's name.
            on_asked: `on_asked(position)` returns the collective that this rank has launched at that position, or None
                if it has launched none there yet. After None this rank must call `agree` there before it launches.

        Raises:
            InvalidArgument: the group has a callback already.
        """
        self._connection.follow(self._scoped(group), on_asked)

    def unfollow(self, group: str) -> None:
        """Removes the callback of `follow`; a call of it that is running goes on. Idempotent."""
        self._connection.unfollow(self._scoped(group))

    # Reports of a launcher about its ranks, on a server of launchers.

    def begin_start(self, start: str, world_size: int) -> None:
        """Begins a start of the ranks. Every launcher must call it, with the same arguments, before it starts ranks.

        The ranks join with the start's name. The server closes the connections of the previous start.

        Args:
            start: the start's name, at most 64 bytes; not used before.
            world_size: the number of ranks on all machines.
        """
        self._ask_at_once("begin_start", FrameType.BEGIN_START, start, world_size)

    def note_start(self, rank: int, pid: int) -> None:
        """Records a rank's process on this machine. Waiting ranks get an error if it is paused before it joins.

        Args:
            rank: the rank's number.
            pid: its process id.
        """
        self._post(FrameType.STARTED, rank, pid)

    def note_end(self, rank: int, how: str) -> None:
        """Records that a rank's process has ended; ranks that wait for it to join get an error.

        Args:
            rank: the rank's number.
            how: how the process ended, in words, e.g. "ended with exit code 0".
        """
        self._post(FrameType.ENDED, rank, how)

    # Leaving.

    def announce_left(self, name: str, position: int) -> None:
        """Reports that this rank has left a communicator after `position` collectives; never waits and never raises.

        Once every member has reported this or left the world, the server removes its entries whose name is `name` or
        begins with "name/".
        """
        with contextlib.suppress(ValueError):
            self._post(FrameType.LEAVE, self._scoped(name), self._members, operator.index(position))

    def left_ranks(self, name: str) -> dict[int, int]:
        """Returns the world ranks that have left a communicator, each with the number of collectives begun before."""
        asked = self._ask_at_once(f"left_ranks {name!r}", FrameType.LEFT_RANKS, self._scoped(name), self._members)
        return dict(zip(*asked, strict=True))

    def close(self) -> None:
        """Leaves the group, or the world. Idempotent. The generation goes on without this rank.

        A group's client does not wait. The world's client sends LEAVE, waits up to 1 s and closes the connection;
        threads that wait in a request of the world or of one of its groups get CommunicatorClosed.
        """
        if self._world is None:
            self._connection.close()
        elif not self._has_left:
            self._has_left = True
            self.announce_left(self.name, 0)

    def abandon(self) -> None:
        """Closes the connection without LEAVE, after a failure. Idempotent."""
        self._connection.abandon()

    # Failures.

    def check(self) -> None:
        """Raises the failure of the generation, if it has failed; never waits. Every later call raises it again.

        Raises:
            RankFailed: a rank of this generation died, was paused (SIGSTOP) or reported a failure.
            CollectiveTimeout: a rank did not arrive at a collective in time.
            RendezvousError: the server is gone.
            CommunicatorClosed: this client was closed.
        """
        self._connection.raise_failure()

    def describe_with(
        self,
        positions: Callable[[], Mapping[str, int]],
        report: Callable[[], str],
        history: Callable[[], Calls] = dict,
        on_trouble: Callable[[str], object] = str,
    ) -> None:
        """Sets the callbacks that describe this rank to the server and the other ranks.

        The callbacks run in threads of this client. They must be quick and must not raise; if `report` raises, the
        error's text is sent as the report.

        Args:
            positions: returns the number of collectives that this rank has begun in each group, for at most 16
                groups. It runs at every heartbeat, twice a second.
            report: returns the text on this rank for the other ranks' error; shortened to 16 KiB.
            history: returns this rank's last collectives, by group; for each its number, digest, description (at most
                200 bytes), and whether this rank is still in it. At most 16 groups and 128 collectives.
            on_trouble: called with one line of text after this rank has answered a status request, and when the
                generation fails.
        """
        self._connection.callbacks = Callbacks(positions, report, history, on_trouble)

    def report_waiting(
        self, group: str, position: int, what: str, waited_seconds: float, missing: Sequence[int] | None
    ) -> None:
        """Reports that this rank waits for others in a collective; does not wait for an answer, and does not raise.

        The server logs one notice for each position of a group, however many ranks report that they wait there.

        Args:
            group: the group's name, as in the positions of `describe_with`.
            position: the number of the collective in the group, counted from 1.
            what: the collective in words, with its number, e.g. "all_reduce #57".
            waited_seconds: how long this rank has waited in it.
            missing: the world ranks that it waits for. None if it does not know them: the server then names the ranks
                that have begun fewer collectives.
        """
        self._post(FrameType.STUCK, *self._wait_fields(group, position, what, waited_seconds, missing), False)

    def report_stuck(
        self, group: str, position: int, what: str, waited_seconds: float, missing: Sequence[int] | None
    ) -> NoReturn:
        """Fails the generation because a collective has reached its deadline, and raises that failure.

        The server asks every rank for its status, for at most half a second. Then every rank, also a missing one, gets
        the same error, in this call or its next one. The arguments are those of `report_waiting`.

        Raises:
            CollectiveTimeout: `missing_ranks` has the ranks that did not arrive; the text has every rank's report. If
                the server does not answer within a second, the error has only this rank's view.
            RankFailed: a rank was found dead or paused (SIGSTOP), or the generation has failed before.
            RendezvousError: the server is gone.
            CommunicatorClosed: this client was closed.
        """
        fields = self._wait_fields(group, position, what, waited_seconds, missing)
        self._connection.await_failure(FrameType.STUCK, *fields, True)
        missing_names = f" for {name_ranks(missing)}" if missing else ""
        raise CollectiveTimeout(
            f"{self._connection.label}: waited {waited_seconds:.3g} s in {what}{missing_names}; the states of the "
            f"other ranks are unknown: the rendezvous server at {self.address} did not answer within "
            f"{FAILURE_WITHIN_SECONDS:g} s",
            missing_ranks=tuple(missing or ()),
        )

    def report_failure(self, reason: str, *, culprit: int | None = None) -> None:
        """Fails the generation: every rank gets RankFailed with this rank and the reason.

        For error handlers: it never waits and never raises.

        Args:
            reason: the text of the failure; shortened to 4 KiB.
            culprit: the world rank that caused this rank's failure; RankFailed then names the culprit instead.
        """
        self._connection.report_failure(reason, culprit)

    def _ask_at_once(self, operation: str, frame_type: FrameType, *fields: object) -> Any:
        return self._connection.ask(operation, AT_ONCE_SECONDS, frame_type, *fields)

    def _post(self, frame_type: FrameType, *fields: object) -> None:
        """Sends a message that needs no answer, unless the generation has failed."""
        with contextlib.suppress(GradsyncError):
            self._connection.raise_failure()
            self._connection.post(frame_type, *fields)

    def _wait_fields(
        self, group: str, position: int, what: str, waited_seconds: float, missing: Sequence[int] | None
    ) -> tuple[object, ...]:
        """Returns the fields of a STUCK message, without the last one."""
        members = self._members
        absent = None if missing is None else sorted({operator.index(rank) for rank in missing})
        if len(members or ()) + len(absent or ()) > _MAX_LISTED_RANKS:  # both lists might not fit one frame
            members = None
        waited_ms = max(0, math.ceil(waited_seconds * 1000.0))
        what = clip_text(what, MAX_WHAT_BYTES)
        return self._scoped(group), members, operator.index(position), what, waited_ms, absent

    def _scoped(self, name: str) -> str:
        return name if not self.name or is_under(name, self.name) else f"{self.name}/{name}"
