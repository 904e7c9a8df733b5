"""Collectives that come again: however they are spelled, and wherever their results go, the bits are NumPy's."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradsync as gs
from contract import Host, assert_identical, contribution, exactly_reduced, expect, sealed
from rank_processes import run_ranks

# Of each way into shared memory: assigned, copied by a ufunc, and from places that ranks tell each other.
_ROWS = (1, 300, 1_500)
_TAIL = (3,)
_REDUCTIONS = (("float32", "mean"), ("float64", "sum"), ("int16", "prod"), ("complex64", "sum"))

Placed = tuple[Host, Host | None]  # an array and its `out`


def placings(values: Host, result_shape: tuple[int, ...], begin: int) -> Iterator[tuple[str, Placed]]:
    """Yields the array and its `out` as callers place them: apart, one within the other, and overlapping.

    Args:
        values: of the array.
        result_shape: of the result.
        begin: row of the larger of the two at which the smaller one begins in an in-place call.
    """
    rows, result_rows = len(values), result_shape[0]
    yield "new, or in place", (values.copy(), None)
    yield "apart", (sealed(values.copy()), np.zeros(result_shape, values.dtype))
    for shift in (0, 1):
        memory = np.zeros((max(rows, result_rows) + 1, *values.shape[1:]), values.dtype)
        array_at, out_at = (shift, begin) if rows >= result_rows else (begin, shift)
        array, out = memory[array_at:][:rows], memory[out_at:][:result_rows]
        array[...] = values
        yield f"within, {shift} on", (array, out)


def check_placings(comm: Any, what: str, detail: str, values: Host, begin: int, want: Host) -> None:
    """Runs a collective for each placing: for the first time, like an earlier call, and in the queue."""
    details = (detail,) if detail else ()
    ways: list[Callable[..., Any]] = [getattr(comm, what)] * 2
    ways.append(lambda *arguments, out: getattr(comm.asynchronous, what)(*arguments, out=out).result())
    for call in ways:
        for where, (array, out) in placings(values, want.shape, begin):
            got = call(array, *details, out=out)
            assert out is None or got is out, where
            assert_identical(np.ascontiguousarray(got), want)
            if where == "apart":
                assert_identical(array, values)


def check_reductions(comm: Any) -> None:
    n, rank = comm.world_size, comm.rank
    for (name, op), rows in product(_REDUCTIONS, _ROWS):
        of_ranks = [contribution(each, (rows * n, *_TAIL), name) for each in range(n)]
        own = slice(rank * rows, (rank + 1) * rows)
        whole = exactly_reduced(op, of_ranks)
        check_placings(comm, "all_reduce", op, of_ranks[rank], 0, whole)
        check_placings(comm, "reduce_scatter", op, of_ranks[rank], own.start, whole[own])


def check_movements(comm: Any) -> None:
    n, rank = comm.world_size, comm.rank
    for name, rows in product(("uint8", "float64"), _ROWS):
        of_ranks = [contribution(each, (rows, *_TAIL), name) for each in range(n)]
        check_placings(comm, "all_gather", "", of_ranks[rank], rank * rows, np.concatenate(of_ranks))
        of_ranks = [contribution(each, (rows * n, *_TAIL), name) for each in range(n)]
        own = slice(rank * rows, (rank + 1) * rows)
        check_placings(comm, "all_to_all", "", of_ranks[rank], 0, np.concatenate([each[own] for each in of_ranks]))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("check", [check_reductions, check_movements])
def test_results_go_where_the_caller_wants_them(check: Callable[[Any], None], world_size: int) -> None:
    run_ranks(world_size, check, timeout=120)


def check_large(comm: Any) -> None:
    """Arrays that do not fit into one shot: more than are kept, in turn; new ones at old addresses; and freed ones."""
    n, rank = comm.world_size, comm.rank
    for name, op in (("float32", "mean"), ("float16", "sum"), ("int8", "max"), ("complex64", "prod")):
        rows = 400_000 // np.dtype(name).itemsize // 3
        of_ranks = [contribution(each, (rows, *_TAIL), name) for each in range(n)]
        if (name, op) != ("complex64", "prod"):  # which NumPy rounds by where it is
            check_placings(comm, "all_reduce", op, of_ranks[rank], 0, exactly_reduced(op, of_ranks))
    memory = np.empty(14_000_000, np.int8)
    for _ in range(3):  # results come to lie on what is still to be read
        values = np.arange(8_000_000) % 37
        memory[:8_000_000] = values
        got = comm.all_reduce(memory[:8_000_000], out=memory[6_000_000:])
        assert (got == n * values).all()
    shifted = np.frombuffer(bytearray(400_001), np.uint8)[1:].view(np.float32)
    arrays = [np.empty(100_000 + length, np.float32) for length in (0, 0, 0, 0, 0, 0, 1, 300_000)] + [shifted]
    for turn in range(4):
        for number, array in enumerate(arrays):
            array.fill(rank + turn + number)
            comm.all_reduce(array)
            assert (array == sum(range(n)) + n * (turn + number)).all(), (turn, number)
    gone = [weakref.ref(array) for array in arrays]
    del array, arrays, shifted
    assert [ref() for ref in gone] == [None] * len(gone)
    np.ones(700_000, np.float32).fill(0)  # over what was freed
    array = np.full(100_000, 1.0, np.float32)
    assert (comm.all_reduce(array) == n).all()


def check_halves(comm: Any) -> None:
    """reduce_scatter of half precision into rows of its own source, of more elements than one block."""
    n, rank, rows = comm.world_size, comm.rank, 100_000
    for name, op in product(("float16", "bfloat16"), ("sum", "mean")):
        of_ranks = [contribution(each, (rows * n,), name) for each in range(n)]
        want = exactly_reduced(op, of_ranks)[rank * rows : (rank + 1) * rows]
        for shift in (0, 30_000, -30_000):
            for call in (comm, comm, comm.asynchronous):
                array = of_ranks[rank].copy()
                begin = min(max(rank * rows + shift, 0), rows * (n - 1))
                out = array[begin : begin + rows]
                got = call.reduce_scatter(array, op, out=out)
                assert_identical(np.asarray(out if got is out else got.result()), want)


@pytest.mark.parametrize("world_size", [2, 3])
def test_half_precision_into_rows_of_its_own_source(world_size: int) -> None:
    run_ranks(world_size, check_halves, timeout=120)


@pytest.mark.parametrize("world_size", [2, 3])
def test_large_arrays_that_recur_and_that_do_not(world_size: int) -> None:
    run_ranks(world_size, check_large, timeout=120)


SPELLINGS: list[Any] = ["sum", "SUM", np.str_("Sum"), gs.ReduceOp.SUM]


def check_meeting(comm: Any) -> None:
    """Each rank has its own spelling and layout, which changes from call to call."""
    for number, (name, rows) in enumerate(product(("float32", "float16", "int64"), (3, 2_000))):
        of_ranks = [contribution(each, (rows, 4), name) for each in range(comm.world_size)]
        want = exactly_reduced("sum", of_ranks)
        for turn in range(6):
            mine = np.array(of_ranks[comm.rank], order="CF"[(number + turn + comm.rank) // 2 % 2])
            got = comm.all_reduce(mine, SPELLINGS[(turn + comm.rank) % 4])
            assert_identical(np.ascontiguousarray(got), want)
            root = turn % comm.world_size
            sent = np.array(of_ranks[comm.rank], order="CF"[(turn + comm.rank) % 2])
            assert_identical(np.ascontiguousarray(comm.broadcast(sent, root)), of_ranks[root])


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_of_any_spelling_and_layout_meet(world_size: int) -> None:
    run_ranks(world_size, check_meeting, timeout=120)


def check_refusals(comm: Any) -> None:
    """What was right for one array is looked at again for the next one like it."""
    array = np.ones(64, np.float32)
    for _ in range(3):
        comm.all_reduce(array)
        comm.broadcast(array, 1)
    expect(gs.InvalidArgument, lambda: comm.all_reduce(sealed(array.copy())), "read-only")
    expect(gs.InvalidArgument, lambda: comm.all_reduce(array, out=np.ones(63, np.float32)), "out= with shape")
    expect(gs.InvalidArgument, lambda: comm.all_reduce(array, out=np.ones(64)), "dtype float32, got")
    expect(gs.InvalidArgument, lambda: comm.all_reduce(array, ["sum"]), "op needs to be one of")
    expect(gs.InvalidArgument, lambda: comm.broadcast(array, 1.0), "root to be a rank from 0 to")
    if comm.rank == 0:
        expect(gs.InvalidArgument, lambda: comm.broadcast(sealed(array.copy()), 1), "read-only")
    swapped = array.astype(">f4")
    expect(gs.UnsupportedDtype, lambda: comm.all_reduce(swapped), "native byte order")
    comm.barrier()


def test_a_call_like_an_earlier_one_is_checked_too() -> None:
    run_ranks(2, check_refusals)


def count_calls(comm: Any) -> dict[str, int]:
    """Returns how many Python functions each spelling of a small all-reduce enters; the least of some."""
    array, half = np.ones(1024, np.float32), np.ones(1024, np.float16)
    spelled = {f"{type(op).__name__} {op}": partial(comm.all_reduce, array, op) for op in SPELLINGS}
    spelled["half"] = partial(comm.all_reduce, half)
    least = {}
    for name, call in spelled.items():
        call()
        counts = []
        for _ in range(20):
            seen: list[str] = []
            sys.setprofile(lambda _frame, event, _argument, seen=seen: seen.append(event))  # type: ignore[misc]
            call()
            sys.setprofile(None)
            counts.append(seen.count("call"))
        least[name] = min(counts)
    return least


def test_every_spelling_takes_the_short_way() -> None:
    """Who comes last to a collective does not wait there: of both ranks the least."""
    first, second = run_ranks(2, count_calls)
    least = {name: min(count, second[name]) for name, count in first.items()}
    assert max(least.values()) <= 30, least


def end_with_calls_remembered(comm: Any) -> list[str]:
    """Returns what is still mapped of a group's memory after its end, with its plans in the hands of the caller."""
    group = comm.split(0)
    array = np.ones(1024, np.float32)
    for _ in range(3):
        group.all_reduce(array)
        group.all_gather(array)
        group.reduce_scatter(array)
        group.broadcast(array)
        group.all_to_all(array)
    comm.barrier()

    def mapped() -> list[str]:
        return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:gradsync" in line]

    before = mapped()
    group.close()
    expect(gs.CommunicatorClosed, lambda: group.all_reduce(array))
    assert len(mapped()) < len(before)
    comm.barrier()
    return mapped()


def test_the_end_frees_the_memory_of_what_is_remembered() -> None:
    run_ranks(2, end_with_calls_remembered)
