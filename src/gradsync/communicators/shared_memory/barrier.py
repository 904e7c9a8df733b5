"""The meeting point of the ranks of a shared-memory communicator.

A rank arrives by storing the number of the round in its line of waiting.py. The 64-bit digest of what it is
about to do lies in the same line, so that comparing the ranks' plans costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NoReturn
from zlib import crc32

from gradsync.communicators.agreement import Agreement, Description, first_difference, mismatch
from gradsync.communicators.shared_memory.pages import whole_pages
from gradsync.communicators.shared_memory.waiting import (
    SPINS,
    WORDS_PER_RANK,
    Rests,
    SharedWaiting,
    TextBoard,
    waiting_bytes,
)
from gradsync.communicators.verdicts import Verdicts

# Words of a rank's line.
_ARRIVALS = 0  # the number of the last round that the rank has arrived at
_DIGESTS = 1  # two words, even and odd rounds: a fast rank may be one round ahead of a slow reader, never two
_TEXT_BYTES = 16384  # description of the collective, for PlanMismatch

_NO_DIGEST = 0


def header_bytes(world_size: int) -> int:
    """Returns how much shared memory the barrier of that many ranks needs, in whole pages."""
    size = waiting_bytes(world_size) + world_size * _TEXT_BYTES
    return whole_pages(size)


class SharedBarrier:
    """A reusable barrier with agreement, abort and deadline.

    Args:
        memory: header_bytes(world_size) bytes of shared memory, zero at the start.
        rank: this rank.
        world_size: number of ranks.
        timeout_seconds: how long to wait for a rank before CollectiveTimeout.
        verdicts: the server's; asked for every few milliseconds of waiting.
        ranks: the numbers of all ranks in the world, by which errors name them; None where they are the same.
        label: this rank in errors; None is "rank 0/2".

    Attributes:
        waiting: the same ranks where they wait for something else than all of them, and how they end.
        round: the number of the last round that this rank arrived at.
    """

    def __init__(
        self,
        memory: memoryview,
        rank: int,
        world_size: int,
        timeout_seconds: float,
        verdicts: Verdicts,
        *,
        ranks: Sequence[int] | None = None,
        label: str | None = None,
    ) -> None:
        self._rank = rank
        self._ranks = tuple(range(world_size) if ranks is None else ranks)
        self._label = f"rank {rank}/{world_size}" if label is None else label
        of_waiting = waiting_bytes(world_size)
        self.waiting = SharedWaiting(memory[:of_waiting], rank, self._ranks, self._label, timeout_seconds, verdicts)
        self._words = self.waiting.words
        self._aborted = self.waiting.aborted
        self._texts = TextBoard(memory[of_waiting : of_waiting + world_size * _TEXT_BYTES], _TEXT_BYTES)
        self._line = rank * WORDS_PER_RANK
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self._arrivals = [peer * WORDS_PER_RANK + _ARRIVALS for peer in self._peers]
        self.round = 0

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
            if words[peer * WORDS_PER_RANK + digest_word] != agreement.digest:
                self._raise_mismatch(agreement)

    def arrive(self) -> None:
        """Tells the others that this rank has come to the next round, and waits for nobody.

        Between meetings for one collective, on which the ranks have agreed: nothing is compared. `await_round` of the
        round before, at the latest, must come before the next.
        """
        self.round += 1
        self._words[self._line + _ARRIVALS] = self.round  # publishes all data written before

    def await_round(self, number: int) -> None:
        """Waits until every rank has arrived at a round, at which this rank has.

        Raises:
            RankFailed, CollectiveTimeout: as for meet.
        """
        words = self._words
        began = 0.0
        for arrivals in self._arrivals:
            if words[arrivals] < number:
                # One deadline for all, and a clock only where there is something to wait for.
                began = began or time.monotonic()
                self._wait_for(arrivals, number, began)
        if words[self._aborted]:  # a late rank must not take the arrival of one that has given up for success
            self.waiting.look_for_aborts(number)
        self.waiting.completed = number

    def meet_in_disagreement(self, agreement: Agreement) -> NoReturn:
        """Arrives at a round that others have entered, to do something else than they: raises that on every rank.

        Args:
            agreement: on what this rank is about to do; differs from that of another rank in the round.

        Raises:
            PlanMismatch, RankFailed, CollectiveTimeout: as for meet.
        """
        self._arrive(agreement.digest)
        self._raise_mismatch(agreement)

    def is_ahead(self, peer: int) -> bool:
        """Whether a rank has arrived at a round that this rank has not: it waits there until this one comes."""
        return self._words[peer * WORDS_PER_RANK + _ARRIVALS] > self.round

    def _arrive(self, digest: int) -> None:
        self._words[self._line + _DIGESTS + ((self.round + 1) & 1)] = digest
        self.arrive()
        self.await_round(self.round)

    def _wait_for(self, arrivals: int, wanted: int, began: float) -> None:
        words = self._words
        look_for_failures = self.waiting.look_for_failures

        def missing() -> list[int]:
            return [peer for peer in self._peers if words[peer * WORDS_PER_RANK + _ARRIVALS] < wanted]

        if self.waiting.is_verdict_known():  # heard of by another thread; where nobody waits for long, nobody looks
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

        First a checksum of each line, from which all ranks find the first that differs; then the text from there on,
        because the whole may be too long.
        """
        place, _, described = agreement.text_for_others().partition("\n")
        headline, *lines = described.splitlines() or [""]
        self._texts.write(self._rank, b"".join(crc32(line.encode()).to_bytes(4, "little") for line in lines))
        self._arrive(_NO_DIGEST)
        sums = [self._texts.read(rank) for rank in range(len(self._ranks))]
        first = first_difference([[part[i : i + 4] for i in range(0, len(part), 4)] for part in sums])
        self._arrive(_NO_DIGEST)  # until here the others read this rank's checksums
        self._texts.write(self._rank, "\n".join([place, headline, *lines[first:]]).encode(errors="backslashreplace"))
        self._arrive(_NO_DIGEST)
        texts = {number: self._texts.read(rank).decode(errors="replace") for rank, number in enumerate(self._ranks)}
        descriptions = {number: Description.parse(text, first) for number, text in texts.items()}
        raise mismatch(self._label, agreement, descriptions)

    def announce_closed(self) -> None:
        """Tells the others that this rank will not come again; earlier arrivals still count."""
        self.waiting.announce_closed()

    def announce_abort(self, reason: str, culprit: int | None = None) -> None:
        """Makes every rank that waits, now or later, raise RankFailed; arguments as for SharedWaiting."""
        self.waiting.announce_abort(reason, culprit)

    def release(self) -> None:
        """Lets go of the shared memory; the barrier cannot be used afterwards."""
        self._texts.release()
        self.waiting.release()
