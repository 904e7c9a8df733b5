"""Runs the collectives of a step: the all-reduce of each complete bucket, and the check that all ranks end the step.

The backend does the work of an all-reduce: it compares the ranks' digests of the bucket (see Agreement), copies the
bytes, adds up, and divides for a mean. For shared memory, this code is in communicators/shared_memory/all_reduce.py. If
the digests differ, the backend raises PlanMismatch on every rank, and Step.fail ends the step.

A hook is a function of the program that replaces the all-reduce of each bucket. gradsync calls it with each bucket of a
step, in the same order on every rank, and it reduces the bucket's buffer in place. examples/hooks.py has some hooks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradsync.bucketing.agreements import Flush, StepEvents
from gradsync.bucketing.gradient import BucketMemory, GradientEntry
from gradsync.bucketing.guard import Holder, LockedGradients
from gradsync.bucketing.lists import array_module
from gradsync.bucketing.options import Options
from gradsync.bucketing.plan import Bucket
from gradsync.bucketing.values import BucketWatch, Values
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.for_bucketing import ListReduction
from gradsync.communicators.host_values import Checks
from gradsync.errors import InvalidArgument
from gradsync.futures import Completion
from gradsync.reduction import Array


@dataclass
class Statistics:
    """Counters of a callback since its construction.

    Attributes:
        steps: the number of flushes that reduced gradients.
        gradients: the number of gradients in all steps that have ended, with the zeros for missing gradients.
        all_reduces: the number of buckets reduced, also by a hook.
        bytes_all_reduced: the size of all reduced buckets together, in the gradients' own dtypes.
        communication_seconds: the time that the host spends in the reductions and at the flush: for packing, waiting,
            reducing and splitting. If a GPU does this work, the host's time to launch it counts, and the time in which
            the host waits for the GPU.
        skipped_steps: the number of steps whose gradients were not finite, with nonfinite="skip".
    """

    steps: int = 0
    gradients: int = 0
    all_reduces: int = 0
    bytes_all_reduced: int = 0
    communication_seconds: float = 0.0
    skipped_steps: int = 0


@dataclass(slots=True, eq=False)
class Reduction:
    """The reduction of one bucket, with its arrays. The next step may use this object again; see Reducer.reduce.

    Attributes:
        bucket: the bucket that is reduced.
        sources: flat arrays of the values to reduce, one for each slot. If gradients live in the bucket, the only
            source is a flat view of the whole bucket.
        targets: flat arrays for the results, in the order of the sources; see the class ListReduction in
            for_bucketing.py.
        write_backs: pairs of a target and a native array; after the reduction, the target is copied into the native
            array.
        results: the native arrays that hold the reduced values after the reduction.
        locked: the gradients that are read-only until the reduction ends; None if there are none.
        memory: the memory of the buckets, if gradients live in it; else None.
        of_list: the ListReduction of the sources. If the callback has a hook, `of_list` is not set.
        checks: the checks that the communicator makes during the reduction; none with a hook.
    """

    bucket: Bucket
    sources: list[Array]
    targets: list[Array]
    write_backs: list[tuple[Array, Array]]
    results: list[Any]
    locked: LockedGradients | None = None
    memory: BucketMemory | None = None
    of_list: ListReduction = field(init=False)
    checks: Checks = Checks.NONE


class Reducer:
    """Runs the collectives of a callback, step after step.

    Args:
        options: the options of the callback.

    Attributes:
        op: the operator of the reduction: sum or mean.
        events: the object that makes the Agreements of a step.
        statistics: the counters of all steps.
        values: the object that checks gradients for NaN and infinity, computes their norm, and clips them.
    """

    def __init__(self, options: Options) -> None:
        self.op = options.op
        self.events = StepEvents(options.op, options.settings(), options.threshold_bytes)
        self.statistics = Statistics()
        self.values = Values(options.nonfinite, options.clip_norm)
        self._options = options
        self._hook: BucketHook | None = None
        self._launched: list[Completion] = []  # this step's reductions that run beside the host
        self._last: dict[int, Reduction] = {}  # by bucket: reductions of the last step whose arrays may arrive again

    def use_hook(self, hook: BucketHook | None) -> None:
        """Uses a hook, or no hook, for the buckets of later steps; see AllreduceCallback.register_hook."""
        self._hook = hook
        self._last.clear()
        self.events.change_settings(self._options.settings() | ({} if hook is None else {"hook": ""}))

    def renew(self, number: int) -> None:
        """Forgets a bucket's reduction, because this step has a new array in the bucket; keeps it for bucket views."""
        known = self._last.get(number)
        if known is not None and known.memory is None:
            del self._last[number]

    def keep(self, numbers: Iterable[int]) -> None:
        """Forgets the reductions of all buckets whose numbers are not in `numbers`."""
        for number in self._last.keys() - set(numbers):
            del self._last[number]

    def forget(self) -> None:
        """Forgets all reductions and their arrays."""
        self._last.clear()

    def reduce(
        self,
        bucket: Bucket,
        entries: Mapping[int, GradientEntry],
        memory: BucketMemory | None,
        communicator: Communicator,
        holder: Holder,
        producers: Sequence[Any],
    ) -> Completion | None:
        """Reduces a complete bucket, and unlocks its gradients.

        Args:
            bucket: a bucket whose gradients have all arrived.
            entries: the gradients of the step, by position.
            memory: the memory of the buckets, if gradients live in it; else None.
            communicator: the communicator whose ranks reduce the buckets.
            holder: the callback that has the gradients in flight.
            producers: GPU events, recorded after the work that computes the gradients; see Backend.mark_work.
        """
        started = time.perf_counter()
        reduction = self._last.get(bucket.number)
        if reduction is None or reduction.bucket is not bucket:
            reduction = self._reduction_of(bucket, entries, memory, communicator, holder)
        agreement = self.events.next(bucket)
        watch = None
        if self.values.checks:
            watch = self.values.watch(bucket, reduction.results, communicator, reduction.checks)
        if self._hook is None:
            completion = reduction.of_list.run(agreement, watch=watch, producers=producers)
        else:
            communicator._agree(agreement)
            completion = self._run_hook(self._hook, reduction, communicator, watch, producers)
        if completion is not None:
            self._launched.append(completion)
        if reduction.locked is not None:
            if completion is None or self._hook is not None:  # the results of a hook are in host arrays already
                reduction.locked.unlock()
            else:
                completion.before_done(reduction.locked.unlock)
        statistics = self.statistics
        statistics.communication_seconds += time.perf_counter() - started
        statistics.all_reduces += 1
        statistics.bytes_all_reduced += bucket.size_bytes
        return completion

    def _reduction_of(
        self,
        bucket: Bucket,
        entries: Mapping[int, GradientEntry],
        memory: BucketMemory | None,
        communicator: Communicator,
        holder: Holder,
    ) -> Reduction:
        """Makes the Reduction of a complete bucket; the next step uses this object again if all arrays arrive again."""
        if memory is None:
            own = [entries[slot.position] for slot in bucket.slots]
            outs = [entry.out for entry in own]
            reduction = Reduction(
                bucket,
                [out.source for out in outs],
                [out.target for out in outs],
                [(out.target, out.write_back) for out in outs if out.write_back is not None],
                [out.target if out.write_back is None else out.write_back for out in outs],
                LockedGradients(own, holder) or None,
            )
            recurs = all(entry.recurs for entry in own)
        else:
            flat, recurs = memory.flat(bucket), True
            reduction = Reduction(bucket, [flat], [flat], [], [flat], memory=memory)
        if self._hook is None:
            self._prepare(reduction, communicator, recurs=recurs)
        self._last.pop(bucket.number, None)
        if recurs:
            self._last[bucket.number] = reduction
        return reduction

    def _prepare(self, reduction: Reduction, communicator: Communicator, *, recurs: bool) -> None:
        """Decides how a bucket's values are checked, and prepares the all-reduce.

        Args:
            reduction: the Reduction of the bucket.
            communicator: the communicator whose ranks reduce the bucket.
            recurs: whether the same arrays will be reduced again.
        """
        memory, backend = reduction.memory, communicator._backend
        within = Checks.NONE
        if backend.finder is not None:
            within |= Checks.NONFINITE
        if backend.squares is not None:
            within |= Checks.SQUARES
        reduction.checks = self.values.checks & within  # a BucketWatch makes the remaining checks
        reduction.of_list = ListReduction(
            communicator,
            reduction.sources,
            reduction.targets,
            self.op,
            write_backs=reduction.write_backs,
            checks=reduction.checks,
            recurs=recurs,
            resident=None if memory is None else memory.memory,
        )

    def _run_hook(
        self,
        hook: BucketHook,
        reduction: Reduction,
        communicator: Communicator,
        watch: BucketWatch | None,
        producers: Sequence[Any],
    ) -> Completion | None:
        """Packs a bucket, has the hook reduce it, and splits it again; on a GPU all on the current stream."""
        bucket, sources, targets, arrays = reduction.bucket, reduction.sources, reduction.targets, communicator._arrays
        communicator._follow_work(producers)
        if watch is not None:
            watch.before(sources)
        buffer, is_packed = sources[0], len(sources) > 1 or sources[0] is not targets[0]
        if is_packed:
            buffer = arrays.scratch(bucket.size_elements, buffer.dtype)
            array_module(buffer).concatenate(sources, out=buffer)
        names = tuple([spec.label for spec in bucket.specs])
        returned = hook(GradientBucket(buffer, names, bucket.number, communicator, self.op.value))
        if returned is not None and returned is not buffer:
            raise InvalidArgument(
                f"{communicator.label}: a hook must leave the reduced values in bucket.buffer, and return nothing, got "
                f"{type(returned).__name__}: write bucket.buffer[...] = ..."
            )
        if is_packed:
            for slot, target in zip(bucket.slots, targets, strict=True):
                arrays.assign(buffer[slot.begin : slot.end], target)
        if watch is not None:
            watch.after(targets)
        for target, native in reduction.write_backs:
            arrays.write_back(target, native)
        return communicator._mark_end()

    def end(self, gradients: int, communicator: Communicator) -> Completion | None:
        """Checks that the step ends after `gradients` gradients on all ranks; ends the nonfinite check and clipping.

        On a GPU, work that the caller queues next begins after the reductions.

        Returns:
            The end of GPU work that changes the results after their reduction, such as clipping; None if there is no
            such work.

        Raises:
            PlanMismatch: the step of another rank ends differently; all ranks raise this error.
            NonFiniteGradient: some rank's gradients, or their sum, are not finite, and the policy is "raise"; all ranks
                raise this error.
        """
        started = time.perf_counter()
        agreement, later = self.events.next(Flush(gradients)), None
        if not self.values.checks:
            communicator._agree(agreement)
        self.order_launched()
        if self.values.checks:
            later = self.values.end(communicator, agreement)
            self.statistics.skipped_steps += self.values.skip_step
        self.statistics.communication_seconds += time.perf_counter() - started
        return later

    def order_launched(self) -> None:
        """Makes later work on the current stream wait for this step's reductions.

        If a reduction writes to gradients in host memory, the host waits until the reduction has ended.
        """
        for completion in self._launched:
            completion.order()

    def agree_on_missing(self, gradients: int, missing: tuple[str, ...], communicator: Communicator) -> None:
        """Checks that all ranks have `gradients` gradients in this step, and that all lack the gradients in `missing`.

        Raises:
            PlanMismatch: the ranks differ; all ranks raise this error.
        """
        communicator._agree(self.events.next(Flush(gradients, missing)))

    def begin_step(self) -> None:
        """Begins a step; keeps the Agreements of the last step, because the new step may repeat the last step."""
        self.events.begin_step()
        self._launched.clear()


# -- Hooks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class GradientBucket:
    """The argument of a hook: a bucket whose gradients stand one after the other in a flat buffer.

    Attributes:
        buffer: a 1-D array of this rank's values, on the communicator's device. The hook replaces them by the reduced
            values. The array is valid until the hook returns.
        names: the names of the gradients, in the order of the buffer. A name that is a string is unchanged. Another
            name is given as its repr(), and an array as its index, such as "#3".
        index: the bucket's number in its step, from 0.
        communicator: the communicator whose ranks reduce the bucket.
        op: what the hook computes: "sum" or "mean".
    """

    buffer: Array
    names: tuple[str, ...]
    index: int
    communicator: Communicator
    op: str


#: A hook leaves the reduced values in the bucket's buffer.
BucketHook = Callable[[GradientBucket], Any]
