"""Arithmetic on the values of host arrays: scaled into another dtype, checked to be finite, their squares summed.

Each reads the memory once, in pieces that stay in a core's cache while more than one pass goes over them. ArrayKind
(host_arrays.py) says what each must do; nccl/device_values.py has the forms for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from math import isfinite
from typing import Any

import numpy as np

from gradsync.reduction import Array, accumulation_dtype, dtype_name, part_dtype, part_pairs, product_dtype

# Half a megabyte of float32. NumPy takes about 1 us to begin with a piece, and some 25 us to go over it.
_PIECE_ELEMENTS = 2**17
# Of values that are widened first: a step allocates no more than some 64 KB at a time.
_WIDENED_PIECE_ELEMENTS = 2**14
# Of longer rows OpenBLAS adds up the squares in several threads, on cores that other ranks are busy on.
_UNTHREADED_ELEMENTS = 2**13
# Short rows round little: a sum of 1024 squares in float32 is right to 2e-7.
_ROW_ELEMENTS = 2**10
# Below it, squares too small for float32 (2**-149 each is the least) could be a visible part of the sum of a row.
_LEAST_ROW_SUM = 2.0**-100

# Other products are made in a wider dtype, or part by part.
_MULTIPLIED_AS_THEY_ARE = (np.dtype(np.float32), np.dtype(np.float64))

# In half precision what is not finite has all exponent bits set. Of a positive number these are the largest integers,
# signed or not; of a negative one the largest unsigned ones.
_INFINITY_BITS = {"float16": 0x7C00, "bfloat16": 0x7F80}
_SIGN_BIT = 0x8000


def multiply(source: Array, factor: float, out: Array) -> None:
    """See ArrayKind."""
    with np.errstate(all="ignore"):  # what is infinite or lost is the business of whoever checks the values
        if factor == 1.0:
            if out is not source:
                np.copyto(out, source, casting="unsafe")
            return
        for values, target in part_pairs(source, out):
            wide = product_dtype(values.dtype, target.dtype)
            np.multiply(values, wide.type(factor), out=target, dtype=wide, casting="unsafe")


def multiply_in_place(arrays: Sequence[Array], factor: float) -> None:
    """See ArrayKind; of many small arrays in a third of the time that a `multiply` for each takes."""
    factors: dict[np.dtype[Any], Any] = {}  # by dtype, where that is the one in which products are made
    with np.errstate(all="ignore"):
        for array in arrays:
            scale = factors.get(array.dtype)
            if scale is not None:
                np.multiply(array, scale, array)
                continue
            multiply(array, factor, array)
            if array.dtype in _MULTIPLIED_AS_THEY_ARE:
                factors[array.dtype] = array.dtype.type(factor)


def all_finite(flat: Array) -> bool:
    """See ArrayKind."""
    test = finite_test(flat.dtype)
    if test is None:
        return True
    with np.errstate(all="ignore"):
        return all(map(test, _pieces(flat)))


@lru_cache(maxsize=64)
def finite_test(dtype: np.dtype[Any]) -> Callable[[Array], bool] | None:
    """Returns what tells whether a 1-D array of a dtype has neither NaN nor infinity; None where no value is such.

    It goes over the array once or twice, so that is best one that fits into a core's cache. It may only be called where
    floating-point errors are ignored.
    """
    infinity = _INFINITY_BITS.get(dtype_name(dtype))
    if infinity is not None:
        return partial(_halves_finite, infinity=infinity)
    part = part_dtype(dtype)
    if not _is_floating(part):
        return None
    return _finite if part == dtype else lambda values: _finite(values.view(part))


def sum_of_squares(flat: Array) -> float:
    """See ArrayKind."""
    part = part_dtype(flat.dtype)
    parts = flat.view(part)
    wide = accumulation_dtype(part) if _is_floating(part) else np.dtype(np.float64)
    with np.errstate(all="ignore"):
        if wide == part:
            return float(sum(map(_sum_of_squares, _pieces(parts))))
        return float(sum(_sum_of_squares(piece.astype(wide)) for piece in _pieces(parts, _WIDENED_PIECE_ELEMENTS)))


def _is_floating(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f" or dtype_name(dtype) in _INFINITY_BITS


def _pieces(flat: Array, elements: int = _PIECE_ELEMENTS) -> Iterator[Array]:
    return (flat[begin : begin + elements] for begin in range(0, flat.size, elements))


def _finite(piece: Array) -> bool:
    """A sum of squares that is finite has no summand that is not; one that is not may have overflowed.

    Of squares, because BLAS adds these up at several times the speed at which NumPy adds up.
    """
    size = piece.size
    whole = size - size % _UNTHREADED_ELEMENTS
    sums = []
    if whole:
        rows = piece[:whole].reshape(-1, _UNTHREADED_ELEMENTS)
        sums = np.vecdot(rows, rows).tolist()
    if whole < size:
        tail = piece[whole:]
        sums.append(np.vecdot(tail, tail))
    return isfinite(sum(sums)) or bool(np.isfinite(piece).all())


def _halves_finite(piece: Array, infinity: int) -> bool:
    if np.maximum.reduce(piece.view(np.int16), initial=0) >= infinity:  # initial: there may be no values
        return False
    return bool(np.maximum.reduce(piece.view(np.uint16), initial=0) < _SIGN_BIT | infinity)


def _sum_of_squares(piece: Array) -> float:
    """Sums rows in their own precision, which BLAS does fastest, and the rows in float64."""
    rows, rest = piece.size // _ROW_ELEMENTS, piece.size % _ROW_ELEMENTS
    table = piece[: piece.size - rest].reshape(rows, _ROW_ELEMENTS)
    tail = piece[piece.size - rest :].astype(np.float64)
    sums = np.vecdot(table, table)
    if piece.dtype == np.float32:
        sums = sums.astype(np.float64)
        inexact = ~(np.isfinite(sums) & (sums >= _LEAST_ROW_SUM))
        if inexact.any():
            again = table[inexact].astype(np.float64)
            sums[inexact] = np.vecdot(again, again)
    return float(np.add.reduce(sums) + np.vecdot(tail, tail))
