"""How a list of arrays is cut into chunks and slices for the shared-memory stream, and when what is done to them.

Pure arithmetic. The list is taken as one flat sequence of elements. A chunk is what is published at a time; within a
chunk each rank owns one slice, which it reduces.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from gradsync.communicators.pieces import Piece, cuts, line_bounds, pieces_between

#: Chunks between their publication and the end of their delivery: as many slots has a rank.
CHUNKS_IN_FLIGHT = 4

# Below, pieces are gathered: a NumPy call costs as much as copying some kilobytes.
_WORTH_A_CALL_BYTES = 4096


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
