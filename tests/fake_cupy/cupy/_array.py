"""The array: a view of device memory that the host cannot look into, and the arithmetic that streams do on it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from . import _dlpack
from .cuda import memory
from .cuda._devices import Device, current_device
from .cuda.memory import MemoryPointer, alloc
from .cuda.stream import current_queue, get_current_stream


def launch(work: Callable[..., Any], *operands: Any, **options: Any) -> None:
    """Queues a call on the current stream. Operands are views of memory: arrays would be kept by it."""
    current_queue().submit(lambda: work(*operands, **options))


def checked_dtype(dtype: Any) -> np.dtype:
    """A dtype that CuPy supports, or an error."""
    dtype = np.dtype(dtype)
    is_ml_dtype = dtype.type.__module__ == "ml_dtypes"
    if (dtype.kind not in "?biufc" or dtype.itemsize > 16 or dtype.char in "gG") and not is_ml_dtype:
        raise ValueError(f"Unsupported dtype {dtype}")
    if dtype.byteorder == ">":
        raise ValueError(f"Unsupported dtype {dtype} with big-endian byte-order")
    return dtype


class Flags:
    """How an array lies in memory; there is no `writeable`, as in CuPy."""

    def __init__(self, host: np.ndarray, owndata: bool) -> None:
        self.c_contiguous, self.f_contiguous = host.flags.c_contiguous, host.flags.f_contiguous
        self.owndata, self.forc = owndata, host.flags.forc


class ndarray:  # noqa: N801
    """An array on the current device, or a view of the memory of memptr.

    Every operation is queued on the current stream and returns at once. The queued work uses `_host`, and nobody else.

    Args:
        shape: lengths of the axes.
        dtype: of the elements.
        memptr: where they are; by default fresh memory.
        strides: bytes from one element to the next.
        order: C or F.
    """

    __array_priority__ = 100
    __array_ufunc__ = None
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
            strides = _contiguous_strides(shape, dtype.itemsize, order)
        if memptr is None:
            memptr = alloc(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        self._become(memptr, memptr.host_view(shape, dtype, strides), None)

    def _become(self, data: MemoryPointer, host: np.ndarray, base: ndarray | None) -> None:
        self.data, self._host, self.base = data, host, base

    def _view_of(self, host: np.ndarray) -> ndarray:
        """The array whose work uses this view of our memory."""
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
    flags = property(lambda self: Flags(self._host, self.base is None))
    device = property(lambda self: Device(self.data.device_id))
    T = property(lambda self: self.transpose())
    real = property(lambda self: self._view_of(self._host.real))
    imag = property(lambda self: self._view_of(self._host.imag))

    # -- Between host and device ----------------------------------------------------------------------------------

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct one.")

    def __array_function__(self, *args: Any, **kwargs: Any) -> Any:
        return NotImplemented

    def get(self, stream: Any = None, order: str = "C", out: np.ndarray | None = None, blocking: bool = True) -> Any:
        """Copies to the host, on a stream, by default the current one; returns early for pinned memory only."""
        target = np.empty(self.shape, self.dtype, self._order(order)) if out is None else out
        if not isinstance(target, np.ndarray) or target.dtype != self.dtype:
            raise TypeError(
                f"{self.dtype} array cannot be obtained from {type(target)}, {getattr(target, 'dtype', '')}"
            )
        if target.shape != self.shape:
            raise ValueError(f"Shape mismatch. Expected shape: {self.shape}, actual shape: {target.shape}")
        if not target.flags.forc:
            raise RuntimeError("`out` cannot be specified when copying to non-contiguous ndarray")
        host, room = self._host, memory.unowned(target)
        queue = self._queue(stream)
        queue.submit(lambda: np.copyto(room, host))
        if blocking or not memory.is_pinned(target):
            queue.synchronize()
        return target

    def set(self, arr: np.ndarray, stream: Any = None) -> None:
        """Copies from the host, on a stream, by default the current one."""
        if not isinstance(arr, np.ndarray) or arr.dtype != self.dtype:
            raise TypeError(f"{type(arr)}, {getattr(arr, 'dtype', '')} cannot be set to {self.dtype} array")
        if arr.shape != self.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        if not self._host.flags.forc:
            raise RuntimeError("Cannot set to non-contiguous array")
        order = "C" if self._host.flags.c_contiguous else "F"
        source = np.asarray(arr, order=order)
        # The driver stages other memory before it returns.
        source = memory.unowned(source) if memory.is_pinned(source) else source.copy(order)
        host = self._host
        self._queue(stream).submit(lambda: np.copyto(host, source))

    def _queue(self, stream: Any) -> Any:
        """The queue of a stream, by default the current one, of this array's device."""
        device_id = self.data.device_id
        return (get_current_stream(device_id) if stream is None else stream)._queue(device_id)

    def item(self) -> Any:
        return self.get().item()

    def __bool__(self) -> bool:
        return bool(self.get()) if self.size else False

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        return operator.index(self.get())  # refuses floats, as NumPy does

    def __float__(self) -> float:
        return float(self.item())

    def tolist(self) -> Any:
        return self.get().tolist()

    def __repr__(self) -> str:
        return repr(self.get())

    def __len__(self) -> int:
        return len(self._host)

    # -- Views and copies -----------------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> ndarray:
        key = key if isinstance(key, tuple) else (key,)
        if not all(part is None or part is ... or isinstance(part, (slice, int, np.integer)) for part in key):
            raise IndexError(f"the fake knows basic indexing only, not {key!r}")
        return self._view_of(self._host[key if ... in key else (*key, ...)])  # NumPy gives a scalar without the dots

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, np.ndarray) and value.ndim > 0:
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        assign(self[key], value, "unsafe")

    def __iter__(self):
        return (self[index] for index in range(len(self)))

    def view(self, dtype: Any = None, type: Any = None) -> ndarray:
        """The same memory as another dtype, or as an array of another class."""
        view = self._view_of(self._host.view() if dtype is None else self._host.view(checked_dtype(dtype)))
        if type is not None:
            view.__class__ = type
        return view

    def transpose(self, *axes: Any) -> ndarray:
        return self._view_of(self._host.transpose(*axes))

    def reshape(self, *shape: Any, order: str = "C") -> ndarray:
        """A view where one is possible, else a copy."""
        host = self._host.reshape(*shape, order=order)
        if self.size == 0 or np.may_share_memory(host, self._host):
            return self._view_of(host if self.size else self.data.host_view(host.shape, host.dtype, host.strides))
        return self.copy(order).reshape(*shape, order=order)

    def _order(self, order: str) -> str:
        is_f = self._host.flags.f_contiguous and not self._host.flags.c_contiguous
        return ("F" if is_f else "C") if order in ("A", "K") else order

    def copy(self, order: str = "C") -> ndarray:
        """A copy on the current device, which may be another one."""
        result = ndarray(self.shape, self.dtype, order=self._order(order))
        launch(np.copyto, result._host, self._host)
        return result

    def astype(
        self, dtype: Any, order: str = "K", casting: Any = None, subok: Any = None, copy: bool = True
    ) -> ndarray:
        """A copy in another dtype; the array itself with copy=False, where it has that dtype."""
        if not copy and np.dtype(dtype) == self.dtype:
            return self
        result = ndarray(self.shape, dtype, order=self._order(order))
        assign(result, self, "unsafe")
        return result

    def fill(self, value: Any) -> None:
        self[...] = value

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
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

    # -- Arithmetic: checked at once, and computed by NumPy when the stream gets there -----------------------------

    def __abs__(self) -> ndarray:
        return compute(np.absolute, self)


def _contiguous_strides(shape: tuple[int, ...], itemsize: int, order: str) -> tuple[int, ...]:
    strides, step = [0] * len(shape), itemsize
    for axis in range(len(shape)) if order == "F" else reversed(range(len(shape))):
        strides[axis] = step
        step *= max(shape[axis], 1)
    return tuple(strides)


def operand(value: Any) -> Any:
    """An operand of queued work: a view of memory on the current device, or a scalar."""
    if isinstance(value, ndarray):
        if value.data.device_id != current_device().device_id:
            raise ValueError(
                f"The device where the array resides ({value.data.device_id}) is different from the current device "
                f"({current_device().device_id}). Peer access is unavailable between these devices."
            )
        return value._host
    if isinstance(value, np.ndarray) and value.ndim == 0:
        return value.copy()[()]
    if isinstance(value, (bool, int, float, complex, np.generic)):
        return value
    raise TypeError(f"Unsupported type {type(value)}")


def assign(target: ndarray, value: Any, casting: str) -> None:
    """Queues target[...] = value."""
    goal, source = operand(target), np.asarray(operand(value))
    if np.broadcast_shapes(goal.shape, source.shape) != goal.shape:
        raise ValueError(f"could not broadcast input array from shape {source.shape} into shape {goal.shape}")
    if not np.can_cast(source.dtype, goal.dtype, casting):
        raise TypeError(f"Cannot cast array data from {source.dtype!r} to {goal.dtype!r} according to '{casting}'")
    if np.iscomplexobj(source) and goal.dtype.kind != "c":
        source = source.real
    launch(np.copyto, goal, source, casting="unsafe")


def compute(function: Any, *values: Any, out: Any = None, **options: Any) -> ndarray:
    """Queues a ufunc, and gives the array that will hold its result. Options: the dtype and the casting."""
    operands = [operand(value) for value in values]
    probes = [np.empty(0, host.dtype) if isinstance(host, np.ndarray) else host for host in operands]
    goal = None if out is None else operand(out)
    shape = np.broadcast_shapes(*map(np.shape, operands))
    with np.errstate(all="ignore"):  # NumPy's own rules say here and now which dtype comes out, and whether it fits
        probe = function(*probes, out=None if goal is None else np.empty(0, goal.dtype), **options)
    if goal is not None and goal.shape != np.broadcast_shapes(shape, goal.shape):
        raise ValueError(f"non-broadcastable output operand with shape {goal.shape} for shape {shape}")
    result = ndarray(shape, probe.dtype) if out is None else out
    launch(function, *operands, out=result._host, **options)
    return result


def queued(function: Any, *values: Any, out: Any = None, **options: Any) -> ndarray:
    """Queues any function that makes an array, and gives the array that will hold it."""
    operands = [operand(value) for value in values]
    probe = np.asarray(function(*[np.ones_like(h) if isinstance(h, np.ndarray) else h for h in operands], **options))
    result = ndarray(probe.shape, probe.dtype) if out is None else out
    launch(lambda goal, *hosts: np.copyto(goal, function(*hosts, **options), "unsafe"), operand(result), *operands)
    return result


def _give_operators() -> None:
    names = {"truediv": np.true_divide, "floordiv": np.floor_divide, "mod": np.remainder, "pow": np.power}
    names |= {"add": np.add, "sub": np.subtract, "mul": np.multiply, "and": np.bitwise_and, "or": np.bitwise_or}
    for name, f in names.items():
        setattr(ndarray, f"__{name}__", lambda self, other, f=f: compute(f, self, other))
        setattr(ndarray, f"__r{name}__", lambda self, other, f=f: compute(f, other, self))
        setattr(ndarray, f"__i{name}__", lambda self, other, f=f: compute(f, self, other, out=self))
    for name in ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"):
        short = {"equal": "eq", "less": "lt", "greater": "gt"}.get(name, name[0] + "e")
        f = getattr(np, name)
        setattr(ndarray, f"__{short}__", lambda self, other, f=f: compute(f, self, other))
    for name in ("sum", "prod", "mean", "max", "min", "all", "any"):
        f = getattr(np, name)
        setattr(ndarray, name, lambda self, axis=None, f=f, **o: queued(f, self, axis=axis, **o))


_give_operators()
ndarray.__module__ = "cupy"
