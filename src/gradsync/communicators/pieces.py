"""Cuts a list of arrays into pieces, as if it were one flat array: pure arithmetic.

For collectives that move many arrays together without first copying them into one array.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

CACHE_LINE_BYTES = 64


class Piece(NamedTuple):
    """Elements [begin, end) of the array with the number `array` in the list."""

    array: int
    begin: int
    end: int


def cuts(total: int, step: int) -> list[tuple[int, int]]:
    """Cuts `total` elements into sections [begin, end) of `step` elements; the last one may be shorter."""
    return [(begin, min(begin + step, total)) for begin in range(0, total, step)]


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


def line_bounds(total: int, itemsize: int, world_size: int) -> list[int]:
    """Divides `total` elements among the ranks: rank r has [bounds[r], bounds[r + 1]). No two share a cache line."""
    line = max(1, CACHE_LINE_BYTES // itemsize)
    return [min(total, -(-total * rank // world_size // line) * line) for rank in range(world_size)] + [total]


@lru_cache(maxsize=256)
def share_of(sizes: tuple[int, ...], itemsize: int, rank: int, world_size: int) -> tuple[Piece, ...]:
    """Returns one rank's share of the flat array; the shares of all ranks make up the whole.

    Args:
        sizes: elements of each array.
        itemsize: bytes of an element; shares begin on cache lines.
        rank, world_size: the rank, and the number of ranks.
    """
    bounds = line_bounds(sum(sizes), itemsize, world_size)
    return pieces_between(sizes, bounds[rank], bounds[rank + 1])


@lru_cache(maxsize=256)
def _starts(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return (0, *accumulate(sizes))[:-1]
