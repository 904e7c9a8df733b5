"""How a rank waits for MPI: it looks again and again, so that it also sees what the rendezvous tells of the others.

A blocking call of MPI would never return where a rank has died, or does not come.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gradsync.communicators.mpi.unfinished import keep_for_ever
from gradsync.communicators.verdicts import NEWS_SECONDS, Verdicts
from gradsync.errors import GradsyncError

# Looking makes MPI progress, so a rank looks often before it sleeps. Where others want the core they get it.
_SPINS = 60
_YIELD_FOR_SECONDS = 2e-3
_SLEEP_SECONDS = 50e-6
_LOOK_FOR_FAILURES_EVERY_SECONDS = 5e-3
# The server has to be asked for what a rank has left that closed the communicator: seldom.
_FIRST_QUESTION_AFTER_SECONDS = 0.02
_LAST_PAUSE_SECONDS = 1.0


class Wait(NamedTuple):
    """What a rank waits for.

    Attributes:
        is_done: whether the wait is over; makes progress.
        requests: what MPI works on until then; may grow meanwhile.
        memory: what that reads and writes; kept, should the wait be given up.
        awaited: of messages: gives the ranks that are waited for, by their numbers in this communicator. None is a
            collective, in which MPI does not tell who is missing.
        unheard: of messages: gives those of them that have not come yet. None is a collective.
        look_around: called every few milliseconds of a longer wait.
    """

    is_done: Callable[[], bool]
    requests: Sequence[Any]
    memory: object
    awaited: Callable[[], Sequence[int]] | None = None
    unheard: Callable[[], Sequence[int]] | None = None
    look_around: Callable[[], None] | None = None


class MpiWaiting:
    """The waits of one communicator.

    Args:
        mpi: the module mpi4py.MPI.
        ranks: the numbers of all ranks in the world, by which errors and the server name them.
        timeout_seconds: how long to wait before CollectiveTimeout.
        verdicts: the server's.
        raise_if_left: raises where a rank has closed the communicator before a collective's number; see verdicts.

    Attributes:
        begun: how many collectives this rank has begun.
        was_cut_off: whether a wait was given up, so that MPI still works on it.
    """

    def __init__(
        self,
        mpi: Any,
        ranks: Sequence[int],
        timeout_seconds: float,
        verdicts: Verdicts,
        raise_if_left: Callable[..., None],
    ) -> None:
        self._test_all = mpi.Request.Testall
        self._ranks = ranks
        self._timeout_seconds = timeout_seconds
        self._verdicts = verdicts
        self._raise_if_left = raise_if_left
        self.begun = 0
        self.was_cut_off = False

    def finish(self, requests: Sequence[Any], memory: object, look_around: Callable[[], None] | None = None) -> None:
        """Waits for requests of a collective.

        Args:
            requests: of MPI, by this communicator's ranks.
            memory: what they read and write; kept, should the wait be given up.
            look_around: called every few milliseconds of a longer wait.

        Raises:
            RankFailed: a rank died, or closed the communicator before it came to this collective.
            CollectiveTimeout: the deadline.
            MpiError: from MPI.
        """
        test_all = self._test_all
        self.until(Wait(lambda: test_all(requests), requests, memory, look_around=look_around))

    def until(self, wait: Wait) -> None:
        """Makes progress until a wait is over.

        Raises:
            As for `finish`.
        """
        is_done = wait.is_done
        try:
            for _ in range(_SPINS):
                if is_done():
                    return
            self._wait(wait)
        except BaseException:
            self.cut_off(wait.requests, wait.memory)
            raise

    def cut_off(self, requests: Sequence[Any], memory: object) -> None:
        """Notes that this rank waits no more, while MPI may still work on requests and memory."""
        self.was_cut_off = True
        keep_for_ever(requests, memory)

    def _wait(self, wait: Wait) -> None:
        began = now = time.monotonic()
        look_at = began + _LOOK_FOR_FAILURES_EVERY_SECONDS
        pause_seconds = _FIRST_QUESTION_AFTER_SECONDS
        ask_at = began + pause_seconds
        while not wait.is_done():
            if now < began + _YIELD_FOR_SECONDS:
                os.sched_yield()
            else:
                time.sleep(_SLEEP_SECONDS)
            now = time.monotonic()
            if now < look_at:
                continue
            look_at = now + _LOOK_FOR_FAILURES_EVERY_SECONDS
            if wait.look_around is not None:
                wait.look_around()
            if self._verdicts.is_known() and not wait.is_done():
                self._verdicts.check()
            if now >= ask_at:
                pause_seconds = min(2 * pause_seconds, _LAST_PAUSE_SECONDS)
                ask_at = now + pause_seconds
                self._ask(wait)
            self._look_at_the_clock(wait, now - began)

    def _ask(self, wait: Wait) -> None:
        """Raises RankFailed where a rank that is waited for has closed the communicator."""
        try:
            if wait.unheard is None:
                self._raise_if_left(self.begun - 1)
            else:
                self._raise_if_left(math.inf, [self._ranks[rank] for rank in wait.unheard()])
            return
        except GradsyncError as error:
            reason = error
        # What a rank did before it closed may have come meanwhile; and a verdict is the better reason.
        if not wait.is_done():
            self._verdicts.check()
            raise reason

    def _look_at_the_clock(self, wait: Wait, waited_seconds: float) -> None:
        missing = None if wait.awaited is None else [self._ranks[rank] for rank in wait.awaited()]
        if waited_seconds >= self._timeout_seconds and not wait.is_done():
            self._verdicts.give_up(waited_seconds, missing)
        self._verdicts.warn(waited_seconds, missing)

    def await_cause(self) -> None:
        """Raises, should the server tell it within a moment, why MPI has failed: often a rank that died."""
        self._verdicts.await_news(NEWS_SECONDS)
