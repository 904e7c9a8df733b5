"""One gradient: its name, which is the same on all ranks; its array, which is checked; and the option `parameters`."""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from gradsync.bucketing.bucket import GradientSpec
from gradsync.bucketing.options import Options
from gradsync.communicators.agreement import array_text
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.for_bucketing import arrays_of
from gradsync.communicators.host_arrays import ArrayKind
from gradsync.errors import InvalidArgument, UnsupportedDtype, shown
from gradsync.reduction import Array, ReduceOp, dtype_name, dtype_of

PLAIN_NAMES = (str, int)  # the types of nearly all names; such a name is its own key
_ARRAY = object()  # in the keys of arrays
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]{5,}")


class Known(NamedTuple):
    """A parameter whose gradients have been checked.

    Attributes:
        shape, dtype: of its gradients.
        name: the same on all ranks.
        param: the name or array with which the program hands them over; kept alive, so that no other gets its id.
        called: what the program reads of it: `param`, or of an array its name.
        spec: what the ranks agree on.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    name: str
    param: Any
    called: Any
    spec: GradientSpec


def known(param: Any, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Known:
    called = name if is_array(param) else param
    return Known(shape, dtype, name, param, called, GradientSpec(name, shape, dtype_name(dtype), dtype.itemsize))


# -- Names ------------------------------------------------------------------------------------------------------------


def is_array(param: Any) -> bool:
    """Whether a parameter is an array, which is its own name."""
    return hasattr(param, "shape") and hasattr(param, "dtype") and not isinstance(param, np.generic)


def key_of(param: Any) -> Hashable:
    """Returns a parameter's key in this process, which is hashable.

    Raises:
        InvalidArgument: the parameter is neither hashable nor an array.
    """
    if type(param) in PLAIN_NAMES:
        return param  # type: ignore[no-any-return]  # a str or an int
    if isinstance(param, np.generic):  # an element of an array of names: equal names are one parameter
        return key_of(param.item())
    if is_array(param):
        return (_ARRAY, id(param))
    try:
        hash(param)
    except TypeError:
        raise InvalidArgument(f"a parameter must be a hashable name or an array, got {type(param).__name__}") from None
    return param  # type: ignore[no-any-return]  # it is hashable


def name_of(param: Any, communicator: Communicator) -> str:
    """Returns a parameter's name: the same text on all ranks, in all runs.

    Raises:
        InvalidArgument: the name shows an address, which differs between ranks.
    """
    if is_array(param):
        return name_of_array(param, communicator)
    if isinstance(param, np.generic):
        return name_of(param.item(), communicator)
    name = repr(param)
    is_id = isinstance(param, int) and 2**40 < param < 2**48 and param % 16 == 0
    if is_id or _ADDRESS.search(name):
        what = "looks like an id()" if is_id else "shows an address"
        raise InvalidArgument(
            f"{communicator.label}: the name {shown(param)} {what}, which differs between ranks: name gradients by "
            "text, numbers or tuples of these, or give the name's class a __repr__ that is the same on all ranks"
        )
    return name


def name_of_array(param: Any, communicator: Communicator) -> str:
    """Returns the name of a parameter that is an array: its shape, dtype and bytes at its first use."""
    native = communicator.native_array(param, "an array as a gradient's name")
    digest = arrays_of(communicator).digest(native)
    return f"array of {array_text(dtype_name(native.dtype), native.shape)} with digest {digest:016x}"


# -- Arrays -----------------------------------------------------------------------------------------------------------


def as_array(grad: Any) -> Any:
    """Returns a number, NumPy's or Python's float or complex, as a new 0-d array; an array as it is."""
    return np.asarray(grad) if isinstance(grad, (np.generic, float, complex)) else grad


def accept(name: str, grad: Any, communicator: Communicator, options: Options) -> Array:
    """Returns a gradient as a native array that can be reduced.

    Args:
        name: its name in errors.
        grad: what was handed over.
        communicator: whose ranks reduce it.
        options: the callback's.

    Raises:
        InvalidArgument, UnsupportedDtype: see AllreduceCallback.__call__.
    """
    who = f"the gradient of {name}"
    if grad is None:
        raise InvalidArgument(
            f"{communicator.label}: {who} is None: if a step does not use a parameter, hand over no gradient for it; "
            'AllreduceCallback(parameters=..., missing="zero") then uses zeros'
        )
    if isinstance(grad, str):
        raise InvalidArgument(f"{communicator.label}: {who} is text, {shown(grad)}: pass the name first")
    native: Array = communicator.native_array(grad, who)
    if isinstance(native, np.ndarray) and not native.flags.writeable and not hasattr(grad, "__array__"):
        raise InvalidArgument(
            f"{communicator.label}: {who} is read-only to NumPy, because the DLPack of {type(grad).__name__} does not "
            "say that it can be written to, so the result would not be in it: hand over a NumPy view or a copy of it"
        )
    try:
        options.check_dtype(native.dtype, arrays_of(communicator))
    except UnsupportedDtype as error:
        text, integers = str(error), native.dtype.isnative and native.dtype.kind in "iu"
        if options.op is ReduceOp.MEAN and integers:
            text = f'{native.dtype} has no mean: convert it with astype("float32"), or take "sum" where that is meant'
        elif native.dtype == bool:
            text = 'bool has neither sum nor mean: convert it with astype("float32")'
        raise UnsupportedDtype(f"{communicator.label}: {who}: {text}") from None
    return native


class _Claim(NamedTuple):
    """The addresses [begin, end) of one gradient; `order` is unique, so that sorting never compares arrays."""

    begin: int
    order: int
    end: int
    array: Array
    name: str


class OverlapCheck:
    """Refuses gradients of a step that share memory. It keeps them alive, so that no other array gets their memory."""

    def __init__(self) -> None:
        self._claims: list[_Claim] = []
        self._longest_bytes = 0
        self._ranges_overlap = False  # True only with interleaved views, or with read-only arrays

    def claim(self, array: Array, name: str, arrays: ArrayKind, who: str) -> None:
        """Takes the memory of a gradient, which no earlier gradient of the step may share.

        Args:
            array: the gradient as a native array; host and devices share one address space.
            name: its name in errors.
            arrays: the communicator's functions for arrays.
            who: the beginning of errors, which names this rank.

        Raises:
            InvalidArgument: an earlier gradient shares it, and the reduction writes to at least one of the two.
        """
        if not array.size:
            return
        begin, end = arrays.byte_bounds(array)
        claims = self._claims
        # If no known ranges overlap, only the last one that begins before the new one can overlap it from below.
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


# -- Parameters that are named beforehand -----------------------------------------------------------------------------


def known_parameters(parameters: Any, op: ReduceOp, communicator: Communicator) -> dict[Hashable, Known]:
    """Returns the entries of the option `parameters`, by key, in order.

    Args:
        parameters: a mapping of names to arrays or to (shape, dtype), or a list of arrays.
        op: the operator of the reduction.
        communicator: whose ranks reduce the gradients.

    Raises:
        InvalidArgument: it is something else, or names a parameter twice.
        UnsupportedDtype: the operator is not defined for a dtype.
    """
    if hasattr(parameters, "dtype") or not isinstance(parameters, Iterable) or isinstance(parameters, (str, bytes)):
        raise InvalidArgument(
            f"{communicator.label}: AllreduceCallback needs parameters as a mapping of names to arrays, or to (shape, "
            f"dtype), or as a list of arrays, got {type(parameters).__name__}"
        )
    pairs = parameters.items() if isinstance(parameters, Mapping) else ((each, each) for each in parameters)
    found: dict[Hashable, Known] = {}
    names: set[str] = set()
    for position, (param, array) in enumerate(pairs):
        key = key_of(param)
        if key in found:
            raise InvalidArgument(f"{communicator.label}: AllreduceCallback got the same parameter twice")
        found[key] = its = _known_of(param, array, position, op, communicator)
        if its.name in names:
            raise InvalidArgument(f"{communicator.label}: two parameters have the name {its.name}: give each its own")
        names.add(its.name)
    if not found:
        raise InvalidArgument(
            f"{communicator.label}: parameters= names no parameter: name at least one, or leave the option out"
        )
    return found


def _known_of(param: Any, of: Any, position: int, op: ReduceOp, communicator: Communicator) -> Known:
    name = f"#{position}" if is_array(param) else name_of(param, communicator)
    try:
        if isinstance(of, tuple):
            shape, dtype = tuple(map(int, of[0])), dtype_of(of[1]) if isinstance(of[1], str) else np.dtype(of[1])
            if len(of) != 2 or any(length < 0 for length in shape):
                raise ValueError("a shape has integers >= 0")
        else:
            native = communicator.native_array(of, f"AllreduceCallback, parameter {name}")
            shape, dtype = native.shape, native.dtype
    except (AttributeError, ImportError, IndexError, TypeError, ValueError) as error:
        raise InvalidArgument(
            f"{communicator.label}: AllreduceCallback needs an array or (shape, dtype), such as ((3,), 'float32'), for "
            f"parameter {name}, got {of!r}: {error}"
        ) from error
    arrays_of(communicator).check_operation(op, np.dtype(dtype))
    return known(param, name, shape, np.dtype(dtype))
