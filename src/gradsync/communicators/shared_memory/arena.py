"""The staging memory of a shared-memory communicator, and what else every collective of it works with.

Ranks hand each other arrays through rings: for each rank one of some regions, taken in turn by the rounds. A rank
writes into its own regions only; once all have met, the others read there. A region is written again when all have met
twice since, and so are done with reading. Two would do, but then a rank would rewrite memory that another core has just
read, which makes the processor take each line back first. The number of the round says which region, so that all ranks
know it. The smallest amounts, which are not worth that, lie at one of two places beside each other.

The chunks of large lists go through slots, of which others write the results back into: see pipelined.py.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import numpy as np

from gradsync.communicators.nonfinite import NonFiniteFinder
from gradsync.communicators.pieces import CACHE_LINE_BYTES
from gradsync.communicators.shared_memory.barrier import SharedBarrier
from gradsync.communicators.shared_memory.segment import whole_pages
from gradsync.diagnostics import FlightRecorder
from gradsync.reduction import Array, accumulation_dtype

#: What takes no more than this lies at one of two places, in turn.
HOT_BYTES = 16 * 1024

_REGIONS = 4

#: Chunks of a large list between their publication and the end of their delivery: as many slots has a rank.
CHUNKS_IN_FLIGHT = 4

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


SlotArrays = tuple[tuple[Array, ...], ...]  # [number][rank] -> 1-D array in shared memory


class Slots:
    """Some buffers of a fixed size for each rank in shared memory, used in turn, as arrays of any dtype.

    Args:
        memory: begins with room for them.
        world_size: number of ranks.
        slot_bytes: size of one buffer.

    Attributes:
        bytes: how much of the memory they take.
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
        """Returns how much memory the slots take, with the flags behind them in whole pages."""
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
        """Lets go of the memory."""
        self._arrays.clear()
        self.flags.clear()
        with contextlib.suppress(BufferError):  # see ShmBackend.release
            self._memory.release()


class Scratch:
    """Private memory for one chunk, as arrays of any dtype; allocated once.

    Args:
        size_bytes: of a chunk.
    """

    def __init__(self, size_bytes: int) -> None:
        self._own = np.empty(size_bytes, np.uint8)
        self._result = np.empty(size_bytes, np.uint8)
        self._accumulator = np.empty(0, np.float32)

    def own(self, dtype: np.dtype[Any], length: int) -> Array:
        """Returns room for this rank's contribution."""
        return self._own[: length * dtype.itemsize].view(dtype)

    def result(self, dtype: np.dtype[Any], length: int) -> Array:
        """Returns room for a result that does not go straight to where it belongs."""
        return self._result[: length * dtype.itemsize].view(dtype)

    def accumulator(self, dtype: np.dtype[Any], length: int) -> Array | None:
        """Returns room for half precision to add up in, or None where the dtype adds up in itself."""
        if accumulation_dtype(dtype) == dtype:
            return None
        if self._accumulator.size < length:
            self._accumulator = np.empty(length, np.float32)
        return self._accumulator[:length]


class Workplace(NamedTuple):
    """One rank's place in a communicator: who it is, where it meets the others, the memory, how much goes at a time.

    Attributes:
        rank: this rank.
        world_size: number of ranks.
        barrier: where the ranks meet.
        rings: the shared memory.
        small_bytes: up to this size arrays are all-reduced all at once.
        chunk_bytes: of a larger list that is all-reduced, what is published between two rounds of the barrier.
        round_bytes: how much of an array that is moved, or reduced on one rank, goes through a ring at a time.
        share_bytes: likewise, of each of the parts of an array that are for different ranks.
        recorder: the communicator's.
        finder: takes note of what is not finite, where that is looked for.
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

    def peers(self) -> list[int]:
        """Returns the other ranks, the next one first: not all of them read the same ring at once."""
        return [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
