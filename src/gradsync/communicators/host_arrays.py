"""Arrays in host memory: what is accepted, and how a layout becomes flat."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradsync.errors import InvalidArgument, UnsupportedDtype
from gradsync.reduction import Array

_DLPACK_CPU = 1
_DLPACK_CUDA_HOST = 3  # pinned host memory


def as_host_array(array: Any, who: str) -> Array:
    """Returns `array` as a NumPy array over the same memory.

    Args:
        array: a NumPy array, or any object that speaks DLPack and lives in host memory.
        who: begins the error message, e.g. "rank 0/2: all_reduce".

    Raises:
        InvalidArgument: not an array, masked, sparse, or not in host memory.
        UnsupportedDtype: the elements are Python objects.
    """
    if type(array) is np.ndarray:
        native = array
    elif isinstance(array, np.ma.MaskedArray):
        raise InvalidArgument(f"{who} got a masked array: fill or compress it first")
    elif isinstance(array, np.ndarray):
        native = array.view(np.ndarray)
    elif hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        native = _from_dlpack(array, who)
    else:
        raise InvalidArgument(f"{who} needs a NumPy array or one that speaks DLPack, got {_kind_of(array)}")
    if native.dtype.hasobject:
        raise UnsupportedDtype(f"{who} cannot move Python objects (dtype {native.dtype})")
    return native


def _kind_of(array: Any) -> str:
    if hasattr(array, "tocoo"):
        return "a sparse array"
    if isinstance(array, np.generic):
        return f"a NumPy scalar ({array.dtype}): make it an array with numpy.asarray(...)"
    if isinstance(array, (list, tuple, int, float, complex)):
        return f"a {type(array).__name__}: make it an array with numpy.asarray(...)"
    return type(array).__name__


def _from_dlpack(array: Any, who: str) -> Array:
    device_type = array.__dlpack_device__()[0]
    if int(device_type) not in (_DLPACK_CPU, _DLPACK_CUDA_HOST):
        raise InvalidArgument(
            f"{who} runs in host memory, got an array on a device "
            f'(DLPack device type {int(device_type)}): copy it to the host, or use backend="nccl"'
        )
    try:
        return np.from_dlpack(array)
    except (RuntimeError, BufferError, TypeError) as error:
        raise InvalidArgument(f"{who} cannot view {type(array).__name__} without a copy: {error}") from error


def flat_copy_or_view(array: Array) -> Array:
    """Returns the elements in C (index) order as a 1-D contiguous array: a view where the layout allows it."""
    return array.reshape(-1) if array.flags.c_contiguous else np.ascontiguousarray(array).reshape(-1)


def write_back(flat: Array, array: Array) -> None:
    """Copies elements in C order back into the array that flat_copy_or_view had to copy; does nothing for a view."""
    if not array.flags.c_contiguous:
        array[...] = flat.reshape(array.shape)


def overlaps_itself(array: Array) -> bool:
    """Whether two indices may share memory (broadcast views, sliding windows); errs towards True."""
    if array.flags.c_contiguous or array.flags.f_contiguous or array.size <= 1:
        return False
    extent = array.itemsize
    for stride, length in sorted((abs(s), n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1):
        if stride < extent:
            return True
        extent = stride * (length - 1) + extent
    return False
