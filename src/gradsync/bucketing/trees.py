"""Nested containers of arrays and other values: how they are taken apart, compared, and put together again.

A tree is taken apart into a layout, which says everything but the arrays' values, and the arrays. The root's layout
goes to all ranks, and every rank walks its own tree along it: so the root's order counts, whatever theirs.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np

from gradsync.errors import describe
from gradsync.reduction import Array


class Difference(Exception):
    """Two trees part here; the text names the path, and what stands there in the root's and in the other."""


class Unfit(Exception):
    """A tree that cannot be taken apart and put together again; the text names the path."""


class ArrayLayout(NamedTuple):
    """Where a tree has an array."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class ContainerLayout(NamedTuple):
    """A dict, list, tuple, namedtuple or dataclass, with what is in it."""

    kind: str
    children: list[tuple[Hashable, Any]]  # key, index or field -> layout

    def __str__(self) -> str:
        return f"a {self.kind} of {len(self.children)}"


class LeafLayout(NamedTuple):
    """Any other value, itself."""

    value: Any

    def __str__(self) -> str:
        name = type(self.value).__name__
        return "None" if self.value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


Layout = ArrayLayout | ContainerLayout | LeafLayout
ToNative = Callable[[Any, str], Array]


def layout_of(tree: Any, native: ToNative, path: str = "", within: tuple[int, ...] = ()) -> Layout:
    """Returns the layout of a tree.

    Args:
        tree: what a caller handed in.
        native: native(array, path) returns a native array, or raises.
        path: where the tree hangs in a larger one.
        within: the ids of the containers that it hangs in.

    Raises:
        Unfit: a container is in itself, could not be made anew, or has a key that cannot be found again.
    """
    if is_array(tree):
        array = native(tree, path)
        return ArrayLayout(array.shape, str(array.dtype))
    children = _children(tree)
    if children is None:
        return LeafLayout(tree)
    _check_container(tree, children, path, within)
    inner = (*within, id(tree))
    return ContainerLayout(
        _kind(tree), [(key, layout_of(child, native, join(path, key), inner)) for key, child in children.items()]
    )


def arrays_along(layout: Layout, tree: Any, native: ToNative, path: str = "") -> Iterator[tuple[str, Array]]:
    """Yields the arrays of a tree with their paths, in the order of a layout.

    Raises:
        Difference: the tree has another layout.
    """
    if isinstance(layout, ContainerLayout):
        children = _children(tree)
        if children is None or _kind(tree) != layout.kind:
            raise _difference(path, layout, tree, native)
        _check_keys(path, layout, children, native)
        for key, child in layout.children:
            yield from arrays_along(child, children[key], native, join(path, key))
    elif isinstance(layout, ArrayLayout):
        array = native(tree, path) if is_array(tree) else None
        if array is None or (array.shape, str(array.dtype)) != layout:
            raise _difference(path, layout, tree, native)
        yield path, array
    elif is_array(tree) or _children(tree) is not None:
        raise _difference(path, layout, tree, native)


def rebuilt(layout: Layout, tree: Any) -> Any:
    """Returns a tree of the same containers, with its own arrays and the layout's other values.

    Args:
        layout: one that the tree follows.
        tree: left as it is, but for its arrays, which are shared.
    """
    if isinstance(layout, ArrayLayout):
        return tree
    if isinstance(layout, LeafLayout):
        return layout.value
    children = _children(tree) or {}
    return _filled(tree, {key: rebuilt(child, children[key]) for key, child in layout.children})


def leaves_of(tree: Any) -> list[tuple[str, Any]]:
    """Returns what is in a tree and no container, with its path.

    Raises:
        Unfit: see layout_of.
    """
    return list(_leaves(tree, "", ()))


def with_leaves(tree: Any, leaves: Iterator[Any]) -> Any:
    """Returns a tree of the same containers, with other leaves in place of its own, in the order of leaves_of."""
    children = _children(tree)
    if children is None:
        return next(leaves)
    return _filled(tree, {key: with_leaves(child, leaves) for key, child in children.items()})


def join(path: str, key: Hashable) -> str:
    """Returns the path of a child, e.g. "optimizer/momentum/0"."""
    return f"{path}/{key}" if path else str(key)


def _leaves(tree: Any, path: str, within: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    children = _children(tree)
    if children is None:
        yield path, tree
        return
    _check_container(tree, children, path, within)
    inner = (*within, id(tree))
    for key, child in children.items():
        yield from _leaves(child, join(path, key), inner)


def is_array(value: Any) -> bool:
    """Whether a value has memory to be written to: a shape and a dtype alone may also describe something."""
    if isinstance(value, np.ndarray):
        return True
    exports = hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__")
    return exports and not isinstance(value, (np.generic, type))


def _children(tree: Any) -> dict[Hashable, Any] | None:
    """Returns what is in a container, by key; None for what is no container."""
    if isinstance(tree, dict):
        return tree
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return dict(zip(tree._fields, tree, strict=True))
    if isinstance(tree, (list, tuple)) and not hasattr(tree, "n_sequence_fields"):  # such as time.struct_time
        return dict(enumerate(tree))
    if _is_dataclass(tree):
        names = [field.name for field in dataclasses.fields(tree)]
        return {name: getattr(tree, name) for name in names if hasattr(tree, name)}
    return None


def _filled(tree: Any, children: dict[Hashable, Any]) -> Any:
    """Returns a container of a container's type, with other children."""
    if isinstance(tree, tuple):
        # As namedtuple's _make does: a class of tuples may want other arguments than its items.
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
            object.__setattr__(filled, str(name), value)  # frozen dataclasses too
    return filled


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _kind(tree: Any) -> str:
    kind = type(tree).__qualname__
    return f"dataclass {kind}" if _is_dataclass(tree) else kind


def _check_container(tree: Any, children: dict[Hashable, Any], path: str, within: tuple[int, ...]) -> None:
    where = path or "the tree itself"
    if id(tree) in within:
        raise Unfit(f"{where}: this {_kind(tree)} is in itself: a tree must end somewhere")
    for key in children:
        if key != key:  # NaN, which no other rank would find by its own
            raise Unfit(f"{where}: a dict has the key {key!r}, which is not equal to itself: name it otherwise")
    try:
        _filled(tree, children)
    except Exception as error:
        raise Unfit(f"{where}: no other {_kind(tree)} can be made like this one: {describe(error)}") from error


def _check_keys(path: str, layout: ContainerLayout, children: dict[Hashable, Any], native: ToNative) -> None:
    of_root = dict(layout.children)
    for key in of_root:
        if key not in children:
            raise Difference(f"{join(path, key)}: {of_root[key]} against nothing")
    for key, child in children.items():
        if key not in of_root:
            where = join(path, key)
            raise Difference(f"{where}: nothing against {layout_of(child, native, where)}")


def _difference(path: str, layout: Layout, tree: Any, native: ToNative) -> Difference:
    return Difference(f"{path or 'the tree itself'}: {layout} against {layout_of(tree, native, path)}")
