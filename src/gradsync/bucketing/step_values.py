"""What a step finds out about the values of its gradients: whether they are finite, their norm; and their clipping."""

from __future__ import annotations

import logging
from typing import Any

from gradsync.bucketing.bucket_watch import BucketWatch
from gradsync.bucketing.bucket_work import BucketWork
from gradsync.bucketing.finite_check import FINITE_CHECK, FiniteCheck
from gradsync.bucketing.gradient_norm import GRADIENT_NORM, GradientNorm, clip_factor
from gradsync.bucketing.options import Options
from gradsync.bucketing.step_agreements import StepAgreements
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.nonfinite import NonFiniteFinder
from gradsync.futures import Completion

_log = logging.getLogger("gradsync")


class StepValues:
    """Looks at the buckets of one step after another.

    Args:
        options: of the callback.

    Attributes:
        norm: of the last step's reduced gradients, before they were clipped; None where nobody asks for it.
        skip_step: whether the last step's gradients are not finite, where the policy is "skip".
    """

    def __init__(self, options: Options) -> None:
        self.norm: float | None = None
        self.skip_step = False
        self._finite = FiniteCheck(options.nonfinite)
        self._norm = None if options.clip_norm is None else GradientNorm()
        self._max_norm = options.clip_norm
        self._results: list[Any] = []  # what may have to be clipped
        self._buckets = 0

    @property
    def looks_for_nonfinite(self) -> bool:
        """Whether NaN and infinity are looked for."""
        return self._finite.is_on

    @property
    def is_watching(self) -> bool:
        """Whether there is anything to look for."""
        return self.looks_for_nonfinite or self._norm is not None

    def watch(self, work: BucketWork, communicator: Communicator, finder: NonFiniteFinder | None) -> BucketWatch | None:
        """Returns what looks at a bucket before and after its reduction; None where there is nothing to look for.

        Args:
            work: the bucket.
            communicator: whose ranks reduce it.
            finder: what the reduction has take note of NaN and infinity, where it does that itself.
        """
        self._buckets += 1
        if not self.is_watching:
            return None
        if self._norm is not None:
            self._results += work.results
        return BucketWatch(work, self._finite, self._norm, communicator, finder)

    def conclude(self, communicator: Communicator, agreements: StepAgreements) -> Completion | None:
        """Ends a step: has the ranks agree on what they have found, and clips. Every rank must call it.

        Args:
            communicator: of the ranks.
            agreements: of the callback.

        Returns:
            On a GPU, where gradients were clipped, the end of that.

        Raises:
            NonFiniteGradient: some rank's are not finite, and the policy is to raise; on all ranks.
        """
        buckets, results = self._buckets, self._results
        self._begin()
        if not buckets:
            return None
        verdict = self._finite.conclude(communicator, agreements.of_callback(FINITE_CHECK))
        if verdict.error is not None:
            if self._finite.policy == "raise":
                self.fail()
                raise verdict.error
            _log.info("this step is one to skip: %s", verdict.error)
        self.skip_step = not verdict.is_finite
        if self._norm is None or self._max_norm is None:
            return None
        self.norm = self._norm.conclude(communicator, agreements.of_callback(GRADIENT_NORM))
        factor = clip_factor(self.norm, self._max_norm)
        if factor >= 1.0 or not verdict.is_finite:
            return None
        for result in results:
            communicator.arrays.multiply(result, factor, result)
        return communicator.mark_end()

    def fail(self) -> None:
        """Forgets what was noted of a step that has failed."""
        self._begin()
        self._finite.reset()
        if self._norm is not None:
            self._norm.reset()

    def _begin(self) -> None:
        self.norm, self.skip_step = None, False
        self._results, self._buckets = [], 0
