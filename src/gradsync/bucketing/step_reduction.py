"""The collectives of a backward pass: one for each bucket once it is complete, and an agreement on the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from gradsync.bucketing.bucket_work import BucketWork
from gradsync.bucketing.fixed_plan import FixedPlanner
from gradsync.bucketing.options import Options
from gradsync.bucketing.plan import Bucket, BucketPlanner, GradientSpec
from gradsync.bucketing.statistics import Statistics
from gradsync.bucketing.step_agreements import StepAgreements
from gradsync.communicators.base import Communicator
from gradsync.completion import Completion
from gradsync.reduction import ReduceOp


class RollCall(Protocol):
    """How the ranks that have gradients for a step are counted; see join.py."""

    def count(self, passes: int, gradients: int) -> int:
        """Returns how many ranks have gradients for the step that begins. Every rank must call it.

        Args:
            passes, gradients: the local passes that this rank has made before it, and the gradients of these.
        """


class StepReduction:
    """Plans and runs the collectives of one step after another.

    Args:
        options: of the callback.

    Attributes:
        roll_call: counts the ranks before the first collective of a step; None where all take part in all of them.
    """

    def __init__(self, options: Options) -> None:
        self.op = options.op
        self.agreements = StepAgreements(options.op, options.settings())
        self.statistics = Statistics()
        self.roll_call: RollCall | None = None
        self._present: int | None = None  # ranks that have gradients for this step, where they have been counted
        self._launched: list[Completion] = []  # this step's reductions that run beside the host

    def reduce(self, work: BucketWork, communicator: Communicator, producers: Sequence[Any] = ()) -> Completion | None:
        """Reduces a bucket.

        Args:
            work: the bucket and its arrays.
            communicator: whose ranks take part.
            producers: marks (see Communicator.mark_work) of the work that made the sources.
        """
        started = time.perf_counter()
        completion = self._launch(work, communicator, producers)
        statistics = self.statistics
        statistics.communication_seconds += time.perf_counter() - started
        statistics.all_reduces += 1
        statistics.bytes_all_reduced += work.bucket.size_bytes
        if completion is not None:
            self._launched.append(completion)
        return completion

    def _launch(self, work: BucketWork, communicator: Communicator, producers: Sequence[Any]) -> Completion | None:
        op, mean_over = self._mean_over(communicator)
        agreement = self.agreements.bucket(work.bucket)
        if work.memory is not None:
            return communicator.all_reduce_resident(
                work.memory.memory,
                *work.memory.stretch(work.bucket),
                work.sources[0].dtype,
                op,
                agreement,
                producers=producers,
                mean_over=mean_over,
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
        completion = self.reduce(work, communicator, [communicator.mark_work()])
        if completion is not None:
            completion.order()  # the next bucket's zeros go to the same memory

    def end(self, gradients: int, communicator: Communicator) -> None:
        """Agrees that the step has ended after so many gradients; what the caller queues next sees them reduced."""
        self._call_roll()
        communicator.agree(self.agreements.flush(gradients))
        for completion in self._launched:
            completion.order()

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
        self._present = present

    def _mean_over(self, communicator: Communicator) -> tuple[ReduceOp, int | None]:
        """Returns the operator, and by what its result is to be divided: where some ranks are absent, by the others."""
        self._call_roll()
        if self.op is ReduceOp.SUM or self._present in (None, communicator.world_size):
            return self.op, None
        return ReduceOp.SUM, self._present

    def _call_roll(self) -> None:
        if self.roll_call is not None and self._present is None:
            self._present = self.roll_call.count(self.agreements.local_passes, self.agreements.local_gradients)
