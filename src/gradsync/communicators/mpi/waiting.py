"""How a rank waits for MPI: it looks again and again, so that it also sees what the rendezvous tells of the others.

A blocking call of MPI would never return where a rank has died, or does not come.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gradsync.communicators.closing_notices import ClosingNotices
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


class MpiWaiting:
    """The waits of one communicator.

    Args:
        mpi: the module mpi4py.MPI.
        ranks: the numbers of all ranks in the world, by which errors and the server name them.
        timeout_seconds: how long to wait before CollectiveTimeout.
        verdicts: the server's.
        closings: what ranks have told that closed the communicator.

    Attributes:
        begun: how many collectives this rank has begun.
        was_cut_off: whether a wait was given up, so that MPI still works on it.
    """

    def __init__(
        self, mpi: Any, ranks: Sequence[int], timeout_seconds: float, verdicts: Verdicts, closings: ClosingNotices
    ) -> None:
        self._test_all = mpi.Request.Testall
        self._ranks = ranks
        self._timeout_seconds = timeout_seconds
        self._verdicts = verdicts
        self._closings = closings
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
        self.until(lambda: test_all(requests), requests, memory, None, look_around)

    def until(
        self,
        is_done: Callable[[], bool],
        requests: Sequence[Any],
        memory: object,
        awaited: Callable[[], Iterable[int]] | None = None,
        look_around: Callable[[], None] | None = None,
    ) -> None:
        """Calls is_done(), which makes progress, until it is true.

        Args:
            is_done: whether the wait is over.
            requests: what MPI works on until then; may grow meanwhile.
            memory: as for `finish`.
            awaited: of messages: gives the ranks that are waited for, by their numbers in this communicator. None is
                a collective, in which MPI does not tell who is missing.
            look_around: as for `finish`.

        Raises:
            As for `finish`.
        """
        try:
            for _ in range(_SPINS):
                if is_done():
                    return
            self._wait(is_done, awaited, look_around)
        except BaseException:
            self.cut_off(requests, memory)
            raise

    def cut_off(self, requests: Sequence[Any], memory: object) -> None:
        """Notes that this rank waits no more, while MPI may still work on requests and memory."""
        self.was_cut_off = True
        keep_for_ever(requests, memory)

    def _wait(
        self,
        is_done: Callable[[], bool],
        awaited: Callable[[], Iterable[int]] | None,
        look_around: Callable[[], None] | None,
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
            if look_around is not None:
                look_around()
            if self._verdicts.is_known() and not is_done():
                self._verdicts.check()
            if now >= ask_at:
                pause_seconds = min(2 * pause_seconds, _LAST_PAUSE_SECONDS)
                ask_at = now + pause_seconds
                self._ask(is_done, awaited)
            self._look_at_the_clock(now - began, awaited, is_done)

    def _ask(self, is_done: Callable[[], bool], awaited: Callable[[], Iterable[int]] | None) -> None:
        """Raises RankFailed where a rank that is waited for has closed the communicator."""
        try:
            if awaited is None:
                self._closings.look(self.begun - 1)
            else:
                self._closings.look(math.inf, [self._ranks[rank] for rank in awaited()])
            return
        except GradsyncError as error:
            reason = error
        # What a rank did before it closed may have come meanwhile; and a verdict is the better reason.
        if not is_done():
            self._verdicts.check()
            raise reason

    def _look_at_the_clock(
        self, waited_seconds: float, awaited: Callable[[], Iterable[int]] | None, is_done: Callable[[], bool]
    ) -> None:
        missing = None if awaited is None else [self._ranks[rank] for rank in awaited()]
        if waited_seconds >= self._timeout_seconds and not is_done():
            self._verdicts.give_up(waited_seconds, missing)
        self._verdicts.warn(waited_seconds, missing)

    def await_cause(self) -> None:
        """Raises, should the server tell it within a moment, why MPI has failed: often a rank that died."""
        self._verdicts.await_news(NEWS_SECONDS)
