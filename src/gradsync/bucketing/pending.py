"""A gradient between its arrival and its bucket's reduction: where its values come from, where they go, its name."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np

from gradsync.bucketing.future import GradientFuture
from gradsync.communicators.host_arrays import flat_copy_or_view, overlaps_itself
from gradsync.errors import InvalidArgument
from gradsync.reduction import Array


class PendingGradient(NamedTuple):
    """A gradient that waits for its bucket."""

    future: GradientFuture
    parameter: Any  # held until the flush, so that its identity stays its own
    source: Array  # flat
    target: Array  # flat; the source itself where the result may be written in place
    write_back: Array | None  # where the target's values go afterwards, for layouts that are not contiguous
    result: Any  # what the future gives


def prepare(future: GradientFuture, param: Any, grad: Any, native: Array) -> PendingGradient:
    """Decides where the reduced values go."""
    source = flat_copy_or_view(native)
    if not native.flags.writeable or overlaps_itself(native):
        result = np.empty_like(source).reshape(native.shape)
        return PendingGradient(future, param, source, result.reshape(-1), None, result)
    if native.flags.c_contiguous:
        return PendingGradient(future, param, source, source, None, grad)
    return PendingGradient(future, param, source, source, native, grad)


def _is_array(param: Any) -> bool:
    return hasattr(param, "shape") and hasattr(param, "dtype")


def key_of(param: Any) -> Hashable:
    """Returns what tells parameters of one process apart."""
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
    if isinstance(param, (str, int, bytes, type(None))) and not _is_array(param):
        return repr(param)
    if isinstance(param, tuple) and all(isinstance(part, (str, int, bytes, type(None))) for part in param):
        return repr(param)
    return f"#{position}"
