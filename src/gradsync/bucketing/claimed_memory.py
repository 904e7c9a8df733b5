"""Which memory the gradients of a step occupy: two that share some would be reduced into one another."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

from gradsync.communicators.host_arrays import ArrayKind
from gradsync.errors import InvalidArgument
from gradsync.reduction import Array


class _Claim(NamedTuple):
    """Bytes [begin, end) of memory that one gradient lies in; `order` keeps claims comparable."""

    begin: int
    order: int
    end: int
    array: Array
    name: str


class ClaimedMemory:
    """The gradients of a step, by address; held, so that their memory is not used again."""

    def __init__(self) -> None:
        self._claims: list[_Claim] = []
        self._longest_bytes = 0
        self._ranges_overlap = False  # rare: views that interleave, or read-only arrays

    def claim(self, array: Array, name: str, arrays: ArrayKind) -> None:
        """Enters a gradient.

        Args:
            array: native to the communicator; addresses of host and devices are one space.
            name: of the gradient, for the error.
            arrays: how the communicator handles arrays.

        Raises:
            InvalidArgument: it shares memory with a gradient entered before, and one of them is written to.
        """
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
                    f"the gradient of {name} shares memory with the gradient of {claim.name}, which was handed over in "
                    "the same step: their results would be mixed; hand over a copy"
                )
        insort(claims, _Claim(begin, len(claims), end, array, name))
        self._longest_bytes = max(self._longest_bytes, end - begin)

    def clear(self) -> None:
        """Forgets the step."""
        self._claims.clear()
        self._longest_bytes = 0
        self._ranges_overlap = False
