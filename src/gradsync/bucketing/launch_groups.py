"""Which complete buckets are reduced by one collective: those that lie side by side in memory where gradients live.

Where collectives run beside the program, a bucket is launched as soon as it is complete. Where they do not, nothing is
gained by that, and each of several collectives costs the ranks two meetings. What is merged follows from the order of
launch alone, so that all ranks merge alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gradsync.bucketing.bucket_memory import BucketMemory
from gradsync.bucketing.plan import Bucket

# Measured, as ResNet-50's gradients in ranges of 10 MB and of 100: a sixth of the time is waiting in the former.
_MERGED_BYTES = 64 * 1024**2


class LaunchGroups:
    """The buckets of one step, in launch order.

    Args:
        memory: where the gradients live; None: each bucket is reduced alone.
    """

    def __init__(self, memory: BucketMemory | None) -> None:
        self._memory = memory
        self._held: list[Bucket] = []
        self._held_bytes = 0

    def take(self, complete: Iterable[Bucket], *, at_end: bool = False) -> Iterator[Bucket]:
        """Takes complete buckets, and gives what is to be reduced now; at the end of a step, what was held too."""
        for bucket in complete:
            yield from self.add(bucket)
        if at_end:
            yield from self.flush()

    def add(self, bucket: Bucket) -> list[Bucket]:
        """Takes a complete bucket, and returns what can be reduced now."""
        if self._memory is None:
            return [bucket]
        ready = self.flush() if self._held and self._held[-1].dtype != bucket.dtype else []
        self._held.append(bucket)
        self._held_bytes += bucket.size_bytes
        return ready + self.flush() if self._held_bytes >= _MERGED_BYTES else ready

    def flush(self) -> list[Bucket]:
        """Returns what is left, as one bucket."""
        held, self._held, self._held_bytes = self._held, [], 0
        if self._memory is None or not held:
            return []
        return [self._memory.merged(held)]
