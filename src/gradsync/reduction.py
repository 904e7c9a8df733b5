"""Reductions: the operators, the dtypes that they support, and how NumPy does them.

Nothing here communicates. Shared memory without C reduces with `reduce_into`; the tests compare every backend with it,
and with NumPy's float64.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from gradsync.errors import InvalidArgument, UnsupportedDtype, shown

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]
else:  # importing numpy.typing would take time at every start
    Array = np.ndarray


class ReduceOp(enum.StrEnum):
    """An operator that makes one array of those of all ranks, element by element."""

    SUM = "sum"
    MEAN = "mean"
    PROD = "prod"
    MIN = "min"
    MAX = "max"

    @classmethod
    def parse(cls, value: str | ReduceOp) -> ReduceOp:
        """Returns the operator of this name, in upper or lower case.

        Raises:
            InvalidArgument: no operator has this name.
        """
        op = _find(value)
        if op is None:
            is_mean = str(value).rpartition(".")[2].lower() in ("avg", "average")  # PyTorch's, Horovod's
            advice = '; for the average take "mean"' if is_mean else ""
            if type(value).__name__ == "Op":
                advice = '; in place of MPI\'s operators write the name, such as op="sum"'
            known = ", ".join(op.value for op in cls)
            raise InvalidArgument(f"op needs to be one of {known}, got {shown(value)}{advice}")
        return op


_OPS_BY_NAME = {op.value: op for op in ReduceOp}


def _find(value: object) -> ReduceOp | None:
    if isinstance(value, ReduceOp):
        return value
    return _OPS_BY_NAME.get(value.lower()) if isinstance(value, str) else None


def parse_reduce_method(value: str | ReduceOp, argument: str) -> ReduceOp:
    """Returns the operator for gradients: "sum" or "mean", in upper or lower case.

    Args:
        value: the name, or the operator.
        argument: the caller's argument in errors.

    Raises:
        InvalidArgument: it is neither.
    """
    op = _find(value)
    if op is not ReduceOp.SUM and op is not ReduceOp.MEAN:
        given = repr(value) if isinstance(value, str) else type(value).__name__
        raise InvalidArgument(f'{argument} needs to be "sum" or "mean", got {given}')
    return op


_ARITHMETIC = frozenset({ReduceOp.SUM, ReduceOp.PROD, ReduceOp.MIN, ReduceOp.MAX})
_FLOATING = _ARITHMETIC | {ReduceOp.MEAN}

# By the dtype's name, the operators that it has. Complex numbers have no order, a mean of integers would need rounding,
# and a bool has no sum.
OPERATIONS_BY_DTYPE: dict[str, frozenset[ReduceOp]] = {
    **dict.fromkeys(("float16", "bfloat16", "float32", "float64"), _FLOATING),
    **dict.fromkeys(("complex64", "complex128"), frozenset({ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PROD})),
    **dict.fromkeys(("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"), _ARITHMETIC),
    "bool": frozenset({ReduceOp.MIN, ReduceOp.MAX}),
}

# On the host half precision is added in float32, so that a sum over many ranks is rounded once.
_HALF_PRECISION = ("float16", "bfloat16")
_FLOAT32 = np.dtype(np.float32)

# The ufunc that makes one value of two. The sum of a mean is divided afterwards.
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
        UnsupportedDtype: it does not, is not in OPERATIONS_BY_DTYPE, or is not in native byte order.
    """
    if not dtype.isnative:
        name = dtype.name
        raise UnsupportedDtype(f'{name} needs native byte order, got {dtype.str}: convert it with astype("{name}")')
    operations = OPERATIONS_BY_DTYPE.get(dtype.name)
    if operations is None:
        raise UnsupportedDtype(f"dtype {dtype} cannot be reduced: use one of {', '.join(OPERATIONS_BY_DTYPE)}")
    if op not in operations:
        allowed = ", ".join(sorted(o.value for o in operations))
        raise UnsupportedDtype(f"{op.value} is not defined for dtype {dtype.name}: use one of {allowed}")


def operator_for(op: str | ReduceOp, dtype: np.dtype[Any]) -> ReduceOp:
    """Returns the operator, which the dtype supports; raises as parse() and check_operation()."""
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
    """Returns dtype.name from a cache: NumPy takes several microseconds to make it."""
    return str(dtype.name)


@lru_cache(maxsize=64)
def accumulation_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype in which values of `dtype` are added on the host."""
    return _FLOAT32 if dtype.name in _HALF_PRECISION else dtype


def reduce_into(op: ReduceOp, contributions: Sequence[Array], out: Array) -> None:
    """Reduces the arrays of all ranks, in the given order, into `out`.

    The order is fixed, so equal contributions give the same bits on every rank; except for products of complex numbers,
    whose bits may depend on an element's position. Half precision is computed in float32, and rounded once.

    Args:
        op: an operator that check_operation has accepted for the dtype.
        contributions: an array of each rank, in rank order, of one shape and dtype. Only the first or the second may be
            `out` itself.
        out: a contiguous array of the same shape and dtype for the result.
    """
    ufunc, wide = _UFUNCS[op], accumulation_dtype(out.dtype)
    first, *others = contributions
    total = out if wide == out.dtype else np.empty(out.shape, wide)
    if not others:
        np.copyto(total, first)
    for other in others:
        ufunc(first, other, out=total, dtype=wide)
        first = total
    if op is ReduceOp.MEAN:
        divide_into(total, len(contributions), total)
    if total is not out:
        np.copyto(out, total, casting="same_kind")


def divide_into(values: Array, count: int, out: Array) -> None:
    """Divides values by the number of ranks; multiplies by a power of two, which gives the same bits sooner.

    Args:
        values: a floating or complex array. A complex one must be contiguous.
        count: the number of ranks.
        out: an array for the quotients, which may be `values` itself.
    """
    part = part_dtype(values.dtype)
    if values.dtype.kind == "c":
        values, out = values.reshape(-1).view(part), out.reshape(-1).view(part)
    if count & (count - 1) == 0:
        np.multiply(values, part.type(1.0 / count), out=out)
    else:
        np.divide(values, part.type(count), out=out)


@lru_cache(maxsize=64)
def part_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype of a complex dtype's real and imaginary parts, and any other dtype as it is.

    They are divided separately: NumPy's quotient of infinity and a complex number has NaN.
    """
    return np.empty(0, dtype).real.dtype if dtype.kind == "c" else dtype
