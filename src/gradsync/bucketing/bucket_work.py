"""What the reduction of one bucket works on; kept from step to step where the same arrays come again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from gradsync.bucketing.bucket_memory import BucketMemory
from gradsync.bucketing.gradient_lock import Holder, LockedGradients
from gradsync.bucketing.pending import PendingGradient
from gradsync.bucketing.plan import Bucket
from gradsync.communicators.communicator import Communicator, ListReduction
from gradsync.reduction import Array, ReduceOp


class BucketWork(NamedTuple):
    """The arrays of one bucket, one for each slot; see ListReduction of communicator.py.

    Attributes:
        bucket: which gradients.
        sources, targets: flat arrays.
        write_backs: pairs of a target and the native array that gets its values afterwards.
        results: native arrays that hold the reduced values in the end.
        reduction: of these very arrays, where they will come again.
        locked: those of the gradients that are read-only until then; None where there are none.
        memory: where the gradients live in the bucket: the memory, of which `sources` and `targets` are one flat view.
    """

    bucket: Bucket
    sources: list[Array]
    targets: list[Array]
    write_backs: list[tuple[Array, Array]]
    results: list[Any]
    reduction: ListReduction | None = None
    locked: LockedGradients | None = None
    memory: BucketMemory | None = None

    def reduction_on(
        self, communicator: Communicator, op: ReduceOp, *, looks: bool, recurs: bool = False
    ) -> ListReduction:
        """Returns the reduction of the arrays; see ListReduction of communicator.py."""
        return ListReduction(
            communicator, self.sources, self.targets, op, write_backs=self.write_backs, looks=looks, recurs=recurs
        )


def work_of(bucket: Bucket, entries: Sequence[PendingGradient], holder: Holder) -> BucketWork:
    """Returns the work for a bucket, given its gradients by slot, and who has them in flight."""
    return BucketWork(
        bucket,
        [entry.source for entry in entries],
        [entry.target for entry in entries],
        [(entry.target, entry.write_back) for entry in entries if entry.write_back is not None],
        [entry.target if entry.write_back is None else entry.write_back for entry in entries],
        locked=LockedGradients(entries, holder) or None,
    )


def resident_work(bucket: Bucket, memory: BucketMemory) -> BucketWork:
    """Returns the work for a bucket whose gradients live in it."""
    flat = memory.flat(bucket)
    return BucketWork(bucket, [flat], [flat], [], [flat], memory=memory)
