"""A fake of CuPy 14 over host memory, with NCCL between processes: values, timing and failures without a GPU.

It models the rules of CUDA and NCCL, and not gradsync's code: a test fails where gradsync relies on what a GPU does not
promise. What it cannot show: speed, memory that runs out, networks, CuPy's own signatures and types (for those there is
the real CuPy over host memory, `-m cupy`), and whether a rule was understood rightly (`make test-gpu`).

As on a GPU:
    streams     Each is a thread. Work runs later, and events alone order streams; the null stream and those that are
                not non_blocking wait for each other. FAKE_CUPY_DELAY_MS puts random pauses before each piece of work,
                from FAKE_CUPY_SEED. CUPY_CUDA_PER_THREAD_DEFAULT_STREAM=1 gives each thread a default stream.
    memory      The pools give freed memory to the next allocation of the same stream at once, filled with NaNs.
                New memory is NaNs. Host and device memory do not mix, nor do devices.
    errors      Work that raises is the device's sticky error: every later call raises it.
    captures    A stream that captures a graph refuses what cannot be part of one (900 to 907), in all three modes.
    devices     FAKE_CUPY_DEVICES of them (1), of which CUDA_VISIBLE_DEVICES shows some; cuda/_devices.py notes on which
                this process has made a context.
    collectives A collective runs when its stream gets there, one of a device at a time. Sums go round a ring, and are
                rounded at every hop. The host waits where ranks meet for the first time, and for each launch with
                CUDA_LAUNCH_BLOCKING=1. A group launches all it has, or nothing where a call was refused.
                See cuda/nccl.py.
    failures    A rank that does not come, or calls something else, ends the collective with an error that says what
                each rank called. Another operator is not noticed: values are mixed. With FAKE_CUPY_HANG=1 it hangs in
                silence, as on a GPU, until ncclCommAbort; then ncclCommDestroy waits for the other ranks, too.

Other variables: FAKE_CUPY_VERSION (of CuPy), FAKE_CUPY_NCCL_VERSION, and FAKE_CUPY_ADDRESS (where rank 0 listens, for
ranks on several machines).
"""

from __future__ import annotations

from os import environ as _environ
from typing import Any

import numpy as _np

from . import cuda as cuda
from ._array import assign as _assign
from ._array import compute as _compute
from ._array import launch as _launch
from ._array import ndarray
from ._array import operand as _operand
from ._array import queued as _queued
from ._dlpack import from_dlpack as from_dlpack
from ._dlpack import view_of_foreign as _view_of_foreign
from ._kernels import RawModule as RawModule

__version__ = _environ.get("FAKE_CUPY_VERSION", "14.2.0")


class _Ufunc:
    """An elementwise function of NumPy's."""

    def __init__(self, function: _np.ufunc) -> None:
        self._function = function

    def __call__(self, *args: Any, out: Any = None, **options: Any) -> ndarray:
        inputs, outputs = args[: self._function.nin], args[self._function.nin :]
        return _compute(self._function, *inputs, out=outputs[0] if outputs else out, **options)


bool_, float16, float32, float64 = _np.bool_, _np.float16, _np.float32, _np.float64
int8, int16, int32, int64 = _np.int8, _np.int16, _np.int32, _np.int64
uint8, uint16, uint32, uint64 = _np.uint8, _np.uint16, _np.uint32, _np.uint64
complex64, complex128 = _np.complex64, _np.complex128
dtype, nan, inf = _np.dtype, _np.nan, _np.inf
add, multiply, divide, isfinite = (_Ufunc(f) for f in (_np.add, _np.multiply, _np.divide, _np.isfinite))
maximum, rint = (_Ufunc(f) for f in (_np.maximum, _np.rint))  # of examples/hooks.py


def empty(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return ndarray(shape, dtype, order=order)


def full(shape: Any, fill_value: Any, dtype: Any = None, order: str = "C") -> ndarray:
    array = ndarray(shape, _np.asarray(fill_value).dtype if dtype is None else dtype, order=order)
    array.fill(fill_value)
    return array


def zeros(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return full(shape, 0, dtype, order)


def ones(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return full(shape, 1, dtype, order)


def empty_like(a: ndarray, dtype: Any = None, order: str = "K") -> ndarray:
    return ndarray(a.shape, a.dtype if dtype is None else dtype, order=a._order(order))


def full_like(a: ndarray, fill_value: Any, dtype: Any = None) -> ndarray:
    array = empty_like(a, dtype)
    array.fill(fill_value)
    return array


def zeros_like(a: ndarray, dtype: Any = None) -> ndarray:
    return full_like(a, 0, dtype)


def arange(*bounds: Any, dtype: Any = None) -> ndarray:
    return array(_np.arange(*bounds, dtype=dtype))


def array(obj: Any, dtype: Any = None, copy: bool | None = True, order: str | None = "K", **_: Any) -> ndarray:
    """An array on the current device; views of it and of foreign device memory only where copy is not True."""
    order = order or "K"
    if not isinstance(obj, ndarray) and hasattr(obj, "__cuda_array_interface__"):
        obj = _from_interface(obj)
    if isinstance(obj, ndarray):
        dtype = obj.dtype if dtype is None else _np.dtype(dtype)
        is_ordered = {"C": obj.flags.c_contiguous, "F": obj.flags.f_contiguous}.get(order, True)
        if not copy and is_ordered and dtype == obj.dtype:
            return obj
        result = ndarray(obj.shape, dtype, order=obj._order(order))
        _assign(result, obj, "unsafe")
        return result
    host = _np.array(obj, dtype, order=order)
    result = ndarray(
        host.shape, host.dtype, order="C" if host.flags.c_contiguous or not host.flags.f_contiguous else "F"
    )
    result.set(host)
    return result


def asarray(a: Any, dtype: Any = None, order: Any = None, *, copy: Any = None, blocking: bool = False) -> ndarray:
    return array(a, dtype, bool(copy), order)


def ascontiguousarray(a: Any, dtype: Any = None) -> ndarray:
    return array(a, dtype, False, "C")


def asfortranarray(a: Any, dtype: Any = None) -> ndarray:
    return array(a, dtype, False, "F")


def asnumpy(a: Any, stream: Any = None, order: str = "C", out: Any = None, *, blocking: bool = True) -> Any:
    """Copies an array to the host; gives a host array as it is."""
    return a.get(stream, order, out, blocking) if isinstance(a, ndarray) else _np.asarray(a, order=order)


def _from_interface(obj: Any) -> ndarray:
    """A view of foreign device memory, once its producer's stream is done, as CuPy waits by default."""
    interface = obj.__cuda_array_interface__
    if interface.get("stream") is not None:
        cuda.runtime.streamSynchronize(interface["stream"])
    dtype = _np.dtype(interface["typestr"])
    return _view_of_foreign(interface["data"][0], interface["shape"], dtype, interface.get("strides"), obj)


def copyto(dst: ndarray, src: Any, casting: str = "same_kind") -> None:
    """Queues dst[...] = src."""
    if isinstance(src, _np.ndarray) and src.ndim > 0:
        raise ValueError("non-scalar numpy.ndarray cannot be used for copyto")
    _assign(dst, src, casting)


def concatenate(tup: Any, axis: int = 0, out: Any = None, *, dtype: Any = None, casting: str = "same_kind") -> ndarray:
    """Joins arrays along an axis."""
    hosts = [_operand(array) for array in tup]
    probe = _np.concatenate([_np.empty(host.shape, host.dtype) for host in hosts], axis, dtype=dtype, casting=casting)
    result = empty(probe.shape, probe.dtype) if out is None else out
    _launch(_np.concatenate, hosts, axis, out=_operand(result), casting="unsafe")
    return result


def where(condition: ndarray, x: Any, y: Any) -> ndarray:
    return _queued(_np.where, condition, x, y)


def broadcast_to(array: ndarray, shape: Any) -> ndarray:
    """A view with strides of 0."""
    view = _np.broadcast_to(array._host, shape)
    return array._view_of(
        _np.lib.stride_tricks.as_strided(array._host, view.shape, view.strides)
    )  # CuPy's is writeable
