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
from contextlib import contextmanager
from itertools import chain, count, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from gradsync.communicators.agreement import Description, LayoutsDiffer, mismatch
from gradsync.communicators.backend import Message
from gradsync.communicators.failures import CAUSE_SECONDS, FailureMonitor, await_cause, raise_if_left
from gradsync.communicators.mpi.job import free_with_others, keep_for_ever, to_mpi_error
from gradsync.diagnostics import FlightRecorder
from gradsync.errors import CommunicatorClosed, GradsyncError
from gradsync.reduction import Array

if TYPE_CHECKING:
    from gradsync.rendezvous.client import RendezvousClient

#: MPI 3 counts in 32 bits, so no call of MPI gets more than this.
LARGEST_BYTES = 2**30

# MPI moves data only while a rank tests its requests, so a rank tests often before it sleeps. It yields the core to
# other processes first, as there may be more ranks than cores.
_SPINS = 60
_YIELD_FOR_SECONDS = 2e-3
_SLEEP_SECONDS = 50e-6
_CHECK_EVERY_SECONDS = 5e-3
# A wait asks the server which ranks have closed the communicator: after 20 ms, 60 ms, 140 ms ... then every second.
_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS = 0.02, 1.0

# The sender of a message has one tag and its receiver another, since each of two ranks may send to the other.
_COLLECTIVE, _OF_SENDER, _OF_RECEIVER = 1, 2, 3

#: Begins MPI requests, yields them, and goes on when they have ended.
Job = Iterator[list[Any]]
Parts = Iterable[tuple[int, Array]]


class Requests:
    """The MPI requests of one communicator.

    Args:
        mpi: the module mpi4py.MPI.
        comm: an MPI communicator that only gradsync uses.
        client: the rendezvous client of the communicator's ranks.
        recorder: the communicator's flight recorder.
        timeout_seconds: how long a wait lasts before it raises CollectiveTimeout.

    Attributes:
        comm: see Args.
        failures: the failures that the server reports.
        departures: the name under which ranks tell the server that they have closed the communicator.
        peers: the other ranks. They begin with the next one, so that not all ranks send to the same rank at once.
        begun, ended: the numbers of collectives that this rank has begun, and ended.
        call, of_all: room for the comparison of a call. It is here, and so kept if MPI may still write to it.
        is_closed: whether this rank has closed the communicator. Another thread may do that during a wait.
    """

    def __init__(
        self, mpi: Any, comm: Any, client: RendezvousClient, recorder: FlightRecorder, timeout_seconds: float
    ) -> None:
        self.comm = comm
        self.failures = FailureMonitor(client, recorder)
        self.departures = f"mpi/{recorder.group}/closed"
        self.peers = [(client.rank + step) % client.world_size for step in range(1, client.world_size)]
        self.begun = self.ended = 0
        self.is_closed = self._is_waiting = self._has_abandoned = False
        self._test_all, self._byte, self._mpi_error = mpi.Request.Testall, mpi.BYTE, mpi.Exception
        self._client = client
        self._timeout_seconds = timeout_seconds
        self.call, self.of_all = np.zeros((2, 4), np.uint64)
        self._rooms = deque([np.empty(0, np.uint8)] * 2)
        # The messages under way, by the other rank and whether this rank sends. They go one after the other: so they
        # arrive in the order in which they were started, and what MPI matches is theirs.
        self._channels: dict[tuple[int, bool], deque[_Transfer]] = {}

    @contextmanager
    def using(self, *memory: Any) -> Iterator[None]:
        """The context of one call, with the arrays that MPI reads and writes.

        It raises a failure that the server has sent. If the call fails while MPI may use its memory, the memory is kept
        for ever. An exception of MPI becomes MpiError.
        """
        # A wait looks at failures only after some milliseconds, so that a collective whose data have arrived ends alike
        # on all ranks. If all waits are short, only this line raises the failure.
        if self.failures.has_failed():
            self.failures.check()
        try:
            yield
        except BaseException as error:
            if self._is_waiting or not isinstance(error, (GradsyncError, LayoutsDiffer)):  # e.g. Ctrl-C
                self._abandon(memory)
            if not isinstance(error, self._mpi_error):
                raise
            await_cause(CAUSE_SECONDS, self.failures.check)  # often a rank has died, and the server knows
            raise to_mpi_error(error, self._client.label) from error
        finally:
            self.ended = self.begun

    def _abandon(self, memory: object) -> None:
        """Keeps what MPI may still use: this memory, the rooms and the messages."""
        self._has_abandoned = True
        keep_for_ever(self, memory)

    def release(self) -> None:
        """Frees the communicator, unless MPI still works for it."""
        if self._channels and not self._has_abandoned:
            self._abandon(None)
        if not self._has_abandoned:
            free_with_others(self.comm)

    # -- Collectives -------------------------------------------------------------------------------------------

    def finish(self, requests: list[Any]) -> None:
        """Waits until the requests have ended.

        Raises:
            RankFailed: a rank died, or closed the communicator before this collective.
            CollectiveTimeout: the wait reached its deadline.
            RendezvousError: the connection to the rendezvous server was lost.
            CommunicatorClosed: another thread has closed the communicator.
        """

        def is_done() -> bool:
            if self._channels:
                self.move_messages()
            done: bool = self._test_all(requests)
            return done

        self._wait(is_done)

    def run(self, jobs: Iterable[Job]) -> None:
        """Runs jobs, two at a time, so that one is packed while MPI moves the other."""
        begun = ((job, next(job)) for job in jobs)
        for (job, requests), _next_has_begun in pairwise(chain(begun, [(iter(()), [])])):
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

    # -- Messages ----------------------------------------------------------------------------------------------

    def start(self, message: Message, *, is_sending: bool) -> None:
        """Starts a message; the next call of move_messages() begins it."""
        channel = self._channels.setdefault((message.peer, is_sending), deque())
        channel.append(_Transfer(self, self._client, message, is_sending))

    def move_messages(self) -> None:
        """Moves all messages on as far as that goes without waiting."""
        for key, channel in list(self._channels.items()):
            while channel and channel[0].advance(self._test_all):
                channel.popleft()
            if not channel:
                del self._channels[key]

    def await_messages(self, awaited: Collection[Message], seconds: float | None) -> None:
        """Waits until the messages are over, or for some seconds; None: until the deadline. Raises as `finish`."""

        def is_done() -> bool:
            self.move_messages()
            return all(message.is_over for message in awaited)

        self._wait(is_done, awaited, seconds)

    # -- Waiting -----------------------------------------------------------------------------------------------

    def _wait(
        self, is_done: Callable[[], bool], awaited: Collection[Message] | None = None, seconds: float | None = None
    ) -> None:
        """Waits; `awaited` is None for a collective: then nobody knows which ranks are missing."""
        self._is_waiting = True
        began = check_at = ask_at = pause = 0.0
        for tests in count():
            if is_done():
                break
            if tests < _SPINS:
                continue
            now = time.monotonic()
            if not began:
                began, check_at, ask_at, pause = now, now, now + _FIRST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS
            if seconds is not None and now >= began + seconds:
                break
            if now < began + _YIELD_FOR_SECONDS:
                os.sched_yield()
            else:
                time.sleep(_SLEEP_SECONDS)
            if now < check_at + _CHECK_EVERY_SECONDS:
                continue
            check_at = now
            if asks := now >= ask_at:
                pause = min(2 * pause, _LAST_PAUSE_SECONDS)
                ask_at = now + pause
            try:
                self._check(now - began, awaited, asks, seconds is None)
            except GradsyncError:
                if not is_done():  # what this rank waits for may have come meanwhile
                    raise
        self._is_waiting = False

    def _check(self, waited_seconds: float, awaited: Collection[Message] | None, asks: bool, is_limited: bool) -> None:
        """Raises the reason why a wait will not end, if there is one."""
        client = self._client
        missing = None if awaited is None else [client.world_ranks[m.peer] for m in awaited if not m.is_over]
        if self.is_closed:
            raise CommunicatorClosed(f"{client.label}: another thread has closed the communicator")
        if self.failures.has_failed():
            self.failures.check()
        if asks:
            since, ranks = (self.begun - 1, None) if awaited is None else (math.inf, self._absent(awaited))
            raise_if_left(client, self.departures, client.label, since, ranks, self.failures.awaited_message)
        if is_limited and waited_seconds >= self._timeout_seconds:
            self.failures.time_out(waited_seconds, missing)
        self.failures.warn(waited_seconds, missing)

    def _absent(self, awaited: Collection[Message]) -> Iterator[int]:
        """Returns the ranks that have not begun an awaited message. A rank that has begun one ends it, then closes."""
        self.move_messages()
        begun = [channel[0].message for channel in self._channels.values() if channel[0].has_peer_begun]
        yield from [self._client.world_ranks[m.peer] for m in awaited if not m.is_over and m not in begun]


class _Transfer:
    """A message under way.

    First both ranks send each other their digests: so they know of a mismatch before an array changes, and `send` ends
    only once the receiver has begun to receive. Then the sender sends the bytes; or, if the digests differ, both send
    each other their descriptions.
    """

    def __init__(self, requests: Requests, client: RendezvousClient, message: Message, is_sending: bool) -> None:
        self.message = message
        self.has_peer_begun = False
        self._steps = self._run(requests, client, message, is_sending)
        self._pending: list[Any] = []

    def advance(self, test_all: Callable[[list[Any]], bool]) -> bool:
        """Moves the message on without waiting. Returns whether it is over."""
        while test_all(self._pending):
            step = next(self._steps, None)
            if step is None:
                return True
            self._pending = step
        return False

    def _run(self, requests: Requests, client: RendezvousClient, message: Message, is_sending: bool) -> Job:
        peer, tags = message.peer, (_OF_SENDER, _OF_RECEIVER) if is_sending else (_OF_RECEIVER, _OF_SENDER)
        both = np.array([message.agreement.digest, 0], np.uint64)  # this rank's and the other's
        swap = [(peer, both[:1].view(np.uint8))], [(peer, both[1:].view(np.uint8))]
        yield requests.post(*swap, *tags)
        self.has_peer_begun = True
        if both[0] == both[1]:
            whole = [(peer, message.flat)]
            yield requests.post(whole, (), *tags) if is_sending else requests.post((), whole, *tags)
            for following in message.end():
                requests.start(following, is_sending=False)
            return
        described = message.agreement.described()
        text = np.frombuffer(described.to_text().encode(), np.uint8)
        both[0] = text.size
        yield requests.post(*swap, *tags)
        of_peer = np.empty(int(both[1]), np.uint8)
        yield requests.post([(peer, text)], [(peer, of_peer)], *tags)
        ranks, of_peer_described = client.world_ranks, Description.from_text(of_peer.tobytes().decode())
        descriptions = {ranks[client.rank]: described, ranks[peer]: of_peer_described}
        for following in message.end(mismatch(client.label, message.agreement, descriptions)):
            requests.start(following, is_sending=False)


def _pieces(array: Array) -> list[Array]:
    """Cuts an array of bytes into what one call of MPI can send; nothing if it is empty."""
    return [array[begin : begin + LARGEST_BYTES] for begin in range(0, array.size, LARGEST_BYTES)]
