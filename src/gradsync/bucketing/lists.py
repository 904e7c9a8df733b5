"""Lists of arrays: pack them into a flat array and split it again, broadcast them, or reduce them in one collective.

Arrays may be NumPy's or CuPy's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from gradsync.arguments import integer_of
from gradsync.bucketing.divergence import note_broadcast
from gradsync.communicators.agreement import Agreement, Description, array_text, digest_of
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.for_bucketing import arrays_of, broadcast_list
from gradsync.communicators.groups import NonMember
from gradsync.communicators.host_arrays import overlaps_itself
from gradsync.communicators.world import group_or_world
from gradsync.errors import InvalidArgument, name_ranks
from gradsync.reduction import Array, parse_reduce_method

Shape = Sequence[int]


def get_offsets(shapes: Sequence[Shape | None]) -> list[int]:
    """Returns where arrays begin and end in a flat array that holds them one after the other.

    Args:
        shapes: the shapes of the arrays, in order. A 0-d array, of shape (), is one element; None means (1,).

    Returns:
        The list [begin0, end0, begin1, end1, ...], in elements.

    Raises:
        InvalidArgument: an item is not a shape, or a dimension is negative or not an integer.
    """
    offsets: list[int] = []
    end = 0
    for shape in shapes:
        begin, end = end, end + prod(_checked_shape("get_offsets", shape))
        offsets += (begin, end)
    return offsets


def param_pack_concat(
    inputs: Sequence[Any], offsets: Any, offsets_val: Sequence[int] | None = None, *, out: Any = None
) -> Any:
    """Concatenates arrays of one dtype into one flat array.

    Args:
        inputs: arrays of any shape and layout, of one dtype and on one device; copied in C order.
        offsets: what get_offsets returns for their shapes.
        offsets_val: the same in host memory, where `offsets` is an array on a device, which is then not read.
        out: a 1-D contiguous array of this dtype with room for all elements; None makes a new one.

    Returns:
        A 1-D array of offsets[-1] elements: a new array, or the beginning of `out`.

    Raises:
        InvalidArgument: `inputs` is empty or has several dtypes, the offsets do not fit the inputs, or `out` has a
            wrong dtype, layout or size.
    """
    if not inputs:
        raise InvalidArgument("param_pack_concat needs at least one array, got none")
    bounds = [int(offset) for offset in (offsets if offsets_val is None else offsets_val)]
    dtype = inputs[0].dtype
    for array in inputs:
        if array.dtype != dtype:
            raise InvalidArgument(f"param_pack_concat needs one dtype, got {dtype} and {array.dtype}")
    _check_offsets("param_pack_concat", bounds, [array.size for array in inputs])
    xp = array_module(inputs[0])
    total = bounds[-1]
    if out is None:
        out = xp.empty(total, dtype)
    elif out.dtype != dtype or out.ndim != 1 or out.size < total or not out.flags.c_contiguous:
        raise InvalidArgument(
            f"param_pack_concat needs out= as a contiguous 1-D array of at least {total} elements of {dtype}, "
            f"got shape {out.shape} of {out.dtype}, strides {out.strides}"
        )
    flat = out[:total]
    xp.concatenate([array.reshape(-1) for array in inputs], out=flat)
    return flat


def param_pack_split(flat: Any, offsets: Any, shapes: Sequence[Shape | None]) -> list[Any]:
    """Splits a flat array into views of the given shapes: the inverse of param_pack_concat.

    Args:
        flat: the 1-D contiguous array to split.
        offsets: what get_offsets returns for the shapes.
        shapes: the shapes of the views, in order; None means (1,).

    Returns:
        One view into `flat` for each shape; writing to a view writes to `flat`.

    Raises:
        InvalidArgument: an item is not a shape, the offsets do not fit the shapes, or `flat` is too short or not 1-D
            and contiguous.
    """
    bounds = [int(offset) for offset in offsets]
    checked = [_checked_shape("param_pack_split", shape) for shape in shapes]
    _check_offsets("param_pack_split", bounds, [prod(shape) for shape in checked])
    if flat.ndim != 1 or not flat.flags.c_contiguous or (bounds and flat.size < bounds[-1]):
        raise InvalidArgument(
            f"param_pack_split needs a contiguous 1-D array of at least {bounds[-1] if bounds else 0} elements, "
            f"got shape {flat.shape}, strides {flat.strides}"
        )
    return [
        flat[begin:end].reshape(shape) for begin, end, shape in zip(bounds[::2], bounds[1::2], checked, strict=True)
    ]


def _checked_shape(who: str, shape: Shape | None) -> tuple[int, ...]:
    if shape is None:
        return (1,)
    try:
        lengths = [integer_of(length) for length in shape]
    except TypeError:
        lengths = [None]
    checked = tuple([length for length in lengths if length is not None and length >= 0])
    if len(checked) < len(lengths):
        raise InvalidArgument(f"{who} needs shapes of integers >= 0, got {shape!r}")
    return checked


def _check_offsets(who: str, bounds: Sequence[int], sizes: Sequence[int]) -> None:
    ends = list(accumulate(sizes))
    expected = [bound for pair in zip([0, *ends], ends, strict=False) for bound in pair]
    if list(bounds) != expected:
        raise InvalidArgument(f"{who} needs the offsets {expected}, as get_offsets returns them, got {list(bounds)}")


def array_module(array: Any) -> Any:
    """Returns cupy for an array of CuPy's, else numpy."""
    namespace = type(array).__module__.partition(".")[0]
    if namespace == "cupy":
        import cupy

        return cupy
    return np


def bcast_list_(
    arrays: Sequence[Any],
    root: int = 0,
    communicator: Communicator | None = None,
    *,
    group: Communicator | None = None,
) -> None:
    """Copies the root's arrays into those of all other ranks, in place: a model's parameters before the first step.

    Every rank must call it with arrays of the same shapes and dtypes in the same order.

    Args:
        arrays: arrays of any shape, layout and dtype on the communicator's device; writable, except on the root.
        root: the rank whose values all ranks get.
        communicator: the communicator of the ranks; None means the world communicator.
        group: another name for `communicator`.

    Raises:
        InvalidArgument: the root is outside the communicator; `arrays` is not a list of arrays; on a rank other than
            the root, an array is read-only, or its elements share memory (all ranks raise this); or both `communicator`
            and `group` are passed. Nothing was sent.
        UnsupportedDtype: the elements of an array are Python objects.
        PlanMismatch: the ranks' lists differ in length, shapes, dtypes or root. Nothing was sent.
        RankFailed, CollectiveTimeout, CommunicatorClosed: the collective has failed.
    """
    if group is not None:
        if communicator is not None:
            raise InvalidArgument("bcast_list_ got communicator= and group=, two names for one parameter: pass one")
        communicator = group_or_world(group, "bcast_list_")
    communicator, root = communicator_and_root("bcast_list_", communicator, root)
    if isinstance(arrays, Mapping) or hasattr(arrays, "dtype"):
        kind = "a mapping: pass list(parameters.values())" if isinstance(arrays, Mapping) else "one array: pass [array]"
        raise InvalidArgument(f"{communicator.label}: bcast_list_ needs a list of arrays, got {kind}")
    named = [
        (f"array {i}", communicator.native_array(array, f"bcast_list_, array {i}")) for i, array in enumerate(arrays)
    ]
    broadcast_named("bcast_list_", named, root, communicator)


def pack_allreduce_split(
    pack_list: Sequence[Any],
    shapes: Sequence[Shape],
    group: Communicator | None = None,
    reduce_method: str = "mean",
) -> list[Any]:
    """Packs arrays of one dtype, reduces them in one collective, and splits the result. The arrays do not change.

    Every rank must call it with the same shapes, dtype and method.

    Args:
        pack_list: arrays of one dtype on the communicator's device.
        shapes: the shapes of the results, each of as many elements as the array of the same index.
        group: the communicator; None means the world communicator.
        reduce_method: "sum" or "mean", in upper or lower case.

    Returns:
        One array for each shape: views of one new flat array.

    Raises:
        InvalidArgument: `pack_list` is empty or has several dtypes, the shapes do not fit, or the method is unknown.
        UnsupportedDtype, PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: the all-reduce has failed.
    """
    communicator = group_or_world(group, "pack_allreduce_split")
    op = parse_reduce_method(reduce_method, "reduce_method")
    natives = [communicator.native_array(array, "pack_allreduce_split") for array in pack_list]
    offsets = get_offsets(shapes)
    if offsets != get_offsets([native.shape for native in natives]):
        raise InvalidArgument(
            f"{communicator.label}: pack_allreduce_split needs shapes with as many elements as the arrays: the arrays "
            f"have shapes {[native.shape for native in natives]}, got {list(shapes)}"
        )
    flat = param_pack_concat(natives, offsets)
    communicator.all_reduce(flat, op)
    return param_pack_split(flat, offsets, shapes)


def communicator_and_root(what: str, communicator: Communicator | None, root: int) -> tuple[Communicator, int]:
    """Returns the communicator, and `root` as an int, which must be a rank of it."""
    if isinstance(root, (Communicator, NonMember)):
        raise InvalidArgument(
            f"{what} got a communicator ({root!r}) as the root's number: pass it by name, communicator=..."
        )
    communicator = group_or_world(communicator, what, "communicator")
    number = integer_of(root)
    if number is None or not 0 <= number < communicator.world_size:
        within = "" if communicator.ranks == tuple(range(communicator.world_size)) else ", numbered within the group"
        raise InvalidArgument(
            f"{communicator.label}: {what}: root must be 0 to {communicator.world_size - 1}{within}, got {root!r}"
        )
    return communicator, number


def broadcast_named(
    what: str, named: Sequence[tuple[str, Array]], root: int, communicator: Communicator, *, at_once: bool = False
) -> None:
    """Broadcasts arrays, once the ranks agree on their names, shapes and dtypes, and all can be written to.

    `at_once`: see broadcast_list.

    Raises:
        InvalidArgument: a rank cannot write into one of its arrays. All ranks raise it.
    """
    lines = tuple([f"{name}: {array_text(native.dtype, native.shape)}" for name, native in named])
    described = Description(f"{what} of {len(lines)} arrays from root {root}", lines)
    agreement = Agreement(digest_of(what, root, lines), lambda: described)
    arrays, refused = arrays_of(communicator), len(named)
    if communicator.rank != root:
        writable = [arrays.writeable(native) and not overlaps_itself(native) for _, native in named]
        refused = writable.index(False) if False in writable else refused
    by_rank = [number for [number] in communicator.share_numbers(what, [refused], agreement)]
    if (first := min(by_rank)) < len(named):
        ranks = [rank for rank, number in zip(communicator.ranks, by_rank, strict=True) if number == first]
        raise InvalidArgument(
            f"{communicator.label}: {what} writes into the given arrays, but {named[first][0]} is read-only or "
            f"overlaps itself on {name_ranks(ranks)}: pass a copy; nothing was written"
        )
    natives = [native for _, native in named]
    broadcast_list(communicator, natives, root, agreement, at_once=at_once)
    note_broadcast(communicator, natives)
