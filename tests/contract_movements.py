"""The contract of the movements: broadcast, all_gather, gather, scatter and all_to_all. Every bit is the sender's."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np

from contract import LAYOUTS, Host, assert_identical, bounds_of, contribution, dtype_of, in_layout, note, sealed
from contract_reductions import splits

_SHAPES = [(), (0,), (3,), (5, 3), (2, 0, 3), (20_011,)]


def parts(sizes: list[int], tail: tuple[int, ...], name: str, seed: int = 0) -> list[Host]:
    """Returns what each rank contributes, by rank."""
    return [contribution(rank, (rows, *tail), name, seed) for rank, rows in enumerate(sizes)]


def whole(of_ranks: list[Host]) -> Host:
    """Returns the parts of all ranks, one after the other; a 0-d part is one row."""
    return np.concatenate([np.atleast_1d(part) for part in of_ranks], dtype=of_ranks[0].dtype)


def other_layout(kit: Any, values: Host, number: int) -> Any:
    return in_layout(values, kit, LAYOUTS[number % len(LAYOUTS)])


# -- broadcast -------------------------------------------------------------------------------------------------------


def check_broadcast_of_every_dtype(comm: Any, kit: Any) -> None:
    root_of_call = count()
    for name in kit.dtypes:
        for shape in _SHAPES:
            root = next(root_of_call) % comm.world_size
            array = kit.put(contribution(comm.rank, shape, name))
            if comm.rank == root:
                sealed(array)
            assert comm.broadcast(array, root) is array
            assert_identical(kit.get(array), contribution(root, shape, name))
        note("broadcast", name)


def check_broadcast_from_every_root(comm: Any, kit: Any) -> None:
    for root in range(comm.world_size):
        large = kit.put(contribution(comm.rank, (1_000_003,), "float32"))
        comm.broadcast(large, root)
        assert_identical(kit.get(large), contribution(root, (1_000_003,), "float32"))
        for number in range(len(LAYOUTS)):
            array = other_layout(kit, contribution(comm.rank, (30, 40), "float64"), number + comm.rank)
            comm.broadcast(array, root)
            assert_identical(kit.get(array), contribution(root, (30, 40), "float64"))


# -- all_gather ------------------------------------------------------------------------------------------------------


def check_all_gather_of_every_dtype(comm: Any, kit: Any) -> None:
    for name in kit.dtypes:
        for shape in _SHAPES:
            of_ranks = [contribution(rank, shape, name) for rank in range(comm.world_size)]
            got = comm.all_gather(sealed(kit.put(of_ranks[comm.rank])))
            assert isinstance(got, kit.xp.ndarray)
            assert_identical(kit.get(got), whole(of_ranks))
        note("all_gather", name)


def check_all_gather_of_memory_layouts(comm: Any, kit: Any) -> None:
    for shape in ((3, 5), (90, 101), (4, 3, 5)):
        of_ranks = [contribution(rank, shape, "int16") for rank in range(comm.world_size)]
        for number in range(len(LAYOUTS)):
            source = sealed(other_layout(kit, of_ranks[comm.rank], number + comm.rank))
            assert_identical(kit.get(comm.all_gather(source)), whole(of_ranks))
            out = other_layout(kit, np.zeros_like(whole(of_ranks)), number + 1)
            assert comm.all_gather(source, out=out) is out
            assert_identical(kit.get(out), whole(of_ranks))
            assert_identical(kit.get(source), of_ranks[comm.rank])


def check_all_gather_of_sizes(comm: Any, kit: Any) -> None:
    for sizes in splits(comm.world_size):
        for tail in ((), (4,)):
            of_ranks = parts(sizes, tail, "complex64")
            source = kit.put(of_ranks[comm.rank].copy())
            for how in (sizes, np.array(sizes)):
                assert_identical(kit.get(comm.all_gather(source, sizes=how)), whole(of_ranks))
            out = kit.put(np.zeros_like(whole(of_ranks)))
            assert comm.all_gather(source, sizes=sizes, out=out) is out
            assert_identical(kit.get(out), whole(of_ranks))


def check_all_gather_in_place(comm: Any, kit: Any) -> None:
    """From exactly the own rows of the target, and from rows that overlap those of others."""
    for sizes in [*splits(comm.world_size), [2] * comm.world_size, [7_000] * comm.world_size]:
        is_equal = len(set(sizes)) == 1
        bounds = bounds_of(sizes)
        of_ranks = parts(sizes, (3,), "float64")
        for shift in (0, 1, -1):
            begin, end = bounds[comm.rank] + shift, bounds[comm.rank + 1] + shift
            if not (begin >= 0 and end <= bounds[-1]):
                begin, end = bounds[comm.rank], bounds[comm.rank + 1]
            memory = kit.put(np.zeros((bounds[-1], 3)))
            memory[begin:end] = kit.put(of_ranks[comm.rank])
            assert comm.all_gather(memory[begin:end], sizes=None if is_equal else sizes, out=memory) is memory
            assert_identical(kit.get(memory), whole(of_ranks))


# -- gather and scatter ----------------------------------------------------------------------------------------------


def check_gather_of_every_dtype(comm: Any, kit: Any) -> None:
    root_of_call = count()
    for name in kit.dtypes:
        for shape in _SHAPES:
            root = next(root_of_call) % comm.world_size
            of_ranks = [contribution(rank, shape, name) for rank in range(comm.world_size)]
            got = comm.gather(sealed(kit.put(of_ranks[comm.rank])), root)
            assert_on_root(comm, kit, root, got, of_ranks)
        note("gather", name)


def check_gather_of_sizes_and_layouts(comm: Any, kit: Any) -> None:
    for number, sizes in enumerate(splits(comm.world_size)):
        for root in range(comm.world_size):
            of_ranks = parts(sizes, (4,), "float32")
            source = sealed(other_layout(kit, of_ranks[comm.rank], number + comm.rank))
            assert_on_root(comm, kit, root, comm.gather(source, root, sizes=sizes), of_ranks)
            target = other_layout(kit, np.zeros_like(whole(of_ranks)), number + 1)
            got = comm.gather(source, root, sizes=sizes, out=target if comm.rank == root else "not looked at")
            assert got is (target if comm.rank == root else None)
            assert_on_root(comm, kit, root, got, of_ranks)


def assert_on_root(comm: Any, kit: Any, root: int, got: Any, of_ranks: list[Host]) -> None:
    if comm.rank == root:
        assert_identical(kit.get(got), whole(of_ranks))
    else:
        assert got is None


def check_scatter_of_every_dtype(comm: Any, kit: Any) -> None:
    n = comm.world_size
    root_of_call = count()
    for name in kit.dtypes:
        for rows, tail in ((0, ()), (1, ()), (3, (5,)), (2, (0, 3)), (10_007, ())):
            root = next(root_of_call) % n
            of_ranks = parts([rows] * n, tail, name)
            source = sealed(kit.put(whole(of_ranks))) if comm.rank == root else None
            out = None if comm.rank == root else kit.put(np.zeros((rows, *tail), dtype_of(name)))
            got = comm.scatter(source, root, out=out)
            assert got is out or comm.rank == root
            assert_identical(kit.get(got), of_ranks[comm.rank])
        note("scatter", name)


def check_scatter_of_sizes_and_layouts(comm: Any, kit: Any) -> None:
    for number, sizes in enumerate(splits(comm.world_size)):
        for root in range(comm.world_size):
            of_ranks = parts(sizes, (4,), "int64")
            source = other_layout(kit, whole(of_ranks), number) if comm.rank == root else None
            out = other_layout(kit, np.zeros_like(of_ranks[comm.rank]), number + comm.rank + 1)
            assert comm.scatter(source, root, sizes=sizes, out=out) is out
            assert_identical(kit.get(out), of_ranks[comm.rank])


# -- all_to_all ------------------------------------------------------------------------------------------------------


def blocks(rank: int, send_sizes: list[list[int]], tail: tuple[int, ...], name: str) -> list[Host]:
    """Returns what a rank sends to each rank; send_sizes[i][j] are the rows from rank i to rank j."""
    return [contribution(rank, (rows, *tail), name, seed=dest) for dest, rows in enumerate(send_sizes[rank])]


def received(comm: Any, send_sizes: list[list[int]], tail: tuple[int, ...], name: str) -> Host:
    return whole([blocks(source, send_sizes, tail, name)[comm.rank] for source in range(comm.world_size)])


def check_all_to_all_of_every_dtype(comm: Any, kit: Any) -> None:
    n = comm.world_size
    for name in kit.dtypes:
        for rows, tail in ((0, ()), (1, ()), (3, (5,)), (2, (0, 3)), (5_003, ())):
            send_sizes = [[rows] * n] * n
            values = whole(blocks(comm.rank, send_sizes, tail, name))
            got = comm.all_to_all(sealed(kit.put(values)))
            assert_identical(kit.get(got), received(comm, send_sizes, tail, name))
        note("all_to_all", name)


def uneven_tables(n: int) -> list[list[list[int]]]:
    """Returns rows from each rank to each: uneven, in one direction only, for one rank, none."""
    return [
        [[i + 2 * j for j in range(n)] for i in range(n)],
        [[4 if j == (i + 1) % n else 0 for j in range(n)] for i in range(n)],
        [[3_000 * i + 7 if j == 0 else 0 for j in range(n)] for i in range(n)],
        [[0] * n for _ in range(n)],
    ]


def check_all_to_all_of_uneven_sizes(comm: Any, kit: Any) -> None:
    for number, send_sizes in enumerate(uneven_tables(comm.world_size)):
        recv_sizes = [of_rank[comm.rank] for of_rank in send_sizes]
        for tail in ((), (6,)):
            values = whole(blocks(comm.rank, send_sizes, tail, "float32"))
            want = received(comm, send_sizes, tail, "float32")
            source = sealed(other_layout(kit, values, number + comm.rank))
            mine = send_sizes[comm.rank]
            assert_identical(kit.get(comm.all_to_all(source, send_sizes=mine, recv_sizes=recv_sizes)), want)
            out = other_layout(kit, np.zeros_like(want), number + 1)
            assert comm.all_to_all(source, send_sizes=mine, recv_sizes=recv_sizes, out=out) is out
            assert_identical(kit.get(out), want)
            assert_identical(kit.get(source), values)


def check_all_to_all_of_uneven_sizes_in_place(comm: Any, kit: Any) -> None:
    """Rows leave from where others come, and from where the target lies a row further on."""
    n = comm.world_size
    for rows in (30, 3_000, 100_000):
        sizes = [rows, 10, rows // 3, 5][:n]
        send_sizes = [[sizes[(dest - rank) % n] for dest in range(n)] for rank in range(n)]
        recv_sizes = [of_rank[comm.rank] for of_rank in send_sizes]
        values = whole(blocks(comm.rank, send_sizes, (), "int64"))
        want = received(comm, send_sizes, (), "int64")
        for shift in (0, 1):
            memory = kit.put(np.zeros(values.size + 1, np.int64))
            source, out = memory[: values.size], memory[shift : values.size + shift]
            source[...] = kit.put(values)
            target = source if shift == 0 else out
            assert (
                comm.all_to_all(source, send_sizes=send_sizes[comm.rank], recv_sizes=recv_sizes, out=target) is target
            )
            assert_identical(kit.get(out), want)


def check_all_to_all_into_out(comm: Any, kit: Any) -> None:
    n = comm.world_size
    send_sizes = [[30] * n] * n
    values = whole(blocks(comm.rank, send_sizes, (21,), "float64"))
    want = received(comm, send_sizes, (21,), "float64")
    for number in range(len(LAYOUTS)):
        source = sealed(other_layout(kit, values, number + comm.rank))
        out = other_layout(kit, np.zeros_like(want), number + 1)
        assert comm.all_to_all(source, out=out) is out
        assert_identical(kit.get(out), want)
    memory = kit.put(values.copy())  # source and target are one: the source must be copied first
    assert comm.all_to_all(memory, out=memory) is memory
    assert_identical(kit.get(memory), want)


def check_equal_dtypes_of_different_types(comm: Any, kit: Any) -> None:
    """A numpy.record equals the plain structured dtype; ranks with either meet, and each gets its own back."""
    if "structured" not in kit.dtypes:
        return
    n = comm.world_size
    plain = np.dtype([("weight", "<f4"), ("count", "<i4")])
    of_records = np.dtype((np.record, plain))
    for call in range(4):
        dtype = of_records if (comm.rank + call) % 2 else plain
        for rows in (2 * n, 50_000 * n):
            mine = np.zeros(rows, dtype)
            mine["count"] = comm.rank
            gathered, dealt = comm.all_gather(mine), comm.all_to_all(mine)
            assert gathered.dtype.type is dealt.dtype.type is dtype.type
            np.testing.assert_array_equal(gathered["count"], np.repeat(np.arange(n), rows))
            np.testing.assert_array_equal(dealt["count"], np.repeat(np.arange(n), rows // n))
            assert (comm.broadcast(mine, n - 1)["count"] == n - 1).all()


def check_the_same_small_call_again_and_again(comm: Any, kit: Any) -> None:
    """With other arrays each time, and an `out` now and then: what is kept from call to call must not be values."""
    n = comm.world_size
    for call in range(6):
        of_ranks = [contribution(rank, (2 * n, 3), "float32", seed=call) for rank in range(n)]
        dealt = [np.split(values, n) for values in of_ranks]
        mine = kit.put(of_ranks[comm.rank])

        def room(want: Host, number: int = call) -> Any:
            return other_layout(kit, np.zeros_like(want), number) if number % 2 else None

        assert_identical(kit.get(comm.all_gather(mine, out=room(whole(of_ranks)))), whole(of_ranks))
        wanted = whole([blocks_of[comm.rank] for blocks_of in dealt])
        assert_identical(kit.get(comm.all_to_all(mine, out=room(wanted))), wanted)
        array = other_layout(kit, of_ranks[comm.rank], call)
        comm.broadcast(array, n - 1)
        assert_identical(kit.get(array), of_ranks[n - 1])
