"""New arrays, and arrays from host memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._elementwise import assign, new_array, new_array_like
from ._layout import contiguous_strides, extent_bytes
from ._ndarray import ndarray
from .cuda.memory import MemoryPointer, UnownedMemory
from .cuda.runtime import streamSynchronize


def empty(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return new_array(shape, dtype, order)


def full(shape: Any, fill_value: Any, dtype: Any = None, order: str = "C") -> ndarray:
    array = new_array(shape, np.asarray(fill_value).dtype if dtype is None else dtype, order)
    array.fill(fill_value)
    return array


def zeros(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return full(shape, 0, dtype, order)


def ones(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return full(shape, 1, dtype, order)


def _like(prototype: ndarray, dtype: Any, order: str, shape: Any) -> ndarray:
    dtype = prototype.dtype if dtype is None else dtype
    return new_array_like(prototype._host, dtype, order) if shape is None else new_array(shape, dtype)


def empty_like(
    prototype: ndarray, dtype: Any = None, order: str = "K", subok: None = None, shape: Any = None
) -> ndarray:
    return _like(prototype, dtype, order, shape)


def full_like(
    a: ndarray, fill_value: Any, dtype: Any = None, order: str = "K", subok: None = None, shape: Any = None
) -> ndarray:
    array = _like(a, dtype, order, shape)
    array.fill(fill_value)
    return array


def zeros_like(a: ndarray, dtype: Any = None, order: str = "K", subok: None = None, shape: Any = None) -> ndarray:
    return full_like(a, 0, dtype, order, subok, shape)


def ones_like(a: ndarray, dtype: Any = None, order: str = "K", subok: None = None, shape: Any = None) -> ndarray:
    return full_like(a, 1, dtype, order, subok, shape)


def arange(start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> ndarray:
    return array(np.arange(start, stop, step, dtype) if stop is not None else np.arange(0, start, step, dtype))


def array(
    obj: Any,
    dtype: Any = None,
    copy: bool | None = True,
    order: str | None = "K",
    subok: bool = False,
    ndmin: int = 0,
    *,
    blocking: bool = False,
) -> ndarray:
    """Returns an array on the current device; views of it and of foreign device memory only where copy is not True."""
    if not isinstance(obj, ndarray) and hasattr(obj, "__cuda_array_interface__"):
        obj = _from_interface(obj)
    if isinstance(obj, ndarray):
        return _converted(obj, dtype, bool(copy), order or "K")
    host = np.array(obj, dtype, order=order or "K", ndmin=ndmin)
    result = new_array_like(host, host.dtype, "K")
    if host.strides != result.strides:
        host = np.array(host, order="C" if result.flags.c_contiguous else "F")
    result.set(host)
    return result


def _converted(source: ndarray, dtype: Any, copy: bool, order: str) -> ndarray:
    flags = source.flags
    is_ordered = {"C": flags.c_contiguous, "F": flags.f_contiguous}.get(order, True)
    dtype = source.dtype if dtype is None else np.dtype(dtype)
    if not copy and is_ordered and dtype == source.dtype:
        return source
    result = new_array_like(source._host, dtype, order)
    assign(result, source, "unsafe")
    return result


def asarray(a: Any, dtype: Any = None, order: Any = None, *, copy: Any = None, blocking: bool = False) -> ndarray:
    return array(a, dtype, bool(copy), order, blocking=blocking)


def ascontiguousarray(a: Any, dtype: Any = None) -> ndarray:
    return array(a, dtype, False, "C")


def asfortranarray(a: Any, dtype: Any = None) -> ndarray:
    return array(a, dtype, False, "F")


def asnumpy(a: Any, stream: Any = None, order: str = "C", out: Any = None, *, blocking: bool = True) -> Any:
    """Copies an array to the host; returns a host array as it is."""
    if isinstance(a, ndarray):
        return a.get(stream=stream, order=order, out=out, blocking=blocking)
    if out is None:
        return np.asarray(a, order=order)
    np.copyto(out, a)
    return out


def _from_interface(obj: Any) -> ndarray:
    """Returns a view of foreign device memory, once its producer's stream is done, as CuPy waits by default."""
    interface = obj.__cuda_array_interface__
    if interface.get("stream") is not None:
        streamSynchronize(interface["stream"])
    shape, dtype = interface["shape"], np.dtype(interface["typestr"])
    if 0 in shape:
        return ndarray(shape, dtype)
    strides = interface.get("strides") or contiguous_strides(shape, dtype.itemsize)
    memory = UnownedMemory(interface["data"][0], extent_bytes(shape, strides, dtype.itemsize), obj)
    return ndarray(shape, dtype, MemoryPointer(memory, 0), strides)
