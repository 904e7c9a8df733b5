"""threshold_bytes="auto": the first steps try thresholds, then the ranks agree on one.

Whatever the threshold, the results are the same on all ranks, and on the CPU the same bits as with any other one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from gradsync.bucketing.plan import GradientSpec
from gradsync.bucketing.step_reduction import StepReduction
from gradsync.bucketing.threshold_tuner import ThresholdTuner
from gradsync.communicators.agreement import Agreement, digest_of
from gradsync.communicators.base import Communicator

_log = logging.getLogger("gradsync")

_EVENT = 'the choice of a threshold (threshold_bytes="auto")'
AUTO_THRESHOLD = Agreement(digest_of(_EVENT), lambda: _EVENT)

_MOST_SEARCHES = 5


class AutoThreshold:
    """Looks for the threshold, step by step; begins anew where a step has other gradients than the one before.

    Where that happens again and again there is no one threshold to find: then the default one stays.
    """

    def __init__(self) -> None:
        self._tuner = ThresholdTuner()
        self._searches = 0
        self._specs: list[GradientSpec] = []
        self._is_over = False
        self._is_beside_host = False
        self._began = 0.0
        self._seconds = 0.0

    def begin_step(self, reduction: StepReduction, communicator: Communicator) -> None:
        """Notes that the first gradient of a step has come."""
        if not self._is_over:
            self._is_beside_host = communicator.runs_beside_host
            self._began = self._now(reduction)

    def end_step(self, reduction: StepReduction) -> None:
        """Notes that the step's collectives have been called; on a GPU, waits for their end."""
        if not self._is_over:
            reduction.await_launched()
            self._seconds = self._now(reduction) - self._began

    def next_threshold(
        self, specs: Sequence[GradientSpec], communicator: Communicator, agreement: Agreement = AUTO_THRESHOLD
    ) -> int:
        """Returns the threshold of the step to come. Collective once all that counts has been measured.

        Args:
            specs: the gradients of the step that has ended.
            communicator: of the ranks that must agree.
            agreement: what this rank believes all of them are about to do, should they tell their figures.
        """
        if self._is_over:
            return self._tuner.threshold_bytes
        if list(specs) != self._specs:
            self._tuner, self._specs = ThresholdTuner(), list(specs)
            self._searches += 1
            if self._searches > _MOST_SEARCHES:
                self._is_over = True
                _log.info("%s: threshold_bytes stays the default: the gradients change too often", communicator.label)
                return self._tuner.threshold_bytes
            self._tuner.begin(specs)
        else:
            self._tuner.add(self._seconds)
        if self._tuner.is_measured:
            self._decide(communicator, agreement)
        return self._tuner.threshold_bytes

    def _now(self, reduction: StepReduction) -> float:
        """Returns the clock of the step: where collectives run beside the host, of all that it does from the first
        gradient on, which they may hide behind; else of the collectives alone, which all other work only adds to.
        """
        return time.perf_counter() if self._is_beside_host else reduction.statistics.communication_seconds

    def _decide(self, communicator: Communicator, agreement: Agreement) -> None:
        tuner = self._tuner
        figures = communicator.share_numbers("threshold_bytes='auto'", tuner.figures(), agreement)
        threshold = tuner.decide(figures)
        self._is_over, self._specs = True, []
        slowest = [max(of_ranks) / 1e6 for of_ranks in zip(*figures, strict=True)]
        tried = ", ".join(
            f"{candidate / 2**20:g} MiB {milliseconds:.3g} ms"
            for candidate, milliseconds in zip(tuner.candidates, slowest, strict=True)
        )
        _log.info("%s: threshold_bytes is %g MiB from now on; tried: %s", communicator.label, threshold / 2**20, tried)
