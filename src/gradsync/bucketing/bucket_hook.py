"""The interface of hooks. A hook is a function of the program that replaces the all-reduce of each bucket.

gradsync calls the hook with each bucket of a step, in the same order on every rank. The hook returns the reduced values
of the bucket's flat buffer. The hooks of all ranks must call the same collectives on the bucket's communicator.
gradsync/hooks.py defines some hooks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gradsync.bucketing.lists import get_offsets, param_pack_split
from gradsync.communicators.communicator import Communicator
from gradsync.errors import InvalidArgument
from gradsync.reduction import Array, ReduceOp


@dataclass(frozen=True, eq=False, slots=True)
class GradientBucket:
    """The argument of a hook: a bucket whose gradients are packed into one flat buffer, before their reduction.

    Attributes:
        index: the bucket's number in its step, from 0. A bucket keeps its number as long as the steps repeat.
        names: the names of the gradients, in the order of `flat`. A name that is a string is unchanged; another name is
            given as its repr().
        shapes: the shapes of the gradients, in the order of `flat`.
        flat: a 1-D contiguous array of this rank's values, on the communicator's device. The hook may write to the
            array. The array is valid until the bucket is reduced.
        communicator: the communicator whose ranks reduce the bucket.
        op: the required reduction: sum or mean.
    """

    index: int
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    flat: Array
    communicator: Communicator
    op: ReduceOp

    def gradients(self) -> list[Array]:
        """Returns the gradients as views of `flat`, each in its shape."""
        return param_pack_split(self.flat, get_offsets(self.shapes), self.shapes)


#: A hook returns the reduced values: `bucket.flat` itself, another array of its size and dtype, or a future of such
#: an array, such as `bucket.communicator.asynchronous.all_reduce(bucket.flat, bucket.op)`.
BucketHook = Callable[[GradientBucket], Any]


def settings_of(hook: BucketHook) -> str:
    """Returns the text by which ranks compare their hooks: the hook's `settings` if it has any, else its name.

    The ranks do not compare the hook's code or the values in its closure. These values may differ for a good reason,
    such as the rank's own number.
    """
    settings = getattr(hook, "settings", None)
    if settings:
        return str(settings)
    if isinstance(hook, functools.partial):
        return f"partial({settings_of(hook.func)})"
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


def result_of(value: Any, bucket: GradientBucket) -> Array:
    """Returns the reduced values of a bucket as a flat array; waits if the hook has returned a future.

    On a GPU only the current stream waits for the future, not the host.

    Args:
        value: the hook's return value: an array, or an object whose result() gives an array.
        bucket: the bucket that the hook has reduced.

    Raises:
        InvalidArgument: the result is not an array, or has a wrong size or dtype.
        PlanMismatch, RankFailed, ...: the future has failed with this error.
    """
    communicator = bucket.communicator
    if callable(getattr(value, "result", None)):
        value = value.result()
    what = f"a hook for bucket {bucket.index}"
    if value is None:
        raise InvalidArgument(
            f"{communicator.label}: {what} must return the reduced array, such as bucket.flat, or its future, got None"
        )
    native = communicator._native_array(value, what)
    if native.size != bucket.flat.size or native.dtype != bucket.flat.dtype:
        raise InvalidArgument(
            f"{communicator.label}: {what} must return {bucket.flat.size} elements of {bucket.flat.dtype}, or a future "
            f"of them, got {native.size} of {native.dtype}"
        )
    arrays = communicator._arrays
    if native is bucket.flat or (native.size and arrays.byte_bounds(native) == arrays.byte_bounds(bucket.flat)):
        return bucket.flat
    flat: Array = arrays.flat(native)
    return flat
