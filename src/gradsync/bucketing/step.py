"""One step after another: takes gradients, reduces complete buckets at once, and reduces the rest at the flush.

Does this step repeat the last one? Step.take asks that once for each gradient. If the same array arrives that the last
step had at this place, everything known about it is used again: its entry, its place in the plan, and in the end its
bucket's reduction (see Reducer.reduction_of). Otherwise Step._admit checks the gradient and makes a new entry.

An array is kept from one step to the next only if it arrived in two steps running. So a loop that makes new arrays in
each step does not hold the memory of two steps.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from gradsync.bucketing.accumulation import Accumulation
from gradsync.bucketing.agreements import CallbackIdentity
from gradsync.bucketing.bucket_memory import BucketMemory
from gradsync.bucketing.gradient import (
    Destination,
    GradientEntry,
    KnownParameter,
    OverlapCheck,
    accept,
    as_array,
    destination,
    display_name,
    key_of,
    known_parameters,
    warn_of_unequal_values,
)
from gradsync.bucketing.guard import GradientGuard, LockedGradients, can_lock, register, set_flags
from gradsync.bucketing.options import Options
from gradsync.bucketing.plan import (
    DEFAULT_THRESHOLD_BYTES,
    VIEWS_ON_CPU_THRESHOLD_BYTES,
    Bucket,
    GradientSpec,
    Planner,
    list_of_names,
)
from gradsync.bucketing.reducer import Reducer
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.lifetime import Lifetime
from gradsync.diagnostics import tracing
from gradsync.errors import GradientCancelled, InvalidArgument, MissingGradient, NonFiniteGradient, PlanMismatch
from gradsync.futures import CollectiveEnd, Completion, GradientFuture, check_may_call, pending
from gradsync.reduction import Array, dtype_name, dtype_of

_log = logging.getLogger("gradsync")

_NOWHERE = sys.maxsize  # the place of a name that is no parameter


class Step:
    """The state between the first gradient of a step and its flush, and the memory of the last step.

    A gradient's place is its number in the order of arrival; with `parameters` it is the parameter's number.

    Args:
        options: of the callback.
        identity: of the callback.

    Attributes:
        planner: says which gradients share a bucket.
        reducer: the collectives of the step.
        memory: the buckets' memory, if gradients live in the buckets; else None.
        count: gradients handed over since the last flush.
        ended: steps that have ended, empty ones included.
        raised_on_all: the last error that every rank got from a collective of this callback.
        filled: after a flush: by parameter, the results for which this rank had no gradient.
        sums: of the gradients of local passes, until the next step takes them.
    """

    def __init__(self, options: Options, identity: CallbackIdentity) -> None:
        self.planner = Planner(options.threshold_or(DEFAULT_THRESHOLD_BYTES), options.first_bucket_bytes)
        self.reducer = Reducer(options)
        self.reducer.events.arrived = weakref.WeakMethod(self._arrived)
        self.memory: BucketMemory | None = None
        self.count = 0
        self.ended = 0
        self.raised_on_all: BaseException | None = None
        self.filled: dict[Any, Any] = {}
        self.sums = Accumulation()
        self._options = options
        self._identity = identity
        self._communicator: Communicator | None = None  # of the last step
        self._is_known = False  # whether the other ranks of the communicator know the callback
        self._has_compared = options.parameters is None  # whether the ranks have compared the parameters' values
        self._parameters: list[KnownParameter] = []
        self._is_busy = False  # whether some thread hands over a gradient, or flushes
        self._shapes: dict[tuple[int, ...], tuple[int, ...]] = {}  # one object for equal shapes: saves memory
        # By place: of this step, and of the last one where this one has not arrived yet.
        self._places: dict[Hashable, int] | None = None  # with `parameters`
        self._entries: list[GradientEntry | None] = []  # of arrays that may arrive again
        self._seen: list[weakref.ref[Array] | None] = []  # arrays that arrived in the last step for the first time
        self._specs: list[GradientSpec] = []
        self._failed_specs: list[GradientSpec] = []  # of the last step, if that failed
        self._zeros: dict[int, Array] = {}
        # Of this step.
        self._has_come = bytearray()  # with `parameters`: by place, whether the gradient has arrived
        self._new: list[int] = []  # places with another array than in the last step
        self._has_new = False  # whether there is one: only then all gradients are checked for shared memory
        self._keys: set[Hashable] = set()
        self._overlaps = OverlapCheck()
        self._ends = _Ends()
        self._producers: dict[int, list[Any]] = {}  # by bucket; used only if collectives run beside the host
        self._reduced: list[Bucket] = []
        self._unlocked: set[int] = set()  # places of gradients that were unlocked without a reduction
        self._accepted_dtypes: set[Any] = set()
        self._guard: GradientGuard | None = None  # in debug mode
        self._has_ended = False  # whether the flush has begun, so that no gradient will follow
        self._is_watched = False  # whether _note has work for each gradient
        self._state_of: Callable[[Any], Any] = id  # the communicator's ArrayKind.state
        register(self)

    # -- Before a step ---------------------------------------------------------------------------------------------

    def begin_with(self, communicator: Communicator) -> None:
        """Begins with a communicator: forgets the arrays of another one; refuses a change within a step."""
        if communicator is self._communicator:
            return
        if self.count:
            if self._communicator is not None and not self._communicator.closed:
                raise InvalidArgument(
                    f"{communicator.label}: the group has changed in the middle of a backward pass: flush first"
                )
            self.fail(GradientCancelled("the group ended before its backward pass did"))
        self.report_lost_sums()
        self.forget_memory()
        self._accepted_dtypes.clear()
        self._shapes.clear()
        if self._options.parameters is not None:
            self._fix_places(communicator)
        known = self._identity.known_on(communicator)
        self.reducer.begin_with(known)
        self._is_known = known is not None or communicator.world_size == 1
        communicator._lifetime.observe_end(self)
        self._guard = GradientGuard(communicator) if communicator._debug else None
        self._is_watched = self._guard is not None or communicator._runs_beside_host
        self._state_of = communicator._arrays.state
        self._ends.timeout_seconds = communicator._timeout_seconds
        self._communicator = communicator

    def live_in_buckets(self, communicator: Communicator) -> Any:
        """Makes the buckets' memory, and returns its views; see AllreduceCallback.gradient_buffers."""
        if not self._options.gradient_as_bucket_view:
            raise InvalidArgument("gradient_buffers() needs AllreduceCallback(gradient_as_bucket_view=True)")
        self.begin_with(communicator)
        self.forget_memory()
        self._ensure_memory(communicator)
        views = [] if self.memory is None else self.memory.views
        given = self._options.parameters
        return dict(zip(given, views, strict=True)) if isinstance(given, Mapping) else list(views)

    def forget_memory(self) -> None:
        """Forgets the buckets' memory; views of it that a program holds become ordinary arrays."""
        self._forget_entries()
        self._zeros.clear()
        self.reducer.forget()
        self.memory = None

    def meet(self, communicator: Communicator) -> None:
        """Checks, at the first use, that the other ranks use the same callback. The first collective of all."""
        if self._is_known:
            return
        with self.noting_errors():
            self.reducer.events.change_callback(self._identity.meet(communicator))
        self._is_known = True

    def prepare(self, gradient: Any, communicator: Communicator) -> None:
        """Prepares the first step: compares the parameters, makes the buckets' memory. Collective.

        The order is the same on all ranks, whatever gradients they have. The comparison is first, so that a difference
        between the parameters is reported before one between the buckets.

        Args:
            gradient: the first one of this rank, or None.
            communicator: of the ranks.
        """
        self._compare_parameters(gradient, communicator)
        self._ensure_memory(communicator)

    def specs_to_repeat(self) -> list[GradientSpec]:
        """Returns the gradients of the last step; of a failed one, those on which all ranks had agreed."""
        return self._specs or self._failed_specs

    def _ensure_memory(self, communicator: Communicator) -> None:
        """Makes the buckets' memory, if gradients live there and it does not exist yet. Collective then."""
        if self.memory is not None or not self._options.gradient_as_bucket_view:
            return
        self.meet(communicator)
        with self.noting_errors():
            self.memory = BucketMemory(self.planner.buckets, communicator, self.reducer.events.of_callback)

    def _compare_parameters(self, gradient: Any, communicator: Communicator) -> None:
        """Warns before the first step if the parameters' values differ between ranks. Collective, once."""
        if self._has_compared or communicator.world_size == 1:
            return
        self.meet(communicator)
        agreed = self.reducer.events.of_callback
        with self.noting_errors():
            warn_of_unequal_values(self._parameters, self._options.parameters, gradient, communicator, agreed)
        self._has_compared = True  # only here: after PlanMismatch every rank compares again

    def _fix_places(self, communicator: Communicator) -> None:
        """Gives each named parameter its fixed place."""
        options = self._options
        if not self._parameters:
            self._parameters = known_parameters(options.parameters, "AllreduceCallback", options.op, communicator)
        if not self._parameters:
            raise InvalidArgument(
                f"{communicator.label}: parameters= names no parameter: name at least one, or leave it out"
            )
        in_views = options.gradient_as_bucket_view and not communicator._runs_beside_host
        threshold = options.threshold_or(VIEWS_ON_CPU_THRESHOLD_BYTES if in_views else DEFAULT_THRESHOLD_BYTES)
        self._specs = [parameter.spec for parameter in self._parameters]
        self._places = {parameter.key: place for place, parameter in enumerate(self._parameters)}
        self.planner = Planner(threshold, options.first_bucket_bytes, self._specs)
        self._forget_entries()

    # -- A gradient ------------------------------------------------------------------------------------------------

    def take(self, param: Any, grad: Any, communicator: Communicator) -> GradientFuture:
        """Takes a gradient; reduces the buckets that it completes. See AllreduceCallback."""
        if communicator is not self._communicator:
            self.begin_with(communicator)
        if pending:
            check_may_call(communicator.label, "callback(param, grad)")
        if self._is_busy:
            raise _second_use("callback(param, grad)", communicator)
        try:
            self._is_busy = True
            if self._is_watched and communicator._runs_beside_host:
                communicator._checked_stream(None, "a gradient")  # first: an error must leave no trace
            if (places := self._places) is None:
                position = self.count
            else:
                position = places.get(param if type(param) is str else key_of(param), _NOWHERE)
            entry = self._entries[position] if position < len(self._entries) else None
            # Does this step repeat the last one here: the same, unchanged array at the same place?
            if (
                entry is not None
                and entry.gradient is grad
                and self.planner.repeats
                and entry.shape == grad.shape
                and entry.dtype is grad.dtype
                and entry.state == self._state_of(grad)
                and (
                    (entry.parameter is param or entry.key == (param if type(param) is str else key_of(param)))
                    if places is None
                    else not self._has_come[position]
                )
            ):
                if self._has_new:
                    self._register(entry.key, entry.native, entry.name, communicator)
            else:
                if not self.count:
                    self.prepare(grad, communicator)
                entry = self._admit(param, grad, communicator)
                self.reducer.renew(entry.number)
            self.count += 1
            end = self._ends[entry.number]
            if self._is_watched or tracing.active is not None:
                self._note(entry, end, communicator)
            future = GradientFuture(entry.name, end, entry.result)
            if entry.is_locked:
                set_flags(entry.gradient, False)
            if (complete := entry.complete) is None:
                self._has_come[entry.position] = True
                complete = self.planner.count(entry.number)
            if complete:
                self._reduce_all(complete, communicator)
            return future
        finally:
            self._is_busy = False

    def _note(self, entry: GradientEntry, end: CollectiveEnd, communicator: Communicator) -> None:
        """Notes for GPUs, traces and the debug mode: the work that makes a gradient, its arrival, its values."""
        if communicator._runs_beside_host:
            self._producers.setdefault(entry.number, []).append(communicator._mark_work())
        if (tracer := tracing.active) is not None:  # read once: another thread may end the trace
            tracer.arrive(communicator.recorder.group, entry.spec.label, is_first=self.count == 1)
        if self._guard is not None:
            self._guard.take(entry, end)

    def _admit(self, param: Any, grad: Any, communicator: Communicator) -> GradientEntry:
        """Checks a gradient that the last step did not have here, and makes its entry. An error leaves no trace.

        Raises:
            InvalidArgument, UnsupportedDtype: see AllreduceCallback.
        """
        arrays, position = communicator._arrays, self._place_of(param, communicator)
        grad = as_array(grad)
        native = accept(param, grad, position, communicator, self._options, self._accepted_dtypes)
        key, name = key_of(param), display_name(param, position)
        spec = self._spec_of(position, name, native, communicator)
        is_locked = False
        is_itself = native is grad
        if isinstance(grad, np.ndarray):
            # In the buckets' memory, which ranks share, there is nothing to lock; other arrays are copied there now.
            is_on = self._options.lock_gradients and self.memory is None
            is_locked = can_lock(grad, name, self, is_on=is_on)
            if is_locked and is_itself:
                native = grad.view()  # gradsync writes through it; that of a subclass is a view already
        goes = self._destination(grad, native, position, communicator)
        # Otherwise the result is a new array in each step, or the values are copied first.
        recurs = is_itself and goes.result is grad and goes.target is goes.source and goes.write_back is None
        recurs = recurs and self._has_seen(position, grad)
        state = arrays.state(native) if recurs else None
        if self.memory is not None and goes.result is not grad:  # already copied to its place, which is written to
            native = self.memory.views[position]
        if not self._has_new:
            for earlier in self._of_step():
                self._register(earlier.key, earlier.native, earlier.name, communicator)
            self._has_new = True
        self._register(key, native, spec.name, communicator)
        place = self.planner.add(spec, position)
        entry = GradientEntry(
            gradient=grad,
            parameter=param,
            shape=self._shapes.setdefault(spec.shape, spec.shape),
            dtype=native.dtype,
            state=state,
            number=place.number,
            name=spec.name,
            result=goes.result,
            is_locked=is_locked,
            complete=place.complete,
            key=key,
            spec=spec,
            position=position,
            native=native,
            source=goes.source,
            target=goes.target,
            write_back=goes.write_back,
            recurs=recurs,
        )
        if position == len(self._entries):
            self._entries.append(entry)
            self._seen.append(None)
            self._specs.append(spec)
        else:
            self._entries[position] = entry
            self._specs[position] = spec
        self._new.append(position)
        return entry

    def add_up(self, param: Any, grad: Any, communicator: Communicator, *, is_reused: bool = False) -> GradientFuture:
        """Adds up a gradient of a local pass; its future is done, and gives the sum so far. Not collective."""
        self._begin_local(communicator)
        position = len(self.sums) if self._places is None else self._place_of(param, communicator)
        grad = as_array(grad)
        native = accept(param, grad, position, communicator, self._options, self._accepted_dtypes)
        key, name = key_of(param), display_name(param, position)
        if self._places is not None:
            self._spec_of(position, name, native, communicator)
            name = self._specs[position].name
        if isinstance(grad, np.ndarray):
            can_lock(grad, name, self, is_on=False)  # refuses a gradient that is in flight in another callback
        total = self.sums.add(param, key, name, grad, native, communicator, is_reused=is_reused)
        if isinstance(total, np.ndarray):
            total = total.view()
            total.setflags(write=False)
        end = CollectiveEnd(communicator._timeout_seconds)
        end.finish(None, None, communicator._mark_end())
        return GradientFuture(name, end, total)

    def take_with_sum(
        self, param: Any, grad: Any, communicator: Communicator, *, is_reused: bool = False
    ) -> GradientFuture:
        """Takes a gradient together with the sum that local passes have made for its parameter."""
        if self.sums and communicator is self._communicator and grad is not None:
            self._begin_local(communicator)
            grad = as_array(grad)
            native = accept(param, grad, self.count, communicator, self._options, self._accepted_dtypes)
            grad = self.sums.take(key_of(param), grad, native, communicator, is_reused=is_reused)
        return self.take(param, grad, communicator)

    def end_local_pass(self) -> None:
        """Counts a local pass, if a gradient has come in it."""
        self.reducer.events.local_passes += self.sums.end_pass()

    def discard(self) -> None:
        """Drops the sums of local passes."""
        self.sums.clear()
        self.reducer.events.local_passes = 0

    def _begin_local(self, communicator: Communicator) -> None:
        """Checks that a gradient may be added up now; the same checks as at the beginning of take()."""
        if communicator is not self._communicator:
            self.begin_with(communicator)
        if pending:
            check_may_call(communicator.label, "callback(param, grad)")
        if self._is_busy:
            raise _second_use("callback(param, grad)", communicator)
        if communicator._runs_beside_host:
            communicator._checked_stream(None, "a gradient")

    def _place_of(self, param: Any, communicator: Communicator) -> int:
        if self._places is None:
            return self.count
        position = self._places.get(key_of(param))
        if position is None:
            raise InvalidArgument(
                f"{communicator.label}: {display_name(param, self.count)} is not among the callback's parameters, "
                f"which are {list_of_names([spec.name for spec in self._specs])}"
            )
        if self._has_come[position]:
            raise _twice(self._specs[position].name, communicator)
        return position

    def _spec_of(self, position: int, name: str, native: Array, communicator: Communicator) -> GradientSpec:
        """Returns the spec of a gradient: the last step's object, if it is equal."""
        dtype = dtype_name(native.dtype)
        known = self._specs[position] if position < len(self._specs) else None
        if known is not None and known.shape == native.shape and known.dtype == dtype:
            if known.name == name or self._places is not None:
                return known
        elif known is not None and self._places is not None:
            raise InvalidArgument(
                f"{communicator.label}: the gradient of {known.name} must be {known.dtype}{list(known.shape)}, as by "
                f"the callback's parameters, got {dtype}{list(native.shape)}"
            )
        return GradientSpec(name, native.shape, dtype, native.dtype.itemsize)

    def _destination(self, grad: Any, native: Array, position: int, communicator: Communicator) -> Destination:
        """Decides where the reduced values go; copies a gradient into its bucket, if it must live there."""
        if self.memory is None:
            return destination(grad, native, communicator)
        view = self.memory.views[position]
        flat = view.reshape(-1)
        if self.memory.holds(position, native):
            return Destination(flat, flat, None, grad)
        communicator._arrays.assign(native, view)
        return Destination(flat, flat, None, view)

    def _has_seen(self, position: int, gradient: Any) -> bool:
        """Whether the last step had this array at this place."""
        if position >= len(self._seen):
            return False
        entry, seen = self._entries[position], self._seen[position]
        return (entry is not None and entry.gradient is gradient) or (seen is not None and seen() is gradient)

    def _register(self, key: Hashable, native: Array, name: str, communicator: Communicator) -> None:
        """Refuses a second gradient of one parameter, and gradients that share memory."""
        if key in self._keys:
            raise _twice(name, communicator)
        try:
            self._overlaps.claim(native, name, communicator._arrays)
        except InvalidArgument as error:
            raise InvalidArgument(f"{communicator.label}: {error}") from None
        self._keys.add(key)

    # -- The end of a step -----------------------------------------------------------------------------------------

    def flush(self, communicator: Communicator) -> None:
        """Reduces what is left, and ends the step."""
        if pending:
            check_may_call(communicator.label, "flush()")
        if communicator is not self._communicator:
            self.begin_with(communicator)
        communicator._checked_stream(None, "flush()")  # before the ranks meet: this stream will wait for the results
        if self._is_busy:
            raise _second_use("flush()", communicator)
        self.filled = {}
        for end in self._ends.values():
            end.has_begun = True
        try:
            if not self._is_known:
                self.meet(communicator)
            rest = {}  # of parameters with gradients in local passes only
            for param, total in self.sums.take_rest(communicator) if self.sums else ():
                position = self.count if self._places is None else self._places[key_of(param)]
                name = display_name(param, position) if hasattr(param, "dtype") else param
                rest[name] = self.take(param, total, communicator)
            self._has_ended = True
            if self._places is not None and self._is_incomplete():
                self._complete(communicator)
            self._is_busy = True
            self._reduce_all(self.planner.flush(self.count), communicator)
            if self._guard is not None:
                self._guard.check_results()
            later = self.reducer.end(self.count, communicator)
            if later is not None:
                self._ends.postpone(later)
            if (tracer := tracing.active) is not None and self.count:
                tracer.end_step(communicator.recorder.group, self.count)
            self.reducer.statistics.steps += self.count > 0
            self._end_step()
            self._keep_entries()
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self._is_busy = False
        for name, future in rest.items():
            self.filled[name] = future.result()
        if self._ends.leaving is not None:
            self._ends.raise_leaving()

    @contextmanager
    def noting_errors(self) -> Iterator[None]:
        """Surrounds collectives outside the step; notes errors that every rank gets, as fail() does."""
        try:
            yield
        except BaseException as error:
            self._note_raised_on_all(error)
            raise

    def _note_raised_on_all(self, error: BaseException) -> None:
        if isinstance(error, (PlanMismatch, NonFiniteGradient)):
            self.raised_on_all = error

    def fail(self, error: BaseException) -> None:
        """Ends the step with an error, which all futures that are not done raise.

        Forgets the step, except the specs that a rank in join() must repeat.
        """
        self._note_raised_on_all(error)
        self.unlock_waiting()
        ends, self._ends = self._ends, _Ends(self._ends.timeout_seconds)
        self.reducer.fail()
        self.sums.clear()
        if isinstance(error, NonFiniteGradient) or len(self._specs) > self.count:
            self._failed_specs = list(self._specs)
        self._end_step()
        self.reducer.forget()
        self.planner.reset()
        self._forget_entries()
        ends.fail(error)

    def _is_incomplete(self) -> bool:
        """Whether gradients are missing. An empty step is complete, unless zeros take part for the missing ones."""
        if self.count == len(self._parameters):
            return False
        return self.count > 0 or self._options.missing == "zero"

    def _complete(self, communicator: Communicator) -> None:
        """Hands over zeros for the missing gradients, or raises; the same on all ranks."""
        missing = [place for place, has_come in enumerate(self._has_come) if not has_come]
        if self._options.missing == "error":
            names = tuple([self._specs[place].name for place in missing])
            self.reducer.agree_on_missing(self.count, names, communicator)
            raise MissingGradient(
                f"{communicator.label}: no rank has handed over a gradient for {list_of_names(names)}: hand over one "
                'for each parameter, or use AllreduceCallback(parameters=..., missing="zero")'
            )
        filled = {}
        self.prepare(None, communicator)
        for place in missing:
            parameter, zeros = self._parameters[place], self._zeros_at(place, communicator)
            self.take(parameter.parameter, zeros, communicator)
            filled[parameter.label] = zeros
        self.filled.update(filled)

    def _zeros_at(self, place: int, communicator: Communicator) -> Any:
        """Returns zeros for a missing gradient: its place in the bucket, or an array that is kept for later steps."""
        arrays, spec = communicator._arrays, self._specs[place]
        array: Any
        if self.memory is not None:
            array = self.memory.views[place]
        elif place in self._zeros:
            array = self._zeros[place]
        else:
            array = self._zeros[place] = arrays.empty(spec.shape, dtype_of(spec.dtype), None)
        arrays.fill(array, 0)
        return array

    def _reduce_all(self, complete: Sequence[Bucket], communicator: Communicator) -> None:
        try:
            for bucket in complete:
                self._reduce(bucket, communicator)
        except BaseException as error:
            self.fail(error)
            raise
        if self._ends.leaving is not None:
            self._ends.raise_leaving()

    def _reduce(self, bucket: Bucket, communicator: Communicator) -> None:
        number, reducer, guard = bucket.number, self.reducer, self._guard
        end = self._ends[number]
        end.has_begun = True
        if guard is not None:
            guard.check_handed_over([slot.position for slot in bucket.slots])
        if not self._is_known:
            self.meet(communicator)
        reduction = reducer.reduction_of(bucket, self._entries, self.memory, communicator, self)
        completion = reducer.reduce(reduction, communicator, self._producers.get(number, ()), end)
        if not reducer.is_hooked:
            if guard is not None:
                guard.note_results([slot.position for slot in bucket.slots], completion)
            if reduction.locked is not None:
                if completion is None:
                    reduction.locked.put_back()
                else:
                    completion.before_done(reduction.locked.put_back)
        self._reduced.append(bucket)
        if not reducer.is_hooked:
            self._ends.finish(end, None, completion)

    def _end_step(self) -> None:
        """Counts the step, and begins the next."""
        self.reducer.statistics.gradients += self.count
        self.reducer.begin_step()
        self.ended += 1
        self.reducer.keep(self._reduced)
        self._ends.clear()
        if self._guard is not None:
            self._guard.clear()
        self._producers.clear()
        self._reduced.clear()
        self._unlocked.clear()

    def _keep_entries(self) -> None:
        """Keeps entries of arrays that may arrive again; an empty step changes nothing."""
        for position in self._new:
            entry = self._entries[position]
            if entry is not None and not entry.recurs:
                is_native = type(entry.gradient) is type(entry.native)
                self._seen[position] = weakref.ref(entry.gradient) if is_native else None
                self._entries[position] = None
        if self.count and self._places is None:
            for by_place in (self._specs, self._entries, self._seen):
                del by_place[self.count :]
        self._begin_step()

    def _forget_entries(self) -> None:
        """Forgets the arrays of this step and of the last one; parameters keep their places."""
        if self._places is None:
            self._specs = []
        size = len(self._specs)
        self._entries, self._seen = [None] * size, [None] * size
        self._begin_step()

    def _arrived(self) -> tuple[list[GradientSpec], bool, tuple[str, ...]]:
        """Returns this step's gradients that are not reduced yet, whether no more will follow, and the buckets' sizes.

        For the error of ranks that disagree.
        """
        reduced = {slot.position for bucket in self._reduced for slot in bucket.slots}
        came = range(self.count) if self._places is None else [p for p, come in enumerate(self._has_come) if come]
        planner = self.planner
        sizes = [f"threshold_bytes {planner.threshold_bytes}"]
        if planner.first_bucket_bytes is not None:
            sizes.append(f"first_bucket_bytes {planner.first_bucket_bytes}")
        return [self._specs[place] for place in came if place not in reduced], self._has_ended, tuple(sizes)

    def _begin_step(self) -> None:
        self.count = 0
        self._has_ended = False
        if self._places is not None:
            self._has_come = bytearray(len(self._specs))
        if self._has_new:
            self._has_new = False
            self._new.clear()
            self._keys.clear()
            self._overlaps.clear()

    # -- What is in flight -----------------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """See Holder of guard.py."""
        return "" if self._communicator is None else self._communicator.label

    @property
    def whose(self) -> str:
        """See Holder of guard.py."""
        group = "" if self._communicator is None else f" of group {self._communicator.recorder.group!r}"
        return f'an AllreduceCallback("{self.reducer.op.value}"){group}'

    def locked(self) -> list[GradientEntry]:
        """See Holder of guard.py; includes gradients whose reduction was launched and has not ended."""
        return self._locked_until(CollectiveEnd.is_over)

    def unlock_waiting(self) -> None:
        """Unlocks the gradients whose reduction was not launched yet. Any thread may call it.

        A launched reduction unlocks its gradients by itself when it ends.
        """
        waiting = self._locked_until(lambda end: not end.is_pending)
        # Another thread may be locking a gradient now. That thread unlocks it when its step fails.
        if all(end.is_of_caller() for end in list(self._ends.values())):
            self._unlocked.update([entry.position for entry in waiting])
        try:
            LockedGradients(waiting, self).put_back()
        except InvalidArgument as error:
            _log.error("%s", error)

    def communicator_ended(self, lifetime: Lifetime) -> None:
        """See Observer of lifetime.py: the waiting gradients will not be reduced."""
        if self._communicator is not None and lifetime is self._communicator._lifetime:
            self.unlock_waiting()
            if lifetime.is_inherited:
                self._ends.disown(lifetime.ended_error("the reduction of a gradient"))

    def forgotten(self) -> tuple[str, Communicator] | None:
        """Returns the error text for gradients that wait for a flush, and their communicator; None without any.

        None as well if a failure ended the communicator: that failure is why the gradients were not reduced.
        """
        communicator = self._communicator
        if not self.count or communicator is None or communicator._lifetime.has_failed:
            return None
        reduced = {slot.position for bucket in self._reduced for slot in bucket.slots}
        waiting = [entry for entry in self._of_step() if entry.position not in reduced]
        if waiting:
            count = "1 gradient was" if len(waiting) == 1 else f"{len(waiting)} gradients were"
            what = f"{count} handed over and never reduced, beginning with that of {waiting[0].spec.name}"
        elif self._places is not None:
            what = "the gradients of all parameters were handed over, and their step has not ended"
        else:
            return None
        text = f"{communicator.label}: {what}: end each backward pass with flush() or `with callback.backward()`"
        return text, communicator

    def report_lost_sums(self, *, everywhere: bool = True) -> None:
        """Drops the sums that no step will take, and warns; not if a failure ended the communicator.

        Args:
            everywhere: whether to drop them on any communicator; otherwise only on a closed one.
        """
        communicator = self._communicator
        if not self.sums or communicator is None or not (everywhere or communicator.closed):
            return
        names = list_of_names(self.sums.names())
        self.discard()
        if not communicator._lifetime.has_failed:
            _log.warning(
                "warning: %s: the gradients of %s were added up in accumulate() and never reduced over the ranks: hand "
                "over the last pass of each step outside accumulate(), or drop the sums with discard()",
                communicator.label,
                names,
            )

    def _of_step(self) -> list[GradientEntry]:
        """Returns the gradients of this step, by place."""
        if self._places is None:
            entries = self._entries[: self.count]
        else:
            entries = [entry for entry, has_come in zip(self._entries, self._has_come, strict=False) if has_come]
        return [entry for entry in entries if entry is not None]

    def _locked_until(self, is_past: Callable[[CollectiveEnd], bool]) -> list[GradientEntry]:
        """Returns the locked gradients of this step, except those of buckets for whose end is_past(end) is true."""
        free = set(self._unlocked)
        for bucket in list(self._reduced):
            end = self._ends.get(bucket.number)
            if end is None or is_past(end):
                free.update([slot.position for slot in bucket.slots])
        return [entry for entry in self._of_step() if entry.is_locked and entry.position not in free]


class _Ends(dict[int, CollectiveEnd]):
    """The ends of a step's buckets, by number. The futures of a bucket's gradients wait for its end.

    A done-callback that raises SystemExit does not keep other gradients from their end.

    Args:
        timeout_seconds: how long a future without a timeout of its own waits for an end.

    Attributes:
        leaving: the first SystemExit or KeyboardInterrupt that a done-callback raised, until it is raised again.
    """

    def __init__(self, timeout_seconds: float = 0.0) -> None:
        super().__init__()
        self.timeout_seconds = timeout_seconds
        self.leaving: BaseException | None = None

    def __missing__(self, number: int) -> CollectiveEnd:
        end = self[number] = CollectiveEnd(self.timeout_seconds)
        return end

    def finish(self, end: CollectiveEnd, error: BaseException | None, completion: Completion | None) -> None:
        """Ends a bucket: reduced, launched or failed. Call raise_leaving() afterwards."""
        try:
            end.finish(None, error, completion)
        except BaseException as leaving:
            self.leaving = self.leaving or leaving

    def postpone(self, completion: Completion) -> None:
        """Replaces the end of launched reductions by a later one, at which their results are final."""
        for end in self.values():
            end.completion = completion

    def fail(self, error: BaseException) -> None:
        """Ends the buckets that were not reduced."""
        ends = list(self.values())
        self.clear()
        for end in ends:
            self.finish(end, error, None)
        if isinstance(error, (SystemExit, KeyboardInterrupt)):
            self.leaving = None
        self.raise_leaving()

    def disown(self, error: BaseException) -> None:
        """Ends them in the child of a fork; see CollectiveEnd."""
        for end in self.values():
            end.disown(error)

    def raise_leaving(self) -> None:
        """Raises the first SystemExit or KeyboardInterrupt that a done-callback raised."""
        leaving, self.leaving = self.leaving, None
        if leaving is not None:
            raise leaving


def _twice(name: str, communicator: Communicator) -> InvalidArgument:
    return InvalidArgument(
        f"{communicator.label}: {name} was handed over twice before a flush: add its gradients up first, or end each "
        "pass with flush() or `with callback.backward()`"
    )


def _second_use(what: str, communicator: Communicator) -> InvalidArgument:
    return InvalidArgument(
        f"{communicator.label}: {what} while another thread, or the code that a signal handler has interrupted, hands "
        "over a gradient to this callback or flushes it: use one thread at a time, or give each thread a callback "
        "and a group of its own"
    )
