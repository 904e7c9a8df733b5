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

from gradsync.arguments import integer_of
from gradsync.communicators.agreement import Agreement
from gradsync.communicators.backend import Backend, Bounds
from gradsync.communicators.host_arrays import overlaps_itself
from gradsync.communicators.lifetime import Lifetime
from gradsync.diagnostics import FlightRecorder
from gradsync.errors import InvalidArgument, shown
from gradsync.reduction import Array

Shape = tuple[int, ...]

BYTE = np.dtype(np.uint8)

_TOO_MUCH = 2**63  # for NumPy, and for the numbers that ranks tell each other


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


class CollectiveBase(Backend):
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
        """Returns `array` as this backend's own array type over the same memory; for bucketing too.

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

    def _checked_root(self, what: str, root: int, name: str = "root") -> int:
        number = integer_of(root)
        if number is None or not 0 <= number < self.world_size:
            raise InvalidArgument(f"{self.label}: {what} needs {name} from {self._rank_range()}, got {shown(root)}")
        return number

    def _rank_range(self) -> str:
        """Returns how the ranks are numbered, for errors."""
        within = ", numbered within the group" if "group" in self.label else ""
        return f"0 to {self.world_size - 1}{within}"

    def _check_writable(self, what: str, target: Array, name: str = "array", remedy: str = "pass out=") -> None:
        """Refuses an argument that cannot be written to; errors name it, and what to do."""
        if not self.arrays.writeable(target):
            flaw = "is read-only"
        elif overlaps_itself(target):
            flaw = f"has elements that share memory (strides {target.strides})"
        else:
            return
        raise InvalidArgument(f"{self.label}: {what} writes into {name}, which {flaw}: {remedy}")

    def _checked_out(self, what: str, out: Any, shape: Shape, dtype: np.dtype[Any]) -> Array:
        """Returns a caller's `out` as a native array, of the shape and dtype that the result has."""
        target = self.native_array(out, f"{what}: out")
        if target.shape != shape or target.dtype != dtype:
            raise InvalidArgument(
                f"{self.label}: {what} needs out of shape {shape} and dtype {dtype}, "
                f"got shape {target.shape} and dtype {target.dtype}"
            )
        self._check_writable(what, target, "out", "pass another array")
        return target

    def _checked_sizes(
        self, what: str, name: str, sizes: Any, total: int | None = None, *, row_bytes: int = 1
    ) -> tuple[int, ...]:
        """Returns how many rows each rank has; their sum is `total` where that is known."""
        try:
            checked = tuple(operator.index(size) for size in sizes)
        except TypeError:
            checked = ()
        if len(checked) != self.world_size or min(checked) < 0 or sum(checked) * max(row_bytes, 1) >= _TOO_MUCH:
            raise InvalidArgument(
                f"{self.label}: {what} needs {name} as {self.world_size} numbers of rows, each 0 or more and together "
                f"less than 2**63 bytes, got {sizes!r}"
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
            target: native array for the results; None where they cannot touch the source, or each element of it only
                once it has been read.
            source_part: bytes of the source that may be the very bytes of the target: an in-place call.
            target_part: bytes of the target that may be the very bytes of the source, likewise.
        """
        arrays = self.arrays
        flat: Array = arrays.flat(source)
        if target is None or not arrays.is_viewed_flat(source):
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


def row_elements(shape: Shape) -> int:
    """Returns the elements in one row of an array of that shape, which has a first axis."""
    return prod(shape[1:])
