"""The inner loops over shared memory, in plain NumPy: a barrier, reductions, moves of bytes, and pieces of messages.

Each rank owns a part of the memory. The others read all of it, and write only into its slots. A part consists of

- a cache line of words about this rank: its arrivals at the barrier, the digests that it brought, and its end. A second
  line belongs to all ranks, in the part of rank 0;
- the text with the reason of an abort;
- two cache lines for each rank: for the messages to it, and for those from it;
- SLOTS slots, through which the collectives move arrays;
- a ring for the messages to each other rank.

On x86-64, other cores see aligned 8-byte stores in program order. The barrier and the messages rely on that alone: what
a rank wrote before it arrived, or before it counted a piece, is seen by whoever sees the arrival or the count.

A collective goes in rounds of the barrier (`meet`). Round r uses the slots number r % SLOTS. Before a rank writes into
its slot again, all have arrived at a later round, and so have read what was there.

Every function that waits takes `check`: it calls check() after a short wait, and then again and again. check() raises
an error to end the wait, and returns after how many seconds it wants to be called again.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from gradsync.reduction import Array, ReduceOp, accumulation_dtype, part_dtype, reduction_of

Check = Callable[[], float]
Phase = Callable[[str], None]
Bounds = Sequence[int]

# -- The memory -------------------------------------------------------------------------------------------------------

_LINE_BYTES = 64
_LINE_WORDS = _LINE_BYTES // 8

# The words of a rank's line. There are two words for digests and two for layouts, for even and odd rounds: a fast rank
# may have arrived at the next round while a slow one still reads what it brought to this one.
ARRIVED, DIGEST, LAYOUT, STATE, CULPRIT, ABORTED_AT = 0, 1, 3, 5, 6, 7
#: The first word of the common line. It is not zero once any rank has aborted.
ABORTED = _LINE_WORDS
TEXT_BEGIN, TEXT_BYTES = 2 * _LINE_BYTES, 1024
_CHANNELS_BEGIN = TEXT_BEGIN + TEXT_BYTES

# The words of a line of messages. Digests and sizes have two words, for messages of even and odd number: a side that
# has ended a message may begin the next one while the other side still has to compare this one.
NUMBER, MESSAGE_DIGEST, SIZE, DONE, TOLD = 0, 1, 3, 5, 6

#: A round writes one slot while others may still read that of the round before, or the results of a chunk in a third.
SLOTS = 3
#: The pieces of a message that the ring has room for. So the receiver copies one while the sender writes the next.
PIECES = 4
_LEAST_RING_BYTES = 16 * 1024


def _slots_begin(size: int) -> int:
    """Returns where the slots begin: half a page off.

    The data of large NumPy arrays begin 16 bytes after a page. Some processors (AMD Zen 3) copy ten times slower if the
    target lies 1 to 63 bytes after the source, modulo the page size.
    """
    words_end = _CHANNELS_BEGIN + 2 * size * _LINE_BYTES
    return -(-words_end // mmap.PAGESIZE) * mmap.PAGESIZE + mmap.PAGESIZE // 2


def _ring_bytes(size: int, slot_bytes: int) -> int:
    unit = PIECES * _LINE_BYTES
    return max(slot_bytes // max(size - 1, 1), _LEAST_RING_BYTES) // unit * unit


def part_bytes(size: int, slot_bytes: int) -> int:
    """Returns the number of bytes, in whole pages, of the part of each of `size` ranks."""
    end = _slots_begin(size) + SLOTS * slot_bytes + (size - 1) * _ring_bytes(size, slot_bytes)
    return -(-end // mmap.PAGESIZE) * mmap.PAGESIZE


class Shared:
    """The shared memory of a communicator, as one rank sees it.

    Args:
        mapping: the parts of all ranks, initially zero.
        rank, size: this rank's number, and the number of ranks.
        slot_bytes: the size of a slot, a multiple of the page size.

    Attributes:
        rank, size, slot_bytes: see Args.
        words: the memory as 8-byte words.
        lines: the index of the first word of each rank's part.
        rounds: how many rounds of the barrier this rank has completed.
    """

    def __init__(self, mapping: mmap.mmap, rank: int, size: int, slot_bytes: int) -> None:
        self.rank = rank
        self.size = size
        self.slot_bytes = slot_bytes
        self.words = memoryview(mapping).cast("Q")
        self.rounds = 0
        self._part_bytes = part_bytes(size, slot_bytes)
        self.lines = [each * self._part_bytes // 8 for each in range(size)]
        self.arrivals = [line + ARRIVED for each, line in enumerate(self.lines) if each != rank]
        self._bytes = np.frombuffer(mapping, np.uint8)
        self._slots: dict[np.dtype[Any], list[list[Array]]] = {}
        self._scratch = np.empty(slot_bytes, np.uint8)

    def slots(self, dtype: np.dtype[Any]) -> list[Array]:
        """Returns the slots of all ranks for the next round, as arrays of the dtype."""
        if dtype not in self._slots:
            begin, length = _slots_begin(self.size), self.slot_bytes
            self._slots[dtype] = [
                [self._of_rank(rank, begin + number * length, length).view(dtype) for rank in range(self.size)]
                for number in range(SLOTS)
            ]
        return self._slots[dtype][(self.rounds + 1) % SLOTS]

    def scratch(self, dtype: np.dtype[Any], size: int) -> Array:
        """Returns private memory for up to a slot's elements."""
        return self._scratch.view(dtype)[:size]

    def text(self, rank: int) -> Array:
        """Returns the bytes of a rank's text."""
        return self._of_rank(rank, TEXT_BEGIN, TEXT_BYTES)

    def channel(self, sender: int, receiver: int) -> Channel:
        """Returns this rank's side of the channel for the messages between two ranks; it is one of them."""
        of_sender = self.lines[sender] + _CHANNELS_BEGIN // 8 + receiver * _LINE_WORDS
        of_receiver = self.lines[receiver] + _CHANNELS_BEGIN // 8 + (self.size + sender) * _LINE_WORDS
        own, other = (of_sender, of_receiver) if self.rank == sender else (of_receiver, of_sender)
        ring_bytes = _ring_bytes(self.size, self.slot_bytes)
        place = (receiver - sender - 1) % self.size
        begin = _slots_begin(self.size) + SLOTS * self.slot_bytes + place * ring_bytes
        ring = self._of_rank(sender, begin, ring_bytes).reshape(PIECES, -1)
        return Channel(self.words, own, other, list(ring), self.rank == sender)

    def release(self) -> None:
        """Drops the references to the memory, even if something still refers to this object."""
        words = self.words
        self.__dict__.clear()
        words.release()

    def _of_rank(self, rank: int, begin: int, size: int) -> Array:
        begin += rank * self._part_bytes
        return self._bytes[begin : begin + size]


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
    total, length, line = sum(sizes), slot_bytes // itemsize, max(1, _LINE_BYTES // itemsize)
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
    return shared.slot_bytes // max(shared.size - 1, 1) // _LINE_BYTES * _LINE_BYTES // dtype.itemsize


def _places(shared: Shared, share: int) -> list[int]:
    """Returns where, in the slot of each rank, the share for this rank begins."""
    return [(shared.rank - rank - 1) % shared.size * share for rank in range(shared.size)]


def _publish_shares(shared: Shared, source: Array, bounds: Bounds, step: slice, slot: Array, share: int) -> None:
    for peer in range(shared.size):
        if peer != shared.rank:
            low, high = _within(bounds, peer, step)
            place = (peer - shared.rank - 1) % shared.size * share
            slot[place : place + high - low] = source[low:high]


# -- Messages ---------------------------------------------------------------------------------------------------------


_NOTHING = np.empty(0, np.uint8)


class Channel:
    """One side of the channel for the messages from one rank to another, one after the other.

    The sender writes its line and the ring, the receiver writes its line. Each side posts a message: its digest and its
    size. If both sides posted the same, the bytes go through the ring, piece by piece, and each side counts the pieces
    that it is done with. A message ends for the sender when the receiver has read all of it. So neither side is ever
    more than one message ahead.

    Attributes:
        words: the shared memory.
        own, other: the index of the first word of the line of this side, and of the other side.
        ring: the memory for the pieces.
        sends: whether this side is the sender.
        number: the number of the last message that this side has posted.
        data, digest: the bytes of this message, and its digest.
        done: how many pieces this side has written, or read.
        has_agreed: whether both sides have posted the same.
    """

    def __init__(self, words: memoryview, own: int, other: int, ring: Sequence[Array], sends: bool) -> None:
        self.words = words
        self.own = own
        self.other = other
        self.ring = ring
        self.sends = sends
        self.number = self.digest = self.done = 0
        self.data = _NOTHING
        self.has_agreed = False


def post(channel: Channel, data: Array, digest: int) -> None:
    """Posts the next message; the last one must have ended."""
    words, own = channel.words, channel.own
    channel.number, channel.data, channel.digest = channel.number + 1, data, digest
    channel.done, channel.has_agreed = 0, False
    odd = channel.number & 1
    words[own + MESSAGE_DIGEST + odd] = digest
    words[own + SIZE + odd] = data.size
    words[own + DONE] = 0
    words[own + NUMBER] = channel.number  # publishes the words above


#: The results of `advance`.
IDLE, MOVED, OVER, DIFFERS = 0, 1, 2, 3


def forget(channel: Channel) -> None:
    """Drops the reference to the bytes of a message that has ended."""
    channel.data = _NOTHING


def advance(channel: Channel) -> int:
    """Moves at most one piece of the posted message, if that is possible now; never waits."""
    words, own, other, data = channel.words, channel.own, channel.other, channel.data
    if not channel.has_agreed and words[other + NUMBER] >= channel.number:
        odd = channel.number & 1
        if words[other + MESSAGE_DIGEST + odd] != channel.digest or words[other + SIZE + odd] != data.size:
            return DIFFERS
        channel.has_agreed = True
    piece_bytes = channel.ring[0].size
    pieces = -(-data.size // piece_bytes)
    # How many pieces the other side is done with. Until it has posted the message, its count is of the one before.
    theirs = words[other + DONE] if channel.has_agreed else 0
    if words[other + NUMBER] > channel.number:
        theirs = pieces  # it is done with this message, and has posted the next one
    done = channel.done
    if done < min(pieces, theirs + PIECES if channel.sends else theirs):
        part = data[done * piece_bytes : (done + 1) * piece_bytes]
        slot = channel.ring[done % PIECES][: part.size]
        if channel.sends:
            slot[...] = part
        else:
            part[...] = slot
        channel.done = done + 1
        words[own + DONE] = channel.done  # publishes the piece, or that its place in the ring is free
        return MOVED
    is_over = channel.has_agreed and done == pieces and (not channel.sends or theirs == pieces)
    return OVER if is_over else IDLE
