"""Arrays in host memory: checks a caller's arrays, and makes them flat.

`ArrayKind` is the interface that the layers above use for arrays. `HostArrays` implements it for the host,
nccl/device_arrays.py for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Protocol

import numpy as np

from gradsync.communicators import host_values
from gradsync.communicators.pieces import CACHE_LINE_BYTES
from gradsync.errors import InvalidArgument, UnsupportedDtype
from gradsync.reduction import Array, divide_into

DLPACK_CPU = 1
DLPACK_CUDA_HOST = 3  # pinned host memory

_PIECE_BYTES = 32 * 1024**2  # the host memory for reading a GPU's array, piece by piece

_FOR_NUMBERS = "make it an array with numpy.array(...), or pass numbers to gs.comm.reduce_dict or comm.objects"
_FOR_OBJECTS = "comm.objects gathers, broadcasts and scatters Python objects"


class ArrayKind(Protocol):
    """The functions for one kind of arrays. A native array is the result of `native`; a flat one is 1-D, contiguous."""

    def native(self, array: Any, who: str) -> Any:
        """Returns `array` as an array over the same memory; see Communicator._native_array."""

    def flat(self, native: Any) -> Any:
        """Returns the elements in C (index) order on the communicator's device; a view if possible."""

    def is_viewed_flat(self, native: Any) -> bool:
        """Whether flat() gives a view of this very memory."""

    def write_back(self, flat: Any, native: Any) -> None:
        """Copies elements in C order into an array that flat() had to copy; does nothing for a view."""

    def empty(self, shape: tuple[int, ...], dtype: Any, like: Any) -> Any:
        """Returns a new C-contiguous array, in the same kind of memory as the native array `like`."""

    def empty_like(self, native: Any) -> Any:
        """Returns a new C-contiguous array of the same shape and dtype, in the same kind of memory."""

    def empty_flat(self, native: Any) -> Any:
        """Returns a new flat array for the elements of an array, on the communicator's device."""

    def scratch(self, size: int, dtype: Any) -> Any:
        """Returns a new flat array for work on the current stream."""

    def fill(self, native: Any, value: Any) -> None:
        """Sets all elements of an array on the communicator's device."""

    def assign(self, native: Any, target: Any) -> None:
        """Copies an array's elements into another one on the communicator's device."""

    def divide(self, flat: Any, count: int) -> None:
        """Divides floating or complex elements in place."""

    def multiply(self, source: Any, factor: float, out: Any) -> None:
        """Multiplies floating or complex elements into `out`, which may be `source`; on a GPU on the current stream.

        The product is computed in the wider of the two dtypes (half precision in float32) and rounded once; from
        float64 to half precision it may be rounded to float32 in between. Complex numbers are scaled part by part.
        Overflow gives infinity without a warning. A GPU treats subnormal float32 numbers as 0 (CuPy's compiler flags).

        Args:
            source: native array of any shape and layout.
            factor: 1.0 gives a plain copy, of any dtype.
            out: array of the same shape, in the same memory space, of any layout: `source`, or one that shares no
                memory with it. Its dtype may be another one of the same kind: both real, or both complex.
        """

    def multiply_in_place(self, natives: Any, factor: float) -> None:
        """Multiplies each of some floating or complex arrays by the factor, as `multiply` does."""

    def all_finite(self, flat: Any) -> Any:
        """Whether a flat array has neither NaN nor infinity; always true for integers and bools.

        Returns:
            A bool; on a GPU a 0-d bool array of the device, by work on the current stream: the host does not wait.
        """

    def sum_of_squares(self, flat: Any) -> Any:
        """Sums the squares of the absolute values of a flat array; the same array gives the same bits each time.

        Sums are in float64; on the host, sums of 1024 squares of float32 or half precision are in float32. The relative
        error stays below 1e-6. Only values beyond the range of float64 overflow or underflow.

        Returns:
            A float; on a GPU a 0-d float64 array of the device, by work on the current stream: the host does not wait.
        """

    def writeable(self, native: Any) -> bool:
        """Whether the array may be written to."""

    def state(self, native: Any) -> Any:
        """Returns a value that changes if an array with the same identity, shape and dtype needs new checks."""

    def byte_bounds(self, native: Any) -> tuple[int, int]:
        """Returns the first address of a non-empty array, and one past its last."""

    def share_memory(self, first: Any, second: Any) -> bool:
        """Whether two arrays share an element; True if that is too hard to find out."""


class HostArrays:
    """NumPy arrays, and other arrays in host memory that support DLPack."""

    def native(self, array: Any, who: str) -> Array:
        """See ArrayKind."""
        return as_host_array(array, who)

    def flat(self, native: Array) -> Array:
        """See ArrayKind."""
        return native.reshape(-1) if native.flags.c_contiguous else np.ascontiguousarray(native).reshape(-1)

    def is_viewed_flat(self, native: Array) -> bool:
        """See ArrayKind."""
        return native.flags.c_contiguous

    def write_back(self, flat: Array, native: Array) -> None:
        """See ArrayKind."""
        if not native.flags.c_contiguous:
            native[...] = flat.view(native.dtype).reshape(native.shape)

    def empty(self, shape: tuple[int, ...], dtype: Any, like: Array) -> Array:
        """See ArrayKind."""
        return np.empty(shape, dtype)

    def empty_like(self, native: Array) -> Array:
        """See ArrayKind; aligned to a cache line, so that JAX can use the memory without a copy."""
        room = np.empty(native.nbytes + CACHE_LINE_BYTES, np.uint8)
        begin = -room.__array_interface__["data"][0] % CACHE_LINE_BYTES
        return room[begin : begin + native.nbytes].view(native.dtype).reshape(native.shape)

    def empty_flat(self, native: Array) -> Array:
        """See ArrayKind."""
        return np.empty(native.size, native.dtype)

    def scratch(self, size: int, dtype: Any) -> Array:
        """See ArrayKind."""
        return np.empty(size, dtype)

    def fill(self, native: Array, value: Any) -> None:
        """See ArrayKind."""
        native[...] = value

    def assign(self, native: Array, target: Array) -> None:
        """See ArrayKind."""
        np.copyto(target, native)

    def divide(self, flat: Array, count: int) -> None:
        """See ArrayKind."""
        with np.errstate(all="ignore"):  # all ranks have the same infinities
            divide_into(flat, count, flat)

    def multiply(self, source: Array, factor: float, out: Array) -> None:
        """See ArrayKind."""
        host_values.multiply(source, factor, out)

    def multiply_in_place(self, natives: Sequence[Array], factor: float) -> None:
        """See ArrayKind."""
        host_values.multiply_in_place(natives, factor)

    def all_finite(self, flat: Array) -> bool:
        """See ArrayKind."""
        return host_values.all_finite(flat)

    def sum_of_squares(self, flat: Array) -> float:
        """See ArrayKind."""
        return host_values.sum_of_squares(flat)

    def writeable(self, native: Array) -> bool:
        """See ArrayKind."""
        return native.flags.writeable

    # See ArrayKind. It is called for each gradient, so it is in C. The flag is enough: NumPy refuses to exchange the
    # memory of an array that has views.
    state = staticmethod(attrgetter("flags.writeable"))

    def byte_bounds(self, native: Array) -> tuple[int, int]:
        """See ArrayKind."""
        address: int = native.__array_interface__["data"][0]
        return span(native, address)

    def share_memory(self, first: Array, second: Array) -> bool:
        """See ArrayKind."""
        try:
            return bool(np.shares_memory(first, second, max_work=10_000))  # type: ignore[arg-type]  # any count is allowed
        except np.exceptions.TooHardError:
            return True


def span(array: Any, address: int) -> tuple[int, int]:
    """Returns the first address of a non-empty array and one past its last; `address` is its first element's."""
    if array.flags.c_contiguous or array.flags.f_contiguous:
        return address, address + array.nbytes
    steps = [stride * (length - 1) for stride, length in zip(array.strides, array.shape, strict=True)]
    low, high = sum(step for step in steps if step < 0), sum(step for step in steps if step > 0)
    return address + low, address + high + array.itemsize


def as_host_array(array: Any, who: str) -> Array:
    """Returns `array` as a NumPy array over the same memory.

    Args:
        array: a NumPy array, or any array in host memory that supports DLPack.
        who: the beginning of the error message, e.g. "rank 0/2: all_reduce".

    Raises:
        InvalidArgument: not an array, a masked or sparse array, or not in host memory.
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
        raise InvalidArgument(f"{who} needs a NumPy array or one that supports DLPack, got {kind_of(array)}")
    if native.dtype.hasobject:
        raise UnsupportedDtype(f"{who} cannot move Python objects (dtype {native.dtype}): {_FOR_OBJECTS}")
    return native


def kind_of(array: Any) -> str:
    """Describes an argument that is not an array, with advice."""
    if hasattr(array, "tocoo"):
        return "a sparse array"
    if isinstance(array, np.generic):
        return f"a NumPy scalar ({array.dtype}): {_FOR_NUMBERS}"
    name = "None" if array is None else type(array).__name__
    if isinstance(array, (int, float, complex)):
        return f"a {name}: {_FOR_NUMBERS}"
    if isinstance(array, (list, tuple)):
        return f"a {name}: make it an array with numpy.asarray(...)"
    if callable(getattr(array, "result", None)):
        return f"a {name}: pass its .result()"
    return f"{name} ({_FOR_OBJECTS})"


def _from_dlpack(array: Any, who: str) -> Array:
    device_type = array.__dlpack_device__()[0]
    if int(device_type) not in (DLPACK_CPU, DLPACK_CUDA_HOST):
        raise InvalidArgument(
            f"{who} needs an array in host memory, got one on a device "
            f'(DLPack device type {int(device_type)}): copy it to the host, or use backend="nccl"'
        )
    try:
        return _bfloat16_view(array) if _is_bfloat16(array) else np.from_dlpack(array)
    except (RuntimeError, BufferError, TypeError) as error:
        raise InvalidArgument(
            f"{who} cannot view {type(array).__name__} without a copy: {error}{advice(error)}"
        ) from error


def _is_bfloat16(array: Any) -> bool:
    return str(getattr(array, "dtype", "")) == "bfloat16"  # the dtype of ml_dtypes, as in JAX; PyTorch's text differs


def _bfloat16_view(array: Any) -> Array:
    """Returns a view of a JAX bfloat16 array, read-only: NumPy's DLPack does not support bfloat16.

    Raises:
        TypeError: the array is of another library, which may give a copy.
    """
    native = np.asarray(array)
    if native.flags.writeable:
        raise TypeError("NumPy supports no bfloat16 through DLPack")
    return native


def advice(error: Exception) -> str:
    """Returns advice for the most common refusal of DLPack: a PyTorch parameter."""
    return " (PyTorch: hand over p.data or p.grad)" if "require gradient" in str(error) else ""


def overlaps_itself(array: Any) -> bool:
    """Whether two indices may share memory (broadcast views, sliding windows); True if in doubt."""
    if array.flags.c_contiguous or array.flags.f_contiguous or array.size <= 1:
        return False
    extent = array.itemsize
    for stride, length in sorted((abs(s), n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1):
        if stride < extent:
            return True
        extent = stride * (length - 1) + extent
    return False


def digest_of_values(arrays: ArrayKind, native: Any) -> str:
    """Returns the SHA-256 of an array's elements, as bytes in C order, whatever its layout.

    A GPU's array is copied to host memory in pieces, after the current stream's
    work.
    """
    import hashlib  # imported here to keep the start of a rank short

    hasher = hashlib.sha256()
    if isinstance(native, np.ndarray):
        hasher.update(np.ascontiguousarray(native).reshape(-1).view(np.uint8).data)
        return hasher.hexdigest()
    flat: Any = arrays.flat(native)
    step = max(1, _PIECE_BYTES // flat.dtype.itemsize)
    for begin in range(0, flat.size, step):
        hasher.update(flat[begin : begin + step].get().view(np.uint8).data)
    return hasher.hexdigest()
