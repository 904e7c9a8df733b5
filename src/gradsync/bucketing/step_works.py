"""What the buckets of a step work on, kept for the next step where the same arrays may come again."""

from __future__ import annotations

from collections.abc import Sequence

from gradsync.bucketing.bucket_work import BucketWork, resident_work, work_of
from gradsync.bucketing.gradient_lock import Holder
from gradsync.bucketing.plan import Bucket
from gradsync.bucketing.step_plan import StepPlan
from gradsync.bucketing.step_reduction import StepReduction
from gradsync.communicators.communicator import Communicator


class StepWorks:
    """The work of each bucket.

    Args:
        plan: knows the gradients.
        reduction: says what can be prepared.
    """

    def __init__(self, plan: StepPlan, reduction: StepReduction) -> None:
        self._plan = plan
        self._reduction = reduction
        self._known: dict[int, BucketWork] = {}  # by bucket; of the last step where its arrays may recur
        self._renewed: set[int] = set()  # the buckets in which some array is not known from the last step

    def renew(self, number: int) -> None:
        """Notes that an array has come for a bucket that the last step did not have there."""
        self._renewed.add(number)

    def of(self, bucket: Bucket, communicator: Communicator, holder: Holder) -> BucketWork:
        """Returns the work for a bucket whose gradients have come, and are the holder's."""
        number = bucket.number
        known = self._known.get(number)
        if known is not None and known.bucket is bucket and (known.memory is not None or number not in self._renewed):
            return known
        if self._plan.memory is not None:
            work = self._known[number] = resident_work(bucket, self._plan.memory)
            return work
        entries = [self._plan.arrivals.entry(slot.position) for slot in bucket.slots]
        work = work_of(bucket, entries, holder)
        if not all(entry.recurs for entry in entries):
            self._known.pop(number, None)
            return work
        if self._reduction.can_prepare(work.sources[0].dtype):
            looks = communicator.finder is not None and self._reduction.values.looks_for_nonfinite
            reduction = work.reduction_on(communicator, self._reduction.op, looks=looks, recurs=True)
            work = work._replace(reduction=reduction)
        self._known[number] = work
        return work

    def end_step(self, reduced: Sequence[Bucket]) -> None:
        """Lets go of the arrays of buckets that the step did not have; an empty step says nothing about the next."""
        self._renewed.clear()
        if reduced:
            for number in self._known.keys() - {bucket.number for bucket in reduced}:
                del self._known[number]

    def clear(self) -> None:
        """Lets go of all arrays."""
        self._known.clear()
