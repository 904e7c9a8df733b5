"""The contract of memory in which gradients live: ranges of it are reduced in place."""

from __future__ import annotations

from typing import Any

import numpy as np

import gradsync as gs
from contract import (
    IS_EVERYWHERE,
    KITS,
    Host,
    assert_equal_to_reference,
    assert_identical,
    assert_same_bits_everywhere,
    contribution,
    expect,
    reductions_of,
)
from gradsync.communicators.agreement import Agreement, agreement_on
from gradsync.communicators.for_bucketing import ListReduction, make_resident_memory
from gradsync.reduction import ReduceOp

_SIZES = (1, 77, 20_011)


def agreed(size: int, what: str = "resident") -> Agreement:
    return agreement_on(what, (size,), None, "")


def make(comm: Any, size_bytes: int) -> Any:
    return make_resident_memory(comm, size_bytes, agreed(size_bytes, "make_resident_memory"))


def kit_of(comm: Any) -> Any:
    """The memory lives where the communicator does, whatever it takes besides."""
    return KITS["cupy" if comm.backend == "nccl" else "numpy"]()


def reduce_values(comm: Any, memory: Any, values: Host, op: str, begin: int = 0) -> Host:
    """Writes values into the memory, reduces them, and returns what is there."""
    kit = kit_of(comm)
    end = begin + values.nbytes
    view = memory.bytes[begin:end].view(values.dtype)
    view[...] = kit.put(values)
    producers = [comm._mark_work()]
    reduction = ListReduction(comm, [view], [view], ReduceOp(op), resident=memory)
    end_of_work = reduction.run(agreed(values.size), producers=producers)
    if end_of_work is not None:
        end_of_work.wait()
    return np.array(kit.get(view))


def check_resident_reduction_of_every_operation_and_dtype(comm: Any, _kit: Any) -> None:
    begin = 192  # not at a page
    memory = make(comm, begin + max(_SIZES) * 16 + 64)
    for name, op in reductions_of(comm):
        for size in _SIZES:
            values = contribution(comm.rank, (size,), name)
            got = reduce_values(comm, memory, values, op, begin)
            assert_equal_to_reference(got, op, name, (size,), comm.world_size)
            if comm.backend != "nccl" and not (name.startswith("complex") and op == "prod"):
                assert_identical(got, _as_list(comm, values, op))
        assert_same_bits_everywhere(comm, got)


def check_resident_reduction_leaves_the_rest(comm: Any, _kit: Any) -> None:
    memory = make(comm, 64 * 1000)
    for begin, size in ((64, 1), (0, 0), (640, 5000), (64 * 999, 16), (64, 15_900)):
        end = begin + 4 * size
        memory.bytes[...] = 7 + comm.rank
        values = contribution(comm.rank, (size,), "float32")
        got = reduce_values(comm, memory, values, "mean", begin)
        assert_equal_to_reference(got, "mean", "float32", (size,), comm.world_size)
        whole = kit_of(comm).get(memory.bytes)
        assert (whole[:begin] == 7 + comm.rank).all()
        assert (whole[end:] == 7 + comm.rank).all()


def check_resident_memory_is_aligned_and_zero(comm: Any, _kit: Any) -> None:
    for size_bytes in (0, 1, 64, 4096, 4097, 1_000_000):
        memory = make(comm, size_bytes)
        assert (memory.bytes.shape, memory.bytes.dtype) == ((size_bytes,), np.uint8)
        assert not memory.bytes.any()
        if size_bytes:
            assert comm._arrays.byte_bounds(memory.bytes)[0] % 64 == 0
        comm.barrier()
        memory.bytes[...] = comm.rank + 1
        comm.barrier()
        assert (memory.bytes == comm.rank + 1).all()  # each has its own


def check_many_resident_reductions_in_a_row(comm: Any, _kit: Any) -> None:
    """The values change with every step: who reads or writes too early is found out."""
    n = comm.world_size
    memory = make(comm, 1 << 20)
    ranges = [(0, 10), (64, 20_000), (131_072, 200_000)]
    views = [memory.bytes[begin : begin + 4 * size].view(np.int32) for begin, size in ranges]
    for step in range(200 if IS_EVERYWHERE or comm.backend != "nccl" else 40):  # to save time, on the stand-in
        for (_, size), view in zip(ranges, views, strict=True):
            view[...] = comm.rank + step
            reduction = ListReduction(comm, [view], [view], ReduceOp.SUM, resident=memory)
            end = reduction.run(agreed(size), producers=[comm._mark_work()])
            if end is not None:
                end.wait()
        for view in views:
            assert (view == n * step + n * (n - 1) // 2).all(), step


def check_resident_memory_of_different_sizes_is_refused(comm: Any, _kit: Any) -> None:
    if comm.world_size == 1:
        return
    size_bytes = 64 + comm.rank
    expect(gs.PlanMismatch, lambda: make(comm, size_bytes))
    memory = make(comm, 64)
    got = reduce_values(comm, memory, contribution(comm.rank, (3,), "float64"), "sum")
    assert_equal_to_reference(got, "sum", "float64", (3,), comm.world_size)


def check_resident_memory_of_a_group(comm: Any, _kit: Any) -> None:
    group = comm.split(comm.rank % 2)
    memories = [make(group, 100_000) for _ in range(2)]
    for memory in memories:
        values = contribution(group.rank, (25_000,), "float32")
        got = reduce_values(group, memory, values, "max")
        assert_equal_to_reference(got, "max", "float32", (25_000,), group.world_size)
    group.close()
    expect(gs.CommunicatorClosed, lambda: reduce_values(group, memories[0], values, "max"), "closed")
    memories[0].bytes[:4] = 5
    assert (memories[0].bytes[:4] == 5).all()


def _as_list(comm: Any, values: Host, op: str) -> Host:
    """Returns the same reduction of a copy."""
    kit = kit_of(comm)
    array = kit.put(values.copy())
    comm.all_reduce(array, op)
    return kit.get(array)
