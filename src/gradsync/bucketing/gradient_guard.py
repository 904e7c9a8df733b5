"""The debug mode's watch over gradients: whether somebody writes to them while they belong to gradsync.

From its hand-over until its bucket is reduced a gradient is for gradsync alone. Then its future is done, and the result
is the caller's; but who has not asked the future cannot know that, so what nobody has asked for is watched until the
step ends: that finds who goes on adding to a gradient that has been reduced already.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from zlib import crc32

import numpy as np

from gradsync.bucketing.pending import PendingGradient
from gradsync.communicators.communicator import Communicator
from gradsync.errors import GradientChanged, caller
from gradsync.futures import CollectiveEnd, Completion

_HAND_OVER = "its hand-over and the reduction of its bucket: hand it over once it is complete"
_REDUCTION = "the reduction of its bucket and the end of the step, and nobody had asked its future: ask that first"


class _Watched:
    """One gradient of the step: its digest, and where in the program it was handed over."""

    __slots__ = ("array", "digest", "end", "entry", "place")

    def __init__(self, entry: PendingGradient, end: CollectiveEnd, digest: int, place: str) -> None:
        self.entry = entry
        self.end = end
        self.array = _watched_array(entry)
        self.digest = digest
        self.place = place


class GradientGuard:
    """Watches the gradients of one step after another.

    Args:
        communicator: whose ranks reduce them.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._given: dict[int, _Watched] = {}  # by place in the step
        self._reduced: list[list[_Watched]] = []  # by bucket

    def take(self, entry: PendingGradient, end: CollectiveEnd) -> None:
        """Begins to watch a gradient that is being handed over, until the end of its bucket's reduction."""
        digest = self._digest(_watched_array(entry))
        self._given[entry.position] = _Watched(entry, end, digest, _place_of_caller())

    def check_handed_over(self, positions: Iterable[int]) -> None:
        """Makes sure that the gradients of a bucket are what was handed over.

        Raises:
            GradientChanged: one of them is not.
        """
        for position in positions:
            watched = self._given.get(position)
            if watched is not None and self._digest(watched.array) != watched.digest:
                raise self._changed(watched, _HAND_OVER)

    def note_results(self, positions: Iterable[int], completion: Completion | None) -> None:
        """Begins to watch the results of a bucket, before anybody hears of its end; waits for them on a GPU."""
        if completion is not None:
            completion.wait()
        results = []
        for position in positions:
            watched = self._given.pop(position, None)
            if watched is not None:
                watched.array = watched.entry.native if watched.entry.write_back is None else watched.entry.write_back
                watched.digest = self._digest(watched.array)
                results.append(watched)
        self._reduced.append(results)

    def check_results(self) -> None:
        """Makes sure that the results of buckets whose end nobody has asked for are what the reduction left.

        Raises:
            GradientChanged: one of them is not.
        """
        for results in self._reduced:
            for watched in results:
                if not watched.end.was_asked and self._digest(watched.array) != watched.digest:
                    raise self._changed(watched, _REDUCTION)

    def clear(self) -> None:
        """Forgets the step."""
        self._given.clear()
        self._reduced.clear()

    def _digest(self, array: Any) -> int:
        """Returns a digest of the elements; of a GPU's array after the work of the current stream."""
        if not isinstance(array, np.ndarray):
            array = self._communicator.arrays.flat(array).get()
        return crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def _changed(self, watched: _Watched, between: str) -> GradientChanged:
        communicator, name = self._communicator, watched.entry.spec.name
        return GradientChanged(
            f"{communicator.label}: the gradient of {name}, handed over at {watched.place}, was written to between "
            f"{between}",
            rank=communicator.ranks[communicator.rank],
            parameter=watched.entry.spec.label,
            handed_over_at=watched.place,
        )


def _watched_array(entry: PendingGradient) -> Any:
    """Returns what the program could write to: of a host array on a GPU's communicator not the copy."""
    is_copied = isinstance(entry.gradient, np.ndarray) and not isinstance(entry.native, np.ndarray)
    return entry.gradient if is_copied else entry.native


def _place_of_caller() -> str:
    """Returns "file:line" of the user's program."""
    found = caller()
    return "an unknown place" if found is None else f"{found.code.co_filename}:{found.line}"
