"""What is known of the gradients of a step: their places, their buckets, and where they live.

At first nothing is: places are the order of arrival, and buckets fill as gradients come. Where a caller tells the
parameters, each has its place for good; only then can gradients live in the buckets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gradsync.bucketing.arrivals import Arrivals
from gradsync.bucketing.bucket_memory import BucketMemory
from gradsync.bucketing.fixed_arrivals import FixedArrivals
from gradsync.bucketing.fixed_plan import FixedPlanner
from gradsync.bucketing.gradient_lock import Holder, lock_of
from gradsync.bucketing.options import Options
from gradsync.bucketing.parameter_specs import KnownParameter, known_parameters
from gradsync.bucketing.pending import Destination, PendingGradient, accept, destination, display_name, key_of
from gradsync.bucketing.plan import (
    DEFAULT_THRESHOLD_BYTES,
    VIEWS_ON_CPU_THRESHOLD_BYTES,
    BucketPlanner,
    GradientSpec,
)
from gradsync.communicators.agreement import Agreement
from gradsync.communicators.communicator import Communicator
from gradsync.errors import InvalidArgument, NonFiniteGradient
from gradsync.reduction import Array, dtype_name


class StepPlan:
    """The plan of a callback's steps, on one communicator after another.

    Args:
        options: of the callback.

    Attributes:
        arrivals: the gradients of the step that is under way, by place.
        planner: says which gradients complete a bucket.
        memory: where gradients live in the buckets; None where they do not.
        told: `parameters` of the options, once they have been taken.
    """

    def __init__(self, options: Options) -> None:
        self.arrivals: Arrivals = Arrivals()
        self.planner: BucketPlanner | FixedPlanner = BucketPlanner(
            options.threshold_or(DEFAULT_THRESHOLD_BYTES), options.first_bucket_bytes
        )
        self.memory: BucketMemory | None = None
        self._options = options
        self._accepted_dtypes: set[Any] = set()
        self._failed_specs: list[GradientSpec] = []  # of the last step, where that has failed
        self.told: list[KnownParameter] = []

    def begin_with(self, communicator: Communicator) -> None:
        """Forgets what was known for another communicator, and takes the parameters that the caller has told."""
        self.arrivals.forget()
        self.arrivals.label = communicator.label
        self.memory = None
        self._accepted_dtypes.clear()
        if self._options.parameters is not None:
            self._fix_places(communicator)

    def forget_memory(self) -> None:
        """Leaves the memory of the buckets to those who hold views of it, which are arrays like any other then."""
        self.arrivals.forget()
        self.memory = None

    def specs_to_repeat(self) -> list[GradientSpec]:
        """Returns the gradients of the last step, as far as all ranks had agreed on them where it failed."""
        return self.arrivals.specs or self._failed_specs

    def fail(self, error: BaseException) -> None:
        """Forgets the step, but for what a rank must repeat that stands in for others."""
        if isinstance(error, NonFiniteGradient) or len(self.arrivals.specs) > self.arrivals.count:
            self._failed_specs = list(self.arrivals.specs)
        self.planner.reset()
        self.arrivals.forget()

    @property
    def known_places(self) -> FixedArrivals | None:
        """The gradients of the step, where each parameter has its place for good."""
        return self.arrivals if isinstance(self.arrivals, FixedArrivals) else None

    @property
    def needs_memory(self) -> bool:
        """Whether gradients shall live in the buckets, but there is no memory yet."""
        return self._options.gradient_as_bucket_view and self.memory is None

    def make_memory(self, communicator: Communicator, agreed: Callable[[Agreement], Agreement]) -> None:
        """Makes the memory of the buckets. Collective; `agreed`: see BucketMemory."""
        if isinstance(self.planner, FixedPlanner):
            self.memory = BucketMemory(self.planner, communicator, agreed)

    def admit(self, param: Any, grad: Any, communicator: Communicator, holder: Holder) -> PendingGradient:
        """Takes a gradient whose array is not known from the last step; what fails here leaves no trace.

        Args:
            param, grad: what was handed over.
            communicator: where it is to be reduced.
            holder: who has it in flight then.

        Raises:
            InvalidArgument, UnsupportedDtype: see AllreduceCallback.
        """
        arrivals, arrays = self.arrivals, communicator.arrays
        position = arrivals.place_of(param)
        native = self.check(param, grad, position, communicator)
        name = display_name(param, position)
        spec = arrivals.spec(position, name, native, dtype_name(native.dtype))
        lock = None
        is_itself = native is grad
        if isinstance(grad, np.ndarray):
            is_on = self._options.lock_gradients and self.memory is None  # else ranks share it, or it is copied now
            lock = lock_of(grad, name, holder, is_on=is_on)
            if lock is not None and is_itself:
                native = grad.view()  # for our own writing; one of a subclass is a view already
        goes = self._destination(grad, native, position, communicator)
        # Else the result is a new array each time, or the values are copied first.
        recurs = is_itself and goes.result is grad and goes.target is goes.source and goes.write_back is None
        recurs = recurs and arrivals.has_seen(position, grad)
        state = arrays.state(native) if recurs else None
        if self.memory is not None and goes.result is not grad:  # copied already: what is written to is the place
            native = self.memory.views[position]
        entry = PendingGradient(position, param, key_of(param), grad, native, state, spec, *goes, recurs, lock)
        arrivals.add(entry, arrays)
        return entry

    def check(self, param: Any, grad: Any, position: int, communicator: Communicator) -> Array:
        """Returns a gradient as a native array that can be reduced."""
        native = accept(param, grad, position, communicator, self._options, self._accepted_dtypes)
        key_of(param)
        return native

    def _fix_places(self, communicator: Communicator) -> None:
        """Gives each parameter that was told its place for good."""
        options, label = self._options, communicator.label
        if not self.told:
            self.told = known_parameters(options.parameters, "AllreduceCallback", options.op, communicator)
        if not self.told:
            raise InvalidArgument(f"{label}: the callback's parameters are none: name at least one, or leave them out")
        on_cpu_in_buckets = options.gradient_as_bucket_view and not communicator.runs_beside_host
        threshold = options.threshold_or(VIEWS_ON_CPU_THRESHOLD_BYTES if on_cpu_in_buckets else DEFAULT_THRESHOLD_BYTES)
        self.arrivals = FixedArrivals(self.told, label)
        self.planner = FixedPlanner([parameter.spec for parameter in self.told], threshold, options.first_bucket_bytes)

    def _destination(self, grad: Any, native: Array, position: int, communicator: Communicator) -> Destination:
        """Decides where the reduced values go; where gradients live in buckets, copies one from elsewhere into its."""
        if self.memory is None:
            return destination(grad, native, communicator)
        view = self.memory.views[position]
        flat = view.reshape(-1)
        if self.memory.holds(position, native):
            return Destination(flat, flat, None, grad)
        communicator.arrays.assign(native, view)
        return Destination(flat, flat, None, view)
