"""broadcast_tree: a training's whole state in one call; and how trees are taken apart, without ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gradsync.bucketing.trees import Difference, arrays_along, layout_of, rebuilt

# -- What needs no second process ---------------------------------------------------------------------------------


def native(array: Any, path: str) -> Any:
    return np.asarray(array)


keys = st.one_of(st.text(max_size=3), st.integers(), st.tuples(st.integers()), st.none())
leaves = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.builds(lambda n: np.arange(n), st.integers(0, 4)))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple), st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


@given(trees)
def test_a_tree_follows_its_own_layout(tree: Any) -> None:
    layout = layout_of(tree, native)
    arrays = [array for _, array in arrays_along(layout, tree, native)]
    whole = rebuilt(layout, tree)
    assert repr(whole) == repr(tree)
    assert [id(array) for _, array in arrays_along(layout, whole, native)] == [id(array) for array in arrays]


@given(trees, trees)
def test_two_trees_are_the_same_or_differ_somewhere(one: Any, other: Any) -> None:
    layout = layout_of(one, native)
    try:
        arrays = list(arrays_along(layout, other, native))
    except Difference as found:
        assert ": " in str(found)
        assert " against " in str(found)
    else:
        mine = [(path, array.shape, array.dtype) for path, array in arrays_along(layout, one, native)]
        assert [(path, array.shape, array.dtype) for path, array in arrays] == mine
