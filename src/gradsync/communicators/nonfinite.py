"""Whose values are not finite, found while they are reduced.

A sum that is finite has no summand that is not: nearly always a look at the results is enough, while they are in the
cache. Where they are not finite, a look at what they came from, before they take the place of that, tells whose it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from gradsync.reduction import Array

#: In place of an element's number, where there is no such element.
NOWHERE = -1


class NonFinite(NamedTuple):
    """What this rank has found in the reduction of one list.

    Attributes:
        firsts: by rank, the first element that it brought in and that is not finite, counted over the whole list;
            NOWHERE where there is none.
        has_results: whether some result is not finite.
    """

    firsts: Sequence[int]
    has_results: bool


class NonFiniteFinder:
    """Takes note of what is not finite, in one reduction after another.

    Args:
        world_size: number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._forget()

    def look(self, is_finite: Callable[[Array], bool], results: Array, contributions: Sequence[Array], at: int) -> None:
        """Looks at some results of a sum or mean, and where they are not finite at what they came from.

        Args:
            is_finite: tells of an array of the results' dtype whether all of it is.
            results: a stretch of them.
            contributions: by rank, what was reduced to that, as it was.
            at: where the stretch begins in the whole list.
        """
        if is_finite(results):
            return
        self.note_results()
        for rank, values in enumerate(contributions):
            self.look_at(rank, values, at)

    def note_results(self) -> None:
        """Takes note that some result is not finite."""
        self._has_results = True

    def look_at(self, rank: int, values: Array, at: int) -> None:
        """Looks at what a rank gave; `at` is where that begins in the whole list."""
        found = np.flatnonzero(~np.isfinite(values))
        if found.size:
            first, known = at + int(found[0]), self._firsts[rank]
            self._firsts[rank] = first if known == NOWHERE else min(known, first)

    def take(self) -> NonFinite:
        """Returns what was found since the last time."""
        found = NonFinite(self._firsts, self._has_results)
        self._forget()
        return found

    def _forget(self) -> None:
        self._firsts = [NOWHERE] * self._world_size
        self._has_results = False
