"""What the rooms above do with arrays, and the checks of a caller's arrays in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from gradsync.errors import InvalidArgument, UnsupportedDtype
from gradsync.reduction import Array, ReduceOp, accumulation_dtype, check_operation, part_dtype

CACHE_LINE_BYTES = 64
DLPACK_CPU = 1
DLPACK_CUDA_HOST = 3  # pinned host memory
# The squares of so many values are summed at a time: OpenBLAS sums more in threads, on cores that other ranks need.
_SUMMED_ELEMENTS = 2**13
# 64-bit words of which a digest is made at a time: they, their keys and the scratch memory fit into a core's cache.
_DIGEST_WORDS = 2**14
_DIGEST_FACTOR = 0x9E3779B97F4A7C15

_FOR_NUMBERS = "make it an array with numpy.array(...), or pass numbers to gs.comm.reduce_dict or comm.objects"
_FOR_OBJECTS = "comm.objects gathers, broadcasts and scatters Python objects"


class ArrayKind:
    """The functions for host arrays; the subclass DeviceArrays (nccl/arrays.py) has those for a GPU.

    A native array is one of NumPy or CuPy that `native` has returned. A flat array is 1-D and contiguous. A host array
    is NumPy's, or any in host memory that supports DLPack.
    """

    def check_operation(self, op: ReduceOp, dtype: np.dtype[Any]) -> None:
        """Raises UnsupportedDtype if this operator cannot reduce elements of this dtype."""
        check_operation(op, dtype)

    def native(self, array: Any, who: str) -> Any:
        """Returns `array` as NumPy's or CuPy's, over the same memory; see Collectives.native_array."""
        return as_host_array(array, who)

    def flat(self, native: Any) -> Any:
        """Returns the elements in C order as a flat array on the communicator's device: a view if possible."""
        return native.reshape(-1) if native.flags.c_contiguous else np.ascontiguousarray(native).reshape(-1)

    def is_viewed_flat(self, native: Any) -> bool:
        """Whether flat() returns a view of the array, not a copy."""
        return bool(native.flags.c_contiguous)

    def write_back(self, flat: Any, native: Any) -> None:
        """Copies the elements of `flat`, in C order, to `native`, unless it is a view of it."""
        if not native.flags.c_contiguous:
            native[...] = flat.view(native.dtype).reshape(native.shape)

    def empty(self, shape: tuple[int, ...], dtype: Any, like: Any) -> Any:
        """Returns a new C-contiguous array in the kind of memory (host or device) of the native array `like`."""
        return np.empty(shape, dtype)

    def empty_like(self, native: Any) -> Any:
        """Returns a new C-contiguous array of the shape, dtype and kind of memory (host or device) of `native`.

        Host memory is aligned to a cache line, so that JAX can use it without a copy.
        """
        room = np.empty(native.nbytes + CACHE_LINE_BYTES, np.uint8)
        begin = -room.__array_interface__["data"][0] % CACHE_LINE_BYTES
        return room[begin : begin + native.nbytes].view(native.dtype).reshape(native.shape)

    def scratch(self, size: int, dtype: Any) -> Any:
        """Returns a new flat array on the communicator's device, for values that only the current stream uses.

        If CuPy does not support the dtype, the array has bytes.
        """
        return np.empty(size, dtype)

    def zero(self, native: Any) -> None:
        """Sets all elements of an array on the communicator's device to 0."""
        native[...] = 0

    def assign(self, native: Any, target: Any) -> None:
        """Copies the elements of `native` to `target`, an array on the communicator's device."""
        np.copyto(target, native)

    def multiply_in_place(self, natives: Sequence[Any], factor: float) -> None:
        """Multiplies floating and complex arrays of any layout, on a GPU on the current stream.

        Products of half precision are computed in float32 and rounded once. Real and imaginary parts are multiplied
        separately: a complex number times infinity has NaN. Overflow gives infinity without a warning.
        """
        with np.errstate(all="ignore"):  # other code checks the values for overflow; the factor itself may overflow
            for part in [part for native in natives for part in real_parts(native)]:
                wide = accumulation_dtype(part.dtype)
                np.multiply(part, wide.type(factor), out=part, dtype=wide, casting="unsafe")

    def digest(self, native: Any) -> int:
        """Returns a 64-bit digest of an array's elements as bytes in C order; see digest_of_bytes."""
        return digest_of_bytes(np.ascontiguousarray(native).reshape(-1).view(np.uint8))

    def all_finite(self, flat: Any) -> Any:
        """Whether a flat array has neither NaN nor infinity; always True for integers and bools.

        On a GPU the result is a 0-d array, computed on the current stream; the host does not wait for it.
        """
        with np.errstate(all="ignore"):
            return bool(np.isfinite(flat).all())

    def sum_of_squares(self, flat: Any) -> Any:
        """Sums the squares of the absolute values of a flat array in float64; the same array gives the same bits.

        On a GPU the result is a 0-d array, computed on the current stream; the host does not wait for it.
        """
        parts, total = flat.view(part_dtype(flat.dtype)), 0.0
        with np.errstate(all="ignore"):
            for begin in range(0, parts.size, _SUMMED_ELEMENTS):
                piece = parts[begin : begin + _SUMMED_ELEMENTS].astype(np.float64)
                total += float(np.vecdot(piece, piece))
        return total

    def writeable(self, native: Any) -> bool:
        """Whether an array may be written to."""
        return bool(native.flags.writeable)

    def byte_bounds(self, native: Any) -> tuple[int, int]:
        """Returns the address of the first byte of a non-empty array, and the address after its last byte."""
        return span(native, native.__array_interface__["data"][0])

    def share_memory(self, first: Any, second: Any) -> bool:
        """Whether two arrays share an element; True if NumPy would need too long to find out."""
        try:
            return bool(np.shares_memory(first, second, max_work=10_000))  # type: ignore[arg-type]  # any int is valid
        except np.exceptions.TooHardError:
            return True


def real_parts(array: Any) -> list[Any]:
    """Returns views of a complex array's real and imaginary parts; of a real one, the array itself. CuPy's too."""
    if array.dtype.kind != "c":
        return [array]
    return [array.reshape(-1).view(part_dtype(array.dtype))] if array.flags.c_contiguous else [array.real, array.imag]


def digest_of_bytes(data: Array) -> int:
    """Returns a 64-bit digest of a 1-D array of bytes, whose positions count; it is the same on all machines.

    Different bytes of one length have equal digests with a probability of at most 2**-32, and nearly always of 2**-64.
    The digest is no defence against somebody who looks for such bytes.

    Source: NH of UMAC (Black et al., CRYPTO 1999): each word counts as (low half + key) * (high half + other key).
    """
    whole = data.size - data.size % 8
    words = data[:whole].view("<u8")
    room, keys, made = np.empty((2, min(words.size, _DIGEST_WORDS)), np.uint64), _digest_keys(), 0
    for begin in range(0, words.size, _DIGEST_WORDS):
        piece = words[begin : begin + _DIGEST_WORDS]
        (low, high), (low_keys, high_keys) = room[:, : piece.size], keys[:, : piece.size]
        np.bitwise_and(piece, 0xFFFFFFFF, out=low)
        np.right_shift(piece, 32, out=high)
        low += low_keys
        high += high_keys
        low *= high
        made = (made * _DIGEST_FACTOR + int(np.add.reduce(low))) % 2**64
    tail = data[whole:].tobytes()
    return (made * _DIGEST_FACTOR + int.from_bytes(tail, "little")) % 2**64 if tail else made


@lru_cache(maxsize=1)
def _digest_keys() -> Array:
    """Returns two rows of 64-bit keys that look random: SplitMix64 (Steele et al., OOPSLA 2014) of 1, 2 and so on."""
    keys: Array = np.arange(1, 2 * _DIGEST_WORDS + 1, dtype=np.uint64) * np.uint64(_DIGEST_FACTOR)
    keys = (keys ^ keys >> 30) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ keys >> 27) * np.uint64(0x94D049BB133111EB)
    keys ^= keys >> 31
    return keys.reshape(2, _DIGEST_WORDS)


def span(array: Any, address: int) -> tuple[int, int]:
    """Returns the address of the first byte of a non-empty array, and the address after its last byte.

    Args:
        array: an array with strides.
        address: the address of the element at index 0.
    """
    if array.flags.c_contiguous or array.flags.f_contiguous:
        return address, address + array.nbytes
    steps = [stride * (length - 1) for stride, length in zip(array.strides, array.shape, strict=True)]
    low, high = sum(step for step in steps if step < 0), sum(step for step in steps if step > 0)
    return address + low, address + high + array.itemsize


def as_host_array(array: Any, who: str) -> Array:
    """Returns `array` as a NumPy array over the same memory.

    Args:
        array: NumPy's, or any in host memory that supports DLPack.
        who: the beginning of errors, e.g. "rank 0/2: all_reduce".

    Raises:
        InvalidArgument: it is no array, is masked or sparse, is not in host memory, or cannot be viewed without a copy.
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
    """Returns what an argument is that is no array, with advice, for errors."""
    if hasattr(array, "tocoo"):
        return "a sparse array"
    if isinstance(array, np.generic):
        return f"a NumPy scalar ({array.dtype}): {_FOR_NUMBERS}"
    name = "None" if array is None else type(array).__name__
    if isinstance(array, (int, float, complex)):
        return f"{'an' if name == 'int' else 'a'} {name}: {_FOR_NUMBERS}"
    if isinstance(array, (list, tuple)):
        return f"a {name}: make it an array with numpy.asarray(...)"
    if callable(getattr(array, "result", None)):
        return f"a {name}: pass its .result()"
    return f"{name} ({_FOR_OBJECTS})"


def _from_dlpack(array: Any, who: str) -> Array:
    device_type = array.__dlpack_device__()[0]
    if int(device_type) not in (DLPACK_CPU, DLPACK_CUDA_HOST):
        raise InvalidArgument(
            f"{who} needs an array in host memory, got an array on a device "
            f'(DLPack device type {int(device_type)}): copy it to the host, or use backend="nccl"'
        )
    try:
        return _bfloat16_view(array) if _is_bfloat16(array) else _written_if_may_be(array, np.from_dlpack(array))
    except (RuntimeError, BufferError, TypeError) as error:
        raise InvalidArgument(
            f"{who} cannot view {type(array).__name__} without a copy: {error}{advice(error)}"
        ) from error


def _written_if_may_be(array: Any, view: Array) -> Array:
    """Returns a view of an array of another library through which NumPy writes, if the library allows it.

    NumPy takes each array of DLPack without a version for a read-only one, also those of PyTorch before 2.9; NumPy
    before 2.2.5 all others too. __array__ tells: PyTorch's can be written to, JAX's cannot.
    """
    if view.flags.writeable or not hasattr(array, "__array__"):
        return view
    other = np.asarray(array)
    is_same = other.ctypes.data == view.ctypes.data and (other.shape, other.dtype) == (view.shape, view.dtype)
    return other if is_same and other.strides == view.strides else view


def _is_bfloat16(array: Any) -> bool:
    return str(getattr(array, "dtype", "")) == "bfloat16"  # the dtype of ml_dtypes, as in JAX; PyTorch's text differs


def _bfloat16_view(array: Any) -> Array:
    """Returns a read-only view of a JAX bfloat16 array, made without DLPack: NumPy's does not support bfloat16.

    Raises:
        TypeError: it is another library's, whose conversion may copy.
    """
    native = np.asarray(array)
    if native.flags.writeable:
        raise TypeError("NumPy does not support bfloat16 through DLPack")
    return native


def advice(error: Exception) -> str:
    """Returns advice for the most common error of DLPack, that of a PyTorch parameter; "" for all others."""
    return " (PyTorch: hand over p.data or p.grad)" if "require gradient" in str(error) else ""


def overlaps_itself(array: Any) -> bool:
    """Whether two elements of an array may share memory, as in broadcast views and sliding windows; True in doubt."""
    if array.flags.c_contiguous or array.flags.f_contiguous or array.size <= 1:
        return False
    extent = array.itemsize
    for stride, length in sorted((abs(s), n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1):
        if stride < extent:
            return True
        extent = stride * (length - 1) + extent
    return False
