"""Trees: nested containers of arrays, averaged over the ranks or sent from the root to all of them.

A tree nests dicts (in any order), lists, tuples, namedtuples and dataclasses and, where the program has imported JAX,
the pytrees that are registered there. flatten() takes it apart, and unflatten() makes a copy with other leaves.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from gradsync.bucketing.callback import AllreduceCallback
from gradsync.bucketing.events import CallbackIdentity
from gradsync.bucketing.lists import broadcast_named, communicator_and_root
from gradsync.bucketing.options import Options, checked_weight
from gradsync.bucketing.step import Step
from gradsync.communicators.agreement import AFTER_REBUILD, array_text
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.for_bucketing import arrays_of, kept
from gradsync.communicators.host_arrays import ArrayKind
from gradsync.communicators.world import group_or_world
from gradsync.errors import InvalidArgument, PlanMismatch, describe
from gradsync.futures import refuse_in_callback
from gradsync.reduction import Array, ReduceOp, dtype_name, parse_reduce_method

Tree = TypeVar("Tree")
Path = tuple[Hashable, ...]

_WHAT = "average_gradients"
# The most bytes that one collective packs. A larger pack is not faster, and on a GPU it needs more memory.
_LIST_BYTES = 64 * 1024**2
_MOST_TREES = 16  # whose plans are kept


# -- Trees and their leaves -------------------------------------------------------------------------------------------


class Node(NamedTuple):
    """A container of a tree, without its leaves.

    Attributes:
        kind: the class of the container.
        keys: the keys, indices or names of fields of its children, in order.
        children: containers; None stands for a leaf.
    """

    kind: str
    keys: Path
    children: tuple[Node | None, ...]


def flatten(tree: Any, who: str) -> tuple[list[Any], Node | None]:
    """Returns the leaves of a tree, and its containers; `who` begins the text of errors."""
    leaves: list[Any] = []
    try:
        structure = _walk(tree, leaves)
    except RecursionError as error:
        raise InvalidArgument(f"{who}: the tree is nested too deeply, or a container contains itself") from error
    return leaves, structure


def _walk(tree: Any, leaves: list[Any]) -> Node | None:
    if type(tree) is np.ndarray or (opened := _opened(tree)) is None:
        leaves.append(tree)
        return None
    children = opened[0]
    kind = type(tree).__qualname__
    return Node(kind, tuple(children), tuple([_walk(child, leaves) for child in children.values()]))


def unflatten(tree: Any, structure: Node | None, leaves: Iterator[Any]) -> Any:
    """Returns a copy of a tree with other leaves, which come in the order of `structure`; dicts get that order."""
    if structure is None:
        return next(leaves)
    opened = _opened(tree)
    assert opened is not None
    children, copied = opened
    new = {key: unflatten(children[key], part, leaves) for key, part in zip(*structure[1:], strict=True)}
    try:
        return copied(tree, new)
    except Exception as error:
        raise InvalidArgument(f"gradsync cannot copy this {structure.kind}: {describe(error)}") from error


def nodes_of(structure: Node | None, leaves: Iterator[Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields the path and the content of each node, a container before its children: a Node, or a leaf."""
    yield path, next(leaves) if structure is None else structure
    if structure is not None:
        for key, part in zip(*structure[1:], strict=True):
            if key != key:  # NaN: no other rank could find its value
                raise InvalidArgument(
                    f"{_name(path)} has the key {key!r}, which is not equal to itself: use another key"
                )
            yield from nodes_of(part, leaves, (*path, key))


def _leaves_of(structure: Node | None, leaves: Iterable[Any]) -> dict[Path, Any]:
    return {path: leaf for path, leaf in nodes_of(structure, iter(leaves)) if not isinstance(leaf, Node)}


def _name(path: Path) -> str:
    """Returns a path as text, e.g. "optimizer/momentum/0"."""
    return "/".join(map(str, path)) or "the tree"


def _is_array(value: Any) -> bool:
    """Whether a value is an array that holds data, not only a description of one, such as jax.ShapeDtypeStruct."""
    exports = hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__")
    return exports and not isinstance(value, (np.generic, type))


def _holds_arrays(leaf: Any, seen: set[int]) -> bool:
    """Whether a leaf is an object that has arrays in its attributes, or in those of their values.

    A sparse array, or a key of JAX, is one value itself.
    """
    if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
        return False
    attributes = getattr(leaf, "__dict__", None)
    if not isinstance(attributes, dict) or isinstance(leaf, (type, ModuleType)) or id(leaf) in seen:
        return False
    seen.add(id(leaf))
    leaves: list[Any] = []
    with suppress(RecursionError):  # a container in it contains itself: pickle can send that
        _walk(attributes, leaves)
        return any(_is_array(each) or _holds_arrays(each, seen) for each in leaves)
    return False


def _opened(tree: Any) -> tuple[dict[Any, Any], Callable[[Any, dict[Any, Any]], Any]] | None:
    """Returns the content of a container by key, and what makes a copy with other content; None for a leaf."""
    if isinstance(tree, dict):
        return tree, _refilled
    if isinstance(tree, list):
        return dict(enumerate(tree)), _refilled
    if isinstance(tree, tuple) and not hasattr(tree, "n_sequence_fields"):  # unlike time.struct_time
        return dict(zip(getattr(tree, "_fields", range(len(tree))), tree, strict=True)), _new_tuple
    if tree is None or isinstance(tree, (int, float, complex, str, type)) or _is_array(tree):
        return None
    if "jax" in sys.modules:
        open_node = sys.modules["jax"].tree_util.tree_flatten_with_path
        pairs, treedef = open_node(tree, is_leaf=lambda part: part is not tree)
        if not pairs or pairs[0][0]:  # a leaf has itself, without a path
            content = {str(path[0]).strip(".[]'\""): child for path, child in pairs}
            return content, lambda _, new: treedef.unflatten(new.values())
    if dataclasses.is_dataclass(tree):
        names = [field.name for field in dataclasses.fields(tree) if hasattr(tree, field.name)]
        return {name: getattr(tree, name) for name in names}, _refilled
    return None


def _refilled(tree: Any, content: dict[Any, Any]) -> Any:
    if type(tree) is dict:
        return content
    new = copy.copy(tree)
    if isinstance(new, list):
        new[:] = content.values()
    elif isinstance(new, dict):
        new.clear()
        new.update(content)
    else:
        for name, value in content.items():
            object.__setattr__(new, name, value)  # works for frozen dataclasses too
    return new


def _new_tuple(tree: Any, content: dict[Any, Any]) -> Any:
    # As namedtuple's _make does: the constructor of a subclass of tuple may not take the items as arguments.
    new = tuple.__new__(type(tree), content.values())
    getattr(new, "__dict__", {}).update(getattr(tree, "__dict__", {}))
    return new


# -- Gradients, averaged ----------------------------------------------------------------------------------------------


def average_gradients(
    tree: Tree,
    callback: AllreduceCallback | None = None,
    *,
    op: str | None = None,
    communicator: Communicator | None = None,
    weight: float | None = None,
) -> Tree:
    """Averages or sums the gradients of a tree over the ranks: `gradients = gs.average_gradients(gradients)`.

    Every rank must call it with arrays of the same shapes and dtypes at the same paths. A tree nests dicts (in any
    order), lists, tuples, namedtuples, dataclasses, and pytrees that are registered with JAX. Writeable arrays are
    reduced in place. Use the tree that is returned: it has a new array of the same kind in place of a read-only one,
    such as JAX's, or one whose elements share memory, and a new number in place of a number. None stays None, unless
    the ranks reduced a gradient for it: with a callback that has missing="zero", or where this rank has a weight of 0
    and no gradient at all, and knows the tree.

    With one rank, without a callback and a weight, the tree comes back as it is, unchecked.

    Args:
        tree: a tree of gradients on the communicator's device, or a single array or number. Its containers stay as they
            are.
        callback: the AllreduceCallback that reduces the gradients as one step, with all its options, such as clipping;
            a gradient's path is its name.
        op: "mean" or "sum", in upper or lower case. None means the callback's operator or, without one, "mean".
        communicator: whose ranks reduce. None means the callback's or, without one, the world communicator.
        weight: this rank's weight in the mean, such as the number of its samples; see AllreduceCallback.backward. If
            all weights are 0, nothing is reduced, and the tree that is returned has None in place of each gradient.

    Returns:
        A tree of the same structure. Its containers are copies, unless it is the tree itself.

    Raises:
        InvalidArgument: a value in the tree is not an array, a number or None; two arrays share memory, or have the
            same path; a container contains itself, or cannot be copied; an int is too large for a sum; `op` is neither
            "mean" nor "sum"; `op` or `communicator` is passed with a callback; or the weight cannot be used.
        UnsupportedDtype: the operator is not defined for a dtype, e.g. the mean of integers; the text names the path.
        PlanMismatch: the ranks' trees differ. All ranks raise it, with the first path that differs; nothing was
            written.
        RankFailed, CollectiveTimeout, CommunicatorClosed: a collective has failed.
    """
    if callback is not None:
        if not isinstance(callback, AllreduceCallback) or op is not None or communicator is not None:
            raise InvalidArgument(
                f"{_WHAT} needs a callback, which has an operator and a communicator already, or op= and communicator= "
                f"by name, got callback={callback!r}, op={op!r}, communicator={communicator!r}"
            )
        leaves, structure, names = _taken_apart(tree, _WHAT)
        with callback.backward(weight=weight):
            _hand_over(names, leaves, callback, callback._communicator())
        return _with_results(tree, leaves, structure, names, callback._step)
    method = parse_reduce_method("mean" if op is None else op, f"{_WHAT}: op")
    communicator = group_or_world(communicator, _WHAT, "communicator")
    refuse_in_callback(communicator.label, _WHAT)
    if communicator.world_size == 1 and weight is None:
        return tree
    leaves, structure, names = _taken_apart(tree, f"{communicator.label}: {_WHAT}")
    weight, step = checked_weight(weight, method), _kept_step(communicator, method, structure)
    try:
        _hand_over(names, leaves, partial(step.take, communicator=communicator), communicator)
        step.flush(communicator, weight)
        return _with_results(tree, leaves, structure, names, step)
    except BaseException as error:
        step.fail(error)
        raise
    finally:
        step.forget_results()  # the arrays are the caller's


def _kept_step(communicator: Communicator, op: ReduceOp, structure: Node | None) -> Step:
    """Returns the step for trees of one structure, which keeps their plan."""
    steps = kept(communicator)
    step: Step | None = steps.get((op, structure))
    if step is None:
        if _WHAT not in steps:  # one identity for all: the ranks may come with different trees, and are told so
            steps[_WHAT] = CallbackIdentity(_WHAT, communicator)
            steps[_WHAT].made_at = ""  # no callback of the program
        if len(steps) > _MOST_TREES:
            del steps[list(steps)[1]]  # the oldest, after the identity
        steps[op, structure] = step = Step(Options(op, _LIST_BYTES), steps[_WHAT])
    return step


_names: dict[Node | None, list[str]] = {}  # of the leaves of trees that were averaged


def _taken_apart(tree: Any, who: str) -> tuple[list[Any], Node | None, list[str]]:
    """Returns the leaves of a tree, its containers, and the names of the leaves, which are their paths."""
    leaves, structure = flatten(tree, who)
    names = _names.get(structure)
    if names is None:
        names = [_name(path) for path in _leaves_of(structure, leaves)]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidArgument(f"{who}: two values of the tree have the path {twice}: rename one of their keys")
        unflatten(tree, structure, iter(leaves))  # fails before anything is reduced
        if len(_names) >= _MOST_TREES:
            _names.clear()
        _names[structure] = names
    return leaves, structure, names


def _hand_over(
    names: Sequence[str], leaves: Sequence[Any], take: Callable[[str, Any], Any], communicator: Communicator
) -> None:
    for name, leaf in zip(names, leaves, strict=True):
        if type(leaf) is np.ndarray:
            take(name, leaf)
        elif leaf is not None:
            take(name, _as_array(name, leaf, communicator))


def _as_array(name: str, leaf: Any, communicator: Communicator) -> Any:
    if isinstance(leaf, int) and abs(leaf) >= 2**63 // communicator.world_size:
        raise InvalidArgument(f"{communicator.label}: {_WHAT}: {name} is {leaf}, too large for a sum of 64 bits")
    if isinstance(leaf, (np.generic, int, float, complex)):
        return np.asarray(leaf)
    if _is_array(leaf):
        return leaf
    raise InvalidArgument(
        f"{communicator.label}: {_WHAT}: {name} is {type(leaf).__name__}, not a gradient: a tree has arrays, numbers "
        "or None in dicts, lists, tuples, namedtuples and dataclasses"
    )


def _with_results(tree: Tree, leaves: Sequence[Any], structure: Node | None, names: Sequence[str], step: Step) -> Tree:
    results = map(step.results().get, names)
    new: Iterable[Any] = map(_as_given, leaves, results)
    if step.total_weight == 0.0:  # no rank had a batch: nothing was reduced
        new = [None] * len(leaves)
    whole: Tree = unflatten(tree, structure, iter(new))
    return whole


def _as_given(given: Any, result: Any) -> Any:
    """Returns a result as the kind of value that was given."""
    if result is None or result is given:
        return given
    if isinstance(given, np.generic):
        return result[()]
    if isinstance(given, (int, float, complex)):
        return type(given)(result.item())
    if given is None or isinstance(given, np.ndarray):
        return result
    if hasattr(given, "__array_namespace__"):
        library = given.__array_namespace__()
        return library.asarray(result) if dtype_name(result.dtype) == "bfloat16" else library.from_dlpack(result)
    return sys.modules[type(given).__module__.partition(".")[0]].from_dlpack(result)


# -- State, broadcast -------------------------------------------------------------------------------------------------


def broadcast_tree(tree: Tree, root: int = 0, communicator: Communicator | None = None) -> Tree:
    """Sends the root's parameters, buffers and optimiser state to all ranks: `state = gs.broadcast_tree(state)`.

    Every rank must call it with a tree of the same structure, with arrays of the same shapes and dtypes at the same
    paths. A tree nests dicts (of the same keys, in any order), lists, tuples, namedtuples, dataclasses, and pytrees
    that are registered with JAX. The root's arrays are copied into those of the other ranks. All else (step counters,
    learning rates, strings, NumPy scalars, None, objects, sparse arrays, JAX's keys) is sent by pickle, so ranks must
    trust the root, and only the tree that is returned has it. So of an object with arrays inside, such as a model, pass
    its arrays. What a JAX pytree does not list among its children, such as static fields, is not sent.

    A 0-d array of NumPy and a number of its dtype fit each other: arithmetic and np.load turn one into the other. The
    root's number is written into this rank's array. In place of this rank's number the tree that is returned has a new
    array.

    Once the ranks have made a step, or were rebuilt, they write to their arrays only when all have arrived, for which
    they need memory for a second copy: if a rank dies meanwhile, no other is left with half of a state.

    Args:
        tree: the tree of this rank. Its containers stay as they are.
        root: the rank whose values all ranks get.
        communicator: the communicator of the ranks; None means the world communicator.

    Returns:
        A tree of the same structure with the root's values: this rank's arrays, in copies of its containers. Dicts have
        the root's order.

    Raises:
        InvalidArgument: an array of a rank other than the root is read-only, or its elements share memory, or a value
            of the root cannot be pickled: all ranks raise it. Or the root is outside the communicator, a container
            contains itself, or an object that is neither array nor container has arrays inside. No array was written
            to.
        UnsupportedDtype: the elements of an array are Python objects. No array was written to.
        PlanMismatch: the ranks' trees differ, or the root's values do not fit on some rank; the text has the first path
            that differs on each. No array was written to.
        RankFailed, CollectiveTimeout, CommunicatorClosed: a collective has failed.
    """
    communicator, root = communicator_and_root("broadcast_tree", communicator, root)
    leaves, structure = flatten(tree, f"{communicator.label}: broadcast_tree")
    own = dict(nodes_of(structure, iter(leaves)))
    natives = {
        path: communicator.native_array(leaf, f"broadcast_tree, {_name(path)}")
        for path, leaf in own.items()
        if _is_array(leaf)
    }
    for path, leaf in own.items():
        if path not in natives and not isinstance(leaf, Node) and _holds_arrays(leaf, set()):
            instead = "its state_dict()" if hasattr(leaf, "state_dict") else 'its arrays, such as {"w": model.w}'
            raise InvalidArgument(
                f"{communicator.label}: broadcast_tree: {_name(path)} is an object ({type(leaf).__qualname__}) with "
                "arrays inside. The root's would come in a copy of the object, and leave its own as they are: pass "
                f"{instead}, or use comm.objects.broadcast, which returns the copy"
            )
    described = {path: _described(content, natives.get(path)) for path, content in own.items()}
    values = [_as_value(leaf) for leaf in leaves]
    arrays = arrays_of(communicator)
    skeleton = structure, values, described, _shared_memory(list(natives.values()), arrays)
    sent = communicator.objects.broadcast_for("broadcast_tree", _AsBytes(skeleton), root)
    whole, named, difference = tree, [], None
    numbers: dict[Path, Any] = {}
    try:
        structure, values, of_root, shared = skeleton if communicator.rank == root else pickle.loads(sent)
        from_root = _leaves_of(structure, values)
        new, numbers = _fit_numbers(own, of_root, from_root)
        own |= new
        natives |= {path: communicator.native_array(array, "broadcast_tree") for path, array in new.items()}
        described |= {path: of_root[path] for path in (*new, *numbers)}
        named = [(_name(path), natives[path]) for path in of_root if path in natives and path not in numbers]
        written = named + [(_name(path), own[path]) for path in numbers]
        difference = _difference(described, of_root) or _difference_in_memory(written, shared, arrays)
        if difference is None:
            values = [own[path] if path in natives else value for path, value in from_root.items()]
            whole = unflatten(tree, structure, iter(values))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # from the caller's classes, SystemExit too: the other ranks wait for the report
        difference = f"the root's values do not fit on this rank: {describe(error)}"
    by_rank = communicator.objects.all_gather_for("broadcast_tree", difference)
    if differences := {rank: text for rank, text in zip(communicator.ranks, by_rank, strict=True) if text is not None}:
        lines = "".join(f"\n  rank {rank}: {text}" for rank, text in differences.items())
        lines += f"\n  {AFTER_REBUILD}" if communicator.is_rebuilt else ""
        raise PlanMismatch(
            f"{communicator.label}: broadcast_tree needs the same tree on all ranks; no array was written to. The "
            f"first difference of each rank from rank {communicator.ranks[root]} (the root):{lines}",
            descriptions=differences,
        )
    broadcast_named("broadcast_tree", named, root, communicator, at_once=communicator.has_begun)
    for path, number in numbers.items():
        own[path][...] = number
    return whole


class _AsBytes:
    """What arrives as the bytes of its pickle: a rank that cannot read them still takes part in the next collective."""

    def __init__(self, content: Any) -> None:
        self._content = content

    def __reduce__(self) -> tuple[Any, ...]:
        return bytes, (pickle.dumps(self._content, pickle.HIGHEST_PROTOCOL),)


def _described(content: Any, native: Array | None) -> tuple[str, str]:
    """Returns what must be equal on all ranks about a node of a tree, and the node in words."""
    if isinstance(content, Node):
        return content.kind, f"a {content.kind} of {len(content.keys)}"
    if native is not None:
        return (array_text(native.dtype, native.shape),) * 2
    name = type(content).__name__
    return "", "None" if content is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _as_value(leaf: Any) -> Any:
    """Returns what is sent of a leaf beside the arrays: None for an array, a number for a 0-d array of NumPy."""
    if type(leaf) is np.ndarray and leaf.shape == ():
        return leaf[()]
    return None if _is_array(leaf) else leaf


def _fit_numbers(
    own: Mapping[Path, Any], of_root: Mapping[Path, tuple[str, str]], from_root: Mapping[Path, Any]
) -> tuple[dict[Path, Array], dict[Path, Any]]:
    """Returns new 0-d arrays for this rank's numbers where the root has such, and the root's numbers for its arrays.

    `momentum = 0.9 * momentum + gradient` makes a number of a 0-d array: a rank that was started again has the array
    still. Only equal dtypes fit.
    """
    new, numbers = {}, {}
    for path, leaf in own.items():
        theirs = from_root.get(path)
        if (dtype := _dtype_of_number(leaf)) is not None:
            if theirs is not None and of_root[path][0] == array_text(dtype, ()):
                new[path] = np.empty((), dtype)
        elif type(leaf) is np.ndarray and leaf.shape == () and leaf.flags.writeable:
            dtype = _dtype_of_number(theirs)
            if dtype is not None and dtype == leaf.dtype and not of_root[path][0]:
                numbers[path] = theirs
    return new, numbers


def _dtype_of_number(value: Any) -> np.dtype[Any] | None:
    return np.asarray(value).dtype if isinstance(value, (np.number, np.bool_, int, float, complex)) else None


def _difference(own: Mapping[Path, tuple[str, str]], of_root: Mapping[Path, tuple[str, str]]) -> str | None:
    """Returns the first container, key or array in which this rank's tree differs from the root's."""
    missing = "", "missing"
    for path in {**of_root, **own}:
        (kind, mine), (roots_kind, theirs) = own.get(path, missing), of_root.get(path, missing)
        if kind != roots_kind or (path in own) != (path in of_root):
            return f"{_name(path)}: {mine}, but {theirs} on the root"
    return None


#: For a pair of arrays that share memory: the offset of the second array in bytes, and the strides of both arrays,
#: which are left out if shapes and strides are the same. The key is the pair of the arrays' indices in the tree.
_Shared = dict[tuple[int, int], tuple[Any, ...]]


def _shared_memory(natives: Sequence[Array], arrays: ArrayKind) -> _Shared:
    """Returns the pairs of arrays that share memory."""
    ranges = sorted((*arrays.byte_bounds(native), i) for i, native in enumerate(natives) if native.size)
    shared: _Shared = {}
    reaching: list[tuple[int, int, int]] = []  # earlier ranges that end after the begin of this range
    for begin, end, number in ranges:
        reaching = [entry for entry in reaching if entry[1] > begin]
        for other_begin, _, other in reaching:
            first, second = (natives[i] for i in sorted((number, other)))
            if arrays.share_memory(first, second):
                offset = begin - other_begin if other < number else other_begin - begin
                are_same = not offset and (first.shape, first.strides) == (second.shape, second.strides)
                strides = () if are_same else (tuple(first.strides), tuple(second.strides))
                shared[min(number, other), max(number, other)] = (offset, *strides)
        reaching.append((begin, end, number))
    return shared


def _difference_in_memory(named: Sequence[tuple[str, Array]], of_root: _Shared, arrays: ArrayKind) -> str | None:
    """Returns the first two arrays that share memory on this rank, and not in the same way on the root."""
    for pair, memory in sorted(_shared_memory([native for _, native in named], arrays).items()):
        if of_root.get(pair) != memory:
            first, second = (named[number][0] for number in pair)
            how = ", but not on the root" if pair not in of_root else " in a different way than on the root"
            return f"{second}: shares memory with {first}{how}"
    return None
