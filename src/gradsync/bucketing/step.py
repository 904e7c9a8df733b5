"""Runs the training steps of a callback: reduces each bucket as soon as it is complete, and the rest in flush().

gradsync keeps the GradientEntry of an array only if the array arrived at the same position in two consecutive steps. So
a loop that makes new arrays in each step does not hold the memory of two steps.

If the array of a kept entry arrives again at its position, Step.take uses the entry again. When all arrays of a bucket
have arrived again, the bucket's Reduction is used again too (see Reducer.reduce). For any other array, Step._admit
checks the gradient and makes a new entry.
"""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np

from gradsync.bucketing.agreements import CallbackIdentity
from gradsync.bucketing.gradient import (
    PLAIN_NAMES,
    BucketMemory,
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
from gradsync.bucketing.guard import LockedGradients, can_lock, register, set_flags
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
from gradsync.diagnostics import trace
from gradsync.errors import (
    GradientCancelled,
    GradsyncError,
    InvalidArgument,
    MissingGradient,
    NonFiniteGradient,
    PlanMismatch,
)
from gradsync.futures import CollectiveEnd, Completion, GradientFuture, check_may_call, pending
from gradsync.reduction import Array, dtype_name, dtype_of

_log = logging.getLogger("gradsync")


class Step:
    """The state of the current step, from its first gradient to its flush, and the memory of the last step.

    Args:
        options: the options of the callback.
        identity: the identity of the callback: its name, or the lines of code that constructed it.

    Attributes:
        planner: the planner, which assigns gradients to buckets.
        reducer: the reducer, which runs the collectives of the step.
        memory: the memory of the buckets, if gradients live in it; else None.
        count: the number of gradients of the current step so far.
        ended: the number of steps that have ended, including empty and failed steps. This number is also the index of
            the current step.
        raised_on_all: the last error that every rank raised in a collective of this callback; None if there is none.
        filled: after a flush, by parameter: the results of parameters that had no gradient on this rank.
    """

    def __init__(self, options: Options, identity: CallbackIdentity) -> None:
        self.planner = Planner(options.threshold_or(DEFAULT_THRESHOLD_BYTES))
        self.reducer = Reducer(options)
        self.memory: BucketMemory | None = None
        self.count = 0
        self.ended = 0
        self.raised_on_all: BaseException | None = None
        self.filled: dict[Any, Any] = {}
        self._options = options
        self._identity = identity
        self._communicator: Communicator | None = None  # the communicator of the last step
        self._is_known = False  # whether the other ranks of the communicator know the callback
        # Whether the ranks have compared the values of `parameters`, or the option is not set.
        self._has_compared = options.parameters is None
        self._parameters: list[KnownParameter] = []  # by position
        self._positions: dict[Hashable, int] | None = None  # with `parameters`: the positions by the parameter's key
        self._is_busy = False  # whether some thread is handing over a gradient, or flushing
        # By position: the gradients of this step, and the kept entries of the last step. For other native arrays of the
        # last step, _seen has weak references: if such an array arrives in this step too, its entry is kept.
        self._entries: dict[int, GradientEntry] = {}
        self._seen: dict[int, weakref.ref[Any]] = {}
        # The next attributes, up to `_producers`, belong to the current step.
        self._new: list[GradientEntry] = []  # the gradients that did not use an entry again
        # While _new is empty, the gradients are the same arrays as in the last step, which were checked for shared
        # memory. From the first new gradient on, all gradients of the step are checked again.
        self._keys: set[Hashable] = set()
        self._overlaps = OverlapCheck()
        self._ends: dict[int, CollectiveEnd] = {}  # by bucket; a defaultdict makes a missing end
        self._leaving: BaseException | None = None  # the first SystemExit or KeyboardInterrupt of a done-callback
        self._producers: dict[int, list[Any]] = {}  # GPU events of the gradients' work, by bucket
        self._state_of: Callable[[Any], Any] = id  # the communicator's ArrayKind.state
        register(self)

    # -- Before a step ---------------------------------------------------------------------------------------------

    def begin_with(self, communicator: Communicator) -> None:
        """Starts to use a new communicator, and forgets the arrays of the previous one.

        Raises:
            InvalidArgument: a step has begun on the previous communicator, and that communicator is still open; or the
                option `parameters` has a wrong value.
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
        self._forget_memory()
        if self._options.parameters is not None:
            self._fix_positions(communicator)
        known = self._identity.known_on(communicator)
        self.reducer.events.change_callback(known)
        self._is_known = known is not None or communicator.world_size == 1
        communicator._lifetime.observe_end(self)
        self._state_of = communicator._arrays.state
        self._ends = defaultdict(partial(CollectiveEnd, communicator._backend.timeout_seconds))
        self._communicator = communicator

    def live_in_buckets(self, communicator: Communicator) -> Any:
        """Allocates the buckets' memory, and returns its views; see AllreduceCallback.gradient_buffers."""
        if not self._options.gradient_as_bucket_view:
            raise InvalidArgument("gradient_buffers() needs AllreduceCallback(gradient_as_bucket_view=True)")
        self.begin_with(communicator)
        self._forget_memory()
        self._ensure_memory(communicator)
        views = [] if self.memory is None else self.memory.views
        given = self._options.parameters
        return dict(zip(given, views, strict=True)) if isinstance(given, Mapping) else list(views)

    def _forget_memory(self) -> None:
        """Forgets the arrays of the last step and the buckets' memory; its views become ordinary arrays."""
        self._entries.clear()
        self.reducer.forget()
        self.memory = None

    def _agree_on_callback(self, communicator: Communicator) -> None:
        """Checks, at the first use on a communicator, that the other ranks use the same callback.

        Every rank must call it, before all other collectives of the callback.
        """
        if self._is_known:
            return
        with self._noting_errors():
            self.reducer.events.change_callback(self._identity.agree(communicator))
        self._is_known = True

    def _prepare(self, gradient: Any, communicator: Communicator) -> None:
        """Prepares the first step: compares the parameters' values, and allocates the buckets' memory, if needed.

        Every rank must call it, even a rank without gradients. All ranks compare first and allocate then, so that all
        of them call the same collectives in the same order.

        Args:
            gradient: the first gradient of this rank, or None.
            communicator: the communicator of the ranks.
        """
        if not self._has_compared and communicator.world_size > 1:
            self._agree_on_callback(communicator)
            with self._noting_errors():
                agreed = self.reducer.events.of_callback
                warn_of_unequal_values(self._parameters, self._options.parameters, gradient, communicator, agreed)
            self._has_compared = True  # set only here, so that after PlanMismatch every rank compares again
        self._ensure_memory(communicator)

    def _ensure_memory(self, communicator: Communicator) -> None:
        """If gradients live in buckets, allocates the buckets' memory, unless it exists already.

        Every rank must call it.
        """
        if self.memory is not None or not self._options.gradient_as_bucket_view:
            return
        self._agree_on_callback(communicator)
        with self._noting_errors():
            self.memory = BucketMemory(self.planner.buckets, communicator, self.reducer.events.of_callback)

    def _fix_positions(self, communicator: Communicator) -> None:
        """Gives each named parameter its fixed position, and plans the buckets."""
        options = self._options
        if not self._parameters:
            self._parameters = known_parameters(options.parameters, options.op, communicator)
        if not self._parameters:
            raise InvalidArgument(
                f"{communicator.label}: parameters= names no parameter: name at least one, or leave the option out"
            )
        in_views = options.gradient_as_bucket_view and not communicator._runs_beside_host
        threshold = options.threshold_or(VIEWS_ON_CPU_THRESHOLD_BYTES if in_views else DEFAULT_THRESHOLD_BYTES)
        self._positions = {parameter.key: position for position, parameter in enumerate(self._parameters)}
        self.planner = Planner(threshold, [parameter.spec for parameter in self._parameters])

    # -- A gradient ------------------------------------------------------------------------------------------------

    def take(self, param: Any, grad: Any, communicator: Communicator) -> GradientFuture:
        """Takes a gradient; reduces the buckets that the gradient completes. See AllreduceCallback.__call__."""
        if communicator is not self._communicator or pending or self._is_busy:
            self._begin_call("callback(param, grad)", communicator)
        try:
            self._is_busy = True
            if communicator._runs_beside_host:
                communicator._checked_stream(None, "a gradient")  # first, so that an error changes nothing
            position: int | None = self.count
            if (positions := self._positions) is not None:
                position = positions.get(param if type(param) in PLAIN_NAMES else key_of(param))
            entry = self._entries.get(position)  # type: ignore[arg-type]  # None is no position
            # True if a kept entry can be used again: the same array, with the same shape, dtype and state, is at the
            # same position. (A plain name is its own key, which saves a call for each gradient.)
            if (
                entry is not None
                and entry.gradient is grad
                and self.planner.repeats
                and entry.shape == grad.shape
                and entry.dtype is grad.dtype
                and entry.state == self._state_of(grad)
                and (entry.parameter is param or entry.key == (param if type(param) in PLAIN_NAMES else key_of(param)))
                and entry.arrived_in != self.ended
            ):
                if self._new:
                    self._register(entry.key, entry.native, entry.name, communicator)
            else:
                if not self.count:
                    self._prepare(grad, communicator)
                entry = self._admit(param, grad, communicator)
            entry.arrived_in = self.ended
            self.count += 1
            end = self._ends[entry.bucket]
            if communicator._runs_beside_host or trace.active is not None:
                self._note(entry, communicator)
            future = GradientFuture(entry.name, end, entry.result)
            if entry.is_locked:
                set_flags(entry.gradient, False)
            completes = entry.completes
            if completes is None:
                completes = self.planner.note_arrival(entry.bucket)
            if completes:
                self._reduce(completes, communicator)
            return future
        finally:
            self._is_busy = False

    def _begin_call(self, what: str, communicator: Communicator) -> None:
        """Starts to use a new communicator; checks that a hand-over or a flush may begin now."""
        if communicator is not self._communicator:
            self.begin_with(communicator)
        if pending:
            check_may_call(communicator.label, what)
        if self._is_busy:
            raise InvalidArgument(
                f"{communicator.label}: {what} was called while an earlier call of this callback was still running: "
                "call it from one thread at a time, and not from a hook or a signal handler; or give each thread its "
                "own callback and group"
            )

    def _note(self, entry: GradientEntry, communicator: Communicator) -> None:
        """Records a gradient: the begin of a traced step, and on a GPU the work before it."""
        if communicator._runs_beside_host:
            self._producers.setdefault(entry.bucket, []).append(communicator._mark_work())
        if trace.active is not None and self.count == 1:
            trace.active.begin_step(communicator.recorder)

    def _admit(self, param: Any, grad: Any, communicator: Communicator) -> GradientEntry:
        """Checks a gradient for which no kept entry fits, and makes its entry. An error adds no gradient to the step.

        Raises:
            InvalidArgument, UnsupportedDtype: see AllreduceCallback.
        """
        arrays, position = communicator._arrays, self._position_of(param, communicator)
        grad, native, spec = self._accepted(param, grad, position, communicator)
        key = key_of(param)
        is_locked = False
        is_itself = native is grad
        if isinstance(grad, np.ndarray):
            # Gradients in the buckets' memory, which ranks share, are not locked. Other arrays are copied into a
            # bucket.
            is_locked = can_lock(grad, spec.name, self) and self.memory is None
            if is_locked and is_itself:
                native = grad.view()  # gradsync writes through the view. For a subclass, native is a view already
        out = self._destination(grad, native, position, communicator)
        # An entry can recur only if the array is reduced in place, without a new result and without a copy.
        recurs = is_itself and out.result is grad and out.target is out.source and out.write_back is None
        last, seen = self._entries.get(position), self._seen.get(position)
        recurs = recurs and ((last is not None and last.gradient is grad) or (seen is not None and seen() is grad))
        state = arrays.state(native) if recurs else None
        if self.memory is not None and out.result is not grad:  # already copied into its bucket
            native = self.memory.views[position]
        if not self._new:  # the first new gradient of this step; a failed call may have left other keys and arrays
            self._keys.clear()
            self._overlaps.clear()
            for earlier in self._of_step():
                self._register(earlier.key, earlier.native, earlier.name, communicator)
        self._register(key, native, spec.name, communicator)
        assignment = self.planner.assign(spec, position)
        entry = self._entries[position] = GradientEntry(
            gradient=grad,
            parameter=param,
            shape=spec.shape,
            dtype=native.dtype,
            state=state,
            bucket=assignment.bucket,
            name=spec.name,
            result=out.result,
            is_locked=is_locked,
            completes=assignment.completes,
            key=key,
            position=position,
            native=native,
            out=out,
            recurs=recurs,
        )
        self._new.append(entry)
        self.reducer.renew(entry.bucket)
        return entry

    def _position_of(self, param: Any, communicator: Communicator) -> int:
        """Returns the position of a new gradient. Refuses an unknown parameter, or a second gradient of a parameter."""
        if self._positions is None:
            return self.count
        position = self._positions.get(key_of(param))
        if position is None:
            raise InvalidArgument(
                f"{communicator.label}: {display_name(param, self.count)} is not among the callback's parameters, "
                f"which are {list_of_names([parameter.spec.name for parameter in self._parameters])}"
            )
        entry = self._entries.get(position)
        if entry is not None and entry.arrived_in == self.ended:
            raise _twice(entry.name, communicator)
        return position

    def _accepted(
        self, param: Any, grad: Any, position: int, communicator: Communicator
    ) -> tuple[Any, Array, GradientSpec]:
        """Returns a gradient as an array and as a native array, and its spec: the last step's object if it is equal."""
        grad, name = as_array(grad), display_name(param, position)
        native = accept(name, grad, communicator, self._options)
        spec = GradientSpec(name, native.shape, dtype_name(native.dtype), native.dtype.itemsize)
        assignments = self.planner.assignments
        known = assignments[position].spec if position < len(assignments) else None
        if known is None or (self._positions is None and known != spec):
            return grad, native, spec
        if known[1:] != spec[1:]:
            raise InvalidArgument(
                f"{communicator.label}: the gradient of {known.name} must be {known.dtype}{list(known.shape)}, as the "
                f"option parameters= says, got {spec.dtype}{list(spec.shape)}"
            )
        return grad, native, known

    def _destination(self, grad: Any, native: Array, position: int, communicator: Communicator) -> Destination:
        """Decides where the reduced values go. If gradients live in buckets, copies a gradient from outside them."""
        if self.memory is None:
            return destination(grad, native, communicator)
        view = self.memory.views[position]
        flat = view.reshape(-1)
        if self.memory.holds(position, native):
            return Destination(flat, flat, None, grad)
        communicator._arrays.assign(native, view)
        return Destination(flat, flat, None, view)

    def _register(self, key: Hashable, native: Array, name: str, communicator: Communicator) -> None:
        """Refuses a second gradient of one parameter, and gradients that share memory."""
        if key in self._keys:
            raise _twice(name, communicator)
        self._overlaps.claim(native, name, communicator._arrays, communicator.label)
        self._keys.add(key)

    # -- The end of a step -----------------------------------------------------------------------------------------

    def flush(self, communicator: Communicator) -> None:
        """Reduces the rest of the buckets, and ends the step."""
        if communicator is not self._communicator or pending or self._is_busy:
            self._begin_call("flush()", communicator)
        if communicator._runs_beside_host:  # checked before any collective: this stream will wait for the results
            communicator._checked_stream(None, "flush()")
        self.filled = {}
        for end in self._ends.values():
            end.has_begun = True
        try:
            if not self._is_known:
                self._agree_on_callback(communicator)
            if self.count < len(self._parameters):
                self._complete(communicator)
            self._is_busy = True
            self._reduce(self.planner.flush(self.count), communicator)
            later = self.reducer.end(self.count, communicator)
            if later is not None:  # results are final only at the end of this work: clipping
                for end in self._ends.values():
                    end.completion = later
            if trace.active is not None and self.count:
                trace.active.end_step(communicator.recorder, self.count)
            self.reducer.statistics.steps += self.count > 0
            if self._new or 0 < self.count < len(self._entries):
                self._learn()
            self._end_step()
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self._is_busy = False
        if self._leaving is not None:
            self._raise_leaving()

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        """A context manager for collectives outside of take() and flush(); notes an error that all ranks raise."""
        try:
            yield
        except BaseException as error:
            self._note_raised_on_all(error)
            raise

    def _note_raised_on_all(self, error: BaseException) -> None:
        if isinstance(error, (PlanMismatch, NonFiniteGradient)):
            self.raised_on_all = error

    def fail(self, error: BaseException) -> None:
        """Ends the step with an error, which the futures that are not done will raise; forgets all arrays."""
        self._note_raised_on_all(error)
        self.unlock_waiting()
        if isinstance(error, PlanMismatch):
            # All ranks have launched the earlier buckets of the step, so the reductions of these buckets end soon. The
            # program may use its gradients again when it has caught the error.
            with suppress(GradsyncError):  # e.g. the communicator is broken, and all its reductions have failed
                self.reducer.order_launched()
        ends = list(self._ends.values())
        self.reducer.values.fail()
        self._end_step()
        self.reducer.forget()
        self.planner.reset()
        self._entries.clear()
        for end in ends:
            self._finish(end, error, None)
        if isinstance(error, (SystemExit, KeyboardInterrupt)):
            self._leaving = None
        self._raise_leaving()

    def _complete(self, communicator: Communicator) -> None:
        """Hands over zeros for missing gradients, or raises an error.

        In a step without any gradient, no parameter counts as missing with missing="error", and all parameters count as
        missing with missing="zero".

        Raises:
            MissingGradient: the same gradients are missing on all ranks, with missing="error".
            PlanMismatch: the ranks lack different gradients, with missing="error".
        """
        if not self.count and self._options.missing == "error":
            return
        arrived = {entry.position for entry in self._of_step()}
        missing = [position for position in range(len(self._parameters)) if position not in arrived]
        if self._options.missing == "error":
            names = tuple([self._parameters[position].spec.name for position in missing])
            self.reducer.agree_on_missing(self.count, names, communicator)
            raise MissingGradient(
                f"{communicator.label}: no rank has handed over a gradient for {list_of_names(names)}: hand over one "
                'for each parameter, or use AllreduceCallback(parameters=..., missing="zero")'
            )
        self._prepare(None, communicator)
        for position in missing:
            param, _, spec = self._parameters[position]
            if self.memory is None:  # a new array, which the program may keep: it gets the result
                zeros = communicator._arrays.empty(spec.shape, dtype_of(spec.dtype), None)
            else:
                zeros = self.memory.views[position]
            communicator._arrays.zero(zeros)
            self.take(param, zeros, communicator)
            # The key is the parameter's name, or the index of an array, such as "#3".
            self.filled[display_name(param, position) if hasattr(param, "dtype") else param] = zeros

    def _reduce(self, complete: Sequence[Bucket], communicator: Communicator) -> None:
        """Reduces complete buckets, and completes their futures."""
        try:
            for bucket in complete:
                end = self._ends[bucket.number]
                end.has_begun = True
                if not self._is_known:
                    self._agree_on_callback(communicator)
                producers = self._producers.get(bucket.number, ())
                completion = self.reducer.reduce(bucket, self._entries, self.memory, communicator, self, producers)
                self._finish(end, None, completion)
        except BaseException as error:
            self.fail(error)
            raise
        if self._leaving is not None:
            self._raise_leaving()

    def _finish(self, end: CollectiveEnd, error: BaseException | None, completion: Completion | None) -> None:
        """Completes a bucket's futures. An exception that leaves a done-callback is kept for _raise_leaving."""
        try:
            end.finish(None, error, completion)
        except BaseException as leaving:
            self._leaving = self._leaving or leaving

    def _raise_leaving(self) -> None:
        """Raises the first SystemExit or KeyboardInterrupt that a done-callback raised."""
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            raise leaving

    def _learn(self) -> None:
        """Remembers which arrays may arrive again, after a step that differs from the step before."""
        entries, step = self._entries, self.ended
        self._entries = {at: entry for at, entry in entries.items() if entry.recurs and entry.arrived_in == step}
        self._seen = {
            at: weakref.ref(entry.gradient)
            for at, entry in entries.items()
            if at not in self._entries and type(entry.gradient) is type(entry.native)
        }
        self.reducer.keep(self._ends)

    def _end_step(self) -> None:
        """Counts the step, and begins the next."""
        self.reducer.statistics.gradients += self.count
        self.reducer.begin_step()
        self.ended += 1
        self.count = 0
        self._new.clear()
        if self._keys:
            self._keys.clear()
            self._overlaps.clear()
        self._ends.clear()
        self._producers.clear()

    # -- What is in flight -----------------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """See the class Holder in guard.py."""
        return "" if self._communicator is None else self._communicator.label

    @property
    def whose(self) -> str:
        """See the class Holder in guard.py."""
        group = "" if self._communicator is None else f" of group {self._communicator.recorder.group!r}"
        return f'an AllreduceCallback("{self.reducer.op.value}"){group}'

    def locked(self) -> list[GradientEntry]:
        """See the class Holder in guard.py. The list has all locked gradients whose reduction has not ended."""
        return [entry for entry, end in self._of_step_with_ends() if entry.is_locked and not end.is_over()]

    def unlock_waiting(self) -> None:
        """Unlocks the gradients whose reduction was not launched yet. Any thread may call it.

        A launched reduction unlocks its gradients by itself when it ends.
        """
        waiting = [entry for entry in self._waiting() if entry.is_locked]
        gradients = LockedGradients(waiting, self)
        # Another thread may be locking a gradient now. That thread unlocks the gradient when the step fails.
        if all(end.is_of_caller() for end in list(self._ends.values())):
            for entry in waiting:
                entry.is_locked = False
        try:
            gradients.unlock()
        except InvalidArgument as error:
            _log.error("%s", error)

    def communicator_ended(self, lifetime: Lifetime) -> None:
        """See the class Observer in lifetime.py. Unlocks the gradients that wait, because they will not be reduced."""
        if self._communicator is not None and lifetime is self._communicator._lifetime:
            self.unlock_waiting()
            if lifetime.is_inherited:
                error = lifetime.ended_error("the reduction of a gradient")
                for end in self._ends.values():
                    end.disown(error)

    def forgotten(self) -> str | None:
        """Returns the error text for gradients that wait for a flush; None if there are none.

        The result is also None if a failure ended the communicator, because this failure explains why gradients were
        not reduced.
        """
        communicator = self._communicator
        if not self.count or communicator is None or communicator._lifetime.has_failed:
            return None
        waiting = self._waiting()
        if waiting:
            count = "1 gradient was" if len(waiting) == 1 else f"{len(waiting)} gradients were"
            what = f"{count} handed over and never reduced (first: {waiting[0].name})"
        elif self._positions is not None:
            what = "the gradients of all parameters were handed over, and their step has not ended"
        else:
            return None
        return f"{communicator.label}: {what}: end each backward pass with flush() or `with callback.backward()`"

    def _of_step(self) -> list[GradientEntry]:
        """Returns the gradients of this step, by position."""
        step = self.ended
        return sorted([entry for entry in list(self._entries.values()) if entry.arrived_in == step], key=_position)

    def _of_step_with_ends(self) -> list[tuple[GradientEntry, CollectiveEnd]]:
        """Returns the gradients of this step, by position, each with the CollectiveEnd of its bucket."""
        ends = [(entry, self._ends.get(entry.bucket)) for entry in self._of_step()]
        return [(entry, end) for entry, end in ends if end is not None]

    def _waiting(self) -> list[GradientEntry]:
        """Returns the gradients of this step whose reduction was not launched yet, by position."""
        return [entry for entry, end in self._of_step_with_ends() if end.is_pending]


_position = attrgetter("position")


def _twice(name: str, communicator: Communicator) -> InvalidArgument:
    return InvalidArgument(
        f"{communicator.label}: {name} was handed over twice before a flush: add its gradients up first, or end each "
        "pass with flush() or `with callback.backward()`"
    )
