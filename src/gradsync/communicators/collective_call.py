"""A collective between the caller's arguments and the bytes: checked, described for the other ranks, ready to run.

Every public collective first makes a CollectiveCall, which refuses what a caller can get wrong, in the same words on
every backend, before any other rank is involved; then it runs it, at once or through the queue
(collectives/asynchronous.py).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import numpy as np

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.backend import Backend, Bounds
from gradsync.communicators.host_arrays import overlaps_itself
from gradsync.communicators.lifetime import Lifetime
from gradsync.errors import InvalidArgument
from gradsync.flight_recorder import FlightRecorder
from gradsync.reduction import Array

Shape = tuple[int, ...]

BYTE = np.dtype(np.uint8)


class CollectiveCall(NamedTuple):
    """One collective of one rank, checked.

    Attributes:
        what: its name in errors.
        agreement: what this rank believes all ranks are about to do.
        move: move(launch) moves the bytes through the backend's hooks and returns the result. Runs within the
            communicator's turn and `_launching`; keeps the arrays.
    """

    what: str
    agreement: Agreement
    move: Callable[[Any], Any]


class Caller(Backend):
    """What the families of collectives share: who this rank is, the checks, the way to flat arrays, and running.

    Attributes:
        rank, world_size, ranks, device, label, recorder, lifetime: see Communicator.
    """

    rank: int
    world_size: int
    ranks: tuple[int, ...]
    device: str
    label: str
    recorder: FlightRecorder
    lifetime: Lifetime

    def native_array(self, array: Any, what: str) -> Array:
        """Returns `array` as this backend's own array type over the same memory.

        Args:
            array: what a caller handed in.
            what: names the operation in the error.

        Raises:
            InvalidArgument: not an array, or one that this communicator cannot reach.
            UnsupportedDtype: the elements are Python objects.
        """
        if type(array) is np.ndarray and not array.dtype.hasobject:  # nearly always; spares making the label
            return array
        native: Array = self.arrays.native(array, f"{self.label}: {what}")
        return native

    def _run(self, call: CollectiveCall, stream: Any) -> Any:
        with self.lifetime.turn(call.what, call.agreement):
            with self._launching(stream) as launch:
                result = call.move(launch)
            self._await_host_results(launch)
        return result

    # -- Checks ------------------------------------------------------------------------------------------------

    def _check_root(self, root: int) -> None:
        if not is_integer(root) or not 0 <= root < self.world_size:
            raise InvalidArgument(f"{self.label}: root must be 0 to {self.world_size - 1}, got {root!r}")

    def _check_writable(self, what: str, target: Array) -> None:
        if not self.arrays.writeable(target):
            raise InvalidArgument(f"{self.label}: {what} cannot write into a read-only array: pass out=")
        if overlaps_itself(target):
            raise InvalidArgument(
                f"{self.label}: {what} cannot write into an array whose elements overlap "
                f"(strides {target.strides}): pass out="
            )

    def _checked_out(self, what: str, out: Any, shape: Shape, dtype: np.dtype[Any]) -> Array:
        """Returns a caller's `out` as a native array, of the shape and dtype that the result has."""
        target = self.native_array(out, f"{what}: out")
        if target.shape != shape or target.dtype != dtype:
            raise InvalidArgument(
                f"{self.label}: {what} needs out of shape {shape} and dtype {dtype}, "
                f"got shape {target.shape} and dtype {target.dtype}"
            )
        self._check_writable(what, target)
        return target

    def _checked_sizes(self, what: str, name: str, sizes: Any, total: int | None = None) -> tuple[int, ...]:
        """Returns how many rows each rank has; their sum is `total` where that is known."""
        try:
            checked = tuple(operator.index(size) for size in sizes)
        except TypeError:
            checked = ()
        if len(checked) != self.world_size or min(checked) < 0:
            raise InvalidArgument(
                f"{self.label}: {what} needs {name} as {self.world_size} numbers of rows, each 0 or more, got {sizes!r}"
            )
        if total is not None and sum(checked) != total:
            raise InvalidArgument(
                f"{self.label}: {what}: {name} {list(checked)} are {sum(checked)} rows, the array has {total}"
            )
        return checked

    def _equal_sizes(self, what: str, name: str, rows: int) -> tuple[int, ...]:
        """Returns the rows of each rank's part where the parts are equal."""
        if rows % self.world_size:
            raise InvalidArgument(
                f"{self.label}: {what} cuts the first axis into {self.world_size} equal parts, which {rows} rows do "
                f"not give: pass {name}="
            )
        return (rows // self.world_size,) * self.world_size

    # -- Arrays ------------------------------------------------------------------------------------------------

    def _flat_source(
        self,
        source: Array,
        target: Array | None = None,
        *,
        source_part: slice | None = None,
        target_part: slice | None = None,
    ) -> Array:
        """Returns the elements of a source, safe to be read while the target is being written.

        Args:
            source: native array.
            target: native array for the results; None where they cannot touch the source.
            source_part: bytes of the source that may be the very bytes of the target: an in-place call.
            target_part: bytes of the target that may be the very bytes of the source, likewise.
        """
        arrays = self.arrays
        flat: Array = arrays.flat(source)
        if target is None or target is source or not arrays.is_viewed_flat(source):
            return flat
        if not arrays.share_memory(source, target):
            return flat
        is_in_place = (source_part is not None and self._is_part(target, source, source_part)) or (
            target_part is not None and self._is_part(source, target, target_part)
        )
        return flat if is_in_place else flat.copy()

    def _is_part(self, part: Array, whole: Array, where: slice) -> bool:
        """Whether a non-empty array is exactly these bytes of another one, both contiguous."""
        arrays = self.arrays
        if not arrays.is_viewed_flat(part) or not arrays.is_viewed_flat(whole):
            return False
        begin = arrays.byte_bounds(whole)[0]
        return arrays.byte_bounds(part) == (begin + where.start, begin + where.stop)

    def _flat_target(self, target: Array) -> Array:
        """Returns room for the elements of a target: the target itself, where it is contiguous on the device."""
        arrays = self.arrays
        flat: Array = arrays.flat(target) if arrays.is_viewed_flat(target) else arrays.empty_flat(target)
        return flat

    def _deliver(self, flat: Array, target: Array, launch: Any) -> None:
        """Brings results from their room to where the caller wants them."""
        self._keep(target, flat)
        self._bring_back(flat, target, launch)


def row_shape(shape: Shape) -> Shape:
    """Returns a shape with a first axis: a 0-d array is one row."""
    return shape or (1,)


def bounds_of(sizes: Sequence[int], row: int) -> Bounds:
    """Returns where the parts of `sizes` rows lie, given what a row holds."""
    return [0, *accumulate([size * row for size in sizes])]


def part_of(bounds: Bounds, rank: int) -> slice:
    """Returns where one rank's part lies."""
    return slice(bounds[rank], bounds[rank + 1])


def row_elements(shape: Shape) -> int:
    """Returns the elements in one row of an array of that shape, which has a first axis."""
    return prod(shape[1:])


def is_integer(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
