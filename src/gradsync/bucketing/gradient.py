"""Handles one gradient before its bucket is reduced: checks its array, and decides where its result is written.

If two gradients of a step share memory to which a reduction writes, the reduction of one gradient would change the
other gradient. So OverlapCheck refuses the second gradient. The last part of this module reads the option `parameters`,
which lists the gradients before the first step.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gradsync.bucketing.options import Options
from gradsync.bucketing.plan import Bucket, GradientSpec
from gradsync.communicators.agreement import Agreement, Description, agreement_on, digest_of
from gradsync.communicators.backend import ResidentMemory
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.for_bucketing import make_resident_memory
from gradsync.communicators.host_arrays import ArrayKind, digest_of_values, overlaps_itself
from gradsync.communicators.host_copy import CACHE_LINE_BYTES
from gradsync.errors import InvalidArgument, UnsupportedDtype
from gradsync.reduction import OPERATIONS_BY_DTYPE, Array, ReduceOp, check_operation, dtype_name, dtype_of

_log = logging.getLogger("gradsync")

PLAIN_NAMES = (str, int)  # the types of nearly all names; such a name is its own key


class Destination(NamedTuple):
    """Where a gradient's values are read, and where the reduced values go.

    Attributes:
        source: a flat array of the values to reduce, on the communicator's device.
        target: a flat array for the reduced values, on the same device. If the results may overwrite the source, the
            target is the source itself.
        write_back: the native array into which the target is copied after the reduction; None if no copy is needed. A
            copy is needed if the native array is not C-contiguous, or is not on the communicator's device.
        result: the result of the gradient's future.
    """

    source: Array
    target: Array
    write_back: Array | None
    result: Any


@dataclass(slots=True, eq=False)  # not a tuple: Python reads a slot faster
class GradientEntry:
    """One gradient of a step: its array and its bucket. The next step may use the entry again; see `recurs`.

    Attributes:
        gradient: the array that was handed over.
        parameter: the parameter, kept alive so that no other object gets its id.
        shape, dtype, state: the array's shape and dtype, and a fingerprint of its other properties (see
            ArrayKind.state). The next step uses the entry again only if all three are unchanged. `state` is None unless
            `recurs`.
        bucket: the number of the gradient's bucket.
        name: the parameter's name, the same on all ranks.
        result: the result of the gradient's future.
        is_locked: whether the gradient is read-only while it is in flight.
        completes: the buckets that the gradient completes; see the class Assignment in plan.py.
        key: the key that identifies the parameter in this process.
        position: the gradient's index in the order of arrival. If the callback has the option `parameters`: the
            parameter's index in this option.
        native: the gradient as a native array (see ArrayKind). If the gradient is locked: a view that stays writeable.
            If the gradient was copied into its bucket: the view of the bucket.
        out: where the gradient's values are read, and where the reduced values go.
        recurs: whether the next step may use the entry again. This is so if the last step had the same array at this
            position, and the array is reduced in place.
        arrived_in: the number of the step in which the gradient arrived last.
    """

    # The fields that are compared when an array arrives again come first, side by side in memory.
    gradient: Any
    parameter: Any
    shape: tuple[int, ...]
    dtype: Any
    state: Any
    bucket: int
    name: str
    result: Any
    is_locked: bool
    completes: Sequence[Bucket] | None
    key: Hashable
    position: int
    native: Any
    out: Destination
    recurs: bool
    arrived_in: int = -1


def accept(name: str, grad: Any, communicator: Communicator, options: Options) -> Array:
    """Returns a gradient as a native array that can be reduced.

    Args:
        name: the gradient's name, for errors.
        grad: the gradient that was handed over.
        communicator: the communicator that reduces the gradient.
        options: the options of the callback.

    Raises:
        InvalidArgument, UnsupportedDtype: see AllreduceCallback.__call__.
    """
    who = f"the gradient of {name}"
    if grad is None:
        raise InvalidArgument(
            f"{communicator.label}: {who} is None: if a step does not use a parameter, hand over no gradient for it; "
            'AllreduceCallback(parameters=..., missing="zero") then uses zeros'
        )
    native: Array = communicator._native_array(grad, who)
    try:
        options.check_dtype(native.dtype)
    except UnsupportedDtype as error:
        advice = ""
        if options.op is ReduceOp.MEAN and ReduceOp.SUM in OPERATIONS_BY_DTYPE.get(dtype_name(native.dtype), ()):
            advice = '; convert it with astype("float32"), or use AllreduceCallback("sum") where a sum is meant'
        raise UnsupportedDtype(f"{communicator.label}: {who}: {error}{advice}") from None
    return native


def destination(grad: Any, native: Array, communicator: Communicator) -> Destination:
    """Decides where the reduced values go: into the gradient or, if it is read-only or overlaps itself, a new array."""
    arrays = communicator._arrays
    source = arrays.flat(native)
    if arrays.writeable(native) and not overlaps_itself(native):
        return Destination(source, source, None if arrays.is_viewed_flat(native) else native, grad)
    result = arrays.empty_like(native)
    if arrays.is_viewed_flat(result):
        return Destination(source, arrays.flat(result), None, result)
    return Destination(source, source, result, result)


def as_array(grad: Any) -> Any:
    """Returns a NumPy scalar, or a Python float or complex, as a new 0-d array; returns an array unchanged."""
    return np.asarray(grad) if isinstance(grad, (np.generic, float, complex)) else grad


def _is_array(param: Any) -> bool:
    return hasattr(param, "shape") and hasattr(param, "dtype") and not isinstance(param, np.generic)


def key_of(param: Any) -> Hashable:
    """Returns a hashable key that identifies a parameter in this process.

    Raises:
        InvalidArgument: the parameter is neither hashable nor an array.
    """
    if type(param) in PLAIN_NAMES:
        return param  # type: ignore[no-any-return]  # a str or an int
    if isinstance(param, np.generic):  # an element of an array of names: equal names are one parameter
        return key_of(param.item())
    if _is_array(param):
        return ("array", id(param))
    try:
        hash(param)
    except TypeError:
        raise InvalidArgument(f"a parameter must be a hashable name or an array, got {type(param).__name__}") from None
    return ("name", param)


def display_name(param: Any, position: int) -> str:
    """Returns a parameter's name for errors and Agreements. The name is the same on all ranks, so it has no address."""
    if type(param) in PLAIN_NAMES:
        return repr(param)
    if isinstance(param, np.generic):
        return display_name(param.item(), position)
    if isinstance(param, (str, int, bytes, type(None))):
        return repr(param)
    if isinstance(param, tuple) and all(isinstance(part, (str, int, bytes, type(None))) for part in param):
        return repr(param)
    return f"#{position}"


class _Claim(NamedTuple):
    """The memory addresses [begin, end) of one gradient; `order` is unique, so that sorting never compares arrays."""

    begin: int
    order: int
    end: int
    array: Array
    name: str


class OverlapCheck:
    """Refuses gradients of one step that share memory.

    The check keeps the gradients alive, so that no other array gets their memory.
    """

    def __init__(self) -> None:
        self._claims: list[_Claim] = []
        self._longest_bytes = 0
        self._ranges_overlap = False  # True only with interleaved views, or with read-only arrays

    def claim(self, array: Array, name: str, arrays: ArrayKind, who: str) -> None:
        """Records the memory of a gradient; raises if an earlier gradient of the step shares this memory.

        Args:
            array: the gradient as a native array; host and devices share one address space.
            name: the gradient's name, for the error.
            arrays: the communicator's functions for arrays.
            who: the beginning of the error text, which names this rank.

        Raises:
            InvalidArgument: the gradient shares memory with an earlier gradient, and the reduction writes to at least
                one of the two.
        """
        if not array.size:
            return
        begin, end = arrays.byte_bounds(array)
        claims = self._claims
        # If the known ranges do not overlap, only one earlier range can overlap the new range from below: the last
        # known range that begins before the new range.
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
                    f"{who}: the gradient of {name} shares memory with the gradient of {claim.name}, which was handed "
                    "over in the same step: their results would be mixed; hand over a copy"
                )
        insort(claims, _Claim(begin, len(claims), end, array, name))
        self._longest_bytes = max(self._longest_bytes, end - begin)

    def clear(self) -> None:
        """Forgets the gradients of the step."""
        self._claims.clear()
        self._longest_bytes = 0
        self._ranges_overlap = False


# -- Gradients that live in buckets ------------------------------------------------------------------------------------


class BucketMemory:
    """The memory of all buckets of a plan; each parameter has a view of it.

    The communicator allocates the memory: the backend `shm` in memory that the ranks share, NCCL on the GPU, the other
    backends in this rank's memory. A view keeps the memory alive: a program may read its views after the communicator
    is closed, but the ranks cannot reduce the memory any more.

    Every rank must construct it, for the same plan.

    Args:
        buckets: the buckets of the plan.
        communicator: the communicator that allocates the memory and reduces it.
        agreed: the function StepEvents.of_callback, which includes the callback in an Agreement.

    Attributes:
        memory: the memory of all buckets.
        views: the view of each gradient in this memory, by position.

    Raises:
        PlanMismatch: the ranks' plans differ.
        BackendUnavailable: there is not enough memory.
        RankFailed, CollectiveTimeout, CommunicatorClosed: see Communicator.all_reduce.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        communicator: Communicator,
        agreed: Callable[[Agreement], Agreement],
    ) -> None:
        self._ranges: dict[int, tuple[int, int]] = {}  # the bytes [begin, end) of each bucket in the memory
        end = 0
        for bucket in buckets:
            begin = -(-end // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
            end = begin + bucket.size_bytes
            self._ranges[bucket.number] = (begin, end)
        self._arrays = communicator._arrays
        self._label = communicator.label
        self.memory: ResidentMemory = make_resident_memory(
            communicator, max(end, 1), agreed(_agreement_on_memory(buckets))
        )
        self.views: list[Array] = [self.memory.bytes] * sum(len(bucket.slots) for bucket in buckets)
        self._names: list[str] = [""] * len(self.views)
        for bucket in buckets:
            flat = self.flat(bucket)
            for slot in bucket.slots:
                self.views[slot.position] = flat[slot.begin : slot.end].reshape(slot.spec.shape)
                self._names[slot.position] = slot.spec.name
        self._bounds = self._arrays.byte_bounds(self.memory.bytes)

    def flat(self, bucket: Bucket) -> Array:
        """Returns the gradients of a bucket as one 1-D array of the bucket's dtype."""
        begin, end = self._ranges[bucket.number]
        flat: Array = self.memory.bytes[begin:end].view(dtype_of(bucket.dtype))
        return flat

    def holds(self, position: int, native: Array) -> bool:
        """Whether an array is the view that belongs to the gradient at a position.

        Raises:
            InvalidArgument: the array lies in the buckets' memory, but is not this view. The reduction would mix the
                values of different gradients.
        """
        own = self.views[position]
        if native is own:
            return True
        if not native.size:
            return False
        begin, end = self._arrays.byte_bounds(native)
        if end <= self._bounds[0] or begin >= self._bounds[1]:
            return False
        if self._arrays.byte_bounds(own) == (begin, end) and native.flags.c_contiguous:
            return True
        raise InvalidArgument(
            f"{self._label}: the gradient of {self._names[position]} lies in the buckets' memory, but not in the part "
            "for this parameter: hand over the array that gradient_buffers() returned for this parameter, or a copy"
        )


def _agreement_on_memory(buckets: Sequence[Bucket]) -> Agreement:
    """Returns the Agreement that the ranks compare before they allocate the memory of the buckets."""
    specs = [bucket.specs for bucket in buckets]

    def describe() -> Description:
        lines = tuple([str(spec) for of_bucket in specs for spec in of_bucket])
        return Description(f"gradient_buffers of {len(lines)} gradients in {len(specs)} buckets", lines)

    return Agreement(digest_of("gradient_buffers", specs), describe)


# -- Parameters that are named beforehand ----------------------------------------------------------------------------

_COMPARISON = "the comparison of the parameters' values before the first step"
_AGREEMENT = agreement_on(_COMPARISON, (), None, "")


class KnownParameter(NamedTuple):
    """A parameter that `parameters=` names.

    Attributes:
        parameter: the name or array with which the program will hand over this parameter's gradients; kept alive, so
            that no other object gets its id.
        key: the key that identifies the parameter in this process.
        spec: the name, shape and dtype of the parameter's gradients.
    """

    parameter: Any
    key: Hashable
    spec: GradientSpec


def known_parameters(parameters: Any, op: ReduceOp, communicator: Communicator) -> list[KnownParameter]:
    """Returns the entries of the option `parameters`, in order.

    Args:
        parameters: the option: a mapping of names to arrays or to (shape, dtype), or a list of arrays.
        op: the operator of the reduction.
        communicator: the communicator that will reduce the gradients.

    Raises:
        InvalidArgument: `parameters` has a wrong type, names a parameter twice, or has an entry that is neither an
            array nor (shape, dtype).
        UnsupportedDtype: the operator is not defined for a dtype.
    """
    if hasattr(parameters, "dtype") or not isinstance(parameters, Iterable) or isinstance(parameters, (str, bytes)):
        raise InvalidArgument(
            f"{communicator.label}: AllreduceCallback needs parameters as a mapping of names to arrays, or to (shape, "
            f"dtype), or as a list of arrays, got {type(parameters).__name__}"
        )
    pairs = parameters.items() if isinstance(parameters, Mapping) else ((each, each) for each in parameters)
    known = [
        KnownParameter(param, key_of(param), _spec_of(param, array, position, op, communicator))
        for position, (param, array) in enumerate(pairs)
    ]
    if len({parameter.key for parameter in known}) < len(known):
        raise InvalidArgument(f"{communicator.label}: AllreduceCallback got the same parameter twice")
    return known


def _spec_of(param: Any, of: Any, position: int, op: ReduceOp, communicator: Communicator) -> GradientSpec:
    name = display_name(param, position)
    try:
        if isinstance(of, tuple):
            shape, dtype = tuple(map(int, of[0])), dtype_of(of[1]) if isinstance(of[1], str) else np.dtype(of[1])
            if len(of) != 2 or any(length < 0 for length in shape):
                raise ValueError("a shape has integers >= 0")
        else:
            native = communicator._native_array(of, f"AllreduceCallback, parameter {name}")
            shape, dtype = native.shape, native.dtype
    except (AttributeError, ImportError, IndexError, TypeError, ValueError) as error:
        raise InvalidArgument(
            f"{communicator.label}: AllreduceCallback needs an array or (shape, dtype), such as ((3,), 'float32'), for "
            f"parameter {name}, got {of!r}: {error}"
        ) from error
    check_operation(op, dtype)
    return GradientSpec(name, shape, dtype_name(dtype), dtype.itemsize)


def warn_of_unequal_values(
    known: Sequence[KnownParameter],
    parameters: Any,
    gradient: Any,
    communicator: Communicator,
    agreed: Callable[[Agreement], Agreement],
) -> None:
    """Logs a warning, on rank 0, if the parameters' values differ between ranks. Every rank must call it.

    The ranks compare the bytes of the values. The ranks skip the comparison if some rank passed only shapes and dtypes,
    a read-only array (the program may have replaced it), or an array that shares memory with the rank's first gradient.

    Args:
        known: the result of known_parameters().
        parameters: the option `parameters`, as the program passed it.
        gradient: the first gradient that was handed over, or None.
        communicator: the communicator whose ranks compare their values.
        agreed: the function StepEvents.of_callback, which includes the callback in an Agreement.

    Raises:
        PlanMismatch: another rank uses a different callback, or calls a different collective.
        RankFailed, CollectiveTimeout, CommunicatorClosed: the exchange between the ranks has failed.
    """
    by_name = isinstance(parameters, Mapping)
    given = {each.spec.name: parameters.get(each.parameter) if by_name else each.parameter for each in known}
    arrays = {name: array for name, array in given.items() if hasattr(array, "dtype")}
    digests: dict[str, str] = {}
    if not any(_shares_memory(array, gradient) for array in arrays.values()):
        natives = {name: communicator._native_array(array, f"parameter {name}") for name, array in arrays.items()}
        if all(communicator._arrays.writeable(native) for native in natives.values()):
            digests = {name: digest_of_values(communicator._arrays, native) for name, native in natives.items()}
    communicator._agree(agreed(_AGREEMENT))  # the ranks must not compare the parameters of different callbacks
    by_rank: list[dict[str, str]] = communicator.objects.all_gather_for(_COMPARISON, digests)
    different = [name for name in digests if len({digests_there.get(name) for digests_there in by_rank}) > 1]
    if communicator.rank or not different or not all(by_rank):
        return
    first = different[0]
    other = next(rank for rank, there in enumerate(by_rank) if there.get(first) != digests[first])
    _log.warning(
        f"{communicator.label}: the parameters differ between the ranks before the first step. The first parameter "
        f"that differs is {first}: rank {communicator.ranks[other]} has other values than rank "
        f"{communicator.ranks[0]}; {len(different)} of {len(digests)} arrays differ. Gradients are averaged, "
        "parameters are not: call gs.bcast_list_(arrays, root=0) with all parameters before the first step"
    )


def _shares_memory(array: Any, gradient: Any) -> bool:
    if array is gradient:
        return True
    return isinstance(array, np.ndarray) and isinstance(gradient, np.ndarray) and np.may_share_memory(array, gradient)
