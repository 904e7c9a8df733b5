"""Arithmetic on the values of host arrays: scale them, check for NaN and infinity, sum squares, make digests.

(For a GPU: nccl/arrays.py.) all_finite and sum_of_squares may read a value more than once, so they work on pieces that
fit into a core's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from math import isfinite
from typing import Any

import numpy as np

from gradsync.reduction import Array, accumulation_dtype, dtype_name, part_dtype

# Half a megabyte of float32. For one piece NumPy has a fixed cost of about 1 us, and reads the piece in about 25 us.
_PIECE_ELEMENTS = 2**17
# For values that are first converted to float32 or float64: 64 or 128 KB are allocated at a time.
_WIDENED_PIECE_ELEMENTS = 2**14
# OpenBLAS sums the squares of longer rows in several threads, on cores that other ranks need.
_UNTHREADED_ELEMENTS = 2**13
# The sum of a short row has a small rounding error: 2e-7 for 1024 squares in float32.
_ROW_ELEMENTS = 2**10
# In a smaller sum of a row, squares too small for float32 (below 2**-149) could matter.
_LEAST_ROW_SUM = 2.0**-100

# 64-bit words of which a digest is made at a time: they, their keys and the scratch memory fit into a core's cache.
_DIGEST_WORDS = 2**14
_DIGEST_FACTOR = 0x9E3779B97F4A7C15

# Products of other dtypes are computed in a wider dtype, or for real and imaginary parts separately.
_MULTIPLIED_AS_THEY_ARE = (np.dtype(np.float32), np.dtype(np.float64))

# NaN and infinity in half precision have all exponent bits set: positive ones have the bits of the largest int16,
# negative ones those of the largest uint16.
_INFINITY_BITS = {"float16": 0x7C00, "bfloat16": 0x7F80}
_SIGN_BIT = 0x8000


def multiply_in_place(arrays: Sequence[Array], factor: float) -> None:
    """Multiplies floating and complex arrays of any layout in place.

    Products of half precision are computed in float32 and rounded once. Real and imaginary parts are multiplied
    separately: a complex number times infinity has NaN. Overflow gives infinity without a warning.
    """
    with np.errstate(all="ignore"):  # other code checks the values for overflow; the factor itself may overflow
        factors = {dtype: dtype.type(factor) for dtype in _MULTIPLIED_AS_THEY_ARE}
        for array in arrays:
            own = factors.get(array.dtype)
            if own is not None:
                np.multiply(array, own, array)
                continue
            for part in real_parts(array):
                wide = accumulation_dtype(part.dtype)
                np.multiply(part, wide.type(factor), out=part, dtype=wide, casting="unsafe")


def real_parts(array: Any) -> list[Any]:
    """Returns views of a complex array's real and imaginary parts; of a real one, the array itself. CuPy's too."""
    part = part_dtype(array.dtype)
    if part is array.dtype:
        return [array]
    return [array.reshape(-1).view(part)] if array.flags.c_contiguous else [array.real, array.imag]


def all_finite(flat: Array) -> bool:
    """Whether a flat array has neither NaN nor infinity; always True for integers and bools."""
    test = finite_test(flat.dtype)
    if test is None:
        return True
    with np.errstate(all="ignore"):
        return all(map(test, _pieces(flat)))


@lru_cache(maxsize=64)
def finite_test(dtype: np.dtype[Any]) -> Callable[[Array], bool] | None:
    """Returns what tests whether a 1-D array of the dtype has neither NaN nor infinity; None if the dtype has none.

    It reads the array up to two times: pass one that fits into a core's cache, within np.errstate(all="ignore").
    """
    infinity = _INFINITY_BITS.get(dtype_name(dtype))
    if infinity is not None:
        return partial(_halves_finite, infinity=infinity)
    part = part_dtype(dtype)
    if not _is_floating(part):
        return None
    return _finite if part == dtype else lambda values: _finite(values.view(part))


def sum_of_squares(flat: Array) -> float:
    """Sums the squares of the absolute values of a flat array; the same array gives the same bits each time.

    It is computed in float64; for float32, complex64 and half precision, 1024 squares at a time are first added in
    float32. The relative error is below 1e-6. It overflows or underflows only beyond the range of float64.
    """
    part = part_dtype(flat.dtype)
    parts = flat.view(part)
    wide = accumulation_dtype(part) if _is_floating(part) else np.dtype(np.float64)
    with np.errstate(all="ignore"):
        if wide == part:
            return float(sum(map(_sum_of_squares, _pieces(parts))))
        return float(sum(_sum_of_squares(piece.astype(wide)) for piece in _pieces(parts, _WIDENED_PIECE_ELEMENTS)))


def digest(data: Array) -> int:
    """Returns a 64-bit digest of bytes, in which the position of each byte counts; it is the same on all machines.

    Different bytes of one length have equal digests with a probability of at most 2**-32, and nearly always of 2**-64.
    The digest is no defence against somebody who looks for such bytes.

    Args:
        data: a 1-D array of bytes.

    Source: NH of UMAC (Black et al., CRYPTO 1999): each word counts as (low half + key) * (high half + other key).
    """
    whole = data.size - data.size % 8
    words = data[:whole].view("<u8")
    size = min(words.size, _DIGEST_WORDS)
    room, keys, made = np.empty((2, size), np.uint64), _digest_keys(), 0
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


def _is_floating(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f" or dtype_name(dtype) in _INFINITY_BITS


def _pieces(flat: Array, elements: int = _PIECE_ELEMENTS) -> Iterator[Array]:
    return (flat[begin : begin + elements] for begin in range(0, flat.size, elements))


def _finite(piece: Array) -> bool:
    """Whether all values are finite: as their squares' sum is, or, where it may have overflowed, each by itself.

    (BLAS sums squares several times faster than NumPy sums values.)
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
    """Sums the squares of each row in its dtype, for which BLAS is fastest, and adds these sums in float64."""
    rows, rest = piece.size // _ROW_ELEMENTS, piece.size % _ROW_ELEMENTS
    table = piece[: piece.size - rest].reshape(rows, _ROW_ELEMENTS)
    tail = piece[piece.size - rest :].astype(np.float64)
    sums = np.vecdot(table, table)
    if piece.dtype == np.float32:
        sums = _summed_again(table, sums)
    return float(np.add.reduce(sums) + np.vecdot(tail, tail))


def _summed_again(table: Array, sums: Array) -> Array:
    """Returns the rows' sums of squares in float64. Rows whose sums are too inexact in float32 are summed again."""
    inexact, sums = _inexact(sums), sums.astype(np.float64)
    if inexact.any():
        again = table[inexact].astype(np.float64)
        sums[inexact] = np.vecdot(again, again)
    return sums


def _inexact(sums: Array) -> Array:
    inexact: Array = ~(np.isfinite(sums) & (sums >= _LEAST_ROW_SUM))
    return inexact
