"""One backward pass after another: gradients come in, complete buckets are reduced at once, the flush does the rest.

A gradient whose array came for the same parameter in the step before costs little here: what was worked out for it,
and for its bucket, is taken as it is. Else it is looked at from all sides first.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from gradsync.bucketing.arrivals import Arrivals
from gradsync.bucketing.bucket_work import BucketWork, work_of
from gradsync.bucketing.future import GradientFuture
from gradsync.bucketing.options import Options
from gradsync.bucketing.pending import PendingGradient, accept, destination, display_name, key_of
from gradsync.bucketing.plan import Bucket
from gradsync.bucketing.step_reduction import StepReduction
from gradsync.collective_end import CollectiveEnd
from gradsync.communicators.base import Communicator
from gradsync.errors import InvalidArgument
from gradsync.reduction import dtype_name

_log = logging.getLogger("gradsync")


class BackwardPass:
    """The state between the first gradient of a step and its flush.

    Args:
        options: of the callback.

    Attributes:
        arrivals: the gradients of the step.
        reduction: the collectives of the step.
    """

    def __init__(self, options: Options) -> None:
        self.arrivals = Arrivals()
        self.reduction = StepReduction(options)
        self._communicator: Communicator | None = None  # for which all that is known from the last step is right
        self._ends: dict[int, CollectiveEnd] = {}  # by bucket; of those that have yet to be reduced
        self._producers: dict[int, list[Any]] = {}  # by bucket; where collectives run beside the host
        self._works: dict[int, BucketWork] = {}  # by bucket; of the last step where they may recur
        self._renewed: set[int] = set()  # the buckets in which some array is not known from the last step
        self._reduced: list[Bucket] = []
        self._accepted_dtypes: set[Any] = set()

    @property
    def is_under_way(self) -> bool:
        """Whether gradients have come since the last flush."""
        return self.arrivals.count > 0

    def hand_over(self, param: Any, grad: Any, communicator: Communicator) -> GradientFuture:
        """Takes a gradient; reduces the bucket that it completes. See AllreduceCallback."""
        if communicator is not self._communicator:
            self._begin_with(communicator)
        arrivals, planner = self.arrivals, self.reduction.planner
        entry = arrivals.recurring(param, grad, communicator.arrays)
        is_new = entry is None
        if entry is None:
            entry = self._admit(param, grad, communicator)
        complete = planner.add(entry.spec)
        number = planner.placed_in
        end = self._ends.get(number)
        if end is None:
            end = self._ends[number] = CollectiveEnd()
        if is_new:
            self._renewed.add(number)
        if communicator.runs_beside_host:
            self._producers.setdefault(number, []).append(communicator.mark_work())
        future = GradientFuture(entry.spec.name, end, entry.result)
        for bucket in complete:
            self._reduce(bucket, communicator)
        return future

    def check(self, param: Any, grad: Any, communicator: Communicator) -> None:
        """Refuses what hand_over would refuse as such; takes nothing."""
        accept(param, grad, self.arrivals.count, communicator, self.reduction.op, self._accepted_dtypes)
        key_of(param)

    def flush(self, communicator: Communicator) -> None:
        """Reduces what is left, and ends the step."""
        if communicator is not self._communicator:
            self._begin_with(communicator)
        try:
            for bucket in self.reduction.planner.flush():
                self._reduce(bucket, communicator)
            self.reduction.end(self.arrivals.count, communicator)
        except BaseException as error:
            self.fail(error)
            raise
        self.reduction.statistics.steps += self.is_under_way
        self._end_step()
        self.arrivals.end_step()

    def fail(self, error: BaseException) -> None:
        """Ends the step with an error, which the futures that are not done get."""
        ends = list(self._ends.values())
        self.reduction.reset()
        self._end_step()
        self._works.clear()
        self.arrivals.forget()
        for end in ends:
            end.finish(None, error)

    def _begin_with(self, communicator: Communicator) -> None:
        """Begins a step on another communicator: what is known of arrays is known for the one before."""
        if self.is_under_way:
            raise InvalidArgument(
                f"{communicator.label}: the group has changed in the middle of a backward pass: flush first"
            )
        self.arrivals.forget()
        self._works.clear()
        self._accepted_dtypes.clear()
        self._communicator = communicator

    def _admit(self, param: Any, grad: Any, communicator: Communicator) -> PendingGradient:
        """Takes a gradient whose array is not known from the last step; what fails here leaves no trace."""
        arrivals, arrays = self.arrivals, communicator.arrays
        position = arrivals.place_of(param)
        native = accept(param, grad, position, communicator, self.reduction.op, self._accepted_dtypes)
        key, name = key_of(param), display_name(param, position)
        spec = arrivals.spec(name, native, dtype_name(native.dtype))
        source, target, write_back, result = destination(grad, native, communicator)
        recurs = target is source and write_back is None and native is grad and arrivals.has_seen(native)
        state = arrays.state(native) if recurs else None
        entry = PendingGradient(param, key, grad, native, state, spec, source, target, write_back, result, recurs)
        try:
            arrivals.add(entry, arrays)
        except InvalidArgument as error:
            raise InvalidArgument(f"{communicator.label}: {error}") from None
        return entry

    def _reduce(self, bucket: Bucket, communicator: Communicator) -> None:
        number = bucket.number
        try:
            completion = self.reduction.reduce(
                self._work_for(bucket, communicator), communicator, self._producers.get(number, ())
            )
        except BaseException as error:
            self.fail(error)
            raise
        self._reduced.append(bucket)
        self._ends.pop(number).finish(None, None, completion)

    def _work_for(self, bucket: Bucket, communicator: Communicator) -> BucketWork:
        number = bucket.number
        known = self._works.get(number)
        if known is not None and known.bucket is bucket and number not in self._renewed:
            return known
        entries = [self.arrivals.entry(slot.position) for slot in bucket.slots]
        work = work_of(bucket, entries)
        if all(entry.recurs for entry in entries):
            prepared = communicator.prepare_list(work.sources, work.targets, self.reduction.op)
            work = self._works[number] = work._replace(prepared=prepared)
        else:
            self._works.pop(number, None)
        return work

    def _end_step(self) -> None:
        self.reduction.statistics.gradients += self.arrivals.count
        self.reduction.begin_step()
        for number in self._works.keys() - {bucket.number for bucket in self._reduced}:
            del self._works[number]
        self._ends.clear()
        self._producers.clear()
        self._renewed.clear()
        self._reduced.clear()


def tell_forgotten(backward: BackwardPass) -> None:
    """Warns when a callback goes, or the program ends, with gradients that were never reduced."""
    arrivals = backward.arrivals
    waiting = arrivals.count - sum(len(bucket.slots) for bucket in backward._reduced)
    if waiting and getattr(sys, "last_value", None) is None:  # after an exception there is better to tell
        reduced = {slot.position for bucket in backward._reduced for slot in bucket.slots}
        first = next(position for position in range(arrivals.count) if position not in reduced)
        _log.warning(
            "%d gradients were handed over and never reduced, beginning with the gradient of %s: end each backward "
            "pass with flush() or `with callback.backward()`",
            waiting,
            arrivals.specs[first].name,
        )
