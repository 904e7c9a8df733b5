"""Requests of MPI on one communicator: how a rank begins messages, and how it waits for requests to end.

A blocking call of MPI never returns where a rank has died, or does not come. So a rank looks at its requests again and
again, and between looks at the clock and at what the rendezvous server knows of the other ranks.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from gradsync.communicators.failures import CAUSE_SECONDS, FailureMonitor
from gradsync.communicators.mpi.mpi_job import keep_for_ever
from gradsync.errors import GradsyncError
from gradsync.reduction import Array

# Up to here every rank sends to every other one, which costs no more bytes than MPI's algorithms and fewer copies.
# Among more, MPI's own collectives need fewer messages.
DIRECT_RANKS = 16
_PIECE_BYTES = 2**30  # of one message: MPI 3 counts in 32 bits

# Looking makes MPI progress, so a rank looks often before it sleeps. Where others want the core they get it.
_SPINS = 60
_YIELD_FOR_SECONDS = 2e-3
_SLEEP_SECONDS = 50e-6
_LOOK_FOR_FAILURES_EVERY_SECONDS = 5e-3
# Which ranks have closed the communicator has to be asked of the server: seldom.
_FIRST_QUESTION_AFTER_SECONDS = 0.02
_LAST_PAUSE_SECONDS = 1.0

TAG_COLLECTIVE = 1  # of the messages in collectives; mpi_backend.py has those of send and recv

Parts = Iterable[tuple[int, Array]]
Ranks = Callable[[], Sequence[int]]


class MpiRequests:
    """The requests of one communicator.

    Args:
        mpi: the module mpi4py.MPI.
        comm: gradsync's own communicator of MPI, on which nobody else communicates.
        ranks: the numbers of all ranks in the world, by which errors and the server name them.
        timeout_seconds: how long to wait before CollectiveTimeout.
        failures: the server's.
        raise_if_left: raises if a rank has closed the communicator before a collective's number; see failures.py.

    Attributes:
        mpi, comm: as given.
        rank, world_size: of `comm`.
        is_direct: whether the ranks are few.
        peers: the other ranks, in the order in which this one sends to them.
        begun: how many collectives this rank has begun.
        has_abandoned: whether a wait has failed, so that MPI still works on its requests.
    """

    def __init__(
        self,
        mpi: Any,
        comm: Any,
        ranks: Sequence[int],
        timeout_seconds: float,
        failures: FailureMonitor,
        raise_if_left: Callable[..., None],
    ) -> None:
        self.mpi = mpi
        self.comm = comm
        self.rank: int = comm.Get_rank()
        self.world_size: int = comm.Get_size()
        self.is_direct = self.world_size <= DIRECT_RANKS
        # The next one first: not all ranks send to the same one at once.
        self.peers = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        self.begun = 0
        self.has_abandoned = False
        self._test_all = mpi.Request.Testall
        self._byte = mpi.BYTE
        self._ranks = ranks
        self._timeout_seconds = timeout_seconds
        self._failures = failures
        self._raise_if_left = raise_if_left

    # -- Messages ----------------------------------------------------------------------------------------------

    def post(self, sends: Parts, receives: Parts, tag: int = TAG_COLLECTIVE) -> list[Any]:
        """Begins messages; each is (peer, bytes). Empty ones do not travel: both ends know their sizes.

        Returns:
            Requests, which keep the arrays.
        """
        comm, byte = self.comm, self._byte
        requests = [comm.Irecv([piece, byte], peer, tag) for peer, array in receives for piece in pieces(array)]
        requests += [comm.Isend([piece, byte], peer, tag) for peer, array in sends for piece in pieces(array)]
        return requests

    def post_all(self, outgoing: Sequence[Array], incoming: Sequence[Array]) -> list[Any]:
        """Begins messages to and from each other rank, whose bytes stand at its number; those at the own one stay."""
        return self.post(
            [(peer, outgoing[peer]) for peer in self.peers], [(peer, incoming[peer]) for peer in self.peers]
        )

    def move(self, sends: Parts, receives: Parts) -> None:
        """Sends and receives messages of a collective; returns when all have ended."""
        self.finish(self.post(sends, receives))

    # -- Waiting -----------------------------------------------------------------------------------------------

    def finish(self, requests: Sequence[Any], memory: object = None, look: Callable[[], None] | None = None) -> None:
        """Waits for requests of a collective.

        Args:
            requests: of MPI, by this communicator's ranks.
            memory: what they read and write, where the requests do not keep it: those of `post` do, those of MPI's
                collectives do not all.
            look: called every few milliseconds of a longer wait.

        Raises:
            RankFailed: a rank died, or closed the communicator before it came to this collective.
            CollectiveTimeout: the deadline.
            MpiError: from MPI.
        """
        self.wait(partial(self._test_all, requests), (requests, memory), look=look)

    def wait(
        self,
        is_done: Callable[[], bool],
        kept: object,
        *,
        missing: Ranks | None = None,
        absent: Ranks | None = None,
        look: Callable[[], None] | None = None,
    ) -> None:
        """Waits until `is_done`, which makes progress, says so. Raises as `finish` does.

        Args:
            is_done: whether the wait is over.
            kept: requests, and the memory on which they work; kept for ever if the wait fails.
            missing: of messages: returns the ranks that have not done their part, by their numbers in this
                communicator. None is a collective, in which MPI does not say who is missing.
            absent: of messages: returns those of them that have not come yet.
            look: called every few milliseconds of a longer wait.
        """
        try:
            for _ in range(_SPINS):
                if is_done():
                    return
            self._wait_long(is_done, missing, absent, look)
        except BaseException:
            self.abandon(kept)
            raise

    def abandon(self, kept: object) -> None:
        """Keeps for ever what MPI may still work on, as this rank does not wait for it any more."""
        self.has_abandoned = True
        keep_for_ever(kept)

    def _wait_long(
        self,
        is_done: Callable[[], bool],
        missing: Ranks | None,
        absent: Ranks | None,
        look: Callable[[], None] | None,
    ) -> None:
        began = now = time.monotonic()
        look_at = began + _LOOK_FOR_FAILURES_EVERY_SECONDS
        pause_seconds = _FIRST_QUESTION_AFTER_SECONDS
        ask_at = began + pause_seconds
        while not is_done():
            if now < began + _YIELD_FOR_SECONDS:
                os.sched_yield()
            else:
                time.sleep(_SLEEP_SECONDS)
            now = time.monotonic()
            if now < look_at:
                continue
            look_at = now + _LOOK_FOR_FAILURES_EVERY_SECONDS
            if look is not None:
                look()
            if self._failures.has_failed() and not is_done():
                self._failures.check()
            if now >= ask_at:
                pause_seconds = min(2 * pause_seconds, _LAST_PAUSE_SECONDS)
                ask_at = now + pause_seconds
                self._raise_if_closed(is_done, absent)
            waited_seconds = now - began
            missing_ranks = None if missing is None else self._in_world(missing())
            if waited_seconds >= self._timeout_seconds and not is_done():
                self._failures.time_out(waited_seconds, missing_ranks)
            self._failures.warn(waited_seconds, missing_ranks)

    def _raise_if_closed(self, is_done: Callable[[], bool], absent: Ranks | None) -> None:
        """Raises RankFailed where a rank that is waited for has closed the communicator."""
        try:
            if absent is None:
                self._raise_if_left(self.begun - 1)
            else:
                self._raise_if_left(math.inf, self._in_world(absent()))
            return
        except GradsyncError as error:
            reason = error
        # What a rank did before it closed may have arrived meanwhile; and a verdict is the better reason.
        if not is_done():
            self._failures.check()
            raise reason

    def _in_world(self, ranks: Sequence[int]) -> list[int]:
        return [self._ranks[rank] for rank in ranks]

    def await_cause(self) -> None:
        """Raises, should the server say so within a moment, why MPI has failed: often a rank that died."""
        self._failures.await_cause(CAUSE_SECONDS)


def pieces(array: Array) -> list[Array]:
    """Cuts bytes into what one message of MPI carries; both ends cut alike."""
    if array.nbytes <= _PIECE_BYTES:
        return [array] if array.size else []
    return [array[begin : begin + _PIECE_BYTES] for begin in range(0, array.nbytes, _PIECE_BYTES)]
