"""Packing and splitting: inverse of each other, for any shapes and layouts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import gradsync as gs

array_lists = st.sampled_from(["f4", "f8", "i2", "c8", "?"]).flatmap(
    lambda dtype: st.lists(
        hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)),
        min_size=1,
        max_size=8,
    )
)
layout = st.sampled_from([np.ascontiguousarray, np.asfortranarray, lambda a: a[..., ::-1][..., ::-1] if a.ndim else a])


@given(array_lists, layout)
def test_split_is_the_inverse_of_concat(arrays, change_layout) -> None:
    shapes = [array.shape for array in arrays]
    offsets = gs.get_offsets(shapes)
    flat = gs.param_pack_concat([np.asarray(change_layout(a)).reshape(a.shape) for a in arrays], offsets)
    assert flat.shape == (sum(a.size for a in arrays),)
    for original, view in zip(arrays, gs.param_pack_split(flat, offsets, shapes), strict=True):
        np.testing.assert_array_equal(view, original)
        assert view.size == 0 or np.shares_memory(view, flat)


def test_offsets() -> None:
    assert gs.get_offsets([(2, 3), (), (0, 4), (5,)]) == [0, 6, 6, 7, 7, 7, 7, 12]
    assert gs.get_offsets([]) == []


def test_offsets_on_a_device_and_on_the_host() -> None:
    arrays = [np.ones(2), np.ones(3)]
    offsets = gs.get_offsets([a.shape for a in arrays])
    assert gs.param_pack_concat(arrays, np.array(offsets)).sum() == 5
    assert gs.param_pack_concat(arrays, "somewhere else", offsets).sum() == 5


def test_concat_into_out() -> None:
    out = np.zeros(10)
    flat = gs.param_pack_concat([np.ones(2), np.ones((2, 2))], [0, 2, 2, 6], out=out)
    assert np.shares_memory(flat, out)
    np.testing.assert_array_equal(out, [1] * 6 + [0] * 4)


@pytest.mark.parametrize(
    ("inputs", "offsets", "options", "text"),
    [
        ([], [], {}, "at least one"),
        ([np.ones(2), np.ones(2, "f4")], [0, 2, 2, 4], {}, "one dtype"),
        ([np.ones(2)], [0, 3], {}, "offsets"),
        ([np.ones(2)], [0, 2, 2, 4], {}, "offsets"),
        ([np.ones(2)], [0, 2], {"out": np.zeros(1)}, "out"),
        ([np.ones(2)], [0, 2], {"out": np.zeros(2, "f4")}, "out"),
        ([np.ones(2)], [0, 2], {"out": np.zeros((2, 2))}, "out"),
        ([np.ones(2)], [0, 2], {"out": np.zeros(8)[::2]}, "out"),
    ],
)
def test_concat_refuses(inputs, offsets, options, text) -> None:
    with pytest.raises(gs.InvalidArgument, match=text):
        gs.param_pack_concat(inputs, offsets, **options)


def test_split_refuses() -> None:
    with pytest.raises(gs.InvalidArgument, match="at least 6"):
        gs.param_pack_split(np.zeros(5), [0, 6], [(2, 3)])
    with pytest.raises(gs.InvalidArgument, match="offsets"):
        gs.param_pack_split(np.zeros(6), [0, 5], [(2, 3)])
    with pytest.raises(gs.InvalidArgument, match="shapes of integers"):
        gs.get_offsets([(2, -1)])
