"""The meeting point of the ranks of a shared-memory communicator.

Each rank owns one cache line and two pieces of text in shared memory; it writes only its own and reads all. A rank
arrives by storing the number of the round. The 64-bit digest of what it is about to do lies in the same line, so
that comparing the ranks' plans costs nothing. Aligned 8-byte stores become visible in program order on x86-64, which
is all the ordering that this protocol needs; shared_memory.py refuses other processors.
"""

from __future__ import annotations

import os
import time
from zlib import crc32

from gradsync.communicators.agreement import Agreement, Description, first_difference, mismatch
from gradsync.communicators.verdicts import Verdicts
from gradsync.errors import CollectiveTimeout, RankFailed

# One 64-byte line of eight words for each rank, and one for all, of which the first word is not zero once any rank
# has aborted.
_WORDS_PER_RANK = 8
_ARRIVALS = 0  # the number of the last round that the rank has arrived at
_DIGESTS = 1  # two words, even and odd rounds: a fast rank may be one round ahead of a slow reader, never two
_STATE = 3
_CULPRIT = 4  # of an aborted rank: the rank whose failure made it abort, often its own
_GAVE_UP_AT = 5  # of an aborted rank: the first round that it did not complete
# The last one: aborted because of the server's verdict, which every rank can hear there, or will in a moment.
_OPEN, _CLOSED, _ABORTED, _CONDEMNED = 0, 1, 2, 3
_TEXT_BYTES = 16384  # description of the collective, for PlanMismatch
_REASON_BYTES = 1024  # why a rank aborted

# Waiting: first read, which answers within a microsecond on idle cores; then let others run, in case this core is
# wanted; then sleep, because sched_yield starves beside a busy process. Failures are looked for while sleeping.
_SPINS = 60
_YIELD_FOR_SECONDS = 100e-6
_SLEEP_SECONDS = 50e-6
_LOOK_FOR_FAILURES_EVERY_SECONDS = 5e-3
_NEWS_SECONDS = 2.0  # how long after another rank has heard it the verdict may come

_NO_DIGEST = 0


def header_bytes(world_size: int) -> int:
    """Returns how much shared memory the barrier of that many ranks needs, in whole pages."""
    size = (world_size + 1) * _WORDS_PER_RANK * 8 + world_size * (_TEXT_BYTES + _REASON_BYTES)
    return -(-size // 4096) * 4096


class SharedBarrier:
    """A reusable barrier with agreement, abort and deadline.

    Args:
        memory: header_bytes(world_size) bytes of shared memory, zero at the start.
        rank: this rank.
        world_size: number of ranks.
        timeout_seconds: how long to wait for a rank before CollectiveTimeout.
        verdicts: the server's; asked for every few milliseconds of waiting.
    """

    def __init__(
        self,
        memory: memoryview,
        rank: int,
        world_size: int,
        timeout_seconds: float,
        verdicts: Verdicts,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._timeout_seconds = timeout_seconds
        self._verdicts = verdicts
        self._is_verdict_known = verdicts.is_known
        self._aborted = world_size * _WORDS_PER_RANK
        lines = (world_size + 1) * _WORDS_PER_RANK * 8
        self._words = memory[:lines].cast("Q")
        self._texts = _TextBoard(memory[lines : lines + world_size * _TEXT_BYTES], _TEXT_BYTES)
        self._reasons = _TextBoard(memory[lines + world_size * _TEXT_BYTES :], _REASON_BYTES)
        self._line = rank * _WORDS_PER_RANK
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self._arrivals = [peer * _WORDS_PER_RANK + _ARRIVALS for peer in self._peers]
        self.round = 0  # the last one that this rank arrived at
        self._completed = 0  # the last one that this rank saw all arrive at

    @property
    def next_parity(self) -> int:
        """Which of two buffers the next round uses.

        A buffer is written again two rounds later, which a rank enters only after all have left the round between,
        and so are done with reading it.
        """
        return (self.round + 1) & 1

    def meet(self, agreement: Agreement) -> None:
        """Waits until every rank has arrived, and compares what they are about to do.

        Raises:
            PlanMismatch: on every rank, when any two digests differ.
            RankFailed: a rank closed or aborted the communicator, or died.
            CollectiveTimeout: a rank did not arrive before the deadline.
        """
        self._arrive(agreement.digest)
        words = self._words
        digest_word = _DIGESTS + (self.round & 1)
        for peer in self._peers:
            if words[peer * _WORDS_PER_RANK + digest_word] != agreement.digest:
                self._raise_mismatch(agreement)

    def _arrive(self, digest: int) -> None:
        words = self._words
        self.round = arrived = self.round + 1
        words[self._line + _DIGESTS + (arrived & 1)] = digest
        words[self._line + _ARRIVALS] = arrived  # publishes the digest and all data written before
        deadline = 0.0
        for arrivals in self._arrivals:
            if words[arrivals] < arrived:
                # One deadline for all, made only where there is something to wait for.
                deadline = deadline or time.monotonic() + self._timeout_seconds
                self._wait_for(arrivals, deadline)
        if words[self._aborted]:  # a late rank must not take the arrival of one that has given up for success
            self._look_for_aborts()
        self._completed = arrived

    def _wait_for(self, arrivals: int, deadline: float) -> None:
        words, wanted = self._words, self.round
        if self._is_verdict_known():  # heard of by another thread; where nobody waits for long, nobody looks
            self._look_for_failures(0.0)
        for _ in range(_SPINS):
            if words[arrivals] >= wanted:
                return
        now = time.monotonic()
        sleep_from = now + _YIELD_FOR_SECONDS
        look_at = now + _LOOK_FOR_FAILURES_EVERY_SECONDS
        while words[arrivals] < wanted:
            if now < sleep_from:
                os.sched_yield()
            else:
                time.sleep(_SLEEP_SECONDS)
            now = time.monotonic()
            if now >= look_at:
                look_at = now + _LOOK_FOR_FAILURES_EVERY_SECONDS
                self._look_for_failures(now - deadline + self._timeout_seconds)

    def _look_for_failures(self, waited_seconds: float) -> None:
        missing = self._missing()
        if self._words[self._line + _STATE] != _OPEN:  # by another thread of this process
            raise RankFailed(
                f"rank {self._rank}/{self._world_size}: the communicator was closed or aborted during a collective",
                rank=self._rank,
                phase="collective",
            )
        try:
            self._verdicts.check()
        except (RankFailed, CollectiveTimeout):
            # Who arrived here before it failed has done its part of this round: the next one will tell.
            if self._missing():
                raise
        for peer in missing:
            state = self._words[peer * _WORDS_PER_RANK + _STATE]
            # A rank may arrive and then close: its arrival is read again after its state.
            if state == _CLOSED and self._words[peer * _WORDS_PER_RANK + _ARRIVALS] < self.round:
                self._raise_failed(
                    peer,
                    f"rank {peer} closed the communicator while this rank still needed it; "
                    "do all ranks make the same number of steps?",
                )
        self._look_for_aborts()
        if missing and waited_seconds >= self._timeout_seconds:
            # First here: a rank that comes now must not take the round for complete, and go on beside the verdict.
            self._announce(_CONDEMNED, f"waited {waited_seconds:.3g} s for ranks {missing}", missing[0])
            self._verdicts.give_up(waited_seconds, missing)
        if missing:
            self._verdicts.warn(waited_seconds, missing)

    def _look_for_aborts(self) -> None:
        """Raises when a rank gave up in this round or an earlier one, even if it had arrived."""
        for peer in self._peers:
            line = peer * _WORDS_PER_RANK
            state = self._words[line + _STATE]
            if state in (_ABORTED, _CONDEMNED) and self._words[line + _GAVE_UP_AT] <= self.round:
                if state == _CONDEMNED:
                    self._verdicts.await_news(_NEWS_SECONDS)
                self._verdicts.check()  # what the server says is the same on every rank
                reason = self._reasons.read(peer).decode(errors="replace")
                self._raise_failed(self._words[line + _CULPRIT], f"rank {peer} aborted: {reason}")

    def _missing(self) -> list[int]:
        return [p for p in self._peers if self._words[p * _WORDS_PER_RANK + _ARRIVALS] < self.round]

    def _raise_failed(self, culprit: int, what: str) -> None:
        raise RankFailed(f"rank {self._rank}/{self._world_size}: {what}", rank=culprit, phase="collective")

    def _raise_mismatch(self, agreement: Agreement) -> None:
        """Exchanges descriptions, so that every rank can raise the same error.

        First a checksum of each line, from which all ranks find the first that differs; then the text from there on,
        because the whole may be too long.
        """
        headline, *lines = agreement.describe().splitlines() or [""]
        self._texts.write(self._rank, b"".join(crc32(line.encode()).to_bytes(4, "little") for line in lines))
        self._arrive(_NO_DIGEST)
        sums = [self._texts.read(rank) for rank in range(self._world_size)]
        first = first_difference([[part[i : i + 4] for i in range(0, len(part), 4)] for part in sums])
        self._arrive(_NO_DIGEST)  # until here the others read this rank's checksums
        self._texts.write(self._rank, "\n".join([headline, *lines[first:]]).encode(errors="backslashreplace"))
        self._arrive(_NO_DIGEST)
        texts = {rank: self._texts.read(rank).decode(errors="replace") for rank in range(self._world_size)}
        descriptions = {rank: Description.parse(text, first) for rank, text in texts.items()}
        raise mismatch(f"rank {self._rank}/{self._world_size}", agreement.event, descriptions)

    def announce_closed(self) -> None:
        """Tells the others that this rank will not come again; earlier arrivals still count."""
        self._words[self._line + _STATE] = _CLOSED

    def announce_abort(self, reason: str, culprit: int | None = None) -> None:
        """Makes every rank that waits, now or later, raise RankFailed with the reason.

        Args:
            reason: told to all.
            culprit: the rank whose failure this is; None is this rank.
        """
        state = _CONDEMNED if self._verdicts.was_heard else _ABORTED
        self._announce(state, reason, self._rank if culprit is None else culprit)

    def _announce(self, state: int, reason: str, culprit: int) -> None:
        self._reasons.write(self._rank, reason.encode(errors="backslashreplace"))
        self._words[self._line + _GAVE_UP_AT] = self._completed + 1
        self._words[self._line + _CULPRIT] = culprit
        self._words[self._line + _STATE] = state
        self._words[self._aborted] = 1

    def release(self) -> None:
        """Lets go of the shared memory; the barrier cannot be used afterwards."""
        self._texts.release()
        self._reasons.release()
        self._words.release()


class _TextBoard:
    """One short text for each rank in shared memory: a length, then bytes."""

    def __init__(self, memory: memoryview, bytes_per_rank: int) -> None:
        self._memory = memory
        self._bytes_per_rank = bytes_per_rank

    def write(self, rank: int, text: bytes) -> None:
        data = text[: self._bytes_per_rank - 4]
        begin = rank * self._bytes_per_rank
        self._memory[begin + 4 : begin + 4 + len(data)] = data
        self._memory[begin : begin + 4] = len(data).to_bytes(4, "little")

    def read(self, rank: int) -> bytes:
        begin = rank * self._bytes_per_rank
        length = int.from_bytes(self._memory[begin : begin + 4], "little")
        return bytes(self._memory[begin + 4 : begin + 4 + length])

    def release(self) -> None:
        self._memory.release()
