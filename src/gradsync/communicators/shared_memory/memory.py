"""The shared memory of a communicator: what a rank's part consists of, and this rank's view of all parts.

Each rank owns a part. The others read all of it, and write only into its slots. A part consists of

- a cache line of words about this rank: its arrivals at the barrier, the digests that it brought, and its end;
- a second line: a word that belongs to all ranks, in the part of rank 0; how many ranks sleep until this one arrives,
  which is for the C kernels; and the factors that it brought;
- the text with the reason of an abort;
- two cache lines for each rank: for the messages to it, and for those from it;
- SLOTS slots, through which the collectives move arrays;
- a ring for the messages to each other rank.

On x86-64, other cores see aligned 8-byte stores in program order. The barrier and the messages rely on that alone: what
a rank wrote before it arrived, or before it counted a piece, is seen by whoever sees the arrival or the count. On other
processors the kernels in C see to the order, and Python code calls `fence` where the order counts.

A collective goes in rounds of the barrier (`meet`). Round r uses the slots number r % SLOTS. Before a rank writes into
its slot again, all have arrived at a later round, and so have read what was there.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np

from gradsync.communicators.shared_memory.channels import PIECES, Channel
from gradsync.communicators.shared_memory.compiled import compiled
from gradsync.reduction import Array

LINE_BYTES = 64
LINE_WORDS = LINE_BYTES // 8

# The words of a rank's line. There are two words for digests and two for layouts, for even and odd rounds: a fast rank
# may have arrived at the next round while a slow one still reads what it brought to this one.
ARRIVED, DIGEST, LAYOUT, STATE, CULPRIT, ABORTED_AT = 0, 1, 3, 5, 6, 7
#: The first word of the common line. It is not zero once any rank has aborted.
ABORTED = LINE_WORDS
#: The words of a rank's second line for its factors in even and odd rounds, as float64.
FACTOR = LINE_WORDS + 2
#: The words of the text with the reason of an abort.
TEXT_BEGIN, TEXT_END = 2 * LINE_WORDS, 18 * LINE_WORDS
_CHANNELS_BEGIN = TEXT_END

#: A round writes one slot while others may still read that of the round before.
SLOTS = 2
_LEAST_RING_BYTES = 16 * 1024


def _slots_begin(size: int) -> int:
    """Returns where the slots begin: half a page off.

    The data of large NumPy arrays begin 16 bytes after a page. Some processors (AMD Zen 3) copy ten times slower if the
    target lies 1 to 63 bytes after the source, modulo the page size.
    """
    words_end = 8 * _CHANNELS_BEGIN + 2 * size * LINE_BYTES
    return -(-words_end // mmap.PAGESIZE) * mmap.PAGESIZE + mmap.PAGESIZE // 2


def _ring_bytes(size: int, slot_bytes: int) -> int:
    unit = PIECES * LINE_BYTES
    return max(4 * slot_bytes // max(size - 1, 1), _LEAST_RING_BYTES) // unit * unit


def _is_crowded(size: int) -> bool:
    """Whether there are more ranks than cores, so that a rank in C that waits gives its core to others."""
    return size > len(os.sched_getaffinity(0))


def part_bytes(size: int, slot_bytes: int) -> int:
    """Returns the number of bytes, in whole pages, of the part of each of `size` ranks."""
    end = _slots_begin(size) + SLOTS * slot_bytes + (size - 1) * _ring_bytes(size, slot_bytes)
    return -(-end // mmap.PAGESIZE) * mmap.PAGESIZE


class _Plain:
    """What `compiled.Memory` is, without C."""

    def __init__(
        self, mapping: mmap.mmap, rank: int, size: int, part: int, slots_begin: int, slot_bytes: int, is_crowded: bool
    ) -> None:
        self.rank = rank
        self.size = size
        self.slot_bytes = slot_bytes
        self.rounds = 0

    def release(self) -> None:
        """Gives back the memory."""


_Memory: Any = _Plain if compiled is None else compiled.Memory


class Shared(_Memory):  # type: ignore[misc]  # one of two
    """The shared memory of a communicator, as one rank sees it.

    Args:
        mapping: the parts of all ranks, initially zero.
        rank, size: this rank's number, and the number of ranks.
        slot_bytes: the size of a slot, a multiple of the page size.

    Attributes:
        rank, size, slot_bytes: see Args.
        words: the memory as 8-byte words.
        lines: the index of the first word of each rank's part.
        rounds: how many rounds of the barrier this rank has completed.
    """

    def __init__(self, mapping: mmap.mmap, rank: int, size: int, slot_bytes: int) -> None:
        own = part_bytes(size, slot_bytes), _slots_begin(size), slot_bytes
        super().__init__(mapping, rank, size, *own, _is_crowded(size))
        self.words = memoryview(mapping).cast("Q")
        self._part_bytes = part_bytes(size, slot_bytes)
        self.lines = [each * self._part_bytes // 8 for each in range(size)]
        self.arrivals = [line + ARRIVED for each, line in enumerate(self.lines) if each != rank]
        self._bytes = np.frombuffer(mapping, np.uint8)
        self._slots: dict[np.dtype[Any], list[list[Array]]] = {}
        self._scratch = np.empty(slot_bytes, np.uint8)

    def slots(self, dtype: np.dtype[Any]) -> list[Array]:
        """Returns the slots of all ranks for the next round, as arrays of the dtype."""
        if dtype not in self._slots:
            begin, length = _slots_begin(self.size), self.slot_bytes
            self._slots[dtype] = [
                [self._of_rank(rank, begin + number * length, length).view(dtype) for rank in range(self.size)]
                for number in range(SLOTS)
            ]
        return self._slots[dtype][(self.rounds + 1) % SLOTS]

    def scratch(self, dtype: np.dtype[Any], size: int) -> Array:
        """Returns private memory for up to a slot's elements."""
        return self._scratch.view(dtype)[:size]

    def channel(self, sender: int, receiver: int) -> Channel:
        """Returns this rank's side of the channel for the messages between two ranks; it is one of them."""
        of_sender = self.lines[sender] + _CHANNELS_BEGIN + receiver * LINE_WORDS
        of_receiver = self.lines[receiver] + _CHANNELS_BEGIN + (self.size + sender) * LINE_WORDS
        own, other = (of_sender, of_receiver) if self.rank == sender else (of_receiver, of_sender)
        ring_bytes = _ring_bytes(self.size, self.slot_bytes)
        place = (receiver - sender - 1) % self.size
        begin = _slots_begin(self.size) + SLOTS * self.slot_bytes + place * ring_bytes
        ring = self._of_rank(sender, begin, ring_bytes).reshape(PIECES, -1)
        return Channel(self.words, own, other, list(ring), self.rank == sender)

    def release(self) -> None:
        """Drops the references to the memory, even if something still refers to this object."""
        words = self.words
        self.__dict__.clear()
        words.release()
        super().release()

    def _of_rank(self, rank: int, begin: int, size: int) -> Array:
        begin += rank * self._part_bytes
        return self._bytes[begin : begin + size]
