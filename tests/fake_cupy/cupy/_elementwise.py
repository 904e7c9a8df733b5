"""Arithmetic and reductions: checked at once, and computed by NumPy when the stream gets there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .cuda._devices import current_device_id
from .cuda.stream import current_queue


def launch(work: Callable[..., Any], *operands: Any, **options: Any) -> None:
    """Queues a call on the current stream. The operands are views of memory, never arrays: see PooledMemory."""
    current_queue().submit(lambda: work(*operands, **options))


def new_array(shape: Any, dtype: Any, order: str = "C") -> Any:
    """Returns uninitialised memory."""
    from ._ndarray import ndarray

    return ndarray(shape, dtype, order=order)


def new_array_like(host: np.ndarray, dtype: Any, order: str) -> Any:
    """Returns uninitialised memory of the same shape, in an order of C, F, A or K."""
    if order in ("A", "K"):
        order = "F" if host.flags.f_contiguous and not host.flags.c_contiguous else "C"
    return new_array(host.shape, dtype, order)


def operand(value: Any) -> Any:
    """Returns an operand for queued work: a view of memory on the current device, or a scalar."""
    from ._ndarray import ndarray

    if isinstance(value, ndarray):
        if value.data.device_id != current_device_id():
            raise ValueError(
                f"The device where the array resides ({value.data.device_id}) is different from the current device "
                f"({current_device_id()}). Peer access is unavailable between these devices."
            )
        return value._host
    if isinstance(value, np.ndarray) and value.ndim == 0:
        return value.copy()[()]
    if isinstance(value, (bool, int, float, complex, np.generic)):
        return value
    raise TypeError(f"Unsupported type {type(value)}")


def assign(target: Any, value: Any, casting: str) -> None:
    """Queues target[...] = value."""
    goal, source = operand(target), np.asarray(operand(value))
    source_shape = source.shape
    if np.broadcast_shapes(goal.shape, source_shape) != goal.shape:
        raise ValueError(f"could not broadcast input array from shape {source_shape} into shape {goal.shape}")
    if not np.can_cast(source.dtype, goal.dtype, casting):
        raise TypeError(f"Cannot cast array data from {source.dtype!r} to {goal.dtype!r} according to '{casting}'")
    if np.iscomplexobj(source) and goal.dtype.kind != "c":
        source = source.real
    launch(np.copyto, goal, source, casting="unsafe")


def compute(function: Any, *values: Any, out: Any = None, **options: Any) -> Any:
    """Queues a ufunc and returns the array that will hold its result. Options: the dtype and the casting."""
    operands = [operand(value) for value in values]
    probes = [np.empty(0, host.dtype) if isinstance(host, np.ndarray) else host for host in operands]
    goal = None if out is None else operand(out)
    shape = np.broadcast_shapes(*map(np.shape, operands))
    # NumPy's own rules say here and now which dtype comes out, and whether it fits.
    with np.errstate(all="ignore"):
        probe = function(*probes, out=None if goal is None else np.empty(0, goal.dtype), **options)
    if goal is not None and goal.shape != np.broadcast_shapes(shape, goal.shape):
        raise ValueError(f"non-broadcastable output operand with shape {goal.shape} for shape {shape}")
    result = new_array(shape, probe.dtype) if out is None else out
    launch(function, *operands, out=result._host, **options)
    return result


def reduce(function: Any, array: Any, axis: Any, dtype: Any, out: Any, keepdims: bool) -> Any:
    """Queues a reduction over some axes, by default all."""
    host = operand(array)
    axes = _axes(axis, host.ndim)
    lengths = [1 if index in axes else length for index, length in enumerate(host.shape)]
    options = {"axis": axes, "keepdims": keepdims}
    if dtype is not None:
        options["dtype"] = dtype
    probe = np.asarray(function(np.ones(lengths, host.dtype), **options))
    if host.size == 0:
        np.asarray(function(host, **options))  # raises where the reduction has no value for nothing
    result = new_array(probe.shape, probe.dtype) if out is None else out
    if result.shape != probe.shape:
        raise ValueError(f"output of shape {result.shape} for a reduction of shape {probe.shape}")
    launch(function, host, out=operand(result), **options)
    return result


def _axes(axis: Any, ndim: int) -> tuple[int, ...]:
    """Returns the axes to reduce over."""
    axes = range(ndim) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    for index in axes:
        if not -ndim <= index < ndim:
            raise np.exceptions.AxisError(index, ndim)
    return tuple(index % ndim for index in axes)


def _binary(function: Any) -> tuple[Any, Any, Any]:
    """Returns the method, its reflection and its in-place form."""

    def in_place(self: Any, other: Any) -> Any:
        return compute(function, self, other, out=self)

    return (
        lambda self, other: compute(function, self, other),
        lambda self, other: compute(function, other, self),
        in_place,
    )


class Operators:
    """The operators and reductions of an array."""

    __add__, __radd__, __iadd__ = _binary(np.add)
    __sub__, __rsub__, __isub__ = _binary(np.subtract)
    __mul__, __rmul__, __imul__ = _binary(np.multiply)
    __truediv__, __rtruediv__, __itruediv__ = _binary(np.true_divide)
    __floordiv__, __rfloordiv__, __ifloordiv__ = _binary(np.floor_divide)
    __mod__, __rmod__, __imod__ = _binary(np.remainder)
    __pow__, __rpow__, __ipow__ = _binary(np.power)
    __and__, __rand__, __iand__ = _binary(np.bitwise_and)
    __or__, __ror__, __ior__ = _binary(np.bitwise_or)
    __eq__, __ne__ = _binary(np.equal)[0], _binary(np.not_equal)[0]
    __lt__, __le__ = _binary(np.less)[0], _binary(np.less_equal)[0]
    __gt__, __ge__ = _binary(np.greater)[0], _binary(np.greater_equal)[0]

    def __neg__(self) -> Any:
        return compute(np.negative, self)

    def __invert__(self) -> Any:
        return compute(np.invert, self)

    def __abs__(self) -> Any:
        return compute(np.absolute, self)

    def sum(self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        return reduce(np.sum, self, axis, dtype, out, keepdims)

    def prod(self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        return reduce(np.prod, self, axis, dtype, out, keepdims)

    def mean(self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        return reduce(np.mean, self, axis, dtype, out, keepdims)

    def max(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        return reduce(np.max, self, axis, None, out, keepdims)

    def min(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        return reduce(np.min, self, axis, None, out, keepdims)

    def all(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        return reduce(np.all, self, axis, None, out, keepdims)

    def any(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        return reduce(np.any, self, axis, None, out, keepdims)
