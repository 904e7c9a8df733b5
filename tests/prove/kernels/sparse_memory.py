"""Arrays of more memory than there is: what nobody has written reads as zeros, and takes none."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest

_MAP_NORESERVE = 0x4000  # of Linux; Python's mmap has it from 3.13 on


def untouched(size: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Returns an array of zeros; skips the test where the machine does not give so many addresses."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        memory = mmap.mmap(-1, size * dtype.itemsize, flags=flags)
    except OSError as error:
        pytest.skip(f"no {size * dtype.itemsize} bytes of addresses: {error}")
    return np.frombuffer(memory, dtype, size)
