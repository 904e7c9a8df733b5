"""The plan assigns gradients to buckets. This module only computes: it has no arrays and no I/O.

All gradients of a bucket have one dtype. A bucket of two or more gradients never exceeds the threshold. A gradient
larger than the threshold gets a bucket of its own, and the open bucket of its dtype stays open. Buckets fill in the
order in which gradients arrive. A bucket is complete, and is launched, when it has reached the threshold, when the next
gradient for it does not fit, or at the flush. If all gradients are known beforehand, a bucket is launched when all of
its gradients have arrived and all earlier buckets are launched.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from gradsync.arguments import integer_of
from gradsync.communicators.agreement import array_text
from gradsync.errors import InvalidArgument

DEFAULT_THRESHOLD_BYTES = 10 * 1024**2
#: The threshold for gradients that live in buckets on the CPU. Such gradients are not copied, and their reductions do
#: not overlap the program. So more buckets only add the time of more barriers: two for each bucket.
VIEWS_ON_CPU_THRESHOLD_BYTES = 64 * 1024**2

_SIZE = re.compile(r"\s*(?P<number>\d+(\.\d+)?)\s*(?P<unit>[KMG]?i?B)\s*", re.IGNORECASE)
_UNITS = {"B": 1, "KB": 1024, "MB": 1024**2, "GB": 1024**3}

_MOST_NAMES = 8  # in one message


class GradientSpec(NamedTuple):
    """A gradient's name, shape and dtype, on which the ranks must agree.

    Attributes:
        name: the repr() of the parameter's name, or its index ("#3"), the same on all ranks. In average_gradients(),
            the path in the tree.
        shape: the gradient's shape.
        dtype: the name of the gradient's dtype.
        itemsize: the size of one element in bytes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def label(self) -> str:
        """The parameter's name itself, if this name is a string; else the attribute `name`."""
        if self.name[:1] not in ("'", '"'):
            return self.name
        return self.name[1:-1] if "\\" not in self.name else str(ast.literal_eval(self.name))

    def __str__(self) -> str:
        """Returns the gradient in one line, for PlanMismatch, e.g. "'w': float32[3, 4]"."""
        return f"{self.name}: {array_text(self.dtype, self.shape)}"

    @property
    def size_elements(self) -> int:
        """The number of elements of the gradient; 1 for a 0-d gradient."""
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """The number of bytes of the gradient."""
        return self.size_elements * self.itemsize


@dataclass(frozen=True, slots=True)
class Slot:
    """The part of a bucket that holds one gradient.

    Attributes:
        position: the gradient's position in the step, from 0; see Planner.
        spec: the gradient's name, shape and dtype.
        begin: the index of the gradient's first element in the flat buffer.
        end: the index after the gradient's last element.
    """

    position: int
    spec: GradientSpec
    begin: int
    end: int


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced by one collective, in the order of their positions.

    Attributes:
        dtype: the dtype's name, the same for all slots.
        slots: the gradients, back to back from element 0.
        number: the bucket's number in its step, in the order in which buckets are opened.
    """

    dtype: str
    slots: tuple[Slot, ...]
    number: int

    @property
    def size_elements(self) -> int:
        """The number of elements of the flat buffer."""
        return self.slots[-1].end

    @cached_property  # read in each step
    def size_bytes(self) -> int:
        """The number of bytes of the flat buffer."""
        return self.size_elements * self.slots[-1].spec.itemsize

    @property
    def specs(self) -> tuple[GradientSpec, ...]:
        """The GradientSpecs of the bucket's gradients, in order."""
        return tuple([slot.spec for slot in self.slots])


class _Filling(NamedTuple):
    """A bucket that is not full, and takes further gradients."""

    number: int
    slots: list[Slot]

    @property
    def size_bytes(self) -> int:
        return self.slots[-1].end * self.slots[-1].spec.itemsize if self.slots else 0

    def finished(self) -> Bucket:
        return Bucket(self.slots[0].spec.dtype, tuple(self.slots), self.number)


class Assignment(NamedTuple):
    """The bucket to which the plan assigns one gradient.

    Attributes:
        spec: the gradient's name, shape and dtype.
        bucket: the number of the gradient's bucket.
        completes: the buckets that the gradient completes, in launch order. None if the gradients may arrive in any
            order; Planner.note_arrival then returns these buckets.
    """

    spec: GradientSpec
    bucket: int
    completes: Sequence[Bucket] | None


class Planner:
    """Assigns gradients to buckets, and reports when a bucket is complete.

    Without `specs` a gradient's position is its index in the order of arrival, and buckets fill gradient by gradient. A
    step that repeats the last step gets the same buckets. With `specs` the positions and the buckets are fixed, and the
    gradients arrive in any order. In this case a bucket is complete when all of its gradients have arrived and all
    earlier buckets are complete. So ranks whose gradients arrive in different orders launch the buckets in the same
    order.

    Args:
        threshold_bytes: the largest size of a bucket of several gradients; at least 1.
        specs: the name, shape and dtype of each gradient, by position; None if the gradients are not known before the
            first step.

    Attributes:
        threshold_bytes: see Args.
        assignments: the Assignment of each gradient of this step, by position. While the step repeats the last step,
            the list has the Assignments of all gradients of the last step.
        repeats: whether all gradients of this step so far were in the last step, at the same positions. With `specs`,
            always True.
        buckets: with `specs`, all buckets in launch order; else an empty list.

    Raises:
        InvalidArgument: the threshold is neither an integer of at least 1 nor text such as "25 MB".
    """

    def __init__(self, threshold_bytes: int | str, specs: Sequence[GradientSpec] | None = None) -> None:
        self.threshold_bytes = _checked_bytes(threshold_bytes)
        self.assignments: list[Assignment] = []
        self.repeats = False
        self.buckets: list[Bucket] = []
        self._open: dict[str, _Filling] = {}  # the buckets that take further gradients, by dtype
        self._opened = 0  # the number of buckets opened in this step
        self._rest: list[Bucket] = []  # the buckets that the end of the last step completed
        self._missing: list[int] = []  # with `specs`: the number of gradients that each bucket lacks, in launch order
        self._next = 0  # with `specs`: the index of the bucket to launch next
        self._is_fixed = specs is not None
        if specs is not None:
            self.buckets = plan_buckets(specs, self.threshold_bytes)
            self._order = {bucket.number: index for index, bucket in enumerate(self.buckets)}
            numbers = {slot.position: bucket.number for bucket in self.buckets for slot in bucket.slots}
            self.assignments = [Assignment(spec, numbers[position], None) for position, spec in enumerate(specs)]
            self.reset()

    def assign(self, spec: GradientSpec, position: int) -> Assignment:
        """Assigns one gradient to a bucket.

        Args:
            spec: the gradient's name, shape and dtype. The planner compares specs by identity: pass the same object as
                in the last step to save work.
            position: the gradient's position. Without the planner's `specs`, this is the number of gradients that
                arrived earlier in the step.
        """
        if self._is_fixed:
            return self.assignments[position]
        if self.repeats:
            if position < len(self.assignments) and self.assignments[position].spec is spec:
                return self.assignments[position]
            self._stop_repeating(position)
        assignment = self._fill(spec, position)
        self.assignments.append(assignment)
        return assignment

    def note_arrival(self, bucket: int) -> Sequence[Bucket]:
        """Counts a gradient of a bucket as arrived; returns the buckets that are now complete. Only with `specs`."""
        begin = self._order[bucket]
        self._missing[begin] -= 1
        if self._missing[begin] or begin != self._next:
            return ()
        while self._next < len(self.buckets) and not self._missing[self._next]:
            self._next += 1
        return self.buckets[begin : self._next]

    def flush(self, count: int) -> list[Bucket]:
        """Ends a step with `count` gradients; returns the buckets that were not full, sorted by their dtypes.

        An empty step keeps the plan of the last step. With `specs`, the list is empty: either all gradients of the step
        have arrived, so that every bucket is complete, or no gradient has arrived.
        """
        if self._is_fixed:
            self.reset()
            return []
        if not count:
            return []
        if self.repeats and count < len(self.assignments):
            self._stop_repeating(count)
        if not self.repeats:
            self._rest = [self._open.pop(dtype).finished() for dtype in sorted(self._open)]
            self._opened = 0
            self.repeats = True
        return self._rest

    def plan_step(self, specs: Sequence[GradientSpec]) -> list[Bucket]:
        """Plans a whole step, and returns its buckets, in launch order. Only without `specs`."""
        complete: list[Bucket] = []
        for position, spec in enumerate(specs):
            complete += self.assign(spec, position).completes or ()
        return complete + self.flush(len(specs))

    def reset(self) -> None:
        """Forgets this step and the last step."""
        if self._is_fixed:
            self._next, self._missing = 0, [len(bucket.slots) for bucket in self.buckets]
            self.repeats = True
            return
        self.assignments = []
        self._open.clear()
        self._opened = 0
        self.repeats = False

    def _stop_repeating(self, count: int) -> None:
        """Plans this step's first `count` gradients again, because this step no longer repeats the last step."""
        self.repeats = False
        del self.assignments[count:]
        for position, assignment in enumerate(self.assignments):
            self._fill(assignment.spec, position)

    def _fill(self, spec: GradientSpec, position: int) -> Assignment:
        """Puts a gradient into the open bucket of the gradient's dtype, or into a new bucket.

        A gradient above the threshold gets a bucket of its own, and the open bucket stays open.
        """
        complete: list[Bucket] = []
        filling = None if spec.size_bytes > self.threshold_bytes else self._open.pop(spec.dtype, None)
        if filling is not None and filling.size_bytes + spec.size_bytes > self.threshold_bytes:
            complete.append(filling.finished())
            filling = None
        if filling is None:
            filling = _Filling(self._opened, [])
            self._opened += 1
        begin = filling.slots[-1].end if filling.slots else 0
        filling.slots.append(Slot(position, spec, begin, begin + spec.size_elements))
        if filling.size_bytes >= self.threshold_bytes:
            complete.append(filling.finished())
        else:
            self._open[spec.dtype] = filling
        return Assignment(spec, filling.number, complete)


def plan_buckets(specs: Iterable[GradientSpec], threshold_bytes: int | str) -> list[Bucket]:
    """Returns the buckets of a whole step, in launch order."""
    return Planner(threshold_bytes).plan_step(list(specs))


def _checked_bytes(size: object) -> int:
    """Returns the threshold in bytes, given as an integer or as text: "25 MB" is 25 * 1024**2.

    Raises:
        InvalidArgument: the size is neither an integer nor a text such as "25 MB", or it is below 1.
    """
    number = integer_of(size)
    if isinstance(size, str) and (found := _SIZE.fullmatch(size)):
        size_bytes = float(found["number"]) * _UNITS[found["unit"].upper().replace("IB", "B")]
        number = int(size_bytes) if math.isfinite(size_bytes) else None
    if number is None or number < 1:
        raise InvalidArgument(
            f'threshold_bytes must be an integer of at least 1, or text such as "25 MB", got {size!r}'
        )
    return number


def list_of_names(names: Sequence[str]) -> str:
    """Returns the first names of a list as text, and the number of further names, if there are more than eight."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
