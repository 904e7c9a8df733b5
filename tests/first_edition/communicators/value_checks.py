"""What every kind of array must do with the values of arrays; the host's and the device's alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

FLOATING: list[Any] = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
COMPLEX: list[Any] = [np.complex64, np.complex128]
# Relative to the largest of what is rounded; from float64 to half precision there may be two roundings.
ROUNDING = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-24, "float64": 2**-53, "complex64": 2**-23}

Put = Callable[[Any], Any]


def values_of(dtype: Any, shape: tuple[int, ...], seed: int = 0) -> np.ndarray[Any, Any]:
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(shape)
    if np.dtype(dtype).kind == "c":
        return (values + 1j * generator.standard_normal(shape)).astype(dtype)
    return values.astype(dtype)


def layouts(array: Any) -> list[Any]:
    """The same shape in several layouts: what they hold does not matter."""
    wide = array[:, None].repeat(2, 1) if isinstance(array, np.ndarray) else array
    return [array, array.T.copy().T, *([wide[:, 0]] if isinstance(array, np.ndarray) else [])]


def multiplies(arrays: Any, put: Put, get: Put) -> None:
    for dtypes in (FLOATING, COMPLEX):
        for source_dtype in dtypes:
            for out_dtype in dtypes:
                for factor in (1.0, 0.25, -3.7, 1 / 3):
                    _multiplies(arrays, put, get, source_dtype, out_dtype, factor)
    # What overflows is infinite, and nothing warns of it.
    for value, factor, out_dtype in [(7e4, 1.0, np.float16), (1e30, 1e30, np.float32), (1.0, 1e300, np.float32)]:
        out = put(np.zeros(3, out_dtype))
        arrays.multiply(put(np.full(3, value, np.float32)), factor, out)
        assert np.isposinf(get(out).astype(np.float64)).all()
    for order in ("C", "F"):  # infinity times a complex factor would be NaN
        infinite = put(np.full((3, 2), np.inf + 1j, np.complex64, order))
        arrays.multiply(infinite, 2.0, infinite)
        assert (get(infinite) == np.inf + 2j).all()
    integers = put(np.arange(5))
    copied = put(np.zeros(5, np.int64))
    arrays.multiply(integers, 1.0, copied)
    assert get(copied).tolist() == [0, 1, 2, 3, 4]
    arrays.multiply(put(np.zeros(0, np.float32)), 2.0, put(np.zeros(0, np.float16)))


def _multiplies(arrays: Any, put: Put, get: Put, source_dtype: Any, out_dtype: Any, factor: float) -> None:
    values = values_of(source_dtype, (7, 5))
    wide = np.complex128 if np.dtype(source_dtype).kind == "c" else np.float64
    wanted = values.astype(wide) * factor
    for order in ("C", "F"):
        source, out = put(np.asarray(values, order=order)), put(np.zeros((7, 5), out_dtype, order))
        arrays.multiply(source, factor, out)
        got = get(out)
        assert got.dtype == out_dtype
        tolerance = sum(ROUNDING.get(np.dtype(dtype).name, 2**-52) for dtype in (out_dtype, np.float32))
        np.testing.assert_allclose(got.astype(wide), wanted, rtol=tolerance * 1.01)
        assert (get(source) == values).all()
    rounded = values.astype(np.float32) if np.dtype(source_dtype).itemsize == 2 else values
    if np.dtype(source_dtype).kind != "c" and source_dtype is not np.float64:  # rounded once: the very bits
        scaled = (rounded * np.float32(factor)).astype(out_dtype) if out_dtype is not np.float64 else wanted
        np.testing.assert_array_equal(got, scaled.astype(out_dtype))
    in_place = put(values.copy())
    arrays.multiply(in_place[::2], factor, in_place[::2])
    assert (get(in_place)[1::2] == values[1::2]).all()
    np.testing.assert_allclose(
        get(in_place)[::2].astype(wide), wanted[::2], rtol=ROUNDING.get(np.dtype(source_dtype).name, 2**-52) * 2
    )


def tells_the_finite(arrays: Any, put: Put, is_finite: Callable[[Any], bool]) -> None:
    for dtype in (*FLOATING, *COMPLEX):
        for size in (0, 1, 5, 1025, 300_001):
            values = values_of(dtype, (size,))
            assert is_finite(arrays.all_finite(put(values)))
            for at in {0, size // 2, size - 1} if size else ():
                for bad in (np.nan, -np.nan, np.inf, -np.inf, *((1j * np.inf,) if values.dtype.kind == "c" else ())):
                    spoilt = values.copy()
                    spoilt[at] = bad
                    assert not is_finite(arrays.all_finite(put(spoilt))), (dtype, size, at, bad)
        part = values.real.dtype
        largest = np.full(2000, ml_dtypes.finfo(part).max, part).astype(dtype)
        assert is_finite(arrays.all_finite(put(largest)))  # though their sum is not
        assert is_finite(arrays.all_finite(put(-largest)))
        assert is_finite(arrays.all_finite(put(largest)[1:]))
    for dtype in (np.int8, np.uint16, np.int64, np.bool_):
        assert is_finite(arrays.all_finite(put(np.full(9, -1).astype(dtype))))


def sums_squares(arrays: Any, put: Put, number: Callable[[Any], float]) -> None:
    for dtype in (*FLOATING, *COMPLEX, np.int32, np.uint8, np.bool_):
        for size in (0, 1, 5, 1023, 1024, 1025, 300_001):
            values = values_of(np.float64, (size,), size)
            values = (values * 40).astype(dtype) if np.dtype(dtype).kind in "iub" else values_of(dtype, (size,), size)
            wide = np.complex128 if np.dtype(dtype).kind == "c" else np.float64
            wanted = np.sum(np.abs(values.astype(wide)) ** 2)
            got = number(arrays.sum_of_squares(put(values)))
            np.testing.assert_allclose(got, wanted, rtol=1e-6)
            assert got == number(arrays.sum_of_squares(put(values)))
    for value in (1e30, 1e-30, 3e-39, 2e-20, 0.0):
        values = np.full(3000, value, np.float32)
        values[2999] = 0.0
        got = number(arrays.sum_of_squares(put(values)))
        np.testing.assert_allclose(got, 2999 * float(np.float32(value)) ** 2, rtol=1e-6)
    for bad in (np.nan, np.inf):
        for dtype in FLOATING:
            values = np.ones(3000, dtype)
            values[1000] = bad
            np.testing.assert_equal(number(arrays.sum_of_squares(put(values))), bad)
