"""The pipelined all-reduce of a large list over shared memory: chunk by chunk.

Each chunk is divided into one slice for each rank, its owner. Every rank publishes the slices of the other owners,
reduces its own slice, and writes the result back into the others' slots, from which they copy it. So each rank reads
and reduces 1/n of the list. (If the others copied the results from the owner's memory, the all-reduce took a quarter
longer.)

The file has three parts. First the plan: the list is cut, as one flat sequence of elements, into chunks, slices and
steps, by pure arithmetic. Then NumPy calls that are made once and run many times, because making a view takes as long
as copying some kilobytes. Pieces below some kilobytes are copied together, because a call for each would take longer
than the copy. Then the check for non-finite values, and the all-reduce itself.
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
from gradsync.communicators.host_values import SumOfSquares, finite_test, multiply_quietly, tables_of
from gradsync.communicators.nonfinite import Checks, NonFiniteFinder
from gradsync.communicators.pieces import Piece, cuts, line_bounds, pieces_between
from gradsync.communicators.shared_memory.arena import CHUNKS_IN_FLIGHT, Scratch, ShmContext, SlotArrays
from gradsync.diagnostics import tracing
from gradsync.reduction import (
    Array,
    Call,
    ReduceOp,
    Wire,
    accumulation_dtype,
    division_call,
    reduction_of,
)

# Smaller pieces are gathered: a NumPy call takes as long as copying some kilobytes.
_WORTH_A_CALL_BYTES = 4096
# The size that is reduced, and then divided, while it stays in the cache.
_REDUCED_BYTES = 256 * 1024
# The size of one copy into shared memory on processors with a slow memcpy, such as Zen 3. Measured there: while it is
# slow to overwrite memory that others have read (see arena.py), calls of twice the size take twice as long for the same
# bytes, and calls of four times the size four times as long. On a Xeon one call for a whole chunk is the fastest.
_PUBLISHED_BYTES = 128 * 1024
# The size of small pieces that are gathered, and then reduced, divided and scattered together.
_GATHERED_BYTES = 128 * 1024


class Section(NamedTuple):
    """Elements [begin, end) of a chunk, and the pieces of arrays that they consist of, in order."""

    begin: int
    end: int
    pieces: tuple[Piece, ...]


class Chunk(NamedTuple):
    """One chunk for one rank, cut into sections that are each worth a NumPy call.

    Attributes:
        own: the slice that this rank reduces.
        published, delivered: all other slices, cut for the two copies.
    """

    own: tuple[Section, ...]
    published: tuple[Section, ...]
    delivered: tuple[Section, ...]


class Lengths(NamedTuple):
    """The largest sizes of chunks and sections, in elements.

    Attributes:
        chunk: the size of a chunk.
        reduced, published: the size of a section of one piece, when it is reduced and when it is published.
        gathered: the size of a section of several small pieces.
    """

    chunk: int
    reduced: int
    published: int
    gathered: int


class Wait(enum.Enum):
    """The wait of a rank after a step."""

    AGREEMENT = "all ranks, with a comparison of digests"
    ALL = "all ranks"
    ALL_BEFORE = "all ranks to have ended the step before"
    NOBODY = "no wait"


class Step(NamedTuple):
    """The chunks that a rank handles before it arrives at a round of the barrier.

    Attributes:
        delivered, published, reduced: numbers of chunks, handled in this order.
        wait: the wait at the end of the step.
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
        lengths: the sizes of chunks and sections.
        itemsize: bytes of an element; slices begin on cache lines, so that no two ranks write into one line.
        rank: the rank whose chunks are returned.
        world_size: number of slices in a chunk.
    """

    def cut(whole: list[Section], of_one: int) -> tuple[Section, ...]:
        return tuple(part for one in whole for part in worth_a_call(one, itemsize, of_one, lengths.gathered))

    chunks = []
    for begin, end in cuts(sum(sizes), lengths.chunk):
        length = end - begin
        low, high = line_bounds(length, itemsize, world_size)[rank : rank + 2]
        before, own, after = (
            Section(a, b, pieces_between(sizes, begin + a, begin + b))
            for a, b in ((0, low), (low, high), (high, length))
        )
        others = [before, after]
        chunks.append(Chunk(cut([own], lengths.reduced), cut(others, lengths.published), cut(others, length)))
    return tuple(chunks)


def worth_a_call(whole: Section, itemsize: int, of_one: int, of_several: int) -> Iterator[Section]:
    """Cuts a section into sections that are each worth a NumPy call.

    Args:
        whole: the section.
        itemsize: bytes of an element.
        of_one, of_several: the largest number of elements of a section of one piece, and of several.
    """
    begin = end = whole.begin
    together: list[Piece] = []
    for piece in whole.pieces:
        size = piece.end - piece.begin
        is_small = size * itemsize < _WORTH_A_CALL_BYTES
        if together and not (is_small and end - begin + size <= of_several):
            yield Section(begin, end, tuple(together))
            begin, together = end, []
        end += size
        if is_small:
            together.append(piece)
            continue
        for low, high in cuts(size, of_one):
            yield Section(begin + low, begin + high, (Piece(piece.array, piece.begin + low, piece.begin + high),))
        begin = end
    if together:
        yield Section(begin, end, tuple(together))


def plan_steps(count: int) -> Iterator[Step]:
    """Yields the steps for `count` chunks, at least one.

    A chunk is reduced when all ranks have published it, and delivered when all have reduced it. Each of these actions
    comes two steps after the one before. So a rank can go on while another rank is still in the step before; otherwise
    every short delay of any rank would delay all. After the last chunk is published, the remaining steps wait for all
    ranks.
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


_EVERYTHING = slice(None)
# Dtypes whose memoryviews can be assigned directly. Others are assigned as bytes: integers of one size have several
# format letters, and memoryviews do not support complex numbers and bfloat16.
_FORMATS = frozenset("efd")
_assign: Callable[..., None] = setitem
_exhaust = deque[Any](maxlen=0).extend


def run_calls(calls: Iterable[Call]) -> None:
    """Runs the calls in their order."""
    for function, arguments in calls:
        function(*arguments)


def copying(source: Array, target: Array) -> Call:
    """Returns the call that copies a 1-D array into another of its size and dtype, bit for bit."""
    word = word_dtype(source.dtype)
    return copy_words, (source.view(word), target.view(word))


def gathering(sources: Sequence[Array], packed: Array) -> Call:
    """Returns the call that copies small 1-D arrays one after the other into an array of their total size."""
    return np.concatenate, (sources, 0, packed)


def converting(source: Array, factor: float, target: Array) -> Call:
    """Returns the call that multiplies a 1-D array into another one of its size, which may have another dtype."""
    return multiply_quietly, (source, factor, target)


def collecting(sources: Sequence[Array], place: Array, wire: Wire | None, scratch: Scratch) -> list[Call]:
    """Returns the calls that copy one array, or several small ones, to a place, in the form in which they travel."""
    if wire is None:
        return [copying(sources[0], place) if len(sources) == 1 else gathering(sources, place)]
    if len(sources) == 1:
        return [converting(sources[0], wire.prescale, place)]
    gathered = scratch.converted(sources[0].dtype, place.size)
    return [gathering(sources, gathered), converting(gathered, wire.prescale, place)]


def adding_squares(squares: SumOfSquares, values: Array, *, stays: bool) -> list[Call]:
    """Returns the calls that add the squares of a flat array.

    Args:
        squares: gets the squares.
        values: flat array.
        stays: whether the values stay unchanged until the sum is taken.
    """
    tables = tables_of(values) if stays else []
    return [(squares.add_rows, (table,)) for table in tables] or [(squares.add, (values,))]


def scattering(packed: Array, targets: Sequence[Array]) -> Call:
    """Returns the call that copies a packed array into small 1-D arrays of the same total size.

    It uses memoryviews, which take half the time of NumPy for small arrays.
    """
    whole, *memories = _memories([packed, *targets])
    places, begin = [], 0
    for memory in memories:
        end = begin + len(memory)
        places.append(whole[begin:end])
        begin = end
    return _scatter, (memories, places)


class CopyOut:
    """Copies results from shared memory to the targets.

    Args:
        targets: 1-D arrays.
        divisor: the results are divided by it; 1 copies bit for bit. If it is larger, results have the targets' dtype.
        scratch: private memory.
        wire: the form of the results; None: that of the targets.
    """

    def __init__(self, targets: Sequence[Array], divisor: int, scratch: Scratch, wire: Wire | None) -> None:
        self._targets = targets
        self._wire = wire
        self._divisor = divisor
        self._divides = divisor > 1
        self._scratch = scratch

    def calls(self, place: Array, pieces: Sequence[Piece]) -> list[Call]:
        """Returns the calls that copy the results in `place` to one piece of the targets, or several small pieces."""
        targets = [piece_of(self._targets, piece) for piece in pieces]
        if len(targets) == 1:
            return self._delivering(place, targets[0])
        if not self._divides and self._wire is None:
            return [scattering(place, targets)]
        together = self._scratch.converted(targets[0].dtype, place.size)
        return [*self._delivering(place, together), scattering(together, targets)]

    def delivered(self, place: Array, pieces: Sequence[Piece]) -> Array:
        """Returns one array with the values that `calls` copies: a piece of a target, or an array that is reused."""
        if len(pieces) == 1:
            return piece_of(self._targets, pieces[0])
        if not self._divides and self._wire is None:
            return place
        return self._scratch.converted(self._targets[0].dtype, place.size)

    def _delivering(self, place: Array, target: Array) -> list[Call]:
        """Returns the calls that divide the results into an array, convert them, or only copy them."""
        scale = 1.0 if self._wire is None else self._wire.postscale
        if self._divides:
            divided = division_call(place, self._divisor, target)
            return [divided] if scale == 1.0 else [divided, converting(target, scale, target)]
        return [copying(place, target) if self._wire is None else converting(place, scale, target)]


def piece_of(arrays: Sequence[Array], piece: Piece) -> Array:
    """Returns a piece of one of the arrays; the array itself if the piece is all of it."""
    array = arrays[piece.array]
    return array if piece.end - piece.begin == array.size else array[piece.begin : piece.end]


def _memories(arrays: Sequence[Array]) -> list[memoryview]:
    """Returns the memory of arrays of one dtype, all as elements or all as bytes."""
    if arrays[0].dtype.char in _FORMATS:
        memories = [array.data for array in arrays]
        # NumPy arrays over ctypes arrays have the format "<f", and unaligned arrays "=f".
        if all(memory.format in _FORMATS for memory in memories):
            return memories
    return [array.view(np.uint8).data for array in arrays]


def _scatter(memories: Sequence[memoryview], places: Sequence[memoryview]) -> None:
    _exhaust(map(_assign, memories, repeat(_EVERYTHING), places))  # a loop in C


#: [number of a slot][rank] -> whether the rank's results for the chunk in this slot are not all finite. The rank resets
#: its flag when all have published the next chunk in this slot, and so have delivered this one.
Flags = Sequence[memoryview]


class ChunkCheck:
    """Checks the chunks of one list of arrays for non-finite values.

    Args:
        sources: this rank's arrays.
        chunk_elements: size of a chunk; the last one may be shorter.
        rank: this rank.
        is_finite: returns whether all elements of an array are finite.
        flags: flags in shared memory.
        finder: collects the non-finite values.
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
        """Resets this rank's flag for a chunk."""
        self._flags_of(chunk)[self._rank] = False

    def look(self, chunk: int, section: Section, results: Array) -> None:
        """Checks this rank's results before their delivery; if they are not finite, checks this rank's values too."""
        if not self._is_finite(results):
            self._flags_of(chunk)[self._rank] = True
            self._finder.note_nonfinite_result()
            self._look_at_own(chunk, [section])

    def look_before_delivery(self, chunk: int, sections: Sequence[Section]) -> None:
        """Checks this rank's own values if any rank's flag for the chunk is set."""
        if any(self._flags_of(chunk)):
            self._look_at_own(chunk, sections)

    def _flags_of(self, chunk: int) -> memoryview:
        return self._flags[chunk % len(self._flags)]

    def _look_at_own(self, chunk: int, sections: Sequence[Section]) -> None:
        for begin, _, pieces in sections:
            at = chunk * self._chunk_elements + begin
            for number, low, high in pieces:
                self._finder.check_contribution(self._rank, self._sources[number][low:high], at)
                at += high - low


# The calls of a step, the ends of its first two parts, and its wait.
_StepCalls = tuple[list[Call], tuple[int, int], Wait]


class PipelinedAllReduce:
    """The pipelined all-reduce of one list of arrays.

    Several chunks are in flight, each in one slot; see plan_steps. A rank publishes a chunk into one of its slots only
    after it has copied the results of the earlier chunk out of that slot. Other ranks use the slot only between two
    barriers: the one after the chunk was published, and the one after they have reduced it.

    Args:
        sources, targets: see Backend.all_reduce.
        op: an operator that the dtype supports.
        context: this rank's context.
        scratch: private memory.
        slots: the slots as arrays of the dtype in which values travel; a chunk fits one slot.
        flags: the ranks' flags for non-finite results.
        checks: the checks of the results.
        wire: the form in which values travel; None: that of the sources.
    """

    def __init__(
        self,
        sources: Sequence[Array],
        targets: Sequence[Array],
        op: ReduceOp,
        context: ShmContext,
        scratch: Scratch,
        slots: SlotArrays,
        flags: Flags,
        checks: Checks = Checks.NONE,
        wire: Wire | None = None,
    ) -> None:
        self._sources = sources
        self._wire = wire
        self._barrier = context.barrier
        self._recorder = context.recorder
        self._rank = rank = context.rank
        world_size = context.world_size
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self._scratch = scratch
        self._slots = slots
        self._dtype = dtype = sources[0].dtype if wire is None else wire.dtype
        itemsize = dtype.itemsize
        sizes = tuple([source.size for source in sources])
        published_bytes = _PUBLISHED_BYTES if memcpy_is_slow() else context.chunk_bytes
        bytes_at_a_time = context.chunk_bytes, _REDUCED_BYTES, published_bytes, _GATHERED_BYTES
        lengths = Lengths(*[size_bytes // itemsize for size_bytes in bytes_at_a_time])
        self._chunks = plan_stream(sizes, lengths, itemsize, rank, world_size)
        # A mean is a sum that is divided while it is copied to the targets, which saves a pass over the data. Half
        # precision is divided together with the sum, in float32.
        divides_late = op is ReduceOp.MEAN and accumulation_dtype(dtype) == dtype
        self._reduce = reduction_of(ReduceOp.SUM if divides_late else op, dtype, world_size)
        self._delivery = CopyOut(targets, world_size if divides_late else 1, scratch, wire)
        is_finite = finite_test(dtype) if Checks.NONFINITE in checks else None
        self._look: ChunkCheck | None = None
        if is_finite is not None:
            self._look = ChunkCheck(sources, lengths.chunk, rank, is_finite, flags, context.finder)
        self._squares = context.squares if Checks.SQUARES in checks else None
        self._kept: list[_StepCalls] | None = None

    def keep(self) -> None:
        """Makes the calls of all steps, for all runs."""
        self._kept = list(self._work_out())

    def run(self, agreement: Agreement) -> None:
        """Reduces each source into its target."""
        with np.errstate(all="ignore"):  # errors would be raised on some ranks only; overflow and NaN show in results
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
                made += self._collecting(pieces, slot[begin:end])
        published = len(made)
        for number in step.reduced:
            slots = self._slots[number % CHUNKS_IN_FLIGHT]
            if self._look is not None:
                made.append((self._look.begin, (number,)))
            for section in self._chunks[number].own:
                made += self._reducing(number, section, slots)
        return made, (delivered, published)

    def _collecting(self, pieces: Sequence[Piece], place: Array) -> list[Call]:
        return collecting([piece_of(self._sources, piece) for piece in pieces], place, self._wire, self._scratch)

    def _reducing(self, number: int, section: Section, slots: Sequence[Array]) -> list[Call]:
        """Returns the calls that reduce a section into the slot of every peer, and deliver the result on this rank."""
        begin, end, pieces = section
        made: list[Call] = []
        contributions = [slot[begin:end] for slot in slots]
        # The result goes to the slot of rank 0 or rank 1: a reduction in rank order reads their contributions before it
        # writes the first result.
        result, *others = [contributions[peer] for peer in self._peers]
        if len(pieces) == 1 and self._wire is None:
            own = piece_of(self._sources, pieces[0])
        else:
            own = self._scratch.own(self._dtype, end - begin)
            made += self._collecting(pieces, own)
        contributions[self._rank] = own
        made.append((self._reduce, (contributions, result)))
        if self._look is not None:
            made.append((self._look.look, (number, section, result)))
        made += [copying(result, place) for place in others]
        made += self._delivery.calls(result, pieces)
        if self._squares is not None:
            delivered = self._delivery.delivered(result, pieces)
            made += adding_squares(self._squares, delivered, stays=len(pieces) == 1)
        return made
