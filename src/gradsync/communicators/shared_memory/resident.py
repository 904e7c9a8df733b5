"""Memory in which gradients live, shared by the ranks: each reduces a slice of a range, over the parts of all.

No rank copies anything into a slot or out of it: when all have met, a rank reduces the slice that it owns, where the
contributions lie, and writes the result into every rank's part; then all meet again. Measured, that beats the one
meeting of small lists from the smallest ranges on. At the end: how the ranks get such memory, which one of them makes
and hands to the others.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.backend import ResidentMemory
from gradsync.communicators.host_values import finite_test
from gradsync.communicators.pieces import cuts, line_bounds
from gradsync.communicators.shared_memory.arena import Workplace
from gradsync.communicators.shared_memory.pipelined import Call, run_calls
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
from gradsync.reduction import UFUNCS_INTO, Array, ReduceOp, accumulation_dtype, divide_into

# What is reduced before it is written to the others: it is still in the cache then.
_CHUNK_BYTES = 384 * 1024
_HALF_CHUNK_ELEMENTS = _CHUNK_BYTES // 8  # of half precision, in two arrays of float32
_MAX_PREPARED = 1024

# From here on memory lies on huge pages, as far as they can be had within a time.
_HUGE_FROM_BYTES = 4 * HUGE_PAGE_BYTES
_SECONDS_PER_HUGE_PAGE = 10e-3  # on average; on an idle machine it is one or two
_TICKET_WORDS = 12


class Range(NamedTuple):
    """What is reduced, and how: under this, what has been prepared is found again."""

    begin_bytes: int
    end_bytes: int
    dtype: np.dtype[Any]
    op: ReduceOp
    mean_over: int | None
    looks: bool


class SharedResidentMemory(ResidentMemory):
    """The parts of all ranks, as one of them has them mapped.

    The mapping, and with it the kernel's memory, goes with the last view of it, in whatever hands that is.

    Args:
        parts: [rank] -> its bytes.
        rank: this rank.

    Attributes:
        parts: see above.
    """

    def __init__(self, parts: Sequence[Array], rank: int) -> None:
        super().__init__(parts[rank])
        self.parts = parts
        self._prepared: dict[Range, list[Call]] = {}

    def prepared(self, key: Range, prepare: Callable[[SharedResidentMemory, Range], list[Call]]) -> list[Call]:
        """Returns what `prepare` makes for a range; a training loop has the same ranges in every step."""
        steps = self._prepared.get(key)
        if steps is None:
            if len(self._prepared) >= _MAX_PREPARED:
                self._prepared.clear()
            steps = self._prepared[key] = prepare(self, key)
        return steps


class ResidentReduction:
    """All-reduces ranges of resident memory.

    Args:
        workplace: this rank's.
    """

    def __init__(self, workplace: Workplace) -> None:
        self._rank = workplace.rank
        self._world_size = workplace.world_size
        self._barrier = workplace.barrier
        self._recorder = workplace.recorder
        self._finder = workplace.finder
        self._sums = np.empty(_CHUNK_BYTES, np.uint8)  # room for what is looked at before any rank gets it
        self._widened: list[Array] = []  # room for half precision: a sum, and what is added to it

    def all_reduce(self, memory: SharedResidentMemory, key: Range, agreement: Agreement) -> None:
        """Reduces a range in place; see Communicator.all_reduce_resident."""
        steps = memory.prepared(key, self._prepare)
        laps = tracing.laps_of(self._recorder)
        self._barrier.meet(agreement)
        if laps is not None:
            laps.end("waiting")
        run_calls(steps)
        if laps is not None:
            laps.end("reducing")
        self._barrier.meet(agreement)
        if laps is not None:
            laps.end("waiting")

    def _prepare(self, memory: SharedResidentMemory, key: Range) -> list[Call]:
        """Lists the calls that reduce this rank's slice: for each chunk the arithmetic of reduce_into."""
        itemsize, size_bytes = key.dtype.itemsize, key.end_bytes - key.begin_bytes
        low, high = line_bounds(size_bytes, 1, self._world_size)[self._rank : self._rank + 2]
        steps: list[Call] = []
        first, step = key.begin_bytes + low, _chunk_elements(key.dtype) * itemsize
        for begin, end in cuts(high - low, step):
            parts = [part[first + begin : first + end].view(key.dtype) for part in memory.parts]
            steps += self._chunk(parts, key, (low + begin) // itemsize)
        return steps

    def _chunk(self, parts: Sequence[Array], key: Range, at: int) -> list[Call]:
        """Returns the calls for one chunk, given its elements in the parts of all ranks, and its place in the range."""
        is_finite = finite_test(key.dtype) if key.looks else None
        if is_finite is None:
            # Rank 0's or rank 1's: in rank order, it has been read when the first sum is written. The own one where
            # that can be.
            result = parts[min(self._rank, 1)]
        else:
            result = self._sums.view(key.dtype)[: parts[0].size]  # what it came from must stay as it is
        steps = self._sum(parts, result, key.op)
        if is_finite is not None:
            steps.append((self._finder.look, (is_finite, result, parts, at)))
        if key.mean_over is not None:
            steps.append((divide_into, (result, key.mean_over, result)))
        # Between places that lie alike within their pages, NumPy's own way of copying is the fastest (host_copy.py).
        return [*steps, *((np.copyto, (part, result)) for part in parts if part is not result)]

    def _sum(self, parts: Sequence[Array], result: Array, op: ReduceOp) -> list[Call]:
        """Returns the calls that reduce_into would make."""
        ufunc, is_half = UFUNCS_INTO[op], accumulation_dtype(result.dtype) != result.dtype
        total, addend = self._room(result.size) if is_half else (result, result)
        steps: list[Call] = [(np.copyto, (total, parts[0]))] if is_half else []
        for number, part in enumerate(parts[1:]):
            if is_half:
                # By itself: a ufunc that is given another dtype casts piece by piece, in memory that it allocates.
                steps += [(np.copyto, (addend, part)), (ufunc, (total, addend, total))]
            else:
                steps.append((ufunc, (parts[0] if number == 0 else total, part, total)))
        if op is ReduceOp.MEAN:
            steps.append((divide_into, (total, len(parts), total)))
        return [*steps, (np.copyto, (result, total, "same_kind"))] if is_half else steps

    def _room(self, length: int) -> tuple[Array, Array]:
        if not self._widened:
            self._widened = [np.empty(_HALF_CHUNK_ELEMENTS, np.float32) for _ in range(2)]
        total, addend = self._widened
        return total[:length], addend[:length]


def _chunk_elements(dtype: np.dtype[Any]) -> int:
    return _CHUNK_BYTES // dtype.itemsize if accumulation_dtype(dtype) == dtype else _HALF_CHUNK_ELEMENTS


class Handover(NamedTuple):
    """How the ranks of a communicator come to the memory that one of them makes.

    Attributes:
        workplace: this rank's.
        share: share(numbers) returns the numbers of all ranks, by rank.
        look_for_failures: look_for_failures(ranks) raises why it would be in vain to wait for them.
        timeout_seconds: how long to wait for them.
    """

    workplace: Workplace
    share: Callable[[Sequence[int]], list[list[int]]]
    look_for_failures: Callable[[list[int]], None]
    timeout_seconds: float

    def make_memory(self, size_bytes: int) -> SharedResidentMemory:
        """Makes resident memory; every rank must call it.

        Raises:
            BackendUnavailable: this rank cannot have it, or no rank can.
        """
        rank, world_size = self.workplace.rank, self.workplace.world_size
        is_large = size_bytes >= _HUGE_FROM_BYTES
        page_bytes = HUGE_PAGE_BYTES if is_large else mmap.PAGESIZE
        part_bytes = max(-(-size_bytes // page_bytes), 1) * page_bytes
        begin, end = rank * part_bytes, (rank + 1) * part_bytes
        descriptor = self._offer(part_bytes * world_size) if rank == 0 else self._take()
        try:
            # Each rank its own, at once, and where the memory is near its processor.
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
        """Returns the descriptor of new memory that all the others have taken.

        Raises:
            BackendUnavailable: there is no such memory, or another rank could not take it.
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
        barrier, peers = self.workplace.barrier, self.workplace.peers()
        deadline = time.monotonic() + self.timeout_seconds
        served = 0

        def look_around() -> None:
            # Who has gone on to the next meeting has taken the memory, or will not come for it.
            behind = [peer for peer in peers if not barrier.is_ahead(peer)]
            if len(peers) - len(behind) > served:
                raise BackendUnavailable("another rank could not take the shared memory")
            self.look_for_failures(behind)

        while served < len(peers):
            offer.serve(descriptor, 1, deadline, look_around)
            served += 1

    def _take(self) -> int:
        """Returns the descriptor that rank 0 offers.

        Raises:
            BackendUnavailable: it has none to offer, or this rank cannot take it.
        """
        ticket = _as_bytes(self.share(_as_words(b""))[0])
        if not ticket:
            raise BackendUnavailable("the first rank could not make the shared memory")
        try:
            return take_segment(ticket, self.timeout_seconds)
        except OSError as error:
            raise BackendUnavailable(f"cannot take the shared memory: {error}") from error


def _open_offer(size_bytes: int) -> tuple[int, SegmentOffer]:
    descriptor = create_segment(size_bytes, allocated=False)
    try:
        return descriptor, SegmentOffer()
    except OSError as error:
        os.close(descriptor)
        raise BackendUnavailable(f"cannot offer the shared memory to the other ranks: {error}") from error


def _as_words(ticket: bytes) -> list[int]:
    """Returns a ticket as numbers, as many for every ticket: its length first."""
    padded = ticket.ljust(8 * _TICKET_WORDS, b"\0")
    return [len(ticket), *np.frombuffer(padded, np.int64).tolist()]


def _as_bytes(words: Sequence[int]) -> bytes:
    return np.array(words[1:], np.int64).tobytes()[: words[0]]
