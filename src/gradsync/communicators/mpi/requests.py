"""Waits for the MPI requests of one communicator, and moves its messages on.

A blocking call of MPI may never return if a rank has died or does not make its call. So all calls are nonblocking, and
a wait tests the requests again and again. In between it looks at its deadline, and at what the rendezvous server says:
failures, and ranks that have closed the communicator.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from gradsync.communicators.agreement import Description, LayoutsDiffer, mismatch
from gradsync.communicators.backend import Message
from gradsync.communicators.failures import CAUSE_SECONDS, FailureMonitor, await_cause, raise_if_left
from gradsync.communicators.mpi.job import keep_for_ever, to_mpi_error
from gradsync.errors import CommunicatorClosed, GradsyncError, PlanMismatch, RankFailed
from gradsync.reduction import Array

if TYPE_CHECKING:
    from typing import Self

    from gradsync.rendezvous.client import RendezvousClient

#: MPI 3 counts in 32 bits, so no call of MPI gets more than this.
LARGEST_BYTES = 2**30

# MPI moves data only while a rank tests its requests, so a rank tests often before it sleeps. It yields the core to
# other processes first, as there may be more ranks than cores.
_SPINS = 60
_YIELD_FOR_SECONDS = 2e-3
_SLEEP_SECONDS = 50e-6
_CHECK_EVERY_SECONDS = 5e-3
# A wait asks the server which ranks have closed the communicator: after 20 ms, 40 ms, 80 ms ... and then every second.
_FIRST_QUESTION_AFTER_SECONDS = 0.02
_LAST_PAUSE_SECONDS = 1.0

# The sender of a message has one tag and its receiver another, since each of two ranks may send to the other.
_COLLECTIVE, _OF_SENDER, _OF_RECEIVER = 1, 2, 3

Parts = Iterable[tuple[int, Array]]

#: Begins MPI requests, yields them, and goes on when they have ended.
Job = Iterator[list[Any]]


class Requests:
    """The MPI requests of one communicator.

    `with requests.using(arrays):` is around each call of a backend's method: it raises a failure that the server has
    sent, turns MPI's exceptions into MpiError, and keeps the memory for ever if the call fails while MPI may use it.

    Args:
        mpi: the module mpi4py.MPI.
        comm: an MPI communicator that only gradsync uses.
        client: the rendezvous client of the communicator's ranks.
        timeout_seconds: how long a wait lasts before it raises CollectiveTimeout.
        failures: the failures that the server reports.
        departures: the name under which ranks tell the server that they have closed the communicator.

    Attributes:
        comm: see Args.
        peers: the other ranks. They begin with the next one, so that not all ranks send to the same rank at once.
        begun, ended: the numbers of collectives that this rank has begun, and ended.
        test_all: MPI_Testall.
        is_waiting: whether MPI may use memory of the current call.
        has_abandoned: whether a call has failed, and MPI may use its memory until the process ends.
        is_closed: whether this rank has closed the communicator. Another thread may do that during a wait.
    """

    def __init__(
        self,
        mpi: Any,
        comm: Any,
        client: RendezvousClient,
        timeout_seconds: float,
        failures: FailureMonitor,
        departures: str,
    ) -> None:
        self.comm = comm
        self.peers = [(client.rank + step) % client.world_size for step in range(1, client.world_size)]
        self.begun = self.ended = 0
        self.is_waiting = self.has_abandoned = self.is_closed = False
        self.test_all = mpi.Request.Testall
        self._byte, self._mpi_exception = mpi.BYTE, mpi.Exception
        self._client = client
        self._timeout_seconds = timeout_seconds
        self._failures = failures
        self._departures = departures
        self._memory: tuple[Any, ...] = ()
        self._rooms = deque([np.empty(0, np.uint8)] * 2)
        # The messages under way, by the other rank and whether this rank sends. One after the other: so they arrive in
        # the order in which they were started, and what MPI matches is theirs.
        self._channels: dict[tuple[int, bool], deque[_Transfer]] = {}

    def using(self, *memory: Any) -> Self:
        """Returns the context manager of one call, given the arrays that MPI will read and write."""
        self._memory = memory
        return self

    def __enter__(self) -> None:
        # A wait looks at failures only after some milliseconds, so that a collective whose data have arrived ends alike
        # on all ranks. If all waits are short, only this line raises the failure.
        if self._failures.has_failed():
            self._failures.check()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        memory, self._memory = self._memory, ()
        self.ended = self.begun
        if error is None:
            return
        if self.is_waiting or not isinstance(error, (GradsyncError, LayoutsDiffer)):  # e.g. Ctrl-C after MPI began
            self.has_abandoned = True
            keep_for_ever(self, memory)  # with the rooms and the messages
        if isinstance(error, self._mpi_exception):
            await_cause(CAUSE_SECONDS, self._failures.check)  # often a rank has died, and the server knows
            raise to_mpi_error(error, self._client.label) from error

    # -- Collectives -------------------------------------------------------------------------------------------

    def finish(self, requests: list[Any]) -> None:
        """Waits until the requests have ended.

        Raises:
            RankFailed: a rank died, or closed the communicator before this collective.
            CollectiveTimeout: the wait reached its deadline.
            RendezvousError: the connection to the rendezvous server was lost.
        """

        def is_done() -> bool:
            if self._channels:
                self.move_messages()
            done: bool = self.test_all(requests)
            return done

        self._wait(is_done)

    def run(self, jobs: Iterable[Job]) -> None:
        """Runs jobs, two at a time, so that one is packed while MPI moves the other."""
        begun: deque[tuple[Job, list[Any]]] = deque()
        for job in jobs:
            begun.append((job, next(job)))
            if len(begun) == 2:
                self._end_first(begun)
        while begun:
            self._end_first(begun)

    def _end_first(self, begun: deque[tuple[Job, list[Any]]]) -> None:
        job, requests = begun.popleft()
        self.finish(requests)
        next(job, None)

    def room(self, size: int, dtype: np.dtype[Any]) -> Array:
        """Returns memory for `size` elements. It is used again for the second room that is asked for after this one."""
        self._rooms.rotate()
        if self._rooms[0].size < size * dtype.itemsize:
            self._rooms[0] = np.empty(size * dtype.itemsize, np.uint8)
        return self._rooms[0][: size * dtype.itemsize].view(dtype)

    def post(self, sends: Parts, receives: Parts, tag: int = _COLLECTIVE, peer_tag: int = _COLLECTIVE) -> list[Any]:
        """Begins to send and to receive arrays of bytes, given as pairs (peer, array). Empty ones are not sent."""
        comm, byte = self.comm, self._byte
        requests = [comm.Irecv([piece, byte], peer, peer_tag) for peer, array in receives for piece in _pieces(array)]
        requests += [comm.Isend([piece, byte], peer, tag) for peer, array in sends for piece in _pieces(array)]
        return requests

    def move(self, sends: Parts, receives: Parts) -> None:
        """Sends and receives the arrays of a collective, and waits for them; see `post`."""
        self.finish(self.post(sends, receives))

    # -- Messages ----------------------------------------------------------------------------------------------

    @property
    def has_messages(self) -> bool:
        """Whether messages are under way."""
        return bool(self._channels)

    def start(self, message: Message, *, is_sending: bool) -> None:
        """Starts a message; the next call of move_messages() begins it."""
        channel = self._channels.setdefault((message.peer, is_sending), deque())
        channel.append(_Transfer(self, message, is_sending))

    def move_messages(self) -> None:
        """Moves all messages on as far as that goes without waiting."""
        for key, channel in list(self._channels.items()):
            while channel and channel[0].advance():
                transfer = channel.popleft()
                transfer.message.end(transfer.error)
            if not channel:
                self._channels.pop(key, None)

    def await_messages(self, awaited: Collection[Message], seconds: float | None) -> None:
        """Waits until the messages are over, or for some seconds; None: until the deadline. Raises as `finish`."""

        def is_done() -> bool:
            self.move_messages()
            return all(message.is_over for message in awaited)

        self._wait(is_done, awaited, seconds)

    def mismatch_of(self, message: Message, described: Description, by_peer: Description) -> PlanMismatch:
        """Returns the error of a message on which this rank and its peer disagree."""
        ranks = self._client.world_ranks
        descriptions = {ranks[self._client.rank]: described, ranks[message.peer]: by_peer}
        return mismatch(self._client.label, message.agreement, descriptions)

    # -- Waiting -----------------------------------------------------------------------------------------------

    def _wait(
        self, is_done: Callable[[], bool], awaited: Collection[Message] | None = None, seconds: float | None = None
    ) -> None:
        self.is_waiting = True
        for _ in range(_SPINS):
            if is_done():
                break
        else:
            self._wait_long(is_done, awaited, seconds)
        self.is_waiting = False

    def _wait_long(
        self, is_done: Callable[[], bool], awaited: Collection[Message] | None, seconds: float | None
    ) -> None:
        """Waits; if `awaited` is None, it is for a collective, and nobody knows which ranks are missing."""
        began = now = time.monotonic()
        check_at, pause_seconds = began + _CHECK_EVERY_SECONDS, _FIRST_QUESTION_AFTER_SECONDS
        ask_at = began + pause_seconds
        while not is_done():
            if now < began + _YIELD_FOR_SECONDS:
                os.sched_yield()
            else:
                time.sleep(_SLEEP_SECONDS)
            now = time.monotonic()
            if seconds is not None and now >= began + seconds:
                return
            if now < check_at:
                continue
            check_at = now + _CHECK_EVERY_SECONDS
            if self.is_closed and not is_done():
                raise CommunicatorClosed(f"{self._client.label}: another thread closed the communicator meanwhile")
            if self._failures.has_failed() and not is_done():
                self._failures.check()
            if now >= ask_at:
                pause_seconds = min(2 * pause_seconds, _LAST_PAUSE_SECONDS)
                ask_at = now + pause_seconds
                self._raise_if_left(is_done, awaited)
            missing = None if awaited is None else self._in_world([m.peer for m in awaited if not m.is_over])
            if seconds is None and now >= began + self._timeout_seconds and not is_done():
                self._failures.time_out(now - began, missing)
            self._failures.warn(now - began, missing)

    def _raise_if_left(self, is_done: Callable[[], bool], awaited: Collection[Message] | None) -> None:
        """Raises RankFailed if a rank for which this rank waits has closed the communicator."""
        try:
            if awaited is None:
                raise_if_left(self._client, self._departures, self._client.label, self.begun - 1)
            else:
                absent = self._absent(awaited)
                raise_if_left(self._client, self._departures, self._client.label, math.inf, absent)
        except GradsyncError as error:
            # What the rank sent before it closed may have come meanwhile. Also, a failure is the cause of what follows.
            if is_done():
                return
            self._failures.check()
            if awaited is None or not isinstance(error, RankFailed) or error.rank in self._absent(awaited):
                raise

    def _absent(self, awaited: Collection[Message]) -> list[int]:
        """Returns the ranks that have not begun an awaited message. A rank that has begun one ends it, then closes."""
        answered = [channel[0].message for channel in self._channels.values() if channel[0].has_peer_begun]
        return self._in_world([m.peer for m in awaited if not m.is_over and m not in answered])

    def _in_world(self, ranks: Iterable[int]) -> list[int]:
        return [self._client.world_ranks[rank] for rank in ranks]


class _Transfer:
    """A message under way.

    First both ranks send each other their digests: so they know of a mismatch before an array changes, and `send` ends
    only once the receiver has begun to receive. Then the sender sends the bytes; or, if the digests differ, both send
    each other their descriptions.

    Attributes:
        message: the message.
        error: how it has ended.
        has_peer_begun: whether the other rank has begun it, too.
    """

    def __init__(self, requests: Requests, message: Message, is_sending: bool) -> None:
        self.message = message
        self.error: PlanMismatch | None = None
        self.has_peer_begun = False
        self._test_all = requests.test_all
        self._pending: list[Any] = []
        self._steps = self._run(requests, message, is_sending)

    def advance(self) -> bool:
        """Moves the message on without waiting. Returns whether it is over."""
        while self._test_all(self._pending):
            following = next(self._steps, None)
            if following is None:
                return True
            self._pending = following
        return False

    def _run(self, requests: Requests, message: Message, is_sending: bool) -> Job:
        tags = (_OF_SENDER, _OF_RECEIVER) if is_sending else (_OF_RECEIVER, _OF_SENDER)
        post, peer = partial(requests.post, tag=tags[0], peer_tag=tags[1]), message.peer
        both = np.array([message.agreement.digest, 0], np.uint64)  # of this rank and of the other
        swap = [(peer, both[:1].view(np.uint8))], [(peer, both[1:].view(np.uint8))]
        yield post(*swap)
        self.has_peer_begun = True
        if both[0] == both[1]:
            whole = [(peer, message.flat)]
            yield post(whole, ()) if is_sending else post((), whole)
            return
        described = message.agreement.described()
        text = np.frombuffer(described.to_text().encode(), np.uint8)
        both[0] = text.size
        yield post(*swap)
        by_peer = np.empty(int(both[1]), np.uint8)
        yield post([(peer, text)], [(peer, by_peer)])
        self.error = requests.mismatch_of(message, described, Description.from_text(by_peer.tobytes().decode()))


def _pieces(array: Array) -> list[Array]:
    """Cuts an array of bytes into what one call of MPI can send; nothing if it is empty."""
    return [array[begin : begin + LARGEST_BYTES] for begin in range(0, array.size, LARGEST_BYTES)]
