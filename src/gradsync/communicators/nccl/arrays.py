"""The arrays of a communicator on a GPU: CuPy's, other libraries' device arrays, and host arrays.

Contiguous device arrays are used without a copy; host arrays are copied to the device and back. ArrayKind
(host_arrays.py) says what each method does. Arithmetic on the device is launched on the current stream, and not waited
for.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import cupy
import numpy as np

from gradsync.communicators.host_arrays import (
    DLPACK_CPU,
    DLPACK_CUDA_HOST,
    ArrayKind,
    advice,
    as_host_array,
    kind_of,
    real_parts,
    span,
)
from gradsync.communicators.nccl.streams import on_device
from gradsync.communicators.nccl.work import await_results_in
from gradsync.errors import InvalidArgument, UnsupportedDtype
from gradsync.reduction import (
    OPERATIONS_BY_DTYPE,
    Array,
    ReduceOp,
    accumulation_dtype,
    check_operation,
    dtype_name,
    part_dtype,
)

_DLPACK_CUDA = 2
_DLPACK_CUDA_MANAGED = 13
_LACKING = ("int16", "uint16")  # dtypes that NCCL does not reduce


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _on_own_device(method: _Method) -> _Method:
    """Makes the device of the arrays the current one in a method."""

    @wraps(method)
    def run(self: DeviceArrays, *arguments: Any) -> Any:
        with on_device(self._device_id):
            return method(self, *arguments)

    return cast(_Method, run)


class _Launching(threading.local):
    """See DeviceArrays."""

    results_on: Any = None


class DeviceArrays(ArrayKind):
    """An ArrayKind whose native arrays are CuPy's, of one device, or NumPy's. Flat arrays are on the device.

    Args:
        device_id: the CUDA device number in this process.

    Attributes:
        launching.results_on: in the thread that launches, the stream on which the program will use a result; None means
            the current stream, as in any other thread. `empty` allocates for this stream. CuPy's pool gives freed
            memory at once to the next allocation for the same stream, whose queued work may still use it: so `empty`
            makes the current stream wait for that work.
    """

    def __init__(self, device_id: int) -> None:
        self._device_id = device_id
        self.launching = _Launching()

    def check_operation(self, op: ReduceOp, dtype: np.dtype[Any]) -> None:
        """See ArrayKind. NCCL has no 16-bit integers and no products of complex numbers."""
        check_operation(op, dtype)
        if dtype_name(dtype) in _LACKING or (dtype.kind == "c" and op is ReduceOp.PROD):
            what = f"products of {dtype_name(dtype)}" if dtype.kind == "c" else dtype_name(dtype)
            raise UnsupportedDtype(f"NCCL does not reduce {what}: convert the array with astype() first")

    def native(self, array: Any, who: str) -> Any:
        """Returns `array` as CuPy's, over the same memory, or as NumPy's if it is in host memory.

        Raises:
            InvalidArgument: it is no array, or is on another GPU.
            UnsupportedDtype: the elements are Python objects.
        """
        if isinstance(array, cupy.ndarray):
            native = array
        elif isinstance(array, np.ndarray):
            return as_host_array(array, who)
        else:
            native = _foreign(array, who)
            if isinstance(native, np.ndarray):
                return native
        if native.device.id != self._device_id:
            raise InvalidArgument(
                f"{who} runs on cuda:{self._device_id}, got an array on cuda:{native.device.id}: make arrays after "
                f"init_process_group(), which makes cuda:{self._device_id} CuPy's current device, or copy the array"
            )
        if native.dtype.hasobject:
            raise UnsupportedDtype(f"{who} cannot move Python objects (dtype {native.dtype})")
        return native

    def flat(self, native: Any) -> Any:
        """See ArrayKind. Copies a host array to the device, on the current stream."""
        return native.reshape(-1) if self.is_viewed_flat(native) else self._copied_flat(native)

    @_on_own_device
    def _copied_flat(self, native: Any) -> Any:
        if isinstance(native, np.ndarray):
            await_results_in(native)  # an earlier collective may still have to write to this array
            return cupy.asarray(_transferable(native))
        return cupy.ascontiguousarray(native).reshape(-1)

    def is_viewed_flat(self, native: Any) -> bool:
        return not isinstance(native, np.ndarray) and bool(native.flags.c_contiguous)

    def write_back(self, flat: Any, native: Any) -> None:
        """See ArrayKind. For a host array it waits until the current stream has done its work."""
        if isinstance(native, np.ndarray):
            native[...] = flat.get().view(native.dtype).reshape(native.shape)
        elif not native.flags.c_contiguous:
            native[...] = flat.view(native.dtype).reshape(native.shape)

    @_on_own_device
    def empty(self, shape: tuple[int, ...], dtype: Any, like: Any) -> Any:
        if isinstance(like, np.ndarray):
            return np.empty(shape, dtype)
        stream = self.launching.results_on
        if stream is None:
            return cupy.empty(shape, dtype)
        with stream:
            array = cupy.empty(shape, dtype)
        # Another thread may have freed this memory just now, while queued work of `stream` still uses it.
        cupy.cuda.get_current_stream().wait_event(stream.record(cupy.cuda.Event(disable_timing=True)))
        return array

    def empty_like(self, native: Any) -> Any:
        return self.empty(native.shape, native.dtype, native)

    @_on_own_device
    def assign(self, native: Any, target: Any) -> None:
        """See ArrayKind. The copy runs on the current stream."""
        if isinstance(native, np.ndarray):
            await_results_in(native)  # an earlier collective may still have to write to this array
            target.set(np.asarray(native, order="C"))  # ascontiguousarray would return 1-d for 0-d
        else:
            target[...] = native

    @_on_own_device
    def scratch(self, size: int, dtype: Any) -> Any:
        """See ArrayKind. It is for the current stream only, not for the program's stream `results_on`."""
        return cupy.empty(size, dtype) if _is_known(dtype) else cupy.empty(size * dtype.itemsize, np.uint8)

    @_on_own_device
    def zero(self, native: Any) -> None:
        """See ArrayKind. The current stream writes the values."""
        native[...] = 0

    @_on_own_device
    def multiply_in_place(self, natives: Any, factor: Any) -> None:
        """See ArrayKind. Multiplies host arrays on the CPU. The factor may be an array on the device."""
        for native in natives:
            if isinstance(native, np.ndarray):
                super().multiply_in_place([native], float(factor))
                continue
            for part in real_parts(native):
                wide = accumulation_dtype(part.dtype)
                by = wide.type(factor) if isinstance(factor, float) else factor.astype(wide)
                cupy.multiply(part, by, out=part, dtype=wide, casting="unsafe")

    @_on_own_device
    def digest(self, native: Any) -> int:
        """See ArrayKind. The host makes it, of a copy; it waits for the work that is queued on the current stream."""
        return super().digest(native if isinstance(native, np.ndarray) else native.get())

    @_on_own_device
    def all_finite(self, flat: Any) -> Any:
        parts = flat.view(part_dtype(flat.dtype))
        return cupy.isfinite(parts.astype(np.float32) if dtype_name(parts.dtype) == "bfloat16" else parts).all()

    @_on_own_device
    def sum_of_squares(self, flat: Any) -> Any:
        parts = flat.view(part_dtype(flat.dtype))
        return cupy.multiply(parts, parts, dtype=np.float64, casting="unsafe").sum()

    def writeable(self, native: Any) -> bool:
        return native.flags.writeable if isinstance(native, np.ndarray) else not isinstance(native, _ReadOnly)

    def byte_bounds(self, native: Any) -> tuple[int, int]:
        """See ArrayKind. The host and all devices share one address space (CUDA's unified addressing)."""
        if isinstance(native, np.ndarray):
            return super().byte_bounds(native)
        return span(native, native.data.ptr)

    def share_memory(self, first: Any, second: Any) -> bool:
        if isinstance(first, np.ndarray) != isinstance(second, np.ndarray):
            return False
        return super().share_memory(_addresses_of(first), _addresses_of(second))


def _transferable(native: Array) -> Array:
    """Returns a host array as a 1-D array in C order; of bytes, if CuPy does not support the dtype."""
    flat = np.ascontiguousarray(native).reshape(-1)
    return flat if _is_known(flat.dtype) else flat.view(np.uint8)


def _is_known(dtype: np.dtype[Any]) -> bool:
    """Whether CuPy supports arrays of this dtype."""
    return dtype.isnative and dtype_name(dtype) in OPERATIONS_BY_DTYPE


def _foreign(array: Any, who: str) -> Any:
    """Returns another library's array as CuPy's or NumPy's, without a copy; the current stream waits for its values."""
    try:
        # DLPack first: with it the current stream waits for the producer's, and the host need not.
        if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
            kind = int(array.__dlpack_device__()[0])
            if kind in (DLPACK_CPU, DLPACK_CUDA_HOST):
                return as_host_array(array, who)
            if kind in (_DLPACK_CUDA, _DLPACK_CUDA_MANAGED):
                exporter = _Exporter(array)
                native = cupy.from_dlpack(exporter)
                return native.view(type=_ReadOnly) if exporter.is_read_only else native
            raise InvalidArgument(
                f"{who} needs an array in host memory or on a CUDA device, got one of DLPack device type {kind}"
            )
        interface = getattr(array, "__cuda_array_interface__", None)
        if interface is not None:
            native = cupy.asarray(array)
            return native.view(type=_ReadOnly) if interface["data"][1] else native
    except (RuntimeError, BufferError, TypeError, ValueError) as error:
        if isinstance(error, (UnsupportedDtype, InvalidArgument)):
            raise
        raise InvalidArgument(
            f"{who} cannot view {type(array).__name__} without a copy: {error}{advice(error)}"
        ) from error
    needed = "a CuPy or NumPy array, or one that supports DLPack"
    raise InvalidArgument(f"{who} needs {needed}, got {kind_of(array)}")


class _ReadOnly(cupy.ndarray):  # type: ignore[misc]  # CuPy has no type annotations
    """A CuPy array that is read-only, for which CuPy has no flag."""


_PointerOf = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
_IsValid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
_pointer_of = _PointerOf(("PyCapsule_GetPointer", ctypes.pythonapi))
_is_valid = _IsValid(("PyCapsule_IsValid", ctypes.pythonapi))
_VERSIONED = b"dltensor_versioned"
# Where the flags are in DLPack's struct DLManagedTensorVersioned: after the version (two uint32), manager_ctx and
# deleter. Later versions of DLPack keep these. Source: dlpack.h.
_FLAGS_OFFSET = 24
_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY


class _Exporter:
    """Passes an array to CuPy by DLPack and reads the capsule's flags, which CuPy ignores.

    Attributes:
        is_read_only: known when CuPy has called `__dlpack__`. Capsules of DLPack before 1.0 have no flags. JAX's have
            none either, so every array of JAX counts as read-only.
    """

    def __init__(self, array: Any) -> None:
        self._array = array
        jax = sys.modules.get("jax")
        self.is_read_only = jax is not None and isinstance(array, getattr(jax, "Array", ()))

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self._array.__dlpack__(**options)
        if _is_valid(capsule, _VERSIONED):
            flags = ctypes.c_uint64.from_address(_pointer_of(capsule, _VERSIONED) + _FLAGS_OFFSET)
            self.is_read_only = self.is_read_only or bool(flags.value & _READ_ONLY)
        return capsule


def _addresses_of(array: Any) -> Any:
    """Returns a NumPy array over a device array's addresses, to compare them. NumPy must not read the memory."""
    if isinstance(array, np.ndarray):
        return array
    addresses = {
        "version": 3,
        "data": (array.data.ptr, False),
        "shape": array.shape,
        "strides": array.strides,
        "typestr": f"|V{array.dtype.itemsize}",
    }
    return np.asarray(SimpleNamespace(__array_interface__=addresses))
