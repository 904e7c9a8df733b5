"""NumPy calls that are made once and run many times: a function and the views that it is given.

To cut a view costs as much as copying kilobytes, so what an all-reduce of the same arrays repeats keeps its views.
Pieces below some kilobytes go together: a call for each would cost more than their bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import setitem
from typing import Any

import numpy as np

from gradsync.communicators.host_copy import copy_words, word_dtype
from gradsync.communicators.pieces import Piece
from gradsync.communicators.shared_memory.scratch import Scratch
from gradsync.reduction import (
    UFUNCS,
    Array,
    ReduceOp,
    divide_into,
    division,
    part_dtype,
    reduce_into,
)

Call = tuple[Callable[..., Any], tuple[Any, ...]]

_EVERYTHING = slice(None)
# Dtypes whose memoryviews can be assigned to each other as they are. Others go as bytes: integers of one size have
# several format letters, and complex numbers and bfloat16 have none that a memoryview understands.
_FORMATS = frozenset("efd")
_assign: Callable[..., None] = setitem
_exhaust = deque[Any](maxlen=0).extend


def run(calls: Iterable[Call]) -> None:
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
    whole = _memory(packed)
    memories, places, begin = [], [], 0
    for target in targets:
        memory = _memory(target)
        end = begin + len(memory)
        memories.append(memory)
        places.append(whole[begin:end])
        begin = end
    return _scatter, (memories, places)


def reducing(op: ReduceOp, contributions: Sequence[Array], out: Array, accumulator: Array | None) -> list[Call]:
    """Reduces as reduce_into of reduction.py does; `accumulator` is None where the dtype adds up in itself."""
    if accumulator is not None:
        return [(reduce_into, (op, contributions, out, accumulator))]
    ufunc = UFUNCS[op]
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
            target = part_of(self._targets, pieces[0])
            return [self._dividing(place, target) if self._divides else copying(place, target)]
        targets = [part_of(self._targets, piece) for piece in pieces]
        if not self._divides:
            return [scattering(place, targets)]
        divided = self._scratch.result(place.dtype, place.size)
        return [self._dividing(place, divided), scattering(divided, targets)]

    def _dividing(self, values: Array, out: Array) -> Call:
        """Divides as divide_into of reduction.py does."""
        if self._part is not None:
            values, out = values.view(self._part), out.view(self._part)
        return self._divide, (values, self._divisor, out)


def part_of(arrays: Sequence[Array], piece: Piece) -> Array:
    """Returns a piece of one of the arrays: the array itself, where that is all of it."""
    array = arrays[piece.array]
    return array if piece.end - piece.begin == array.size else array[piece.begin : piece.end]


def _memory(array: Array) -> memoryview:
    if array.dtype.char not in _FORMATS:
        return array.view(np.uint8).data
    memory = array.data
    if memory.format not in _FORMATS:  # NumPy's arrays over those of ctypes say "<f", also views as the same dtype
        memory = array.view(np.uint8).view(array.dtype.type).data
    return memory


def _scatter(memories: Sequence[memoryview], places: Sequence[memoryview]) -> None:
    _exhaust(map(_assign, memories, repeat(_EVERYTHING), places))  # a loop in C
