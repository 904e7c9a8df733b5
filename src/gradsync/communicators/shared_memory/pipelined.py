"""The pipelined all-reduce of a large list of arrays over shared memory, chunk by chunk.

Each chunk is divided into one slice for each rank, which owns that slice. Every rank copies the slices that other ranks
own into its own slot in shared memory: it publishes them. Then every rank reduces the slice that it owns, and writes
the result into the slots of the other ranks, which copy it from there to their targets. So each rank reads and reduces
only 1/n of the list. (In measurements the all-reduce took a quarter longer if each rank instead copied the results from
the memory of their owner.)

This file has three parts. The first part makes the plan: it divides the list, as one flat sequence of elements, into
chunks, slices and steps. The second part turns the plan into NumPy calls. A call is prepared once and run many times,
because creating a view takes as long as copying some kilobytes. Pieces of arrays below some kilobytes are copied
together in one call. The third part contains the check for non-finite values and the all-reduce itself.
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
from gradsync.communicators.host_copy import (
    Piece,
    copy_words,
    cuts,
    line_bounds,
    memcpy_is_slow,
    pieces_between,
    word_dtype,
)
from gradsync.communicators.host_values import (
    Checks,
    NonFiniteFinder,
    SumOfSquares,
    finite_test,
    multiply_quietly,
    tables_of,
)
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

# Smaller pieces are copied together: a NumPy call takes as long as copying some kilobytes.
_WORTH_A_CALL_BYTES = 4096
# The number of bytes that one call reduces, and the next call divides, while they are in the cache.
_REDUCED_BYTES = 256 * 1024
# The number of bytes that one call copies into shared memory, on processors with a slow memcpy, such as Zen 3. Measured
# there: overwriting memory that other ranks have read (see arena.py) takes twice as long per byte in calls of twice
# this size, and four times as long in calls of four times this size. On a Xeon one call for a whole chunk is the
# fastest.
_PUBLISHED_BYTES = 128 * 1024
# The largest total size of small pieces that are copied together into a buffer and reduced there.
_GATHERED_BYTES = 128 * 1024


class Section(NamedTuple):
    """The elements [begin, end) of a chunk. The section consists of `pieces` of arrays, in this order."""

    begin: int
    end: int
    pieces: tuple[Piece, ...]


class Chunk(NamedTuple):
    """The work of one rank on one chunk, divided into sections that are each large enough to be worth a NumPy call.

    Attributes:
        own: the sections of the slice that this rank reduces.
        published: the sections of the slices that other ranks reduce; this rank copies them into shared memory.
        delivered: the sections of the same slices; this rank copies their results to the targets.
    """

    own: tuple[Section, ...]
    published: tuple[Section, ...]
    delivered: tuple[Section, ...]


class Lengths(NamedTuple):
    """The largest numbers of elements of chunks and sections.

    Attributes:
        chunk: the largest number of elements of a chunk.
        reduced: the largest number of elements of a section that consists of one piece and is reduced.
        published: the largest number of elements of a section that consists of one piece and is copied into shared
            memory.
        gathered: the largest number of elements of a section that consists of several small pieces.
    """

    chunk: int
    reduced: int
    published: int
    gathered: int


class Wait(enum.Enum):
    """How long a rank waits after a step."""

    AGREEMENT = "until all ranks have ended this step and compared digests"
    ALL = "until all ranks have ended this step"
    ALL_BEFORE = "until all ranks have ended the previous step"
    NOBODY = "no wait"


class Step(NamedTuple):
    """The chunks that a rank handles before it arrives at a round of the barrier.

    Attributes:
        delivered, published, reduced: the numbers of the chunks that the rank delivers, then publishes, then reduces.
        wait: how long the rank waits at the end of the step.
    """

    delivered: range
    published: range
    reduced: range
    wait: Wait


@lru_cache(maxsize=256)
def plan_stream(
    sizes: tuple[int, ...], lengths: Lengths, itemsize: int, rank: int, world_size: int
) -> tuple[Chunk, ...]:
    """Divides arrays of the given sizes into chunks, and each chunk into one slice for each rank.

    Args:
        sizes: the number of elements of each array, in order.
        lengths: the largest lengths of chunks and sections.
        itemsize: the number of bytes of an element. Slices begin on cache lines, so that no two ranks write into one
            line.
        rank: the rank whose chunks are returned.
        world_size: the number of ranks, and so of slices in a chunk.
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
    """Divides a section into sections that are each large enough for a NumPy call.

    Args:
        whole: the section to divide.
        itemsize: the number of bytes of an element.
        of_one: the largest number of elements of a section that consists of one piece.
        of_several: the largest number of elements of a section that consists of several pieces.
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
    """Yields the steps that all-reduce `count` chunks; `count` is at least 1.

    A chunk can be reduced when all ranks have published it, and delivered when all ranks have reduced it. A rank
    reduces a chunk two steps after it published the chunk, and delivers the results two steps later. So a rank can
    continue while another rank is still in the previous step; otherwise every short delay of one rank would delay all
    ranks. In the steps after the last chunk is published, each rank waits for all ranks.
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
# The dtypes whose memoryviews can be assigned directly. Arrays of other dtypes are assigned as bytes: integers of the
# same size may have different format letters, and memoryviews do not support complex numbers and bfloat16.
_FORMATS = frozenset("efd")
_assign: Callable[..., None] = setitem
_exhaust = deque[Any](maxlen=0).extend


def run_calls(calls: Iterable[Call]) -> None:
    """Runs the calls in their order."""
    for function, arguments in calls:
        function(*arguments)


def copying(source: Array, target: Array) -> Call:
    """Returns the call that copies a 1-D array, bit for bit, to a target of the same size and dtype."""
    word = word_dtype(source.dtype)
    return copy_words, (source.view(word), target.view(word))


def gathering(sources: Sequence[Array], packed: Array) -> Call:
    """Returns the call that copies small 1-D arrays, one after the other, into one array of their total size."""
    return np.concatenate, (sources, 0, packed)


def converting(source: Array, factor: float, target: Array) -> Call:
    """Returns the call that writes the products of a 1-D array and a factor to a target of the same size."""
    return multiply_quietly, (source, factor, target)


def collecting(sources: Sequence[Array], packed: Array, wire: Wire | None, scratch: Scratch) -> list[Call]:
    """Returns the calls that copy one array, or several small arrays, into one array, and convert them for exchange.

    Args:
        sources: the arrays to copy.
        packed: the array that gets the values.
        wire: the dtype and the factors for the values that ranks exchange; None if they exchange the values unchanged.
        scratch: the buffers of this process.
    """
    if wire is None:
        return [copying(sources[0], packed) if len(sources) == 1 else gathering(sources, packed)]
    if len(sources) == 1:
        return [converting(sources[0], wire.prescale, packed)]
    gathered = scratch.converted(sources[0].dtype, packed.size)
    return [gathering(sources, gathered), converting(gathered, wire.prescale, packed)]


def adding_squares(squares: SumOfSquares, values: Array, *, stays: bool) -> list[Call]:
    """Returns the function calls that add the squares of an array's elements to a sum.

    Args:
        squares: the sum to which the squares are added.
        values: the 1-D array.
        stays: whether the values remain unchanged until the sum is read.
    """
    tables = tables_of(values) if stays else []
    return [(squares.add_rows, (table,)) for table in tables] or [(squares.add, (values,))]


def scattering(packed: Array, targets: Sequence[Array]) -> Call:
    """Returns the call that splits a packed array into small 1-D arrays of the same total size.

    The call assigns memoryviews: for small arrays this takes half the time of assigning NumPy arrays.
    """
    whole, *memories = _memories([packed, *targets])
    places, begin = [], 0
    for memory in memories:
        end = begin + len(memory)
        places.append(whole[begin:end])
        begin = end
    return _scatter, (memories, places)


class CopyOut:
    """Prepares the calls that copy results from shared memory to the targets.

    Args:
        targets: the 1-D arrays that get the results.
        divisor: the number by which the results are divided, or 1. If the divisor is larger than 1, the results have
            the dtype of the targets.
        scratch: the buffers of this process.
        wire: the dtype of the results, and the factors for their conversion; None if the results have the targets'
            dtype.
    """

    def __init__(self, targets: Sequence[Array], divisor: int, scratch: Scratch, wire: Wire | None) -> None:
        self._targets = targets
        self._wire = wire
        self._divisor = divisor
        self._divides = divisor > 1
        self._scratch = scratch

    def calls(self, results: Array, pieces: Sequence[Piece]) -> list[Call]:
        """Returns the calls that copy `results` to one piece of the targets, or to several small pieces."""
        targets = [piece_of(self._targets, piece) for piece in pieces]
        if len(targets) == 1:
            return self._delivering(results, targets[0])
        if not self._divides and self._wire is None:
            return [scattering(results, targets)]
        together = self._scratch.converted(targets[0].dtype, results.size)
        return [*self._delivering(results, together), scattering(together, targets)]

    def delivered(self, results: Array, pieces: Sequence[Piece]) -> Array:
        """Returns one array with the values that the pieces get: the only piece, `results`, or a reused buffer."""
        if len(pieces) == 1:
            return piece_of(self._targets, pieces[0])
        if not self._divides and self._wire is None:
            return results
        return self._scratch.converted(self._targets[0].dtype, results.size)

    def _delivering(self, results: Array, target: Array) -> list[Call]:
        """Returns the calls that copy results to one array. If needed, they also divide and convert the results."""
        scale = 1.0 if self._wire is None else self._wire.postscale
        if self._divides:
            divided = division_call(results, self._divisor, target)
            return [divided] if scale == 1.0 else [divided, converting(target, scale, target)]
        return [copying(results, target) if self._wire is None else converting(results, scale, target)]


def piece_of(arrays: Sequence[Array], piece: Piece) -> Array:
    """Returns a piece of one of the arrays, or the array itself if the piece is the whole array."""
    array = arrays[piece.array]
    return array if piece.end - piece.begin == array.size else array[piece.begin : piece.end]


def _memories(arrays: Sequence[Array]) -> list[memoryview]:
    """Returns memoryviews of arrays of the same dtype: all memoryviews of elements, or all of bytes."""
    if arrays[0].dtype.char in _FORMATS:
        memories = [array.data for array in arrays]
        # The format is "<f" for NumPy arrays in ctypes memory, and "=f" for unaligned arrays.
        if all(memory.format in _FORMATS for memory in memories):
            return memories
    return [array.view(np.uint8).data for array in arrays]


def _scatter(memories: Sequence[memoryview], places: Sequence[memoryview]) -> None:
    _exhaust(map(_assign, memories, repeat(_EVERYTHING), places))  # a loop in C


#: [number of the slot][rank] -> whether that rank found a non-finite result in the chunk that uses the slot. A rank
#: resets its flag when all ranks have published the next chunk in this slot: by then they have delivered the old chunk.
Flags = Sequence[memoryview]


class ChunkCheck:
    """Checks the chunks of one list of arrays for non-finite values.

    Args:
        sources: this rank's arrays.
        chunk_elements: the number of elements of a chunk; the last chunk may be shorter.
        rank: the number of this rank in the communicator.
        is_finite: a function that returns whether all elements of an array are finite.
        flags: the flags of all ranks in shared memory.
        finder: the object that collects the non-finite values.
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

    def check_results(self, chunk: int, section: Section, results: Array) -> None:
        """Checks results that this rank has reduced.

        If a result is not finite, also checks this rank's contribution.
        """
        if not self._is_finite(results):
            self._flags_of(chunk)[self._rank] = True
            self._finder.note_nonfinite_result()
            self._check_own(chunk, [section])

    def check_contributions(self, chunk: int, sections: Sequence[Section]) -> None:
        """Checks this rank's contributions to a chunk if any rank has set its flag for the chunk."""
        if any(self._flags_of(chunk)):
            self._check_own(chunk, sections)

    def _flags_of(self, chunk: int) -> memoryview:
        return self._flags[chunk % len(self._flags)]

    def _check_own(self, chunk: int, sections: Sequence[Section]) -> None:
        for begin, _, pieces in sections:
            at = chunk * self._chunk_elements + begin
            for number, low, high in pieces:
                self._finder.check_contribution(self._rank, self._sources[number][low:high], at)
                at += high - low


# The calls of a step; the indices at which its first part and its second part end; and its wait.
_StepCalls = tuple[list[Call], tuple[int, int], Wait]


class PipelinedAllReduce:
    """The pipelined all-reduce of one list of arrays.

    Several chunks are in progress at once; each uses one slot of every rank (see plan_steps). A rank publishes a chunk
    in one of its slots only after it has copied the results of the earlier chunk out of that slot. Other ranks use the
    slot only between two barriers: the barrier after the chunk was published, and the barrier after it was reduced.

    Args:
        sources, targets: see Backend.all_reduce.
        op: the operator of the reduction, which the dtype must support.
        context: the communicator's barrier, rings and sizes.
        scratch: the buffers of this process.
        slots: the slots as arrays of the dtype that ranks exchange; a chunk fits into one slot.
        flags: the flags of all ranks for non-finite results.
        checks: the checks that the plan makes on the results.
        wire: the dtype and the factors for the values that ranks exchange; None if they exchange the values unchanged.
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
        # A mean is computed as a sum, which is divided while it is copied to the targets. This saves one pass over the
        # data. In half precision, one call adds and divides in float32, and rounds the result once.
        divides_late = op is ReduceOp.MEAN and accumulation_dtype(dtype) == dtype
        self._reduce = reduction_of(ReduceOp.SUM if divides_late else op, dtype, world_size)
        self._delivery = CopyOut(targets, world_size if divides_late else 1, scratch, wire)
        is_finite = finite_test(dtype) if Checks.NONFINITE in checks else None
        self._check: ChunkCheck | None = None
        if is_finite is not None:
            self._check = ChunkCheck(sources, lengths.chunk, rank, is_finite, flags, context.finder)
        self._squares = context.squares if Checks.SQUARES in checks else None
        self._kept: list[_StepCalls] | None = None

    def keep(self) -> None:
        """Prepares the calls of all steps now, so that all later runs use them."""
        self._kept = list(self._work_out())

    def run(self, agreement: Agreement) -> None:
        """All-reduces each source into its target."""
        with np.errstate(all="ignore"):  # only some ranks would raise errors; overflow and NaN are visible anyway
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
            barrier.agree(agreement)

    def _work_out(self) -> Iterator[_StepCalls]:
        for step in plan_steps(len(self._chunks)):
            yield *self._calls_of(step), step.wait

    def _calls_of(self, step: Step) -> tuple[list[Call], tuple[int, int]]:
        made: list[Call] = []
        for number in step.delivered:
            slot = self._slots[number % CHUNKS_IN_FLIGHT][self._rank]
            if self._check is not None:
                made.append((self._check.check_contributions, (number, self._chunks[number].delivered)))
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
            if self._check is not None:
                made.append((self._check.begin, (number,)))
            for section in self._chunks[number].own:
                made += self._reducing(number, section, slots)
        return made, (delivered, published)

    def _collecting(self, pieces: Sequence[Piece], packed: Array) -> list[Call]:
        return collecting([piece_of(self._sources, piece) for piece in pieces], packed, self._wire, self._scratch)

    def _reducing(self, number: int, section: Section, slots: Sequence[Array]) -> list[Call]:
        """Returns the calls that reduce a section, and copy the result to the peers' slots and to the targets."""
        begin, end, pieces = section
        made: list[Call] = []
        contributions = [slot[begin:end] for slot in slots]
        # The result is first written to the slot of rank 0 or rank 1: a reduction in rank order reads the contributions
        # of both before it writes the first result.
        result, *others = [contributions[peer] for peer in self._peers]
        if len(pieces) == 1 and self._wire is None:
            own = piece_of(self._sources, pieces[0])
        else:
            own = self._scratch.own(self._dtype, end - begin)
            made += self._collecting(pieces, own)
        contributions[self._rank] = own
        made.append((self._reduce, (contributions, result)))
        if self._check is not None:
            made.append((self._check.check_results, (number, section, result)))
        made += [copying(result, other) for other in others]
        made += self._delivery.calls(result, pieces)
        if self._squares is not None:
            delivered = self._delivery.delivered(result, pieces)
            made += adding_squares(self._squares, delivered, stays=len(pieces) == 1)
        return made
