"""The contract of disagreement: PlanMismatch on every rank, nothing written, and the communicator goes on."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np

import gradsync as gs
from contract import assert_identical, expect

Collective = Callable[[], Any]


def collectives(comm: Any, kit: Any, array: Any) -> dict[str, Collective]:
    """Returns calls that are right by themselves, and of which no two agree; array has rows for every rank."""
    n = comm.world_size
    rows = int(array.shape[0])
    last = n - 1
    equal, uneven = [rows // n] * n, [rows // n] * n
    uneven[0], uneven[last] = uneven[0] + 1, uneven[last] - 1
    of_rows = [rows] * n
    part = array[: rows // n].copy()
    uneven_part = array[: uneven[comm.rank]].copy()
    return {
        "barrier": comm.barrier,
        "all_reduce": lambda: comm.all_reduce(array),
        "all_reduce, max": lambda: comm.all_reduce(array, "max"),
        "reduce": lambda: comm.reduce(array),
        "reduce, min": lambda: comm.reduce(array, "min"),
        "reduce to the last": lambda: comm.reduce(array, "sum", last),
        "reduce_scatter": lambda: comm.reduce_scatter(array),
        "reduce_scatter of uneven rows": lambda: comm.reduce_scatter(array, sizes=uneven),
        "broadcast": lambda: comm.broadcast(array),
        "broadcast from the last": lambda: comm.broadcast(array, last),
        "all_gather": lambda: comm.all_gather(array),
        "all_gather of given rows": lambda: comm.all_gather(array, sizes=of_rows),
        "gather": lambda: comm.gather(array),
        "gather to the last": lambda: comm.gather(array, last),
        "gather of given rows": lambda: comm.gather(array, sizes=of_rows),
        "scatter": lambda: comm.scatter(array, out=part),
        "scatter from the last": lambda: comm.scatter(array, last, out=part),
        "scatter of uneven rows": lambda: comm.scatter(array, sizes=uneven, out=uneven_part),
        "all_to_all": lambda: comm.all_to_all(array),
        "all_to_all of given rows": lambda: comm.all_to_all(array, send_sizes=equal, recv_sizes=equal),
    }


def disagree(comm: Any, kit: Any, mine: Collective, arrays: list[Any]) -> None:
    """Calls what this rank wants, which is not what all others want."""
    before = [kit.get(array).copy() for array in arrays]
    error = expect(gs.PlanMismatch, mine)
    assert set(error.descriptions) == set(range(comm.world_size))
    assert len(set(error.descriptions.values())) == 2, error.descriptions
    for array, values in zip(arrays, before, strict=True):
        assert_identical(kit.get(array), values)


def assert_usable(comm: Any, kit: Any) -> None:
    assert (kit.get(comm.all_reduce(kit.put(np.full(3, 1.0)))) == comm.world_size).all()


def check_each_pair_of_collectives(comm: Any, kit: Any) -> None:
    if comm.world_size == 1:
        return
    array = kit.put(np.full((4 * comm.world_size, 3), 1.0))
    calls = collectives(comm, kit, array)
    for number, (first, second) in enumerate(combinations(calls, 2)):
        odd = comm.rank == number % comm.world_size
        disagree(comm, kit, calls[second if odd else first], [array])
        if number % 10 == 0:
            assert_usable(comm, kit)
    assert_usable(comm, kit)


def check_each_collective_of_other_arrays(comm: Any, kit: Any) -> None:
    """Other dtypes, numbers of columns, and sizes for which a collective takes another way."""
    if comm.world_size == 1:
        return
    n = comm.world_size
    small = kit.put(np.full((4 * n, 3), 1.0))
    names = [name for name in collectives(comm, kit, small) if name != "barrier"]
    large = kit.put(np.full((100_000 * n, 1), 1.0))
    for others in (
        kit.put(np.full((4 * n, 3), 1, np.float32)),
        kit.put(np.full((4 * n, 4), 1.0)),
        kit.put(np.full((4 * n, 3, 1), 1.0)),
        large,
    ):
        for number, name in enumerate(names):
            odd = comm.rank == number % n
            array = others if odd else small
            disagree(comm, kit, collectives(comm, kit, array)[name], [small, others])
        assert_usable(comm, kit)


def collectives_within(comm: Any, memory: Any, rows: int) -> list[Collective]:
    """Returns calls whose sources and targets lie in one memory, and some of them on one another."""
    n = comm.world_size
    whole, part = memory[: n * rows], memory[rows // 2 : rows // 2 + rows]
    next_whole, all_parts = memory[rows : (n + 1) * rows], memory[n * rows : 2 * n * rows]
    sizes = [rows] * n
    return [
        lambda: comm.all_reduce(whole, out=next_whole),
        lambda: comm.reduce(whole, "sum", comm.rank, out=next_whole),
        lambda: comm.reduce_scatter(whole, out=part),
        lambda: comm.broadcast(whole, (comm.rank + 1) % n),
        lambda: comm.all_gather(part, out=all_parts),
        lambda: comm.all_gather(part, out=whole),
        lambda: comm.gather(part, comm.rank, out=all_parts),
        lambda: comm.gather(part, comm.rank, sizes=sizes, out=whole),
        lambda: comm.scatter(whole, comm.rank, out=part),
        lambda: comm.all_to_all(whole, out=all_parts),
        lambda: comm.all_to_all(whole, out=next_whole),
        lambda: comm.all_to_all(whole, send_sizes=sizes, recv_sizes=sizes, out=all_parts),
    ]


def check_outs_and_overlapping_sources(comm: Any, kit: Any) -> None:
    """Where one rank does something else, the others' outs are as they were, and so is what they were to send."""
    if comm.world_size == 1:
        return
    for number, rows in enumerate((1, 5_000, 100_000)):
        values = np.arange(2.0 * comm.world_size * rows)
        memory = kit.put(values.copy())
        for attempt in collectives_within(comm, memory, rows):
            expect(gs.PlanMismatch, comm.barrier if comm.rank == number % comm.world_size else attempt)
            assert_identical(kit.get(memory), values)
        assert_usable(comm, kit)


def check_the_advice_for_gathers_of_unequal_rows(comm: Any, kit: Any) -> None:
    if comm.world_size == 1:
        return
    unequal, other = kit.put(np.zeros((3 + comm.rank, 2))), kit.put(np.zeros((3, 2 + comm.rank)))
    expect(gs.PlanMismatch, lambda: comm.all_gather(unequal), "pass sizes=")
    expect(gs.PlanMismatch, lambda: comm.gather(unequal), "pass sizes=")
    assert "sizes=" not in str(expect(gs.PlanMismatch, lambda: comm.all_gather(other)))
    error = expect(gs.PlanMismatch, lambda: comm.all_gather(other, sizes=[3] * comm.world_size))
    assert f"float64[rows, {2 + comm.rank}]" in error.descriptions[comm.rank]


def check_numbers_of_rows(comm: Any, kit: Any) -> None:
    """Rows that must be equal, and are not; sizes of which each rank believes others; rows that are not expected."""
    if comm.world_size == 1:
        return
    n, odd = comm.world_size, comm.rank == comm.world_size - 1
    rows = 3 if odd else 2
    array = kit.put(np.full((rows * n, 2), 1.0))
    believed = [rows] * n
    twos = kit.put(np.full((2 * n, 2), 1.0))
    shifted = [1, 3, *[2] * (n - 2)] if odd else [2] * n
    for attempt in (
        lambda: comm.all_reduce(array),
        lambda: comm.reduce(array),
        lambda: comm.broadcast(array),
        lambda: comm.all_gather(array),
        lambda: comm.gather(array),
        lambda: comm.reduce_scatter(array),
        lambda: comm.all_to_all(array),
        lambda: comm.all_gather(array[:rows], sizes=believed),
        lambda: comm.gather(array[:rows], sizes=believed),
        lambda: comm.reduce_scatter(twos, sizes=shifted),
    ):
        disagree(comm, kit, attempt, [array, twos])
        assert_usable(comm, kit)
    # This rank sends two rows to each, and one rank expects three of the first.
    expected = [3, *[2] * (n - 1)] if odd else [2] * n
    error = expect(gs.PlanMismatch, lambda: comm.all_to_all(twos, send_sizes=[2] * n, recv_sizes=expected))
    assert set(error.descriptions) == set(range(n))
    assert_usable(comm, kit)
