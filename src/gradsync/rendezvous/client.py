"""The face of the rendezvous for a rank: it joins a generation, and shares keys, meetings and failures with the others.

Used by the process group and the communicators. The world and a group of its ranks are one class: a group has a name,
which stands before all names that it uses, and some of the ranks.
"""

from __future__ import annotations

import contextlib
import operator
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn

from gradsync.errors import GradsyncError, InvalidArgument
from gradsync.machine import machine_identity
from gradsync.rendezvous.connection import (
    AT_ONCE_SECONDS,
    Calls,
    Connection,
    OnAsked,
    StreamEnded,
    check_timeout,
    dial,
)
from gradsync.rendezvous.frames import (
    MAX_MACHINE_BYTES,
    NEXT_GENERATION,
    PROTOCOL_VERSION,
    Decision,
    FrameType,
    clip_text,
    is_under,
)
from gradsync.rendezvous.handshake import check_secret
from gradsync.rendezvous.liveness import heartbeat_seconds

_JOIN_ATTEMPTS = 50


class RendezvousClient:
    """A rank's place in one generation, made by `connect`, or in a group of its ranks, made by `group`.

    Any number of threads may use it, each call with its own deadline. Every call ends in its result or in a typed
    error. A failure of the generation is sticky: once known, every call raises it. Ranks that are passed to a group
    count within the group; ranks in errors and reports are the world's.

    Attributes:
        rank, world_size: this rank's number, and how many members there are.
        world_ranks: the members' numbers in the world, by rank.
        name: of the group; "" is the world.
        label: this rank in messages, e.g. "rank 1/4", or "rank 1/2 of group 'pair' (rank 2 of the world)".
        generation: counted by the server from 1.
        most_advanced: the rank that has completed the most steps, as `connect` was told.
        address: the server's address.
        own_host: the address of this machine by which it reaches the server.
        has_failed: a function that returns, in a tenth of a microsecond, whether `check` would raise, or will in the
            other ranks in a moment; for loops that are too fast for `check`.
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
        self._members: list[int] | None = None  # None is all ranks
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
        timeout_seconds: float = 120.0,
        noun: str = "rank",
        generation: int = NEXT_GENERATION,
        min_ranks: int | None = None,
        steps: int = 0,
        start: str | None = None,
    ) -> RendezvousClient:
        """Joins the next generation: connects, authenticates, and waits until all ranks have joined.

        Every rank must call it once per generation. With `min_ranks`, after a failure, the generation forms of the
        ranks that come: at the first deadline, or once all others are known to have ended. They are numbered anew then,
        in their order.

        Args:
            address: the server's address, "host:port" or "[IPv6]:port".
            secret: the run's secret, at least 16 bytes.
            rank: this rank as it was launched, from 0.
            world_size: how many ranks were launched.
            timeout_seconds: one deadline for all of it.
            noun: what messages call a member, as the server does.
            generation: the number of the generation to join; 0 is whichever forms next. Who comes too late for it is
                refused.
            min_ranks: of how many ranks at least it may form; None needs all. Needs `generation`.
            steps: how many this rank has completed.
            start: which start of the ranks this one is of, where launchers share the server, see `begin_start`.

        Raises:
            InvalidArgument: an argument is out of its range.
            RendezvousTimeout: the server was not reached (the text has the address and the last cause), or
                not all ranks joined (`missing_ranks` names them).
            AuthenticationError: the server does not know the secret.
            RendezvousError: the server refused this rank, or something else holds the port.
            RankFailed: another rank died while the generation was forming.
        """
        deadline = time.monotonic() + check_timeout(timeout_seconds)
        rank, world_size = operator.index(rank), operator.index(world_size)
        if not 0 <= rank < world_size:
            raise InvalidArgument(f"connect needs a rank from 0 to world_size - 1 = {world_size - 1}, got {rank}")
        if min_ranks is not None and generation == NEXT_GENERATION:
            raise InvalidArgument("connect with min_ranks needs the generation that follows the one which has failed")
        secret = check_secret(secret)
        label = f"{noun} {rank}/{world_size}"
        host = clip_text(socket.gethostname(), MAX_MACHINE_BYTES)
        join = (FrameType.JOIN,) if start is None else (FrameType.JOIN_START, start)
        introduction = FrameType.INTRODUCE, machine_identity(), host, os.getpid(), min_ranks, steps
        attempts_left = _JOIN_ATTEMPTS
        while True:
            attempts_left -= 1
            connection = dial(address, secret=secret, deadline=deadline, label=label, generation=generation)
            try:
                connection.start(heartbeat_seconds(world_size))
                # The introduction travels right behind: a rank that is stopped in between would never be missed.
                joined = connection.ask(
                    "joining",
                    max(deadline - time.monotonic(), 0.0),
                    *join,
                    PROTOCOL_VERSION,
                    rank,
                    world_size,
                    generation,
                    then=introduction,
                    shown_seconds=timeout_seconds,
                )
            except BaseException as error:
                connection.abandon()
                # A server flooded by strangers may drop a connection that it does not know yet.
                if not isinstance(error.__cause__, StreamEnded) or connection.is_seated or not attempts_left:
                    raise
                continue
            number, own_rank, size, most_advanced = joined
            connection.label = f"{noun} {own_rank}/{size}"
            return cls(connection, tuple(range(size)), own_rank, generation=number, most_advanced=most_advanced)

    def group(self, members: Sequence[int], name: str) -> RendezvousClient:
        """Returns this rank's place among some of the members. All of these make one, with the same arguments.

        What they share stands under the group's name: a key, barrier or group that is not called so, or "name/...",
        gets "name/" before it.

        Args:
            members: ranks of this client; in this order they are rank 0, 1, 2 ... of the group.
            name: not used before in this generation; at most 500 bytes.

        Raises:
            InvalidArgument: this rank is no member, or a member is named twice or does not exist.
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

    def __repr__(self) -> str:
        of_group = f", name={self.name!r}, world_ranks={self.world_ranks}" if self.name else ""
        return (
            f"{type(self).__name__}(rank={self.rank}, world_size={self.world_size}{of_group}, "
            f"generation={self.generation}, address={self.address!r})"
        )

    def __enter__(self) -> RendezvousClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Keys and meetings.

    def set(self, key: str, value: bytes, *, replace: bool = True) -> bool:
        """Stores a value of at most 60 KiB under a key, for all members; returns whether it was stored.

        Args:
            key: its name.
            value: bytes.
            replace: whether to replace a value that is there; else the first one stays.

        Raises:
            InvalidArgument: the key or the value does not fit.
            RankFailed, CollectiveTimeout, RendezvousError: the generation or the server has failed.
        """
        data = bytes(value) if isinstance(value, (bytearray, memoryview)) else value
        return bool(self._ask_at_once(f"set {key!r}", FrameType.SET, self._scoped(key), data, replace))

    def get(self, key: str, *, from_rank: int | None = None, timeout_seconds: float = 120.0) -> bytes:
        """Returns the value of a key; waits until it is set.

        Args:
            key: its name.
            from_rank: the member that sets it: it is named if it does not in time, and the wait ends if it leaves.
            timeout_seconds: this rank's deadline.

        Raises:
            RendezvousTimeout: nobody set it by the deadline; `missing_ranks` names `from_rank`.
            RankFailed: a rank died, `from_rank` has left, or every other rank has.
        """
        setter = None if from_rank is None else self.world_ranks[from_rank]
        operation = f"get {key!r}"
        return bytes(self._connection.ask(operation, timeout_seconds, FrameType.GET, self._scoped(key), setter))

    def delete(self, key: str) -> bool:
        """Removes a key; returns whether it was there."""
        return bool(self._ask_at_once(f"delete {key!r}", FrameType.DELETE, self._scoped(key)))

    def exchange(self, name: str, value: bytes, *, timeout_seconds: float = 120.0) -> list[bytes]:
        """Returns the values of all members, by rank. Every member must call it, with the same name.

        Args:
            name: names the exchange.
            value: at most 60 KiB, and 512 KiB shared by the members.
            timeout_seconds: this rank's deadline.

        Raises:
            InvalidArgument: the value is too long.
            RendezvousTimeout: `missing_ranks` names the ranks that did not come, the text where they are.
            RankFailed: a rank died, or one that is needed has left.
        """
        fields = self._scoped(name), self._members, bytes(value)
        values = self._connection.ask(f"exchange {name!r}", timeout_seconds, FrameType.EXCHANGE, *fields)
        by_world_rank = dict(zip(sorted(self.world_ranks), values, strict=True))
        return [by_world_rank[rank] for rank in self.world_ranks]

    def barrier(self, name: str = "", *, timeout_seconds: float = 120.0) -> None:
        """Waits until every member has arrived. Every member must call it, with the same name; reusable.

        A rank whose deadline comes first is withdrawn, and may come back to it. Raises as `exchange`.
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
        timeout_seconds: float = 120.0,
        arriving: tuple[list[object], object] | None = None,
    ) -> Decision:
        """Asks whether all members do the same at a position of their group, and returns the decision.

        Returns once every member has called it for this position, or has said, asked through `follow`, that it has
        launched already: AGREED when all digests are equal, else MISMATCH, or LAUNCHED when a member launched another
        digest. LAUNCHED comes at once, and for every later position of the group too; `launched_position` says where.

        Args:
            group: the group's name, at most 960 bytes.
            position: which of the group's collectives, from 0.
            digest: of what this rank is about to do, an unsigned integer of 64 bits.
            timeout_seconds: this rank's deadline.
            arriving: a list, and what is appended to it when the decision comes: before any thread is woken, and in the
                order in which the server has decided, which threads that ask at the same time cannot tell otherwise.

        Raises:
            InvalidArgument: an argument is out of its range, the members differ from an earlier call's, or this rank
                already waits at this position.
            RendezvousTimeout: `missing_ranks` names the members who did not report, the text where they are.
            RankFailed: a rank died, or a member who has not reported has left.
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
        """Returns where a member of the group launched something else, known after a decision LAUNCHED; else None.

        It may lie before the position that this rank asked about: then this rank launched there too.
        """
        return self._launched_positions.get(self._scoped(group))

    def follow(self, group: str, on_asked: OnAsked) -> None:
        """Lets `on_asked(position)` say what this rank launched there, whenever another member asks.

        Call it before the group's first collective: a question that comes earlier is not kept. `on_asked` runs in a
        thread of this client's. It is to be quick, not to raise, and to wait for nothing that needs the server.

        Args:
            group: the group's name.
            on_asked: returns what this rank launched at that position, or None when it has not come there yet. It
                must `agree` there then, even if it would have launched without asking.

        Raises:
            InvalidArgument: the group is followed already.
        """
        self._connection.follow(self._scoped(group), on_asked)

    def unfollow(self, group: str) -> None:
        """Ends `follow`; a call under way in another thread may still run. Idempotent."""
        self._connection.unfollow(self._scoped(group))

    # What a launcher says of its ranks, on a server of launchers.

    def begin_start(self, start: str, world_size: int) -> None:
        """Begins a start of the ranks. Every launcher must call it, with the same arguments, before it starts any.

        The ranks join with its name. Those of the start before are turned away.

        Args:
            start: its name, at most 64 bytes; not used before.
            world_size: how many ranks there are on all machines.
        """
        self._ask_at_once("beginning a start", FrameType.BEGIN_START, start, world_size)

    def note_start(self, rank: int, pid: int) -> None:
        """Names the process of a rank on this machine: should it stand still before it joins, the others are told.

        Args:
            rank: its number.
            pid: its process id.
        """
        self._say(FrameType.STARTED, rank, pid)

    def note_end(self, rank: int, how: str) -> None:
        """Says that a rank's process has ended: whoever waits for it to join is told.

        Args:
            rank: its number.
            how: it ended, in words, e.g. "ended with exit code 0".
        """
        self._say(FrameType.ENDED, rank, how)

    # Leaving.

    def announce_left(self, name: str, position: int) -> None:
        """Says that this rank has left a communicator, after so many of its collectives; never waits, nor raises.

        Once all members have said so, or left the world, the server drops what is called `name` or "name/...".
        """
        with contextlib.suppress(ValueError):
            self._say(FrameType.LEAVE, self._scoped(name), self._members, operator.index(position))

    def left_ranks(self, name: str) -> dict[int, int]:
        """Returns the members that have left a communicator, as the world counts, and after how many collectives."""
        asked = self._ask_at_once(f"left_ranks {name!r}", FrameType.LEFT_RANKS, self._scoped(name), self._members)
        return dict(zip(*asked, strict=True))

    def close(self) -> None:
        """Leaves the group, or the world; idempotent. The generation goes on without this rank.

        A group waits for nothing. The world's client says goodbye and closes the connection; a thread that waits in a
        request of it, or of its groups, gets CommunicatorClosed.
        """
        if self._world is None:
            self._connection.close()
        elif not self._has_left:
            self._has_left = True
            self.announce_left(self.name, 0)

    def abandon(self) -> None:
        """Closes the connection without a goodbye: for a client that has failed. Idempotent."""
        self._connection.abandon()

    # Failures.

    def check(self) -> None:
        """Raises when the generation has failed or the server is gone; never waits.

        Raises:
            RankFailed: a rank of this generation died, was stopped or reported a failure; raised again at every call.
            CollectiveTimeout: a rank did not come to a collective in time, and another one has reported that; likewise.
            RendezvousError: the server is gone.
            CommunicatorClosed: this client was closed.
        """
        self._connection.raise_failure()

    def describe_with(
        self,
        positions: Callable[[], Mapping[str, int]],
        report: Callable[[], str],
        history: Callable[[], Calls] = dict,
        on_trouble: Callable[[str], None] | None = None,
    ) -> None:
        """Lets these say where this rank is, while it lives and when another rank misses it.

        They run in threads of this client's, are to be quick and not to raise; one that raises counts as a text that
        says so.

        Args:
            positions: returns, for at most 16 groups, how many collectives this rank has begun there. It runs at every
                heartbeat, twice a second.
            report: returns what this rank does, for the other ranks' error; cut to 16 KiB.
            history: returns this rank's last collectives, by group: number, digest, what it is, whether it is inside.
            on_trouble: called with a line, after this rank was asked and has answered, and once the generation fails.
        """
        self._connection.describe_with(positions, report, history, on_trouble)

    def report_waiting(
        self, group: str, position: int, what: str, waited_seconds: float, missing: Sequence[int] | None
    ) -> None:
        """Tells the operator that this rank waits in a collective for others; never waits for an answer, nor raises.

        The server says so once for each position of a group, however many ranks report it.

        Args:
            group: the group's name, as in the positions that `describe_with` tells.
            position: which of the group's collectives, counted from 1: how many this rank has begun, this one included.
            what: the collective in words, its number included, e.g. "all_reduce #57".
            waited_seconds: how long this rank has waited for it.
            missing: the ranks that it waits for, as the world counts; None where it cannot know: then those that have
                begun fewer.
        """
        with contextlib.suppress(GradsyncError):
            report = position, what, waited_seconds, _ascending(missing)
            self._connection.report_waiting(self._scoped(group), self._members, *report)

    def report_stuck(
        self, group: str, position: int, what: str, waited_seconds: float, missing: Sequence[int] | None
    ) -> NoReturn:
        """Ends the generation because a collective has reached its deadline, and raises the failure of all ranks.

        The server asks every rank what it does, for at most half a second. The same error is then raised on every
        rank, the missing ones too, by this call or whichever comes next. Arguments as for `report_waiting`.

        Raises:
            CollectiveTimeout: `missing_ranks` names the ranks that did not come; the text has what each rank does.
                It is this rank's own where the server does not answer within a second.
            RankFailed: a rank turned out to be dead or stopped, or the generation has failed before.
            RendezvousError: the server is gone.
            CommunicatorClosed: this client was closed.
        """
        report = position, what, waited_seconds, _ascending(missing)
        self._connection.report_stuck(self._scoped(group), self._members, *report)

    def report_failure(self, reason: str, *, culprit: int | None = None) -> None:
        """Fails the generation: every rank gets RankFailed with this rank and the reason.

        Meant for the way out of an error: it waits for nothing, and never raises.

        Args:
            reason: why; cut to 4 KiB.
            culprit: whom RankFailed names where this rank has failed because of another one, as the world counts.
        """
        self._connection.report_failure(reason, culprit)

    def _ask_at_once(self, operation: str, frame_type: FrameType, *fields: object) -> Any:
        return self._connection.ask(operation, AT_ONCE_SECONDS, frame_type, *fields)

    def _say(self, frame_type: FrameType, *fields: object) -> None:
        """Sends a message that needs no answer, unless the generation has failed."""
        with contextlib.suppress(GradsyncError):
            self._connection.raise_failure()
            self._connection.post(frame_type, *fields)

    def _scoped(self, name: str) -> str:
        return name if not self.name or is_under(name, self.name) else f"{self.name}/{name}"


def _ascending(ranks: Sequence[int] | None) -> list[int] | None:
    return None if ranks is None else sorted({operator.index(rank) for rank in ranks})
