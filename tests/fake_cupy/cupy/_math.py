"""Functions on arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._creation import empty
from ._elementwise import assign, compute, launch, operand, reduce
from ._ndarray import ndarray


class Ufunc:
    """An elementwise function.

    Args:
        function: NumPy's.
    """

    def __init__(self, function: np.ufunc) -> None:
        self._function = function

    def __call__(self, *args: Any, out: Any = None, **options: Any) -> ndarray:
        inputs, outputs = args[: self._function.nin], args[self._function.nin :]
        return compute(self._function, *inputs, out=outputs[0] if outputs else out, **options)


def prod(a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
    return reduce(np.prod, a, axis, dtype, out, keepdims)


def sum(a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
    return reduce(np.sum, a, axis, dtype, out, keepdims)


def amax(a: Any, axis: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
    return reduce(np.max, a, axis, None, out, keepdims)


def amin(a: Any, axis: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
    return reduce(np.min, a, axis, None, out, keepdims)


def copyto(dst: ndarray, src: Any, casting: str = "same_kind", where: None = None) -> None:
    """Queues dst[...] = src."""
    if isinstance(src, np.ndarray) and src.ndim > 0:
        raise ValueError("non-scalar numpy.ndarray cannot be used for copyto")
    assign(dst, src, casting)


def concatenate(
    tup: Any, axis: int | None = 0, out: Any = None, *, dtype: Any = None, casting: str = "same_kind"
) -> ndarray:
    """Joins arrays along an axis; all of them flattened where it is None."""
    arrays = [array.ravel() if axis is None else array for array in tup]
    axis = axis or 0
    hosts = [operand(array) for array in arrays]
    shape = list(hosts[0].shape)
    for host in hosts:
        others = [*host.shape[:axis], shape[axis], *host.shape[axis:][1:]]
        if others != shape:
            raise ValueError("All arrays must have same shape except the axis to concatenate")
    shape[axis] = np.add.reduce([host.shape[axis] for host in hosts])
    result = empty(tuple(shape), np.result_type(*hosts) if dtype is None else dtype) if out is None else out
    if result.shape != tuple(shape):
        raise ValueError("Output array has wrong shape")
    if any(not np.can_cast(host.dtype, result.dtype, casting) for host in hosts):
        raise TypeError(f"Cannot cast to {result.dtype!r} according to '{casting}'")
    launch(np.concatenate, hosts, axis, out=operand(result), casting="unsafe")
    return result


def where(condition: ndarray, x: Any, y: Any) -> ndarray:
    """Chooses element by element."""
    return queued(np.where, condition, x, y)


def matmul(a: ndarray, b: ndarray) -> ndarray:
    """Multiplies matrices."""
    return queued(np.matmul, a, b)


ndarray.__matmul__ = matmul


def queued(function: Any, *values: Any) -> ndarray:
    """Queues a function that makes an array, and returns the array that will hold it."""
    operands = [operand(value) for value in values]
    probe = function(*[np.ones_like(host) if isinstance(host, np.ndarray) else host for host in operands])
    result = empty(probe.shape, probe.dtype)
    launch(lambda goal, *hosts: np.copyto(goal, function(*hosts)), operand(result), *operands)
    return result


def broadcast_to(array: ndarray, shape: Any) -> ndarray:
    """Returns a view with strides of 0."""
    view = np.broadcast_to(array._host, shape)
    return array._view_of(np.lib.stride_tricks.as_strided(array._host, view.shape, view.strides))  # CuPy's is writeable


def may_share_memory(a: Any, b: Any, max_work: Any = None) -> bool:
    """Returns whether the ranges of addresses overlap."""
    if not (isinstance(a, ndarray) and isinstance(b, ndarray)):
        return False
    return np.may_share_memory(a._host, b._host)


def shares_memory(a: Any, b: Any, max_work: Any = None) -> bool:
    """Returns whether any element is in both."""
    if not (isinstance(a, ndarray) and isinstance(b, ndarray)):
        return False
    return np.shares_memory(a._host, b._host)
