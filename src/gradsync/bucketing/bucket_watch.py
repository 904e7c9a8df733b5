"""What is noted of the values of each bucket: whether they are finite, and their squares for the norm."""

from __future__ import annotations

from collections.abc import Sequence

from gradsync.bucketing.bucket_work import BucketWork
from gradsync.bucketing.finite_check import FiniteCheck
from gradsync.bucketing.gradient_norm import GradientNorm
from gradsync.communicators.base import Communicator
from gradsync.reduction import Array


class BucketWatch:
    """Looks at the values of one bucket before and after its reduction; see Communicator.all_reduce_list.

    Args:
        work: the bucket.
        finite: takes note of NaN and infinity.
        norm: takes note of squares; None where nobody asks for the norm.
        communicator: whose ranks reduce it.
    """

    def __init__(
        self, work: BucketWork, finite: FiniteCheck, norm: GradientNorm | None, communicator: Communicator
    ) -> None:
        self._work = work
        self._finite = finite
        self._norm = norm
        self._communicator = communicator

    def before(self, sources: Sequence[Array]) -> None:
        """Looks at this rank's values."""
        if self._finite.policy == "off":
            return
        slots = self._work.bucket.slots
        if self._work.memory is not None:  # they live in the bucket, which is one array
            sources = [sources[0][slot.begin : slot.end] for slot in slots]
        names = [slot.spec.label for slot in slots]
        self._finite.note(list(zip(names, sources, strict=True)), self._communicator.arrays)

    def after(self, targets: Sequence[Array]) -> None:
        """Looks at the reduced values."""
        self._finite.note_results(targets, self._communicator)
        if self._norm is not None:
            self._norm.note_results(targets, self._communicator)
