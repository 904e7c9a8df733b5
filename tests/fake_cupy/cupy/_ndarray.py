"""The array: a view of device memory that the host cannot look into."""

from __future__ import annotations

import operator
from typing import Any, NoReturn

import numpy as np

from . import _dlpack, _elementwise
from ._layout import Flags, basic_index, checked_dtype, contiguous_strides
from .cuda import pinned_memory
from .cuda.device import Device
from .cuda.memory import MemoryPointer, alloc
from .cuda.stream import get_current_stream


class ndarray(_elementwise.Operators):  # noqa: N801
    """An array on the current device, or a view of the memory of memptr.

    Every operation is queued on the current stream and returns at once. The queued work uses `_host`, and
    nobody else.

    Args:
        shape: lengths of the axes.
        dtype: of the elements.
        memptr: where they are; by default fresh memory.
        strides: bytes from one element to the next.
        order: C or F.
    """

    __array_priority__ = 100
    __hash__ = None

    def __init__(
        self,
        shape: Any,
        dtype: Any = float,
        memptr: MemoryPointer | None = None,
        strides: tuple[int, ...] | None = None,
        order: str = "C",
    ) -> None:
        shape = (int(shape),) if np.isscalar(shape) else tuple(int(length) for length in shape)
        dtype = checked_dtype(dtype)
        if strides is None:
            strides = contiguous_strides(shape, dtype.itemsize, order)
        if memptr is None:
            memptr = alloc(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        self._become(memptr, memptr.host_view(shape, dtype, strides), None)

    def _become(self, data: MemoryPointer, host: np.ndarray, base: ndarray | None) -> None:
        self.data = data
        self._host = host
        self.base = base

    def _view_of(self, host: np.ndarray) -> ndarray:
        """Returns the array whose work uses this view of our memory."""
        view = ndarray.__new__(type(self))  # CuPy's views are of the class of what they view
        offset = host.__array_interface__["data"][0] - self._host.__array_interface__["data"][0]
        view._become(self.data + (offset if self.data.mem.block else 0), host, self if self.base is None else self.base)
        return view

    shape = property(lambda self: self._host.shape)
    strides = property(lambda self: self._host.strides)
    dtype = property(lambda self: self._host.dtype)
    size = property(lambda self: self._host.size)
    ndim = property(lambda self: self._host.ndim)
    itemsize = property(lambda self: self._host.itemsize)
    nbytes = property(lambda self: self._host.nbytes)
    device = property(lambda self: Device(self.data.device_id))
    T = property(lambda self: self.transpose())
    real = property(lambda self: self._view_of(self._host.real))
    imag = property(lambda self: self._view_of(self._host.imag))

    @property
    def flags(self) -> Flags:
        flags = self._host.flags
        return Flags(flags.c_contiguous, flags.f_contiguous, self.base is None)

    # Forbidden on the host.

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy array "
            "explicitly."
        )

    __array_ufunc__ = None

    def __array_function__(self, *args: Any, **kwargs: Any) -> Any:
        return NotImplemented

    # Allowed; each waits for the current stream.

    def get(self, stream: Any = None, order: str = "C", out: np.ndarray | None = None, blocking: bool = True) -> Any:
        """Copies to the host, on a stream, by default the current one; returns early for pinned memory only."""
        target = np.empty(self.shape, self.dtype, self._order(order)) if out is None else out
        if not isinstance(target, np.ndarray):
            raise TypeError("Only numpy.ndarray can be obtained from cupy.ndarray")
        if target.dtype != self.dtype:
            raise TypeError(f"{self.dtype} array cannot be obtained from {target.dtype} array")
        if target.shape != self.shape:
            raise ValueError(f"Shape mismatch. Expected shape: {self.shape}, actual shape: {target.shape}")
        if not target.flags.forc:
            raise RuntimeError("`out` cannot be specified when copying to non-contiguous ndarray")
        host, place = self._host, pinned_memory.unowned(target)
        queue = self._queue(stream)
        queue.submit(lambda: np.copyto(place, host))
        if blocking or not pinned_memory.is_pinned(target.ctypes.data, target.nbytes):
            queue.synchronize()
        return target

    def _queue(self, stream: Any) -> Any:
        """Returns the queue of a stream, by default the current one, of this array's device."""
        device_id = self.data.device_id
        return (get_current_stream(device_id) if stream is None else stream)._queue(device_id)

    def item(self) -> Any:
        """Returns the only element."""
        if self.size != 1:
            raise ValueError("can only convert an array of size 1 to a Python scalar")
        return self.get().item()

    def __bool__(self) -> bool:
        if self.size == 0:
            return False
        if self.size > 1:
            raise ValueError(
                "The truth value of an array with more than one element is ambiguous. Use a.any() or a.all()"
            )
        return bool(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        return operator.index(self.get())  # refuses floats, as NumPy does

    def __float__(self) -> float:
        return float(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def tolist(self) -> Any:
        """Returns the elements as nested lists."""
        return self.get().tolist()

    def __repr__(self) -> str:
        return repr(self.get())

    def __len__(self) -> int:
        return len(self._host)

    # Copies from the host.

    def set(self, arr: np.ndarray, stream: Any = None) -> None:
        """Copies from the host, on a stream, by default the current one."""
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if arr.dtype != self.dtype:
            raise TypeError(f"{arr.dtype} array cannot be set to {self.dtype} array")
        if arr.shape != self.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        if not self._host.flags.forc:
            raise RuntimeError("Cannot set to non-contiguous array")
        order = "C" if self._host.flags.c_contiguous else "F"
        source = np.asarray(arr, order=order)
        if not pinned_memory.is_pinned(source.ctypes.data, source.nbytes):
            source = source.copy(order)  # the driver stages it before it returns
        else:
            source = pinned_memory.unowned(source)
        host = self._host
        self._queue(stream).submit(lambda: np.copyto(host, source))

    # Views.

    def __getitem__(self, key: Any) -> ndarray:
        return self._view_of(self._host[basic_index(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, np.ndarray) and value.ndim > 0:
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        _elementwise.assign(self[key], value, "unsafe")

    def __iter__(self):
        return (self[index] for index in range(len(self)))

    def view(self, dtype: Any = None, type: Any = None) -> ndarray:
        """Returns the same memory as another dtype, or as an array of another class."""
        view = self._view_of(self._host.view() if dtype is None else self._host.view(checked_dtype(dtype)))
        if type is not None:
            view.__class__ = type
        return view

    def transpose(self, *axes: Any) -> ndarray:
        """Returns the same memory with the axes in another order."""
        return self._view_of(self._host.transpose(*axes))

    def reshape(self, *shape: Any, order: str = "C") -> ndarray:
        """Returns a view where one is possible, else a copy."""
        host = self._host.reshape(*shape, order=order)
        if self.size == 0 or np.may_share_memory(host, self._host):
            return self._view_of(host if self.size else self.data.host_view(host.shape, host.dtype, host.strides))
        return self.copy(order).reshape(*shape, order=order)

    def ravel(self, order: str = "C") -> ndarray:
        """Returns all elements along one axis; a view where one is possible."""
        return self.reshape(-1, order=self._order(order))

    def _order(self, order: str) -> str:
        if order == "A":
            return "F" if self._host.flags.f_contiguous and not self._host.flags.c_contiguous else "C"
        return order

    # Copies.

    def copy(self, order: str = "C") -> ndarray:
        """Returns a copy on the current device."""
        result = _elementwise.new_array_like(self._host, self.dtype, order)
        _elementwise.launch(np.copyto, result._host, self._host)
        return result

    def astype(
        self, dtype: Any, order: str = "K", casting: Any = None, subok: Any = None, copy: bool = True
    ) -> ndarray:
        """Returns a copy in another dtype; the array itself with copy=False, where it has that dtype."""
        dtype = checked_dtype(dtype)
        if casting is not None and not np.can_cast(self.dtype, dtype, casting):
            raise TypeError(
                f"Cannot cast array data from {self.dtype!r} to {dtype!r} according to the rule '{casting}'"
            )
        if not copy and dtype == self.dtype:
            return self
        result = _elementwise.new_array_like(self._host, dtype, order)
        _elementwise.assign(result, self, "unsafe")
        return result

    def fill(self, value: Any) -> None:
        """Sets every element."""
        self[...] = value

    # Exchange with other libraries.

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "stream": get_current_stream().ptr or 1,
            "version": 3,
            "strides": None if self._host.flags.c_contiguous else self.strides,
            "data": (self.data.ptr if self.size else 0, False),
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return _dlpack.CUDA, self.data.device_id

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None
    ) -> Any:
        return _dlpack.export(self, stream, max_version, dl_device, copy)


ndarray.__module__ = "cupy"
