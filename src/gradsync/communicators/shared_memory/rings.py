"""The memory through which ranks hand each other arrays: for each rank a ring of regions, taken in turn by the rounds.

A rank writes into its own regions only; once all have met, the others read there. A region is written again when all
have met twice since, and so are done with reading. Two would do, but then a rank would rewrite memory that another core
has just read, which makes the processor take each line back first. The number of the round says which region, so that
all ranks know it. The smallest amounts, which are not worth that, lie at one of two places beside each other.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from gradsync.communicators.pieces import CACHE_LINE_BYTES
from gradsync.communicators.shared_memory.barrier import SharedBarrier
from gradsync.communicators.shared_memory.pages import whole_pages
from gradsync.reduction import Array

#: What takes no more than this lies at one of two places, in turn.
HOT_BYTES = 16 * 1024

_REGIONS = 4

Rings = tuple[Array, ...]  # [rank] -> all its regions as one 1-D array


class SharedRings:
    """The regions of all ranks of a communicator, as one of them uses them.

    Args:
        memory: begins with bytes_for(world_size, round_bytes) bytes of shared memory.
        world_size: number of ranks.
        round_bytes: the largest region; a multiple of every item size.
        barrier: where the ranks meet.

    Attributes:
        bytes: how much of the memory they take.
    """

    def __init__(self, memory: memoryview, world_size: int, round_bytes: int, barrier: SharedBarrier) -> None:
        self.bytes = self.bytes_for(world_size, round_bytes)
        self._memory = memory[: self.bytes]
        self._world_size = world_size
        self._round_bytes = round_bytes
        self._barrier = barrier
        self._rings: dict[np.dtype[Any], Rings] = {}

    @staticmethod
    def bytes_for(world_size: int, round_bytes: int) -> int:
        """Returns how much memory the regions of that many ranks take, in whole pages."""
        return world_size * whole_pages(2 * HOT_BYTES + _REGIONS * round_bytes)

    def next_place(self, size_bytes: int) -> int:
        """Returns where each rank's region of the next round begins, in bytes: a multiple of every item size.

        Args:
            size_bytes: what the largest part needs; the same on all ranks.
        """
        if size_bytes <= HOT_BYTES:
            return self._barrier.next_parity * HOT_BYTES
        return 2 * HOT_BYTES + (self._barrier.round + 1) % _REGIONS * self._round_bytes

    def hot(self, dtype: np.dtype[Any], size: int) -> list[list[Array]]:
        """Returns [next_parity of the barrier][rank] -> the region of a round, for regions of at most HOT_BYTES."""
        begins = [parity * HOT_BYTES // dtype.itemsize for parity in (0, 1)]
        return [[ring[begin : begin + size] for ring in self.of(dtype)] for begin in begins]

    def of(self, dtype: np.dtype[Any]) -> Rings:
        """Returns the regions, by rank, as arrays of a dtype of 1, 2, 4, 8 or 16 bytes."""
        rings = self._rings.get(dtype)
        if rings is None:
            whole = np.frombuffer(self._memory, np.uint8).reshape(self._world_size, -1)
            rings = self._rings[dtype] = tuple([ring.view(dtype) for ring in whole])
        return rings

    def release(self) -> None:
        """Lets go of the memory."""
        self._rings.clear()
        with contextlib.suppress(BufferError):  # see ShmBackend.release
            self._memory.release()


def share_begin(owner: int, reader: int, size_bytes: int) -> int:
    """Returns where in a rank's region the share of another rank begins, among equal ones, each on lines of its own."""
    return (reader if reader < owner else reader - 1) * (-(-size_bytes // CACHE_LINE_BYTES) * CACHE_LINE_BYTES)


def shares_bytes(world_size: int, size_bytes: int) -> int:
    """Returns what a region takes that has a share for each of the other ranks."""
    return share_begin(0, world_size, size_bytes)
