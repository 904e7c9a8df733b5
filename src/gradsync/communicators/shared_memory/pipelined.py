"""The all-reduce of a large list over shared memory: chunk by chunk, reduced by its owners and written back.

Every rank publishes what others own, reduces the slice that it owns, and writes the result back into the others'
memory, from where they fetch it. Each rank reads and reduces 1/n of everything, whatever n. (Results in memory of the
reducer's own, which others would fetch from there, took a quarter longer.)

First comes how a list is cut into chunks and slices, and when what is done to them: pure arithmetic, for which the list
is one flat sequence of elements. A chunk is what is published at a time; within a chunk each rank owns one slice. Then
NumPy calls that are made once and run many times: to cut a view costs as much as copying kilobytes, so what an
all-reduce of the same arrays repeats keeps its views. Pieces below some kilobytes go together: a call for each would
cost more than their bytes. Then the look at what is not finite, and the all-reduce itself.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import repeat
from operator import setitem
from typing import Any, NamedTuple

import numpy as np

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.host_copy import copy_words, memcpy_is_slow, word_dtype
from gradsync.communicators.host_values import finite_test
from gradsync.communicators.nonfinite import NonFiniteFinder
from gradsync.communicators.pieces import Piece, cuts, line_bounds, pieces_between
from gradsync.communicators.shared_memory.arena import CHUNKS_IN_FLIGHT, Scratch, SlotArrays, Workplace
from gradsync.diagnostics import tracing
from gradsync.reduction import (
    UFUNCS_INTO,
    Array,
    ReduceOp,
    accumulation_dtype,
    divide_into,
    division,
    part_dtype,
    reduce_into,
)

# Below, pieces are gathered: a NumPy call costs as much as copying some kilobytes.
_WORTH_A_CALL_BYTES = 4096
# What is reduced, and then divided, at a time: from one pass to the next it stays in the cache.
_REDUCED_BYTES = 256 * 1024
# What is copied into shared memory by one call where memcpy is slow, as on Zen 3. Measured there: while rewriting what
# others have read is slow (see arena.py), calls of twice that size take twice as long for the same bytes, and of four
# times that size four times as long. Elsewhere (a Xeon) a whole chunk by one call is the fastest.
_PUBLISHED_BYTES = 128 * 1024
# How much of small pieces is gathered, and then reduced, divided and scattered.
_GATHERED_BYTES = 128 * 1024


class Stretch(NamedTuple):
    """Elements [begin, end) of a chunk, and the pieces of arrays that lie there, in order."""

    begin: int
    end: int
    pieces: tuple[Piece, ...]


class Chunk(NamedTuple):
    """What is published at a time, as one rank sees it, in stretches that are worth a NumPy call each.

    Attributes:
        own: the slice that this rank reduces.
        published, delivered: all other slices, cut in two ways.
    """

    own: tuple[Stretch, ...]
    published: tuple[Stretch, ...]
    delivered: tuple[Stretch, ...]


class Lengths(NamedTuple):
    """The most elements of what is taken at a time.

    Attributes:
        chunk: see above.
        reduced, published: of a stretch of one piece.
        gathered: of a stretch of several small pieces.
    """

    chunk: int
    reduced: int
    published: int
    gathered: int


class Wait(enum.Enum):
    """What a rank waits for after a step."""

    AGREEMENT = "all ranks, in agreement"
    ALL = "all ranks"
    ALL_BEFORE = "all ranks to have come as far as the step before"
    NOBODY = "nobody"


class Step(NamedTuple):
    """What a rank does before it arrives at a round of the barrier: numbers of chunks.

    Attributes:
        delivered, published, reduced: the chunks, in this order.
        wait: what it waits for then.
    """

    delivered: range
    published: range
    reduced: range
    wait: Wait


@lru_cache(maxsize=256)
def plan_stream(
    sizes: tuple[int, ...], lengths: Lengths, itemsize: int, rank: int, world_size: int
) -> tuple[Chunk, ...]:
    """Cuts arrays of the given sizes into chunks, and each chunk into a slice for each rank.

    Args:
        sizes: elements of each array, in order.
        lengths: of chunks and stretches.
        itemsize: bytes of an element; slices begin on cache lines, so that no two ranks write into one.
        rank: whose view of the chunks is wanted.
        world_size: number of slices in a chunk.
    """

    def cut(whole: list[Stretch], of_one: int) -> tuple[Stretch, ...]:
        return tuple(part for one in whole for part in worth_a_call(one, itemsize, of_one, lengths.gathered))

    chunks = []
    for begin, end in cuts(sum(sizes), lengths.chunk):
        length = end - begin
        low, high = line_bounds(length, itemsize, world_size)[rank : rank + 2]
        before, own, after = (
            Stretch(a, b, pieces_between(sizes, begin + a, begin + b))
            for a, b in ((0, low), (low, high), (high, length))
        )
        others = [before, after]
        chunks.append(Chunk(cut([own], lengths.reduced), cut(others, lengths.published), cut(others, length)))
    return tuple(chunks)


def worth_a_call(whole: Stretch, itemsize: int, of_one: int, of_several: int) -> Iterator[Stretch]:
    """Cuts a stretch into those that are worth a NumPy call.

    Args:
        whole: what is cut.
        itemsize: bytes of an element.
        of_one, of_several: the most elements of a stretch of one piece, and of several.
    """
    begin = end = whole.begin
    together: list[Piece] = []
    for piece in whole.pieces:
        size = piece.end - piece.begin
        is_small = size * itemsize < _WORTH_A_CALL_BYTES
        if together and not (is_small and end - begin + size <= of_several):
            yield Stretch(begin, end, tuple(together))
            begin, together = end, []
        end += size
        if is_small:
            together.append(piece)
            continue
        for low, high in cuts(size, of_one):
            yield Stretch(begin + low, begin + high, (Piece(piece.array, piece.begin + low, piece.begin + high),))
        begin = end
    if together:
        yield Stretch(begin, end, tuple(together))


def plan_steps(count: int) -> Iterator[Step]:
    """Yields the steps in which so many chunks, one at least, go through the stream.

    A chunk is reduced when all have published it, and delivered when all have reduced it. Nearly always a rank goes on
    while another is still in the step before: ranks are delayed now here, now there, and would otherwise wait for
    every delay of any. So two steps lie between those actions, until nothing is left to publish.
    """
    behind = CHUNKS_IN_FLIGHT // 2
    for number in range(count):
        wait = Wait.AGREEMENT if number == 0 else Wait.ALL_BEFORE if number < count - 1 else Wait.ALL
        yield Step(_one(number - 2 * behind), _one(number), _one(number - behind), wait)
    first, middle = max(count - 2 * behind, 0), max(count - behind, 0)
    yield Step(range(first, middle), range(0), range(middle, count), Wait.ALL)
    yield Step(range(middle, count), range(0), range(0), Wait.NOBODY)


def _one(number: int) -> range:
    return range(number, number + 1) if number >= 0 else range(0)


Call = tuple[Callable[..., Any], tuple[Any, ...]]

_EVERYTHING = slice(None)
# Dtypes whose memoryviews can be assigned to each other as they are. Others go as bytes: integers of one size have
# several format letters, and complex numbers and bfloat16 have none that a memoryview understands.
_FORMATS = frozenset("efd")
_assign: Callable[..., None] = setitem
_exhaust = deque[Any](maxlen=0).extend


def run_calls(calls: Iterable[Call]) -> None:
    """Runs the calls in their order."""
    for function, arguments in calls:
        function(*arguments)


def copying(source: Array, target: Array) -> Call:
    """Copies one 1-D array into another of its size and dtype, bit for bit."""
    word = word_dtype(source.dtype)
    return copy_words, (source.view(word), target.view(word))


def gathering(sources: Sequence[Array], packed: Array) -> Call:
    """Copies 1-D arrays, each small, one after the other into an array of their total size."""
    return np.concatenate, (sources, 0, packed)


def scattering(packed: Array, targets: Sequence[Array]) -> Call:
    """Copies a packed array into 1-D arrays, each small, that together have its size.

    By memoryviews, which copy in half the time that NumPy takes to assign a small array.
    """
    whole, *memories = _memories([packed, *targets])
    places, begin = [], 0
    for memory in memories:
        end = begin + len(memory)
        places.append(whole[begin:end])
        begin = end
    return _scatter, (memories, places)


def reducing(op: ReduceOp, contributions: Sequence[Array], out: Array, accumulator: Array | None) -> list[Call]:
    """Reduces as reduce_into of reduction.py does; `accumulator` is None where the dtype adds up in itself."""
    if accumulator is not None:
        return [(reduce_into, (op, contributions, out, accumulator))]
    ufunc = UFUNCS_INTO[op]
    calls: list[Call] = [(ufunc, (contributions[0], contributions[1], out))]
    calls += [(ufunc, (out, contribution, out)) for contribution in contributions[2:]]
    if op is ReduceOp.MEAN:
        calls.append((divide_into, (out, len(contributions), out)))
    return calls


class Delivery:
    """Brings results to where they belong.

    Args:
        targets: 1-D arrays.
        divisor: what to divide by on the way; 1 copies bit for bit.
        scratch: private memory.
    """

    def __init__(self, targets: Sequence[Array], divisor: int, scratch: Scratch) -> None:
        self._targets = targets
        self._divides = divisor > 1
        self._scratch = scratch
        self._part: np.dtype[Any] | None = None
        if self._divides:
            dtype = targets[0].dtype
            part = part_dtype(dtype)
            self._part = part if part != dtype else None
            self._divide, self._divisor = division(part, divisor)

    def calls(self, place: Array, pieces: Sequence[Piece]) -> list[Call]:
        """Returns what brings the results at a place to pieces of the targets: to one, or to several small ones."""
        if len(pieces) == 1:
            target = piece_of(self._targets, pieces[0])
            return [self._dividing(place, target) if self._divides else copying(place, target)]
        targets = [piece_of(self._targets, piece) for piece in pieces]
        if not self._divides:
            return [scattering(place, targets)]
        divided = self._scratch.result(place.dtype, place.size)
        return [self._dividing(place, divided), scattering(divided, targets)]

    def _dividing(self, values: Array, out: Array) -> Call:
        """Divides as divide_into of reduction.py does."""
        if self._part is not None:
            values, out = values.view(self._part), out.view(self._part)
        return self._divide, (values, self._divisor, out)


def piece_of(arrays: Sequence[Array], piece: Piece) -> Array:
    """Returns a piece of one of the arrays: the array itself, where that is all of it."""
    array = arrays[piece.array]
    return array if piece.end - piece.begin == array.size else array[piece.begin : piece.end]


def _memories(arrays: Sequence[Array]) -> list[memoryview]:
    """Returns the memory of arrays of one dtype, all as elements or all as bytes."""
    if arrays[0].dtype.char in _FORMATS:
        memories = [array.data for array in arrays]
        # NumPy's arrays over those of ctypes say "<f", and those that are not aligned "=f".
        if all(memory.format in _FORMATS for memory in memories):
            return memories
    return [array.view(np.uint8).data for array in arrays]


def _scatter(memories: Sequence[memoryview], places: Sequence[memoryview]) -> None:
    _exhaust(map(_assign, memories, repeat(_EVERYTHING), places))  # a loop in C


#: [number of a slot][rank] -> whether what the rank has reduced of the chunk there is not finite. It writes that again
#: when all have published the next chunk in that slot, and so have delivered this one.
Flags = Sequence[memoryview]


class ChunkLook:
    """Looks at the chunks of one list of arrays.

    Args:
        sources: what this rank gives.
        chunk_elements: size of a chunk; the last one may be shorter.
        rank: this rank.
        is_finite: tells of an array whether all of it is.
        flags: in shared memory.
        finder: takes note of what is not finite.
    """

    def __init__(
        self,
        sources: Sequence[Array],
        chunk_elements: int,
        rank: int,
        is_finite: Callable[[Array], bool],
        flags: Flags,
        finder: NonFiniteFinder,
    ) -> None:
        self._sources = sources
        self._chunk_elements = chunk_elements
        self._rank = rank
        self._is_finite = is_finite
        self._flags = flags
        self._finder = finder

    def begin(self, chunk: int) -> None:
        """Begins with the results of a chunk: what was said of the one before in its slot is over."""
        self._flags_of(chunk)[self._rank] = False

    def look(self, chunk: int, stretch: Stretch, results: Array) -> None:
        """Looks at results of this rank, before they are delivered to it, and, where it must, at what it gave."""
        if not self._is_finite(results):
            self._flags_of(chunk)[self._rank] = True
            self._finder.note_results()
            self._look_at_own(chunk, [stretch])

    def look_before_delivery(self, chunk: int, stretches: Sequence[Stretch]) -> None:
        """Looks at what this rank gave, where somebody has told that the results are not finite."""
        if any(self._flags_of(chunk)):
            self._look_at_own(chunk, stretches)

    def _flags_of(self, chunk: int) -> memoryview:
        return self._flags[chunk % len(self._flags)]

    def _look_at_own(self, chunk: int, stretches: Sequence[Stretch]) -> None:
        for begin, _, pieces in stretches:
            at = chunk * self._chunk_elements + begin
            for number, low, high in pieces:
                self._finder.look_at(self._rank, self._sources[number][low:high], at)
                at += high - low


# What a step does, where in that its parts end, and for whom it waits then.
_StepCalls = tuple[list[Call], tuple[int, int], Wait]


class WriteBack:
    """The all-reduce of one list of arrays.

    Several chunks are in flight, each in the slot of its turn; see plan_steps. A rank publishes into its own slot only
    after fetching the chunk that was there before, and others touch that slot only between the rounds of the barrier
    after its publication and after their reduction.

    Args:
        sources, targets: see Backend.all_reduce.
        op: an operator that the dtype table allows.
        workplace: this rank's.
        scratch: private memory.
        slots: of the sources' dtype; a chunk fits into a slot.
        flags: where ranks tell of results that are not finite; None where nobody looks for such.
    """

    def __init__(
        self,
        sources: Sequence[Array],
        targets: Sequence[Array],
        op: ReduceOp,
        workplace: Workplace,
        scratch: Scratch,
        slots: SlotArrays,
        flags: Flags | None,
    ) -> None:
        self._sources = sources
        self._barrier = workplace.barrier
        self._recorder = workplace.recorder
        self._rank = rank = workplace.rank
        world_size = workplace.world_size
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self._scratch = scratch
        self._slots = slots
        self._dtype = dtype = sources[0].dtype
        itemsize = dtype.itemsize
        sizes = tuple([source.size for source in sources])
        published_bytes = _PUBLISHED_BYTES if memcpy_is_slow() else workplace.chunk_bytes
        bytes_at_a_time = workplace.chunk_bytes, _REDUCED_BYTES, published_bytes, _GATHERED_BYTES
        lengths = Lengths(*[size_bytes // itemsize for size_bytes in bytes_at_a_time])
        self._chunks = plan_stream(sizes, lengths, itemsize, rank, world_size)
        self._accumulator = scratch.accumulator(dtype, max(lengths.reduced, lengths.gathered))
        # The mean is a sum that is divided on its way into the targets: that spares a pass over the data. Half
        # precision is divided with the sum, in float32.
        divides_late = op is ReduceOp.MEAN and accumulation_dtype(dtype) == dtype
        self._op = ReduceOp.SUM if divides_late else op
        self._delivery = Delivery(targets, world_size if divides_late else 1, scratch)
        is_finite = None if flags is None else finite_test(dtype)
        self._look: ChunkLook | None = None
        if flags is not None and is_finite is not None:
            self._look = ChunkLook(sources, lengths.chunk, rank, is_finite, flags, workplace.finder)
        self._kept: list[_StepCalls] | None = None

    def keep(self) -> None:
        """Works out what every step does, once for all runs."""
        self._kept = list(self._work_out())

    def run(self, agreement: Agreement) -> None:
        """Reduces each source into its target."""
        with np.errstate(all="ignore"):  # overflow and NaN are the caller's business; errors would hit some ranks only
            self._run(agreement)

    def _run(self, agreement: Agreement) -> None:
        steps: Iterable[_StepCalls] = self._work_out() if self._kept is None else self._kept
        laps = tracing.laps_of(self._recorder)
        if laps is None:
            for step_calls, _, wait in steps:
                run_calls(step_calls)
                self._wait(wait, agreement)
            return
        for step_calls, (delivered, published), wait in steps:
            parts = step_calls[:delivered], step_calls[delivered:published], step_calls[published:]
            for phase, part in zip(("splitting", "packing", "reducing"), parts, strict=True):
                if part:
                    run_calls(part)
                    laps.end(phase)
            if wait is not Wait.NOBODY:
                self._wait(wait, agreement)
                laps.end("waiting")

    def _wait(self, wait: Wait, agreement: Agreement) -> None:
        barrier = self._barrier
        if wait is Wait.ALL_BEFORE:
            barrier.arrive()
            barrier.await_round(barrier.round - 1)
        elif wait is Wait.ALL:
            barrier.arrive()
            barrier.await_round(barrier.round)
        elif wait is Wait.AGREEMENT:
            barrier.meet(agreement)

    def _work_out(self) -> Iterator[_StepCalls]:
        for step in plan_steps(len(self._chunks)):
            yield *self._calls_of(step), step.wait

    def _calls_of(self, step: Step) -> tuple[list[Call], tuple[int, int]]:
        made: list[Call] = []
        for number in step.delivered:
            slot = self._slots[number % CHUNKS_IN_FLIGHT][self._rank]
            if self._look is not None:
                made.append((self._look.look_before_delivery, (number, self._chunks[number].delivered)))
            for begin, end, pieces in self._chunks[number].delivered:
                made += self._delivery.calls(slot[begin:end], pieces)
        delivered = len(made)
        for number in step.published:
            slot = self._slots[number % CHUNKS_IN_FLIGHT][self._rank]
            for begin, end, pieces in self._chunks[number].published:
                made.append(self._collecting(pieces, slot[begin:end]))
        published = len(made)
        for number in step.reduced:
            slots = self._slots[number % CHUNKS_IN_FLIGHT]
            if self._look is not None:
                made.append((self._look.begin, (number,)))
            for stretch in self._chunks[number].own:
                made += self._reducing(number, stretch, slots)
        return made, (delivered, published)

    def _collecting(self, pieces: Sequence[Piece], place: Array) -> Call:
        if len(pieces) == 1:
            return copying(piece_of(self._sources, pieces[0]), place)
        return gathering([piece_of(self._sources, piece) for piece in pieces], place)

    def _reducing(self, number: int, stretch: Stretch, slots: Sequence[Array]) -> list[Call]:
        """Reduces what this rank owns into the slot of every peer, and delivers it here."""
        begin, end, pieces = stretch
        made: list[Call] = []
        contributions = [slot[begin:end] for slot in slots]
        # Rank 0 or rank 1: in rank order, its contribution is read before the first result is written.
        result, *others = [contributions[peer] for peer in self._peers]
        if len(pieces) == 1:
            own = piece_of(self._sources, pieces[0])
        else:
            own = self._scratch.own(self._dtype, end - begin)
            made.append(self._collecting(pieces, own))
        contributions[self._rank] = own
        accumulator = None if self._accumulator is None else self._accumulator[: end - begin]
        made += reducing(self._op, contributions, result, accumulator)
        if self._look is not None:
            made.append((self._look.look, (number, stretch, result)))
        made += [copying(result, place) for place in others]
        made += self._delivery.calls(result, pieces)
        return made
