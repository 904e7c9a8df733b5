"""The slots of the ranks in shared memory, as arrays of any dtype, and what ranks tell each other of each slot."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from gradsync.communicators.shared_memory.pages import whole_pages
from gradsync.communicators.shared_memory.stream_plan import CHUNKS_IN_FLIGHT
from gradsync.reduction import Array

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
