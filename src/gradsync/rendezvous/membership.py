"""A rank's membership in one generation: joining, staying alive for the others, failing, leaving.

The lower half of the client: `client` adds what the members share. Every call has a deadline, and ends in its result
or in a typed error. A failure of the generation is sticky: once known, every call raises it.
"""

from __future__ import annotations

import contextlib
import operator
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NoReturn, TypeVar

from gradsync.errors import (
    CollectiveTimeout,
    CommunicatorClosed,
    GradsyncError,
    InvalidArgument,
    RankFailed,
    RendezvousError,
)
from gradsync.rendezvous.client_connection import ClientConnection, StreamEnded
from gradsync.rendezvous.dialling import dial
from gradsync.rendezvous.disagreement import Told
from gradsync.rendezvous.handshake import check_secret
from gradsync.rendezvous.messages import MAX_REASON_BYTES, PROTOCOL_VERSION, FrameType, clip_text
from gradsync.rendezvous.request_channel import RequestChannel, check_timeout
from gradsync.rendezvous.silence import heartbeat_seconds

_JOIN_ATTEMPTS = 50

M = TypeVar("M", bound="Membership")


class Membership:
    """A rank's membership in one generation; made by `connect`.

    Any number of threads may use it, each request with its own deadline.

    Attributes:
        rank, world_size: as given to `connect`.
        generation: counted by the server from 1.
        address: the server's address.
        own_host: the address of this machine by which it reaches the server.
    """

    def __init__(self, connection: ClientConnection, rank: int, world_size: int, called: str = "rank") -> None:
        self.rank = rank
        self.world_size = world_size
        self.generation = 0
        self.address = connection.address
        self.own_host = connection.own_host
        self._who = f"{called} {rank}/{world_size}"
        self._requests = RequestChannel(connection, self._who)

    @classmethod
    def connect(
        cls: type[M],
        address: str,
        *,
        secret: bytes,
        rank: int,
        world_size: int,
        timeout_seconds: float = 120.0,
        called: str = "rank",
    ) -> M:
        """Joins the next generation: connects, authenticates, and waits until all ranks have joined.

        Every rank must call it once per generation.

        Args:
            address: the server's address, "host:port" or "[IPv6]:port".
            secret: the run's secret, at least 16 bytes.
            rank: this rank, from 0.
            world_size: how many ranks the caller expects.
            timeout_seconds: one deadline for all of it.
            called: what messages call a member, as the server does.

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
        who = f"{called} {rank}/{world_size}"
        attempts_left = _JOIN_ATTEMPTS
        while True:
            attempts_left -= 1
            client = cls(dial(address, secret=secret, deadline=deadline, who=who), rank, world_size, called)
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
            f"{type(self).__name__}(rank={self.rank}, world_size={self.world_size}, "
            f"generation={self.generation}, address={self.address!r})"
        )

    def __enter__(self: M) -> M:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def has_failed(self) -> Callable[[], bool]:
        """A function that tells, in a tenth of a microsecond, whether `check` would raise what is known already.

        The heartbeat thread hears of a failure while this rank is busy; for loops that are too fast for `check`.
        """
        return self._requests.has_failed

    def check(self) -> None:
        """Raises when the generation has failed or the server is gone; never waits, one poll call when all is quiet.

        Questions of other ranks that have come in are answered on the way, see `RendezvousClient.follow`.

        Raises:
            RankFailed: a rank of this generation died, was stopped or reported a failure; raised again at every call.
            CollectiveTimeout: a rank did not come to a collective in time, and another one has reported that; likewise.
            RendezvousError: the server is gone.
            CommunicatorClosed: this client was closed.
        """
        self._requests.check()

    def describe_with(
        self,
        positions: Callable[[], dict[str, int]],
        report: Callable[[], str],
        history: Callable[[], Told] = dict,
        on_trouble: Callable[[str], None] | None = None,
    ) -> None:
        """Lets these say where this rank is, while it lives and when another rank misses it.

        They run in a thread of this client's, or in one that waits in a request or calls `check`. They are to be
        quick and not to raise; one that raises counts as a text that says so.

        Args:
            positions: returns, for at most 16 groups, how many collectives this rank has begun there. It runs at every
                heartbeat, twice a second.
            report: returns what this rank does, for the other ranks' error; cut to 16 KiB.
            history: returns this rank's last collectives, by group: number, digest, what it is, whether it is inside.
            on_trouble: called with a line, after this rank was asked and has answered, and once the generation fails.
        """
        self._requests.self_report.describe_with(positions, report, history, on_trouble)

    def report_waiting(
        self,
        group: str,
        position: int,
        what: str,
        waited_seconds: float,
        missing: Sequence[int] | None,
        *,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Tells the operator that this rank waits in a collective for others; never waits for an answer, nor raises.

        The server says so once for each position of a group, however many ranks report it.

        Args:
            group: the group's name, as in the positions that `describe_with` tells.
            position: which of the group's collectives, counted from 1: how many this rank has begun, this one included.
            what: the collective in words, its number included, e.g. "all_reduce #57".
            waited_seconds: how long this rank has waited for it.
            missing: the ranks that it waits for; None where it cannot know: then those that have begun fewer.
            ranks: the group's members; all ranks by default.
        """
        with contextlib.suppress(GradsyncError):
            claim = (position, what, waited_seconds, _ascending(missing))
            self._requests.report_waiting(group, _ascending(ranks), *claim)

    def report_absence(
        self,
        group: str,
        position: int,
        what: str,
        waited_seconds: float,
        missing: Sequence[int] | None,
        *,
        ranks: Sequence[int] | None = None,
    ) -> NoReturn:
        """Ends the generation because a collective has reached its deadline, and raises the verdict of all ranks.

        The server asks every rank what it does, for at most half a second. The same error is then raised on every
        rank, the missing ones too, by this call or whichever comes next.

        Args:
            group, position, what, waited_seconds, missing, ranks: as for `report_waiting`.

        Raises:
            CollectiveTimeout: `missing_ranks` names the ranks that did not come; the text has what each rank does.
                It is this rank's own where the server does not answer within a second.
            RankFailed: a rank turned out to be dead or stopped, or the generation has failed before.
            RendezvousError: the server is gone.
            CommunicatorClosed: this client was closed.
        """
        self._requests.report_absence(group, _ascending(ranks), position, what, waited_seconds, _ascending(missing))

    def report_failure(self, reason: str, *, culprit: int | None = None) -> None:
        """Poisons the generation: every other rank gets RankFailed with this rank and the reason.

        So does this rank, in whatever its other threads wait for at the server, or come to ask for afterwards. Meant
        for the way out of an error, so it never raises for a server that is gone or a generation that has failed
        already: the other ranks learn of those by themselves.

        Args:
            reason: why; cut to 4 KiB.
            culprit: whom RankFailed names where this rank has failed because of another one, as the world counts.
        """
        fields = (clip_text(reason, MAX_REASON_BYTES), culprit)
        with contextlib.suppress(RendezvousError, RankFailed, CollectiveTimeout, CommunicatorClosed):
            self._requests.ask_at_once("report_failure", FrameType.REPORT_FAILURE, *fields)
            self._requests.has_reported = True

    def close(self) -> None:
        """Says goodbye and closes the connection; the generation goes on without this rank. Idempotent.

        A thread that waits in a request of this client gets CommunicatorClosed.
        """
        self._requests.close()

    def abandon(self) -> None:
        """Closes the descriptor without goodbye: for a client that failed, and the child of a fork. Idempotent."""
        self._requests.abandon()

    def _join(self, deadline: float, timeout_seconds: float) -> int:
        left_seconds = max(deadline - time.monotonic(), 0.0)
        fields = (PROTOCOL_VERSION, self.rank, self.world_size)
        self._requests.begin_heartbeats(heartbeat_seconds(self.world_size))
        return int(self._requests.ask("joining", left_seconds, FrameType.JOIN, *fields, shown_seconds=timeout_seconds))


def _ascending(ranks: Sequence[int] | None) -> list[int] | None:
    return None if ranks is None else sorted({operator.index(rank) for rank in ranks})
