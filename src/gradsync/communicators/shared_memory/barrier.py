"""The barrier of a shared-memory communicator, which also compares digests and announces close and abort.

Each rank owns one cache line in shared memory, and memory for a text. All ranks read these cache lines and texts, but
only their owner writes them. A rank's cache line contains the number of the last round at which the rank has arrived,
and the 64-bit digest of the collective that the rank has called. The line also shows whether the rank has closed or
aborted the communicator. So a rank that arrives at the barrier writes to one cache line only, and no further cache line
is needed for the digests. In addition, each rank that aborts writes to one word that all ranks share.

On x86-64, other cores see aligned 8-byte stores in program order. The barrier, and the protocols that use it, rely on
this guarantee alone. On other processors check_platform raises an error.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from gradsync.communicators.agreement import Agreement, mismatch
from gradsync.communicators.failures import (
    CAUSE_SECONDS,
    FailureMonitor,
    await_cause,
    closed_failure,
    exchange_descriptions,
)
from gradsync.errors import CollectiveTimeout, RankFailed, RendezvousError

# Each rank has a cache line of eight words. After these cache lines there is one common cache line, whose first word is
# not zero once any rank has aborted. The first three words of a rank's cache line belong to the barrier, and the last
# two words are not used.
WORDS_PER_RANK = 8
LINE_BYTES = 8 * WORDS_PER_RANK
_STATE = 3
_CULPRIT = 4  # after an abort: the world rank that has failed, often this rank itself
_ABORTED_AT = 5  # after an abort: the first round of the barrier that this rank did not complete
# _ABORTED_BY_SERVER: the rank aborted because of a failure that the rendezvous server sends to all ranks.
# _CLOSED_AFTER_FAILURE: the rank closed after it had received such a failure. In these two states every other rank has
# also received the failure from the server, or will receive the failure soon.
_OPEN, _CLOSED, _ABORTED, _ABORTED_BY_SERVER, _CLOSED_AFTER_FAILURE = 0, 1, 2, 3, 4
REASON_BYTES = 1024  # the memory for the text with the reason of an abort

# A waiting rank first spins: if each rank has a core of its own, most waits end within a microsecond. Then the rank
# yields, in case another process needs this core. Then the rank sleeps again and again, because a process that only
# yields gets too little time if another process is busy. Every few milliseconds, the rank checks for failures.
SPINS = 60
_YIELD_FOR_SECONDS = 100e-6
_SLEEP_SECONDS = 50e-6
_CHECK_EVERY_SECONDS = 5e-3

# The words of a rank's cache line that belong to the barrier.
_ARRIVALS = 0  # the number of the last round that the rank has arrived at
_DIGESTS = 1  # two words, for even and odd rounds: a fast rank may be one round ahead of a slow reader

ANY_ROUND = 2**64 - 1  # larger than the number of any round


def pauses(began: float) -> Iterator[float | None]:
    """Pauses a waiting rank before each item: at first the rank yields its core, later it sleeps.

    Args:
        began: the time at which the wait began, in time.monotonic() seconds.

    Yields:
        The time that the rank has waited, in seconds, if the rank should now check for failures; otherwise None.
    """
    now = time.monotonic()
    sleep_from, check_at = now + _YIELD_FOR_SECONDS, now + _CHECK_EVERY_SECONDS
    while True:
        if now < sleep_from:
            os.sched_yield()
        else:
            time.sleep(_SLEEP_SECONDS)
        now = time.monotonic()
        if now < check_at:
            yield None
        else:
            check_at = now + _CHECK_EVERY_SECONDS
            yield now - began


class SharedBarrier:
    """A reusable barrier that compares digests. A wait raises an error after an abort, a failure or the deadline.

    Args:
        areas: the areas of the shared memory, initially all zero; see areas_of in arena.py.
        rank: the number of this rank in the communicator. Methods number all ranks in this way, unless they say "world
            rank".
        ranks: the world ranks of all members, for errors and for reports to the server.
        label: this rank's name in errors.
        timeout_seconds: how long a rank waits for another rank before it raises CollectiveTimeout.
        failures: the monitor that receives failures from the server. A waiting rank checks this monitor every few
            milliseconds.

    Attributes:
        words: the cache lines of all ranks, and one cache line that all ranks share, as 8-byte words.
        aborted: the index of the word that is not zero once any rank has aborted.
        round: the number of the last round at which this rank has arrived.
        has_failed: a function that takes 0.1 us and returns whether the generation has failed.
        ranks, label, failures: see Args.
    """

    def __init__(
        self,
        areas: dict[str, memoryview],
        rank: int,
        ranks: Sequence[int],
        label: str,
        timeout_seconds: float,
        failures: FailureMonitor,
    ) -> None:
        self.ranks = tuple(ranks)
        self.label = label
        self.has_failed = failures.has_failed
        self.aborted = len(ranks) * WORDS_PER_RANK
        self.round = 0
        self.words = areas["lines"]
        self._reasons = areas["reasons"]
        self._rank = rank
        self._timeout_seconds = timeout_seconds
        self.failures = failures
        self._completed = 0  # the last round for which this rank saw all ranks arrive
        self._line = rank * WORDS_PER_RANK
        self._peers = [peer for peer in range(len(ranks)) if peer != rank]
        self._arrivals = [peer * WORDS_PER_RANK + _ARRIVALS for peer in self._peers]
        self._digests = [[peer * WORDS_PER_RANK + _DIGESTS + odd for peer in self._peers] for odd in (0, 1)]

    def agree(self, agreement: Agreement) -> None:
        """Arrives at the next round, waits until every rank has arrived, and compares the digests of all ranks.

        Raises:
            PlanMismatch: two ranks have different digests. Every rank raises this error.
            RankFailed: a rank closed or aborted the communicator, or died.
            CollectiveTimeout: a rank did not arrive before the deadline.
            RendezvousError: the rendezvous server is gone, and a rank has not arrived.
        """
        digest, words = agreement.digest, self.words
        self.round = number = self.round + 1
        line = self._line
        words[line + _DIGESTS + (number & 1)] = digest
        words[line + _ARRIVALS] = number  # this store publishes everything that this rank wrote before
        self.await_round(number)
        digests = self._digests[number & 1]
        for peer_digest in digests:
            if words[peer_digest] != digest:
                self._raise_mismatch(agreement)

    def arrive(self) -> None:
        """Arrives at the next round without waiting.

        This method compares no digests: a collective calls it only after the ranks have agreed in its first round.
        After a rank has arrived at round n, it must call `await_round(n - 1)` before it arrives at round n + 1.
        """
        self.round += 1
        self.words[self._line + _ARRIVALS] = self.round  # this store publishes everything that this rank wrote before

    def await_round(self, number: int) -> None:
        """Waits until every rank has arrived at a round. This rank must already have arrived at the round.

        Raises:
            RankFailed, CollectiveTimeout, RendezvousError: see `agree`.
        """
        words = self.words
        began = 0.0
        for arrivals in self._arrivals:
            if words[arrivals] < number:
                # The waits for all ranks have one common deadline. The clock is read only if this rank has to wait.
                began = began or time.monotonic()
                self._wait_for(arrivals, number, began)
        if words[self.aborted]:  # a rank may have arrived and then aborted
            self.check_for_aborts(number)
        self._completed = number

    def is_ahead(self, peer: int) -> bool:
        """Whether a peer has arrived at a later round than this rank."""
        return self.words[peer * WORDS_PER_RANK + _ARRIVALS] > self.round

    def _wait_for(self, arrivals: int, wanted: int, began: float) -> None:
        words = self.words
        check_for_failures = self.check_for_failures

        def missing() -> list[int]:
            return [peer for peer in self._peers if words[peer * WORDS_PER_RANK + _ARRIVALS] < wanted]

        if self.has_failed():  # checked here because a short wait ends before `check_for_failures`
            check_for_failures(missing, 0.0, wanted)
        for _ in range(SPINS):
            if words[arrivals] >= wanted:
                return
        for waited_seconds in pauses(began):
            if words[arrivals] >= wanted:
                return
            if waited_seconds is not None:
                check_for_failures(missing, waited_seconds, wanted)

    def _raise_mismatch(self, agreement: Agreement) -> NoReturn:
        """Exchanges descriptions of the collectives, so that every rank can raise the same error."""
        text = agreement.described().to_text()
        client, group = self.failures.client, self.failures.group
        descriptions = exchange_descriptions(client, group, self.round, text, self.ranks)
        raise mismatch(self.label, agreement, descriptions)

    # -- Failures ----------------------------------------------------------------------------------------------

    def check_for_failures(self, missing: Callable[[], list[int]], waited_seconds: float, round_number: int) -> None:
        """Raises an error if the awaited ranks cannot arrive any more, or if the deadline has passed.

        Args:
            missing: a function that returns the ranks for which this rank waits at the time of the call.
            waited_seconds: how long this rank has waited.
            round_number: the round in which this rank waits; see check_for_aborts.

        Raises:
            RankFailed: a rank closed or aborted the communicator, or died.
            CollectiveTimeout: the missing ranks did not arrive before the deadline.
            RendezvousError: the rendezvous server is gone, and a rank is missing.
        """
        awaited = missing()
        if self.words[self._line + _STATE] != _OPEN:  # another thread closed or aborted the communicator
            raise RankFailed(
                f"{self.label}: the communicator was closed or aborted during a collective",
                rank=self.ranks[self._rank],
                phase="collective",
            )
        try:
            self.failures.check()
        except (RankFailed, CollectiveTimeout, RendezvousError):
            # If all ranks arrived before the failure, this wait succeeds, and the next wait raises the error.
            if missing():
                raise
        self._check_for_closed(awaited, missing)
        self.check_for_aborts(round_number)
        if awaited:
            self._check_deadline([self.ranks[peer] for peer in awaited], waited_seconds)

    def _check_for_closed(self, awaited: Sequence[int], missing: Callable[[], list[int]]) -> None:
        for peer in awaited:
            state = self.words[peer * WORDS_PER_RANK + _STATE]
            # A rank may arrive and then close, so `missing` is called again after the state was read.
            if state in (_CLOSED, _CLOSED_AFTER_FAILURE) and peer in missing():
                if state == _CLOSED_AFTER_FAILURE:
                    await_cause(CAUSE_SECONDS, self.failures.check)
                raise closed_failure(self.label, self.ranks[peer])

    def check_for_aborts(self, round_number: int) -> None:
        """Raises an error if another rank has aborted in this round of the barrier or in an earlier round.

        This rank raises the error even if the other rank had arrived at the round before it aborted.

        Args:
            round_number: the round in which this rank waits; ANY_ROUND if an abort in any round is an error.
        """
        for peer in self._peers:
            line = peer * WORDS_PER_RANK
            state = self.words[line + _STATE]
            if state in (_ABORTED, _ABORTED_BY_SERVER) and self.words[line + _ABORTED_AT] <= round_number:
                if state == _ABORTED_BY_SERVER:
                    await_cause(CAUSE_SECONDS, self.failures.check)
                self.failures.check()  # raises the server's error if there is one, because all ranks raise that error
                begin = peer * REASON_BYTES
                reason = bytes(self._reasons[begin : begin + REASON_BYTES]).rstrip(b"\0").decode(errors="replace")
                text = f"{self.label}: rank {self.ranks[peer]} aborted: {reason}"
                raise RankFailed(text, rank=self.words[line + _CULPRIT], phase="collective")

    def _check_deadline(self, awaited: list[int], waited_seconds: float) -> None:
        if waited_seconds >= self._timeout_seconds:
            # The abort is announced before the timeout is reported: a rank that arrives now must not continue as if the
            # round were complete.
            self._announce(_ABORTED_BY_SERVER, f"waited {waited_seconds:.3g} s for ranks {awaited}", awaited[0])
            self.failures.time_out(waited_seconds, awaited)
        self.failures.warn(waited_seconds, awaited)

    def announce_closed(self) -> None:
        """Announces that this rank has closed the communicator. Its arrivals at earlier rounds remain valid."""
        self.words[self._line + _STATE] = _CLOSED_AFTER_FAILURE if self.has_failed() else _CLOSED

    def announce_abort(self, reason: str, culprit: int | None = None) -> None:
        """Makes every other rank that waits, now or later, raise RankFailed with the reason, or the server's error.

        Args:
            reason: the reason of the abort. The errors of the other ranks show its first 1024 bytes.
            culprit: the world rank that has failed; None if this rank has failed.
        """
        state = _ABORTED_BY_SERVER if self.failures.was_raised else _ABORTED
        self._announce(state, reason, self.ranks[self._rank] if culprit is None else culprit)

    def _announce(self, state: int, reason: str, culprit: int) -> None:
        data, begin = reason.encode(errors="backslashreplace")[:REASON_BYTES], self._rank * REASON_BYTES
        self._reasons[begin : begin + REASON_BYTES] = data.ljust(REASON_BYTES, b"\0")
        self.words[self._line + _ABORTED_AT] = self._completed + 1
        self.words[self._line + _CULPRIT] = culprit
        self.words[self._line + _STATE] = state
        self.words[self.aborted] = 1
