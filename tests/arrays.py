"""Arrays for tests: in host memory or on the GPU, values that depend on the rank, and what their reduction must be.

What a rank contributes follows from (rank, seed), so each rank can compute what all others gave, and with it the
reference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
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
#: The operators that are defined for each dtype.
OPERATORS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("float16", "bfloat16", "float32", "float64"), ("sum", "mean", "prod", "min", "max")),
    **dict.fromkeys(("complex64", "complex128"), ("sum", "mean", "prod")),
    **dict.fromkeys(INTEGERS, ("sum", "prod", "min", "max")),
    "bool": ("min", "max"),
}
#: Those that NCCL lacks, and those that it has.
NOT_ON_GPU = {name: OPERATORS[name] for name in ("int16", "uint16")} | dict.fromkeys(
    ("complex64", "complex128"), ("prod",)
)
OPERATORS_ON_GPU = {
    dtype: tuple(op for op in ops if op not in NOT_ON_GPU.get(dtype, ()))
    for dtype, ops in OPERATORS.items()
    if ops != NOT_ON_GPU.get(dtype)
}
#: What no reduction takes and that moves all the same, in host memory: time, records, foreign byte order, text.
HOST_DTYPES = {
    "time": np.dtype("datetime64[s]"),
    "record": np.dtype([("weight", "<f4"), ("count", "<i8"), ("name", "S3")]),
    "foreign byte order": np.dtype(">f8"),
    "text": np.dtype("U4"),
}
LAYOUTS = ("C", "Fortran", "strided", "reversed")


class HostArrays:
    """NumPy's arrays."""

    xp: Any = np
    dtypes = (*DTYPES, *HOST_DTYPES)

    def put(self, values: Any) -> Any:
        """A copy of the values, in their layout."""
        return np.array(values, copy=True, order="K")

    def get(self, array: Any) -> np.ndarray[Any, Any]:
        """Its values on the host."""
        return np.asarray(array)


class DeviceArrays:
    """CuPy's arrays, on the current device."""

    dtypes = DTYPES

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


def operators_of(comm: Any) -> dict[str, tuple[str, ...]]:
    """The operators of each dtype that a communicator's device has."""
    return OPERATORS if comm.device == "cpu" else OPERATORS_ON_GPU


def arrays_for(comm: Any) -> list[HostArrays | DeviceArrays]:
    """All kinds of arrays that a communicator takes: a GPU's also those in host memory."""
    return [HostArrays()] if comm.device == "cpu" else [DeviceArrays(), HostArrays()]


def in_layout(values: np.ndarray[Any, Any], arrays: Any, layout: str) -> Any:
    """A new array of these values and their shape, which lies in memory in another way; see LAYOUTS."""
    if values.ndim == 0 or layout == "C":
        return arrays.put(np.ascontiguousarray(values).reshape(values.shape))
    if layout == "Fortran":
        return arrays.put(np.asfortranarray(values))
    if layout == "reversed":
        backwards = (slice(None, None, -1),) * values.ndim
        return arrays.put(np.ascontiguousarray(values[backwards]))[backwards]
    wide = arrays.xp.zeros(
        (2 * values.shape[0], *values.shape[1:-1], 3 * values.shape[-1])[-values.ndim :], values.dtype
    )
    strided = wide[::2, ..., ::3] if values.ndim > 1 else wide[::3]
    strided[...] = arrays.put(values)
    return strided


def read_only(array: Any) -> Any:
    """The array, read-only where there is such a thing: a source that nobody may write to."""
    if isinstance(array, np.ndarray):
        array.setflags(write=False)
    return array


def bounds_of(sizes: Sequence[int]) -> list[int]:
    """Where the rows of each rank begin, and where the last ones end."""
    return [0, *accumulate(sizes)]


def sizes_of(ranks: int) -> list[list[int]]:
    """Numbers of rows by rank: uneven, some of none, all of one, large, and none at all."""
    return [
        [rank + 1 for rank in range(ranks)],
        [0 if rank % 2 else 3 for rank in range(ranks)],
        [5 if rank == ranks - 1 else 0 for rank in range(ranks)],
        [9_000 + 2_003 * rank for rank in range(ranks)],
        [0] * ranks,
    ]


def dtype_of(name: str) -> np.dtype[Any]:
    if name in HOST_DTYPES:
        return HOST_DTYPES[name]
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def contribution(rank: int, shape: tuple[int, ...] | int, dtype: str, seed: int = 0) -> np.ndarray[Any, Any]:
    """What a rank contributes: values around 1, so that a product of four is in the range of each dtype."""
    rng = np.random.default_rng([rank, seed])
    if dtype == "bool":
        return np.asarray(rng.integers(0, 2, shape).astype(bool))
    if dtype in INTEGERS:
        return np.asarray(rng.integers(0, 4, shape).astype(dtype))
    if dtype == "record":
        numbers = np.asarray(rng.integers(0, 900, shape))
        records = np.zeros(numbers.shape, HOST_DTYPES[dtype])
        records["weight"], records["count"], records["name"] = numbers / 8, numbers, numbers.astype("S3")
        return records
    if dtype in HOST_DTYPES:
        return np.asarray(rng.integers(0, 1000, shape)).astype(HOST_DTYPES[dtype])
    values = rng.uniform(0.5, 1.5, shape)
    if dtype.startswith("complex"):
        values = values + 1j * rng.uniform(0.5, 1.5, shape)
    return np.asarray(values).astype(dtype_of(dtype))


def reduced(op: str, shape: tuple[int, ...] | int, dtype: str, ranks: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """What the contributions of that many ranks give, in float64 (complex128)."""
    functions: dict[str, Any] = {"sum": np.sum, "mean": np.mean, "prod": np.prod, "min": np.min, "max": np.max}
    stack = _stack((shape,) if isinstance(shape, int) else tuple(shape), dtype, ranks, seed)
    return np.asarray(functions[op](stack, axis=0))


@lru_cache(maxsize=8)  # for the operators of a dtype, one after the other
def _stack(shape: tuple[int, ...], dtype: str, ranks: int, seed: int) -> np.ndarray[Any, Any]:
    wide = np.complex128 if dtype.startswith("complex") else np.float64
    return np.stack([contribution(rank, shape, dtype, seed).astype(wide) for rank in range(ranks)])


def joined(parts: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """The parts of all ranks, one after the other; a 0-d part is one row."""
    return np.concatenate([np.atleast_1d(part) for part in parts], dtype=parts[0].dtype)


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


def assert_same_on_all_ranks(comm: Any, results: Sequence[np.ndarray[Any, Any]]) -> None:
    """Every rank has the same bits; each must call it."""
    digests = [hashlib.sha1(np.ascontiguousarray(result).tobytes()).hexdigest() for result in results]
    assert all(theirs == digests for theirs in comm.objects.all_gather(digests))
