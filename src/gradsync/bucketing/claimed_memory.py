"""Which memory the gradients of a step occupy: two that share some would be reduced into one another."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any, NamedTuple

import numpy as np

from gradsync.bucketing.future import GradientFuture
from gradsync.errors import InvalidArgument
from gradsync.reduction import Array


class _Claim(NamedTuple):
    """Bytes [begin, end) of memory that one gradient lies in; `order` keeps claims comparable."""

    begin: int
    order: int
    end: int
    array: Array  # held, so that its memory is not given to a later gradient of the same step
    future: GradientFuture


class ClaimedMemory:
    """The gradients of a step, by address."""

    def __init__(self) -> None:
        self._claims: list[_Claim] = []
        self._longest_bytes = 0
        self._ranges_overlap = False  # rare: views that interleave, or read-only arrays

    def claim(self, array: Array, future: GradientFuture) -> None:
        """Enters a gradient.

        Args:
            array: a host array.
            future: names the gradient in the error.

        Raises:
            InvalidArgument: it shares memory with a gradient entered before, and one of them is written to.
        """
        if not array.size:
            return
        begin, end = _byte_bounds(array)
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
            if (array.flags.writeable or claim.array.flags.writeable) and _share(array, claim.array):
                raise InvalidArgument(
                    f"{future.name} shares memory with {claim.future.name}, which was handed over in the same step: "
                    "their results would be mixed; hand over a copy"
                )
        insort(claims, _Claim(begin, len(claims), end, array, future))
        self._longest_bytes = max(self._longest_bytes, end - begin)

    def clear(self) -> None:
        """Forgets the step."""
        self._claims.clear()
        self._longest_bytes = 0
        self._ranges_overlap = False


def _byte_bounds(array: Array) -> tuple[int, int]:
    """Returns the first address of a non-empty array and one past its last."""
    address: int = array.__array_interface__["data"][0]
    if array.flags.c_contiguous or array.flags.f_contiguous:
        return address, address + array.nbytes
    steps = [stride * (length - 1) for stride, length in zip(array.strides, array.shape, strict=True)]
    low, high = sum(step for step in steps if step < 0), sum(step for step in steps if step > 0)
    return address + low, address + high + array.itemsize


def _share(first: Any, second: Any) -> bool:
    """Whether two arrays share an element; views that interleave do not. Where that is hard to tell: True."""
    try:
        return bool(np.shares_memory(first, second, max_work=10_000))  # type: ignore[arg-type]  # any count is allowed
    except np.exceptions.TooHardError:
        return True
