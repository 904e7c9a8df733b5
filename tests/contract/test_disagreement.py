"""Ranks that call different things: PlanMismatch on every rank, nothing is written, and the communicator goes on."""

from itertools import combinations

import numpy as np
import pytest

import gradsync as gs
from arrays import arrays_of, assert_identical
from ranks import COMPARED


def collectives(comm, array):
    """Calls that are right by themselves, and of which no two agree; the array has rows for every rank."""
    n, rows = comm.world_size, int(array.shape[0])
    last, each = n - 1, rows // n
    equal, uneven, of_rows = [each] * n, [each + 1, *[each] * (n - 2), each - 1], [rows] * n
    part, uneven_part = array[:each].copy(), array[: uneven[comm.rank]].copy()
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
        "objects": lambda: comm.objects.all_gather(1),
        "split": lambda: comm.split(0),
    }


def assert_disagree(comm, mine, *kept):
    """Calls what this rank wants, which is not what all others want."""
    arrays = arrays_of(comm)
    before = [arrays.get(array).copy() for array in kept]
    with pytest.raises(gs.PlanMismatch) as raised:
        mine()
    error = raised.value
    assert set(error.descriptions) == set(error.places) == set(comm.ranks)
    assert len(set(error.descriptions.values())) > 1
    assert all("test_disagreement.py" in place for place in error.places.values())
    for array, values in zip(kept, before, strict=True):
        assert_identical(arrays.get(array), values)
    return error


def assert_usable(comm):
    arrays = arrays_of(comm)
    assert (arrays.get(comm.all_reduce(arrays.put(np.ones(3)))) == comm.world_size).all()


@pytest.mark.ranks(on=COMPARED)
def test_each_pair_of_collectives(comm):
    array = arrays_of(comm).put(np.full((4 * comm.world_size, 3), 1.0))
    calls = collectives(comm, array)
    for number, (first, second) in enumerate(combinations(calls, 2)):
        if comm.backend != "shm" and number % 4:  # to save time: what compares them is the same for all pairs
            continue
        odd = comm.rank == number % comm.world_size
        error = assert_disagree(comm, calls[second if odd else first], array)
        assert len(set(error.descriptions.values())) == 2, (first, second)
    assert_usable(comm)


@pytest.mark.ranks(on=COMPARED)
def test_each_collective_of_other_arrays(comm):
    """Other dtypes and numbers of columns, and sizes for which a collective may take another way."""
    n, arrays = comm.world_size, arrays_of(comm)
    small = arrays.put(np.full((4 * n, 3), 1.0))
    names = [name for name in collectives(comm, small) if name not in ("barrier", "objects", "split")]
    for shape, dtype in (
        ((4 * n, 3), "float32"),
        ((4 * n, 4), "float64"),
        ((4 * n, 3, 1), "float64"),
        ((99_999 * n, 1), "float64"),
    ):
        other = arrays.put(np.full(shape, 1, dtype))
        for number, name in enumerate(names):
            array = other if comm.rank == number % n else small
            assert_disagree(comm, collectives(comm, array)[name], small)
        assert_usable(comm)


@pytest.mark.ranks(on=COMPARED)
def test_sources_and_targets_in_one_memory_are_not_written(comm):
    """Where one rank does something else, the others' outs are as they were, and so is what they were to send."""
    n, arrays = comm.world_size, arrays_of(comm)
    for number, rows in enumerate((1, 5_000, 100_000)):
        memory = arrays.put(np.arange(2.0 * n * rows))
        whole, part = memory[: n * rows], memory[rows // 2 : rows // 2 + rows]
        further, rest, sizes = memory[rows : (n + 1) * rows], memory[n * rows : 2 * n * rows], [rows] * n
        for attempt in (
            lambda: comm.all_reduce(whole, out=further),
            lambda: comm.reduce(whole, "sum", comm.rank, out=further),
            lambda: comm.reduce_scatter(whole, out=part),
            lambda: comm.broadcast(whole, (comm.rank + 1) % n),
            lambda: comm.all_gather(part, out=rest),
            lambda: comm.all_gather(part, out=whole),
            lambda: comm.gather(part, comm.rank, out=rest),
            lambda: comm.gather(part, comm.rank, sizes=sizes, out=whole),
            lambda: comm.scatter(whole, comm.rank, out=part),
            lambda: comm.all_to_all(whole, out=rest),
            lambda: comm.all_to_all(whole, out=further),
            lambda: comm.all_to_all(whole, send_sizes=sizes, recv_sizes=sizes, out=rest),
        ):
            assert_disagree(comm, comm.barrier if comm.rank == number % n else attempt, memory)
        assert_usable(comm)


@pytest.mark.ranks(on=COMPARED)
def test_numbers_of_rows(comm):
    """Rows that must be equal, and are not; sizes of which each rank believes others; rows that are not expected."""
    n, odd, arrays = comm.world_size, comm.rank == comm.world_size - 1, arrays_of(comm)
    rows = 3 if odd else 2
    array, twos = arrays.put(np.full((rows * n, 2), 1.0)), arrays.put(np.full((2 * n, 2), 1.0))
    believed, shifted = [rows] * n, [1, 3, *[2] * (n - 2)] if odd else [2] * n
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
        assert_disagree(comm, attempt, array, twos)
    # Each rank sends two rows to each, and one rank expects three of the first.
    expected = [3, *[2] * (n - 1)] if odd else [2] * n
    with pytest.raises(gs.PlanMismatch) as raised:
        comm.all_to_all(twos, send_sizes=[2] * n, recv_sizes=expected)
    assert set(raised.value.descriptions) == set(comm.ranks)
    assert_usable(comm)


@pytest.mark.ranks(
    2,
    on=("fake",),
    fresh=True,
    options={"collective_timeout_seconds": 1.5},
    environment={"FAKE_CUPY_HANG": "1"},
)
@pytest.mark.parametrize("odd", ["all_reduce of other rows", "broadcast", "all_to_all"])
def test_over_nccl_without_debug_the_deadline_tells(comm, odd):
    """The kernels hang, or do something wrong; what both ranks called is in the error."""
    array = arrays_of(comm).put(np.full((8, 3), 1.0))
    calls = collectives(comm, array) | {"all_reduce of other rows": lambda: comm.all_reduce(array[:6])}
    with pytest.raises(gs.CollectiveTimeout) as raised:
        calls[odd if comm.rank else "all_reduce"]()
        comm.barrier()
    for text in ("all_reduce(sum)", odd.partition(" ")[0].rstrip(","), "test_disagreement.py"):
        assert text in str(raised.value)
    assert comm.closed


@pytest.mark.ranks(2, on=("shm", "debug"))
def test_ranks_that_gather_unequal_rows_are_told_to_pass_sizes(comm):
    arrays = arrays_of(comm)
    for gather in (comm.all_gather, comm.gather):
        with pytest.raises(gs.PlanMismatch, match="sizes="):
            gather(arrays.put(np.zeros((3 + comm.rank, 2))))
    with pytest.raises(gs.PlanMismatch) as raised:
        comm.all_gather(arrays.put(np.zeros((3, 2 + comm.rank))))
    assert "sizes=" not in str(raised.value)
