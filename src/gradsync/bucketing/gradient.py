"""A gradient between its arrival and its bucket's reduction: what is accepted as one, its name, where its values go.

Two gradients that share memory would be reduced into one another: OverlapCheck refuses the second.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gradsync.bucketing.options import Options
from gradsync.bucketing.plan import Bucket, GradientSpec
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.host_arrays import ArrayKind, overlaps_itself
from gradsync.errors import InvalidArgument, UnsupportedDtype
from gradsync.reduction import OPERATIONS_BY_DTYPE, Array, ReduceOp, dtype_name

_PLAIN_NAMES = (str, int)  # nearly all names: known by their type alone


@dataclass(slots=True, eq=False)  # not a tuple: Python reads a slot in less than half the time
class GradientEntry:
    """A gradient that waits for its bucket; taken again in the next step where the very same array comes.

    Attributes:
        gradient: what was handed over.
        parameter: held as long as this is, so that its identity stays its own.
        shape, dtype, state: what must not have changed where the array comes again; see ArrayKind.state.
        number: of its bucket.
        name: as ranks know it.
        result: what the future gives.
        is_locked: whether the gradient is read-only while it is in flight.
        complete: the buckets that are complete because of it; see Place of plan.py.
        key: what tells the parameter apart from the others of this process.
        spec: what ranks agree on about it.
        position: its place in the step.
        native: the gradient as the communicator's array; of one that is locked, a view that stays writeable.
        source: flat, on the communicator's device.
        target: flat, likewise; the source itself where the result may take its place.
        write_back: where the target's values go afterwards: other layouts, other devices; None where they are there.
        recurs: whether it is kept for the next step: the last one had this very array here, and it is reduced in place.
    """

    # In this order: what is looked at where the array comes again lies side by side.
    gradient: Any
    parameter: Any
    shape: tuple[int, ...]
    dtype: Any
    state: Any
    number: int
    name: str
    result: Any
    is_locked: bool
    complete: Sequence[Bucket] | None
    key: Hashable
    spec: GradientSpec
    position: int
    native: Array
    source: Array
    target: Array
    write_back: Array | None
    recurs: bool


class Destination(NamedTuple):
    """Where a gradient's values are taken from, and where the reduced ones go; as in GradientEntry."""

    source: Array
    target: Array
    write_back: Array | None
    result: Any


def accept(
    param: Any, grad: Any, position: int, communicator: Communicator, options: Options, accepted_dtypes: set[Any]
) -> Array:
    """Returns a gradient as a native array that can be reduced; errors name the gradient.

    Args:
        param: whose gradient it is.
        grad: what a caller handed over.
        position: its arrival number.
        communicator: where it is to be reduced.
        options: how it is to be reduced.
        accepted_dtypes: those that have passed already; grows.
    """
    if grad is None:
        raise InvalidArgument(
            f"{communicator.label}: the gradient of {display_name(param, position)} is None: hand over none for a "
            'parameter that a step does not use, with AllreduceCallback(parameters=..., missing="zero")'
        )
    native: Array | None = None
    try:
        native = communicator.native_array(grad, "the gradient")
        if native.dtype not in accepted_dtypes:
            options.check_dtype(native.dtype)
            accepted_dtypes.add(native.dtype)
    except (InvalidArgument, UnsupportedDtype) as error:
        name = display_name(param, position)
        advice = ""
        can_be_summed = isinstance(error, UnsupportedDtype) and options.op is ReduceOp.MEAN and _is_summed(native)
        if can_be_summed:
            advice = '; convert it with astype("float32"), or use AllreduceCallback("sum") where a sum is meant'
        said = str(error).removeprefix(f"{communicator.label}: ")
        raise type(error)(f"{communicator.label}: the gradient of {name}: {said}{advice}") from None
    return native


def destination(grad: Any, native: Array, communicator: Communicator) -> Destination:
    """Decides where the reduced values go: into the gradient, or a new array where that cannot be written to."""
    arrays = communicator.arrays
    source = arrays.flat(native)
    if arrays.writeable(native) and not overlaps_itself(native):
        return Destination(source, source, None if arrays.is_viewed_flat(native) else native, grad)
    result = arrays.empty_like(native)
    if arrays.is_viewed_flat(result):
        return Destination(source, arrays.flat(result), None, result)
    return Destination(source, source, result, result)


def _is_summed(native: Array | None) -> bool:
    return native is not None and ReduceOp.SUM in OPERATIONS_BY_DTYPE.get(dtype_name(native.dtype), ())


def as_array(grad: Any) -> Any:
    """Returns a NumPy scalar, or a Python float or complex, as a new 0-d array; arrays as they are."""
    return np.asarray(grad) if isinstance(grad, (np.generic, float, complex)) else grad


def _is_array(param: Any) -> bool:
    return hasattr(param, "shape") and hasattr(param, "dtype") and not isinstance(param, np.generic)


def key_of(param: Any) -> Hashable:
    """Returns what tells parameters of one process apart."""
    if type(param) in _PLAIN_NAMES:
        return param  # type: ignore[no-any-return]  # a str or an int
    if isinstance(param, np.generic):  # a name out of an array of names: equal ones are one parameter
        return key_of(param.item())
    if _is_array(param):
        return ("array", id(param))
    try:
        hash(param)
    except TypeError:
        raise InvalidArgument(
            f"a parameter is named by a hashable value or by its array, got {type(param).__name__}"
        ) from None
    return ("name", param)


def display_name(param: Any, position: int) -> str:
    """Returns a name that is the same on all ranks: never one made from an address in memory."""
    if type(param) in _PLAIN_NAMES:
        return repr(param)
    if isinstance(param, np.generic):
        return display_name(param.item(), position)
    if isinstance(param, (str, int, bytes, type(None))):
        return repr(param)
    if isinstance(param, tuple) and all(isinstance(part, (str, int, bytes, type(None))) for part in param):
        return repr(param)
    return f"#{position}"


class _Claim(NamedTuple):
    """Bytes [begin, end) of memory that one gradient lies in; `order` keeps claims comparable."""

    begin: int
    order: int
    end: int
    array: Array
    name: str


class OverlapCheck:
    """The memory of a step's gradients, by address; they are held, so that it is not used again."""

    def __init__(self) -> None:
        self._claims: list[_Claim] = []
        self._longest_bytes = 0
        self._ranges_overlap = False  # rare: views that interleave, or read-only arrays

    def claim(self, array: Array, name: str, arrays: ArrayKind) -> None:
        """Enters a gradient.

        Args:
            array: native to the communicator; addresses of host and devices are one space.
            name: of the gradient, for the error.
            arrays: how the communicator handles arrays.

        Raises:
            InvalidArgument: it shares memory with a gradient entered before, and one of them is written to.
        """
        if not array.size:
            return
        begin, end = arrays.byte_bounds(array)
        claims = self._claims
        # Among ranges that do not overlap, only the last one that begins before this one can reach into it.
        if self._ranges_overlap:
            at = bisect_left(claims, (begin - self._longest_bytes,))
        else:
            at = max(bisect_left(claims, (begin,)) - 1, 0)
        for index in range(at, len(claims)):
            claim = claims[index]
            if claim.begin >= end:
                break
            if claim.end <= begin:
                continue
            self._ranges_overlap = True
            written = arrays.writeable(array) or arrays.writeable(claim.array)
            if written and arrays.share_memory(array, claim.array):
                raise InvalidArgument(
                    f"the gradient of {name} shares memory with the gradient of {claim.name}, which was handed over in "
                    "the same step: their results would be mixed; hand over a copy"
                )
        insort(claims, _Claim(begin, len(claims), end, array, name))
        self._longest_bytes = max(self._longest_bytes, end - begin)

    def clear(self) -> None:
        """Forgets the step."""
        self._claims.clear()
        self._longest_bytes = 0
        self._ranges_overlap = False
