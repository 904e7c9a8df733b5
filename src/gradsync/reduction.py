"""Reductions: the operators, the dtypes that they support, and their reference implementation in NumPy.

This module computes with host arrays, and does not communicate. The shared-memory backend reduces with `reduction_of`.
The tests compare every backend with `reduce_into` and with NumPy's float64.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from gradsync.errors import InvalidArgument, UnsupportedDtype, shown

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]
else:  # importing numpy.typing would take time at every start
    Array = np.ndarray


class ReduceOp(enum.StrEnum):
    """An operator that reduces the arrays of all ranks to one array, element by element."""

    SUM = "sum"
    MEAN = "mean"
    PROD = "prod"
    MIN = "min"
    MAX = "max"

    @classmethod
    def parse(cls, value: str | ReduceOp) -> ReduceOp:
        """Returns the operator that has this name, in upper or lower case.

        Raises:
            InvalidArgument: no operator has this name.
        """
        op = _find(value)
        if op is None:
            raise InvalidArgument(f"op needs to be one of {', '.join(op.value for op in cls)}, got {shown(value)}")
        return op


_OPS_BY_NAME = {op.value: op for op in ReduceOp}


def _find(value: object) -> ReduceOp | None:
    if isinstance(value, ReduceOp):
        return value
    return _OPS_BY_NAME.get(value.lower()) if isinstance(value, str) else None


def parse_reduce_method(value: str | ReduceOp, argument: str) -> ReduceOp:
    """Returns the operator for gradients from its name: "sum" or "mean", in upper or lower case.

    Args:
        value: the name, or the operator.
        argument: the name of the caller's argument in the error.

    Raises:
        InvalidArgument: the value is neither "sum" nor "mean".
    """
    op = _find(value)
    if op is not ReduceOp.SUM and op is not ReduceOp.MEAN:
        given = repr(value) if isinstance(value, str) else type(value).__name__
        raise InvalidArgument(f'{argument} needs to be "sum" or "mean", got {given}')
    return op


_ARITHMETIC = frozenset({ReduceOp.SUM, ReduceOp.PROD, ReduceOp.MIN, ReduceOp.MAX})
_FLOATING = _ARITHMETIC | {ReduceOp.MEAN}

# The dtype table: name -> the operators that are defined for it. Complex numbers have no order, a mean of integers
# would need rounding, and a bool has no sum.
OPERATIONS_BY_DTYPE: dict[str, frozenset[ReduceOp]] = {
    **dict.fromkeys(("float16", "bfloat16", "float32", "float64"), _FLOATING),
    **dict.fromkeys(("complex64", "complex128"), frozenset({ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PROD})),
    **dict.fromkeys(("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"), _ARITHMETIC),
    "bool": frozenset({ReduceOp.MIN, ReduceOp.MAX}),
}

# On the host, gradsync adds values of half precision in float32, so that it rounds a sum over many ranks only once.
_HALF_PRECISION = ("float16", "bfloat16")
_FLOAT32 = np.dtype(np.float32)

# gradsync reduces arrays of half precision in blocks of this size, because their float32 values fit into a core's L2
# cache.
_BLOCK_ELEMENTS = 2**16


class _Block(threading.local):
    """A thread's buffer for one block of values, converted to float32."""

    def __init__(self) -> None:
        self.total = np.empty(_BLOCK_ELEMENTS, np.float32)


_block = _Block()

#: A function and its arguments.
Call = tuple[Callable[..., Any], tuple[Any, ...]]


# For each operator, the ufunc that reduces two values to one. For a mean, gradsync divides the sum afterwards.
_UFUNCS: dict[ReduceOp, Callable[..., Any]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}


@lru_cache(maxsize=256)
def check_operation(op: ReduceOp, dtype: np.dtype[Any]) -> None:
    """Checks that the dtype supports the operator.

    Raises:
        UnsupportedDtype: the dtype is not in OPERATIONS_BY_DTYPE, is not in native byte order, or does not support the
            operator.
    """
    if not dtype.isnative:
        raise UnsupportedDtype(f"{dtype.name} needs native byte order, got {dtype.str}: convert it with astype first")
    operations = OPERATIONS_BY_DTYPE.get(dtype.name)
    if operations is None:
        raise UnsupportedDtype(f"dtype {dtype} cannot be reduced: use one of {', '.join(OPERATIONS_BY_DTYPE)}")
    if op not in operations:
        allowed = ", ".join(sorted(o.value for o in operations))
        raise UnsupportedDtype(f"{op.value} is not defined for dtype {dtype.name}: use one of {allowed}")


def operator_for(op: str | ReduceOp, dtype: np.dtype[Any]) -> ReduceOp:
    """Returns the operator, after checking that the dtype supports it; raises as parse() and check_operation()."""
    return _operator_for(op, dtype) if isinstance(op, str) else ReduceOp.parse(op)


@lru_cache(maxsize=256)
def _operator_for(op: str | ReduceOp, dtype: np.dtype[Any]) -> ReduceOp:
    parsed = ReduceOp.parse(op)
    check_operation(parsed, dtype)
    return parsed


def dtype_of(name: str) -> np.dtype[Any]:
    """Returns the dtype with this name.

    Raises:
        TypeError: there is no such dtype.
        InvalidArgument: the name is "bfloat16", and ml_dtypes is not installed.
    """
    try:
        return np.dtype(name)
    except TypeError:
        if name != "bfloat16":
            raise
    try:
        import ml_dtypes  # the import adds bfloat16 to NumPy
    except ImportError:
        raise InvalidArgument("bfloat16 in NumPy needs ml_dtypes: pip install ml_dtypes") from None
    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return dtype


@lru_cache(maxsize=64)
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Returns dtype.name from a cache, because NumPy takes several microseconds to compute it."""
    return str(dtype.name)


@lru_cache(maxsize=64)
def accumulation_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype in which gradsync adds values of `dtype` on the host."""
    return _FLOAT32 if dtype.name in _HALF_PRECISION else dtype


Reduce = Callable[[Sequence[Array], Array], None]


def reduce_into(op: ReduceOp, contributions: Sequence[Array], out: Array) -> None:
    """Reduces the arrays of all ranks, in the given order, into `out`.

    The order of the operands is fixed, so equal contributions give the same bits on every rank. There is one exception:
    the bits of a product of complex numbers may depend on the position of the element in the array. For half precision,
    the function computes in float32, and rounds the result once.

    Args:
        op: an operator that check_operation has accepted for the dtype.
        contributions: one array of each rank, in rank order, all with the same shape and dtype. Only the first or the
            second of these arrays may be `out` itself.
        out: a contiguous array for the result, with the same shape and dtype.
    """
    reduction_of(op, out.dtype, len(contributions))(contributions, out)


@lru_cache(maxsize=256)
def reduction_of(op: ReduceOp, dtype: np.dtype[Any], count: int) -> Reduce:
    """Returns the function with which `reduce_into` reduces `count` arrays of a dtype."""
    if accumulation_dtype(dtype) != dtype:
        return partial(_reduce_halves, op)
    ufunc, divides = _UFUNCS[op], op is ReduceOp.MEAN

    def reduce(contributions: Sequence[Array], out: Array) -> None:
        if count == 1:
            np.copyto(out, contributions[0])
            return
        ufunc(contributions[0], contributions[1], out=out)
        for contribution in contributions[2:]:
            ufunc(out, contribution, out=out)
        if divides:
            divide_into(out, count, out)

    return reduce


def _reduce_halves(op: ReduceOp, contributions: Sequence[Array], out: Array) -> None:
    """Reduces arrays of half precision in float32, block by block."""
    ufunc, out = _UFUNCS[op], out.reshape(-1)
    flats = [contribution.reshape(-1) for contribution in contributions]
    for begin in range(0, out.size, _BLOCK_ELEMENTS):
        end = min(begin + _BLOCK_ELEMENTS, out.size)
        first, *others = [flat[begin:end] for flat in flats]
        total = _block.total[: end - begin]
        if not others:
            np.copyto(total, first)
        for other in others:
            ufunc(first, other, out=total, dtype=_FLOAT32)
            first = total
        if op is ReduceOp.MEAN:
            divide_into(total, len(flats), total)
        np.copyto(out[begin:end], total, casting="same_kind")


def divide_into(values: Array, count: int, out: Array) -> None:
    """Divides values by the number of ranks.

    If the number of ranks is a power of two, the function multiplies by 1 / count, which gives the same bits as a
    division, and is faster on many processors.

    Args:
        values: a floating or complex array. A complex array must be contiguous.
        count: the number of ranks.
        out: the array for the quotients, which may be `values` itself.
    """
    function, arguments = division_call(values, count, out)
    function(*arguments)


def division_call(values: Array, count: int, out: Array) -> Call:
    """Returns the function that `divide_into` calls, and its arguments."""
    part = part_dtype(values.dtype)
    if part is not values.dtype:
        values, out = values.reshape(-1).view(part), out.reshape(-1).view(part)
    ufunc, divisor = _division(values.dtype, count)
    return ufunc, (values, divisor, out)


@lru_cache(maxsize=64)
def _division(dtype: np.dtype[Any], count: int) -> tuple[Callable[..., Any], Array]:
    """Returns the ufunc that divides values of a floating dtype by `count`, and its second operand.

    The operand is a 0-d array, because NumPy would convert a scalar again in each call.
    """
    by_multiplication = count & (count - 1) == 0  # a power of two
    operand = np.array(1.0 / count if by_multiplication else count, dtype)
    operand.flags.writeable = False
    return np.multiply if by_multiplication else np.divide, operand


@lru_cache(maxsize=64)
def part_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype of the real and imaginary parts of a complex dtype. Returns any other dtype unchanged.

    gradsync divides real and imaginary parts separately, because NumPy's quotient of infinity and a complex number
    contains NaN.
    """
    return np.empty(0, dtype).real.dtype if dtype.kind == "c" else dtype
