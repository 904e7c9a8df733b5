"""All gradients of a step at once, as a tree: for loops that have them all before they synchronise any.

A tree goes the short way: taken apart, agreed upon once, and reduced in lists that the communicator packs by itself.
With a callback it goes the way of all gradients, so that the callback's knobs hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np

from gradsync.bucketing.callback import AllreduceCallback
from gradsync.bucketing.gradient import Destination, OverlapCheck, destination
from gradsync.bucketing.guard import refuse_in_flight
from gradsync.bucketing.plan import Bucket, GradientSpec, plan_buckets
from gradsync.bucketing.trees import Unfit, is_array, leaves_of, with_leaves
from gradsync.communicators.agreement import Agreement, digest_of
from gradsync.communicators.communicator import Communicator, ListReduction
from gradsync.communicators.world import group_or_world
from gradsync.errors import InvalidArgument, UnsupportedDtype
from gradsync.futures import check_may_call, pending
from gradsync.reduction import Array, ReduceOp, check_operation, dtype_name, parse_reduce_method

Tree = TypeVar("Tree")

_WHAT = "average_gradients"
# What a collective packs together; more would gain nothing, and on a GPU take as much memory again.
_LIST_BYTES = 64 * 1024**2
_ALONE = "the gradient"  # the path of a tree that is nothing but an array


def average_gradients(
    tree: Tree,
    callback: AllreduceCallback | None = None,
    *,
    op: str | None = None,
    communicator: Communicator | None = None,
) -> Tree:
    """Averages all gradients of a tree over the ranks: `gradients = gs.average_gradients(gradients)`.

    Every rank must call it with a tree of the same paths: dicts (in any order), lists, tuples, namedtuples and
    dataclasses, nested, with arrays of the same shapes and dtypes at the same places, or None where there is no
    gradient. Use the tree that is returned. In it an array that can be written to is the caller's own, reduced in
    place, as everywhere in gradsync; for one that cannot, such as JAX's, there is a new one of its kind, and for a
    number (NumPy's scalars, float, complex, int) a new number.

    With one rank, and without a callback, it returns the tree as it is, and does not look at it.

    Args:
        tree: of gradients, on the communicator's device; an array alone is one too. Its containers are left as they
            are.
        callback: hands the gradients over to it, under their paths, and ends its step; so whatever it was made to do is
            done, such as clipping or skipping. Within its no_sync() that is an error: nothing is handed over there.
        op: "mean" or "sum", in any case; None: the mean, or what the callback does.
        communicator: None is the world's, or the callback's.

    Returns:
        A tree of the same structure. Of a dataclass, a copy.

    Raises:
        InvalidArgument: what is in the tree is neither an array nor a number, two arrays that share memory or have one
            path, a tree that is in itself, or `op` or `communicator` beside a callback.
        UnsupportedDtype: e.g. the mean of integers; the text has the path.
        PlanMismatch: the ranks' trees differ; on all of them, with the first path where they do. Nothing was written.
        RankFailed, CollectiveTimeout, CommunicatorClosed: from the collectives.
    """
    if callback is not None:
        _check_callback(callback, op, communicator)
        leaves = _leaves_of(tree, _WHAT)
        return _put_together(tree, leaves, _by_callback(leaves, callback))
    method = parse_reduce_method("mean" if op is None else op)
    communicator = group_or_world(communicator, _WHAT, "communicator")
    if pending:
        check_may_call(communicator.label, _WHAT)
    if communicator.world_size == 1:
        return tree
    leaves = _leaves_of(tree, f"{communicator.label}: {_WHAT}")
    return _put_together(tree, leaves, average_leaves(leaves, method, communicator))


class Leaf(NamedTuple):
    """What is at one place of a tree.

    Attributes:
        path: of its place.
        given: what stands there.
        array: the same as an array; None where there is no gradient.
    """

    path: str
    given: Any
    array: Any


def average_leaves(leaves: Sequence[Leaf], op: ReduceOp, communicator: Communicator) -> dict[str, Any]:
    """Reduces arrays that are known by their paths, and returns the results, likewise.

    Every rank must call it with the same paths, in any order.

    Raises:
        InvalidArgument, UnsupportedDtype, PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: see
            average_gradients.
    """
    ordered = sorted(leaves, key=lambda leaf: leaf.path)
    present = [leaf for leaf in ordered if leaf.array is not None]
    natives = [_native(leaf, op, communicator) for leaf in present]
    specs = [
        GradientSpec(leaf.path, native.shape, dtype_name(native.dtype), native.dtype.itemsize)
        for leaf, native in zip(present, natives, strict=True)
    ]
    _check_memory(specs, natives, communicator)
    goes = [destination(leaf.array, native, communicator) for leaf, native in zip(present, natives, strict=True)]
    plan = _plan(op, tuple(specs), tuple([leaf.path for leaf in ordered if leaf.array is None]))
    if not plan.buckets:
        communicator.agree(plan.agreement)
    for bucket in plan.buckets:
        _reduce(bucket, goes, op, plan.agreement, communicator)
    return {spec.name: each.result for spec, each in zip(specs, goes, strict=True)}


class _Plan(NamedTuple):
    """What ranks agree on, and which arrays are reduced together."""

    agreement: Agreement
    buckets: list[Bucket]


@lru_cache(maxsize=16)
def _plan(op: ReduceOp, specs: tuple[GradientSpec, ...], absent: tuple[str, ...]) -> _Plan:
    """Works out the plan of a tree; kept, because loops repeat themselves."""

    def describe() -> str:
        texts = {spec.name: f"{spec.dtype}{list(spec.shape)}" for spec in specs} | dict.fromkeys(absent, "None")
        return "\n".join([headline, *(f"{path}: {texts[path]}" for path in sorted(texts))])

    headline = f"{_WHAT}({op.value}) of {len(specs)} arrays"
    agreement = Agreement(digest_of(_WHAT, op.value, specs, absent), describe, item="array {} of the tree")
    return _Plan(agreement, plan_buckets(specs, _LIST_BYTES))


def _reduce(
    bucket: Bucket, goes: Sequence[Destination], op: ReduceOp, agreement: Agreement, communicator: Communicator
) -> None:
    """Reduces the arrays of one bucket; what the caller queues next on the current stream sees them reduced."""
    communicator.checked_stream(None, _WHAT)
    parts = [goes[slot.position] for slot in bucket.slots]
    reduction = ListReduction(
        communicator,
        [part.source for part in parts],
        [part.target for part in parts],
        op,
        write_backs=[(part.target, part.write_back) for part in parts if part.write_back is not None],
    )
    completion = reduction.run(agreement, producers=[communicator.mark_work()])
    if completion is not None:
        completion.order()


def _by_callback(leaves: Sequence[Leaf], callback: AllreduceCallback) -> dict[str, Any]:
    present = sorted([leaf for leaf in leaves if leaf.array is not None], key=lambda leaf: leaf.path)
    with callback.backward():
        futures = {leaf.path: callback(leaf.path, leaf.array) for leaf in present}
    return {path: future.result() for path, future in futures.items()}


def _check_callback(callback: AllreduceCallback, op: str | None, communicator: Communicator | None) -> None:
    if not isinstance(callback, AllreduceCallback):
        raise InvalidArgument(
            f"{_WHAT} needs an AllreduceCallback as its callback, got {type(callback).__name__}: pass op= and "
            "communicator= by name"
        )
    if op is not None or communicator is not None:
        raise InvalidArgument(
            f"{_WHAT} got {'op' if op is not None else 'communicator'}= beside a callback, which has its own: make the "
            "callback with it"
        )


def _leaves_of(tree: Any, who: str) -> list[Leaf]:
    try:
        leaves = [Leaf(path or _ALONE, given, _as_array(given, path, who)) for path, given in leaves_of(tree)]
    except Unfit as error:
        raise InvalidArgument(f"{who}: {error}") from error
    except RecursionError as error:
        raise InvalidArgument(f"{who}: the tree is nested too deep") from error
    paths: set[str] = set()
    for leaf in leaves:
        if leaf.path in paths:
            raise InvalidArgument(f"{who}: two places of the tree have the path {leaf.path}: rename one of their keys")
        paths.add(leaf.path)
    return leaves


def _as_array(given: Any, path: str, who: str) -> Any:
    if given is None or is_array(given):
        return given
    if isinstance(given, (np.generic, int, float, complex)):
        return np.asarray(given)
    raise InvalidArgument(
        f"{who}: {path or 'the tree'} is {type(given).__name__}, and no gradient: a tree has arrays, numbers or None "
        "in dicts, lists, tuples, namedtuples and dataclasses"
    )


def _put_together(tree: Tree, leaves: Sequence[Leaf], results: dict[str, Any]) -> Tree:
    whole: Tree = with_leaves(tree, iter([_as_given(leaf, results.get(leaf.path)) for leaf in leaves]))
    return whole


def _as_given(leaf: Leaf, result: Any) -> Any:
    """Returns a result as the kind of thing that was given."""
    if result is None or result is leaf.given:
        return leaf.given
    if isinstance(leaf.given, np.generic):
        return result[()]
    if isinstance(leaf.given, (int, float, complex)):
        return type(leaf.given)(result.item())
    if isinstance(leaf.given, np.ndarray) or not hasattr(leaf.given, "__array_namespace__"):
        return result
    library = leaf.given.__array_namespace__()
    return library.asarray(result) if dtype_name(result.dtype) == "bfloat16" else library.from_dlpack(result)


def _native(leaf: Leaf, op: ReduceOp, communicator: Communicator) -> Array:
    native: Array = communicator.native_array(leaf.array, f"{_WHAT}, {leaf.path}")
    if isinstance(native, np.ndarray) and not native.flags.writeable:
        refuse_in_flight(native, f"{communicator.label}: {_WHAT}, {leaf.path}")
    try:
        check_operation(op, native.dtype)
    except UnsupportedDtype as error:
        raise UnsupportedDtype(f"{communicator.label}: {_WHAT}, {leaf.path}: {error}") from None
    return native


def _check_memory(specs: Sequence[GradientSpec], natives: Sequence[Array], communicator: Communicator) -> None:
    """Refuses arrays that would be reduced into one another."""
    memory = OverlapCheck()
    for spec, native in zip(specs, natives, strict=True):
        try:
            memory.claim(native, spec.name, communicator.arrays)
        except InvalidArgument as error:
            raise InvalidArgument(f"{communicator.label}: {_WHAT}: {error}") from None
