"""The staging memory of a shared-memory communicator.

Ranks pass arrays through rings: each rank has four regions, which the rounds use in turn. A rank writes only to its own
regions; after a barrier the others read them. Two regions would be enough, because a region is written again only after
two more barriers, when all have read it. But then a rank would overwrite memory that another core has just read, and
the processor would first have to fetch each line back. The number of the round determines the region, so all ranks know
it. For arrays of up to 16 KB, four regions are not worth it: the ranks use two small regions in turn.

The chunks of large lists use slots, into which other ranks write the results back: see pipelined.py.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import numpy as np

from gradsync.communicators.host_values import SumOfSquares
from gradsync.communicators.nonfinite import NonFiniteFinder
from gradsync.communicators.pieces import CACHE_LINE_BYTES
from gradsync.communicators.shared_memory.barrier import SharedBarrier
from gradsync.communicators.shared_memory.segment import whole_pages
from gradsync.diagnostics import FlightRecorder
from gradsync.reduction import Array

#: The size of the two small regions.
HOT_BYTES = 16 * 1024

_REGIONS = 4

#: The number of slots of a rank: the chunks between their publication and the end of their delivery.
CHUNKS_IN_FLIGHT = 4

Rings = tuple[Array, ...]  # [rank] -> all its regions, as one 1-D array


class SharedRings:
    """The regions of all ranks of a communicator.

    Args:
        memory: shared memory; the first bytes_for(world_size, round_bytes) bytes are used.
        world_size: number of ranks.
        round_bytes: the size of a large region; a multiple of every item size.
        barrier: the communicator's barrier.

    Attributes:
        bytes: the number of bytes used.
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
        """Returns the size of all regions, in whole pages."""
        return world_size * whole_pages(2 * HOT_BYTES + _REGIONS * round_bytes)

    def next_place(self, size_bytes: int) -> int:
        """Returns the offset of each rank's region for the next round, in bytes: a multiple of every item size.

        Args:
            size_bytes: the size of the largest part; the same on all ranks.
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
        """Releases the memory."""
        self._rings.clear()
        with contextlib.suppress(BufferError):  # see ShmBackend.release
            self._memory.release()


def share_begin(owner: int, reader: int, size_bytes: int) -> int:
    """Returns the offset of `reader`'s share in the region of `owner`; shares have equal sizes and own cache lines."""
    return (reader if reader < owner else reader - 1) * (-(-size_bytes // CACHE_LINE_BYTES) * CACHE_LINE_BYTES)


def shares_bytes(world_size: int, size_bytes: int) -> int:
    """Returns the size of a region with a share for each of the other ranks."""
    return share_begin(0, world_size, size_bytes)


SlotArrays = tuple[tuple[Array, ...], ...]  # [number][rank] -> 1-D array in shared memory


class Slots:
    """Buffers of a fixed size for each rank in shared memory, used in turn, as arrays of any dtype.

    Args:
        memory: shared memory; the first bytes_for(world_size, slot_bytes) bytes are used.
        world_size: number of ranks.
        slot_bytes: size of one buffer.

    Attributes:
        bytes: the number of bytes used.
        flags: [number][rank] -> a byte that the rank writes and all read.
    """

    def __init__(self, memory: memoryview, world_size: int, slot_bytes: int) -> None:
        self.bytes = self.bytes_for(world_size, slot_bytes)
        self._memory = memory[: self.bytes]
        self._shape = (CHUNKS_IN_FLIGHT, world_size, slot_bytes)
        self._slots_bytes = CHUNKS_IN_FLIGHT * world_size * slot_bytes
        behind = self._memory[self._slots_bytes :]
        self.flags = [behind[number * world_size :][:world_size] for number in range(CHUNKS_IN_FLIGHT)]
        self._arrays: dict[np.dtype[Any], SlotArrays] = {}

    @staticmethod
    def bytes_for(world_size: int, slot_bytes: int) -> int:
        """Returns the size of the slots, and of the flags after them in whole pages."""
        flags_bytes = whole_pages(CHUNKS_IN_FLIGHT * world_size)
        return CHUNKS_IN_FLIGHT * world_size * slot_bytes + flags_bytes

    def of(self, dtype: np.dtype[Any]) -> SlotArrays:
        """Returns [number][rank] -> the whole buffer as a 1-D array."""
        arrays = self._arrays.get(dtype)
        if arrays is None:
            whole = np.frombuffer(self._memory[: self._slots_bytes], np.uint8).reshape(self._shape)
            arrays = self._arrays[dtype] = tuple(tuple(row.view(dtype) for row in half) for half in whole)
        return arrays

    def release(self) -> None:
        """Releases the memory."""
        self._arrays.clear()
        self.flags.clear()
        with contextlib.suppress(BufferError):  # see ShmBackend.release
            self._memory.release()


class Scratch:
    """Private memory for one chunk, as arrays of any dtype; allocated once.

    Args:
        size_bytes: size of a chunk.
    """

    def __init__(self, size_bytes: int) -> None:
        self._own = np.empty(size_bytes, np.uint8)
        self._result = np.empty(size_bytes, np.uint8)
        self._converted = np.empty(0, np.uint8)

    def own(self, dtype: np.dtype[Any], length: int) -> Array:
        """Returns an array for this rank's contribution."""
        return self._own[: length * dtype.itemsize].view(dtype)

    def result(self, dtype: np.dtype[Any], length: int) -> Array:
        """Returns an array for a result that cannot be written directly to its target."""
        return self._result[: length * dtype.itemsize].view(dtype)

    def converted(self, dtype: np.dtype[Any], length: int) -> Array:
        """Returns an array for values in the dtype of the callers' arrays, if they travel in another form."""
        size_bytes = length * dtype.itemsize
        if self._converted.size < size_bytes:
            self._converted = np.empty(size_bytes, np.uint8)
        return self._converted[:size_bytes].view(dtype)


class ShmContext(NamedTuple):
    """The objects and sizes that every collective of a shared-memory communicator uses.

    Attributes:
        rank: this rank.
        world_size: number of ranks.
        barrier: the communicator's barrier.
        rings: the regions in shared memory.
        small_bytes: the largest array that is all-reduced in one shot.
        chunk_bytes: the size of the chunks in which larger lists are all-reduced.
        round_bytes: the part of an array that goes through a ring in one round, in movements and in reductions to one
            rank.
        share_bytes: the same for each part of an array whose parts are for different ranks.
        recorder: the communicator's flight recorder.
        finder: collects non-finite values.
        squares: adds up the squares of results.
    """

    rank: int
    world_size: int
    barrier: SharedBarrier
    rings: SharedRings
    small_bytes: int
    chunk_bytes: int
    round_bytes: int
    share_bytes: int
    recorder: FlightRecorder
    finder: NonFiniteFinder
    squares: SumOfSquares

    def peers(self) -> list[int]:
        """Returns the other ranks, the next rank first, so that not all ranks read the same ring at once."""
        return [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
