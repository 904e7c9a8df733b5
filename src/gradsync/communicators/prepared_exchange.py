"""The all-reduce of one small array over shared memory, with everything prepared that stays from call to call.

The same protocol as Exchange of shared_reduction.py, so that ranks on either path meet; about a quarter of its time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Any

import numpy as np

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.host_copy import word_dtype
from gradsync.communicators.shared_barrier import SharedBarrier
from gradsync.errors import UnsupportedDtype
from gradsync.reduction import UFUNCS, Array, ReduceOp, accumulation_dtype, check_operation, divide_into

# Above, NumPy's assignment may meet the slow case of memcpy that host_copy.py tells of.
_ASSIGN_UP_TO_BYTES = 4096


class PreparedExchange:
    """Reduces arrays of one shape and dtype in place, by one operator.

    Args:
        agreement: on this all-reduce.
        op: an operator that the dtype table allows.
        shape: of the arrays.
        dtype: of the arrays; adds up in itself.
        slots: [parity][rank] -> the shared buffer as a 1-D array of the dtype.
        barrier: where the ranks meet.
        rank: this rank.
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
        slots: Sequence[Sequence[Array]],
        barrier: SharedBarrier,
        rank: int,
        quietly: Callable[..., Any],
    ) -> None:
        self._quietly = quietly
        size = int(np.prod(shape))
        views = [[slot[:size].reshape(shape) for slot in half] for half in slots]
        self._own = [half[rank] for half in views]
        self._word = word_dtype(dtype)
        self._own_words = [half[rank].view(self._word) for half in views]
        self._first = [half[0] for half in views]
        self._second = [half[1] for half in views]
        self._rest = [half[2:] for half in views]
        self._barrier = barrier
        self.agreement = agreement
        self._ufunc = UFUNCS[op]
        self._divisor = len(slots[0]) if op is ReduceOp.MEAN else 1
        self._copies_by_ufunc = size * dtype.itemsize > _ASSIGN_UP_TO_BYTES and self._word != dtype

    @staticmethod
    def suits(array: Array, op: ReduceOp) -> bool:
        """Whether such calls can be prepared; whether one may use it, `target` tells."""
        try:
            check_operation(op, array.dtype)
        except UnsupportedDtype:
            return False  # whose turn it is to tell, tells
        return array.nbytes > 0 and accumulation_dtype(array.dtype) == array.dtype

    @staticmethod
    def target(array: Array, out: Any) -> Array | None:
        """Returns the array, which receives the result, where it can be read and written as it lies; else None."""
        flags = array.flags
        return array if out is None and flags.c_contiguous and flags.writeable else None

    def run(self, array: Array, _target: Array) -> None:
        """Reduces the array in place; see Communicator.all_reduce."""
        quietly = self._quietly
        parity = self._barrier.next_parity
        if self._copies_by_ufunc:
            np.positive(array.view(self._word), self._own_words[parity])
        else:
            self._own[parity][...] = array
        self._barrier.meet(self.agreement)
        quietly(self._ufunc, self._first[parity], self._second[parity], out=array)
        for contribution in self._rest[parity]:
            quietly(self._ufunc, array, contribution, out=array)
        if self._divisor > 1:
            quietly(divide_into, array, self._divisor, array)


def quiet_caller() -> Callable[..., Any]:
    """Returns call(function, *arguments), within which floating-point errors are ignored.

    They are the caller's business, and as exceptions they would hit some ranks and not others.
    """
    context = Context()
    context.run(np.seterr, all="ignore")  # NumPy keeps the setting in the context; entering one costs next to nothing
    return context.run
