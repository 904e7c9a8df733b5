"""Which memory the gradients of a step occupy: two that share some would be reduced into one another."""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from typing import NamedTuple

from gradsync.bucketing.future import GradientFuture
from gradsync.communicators.host_arrays import ArrayKind
from gradsync.errors import InvalidArgument
from gradsync.reduction import Array


class _Claim(NamedTuple):
    """Bytes [begin, end) of memory that one gradient lies in; `order` keeps claims comparable."""

    begin: int
    order: int
    end: int
    array: Array
    future: GradientFuture


class ClaimedMemory:
    """The gradients of a step, by address.

    Most loops hand over the very arrays of the step before; as long as they do, nothing needs to be compared again.
    """

    def __init__(self) -> None:
        self._held: list[tuple[Array, GradientFuture]] = []  # this step's, so that their memory is not used again
        self._last: list[weakref.ref[Array]] = []  # the last step's, where their ranges of memory did not meet
        self._repeating = True
        self._claims: list[_Claim] = []
        self._longest_bytes = 0
        self._ranges_overlap = False  # rare: views that interleave, or read-only arrays

    def claim(self, array: Array, future: GradientFuture, arrays: ArrayKind) -> None:
        """Enters a gradient.

        Args:
            array: native to the communicator; addresses of host and devices are one space.
            future: names the gradient in the error.
            arrays: how the communicator handles arrays.

        Raises:
            InvalidArgument: it shares memory with a gradient entered before, and one of them is written to.
        """
        held = self._held
        if self._repeating:
            position = len(held)
            if position < len(self._last) and self._last[position]() is array:
                held.append((array, future))
                return
            self._repeating = False
            for earlier in held:
                self._compare(*earlier, arrays)
        self._compare(array, future, arrays)
        held.append((array, future))

    def clear(self) -> None:
        """Forgets the step."""
        if self._ranges_overlap:  # read-only views of the same memory may be made writeable
            self._last = []
        elif not self._repeating or len(self._held) != len(self._last):
            self._last = [weakref.ref(array) for array, _ in self._held]
        self._held.clear()
        self._repeating = True
        self._claims.clear()
        self._longest_bytes = 0
        self._ranges_overlap = False

    def _compare(self, array: Array, future: GradientFuture, arrays: ArrayKind) -> None:
        if not array.size:
            return
        begin, end = arrays.byte_bounds(array)
        claims = self._claims
        # Among ranges that do not overlap, only the last one that begins before this one can reach into it.
        if self._ranges_overlap:
            at = bisect_left(claims, (begin - self._longest_bytes,))
        else:
            at = max(bisect_left(claims, (begin,)) - 1, 0)
        for index in range(at, len(claims)):
            claim = claims[index]
            if claim.begin >= end:
                break
            if claim.end <= begin:
                continue
            self._ranges_overlap = True
            written = arrays.writeable(array) or arrays.writeable(claim.array)
            if written and arrays.share_memory(array, claim.array):
                raise InvalidArgument(
                    f"{future.name} shares memory with {claim.future.name}, which was handed over in the same step: "
                    "their results would be mixed; hand over a copy"
                )
        insort(claims, _Claim(begin, len(claims), end, array, future))
        self._longest_bytes = max(self._longest_bytes, end - begin)
