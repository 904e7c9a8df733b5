"""Resident memory: shared memory in which gradients are stored, so that they are reduced without a copy.

Each rank has a part of the memory. After a barrier each rank reduces the slice that it owns, directly from the parts of
all ranks, and writes the result into all parts. A second barrier follows. In measurements this reduction was faster
than the all-reduce in one shot (OneShot), even if only a small part of the memory was reduced.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence

import numpy as np

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.backend import ResidentMemory
from gradsync.communicators.host_copy import cuts, line_bounds
from gradsync.communicators.host_values import Checks, finite_test
from gradsync.communicators.shared_memory.all_reduce import adding_squares, run_calls
from gradsync.communicators.shared_memory.arena import ShmContext
from gradsync.communicators.shared_memory.segment import (
    HUGE_PAGE_BYTES,
    create_segment,
    map_segment,
    populate,
    reserve,
    share_segment,
    take_huge_pages,
)
from gradsync.diagnostics import trace
from gradsync.reduction import Array, Call, ReduceOp, reduction_of

# The number of bytes that one call reduces. The next calls copy the result to the other ranks while it is in the cache.
_CHUNK_BYTES = 384 * 1024

# Parts of at least this size use huge pages, if the kernel provides them in time.
_HUGE_FROM_BYTES = 4 * HUGE_PAGE_BYTES
_SECONDS_PER_HUGE_PAGE = 10e-3  # the time limit for a page, on average; on an idle machine a page takes 1 or 2 ms


class SharedResidentMemory(ResidentMemory):
    """Resident memory with the parts of all ranks, mapped in this process.

    The mapping is freed when its last view is deleted, which may be a view that user code holds.

    Args:
        parts: [rank] -> the bytes of that rank's part.
        context: the memory and objects that all collectives of the communicator use.
    """

    def __init__(self, parts: Sequence[Array], context: ShmContext) -> None:
        super().__init__(parts[context.rank])
        self._parts = parts
        self._context = context

    def prepare(self, values: Array, op: ReduceOp, checks: Checks) -> ResidentAllReduce:
        begin = values.ctypes.data - self.bytes.ctypes.data if values.size else 0
        parts = [part[begin : begin + values.nbytes].view(values.dtype) for part in self._parts]
        return ResidentAllReduce(parts, op, checks, self._context)


class ResidentAllReduce:
    """The all-reduce of a part of resident memory, in place.

    Args:
        parts: [rank] -> the elements in that rank's part.
        op: the operator.
        checks: the checks that are made during the reduction.
        context: the memory and objects that all collectives of the communicator use.
    """

    def __init__(self, parts: Sequence[Array], op: ReduceOp, checks: Checks, context: ShmContext) -> None:
        self._context = context
        self._op = op
        self._checks = checks
        self._calls: list[Call] = []  # the calls that reduce this rank's slice chunk by chunk
        itemsize, rank = parts[0].itemsize, context.rank
        low, high = (bound // itemsize for bound in line_bounds(parts[0].nbytes, 1, len(parts))[rank : rank + 2])
        for begin, end in cuts(high - low, _CHUNK_BYTES // itemsize):
            self._add_calls([part[low + begin : low + end] for part in parts], low + begin)

    def run(self, agreement: Agreement) -> None:
        """Reduces the current values; see PreparedList."""
        context = self._context
        end_phase = trace.phases_of(context.recorder)
        context.barrier.agree(agreement)
        end_phase("waiting")
        context.quietly(run_calls, self._calls)
        end_phase("reducing")
        context.barrier.agree(agreement)
        end_phase("waiting")

    def _add_calls(self, parts: Sequence[Array], at: int) -> None:
        """Adds the calls that reduce the chunk that begins at element `at`, with the same arithmetic as reduce_into."""
        context, calls, dtype = self._context, self._calls, parts[0].dtype
        is_finite = finite_test(dtype) if Checks.NONFINITE in self._checks else None
        if is_finite is None:
            # The result is first written to the part of rank 0 or rank 1, because the reduction reads both parts before
            # it writes the first result. Rank 0 writes to its own part, and other ranks write to the part of rank 1.
            result = parts[min(context.rank, 1)]
        else:  # the contributions must stay unchanged for the check
            result = context.buffer("result", dtype, parts[0].size)
        calls.append((reduction_of(self._op, dtype, len(parts)), (parts, result)))
        if is_finite is not None:
            calls.append((context.finder.check_section, (is_finite, result, parts, at)))
        # Source and target have the same offset in their pages. In this case NumPy's own copy is the fastest; see
        # host_copy.py.
        calls += [(np.copyto, (part, result)) for part in parts if part is not result]
        if Checks.SQUARES in self._checks:
            calls += adding_squares(context.squares, parts[context.rank], stays=True)


def make_resident_memory(
    context: ShmContext,
    size_bytes: int,
    broadcast: Callable[[bytes], bytes],
    await_all: Callable[[], None],
) -> SharedResidentMemory:
    """Makes shared memory on rank 0, which the other ranks open. Every rank must call this function.

    Args:
        context: the memory and objects that all collectives of the communicator use.
        size_bytes: the size of each rank's part in bytes.
        broadcast: a function; broadcast(data) returns the data of rank 0, which are at most 128 bytes.
        await_all: a function that returns when all ranks have called it.

    Raises:
        BackendUnavailable: rank 0 could not make the memory, or this rank could not open, allocate or map the memory.
    """
    rank, world_size = context.rank, context.world_size
    is_large = size_bytes >= _HUGE_FROM_BYTES
    page_bytes = HUGE_PAGE_BYTES if is_large else mmap.PAGESIZE
    part_bytes = max(-(-size_bytes // page_bytes), 1) * page_bytes
    begin, end = rank * part_bytes, (rank + 1) * part_bytes

    make = (lambda: create_segment(part_bytes * world_size, allocated=False)) if rank == 0 else None
    descriptor = share_segment(make, broadcast, await_all)
    try:
        # Each rank allocates its own part, so that the ranks allocate in parallel, and each part is near its processor.
        reserve(descriptor, begin, end)
    except BaseException:
        os.close(descriptor)
        raise
    mapping = map_segment(descriptor, on_huge_pages=is_large)
    if is_large:
        take_huge_pages(mapping, begin, end, part_bytes // page_bytes * _SECONDS_PER_HUGE_PAGE)
    populate(mapping, begin, end)
    whole = np.frombuffer(mapping, np.uint8).reshape(world_size, part_bytes)
    return SharedResidentMemory([part[:size_bytes] for part in whole], context)
