"""Prepared collectives on small arrays: wherever their result goes, the bits are those of the long way and of NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

from contract import Host, assert_identical, contribution, exactly_reduced, sealed
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
    """Runs a collective the short way and the long way for each placing."""
    call: Callable[..., Any] = getattr(comm, f"_{what}_call")
    details = (detail,) if detail else ()
    twice = [list(placings(values, want.shape, begin)) for _ in range(2)]
    for (where, (array, out)), (_, (long_array, long_out)) in zip(*twice, strict=True):
        got = comm._shortcut(what, array, out, detail)
        assert got is not None, f"{what} with its result {where} is not prepared for"
        assert out is None or got is out, where
        long_got = comm._run(call(long_array, *details, out=long_out), None)
        for result in (got, long_got):
            assert_identical(np.ascontiguousarray(result), want)
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
