"""The cut of a list into chunks and slices: every element once, for every rank's view."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gradsync.communicators.shared_memory.stream_plan import plan_stream

sizes_lists = st.lists(st.integers(0, 300), min_size=1, max_size=12).map(tuple)


@given(sizes_lists, st.integers(1, 100), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 5))
def test_each_rank_sees_all_elements_and_owns_its_share(sizes, chunk, itemsize, world_size) -> None:
    elements = [(array, i) for array, size in enumerate(sizes) for i in range(size)]
    plans = [plan_stream(sizes, chunk, itemsize, rank, world_size) for rank in range(world_size)]
    owned = []
    for number in range(len(plans[0])):
        for plan in plans:
            own, others = plan[number]
            regions = sorted([own, *others])
            covered = [e for region in regions for a, b, c in region.pieces for e in ((a, i) for i in range(b, c))]
            assert covered == elements[number * chunk : (number + 1) * chunk]
            for region in regions:
                assert sum(end - begin for _, begin, end in region.pieces) == region.end - region.begin
            owned += [(a, i) for a, b, c in own.pieces for i in range(b, c)]
    assert sorted(owned) == elements


@given(st.integers(1, 10_000), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 5))
def test_slices_begin_on_cache_lines(size, itemsize, world_size) -> None:
    for rank in range(world_size):
        (chunk,) = plan_stream((size,), size, itemsize, rank, world_size)
        assert chunk.own.begin * itemsize % 64 == 0 or chunk.own.begin == size
