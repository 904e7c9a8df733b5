"""The collectives of a backward pass: one for each bucket once it is complete, and an agreement on the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from gradsync.bucketing.bucket_hook import BucketHook, settings_of
from gradsync.bucketing.bucket_work import BucketWork
from gradsync.bucketing.callback_identity import KnownCallback
from gradsync.bucketing.compression import Compressed
from gradsync.bucketing.fixed_plan import FixedPlanner
from gradsync.bucketing.hooked_buckets import HookedBuckets
from gradsync.bucketing.options import Options
from gradsync.bucketing.plan import Bucket, BucketPlanner, GradientSpec
from gradsync.bucketing.statistics import Statistics
from gradsync.bucketing.step_agreements import StepAgreements
from gradsync.bucketing.step_values import StepValues
from gradsync.communicators.communicator import Communicator, Stage
from gradsync.communicators.host_arrays import ArrayKind
from gradsync.errors import CommunicatorClosed, InvalidArgument
from gradsync.futures import CollectiveEnd, Completion
from gradsync.reduction import Array, ReduceOp


class RollCall(Protocol):
    """How the ranks that have gradients for a step are counted; see join.py."""

    def count(self, passes: int) -> int:
        """Returns how many ranks have gradients for the step that begins. Every rank must call it.

        Args:
            passes: the local passes that this rank has made before it.
        """


class _Divided:
    """Divides a sum: the mean over the ranks that had something to give. See Stage of communicator.py."""

    def __init__(self, count: int, arrays: ArrayKind) -> None:
        self._count = count
        self._arrays = arrays

    def before(self, given: Sequence[Array]) -> Sequence[Array]:
        return given

    def after(self, results: Sequence[Array]) -> Sequence[Array]:
        for result in results:
            self._arrays.divide(result, self._count)
        return results


class StepReduction:
    """Runs the collectives of one step after another.

    Args:
        options: of the callback.

    Attributes:
        op: sum or mean.
        agreements: what the ranks agree on.
        statistics: what has been done.
        roll_call: counts the ranks before the first collective of a step; None where all take part in all of them.
        values: what is found out about the gradients.
    """

    def __init__(self, options: Options) -> None:
        self.op = options.op
        self.agreements = StepAgreements(options.op, options.settings())
        self.statistics = Statistics()
        self.roll_call: RollCall | None = None
        self.values = StepValues(options)
        self._options = options
        self._hooked: HookedBuckets | None = None
        self._present: int | None = None  # ranks that have gradients for this step, where they have been counted
        self._launched: list[Completion] = []  # this step's reductions that run beside the host

    def begin_with(self, callback: KnownCallback | None) -> None:
        """Begins on a communicator whose ranks know the callback so; memory that was made for another is let go."""
        self.agreements.change_callback(callback)
        self._options.wire.forget_memory()
        if self._hooked is not None:
            self._hooked.reset()

    def can_prepare(self, dtype: np.dtype[Any]) -> bool:
        """Whether buckets of a dtype are reduced as lists of arrays, which a communicator can prepare."""
        return self._hooked is None and not self._options.wire.changes(dtype)

    @property
    def is_hooked(self) -> bool:
        """Whether a hook reduces the buckets."""
        return self._hooked is not None

    def use_hook(self, hook: BucketHook | None) -> None:
        """Has a hook reduce the buckets of the steps to come; see AllreduceCallback.register_hook."""
        if hook is not None and self._options.wire.dtype_name is not None:
            raise InvalidArgument(
                f"a hook decides what travels: make the callback without compression={self._options.wire.dtype_name!r}"
            )
        name = "" if hook is None else f"hook {settings_of(hook)}"
        self._hooked = None if hook is None else HookedBuckets(hook, self._options.wire)
        self.agreements.change_settings(", ".join(filter(None, [self._options.settings(), name])))

    def reduce(
        self, work: BucketWork, communicator: Communicator, producers: Sequence[Any], end: CollectiveEnd
    ) -> Completion | None:
        """Reduces a bucket, or has the hook begin to, which then brings about the end by itself.

        Args:
            work: the bucket and its arrays.
            communicator: whose ranks take part.
            producers: marks (see Communicator.mark_work) of the work that made the sources.
            end: of the gradients in it, for the hook.
        """
        started = time.perf_counter()
        op, mean_over = self._mean_over(communicator)
        completion = None
        if self._hooked is None:
            completion = self._launch(work, communicator, producers, op, mean_over)
            if completion is not None:
                self._launched.append(completion)
        else:
            watch = self.values.watch(work, communicator, None)
            try:
                communicator.agree(self.agreements.bucket(work.bucket))
                self._hooked.begin(work, communicator, op, mean_over, producers, end, watch)
            except CommunicatorClosed:
                self._hooked.finish()  # raises what an earlier bucket's future has failed with, which has closed it
                raise
        statistics = self.statistics
        statistics.communication_seconds += time.perf_counter() - started
        statistics.all_reduces += 1
        statistics.bytes_all_reduced += work.bucket.size_bytes
        return completion

    def _launch(
        self,
        work: BucketWork,
        communicator: Communicator,
        producers: Sequence[Any],
        op: ReduceOp,
        mean_over: int | None,
    ) -> Completion | None:
        agreement, arrays = self.agreements.bucket(work.bucket), communicator.arrays
        dtype = work.sources[0].dtype
        wire = self._options.wire if self._options.wire.changes(dtype) else None
        finder = communicator.finder if wire is None and self.values.looks_for_nonfinite else None
        watch = self.values.watch(work, communicator, finder)
        stages: list[Stage] = [] if watch is None else [watch]
        if work.memory is not None and wire is None:
            return communicator.all_reduce_resident(
                work.memory.memory,
                *work.memory.stretch(work.bucket),
                dtype,
                op,
                agreement,
                producers=producers,
                mean_over=mean_over,
                stages=stages,
                looks=finder is not None,
            )
        if mean_over is not None:
            stages.append(_Divided(mean_over, arrays))
        if wire is not None:
            stages.append(Compressed(wire, work.targets, arrays))
        reduction = work.reduction
        if reduction is None or op is not self.op:
            reduction = work.reduction_on(communicator, op, looks=finder is not None)
        return reduction.run(agreement, stages=stages, producers=producers)

    def stand_in(
        self,
        planner: BucketPlanner | FixedPlanner,
        specs: Sequence[GradientSpec],
        communicator: Communicator,
        zeros: Callable[[Bucket], BucketWork],
        *,
        present: int,
        passes: int,
    ) -> None:
        """Takes part, with zeros, in a whole step of the ranks that have gradients for it.

        Args:
            planner: of the callback, between steps.
            specs: the gradients of the step, in the order of their places.
            communicator: whose ranks take part.
            zeros: zeros(bucket) returns the work on an array of them, which the next call may return again.
            present: how many ranks have gradients.
            passes: the local passes that those have made before it: their agreements include them.
        """
        self.begin_step(present)
        self.agreements.local_passes = passes
        complete = [bucket for position, spec in enumerate(specs) for bucket in planner.add(spec, position)]
        try:
            for bucket in [*complete, *planner.flush()]:
                self._reduce_zeros(zeros(bucket), communicator)
            self.end(len(specs), communicator)
        except BaseException:
            self.fail()
            raise
        finally:
            self.begin_step()

    def _reduce_zeros(self, work: BucketWork, communicator: Communicator) -> None:
        completion = self.reduce(work, communicator, [communicator.mark_work()], CollectiveEnd())
        if self._hooked is not None:
            self._hooked.finish()
        if completion is not None:
            completion.order()  # the next bucket's zeros go to the same memory

    def end(self, gradients: int, communicator: Communicator) -> Completion | None:
        """Agrees that the step has ended after so many gradients; what the caller queues next sees them reduced.

        Returns:
            What comes after the end of the buckets, and before the results are final; None where nothing does.

        Raises:
            NonFiniteGradient: some rank's are not finite, and the policy is to raise; on all ranks.
        """
        self._call_roll()
        if self._hooked is not None:
            started = time.perf_counter()
            self._hooked.finish()
            self.statistics.communication_seconds += time.perf_counter() - started
        communicator.agree(self.agreements.flush(gradients))
        for completion in self._launched:
            completion.order()
        later = self.values.conclude(communicator, self.agreements)
        self.statistics.skipped_steps += self.values.skip_step
        return later

    def agree_on_missing(self, gradients: int, missing: tuple[str, ...], communicator: Communicator) -> None:
        """Agrees that the step ends after so many gradients because others are missing.

        Raises:
            PlanMismatch: other ranks have them.
        """
        self._call_roll()
        communicator.agree(self.agreements.flush(gradients, missing))

    def begin_step(self, present: int | None = None) -> None:
        """Forgets the step before, but for its plan, which this one may repeat.

        Args:
            present: how many ranks have gradients for the new step, where they have been counted already.
        """
        self.agreements.begin_step()
        self._launched.clear()
        self._present = present

    def fail(self) -> None:
        """Forgets what was noted of a step that has failed."""
        self.values.fail()
        if self._hooked is not None:
            self._hooked.reset()

    def _mean_over(self, communicator: Communicator) -> tuple[ReduceOp, int | None]:
        """Returns the operator, and by what its result is to be divided: where some ranks are absent, by the others."""
        self._call_roll()
        if self.op is ReduceOp.SUM or self._present in (None, communicator.world_size):
            return self.op, None
        return ReduceOp.SUM, self._present

    def _call_roll(self) -> None:
        if self.roll_call is not None and self._present is None:
            self._present = self.roll_call.count(self.agreements.local_passes)
