"""The memory through which ranks hand each other arrays: a ring for each rank, in which it moves on with every round.

A rank writes into its own ring only; once all have met, the others read there. A place is written again when all have
met twice since, and so are done with reading; but why a ring, and no fixed buffers used in turn? Rewriting memory
that another core has just read makes the processor take each line back first. A virtual machine does that at 9 GB/s,
and for seconds on end, whenever its memory is in another mode, at 2; what a core has not touched for a while is written
at 25. So a rank goes round a short ring, which stays in the caches, or, while it finds that writing is slow, a long
one, from which the lines have left the other caches before they are written again.

Each rank chooses its own places, and tells them at the barrier. Only the smallest regions, which are not worth that,
lie at places that all know.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gradsync.communicators.pieces import CACHE_LINE_BYTES
from gradsync.communicators.shared_memory.barrier import SharedBarrier
from gradsync.communicators.shared_memory.pages import whole_pages
from gradsync.reduction import Array

#: Regions up to here lie at one of two places, in turn.
HOT_BYTES = 16 * 1024

_LONG_BYTES = 16 * 1024**2  # what the others together read before a place is written again: some times their caches
_REGIONS_OF_A_SHORT_RING = 4  # of the largest: three, so that those of two rounds never meet, and one to stay fast
_JUDGED_FROM_BYTES = 64 * 1024
_SLOW_BYTES_PER_SECOND = 3e9
_SLOW_IN_A_ROW = 6  # a process that was interrupted is slow too, but not again and again
_STAY_LONG_SECONDS = 0.25  # before the short ring is tried again

Rings = tuple[Array, ...]  # [rank] -> its whole ring as a 1-D array


class SharedRings:
    """The rings of all ranks of a communicator, as one of them uses them.

    Args:
        memory: begins with bytes_for(world_size, round_bytes) bytes of shared memory.
        world_size: number of ranks.
        round_bytes: the largest region.
        barrier: where the ranks meet.
        rank: this rank.
        allocate: makes sure that these bytes of the memory, (begin, end), can be written to; returns whether they can.

    Attributes:
        bytes: how much of the memory the rings take.
    """

    def __init__(
        self,
        memory: memoryview,
        world_size: int,
        round_bytes: int,
        barrier: SharedBarrier,
        rank: int,
        allocate: Callable[[int, int], bool],
    ) -> None:
        self.bytes = self.bytes_for(world_size, round_bytes)
        self._memory = memory[: self.bytes]
        self._world_size = world_size
        self._barrier = barrier
        self._ring_bytes = self.bytes // world_size
        self._rank = rank
        self._allocate: Callable[[int, int], bool] | None = allocate  # None once it has been done, or cannot be
        self._short_bytes = _short_bytes(round_bytes)
        self._longest_bytes = self._ring_bytes
        self._in_use_bytes = self._short_bytes
        self._slow_in_a_row = 0
        self._short_again_at = 0.0
        self._next = 2 * HOT_BYTES
        self._hot_places = [[parity * HOT_BYTES] * world_size for parity in (0, 1)]
        self._rings: dict[np.dtype[Any], Rings] = {}

    @staticmethod
    def bytes_for(world_size: int, round_bytes: int) -> int:
        """Returns how much memory the rings of that many ranks take, in whole pages."""
        others_read_bytes = _LONG_BYTES // (world_size - 1) if world_size > 1 else 0
        rotating_bytes = max(others_read_bytes, _REGIONS_OF_A_SHORT_RING * round_bytes)
        return world_size * whole_pages(2 * HOT_BYTES + rotating_bytes)

    @classmethod
    def parts_in_use(cls, world_size: int, round_bytes: int) -> list[tuple[int, int]]:
        """Returns where the short rings lie, as (begin, end) in the rings' memory: what is used from the beginning."""
        whole_bytes = cls.bytes_for(world_size, round_bytes)
        begins = range(0, whole_bytes, whole_bytes // world_size)
        return [(begin, begin + _short_bytes(round_bytes)) for begin in begins]

    def take(self, size_bytes: int) -> int:
        """Returns where this rank's region of the next round begins, in bytes: a multiple of every item size.

        All ranks take regions of one size for a round. Its places are read before the ranks meet again.
        """
        if size_bytes <= HOT_BYTES:
            return self._barrier.next_parity * HOT_BYTES
        begin = self._next
        if begin + size_bytes > self._in_use_bytes:
            begin = 2 * HOT_BYTES
            if self._in_use_bytes > self._short_bytes and time.monotonic() >= self._short_again_at:
                self._in_use_bytes = self._short_bytes
        self._next = begin + -(-size_bytes // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
        self._barrier.post_place(begin)
        return begin

    def places(self, size_bytes: int) -> Sequence[int]:
        """Returns where the regions of the round begin in which the ranks have just met, by rank.

        Args:
            size_bytes: what all have taken for it.
        """
        if size_bytes <= HOT_BYTES:
            return self._hot_places[self._barrier.round & 1]
        return self._barrier.posted_places()

    def wrote(self, size_bytes: int, began: float) -> None:
        """Judges, by how long writing into a region took, whether the ring should be long.

        Args:
            size_bytes: how much was written.
            began: when, in time.perf_counter() seconds.
        """
        if size_bytes < _JUDGED_FROM_BYTES or self._in_use_bytes > self._short_bytes:
            return
        if size_bytes >= (time.perf_counter() - began) * _SLOW_BYTES_PER_SECOND:
            self._slow_in_a_row = 0
            return
        self._slow_in_a_row += 1
        if self._slow_in_a_row >= _SLOW_IN_A_ROW:
            self._slow_in_a_row = 0
            self._lengthen()

    def _lengthen(self) -> None:
        if self._allocate is not None:  # most programs never come here
            begin = self._rank * self._ring_bytes
            if not self._allocate(begin + self._short_bytes, begin + self._ring_bytes):
                self._longest_bytes = self._short_bytes
            self._allocate = None
        self._in_use_bytes = self._longest_bytes
        self._short_again_at = time.monotonic() + _STAY_LONG_SECONDS

    def hot(self, dtype: np.dtype[Any], size: int) -> list[list[Array]]:
        """Returns [next_parity of the barrier][rank] -> the region of a round, for regions of at most HOT_BYTES."""
        begins = [parity * HOT_BYTES // dtype.itemsize for parity in (0, 1)]
        return [[ring[begin : begin + size] for ring in self.of(dtype)] for begin in begins]

    def of(self, dtype: np.dtype[Any]) -> Rings:
        """Returns the rings, by rank, as arrays of a dtype of 1, 2, 4, 8 or 16 bytes."""
        rings = self._rings.get(dtype)
        if rings is None:
            whole = np.frombuffer(self._memory, np.uint8).reshape(self._world_size, self._ring_bytes)
            rings = self._rings[dtype] = tuple([ring.view(dtype) for ring in whole])
        return rings

    def release(self) -> None:
        """Lets go of the memory."""
        self._allocate = None
        self._rings.clear()
        with contextlib.suppress(BufferError):  # see SharedMemoryCommunicator._release
            self._memory.release()


def _short_bytes(round_bytes: int) -> int:
    return 2 * HOT_BYTES + _REGIONS_OF_A_SHORT_RING * round_bytes


def share_begin(owner: int, reader: int, size_bytes: int) -> int:
    """Returns where in a rank's region the share of another rank begins, among equal ones, each on lines of its own."""
    return (reader if reader < owner else reader - 1) * (-(-size_bytes // CACHE_LINE_BYTES) * CACHE_LINE_BYTES)


def shares_bytes(world_size: int, size_bytes: int) -> int:
    """Returns what a region takes that has a share for each of the other ranks."""
    return share_begin(0, world_size, size_bytes)
