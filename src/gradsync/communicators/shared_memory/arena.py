"""The shared memory of a communicator: its areas, and the memory and objects that all collectives use.

Ranks pass arrays to each other through five slots. Each slot has a buffer for each rank. A collective that moves data
in rounds uses one slot in each round of the barrier: a rank writes to its own buffer, and after the barrier the other
ranks read from this buffer. The number of the round determines the slot, so all ranks know the slot.

Two slots would be correct for rounds: before a rank writes to a buffer again, all ranks have arrived at the next
barrier, and so have read the buffer. Four slots are faster. With two slots, a rank would overwrite memory that another
core has just read, and the processor would first have to transfer each cache line back from that core.

Large lists of arrays are all-reduced in chunks (see all_reduce.py). A chunk also uses a slot, into which other ranks
write the results. A rank publishes the first chunk before any barrier of its collective, so the first chunk uses slot
0, which no round uses. Messages between two ranks also use slot 0 (see point_to_point.py).
"""

from __future__ import annotations

from contextvars import Context
from typing import Any

import numpy as np

from gradsync.communicators.shared_memory.barrier import LINE_BYTES, REASON_BYTES, SharedBarrier
from gradsync.diagnostics import FlightRecorder
from gradsync.reduction import Array

#: The size of the buffer that each rank has in a slot, and the largest chunk of a large list that a rank publishes
#: between two barriers. Larger chunks do not fit into the cache; smaller chunks need more barriers and NumPy calls.
#: This size was measured on a processor with a slow memcpy (Zen 3). On a Xeon, chunks of half this size are 5 to 9 %
#: faster for lists of 4 MB and more. All ranks use the size that fits rank 0's measurement of memcpy.
SLOT_BYTES = 1024 * 1024
#: The largest number of bytes that a rank publishes in one round of the other collectives. While some ranks still read
#: in this round, other ranks already write for the next round.
ROUND_BYTES = 512 * 1024
#: The number of slots for chunks: slots 0 to 3. A chunk uses a slot from its publication in shared memory until its
#: results are copied out.
CHUNKS_IN_FLIGHT = 4
#: The number of slots for rounds: slots 1 to 4.
ROUND_SLOTS = 4

SlotArrays = tuple[tuple[Array, ...], ...]  # [number of the slot][rank] -> the rank's buffer, as a 1-D array


def _areas(world_size: int) -> dict[str, int]:
    """Returns the areas of a communicator's shared memory in their order, with their sizes in bytes.

    Each area except the last consists of whole cache lines.
    """
    return {
        "slots": (1 + ROUND_SLOTS) * world_size * SLOT_BYTES,
        "lines": (world_size + 1) * LINE_BYTES,
        "reasons": world_size * REASON_BYTES,
        "message lines": 2 * world_size * world_size * LINE_BYTES,
    }


def segment_bytes(world_size: int) -> int:
    """Returns the size in bytes of a communicator's shared memory."""
    return sum(_areas(world_size).values())


def areas_of(memory: memoryview, world_size: int) -> dict[str, memoryview]:
    """Divides segment_bytes(world_size) bytes of shared memory into areas. Areas of lines consist of 8-byte words."""
    areas, begin = {}, 0
    for name, size_bytes in _areas(world_size).items():
        area = memory[begin : begin + size_bytes]
        areas[name] = area.cast("Q") if name.endswith("lines") else area
        begin += size_bytes
    return areas


class ShmContext:
    """The memory, sizes and objects that every collective of a shared-memory communicator uses.

    Args:
        rank: the number of this rank in the communicator.
        world_size: the number of ranks.
        barrier: the communicator's barrier.
        areas: the areas of the shared memory; see areas_of.
        chunk_bytes: the size of the chunks in which large arrays and lists are all-reduced, in bytes.
        recorder: the communicator's flight recorder.

    Attributes:
        rank, world_size, barrier, chunk_bytes, recorder: see Args.
        share_bytes: the largest number of bytes that a rank publishes for each other rank in one round of an all_to_all
            or a reduce_scatter.
        quietly: a function; quietly(function, *arguments) calls the function and ignores floating-point errors. If
            NumPy raised these errors as exceptions, only some ranks would raise them. A program finds overflow and NaN
            in the results.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        barrier: SharedBarrier,
        areas: dict[str, memoryview],
        chunk_bytes: int,
        recorder: FlightRecorder,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.barrier = barrier
        self.chunk_bytes = chunk_bytes
        self.recorder = recorder
        self.share_bytes = ROUND_BYTES // max(world_size - 1, 1) // LINE_BYTES * LINE_BYTES
        context = Context()
        context.run(np.seterr, all="ignore")  # a setting of the context; entering it is faster than np.errstate
        self.quietly = context.run
        self._slots = np.frombuffer(areas["slots"], np.uint8).reshape(1 + ROUND_SLOTS, world_size, SLOT_BYTES)
        self._of_dtype: dict[np.dtype[Any], SlotArrays] = {}
        self._buffers: dict[str, Array] = {}

    def slots(self, dtype: np.dtype[Any]) -> SlotArrays:
        """Returns the slots as arrays of a dtype of 1, 2, 4, 8 or 16 bytes."""
        arrays = self._of_dtype.get(dtype)
        if arrays is None:
            arrays = tuple([tuple([buffer.view(dtype) for buffer in slot]) for slot in self._slots])
            self._of_dtype[dtype] = arrays
        return arrays

    def round_slots(self, dtype: np.dtype[Any]) -> SlotArrays:
        """Returns the slots for rounds: the round after `barrier.round` uses the slot barrier.round % ROUND_SLOTS."""
        return self.slots(dtype)[1:]

    def buffer(self, name: str, dtype: np.dtype[Any], length: int) -> Array:
        """Returns a buffer of this process for the elements of one chunk. Equal names give the same memory."""
        whole = self._buffers.get(name)
        if whole is None:
            whole = self._buffers[name] = np.empty(SLOT_BYTES, np.uint8)
        return whole[: length * dtype.itemsize].view(dtype)

    def peers(self) -> list[int]:
        """Returns the other ranks in the order in which this rank reads their buffers.

        The list begins with the next rank, so that the ranks do not all read the same buffer at once.
        """
        return [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    def release(self) -> None:
        """Releases the shared memory, even if another object still refers to this context."""
        self.__dict__.clear()


def share_begin(owner: int, reader: int, size_bytes: int) -> int:
    """Returns the offset, in the buffer of rank `owner`, of the share that rank `reader` reads.

    All shares have the same size, and no two shares have bytes in the same cache line.
    """
    return (reader if reader < owner else reader - 1) * (-(-size_bytes // LINE_BYTES) * LINE_BYTES)
