"""JAX: averages the gradients of a pytree over the ranks, inside or outside jax.jit, and broadcasts pytrees.

JAX's arrays are read-only, so results are new arrays. On the CPU the adapter reads gradients without a copy, and JAX
takes a result without a copy if its memory begins on a cache line. The adapter copies arrays on a GPU through host
memory, so use JAX's own collectives on GPUs. With gradsync's launcher you do not need jax.distributed; each rank uses
only its own devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from gradsync.adapters import without
from gradsync.bucketing.trees import average_arrays
from gradsync.bucketing.trees import broadcast_tree as broadcast_containers
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.world import group_or_world
from gradsync.errors import InvalidArgument
from gradsync.futures import check_may_call, pending
from gradsync.reduction import ReduceOp, parse_reduce_method

try:
    import jax
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise
    raise without("JAX", "jax") from error

from jax.experimental import io_callback

Tree = TypeVar("Tree")


def average_gradients(tree: Tree, *, op: str = "mean", communicator: Communicator | None = None) -> Tree:
    """Averages all gradients of a pytree over the ranks; with op="sum", adds them.

    Every rank must call this function, with a pytree that has the same paths, and leaves of the same shapes and dtypes.
    Inside jax.jit, gradsync averages the gradients each time the compiled function runs, not when JAX traces it. All
    ranks must run the same compiled functions in the same order. A compiled function with several calls of
    average_gradients() runs these calls in the order in which JAX traced them. Inside jax.jit, a failure raises an
    error of JAX that contains gradsync's text. A compiled function runs in parallel with your program: wait for its
    results (jax.block_until_ready) before you call another collective.

    Args:
        tree: any pytree of arrays or numbers; None is not a leaf.
        op: "mean" or "sum", in upper or lower case.
        communicator: the communicator of the ranks; None means the world communicator.

    Returns:
        A pytree of the same structure, with new arrays on the same devices; outside jax.jit, a number stays a number of
        its type. With one rank, returns the given tree.

    Raises:
        InvalidArgument: `op` is neither "mean" nor "sum", two leaves have the same path, or `communicator` is None and
            the process group is not initialised.
        UnsupportedDtype: the operator does not support the dtype of a leaf, e.g. the mean of integers; the error's text
            contains the path of the leaf.
        PlanMismatch: the ranks' trees differ. All ranks raise this error, whose text contains the first path that
            differs.
        RankFailed, CollectiveTimeout, CommunicatorClosed: a collective failed.
    """
    method = parse_reduce_method(op, "average_gradients: op")
    communicator = group_or_world(communicator, "average_gradients", "communicator")
    if pending:
        check_may_call(communicator.label, "average_gradients")
    if communicator.world_size == 1:
        return tree
    paths, leaves, structure = _flattened(tree)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        results = _traced(paths, leaves, method, communicator)
    else:
        averages = _averaged(paths, method, communicator, leaves)
        results = [_as_given(leaf, average) for leaf, average in zip(leaves, averages, strict=True)]
    whole: Tree = jax.tree_util.tree_unflatten(structure, results)
    return whole


def broadcast_tree(tree: Tree, root: int = 0, communicator: Communicator | None = None) -> Tree:
    """Sends the root's pytree, e.g. parameters and optimiser state, to all ranks.

    Every rank must call this function, with a pytree that has the same paths, and arrays of the same shapes and dtypes.
    gradsync sends leaves that are not arrays, such as step counters, by pickle, so ranks must trust the root.

    Args:
        tree: any pytree; its leaves do not change.
        root: the rank whose values all ranks get.
        communicator: the communicator of the ranks; None means the world communicator.

    Returns:
        A pytree of the same structure with the root's values, on the devices of this rank's leaves.

    Raises:
        InvalidArgument, PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: see gs.broadcast_tree.
    """
    paths, leaves, structure = _flattened(tree)
    copies = {path: _copied(leaf) for path, leaf in zip(paths, leaves, strict=True)}
    received = broadcast_containers(copies, root, communicator)
    results = [_as_given(leaf, received[path]) for path, leaf in zip(paths, leaves, strict=True)]
    whole: Tree = jax.tree_util.tree_unflatten(structure, results)
    return whole


def _flattened(tree: Any) -> tuple[list[str], list[Any], Any]:
    """Returns the paths and the leaves of a pytree, and its structure."""
    named, structure = jax.tree_util.tree_flatten_with_path(tree)
    paths = ["/".join(map(_name_of, path)) or "the tree" for path, _ in named]
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise InvalidArgument(f"two leaves of the pytree have the path {twice}: rename one of their keys")
    return paths, [leaf for _, leaf in named], structure


def _name_of(entry: Any) -> str:
    """Returns one part of a path: the key, index or attribute."""
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def _averaged(paths: Sequence[str], op: ReduceOp, communicator: Communicator, leaves: Sequence[Any]) -> list[Any]:
    """Reduces the leaves, and returns the results as NumPy arrays to which nothing else refers."""
    arrays = {path: _read_only(leaf) for path, leaf in zip(paths, leaves, strict=True)}
    results = average_arrays(arrays, op, communicator)
    return [results[path] for path in paths]


def _traced(paths: Sequence[str], leaves: Sequence[Any], op: ReduceOp, communicator: Communicator) -> list[Any]:
    """Adds the all-reduce to the program that JAX compiles. The program runs all-reduces in the order of tracing."""
    run = partial(_averaged, paths, op, communicator)
    wanted = [jax.ShapeDtypeStruct(np.shape(leaf), jax.numpy.result_type(leaf)) for leaf in leaves]
    results: list[Any] = io_callback(run, wanted, leaves, ordered=True)
    return results


def _read_only(leaf: Any) -> Any:
    """Returns a NumPy array of the leaf, through which nobody can write to the leaf; copies no array in host memory."""
    array = np.asarray(leaf)
    if array.flags.writeable and isinstance(leaf, np.ndarray):
        array = array.view()
        array.flags.writeable = False
    return array


def _copied(leaf: Any) -> Any:
    """Returns a writeable copy of a leaf, or the leaf itself if it is not an array."""
    if _is_key(leaf):
        return np.array(jax.random.key_data(leaf))
    return np.array(leaf) if isinstance(leaf, (jax.Array, np.ndarray)) else leaf


def _as_given(leaf: Any, value: Any) -> Any:
    """Converts a result to the type of the given leaf, on the devices of this leaf."""
    if _is_key(leaf):
        return jax.random.wrap_key_data(value, impl=jax.random.key_impl(leaf))
    if isinstance(leaf, jax.Array):
        return jax.device_put(value, leaf.sharding)  # without a copy, if the memory begins on a cache line
    if isinstance(value, np.ndarray) and not isinstance(leaf, np.ndarray):
        return value[()] if isinstance(leaf, np.generic) else type(leaf)(value.item())
    return value


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
