"""The blocking rendezvous client: one per rank, through which it meets the others.

The public face of the client's side, used by the process group and the communicators. Every call has a
deadline, and ends in its result or in a typed error. A failure of the generation is sticky: once known, every
call raises it.
"""

from __future__ import annotations

import contextlib
import operator
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from gradsync.errors import CommunicatorClosed, InvalidArgument, RankFailed, RendezvousError
from gradsync.rendezvous.agreements import Verdict
from gradsync.rendezvous.client_connection import ClientConnection, StreamEnded
from gradsync.rendezvous.dialling import dial
from gradsync.rendezvous.followers import OnAsked
from gradsync.rendezvous.handshake import check_secret
from gradsync.rendezvous.messages import MAX_REASON_BYTES, PROTOCOL_VERSION, FrameType, clip_text
from gradsync.rendezvous.request_channel import RequestChannel, check_timeout
from gradsync.rendezvous.unique_ids import UniqueIds

_JOIN_ATTEMPTS = 50


class RendezvousClient:
    """A rank's membership in one generation; made by `connect`.

    Any number of threads may use it, each request with its own deadline.

    Attributes:
        rank, world_size: as given to `connect`.
        generation: counted by the server from 1.
        address: the server's address.
    """

    def __init__(self, connection: ClientConnection, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.generation = 0
        self.address = connection.address
        self._who = f"rank {rank}/{world_size}"
        self._requests = RequestChannel(connection, self._who)
        self._ids = UniqueIds(self._requests, rank, self._who)
        self._passed_positions: dict[str, int] = {}

    @classmethod
    def connect(
        cls, address: str, *, secret: bytes, rank: int, world_size: int, timeout_seconds: float = 120.0
    ) -> RendezvousClient:
        """Joins the next generation: connects, authenticates, and waits until all ranks have joined.

        Every rank must call it once per generation.

        Args:
            address: the server's address, "host:port" or "[IPv6]:port".
            secret: the run's secret, at least 16 bytes.
            rank: this rank, from 0.
            world_size: how many ranks the caller expects.
            timeout_seconds: one deadline for all of it.

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
        secret = check_secret(secret)
        who = f"rank {rank}/{world_size}"
        attempts_left = _JOIN_ATTEMPTS
        while True:
            attempts_left -= 1
            client = cls(dial(address, secret=secret, deadline=deadline, who=who), rank, world_size)
            try:
                client.generation = client._join(deadline, timeout_seconds)
                return client
            except BaseException as error:
                client.abandon()
                # A server flooded by strangers may drop a connection that it does not know yet.
                dropped = isinstance(error.__cause__, StreamEnded) and not client._requests.is_seated
                if not dropped or not attempts_left:
                    raise

    def __repr__(self) -> str:
        return (
            f"RendezvousClient(rank={self.rank}, world_size={self.world_size}, "
            f"generation={self.generation}, address={self.address!r})"
        )

    def __enter__(self) -> RendezvousClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def set(self, key: str, value: bytes) -> None:
        """Stores a value of at most 60 KiB under a key, for all ranks of this generation.

        Raises:
            InvalidArgument: the key or the value does not fit.
            RankFailed, RendezvousError: the generation or the server has failed.
        """
        data = bytes(value) if isinstance(value, (bytearray, memoryview)) else value
        self._requests.ask_at_once(f"set {key!r}", FrameType.SET, key, data)

    def get(self, key: str, *, timeout_seconds: float = 120.0) -> bytes:
        """Returns the value of a key; waits until some rank sets it.

        Raises:
            RendezvousTimeout: nobody set it by the deadline.
            RankFailed: a rank died, or every other rank has left.
        """
        return bytes(self._requests.ask(f"get {key!r}", timeout_seconds, FrameType.GET, key))

    def add(self, key: str, amount: int = 1) -> int:
        """Adds to a counter, atomically, and returns its new value; a new counter starts at 0.

        A counter is a key that holds a decimal number; `get` and `set` see it as text.
        """
        return int(self._requests.ask_at_once(f"add {key!r}", FrameType.ADD, key, amount))

    def delete(self, key: str) -> bool:
        """Removes a key; returns whether it was there."""
        return bool(self._requests.ask_at_once(f"delete {key!r}", FrameType.DELETE, key))

    def barrier(self, name: str = "", *, ranks: Sequence[int] | None = None, timeout_seconds: float = 120.0) -> int:
        """Waits until every rank has arrived; returns the round's number, counted from 1.

        Every rank of `ranks` must call it with the same name and the same ranks. Reusable any number of
        times. A rank whose deadline comes first is withdrawn, and may come back to the same round.

        Args:
            name: names the barrier among those of the same ranks.
            ranks: who takes part; all ranks by default.
            timeout_seconds: this rank's deadline.

        Raises:
            RendezvousTimeout: `missing_ranks` names the ranks that did not come, the text where they are.
            RankFailed: a rank died, or one that is needed has left.
        """
        members = self._check_ranks(ranks)
        return int(self._requests.ask(f"barrier {name!r}", timeout_seconds, FrameType.BARRIER, name, members))

    def unique_id(
        self,
        group: str,
        *,
        root: int,
        ranks: Sequence[int] | None = None,
        make_id: Callable[[], bytes] | None,
        timeout_seconds: float = 120.0,
    ) -> bytes:
        """Returns the one 128-byte id of a group in this generation; treat it as a secret.

        Every member must call it with the same root and ranks. The root makes the id, once; the others wait.

        Args:
            group: the group's name.
            root: the rank that makes the id.
            ranks: the members; all ranks by default.
            make_id: returns 128 bytes; called by the root only, others may pass None.
            timeout_seconds: this rank's deadline.

        Raises:
            InvalidArgument: the id is not 128 bytes, this rank is no member, or the members disagree.
            RendezvousTimeout: the root did not hand the id in by the deadline.
            RankFailed: a rank died, or the root has left without handing it in.
        """
        return self._ids.get(group, root, self._check_ranks(ranks), make_id, timeout_seconds)

    def agree(
        self,
        group: str,
        position: int,
        digest: int,
        *,
        ranks: Sequence[int] | None = None,
        timeout_seconds: float = 120.0,
    ) -> Verdict:
        """Asks whether all members do the same at a position of their group, and returns the verdict.

        Returns once every member has called it for this position, or has told, asked through `follow`, that it has
        gone ahead: SAME when all digests are equal, else DIFFERENT, or PASSED when a member went ahead with another
        digest. PASSED comes at once, and for every later position of the group too; `passed_position` says where.

        Args:
            group: the group's name, at most 960 bytes.
            position: which of the group's collectives, from 0.
            digest: of what this rank is about to do, an unsigned integer of 64 bits.
            ranks: the members, the same in every call for this group; all ranks by default.
            timeout_seconds: this rank's deadline.

        Raises:
            InvalidArgument: an argument is out of its range, the members differ from an earlier call's, or this rank
                already waits at this position.
            RendezvousTimeout: `missing_ranks` names the members who did not report, the text where they are.
            RankFailed: a rank died, or a member who has not reported has left.
        """
        operation = f"agree {group!r} at position {position}"
        fields = (group, operator.index(position), operator.index(digest), self._check_ranks(ranks))
        verdict, decided_at = self._requests.ask(operation, timeout_seconds, FrameType.AGREE, *fields)
        if verdict == Verdict.PASSED:
            self._passed_positions[group] = decided_at
        return Verdict(verdict)

    def passed_position(self, group: str) -> int | None:
        """Returns where a member of the group went ahead, known after a verdict of PASSED; else None.

        It may lie before the position that this rank asked about: then this rank went ahead there too.
        """
        return self._passed_positions.get(group)

    def follow(self, group: str, on_asked: OnAsked) -> None:
        """Lets `on_asked(position)` say what this rank launched there, whenever another member asks.

        Call it before the group's first collective: a question that comes earlier is not kept. `on_asked` runs in
        whichever thread receives the question, in a request or in `check`, without a lock of this client held;
        two threads may run it at once. It is to be quick and not to raise.

        Args:
            group: the group's name.
            on_asked: returns what this rank launched at that position, or None when it has not come there yet. It
                must `agree` there then, even if it would have gone ahead.

        Raises:
            InvalidArgument: the group is followed already.
        """
        self._requests.followers.follow(group, on_asked)

    def unfollow(self, group: str) -> None:
        """Ends `follow`; a call under way in another thread may still run. Idempotent."""
        self._requests.followers.unfollow(group)

    def check(self) -> None:
        """Raises when the generation has failed or the server is gone; never waits, one poll call when all is quiet.

        Questions of other ranks that have come in are answered on the way, see `follow`.

        Raises:
            RankFailed: a rank of this generation died or reported a failure; raised again at every call.
            RendezvousError: the server is gone.
            CommunicatorClosed: this client was closed.
        """
        self._requests.check()

    def report_failure(self, reason: str) -> None:
        """Poisons the generation: every other rank gets RankFailed with this rank and the reason.

        Meant for the way out of an error, so it never raises for a server that is gone or a generation that
        has failed already: the other ranks learn of those by themselves.

        Args:
            reason: why; cut to 4 KiB.
        """
        with contextlib.suppress(RendezvousError, RankFailed, CommunicatorClosed):
            self._requests.ask_at_once("report_failure", FrameType.REPORT_FAILURE, clip_text(reason, MAX_REASON_BYTES))

    def set_phase(self, phase: str) -> None:
        """Says what this rank does now, for the texts of RankFailed; sent without waiting for an answer."""
        self._requests.set_phase(phase)

    def close(self) -> None:
        """Says goodbye and closes the connection; the generation goes on without this rank. Idempotent.

        A thread that waits in a request of this client gets CommunicatorClosed.
        """
        self._requests.close()

    def abandon(self) -> None:
        """Closes the descriptor without goodbye or any I/O: for the child after a fork. Idempotent."""
        self._requests.abandon()

    def _join(self, deadline: float, timeout_seconds: float) -> int:
        left_seconds = max(deadline - time.monotonic(), 0.0)
        fields = (PROTOCOL_VERSION, self.rank, self.world_size)
        return int(self._requests.ask("joining", left_seconds, FrameType.JOIN, *fields, shown_seconds=timeout_seconds))

    def _check_ranks(self, ranks: Sequence[int] | None) -> list[int] | None:
        """Returns the members in ascending order, or None for all ranks."""
        if ranks is None:
            return None
        members = sorted(operator.index(rank) for rank in ranks)
        fits = members and members[0] >= 0 and members[-1] < self.world_size and len(set(members)) == len(members)
        if not fits or self.rank not in members:
            raise InvalidArgument(
                f"{self._who}: ranks need to be distinct, from 0 to {self.world_size - 1}, "
                f"and to include this rank, got {members}"
            )
        return members
