"""Which gradient goes into which bucket: pure arithmetic, no arrays, no I/O.

The rule: a bucket holds one dtype; a bucket of two or more gradients never exceeds the threshold; a gradient larger
than the threshold goes alone. Buckets fill in the order in which gradients arrive, and are complete, and therefore
launched, as soon as the next gradient cannot join.
"""

from __future__ import annotations

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
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.slots[0].spec.itemsize

    @property
    def size_bytes(self) -> int:
        """Number of bytes of the flat buffer."""
        return self.size_elements * self.itemsize

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
class _Placed:
    """What became of one gradient: its bucket's number, and the buckets that are complete because of it."""

    spec: GradientSpec
    number: int
    complete: list[Bucket]


class BucketPlanner:
    """Fills buckets gradient by gradient; a step that repeats the one before gets its buckets again.

    Args:
        threshold_bytes: size that a bucket of several gradients never exceeds; at least 1.
        first_bucket_bytes: the same for the first bucket of a step, so that communication may start early; None is
            the threshold.

    Attributes:
        threshold_bytes: see above.
        first_bucket_bytes: see above; None where it is the threshold.
        placed_in: number of the bucket to which the last gradient was added.

    Raises:
        InvalidArgument: a size that is no integer of at least 1, or a first bucket above the threshold.
    """

    def __init__(self, threshold_bytes: int, first_bucket_bytes: int | None = None) -> None:
        threshold_bytes = checked_bytes("threshold_bytes", threshold_bytes)
        if first_bucket_bytes is not None:
            first_bucket_bytes = checked_bytes("first_bucket_bytes", first_bucket_bytes)
            if first_bucket_bytes > threshold_bytes:
                raise InvalidArgument(
                    f"first_bucket_bytes must be at most threshold_bytes ({threshold_bytes}), got {first_bucket_bytes}"
                )
        self.threshold_bytes = threshold_bytes
        self.first_bucket_bytes = first_bucket_bytes
        self.placed_in = 0
        self._open: dict[str, _Filling] = {}
        self._opened = 0
        self._arrived = 0
        self._steps: list[_Placed] = []
        self._rest: list[Bucket] | None = None  # what the flush of the last step completed; None: it had none
        self._repeating = False

    def add(self, spec: GradientSpec, position: int | None = None) -> list[Bucket]:
        """Places one gradient, and returns the buckets that are complete because of it, in launch order.

        An oversize gradient is complete at once and does not disturb the bucket that is being filled.

        Args:
            spec: known again by identity: a caller that passes the same object as in the step before saves work.
            position: its place in the step: that of its arrival, which the planner counts itself.
        """
        if self._repeating:
            if self._arrived < len(self._steps):
                placed = self._steps[self._arrived]
                if placed.spec is spec:
                    self._arrived += 1
                    self.placed_in = placed.number
                    return placed.complete
            self._stop_repeating()
        complete = self._place(spec)
        self._steps.append(_Placed(spec, self.placed_in, complete))
        return complete

    def flush(self) -> list[Bucket]:
        """Completes what is open, dtype by dtype in sorted order, and begins a new step.

        An empty step says nothing about the next: what is known of the last one stays.
        """
        if not self._arrived:
            return []
        if self._repeating and self._arrived == len(self._steps) and self._rest is not None:
            self._arrived = 0
            return self._rest
        if self._repeating:
            self._stop_repeating()
        rest = [self._take(dtype) for dtype in sorted(self._open)]
        self._begin_step(rest)
        return rest

    def reset(self) -> None:
        """Forgets the step."""
        self._steps.clear()
        self._begin_step(None)

    def _begin_step(self, rest: list[Bucket] | None) -> None:
        self._open.clear()
        self._opened = 0
        self._arrived = 0
        self._rest = rest
        self._repeating = rest is not None

    def _stop_repeating(self) -> None:
        """Brings the open buckets to where they would be without the shortcut."""
        self._repeating = False
        begun = [placed.spec for placed in self._steps[: self._arrived]]
        del self._steps[self._arrived :]
        self._arrived = 0
        for spec in begun:
            self._place(spec)

    def _place(self, spec: GradientSpec) -> list[Bucket]:
        position, self._arrived = self._arrived, self._arrived + 1
        size_bytes = spec.size_bytes
        filling = self._open.get(spec.dtype)
        if size_bytes > self.threshold_bytes:
            return [self._alone(position, spec)]
        complete: list[Bucket] = []
        if filling is not None and _filled_bytes(filling) + size_bytes > filling.limit_bytes:
            complete.append(self._take(spec.dtype))
            filling = None
        if filling is None:
            if size_bytes > self._next_limit_bytes():  # the first bucket is for smaller ones
                return [*complete, self._alone(position, spec)]
            filling = self._open[spec.dtype] = self._open_bucket()
        begin = filling.slots[-1].end if filling.slots else 0
        filling.slots.append(Slot(position, spec, begin, begin + spec.size_elements))
        self.placed_in = filling.number
        if _filled_bytes(filling) == filling.limit_bytes:
            complete.append(self._take(spec.dtype))
        return complete

    def _next_limit_bytes(self) -> int:
        is_first = self._opened == 0 and self.first_bucket_bytes is not None
        return self.first_bucket_bytes if is_first else self.threshold_bytes  # type: ignore[return-value]

    def _open_bucket(self) -> _Filling:
        filling = _Filling(self._opened, self._next_limit_bytes(), [])
        self._opened += 1
        return filling

    def _alone(self, position: int, spec: GradientSpec) -> Bucket:
        self.placed_in, self._opened = self._opened, self._opened + 1
        return Bucket(spec.dtype, (Slot(position, spec, 0, spec.size_elements),), self.placed_in)

    def _take(self, dtype: str) -> Bucket:
        filling = self._open.pop(dtype)
        return Bucket(dtype, tuple(filling.slots), filling.number)


def plan_buckets(
    specs: Iterable[GradientSpec], threshold_bytes: int, first_bucket_bytes: int | None = None
) -> list[Bucket]:
    """Returns the buckets of a whole step, in launch order."""
    planner = BucketPlanner(threshold_bytes, first_bucket_bytes)
    return [bucket for spec in specs for bucket in planner.add(spec)] + planner.flush()


def _filled_bytes(filling: _Filling) -> int:
    return filling.slots[-1].end * filling.slots[-1].spec.itemsize if filling.slots else 0


def checked_bytes(name: str, size_bytes: object) -> int:
    """Returns a size as an int.

    Raises:
        InvalidArgument: it is no integer of at least 1.
    """
    number = integer_of(size_bytes)
    if number is None or number < 1:
        raise InvalidArgument(f"{name} must be an integer of at least 1, got {size_bytes!r}")
    return number


def list_of_names(names: Sequence[str]) -> str:
    """Returns the first names of a list, and how many more there are."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
