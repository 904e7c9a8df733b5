"""Arithmetic that cuts a list of arrays into pieces, as if the list were one flat array.

The functions are for collectives that move many arrays together without first copying them to one array. No function in
this file reads or writes an array.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

CACHE_LINE_BYTES = 64


class Piece(NamedTuple):
    """The elements [begin, end) of the array that has the index `array` in the list."""

    array: int
    begin: int
    end: int


def cuts(total: int, step: int) -> list[tuple[int, int]]:
    """Cuts `total` elements into sections [begin, end) of `step` elements. The last section may be shorter."""
    return [(begin, min(begin + step, total)) for begin in range(0, total, step)]


def pieces_between(sizes: tuple[int, ...], begin: int, end: int) -> tuple[Piece, ...]:
    """Returns the pieces that together are the elements [begin, end) of the flat array.

    Args:
        sizes: the number of elements of each array in the list.
        begin: the index of the first element in the flat array.
        end: the index after the last element in the flat array.
    """
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
    """Divides `total` elements among the ranks, so that no two ranks share a cache line.

    Returns:
        The bounds of the ranks' parts: rank r has the elements [bounds[r], bounds[r + 1]).
    """
    line = max(1, CACHE_LINE_BYTES // itemsize)
    return [min(total, -(-total * rank // world_size // line) * line) for rank in range(world_size)] + [total]


@lru_cache(maxsize=256)
def share_of(sizes: tuple[int, ...], itemsize: int, rank: int, world_size: int) -> tuple[Piece, ...]:
    """Returns the pieces that are one rank's share of the flat array. The shares of all ranks make up the whole array.

    Args:
        sizes: the number of elements of each array in the list.
        itemsize: the size of an element in bytes. The array is divided only at the borders of cache lines.
        rank: the rank whose share is returned.
        world_size: the number of ranks.
    """
    bounds = line_bounds(sum(sizes), itemsize, world_size)
    return pieces_between(sizes, bounds[rank], bounds[rank + 1])


@lru_cache(maxsize=256)
def _starts(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return (0, *accumulate(sizes))[:-1]
