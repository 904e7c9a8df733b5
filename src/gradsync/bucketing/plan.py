"""Which gradient goes into which bucket: pure arithmetic, no arrays, no I/O.

The rule: a bucket holds one dtype; a bucket of two or more gradients never exceeds the threshold; a gradient larger
than the threshold goes alone. Buckets fill in the order in which gradients arrive, and are complete, and therefore
launched, as soon as the next gradient cannot join.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from gradsync.errors import InvalidArgument


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
    """

    dtype: str
    slots: tuple[Slot, ...]

    @property
    def size_elements(self) -> int:
        """Number of elements of the flat buffer."""
        return self.slots[-1].end

    @property
    def size_bytes(self) -> int:
        """Number of bytes of the flat buffer."""
        return self.size_elements * self.slots[0].spec.itemsize


class BucketPlanner:
    """Fills buckets gradient by gradient; a step that repeats the one before gets its buckets again.

    Args:
        threshold_bytes: size that a bucket of several gradients never exceeds; at least 1.
    """

    def __init__(self, threshold_bytes: int) -> None:
        if not isinstance(threshold_bytes, int) or isinstance(threshold_bytes, bool) or threshold_bytes < 1:
            raise InvalidArgument(f"threshold_bytes must be an integer of at least 1, got {threshold_bytes!r}")
        self.threshold_bytes = threshold_bytes
        self._open: dict[str, list[Slot]] = {}
        self._arrived = 0
        self._steps: list[tuple[GradientSpec, list[Bucket]]] = []  # what each gradient of the last step completed
        self._rest: list[Bucket] | None = None  # what the flush of the last step completed; None: it had none
        self._repeating = False

    def add(self, spec: GradientSpec) -> list[Bucket]:
        """Places one gradient, and returns the buckets that are complete because of it, in launch order.

        An oversize gradient is complete at once and does not disturb the bucket that is being filled.

        Args:
            spec: known again by identity: a caller that passes the same object as in the step before saves work.
        """
        if self._repeating:
            if self._arrived < len(self._steps):
                known, complete = self._steps[self._arrived]
                if known is spec:
                    self._arrived += 1
                    return complete
            self._stop_repeating()
        complete = self._place(spec)
        self._steps.append((spec, complete))
        return complete

    def flush(self) -> list[Bucket]:
        """Completes what is open, dtype by dtype in sorted order, and begins a new step."""
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
        self._arrived = 0
        self._rest = rest
        self._repeating = rest is not None

    def _stop_repeating(self) -> None:
        """Brings the open buckets to where they would be without the shortcut."""
        self._repeating = False
        begun = [spec for spec, _ in self._steps[: self._arrived]]
        del self._steps[self._arrived :]
        self._arrived = 0
        for spec in begun:
            self._place(spec)

    def _place(self, spec: GradientSpec) -> list[Bucket]:
        position, self._arrived = self._arrived, self._arrived + 1
        size_bytes = spec.size_bytes
        if size_bytes > self.threshold_bytes:
            return [Bucket(spec.dtype, (Slot(position, spec, 0, spec.size_elements),))]
        complete: list[Bucket] = []
        slots = self._open.get(spec.dtype, [])
        filled_bytes = slots[-1].end * spec.itemsize if slots else 0
        if slots and filled_bytes + size_bytes > self.threshold_bytes:
            complete.append(self._take(spec.dtype))
            slots, filled_bytes = [], 0
        begin = slots[-1].end if slots else 0
        slots.append(Slot(position, spec, begin, begin + spec.size_elements))
        self._open[spec.dtype] = slots
        if filled_bytes + size_bytes == self.threshold_bytes:
            complete.append(self._take(spec.dtype))
        return complete

    def _take(self, dtype: str) -> Bucket:
        return Bucket(dtype, tuple(self._open.pop(dtype)))


def plan_buckets(specs: Iterable[GradientSpec], threshold_bytes: int) -> list[Bucket]:
    """Returns the buckets of a whole step, in launch order."""
    planner = BucketPlanner(threshold_bytes)
    return [bucket for spec in specs for bucket in planner.add(spec)] + planner.flush()
