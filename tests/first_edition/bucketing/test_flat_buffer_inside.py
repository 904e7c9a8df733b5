"""Packing and splitting: inverse of each other, for any shapes and layouts."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gradsync.bucketing.flat_buffer import FlatBuffer

array_lists = st.sampled_from(["f4", "f8", "i2", "c8", "?"]).flatmap(
    lambda dtype: st.lists(
        hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)),
        min_size=1,
        max_size=8,
    )
)


@given(array_lists)
def test_flat_buffer_round_trip(arrays) -> None:
    buffer = FlatBuffer(np)
    flats = [array.reshape(-1) for array in arrays]
    for _ in range(2):
        targets = [np.empty_like(flat) for flat in flats]
        packed = buffer.pack(flats)
        buffer.split(packed, targets)
        for flat, target in zip(flats, targets, strict=True):
            np.testing.assert_array_equal(flat, target)


def test_flat_buffer_is_reused() -> None:
    buffer = FlatBuffer(np)
    large, small = [np.zeros(10), np.ones(5)], [np.ones(3)]
    first = buffer.pack(large)
    assert np.shares_memory(buffer.pack(small), first)
    assert np.shares_memory(buffer.pack(large), first)
