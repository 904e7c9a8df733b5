"""broadcast, all_gather, gather, scatter and all_to_all: every bit is the sender's."""

import time
from itertools import count, product

import numpy as np
import pytest

from arrays import (
    LAYOUTS,
    HostArrays,
    arrays_for,
    arrays_of,
    assert_identical,
    bounds_of,
    contribution,
    in_layout,
    joined,
    read_only,
    sizes_of,
)
from ranks import ALSO_ALONE, EVERYWHERE, ON_GPU, SEVERAL, THREE_OF_FAKE

SHAPES = [(), (0,), (3,), (5, 3), (2, 0, 3), (20_011,)]


def placed(arrays, values, number):
    return in_layout(values, arrays, LAYOUTS[number % len(LAYOUTS)])


def blank(arrays, like, number=0):
    return placed(arrays, np.zeros_like(like), number)


@pytest.mark.ranks(on=ALSO_ALONE | ON_GPU)
def test_every_dtype_and_shape(comm):
    n, rank, turn = comm.world_size, comm.rank, count()
    for arrays, shape in product(arrays_for(comm), SHAPES):
        is_staged = comm.device != "cpu" and isinstance(arrays, HostArrays)
        for dtype in arrays.dtypes[:: 3 if is_staged else 1]:
            root = next(turn) % n
            of_ranks = [contribution(each, shape, dtype) for each in range(n)]

            array = arrays.put(of_ranks[rank])
            assert comm.broadcast(read_only(array) if rank == root else array, root) is array
            assert_identical(arrays.get(array), of_ranks[root])

            mine = read_only(arrays.put(of_ranks[rank]))
            got = comm.all_gather(mine)
            assert isinstance(got, arrays.xp.ndarray)
            assert_identical(arrays.get(got), joined(of_ranks))

            got = comm.gather(mine, root)
            if rank == root:
                assert_identical(arrays.get(got), joined(of_ranks))
            else:
                assert got is None

            got = comm.scatter(
                read_only(arrays.put(joined(of_ranks))) if rank == root else None,
                root,
                out=None if rank == root else blank(arrays, np.atleast_1d(of_ranks[0])),
            )
            assert_identical(arrays.get(got), np.atleast_1d(of_ranks[rank]))

            dealt = [[contribution(each, shape, dtype, seed=to) for to in range(n)] for each in range(n)]
            got = comm.all_to_all(read_only(arrays.put(joined(dealt[rank]))))
            assert_identical(arrays.get(got), joined([parts[rank] for parts in dealt]))


@pytest.mark.ranks(on=EVERYWHERE)
def test_large_broadcast_from_every_root(comm):
    arrays = arrays_of(comm)
    for root in range(comm.world_size):
        array = arrays.put(contribution(comm.rank, 300_003, "float32"))
        comm.broadcast(array, root)
        assert_identical(arrays.get(array), contribution(root, 300_003, "float32"))


@pytest.mark.ranks(on=EVERYWHERE | THREE_OF_FAKE)
def test_layouts_differ_between_ranks_sources_and_targets(comm):
    n, rank = comm.world_size, comm.rank
    for arrays, shape, number in product(arrays_for(comm), [(3, 5), (90, 101), (4, 3, 5)], range(len(LAYOUTS))):
        of_ranks, root = [contribution(each, shape, "int16") for each in range(n)], number % n
        array = placed(arrays, of_ranks[rank], number + rank)
        comm.broadcast(array, root)
        assert_identical(arrays.get(array), of_ranks[root])

        source = read_only(placed(arrays, of_ranks[rank], number + rank))
        out = blank(arrays, joined(of_ranks), number + 1)
        assert comm.all_gather(source, out=out) is out
        assert_identical(arrays.get(out), joined(of_ranks))
        assert_identical(arrays.get(comm.all_gather(source)), joined(of_ranks))

        out = blank(arrays, joined(of_ranks), number + 2)
        assert comm.gather(source, root, out=out if rank == root else "not looked at") is (
            out if rank == root else None
        )
        if rank == root:
            assert_identical(arrays.get(out), joined(of_ranks))
        assert_identical(arrays.get(source), of_ranks[rank])

        whole = read_only(placed(arrays, joined(of_ranks), number + 3 * rank))
        out = blank(arrays, of_ranks[rank], number + rank + 1)
        assert comm.scatter(whole if rank == root else None, root, out=out) is out
        assert_identical(arrays.get(out), of_ranks[rank])

        dealt = [[contribution(each, shape, "int16", seed=to) for to in range(n)] for each in range(n)]
        source = read_only(placed(arrays, joined(dealt[rank]), number + rank))
        out = blank(arrays, joined(dealt[rank]), number + 1)
        assert comm.all_to_all(source, out=out) is out
        assert_identical(arrays.get(out), joined([parts[rank] for parts in dealt]))


@pytest.mark.ranks(on=EVERYWHERE)
def test_uneven_sizes(comm):
    n, rank = comm.world_size, comm.rank
    for arrays, (number, sizes), tail in product(arrays_for(comm), enumerate(sizes_of(n)), [(), (4,)]):
        of_ranks, root = [contribution(each, (rows, *tail), "complex64") for each, rows in enumerate(sizes)], number % n
        whole, source = joined(of_ranks), read_only(placed(arrays, of_ranks[rank], number + rank))
        for given in (sizes, np.array(sizes)):
            assert_identical(arrays.get(comm.all_gather(source, sizes=given)), whole)
        out = blank(arrays, whole, number)
        assert comm.all_gather(source, sizes=sizes, out=out) is out
        assert_identical(arrays.get(out), whole)

        got = comm.gather(source, root, sizes=sizes)
        assert got is None if rank != root else arrays.get(got).tobytes() == whole.tobytes()

        out = blank(arrays, of_ranks[rank], number)
        comm.scatter(placed(arrays, whole, number) if rank == root else None, root, sizes=sizes, out=out)
        assert_identical(arrays.get(out), of_ranks[rank])


def uneven_tables(n):
    """Rows from each rank to each: uneven, in one direction only, for one rank, none."""
    return [
        [[i + 2 * j for j in range(n)] for i in range(n)],
        [[4 if j == (i + 1) % n else 0 for j in range(n)] for i in range(n)],
        [[3_000 * i + 7 if j == 0 else 0 for j in range(n)] for i in range(n)],
        [[0] * n for _ in range(n)],
    ]


@pytest.mark.ranks(on=EVERYWHERE | THREE_OF_FAKE | ON_GPU)
def test_all_to_all_of_uneven_sizes(comm):
    n, rank = comm.world_size, comm.rank
    for arrays, (number, table), tail in product(arrays_for(comm), enumerate(uneven_tables(n)), [(), (6,)]):
        dealt = [[contribution(i, (table[i][j], *tail), "float32", seed=j) for j in range(n)] for i in range(n)]
        sizes = {"send_sizes": table[rank], "recv_sizes": [row[rank] for row in table]}
        want = joined([parts[rank] for parts in dealt])
        source = read_only(placed(arrays, joined(dealt[rank]), number + rank))
        assert_identical(arrays.get(comm.all_to_all(source, **sizes)), want)
        out = blank(arrays, want, number + 1)
        assert comm.all_to_all(source, **sizes, out=out) is out
        assert_identical(arrays.get(out), want)
        assert_identical(arrays.get(source), joined(dealt[rank]))


@pytest.mark.ranks(on=EVERYWHERE)
def test_all_gather_from_rows_of_its_target(comm):
    """From exactly its own rows, and from rows that overlap those of others; once more, since plans may be kept."""
    n, rank = comm.world_size, comm.rank
    for arrays, sizes in product(arrays_for(comm), [*sizes_of(n), [2] * n, [7_000] * n]):
        is_equal, bounds = len(set(sizes)) == 1, bounds_of(sizes)
        of_ranks = [contribution(each, (rows, 3), "float64") for each, rows in enumerate(sizes)]
        for shift, _ in product((0, 1, -1), range(2)):
            begin, end = bounds[rank] + shift, bounds[rank + 1] + shift
            if not 0 <= begin <= end <= bounds[-1]:
                begin, end = bounds[rank], bounds[rank + 1]
            memory = arrays.put(np.zeros((bounds[-1], 3)))
            memory[begin:end] = arrays.put(of_ranks[rank])
            assert comm.all_gather(memory[begin:end], sizes=None if is_equal else sizes, out=memory) is memory
            assert_identical(arrays.get(memory), joined(of_ranks))


@pytest.mark.ranks(on=EVERYWHERE)
def test_all_to_all_within_one_memory(comm):
    """Rows leave from where others come, equal and uneven, and where the target lies a row further on."""
    n, rank = comm.world_size, comm.rank
    for arrays, rows, is_even in product(arrays_for(comm), (30, 70_000), (True, False)):
        sizes = [rows] * n if is_even else [rows, 10, rows // 3][:n]
        table = [[sizes[(to - each) % n] for to in range(n)] for each in range(n)]
        dealt = [[contribution(i, table[i][j], "int64", seed=j) for j in range(n)] for i in range(n)]
        values, want = joined(dealt[rank]), joined([parts[rank] for parts in dealt])
        given = {} if is_even else {"send_sizes": table[rank], "recv_sizes": [row[rank] for row in table]}
        for shift in (0, 1):
            memory = arrays.put(np.zeros(values.size + 1, np.int64))
            source, out = memory[:-1], memory[shift : values.size + shift]
            source[...] = arrays.put(values)
            comm.all_to_all(source, **given, out=source if shift == 0 else out)
            assert_identical(arrays.get(out), want)


@pytest.mark.ranks(on=EVERYWHERE)
def test_the_same_call_again_with_other_values(comm):
    """What is kept from call to call must be neither values nor arrays."""
    n, rank, arrays = comm.world_size, comm.rank, arrays_of(comm)
    for rows, call in product((2 * n, 4_000 * n), range(5)):
        of_ranks = [contribution(each, (rows, 3), "float32", seed=call) for each in range(n)]
        mine = arrays.put(of_ranks[rank])
        out = blank(arrays, joined(of_ranks), call) if call % 2 else None
        assert_identical(arrays.get(comm.all_gather(mine, out=out)), joined(of_ranks))
        want = joined([np.split(values, n)[rank] for values in of_ranks])
        out = blank(arrays, want, call) if call % 2 else None
        assert_identical(arrays.get(comm.all_to_all(mine, out=out)), want)
        array = placed(arrays, of_ranks[rank], call)
        comm.broadcast(array, n - 1)
        assert_identical(arrays.get(array), of_ranks[n - 1])


@pytest.mark.ranks(on=SEVERAL)
def test_a_barrier_holds_all(comm):
    """Nobody leaves before the last one has come, whoever that is: each in turn has work to do first."""
    for late in range(2 * comm.world_size):
        if comm.rank == late % comm.world_size:
            np.sort(contribution(comm.rank, 200_000, "float64", late))
        came = time.monotonic()  # one clock for all processes of a machine
        comm.barrier()
        went = time.monotonic()
        times = comm.objects.all_gather((came, went))
        assert max(came for came, _ in times) <= min(went for _, went in times)
