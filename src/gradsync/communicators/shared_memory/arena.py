"""The staging memory of a shared-memory communicator.

Ranks pass arrays to each other through rings. The ring of a rank has four regions, which successive rounds of the
barrier use one after the other. A rank writes only to its own regions. After a barrier the other ranks read these
regions. The number of the round determines the region, so all ranks know it.

Two regions would be correct: before a rank writes to a region again, all ranks have arrived at the next barrier, and so
have read the region. Four are faster: with two, a rank would overwrite memory that another core has just read, and the
processor would first have to transfer each cache line back from that core. For arrays of up to 16 KB four regions bring
no gain, so a ring also has two small regions, which the ranks use alternately.

Large lists of arrays are reduced in chunks. The chunks go through slots, into which other ranks write the results: see
pipelined.py.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import numpy as np

from gradsync.communicators.host_copy import CACHE_LINE_BYTES
from gradsync.communicators.host_values import NonFiniteFinder, SumOfSquares
from gradsync.communicators.shared_memory.barrier import SharedBarrier
from gradsync.communicators.shared_memory.segment import whole_pages
from gradsync.diagnostics import FlightRecorder
from gradsync.reduction import Array

#: The size in bytes of each of the two small regions.
SMALL_REGION_BYTES = 16 * 1024

_REGIONS = 4

#: The number of slots of each rank. A chunk uses a slot from its publication in shared memory until its results are
#: copied out.
CHUNKS_IN_FLIGHT = 4

Rings = tuple[Array, ...]  # [rank] -> all regions of that rank, as one 1-D array


class SharedRings:
    """The regions of all ranks of a communicator.

    Args:
        memory: shared memory. The rings use the first bytes_for(world_size, round_bytes) bytes of this memory.
        world_size: the number of ranks.
        round_bytes: the size in bytes of each large region; a multiple of the item size of every dtype.
        barrier: the communicator's barrier.

    Attributes:
        bytes: the number of bytes that the rings use.
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
        """Returns the size in bytes of the rings of all ranks, each rounded up to whole pages."""
        return world_size * whole_pages(2 * SMALL_REGION_BYTES + _REGIONS * round_bytes)

    def next_offset(self, size_bytes: int) -> int:
        """Returns the offset of the next round's region in each ring, in bytes: a multiple of every item size.

        Args:
            size_bytes: the number of bytes of the region that the round uses; the same on all ranks.
        """
        if size_bytes <= SMALL_REGION_BYTES:
            return self._barrier.next_parity * SMALL_REGION_BYTES
        return 2 * SMALL_REGION_BYTES + (self._barrier.round + 1) % _REGIONS * self._round_bytes

    def small_regions(self, dtype: np.dtype[Any], size: int) -> list[list[Array]]:
        """Returns [parity][rank] -> the first `size` elements of the small region that rounds of this parity use."""
        begins = [parity * SMALL_REGION_BYTES // dtype.itemsize for parity in (0, 1)]
        return [[ring[begin : begin + size] for ring in self.of(dtype)] for begin in begins]

    def of(self, dtype: np.dtype[Any]) -> Rings:
        """Returns the whole ring of each rank, in rank order, as arrays of a dtype of 1, 2, 4, 8 or 16 bytes."""
        rings = self._rings.get(dtype)
        if rings is None:
            whole = np.frombuffer(self._memory, np.uint8).reshape(self._world_size, -1)
            rings = self._rings[dtype] = tuple([ring.view(dtype) for ring in whole])
        return rings

    def release(self) -> None:
        """Releases the shared memory."""
        self._rings.clear()
        with contextlib.suppress(BufferError):  # see ShmBackend.release
            self._memory.release()


def share_begin(owner: int, reader: int, size_bytes: int) -> int:
    """Returns the offset, in the region of rank `owner`, of the share that rank `reader` reads.

    All shares have the same size, and no two shares have bytes in the same cache line.
    """
    return (reader if reader < owner else reader - 1) * (-(-size_bytes // CACHE_LINE_BYTES) * CACHE_LINE_BYTES)


def shares_bytes(world_size: int, size_bytes: int) -> int:
    """Returns the size in bytes of a region with one share for each rank, except for the region's owner."""
    return share_begin(0, world_size, size_bytes)


SlotArrays = tuple[tuple[Array, ...], ...]  # [number of the slot][rank] -> the slot as a 1-D array


class Slots:
    """The slots of all ranks: buffers of a fixed size in shared memory. Successive chunks use successive slots.

    Args:
        memory: shared memory. The slots use the first bytes_for(world_size, slot_bytes) bytes of this memory.
        world_size: the number of ranks.
        slot_bytes: the size of one slot in bytes.

    Attributes:
        bytes: the number of bytes that the slots and their flags use.
        flags: [number of the slot][rank] -> a byte that only the given rank writes, and all ranks read.
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
        """Returns the size in bytes of all slots and of their flags.

        The size of the flags is rounded up to whole pages.
        """
        flags_bytes = whole_pages(CHUNKS_IN_FLIGHT * world_size)
        return CHUNKS_IN_FLIGHT * world_size * slot_bytes + flags_bytes

    def of(self, dtype: np.dtype[Any]) -> SlotArrays:
        """Returns [number of the slot][rank] -> the whole slot, as a 1-D array of the dtype."""
        arrays = self._arrays.get(dtype)
        if arrays is None:
            whole = np.frombuffer(self._memory[: self._slots_bytes], np.uint8).reshape(self._shape)
            arrays = self._arrays[dtype] = tuple(tuple(row.view(dtype) for row in half) for half in whole)
        return arrays

    def release(self) -> None:
        """Releases the shared memory."""
        self._arrays.clear()
        self.flags.clear()
        with contextlib.suppress(BufferError):  # see ShmBackend.release
            self._memory.release()


class Scratch:
    """Buffers of this process for one chunk at a time, allocated once and used as arrays of any dtype.

    Args:
        size_bytes: the size of a chunk in bytes.
    """

    def __init__(self, size_bytes: int) -> None:
        self._own = np.empty(size_bytes, np.uint8)
        self._result = np.empty(size_bytes, np.uint8)
        self._converted = np.empty(0, np.uint8)

    def own(self, dtype: np.dtype[Any], length: int) -> Array:
        """Returns a buffer for this rank's contribution to a reduction."""
        return self._own[: length * dtype.itemsize].view(dtype)

    def result(self, dtype: np.dtype[Any], length: int) -> Array:
        """Returns a buffer for a result that cannot be written directly to its target."""
        return self._result[: length * dtype.itemsize].view(dtype)

    def converted(self, dtype: np.dtype[Any], length: int) -> Array:
        """Returns a buffer in the dtype of the caller's arrays, for values that ranks exchange in a different dtype."""
        size_bytes = length * dtype.itemsize
        if self._converted.size < size_bytes:
            self._converted = np.empty(size_bytes, np.uint8)
        return self._converted[:size_bytes].view(dtype)


class ShmContext(NamedTuple):
    """The objects and sizes that every collective of a shared-memory communicator uses.

    Attributes:
        rank: the number of this rank in the communicator.
        world_size: the number of ranks.
        barrier: the communicator's barrier.
        rings: the regions of all ranks in shared memory.
        small_bytes: the largest size of an array or list that is all-reduced in one round, in bytes.
        chunk_bytes: the size of the chunks in which larger arrays and lists are all-reduced, in bytes.
        round_bytes: in a broadcast, gather, all_gather or reduce, one round moves at most this number of bytes of an
            array.
        share_bytes: in a scatter, all_to_all or reduce_scatter, one round moves at most this number of bytes for each
            rank.
        recorder: the communicator's flight recorder.
        finder: the object that collects non-finite values.
        squares: the object that adds up the squares of results.
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
        """Returns the other ranks in the order in which this rank reads their rings.

        The list begins with the next rank, so that the ranks do not all read the same ring at once.
        """
        return [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
