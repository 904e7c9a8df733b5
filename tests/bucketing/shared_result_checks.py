"""What the check for NaN and infinity, and the norm, must do on every backend; run inside rank processes."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

import gradsync as gs
from contract import dtype_of
from gradsync.bucketing.finite_check import FiniteCheck
from gradsync.bucketing.gradient_norm import GradientNorm, clip_factor

DTYPES = ("float32", "float16", "bfloat16", "float64", "complex64", "int32")


def to_device(comm: Any, values: np.ndarray[Any, Any]) -> Any:
    if comm.device == "cpu":
        return values
    import cupy

    return cupy.asarray(values)


def step(comm: Any, check: FiniteCheck, named: list[tuple[str, Any]], size: int = 2) -> Any:
    """Reduces gradients as a callback would, so many to a bucket, and returns the verdict."""
    for begin in range(0, len(named), size):
        bucket = [(name, to_device(comm, values)) for name, values in named[begin : begin + size]]
        check.note(bucket, comm.arrays)
        for _, flat in bucket:
            comm.all_reduce(flat)
        check.note_results([flat for _, flat in bucket], comm)
    return check.conclude(comm)


def gradients(dtype: str) -> list[tuple[str, Any]]:
    return [(f"w{i}", np.full(size, i % 3 + 1, dtype_of(dtype))) for i, size in enumerate((5, 1, 0, 700, 33))]


def find_what_is_not_finite(comm: Any) -> list[str]:
    """Returns what was told, which must be the same on every rank but for who tells it."""
    told = []
    check = FiniteCheck("raise")
    for dtype in DTYPES:
        named = gradients(dtype)
        assert step(comm, check, named) == (True, None)
        if dtype == "int32":
            continue
        for bad, at in [({comm.world_size - 1: 3}, 699), ({0: 4, comm.world_size - 1: 1}, 0)]:
            named = gradients(dtype)
            if comm.rank in bad:
                named[bad[comm.rank]][1][at] = np.nan if at else -np.inf
                named[4][1][7] = np.nan  # a later one is not told
            verdict = step(comm, check, named)
            assert not verdict.is_finite
            error = pickle.loads(pickle.dumps(verdict.error))
            assert isinstance(error, gs.NonFiniteGradient)
            expected = {comm.ranks[rank]: f"w{position}" for rank, position in sorted(bad.items())}
            assert error.parameters == expected
            assert (error.rank, error.parameter) == next(iter(expected.items()))
            told.append(str(error).removeprefix(comm.label))
            assert step(comm, check, gradients(dtype)).is_finite  # it is forgotten
    return told


def tell_an_overflow(comm: Any) -> str:
    """Every rank's gradients are finite, and one element of their sum is not, in the share of one rank."""
    check, verdicts = FiniteCheck("skip"), []
    for at in (0, 350, 699):
        values = np.ones(700, np.float16)
        values[at] = 60000
        verdict = step(comm, check, [("w", values)])
        assert verdict.is_finite == (comm.world_size == 1)
        verdicts.append(str(verdict.error).removeprefix(comm.label))
        assert verdict.error is None or (verdict.error.rank, verdict.error.parameter) == (None, "")
    return verdicts[0]


def forget_a_failed_step(comm: Any) -> None:
    check, norm = FiniteCheck("raise"), GradientNorm()
    bad = to_device(comm, np.full(3, np.nan))
    check.note([("w", bad)], comm.arrays)
    check.note_results([bad], comm)
    norm.note_results([bad], comm)
    check.reset()
    norm.reset()
    assert check.conclude(comm).is_finite
    assert norm.conclude(comm) == 0.0


def know_no_names(comm: Any) -> str:
    """A rank without gradients, inside join(), hears of those of others."""
    check = FiniteCheck("raise")
    if comm.rank == 0:
        check.note([("w", to_device(comm, np.full(3, np.nan)))], comm.arrays)
    check.note_results([], comm)
    error = check.conclude(comm).error
    assert error is not None
    return error.parameter


def find_nothing_when_off(comm: Any) -> None:
    check = FiniteCheck("off")
    check.note([("w", to_device(comm, np.full(3, np.nan)))], comm.arrays)
    check.note_results([to_device(comm, np.full(3, np.nan))], comm)
    if comm.rank == 0:  # no other rank is needed
        assert check.conclude(comm) == (True, None)


def norms(comm: Any) -> list[str]:
    """Returns the norms, which must have the same bits on every rank."""
    norm, told = GradientNorm(), []
    for dtype in DTYPES:
        for sizes in ([0], [1], [5, 0, 1], [1000, 3, 70_000], []):
            generator = np.random.default_rng(len(sizes))
            values = [(generator.standard_normal(size) * 9).astype(dtype_of(dtype)) for size in sizes]
            wide = np.complex128 if dtype == "complex64" else np.float64
            wanted = np.sqrt(sum(np.sum(np.abs(each.astype(wide)) ** 2) for each in values))
            flats = [to_device(comm, each) for each in values]
            norm.note_results(flats, comm)
            together = norm.conclude(comm)
            for flat in flats:
                norm.note_results([flat], comm)
            for got in (together, norm.conclude(comm)):
                assert type(got) is float
                np.testing.assert_allclose(got, wanted, rtol=1e-6)
                told.append(got.hex())
    for bad in (np.nan, np.inf):
        values = np.ones(1000, np.float32)
        values[999] = bad
        norm.note_results([to_device(comm, values)], comm)
        got = norm.conclude(comm)
        assert not np.isfinite(got)
        assert clip_factor(got, 1.0) == 0.0 or np.isnan(got)
    return told
