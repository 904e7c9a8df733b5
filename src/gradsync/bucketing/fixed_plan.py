"""Which gradient goes into which bucket where that is known beforehand: pure arithmetic, as in plan.py.

The gradients may come in any order. A bucket is launched when all of its gradients have come and all buckets before it
have been launched, so that ranks whose gradients come in different orders launch in the same one.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradsync.bucketing.plan import Bucket, GradientSpec, plan_buckets


class FixedPlanner:
    """The buckets of a step whose gradients are known.

    Args:
        specs: the gradients, in the order in which they are expected.
        threshold_bytes, first_bucket_bytes: as for BucketPlanner.

    Attributes:
        threshold_bytes: see above.
        buckets: in the order of their launch.
        placed_in: number of the bucket of the gradient that was added last.
    """

    def __init__(
        self, specs: Sequence[GradientSpec], threshold_bytes: int, first_bucket_bytes: int | None = None
    ) -> None:
        self.threshold_bytes = threshold_bytes
        self.buckets = plan_buckets(specs, threshold_bytes, first_bucket_bytes)
        self.placed_in = 0
        self._place_of = {slot.position: at for at, bucket in enumerate(self.buckets) for slot in bucket.slots}
        self.reset()

    def add(self, spec: GradientSpec, position: int) -> list[Bucket]:
        """Notes that a gradient has come, and returns the buckets that can be launched because of it, in order.

        Args:
            spec: unused: the plan knows it.
            position: which of the gradients that the plan was made for; each once in a step.
        """
        at = self._place_of[position]
        self.placed_in = self.buckets[at].number
        self._missing[at] -= 1
        ready: list[Bucket] = []
        while self._next < len(self.buckets) and not self._missing[self._next]:
            ready.append(self.buckets[self._next])
            self._next += 1
        return ready

    def flush(self) -> list[Bucket]:
        """Begins a new step. Nothing is left to complete: all gradients have come, or none, in an empty step."""
        self.reset()
        return []

    def reset(self) -> None:
        """Forgets the step."""
        self._next = 0
        self._missing = [len(bucket.slots) for bucket in self.buckets]
