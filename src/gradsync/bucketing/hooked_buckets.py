"""Buckets that a hook of the program's own reduces: packed and handed to it at once, delivered at the flush."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from gradsync.bucketing.bucket_hook import BucketHook, GradientBucket, result_of
from gradsync.bucketing.bucket_watch import BucketWatch
from gradsync.bucketing.bucket_work import BucketWork
from gradsync.bucketing.compression import WireFormat
from gradsync.bucketing.flat_buffer import array_module
from gradsync.communicators.communicator import Communicator
from gradsync.futures import CollectiveEnd
from gradsync.reduction import Array, ReduceOp


class _UnderWay(NamedTuple):
    """A bucket that a hook has taken."""

    work: BucketWork
    bucket: GradientBucket
    value: Any
    mark: Any  # of the work that the hook has queued
    mean_over: int | None
    end: CollectiveEnd
    watch: BucketWatch | None


class HookedBuckets:
    """The buckets of a step that a hook reduces. On a GPU all that is done here goes to the current stream.

    Args:
        hook: see bucket_hook.py.
        wire: whose scales are applied.
    """

    def __init__(self, hook: BucketHook, wire: WireFormat) -> None:
        self._hook = hook
        self._wire = wire
        self._under_way: list[_UnderWay] = []
        self._flats: dict[int, Array] = {}  # by bucket: several are under way at once

    def begin(
        self,
        work: BucketWork,
        communicator: Communicator,
        op: ReduceOp,
        mean_over: int | None,
        producers: Sequence[Any],
        end: CollectiveEnd,
        watch: BucketWatch | None,
    ) -> None:
        """Packs a bucket, scaled, and hands it to the hook.

        Args:
            work: the bucket; ranks have agreed on it.
            communicator: whose ranks reduce it.
            op: of the reduction.
            mean_over: divides a sum by this number afterwards.
            producers: marks (see mark_work) of the work that made the sources.
            end: of its gradients.
            watch: looks at the values before and after.
        """
        communicator.follow_work(producers)
        if watch is not None:
            watch.before(work.sources)
        flat = self._packed(work, communicator)
        specs = work.bucket.specs
        names, shapes = tuple([spec.label for spec in specs]), tuple([spec.shape for spec in specs])
        bucket = GradientBucket(work.bucket.number, names, shapes, flat, communicator, op)
        value = self._hook(bucket)
        self._under_way.append(_UnderWay(work, bucket, value, communicator.mark_work(), mean_over, end, watch))

    def finish(self) -> None:
        """Waits for the hook's results, in order, and brings them to the gradients."""
        under_way, self._under_way = self._under_way, []
        for work, bucket, value, mark, mean_over, end, watch in under_way:
            communicator = bucket.communicator
            if mark is not None:
                communicator.follow_work([mark])  # the gradient may have been handed over on another stream
            reduced = result_of(value, bucket)
            if mean_over is not None:
                communicator.arrays.divide(reduced, mean_over)
            self._deliver(reduced, work, communicator)
            if watch is not None:
                watch.after(work.targets)
            if work.locked is not None:
                work.locked.put_back()
            end.finish(None, None, communicator.mark_end())

    def reset(self) -> None:
        """Forgets what is under way, and the memory that it may still use: the step has failed."""
        self._under_way.clear()
        self._flats.clear()

    def _packed(self, work: BucketWork, communicator: Communicator) -> Array:
        arrays, sources = communicator.arrays, work.sources
        size = work.bucket.size_elements
        if work.memory is not None:
            flat = sources[0]
        else:
            known = self._flats.get(work.bucket.number)
            if known is None or known.size != size or known.dtype != sources[0].dtype:
                known = arrays.scratch(size, sources[0].dtype)
                self._flats[work.bucket.number] = known
            flat = known
            array_module(flat).concatenate(sources, out=flat)
        if self._wire.prescale != 1.0:
            arrays.multiply(flat, self._wire.prescale, flat)
        return flat

    def _deliver(self, reduced: Array, work: BucketWork, communicator: Communicator) -> None:
        arrays, postscale, begin = communicator.arrays, self._wire.postscale, 0
        for target in work.targets:
            end = begin + target.size
            if target is not reduced or postscale != 1.0:
                arrays.multiply(reduced[begin:end], postscale, target)
            begin = end
        for target, native in work.write_backs:
            arrays.write_back(target, native)
