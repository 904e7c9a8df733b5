"""How a list of arrays is cut into chunks and slices for the shared-memory stream: pure arithmetic.

The list is taken as one flat sequence of elements. A chunk is what is in flight at a time; within a chunk each rank
owns one slice, which it reduces. A region names a stretch of a chunk and the pieces of arrays that lie in it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from gradsync.communicators.pieces import Piece, cuts, pieces_between

_CACHE_LINE_BYTES = 64


class Region(NamedTuple):
    """Elements [begin, end) of a chunk, and the pieces of arrays that lie there, in order."""

    begin: int
    end: int
    pieces: tuple[Piece, ...]


class Chunk(NamedTuple):
    """One step of the stream, as one rank sees it: its own slice, and the rest in at most two regions."""

    own: Region
    others: tuple[Region, ...]


@lru_cache(maxsize=256)
def plan_stream(
    sizes: tuple[int, ...], chunk_elements: int, itemsize: int, rank: int, world_size: int
) -> tuple[Chunk, ...]:
    """Cuts arrays of the given sizes into chunks, and each chunk into a slice for each rank.

    Args:
        sizes: elements of each array, in order.
        chunk_elements: elements of a chunk, at most.
        itemsize: bytes of an element; slices begin on cache lines, so that no two ranks write into one.
        rank: whose view of the chunks is wanted.
        world_size: number of slices in a chunk.
    """
    return tuple(
        _chunk(sizes, begin, end, itemsize, rank, world_size) for begin, end in cuts(sum(sizes), chunk_elements)
    )


def _chunk(sizes: tuple[int, ...], begin: int, end: int, itemsize: int, rank: int, world_size: int) -> Chunk:
    length = end - begin
    line = max(1, _CACHE_LINE_BYTES // itemsize)
    bounds = [min(length, -(-length * r // world_size // line) * line) for r in range(world_size)] + [length]
    low, high = bounds[rank], bounds[rank + 1]
    before, own, after = (
        Region(a, b, pieces_between(sizes, begin + a, begin + b)) for a, b in ((0, low), (low, high), (high, length))
    )
    return Chunk(own, tuple(region for region in (before, after) if region.begin < region.end))
