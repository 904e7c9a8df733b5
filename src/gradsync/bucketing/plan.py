"""Which gradient goes into which bucket: pure arithmetic, no arrays, no I/O.

The rule: a bucket holds one dtype; a bucket of two or more gradients never exceeds the threshold; a gradient larger
than the threshold goes alone. Buckets fill in the order in which gradients arrive, and are complete, and therefore
launched, as soon as the next gradient cannot join.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from gradsync.arguments import integer_of
from gradsync.errors import InvalidArgument

DEFAULT_THRESHOLD_BYTES = 10 * 1024**2
#: Of gradients that live in buckets on the CPU. Nothing is copied there, and nothing runs beside the program: a bucket
#: more only costs two meetings of the ranks more, a sixth of the time of ResNet-50's gradients in buckets of 10 MB.
VIEWS_ON_CPU_THRESHOLD_BYTES = 64 * 1024**2

_SIZE = re.compile(r"\s*(?P<number>\d+(\.\d+)?)\s*(?P<unit>[KMG]?i?B)\s*", re.IGNORECASE)
_UNITS = {"B": 1, "KB": 1024, "MB": 1024**2, "GB": 1024**3}

_NAMED = 8  # gradients that a message names


class GradientSpec(NamedTuple):
    """What ranks must agree on about one gradient.

    Attributes:
        name: the same on all ranks: the parameter's name, or its arrival index ("#3").
        shape: its shape.
        dtype: its dtype's name.
        itemsize: bytes of one element.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def label(self) -> str:
        """The name without the quotes of a string."""
        is_quoted = self.name[:1] in ("'", '"') and self.name[:1] == self.name[-1:]
        return self.name[1:-1] if is_quoted else self.name

    @property
    def size_elements(self) -> int:
        """Number of elements; 1 for a 0-d gradient."""
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Number of bytes."""
        return self.size_elements * self.itemsize


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one gradient lies in its bucket.

    Attributes:
        position: arrival number of the gradient in the step, from 0.
        spec: the gradient.
        begin: first element in the flat buffer.
        end: one past its last element.
    """

    position: int
    spec: GradientSpec
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are reduced by one collective, in arrival order.

    Attributes:
        dtype: the dtype's name, shared by all slots.
        slots: the gradients, back to back from element 0.
        number: counts the buckets of a step in the order in which they are opened.
    """

    dtype: str
    slots: tuple[Slot, ...]
    number: int

    @property
    def size_elements(self) -> int:
        """Number of elements of the flat buffer."""
        return self.slots[-1].end

    @property
    def size_bytes(self) -> int:
        """Number of bytes of the flat buffer."""
        last = self.slots[-1]
        return last.end * last.spec.itemsize

    @property
    def specs(self) -> tuple[GradientSpec, ...]:
        """The gradients, in order."""
        return tuple([slot.spec for slot in self.slots])


class _Filling(NamedTuple):
    """A bucket that is being filled."""

    number: int
    limit_bytes: int
    slots: list[Slot]


@dataclass(slots=True, eq=False)  # not a tuple: Python reads a slot in less than half the time
class Place:
    """What the plan knows of one gradient.

    Attributes:
        spec: of the gradient.
        number: of its bucket.
        complete: the buckets that are complete because of it, in launch order; None where that depends on which others
            have come: see Planner.count.
    """

    spec: GradientSpec
    number: int
    complete: Sequence[Bucket] | None


class Planner:
    """Says which gradients share a bucket, and when a bucket is complete.

    Without `specs` places are the order of arrival, and buckets fill gradient by gradient; a step that repeats the one
    before gets its buckets again. With `specs` places and buckets are known: gradients come in any order, and a bucket
    is complete when all of its gradients have come, and all buckets before it are complete. So ranks whose gradients
    come in different orders launch in the same one.

    Args:
        threshold_bytes: size that a bucket of several gradients never exceeds; at least 1.
        first_bucket_bytes: the same for the first bucket of a step, so that communication may start early; None is
            the threshold.
        specs: the gradients, by place.

    Attributes:
        threshold_bytes, first_bucket_bytes: see above.
        places: of this step, and beyond what has come, of the last one.
        repeats: whether all that has come in this step came in the last one, at the same places.
        buckets: with `specs`: all, in the order of their launch.

    Raises:
        InvalidArgument: a size that is no integer of at least 1, or a first bucket above the threshold.
    """

    def __init__(
        self,
        threshold_bytes: int | str,
        first_bucket_bytes: int | str | None = None,
        specs: Sequence[GradientSpec] | None = None,
    ) -> None:
        threshold_bytes = checked_bytes("threshold_bytes", threshold_bytes)
        if first_bucket_bytes is not None:
            first_bucket_bytes = checked_bytes("first_bucket_bytes", first_bucket_bytes)
            if first_bucket_bytes > threshold_bytes:
                raise InvalidArgument(
                    f"first_bucket_bytes must be at most threshold_bytes ({threshold_bytes}), got {first_bucket_bytes}"
                )
        self.threshold_bytes = threshold_bytes
        self.first_bucket_bytes = first_bucket_bytes
        self.places: list[Place] = []
        self.repeats = False
        self.buckets: list[Bucket] = []
        self._open: dict[str, _Filling] = {}
        self._opened = 0
        self._rest: list[Bucket] = []  # what the end of the last step completed
        self._missing: list[int] = []  # with `specs`: by launch order
        self._next = 0
        self._is_fixed = specs is not None
        if specs is not None:
            self.buckets = plan_buckets(specs, threshold_bytes, first_bucket_bytes)
            self._order = {bucket.number: at for at, bucket in enumerate(self.buckets)}
            numbers = {slot.position: bucket.number for bucket in self.buckets for slot in bucket.slots}
            self.places = [Place(spec, numbers[position], None) for position, spec in enumerate(specs)]
            self.reset()

    def add(self, spec: GradientSpec, position: int) -> Place:
        """Places one gradient. An oversize one is complete at once, and leaves the bucket that is filling as it is.

        Args:
            spec: known again by identity: a caller that passes the same object as in the step before saves work.
            position: its place in the step; without the planner's `specs` the number of those that have come before.
        """
        if self._is_fixed:
            return self.places[position]
        if self.repeats:
            if position < len(self.places) and self.places[position].spec is spec:
                return self.places[position]
            self._stop_repeating(position)
        place = self._fill(spec, position)
        self.places.append(place)
        return place

    def count(self, number: int) -> Sequence[Bucket]:
        """Notes that a gradient has come, into this bucket, whose `complete` is None; returns what it completes."""
        at = self._order[number]
        self._missing[at] -= 1
        if self._missing[at] or at != self._next:
            return ()
        begin = at
        while self._next < len(self.buckets) and not self._missing[self._next]:
            self._next += 1
        return self.buckets[begin : self._next]

    def flush(self, count: int) -> list[Bucket]:
        """Completes what is open after so many gradients, dtype by dtype in sorted order, and begins a new step.

        An empty step says nothing about the next: what is known of the last one stays. With `specs` nothing is open:
        all gradients have come, or none.
        """
        if self._is_fixed:
            self.reset()
            return []
        if not count:
            return []
        if self.repeats and count < len(self.places):
            self._stop_repeating(count)
        if not self.repeats:
            self._rest = [self._take(dtype) for dtype in sorted(self._open)]
            self._opened = 0
            self.repeats = True
        return self._rest

    def plan_step(self, specs: Sequence[GradientSpec]) -> list[Bucket]:
        """Returns the buckets of a whole step, in launch order."""
        complete: list[Bucket] = []
        for position, spec in enumerate(specs):
            place = self.add(spec, position)
            complete += self.count(place.number) if place.complete is None else place.complete
        return complete + self.flush(len(specs))

    def reset(self) -> None:
        """Forgets the step, and the last one."""
        if self._is_fixed:
            self._next, self._missing = 0, [len(bucket.slots) for bucket in self.buckets]
            self.repeats = True
            return
        self.places = []
        self._open.clear()
        self._opened = 0
        self.repeats = False

    def _stop_repeating(self, count: int) -> None:
        """Brings the open buckets to where they would be had the step been filled from its beginning."""
        self.repeats = False
        del self.places[count:]
        for position, place in enumerate(self.places):
            self._fill(place.spec, position)

    def _fill(self, spec: GradientSpec, position: int) -> Place:
        size_bytes = spec.size_bytes
        filling = self._open.get(spec.dtype)
        if size_bytes > self.threshold_bytes:
            return self._alone(position, spec, [])
        complete: list[Bucket] = []
        if filling is not None and _filled_bytes(filling) + size_bytes > filling.limit_bytes:
            complete.append(self._take(spec.dtype))
            filling = None
        if filling is None:
            if size_bytes > self._next_limit_bytes():  # the first bucket is for smaller ones
                return self._alone(position, spec, complete)
            filling = self._open[spec.dtype] = _Filling(self._opened, self._next_limit_bytes(), [])
            self._opened += 1
        begin = filling.slots[-1].end if filling.slots else 0
        filling.slots.append(Slot(position, spec, begin, begin + spec.size_elements))
        if _filled_bytes(filling) == filling.limit_bytes:
            complete.append(self._take(spec.dtype))
        return Place(spec, filling.number, complete)

    def _next_limit_bytes(self) -> int:
        if self._opened == 0 and self.first_bucket_bytes is not None:
            return self.first_bucket_bytes
        return self.threshold_bytes

    def _alone(self, position: int, spec: GradientSpec, before: list[Bucket]) -> Place:
        number, self._opened = self._opened, self._opened + 1
        bucket = Bucket(spec.dtype, (Slot(position, spec, 0, spec.size_elements),), number)
        return Place(spec, number, [*before, bucket])

    def _take(self, dtype: str) -> Bucket:
        filling = self._open.pop(dtype)
        return Bucket(dtype, tuple(filling.slots), filling.number)


def plan_buckets(
    specs: Iterable[GradientSpec], threshold_bytes: int | str, first_bucket_bytes: int | str | None = None
) -> list[Bucket]:
    """Returns the buckets of a whole step, in launch order."""
    return Planner(threshold_bytes, first_bucket_bytes).plan_step(list(specs))


def _filled_bytes(filling: _Filling) -> int:
    return filling.slots[-1].end * filling.slots[-1].spec.itemsize if filling.slots else 0


def checked_bytes(name: str, size: object) -> int:
    """Returns a size as an int: of bytes, or of text such as "25 MB", which is 25 * 1024**2.

    Raises:
        InvalidArgument: it is neither, or below 1.
    """
    number = integer_of(size)
    if isinstance(size, str) and (found := _SIZE.fullmatch(size)):
        size_bytes = float(found["number"]) * _UNITS[found["unit"].upper().replace("IB", "B")]
        number = int(size_bytes) if math.isfinite(size_bytes) else None
    if number is None or number < 1:
        raise InvalidArgument(f'{name} must be an integer of at least 1, or text such as "25 MB", got {size!r}')
    return number


def list_of_names(names: Sequence[str]) -> str:
    """Returns the first names of a list, and how many more there are."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
