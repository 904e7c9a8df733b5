"""One movement, or one reduce_scatter, of small arrays over shared memory: slices of slots and arrays, made once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.host_copy import copy_words, word_dtype
from gradsync.communicators.shared_barrier import SharedBarrier
from gradsync.communicators.shared_slots import Shares, Slots
from gradsync.reduction import UFUNCS, Array, ReduceOp, divide_into

Shape = tuple[int, ...]
_PARITIES = (0, 1)


class _Prepared:
    """What both have in common: which arrays they can take.

    Args:
        agreement: on the collective.
        out_shape: of the result; None where the array receives it.
        dtype: of the arrays.

    Attributes:
        agreement: see above.
    """

    def __init__(self, agreement: Agreement, out_shape: Shape | None, dtype: np.dtype[Any]) -> None:
        self.agreement = agreement
        self._out_shape = out_shape
        self._dtype = dtype
        self._word = word_dtype(dtype)

    def target(self, array: Array, out: Any) -> Array | None:
        """Returns where the result goes; None where these arrays are for the long way."""
        flags = array.flags
        if not flags.c_contiguous:
            return None
        if self._out_shape is None:
            return array if flags.writeable else None
        if out is None:
            return np.empty(self._out_shape, self._dtype)
        if type(out) is not np.ndarray or out.shape != self._out_shape or out.dtype != self._dtype:
            return None
        flags = out.flags
        fits = flags.c_contiguous and flags.writeable and not np.may_share_memory(array, out)
        return out if fits else None


class PreparedMovement(_Prepared):
    """A collective that moves parts of arrays.

    Args:
        agreement, dtype, out_shape: see _Prepared.
        slots: the shared buffers.
        barrier: where the ranks meet.
    """

    def __init__(
        self, agreement: Agreement, dtype: np.dtype[Any], out_shape: Shape | None, slots: Slots, barrier: SharedBarrier
    ) -> None:
        super().__init__(agreement, out_shape, dtype)
        self._barrier = barrier
        self._slots = slots.of(self._word)
        self._published: list[list[tuple[slice, Array]]] = [[], []]  # by parity
        self._kept: list[tuple[slice, slice]] = []
        self._fetched: list[list[tuple[Array, slice]]] = [[], []]

    def publish(self, part: slice, owner: int, begin_bytes: int = 0) -> None:
        """Adds elements of the array that go into a rank's slot, before the ranks meet."""
        for parity in _PARITIES:
            self._published[parity].append((part, self._place(parity, owner, begin_bytes, part)))

    def keep(self, part: slice, own: slice) -> None:
        """Adds elements of the array that stay on this rank."""
        self._kept.append((part, own))

    def fetch(self, part: slice, owner: int, begin_bytes: int = 0) -> None:
        """Adds elements of the target that come from a rank's slot, after the ranks have met."""
        for parity in _PARITIES:
            self._fetched[parity].append((self._place(parity, owner, begin_bytes, part), part))

    def _place(self, parity: int, owner: int, begin_bytes: int, part: slice) -> Array:
        begin = begin_bytes // self._word.itemsize
        return self._slots[parity][owner][begin : begin + part.stop - part.start]

    def run(self, array: Array, target: Array) -> None:
        """Moves the parts; the arrays are what `target` has accepted and returned."""
        parity = self._barrier.next_parity
        source = array.reshape(-1).view(self._word)
        result = source if target is array else target.reshape(-1).view(self._word)
        for part, place in self._published[parity]:
            copy_words(source[part], place)
        for part, own in self._kept:
            copy_words(source[part], result[own])
        self._barrier.meet(self.agreement)
        for place, part in self._fetched[parity]:
            copy_words(place, result[part])


class PreparedReduceScatter(_Prepared):
    """A reduce_scatter of equal parts.

    Args:
        agreement: on the collective.
        op: an operator that the dtype table allows.
        array: one of the arrays to come, for its shape and dtype; the dtype adds up in itself.
        parts: elements of each rank's part.
        slots: the shared buffers.
        shares: how a slot is shared out.
        barrier: where the ranks meet.
        rank: this rank.
        quietly: calls a function so that overflow and NaN raise nothing.
    """

    def __init__(
        self,
        agreement: Agreement,
        op: ReduceOp,
        array: Array,
        parts: Sequence[slice],
        slots: Slots,
        shares: Shares,
        barrier: SharedBarrier,
        rank: int,
        quietly: Callable[..., Any],
    ) -> None:
        rows, *rest = array.shape or (1,)
        super().__init__(agreement, (rows // len(parts), *rest), array.dtype)
        size = parts[0].stop
        self._barrier = barrier
        self._quietly = quietly
        self._ufunc = UFUNCS[op]
        self._divisor = len(parts) if op is ReduceOp.MEAN else 1
        self._own = parts[rank]
        self._rank = rank
        others = [peer for peer in range(len(parts)) if peer != rank]
        words, values = slots.of(self._word), slots.of(array.dtype)
        self._published = [
            [(parts[peer], shares.part(words[parity][rank], rank, peer, size)) for peer in others]
            for parity in _PARITIES
        ]
        # In rank order; this rank's own comes from the array.
        self._contributions: list[list[Array | None]] = [
            [
                None if peer == rank else shares.part(values[parity][peer], peer, rank, size)
                for peer in range(len(parts))
            ]
            for parity in _PARITIES
        ]

    def run(self, array: Array, target: Array) -> None:
        """Reduces; the arrays are what `target` has accepted and returned."""
        parity = self._barrier.next_parity
        source = array.reshape(-1)
        words = source.view(self._word)
        for part, place in self._published[parity]:
            copy_words(words[part], place)
        self._barrier.meet(self.agreement)
        own, result, quietly = source[self._own], target.reshape(-1), self._quietly
        first, second, *rest = [own if given is None else given for given in self._contributions[parity]]
        quietly(self._ufunc, first, second, out=result)
        for contribution in rest:
            quietly(self._ufunc, result, contribution, out=result)
        if self._divisor > 1:
            quietly(divide_into, result, self._divisor, result)
