"""Arrays for tests: in host memory or on the GPU, values that depend on the rank, and what their reduction must be.

What a rank contributes follows from (rank, seed), so each rank can compute what all others gave, and with it the
reference.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

#: How far a reduction over one rank may be from float64; a reduction over n ranks may be n times as far.
TOLERANCE = {
    "float16": 1e-3,
    "bfloat16": 8e-3,
    "float32": 1e-6,
    "complex64": 1e-6,
    "float64": 1e-14,
    "complex128": 1e-14,
}
FLOATS = tuple(TOLERANCE)
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = (*FLOATS, *INTEGERS, "bool")


class HostArrays:
    """NumPy's arrays."""

    xp: Any = np

    def put(self, values: Any) -> Any:
        """A copy of the values, in their layout."""
        return np.array(values, copy=True, order="K")

    def get(self, array: Any) -> np.ndarray[Any, Any]:
        """Its values on the host."""
        return np.asarray(array)


class DeviceArrays:
    """CuPy's arrays, on the current device."""

    def __init__(self) -> None:
        import cupy

        self.xp: Any = cupy

    def put(self, values: Any) -> Any:
        values = np.asarray(values)
        if values.ndim > 1 and values.flags.f_contiguous and not values.flags.c_contiguous:
            return self.xp.asfortranarray(self.xp.asarray(np.ascontiguousarray(values)))
        return self.xp.asarray(np.ascontiguousarray(values)).reshape(values.shape)

    def get(self, array: Any) -> np.ndarray[Any, Any]:
        return array if isinstance(array, np.ndarray) else array.get()


def arrays_of(comm: Any) -> HostArrays | DeviceArrays:
    """The arrays of a communicator's device: CuPy's over NCCL, NumPy's elsewhere."""
    return HostArrays() if comm.device == "cpu" else DeviceArrays()


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def contribution(rank: int, shape: tuple[int, ...] | int, dtype: str, seed: int = 0) -> np.ndarray[Any, Any]:
    """What a rank contributes: values around 1, so that a product of four is in the range of each dtype."""
    rng = np.random.default_rng([rank, seed])
    if dtype == "bool":
        return np.asarray(rng.integers(0, 2, shape).astype(bool))
    if dtype in INTEGERS:
        return np.asarray(rng.integers(0, 4, shape).astype(dtype))
    values = rng.uniform(0.5, 1.5, shape)
    if dtype.startswith("complex"):
        values = values + 1j * rng.uniform(0.5, 1.5, shape)
    return np.asarray(values).astype(dtype_of(dtype))


def reduced(op: str, shape: tuple[int, ...] | int, dtype: str, ranks: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """What the contributions of that many ranks give, in float64 (complex128)."""
    return _reduced(op, (shape,) if isinstance(shape, int) else tuple(shape), dtype, ranks, seed).copy()


@lru_cache(maxsize=64)
def _reduced(op: str, shape: tuple[int, ...], dtype: str, ranks: int, seed: int) -> np.ndarray[Any, Any]:
    wide = np.complex128 if dtype.startswith("complex") else np.float64
    stack = np.stack([contribution(rank, shape, dtype, seed).astype(wide) for rank in range(ranks)])
    functions: dict[str, Any] = {"sum": np.sum, "mean": np.mean, "prod": np.prod, "min": np.min, "max": np.max}
    return np.asarray(functions[op](stack, axis=0))


def assert_close(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any], dtype: str, ranks: int) -> None:
    """Compares a result with its float64 reference: by the precision of its dtype, exactly where it has none."""
    assert got.shape == want.shape
    assert got.dtype == dtype_of(dtype)
    if dtype in TOLERANCE:
        np.testing.assert_allclose(got.astype(want.dtype), want, rtol=TOLERANCE[dtype] * ranks, atol=0)
    else:
        np.testing.assert_array_equal(got, want.astype(got.dtype))


def assert_identical(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> None:
    """Bit for bit, in shape and in dtype."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    if np.ascontiguousarray(got).tobytes() != np.ascontiguousarray(want).tobytes():
        np.testing.assert_array_equal(got, want)
        raise AssertionError("equal values of different bits")
