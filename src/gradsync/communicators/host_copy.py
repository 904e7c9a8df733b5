"""Functions that copy lists of host arrays, and cut lists into pieces; the copies are fast at every memory address.

NumPy copies with memcpy, and glibc's memcpy copies 4 KB to about 1 MB with the instruction `rep movsb`. On AMD Zen 3
this instruction slows down from 40 to 2.8 GB/s (measured) if the destination is 1 to 63 bytes after the source, modulo
the page size. Such addresses occur when data are copied from page-aligned shared memory to large NumPy arrays, whose
data begin 16 bytes after the start of a page. A NumPy ufunc copies with vector loads and stores, and is not slower at
such addresses. So on Zen 3 np.positive on unsigned integers copies pieces of 4 KB or more, and keeps every bit. On
other processors memcpy is as fast or faster, so each process measures both ways.

Source: glibc bugs 30994 and 30995 (memcpy on Zen 3 and Zen 4 with `rep movsb`).

The functions for pieces cut a list of arrays as if the list were one flat array. So a collective can move many arrays
together, and need not first copy them to one array. These functions only compute; they read and write no array.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from gradsync.reduction import Array

# Below this size memcpy does not use `rep movsb`, and an assignment costs less than a ufunc call.
_UFUNC_FROM_BYTES = 4096

# The copies that measure memcpy. A slow memcpy takes more than ten times as long as a ufunc.
_PROBE_BYTES, _PROBES = 128 * 1024, 8
_PAGE_BYTES = 4096

_WORD_BY_ITEMSIZE: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
}


def word_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the unsigned integer dtype with the item size of `dtype`; `dtype` itself if there is none."""
    return _WORD_BY_ITEMSIZE.get(dtype.itemsize, dtype)


@cache
def memcpy_is_slow() -> bool:
    """Whether memcpy is slow if the target begins just after the source, modulo the page size.

    The first call measures this, in less than 1 ms.
    """
    memory = np.zeros(2 * _PROBE_BYTES + 3 * _PAGE_BYTES, np.uint8)
    begin = -memory.ctypes.data % _PAGE_BYTES
    source = memory[begin : begin + _PROBE_BYTES]
    begin += _PROBE_BYTES + _PAGE_BYTES + 16
    target = memory[begin : begin + _PROBE_BYTES]
    return _quickest(np.copyto, target, source) > 2 * _quickest(np.positive, source, target)


def _quickest(copy: Callable[..., Any], *arrays: Array) -> float:
    took = []
    for _ in range(_PROBES):
        began = time.perf_counter()
        copy(*arrays)
        took.append(time.perf_counter() - began)
    return min(took)


def copy_words(source: Array, target: Array) -> None:
    """Copies a 1-D array of words (see word_dtype) to another array of the same size."""
    if source.nbytes >= _UFUNC_FROM_BYTES and memcpy_is_slow():
        np.positive(source, target)
    else:
        target[...] = source


def publish_words(source: Array, target: Array) -> None:
    """Copies words, at most a few hundred KB, to shared memory that other ranks have just read.

    For 4 KB or more, publish_words uses a ufunc on every processor. On a Xeon `copy_words` uses memcpy. If
    publish_words also used memcpy there, an all_reduce of 128 KB would take 10% more time (measured).
    """
    if source.nbytes >= _UFUNC_FROM_BYTES:
        np.positive(source, target)
    else:
        target[...] = source


def pack_words(sources: Sequence[Array], into: Array) -> None:
    """Copies 1-D arrays of words, one after the other, to a single array of their total size."""
    if len(sources) == 1:
        copy_words(sources[0], into)
    elif max([source.nbytes for source in sources]) < _UFUNC_FROM_BYTES:
        np.concatenate(sources, out=into)
    else:
        _walk(sources, into, packing=True)


def split_words(packed: Array, targets: Sequence[Array]) -> None:
    """Copies one array of words to 1-D arrays whose sizes add up to its size: the inverse of pack_words."""
    if len(targets) == 1:
        copy_words(packed, targets[0])
    else:
        _walk(targets, packed, packing=False)


def _walk(pieces: Sequence[Array], packed: Array, *, packing: bool) -> None:
    """Copies each piece to or from its section of the packed array."""
    begin = 0
    for piece in pieces:
        end = begin + piece.size
        section = packed[begin:end]
        if packing:
            copy_words(piece, section)
        else:
            copy_words(section, piece)
        begin = end


# -- Pieces of a list of arrays --------------------------------------------------------------------------------------

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
def _starts(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return (0, *accumulate(sizes))[:-1]
