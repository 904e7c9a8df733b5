"""Functions for trees (nested containers of arrays): average a tree over the ranks, or broadcast the root's tree.

average_gradients() is for loops that have all gradients before they synchronise them. The function flattens the tree,
and checks that all ranks have arrays of the same paths, shapes and dtypes. Then it reduces the arrays in lists; the
communicator packs each list. If a callback is given, the gradients go through the callback, so that the callback's
options apply.

broadcast_tree() sends the whole training state from the root to all ranks. The function copies arrays in place, and
returns a tree that also has the root's other values. The root sends a list of the nodes of its tree, which has
everything except the arrays' values. Every rank compares its own nodes with the root's nodes, and makes the tree to
return, before the rank writes to any array. Then all ranks report whether their trees fit.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np

from gradsync.bucketing.bucket import Bucket, GradientSpec, cut
from gradsync.bucketing.callback import AllreduceCallback
from gradsync.bucketing.gradient import OverlapCheck
from gradsync.bucketing.lists import broadcast_named, check_writable, communicator_and_root
from gradsync.communicators.agreement import Agreement, Description, digest_of
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.for_bucketing import arrays_of, compare, mark_work, reduce_list, runs_beside_host
from gradsync.communicators.host_arrays import ArrayKind, overlaps_itself
from gradsync.communicators.world import group_or_world
from gradsync.errors import InvalidArgument, PlanMismatch, UnsupportedDtype, describe
from gradsync.futures import check_may_call, pending
from gradsync.reduction import Array, ReduceOp, check_operation, dtype_name, parse_reduce_method

Tree = TypeVar("Tree")

_WHAT = "average_gradients"
# The most bytes that one collective packs. A larger pack is not faster, and on a GPU it needs more memory.
_LIST_BYTES = 64 * 1024**2


# -- Gradients, averaged ---------------------------------------------------------------------------------------------


def average_gradients(
    tree: Tree,
    callback: AllreduceCallback | None = None,
    *,
    op: str | None = None,
    communicator: Communicator | None = None,
) -> Tree:
    """Averages or sums the gradients of a tree over the ranks: `gradients = gs.average_gradients(gradients)`.

    Every rank must call it with a tree of the same paths: at each path, all ranks have an array of the same shape and
    dtype, or all have None. A tree nests dicts (in any order), lists, tuples, namedtuples and dataclasses. Use the tree
    that the function returns. Without a callback, the function reduces writeable arrays in place, and the returned tree
    has these same arrays. If an array is read-only, such as JAX's, or its elements share memory, the returned tree has
    a new array of the same kind in its place. A number (NumPy scalar, float, complex, int) is replaced by a new number.

    With one rank and without a callback, the function returns the tree unchanged and unchecked.

    Args:
        tree: a tree of gradients on the communicator's device. A single array is a tree too. The function does not
            change the tree's containers.
        callback: the AllreduceCallback that reduces the gradients; the path of a gradient is its name. The function
            also flushes the callback. All options of the callback apply, such as clipping.
        op: "mean" or "sum", in upper or lower case. None means the callback's operator or, without a callback, "mean".
        communicator: the communicator of the ranks. None means the callback's communicator or, without a callback, the
            world communicator.

    Returns:
        A tree of the same structure. Its containers are copies, unless the tree is returned unchanged.

    Raises:
        InvalidArgument: a value in the tree is not an array, a number or None; two arrays share memory, or have the
            same path; a container contains itself, or cannot be copied; `op` is neither "mean" nor "sum"; or `op` or
            `communicator` is passed with a callback.
        UnsupportedDtype: the operator is not defined for a dtype, e.g. the mean of integers; the text names the path.
        PlanMismatch: the ranks' trees differ. All ranks raise this error, which names the first different path. Without
            a callback, nothing was written.
        RankFailed, CollectiveTimeout, CommunicatorClosed: a collective has failed.
    """
    if callback is not None:
        _check_callback(callback, op, communicator)
        nodes = _nodes_of(tree, _WHAT)
        return _merged(tree, nodes, _by_callback(_arrays_of(nodes, _WHAT), callback))
    method = parse_reduce_method("mean" if op is None else op, "average_gradients: op")
    communicator = group_or_world(communicator, _WHAT, "communicator")
    if pending:
        check_may_call(communicator.label, _WHAT)
    if communicator.world_size == 1:
        return tree
    who = f"{communicator.label}: {_WHAT}"
    nodes = _nodes_of(tree, who)
    return _merged(tree, nodes, _averaged(_arrays_of(nodes, who), method, communicator))


def _averaged(arrays: Mapping[str, Any], op: ReduceOp, communicator: Communicator) -> dict[str, Any]:
    """Reduces the arrays of a tree, given by path; returns the results by path. None has no result."""
    kind, overlaps, specs = arrays_of(communicator), OverlapCheck(), []
    natives: dict[str, Array] = {}
    for path, array in sorted(arrays.items()):
        if array is not None:
            natives[path] = native = _native(path, array, op, communicator)
            overlaps.claim(native, path, kind, f"{communicator.label}: {_WHAT}")
            specs.append(GradientSpec(path, native.shape, dtype_name(native.dtype), native.dtype.itemsize))
    absent = tuple(sorted([path for path, array in arrays.items() if array is None]))
    agreement, buckets = _average_plan(op, tuple(specs), absent)
    if not buckets:
        compare(communicator, agreement)
    results: dict[str, Any] = {}
    for bucket in buckets:
        flats = []
        for path in map(str, bucket.keys):
            native = natives[path]
            if kind.writeable(native) and not overlaps_itself(native):
                results[path] = arrays[path]
                flats.append(kind.flat(native))
            else:
                natives[path] = results[path] = fresh = kind.empty_like(native)
                np.copyto(fresh, native) if isinstance(fresh, np.ndarray) else kind.assign(native, fresh)
                flats.append(kind.flat(fresh))
        after = [mark_work(communicator)] if runs_beside_host(communicator) else None
        targets = [natives[path] for path in map(str, bucket.keys)]
        completion = reduce_list(communicator, flats, op, agreement, targets=targets, after=after)
        if completion is not None:
            completion.order()
    return results


@lru_cache(maxsize=16)
def _average_plan(
    op: ReduceOp, specs: tuple[GradientSpec, ...], absent: tuple[str, ...]
) -> tuple[Agreement, list[Bucket]]:
    """Returns the Agreement that the ranks compare for a tree, and the buckets of arrays that are reduced together.

    Both are cached, because a training loop averages the same tree in each step.
    """

    def describe() -> Description:
        lines = sorted([*map(str, specs), *[f"{path}: None" for path in absent]])
        return Description(f"{_WHAT}({op.value}) of {len(specs)} arrays", tuple(lines))

    buckets = cut([(spec.name, spec) for spec in specs], _LIST_BYTES)
    return Agreement(digest_of(_WHAT, op.value, specs, absent), describe), buckets


def _by_callback(arrays: Mapping[str, Any], callback: AllreduceCallback) -> dict[str, Any]:
    with callback.backward():
        futures = {path: callback(path, array) for path, array in sorted(arrays.items()) if array is not None}
    return {path: future.result() for path, future in futures.items()}


def _check_callback(callback: AllreduceCallback, op: str | None, communicator: Communicator | None) -> None:
    if not isinstance(callback, AllreduceCallback):
        raise InvalidArgument(
            f"{_WHAT} needs an AllreduceCallback as its callback, got {type(callback).__name__}: pass op= and "
            "communicator= by name"
        )
    if op is not None or communicator is not None:
        raise InvalidArgument(
            f"{_WHAT} got {'op' if op is not None else 'communicator'}= together with a callback, which already has an "
            "operator and a communicator: pass only the callback"
        )


def _arrays_of(nodes: Sequence[_Node], who: str) -> dict[str, Any]:
    """Returns the values of a tree as arrays, or None, by path."""
    arrays: dict[str, Any] = {}
    for node in nodes:
        if node.kind:
            continue
        if node.name in arrays:
            raise InvalidArgument(f"{who}: two values of the tree have the path {node.name}: rename one of their keys")
        value = node.content
        if isinstance(value, (np.generic, int, float, complex)):
            value = np.asarray(value)
        elif value is not None and not _is_array(value):
            raise InvalidArgument(
                f"{who}: {node.name} is {type(value).__name__}, not a gradient: a tree has arrays, numbers or None in "
                "dicts, lists, tuples, namedtuples and dataclasses"
            )
        arrays[node.name] = value
    return arrays


def _merged(tree: Tree, nodes: Sequence[_Node], results: Mapping[str, Any]) -> Tree:
    """Returns a copy of a tree in which the results replace the values; a value that was None stays None."""
    new = {node.path: node.content if node.kind else _as_given(node.content, results.get(node.name)) for node in nodes}
    whole: Tree = _rebuilt(tree, new)
    return whole


def _as_given(given: Any, result: Any) -> Any:
    """Returns a result in the type of the value that was given."""
    if result is None or result is given:
        return given
    if isinstance(given, np.generic):
        return result[()]
    if isinstance(given, (int, float, complex)):
        return type(given)(result.item())
    if isinstance(given, np.ndarray) or not hasattr(given, "__array_namespace__"):
        return result
    library = given.__array_namespace__()
    return library.asarray(result) if dtype_name(result.dtype) == "bfloat16" else library.from_dlpack(result)


def _native(path: str, array: Any, op: ReduceOp, communicator: Communicator) -> Array:
    native: Array = communicator._native_array(array, f"{_WHAT}, {path}")
    who = f"{communicator.label}: {_WHAT}, {path}"
    try:
        check_operation(op, native.dtype)
    except UnsupportedDtype as error:
        raise UnsupportedDtype(f"{who}: {error}") from None
    return native


# -- State, broadcast ------------------------------------------------------------------------------------------------


def broadcast_tree(tree: Tree, root: int = 0, communicator: Communicator | None = None) -> Tree:
    """Sends the root's parameters, buffers and optimiser state to all ranks: `state = gs.broadcast_tree(state)`.

    Every rank must call it with a tree of the same structure, with arrays of the same shapes and dtypes at the same
    paths. A tree nests dicts (of the same keys, in any order), lists, tuples, namedtuples and dataclasses. The root's
    arrays are copied into the arrays of the other ranks. All other values (step counters, learning rates, strings,
    NumPy scalars, None, objects of any class) are sent by pickle, so ranks must trust the root. Only the returned tree
    has the root's other values; the given tree keeps its own.

    Args:
        tree: the tree of this rank. The function does not change the tree's containers.
        root: the rank whose values all ranks get.
        communicator: the communicator of the ranks; None means the world communicator.

    Returns:
        A tree of the same structure with the root's values. The dicts of the returned tree have the root's order.
        The arrays of the returned tree are the arrays of the given tree. The containers are copies.

    Raises:
        InvalidArgument: the root is outside the communicator; on a rank other than the root, an array is read-only, or
            its elements share memory; a container contains itself, or cannot be copied; or a value cannot be pickled.
            No array was written to.
        UnsupportedDtype: the elements of an array are Python objects. No array was written to.
        PlanMismatch: the ranks' trees differ, or the root's values cannot be unpickled on some rank; the text names the
            first different path of each rank. No array was written to.
        RankFailed, CollectiveTimeout, CommunicatorClosed: a collective has failed.
    """
    communicator, root = communicator_and_root("broadcast_tree", communicator, root)

    nodes = _nodes_of(tree, f"{communicator.label}: broadcast_tree")
    arrays, natives = communicator._arrays, {}
    for node in nodes:
        if not node.kind and _is_array(node.content):
            natives[node.path] = communicator._native_array(node.content, f"broadcast_tree, {node.name}")
    named = [(_name(path), native) for path, native in natives.items()]
    if communicator.rank != root:
        check_writable("broadcast_tree", named, communicator)
    described = [_described(node, natives[node.path]) if node.path in natives else node for node in nodes]
    own_plan = _Plan(described, _shared_memory(named, arrays))
    data = _pickled_by_root(own_plan, root, communicator)
    whole, difference = tree, None
    try:
        plan = own_plan if communicator.rank == root else _unpickled(data)
        _check_nodes(described, plan.nodes)
        named = [(node.name, natives[node.path]) for node in plan.nodes if node.path in natives]
        _check_shared_memory(named, plan.shared, arrays)
        new = {node.path: node.content for node in plan.nodes}
        own = {node.path: node.content for node in nodes if node.path in natives}
        whole = _rebuilt(tree, new | own)
    except _Difference as found:
        difference = str(found)
    except Exception as error:  # from the caller's classes; the other ranks wait for the report
        difference = f"the root's values do not fit on this rank: {describe(error)}"
    _raise_differences(communicator.objects.all_gather_for("broadcast_tree", difference), root, communicator)
    broadcast_named("broadcast_tree", named, root, communicator)
    return whole


class _Difference(Exception):
    """The trees of this rank and of the root differ. The text names the first different path."""


def _described(node: _Node, native: Array) -> _Node:
    """Returns the node of an array with the array's dtype and shape in place of the array, as the root sends it."""
    return _Node(node.path, f"{native.dtype}{list(native.shape)}", None)


def _check_nodes(own: Sequence[_Node], of_root: Sequence[_Node]) -> None:
    """Raises if the tree of this rank has other containers, keys or arrays than the root's tree."""
    by_path = {node.path: node for node in own}
    for node in of_root:
        mine = by_path.pop(node.path, None)
        if mine is None:
            raise _Difference(f"{node.name}: missing, but {node} on the root")
        if mine.kind != node.kind:
            raise _Difference(f"{node.name}: {mine}, but {node} on the root")
    for node in by_path.values():
        raise _Difference(f"{node.name}: {node}, but missing on the root")


#: For a pair of arrays that share memory: the offset of the second array in bytes, and the strides of both arrays,
#: which are left out if shapes and strides are the same. The key is the pair of the arrays' indices in the tree.
_Shared = dict[tuple[int, int], tuple[Any, ...]]


class _Plan(NamedTuple):
    """The root's tree without the arrays' values, and the pairs of its arrays that share memory."""

    nodes: list[_Node]
    shared: _Shared


def _pickled_by_root(plan: _Plan, root: int, communicator: Communicator) -> bytes:
    """Sends the root's plan to all ranks; returns the plan in pickled form. Every rank must call it.

    This function does not unpickle the plan, because a rank that cannot unpickle the plan must still take part in the
    next collective.
    """
    sent: bytes | str = b""
    if communicator.rank == root:
        try:
            sent = pickle.dumps(plan, pickle.HIGHEST_PROTOCOL)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too: the other ranks wait for this rank
            sent = describe(error)
    sent = communicator.objects.broadcast_for("broadcast_tree", sent, root)
    if isinstance(sent, str):
        raise InvalidArgument(
            f"{communicator.label}: broadcast_tree moved nothing: the tree of rank {communicator.ranks[root]}, the "
            f"root, cannot be pickled: {sent}"
        )
    return sent


def _unpickled(data: bytes) -> _Plan:
    try:
        plan: _Plan = pickle.loads(data)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise _Difference(
            f"the root's tree cannot be unpickled on this rank: {describe(error)}; check that this rank can import all "
            "of the tree's classes"
        ) from error
    return plan


def _shared_memory(named: Sequence[tuple[str, Array]], arrays: ArrayKind) -> _Shared:
    """Returns the pairs of arrays that share memory."""
    ranges = sorted((*arrays.byte_bounds(native), i) for i, (_, native) in enumerate(named) if native.size)
    shared: _Shared = {}
    reaching: list[tuple[int, int, int]] = []  # earlier ranges that end after the begin of this range
    for begin, end, number in ranges:
        reaching = [entry for entry in reaching if entry[1] > begin]
        for other_begin, _, other in reaching:
            first, second = (named[i][1] for i in sorted((number, other)))
            if arrays.share_memory(first, second):
                offset = begin - other_begin if other < number else other_begin - begin
                are_same = not offset and (first.shape, first.strides) == (second.shape, second.strides)
                strides = () if are_same else (tuple(first.strides), tuple(second.strides))
                shared[min(number, other), max(number, other)] = (offset, *strides)
        reaching.append((begin, end, number))
    return shared


def _check_shared_memory(named: Sequence[tuple[str, Array]], of_root: _Shared, arrays: ArrayKind) -> None:
    """Refuses arrays that share memory on this rank, unless they share memory in the same way on the root."""
    for pair, memory in sorted(_shared_memory(named, arrays).items()):
        if of_root.get(pair) != memory:
            first, second = (named[number][0] for number in pair)
            how = ", but not on the root" if pair not in of_root else " in a different way than on the root"
            raise _Difference(f"{second}: shares memory with {first}{how}")


def _raise_differences(by_rank: Sequence[str | None], root: int, communicator: Communicator) -> None:
    """Raises PlanMismatch on every rank if a rank's tree differs from the root's."""
    differences = {rank: text for rank, text in zip(communicator.ranks, by_rank, strict=True) if text is not None}
    if differences:
        lines = "".join(f"\n  rank {rank}: {text}" for rank, text in differences.items())
        raise PlanMismatch(
            f"{communicator.label}: broadcast_tree needs the same tree on all ranks; no array was written to. The "
            f"first difference of each rank from rank {communicator.ranks[root]} (the root):{lines}",
            descriptions=differences,
        )


# -- Containers ------------------------------------------------------------------------------------------------------


class _Node(NamedTuple):
    """A container of a tree, or a value that is no container.

    Attributes:
        path: the keys, indices and names of fields that lead to the node.
        kind: the class of a container; "" for a value. In a broadcast: the dtype and shape of an array.
        content: the keys, indices or names of fields of a container, in order; or the value itself. In a broadcast:
            None for an array.
    """

    path: tuple[Hashable, ...]
    kind: str
    content: Any

    @property
    def name(self) -> str:
        """The path as text."""
        return _name(self.path)

    def __str__(self) -> str:
        if self.kind:
            return self.kind if self.content is None else f"a {self.kind} of {len(self.content)}"
        name = type(self.content).__name__
        return "None" if self.content is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _name(path: tuple[Hashable, ...]) -> str:
    """Returns a path as text, e.g. "optimizer/momentum/0"."""
    return "/".join(map(str, path)) or "the tree"


def _nodes_of(tree: Any, who: str) -> list[_Node]:
    """Returns the nodes of a tree, each container before its children.

    Raises:
        InvalidArgument: a container contains itself, cannot be copied, or has a key that is not equal to itself, such
            as NaN. The text begins with `who`, and names the path of the container.
    """
    try:
        return list(_nodes(tree, who, (), ()))
    except RecursionError as error:
        raise InvalidArgument(f"{who}: the tree is nested too deeply") from error


def _nodes(tree: Any, who: str, path: tuple[Hashable, ...], within: tuple[int, ...]) -> Iterator[_Node]:
    """Yields the nodes of a part of a tree; `within` has the ids of the containers around this part."""
    children = _children(tree)
    if children is None:
        yield _Node(path, "", tree)
        return
    where, kind = f"{who}: {_name(path)}", _kind(tree)
    if id(tree) in within:
        raise InvalidArgument(f"{where}: this {kind} contains itself")
    for key in children:
        if key != key:  # NaN: no other rank could find its value
            raise InvalidArgument(f"{where}: a dict has the key {key!r}, which is not equal to itself: use another key")
    try:
        _filled(tree, children)
    except Exception as error:
        raise InvalidArgument(f"{where}: gradsync cannot copy this {kind}: {describe(error)}") from error
    yield _Node(path, kind, tuple(children))
    for key, child in children.items():
        yield from _nodes(child, who, (*path, key), (*within, id(tree)))


def _rebuilt(tree: Any, new: Mapping[tuple[Hashable, ...], Any], path: tuple[Hashable, ...] = ()) -> Any:
    """Returns a copy of a tree with new values; `new` has each value, and each container's keys, by path."""
    children = _children(tree)
    if children is None:
        return new[path]
    return _filled(tree, {key: _rebuilt(children[key], new, (*path, key)) for key in new[path]})


def _is_array(value: Any) -> bool:
    """Whether a value is an array that holds data, not only a description of an array, such as jax.ShapeDtypeStruct."""
    if isinstance(value, np.ndarray):
        return True
    exports = hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__")
    return exports and not isinstance(value, (np.generic, type))


def _children(tree: Any) -> dict[Hashable, Any] | None:
    """Returns the content of a container by key; None if the value is no container."""
    if isinstance(tree, dict):
        return tree
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return dict(zip(tree._fields, tree, strict=True))
    if isinstance(tree, (list, tuple)) and not hasattr(tree, "n_sequence_fields"):  # unlike time.struct_time
        return dict(enumerate(tree))
    if _is_dataclass(tree) and not _is_array(tree):
        names = [field.name for field in dataclasses.fields(tree)]
        return {name: getattr(tree, name) for name in names if hasattr(tree, name)}
    return None


def _filled(tree: Any, children: dict[Hashable, Any]) -> Any:
    """Returns a container of the same type with new children."""
    if isinstance(tree, tuple):
        # As namedtuple's _make does: the constructor of a subclass of tuple may not take the items as arguments.
        filled_tuple = tuple.__new__(type(tree), children.values())
        getattr(filled_tuple, "__dict__", {}).update(getattr(tree, "__dict__", {}))
        return filled_tuple
    filled = copy.copy(tree)
    if isinstance(tree, list):
        filled[:] = children.values()
    elif isinstance(tree, dict):
        filled.clear()
        filled.update(children)
    else:
        for name, value in children.items():
            object.__setattr__(filled, str(name), value)  # works for frozen dataclasses too
    return filled


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _kind(tree: Any) -> str:
    kind = type(tree).__qualname__
    return f"dataclass {kind}" if _is_dataclass(tree) else kind
