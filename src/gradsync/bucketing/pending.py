"""A gradient between its arrival and its bucket's reduction: where its values come from, where they go, its name."""

from __future__ import annotations

import logging
import sys
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from gradsync.bucketing.future import GradientFuture
from gradsync.communicators.base import Communicator
from gradsync.communicators.host_arrays import overlaps_itself
from gradsync.completion import Completion
from gradsync.errors import InvalidArgument, UnsupportedDtype
from gradsync.reduction import Array, ReduceOp, check_operation

_log = logging.getLogger("gradsync")
_PLAIN_NAMES = (str, int)  # nearly all names: known by their type alone


class PendingGradient(NamedTuple):
    """A gradient that waits for its bucket."""

    future: GradientFuture
    parameter: Any  # held until the flush, so that its identity stays its own
    source: Array  # flat, on the communicator's device
    target: Array  # flat, likewise; the source itself where the result may take its place
    write_back: Array | None  # where the target's values go afterwards: other layouts, other devices
    result: Any  # what the future gives
    producer: Any  # mark of the work that made the gradient; None on the CPU


def accept(
    param: Any, grad: Any, position: int, communicator: Communicator, op: ReduceOp, accepted_dtypes: set[Any]
) -> Array:
    """Returns a gradient as a native array that can be reduced; errors name the gradient.

    Args:
        param: whose gradient it is.
        grad: what a caller handed over.
        position: its arrival number.
        communicator: where it is to be reduced.
        op: by which operator.
        accepted_dtypes: those that have passed already; grows.
    """
    try:
        native: Array = communicator.native_array(grad, "the gradient")
        if native.dtype not in accepted_dtypes:
            check_operation(op, native.dtype)
            accepted_dtypes.add(native.dtype)
    except (InvalidArgument, UnsupportedDtype) as error:
        name = display_name(param, position)
        advice = ""
        if isinstance(error, UnsupportedDtype) and op is ReduceOp.MEAN:
            advice = '; convert it with astype("float32"), or use AllreduceCallback("sum") where a sum is meant'
        raise type(error)(f"{communicator.label}: the gradient of {name}: {error}{advice}") from None
    return native


def prepare(
    future: GradientFuture, param: Any, grad: Any, native: Array, communicator: Communicator
) -> PendingGradient:
    """Decides where the reduced values go: into the gradient, or a new array where that cannot be written to."""
    arrays = communicator.arrays
    source = arrays.flat(native)
    producer = communicator.mark_work()
    if arrays.writeable(native) and not overlaps_itself(native):
        write_back = None if arrays.is_viewed_flat(native) else native
        return PendingGradient(future, param, source, source, write_back, grad, producer)
    result = arrays.empty_like(native)
    if arrays.is_viewed_flat(result):
        return PendingGradient(future, param, source, arrays.flat(result), None, result, producer)
    return PendingGradient(future, param, source, source, result, result, producer)


def resolve(entries: Sequence[PendingGradient], completion: Completion | None) -> None:
    """Resolves every future, even where a done-callback ends in SystemExit or KeyboardInterrupt; then raises that."""
    interruption: BaseException | None = None
    for entry in entries:
        try:
            entry.future.resolve(entry.result, completion)
        except BaseException as error:
            interruption = interruption or error
    if interruption is not None:
        raise interruption


def _is_array(param: Any) -> bool:
    return hasattr(param, "shape") and hasattr(param, "dtype")


def key_of(param: Any) -> Hashable:
    """Returns what tells parameters of one process apart."""
    if type(param) in _PLAIN_NAMES:
        return param  # type: ignore[no-any-return]  # a str or an int
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
    if isinstance(param, (str, int, bytes, type(None))) and not _is_array(param):
        return repr(param)
    if isinstance(param, tuple) and all(isinstance(part, (str, int, bytes, type(None))) for part in param):
        return repr(param)
    return f"#{position}"


def tell_forgotten(pending: dict[int, PendingGradient]) -> None:
    """Warns when a callback goes, or the program ends, with gradients that were never reduced."""
    if pending and getattr(sys, "last_value", None) is None:  # after an exception there is better to tell
        _log.warning(
            "%d gradients were handed over and never reduced, beginning with %s: end each backward pass with flush() "
            "or `with callback.backward()`",
            len(pending),
            next(iter(pending.values())).future,
        )
