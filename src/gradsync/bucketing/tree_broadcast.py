"""A training's whole state from one rank to all: arrays in place, the rest in the tree that is returned.

The root's layout goes to all. Each rank compares its own tree with it, and makes the tree that it will return, before
any array is written to; then all tell whether they can go on.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from gradsync.bucketing.lists import broadcast_named, check_writable, communicator_and_root
from gradsync.bucketing.trees import Difference, Layout, ToNative, Unfit, arrays_along, layout_of, rebuilt
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.host_arrays import ArrayKind
from gradsync.errors import InvalidArgument, PlanMismatch, describe
from gradsync.reduction import Array

Tree = TypeVar("Tree")


def broadcast_tree(tree: Tree, root: int = 0, communicator: Communicator | None = None) -> Tree:
    """Brings the root's parameters, buffers and optimiser state to all ranks: `state = gs.broadcast_tree(state)`.

    Every rank must call it with a tree of the same structure: dicts of the same keys in any order, lists, tuples,
    namedtuples and dataclasses, nested, with arrays of the same shapes and dtypes at the same places. Arrays are copied
    in place. All else (step counters, learning rates, strings, NumPy scalars, None, objects of any class) comes from
    the root by pickle, in which the ranks trust each other: it is in the tree that is returned, and only there.

    Args:
        tree: the containers are left as they are.
        root: the rank whose values all ranks get.
        communicator: None is the world's.

    Returns:
        A tree of the same structure with the root's values, its dicts in the root's order; the arrays are the caller's
        own. Of a dataclass, a copy.

    Raises:
        InvalidArgument: a root outside the communicator, an array that is read-only off the root, a container that is
            in itself or cannot be made anew, or a value that does not pickle; no array was written to.
        PlanMismatch: the ranks' trees differ, or what the root sent does not unpickle on all of them; the text names
            the first path where they do. No array was written to.
        RankFailed, CollectiveTimeout, CommunicatorClosed: from the collectives.
    """
    communicator, root = communicator_and_root("broadcast_tree", communicator, root)

    def native(array: Any, path: str) -> Array:
        return communicator.native_array(array, f"broadcast_tree, {path or 'the tree'}")

    named, plan = _taken_apart(tree, native, communicator)
    if communicator.rank != root:
        check_writable("broadcast_tree", named, communicator)
    theirs = _from_root(plan, root, communicator)
    whole, difference = tree, None
    try:
        if isinstance(theirs, str):
            raise Difference(theirs)
        named = list(arrays_along(theirs.layout, tree, native))
        _check_shared_memory(named, theirs.shared, communicator.arrays)
        whole = rebuilt(theirs.layout, tree)
    except Difference as found:
        difference = str(found)
    except Exception as error:  # from classes of the caller's: the others wait to hear of it
        difference = f"the root's values do not fit here: {describe(error)}"
    _raise_differences(communicator.objects.all_gather_for("broadcast_tree", difference), root, communicator)
    broadcast_named("broadcast_tree", named, root, communicator)
    return whole


class _Place(NamedTuple):
    """How an array lies to an earlier one of the tree with which it shares memory."""

    offset_bytes: int
    strides: tuple[tuple[int, ...], ...]  # of both; empty where they are the same


class _Plan(NamedTuple):
    """What the root tells of its tree: everything but the arrays' values.

    Attributes:
        layout: see trees.py.
        shared: how arrays lie that share memory; by their numbers in the tree's order, the lower one first.
    """

    layout: Layout
    shared: dict[tuple[int, int], _Place]


def _taken_apart(tree: Any, native: ToNative, communicator: Communicator) -> tuple[list[tuple[str, Array]], _Plan]:
    """Returns the arrays of this rank's tree by their paths, and what it would tell as the root."""
    try:
        layout = layout_of(tree, native)
        named = list(arrays_along(layout, tree, native))
    except Unfit as error:
        raise InvalidArgument(f"{communicator.label}: broadcast_tree: {error}") from error
    except RecursionError as error:
        raise InvalidArgument(f"{communicator.label}: broadcast_tree: the tree is nested too deep") from error
    return named, _Plan(layout, _shared_memory(named, communicator.arrays))


def _from_root(plan: _Plan, root: int, communicator: Communicator) -> _Plan | str:
    """Returns the root's plan, or why this rank cannot read it.

    It is read here, and not in the broadcast of an object: who cannot read it must not leave the others alone.
    """
    data = refusal = None
    if communicator.rank == root:
        try:
            data = pickle.dumps(plan, pickle.HIGHEST_PROTOCOL)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too: the others wait for this rank
            refusal = describe(error)
    data, refusal = communicator.objects.broadcast_for("broadcast_tree", (data, refusal), root)
    if data is None:
        raise InvalidArgument(
            f"{communicator.label}: broadcast_tree moved nothing: the tree of rank {communicator.ranks[root]}, the "
            f"root, does not pickle: {refusal}"
        )
    if communicator.rank == root:
        return plan
    try:
        theirs: _Plan = pickle.loads(data)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return f"it does not unpickle here: {describe(error)}; can this rank import all that it is made of?"
    return theirs


def _shared_memory(named: Sequence[tuple[str, Array]], arrays: ArrayKind) -> dict[tuple[int, int], _Place]:
    """Returns how those arrays lie that share memory, by their numbers, the lower one first."""
    ranges = sorted((*arrays.byte_bounds(native), i) for i, (_, native) in enumerate(named) if native.size)
    shared = {}
    reaching: list[tuple[int, int, int]] = []  # ranges that begin before this one and end in it or beyond
    for begin, end, number in ranges:
        reaching = [entry for entry in reaching if entry[1] > begin]
        for other_begin, _, other in reaching:
            first, second = (named[i][1] for i in sorted((number, other)))
            if arrays.share_memory(first, second):
                offset = begin - other_begin if other < number else other_begin - begin
                are_same = not offset and (first.shape, first.strides) == (second.shape, second.strides)
                strides = () if are_same else (tuple(first.strides), tuple(second.strides))
                shared[min(number, other), max(number, other)] = _Place(offset, strides)
        reaching.append((begin, end, number))
    return shared


def _check_shared_memory(
    named: Sequence[tuple[str, Array]], of_root: dict[tuple[int, int], _Place], arrays: ArrayKind
) -> None:
    """Refuses arrays into whose one memory the root would send two values."""
    for pair, place in sorted(_shared_memory(named, arrays).items()):
        if of_root.get(pair) != place:
            first, second = (named[number][0] for number in pair)
            how = "memory of its own" if pair not in of_root else "memory shared otherwise"
            raise Difference(f"{second}: {how} against memory shared with {first}")


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
