"""Which threshold a training's own first steps recommend, for threshold_bytes="auto": pure logic, no clock, no ranks.

    step 1: the default threshold; begin(specs) then says which candidates are worth a try
    each candidate: one step to get used to its plan, then some that are measured; add(seconds) after each step
    decide(figures of all ranks): from the same numbers the same threshold on every rank

A step's time is the fairest measure there is: small buckets overlap more of the backward pass, large ones cost less
each, and which matters more depends on the model, the machine and the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log

from gradsync.bucketing.plan import DEFAULT_THRESHOLD_BYTES, Bucket, GradientSpec, checked_bytes, plan_buckets
from gradsync.errors import InvalidArgument

MIB = 1024**2
#: About three times as much each; between them the time of a step changes little.
CANDIDATES_BYTES = (MIB // 4, 1 * MIB, 3 * MIB, 10 * MIB, 32 * MIB, 100 * MIB)

#: The decision is there after so many steps at most, the first one included.
MAX_STEPS = 20
_MAX_CANDIDATES = 6  # each takes three steps or more
_MOST_MEASURED_STEPS = 4
# Differences below it are noise, and not worth leaving the default for.
_TIE_PERCENT = 2


class ThresholdTuner:
    """Says which threshold each step shall use, takes its seconds, and decides.

    All ranks make their tuners alike and call the same methods after the same steps. A tuner is for one list of
    gradients: where a step brings others, make a new one.

    Args:
        candidates: thresholds in bytes, at most six.
        default_bytes: that of the first step; ties go to the candidate nearest to it.

    Raises:
        InvalidArgument: no candidates, more than six, or one that is no integer of at least 1.
    """

    def __init__(
        self, candidates: Sequence[int] = CANDIDATES_BYTES, default_bytes: int = DEFAULT_THRESHOLD_BYTES
    ) -> None:
        candidates = [checked_bytes("a threshold", threshold) for threshold in candidates]
        default_bytes = checked_bytes("a threshold", default_bytes)
        if not 1 <= len(set(candidates)) <= _MAX_CANDIDATES:
            raise InvalidArgument(
                f"the tuner needs 1 to {_MAX_CANDIDATES} candidates, to be done within {MAX_STEPS} steps, "
                f"got {len(set(candidates))}"
            )
        self._default_bytes = default_bytes
        self._candidates = tuple(sorted(set(candidates)))
        self._measured_steps = 0  # of each candidate
        self._seconds: list[list[float]] = []  # of each candidate's steps, the first one to get used to it
        self._decided: int | None = None

    @property
    def candidates(self) -> tuple[int, ...]:
        """The thresholds that are tried, in this order; after begin() those that give different buckets."""
        return self._candidates

    @property
    def threshold_bytes(self) -> int:
        """What the next step shall use."""
        if self._decided is not None:
            return self._decided
        if not self._seconds:
            return self._default_bytes
        return self._candidates[min(self._current(), len(self._candidates) - 1)]

    @property
    def is_measured(self) -> bool:
        """Whether all figures are there: time for the ranks to share them, and to decide."""
        return bool(self._seconds) and self._current() == len(self._candidates)

    @property
    def total_steps(self) -> int:
        """Steps before the decision, the first one included; known after begin()."""
        return 1 + len(self._candidates) * (1 + self._measured_steps if self._measured_steps else 0)

    def begin(self, specs: Sequence[GradientSpec]) -> None:
        """Learns, after the first step, what the gradients are: drops candidates that would give the same buckets.

        Where one is left there is nothing to measure.

        Args:
            specs: the gradients of a step, in the order in which they are handed over.
        """
        nearest_by_plan: dict[tuple[Bucket, ...], int] = {}
        for threshold in sorted(self._candidates, key=self._distance):
            nearest_by_plan.setdefault(tuple(plan_buckets(specs, threshold)), threshold)
        self._candidates = tuple(sorted(nearest_by_plan.values()))
        if len(self._candidates) > 1:
            self._measured_steps = min((MAX_STEPS - 1) // len(self._candidates) - 1, _MOST_MEASURED_STEPS)
        self._seconds = [[] for _ in self._candidates]

    def add(self, seconds: float) -> None:
        """Takes the time of a step that used threshold_bytes; to be called while not is_measured, after begin()."""
        self._seconds[self._current()].append(seconds)

    def figures(self) -> list[int]:
        """Returns this rank's figure for each candidate, for the ranks to share: its fastest step, in nanoseconds."""
        return [max(round(min(seconds[1:]) * 1e9), 1) if seconds else 1 for seconds in self._seconds]

    def decide(self, figures_by_rank: Sequence[Sequence[int]]) -> int:
        """Returns the threshold for all further steps: the fastest where each is as slow as on its slowest rank.

        Args:
            figures_by_rank: figures() of every rank.

        Raises:
            InvalidArgument: a rank has figures for another number of candidates.
        """
        if not figures_by_rank or any(len(figures) != len(self._candidates) for figures in figures_by_rank):
            raise InvalidArgument(
                f"the tuner needs {len(self._candidates)} figures of every rank, got "
                f"{[len(figures) for figures in figures_by_rank]}"
            )
        slowest = [max(figures) for figures in zip(*figures_by_rank, strict=True)]
        best = min(slowest)
        near = [
            threshold
            for threshold, figure in zip(self._candidates, slowest, strict=True)
            if figure * 100 <= best * (100 + _TIE_PERCENT)  # integers: no rank rounds otherwise
        ]
        self._decided = min(near, key=self._distance)
        return self._decided

    def _current(self) -> int:
        """Returns the candidate whose turn it is; their number when all are through."""
        if not self._measured_steps:
            return len(self._candidates)
        return sum(len(seconds) > self._measured_steps for seconds in self._seconds)

    def _distance(self, threshold: int) -> tuple[float, int]:
        """Orders thresholds by their distance from the default; of two as far from it the smaller is the nearer."""
        return abs(log(threshold / self._default_bytes)), threshold
