"""NaN and infinity in random places of random steps: all ranks tell what a look at every rank's gradients tells."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradsync as gs
from contract import IS_EVERYWHERE, assert_identical, dtype_of
from rank_processes import run_ranks

# More than a chunk of the stream, so small that many go together, none at all, and a bucket that is reduced at once.
_SIZES = (300_000, *[100] * 40, 0, 70_001, 1, 3_000, 7, 30)
_NOT_EMPTY = [place for place, size in enumerate(_SIZES) if size]
_STEPS = 8
_DTYPES = ("float32", "float64", "float16", "bfloat16", "complex64")
_WAYS: dict[str, dict[str, Any]] = {
    "buckets": {},
    "many buckets": {"threshold_bytes": 100_000},
    "gradients in the buckets": {"gradient_as_bucket_view": True},
    "with the norm": {"clip_norm": float("inf")},
}

Gradients = list[np.ndarray[Any, Any]]


def given_by(rank: int, number: int, dtype: str, n: int) -> Gradients:
    """Returns a rank's gradients in a step: some of some ranks spoilt, or all near the largest that the dtype holds."""
    rng = np.random.default_rng([number, rank])
    of_all = np.random.default_rng(number)
    gradients = [rng.uniform(0.5, 1.0, size).astype(dtype_of(dtype)) for size in _SIZES]
    how = number % 4
    if how == 1:
        gradients[int(of_all.choice(_NOT_EMPTY))][...] = largest(dtype)
    elif how > 1 and rng.integers(n):
        for which in rng.choice(_NOT_EMPTY, size=how):
            gradients[which][rng.integers(_SIZES[which])] = rng.choice([np.nan, np.inf, -np.inf])
    return gradients


def largest(dtype: str) -> float:
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype_of(dtype)).max)


def naive_verdict(of_ranks: list[Gradients]) -> dict[int, list[str]]:
    """Returns the gradients of each rank that are not finite, where it has any."""
    bad = [[f"w{i}" for i, each in enumerate(gradients) if not np.isfinite(each).all()] for gradients in of_ranks]
    return {rank: names for rank, names in enumerate(bad) if names}


def reduce_all(callback: gs.AllreduceCallback, arrays: Gradients) -> Gradients:
    with np.errstate(all="ignore"), callback.backward():
        futures = [callback(f"w{place}", array) for place, array in enumerate(arrays)]
    return [future.result() for future in futures]


def tell_as_the_naive_way(comm: Any, dtype: str, options: dict[str, Any], new_arrays: bool) -> list[str]:
    """Returns what each step told, which is the same on all ranks."""
    n = comm.world_size
    if "gradient_as_bucket_view" in options:
        options = {**options, "parameters": {f"w{place}": ((size,), dtype) for place, size in enumerate(_SIZES)}}
    callback, unwatched = (gs.AllreduceCallback("sum", comm, nonfinite=how, **options) for how in ("raise", "off"))
    told, arrays = [], [np.empty(size, dtype_of(dtype)) for size in _SIZES]
    for number in range(_STEPS):
        of_ranks = [given_by(rank, number, dtype, n) for rank in range(n)]
        if new_arrays:
            arrays = of_ranks[comm.rank]
        else:
            for array, values in zip(arrays, of_ranks[comm.rank], strict=True):
                array[...] = values
        own = naive_verdict(of_ranks)
        results = reduce_all(unwatched, [array.copy() for array in arrays])
        is_finite = all(np.isfinite(result).all() for result in results)
        try:
            got = reduce_all(callback, arrays)
        except gs.NonFiniteGradient as error:
            assert error.parameters.keys() == own.keys(), number
            for rank, name in error.parameters.items():  # of several buckets, the first that was reduced
                assert name in (own[rank] if "threshold_bytes" in options else own[rank][:1]), number
            assert not is_finite, number
            told.append(str(error).partition(":")[2])
        else:
            assert is_finite, number
            for one, other in zip(got, results, strict=True):
                assert_identical(one, other)
    return told


def check_ways(comm: Any, dtypes: tuple[str, ...]) -> dict[str, list[str]]:
    told = {}
    for name, options in _WAYS.items():
        is_plain = name in ("buckets", "many buckets")
        for dtype in dtypes if is_plain or IS_EVERYWHERE else ("float32",):
            for new_arrays in (False, True) if is_plain and (dtype == dtypes[0] or IS_EVERYWHERE) else (False,):
                told[f"{name}, {dtype}, {new_arrays}"] = tell_as_the_naive_way(comm, dtype, options, new_arrays)
    return told


_CASES: list[tuple[int, tuple[str, ...]]] = [(2, ("float32", "bfloat16"))]
if IS_EVERYWHERE:
    _CASES += [(1, ("float32",)), (2, ("float64", "float16", "complex64")), (3, ("float32", "float16"))]


@pytest.mark.parametrize(("world_size", "dtypes"), _CASES)
def test_what_is_told_is_what_is_so(world_size: int, dtypes: tuple[str, ...]) -> None:
    told = run_ranks(world_size, check_ways, dtypes, timeout=200)
    assert all(of_rank == told[0] for of_rank in told)
    assert world_size == 1 or all(any("overflowed" in text for text in texts) for texts in told[0].values())


def reduce_nothing(comm: Any) -> None:
    for dtype in _DTYPES:
        callback = gs.AllreduceCallback("mean", comm, nonfinite="raise")
        for _ in range(3):  # prepared, too
            reduce_all(callback, [np.empty((0, 3), dtype_of(dtype)), np.empty(0, dtype_of(dtype))])


def test_a_bucket_of_empty_gradients_is_finite() -> None:
    run_ranks(2, reduce_nothing)
