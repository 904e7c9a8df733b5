"""The memory of gradients that live inside the buckets.

The ranks reduce this memory in place. Each parameter has a view of this memory.

The memory belongs to the communicator: on the CPU the ranks share the memory, on a GPU it is device memory. A view
keeps the memory alive: a program may read its views after the communicator is closed, but the ranks cannot reduce the
memory any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gradsync.bucketing.plan import Bucket
from gradsync.communicators.agreement import Agreement, Description, digest_of
from gradsync.communicators.backend import ResidentMemory
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.for_bucketing import make_resident_memory
from gradsync.communicators.host_copy import CACHE_LINE_BYTES
from gradsync.errors import InvalidArgument
from gradsync.reduction import Array, dtype_of


class ByteRange(NamedTuple):
    """The range [begin, end) of a bucket's bytes in the memory."""

    begin_bytes: int
    end_bytes: int


class BucketMemory:
    """The memory of all buckets of a plan.

    Collective: every rank must construct it, for the same plan.

    Args:
        buckets: the buckets of the plan.
        communicator: the communicator that allocates the memory and reduces it.
        agreed: the function StepEvents.of_callback, which includes the callback in an Agreement.

    Attributes:
        memory: the memory of all buckets.
        views: the view of each gradient in this memory, by position.

    Raises:
        PlanMismatch: the ranks' plans differ.
        BackendUnavailable: there is not enough memory.
        RankFailed, CollectiveTimeout, CommunicatorClosed: see Communicator.all_reduce.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        communicator: Communicator,
        agreed: Callable[[Agreement], Agreement],
    ) -> None:
        self._ranges: dict[int, ByteRange] = {}
        end = 0
        for bucket in buckets:
            begin = -(-end // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
            end = begin + bucket.size_bytes
            self._ranges[bucket.number] = ByteRange(begin, end)
        self._arrays = communicator._arrays
        self._label = communicator.label
        self.memory: ResidentMemory = make_resident_memory(communicator, max(end, 1), agreed(_agreement(buckets)))
        self.views: list[Array] = [self.memory.bytes] * sum(len(bucket.slots) for bucket in buckets)
        self._names: list[str] = [""] * len(self.views)
        for bucket in buckets:
            flat = self.flat(bucket)
            for slot in bucket.slots:
                self.views[slot.position] = flat[slot.begin : slot.end].reshape(slot.spec.shape)
                self._names[slot.position] = slot.spec.name
        self._bounds = self._arrays.byte_bounds(self.memory.bytes)

    def byte_range(self, bucket: Bucket) -> ByteRange:
        """Returns the range of a bucket's bytes in the memory."""
        return self._ranges[bucket.number]

    def flat(self, bucket: Bucket) -> Array:
        """Returns the gradients of a bucket as one 1-D array of the bucket's dtype."""
        begin, end = self._ranges[bucket.number]
        flat: Array = self.memory.bytes[begin:end].view(dtype_of(bucket.dtype))
        return flat

    def holds(self, position: int, native: Array) -> bool:
        """Whether an array is the view that belongs to the gradient at a position.

        Raises:
            InvalidArgument: the array overlaps the view of another gradient: the reduction would mix the two.
        """
        own = self.views[position]
        if native is own:
            return True
        if not native.size:
            return False
        begin, end = self._arrays.byte_bounds(native)
        if end <= self._bounds[0] or begin >= self._bounds[1]:
            return False
        if self._arrays.byte_bounds(own) == (begin, end) and native.flags.c_contiguous:
            return True
        raise InvalidArgument(
            f"{self._label}: the gradient of {self._names[position]} lies in the buckets' memory, but not in the "
            "part for this parameter: hand over the array that gradient_buffers() returned for it, or a copy"
        )


def _agreement(buckets: Sequence[Bucket]) -> Agreement:
    """Returns the Agreement that the ranks compare before they allocate the memory of the buckets."""
    specs = [bucket.specs for bucket in buckets]

    def describe() -> Description:
        items = tuple([spec.item for of_bucket in specs for spec in of_bucket])
        what = f"gradient_buffers of {len(items)} gradients in {len(specs)} buckets"
        return Description(what, items=items, item="gradient {}")

    return Agreement(digest_of("gradient_buffers", specs), describe)
