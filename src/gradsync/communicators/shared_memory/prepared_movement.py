"""One movement, or one reduce_scatter, of small arrays over shared memory: slices of rings and arrays, made once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.backend import Shape, row_shape
from gradsync.communicators.host_copy import copy_words, word_dtype
from gradsync.communicators.shared_memory.arena import Workplace, share_begin, shares_bytes
from gradsync.communicators.shared_memory.prepared_arrays import ArraysOfOneKind
from gradsync.reduction import UFUNCS, Array, ReduceOp, divide_into


class PreparedMovement(ArraysOfOneKind):
    """A collective that moves parts of arrays.

    Args:
        agreement: on the collective.
        result_shape, dtype, in_place: see ArraysOfOneKind.
        workplace: this rank's.
        region_bytes: what a call takes of the rings.

    Attributes:
        agreement: see above.
    """

    def __init__(
        self,
        agreement: Agreement,
        result_shape: Shape,
        dtype: np.dtype[Any],
        workplace: Workplace,
        region_bytes: int,
        *,
        in_place: bool = False,
    ) -> None:
        super().__init__(result_shape, dtype, in_place=in_place)
        self.agreement = agreement
        self._word = word_dtype(dtype)
        self._rings = workplace.rings
        self._words = workplace.rings.of(self._word)
        self._own_words = self._words[workplace.rank]
        self._barrier = workplace.barrier
        self._region_bytes = region_bytes
        # Elements of an array, and where they lie in a rank's region.
        self._published: list[tuple[slice, int, int]] = []
        self._kept: list[tuple[slice, slice]] = []
        self._fetched: list[tuple[slice, int, int, int]] = []

    def publish(self, part: slice, begin_bytes: int = 0) -> None:
        """Adds elements of the array that go to a place in this rank's region, before the ranks meet."""
        begin = begin_bytes // self._word.itemsize
        self._published.append((part, begin, begin + part.stop - part.start))

    def keep(self, part: slice, own: slice) -> None:
        """Adds elements of the array that stay on this rank."""
        self._kept.append((part, own))

    def fetch(self, part: slice, owner: int, begin_bytes: int = 0) -> None:
        """Adds elements of the target that come from a place in a rank's region, after the ranks have met."""
        begin = begin_bytes // self._word.itemsize
        self._fetched.append((part, owner, begin, begin + part.stop - part.start))

    def run(self, array: Array, target: Array) -> None:
        """Moves the parts; the arrays are what `target` has accepted and returned."""
        words = self._words
        at = self._rings.next_place(self._region_bytes) // self._word.itemsize
        source = array.reshape(-1).view(self._word)
        result = source if target is array else target.reshape(-1).view(self._word)
        for part, begin, end in self._published:
            copy_words(source[part], self._own_words[at + begin : at + end])
        self._barrier.meet(self.agreement)
        # Not before all agree: else nothing is written. Before anything is fetched, which may go where it comes from.
        for part, own in self._kept:
            copy_words(source[part], result[own])
        for part, owner, begin, end in self._fetched:
            copy_words(words[owner][at + begin : at + end], result[part])


class PreparedReduceScatter(ArraysOfOneKind):
    """A reduce_scatter of equal parts.

    Args:
        agreement: on the collective.
        op: an operator that the dtype table allows.
        array: one of the arrays to come, for its shape and dtype; the dtype adds up in itself.
        parts: elements of each rank's part.
        workplace: this rank's.
        quietly: calls a function so that overflow and NaN raise nothing.

    Attributes:
        agreement: see above.
    """

    def __init__(
        self,
        agreement: Agreement,
        op: ReduceOp,
        array: Array,
        parts: Sequence[slice],
        workplace: Workplace,
        quietly: Callable[..., Any],
    ) -> None:
        rows, *rest = row_shape(array.shape)
        super().__init__((rows // len(parts), *rest), array.dtype, in_place=False)
        self.agreement = agreement
        self._word = word_dtype(array.dtype)
        rank = workplace.rank
        self._rings = workplace.rings
        self._values = workplace.rings.of(array.dtype)
        self._own_words = workplace.rings.of(self._word)[rank]
        self._barrier = workplace.barrier
        self._quietly = quietly
        self._ufunc = UFUNCS[op]
        self._divisor = len(parts) if op is ReduceOp.MEAN else 1
        self._rank = rank
        self._own = parts[rank]
        self._size = parts[0].stop
        self._itemsize = array.itemsize
        part_bytes = self._size * array.itemsize
        ranks = range(len(parts))
        self._region_bytes = shares_bytes(len(parts), part_bytes)
        # In elements: where the others' parts go in this rank's region, and where its own lies in theirs.
        self._published = [
            (parts[peer], share_begin(rank, peer, part_bytes) // array.itemsize) for peer in ranks if peer != rank
        ]
        self._begins = [0 if peer == rank else share_begin(peer, rank, part_bytes) // array.itemsize for peer in ranks]

    def run(self, array: Array, target: Array) -> None:
        """Reduces; the arrays are what `target` has accepted and returned."""
        at = self._rings.next_place(self._region_bytes) // self._itemsize
        size, own_words, quietly = self._size, self._own_words, self._quietly
        source = array.reshape(-1)
        words = source.view(self._word)
        for part, begin in self._published:
            copy_words(words[part], own_words[at + begin : at + begin + size])
        self._barrier.meet(self.agreement)
        contributions = [
            ring[at + begin : at + begin + size] for ring, begin in zip(self._values, self._begins, strict=True)
        ]
        own, result = source[self._own], target.reshape(-1)
        # In place: its turn comes after the first result is written.
        overwritten = self._rank > 1 and np.may_share_memory(own, result)
        contributions[self._rank] = own.copy() if overwritten else own
        quietly(self._ufunc, contributions[0], contributions[1], out=result)
        for contribution in contributions[2:]:
            quietly(self._ufunc, result, contribution, out=result)
        if self._divisor > 1:
            quietly(divide_into, result, self._divisor, result)
