"""Checks of results while they are reduced, because they are then in the cache.

NonFiniteFinder finds the ranks that contribute NaN or infinity. If a sum is finite, so are its summands. So it is
nearly always enough to check the results. If a result is not finite, the contributions are checked before they are
overwritten, to find the rank.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from gradsync.reduction import Array

#: The number of the first non-finite element if there is none.
NOWHERE = -1


class Checks(enum.Flag):
    """The checks that a backend makes while it reduces a list or resident memory; the same on all ranks.

    NONFINITE: the backend's `finder` collects the values that are not finite.
    SQUARES: the backend's `squares` adds up the squares of this rank's share of the results. Each result is in the
        share of one rank.
    """

    NONE = 0
    NONFINITE = enum.auto()
    SQUARES = enum.auto()


class NonFinite(NamedTuple):
    """The non-finite values that this rank has found in the reduction of one list.

    Attributes:
        firsts: for each rank the number, in the whole list, of the rank's first element that is not finite; NOWHERE if
            all are finite.
        has_results: whether a result is not finite.
    """

    firsts: Sequence[int]
    has_results: bool


class NonFiniteFinder:
    """Collects non-finite values, in one reduction after another.

    Args:
        world_size: number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._forget()

    def check_section(
        self, is_finite: Callable[[Array], bool], results: Array, contributions: Sequence[Array], at: int
    ) -> None:
        """Checks a section of the results of a sum or mean; if a result is not finite, checks the contributions too.

        Args:
            is_finite: a function that returns whether all elements of an array of the results' dtype are finite.
            results: the section, a 1-D array.
            contributions: by rank, the values that were reduced to the section.
            at: the number of the section's first element in the whole list.
        """
        if is_finite(results):
            return
        self.note_nonfinite_result()
        for rank, values in enumerate(contributions):
            self.check_contribution(rank, values, at)

    def note_nonfinite_result(self) -> None:
        """Notes that a result is not finite."""
        self._has_results = True

    def check_contribution(self, rank: int, values: Array, at: int) -> None:
        """Checks a rank's contribution, which begins at element `at` of the whole list."""
        found = np.flatnonzero(~np.isfinite(values))
        if found.size:
            first, known = at + int(found[0]), self._firsts[rank]
            self._firsts[rank] = first if known == NOWHERE else min(known, first)

    def take(self) -> NonFinite:
        """Returns the values found since the last call."""
        found = NonFinite(self._firsts, self._has_results)
        self._forget()
        return found

    def _forget(self) -> None:
        self._firsts = [NOWHERE] * self._world_size
        self._has_results = False
