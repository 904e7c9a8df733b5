"""Checks of values during the reduction, while they are in the cache.

NonFiniteFinder finds the ranks that contribute NaN or infinity. If a sum is finite, all its summands are finite. So it
is nearly always enough to check the results. If a result is not finite, the values of each rank are checked before they
are overwritten, to find the ranks that contributed the non-finite values.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from gradsync.reduction import Array

#: The value of NonFinite.firsts for a rank whose elements are all finite.
NOWHERE = -1


class Checks(enum.Flag):
    """The checks that a backend makes while it reduces a list of arrays or resident memory; equal on all ranks.

    NONFINITE: the backend's `finder` collects the values that are not finite.
    SQUARES: the backend's `squares` adds up the squares of this rank's share of the results. Each result belongs to the
        share of exactly one rank.
    """

    NONE = 0
    NONFINITE = enum.auto()
    SQUARES = enum.auto()


class NonFinite(NamedTuple):
    """The non-finite values that this rank has found in the reduction of one list of arrays.

    Attributes:
        firsts: for each rank the index of its first element that is not finite, counted across all arrays of the list;
            NOWHERE if this rank has found none.
        has_results: whether a result is not finite.
    """

    firsts: Sequence[int]
    has_results: bool


class NonFiniteFinder:
    """Collects the non-finite values of each reduction; `take` returns them.

    Args:
        world_size: the number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._forget()

    def check_section(
        self, is_finite: Callable[[Array], bool], results: Array, contributions: Sequence[Array], at: int
    ) -> None:
        """Checks a section of the results of a sum or mean. If a result is not finite, checks each rank's values too.

        Args:
            is_finite: a function that returns whether all elements of an array of the results' dtype are finite.
            results: the section: a 1-D array of results.
            contributions: for each rank the values from which the section was reduced.
            at: the index of the section's first element, counted across all arrays of the list.
        """
        if is_finite(results):
            return
        self.note_nonfinite_result()
        for rank, values in enumerate(contributions):
            self.check_contribution(rank, values, at)

    def note_nonfinite_result(self) -> None:
        """Records that a result is not finite."""
        self._has_results = True

    def check_contribution(self, rank: int, values: Array, at: int) -> None:
        """Checks the values of one rank and records its first non-finite element.

        Args:
            rank: the rank that contributed the values.
            values: a 1-D array of the rank's values.
            at: the index of the element values[0], counted across all arrays of the list.
        """
        found = np.flatnonzero(~np.isfinite(values))
        if found.size:
            first, known = at + int(found[0]), self._firsts[rank]
            self._firsts[rank] = first if known == NOWHERE else min(known, first)

    def take(self) -> NonFinite:
        """Returns the non-finite values that were found since the last call of `take`."""
        found = NonFinite(self._firsts, self._has_results)
        self._forget()
        return found

    def _forget(self) -> None:
        self._firsts = [NOWHERE] * self._world_size
        self._has_results = False
