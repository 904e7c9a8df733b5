"""The contract of the reductions: all_reduce, reduce and reduce_scatter."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np

from contract import (
    IS_EVERYWHERE,
    LAYOUTS,
    SHAPES,
    Host,
    assert_close,
    assert_equal_to_reference,
    assert_identical,
    assert_same_bits_everywhere,
    bounds_of,
    contribution,
    exactly_reduced,
    in_layout,
    layouts_of,
    note,
    reductions_of,
    reference,
    sealed,
)

_SHAPES_OF_REDUCE = [(), (0,), (13, 17), (40_001,)]
_DTYPES_OF_LARGE = ("float32", "bfloat16", "complex128", "int8")  # of each way of accumulating, and each size of word
_LARGE = (300_007,)


def check_all_reduce_of_every_operation_and_dtype(comm: Any, kit: Any) -> None:
    for name, op in reductions_of(comm, is_first=True):
        results = []
        for shape in _shapes_of_all_reduce(name, comm):
            array = kit.put(contribution(comm.rank, shape, name))
            got = comm.all_reduce(array, op)
            assert got is array
            assert_equal_to_reference(kit.get(array), op, name, shape, comm.world_size)
            results.append(kit.get(array).reshape(-1))
        assert_same_bits_everywhere(comm, np.concatenate(results))
        note("all_reduce", name, op)


def _shapes_of_all_reduce(name: str, comm: Any) -> list[tuple[int, ...]]:
    """Shapes for a dtype, to save time: on more than two ranks the large ones only for a dtype of each kind; over the
    stand-in for NCCL, which computes in one way whatever the shape, some in `make test`."""
    if comm.backend == "nccl" and not IS_EVERYWHERE:
        return _SHAPES_OF_REDUCE
    if name in _DTYPES_OF_LARGE:
        return [*SHAPES, _LARGE]
    return SHAPES if comm.world_size <= 2 else SHAPES[:-1]


def check_all_reduce_of_memory_layouts(comm: Any, kit: Any) -> None:
    for shape in ((3, 5), (400, 301)):
        values = contribution(comm.rank, shape, "float32")
        for number in range(len(LAYOUTS)):
            # Each rank takes another layout: elements must meet by index, not by place in memory.
            array = layouts_of(values, kit)[(number + comm.rank) % len(LAYOUTS)]
            comm.all_reduce(array, "mean")
            assert_equal_to_reference(np.ascontiguousarray(kit.get(array)), "mean", "float32", shape, comm.world_size)


def check_all_reduce_into_out(comm: Any, kit: Any) -> None:
    shape = (300, 301)
    values = contribution(comm.rank, shape, "float64")
    for number in range(len(LAYOUTS)):
        source = sealed(layouts_of(values, kit)[number])
        out = layouts_of(np.zeros(shape), kit)[(number + comm.rank) % len(LAYOUTS)]
        assert comm.all_reduce(source, "sum", out=out) is out
        np.testing.assert_array_equal(kit.get(source), values)
        assert_equal_to_reference(np.ascontiguousarray(kit.get(out)), "sum", "float64", shape, comm.world_size)
    repeated = np.broadcast_to(np.float64(comm.rank), (4, 4))
    out = np.empty((4, 4))
    comm.all_reduce(repeated, out=out)
    assert (out == sum(range(comm.world_size))).all()


def check_all_reduce_into_overlapping_memory(comm: Any, kit: Any) -> None:
    for size in (10, 100_000):
        values = contribution(comm.rank, (size + 3,), "float64")
        memory = kit.put(values.copy())
        comm.all_reduce(memory[3:], out=memory[:-3])
        want = sum(contribution(rank, (size + 3,), "float64")[3:] for rank in range(comm.world_size))
        assert_close(kit.get(memory)[:-3], np.asarray(want), "float64", comm.world_size)
        assert_identical(kit.get(memory)[-3:], values[-3:])


def check_all_reduce_of_foreign_arrays(comm: Any, kit: Any) -> None:
    class Foreign:
        """An array of a library that only supports DLPack."""

        def __init__(self) -> None:
            self.memory = kit.put(np.full(5, comm.rank + 1.0))

        def __dlpack__(self, **options: Any) -> Any:
            return self.memory.__dlpack__(**options)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.memory.__dlpack_device__()

    foreign = Foreign()
    assert comm.all_reduce(foreign) is foreign
    assert (kit.get(foreign.memory) == sum(range(1, comm.world_size + 1))).all()


def check_many_all_reduces_in_a_row(comm: Any, kit: Any) -> None:
    rng = np.random.default_rng(11)
    for step in range(300):
        size = int(rng.choice([1, 100, 16_384, 16_385, 70_000]))
        kind = rng.integers(0, 4)
        if kind == 0:
            comm.barrier()
        elif kind == 1:
            root = int(rng.integers(0, comm.world_size))
            array = kit.put(np.full(size, comm.rank * 1000 + step, np.int32))
            comm.broadcast(array, root)
            assert (kit.get(array) == root * 1000 + step).all()
        else:
            array = kit.put(np.full(size, comm.rank + step, np.int32))
            comm.all_reduce(array)
            n = comm.world_size
            assert (kit.get(array) == n * step + n * (n - 1) // 2).all()


def check_same_bits_from_call_to_call(comm: Any, kit: Any) -> None:
    for size in (1000, 100_000):
        first = kit.put(contribution(comm.rank, (size,), "float32"))
        second = first.copy()
        comm.all_reduce(first, "mean")
        comm.all_reduce(second, "mean")
        assert kit.get(first).tobytes() == kit.get(second).tobytes()


def check_path_does_not_matter(comm: Any, kit: Any) -> None:
    """The value of an element depends neither on the array's size nor on the way.

    NCCL does not promise that, nor does MPI among many ranks.
    """
    if comm.backend == "nccl" or (comm.backend == "mpi" and not comm._backend._requests.is_direct):
        return
    n = comm.world_size
    values = contribution(comm.rank, (20_000 * n,), "float32")
    whole = comm.all_reduce(kit.put(values.copy()))
    few = comm.all_reduce(kit.put(values[:10].copy()))
    assert_identical(kit.get(few), kit.get(whole)[:10])
    assert_identical(
        kit.get(whole), exactly_reduced("sum", [contribution(r, values.shape, "float32") for r in range(n)])
    )
    mine = kit.get(comm.reduce_scatter(kit.put(values.copy())))
    assert_identical(mine, kit.get(whole)[comm.rank * 20_000 : (comm.rank + 1) * 20_000])
    on_root = comm.reduce(kit.put(values.copy()), root=n - 1)
    if comm.rank == n - 1:
        assert_identical(kit.get(on_root), kit.get(whole))


def check_reduce_of_every_operation_and_dtype(comm: Any, kit: Any) -> None:
    root_of_call = count()
    for name, op in reductions_of(comm):
        for shape in _SHAPES_OF_REDUCE:
            root = next(root_of_call) % comm.world_size
            values = contribution(comm.rank, shape, name)
            array = kit.put(values.copy())
            got = comm.reduce(array, op, root)
            if comm.rank == root:
                assert got is array
                assert_equal_to_reference(kit.get(array), op, name, shape, comm.world_size)
            else:
                assert got is None
                assert_identical(kit.get(array), values)
        note("reduce", name, op)


def check_reduce_into_out(comm: Any, kit: Any) -> None:
    for root in range(comm.world_size):
        for shape in ((3, 5), (200, 301)):
            values = contribution(comm.rank, shape, "float64")
            for number in range(len(LAYOUTS)):
                source = sealed(in_layout(values, kit, LAYOUTS[number]))
                target = in_layout(np.zeros(shape), kit, LAYOUTS[(number + 1) % len(LAYOUTS)])
                out = target if comm.rank == root else "not looked at"
                got = comm.reduce(source, "max", root, out=out)
                assert got is (target if comm.rank == root else None)
                assert_identical(kit.get(source), values)
                if comm.rank == root:
                    assert_equal_to_reference(kit.get(target), "max", "float64", shape, comm.world_size)


def check_reduce_of_memory_layouts(comm: Any, kit: Any) -> None:
    shape = (120, 31)
    for number in range(len(LAYOUTS)):
        root = number % comm.world_size
        array = layouts_of(contribution(comm.rank, shape, "complex64"), kit)[(number + comm.rank) % len(LAYOUTS)]
        comm.reduce(array, "mean", root)
        if comm.rank == root:
            assert_equal_to_reference(kit.get(array), "mean", "complex64", shape, comm.world_size)


def check_reduce_scatter_of_every_operation_and_dtype(comm: Any, kit: Any) -> None:
    n = comm.world_size
    for name, op in reductions_of(comm):
        for rows, tail in ((0, ()), (1, ()), (3, (5,)), (10_001, ()), (2, (0, 3))):
            shape = (rows * n, *tail)
            got = comm.reduce_scatter(kit.put(contribution(comm.rank, shape, name)), op)
            assert_part(comm, kit.get(got), op, name, shape, [rows] * n)
        note("reduce_scatter", name, op)


def check_reduce_scatter_of_given_sizes(comm: Any, kit: Any) -> None:
    for sizes in splits(comm.world_size):
        for tail in ((), (7,)):
            shape = (sum(sizes), *tail)
            for number, layout in enumerate(LAYOUTS):
                values = contribution(comm.rank, shape, "float32")
                source = sealed(layouts_of(values, kit)[(number + comm.rank) % len(LAYOUTS)])
                fresh = comm.reduce_scatter(source, "mean", sizes=sizes)
                assert_part(comm, kit.get(fresh), "mean", "float32", shape, sizes)
                out = in_layout(np.zeros((sizes[comm.rank], *tail), np.float32), kit, layout)
                assert comm.reduce_scatter(source, "mean", sizes=sizes, out=out) is out
                assert_part(comm, kit.get(out), "mean", "float32", shape, sizes)
                assert_identical(kit.get(source), values)


def check_reduce_scatter_in_place(comm: Any, kit: Any) -> None:
    """Into exactly the own rows of the source, and into rows that overlap others."""
    for sizes in [*splits(comm.world_size), [2] * comm.world_size, [7_000] * comm.world_size]:
        if not all(sizes):
            continue
        is_equal = len(set(sizes)) == 1
        shape, bounds = (sum(sizes), 3), bounds_of(sizes)
        for shift in (0, -1, 1):
            begin, end = bounds[comm.rank] + shift, bounds[comm.rank + 1] + shift
            if shift and not (begin >= 0 and end <= shape[0]):
                begin, end = bounds[comm.rank], bounds[comm.rank + 1]
            memory = kit.put(contribution(comm.rank, shape, "float64").copy())
            part = memory[begin:end]
            assert comm.reduce_scatter(memory, "prod", sizes=None if is_equal else sizes, out=part) is part
            assert_part(comm, kit.get(part), "prod", "float64", shape, sizes)


def assert_part(comm: Any, got: Host, op: str, name: str, shape: tuple[int, ...], sizes: list[int]) -> None:
    """Compares this rank's rows of a reduction with the reference."""
    want = reference(op, name, shape, comm.world_size)
    bounds = bounds_of(sizes)
    assert_close(got, want[bounds[comm.rank] : bounds[comm.rank + 1]], name, comm.world_size)


def splits(n: int) -> Iterator[list[int]]:
    """Yields rows by rank: uneven, some of none, all of one, large, and none at all."""
    yield [rank + 1 for rank in range(n)]
    yield [0 if rank % 2 else 3 for rank in range(n)]
    yield [5 if rank == n - 1 else 0 for rank in range(n)]
    yield [9_000 + 2_003 * rank for rank in range(n)]
    yield [0] * n
