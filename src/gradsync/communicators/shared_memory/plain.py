"""The inner loops over shared memory, in plain NumPy: a barrier, reductions, and moves of bytes.

This is the reference for _kernels.c, which has the same functions, and takes their place where it was built. memory.py
says how the memory is laid out.

Every function that waits takes `check`: it calls check() after a short wait, and then again and again. check() raises
an error to end the wait, and returns after how many seconds it wants to be called again.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from gradsync.communicators.agreement import LayoutsDiffer
from gradsync.communicators.backend import Bounds, largest_part
from gradsync.communicators.shared_memory.memory import ABORTED, ARRIVED, DIGEST, FACTOR, LAYOUT, LINE_BYTES, Shared
from gradsync.reduction import Array, ReduceOp, accumulation_dtype, part_dtype, reduce_into

Check = Callable[[], float]
Reduce = Callable[[Sequence[Array], Array], None]
#: The elements [begin, end) of the array of this number in a list: (number, begin, end).
Piece = tuple[int, int, int]

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


class Call(NamedTuple):
    """What a rank brings to the rounds of a collective.

    Attributes:
        digest, layout: see Agreement. The first round compares them, before a target is written.
        check: see the top of this file.
        phase: called at the end of each phase of an all_reduce, with its name; see trace.phases_of.
    """

    digest: int
    layout: int
    check: Check
    phase: Callable[[str], None]


class DigestsDiffer(Exception):
    """The ranks brought different digests. All of them raise it."""


def meet(shared: Shared, call: Call, factor: float = 1.0) -> None:
    """Arrives at the next round, waits for all ranks, and compares what they brought, but for the factors.

    Raises:
        DigestsDiffer, LayoutsDiffer: the ranks brought different digests, or only different layouts; on every rank.
    """
    words, number = shared.words, shared.rounds + 1
    line, odd = shared.lines[shared.rank], number & 1
    words[line + DIGEST + odd] = call.digest
    words[line + LAYOUT + odd] = call.layout
    words[line + FACTOR + odd] = _bits_of(factor)
    words[line + ARRIVED] = number  # publishes everything that this rank wrote before
    arrivals = shared.arrivals
    for arrival in arrivals:
        if words[arrival] < number:
            wait(lambda: min([words[arrival] for arrival in arrivals]) >= number, call.check)
            break
    if words[ABORTED]:  # a rank may have arrived and then aborted
        call.check()
    shared.rounds = number
    for arrival in arrivals:
        if words[arrival + DIGEST + odd] != call.digest:
            raise DigestsDiffer
    for arrival in arrivals:
        if words[arrival + LAYOUT + odd] != call.layout:
            raise LayoutsDiffer


@lru_cache(maxsize=64)
def _bits_of(factor: float) -> int:
    return int.from_bytes(struct.pack("<d", factor), "little")


def _factors(shared: Shared) -> list[float]:
    """Returns what the ranks brought to the last round."""
    bits = [shared.words[line + FACTOR + (shared.rounds & 1)] for line in shared.lines]
    return [struct.unpack("<d", each.to_bytes(8, "little"))[0] for each in bits]


# -- Copies -----------------------------------------------------------------------------------------------------------


def pack(sources: Sequence[Array], packed: Array) -> None:
    """Copies 1-D arrays, one after the other, into one array of their total size."""
    if sources:
        np.concatenate(sources, out=packed)


def unpack(packed: Array, targets: Sequence[Array]) -> None:
    """Copies one array to 1-D arrays of the same total size: the inverse of pack."""
    begin = 0
    for target in targets:
        end = begin + target.size
        target[...] = packed[begin:end]
        begin = end


def _pieces(sizes: Sequence[int], ends: Sequence[int]) -> Iterator[list[Piece]]:
    """Divides a list of arrays: yields the pieces of all elements before ends[0], then up to ends[1], and so on."""
    number = at = done = 0  # in array `number`, and in all arrays
    for end in ends:
        pieces = []
        while done < end:
            step = min(sizes[number] - at, end - done)
            if step:
                pieces.append((number, at, at + step))
            at, done = at + step, done + step
            if at == sizes[number]:
                number, at = number + 1, 0
        yield pieces


def _cut(arrays: Sequence[Array], pieces: Sequence[Piece]) -> list[Array]:
    return [arrays[number][begin:end] for number, begin, end in pieces]


# -- Reductions -------------------------------------------------------------------------------------------------------
# Values are reduced in the order of the ranks, by one rank or by all in the same way, so all get the same bits. Results
# tell of NaN and infinity. NumPy must not raise them: an exception on some ranks only would stop the others. Whoever
# reduces multiplies by the factors, which come with the first round, and so products of half precision are not rounded.

#: Up to this size every rank reduces the whole list after one round. Each rank reduces only its slice of a larger list,
#: which takes more rounds.
SMALL_BYTES = 128 * 1024


def all_reduce(
    shared: Shared,
    sources: Sequence[Array],
    targets: Sequence[Array],
    op: ReduceOp,
    factor: float,
    call: Call,
    with_squares: bool = False,
) -> float | None:
    """Reduces each source, multiplied by this rank's factor, into the target of the same index; see Backend.

    Returns:
        With squares: the sum of the squares of this rank's part of the results.
    """
    dtype, sizes = sources[0].dtype, tuple([source.size for source in sources])
    total = sum(sizes)
    with np.errstate(all="ignore"):
        if total * dtype.itemsize > min(SMALL_BYTES, shared.slot_bytes):
            chunks = chunks_of(sizes, dtype.itemsize, shared.slot_bytes, shared.rank, shared.size)
            return _reduce_chunks(shared, chunks, sources, targets, op, factor, call, with_squares)
        slots = [slot[:total] for slot in shared.slots(dtype)]
        pack(sources, slots[shared.rank])
        call.phase("packing")
        meet(shared, call, factor)
        call.phase("waiting")
        reduced = targets[0] if len(targets) == 1 else shared.scratch(dtype, total)
        _reduction(shared, op)(slots, reduced)
        call.phase("reducing")
        if len(targets) > 1:
            unpack(reduced, targets)
            call.phase("splitting")
        begin, end = (total * rank // shared.size for rank in (shared.rank, shared.rank + 1))
        return _sum_of_squares(reduced[begin:end]) if with_squares else None


def _sum_of_squares(values: Array) -> float:
    return float(np.square(values.view(part_dtype(values.dtype)), dtype=np.float64).sum())


def _reduction(shared: Shared, op: ReduceOp) -> Reduce:
    """Returns the function that reduces the values of all ranks, multiplied by the factors of the last round."""
    factors = _factors(shared)
    if all(factor == 1.0 for factor in factors):
        return partial(reduce_into, op)
    return partial(_reduce_products, op, factors)


def _reduce_products(op: ReduceOp, factors: Sequence[float], contributions: Sequence[Array], out: Array) -> None:
    """Adds products. Those of complex numbers are of their parts: NumPy's with infinity have NaN."""
    part = part_dtype(out.dtype)
    wide = accumulation_dtype(part)
    products = [
        contribution.view(part).astype(wide) * wide.type(factor)
        for contribution, factor in zip(contributions, factors, strict=True)
    ]
    reduce_into(op, products, products[0])
    out.view(part)[...] = products[0]


class Chunk(NamedTuple):
    """A part of a list that fits into a slot. The rank reduces the slice [low, high) of its `size` elements for all.

    Attributes:
        low, high, size: see above.
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


def _reduce_chunks(
    shared: Shared,
    chunks: Sequence[Chunk],
    sources: Sequence[Array],
    targets: Sequence[Array],
    op: ReduceOp,
    factor: float,
    call: Call,
    with_squares: bool,
) -> float | None:
    """All-reduces a large list. Between two rounds each rank works on three chunks, in two slots:

    - it copies the results of the others from its own slot of chunk k - 2 to the targets;
    - it copies to the same slot what the others will reduce of chunk k;
    - it reduces its slice of chunk k - 1, and writes the result into the slots of all others.
    """
    dtype, rank, slots = sources[0].dtype, shared.rank, dict[int, list[Array]]()
    first = 0 if rank or shared.size == 1 else 1
    squares = 0.0
    for k in range(len(chunks) + 2):
        if k >= 2:
            chunk, own = chunks[k - 2], slots.pop(k - 2)[rank]
            unpack(own[: chunk.low], _cut(targets, chunk.before))
            unpack(own[chunk.high : chunk.size], _cut(targets, chunk.after))
            call.phase("splitting")
        if k < len(chunks):
            chunk, slots[k] = chunks[k], shared.slots(dtype)
            own = slots[k][rank]
            pack(_cut(sources, chunk.before), own[: chunk.low])
            pack(_cut(sources, chunk.after), own[chunk.high : chunk.size])
            call.phase("packing")
        if 1 <= k <= len(chunks):
            chunk = chunks[k - 1]
            parts = [slot[chunk.low : chunk.high] for slot in slots[k - 1]]
            # The result goes into the slot of rank 0 or 1. In rank order, their values are read before it is written.
            result, others = parts[first], [part for other, part in enumerate(parts) if other not in (rank, first)]
            mine = _cut(sources, chunk.own)
            if len(mine) != 1:
                packed = shared.scratch(dtype, result.size)
                pack(mine, packed)
                mine = [packed]
            parts[rank] = mine[0]
            if k == 1:  # the first round has brought the factors
                reduce = _reduction(shared, op)
            reduce(parts, result)
            for other in others:
                other[...] = result
            unpack(result, _cut(targets, chunk.own))
            squares += _sum_of_squares(result) if with_squares else 0.0
            call.phase("reducing")
        if k <= len(chunks):
            meet(shared, call, factor)
            call.phase("waiting")
    return squares if with_squares else None


def reduce_scatter(shared: Shared, source: Array, target: Array, bounds: Bounds, op: ReduceOp, call: Call) -> None:
    """Reduces the sources of all ranks, and writes to the target what lies within this rank's bounds; see Backend."""
    with np.errstate(all="ignore"):
        for step, shares in _deal(shared, source, bounds, largest_part(bounds), call):
            part = target[step]
            # A copy: the target may be the same memory, and would be written before it is read.
            mine = shared.scratch(source.dtype, part.size)
            mine[...] = shares[shared.rank]
            shares[shared.rank] = mine
            reduce_into(op, [share[: part.size] for share in shares], part)


# -- Moves of bytes ---------------------------------------------------------------------------------------------------


def broadcast(shared: Shared, flats: Sequence[Array], root: int, call: Call) -> None:
    """Copies the root's arrays of bytes into the arrays of all other ranks; see Backend."""
    sizes = [flat.size for flat in flats]
    total, length = sum(sizes), shared.slot_bytes
    ends = [min(begin + length, total) for begin in range(0, max(total, 1), length)]
    for pieces in _pieces(sizes, ends):
        arrays, slot = _cut(flats, pieces), shared.slots(_BYTE)[root]
        if shared.rank == root:
            pack(arrays, slot[: sum([array.size for array in arrays])])
        meet(shared, call)
        if shared.rank != root:
            unpack(slot, arrays)


def all_gather(shared: Shared, source: Array, target: Array, bounds: Bounds, call: Call) -> None:
    """Copies the sources of all ranks, as bytes, into the target of every rank; see Backend."""
    for step in _steps(largest_part(bounds), shared.slot_bytes):
        mine, slots = source[step], list(shared.slots(_BYTE))
        slots[shared.rank][: mine.size] = mine
        meet(shared, call)
        slots[shared.rank] = mine
        _deliver(shared, slots, target, bounds, step)


def all_to_all(
    shared: Shared, source: Array, target: Array, send_bounds: Bounds, receive_bounds: Bounds, largest: int, call: Call
) -> None:
    """Copies part i of every rank's source, as bytes, into the target of rank i; see Backend."""
    for step, shares in _deal(shared, source, send_bounds, largest, call):
        _deliver(shared, shares, target, receive_bounds, step)


_BYTE = np.dtype(np.uint8)


def _steps(largest: int, length: int) -> Iterator[slice]:
    """Yields what a round moves of each part: at least one round, which compares the digests."""
    return (slice(begin, begin + length) for begin in range(0, max(largest, 1), length))


def _deal(
    shared: Shared, source: Array, bounds: Bounds, largest: int, call: Call
) -> Iterator[tuple[slice, list[Array]]]:
    """Gives each rank its part of the source, in rounds. Yields what each round moves of each part, and what it brings.

    That is a list of arrays, by rank; each begins with what the rank has for this one.
    """
    rank, size = shared.rank, shared.size
    share = shared.slot_bytes // max(size - 1, 1) // LINE_BYTES * LINE_BYTES // source.dtype.itemsize
    for step in _steps(largest, share):
        slots = shared.slots(source.dtype)
        parts = [source[begin:end][step] for begin, end in pairwise(bounds)]
        for peer, part in enumerate(parts):
            if peer != rank:
                slots[rank][(peer - rank - 1) % size * share :][: part.size] = part
        meet(shared, call)
        shares = [slot[(rank - peer - 1) % size * share :][:share] for peer, slot in enumerate(slots)]
        shares[rank] = parts[rank]
        yield step, shares


def _deliver(shared: Shared, sources: Sequence[Array], target: Array, bounds: Bounds, step: slice) -> None:
    """Copies what a round has brought to the parts of the target, from the next rank on: not all read one slot."""
    for rank in [*range(shared.rank + 1, shared.size), *range(shared.rank + 1)]:
        part = target[bounds[rank] : bounds[rank + 1]][step]
        part[...] = sources[rank][: part.size]
