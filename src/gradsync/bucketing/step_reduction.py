"""The collectives of a backward pass: one for each bucket once it is complete, and an agreement on the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Protocol

from gradsync.bucketing.bucket_hook import BucketHook
from gradsync.bucketing.bucket_watch import BucketWatch
from gradsync.bucketing.bucket_work import BucketWork
from gradsync.bucketing.finite_check import FiniteCheck
from gradsync.bucketing.fixed_plan import FixedPlanner
from gradsync.bucketing.gradient_norm import GradientNorm, clip_factor, scale
from gradsync.bucketing.hooked_buckets import HookedBuckets
from gradsync.bucketing.options import Options
from gradsync.bucketing.plan import Bucket, BucketPlanner, GradientSpec
from gradsync.bucketing.statistics import Statistics
from gradsync.bucketing.step_agreements import StepAgreements
from gradsync.collective_end import CollectiveEnd
from gradsync.communicators.base import Communicator
from gradsync.completion import Completion
from gradsync.errors import CommunicatorClosed
from gradsync.reduction import ReduceOp


class RollCall(Protocol):
    """How the ranks that have gradients for a step are counted; see join.py."""

    def count(self, passes: int, gradients: int) -> int:
        """Returns how many ranks have gradients for the step that begins. Every rank must call it.

        Args:
            passes, gradients: the local passes that this rank has made before it, and the gradients of these.
        """


class StepReduction:
    """Runs the collectives of one step after another.

    Args:
        options: of the callback.

    Attributes:
        op: sum or mean.
        agreements: what the ranks agree on.
        statistics: what has been done.
        roll_call: counts the ranks before the first collective of a step; None where all take part in all of them.
        norm: of the last step's reduced gradients, before they were clipped; None where nobody asks for it.
        skip_step: whether the last step's gradients are not finite, where the policy is "skip".
    """

    def __init__(self, options: Options) -> None:
        self.op = options.op
        self.agreements = StepAgreements(options.op, options.settings())
        self.statistics = Statistics()
        self.roll_call: RollCall | None = None
        self.norm: float | None = None
        self.skip_step = False
        self._options = options
        self._hooked: HookedBuckets | None = None
        self._finite = FiniteCheck(options.nonfinite)
        self._norm = None if options.clip_norm is None else GradientNorm()
        self._present: int | None = None  # ranks that have gradients for this step, where they have been counted
        self._launched: list[Completion] = []  # this step's reductions that run beside the host
        self._results: list[list[Any]] = []  # by bucket, where they may have to be clipped
        self._buckets_of_last_step = 0
        self._buckets = 0

    @property
    def is_hooked(self) -> bool:
        """Whether a hook reduces the buckets."""
        return self._hooked is not None

    def use_hook(self, hook: BucketHook | None, name: str) -> None:
        """Has a hook reduce the buckets of the steps to come; None: no hook."""
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
        self._buckets += 1
        if self._norm is not None:
            self._results.append(work.results)
        completion, watch = None, None
        if self._finite.policy != "off" or self._norm is not None:
            watch = BucketWatch(work, self._finite, self._norm, communicator)
        if self._hooked is None:
            completion = self._launch(work, communicator, producers, op, mean_over, watch)
            if completion is not None:
                self._launched.append(completion)
        else:
            is_last = self._buckets == self._buckets_of_last_step
            try:
                communicator.agree(self.agreements.bucket(work.bucket))
                self._hooked.begin(work, communicator, op, mean_over, producers, end, watch, is_last=is_last)
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
        watch: BucketWatch | None,
    ) -> Completion | None:
        agreement = self.agreements.bucket(work.bucket)
        dtype = work.sources[0].dtype
        wire = self._options.wire if self._options.wire.changes(dtype) else None
        if work.memory is not None and wire is None:
            return communicator.all_reduce_resident(
                work.memory.memory,
                *work.memory.stretch(work.bucket),
                dtype,
                op,
                agreement,
                producers=producers,
                mean_over=mean_over,
                watch=watch,
            )
        return communicator.all_reduce_list(
            work.sources,
            work.targets,
            op,
            agreement,
            write_backs=work.write_backs,
            producers=producers,
            mean_over=mean_over,
            prepared=work.prepared if op is self.op else None,
            grouped=self._options.strategy == "group",
            wire=wire,
            watch=watch,
        )

    def stand_in(
        self,
        planner: BucketPlanner | FixedPlanner,
        specs: Sequence[GradientSpec],
        communicator: Communicator,
        zeros: Callable[[Bucket], BucketWork],
        *,
        present: int,
        passes: int,
        gradients: int,
    ) -> None:
        """Takes part, with zeros, in a whole step of the ranks that have gradients for it.

        Args:
            planner: of the callback, between steps.
            specs: the gradients of the step, in the order of their places.
            communicator: whose ranks take part.
            zeros: zeros(bucket) returns the work on an array of them, which the next call may return again.
            present: how many ranks have gradients.
            passes, gradients: the local passes that those have made before it: their agreements include them.
        """
        self.begin_step(present)
        self.agreements.local_passes, self.agreements.local_gradients = passes, gradients
        for position, spec in enumerate(specs):
            for bucket in planner.add(spec, position):
                self._reduce_zeros(zeros(bucket), communicator)
        for bucket in planner.flush():
            self._reduce_zeros(zeros(bucket), communicator)
        self.end(len(specs), communicator)
        self.begin_step()

    def _reduce_zeros(self, work: BucketWork, communicator: Communicator) -> None:
        completion = self.reduce(work, communicator, [communicator.mark_work()], CollectiveEnd())
        if self._hooked is not None:
            self._hooked.finish()
        if completion is not None:
            completion.order()  # the next bucket's zeros go to the same memory

    def end(self, gradients: int, communicator: Communicator) -> None:
        """Agrees that the step has ended after so many gradients; what the caller queues next sees them reduced.

        Raises:
            NonFiniteGradient: some rank's are not finite, and the policy is to raise; on all ranks.
        """
        self.skip_step = False
        self._call_roll()
        if self._hooked is not None:
            self._hooked.finish()
        communicator.agree(self.agreements.flush(gradients))
        for completion in self._launched:
            completion.order()
        if self._buckets:
            self._look_at_results(communicator)

    def await_launched(self) -> None:
        """Waits for the end of the step's collectives that run beside the host."""
        for completion in self._launched:
            completion.wait()

    def _look_at_results(self, communicator: Communicator) -> None:
        verdict = self._finite.conclude(communicator)
        if verdict.error is not None and self._finite.policy == "raise":
            raise verdict.error
        self.skip_step = not verdict.is_finite
        self.statistics.skipped_steps += self.skip_step
        if self._norm is None or self._options.clip_norm is None:
            return
        self.norm = self._norm.conclude(communicator)
        factor = clip_factor(self.norm, self._options.clip_norm)
        if factor < 1.0 and verdict.is_finite:
            for result in chain.from_iterable(self._results):
                scale(result, factor, communicator)

    def agree_on_missing(self, gradients: int, missing: str, communicator: Communicator) -> None:
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
        self._results.clear()
        self._buckets_of_last_step, self._buckets = self._buckets or self._buckets_of_last_step, 0
        self._present = present

    def fail(self) -> None:
        """Forgets what was noted of a step that has failed."""
        self._finite.reset()
        if self._norm is not None:
            self._norm.reset()
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
            self._present = self.roll_call.count(self.agreements.local_passes, self.agreements.local_gradients)
