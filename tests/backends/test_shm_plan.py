"""The cut of a list into chunks and slices, every element once, for every rank's view; and the order of the steps.

By private names: that no rank touches memory which another is not done with shows from outside only as a rare race.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gradsync.communicators.shared_memory.all_reduce import Lengths, Section, Wait, plan_steps, plan_stream
from gradsync.communicators.shared_memory.arena import CHUNKS_IN_FLIGHT

sizes_lists = st.lists(st.integers(0, 300) | st.integers(2_000, 9_000), min_size=1, max_size=12).map(tuple)
itemsizes = st.sampled_from([1, 2, 4, 8, 16])
lengths_of_any_kind = st.builds(
    Lengths, st.integers(40, 6_000), st.integers(1, 2_000), st.integers(1, 2_000), st.integers(1, 2_000)
)


@given(sizes_lists, lengths_of_any_kind, itemsizes, st.integers(1, 5))
def test_each_rank_sees_all_elements_and_owns_its_share(sizes, lengths, itemsize, world_size) -> None:
    elements = [(array, i) for array, size in enumerate(sizes) for i in range(size)]
    plans = [plan_stream(sizes, lengths, itemsize, rank, world_size) for rank in range(world_size)]
    owned = []
    for number in range(len(plans[0])):
        for plan in plans:
            chunk = plan[number]
            wanted = elements[number * lengths.chunk : (number + 1) * lengths.chunk]
            assert covered_by([*chunk.own, *chunk.others]) == wanted
            owned += covered_by(chunk.own)
    assert sorted(owned) == elements


def covered_by(stretches: list[Section] | tuple[Section, ...]) -> list[tuple[int, int]]:
    covered = []
    for begin, end, pieces in sorted(stretches):
        assert sum(high - low for _, low, high in pieces) == end - begin > 0
        covered += [(array, i) for array, low, high in pieces for i in range(low, high)]
    return covered


@given(st.integers(1, 30))
def test_every_chunk_is_published_reduced_and_delivered_once(count) -> None:
    steps = list(plan_steps(count))
    for chunks in zip(*[(step.published, step.reduced, step.delivered) for step in steps], strict=True):
        assert [number for of_step in chunks for number in of_step] == list(range(count))
    assert [step.wait for step in steps].count(Wait.AGREEMENT) == 1
    assert steps[0].wait is Wait.AGREEMENT
    assert steps[-1].wait is Wait.NOBODY


@given(st.integers(1, 30))
def test_nobody_touches_a_slot_before_the_others_are_done_with_it(count) -> None:
    """What a rank does in a step, beside the slowest others that may still be where the waits let them be."""
    finished = 0  # steps that all others have ended for certain
    published, reduced, delivered = set[int](), set[int](), set[int]()
    steps = list(plan_steps(count))
    for number, step in enumerate(steps):
        published_by_all = {chunk for other in steps[:finished] for chunk in other.published}
        reduced_by_all = {chunk for other in steps[:finished] for chunk in other.reduced}
        assert set(step.delivered) <= reduced_by_all
        delivered |= set(step.delivered)
        assert all(chunk - CHUNKS_IN_FLIGHT in {*delivered, *range(-CHUNKS_IN_FLIGHT, 0)} for chunk in step.published)
        published |= set(step.published)
        assert set(step.reduced) <= published & published_by_all
        reduced |= set(step.reduced)
        if step.wait in (Wait.AGREEMENT, Wait.ALL):
            finished = number + 1
        elif step.wait is Wait.ALL_BEFORE:
            finished = number
    assert delivered == set(range(count))
