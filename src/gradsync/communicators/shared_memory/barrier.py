"""The barrier of a shared-memory communicator, with waiting, agreement, close and abort.

Each rank owns one cache line and one short text in shared memory. It writes only its own line and text, and reads those
of all ranks. The line records whether the rank has closed or aborted the communicator, and also has the words of the
barrier, so that an arrival writes to no other line. Aligned 8-byte stores become visible in program order on x86-64.
This protocol, and those built on it, need no other ordering; check_platform refuses other processors.

A rank arrives at the barrier by storing the number of the round in its line. The 64-bit digest of its next collective
is in the same line, so that comparing digests takes no extra time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import NoReturn
from zlib import crc32

from gradsync.communicators.agreement import Agreement, Description
from gradsync.communicators.failures import CAUSE_SECONDS, FailureMonitor, closed_failure
from gradsync.communicators.mismatch import first_difference, mismatch
from gradsync.communicators.shared_memory.segment import whole_pages
from gradsync.errors import CollectiveTimeout, RankFailed, RendezvousError

# One 64-byte line of eight words for each rank, and a common line, whose first word is not zero once any rank has
# aborted. The first three words of a rank's line, and the last two, belong to the barrier.
WORDS_PER_RANK = 8
_STATE = 3
_CULPRIT = 4  # of an aborted rank: the world rank whose failure made it abort, often itself
_ABORTED_AT = 5  # of an aborted rank: the first round of the barrier that it did not complete
# The last two states: aborted because of a failure that the server sends to all ranks, and closed by a rank that knew
# of such a failure. Every other rank has received that failure from the server, or will soon.
_OPEN, _CLOSED, _ABORTED, _ABORTED_BY_SERVER, _CLOSED_AFTER_FAILURE = 0, 1, 2, 3, 4
_REASON_BYTES = 1024  # the reason of an abort

# Waiting: first spin, which takes less than a microsecond on idle cores; then yield, in case another process needs this
# core; then sleep, because sched_yield starves next to a busy process. Failures are checked while sleeping.
SPINS = 60
_YIELD_FOR_SECONDS = 100e-6
_SLEEP_SECONDS = 50e-6
_LOOK_FOR_FAILURES_EVERY_SECONDS = 5e-3

# Words of a rank's line.
_ARRIVALS = 0  # the number of the last round that the rank has arrived at
_DIGESTS = 1  # two words, even and odd rounds: a fast rank may be one round ahead of a slow reader, never two
_TEXT_BYTES = 16384  # description of the collective, for PlanMismatch

_NO_DIGEST = 0

ANY_ROUND = 2**64 - 1  # later than any round


def waiting_bytes(world_size: int) -> int:
    """Returns the size of the shared memory for the lines and texts of all ranks."""
    return (world_size + 1) * WORDS_PER_RANK * 8 + world_size * _REASON_BYTES


class SharedWaiting:
    """Waits of the ranks of one communicator for each other, with checks for failures and the deadline.

    Args:
        memory: waiting_bytes(world_size) bytes of shared memory, zero at the start.
        rank: this rank's number in the communicator. All other ranks are such numbers too, unless noted.
        ranks: the world ranks of all members, used in errors and at the server.
        label: this rank's name in errors.
        timeout_seconds: how long to wait for a rank before CollectiveTimeout.
        failures: checked for the server's failures every few milliseconds of waiting.

    Attributes:
        words: the lines.
        aborted: the index of the word that is not zero once any rank has aborted.
        completed: the last round of the barrier at which this rank saw all ranks arrive.
        has_failed: a function that takes 0.1 us and returns whether the generation has failed.
        rank, ranks, label: see above.
    """

    def __init__(
        self,
        memory: memoryview,
        rank: int,
        ranks: Sequence[int],
        label: str,
        timeout_seconds: float,
        failures: FailureMonitor,
    ) -> None:
        self.rank = rank
        self.ranks = tuple(ranks)
        self.label = label
        self.completed = 0
        self.has_failed = failures.has_failed
        self.aborted = len(ranks) * WORDS_PER_RANK
        lines_bytes = (len(ranks) + 1) * WORDS_PER_RANK * 8
        self.words = memory[:lines_bytes].cast("Q")
        self._reasons = TextBoard(memory[lines_bytes:], _REASON_BYTES)
        self._line = rank * WORDS_PER_RANK
        self._peers = [peer for peer in range(len(ranks)) if peer != rank]
        self._timeout_seconds = timeout_seconds
        self._failures = failures

    def look_for_failures(self, missing: Callable[[], list[int]], waited_seconds: float, round_number: int) -> None:
        """Raises if the awaited ranks cannot arrive any more, or the deadline has passed.

        Args:
            missing: returns the ranks that have not done their part at the time of the call.
            waited_seconds: how long this rank has waited.
            round_number: as for look_for_aborts.

        Raises:
            RankFailed: a rank closed or aborted the communicator, or died.
            CollectiveTimeout: the missing ranks did not arrive before the deadline.
        """
        awaited = missing()
        if self.words[self._line + _STATE] != _OPEN:  # by another thread of this process
            raise RankFailed(
                f"{self.label}: the communicator was closed or aborted during a collective",
                rank=self.ranks[self.rank],
                phase="collective",
            )
        try:
            self._failures.check()
        except (RankFailed, CollectiveTimeout, RendezvousError):
            # If all ranks did their part before the failure, this wait succeeds, and the next one raises.
            if missing():
                raise
        self._look_for_closed(awaited, missing)
        self.look_for_aborts(round_number)
        if awaited:
            self._look_at_the_clock([self.ranks[peer] for peer in awaited], waited_seconds)

    def _look_for_closed(self, awaited: Sequence[int], missing: Callable[[], list[int]]) -> None:
        for peer in awaited:
            state = self.words[peer * WORDS_PER_RANK + _STATE]
            # A rank may do its part and then close, so `missing` is checked again after the state.
            if state in (_CLOSED, _CLOSED_AFTER_FAILURE) and peer in missing():
                if state == _CLOSED_AFTER_FAILURE:
                    self._failures.await_cause(CAUSE_SECONDS)
                raise closed_failure(self.label, self.ranks[peer])

    def look_for_aborts(self, round_number: int) -> None:
        """Raises if a rank aborted in that round of the barrier or an earlier one, even if it had arrived.

        Args:
            round_number: the round in which this rank waits; ANY_ROUND if any abort ends the wait.
        """
        for peer in self._peers:
            line = peer * WORDS_PER_RANK
            state = self.words[line + _STATE]
            if state in (_ABORTED, _ABORTED_BY_SERVER) and self.words[line + _ABORTED_AT] <= round_number:
                if state == _ABORTED_BY_SERVER:
                    self._failures.await_cause(CAUSE_SECONDS)
                self._failures.check()  # the server's error is the same on every rank
                reason = self._reasons.read(peer).decode(errors="replace")
                text = f"{self.label}: rank {self.ranks[peer]} aborted: {reason}"
                raise RankFailed(text, rank=self.words[line + _CULPRIT], phase="collective")

    def _look_at_the_clock(self, awaited: list[int], waited_seconds: float) -> None:
        if waited_seconds >= self._timeout_seconds:
            # Announced here first: a rank that arrives now must not continue as if the round were complete.
            self._announce(_ABORTED_BY_SERVER, f"waited {waited_seconds:.3g} s for ranks {awaited}", awaited[0])
            self._failures.time_out(waited_seconds, awaited)
        self._failures.warn(waited_seconds, awaited)

    def announce_closed(self) -> None:
        """Announces that this rank has closed the communicator; its earlier arrivals still count."""
        self.words[self._line + _STATE] = _CLOSED_AFTER_FAILURE if self.has_failed() else _CLOSED

    def announce_abort(self, reason: str, culprit: int | None = None) -> None:
        """Makes every rank that waits, now or later, raise RankFailed with the reason.

        Args:
            reason: the reason for all ranks.
            culprit: the world rank whose failure this is; None is this rank.
        """
        state = _ABORTED_BY_SERVER if self._failures.was_raised else _ABORTED
        self._announce(state, reason, self.ranks[self.rank] if culprit is None else culprit)

    def _announce(self, state: int, reason: str, culprit: int) -> None:
        self._reasons.write(self.rank, reason.encode(errors="backslashreplace"))
        self.words[self._line + _ABORTED_AT] = self.completed + 1
        self.words[self._line + _CULPRIT] = culprit
        self.words[self._line + _STATE] = state
        self.words[self.aborted] = 1

    def release(self) -> None:
        """Releases the shared memory; this object cannot be used afterwards."""
        self._reasons.release()
        self.words.release()


class Rests:
    """The pauses of a waiting rank: it yields at first, then sleeps.

    Args:
        began: when the wait began, in time.monotonic() seconds.
    """

    __slots__ = ("_began", "_look_at", "_now", "_sleep_from")

    def __init__(self, began: float) -> None:
        now = time.monotonic()
        self._began = began
        self._now = now
        self._sleep_from = now + _YIELD_FOR_SECONDS
        self._look_at = now + _LOOK_FOR_FAILURES_EVERY_SECONDS

    def rest(self) -> bool:
        """Pauses; returns whether it is time to check for failures."""
        if self._now < self._sleep_from:
            os.sched_yield()
        else:
            time.sleep(_SLEEP_SECONDS)
        self._now = now = time.monotonic()
        if now < self._look_at:
            return False
        self._look_at = now + _LOOK_FOR_FAILURES_EVERY_SECONDS
        return True

    @property
    def waited_seconds(self) -> float:
        """How long the wait had lasted after the last pause."""
        return self._now - self._began


class TextBoard:
    """Short texts in shared memory, each stored as a length and bytes.

    Args:
        memory: memory for all texts.
        bytes_each: size of one text with its length.
    """

    def __init__(self, memory: memoryview, bytes_each: int) -> None:
        self._memory = memory
        self._bytes_each = bytes_each

    def write(self, place: int, text: bytes) -> None:
        """Writes the text, or the beginning of it that fits."""
        data = text[: self._bytes_each - 4]
        begin = place * self._bytes_each
        self._memory[begin + 4 : begin + 4 + len(data)] = data
        self._memory[begin : begin + 4] = len(data).to_bytes(4, "little")

    def read(self, place: int) -> bytes:
        """Returns the last written text."""
        begin = place * self._bytes_each
        length = int.from_bytes(self._memory[begin : begin + 4], "little")
        return bytes(self._memory[begin + 4 : begin + 4 + length])

    def release(self) -> None:
        """Releases the memory."""
        self._memory.release()


def header_bytes(world_size: int) -> int:
    """Returns the size of the barrier's shared memory, in whole pages."""
    size = waiting_bytes(world_size) + world_size * _TEXT_BYTES
    return whole_pages(size)


class SharedBarrier:
    """A reusable barrier with agreement, abort and deadline.

    Args:
        memory: header_bytes(world_size) bytes of shared memory, zero at the start.
        rank: this rank.
        world_size: number of ranks.
        timeout_seconds: how long to wait for a rank before CollectiveTimeout.
        failures: checked for the server's failures every few milliseconds of waiting.
        ranks: the world ranks of all members, used in errors; None if they are 0 to world_size - 1.
        label: this rank's name in errors; None is "rank 0/2".

    Attributes:
        waiting: the waits, and the states of the ranks; also for waits that do not involve all ranks.
        round: the number of the last round at which this rank has arrived.
    """

    def __init__(
        self,
        memory: memoryview,
        rank: int,
        world_size: int,
        timeout_seconds: float,
        failures: FailureMonitor,
        *,
        ranks: Sequence[int] | None = None,
        label: str | None = None,
    ) -> None:
        self._rank = rank
        self._ranks = tuple(range(world_size) if ranks is None else ranks)
        self._label = f"rank {rank}/{world_size}" if label is None else label
        of_waiting = waiting_bytes(world_size)
        self.waiting = SharedWaiting(memory[:of_waiting], rank, self._ranks, self._label, timeout_seconds, failures)
        self._words = self.waiting.words
        self._aborted = self.waiting.aborted
        self._texts = TextBoard(memory[of_waiting : of_waiting + world_size * _TEXT_BYTES], _TEXT_BYTES)
        self._line = rank * WORDS_PER_RANK
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self._arrivals = [peer * WORDS_PER_RANK + _ARRIVALS for peer in self._peers]
        self._digests = [[peer * WORDS_PER_RANK + _DIGESTS + odd for peer in self._peers] for odd in (0, 1)]
        self.round = 0

    @property
    def next_parity(self) -> int:
        """The number, 0 or 1, of the buffer for the next round.

        A buffer is written again two rounds later. A rank enters that round only after all ranks have left the round in
        between, and so have read the buffer.
        """
        return (self.round + 1) & 1

    def meet(self, agreement: Agreement) -> None:
        """Waits until every rank has arrived, and compares their digests.

        Raises:
            PlanMismatch: on every rank, if any two digests differ.
            RankFailed: a rank closed or aborted the communicator, or died.
            CollectiveTimeout: a rank did not arrive before the deadline.
        """
        digest, words = agreement.digest, self._words
        self._arrive(digest)
        digests = self._digests[self.round & 1]
        for peer_digest in digests:
            if words[peer_digest] != digest:
                self._raise_mismatch(agreement)

    def arrive(self) -> None:
        """Arrives at the next round without waiting.

        It is for the inner rounds of a collective that the ranks have agreed on: no digests are compared. Before the
        next call of `arrive`, the rank must have called `await_round` for the round before this one.
        """
        self.round += 1
        self._words[self._line + _ARRIVALS] = self.round  # publishes all data written before

    def await_round(self, number: int) -> None:
        """Waits until every rank has arrived at a round, at which this rank has arrived already.

        Raises:
            RankFailed, CollectiveTimeout: as for meet.
        """
        words = self._words
        began = 0.0
        for arrivals in self._arrivals:
            if words[arrivals] < number:
                # One deadline for all ranks; the clock is read only if there is a wait.
                began = began or time.monotonic()
                self._wait_for(arrivals, number, began)
        if words[self._aborted]:  # a rank may have arrived and then aborted
            self.waiting.look_for_aborts(number)
        self.waiting.completed = number

    def meet_in_disagreement(self, agreement: Agreement) -> NoReturn:
        """Arrives at a round that other ranks have entered for another collective, so that every rank raises.

        Args:
            agreement: this rank's agreement; it differs from another rank's in the round.

        Raises:
            PlanMismatch, RankFailed, CollectiveTimeout: as for meet.
        """
        self._arrive(agreement.digest)
        self._raise_mismatch(agreement)

    def is_ahead(self, peer: int) -> bool:
        """Whether a rank has arrived at a later round than this rank, and waits there."""
        return self._words[peer * WORDS_PER_RANK + _ARRIVALS] > self.round

    def _arrive(self, digest: int) -> None:
        words, line = self._words, self._line
        self.round = number = self.round + 1
        words[line + _DIGESTS + (number & 1)] = digest
        words[line + _ARRIVALS] = number  # publishes all data written before
        self.await_round(number)

    def _wait_for(self, arrivals: int, wanted: int, began: float) -> None:
        words = self._words
        look_for_failures = self.waiting.look_for_failures

        def missing() -> list[int]:
            return [peer for peer in self._peers if words[peer * WORDS_PER_RANK + _ARRIVALS] < wanted]

        if self.waiting.has_failed():  # checked here because short waits never check while sleeping
            look_for_failures(missing, 0.0, wanted)
        for _ in range(SPINS):
            if words[arrivals] >= wanted:
                return
        rests = Rests(began)
        while words[arrivals] < wanted:
            if rests.rest():
                look_for_failures(missing, rests.waited_seconds, wanted)

    def _raise_mismatch(self, agreement: Agreement) -> NoReturn:
        """Exchanges descriptions, so that every rank can raise the same error.

        First the ranks exchange checksums of the lines, in batches, to find the first line that differs. Then they
        exchange the text from that line on, because the whole text may be too long.
        """
        head, *lines = agreement.described().to_lines(_TEXT_BYTES - 4)
        first, at_a_time = 0, (_TEXT_BYTES - 4) // 4
        is_found = False
        while not is_found:
            own = [crc32(line.encode()).to_bytes(4, "little") for line in lines[first : first + at_a_time]]
            self._texts.write(self._rank, b"".join(own))
            self._arrive(_NO_DIGEST)
            sums = [self._texts.read(rank) for rank in range(len(self._ranks))]
            alike = first_difference([[part[i : i + 4] for i in range(0, len(part), 4)] for part in sums])
            self._arrive(_NO_DIGEST)  # until here the others read this rank's checksums
            first, is_found = first + alike, alike < at_a_time
        self._texts.write(self._rank, "\n".join([head, *lines[first:]]).encode())
        self._arrive(_NO_DIGEST)
        texts = {number: self._texts.read(rank).decode(errors="replace") for rank, number in enumerate(self._ranks)}
        descriptions = {number: Description.from_text(text, first) for number, text in texts.items()}
        raise mismatch(self._label, agreement, descriptions)

    def announce_closed(self) -> None:
        """Announces that this rank has closed the communicator; its earlier arrivals still count."""
        self.waiting.announce_closed()

    def announce_abort(self, reason: str, culprit: int | None = None) -> None:
        """Makes every rank that waits, now or later, raise RankFailed; arguments as for SharedWaiting."""
        self.waiting.announce_abort(reason, culprit)

    def release(self) -> None:
        """Releases the shared memory; the barrier cannot be used afterwards."""
        self._texts.release()
        self.waiting.release()
