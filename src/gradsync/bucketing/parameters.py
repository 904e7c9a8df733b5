"""Collectives on whole lists of arrays: parameters at start-up, and a pack reduced in one go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradsync.bucketing.flat_buffer import (
    FlatBuffer,
    Shape,
    array_module,
    get_offsets,
    param_pack_concat,
    param_pack_split,
)
from gradsync.bucketing.plan import GradientSpec, plan_buckets
from gradsync.communicators.agreement import Agreement, digest_of
from gradsync.communicators.base import Communicator
from gradsync.communicators.host_arrays import overlaps_itself
from gradsync.communicators.world import group_or_world
from gradsync.errors import InvalidArgument
from gradsync.reduction import Array, parse_reduce_method

# Large enough to amortise a collective, small enough to stay a passing allocation.
_BROADCAST_BUFFER_BYTES = 32 * 1024**2


def bcast_list_(arrays: Sequence[Any], root: int = 0, communicator: Communicator | None = None) -> None:
    """Copies the root's arrays into every other rank's, in place, packed into few collectives.

    Every rank must call it with arrays of the same shapes and dtypes in the same order.

    Args:
        arrays: arrays of any shape, layout and dtype on the communicator's device; writable except on the root.
        root: the rank whose values all ranks get.
        communicator: None is the world's.

    Raises:
        InvalidArgument: a root outside the communicator, not an array, or a read-only one; nothing was sent.
        PlanMismatch: the ranks' lists differ in length, shapes, dtypes or root; nothing was sent.
        RankFailed, CollectiveTimeout, CommunicatorClosed: from the collectives.
    """
    communicator = group_or_world(communicator)
    if not isinstance(root, int) or not 0 <= root < communicator.world_size:
        raise InvalidArgument(f"{communicator.label}: root must be 0 to {communicator.world_size - 1}, got {root!r}")
    if isinstance(arrays, Mapping) or hasattr(arrays, "dtype"):
        kind = "a mapping: pass list(parameters.values())" if isinstance(arrays, Mapping) else "one array: pass [array]"
        raise InvalidArgument(f"{communicator.label}: bcast_list_ needs a list of arrays, got {kind}")
    natives = [communicator.native_array(array, f"bcast_list_, array {i}") for i, array in enumerate(arrays)]
    if communicator.rank != root:
        for index, native in enumerate(natives):
            writeable = communicator.arrays.writeable(native)
            if not writeable or overlaps_itself(native):
                kind = "overlaps itself" if writeable else "is read-only"
                raise InvalidArgument(f"{communicator.label}: bcast_list_ writes in place; array {index} {kind}")
    specs = [GradientSpec(f"#{i}", a.shape, str(a.dtype), a.dtype.itemsize) for i, a in enumerate(natives)]
    communicator.agree(Agreement(digest_of("bcast_list_", root, specs), lambda: _describe(specs, root)))
    buffers: dict[Any, FlatBuffer] = {}  # by array module
    for bucket in plan_buckets(specs, _BROADCAST_BUFFER_BYTES):
        _broadcast_bucket([natives[slot.position] for slot in bucket.slots], root, communicator, buffers)


def _describe(specs: Sequence[GradientSpec], root: int) -> str:
    lines = [f"{spec.name}: {spec.dtype}{list(spec.shape)}" for spec in specs]
    return "\n".join([f"bcast_list_ of {len(specs)} arrays from root {root}", *lines])


def _broadcast_bucket(
    natives: Sequence[Array], root: int, communicator: Communicator, buffers: dict[Any, FlatBuffer]
) -> None:
    if len(natives) == 1:
        communicator.broadcast(natives[0], root)
        return
    arrays = communicator.arrays
    flats = [arrays.flat(native) for native in natives]
    module = array_module(flats[0])
    buffer = buffers.setdefault(module, FlatBuffer(module))
    packed = buffer.pack(flats)
    communicator.broadcast(packed, root)
    if communicator.rank == root:
        return
    buffer.split(packed, flats)
    for native, flat in zip(natives, flats, strict=True):
        arrays.write_back(flat, native)


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
    communicator = group_or_world(group)
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
