"""The slots of the ranks in shared memory, as arrays of any dtype, and how they are shared out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from gradsync.reduction import Array

SlotArrays = tuple[tuple[Array, ...], ...]  # [parity][rank] -> 1-D array in shared memory
_CACHE_LINE_BYTES = 64
SlotsOf = Callable[[np.dtype[Any]], SlotArrays]  # gives them under a dtype


class Slots:
    """Two buffers of a fixed size for each rank in shared memory, used in turn, as arrays of any dtype.

    Args:
        memory: begins with room for them.
        world_size: number of ranks.
        slot_bytes: size of one buffer.

    Attributes:
        bytes: how much of the memory they take.
    """

    def __init__(self, memory: memoryview, world_size: int, slot_bytes: int) -> None:
        self.bytes = self.bytes_for(world_size, slot_bytes)
        self._memory = memory[: self.bytes]
        self._shape = (2, world_size, slot_bytes)
        self._arrays: dict[np.dtype[Any], SlotArrays] = {}

    @staticmethod
    def bytes_for(world_size: int, slot_bytes: int) -> int:
        """Returns how much memory the slots take."""
        return 2 * world_size * slot_bytes

    def of(self, dtype: np.dtype[Any]) -> SlotArrays:
        """Returns [parity][rank] -> the whole buffer as a 1-D array."""
        arrays = self._arrays.get(dtype)
        if arrays is None:
            whole = np.frombuffer(self._memory, np.uint8).reshape(self._shape)
            arrays = self._arrays[dtype] = tuple(tuple(row.view(dtype) for row in half) for half in whole)
        return arrays

    def release(self) -> None:
        """Lets go of the memory."""
        self._arrays.clear()
        with contextlib.suppress(BufferError):  # see SharedMemoryCommunicator._release
            self._memory.release()


class Shares:
    """A slot cut into one share for each of the other ranks: where what is meant for one of them lies.

    Args:
        world_size: number of ranks.
        slot_bytes: size of a slot.

    Attributes:
        bytes: size of a share; whole cache lines, so that no two ranks write into one.
    """

    def __init__(self, world_size: int, slot_bytes: int) -> None:
        self.bytes = slot_bytes // max(world_size - 1, 1) // _CACHE_LINE_BYTES * _CACHE_LINE_BYTES

    def begin(self, owner: int, reader: int) -> int:
        """Returns where in a rank's slot the share begins that another rank reads, in bytes."""
        return (reader if reader < owner else reader - 1) * self.bytes

    def part(self, slot: Array, owner: int, reader: int, size: int) -> Array:
        """Returns the first elements of the share in a rank's slot that another rank reads."""
        begin = self.begin(owner, reader) // slot.itemsize
        return slot[begin : begin + size]
