"""threshold_bytes="auto": the first steps try thresholds, then the ranks agree on one.

Whatever the threshold, the results are the same on all ranks, and on the CPU the same bits as with any other one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from gradsync.bucketing.plan import GradientSpec
from gradsync.bucketing.threshold_tuner import ThresholdTuner
from gradsync.communicators.agreement import Agreement, digest_of
from gradsync.communicators.base import Communicator

_log = logging.getLogger("gradsync")

_EVENT = 'the choice of a threshold (threshold_bytes="auto")'
_AGREEMENT = Agreement(digest_of(_EVENT), lambda: _EVENT)


class AutoThreshold:
    """Looks for the threshold, step by step; begins anew where a step has other gradients than the one before."""

    def __init__(self) -> None:
        self._tuner = ThresholdTuner()
        self._specs: list[GradientSpec] = []
        self._is_over = False

    @property
    def is_measuring(self) -> bool:
        """Whether the step that is under way is one that counts."""
        return not self._is_over

    def after_step(self, specs: Sequence[GradientSpec], seconds: float, communicator: Communicator) -> int:
        """Takes the time of a step, and returns the threshold of the next one. Collective once the tuner has all.

        Args:
            specs: the gradients of the step.
            seconds: what its synchronisation has taken.
            communicator: of the ranks that must agree.
        """
        if self._is_over:
            return self._tuner.threshold_bytes
        if list(specs) != self._specs:
            self._tuner, self._specs = ThresholdTuner(), list(specs)
            self._tuner.begin(specs)
        else:
            self._tuner.add(seconds)
        if self._tuner.is_measured:
            self._decide(communicator)
        return self._tuner.threshold_bytes

    def _decide(self, communicator: Communicator) -> None:
        tuner = self._tuner
        figures = communicator.share_numbers("threshold_bytes='auto'", tuner.figures(), _AGREEMENT)
        threshold = tuner.decide(figures)
        self._is_over, self._specs = True, []
        slowest = [max(of_ranks) / 1e6 for of_ranks in zip(*figures, strict=True)]
        tried = ", ".join(
            f"{candidate / 2**20:g} MiB {milliseconds:.3g} ms"
            for candidate, milliseconds in zip(tuner.candidates, slowest, strict=True)
        )
        _log.info("%s: threshold_bytes is %g MiB from now on; tried: %s", communicator.label, threshold / 2**20, tried)
