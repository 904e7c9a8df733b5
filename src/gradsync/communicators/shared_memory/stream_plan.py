"""How a list of arrays is cut into chunks and slices for the shared-memory stream: pure arithmetic.

The list is taken as one flat sequence of elements. A chunk is what is in flight at a time; within a chunk each rank
owns one slice, which it reduces. A region names a stretch of a chunk and the pieces of arrays that lie in it.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

_CACHE_LINE_BYTES = 64


class Piece(NamedTuple):
    """Elements [begin, end) of one array."""

    array: int
    begin: int
    end: int


class Region(NamedTuple):
    """Elements [begin, end) of a chunk, and the pieces of arrays that lie there, in order."""

    begin: int
    end: int
    pieces: tuple[Piece, ...]


Chunk = tuple[Region, ...]  # one step of the stream: the slice of each rank


@lru_cache(maxsize=256)
def plan_stream(sizes: tuple[int, ...], chunk_elements: int, itemsize: int, world_size: int) -> tuple[Chunk, ...]:
    """Cuts arrays of the given sizes into chunks, and each chunk into a slice for each rank.

    Args:
        sizes: elements of each array, in order.
        chunk_elements: elements of a chunk, at most.
        itemsize: bytes of an element; slices begin on cache lines, so that no two ranks write into one.
        world_size: number of slices in a chunk.
    """
    total = sum(sizes)
    return tuple(
        _chunk(sizes, begin, min(begin + chunk_elements, total), itemsize, world_size)
        for begin in range(0, total, chunk_elements)
    )


def _chunk(sizes: tuple[int, ...], begin: int, end: int, itemsize: int, world_size: int) -> Chunk:
    length = end - begin
    line = max(1, _CACHE_LINE_BYTES // itemsize)
    bounds = [min(length, -(-length * r // world_size // line) * line) for r in range(world_size)] + [length]
    return tuple(Region(low, high, pieces_between(sizes, begin + low, begin + high)) for low, high in pairwise(bounds))


def pieces_between(sizes: tuple[int, ...], begin: int, end: int) -> tuple[Piece, ...]:
    """Returns the pieces of arrays that make up elements [begin, end) of the flat sequence."""
    starts = _starts(sizes)
    pieces = []
    array = max(bisect_right(starts, begin) - 1, 0)
    while array < len(sizes) and starts[array] < end:
        low, high = max(begin - starts[array], 0), min(end - starts[array], sizes[array])
        if low < high:
            pieces.append(Piece(array, low, high))
        array += 1
    return tuple(pieces)


@lru_cache(maxsize=256)
def _starts(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return (0, *accumulate(sizes))[:-1]
