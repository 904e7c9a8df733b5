"""One backward pass after another: gradients come in, complete buckets are reduced at once, the flush does the rest.

A gradient whose array came for the same parameter in the step before costs little here: what was worked out for it,
and for its bucket, is taken as it is. Else it is looked at from all sides first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gradsync.bucketing.bucket_ends import BucketEnds
from gradsync.bucketing.callback_identity import CallbackIdentity
from gradsync.bucketing.fixed_arrivals import FixedArrivals
from gradsync.bucketing.gradient_guard import GradientGuard
from gradsync.bucketing.gradient_lock import LockedGradients, register
from gradsync.bucketing.missing import Zeros
from gradsync.bucketing.options import Options
from gradsync.bucketing.parameter_specs import warn_of_unequal_values
from gradsync.bucketing.pending import PendingGradient
from gradsync.bucketing.plan import Bucket, list_of_names
from gradsync.bucketing.step_plan import StepPlan
from gradsync.bucketing.step_reduction import StepReduction
from gradsync.bucketing.step_works import StepWorks
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.lifetime import Lifetime
from gradsync.diagnostics import tracing
from gradsync.errors import GradientCancelled, InvalidArgument, MissingGradient, NonFiniteGradient, PlanMismatch
from gradsync.futures import CollectiveEnd, GradientFuture, check_may_call, pending

_log = logging.getLogger("gradsync")


class BackwardPass:
    """The state between the first gradient of a step and its flush.

    Args:
        options: of the callback.
        identity: of the callback.

    Attributes:
        plan: what is known of the gradients.
        reduction: the collectives of the step.
        ended: how many steps have, empty ones included.
        told: the last error that every rank has had of a collective here.
        filled: after a flush: by parameter, the reduced gradients of those that this rank had none for.
    """

    def __init__(self, options: Options, identity: CallbackIdentity) -> None:
        self.plan = StepPlan(options)
        self.reduction = StepReduction(options)
        self.filled: dict[Any, Any] = {}
        self._options = options
        self._identity = identity
        self._is_known = False  # the callback, to the other ranks of the communicator
        self._has_compared = options.parameters is None  # the parameters' values over the ranks: once
        self._zeros = Zeros()
        self._communicator: Communicator | None = None  # for which all that is known from the last step is right
        self.ended = 0
        self.told: BaseException | None = None
        self._ends = BucketEnds()
        self._producers: dict[int, list[Any]] = {}  # by bucket; where collectives run beside the host
        self._works = StepWorks(self.plan, self.reduction)
        self._reduced: list[Bucket] = []
        self._unlocked: set[int] = set()  # places of gradients that were unlocked because nobody will reduce them
        self._guard: GradientGuard | None = None  # in debug mode
        register(self)

    @property
    def is_under_way(self) -> bool:
        """Whether gradients have come since the last flush."""
        return self.plan.arrivals.count > 0

    def begin_with(self, communicator: Communicator) -> None:
        """Makes sure that what is known of arrays is known for this communicator; refuses others within a step."""
        if communicator is self._communicator:
            return
        if self.is_under_way:
            if self._communicator is not None and not self._communicator.closed:
                raise InvalidArgument(
                    f"{communicator.label}: the group has changed in the middle of a backward pass: flush first"
                )
            self.fail(GradientCancelled("the group ended before its backward pass did"))
        self.plan.begin_with(communicator)
        known = self._identity.known_on(communicator)
        self.reduction.begin_with(known)
        self._is_known = known is not None or communicator.world_size == 1
        self._zeros.clear()
        self._works.clear()
        communicator.lifetime.observe_end(self)
        self._guard = GradientGuard(communicator) if communicator.debug else None
        self._ends.timeout_seconds = communicator.timeout_seconds
        self._communicator = communicator

    def live_in_buckets(self, communicator: Communicator) -> Any:
        """Makes memory in which gradients live in the buckets; see AllreduceCallback.gradient_buffers."""
        if not self._options.gradient_as_bucket_view:
            raise InvalidArgument("gradient_buffers() needs AllreduceCallback(gradient_as_bucket_view=True)")
        self.begin_with(communicator)
        self._zeros.clear()
        self._works.clear()
        self.plan.forget_memory()
        self.ensure_memory(communicator)
        views = [] if self.plan.memory is None else self.plan.memory.views
        told = self._options.parameters
        return dict(zip(told, views, strict=True)) if isinstance(told, Mapping) else list(views)

    def meet(self, communicator: Communicator) -> None:
        """Makes sure, at the first use, that the other ranks use the same callback. Collective, before all else."""
        if self._is_known:
            return
        try:
            self.reduction.agreements.change_callback(self._identity.meet(communicator))
        except BaseException as error:
            self.note_told(error)
            raise
        self._is_known = True

    def prepare(self, gradient: Any, communicator: Communicator) -> None:
        """Does what comes before the first step, in one order on all ranks, whatever gradients they have. Collective.

        The comparison is first: a difference in the buckets is then shown as one.

        Args:
            gradient: the first, where this rank has one.
            communicator: of the ranks.
        """
        self.compare_parameters(gradient, communicator)
        self.ensure_memory(communicator)

    def ensure_memory(self, communicator: Communicator) -> None:
        """Makes the memory of the buckets, where gradients live there and it is not made. Collective then."""
        if not self.plan.needs_memory:
            return
        try:
            self.meet(communicator)
            self.plan.make_memory(communicator, self.reduction.agreements.of_callback)
        except BaseException as error:
            self.note_told(error)
            raise

    def compare_parameters(self, gradient: Any, communicator: Communicator) -> None:
        """Warns, before the first step, where the values of the parameters differ. Collective, at the first call."""
        if self._has_compared or communicator.world_size == 1:
            return
        try:
            self.meet(communicator)
            agreed = self.reduction.agreements.of_callback
            warn_of_unequal_values(self.plan.told, self._options.parameters, gradient, communicator, agreed)
            self._has_compared = True  # only now: after PlanMismatch every rank does so once more
        except BaseException as error:
            self.note_told(error)
            raise

    def hand_over(self, param: Any, grad: Any, communicator: Communicator) -> GradientFuture:
        """Takes a gradient; reduces the buckets that it completes. See AllreduceCallback."""
        if communicator is not self._communicator:
            self.begin_with(communicator)
        if pending:
            check_may_call(communicator.label, "callback(param, grad)")
        is_beside_host = communicator.runs_beside_host
        if is_beside_host:
            communicator.checked_stream(None, "a gradient")  # before anything is taken
        plan = self.plan
        arrivals, planner = plan.arrivals, plan.planner
        entry = arrivals.recurring(param, grad, communicator.arrays)
        if entry is None:
            if not self.is_under_way:
                self.prepare(grad, communicator)
            entry = plan.admit(param, grad, communicator, self)
            complete = planner.add(entry.spec, entry.position)
            self._works.renew(planner.placed_in)
        else:
            complete = planner.add(entry.spec, entry.position)
        number = planner.placed_in
        if is_beside_host:
            self._producers.setdefault(number, []).append(communicator.mark_work())
        if (tracer := tracing.active) is not None:  # looked at once: another thread may end the trace
            tracer.arrive(communicator.recorder.group, entry.spec.label, is_first=arrivals.count == 1)
        end, guard = self._ends[number], self._guard
        if guard is not None:
            guard.take(entry, end)
        future = GradientFuture(entry.spec.name, end, entry.result)
        if (set_writeable := entry.set_writeable) is not None:
            set_writeable(False)
        if complete:
            self._reduce_all(complete, communicator)
        return future

    def is_flushed_since(self, ended: int) -> bool:
        """Whether a step has ended since `ended` was read, and no other has begun: then there is nothing to flush."""
        return self.ended > ended and not self.is_under_way

    def flush(self, communicator: Communicator) -> None:
        """Reduces what is left, and ends the step."""
        if pending:
            check_may_call(communicator.label, "flush()")
        self.begin_with(communicator)
        communicator.checked_stream(None, "flush()")  # before the ranks meet: it is to wait for the results
        self.filled = {}
        try:
            self.meet(communicator)
            places = self.plan.known_places
            if places is not None and self._is_incomplete(places):
                self._complete(places, communicator)
            self._reduce_all(self.plan.planner.flush(), communicator)
            if self._guard is not None:
                self._guard.check_results()
            later = self.reduction.end(self.plan.arrivals.count, communicator)
            if later is not None:
                self._ends.postpone(later)
            self._end_well(communicator)
        except BaseException as error:
            self.note_told(error)
            self.fail(error)
            raise
        self._ends.raise_leaving()

    def _end_well(self, communicator: Communicator) -> None:
        """Keeps of the step what may come again."""
        count = self.plan.arrivals.count
        if (tracer := tracing.active) is not None and count:
            tracer.end_step(communicator.recorder.group, count)
        self.reduction.statistics.steps += count > 0
        self._end_step()
        self.plan.arrivals.end_step()

    def note_told(self, error: BaseException) -> None:
        """Notes that an error came from a collective here, so that every rank has it."""
        if isinstance(error, (PlanMismatch, NonFiniteGradient)):
            self.told = error

    def fail(self, error: BaseException) -> None:
        """Ends the step with an error, which the futures that are not done get."""
        self.unlock_waiting()
        ends, self._ends = self._ends, BucketEnds(self._ends.timeout_seconds)
        self.reduction.fail()
        self._end_step()
        self._works.clear()
        self.plan.fail(error)
        ends.fail(error)

    def _is_incomplete(self, places: FixedArrivals) -> bool:
        """Whether gradients are missing; an empty step is one of its own, except where zeros take part in it."""
        if places.is_complete():
            return False
        return places.count > 0 or self._options.missing == "zero"

    def _complete(self, places: FixedArrivals, communicator: Communicator) -> None:
        """Hands over zeros in place of the gradients that have not come, or raises, on all ranks alike."""
        missing = places.missing()
        if self._options.missing == "error":
            names = tuple([parameter.spec.name for parameter in missing])
            self.reduction.agree_on_missing(places.count, names, communicator)
            raise MissingGradient(
                f"{communicator.label}: no rank has handed over a gradient for {list_of_names(names)}: hand over one "
                'for each parameter, or use AllreduceCallback(parameters=..., missing="zero")'
            )
        filled = {}
        self.prepare(None, communicator)
        for parameter in missing:
            zeros = self._zeros.at(places.place_of(parameter.parameter), parameter.spec, self.plan.memory, communicator)
            self.hand_over(parameter.parameter, zeros, communicator)
            filled[parameter.label] = zeros
        self.filled = filled

    def _reduce_all(self, complete: Sequence[Bucket], communicator: Communicator) -> None:
        for bucket in complete:
            self._reduce(bucket, communicator)
        self._ends.raise_leaving()

    def _reduce(self, bucket: Bucket, communicator: Communicator) -> None:
        end = self._ends[bucket.number]
        try:
            if self._guard is not None:
                self._guard.check_handed_over([slot.position for slot in bucket.slots])
            self.meet(communicator)
            work = self._works.of(bucket, communicator, self)
            completion = self.reduction.reduce(work, communicator, self._producers.get(bucket.number, ()), end)
            if self._guard is not None and not self.reduction.is_hooked:
                self._guard.note_results([slot.position for slot in bucket.slots], completion)
            if work.locked is not None and not self.reduction.is_hooked:
                if completion is None:
                    work.locked.put_back()
                else:
                    completion.before_done(work.locked.put_back)
        except BaseException as error:
            self.note_told(error)
            self.fail(error)
            raise
        self._reduced.append(bucket)
        if not self.reduction.is_hooked:
            self._ends.finish(bucket.number, completion)

    def _end_step(self) -> None:
        self.reduction.statistics.gradients += self.plan.arrivals.count
        self.reduction.begin_step()
        self.ended += 1
        self._works.end_step(self._reduced)
        self._ends.clear()
        if self._guard is not None:
            self._guard.clear()
        self._producers.clear()
        self._reduced.clear()
        self._unlocked.clear()

    @property
    def label(self) -> str:
        """See Holder of gradient_lock.py."""
        return "" if self._communicator is None else self._communicator.label

    @property
    def whose(self) -> str:
        """See Holder of gradient_lock.py."""
        group = "" if self._communicator is None else f" of group {self._communicator.recorder.group!r}"
        return f'an AllreduceCallback("{self.reduction.op.value}"){group}'

    def locked(self) -> list[PendingGradient]:
        """See Holder of gradient_lock.py; those too whose reduction has been launched and has not ended."""
        return self._locked_until(CollectiveEnd.is_over)

    def unlock_waiting(self) -> None:
        """Makes the gradients writeable again whose reduction has not ended or been launched. Any thread may call it.

        What was launched does that by itself.
        """
        waiting = self._locked_until(lambda end: not end.is_pending)
        # Another thread may be locking one now: that one finds it here again when its step fails.
        if all(end.is_of_caller() for end in list(self._ends.values())):
            self._unlocked.update([entry.position for entry in waiting])
        try:
            LockedGradients(waiting, self).put_back()
        except InvalidArgument as error:
            _log.error("%s", error)

    def communicator_ended(self, lifetime: Lifetime) -> None:
        """See Observer of lifetime.py: nobody will reduce what waits."""
        if self._communicator is not None and lifetime is self._communicator.lifetime:
            self.unlock_waiting()
            if lifetime.is_inherited:
                self._ends.disown(lifetime.ended_error("the reduction of a gradient"))

    def _locked_until(self, is_past: Callable[[CollectiveEnd], bool]) -> list[PendingGradient]:
        """Returns the gradients of this step that are locked, but for those of buckets whose end is past."""
        free = set(self._unlocked)
        for bucket in list(self._reduced):
            end = self._ends.get(bucket.number)  # buckets that were reduced as one have ends of their own
            if end is None or is_past(end):
                free.update([slot.position for slot in bucket.slots])
        entries = self.plan.arrivals.of_step()
        return [entry for entry in entries if entry.set_writeable is not None and entry.position not in free]

    def forgotten(self) -> tuple[str, Communicator] | None:
        """Returns in words, with their communicator, the gradients that wait for a flush; None where none does.

        None as well where the communicator was ended by a failure: then that is why they were not reduced.
        """
        communicator = self._communicator
        if not self.is_under_way or communicator is None or communicator.lifetime.has_failed:
            return None
        reduced = {slot.position for bucket in self._reduced for slot in bucket.slots}
        waiting = [entry for entry in self.plan.arrivals.of_step() if entry.position not in reduced]
        if waiting:
            count = "1 gradient was" if len(waiting) == 1 else f"{len(waiting)} gradients were"
            what = f"{count} handed over and never reduced, beginning with that of {waiting[0].spec.name}"
        elif self.plan.known_places is not None:
            what = "the gradients of all parameters were handed over, and their step has not ended"
        else:
            return None
        text = f"{communicator.label}: {what}: end each backward pass with flush() or `with callback.backward()`"
        return text, communicator
