"""Whose values are not finite, while a large list goes through the stream of chunks: see write_back.py.

Who reduces a slice looks at its results, while they are in its cache, and tells all where they are not finite. Each
rank then looks at what it gave to the chunk, before the results take the place of that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gradsync.communicators.nonfinite import NonFiniteFinder
from gradsync.communicators.shared_memory.stream_plan import Stretch
from gradsync.reduction import Array

#: [number of a slot][rank] -> whether what the rank has reduced of the chunk there is not finite. It writes that again
#: when all have published the next chunk in that slot, and so have delivered this one.
Flags = Sequence[memoryview]


class ChunkLook:
    """Looks at the chunks of one list of arrays.

    Args:
        sources: what this rank gives.
        chunk_elements: size of a chunk; the last one may be shorter.
        rank: this rank.
        is_finite: tells of an array whether all of it is.
        flags: in shared memory.
        finder: takes note of what is not finite.
    """

    def __init__(
        self,
        sources: Sequence[Array],
        chunk_elements: int,
        rank: int,
        is_finite: Callable[[Array], bool],
        flags: Flags,
        finder: NonFiniteFinder,
    ) -> None:
        self._sources = sources
        self._chunk_elements = chunk_elements
        self._rank = rank
        self._is_finite = is_finite
        self._flags = flags
        self._finder = finder

    def begin(self, chunk: int) -> None:
        """Begins with the results of a chunk: what was said of the one before in its slot is over."""
        self._flags_of(chunk)[self._rank] = False

    def look(self, chunk: int, stretch: Stretch, results: Array) -> None:
        """Looks at results of this rank, before they are delivered to it, and, where it must, at what it gave."""
        if not self._is_finite(results):
            self._flags_of(chunk)[self._rank] = True
            self._finder.note_results()
            self._look_at_own(chunk, [stretch])

    def look_before_delivery(self, chunk: int, stretches: Sequence[Stretch]) -> None:
        """Looks at what this rank gave, where somebody has told that the results are not finite."""
        if any(self._flags_of(chunk)):
            self._look_at_own(chunk, stretches)

    def _flags_of(self, chunk: int) -> memoryview:
        return self._flags[chunk % len(self._flags)]

    def _look_at_own(self, chunk: int, stretches: Sequence[Stretch]) -> None:
        for begin, _, pieces in stretches:
            at = chunk * self._chunk_elements + begin
            for number, low, high in pieces:
                self._finder.look_at(self._rank, self._sources[number][low:high], at)
                at += high - low
