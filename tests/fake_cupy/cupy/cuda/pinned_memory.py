"""Pinned host memory: copies from and to it are truly asynchronous, and its pool gives freed memory away at once."""

from __future__ import annotations

import ctypes
import functools
from collections import defaultdict

import numpy as np

_ROUNDING_BYTES = 512
_storages: dict[int, bytearray] = {}  # by address; never unmapped
_free: defaultdict[int, list[bytearray]] = defaultdict(list)  # by size


class _Pinned:
    """The attributes of a PinnedMemoryPointer, beside its bytes."""

    storage: bytearray
    ptr: int

    def size(self) -> int:
        """Returns the bytes that there are: as many as were asked for, rounded up as by CuPy's pool."""
        return len(self.storage)

    def __del__(self) -> None:
        _free[len(self.storage)].append(self.storage)


@functools.cache
def _pointer_type(size: int) -> type:
    """Returns a type with the buffer protocol, which a class in Python cannot have by itself before 3.12."""
    return type("PinnedMemoryPointer", (_Pinned, ctypes.c_uint8 * size), {})


def alloc_pinned_memory(size: int) -> _Pinned:
    """Returns pinned memory; np.frombuffer needs its `count`, because there may be more."""
    rounded = 1 << (max(size, _ROUNDING_BYTES) - 1).bit_length()
    try:
        storage = _free[rounded].pop()
    except IndexError:
        storage = bytearray(b"\xff" * rounded)
    pointer = _pointer_type(rounded).from_buffer(storage)
    pointer.storage = storage
    pointer.ptr = ctypes.addressof(pointer)
    _storages[pointer.ptr] = storage
    return pointer


def is_pinned(address: int, size: int) -> bool:
    """Returns whether a range of the host's memory is pinned."""
    return any(begin <= address and address + size <= begin + len(held) for begin, held in list(_storages.items()))


def unowned(array: np.ndarray) -> np.ndarray:
    """Returns the same memory, which this does not keep: cudaMemcpyAsync knows an address, and not whose it is.

    Source: CuPy, cupy/cuda/pinned_memory.pyx: what is collected goes back to its pool, whatever is queued for it.
    """
    room = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
    return np.ndarray(array.shape, array.dtype, room, strides=array.strides)
