"""The step of a callback: takes gradients, and reduces them all at the flush.

A step is a set of named gradients, in any order. At the flush all ranks compare the whole step before anything moves;
then its buckets are reduced one after the other, in place. The plan is kept while steps look the same. On a GPU, with
`parameters=`, a bucket is launched as soon as it and all before it are complete.
"""

from __future__ import annotations

import logging
import math
import sys
import time
import weakref
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from gradsync.bucketing.bucket import (
    Bucket,
    BucketHook,
    BucketMemory,
    checked_threshold,
    cut,
    list_of_names,
    run_hook,
)
from gradsync.bucketing.divergence import Divergence, Parameter
from gradsync.bucketing.events import CallbackIdentity, StepEvents
from gradsync.bucketing.gradient import (
    PLAIN_NAMES,
    Known,
    OverlapCheck,
    accept,
    as_array,
    is_array,
    key_of,
    known,
    known_parameters,
    name_of,
)
from gradsync.bucketing.options import Options
from gradsync.bucketing.unread import UnreadResults
from gradsync.bucketing.values import norm_of
from gradsync.communicators.agreement import Agreement
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.for_bucketing import (
    arrays_of,
    check_stream,
    compare,
    flats_of,
    follow_work,
    has_failed,
    mark_end,
    mark_work,
    reduce_list,
    runs_beside_host,
    share_floats,
    share_weight,
    stray,
    timeout_seconds,
    verify,
)
from gradsync.communicators.host_arrays import overlaps_itself
from gradsync.diagnostics import trace
from gradsync.errors import (
    BackendUnavailable,
    CommunicatorClosed,
    FutureNotReady,
    GradientCancelled,
    GradsyncError,
    InvalidArgument,
    MissingGradient,
    NonFiniteGradient,
    PlanMismatch,
    describe,
    name_ranks,
)
from gradsync.futures import DONE, GradientFuture, Pending, Work, refuse_in_callback, this_thread
from gradsync.reduction import Array, ReduceOp

_log = logging.getLogger("gradsync")
_base_of = attrgetter("base")
_RAISED_ON_ALL = (PlanMismatch, NonFiniteGradient, MissingGradient)


@dataclass
class Statistics:
    """Counters of a callback since its construction.

    Attributes:
        steps: the number of flushes that reduced gradients.
        gradients: the number of gradients in all steps that have ended, with the zeros for missing gradients.
        all_reduces: the number of buckets reduced, also by a hook.
        bytes_all_reduced: the size of all reduced buckets together, in the gradients' own dtypes.
        communication_seconds: the time that the host spends in the flush: for packing, waiting, reducing and splitting.
            If a GPU does this work, the host's time to launch it counts, and the time in which the host waits for it.
        skipped_steps: the number of steps whose gradients were not finite, with nonfinite="skip".
    """

    steps: int = 0
    gradients: int = 0
    all_reduces: int = 0
    bytes_all_reduced: int = 0
    communication_seconds: float = 0.0
    skipped_steps: int = 0


class _Plan(NamedTuple):
    """How the gradients of a step are reduced.

    Attributes:
        arrival: the keys, in the order in which this rank handed them over.
        buckets: all gradients, in the plan's order.
        agreements: for each bucket; without weights and with them.
    """

    arrival: list[Hashable]
    buckets: list[Bucket]
    agreements: tuple[list[Agreement], list[Agreement]]


class Step:
    """The current step of a callback, and the plan of the last one.

    Args:
        options: the options of the callback.
        identity: which callback it is.

    Attributes:
        identity: see Args.
        ended: the number of steps that have ended, including empty and failed ones.
        statistics: the counters of all steps.
        norm, skip_step, total_weight: of the last step; see AllreduceCallback.
        parameters: the option.
        unread: tells, in the first steps, of results that nobody can read; None if there is nothing to look for.
    """

    def __init__(self, options: Options, identity: CallbackIdentity) -> None:
        self.threshold_bytes = checked_threshold(options.threshold_bytes)
        self.ended = 0
        self.statistics = Statistics()
        self._raised_on_all: weakref.ref[BaseException] | None = None  # its traceback holds the callback
        self.norm: float | None = None
        self.skip_step = False
        self.total_weight: float | None = None
        self.parameters = options.parameters
        self._options = options
        self.identity = identity
        self._events = StepEvents(options.op, identity, options.settings(), options.threshold_bytes)
        self._hook: BucketHook | None = None
        self._communicator: Communicator | None = None  # of the last step
        self._known: dict[Hashable, Known] = {}  # with `parameters`: these, in order
        self._keys: dict[str, Hashable] = {}  # of `_known`, by name
        self._is_fixed = options.parameters is not None
        self._memory: BucketMemory | None = None
        self._plan: _Plan | None = None  # None: the gradients look different from those of the last step
        self._is_launched_by: bool | None = None  # on a GPU: whether the plan that the ranks agreed on has weights
        self._results: dict[Hashable, Any] | None = {}  # of the last step; None within a backward pass
        self._results_end: Work = DONE  # a stream waits for it: the step may have run on another one
        self._is_busy = False
        self._weight_of_pass: float | None = None
        self._divergence: Divergence | None = None  # with a communicator
        self.unread: UnreadResults | None = None
        # No short way for gradients: they live in buckets, or NumPy's go to a GPU; or `unread` is there.
        self._is_watched = self._stays_watched = False
        self._end: Pending | None = None  # made with the step's first gradient
        self._begin()

    def _begin(self) -> None:
        """Begins a step without gradients."""
        self._grads: dict[Hashable, Any] = {}  # this step's gradients
        # Of those that cannot be reduced where they lie: where the results go, the array itself or another one.
        self._targets: dict[Hashable, Array] = {}
        self._values: dict[Hashable, Any] = {}  # the results that are not in `_grads`
        self._weight = self._weight_of_pass
        self._launched: list[Work] = []  # of the buckets that have been reduced, or launched on a GPU
        self._marks: set[Any] = set()  # on a GPU: of the work that makes the gradients, one for each stream
        self._overlaps = OverlapCheck()
        self._squares: list[float] = []  # of this rank's part of each bucket's results, if the backend sums them
        self._factor: tuple[ReduceOp, Any] | None = None
        self._total_weight: float | None = None
        self._shared_weight: tuple[Work, Array] | None = None  # on a GPU: adds up all weights, and where they are then

    # -- Before a step ------------------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """The number of gradients of the current step so far."""
        return len(self._grads)

    def check_parameters(self, communicator: Communicator) -> None:
        """Raises what begin_with() would raise for the option `parameters`, before the callback is used."""
        self._take_up(communicator)

    def begin_with(self, communicator: Communicator) -> None:
        """Starts to use a communicator.

        Raises:
            InvalidArgument: a step has begun on another communicator, which is still open; the option `parameters` has
                a wrong value; or the ranks could take this callback for another one.
            UnsupportedDtype: the reduce method is not defined for the dtype of one of the `parameters`.
        """
        if communicator is self._communicator:
            return
        if self.count:
            if self._communicator is not None and not self._communicator.closed:
                raise InvalidArgument(
                    f"{communicator.label}: the group has changed in the middle of a backward pass: call flush() first"
                )
            self.fail(GradientCancelled("the process group ended before the end of the backward pass"))
        self.identity.check_alone(communicator)
        self._take_up(communicator)
        self._communicator = communicator

    def _take_up(self, communicator: Communicator) -> None:
        options = self._options
        self._plan, self._results, self._results_end = None, {}, DONE
        self._is_launched_by = None
        self._known = {}
        self._divergence = Divergence(options.check_every, options.diverged == "raise", communicator)
        self.unread = None
        if communicator.world_size > 1 and not options.gradient_as_bucket_view and self._hook is None:
            self.unread = UnreadResults(communicator.label)
        self._stays_watched = options.gradient_as_bucket_view or runs_beside_host(communicator)
        self._is_watched = self._stays_watched or self.unread is not None
        if self._is_fixed:
            self._known = known_parameters(options.parameters, options.op, communicator)
            self._plan = self._plan_of(list(self._known))
            # The program's buffers stay those of the callback: it writes gradients into them, and reads the results.
            if self._memory is not None and not self._memory.goes_on(self._plan.buckets, communicator):
                self._memory = None
        self._keys = {each.name: key for key, each in self._known.items()}

    def use_hook(self, hook: BucketHook | None) -> None:
        """Uses a hook, or no hook, for the buckets of later steps."""
        self._hook = hook
        if hook is not None:  # which may use the results itself
            self._stop_watching()
        self._events.change_settings(self._options.settings() | ({} if hook is None else {"hook": ""}))
        self._is_launched_by = None
        self._plan = self._plan_of(list(self._known)) if self._is_fixed and self._known else None

    def live_in_buckets(self, communicator: Communicator) -> Mapping[Hashable, Array]:
        """Allocates the buckets' memory anew, and returns the gradients' parts of it, by key. Every rank must call it.

        Raises:
            BackendUnavailable: there is not enough memory on some rank.
            PlanMismatch: the ranks need other memory.
        """
        self.begin_with(communicator)
        assert self._plan is not None
        self._memory, error = None, None
        try:
            memory = self._ensure_memory(communicator)
        except BackendUnavailable as unavailable:
            memory, error = None, unavailable
        agreement = self._events.of_memory(self._plan.buckets)
        have_memory = communicator.share_numbers("gradient_buffers()", [int(error is None)], agreement)
        lacking = [rank for rank, [has_memory] in enumerate(have_memory) if not has_memory]
        if lacking or memory is None:
            self._memory = None
            raise error or BackendUnavailable(
                f"{communicator.label}: gradient_buffers(): not enough memory for the buckets on {name_ranks(lacking)}"
            )
        return {key: memory.views[key] for key in self._known}

    def _ensure_memory(self, communicator: Communicator) -> BucketMemory | None:
        """Returns the memory of the buckets; None if gradients do not live in buckets."""
        if self._memory is None and self._options.gradient_as_bucket_view:
            assert self._plan is not None
            self._memory = BucketMemory(self._plan.buckets, communicator)
        return self._memory

    def begin_pass(self, weight: float | None) -> None:
        """Begins a backward pass: sets this rank's weight in its steps, and forgets the results of the last step.

        Raises:
            InvalidArgument: there is a weight, and gradients wait for a flush already.
        """
        if weight is not None and self.count:
            raise InvalidArgument(
                "backward(weight=) begins a step, and gradients were handed over before it: hand them over in the "
                "block, or call flush() first"
            )
        self.tell_unread()
        self._results = None
        self._weight = self._weight_of_pass = weight

    def end_pass(self) -> None:
        """Ends a backward pass: later steps have no weight."""
        self._weight = self._weight_of_pass = None

    # -- A gradient ---------------------------------------------------------------------------------------------------

    def take(self, param: Any, grad: Any, communicator: Communicator) -> GradientFuture:
        """Takes a gradient; see AllreduceCallback.__call__."""
        if communicator is not self._communicator or self._is_busy or this_thread.callbacks:
            self._begin_call("callback(param, grad)", communicator)
        key = param if type(param) in PLAIN_NAMES else key_of(param)
        its = self._known.get(key)
        if (
            its is None
            or type(its.param) is not type(param)
            or type(grad) is not np.ndarray
            or its.shape != grad.shape
            or its.dtype is not grad.dtype
            or not grad.flags.carray
            or key in self._grads
            or self._is_watched
        ):
            return self._admit(param, key, grad, communicator)
        self._grads[key] = grad
        return GradientFuture(its.name, self._end or self._begin_end(), grad)

    def _begin_end(self) -> Pending:
        assert self._communicator is not None
        if trace.active is not None:
            trace.active.begin_step(self._communicator.recorder)
        if self._divergence is not None:
            self._divergence.begin_step(self.parameters)
        self._end = Pending(timeout_seconds(self._communicator))
        return self._end

    def _admit(self, param: Any, key: Hashable, grad: Any, communicator: Communicator) -> GradientFuture:
        """Takes a gradient that is new, is watched, or cannot be reduced where it lies; checks it."""
        if self.unread is not None and not self._grads:
            self.tell_unread()
        beside_host = runs_beside_host(communicator)
        if beside_host:
            check_stream(communicator, "a gradient")
        grad = as_array(grad)
        its = self._known.get(key)
        if its is None and self._is_fixed:
            names = list_of_names([each.name for each in self._known.values()])
            name = "an array" if is_array(param) else name_of(param, communicator)
            raise InvalidArgument(
                f"{communicator.label}: {name} is not among the callback's parameters, which are {names}"
            )
        if its is None or type(its.param) is not type(param):
            name = name_of(param, communicator)
        else:
            name = its.name
        if its is not None and name != its.name:  # True and 1, or members of two IntEnum
            raise InvalidArgument(
                f"{communicator.label}: the names {name} and {its.name} are equal in Python, so that results() cannot "
                "tell them apart: name gradients by text"
            )
        native = accept(name, grad, communicator, self._options)
        if key in self._grads:
            callback = "" if self.identity.name is None else f" to callback {self.identity.text}"
            raise InvalidArgument(
                f"{communicator.label}: {name} was handed over{callback} twice before a flush: add its gradients up "
                "first, or end each pass with flush() or `with callback.backward()`"
            )
        if its is None or its.shape != native.shape or its.dtype != native.dtype:
            its = self._learn(param, key, name, native, its, communicator)
        arrays = arrays_of(communicator)
        if beside_host and self._is_fixed and not self._options.gradient_as_bucket_view:
            self._overlaps.claim(native, its.name, arrays, communicator.label)
        value: Any = grad
        if self._options.gradient_as_bucket_view:
            memory = self._ensure_memory(communicator)
            assert memory is not None
            value = memory.views[key]
            if memory.holds(key, native):
                value = grad
            elif beside_host:  # now, on the stream that makes it
                self._results_end.order()
                arrays.assign(native, value)
                native = value
            else:
                self._targets[key] = value
        elif not arrays.writeable(native) or overlaps_itself(native):
            value = self._targets[key] = arrays.empty_like(native)
        elif not arrays.is_viewed_flat(native):
            self._targets[key] = native
        if beside_host:
            self._marks.add(mark_work(communicator))
        self._grads[key] = native
        self._values[key] = value
        end = self._end or self._begin_end()
        if self.unread is None:
            future = GradientFuture(its.name, end, value)
        else:
            future = self.unread.future(key, its.name, end, value, is_new=value is not grad)
        if beside_host and self._is_fixed:
            self._launch_complete(communicator)
        return future

    def _learn(
        self, param: Any, key: Hashable, name: str, native: Array, its: Known | None, communicator: Communicator
    ) -> Known:
        """Remembers a gradient that is new, or has another shape or dtype than before."""
        if its is not None and self._is_fixed:
            raise InvalidArgument(
                f"{communicator.label}: the gradient of {name} must be {its.spec.dtype}{list(its.shape)}, as the "
                f"option parameters= says, got {native.dtype}{list(native.shape)}"
            )
        if its is None and name in self._keys:
            self._replace(self._keys[name], name, communicator)
        self._plan = None
        self._known[key] = made = known(param, name, native.shape, native.dtype)
        self._keys[name] = key  # after `_known`: Ctrl-C may come in between
        return made

    def _replace(self, key: Hashable, name: str, communicator: Communicator) -> None:
        """Forgets the parameter that had a name; refuses a second one of the same name while the first is in use."""
        is_of_array = is_array(self._known[key].param)
        # An array that only this class still refers to cannot come again: `weights = weights - step` has made a new one
        if key in self._grads or not is_of_array or sys.getrefcount(self._known[key].param) > 2:
            advice = (
                "arrays of equal values cannot be told apart: name the gradients by text, or pass the arrays as "
                "parameters=[...]"
                if is_of_array
                else "give each its own"
            )
            raise InvalidArgument(f"{communicator.label}: two parameters have the name {name}: {advice}")
        del self._known[key]

    def _begin_call(self, what: str, communicator: Communicator) -> None:
        """Refuses a call in a done-callback, or while another call runs; takes up a new communicator."""
        refuse_in_callback(communicator.label, what)
        if self._is_busy:
            raise InvalidArgument(
                f"{communicator.label}: {what} was called while another call of the callback is running: use a "
                "callback in one thread at a time"
            )
        self.begin_with(communicator)

    # -- The plan -----------------------------------------------------------------------------------------------------

    def _planned(self) -> _Plan:
        """Returns the plan of this step: the last one, while steps look the same."""
        plan, arrival = self._plan, list(self._grads)
        if plan is not None and (self._is_fixed or plan.arrival == arrival):
            return plan
        if plan is not None and set(plan.arrival) == set(arrival):  # in another order: the same plan
            self._plan = plan._replace(arrival=arrival)
            return self._plan
        self._known = {key: self._known[key] for key in arrival}
        self._keys = {each.name: key for key, each in self._known.items()}
        self._plan = self._plan_of(sorted(arrival, key=lambda key: self._known[key].name))
        self._plan = self._plan._replace(arrival=arrival)
        return self._plan

    def _plan_of(self, keys: list[Hashable]) -> _Plan:
        buckets = cut([(key, self._known[key].spec) for key in keys], self.threshold_bytes)
        agreements = []
        for weighted in (False, True):
            whole = self._events.of_step(buckets, weighted=weighted)
            agreements.append([self._events.of_bucket(whole, bucket) for bucket in buckets] or [whole])
        return _Plan(keys, buckets, (agreements[0], agreements[1]))

    # -- The end of a step --------------------------------------------------------------------------------------------

    def flush(self, communicator: Communicator, weight: float | None = None) -> None:
        """Reduces all gradients of the step, and ends it. See AllreduceCallback.flush."""
        if communicator is not self._communicator or self._is_busy or this_thread.callbacks:
            self._begin_call("flush()", communicator)
        if runs_beside_host(communicator):
            check_stream(communicator, "flush()")
        if weight is not None:
            self._weight = weight
        began = time.perf_counter()
        if self._end is not None:
            self._end.has_begun = True
        self.norm, self.skip_step, self.total_weight = None, False, None
        try:
            self._is_busy = True
            if self._grads or self._weight is not None or (self._is_fixed and self._options.missing == "zero"):
                work = self._reduce(communicator)
                assert self._divergence is not None
                self._divergence.end_step(is_used=self._total_weight != 0.0 and not self.skip_step)
            else:
                work = DONE
                compare(communicator, self._events.of("flush of a step without gradients"))
            self.statistics.communication_seconds += time.perf_counter() - began
            if trace.active is not None and self._grads:
                trace.active.end_step(communicator.recorder, self.count)
            self.total_weight = self._total_weight
            if self.total_weight == 0.0:
                self._end_unreduced()
            else:
                self._end_step(work)
        except BaseException as error:
            # Ctrl-C is for the thread that flushes, not for those that wait for a future.
            cancelled = GradientCancelled(f"the flush ended with {describe(error)}")
            self.fail(error if isinstance(error, Exception) else cancelled)
            raise
        finally:
            self._is_busy = False

    def _reduce(self, communicator: Communicator) -> Work:
        """Compares and reduces the step; returns the end of what was launched on a GPU."""
        beside_host = runs_beside_host(communicator)
        self._check_overlaps(communicator)
        self._fill_missing(communicator)
        plan = self._planned()
        op, factor = self._agreed(plan, communicator)
        if self._total_weight == 0.0:
            return DONE
        if self._weight == 0.0:
            self._drop_own(communicator)
        if beside_host:
            self._marks.add(mark_work(communicator))
        for bucket in plan.buckets[len(self._launched) :]:
            self._launched.append(self._reduce_bucket(bucket, plan, communicator, op, factor))
        self._order_launched()
        if len(self._grads) != len(plan.arrival):  # by a thread that had looked at _is_busy just before the flush
            raise InvalidArgument(
                f"{communicator.label}: a gradient was handed over while flush() was running: use a callback in one "
                "thread at a time"
            )
        if self._shared_weight is not None:
            work, total = self._shared_weight
            work.wait()
            self._total_weight = float(total[0])
            if self._total_weight == 0.0:
                return DONE
        self._look_at_values(plan, communicator)
        if beside_host and self._is_fixed and communicator.world_size > 1:
            return verify(communicator, self._events.of("comparison of what was launched"))
        if beside_host and (self._hook is not None or self._options.clip_norm is not None):
            return mark_end(communicator)  # what they have written on the current stream is the result
        return self._launched[-1] if self._launched else DONE

    def _agreed(self, plan: _Plan, communicator: Communicator) -> tuple[ReduceOp, Any]:
        """Has the ranks agree on the step, before its first bucket; see _agreed_factor."""
        if runs_beside_host(communicator):
            self._agree_before_launches(plan, communicator)
        self._compare_parameters(plan)
        return self._agreed_factor(plan, communicator)

    def _agree_before_launches(self, plan: _Plan, communicator: Communicator) -> None:
        """On a GPU, before the first bucket of a step: all ranks compare the step, or know that it is the plan.

        With `parameters=` the plan is compared once. What was launched is compared at the end of each step, on the
        device, and the verdict on the last step is awaited here.
        """
        if self._launched:
            return
        if self._is_fixed:
            self._results_end.wait()
        if not self._is_fixed or self._is_launched_by is not (self._weight is not None):
            whole = plan.agreements[self._weight is not None][0]
            compare(communicator, whole._replace(summarise=None))
            self._is_launched_by = self._weight is not None

    def _reduce_bucket(
        self, bucket: Bucket, plan: _Plan, communicator: Communicator, op: ReduceOp, factor: Any
    ) -> Work:
        """Reduces one bucket; returns what a GPU still has to do."""
        agreement = plan.agreements[self._weight is not None][bucket.number]
        natives, targets = self._arrays_of(bucket, communicator)
        beside_host = runs_beside_host(communicator)
        self.statistics.all_reduces += 1
        self.statistics.bytes_all_reduced += bucket.size_bytes
        if self._hook is None:
            return reduce_list(
                communicator,
                natives,
                op,
                agreement,
                factor=factor,
                targets=targets,
                after=self._marks,
                squares=self._squares if self._options.looks_at_values else None,
            )
        if bucket.number == 0:
            if not beside_host:
                compare(communicator, agreement)
            follow_work(communicator, self._marks)
        arrays, flats = arrays_of(communicator), natives
        if targets is not None:
            flats = flats_of(communicator, natives, targets)
        if self._shared_weight is not None:
            self._shared_weight[0].order()
        if self._shared_weight is not None or factor != 1.0:
            arrays.multiply_in_place(flats, factor)
        run_hook(self._hook, bucket, flats, communicator, op.value)
        for flat, target in zip(flats, targets or (), strict=False):
            arrays.write_back(flat, target)
        return DONE

    def _arrays_of(self, bucket: Bucket, communicator: Communicator) -> tuple[list[Array], list[Array] | None]:
        """Returns the arrays with the values of a bucket, and those for the results: None if they are flat as well."""
        if self._memory is not None:
            for key in bucket.keys if self._targets else ():
                if key in self._targets:
                    arrays_of(communicator).assign(self._grads[key], self._targets[key])
            return [self._memory.flats[bucket.number]], None
        natives = [self._grads[key] for key in bucket.keys]
        if not self._targets:
            return [native.reshape(-1) for native in natives], None
        return natives, [self._result_of(key) for key in bucket.keys]

    def _order_launched(self) -> None:
        """Makes the current stream wait for what was launched, and the host for results in host memory."""
        for work in self._launched:
            work.order()

    def _check_overlaps(self, communicator: Communicator) -> None:
        """Refuses gradients that share memory: their results would be mixed."""
        grads, beside_host = self._grads, runs_beside_host(communicator)
        if self._memory is not None or (beside_host and self._is_fixed):  # those have been looked at one by one
            return
        if not beside_host and len(set(map(id, grads.values()))) == len(grads):
            for base in map(_base_of, grads.values()):
                if base is not None:
                    break
            else:
                return  # each owns its memory
        arrays = arrays_of(communicator)
        for key, native in grads.items():
            self._overlaps.claim(native, self._known[key].name, arrays, communicator.label)

    # -- Missing gradients and weights --------------------------------------------------------------------------------

    def _fill_missing(self, communicator: Communicator) -> None:
        """Hands over zeros for gradients that this rank lacks, or raises an error.

        Raises:
            MissingGradient: the same gradients are missing on all ranks, with missing="error".
            PlanMismatch: the ranks lack different gradients, with missing="error".
        """
        expected: Sequence[Hashable] = ()
        if self._is_fixed:
            expected = list(self._known)
        elif self._weight == 0.0 and not self._grads and self._plan is not None:
            expected = self._plan.arrival
        lacking = [key for key in expected if key not in self._grads]
        if not lacking:
            return
        if self._is_fixed and self._options.missing == "error" and self._weight != 0.0:
            assert self._plan is not None
            names = [self._known[key].name for key in lacking]
            agreement = self._events.of_step(self._plan.buckets, names, weighted=self._weight is not None)
            if runs_beside_host(communicator) and communicator.world_size > 1 and self._is_launched_by is not None:
                raise stray(communicator, agreement)  # the others may have launched their buckets
            compare(communicator, agreement)
            raise MissingGradient(
                f"{communicator.label}: no rank has handed over a gradient for {list_of_names(names)}: hand over one "
                'for each parameter, or use AllreduceCallback(parameters=..., missing="zero")'
            )
        self._ensure_memory(communicator)
        self._results_end.order()
        arrays = arrays_of(communicator)
        for key in lacking:
            its = self._known[key]
            zeros = arrays.empty(its.shape, its.dtype, None) if self._memory is None else self._memory.views[key]
            arrays.zero(zeros)
            self._grads[key] = self._values[key] = zeros

    def _drop_own(self, communicator: Communicator) -> None:
        """Ignores what this rank has handed over: its weight is 0, and the gradient of an empty batch is NaN."""
        arrays = arrays_of(communicator)
        if self._marks:
            follow_work(communicator, self._marks)
        for key, native in self._grads.items():
            if key in self._targets:  # the program's array may not be written to
                self._grads[key] = zeros = arrays.empty_like(native)
                zeros[...] = 0
            else:
                arrays.zero(native)

    def _agreed_factor(self, plan: _Plan, communicator: Communicator) -> tuple[ReduceOp, Any]:
        """Returns the operator, and the factor of this rank's values; the ranks exchange their weights.

        On a GPU they do so on the device, and the factor is there; the host learns the sum at the end of the step.
        """
        if self._weight is None:
            return self._options.op, 1.0
        if self._factor is not None:
            return self._factor
        agreement = self._events.of_weights(plan.agreements[True][0])
        if runs_beside_host(communicator):
            factor, work, total = share_weight(communicator, self._weight, agreement)
            self._factor, self._shared_weight = (ReduceOp.SUM, factor), (work, total)
        else:
            rows = share_floats(communicator, "backward(weight=)", [self._weight], agreement)
            weights = [weight for [weight] in rows]
            self._total_weight = sum(weights)
            if self._total_weight == 0.0 or len(set(weights)) == 1:  # the plain mean, bit for bit
                self._factor = self._options.op, 1.0
            elif self._weight == 0.0:  # the values are zeros
                self._factor = ReduceOp.SUM, 1.0
            else:
                largest = 1.0 if math.isfinite(self._total_weight) else max(weights)
                self._factor = ReduceOp.SUM, self._weight / largest / sum(weight / largest for weight in weights)
        return self._factor

    def _compare_parameters(self, plan: _Plan) -> None:
        """Compares the parameters' values, where it is time for it; before anything else in a step, on all ranks."""
        divergence, given = self._divergence, self.parameters
        if divergence is None or not divergence.is_due or not plan.buckets:
            return
        parameters = []
        for bucket in plan.buckets:
            for key in bucket.keys:
                its = self._known[key]
                named = given.get(its.param) if isinstance(given, Mapping) else None
                array = its.param if is_array(its.param) else named
                parameters.append(Parameter(its.name, array, self._grads.get(key)))
        agreement = plan.agreements[self._weight is not None][0]
        divergence.compare(parameters, agreement, is_fixed=self._is_fixed)

    # -- Early launches: a GPU, and `parameters=` ---------------------------------------------------------------------

    def _launch_complete(self, communicator: Communicator) -> None:
        """Launches the next buckets, as far as all their gradients have arrived."""
        plan = self._plan
        if plan is None or self._hook is not None or self._weight == 0.0:
            return
        while len(self._launched) < len(plan.buckets):
            bucket = plan.buckets[len(self._launched)]
            if not all(key in self._grads for key in reversed(bucket.keys)):  # the last mostly arrives last
                return
            began = time.perf_counter()
            try:
                self._is_busy = True
                op, factor = self._agreed(plan, communicator)
                self._launched.append(self._reduce_bucket(bucket, plan, communicator, op, factor))
            except BaseException as error:
                self.fail(error)
                raise
            finally:
                self._is_busy = False
                self.statistics.communication_seconds += time.perf_counter() - began

    # -- Values -------------------------------------------------------------------------------------------------------

    def _look_at_values(self, plan: _Plan, communicator: Communicator) -> None:
        """Computes the norm of the reduced gradients, checks that they are finite, and clips them.

        Raises:
            NonFiniteGradient: they are not finite, and the policy is "raise"; all ranks raise it.
        """
        options, arrays = self._options, arrays_of(communicator)
        if not options.looks_at_values:
            return
        if self._memory is not None:
            reduced = self._memory.flats
        else:
            reduced = [self._result_of(key) for bucket in plan.buckets for key in bucket.keys]
        squares = sum(self._squares) if len(self._squares) == len(plan.buckets) else None
        norm = norm_of(reduced, squares, communicator, self._events.of("norm of the reduced gradients"))
        if options.clip_norm is not None:
            self.norm = norm.value
        if not norm.is_finite and options.nonfinite != "off":
            error = self._nonfinite(communicator)
            if options.nonfinite == "raise":
                raise error
            _log.info("skip_step is True: %s", error)
            self.skip_step = True
            self.statistics.skipped_steps += 1
        elif options.clip_norm is not None and (factor := norm.clip_factor(options.clip_norm)) < 1.0:
            arrays.multiply_in_place(reduced, factor)

    def _nonfinite(self, communicator: Communicator) -> NonFiniteGradient:
        """Returns the error that names the gradients with NaN or infinity in their results."""
        arrays, known = arrays_of(communicator), self._known
        bad = [key for key in self._grads if not arrays.all_finite(arrays.flat(self._result_of(key)))]
        specs = [known[key].spec for key in bad]
        names = list_of_names([spec.name for spec in specs])
        return NonFiniteGradient(
            f"{communicator.label}: NaN or infinity in the reduced gradients of {names}: check the batches of this "
            "step, or lower the learning rate, or the loss scale",
            parameters=tuple([spec.label for spec in specs]),
        )

    def _result_of(self, key: Hashable) -> Array:
        """Returns the native array that has the reduced values of a gradient."""
        if key in self._targets:
            return self._targets[key]
        return self._grads[key] if self._memory is None else self._memory.views[key]

    def results(self) -> dict[Hashable, Any]:
        """Returns the results of the last step, by key, in the order of hand-over. The current stream waits for them.

        Raises:
            FutureNotReady: a step has begun, and has not ended.
        """
        if self._results is None or self.count:
            raise FutureNotReady(
                "results() gives the gradients of the last step, and a new step has begun: call it after the "
                "`with sync.backward():` block, or after flush()"
            )
        if self.unread is not None:
            self.unread.forget()
        self._results_end.order()
        return self._results

    def forget_results(self) -> None:
        """Lets go of the results of the last step."""
        self._results, self._results_end = {}, DONE
        if self.unread is not None:
            self.unread.forget()

    def tell_unread(self) -> None:
        """Tells of results of the last step that nobody can read; call it before the next step begins."""
        if self.unread is not None:
            self.unread.tell()
            if self.unread.is_over:
                self._stop_watching()

    def _stop_watching(self) -> None:
        self.unread, self._is_watched = None, self._stays_watched

    def by_param(self, values: Mapping[Hashable, Any]) -> dict[Any, Any]:
        """Returns values of gradients by what the program calls these: by name, or by the text that names an array."""
        known = self._known
        return {known[key].called: value for key, value in values.items()}

    # -- Ends ---------------------------------------------------------------------------------------------------------

    def _end_step(self, work: Work) -> None:
        self.statistics.steps += bool(self._grads)
        self.statistics.gradients += len(self._grads)
        self._results = self._grads | self._values if self._values else self._grads
        self._results_end = work
        assert self._communicator is not None
        self._communicator.count_step()
        self._finish(None, work)

    def _end_unreduced(self) -> None:
        """Ends a step in which all weights are 0: the futures raise an error, because their arrays are as they were."""
        self._results, self._results_end = {}, DONE
        self._finish(
            GradientCancelled(
                "the weights of all ranks are 0, so nothing was reduced: leave the loop when total_weight is 0"
            )
        )

    def fail(self, error: BaseException) -> None:
        """Ends the step with an error, which its futures raise; forgets all arrays."""
        self.note(error)
        if isinstance(error, _RAISED_ON_ALL):
            with suppress(GradsyncError):  # all ranks have launched these buckets, so they end soon
                self._order_launched()
        self._results, self._results_end = {}, DONE
        self.norm, self.skip_step, self.total_weight = None, False, None
        if isinstance(error, PlanMismatch) and not self._is_fixed:
            self._plan, self._known, self._keys = None, {}, {}
        self._finish(error)

    def _finish(self, error: BaseException | None, rest: Work = DONE) -> None:
        """Begins the next step, and completes the futures of this one."""
        end = self._end
        self.ended += 1
        self._begin()
        if self.unread is not None:
            self.unread.end_step(self._results or {})
        if end is not None:
            try:
                end.finish(error, rest)
            finally:
                if not end.is_pending:  # else Ctrl-C came in between, and fail() tells the futures
                    self._end = None

    def begin_anew(self) -> None:
        """Forgets all steps: the world was rebuilt, and a new rank in it knows none. Cancels one that has begun.

        A callback of a group of its own goes on as it is.
        """
        if not self.identity.is_of_world:
            return
        if self.count:
            self.fail(GradientCancelled("gs.rebuild() was called before the end of the backward pass"))
        if self._communicator is not None:
            self.norm, self.skip_step, self.total_weight = None, False, None
            self._communicator, self._results, self._results_end = None, {}, DONE  # begin_with() takes up the new world
            if (reset := getattr(self._hook, "reset", None)) is not None:
                reset()

    def disown(self) -> None:
        """Fails the step in the child of a fork: the parent reduces its gradients."""
        if self._end is not None and self._communicator is not None:
            label = self._communicator.label
            self._end.disown(CommunicatorClosed(f"{label}: the parent of this forked process reduces this gradient"))

    def note(self, error: BaseException) -> None:
        """Remembers an error of a collective of this callback, if every rank raises it."""
        if isinstance(error, _RAISED_ON_ALL):
            self._raised_on_all = weakref.ref(error)

    def is_raised_on_all(self, error: BaseException) -> bool:
        """Whether every rank has raised this error, in a collective of this callback."""
        return self._raised_on_all is not None and self._raised_on_all() is error

    def forgotten(self) -> str | None:
        """Returns the error text for gradients that wait for a flush; None if there are none.

        The result is also None if a failure ended the communicator, because this failure explains it.
        """
        if not self._grads or self._communicator is None or has_failed(self._communicator):
            return None
        first = self._known[next(iter(self._grads))].name
        count = "1 gradient was" if self.count == 1 else f"{self.count} gradients were"
        return (
            f"{self._communicator.label}: {count} handed over and never reduced (first: {first}): end each backward "
            "pass with flush() or `with callback.backward()`"
        )
