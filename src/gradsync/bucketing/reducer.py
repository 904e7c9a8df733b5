"""Runs the collectives of a step: the all-reduce of each complete bucket, and the check that all ranks end the step.

The backend does the work of an all-reduce: it compares the ranks' digests of the bucket (see Agreement), copies the
bytes, adds up, and divides for a mean. For shared memory, this code is in communicators/shared_memory/all_reduce.py. If
the digests differ, the backend raises PlanMismatch on every rank, and Step.fail ends the step.

A hook is a function of the program that replaces the all-reduce of each bucket. gradsync calls the hook with each
bucket of a step, in the same order on every rank. The hook returns the reduced values of the bucket's flat buffer. The
hooks of all ranks must call the same collectives on the bucket's communicator. gradsync/hooks.py defines some hooks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gradsync.bucketing.agreements import Flush, KnownCallback, StepEvents
from gradsync.bucketing.gradient import BucketMemory, GradientEntry
from gradsync.bucketing.guard import Holder, LockedGradients
from gradsync.bucketing.lists import array_module, get_offsets, param_pack_split
from gradsync.bucketing.options import Options
from gradsync.bucketing.plan import Bucket
from gradsync.bucketing.values import BucketWatch, Values
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.for_bucketing import ListReduction, Stage
from gradsync.communicators.host_arrays import ArrayKind
from gradsync.communicators.host_values import Checks
from gradsync.errors import CommunicatorClosed, InvalidArgument
from gradsync.futures import Completion
from gradsync.reduction import Array, ReduceOp


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
        mean_over: inside join(), the divisor of a sum if not all ranks have gradients; else None.
        of_list: the ListReduction of the sources. If the callback has a hook, `of_list` is not set.
        divided: inside join(), the Stage that divides a sum by `mean_over`; else None.
        checks: the checks that the communicator makes during the reduction; none with a hook.
    """

    bucket: Bucket
    sources: list[Array]
    targets: list[Array]
    write_backs: list[tuple[Array, Array]]
    results: list[Any]
    locked: LockedGradients | None = None
    memory: BucketMemory | None = None
    mean_over: int | None = None
    of_list: ListReduction = field(init=False)
    divided: Stage | None = None
    checks: Checks = Checks.NONE


class Reducer:
    """Runs the collectives of a callback, step after step.

    Args:
        options: the options of the callback.

    Attributes:
        op: the operator of the reduction: sum or mean.
        events: the object that makes the Agreements of a step.
        statistics: the counters of all steps.
        count_present: inside join(), the function Join.count, called before the first collective of a step; else None.
        values: the object that checks gradients for NaN and infinity, computes their norm, and clips them.
        is_hooked: whether a hook reduces the buckets.
    """

    def __init__(self, options: Options) -> None:
        self.op = options.op
        self.events = StepEvents(options.op, options.settings())
        self.statistics = Statistics()
        self.count_present: Callable[[int], int] | None = None
        self.values = Values(options.nonfinite, options.clip_norm)
        self.is_hooked = False
        self._options = options
        self._hooked: _HookedBuckets | None = None
        self._present: int | None = None  # the number of ranks with gradients for this step, once it is counted
        self._launched: list[Completion] = []  # this step's reductions that run beside the host
        self._last: dict[int, Reduction] = {}  # by bucket: reductions of the last step whose arrays may arrive again

    def begin_with(self, callback: KnownCallback | None) -> None:
        """Starts to use a new communicator, and forgets the arrays of the previous one.

        Args:
            callback: the callback's number and name on the new communicator; None before its first use there.
        """
        self.events.change_callback(callback)
        self._last.clear()
        if self._hooked is not None:
            self._hooked.reset()

    def use_hook(self, hook: BucketHook | None) -> None:
        """Uses a hook, or no hook, for the buckets of later steps; see AllreduceCallback.register_hook."""
        self._hooked = None if hook is None else _HookedBuckets(hook)
        self.is_hooked = hook is not None
        self._last.clear()
        settings = self._options.settings()
        self.events.change_settings(settings if hook is None else settings | {"hook": settings_of(hook)})

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
        """Reduces a complete bucket and unlocks its gradients, or passes the bucket to the hook; see finish_hooked.

        Args:
            bucket: a bucket whose gradients have all arrived.
            entries: the gradients of the step, by position.
            memory: the memory of the buckets, if gradients live in it; else None.
            communicator: the communicator whose ranks reduce the buckets.
            holder: the callback that has the gradients in flight.
            producers: GPU events, recorded after the work that computes the gradients; see Backend.mark_work.
        """
        started = time.perf_counter()
        mean_over = None if self.count_present is None else self._mean_over(communicator)
        reduction = self._last.get(bucket.number)
        if reduction is None or reduction.bucket is not bucket or reduction.mean_over != mean_over:
            reduction = self._reduction_of(bucket, entries, memory, communicator, holder, mean_over)
        agreement = self.events.next(bucket)
        completion = watch = None
        if self.values.checks:
            watch = self.values.watch(bucket, reduction.results, communicator, reduction.checks)
        if self._hooked is not None:
            try:
                communicator._agree(agreement)
                op = self.op if mean_over is None else ReduceOp.SUM
                self._hooked.begin(reduction, communicator, op, producers, watch)
            except CommunicatorClosed:
                for _, finish in self._hooked.take_begun():
                    finish()  # raises if an earlier bucket's future has failed, which closed the communicator
                raise
        else:
            stages = [stage for stage in (watch, reduction.divided) if stage is not None]
            completion = reduction.of_list.run(agreement, stages=stages, producers=producers)
            if completion is not None:
                self._launched.append(completion)
            if reduction.locked is not None:
                if completion is None:
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
        mean_over: int | None,
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
                mean_over=mean_over,
            )
            recurs = all(entry.recurs for entry in own)
        else:
            flat, recurs = memory.flat(bucket), True
            reduction = Reduction(bucket, [flat], [flat], [], [flat], memory=memory, mean_over=mean_over)
        if self._hooked is None:
            self._prepare(reduction, communicator, recurs=recurs)
        self._last.pop(bucket.number, None)
        if recurs:
            self._last[bucket.number] = reduction
        return reduction

    def _prepare(self, reduction: Reduction, communicator: Communicator, *, recurs: bool) -> None:
        """Decides how a bucket's values are checked and divided, and prepares the all-reduce.

        Args:
            reduction: the Reduction of the bucket.
            communicator: the communicator whose ranks reduce the bucket.
            recurs: whether the same arrays will be reduced again.
        """
        memory, mean_over, backend = reduction.memory, reduction.mean_over, communicator._backend
        within = Checks.NONE
        if backend.finder is not None:
            within |= Checks.NONFINITE
        if mean_over is not None:
            reduction.divided = _Divided(mean_over, communicator._arrays)
        elif backend.squares is not None:
            within |= Checks.SQUARES
        reduction.checks = self.values.checks & within  # a BucketWatch makes the remaining checks
        reduction.of_list = ListReduction(
            communicator,
            reduction.sources,
            reduction.targets,
            self.op if mean_over is None else ReduceOp.SUM,
            write_backs=reduction.write_backs,
            checks=reduction.checks,
            recurs=recurs,
            resident=None if memory is None else memory.memory,
        )

    def finish_hooked(self, communicator: Communicator) -> Iterator[tuple[int, Completion | None]]:
        """Waits for the hook's results, and copies them into the gradients; yields the number of each such bucket.

        With each number the method yields the bucket's Completion: None on the CPU.
        """
        if self._hooked is not None:
            for number, finish in self._hooked.take_begun():
                started = time.perf_counter()
                finish()
                self.statistics.communication_seconds += time.perf_counter() - started
                yield number, communicator._mark_end()

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
        if self.count_present is not None:
            self._count_active()
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
        self._count_active()
        communicator._agree(self.events.next(Flush(gradients, missing)))

    def begin_step(self, present: int | None = None, passes: int = 0) -> None:
        """Begins a step; keeps the Agreements of the last step, because the new step may repeat the last step.

        Args:
            present: the number of ranks with gradients for the new step, if it is known already.
            passes: the number of local passes before the new step.
        """
        self.events.begin_step(passes)
        self._launched.clear()
        self._present = present

    def fail(self) -> None:
        """Forgets the results of the value checks, and the hook's buckets, after a step has failed."""
        self.values.fail()
        if self._hooked is not None:
            self._hooked.reset()

    def _mean_over(self, communicator: Communicator) -> int | None:
        """Returns the divisor of the sum if the mean is over only some ranks, inside join(); else None."""
        self._count_active()
        has_all = self._present in (None, communicator.world_size)
        return None if has_all or self.op is ReduceOp.SUM else self._present

    def _count_active(self) -> None:
        if self.count_present is not None and self._present is None:
            self._present = self.count_present(self.events.local_passes)


class _Divided:
    """Divides a sum by the number of ranks that had gradients. See the class Stage in for_bucketing.py."""

    def __init__(self, count: int, arrays: ArrayKind) -> None:
        self._count = count
        self._arrays = arrays

    def before(self, sources: Sequence[Array]) -> None:
        pass

    def after(self, results: Sequence[Array]) -> None:
        for result in results:
            self._arrays.divide(result, self._count)


# -- Hooks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class GradientBucket:
    """The argument of a hook: a bucket whose gradients are packed into one flat buffer, before their reduction.

    Attributes:
        index: the bucket's number in its step, from 0. A bucket keeps its number as long as the steps repeat.
        names: the names of the gradients, in the order of `flat`. A name that is a string is unchanged. Another name is
            given as its repr(), and an array as its index, such as "#3".
        shapes: the shapes of the gradients, in the order of `flat`.
        flat: a 1-D contiguous array of this rank's values, on the communicator's device. The hook may write to the
            array. The array is valid until the bucket is reduced.
        communicator: the communicator whose ranks reduce the bucket.
        op: the required reduction: sum or mean.
    """

    index: int
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    flat: Array
    communicator: Communicator
    op: ReduceOp

    def gradients(self) -> list[Array]:
        """Returns the gradients as views of `flat`, each in its shape."""
        return param_pack_split(self.flat, get_offsets(self.shapes), self.shapes)


#: A hook returns the reduced values: `bucket.flat` itself, another array of its size and dtype, or a future of such
#: an array, such as `bucket.communicator.asynchronous.all_reduce(bucket.flat, bucket.op)`.
BucketHook = Callable[[GradientBucket], Any]


def settings_of(hook: BucketHook) -> str:
    """Returns the text by which ranks compare their hooks: the hook's `settings` if it has any, else its name.

    The ranks do not compare the hook's code or the values in its closure. These values may differ for a good reason,
    such as the rank's own number.
    """
    settings = getattr(hook, "settings", None)
    if settings:
        return str(settings)
    if isinstance(hook, partial):
        return f"partial({settings_of(hook.func)})"
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


def result_of(value: Any, bucket: GradientBucket) -> Array:
    """Returns the reduced values of a bucket as a flat array; waits if the hook has returned a future.

    On a GPU only the current stream waits for the future, not the host.

    Args:
        value: the hook's return value: an array, or an object whose result() gives an array.
        bucket: the bucket that the hook has reduced.

    Raises:
        InvalidArgument: the result is not an array, or has a wrong size or dtype.
        PlanMismatch, RankFailed, ...: the future has failed with this error.
    """
    communicator = bucket.communicator
    if callable(getattr(value, "result", None)):
        value = value.result()
    what = f"a hook for bucket {bucket.index}"
    if value is None:
        raise InvalidArgument(
            f"{communicator.label}: {what} must return the reduced array, such as bucket.flat, or a future of this "
            "array, got None"
        )
    native = communicator._native_array(value, what)
    if native.size != bucket.flat.size or native.dtype != bucket.flat.dtype:
        raise InvalidArgument(
            f"{communicator.label}: {what} must return an array of {bucket.flat.size} elements of {bucket.flat.dtype}, "
            f"or a future of such an array, got {native.size} elements of {native.dtype}"
        )
    arrays = communicator._arrays
    if native is bucket.flat or (native.size and arrays.byte_bounds(native) == arrays.byte_bounds(bucket.flat)):
        return bucket.flat
    flat: Array = arrays.flat(native)
    return flat


class _HookedBuckets:
    """Reduces the buckets of a step through a hook. On a GPU all work here is queued on the current stream.

    Args:
        hook: the program's function, which takes a GradientBucket.
    """

    def __init__(self, hook: BucketHook) -> None:
        self._hook = hook
        # For each bucket that the hook has: its number, and the function that takes the hook's result.
        self._begun: list[tuple[int, Callable[[], None]]] = []
        self._flats: dict[int, Array] = {}  # by bucket, because the hook may work on several buckets at once

    def begin(
        self,
        reduction: Reduction,
        communicator: Communicator,
        op: ReduceOp,
        producers: Sequence[Any],
        watch: BucketWatch | None,
    ) -> None:
        """Packs a bucket, and calls the hook with it.

        Args:
            reduction: the Reduction of the bucket. The ranks have already compared the bucket's Agreement.
            communicator: the communicator whose ranks reduce the buckets.
            op: the operator of the reduction.
            producers: GPU events, recorded after the work that computes the gradients; see Backend.mark_work.
            watch: the object that checks the values before and after the reduction; None for no checks.
        """
        mean_over = reduction.mean_over
        communicator._follow_work(producers)
        if watch is not None:
            watch.before(reduction.sources)
        flat = self._memory_of(reduction, communicator)
        if reduction.memory is None:
            array_module(flat).concatenate(reduction.sources, out=flat)
        specs = reduction.bucket.specs
        names, shapes = tuple([spec.label for spec in specs]), tuple([spec.shape for spec in specs])
        bucket = GradientBucket(reduction.bucket.number, names, shapes, flat, communicator, op)
        value, mark = self._hook(bucket), communicator._mark_work()

        def finish() -> None:
            if mark is not None:
                communicator._follow_work([mark])  # the gradient may have been handed over on another stream
            reduced = result_of(value, bucket)
            if reduced is not flat and mean_over is not None:
                communicator._arrays.assign(reduced, flat)  # the hook may use its own array again
                reduced = flat
            if mean_over is not None:
                communicator._arrays.divide(reduced, mean_over)
            begin = 0
            for target in reduction.targets:
                end = begin + target.size
                if target is not reduced:
                    communicator._arrays.assign(reduced[begin:end], target)
                begin = end
            for target, native in reduction.write_backs:
                communicator._arrays.write_back(target, native)
            if watch is not None:
                watch.after(reduction.targets)
            if reduction.locked is not None:
                reduction.locked.unlock()

        self._begun.append((bucket.index, finish))

    def take_begun(self) -> list[tuple[int, Callable[[], None]]]:
        """Returns, for each bucket that the hook has, its number and the function that takes the hook's result."""
        begun, self._begun = self._begun, []
        return begun

    def reset(self) -> None:
        """Forgets the buckets that the hook has. Their memory is not used again: the hook may still access it."""
        self._begun.clear()
        self._flats.clear()

    def _memory_of(self, reduction: Reduction, communicator: Communicator) -> Array:
        """Returns the memory into which the gradients of a bucket will be packed.

        If the gradients live in their bucket, this is the bucket's own memory, and they are packed already.
        """
        bucket, source = reduction.bucket, reduction.sources[0]
        if reduction.memory is not None:
            return source
        known = self._flats.get(bucket.number)
        if known is None or known.size != bucket.size_elements or known.dtype != source.dtype:
            known = self._flats[bucket.number] = communicator._arrays.scratch(bucket.size_elements, source.dtype)
        return known
