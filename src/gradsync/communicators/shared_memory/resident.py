"""Resident memory: shared memory in which gradients are stored, so that they are reduced without a copy.

Each rank has a part of the memory. After a barrier each rank reduces the slice that it owns, directly from the parts of
all ranks, and writes the result into all parts. A second barrier follows. In measurements this reduction was faster
than the all-reduce in one round (OneShot), even if only a small part of the memory was reduced.

Handover makes resident memory: rank 0 creates it and passes it to the other ranks.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.backend import Range, ResidentMemory
from gradsync.communicators.host_copy import cuts, line_bounds
from gradsync.communicators.host_values import Checks, finite_test
from gradsync.communicators.shared_memory.arena import ShmContext
from gradsync.communicators.shared_memory.pipelined import adding_squares, run_calls
from gradsync.communicators.shared_memory.segment import (
    HUGE_PAGE_BYTES,
    SegmentOffer,
    create_segment,
    map_segment,
    populate,
    reserve,
    take_huge_pages,
    take_segment,
)
from gradsync.diagnostics import tracing
from gradsync.errors import BackendUnavailable
from gradsync.reduction import Array, Call, divide_into, reduction_of

# The number of bytes that one call reduces, and the next calls write to the other ranks, while they are in the cache.
_CHUNK_BYTES = 384 * 1024
_MAX_PREPARED = 1024

# Parts of at least this size use huge pages, if the kernel provides them in time.
_HUGE_FROM_BYTES = 4 * HUGE_PAGE_BYTES
_SECONDS_PER_HUGE_PAGE = 10e-3  # the time limit for a page, on average; on an idle machine a page takes 1 or 2 ms
_TICKET_WORDS = 12


class SharedResidentMemory(ResidentMemory):
    """Resident memory with the parts of all ranks, mapped in this process.

    The mapping is freed when its last view is deleted, which may be a view that user code holds.

    Args:
        parts: [rank] -> the bytes of that rank's part.
        rank: the number of this rank in the communicator.

    Attributes:
        parts: see Args.
        prepared: [range] -> the NumPy calls that reduce it, kept because every training step reduces the same ranges.
    """

    def __init__(self, parts: Sequence[Array], rank: int) -> None:
        super().__init__(parts[rank])
        self.parts = parts
        self.prepared: dict[Range, list[Call]] = {}


class ResidentReduction:
    """All-reduces ranges of resident memory.

    Args:
        context: the communicator's barrier, rings and sizes.
    """

    def __init__(self, context: ShmContext) -> None:
        self._rank = context.rank
        self._world_size = context.world_size
        self._barrier = context.barrier
        self._recorder = context.recorder
        self._finder = context.finder
        self._squares = context.squares
        self._sums = np.empty(_CHUNK_BYTES, np.uint8)  # a buffer for results that are checked before they are written

    def all_reduce(self, memory: SharedResidentMemory, key: Range, agreement: Agreement) -> None:
        """All-reduces a range in place; see all_reduce_resident in for_bucketing.py."""
        steps = memory.prepared.get(key)
        if steps is None:
            if len(memory.prepared) >= _MAX_PREPARED:
                memory.prepared.clear()
            steps = memory.prepared[key] = self._prepare(memory, key)
        laps = tracing.laps_of(self._recorder)
        self._barrier.agree(agreement)
        if laps is not None:
            laps.end("waiting")
        run_calls(steps)
        if laps is not None:
            laps.end("reducing")
        self._barrier.agree(agreement)
        if laps is not None:
            laps.end("waiting")

    def _prepare(self, memory: SharedResidentMemory, key: Range) -> list[Call]:
        """Returns the calls that reduce this rank's slice chunk by chunk, with the same arithmetic as reduce_into."""
        itemsize, size_bytes = key.dtype.itemsize, key.end_bytes - key.begin_bytes
        low, high = line_bounds(size_bytes, 1, self._world_size)[self._rank : self._rank + 2]
        steps: list[Call] = []
        first, step = key.begin_bytes + low, _CHUNK_BYTES // itemsize * itemsize
        for begin, end in cuts(high - low, step):
            parts = [part[first + begin : first + end].view(key.dtype) for part in memory.parts]
            steps += self._chunk(parts, key, (low + begin) // itemsize)
        return steps

    def _chunk(self, parts: Sequence[Array], key: Range, at: int) -> list[Call]:
        """Returns the calls that reduce one chunk.

        Args:
            parts: [rank] -> the elements of the chunk in that rank's part.
            key: the range, and how to reduce it.
            at: the offset of the chunk in the range, in elements.
        """
        is_finite = finite_test(key.dtype) if Checks.NONFINITE in key.checks else None
        if is_finite is None:
            # The result is first written to the part of rank 0 or rank 1, because the reduction reads both parts before
            # it writes the first sum. If this rank is one of the two, the result goes to its own part.
            result = parts[min(self._rank, 1)]
        else:
            result = self._sums.view(key.dtype)[: parts[0].size]  # the contributions must stay unchanged for the check
        steps: list[Call] = [(reduction_of(key.op, key.dtype, len(parts)), (parts, result))]
        if is_finite is not None:
            steps.append((self._finder.check_section, (is_finite, result, parts, at)))
        if key.mean_over is not None:
            steps.append((divide_into, (result, key.mean_over, result)))
        # Source and target have the same offset in their pages. In this case NumPy's own copy is the fastest; see
        # host_copy.py.
        steps += [(np.copyto, (part, result)) for part in parts if part is not result]
        if Checks.SQUARES in key.checks:
            steps += adding_squares(self._squares, parts[self._rank], stays=True)
        return steps


class Handover(NamedTuple):
    """Makes shared memory on rank 0, and passes it to the other ranks of a communicator.

    Attributes:
        context: the communicator's barrier, rings and sizes.
        share: a function; share(numbers) exchanges integers, and returns [rank] -> the integers of that rank.
        check_for_failures: a function; check_for_failures(ranks) raises an error if these ranks cannot arrive any more.
        timeout_seconds: how long a rank waits until the memory is passed.
    """

    context: ShmContext
    share: Callable[[Sequence[int]], list[list[int]]]
    check_for_failures: Callable[[list[int]], None]
    timeout_seconds: float

    def make_memory(self, size_bytes: int) -> SharedResidentMemory:
        """Makes resident memory. Every rank must call this method.

        Raises:
            BackendUnavailable: there is not enough memory, or one of the ranks could not map the memory.
        """
        rank, world_size = self.context.rank, self.context.world_size
        is_large = size_bytes >= _HUGE_FROM_BYTES
        page_bytes = HUGE_PAGE_BYTES if is_large else mmap.PAGESIZE
        part_bytes = max(-(-size_bytes // page_bytes), 1) * page_bytes
        begin, end = rank * part_bytes, (rank + 1) * part_bytes
        descriptor = self._offer(part_bytes * world_size) if rank == 0 else self._take()
        try:
            # Each rank allocates its own part, so that this happens in parallel and near the rank's processor.
            reserve(descriptor, begin, end)
        except BaseException:
            os.close(descriptor)
            raise
        mapping = map_segment(descriptor, on_huge_pages=is_large)
        if is_large:
            take_huge_pages(mapping, begin, end, part_bytes // page_bytes * _SECONDS_PER_HUGE_PAGE)
        populate(mapping, begin, end)
        whole = np.frombuffer(mapping, np.uint8).reshape(world_size, part_bytes)
        return SharedResidentMemory([part[:size_bytes] for part in whole], rank)

    def _offer(self, size_bytes: int) -> int:
        """Makes shared memory, passes it to all other ranks, and returns its file descriptor.

        Raises:
            BackendUnavailable: there is not enough memory, or another rank could not map the memory.
        """
        try:
            descriptor, offer = _open_offer(size_bytes)
        except BackendUnavailable:
            self.share(_as_words(b""))
            raise
        try:
            self.share(_as_words(offer.ticket))
            self._serve(offer, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        finally:
            offer.close()
        return descriptor

    def _serve(self, offer: SegmentOffer, descriptor: int) -> None:
        barrier, peers = self.context.barrier, self.context.peers()

        def check_ranks(served: int) -> None:
            # A rank that has arrived at the next barrier has fetched the memory, or has failed to fetch it.
            behind = [peer for peer in peers if not barrier.is_ahead(peer)]
            if len(peers) - len(behind) > served:
                raise BackendUnavailable("another rank could not map the shared memory")
            self.check_for_failures(behind)

        offer.serve(descriptor, len(peers), time.monotonic() + self.timeout_seconds, check_ranks)

    def _take(self) -> int:
        """Returns the file descriptor of the memory that rank 0 has made.

        Raises:
            BackendUnavailable: rank 0 could not make the memory, or this rank cannot get it.
        """
        ticket = _as_bytes(self.share(_as_words(b""))[0])
        if not ticket:
            raise BackendUnavailable("the first rank could not make the shared memory")
        try:
            return take_segment(ticket, self.timeout_seconds)
        except OSError as error:
            raise BackendUnavailable(f"cannot get the shared memory from the first rank: {error}") from error


def _open_offer(size_bytes: int) -> tuple[int, SegmentOffer]:
    descriptor = create_segment(size_bytes, allocated=False)
    try:
        return descriptor, SegmentOffer()
    except OSError as error:
        os.close(descriptor)
        raise BackendUnavailable(f"cannot offer the shared memory to the other ranks: {error}") from error


def _as_words(ticket: bytes) -> list[int]:
    """Returns a ticket of SegmentOffer as a list of integers of fixed length.

    The first integer is the ticket's size in bytes.
    """
    padded = ticket.ljust(8 * _TICKET_WORDS, b"\0")
    return [len(ticket), *np.frombuffer(padded, np.int64).tolist()]


def _as_bytes(words: Sequence[int]) -> bytes:
    return np.array(words[1:], np.int64).tobytes()[: words[0]]
