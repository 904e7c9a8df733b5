"""The inner loops over shared memory, in plain NumPy: a barrier, reductions, and moves of bytes.

This is the reference for _kernels.c, which has the same functions, and takes their place where it was built. memory.py
says how the memory is laid out.

Every function that waits takes `check`: it calls check() after a short wait, and then again and again. check() raises
an error to end the wait, and returns after how many seconds it wants to be called again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from gradsync.communicators.shared_memory.memory import (
    ABORTED,
    ARRIVED,
    DIGEST,
    LAYOUT,
    LINE_BYTES,
    Shared,
)
from gradsync.reduction import Array, ReduceOp, accumulation_dtype, part_dtype, reduction_of

Check = Callable[[], float]
Phase = Callable[[str], None]
Bounds = Sequence[int]

# -- Waiting ----------------------------------------------------------------------------------------------------------

# A rank first spins: where each has a core, most waits end within a microsecond. Then it yields, in case another
# process needs the core. Then it sleeps again and again: a process that only yields gets too little time beside others.
_SPINS = 60
_YIELD_SECONDS = 100e-6
_SLEEP_SECONDS = 50e-6


def wait(is_over: Callable[[], bool], check: Check) -> None:
    """Waits until is_over() is true, or check() raises."""
    for _ in range(_SPINS):
        if is_over():
            return
    now = time.monotonic()
    sleep_from = check_at = now + _YIELD_SECONDS
    while not is_over():
        if now < sleep_from:
            os.sched_yield()
        elif now < check_at:
            time.sleep(_SLEEP_SECONDS)
        else:
            check_at = now + check()
        now = time.monotonic()


#: The results of `meet`, and of each collective: whether all ranks brought the same.
SAME, LAYOUTS_DIFFER, DIGESTS_DIFFER = 0, 1, 2


def meet(shared: Shared, digest: int, layout: int, check: Check) -> int:
    """Arrives at the next round, waits for all ranks, and compares what they brought; all get the same result."""
    words, number = shared.words, shared.rounds + 1
    line, odd = shared.lines[shared.rank], number & 1
    words[line + DIGEST + odd] = digest
    words[line + LAYOUT + odd] = layout
    words[line + ARRIVED] = number  # publishes everything that this rank wrote before
    arrivals = shared.arrivals
    for arrival in arrivals:
        if words[arrival] < number:
            wait(lambda: min([words[arrival] for arrival in arrivals]) >= number, check)
            break
    if words[ABORTED]:  # a rank may have arrived and then aborted
        check()
    shared.rounds = number
    result = SAME
    for arrival in arrivals:
        if words[arrival + DIGEST + odd] != digest:
            return DIGESTS_DIFFER
        if words[arrival + LAYOUT + odd] != layout:
            result = LAYOUTS_DIFFER
    return result


# -- Copies -----------------------------------------------------------------------------------------------------------


def pack(sources: Sequence[Array], packed: Array, factor: float = 1.0) -> None:
    """Copies 1-D arrays, one after the other, into one array of their total size, and multiplies it by the factor."""
    if sources:
        np.concatenate(sources, out=packed)
        if factor != 1.0:
            parts = packed.view(part_dtype(packed.dtype))  # NumPy's product of a real number and infinity + 1j has NaN
            np.multiply(parts, factor, out=parts, dtype=accumulation_dtype(parts.dtype), casting="same_kind")


def unpack(packed: Array, targets: Sequence[Array]) -> None:
    """Copies one array to 1-D arrays of the same total size: the inverse of pack."""
    begin = 0
    for target in targets:
        end = begin + target.size
        target[...] = packed[begin:end]
        begin = end


class Piece(NamedTuple):
    """The elements [begin, end) of the array number `array` in a list."""

    array: int
    begin: int
    end: int


def _cut(arrays: Sequence[Array], pieces: Sequence[Piece]) -> list[Array]:
    return [arrays[number][begin:end] for number, begin, end in pieces]


def _pieces(sizes: Sequence[int], ends: Sequence[int]) -> Iterator[list[Piece]]:
    """Yields the pieces of the elements before ends[0], then those before ends[1], and so on."""
    number = at = done = 0  # in array `number`, and in all arrays
    for end in ends:
        pieces = []
        while done < end:
            step = min(sizes[number] - at, end - done)
            if step:
                pieces.append(Piece(number, at, at + step))
            at, done = at + step, done + step
            if at == sizes[number]:
                number, at = number + 1, 0
        yield pieces


# -- Reductions -------------------------------------------------------------------------------------------------------

#: Up to this size every rank reduces the whole list after one round. Each rank reduces only its slice of a larger list,
#: which takes more rounds.
SMALL_BYTES = 128 * 1024


def all_reduce(
    shared: Shared,
    sources: Sequence[Array],
    targets: Sequence[Array],
    op: ReduceOp,
    factor: float,
    phase: Phase,
    digest: int,
    layout: int,
    check: Check,
) -> int:
    """Reduces each source, multiplied by this rank's factor, into the target of the same index; see Backend.

    Values are reduced in the order of the ranks, by one rank or by all in the same way: all get the same bits.
    """
    dtype, sizes = sources[0].dtype, tuple([source.size for source in sources])
    reduce, total = reduction_of(op, dtype, shared.size), sum(sizes)
    with np.errstate(all="ignore"):  # an exception on some ranks would stop the others; the results tell NaN and inf
        if total * dtype.itemsize > SMALL_BYTES:
            chunks = chunks_of(sizes, dtype.itemsize, shared.slot_bytes, shared.rank, shared.size)
            return _in_chunks(shared, chunks, sources, targets, reduce, factor, phase, digest, layout, check)
        slots = [slot[:total] for slot in shared.slots(dtype)]
        pack(sources, slots[shared.rank], factor)
        phase("packing")
        if result := meet(shared, digest, layout, check):
            return result
        phase("waiting")
        if len(targets) == 1:
            reduce(slots, targets[0])
            phase("reducing")
            return SAME
        reduced = shared.scratch(dtype, total)
        reduce(slots, reduced)
        phase("reducing")
        unpack(reduced, targets)
        phase("splitting")
    return SAME


class Chunk(NamedTuple):
    """What one rank does with a part of a list that fits into a slot: it reduces the slice [low, high) for all.

    Attributes:
        low, high, size: the rank's slice, and the size of the whole chunk, in elements.
        before, own, after: the pieces of the list before the slice, in it, and after it.
    """

    low: int
    high: int
    size: int
    before: Sequence[Piece]
    own: Sequence[Piece]
    after: Sequence[Piece]


@lru_cache(maxsize=16)
def chunks_of(sizes: tuple[int, ...], itemsize: int, slot_bytes: int, rank: int, ranks: int) -> Sequence[Chunk]:
    """Divides a list into chunks, and these into a slice for each rank; no two slices share a cache line."""
    total, length, line = sum(sizes), slot_bytes // itemsize, max(1, LINE_BYTES // itemsize)
    slices, ends = [], []
    for begin in range(0, total, length):
        size = min(length, total - begin)
        low, high = (min(size, -(-size * each // ranks // line) * line) for each in (rank, rank + 1))
        slices.append((low, high, size))
        ends += [begin + low, begin + high, begin + size]
    pieces = _pieces(sizes, ends)
    return [Chunk(*each, next(pieces), next(pieces), next(pieces)) for each in slices]


def _in_chunks(
    shared: Shared,
    chunks: Sequence[Chunk],
    sources: Sequence[Array],
    targets: Sequence[Array],
    reduce: Callable[[Sequence[Array], Array], None],
    factor: float,
    phase: Phase,
    digest: int,
    layout: int,
    check: Check,
) -> int:
    """All-reduces a large list. Between two rounds each rank works on three chunks, in three slots:

    - it copies to its own slot what others will reduce of chunk k;
    - it reduces its slice of chunk k - 1, and writes the result into the slots of all other ranks;
    - it copies the results of the others from its own slot of chunk k - 2 to the targets.
    """
    dtype, rank, slots = sources[0].dtype, shared.rank, dict[int, list[Array]]()
    first = 0 if rank or shared.size == 1 else 1
    for k in range(len(chunks) + 2):
        if k >= 2:
            low, high, size, before, _, after = chunks[k - 2]
            own = slots.pop(k - 2)[rank]
            unpack(own[:low], _cut(targets, before))
            unpack(own[high:size], _cut(targets, after))
            phase("splitting")
        if k < len(chunks):
            low, high, size, before, _, after = chunks[k]
            slots[k] = shared.slots(dtype)
            own = slots[k][rank]
            pack(_cut(sources, before), own[:low], factor)
            pack(_cut(sources, after), own[high:size], factor)
            phase("packing")
        if 1 <= k <= len(chunks):
            low, high, _, _, pieces, _ = chunks[k - 1]
            contributions = [slot[low:high] for slot in slots[k - 1]]
            # A reduction in rank order has read the values of ranks 0 and 1 when it writes the first result.
            result = contributions[first]
            mine = _cut(sources, pieces)
            if len(mine) == 1 and factor == 1.0:
                contributions[rank] = mine[0]
            else:
                contributions[rank] = shared.scratch(dtype, high - low)
                pack(mine, contributions[rank], factor)
            reduce(contributions, result)
            for other, slot in enumerate(slots[k - 1]):
                if other not in (rank, first):
                    slot[low:high] = result
            unpack(result, _cut(targets, pieces))
            phase("reducing")
        if k <= len(chunks):
            if differs := meet(shared, digest, layout, check):
                return differs  # in the first round, before any target is written
            phase("waiting")
    return SAME


def reduce_scatter(
    shared: Shared,
    source: Array,
    target: Array,
    bounds: Bounds,
    op: ReduceOp,
    digest: int,
    layout: int,
    check: Check,
) -> int:
    """Reduces the sources of all ranks, and writes to the target what lies within this rank's bounds; see Backend."""
    rank, dtype = shared.rank, source.dtype
    reduce, share = reduction_of(op, dtype, shared.size), _share(shared, dtype)
    with np.errstate(all="ignore"):
        for step in _steps(bounds, share):
            slots = shared.slots(dtype)
            _publish_shares(shared, source, bounds, step, slots[rank], share)
            if result := meet(shared, digest, layout, check):
                return result
            low, high = _within(bounds, rank, step)
            contributions = [
                slot[place : place + high - low] for slot, place in zip(slots, _places(shared, share), strict=True)
            ]
            # A copy: the target may be the same memory, and would be written before it is read.
            contributions[rank] = shared.scratch(dtype, high - low)
            contributions[rank][...] = source[low:high]
            reduce(contributions, target[step.start : step.start + high - low])
    return SAME


# -- Moves of bytes ---------------------------------------------------------------------------------------------------


def broadcast(shared: Shared, flats: Sequence[Array], root: int, digest: int, layout: int, check: Check) -> int:
    """Copies the root's arrays of bytes into the arrays of all other ranks; see Backend."""
    sizes = [flat.size for flat in flats]
    total, length = sum(sizes), shared.slot_bytes
    ends = [min(begin + length, total) for begin in range(0, max(total, 1), length)]
    for begin, end, pieces in zip([0, *ends], ends, _pieces(sizes, ends), strict=False):
        arrays = _cut(flats, pieces)
        slot = shared.slots(_BYTE)[root][: end - begin]
        if shared.rank == root:
            pack(arrays, slot)
        if result := meet(shared, digest, layout, check):
            return result
        if shared.rank != root:
            unpack(slot, arrays)
    return SAME


def all_gather(
    shared: Shared, source: Array, target: Array, bounds: Bounds, digest: int, layout: int, check: Check
) -> int:
    """Copies the sources of all ranks, as bytes, into the target of every rank; see Backend."""
    for step in _steps(bounds, shared.slot_bytes):
        slots, mine = shared.slots(_BYTE), source[step]
        slots[shared.rank][: mine.size] = mine
        if result := meet(shared, digest, layout, check):
            return result
        for rank in _in_turn(shared):
            low, high = _within(bounds, rank, step)
            target[low:high] = slots[rank][: high - low] if rank != shared.rank else mine
    return SAME


def all_to_all(
    shared: Shared,
    source: Array,
    target: Array,
    send_bounds: Bounds,
    receive_bounds: Bounds,
    largest: int,
    digest: int,
    layout: int,
    check: Check,
) -> int:
    """Copies part i of every rank's source, as bytes, into the target of rank i; see Backend."""
    share = _share(shared, _BYTE)
    places = _places(shared, share)
    for step in _steps((0, largest), share):
        slots = shared.slots(_BYTE)
        _publish_shares(shared, source, send_bounds, step, slots[shared.rank], share)
        if result := meet(shared, digest, layout, check):
            return result
        for rank in _in_turn(shared):
            low, high = _within(receive_bounds, rank, step)
            if rank == shared.rank:
                begin, end = _within(send_bounds, rank, step)
                target[low:high] = source[begin:end]
            else:
                target[low:high] = slots[rank][places[rank] : places[rank] + high - low]
    return SAME


_BYTE = np.dtype(np.uint8)


def _steps(bounds: Bounds, length: int) -> Iterator[slice]:
    """Yields the parts of each rank's part that one round moves; at least one round, which compares the digests."""
    largest = max([end - begin for begin, end in pairwise(bounds)])
    for begin in range(0, max(largest, 1), length):
        yield slice(begin, begin + length)


def _within(bounds: Bounds, rank: int, step: slice) -> tuple[int, int]:
    """Returns where a step of a rank's part begins and ends in the whole array."""
    begin, end = bounds[rank], bounds[rank + 1]
    return min(begin + step.start, end), min(begin + step.stop, end)


def _in_turn(shared: Shared) -> Iterator[int]:
    """Yields the ranks, from the next one on, so that not all ranks read the same slot at once."""
    return ((shared.rank + step) % shared.size for step in range(1, shared.size + 1))


def _share(shared: Shared, dtype: np.dtype[Any]) -> int:
    """Returns how many elements a rank can publish for each of the others in one slot, in whole cache lines."""
    per_rank: int = shared.slot_bytes // max(shared.size - 1, 1)
    return per_rank // LINE_BYTES * LINE_BYTES // dtype.itemsize


def _places(shared: Shared, share: int) -> list[int]:
    """Returns where, in the slot of each rank, the share for this rank begins."""
    return [(shared.rank - rank - 1) % shared.size * share for rank in range(shared.size)]


def _publish_shares(shared: Shared, source: Array, bounds: Bounds, step: slice, slot: Array, share: int) -> None:
    for peer in range(shared.size):
        if peer != shared.rank:
            low, high = _within(bounds, peer, step)
            place = (peer - shared.rank - 1) % shared.size * share
            slot[place : place + high - low] = source[low:high]
