"""Begins the MPI requests of one communicator, and waits until they end, a rank fails, or the deadline passes.

A blocking call of MPI may never return if a rank has died or does not make its call. So a rank uses non-blocking
requests, and tests repeatedly whether they have completed. Between these tests, the rank checks whether the deadline
has passed, and whether the rendezvous server has reported a failure.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from gradsync.communicators.failures import CAUSE_SECONDS, FailureMonitor, await_cause
from gradsync.communicators.mpi.mpi_job import keep_for_ever, to_mpi_error
from gradsync.errors import GradsyncError, RankFailed
from gradsync.reduction import Array

# Up to this number of ranks, an all_reduce and the exchange of digests send directly from every rank to every other
# rank. Sending directly moves as many bytes as MPI's algorithms, with fewer copies. With more ranks, MPI's algorithms
# need fewer messages.
DIRECT_RANKS = 16
_PIECE_BYTES = 2**30  # the largest message: MPI 3 counts in 32 bits

# MPI makes progress only while a rank tests its requests, so a rank tests often before it sleeps. Between these tests
# the rank yields the core to other processes.
_SPINS = 60
_YIELD_FOR_SECONDS = 2e-3
_SLEEP_SECONDS = 50e-6
_CHECK_EVERY_SECONDS = 5e-3
# During a wait, a rank asks the server which ranks have closed the communicator. The first question comes after 20 ms.
# The pause before each further question is twice as long, up to 1 s.
_FIRST_QUESTION_AFTER_SECONDS = 0.02
_LAST_PAUSE_SECONDS = 1.0

TAG_COLLECTIVE = 1  # for messages of collectives; mpi_backend.py has the tags of send and recv

Parts = Iterable[tuple[int, Array]]
Ranks = Callable[[], Sequence[int]]


class MpiRequests:
    """Begins the MPI requests of one communicator, and waits for them.

    As a context manager, the object converts an exception of MPI to MpiError. If the server has reported the failure
    that caused the exception, the object raises this failure instead.

    Args:
        mpi: the module mpi4py.MPI.
        comm: an MPI communicator that only gradsync uses.
        ranks: the world ranks of all members, for errors and for the server.
        label: this rank's name in errors.
        timeout_seconds: how long a wait lasts before it raises CollectiveTimeout.
        failures: the failures that the server reports.
        raise_if_left: a function that raises RankFailed if a rank has closed the communicator before a given
            collective; see failures.py.

    Attributes:
        mpi, comm, failures: see Args.
        rank, world_size: this rank and the number of ranks in `comm`.
        is_direct: whether there are at most DIRECT_RANKS ranks, so that ranks send directly to all other ranks.
        peers: the other ranks, in the order in which this rank sends to them.
        begun: the number of collectives that this rank has begun.
        disputes: for each direction between two ranks, as text, the number of messages on which they have disagreed.
        has_abandoned: whether a wait or a call of MPI has failed. MPI may then still read and write the memory of the
            requests.
    """

    def __init__(
        self,
        mpi: Any,
        comm: Any,
        ranks: Sequence[int],
        label: str,
        timeout_seconds: float,
        failures: FailureMonitor,
        raise_if_left: Callable[..., None],
    ) -> None:
        self.mpi = mpi
        self.comm = comm
        self.rank: int = comm.Get_rank()
        self.world_size: int = comm.Get_size()
        self.is_direct = self.world_size <= DIRECT_RANKS
        # The list begins with the next rank, so that not all ranks send to the same rank at once.
        self.peers = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        self.begun = 0
        self.disputes = Counter[str]()
        self.has_abandoned = False
        self._test_all = mpi.Request.Testall
        self._byte = mpi.BYTE
        self._ranks = ranks
        self._label = label
        self._timeout_seconds = timeout_seconds
        self.failures = failures
        self._raise_if_left = raise_if_left

    def __enter__(self) -> None:
        pass  # on the CPU there is no launch to begin

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            return
        if not issubclass(kind, GradsyncError):  # e.g. Ctrl-C or MemoryError outside of a wait
            self.abandon(trace)  # the traceback's frames hold the memory that MPI still uses
        if issubclass(kind, self.mpi.Exception):
            # The cause is often the death of a rank, which the server reports.
            await_cause(CAUSE_SECONDS, self.failures.check)
            raise to_mpi_error(error, self._label) from error

    def check(self) -> None:
        """Raises the failure that the server has sent, if there is one. Call it before each collective or message.

        A wait checks for failures only after a few milliseconds, because a collective whose messages have arrived must
        end in the same way on all ranks. If all waits are short, only this method raises the failure.
        """
        if self.failures.has_failed():
            self.failures.check()

    # -- Messages ----------------------------------------------------------------------------------------------

    def post(self, sends: Parts, receives: Parts, tag: int = TAG_COLLECTIVE) -> list[Any]:
        """Starts a non-blocking send or receive for each pair (peer, array of bytes).

        For an empty array, the method sends no message, because both ranks know the sizes.

        Returns:
            The requests, which keep the arrays alive.
        """
        comm, byte = self.comm, self._byte
        requests = [comm.Irecv([piece, byte], peer, tag) for peer, array in receives for piece in pieces(array)]
        requests += [comm.Isend([piece, byte], peer, tag) for peer, array in sends for piece in pieces(array)]
        return requests

    def post_all(self, outgoing: Sequence[Array], incoming: Sequence[Array]) -> list[Any]:
        """Starts a non-blocking send to, and receive from, every other rank. Each list has one array for each rank."""
        return self.post(
            [(peer, outgoing[peer]) for peer in self.peers], [(peer, incoming[peer]) for peer in self.peers]
        )

    def move(self, sends: Parts, receives: Parts) -> None:
        """Sends and receives the messages of a collective, and waits for all of them."""
        self.finish(self.post(sends, receives))

    # -- Waiting -----------------------------------------------------------------------------------------------

    def finish(self, requests: Sequence[Any], memory: object = None, poll: Callable[[], None] | None = None) -> None:
        """Waits until the given MPI requests of a collective have completed.

        If MPI fails, its exception leaves this method, and the context manager of this class converts it to MpiError.

        Args:
            requests: MPI requests of this communicator.
            memory: the arrays of the requests, which the wait keeps alive. None for requests that `post` returned,
                because these requests keep their arrays alive.
            poll: a function to call every few milliseconds during a longer wait.

        Raises:
            RankFailed: a rank died, or closed the communicator before this collective.
            CollectiveTimeout: the wait reached its deadline.
            RendezvousError: the connection to the rendezvous server was lost.
        """
        self.wait(partial(self._test_all, requests), (requests, memory), poll=poll)

    def wait(
        self,
        is_done: Callable[[], bool],
        kept: object,
        *,
        missing: Ranks | None = None,
        absent: Ranks | None = None,
        poll: Callable[[], None] | None = None,
    ) -> None:
        """Waits until `is_done` returns True. Raises the same errors as `finish`.

        Args:
            is_done: a function that returns whether the wait is over; each call lets MPI make progress.
            kept: the requests and their memory. If the wait fails, gradsync keeps them for ever; see `abandon`.
            missing: for messages between two ranks, a function that returns the ranks whose messages have not
                completed, as numbered in this communicator. For collectives `missing` is None, because MPI does not
                show which ranks are missing.
            absent: for messages between two ranks, a function that returns the ranks that have not even begun their
                messages. For collectives `absent` is None.
            poll: a function to call every few milliseconds during a longer wait.
        """
        try:
            for _ in range(_SPINS):
                if is_done():
                    return
            self._wait_long(is_done, missing, absent, poll)
        except BaseException:
            self.abandon(kept)
            raise

    def abandon(self, kept: object) -> None:
        """Keeps requests and memory for ever, because MPI may still use them after a failed wait."""
        self.has_abandoned = True
        keep_for_ever(kept)

    def _wait_long(
        self,
        is_done: Callable[[], bool],
        missing: Ranks | None,
        absent: Ranks | None,
        poll: Callable[[], None] | None,
    ) -> None:
        began = now = time.monotonic()
        check_at = began + _CHECK_EVERY_SECONDS
        pause_seconds = _FIRST_QUESTION_AFTER_SECONDS
        ask_at = began + pause_seconds
        while not is_done():
            if now < began + _YIELD_FOR_SECONDS:
                os.sched_yield()
            else:
                time.sleep(_SLEEP_SECONDS)
            now = time.monotonic()
            if now < check_at:
                continue
            check_at = now + _CHECK_EVERY_SECONDS
            if poll is not None:
                poll()
            if self.failures.has_failed() and not is_done():
                self.failures.check()
            if now >= ask_at:
                pause_seconds = min(2 * pause_seconds, _LAST_PAUSE_SECONDS)
                ask_at = now + pause_seconds
                self._raise_if_closed(is_done, absent)
            waited_seconds = now - began
            missing_ranks = None if missing is None else self._in_world(missing())
            if waited_seconds >= self._timeout_seconds and not is_done():
                self.failures.time_out(waited_seconds, missing_ranks)
            self.failures.warn(waited_seconds, missing_ranks)

    def _raise_if_closed(self, is_done: Callable[[], bool], absent: Ranks | None) -> None:
        """Raises RankFailed if a rank for which this rank waits has closed the communicator."""
        try:
            if absent is None:
                self._raise_if_left(self.begun - 1)
            else:
                self._raise_if_left(math.inf, self._in_world(absent()))
            return
        except GradsyncError as error:
            reason = error
        # Messages that the other rank sent before it closed the communicator may have arrived meanwhile. If the server
        # has sent a failure, check() raises the failure, because it is the cause.
        if is_done():
            return
        self.failures.check()
        has_answered = (
            absent is not None and isinstance(reason, RankFailed) and reason.rank not in self._in_world(absent())
        )
        if not has_answered:  # if the rank that closed has answered meanwhile, this rank waits for a different rank
            raise reason

    def _in_world(self, ranks: Sequence[int]) -> list[int]:
        return [self._ranks[rank] for rank in ranks]


def pieces(array: Array) -> list[Array]:
    """Cuts an array of bytes into pieces of at most 1 GiB, one for each message.

    The sender and the receiver cut their arrays in the same way.
    """
    if array.nbytes <= _PIECE_BYTES:
        return [array] if array.size else []
    return [array[begin : begin + _PIECE_BYTES] for begin in range(0, array.nbytes, _PIECE_BYTES)]
