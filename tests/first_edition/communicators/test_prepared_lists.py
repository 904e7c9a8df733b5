"""Lists of arrays that come again: prepared once, they are reduced as the unprepared way reduces them, bit for bit."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradsync as gs
from contract import REDUCTIONS, assert_identical, contribution, dtype_of, exactly_reduced, expect
from gradsync.communicators.agreement import agreement_on
from gradsync.communicators.communicator import ListReduction
from gradsync.communicators.shared_memory import pipelined
from gradsync.reduction import ReduceOp
from rank_processes import run_ranks

_AWKWARD: dict[str, list[int]] = {
    "small": [1, 0, 7, 1, 300],
    "small, of large": [2_000, 1, 5_000],
    "empty": [0, 0],
    "one": [40_001],
    "one large": [700_003],
    "many tiny and one huge": [*[3] * 500, 600_001, 0, *[100] * 700, 1],
    "of all lengths": [1_023, 1_024, 1_025, 0, 64, 70_000, 1, 1, 33_333, 2_000, 2_000, 2_000, 131_072, 5],
    "larger than what is in flight": [1_000_000, 17, 1_500_000, 400, 400, 900_000],
}
_OF_EVERY_DTYPE = ("small", "of all lengths")
_DTYPES_OF_MANY_RANKS = ("float32", "bfloat16", "complex128", "int8")  # each way of accumulating, each size of word


def reduce_list(comm: Any, sources: list[Any], targets: list[Any], op: str, prepared: Any = None) -> None:
    agreement = agreement_on("all_reduce", (sum(map(len, sources)),), sources[0].dtype, op)
    (prepared or ListReduction(comm, sources, targets, ReduceOp(op))).run(agreement)


def prepare(comm: Any, sources: list[Any], targets: list[Any], op: ReduceOp) -> ListReduction:
    return ListReduction(comm, sources, targets, op, recurs=True)


def given_by(rank: int, sizes: list[int], name: str, seed: int) -> list[Any]:
    flat = contribution(rank, (sum(sizes),), name, seed)
    return [np.ascontiguousarray(part) for part in np.split(flat, np.cumsum(sizes)[:-1])]


def check_list(comm: Any, sizes: list[int], name: str, op: str) -> None:
    """Reduces one list in every way, with changing data, in place and into targets of its own."""
    arrays, sources, targets = ([np.empty(size, dtype_of(name)) for size in sizes] for _ in range(3))
    in_place = prepare(comm, arrays, arrays, ReduceOp(op))
    into = prepare(comm, sources, targets, ReduceOp(op))
    mixed = in_place if comm.rank % 2 == 0 else None
    for seed in range(2):
        values = given_by(comm.rank, sizes, name, seed)
        everyone = [given_by(rank, sizes, name, seed) for rank in range(comm.world_size)]
        unprepared = [part.copy() for part in values]
        reduce_list(comm, unprepared, unprepared, op)
        if not (name.startswith("complex") and op == "prod"):  # which NumPy rounds by where it is in the list
            for number, part in enumerate(unprepared):
                assert_identical(part, exactly_reduced(op, [of_rank[number] for of_rank in everyone]))
        for prepared in (in_place, mixed):
            copy_all(values, arrays)
            reduce_list(comm, arrays, arrays, op, prepared)
            assert_same_list(arrays, unprepared)
        copy_all(values, sources)
        reduce_list(comm, sources, targets, op, into)
        assert_same_list(targets, unprepared)
        assert_same_list(sources, values)


def copy_all(sources: list[Any], targets: list[Any]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target[...] = source


def assert_same_list(got: list[Any], want: list[Any]) -> None:
    for one, other in zip(got, want, strict=True):
        assert_identical(one, other)


def check_awkward_lists(comm: Any) -> None:
    for name, op in REDUCTIONS:
        if comm.world_size == 2 or name in _DTYPES_OF_MANY_RANKS:
            for what in _OF_EVERY_DTYPE:
                check_list(comm, _AWKWARD[what], name, op)
    for sizes, name in product(_AWKWARD.values(), ("float32", "float16")):
        check_list(comm, sizes, name, "mean")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_ways_give_the_same_bits(world_size: int) -> None:
    run_ranks(world_size, check_awkward_lists, timeout=120)


def repeat_with_changing_data(comm: Any) -> None:
    lists = {}
    for what in ("small", "of all lengths", "larger than what is in flight"):
        arrays = [np.empty(size, np.int32) for size in _AWKWARD[what]]
        lists[what] = (arrays, prepare(comm, arrays, arrays, ReduceOp.SUM))
    own = np.random.default_rng([7, comm.rank])
    n = comm.world_size
    for step in range(200):
        what = ("of all lengths", "small", "of all lengths", "larger than what is in flight")[step % 4]
        arrays, prepared = lists[what]
        for number, array in enumerate(arrays):
            array.fill(comm.rank + step + number)
        reduce_list(comm, arrays, arrays, "sum", prepared if own.random() < 0.8 else None)
        for number, array in enumerate(arrays):
            assert (array == n * (step + number) + n * (n - 1) // 2).all(), (step, number)
        if step % 5 == 0:  # what comes between uses the same barrier
            between = np.full(step + 1, comm.rank)
            comm.all_reduce(between)
            assert (between == n * (n - 1) // 2).all()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_200_repetitions(world_size: int) -> None:
    run_ranks(world_size, repeat_with_changing_data, timeout=120)


def allocate_when_steady(comm: Any) -> dict[str, tuple[int, int, int]]:
    """Returns, by list: bytes of the arrays, bytes that stay with what is prepared, most bytes allocated by a call.

    Of several calls the least: what another thread of the process allocates meanwhile counts too.
    """
    found = {}
    for what, sizes in {"large": [3_000_000, 10, 400_000], "small": [100] * 200, "tiny": [100] * 10_000}.items():
        arrays = [np.ones(size, np.float32) for size in sizes]
        reduce_list(comm, arrays, arrays, "mean")
        tracemalloc.start()
        prepared = prepare(comm, arrays, arrays, ReduceOp.MEAN)
        kept = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        peaks = []
        for _ in range(5):
            reduce_list(comm, arrays, arrays, "mean", prepared)
            tracemalloc.start()
            reduce_list(comm, arrays, arrays, "mean", prepared)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        found[what] = (sum(array.nbytes for array in arrays), kept, min(peaks))
    return found


def test_a_steady_call_allocates_next_to_nothing() -> None:
    for found in run_ranks(2, allocate_when_steady):
        assert all(peak < 64 * 1024 for _, _, peak in found.values()), found
        given_bytes, kept, _ = found["large"]
        assert kept < given_bytes / 50, found
        assert found["tiny"][1] < 700 * 10_000, found


def drop_and_release(comm: Any) -> tuple[str, int]:
    arrays = [np.ones(400_000, np.float32), np.ones(5, np.float32)]
    dropped = prepare(comm, arrays, arrays, ReduceOp.SUM)
    reduce_list(comm, arrays, arrays, "sum", dropped)
    gone = weakref.ref(dropped)
    gc.disable()
    del dropped
    assert gone() is None, "it goes at once, without the garbage collector"
    gc.enable()
    kept = prepare(comm, arrays, arrays, ReduceOp.SUM)
    small = prepare(comm, arrays[1:], arrays[1:], ReduceOp.SUM)
    comm.barrier()
    comm.close()
    text = str(expect(gs.CommunicatorClosed, lambda: reduce_list(comm, arrays, arrays, "sum", kept)))
    expect(gs.CommunicatorClosed, lambda: reduce_list(comm, arrays[1:], arrays[1:], "sum", small))
    with open("/proc/self/maps") as maps:
        return text, sum("memfd:gradsync" in line for line in maps)


def test_what_is_prepared_keeps_no_memory_of_a_closed_communicator() -> None:
    for text, mapped in run_ranks(2, drop_and_release):
        assert "it was closed" in text
        assert mapped == 0


def disagree(comm: Any) -> None:
    """Two ranks that prepared lists of other sizes learn it before anything is written, and can go on."""
    arrays = [np.full(300_000 + comm.rank, comm.rank, np.float32)]
    prepared = prepare(comm, arrays, arrays, ReduceOp.SUM)
    expect(gs.PlanMismatch, lambda: reduce_list(comm, arrays, arrays, "sum", prepared))
    assert (arrays[0] == comm.rank).all()
    same = [array[:300_000] for array in arrays]
    reduce_list(comm, same, same, "sum", prepare(comm, same, same, ReduceOp.SUM))
    assert (same[0] == sum(range(comm.world_size))).all()


def test_a_mismatch_leaves_the_arrays_alone() -> None:
    run_ranks(3, disagree)


def overflow(comm: Any) -> None:
    np.seterr(all="raise")
    arrays = [np.full(300_000, 3e38, np.float32), np.full(3, 3e38, np.float32)]
    reduce_list(comm, arrays, arrays, "sum", prepare(comm, arrays, arrays, ReduceOp.SUM))
    assert all(np.isinf(array).all() for array in arrays)


def test_overflow_is_no_exception() -> None:
    run_ranks(2, overflow)


@given(
    st.lists(st.integers(0, 40), min_size=2, max_size=30),
    st.sampled_from(["float32", "float16", "bfloat16", "complex64", "complex128", "int8", "bool", "uint64"]),
)
def test_what_is_scattered_is_what_was_gathered(sizes: list[int], name: str) -> None:
    sources = given_by(0, sizes, name, seed=3)
    targets = [np.zeros_like(source) for source in sources]
    packed = np.empty(sum(sizes), dtype_of(name))
    pipelined.run_calls([pipelined.gathering(sources, packed), pipelined.scattering(packed, targets)])
    assert_identical(packed, np.concatenate(sources))
    assert_same_list(targets, sources)
