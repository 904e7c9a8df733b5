"""What is noted of the values of each bucket: whether they are finite, and their squares for the norm."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from gradsync.bucketing.bucket_work import BucketWork
from gradsync.bucketing.finite_check import FiniteCheck
from gradsync.bucketing.gradient_norm import GradientNorm
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.nonfinite import NonFiniteFinder
from gradsync.reduction import Array


class BucketWatch:
    """Looks at the values of one bucket before and after its reduction; see Stage of communicator.py.

    Args:
        work: the bucket.
        finite: takes note of NaN and infinity.
        norm: takes note of squares; None where nobody asks for the norm.
        communicator: whose ranks reduce it.
        finder: what the reduction has take note of NaN and infinity, where it does that itself.
    """

    def __init__(
        self,
        work: BucketWork,
        finite: FiniteCheck,
        norm: GradientNorm | None,
        communicator: Communicator,
        finder: NonFiniteFinder | None,
    ) -> None:
        self._work = work
        self._finite = finite
        self._norm = norm
        self._communicator = communicator
        self._finder = finder

    def before(self, given: Sequence[Array]) -> Sequence[Array]:
        """Looks at this rank's values."""
        if not self._finite.is_on or self._finder is not None:
            return given
        sources = given
        if self._work.memory is not None:  # they live in the bucket, which is one array
            sources = [sources[0][slot.begin : slot.end] for slot in self._work.bucket.slots]
        names = [slot.spec.label for slot in self._work.bucket.slots]
        self._finite.note(list(zip(names, sources, strict=True)), self._communicator.arrays)
        return given

    def after(self, results: Sequence[Array]) -> Sequence[Array]:
        """Looks at the reduced values."""
        if self._finder is None:
            self._finite.note_results(results, self._communicator)
        else:
            slots, found = self._work.bucket.slots, self._finder.take()
            self._finite.note_found(found, len(slots), self._slot_of, lambda number: slots[number].spec.label)
        if self._norm is not None:
            self._norm.note_results(results, self._communicator)
        return results

    def _slot_of(self, element: int) -> int:
        """Returns the number of the gradient to which an element of the flat bucket belongs."""
        return bisect_right([slot.end for slot in self._work.bucket.slots], element)
