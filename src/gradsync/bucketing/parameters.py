"""Collectives on whole lists of arrays: parameters at start-up, and a pack reduced in one go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradsync.bucketing.array_lists import broadcast_named, check_writable, communicator_and_root
from gradsync.bucketing.flat_buffer import Shape, get_offsets, param_pack_concat, param_pack_split
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.world import group_or_world
from gradsync.errors import InvalidArgument
from gradsync.reduction import parse_reduce_method


def bcast_list_(
    arrays: Sequence[Any],
    root: int = 0,
    communicator: Communicator | None = None,
    *,
    group: Communicator | None = None,
) -> None:
    """Copies the root's arrays into every other rank's, in place, as one collective.

    Every rank must call it with arrays of the same shapes and dtypes in the same order.

    Args:
        arrays: arrays of any shape, layout and dtype on the communicator's device; writable except on the root.
        root: the rank whose values all ranks get.
        communicator: None is the world's.
        group: another name for `communicator`.

    Raises:
        InvalidArgument: a root outside the communicator, not an array, or a read-only one; nothing was sent.
        PlanMismatch: the ranks' lists differ in length, shapes, dtypes or root; nothing was sent.
        RankFailed, CollectiveTimeout, CommunicatorClosed: from the collective.
    """
    if group is not None:
        if communicator is not None:
            raise InvalidArgument("bcast_list_ got communicator= and group=, two names for one thing: pass one")
        communicator = group_or_world(group, "bcast_list_")
    communicator, root = communicator_and_root("bcast_list_", communicator, root)
    if isinstance(arrays, Mapping) or hasattr(arrays, "dtype"):
        kind = "a mapping: pass list(parameters.values())" if isinstance(arrays, Mapping) else "one array: pass [array]"
        raise InvalidArgument(f"{communicator.label}: bcast_list_ needs a list of arrays, got {kind}")
    named = [
        (f"array {i}", communicator.native_array(array, f"bcast_list_, array {i}")) for i, array in enumerate(arrays)
    ]
    if communicator.rank != root:
        check_writable("bcast_list_", named, communicator)
    broadcast_named("bcast_list_", named, root, communicator)


def pack_allreduce_split(
    pack_list: Sequence[Any],
    shapes: Sequence[Shape],
    group: Communicator | None = None,
    reduce_method: str = "mean",
) -> list[Any]:
    """Packs arrays of one dtype, reduces them in one collective, and splits the result.

    Every rank must call it with the same shapes, dtype and method. The inputs are left as they are.

    Args:
        pack_list: arrays of one dtype on the communicator's device.
        shapes: the shapes that the results shall have; as many elements as the inputs.
        group: the communicator; None is the world's.
        reduce_method: "sum" or "mean", in any case.

    Returns:
        One array for each shape: views of one new flat array.

    Raises:
        InvalidArgument: no arrays, mixed dtypes, shapes that do not fit, or an unknown method.
        UnsupportedDtype, PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: from the all-reduce.
    """
    communicator = group_or_world(group, "pack_allreduce_split")
    op = parse_reduce_method(reduce_method)
    natives = [communicator.native_array(array, "pack_allreduce_split") for array in pack_list]
    offsets = get_offsets(shapes)
    if offsets != get_offsets([native.shape for native in natives]):
        raise InvalidArgument(
            f"{communicator.label}: pack_allreduce_split needs shapes with as many elements as the arrays: the arrays "
            f"have shapes {[native.shape for native in natives]}, got {[tuple(shape) for shape in shapes]}"
        )
    flat = param_pack_concat(natives, offsets)
    communicator.all_reduce(flat, op)
    return param_pack_split(flat, offsets, shapes)
