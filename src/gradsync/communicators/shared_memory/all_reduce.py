"""The all-reduce over shared memory.

An array or list of at most SMALL_BYTES is reduced in one shot. Every rank copies its values into its buffer in shared
memory. After one barrier, every rank reduces all values of all ranks.

A larger list is pipelined, chunk by chunk. Each chunk is divided into one slice for each rank; the rank owns its slice.
To publish a chunk, every rank copies the slices that other ranks own into its own buffer in shared memory. Then every
rank reduces the slice that it owns, and writes the result into the buffers of the other ranks. To deliver a chunk,
every rank copies the results from its own buffer to its targets. So each rank reduces only 1/n of the list. (In
measurements the all-reduce took a quarter longer if each rank copied the results from the buffers of other ranks.)

This file has three parts. The first part makes the plan of the pipeline: it divides the list, as one flat sequence of
elements, into chunks, slices and steps. The second part has the NumPy calls that copy. A call can be prepared once and
run many times, because creating a view takes as long as copying some kilobytes. Pieces of arrays below some kilobytes
are copied together in one call. The third part has the plans: OneShot for one small array, ListAllReduce for a list.

Reductions combine the operands in rank order. So all ranks get bitwise equal results, and equal inputs give bitwise
equal results in every run. The result of an element does not depend on the size of the array. Products of complex
numbers are an exception, because NumPy rounds these products differently in vector and scalar code.
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
    publish_words,
    word_dtype,
)
from gradsync.communicators.shared_memory.arena import CHUNKS_IN_FLIGHT, ROUND_SLOTS, ShmContext
from gradsync.diagnostics import trace
from gradsync.reduction import Array, Call, ReduceOp, accumulation_dtype, division_call, reduction_of

#: The largest array or list that is all-reduced in one shot: after one barrier, every rank reduces the whole array. In
#: the pipeline each rank reduces only a share of the array, but waits at more barriers. Up to this size the one shot is
#: faster.
SMALL_BYTES = 128 * 1024
# Up to this size NumPy's assignment is as fast as a ufunc; see host_copy.py.
_ASSIGN_UP_TO_BYTES = 4096
# Smaller pieces are copied together: a NumPy call takes as long as copying some kilobytes.
_WORTH_A_CALL_BYTES = 4096
# The number of bytes that one call reduces. The next calls copy or divide the same bytes while they are in the cache.
_REDUCED_BYTES = 256 * 1024
# The number of bytes that one call copies into shared memory, on processors with a slow memcpy, such as Zen 3. On such
# a processor, a call of twice this size takes twice as long per byte to overwrite memory that other ranks have read
# (see arena.py). A call of four times this size takes four times as long per byte. On a Xeon one call for a whole chunk
# is the fastest.
_PUBLISHED_BYTES = 128 * 1024
# The largest total size of small pieces that the pipeline copies together.
_GATHERED_BYTES = 128 * 1024


class Section(NamedTuple):
    """The elements [begin, end) of a chunk. The section consists of `pieces` of arrays, in this order."""

    begin: int
    end: int
    pieces: tuple[Piece, ...]


class Chunk(NamedTuple):
    """The work of one rank on one chunk, divided into sections; see worth_a_call.

    Attributes:
        own: the sections of the slice that this rank reduces.
        others: the sections of the slices that other ranks reduce. This rank copies the sections into shared memory,
            and copies their results to the targets.
    """

    own: tuple[Section, ...]
    others: tuple[Section, ...]


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
        world_size: the number of ranks, which is also the number of slices of a chunk.
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
        chunks.append(Chunk(cut([own], lengths.reduced), cut([before, after], lengths.published)))
    return tuple(chunks)


def worth_a_call(whole: Section, itemsize: int, of_one: int, of_several: int) -> Iterator[Section]:
    """Divides a section into sections for one NumPy call each: a part of one large piece, or successive small pieces.

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

    A rank can reduce a chunk when all ranks have published the chunk, and deliver the chunk when all ranks have reduced
    it. A rank reduces a chunk two steps after publishing the chunk, and delivers the results two steps later. So a rank
    can continue while another rank is still in the previous step; otherwise every short delay of one rank would delay
    all ranks. The end is shorter: after the step that publishes the last chunk, each rank waits for all ranks, and
    reduces all remaining chunks in the next step. Then each rank waits again, and delivers the remaining results.
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


# -- Copies --------------------------------------------------------------------------------------------------------

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


def _pieces_of(arrays: Sequence[Array], pieces: Sequence[Piece]) -> list[Array]:
    """Returns pieces of arrays. A piece that is a whole array is this array itself."""
    wholes = [(arrays[number], begin, end) for number, begin, end in pieces]
    return [array if end - begin == array.size else array[begin:end] for array, begin, end in wholes]


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


# -- Plans ---------------------------------------------------------------------------------------------------------


class Plan:
    """Base class of plans. A plan is a collective for arrays of given sizes, which can run many times."""

    def release(self) -> None:
        """Drops the plan's references to the shared memory; the plan cannot run any more."""
        self.__dict__.clear()


class OneShot(Plan):
    """The plan of the all-reduce of one small array.

    Args:
        context: the memory and objects that all collectives of the communicator use.
        dtype, size, op: the dtype of the array, the number of its elements, and the operator of the reduction.
    """

    def __init__(self, context: ShmContext, dtype: np.dtype[Any], size: int, op: ReduceOp) -> None:
        self._barrier = context.barrier
        self._rank = context.rank
        self._quietly = context.quietly
        self._reduce = reduction_of(op, dtype, context.world_size)
        self._word = word_dtype(dtype)
        self._slots = [[buffer[:size] for buffer in slot] for slot in context.round_slots(dtype)]
        self._own_words = [slot[context.rank].view(self._word) for slot in self._slots]
        self._assigns = size * dtype.itemsize <= _ASSIGN_UP_TO_BYTES or self._word == dtype

    def run(self, source: Array, target: Array, agreement: Agreement) -> None:
        """All-reduces the source into the target, which may be the same array."""
        if source.ndim != 1:
            is_in_place = source is target
            source = source.ravel()
            target = source if is_in_place else target.ravel()
        number = self._barrier.round % ROUND_SLOTS
        contributions = self._slots[number]
        if self._assigns:
            contributions[self._rank][...] = source
        else:
            publish_words(source.view(self._word), self._own_words[number])
        self._barrier.agree(agreement)
        self._quietly(self._reduce, contributions, target)


#: The calls of a step, by the names of their phases in a trace, and the wait at the end of the step.
_StepCalls = tuple[list[tuple[str, list[Call]]], Wait]


class ListAllReduce(Plan):
    """The all-reduce of one list of arrays: in one shot if the list is small, otherwise pipelined.

    In the pipeline several chunks are in progress at once; each chunk uses one slot (see plan_steps). A rank publishes
    a chunk in its buffer of a slot only after it has copied the results of the earlier chunk out of that buffer. Other
    ranks use the buffer only between two barriers: the barrier after the chunk was published, and the barrier after the
    chunk was reduced.

    The kept calls never refer to this object. Otherwise, because of the reference cycle, arrays that the program has
    dropped would stay in memory until the next garbage collection.

    Args:
        context: the memory and objects that all collectives of the communicator use.
        sources, targets: see Backend.all_reduce.
        op: the operator of the reduction, which the dtype must support.
    """

    def __init__(
        self,
        context: ShmContext,
        sources: Sequence[Array],
        targets: Sequence[Array],
        op: ReduceOp,
    ) -> None:
        self._context = context
        self._barrier = context.barrier
        self._rank = context.rank
        self._sources = sources
        self._targets = targets
        self._dtype = dtype = sources[0].dtype
        self._sizes = sizes = tuple([source.size for source in sources])
        self._size = sum(sizes)
        self._is_one_shot = self._size * dtype.itemsize <= SMALL_BYTES
        # In the pipeline a mean is computed as a sum, which is divided while it is copied to the targets. This saves
        # one pass over the data. In half precision, one call adds and divides in float32, and rounds only once.
        divides_late = op is ReduceOp.MEAN and accumulation_dtype(dtype) == dtype and not self._is_one_shot
        self._divisor = context.world_size if divides_late else 1
        self._reduce = reduction_of(ReduceOp.SUM if divides_late else op, dtype, context.world_size)
        published_bytes = _PUBLISHED_BYTES if memcpy_is_slow() else context.chunk_bytes
        bytes_at_a_time = context.chunk_bytes, _REDUCED_BYTES, published_bytes, _GATHERED_BYTES
        self._lengths = Lengths(*[size_bytes // dtype.itemsize for size_bytes in bytes_at_a_time])
        self._kept: list[list[_StepCalls]] = []

    def keep(self) -> None:
        """Prepares the calls of all steps now. All later runs use these calls."""
        self._kept = [list(self._steps(number)) for number in range(ROUND_SLOTS if self._is_one_shot else 1)]

    def run(self, agreement: Agreement) -> None:
        """All-reduces each source into its target."""
        number = self._barrier.round % ROUND_SLOTS if self._is_one_shot else 0
        end_phase = trace.phases_of(self._context.recorder)
        quietly = self._context.quietly
        for phases, wait in self._kept[number] if self._kept else self._steps(number):
            for phase, calls in phases:
                quietly(run_calls, calls)
                end_phase(phase)
            self._wait(wait, agreement)
            if wait is not Wait.NOBODY:
                end_phase("waiting")

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

    def _steps(self, number: int) -> Iterator[_StepCalls]:
        """Yields the calls of all steps. If the list is reduced in one shot, its round uses the slot `number`."""
        if self._is_one_shot:
            yield from self._one_shot(
                [buffer[: self._size] for buffer in self._context.round_slots(self._dtype)[number]]
            )
            return
        chunks = plan_stream(self._sizes, self._lengths, self._dtype.itemsize, self._rank, self._context.world_size)
        for step in plan_steps(len(chunks)):
            phases = {
                "splitting": [call for number in step.delivered for call in self._delivering(number, chunks[number])],
                "packing": [call for number in step.published for call in self._publishing(number, chunks[number])],
                "reducing": [call for number in step.reduced for call in self._reducing(number, chunks[number])],
            }
            yield [(phase, calls) for phase, calls in phases.items() if calls], step.wait

    def _one_shot(self, contributions: Sequence[Array]) -> Iterator[_StepCalls]:
        """Yields the calls of the two steps of an all-reduce in one shot."""
        is_packed = len(self._targets) > 1
        result = self._context.buffer("result", self._dtype, self._size) if is_packed else self._targets[0]
        whole = Section(0, self._size, pieces_between(self._sizes, 0, self._size))
        published: list[Call] = []
        delivered: list[Call] = []
        for begin, end, pieces in worth_a_call(whole, self._dtype.itemsize, self._size, self._size):
            published.append(self._collecting(pieces, contributions[self._rank][begin:end]))
            if is_packed:
                delivered += self._copying_out(result[begin:end], pieces)
        reduced: list[Call] = [(self._reduce, (contributions, result))]
        yield [("packing", published)], Wait.AGREEMENT
        yield [("reducing", reduced), ("splitting", delivered)], Wait.NOBODY

    # -- The pipeline: each chunk is published, reduced, and delivered -----------------------------------------

    def _publishing(self, number: int, chunk: Chunk) -> list[Call]:
        own = self._buffers(number)[self._rank]
        return [self._collecting(pieces, own[begin:end]) for begin, end, pieces in chunk.others]

    def _reducing(self, number: int, chunk: Chunk) -> list[Call]:
        return [call for section in chunk.own for call in self._reducing_section(number, section)]

    def _reducing_section(self, number: int, section: Section) -> list[Call]:
        """Returns the calls that reduce a section, and copy the result to the other ranks and to the targets."""
        begin, end, pieces = section
        calls: list[Call] = []
        contributions = [buffer[begin:end] for buffer in self._buffers(number)]
        # The result is first written to the buffer of rank 0 or rank 1. A reduction in rank order reads the
        # contributions of both ranks before it writes the first result.
        result, *others = contributions[: self._rank] + contributions[self._rank + 1 :]
        if len(pieces) == 1:
            [own] = _pieces_of(self._sources, pieces)
        else:
            own = self._context.buffer("own", self._dtype, end - begin)
            calls.append(self._collecting(pieces, own))
        contributions[self._rank] = own
        calls.append((self._reduce, (contributions, result)))
        calls += [copying(result, other) for other in others]
        return calls + self._copying_out(result, pieces)

    def _delivering(self, number: int, chunk: Chunk) -> list[Call]:
        own = self._buffers(number)[self._rank]
        return [call for begin, end, pieces in chunk.others for call in self._copying_out(own[begin:end], pieces)]

    def _buffers(self, chunk: int) -> Sequence[Array]:
        """Returns the buffers of all ranks in the slot that a chunk uses."""
        return self._context.slots(self._dtype)[chunk % CHUNKS_IN_FLIGHT]

    # -- From the sources, and to the targets ------------------------------------------------------------------

    def _collecting(self, pieces: Sequence[Piece], packed: Array) -> Call:
        """Returns the call that copies one piece, or several small pieces, to one array."""
        sources = _pieces_of(self._sources, pieces)
        return copying(sources[0], packed) if len(sources) == 1 else gathering(sources, packed)

    def _copying_out(self, results: Array, pieces: Sequence[Piece]) -> list[Call]:
        """Returns the calls that copy results to one piece of the targets, or to several small pieces."""
        delivered = self._delivered(results, pieces)
        calls: list[Call] = []
        if self._divisor > 1:
            calls.append(division_call(results, self._divisor, delivered))
        elif results is not delivered:
            calls.append(copying(results, delivered))
        return calls if len(pieces) == 1 else [*calls, scattering(delivered, _pieces_of(self._targets, pieces))]

    def _delivered(self, results: Array, pieces: Sequence[Piece]) -> Array:
        """Returns the array for quotients: the only piece, a buffer, or `results` if nothing is divided."""
        if len(pieces) == 1:
            return _pieces_of(self._targets, pieces)[0]
        if self._divisor == 1:
            return results
        return self._context.buffer("divided", self._dtype, results.size)
