"""Private memory of a rank for what it has in hand between shared memory and the caller's arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradsync.reduction import Array, accumulation_dtype


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
