"""Collectives on whole lists and trees of arrays: parameters at start-up, and a pack reduced in one go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from gradsync.bucketing.flat_buffer import Shape, get_offsets, param_pack_concat, param_pack_split
from gradsync.bucketing.trees import Difference, arrays_along, layout_of, rebuilt
from gradsync.communicators.agreement import Agreement, digest_of
from gradsync.communicators.base import Communicator
from gradsync.communicators.host_arrays import overlaps_itself
from gradsync.communicators.world import group_or_world
from gradsync.errors import InvalidArgument, PlanMismatch
from gradsync.reduction import Array, parse_reduce_method

Tree = TypeVar("Tree")


def bcast_list_(arrays: Sequence[Any], root: int = 0, communicator: Communicator | None = None) -> None:
    """Copies the root's arrays into every other rank's, in place, as one collective.

    Every rank must call it with arrays of the same shapes and dtypes in the same order.

    Args:
        arrays: arrays of any shape, layout and dtype on the communicator's device; writable except on the root.
        root: the rank whose values all ranks get.
        communicator: None is the world's.

    Raises:
        InvalidArgument: a root outside the communicator, not an array, or a read-only one; nothing was sent.
        PlanMismatch: the ranks' lists differ in length, shapes, dtypes or root; nothing was sent.
        RankFailed, CollectiveTimeout, CommunicatorClosed: from the collective.
    """
    communicator = group_or_world(communicator)
    if isinstance(arrays, Mapping) or hasattr(arrays, "dtype"):
        kind = "a mapping: pass list(parameters.values())" if isinstance(arrays, Mapping) else "one array: pass [array]"
        raise InvalidArgument(f"{communicator.label}: bcast_list_ needs a list of arrays, got {kind}")
    communicator._check_root(root)
    named = [
        (f"array {i}", communicator.native_array(array, f"bcast_list_, array {i}")) for i, array in enumerate(arrays)
    ]
    if communicator.rank != root:
        _check_writable("bcast_list_", named, communicator)
    _broadcast("bcast_list_", named, root, communicator)


def broadcast_tree(tree: Tree, root: int = 0, communicator: Communicator | None = None) -> Tree:
    """Brings the root's parameters, buffers and optimiser state to all ranks, in one call.

    Every rank must call it with a tree of the same structure: dicts of the same keys in any order, lists, tuples,
    namedtuples and dataclasses, nested, with arrays of the same shapes and dtypes at the same places. Arrays are copied
    in place. All else (step counters, learning rates, strings, NumPy scalars, None, objects of any class) comes from
    the root by pickle, in which the ranks trust each other.

    Args:
        tree: the containers are left as they are.
        root: the rank whose values all ranks get.
        communicator: None is the world's.

    Returns:
        A tree of the same structure with the root's values, its dicts in the root's order; the arrays are the caller's
        own. Of a dataclass, a copy.

    Raises:
        InvalidArgument: a root outside the communicator, an array that is read-only off the root, or a value that does
            not pickle; no array was written to.
        PlanMismatch: the ranks' trees differ; the text names the first path where they do. No array was written to.
        RankFailed, CollectiveTimeout, CommunicatorClosed: from the collectives.
    """
    communicator = group_or_world(communicator)
    communicator._check_root(root)

    def native(array: Any, path: str) -> Array:
        return communicator.native_array(array, f"broadcast_tree, {path or 'the tree'}")

    mine = layout_of(tree, native)
    if communicator.rank != root:
        _check_writable("broadcast_tree", list(arrays_along(mine, tree, native)), communicator)
    layout = communicator.objects.broadcast(mine, root, what="broadcast_tree")
    named: list[tuple[str, Array]] = []
    difference = None
    try:
        named += arrays_along(layout, tree, native)
    except Difference as found:
        difference = str(found)
    _raise_differences(communicator.objects.all_gather(difference, what="broadcast_tree"), root, communicator)
    _broadcast("broadcast_tree", named, root, communicator)
    whole: Tree = rebuilt(layout, tree)
    return whole


def _check_writable(what: str, named: Sequence[tuple[str, Array]], communicator: Communicator) -> None:
    for name, native in named:
        writeable = communicator.arrays.writeable(native)
        if not writeable or overlaps_itself(native):
            kind = "overlaps itself" if writeable else "is read-only"
            raise InvalidArgument(f"{communicator.label}: {what} writes in place; {name or 'the tree'} {kind}")


def _raise_differences(by_rank: Sequence[str | None], root: int, communicator: Communicator) -> None:
    """Raises, on every rank, how the trees differ from the root's."""
    differences = {rank: text for rank, text in zip(communicator.ranks, by_rank, strict=True) if text is not None}
    if differences:
        lines = "".join(f"\n  rank {rank}: {text}" for rank, text in differences.items())
        raise PlanMismatch(
            f"{communicator.label}: broadcast_tree needs the same tree on all ranks; no array was written to. First "
            f"differences, that of rank {communicator.ranks[root]}, the root, against theirs:{lines}",
            descriptions=differences,
        )


def _broadcast(what: str, named: Sequence[tuple[str, Array]], root: int, communicator: Communicator) -> None:
    """Broadcasts arrays once the ranks have agreed on their names, shapes and dtypes."""
    lines = [f"{name}: {native.dtype}{list(native.shape)}" for name, native in named]

    def describe() -> str:
        return "\n".join([f"{what} of {len(lines)} arrays from root {root}", *lines])

    communicator.broadcast_list(
        [native for _, native in named], root, Agreement(digest_of(what, root, lines), describe)
    )


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
