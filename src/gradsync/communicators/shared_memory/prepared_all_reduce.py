"""The all-reduce of one small array over shared memory, with everything prepared that stays from call to call.

The same protocol as all_at_once.py, so that ranks on either path meet; about a quarter of its time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context
from typing import Any

import numpy as np

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.host_copy import copy_words, word_dtype
from gradsync.communicators.shared_memory.arena import HOT_BYTES, Workplace
from gradsync.communicators.shared_memory.prepared_arrays import ArraysOfOneKind
from gradsync.errors import UnsupportedDtype
from gradsync.reduction import UFUNCS, Array, ReduceOp, accumulation_dtype, check_operation, divide_into

# Above, NumPy's assignment may meet the slow case of memcpy that host_copy.py tells of.
_ASSIGN_UP_TO_BYTES = 4096


class PreparedAllReduce(ArraysOfOneKind):
    """Reduces arrays of one shape and dtype by one operator, in place or into others.

    Args:
        agreement: on this all-reduce.
        op: an operator that the dtype table allows.
        shape: of the arrays.
        dtype: of the arrays; adds up in itself.
        workplace: this rank's.
        quietly: calls a function so that overflow and NaN raise nothing.

    Attributes:
        agreement: see above.
    """

    def __init__(
        self,
        agreement: Agreement,
        op: ReduceOp,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        workplace: Workplace,
        quietly: Callable[..., Any],
    ) -> None:
        super().__init__(shape, dtype, in_place=True)
        self.agreement = agreement
        self._rings = rings = workplace.rings
        self._barrier = workplace.barrier
        self._rank = rank = workplace.rank
        self._quietly = quietly
        self._shape = shape
        self._size = size = int(np.prod(shape))
        self._size_bytes = size * dtype.itemsize
        self._values, self._words = rings.of(dtype), rings.of(word_dtype(dtype))
        self._word = word_dtype(dtype)
        self._ufunc = UFUNCS[op]
        self._divisor = len(self._values) if op is ReduceOp.MEAN else 1
        self._hot: list[list[Array]] | None = None  # [parity][rank]
        if self._size_bytes <= HOT_BYTES:
            self._hot = [[place.reshape(shape) for place in half] for half in rings.hot(dtype, size)]
            self._own_words = [half[rank].view(self._word) for half in self._hot]
        self._copies_by_ufunc = self._size_bytes > _ASSIGN_UP_TO_BYTES and self._word != dtype

    @staticmethod
    def suits(array: Array, op: ReduceOp) -> bool:
        """Whether such calls can be prepared; whether one may use it, `target` tells."""
        try:
            check_operation(op, array.dtype)
        except UnsupportedDtype:
            return False  # whose turn it is to tell, tells
        return array.nbytes > 0 and accumulation_dtype(array.dtype) == array.dtype

    def run(self, array: Array, target: Array) -> None:
        """Reduces; the arrays are what `target` has accepted and returned."""
        if self._hot is None:
            contributions = self._contributions(array)
        else:
            parity = self._barrier.next_parity
            contributions = self._hot[parity]
            if self._copies_by_ufunc:
                np.positive(array.view(self._word), self._own_words[parity])
            else:
                contributions[self._rank][...] = array
            self._barrier.meet(self.agreement)
        quietly = self._quietly
        quietly(self._ufunc, contributions[0], contributions[1], out=target)
        for contribution in contributions[2:]:
            quietly(self._ufunc, target, contribution, out=target)
        if self._divisor > 1:
            quietly(divide_into, target, self._divisor, target)

    def _contributions(self, array: Array) -> list[Array]:
        """Meets the others; returns what all have contributed, from the regions of the next round."""
        begin = self._rings.next_place(self._size_bytes) // self._word.itemsize
        end = begin + self._size
        copy_words(array.reshape(-1).view(self._word), self._words[self._rank][begin:end])
        self._barrier.meet(self.agreement)
        return [ring[begin:end].reshape(self._shape) for ring in self._values]


def quiet_caller() -> Callable[..., Any]:
    """Returns call(function, *arguments), within which floating-point errors are ignored.

    They are the caller's business, and as exceptions they would hit some ranks and not others.
    """
    context = Context()
    context.run(np.seterr, all="ignore")  # NumPy keeps the setting in the context; entering one costs next to nothing
    return context.run
