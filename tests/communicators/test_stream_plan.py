"""The cut of a list into chunks and slices: every element once."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gradsync.communicators.shared_memory.stream_plan import plan_stream

sizes_lists = st.lists(st.integers(0, 300), min_size=1, max_size=12).map(tuple)


@given(sizes_lists, st.integers(1, 100), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 5))
def test_the_slices_of_a_chunk_are_all_its_elements_in_order(sizes, chunk, itemsize, world_size) -> None:
    elements = [(array, i) for array, size in enumerate(sizes) for i in range(size)]
    plan = plan_stream(sizes, chunk, itemsize, world_size)
    for number, slices in enumerate(plan):
        assert len(slices) == world_size
        covered = [(array, i) for region in slices for array, begin, end in region.pieces for i in range(begin, end)]
        assert covered == elements[number * chunk : (number + 1) * chunk]
        assert slices[0].begin == 0
        for region, following in pairwise(slices):
            assert region.end == following.begin
        for region in slices:
            assert sum(end - begin for _, begin, end in region.pieces) == region.end - region.begin
    assert sum(slices[-1].end for slices in plan) == len(elements)


@given(st.integers(1, 10_000), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 5))
def test_slices_begin_on_cache_lines(size, itemsize, world_size) -> None:
    (slices,) = plan_stream((size,), size, itemsize, world_size)
    for region in slices:
        assert region.begin * itemsize % 64 == 0 or region.begin == size
