"""The norm: its factor, and how ranks share the work on what all of them have."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradsync as gs
from gradsync.bucketing.values import clip_factor
from gradsync.communicators.agreement import agreement_on
from gradsync.communicators.for_bucketing import ListReduction, make_resident_memory
from gradsync.communicators.host_arrays import ArrayKind
from gradsync.communicators.host_copy import share_of
from gradsync.communicators.host_values import Checks, SumOfSquares, tables_of
from gradsync.communicators.local import local_communicator
from places import SHM


def test_the_factor_that_clips() -> None:
    assert clip_factor(0.0, 1.0) == clip_factor(0.5, 1) == 1.0
    assert clip_factor(10.0, 1.0) == 1.0 / (10.0 + 1e-6)  # as torch.nn.utils.clip_grad_norm_
    assert clip_factor(math.inf, 1.0) == 0.0
    assert math.isnan(clip_factor(math.nan, 1.0))
    for max_norm in (0, -1.0, math.nan, True, "1"):
        with pytest.raises(gs.InvalidArgument, match="clip_norm must be a number above 0"):
            gs.AllreduceCallback(clip_norm=max_norm)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_an_infinite_limit_clips_nothing(bad: float) -> None:
    with local_communicator() as comm:
        sync = gs.AllreduceCallback("sum", comm, clip_norm=math.inf)
        with sync.backward():
            future = sync("good", np.full(3, 2.0))
            sync("bad", np.array([1.0, bad]))
    assert future.result().tolist() == [2.0, 2.0, 2.0]
    assert sync.norm is not None
    assert not math.isfinite(sync.norm)


@given(st.lists(st.integers(0, 100), max_size=8), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 5))
def test_shares_are_all_of_it(sizes: list[int], itemsize: int, world_size: int) -> None:
    shares = [share_of(tuple(sizes), itemsize, rank, world_size) for rank in range(world_size)]
    elements = [(p.array, at) for share in shares for p in share for at in range(p.begin, p.end)]
    assert elements == [(array, at) for array, size in enumerate(sizes) for at in range(size)]
    lengths = [sum(piece.end - piece.begin for piece in share) for share in shares]
    assert max(lengths) <= -(-sum(sizes) // world_size) + 64 // itemsize


SIZES = [5, 2**14, 1, 0, 2**15, 3]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64"])
def test_small_and_large_arrays_have_one_norm_and_are_clipped_alike(dtype: str) -> None:
    """Small ones are looked at together, large ones one by one; each is multiplied as it would be alone."""
    rng = np.random.default_rng(5)
    given = [rng.normal(size=size).astype(dtype) for size in SIZES]
    wanted = math.sqrt(sum(float((np.abs(each.astype(np.complex128)) ** 2).sum()) for each in given))
    with local_communicator() as comm:
        sync = gs.AllreduceCallback("sum", comm, clip_norm=1.0)
        with sync.backward():
            futures = [sync(number, each.copy()) for number, each in enumerate(given)]
    assert sync.norm == pytest.approx(wanted, rel=1e-6)
    for future, each in zip(futures, given, strict=True):
        one = each.copy()
        ArrayKind().multiply_in_place([one], clip_factor(sync.norm, 1.0))
        np.testing.assert_array_equal(future.result(), one)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64"])
def test_squares_that_are_added_in_parts(dtype: str) -> None:
    """Values beyond the range of float32 squares, and subnormal ones, count too; a sum that is taken is forgotten."""
    rng = np.random.default_rng(7)
    squares = SumOfSquares()
    for scale in (1.0, 1e-30, 1e25) if dtype != "float16" else (1.0, 1e-3):
        flats = [(scale * rng.normal(size=size)).astype(dtype) for size in (5000, 1024, 3, 0, 70_000)]
        with np.errstate(all="ignore"):
            for flat in flats:
                for table in tables_of(flat):
                    squares.add_rows(table)
                if not tables_of(flat):
                    squares.add(flat)
        wanted = sum(float((np.abs(flat.astype(np.complex128)) ** 2).sum()) for flat in flats)
        assert squares.take() == pytest.approx(wanted, rel=1e-6)
        assert squares.take() == 0.0


#: Of lists that are reduced in one shot, and in chunks.
LISTS = ([5, 0, 3000, 1], [90_000, 7, 400, 0, 250_001, 90, 90, 16, 300_000])


def add_squares_while_reducing(comm: Any) -> list[float]:
    """Each result is in the share of one rank, in a list and in resident memory. Returns all sums."""
    agreement, sums = agreement_on("all_reduce", (1,), None, "squares"), []

    def expect_norm(results: list[np.ndarray]) -> None:
        shares = comm.objects.all_gather(comm._backend.squares.take())
        wanted = sum(float((result.astype(np.float64) ** 2).sum()) for result in results)
        assert math.fsum(shares) == pytest.approx(wanted, rel=1e-6)
        sums.append(math.fsum(shares))

    for sizes, op in itertools.product(LISTS, (gs.ReduceOp.SUM, gs.ReduceOp.MEAN)):
        rng = np.random.default_rng(comm.rank)
        arrays = [rng.normal(size=size).astype(np.float32) for size in sizes]
        reduction = ListReduction(comm, arrays, arrays, op, checks=Checks.SQUARES, recurs=comm.rank == 0)
        for _ in range(2):
            reduction.run(agreement)
            expect_norm(arrays)
    memory = make_resident_memory(comm, 4 * 200_000, agreement)
    values = memory.bytes.view(np.float32)
    values[:] = rng.normal(size=values.size)
    for op in (gs.ReduceOp.MEAN, gs.ReduceOp.SUM):
        for checks in (Checks.SQUARES, Checks.SQUARES | Checks.NONFINITE):
            ListReduction(comm, [values], [values], op, checks=checks, resident=memory).run(agreement)
            expect_norm([values])
    return sums


@pytest.mark.parametrize("world_size", [2, 3])
def test_shared_memory_adds_squares_while_it_reduces(world_size: int) -> None:
    first, *others = SHM.run(world_size, add_squares_while_reducing)
    assert others == [first] * (world_size - 1)
