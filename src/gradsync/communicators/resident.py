"""Memory in which gradients live: what a rank reads and writes there is what the ranks reduce, without a copy.

Here is its form where no other process sees it; ranks that share memory have one of their own
(shared_memory/resident.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gradsync.communicators.host_arrays import ArrayKind
from gradsync.communicators.pieces import CACHE_LINE_BYTES
from gradsync.errors import BackendUnavailable
from gradsync.reduction import Array

_BYTE = np.dtype(np.uint8)


class ResidentMemory:
    """One rank's memory, in which ranges are reduced in place.

    Made by all ranks together (Communicator.make_resident_memory), equally large on each. Views of `bytes` may be used
    for as long as they are held, also when the communicator has ended.

    Args:
        data: see `bytes`.

    Attributes:
        bytes: 1-D uint8 array on the communicator's device, this rank's own; zero at the start. Its first byte is
            aligned to 64.
    """

    def __init__(self, data: Array) -> None:
        self.bytes = data

    def view(self, begin_bytes: int, end_bytes: int, dtype: np.dtype[Any]) -> Array:
        """Returns these bytes as elements."""
        values: Array = self.bytes[begin_bytes:end_bytes].view(dtype)
        return values


def aligned_zeros(arrays: ArrayKind, size_bytes: int, who: str) -> Array:
    """Returns zeroed bytes on the communicator's device, as ResidentMemory has them.

    Args:
        arrays: the communicator's.
        size_bytes: of the memory.
        who: begins the error message.

    Raises:
        BackendUnavailable: there is not so much memory.
    """
    try:
        room: Array = arrays.empty((size_bytes + CACHE_LINE_BYTES,), _BYTE, None)
    except MemoryError as error:
        raise BackendUnavailable(f"{who} cannot allocate {size_bytes} bytes: {error}") from error
    begin = -arrays.byte_bounds(room)[0] % CACHE_LINE_BYTES
    data = room[begin : begin + size_bytes]
    data[...] = 0
    return data
