"""The plan of a step: which gradients are reduced together, in which order. And one bucket: its reduction or its hook.

All gradients of a bucket have one dtype. Two or more gradients never exceed the threshold together; a gradient that is
larger has a bucket of its own.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import isfinite, prod
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from gradsync.arguments import integer_of
from gradsync.bucketing.lists import array_module
from gradsync.communicators.agreement import array_text
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.for_bucketing import arrays_of
from gradsync.errors import BackendUnavailable, InvalidArgument, size_text
from gradsync.reduction import Array, dtype_of

_DEFAULT_THRESHOLD_BYTES = 10 * 1024**2

_SIZE = re.compile(r"\s*(?P<number>\d+(\.\d+)?)\s*(?P<unit>[KMG]?i?B)\s*", re.IGNORECASE)
_UNITS = {"B": 1, "KB": 1024, "MB": 1024**2, "GB": 1024**3}
_MOST_NAMES = 8  # in one message


class GradientSpec(NamedTuple):
    """What the ranks must agree on about a gradient.

    Attributes:
        name: the same on all ranks: the repr() of the parameter's name; of an array see gradient.name_of_array; in
            average_gradients() the path in the tree.
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
        """The parameter's name itself, if it is a string; else the attribute `name`."""
        if self.name[:1] not in ("'", '"'):
            return self.name
        return self.name[1:-1] if "\\" not in self.name else str(ast.literal_eval(self.name))

    def __str__(self) -> str:
        """Returns the gradient in one line, e.g. "'w': float32[3, 4]"."""
        return f"{self.name}: {array_text(self.dtype, self.shape)}"

    @property
    def size_bytes(self) -> int:
        """The number of bytes of the gradient."""
        return prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Gradients that are reduced by one collective.

    Attributes:
        number: of the bucket in its step.
        dtype: of all its gradients.
        keys: the keys of the gradients in this process, in the order of the specs.
        specs: the gradients.
        size_bytes: of all gradients together.
    """

    number: int
    dtype: np.dtype[Any]
    keys: tuple[Hashable, ...]
    specs: tuple[GradientSpec, ...]
    size_bytes: int


def cut(keyed: Iterable[tuple[Hashable, GradientSpec]], threshold_bytes: int) -> list[Bucket]:
    """Returns the buckets of gradients that are given in the plan's order, in the order in which they are complete."""
    buckets: list[tuple[int, list[tuple[Hashable, GradientSpec]]]] = []  # each with the position of its last gradient
    filling: dict[str, tuple[int, int]] = {}  # by dtype: the index of the open bucket, and its bytes
    for position, each in enumerate(keyed):
        spec = each[1]
        if spec.size_bytes > threshold_bytes:  # alone; the open bucket stays open
            buckets.append((position, [each]))
            continue
        index, filled = filling.get(spec.dtype, (-1, 0))
        if index < 0 or filled + spec.size_bytes > threshold_bytes:
            index, filled = len(buckets), 0
            buckets.append((position, []))
        pairs = buckets[index][1]
        pairs.append(each)
        buckets[index] = position, pairs
        filling[spec.dtype] = index, filled + spec.size_bytes
    made = []
    for number, (_, pairs) in enumerate(sorted(buckets, key=itemgetter(0))):
        keys, specs = zip(*pairs, strict=True)
        made.append(Bucket(number, dtype_of(specs[0].dtype), keys, specs, sum(spec.size_bytes for spec in specs)))
    return made


def checked_threshold(value: Any) -> int:
    """Returns the option threshold_bytes as a number of bytes; for None the default.

    Raises:
        InvalidArgument: it is neither an integer of at least 1 nor text such as "25 MB".
    """
    number = _DEFAULT_THRESHOLD_BYTES if value is None else integer_of(value)
    if number is None and isinstance(value, str) and (found := _SIZE.fullmatch(value)):
        size_bytes = float(found["number"]) * _UNITS[found["unit"].upper().replace("I", "")]
        number = round(size_bytes) if isfinite(size_bytes) else None
    if number is None or number < 1:
        raise InvalidArgument(
            f'threshold_bytes must be an integer of at least 1, or text such as "25 MB", got {value!r}'
        )
    return number


def list_of_names(names: Sequence[str]) -> str:
    """Returns names as text, shortened if there are many."""
    shown = ", ".join(names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} and {len(names) - _MOST_NAMES} more"


# -- Gradients that live in buckets -----------------------------------------------------------------------------------


class BucketMemory:
    """The memory of all buckets of a plan, which is reduced in place.

    Attributes:
        views: the part of each gradient, by its key.
        flats: each bucket as one flat array.

    Raises:
        BackendUnavailable: there is not enough memory.
    """

    def __init__(self, buckets: Sequence[Bucket], communicator: Communicator) -> None:
        self._arrays = arrays = arrays_of(communicator)
        self._label, self._device = communicator.label, communicator.device
        self._layout = [bucket.specs for bucket in buckets]
        self.views: dict[Hashable, Array] = {}
        self.flats: list[Array] = []
        self._names = {
            key: spec.name for bucket in buckets for key, spec in zip(bucket.keys, bucket.specs, strict=True)
        }
        try:
            for bucket in buckets:
                flat = arrays.scratch(bucket.size_bytes // bucket.dtype.itemsize, bucket.dtype)
                arrays.zero(flat)
                self.flats.append(flat)
                begin = 0
                for key, spec in zip(bucket.keys, bucket.specs, strict=True):
                    end = begin + prod(spec.shape)
                    self.views[key] = flat[begin:end].reshape(spec.shape)
                    begin = end
        except (MemoryError, ValueError) as error:  # NumPy says ValueError for more bytes than an integer can count
            size_bytes = sum(bucket.size_bytes for bucket in buckets)
            raise BackendUnavailable(
                f"{self._label}: not enough memory for the buckets, {size_text(size_bytes)}: {error}"
            ) from error
        self._bounds = [arrays.byte_bounds(flat) for flat in self.flats if flat.size]

    def goes_on(self, buckets: Sequence[Bucket], communicator: Communicator) -> bool:
        """Whether another communicator, which has these buckets, can go on with it; if so, it does."""
        if [bucket.specs for bucket in buckets] != self._layout or communicator.device != self._device:
            return False
        self._label, self._arrays = communicator.label, arrays_of(communicator)
        return True

    def holds(self, key: Hashable, native: Array) -> bool:
        """Whether an array is the view that belongs to a gradient.

        Raises:
            InvalidArgument: it lies in the buckets' memory, but is not this view: values would be mixed.
        """
        own = self.views[key]
        if native is own:
            return True
        if not native.size:
            return False
        begin, end = self._arrays.byte_bounds(native)
        if not any(begin < high and low < end for low, high in self._bounds):
            return False
        if self._arrays.byte_bounds(own) == (begin, end) and native.flags.c_contiguous:
            return True
        raise InvalidArgument(
            f"{self._label}: the gradient of {self._names[key]} lies in the buckets' memory, but not in the part for "
            "this parameter: hand over the array that gradient_buffers() returned for this parameter, or a copy"
        )


# -- Hooks ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, slots=True)
class GradientBucket:
    """The argument of a hook: a bucket whose gradients stand one after the other in a flat buffer.

    Attributes:
        buffer: a 1-D array of this rank's values, on the communicator's device, which the hook replaces by the reduced
            values. It is valid until the hook returns.
        names: the names of the gradients, in the order of the buffer: a string as it is, anything else as its repr(),
            an array as its index, such as "#3".
        index: the bucket's number in its step, from 0.
        communicator: the communicator whose ranks reduce the bucket.
        op: what the hook computes: "sum" or "mean". In a step with unequal weights the values are weighted already, and
            `op` is "sum".
    """

    buffer: Array
    names: tuple[str, ...]
    index: int
    communicator: Communicator
    op: str


#: A hook leaves the reduced values in the bucket's buffer.
BucketHook = Callable[[GradientBucket], Any]


def run_hook(hook: BucketHook, bucket: Bucket, flats: Sequence[Array], communicator: Communicator, op: str) -> None:
    """Packs a bucket, has the hook reduce it, and splits it again; on a GPU all on the current stream."""
    arrays, buffer = arrays_of(communicator), flats[0]
    if len(flats) > 1:
        buffer = arrays.scratch(bucket.size_bytes // bucket.dtype.itemsize, buffer.dtype)
        array_module(buffer).concatenate(flats, out=buffer)
    names = tuple([spec.label for spec in bucket.specs])
    returned = hook(GradientBucket(buffer, names, bucket.number, communicator, op))
    if returned is not None and returned is not buffer:
        raise InvalidArgument(
            f"{communicator.label}: a hook must leave the reduced values in bucket.buffer, and return nothing, got "
            f"{type(returned).__name__}: write bucket.buffer[...] = ..."
        )
    if len(flats) > 1:
        begin = 0
        for flat in flats:
            arrays.assign(buffer[begin : begin + flat.size], flat)
            begin += flat.size
