"""broadcast_tree: a training's whole state in one call; and how trees are taken apart, without ranks."""

from __future__ import annotations

import pytest
import tree_checks as checks

from places import GPU, SHM, STAND_IN, STAND_IN_MIXED, STAND_IN_STAGED, Place, always_on, on


@pytest.mark.parametrize(
    ("place", "world_size"),
    [*on(SHM, 1, 3), *on(STAND_IN, 1, 2), *always_on(STAND_IN_STAGED, 2), *on(STAND_IN_MIXED, 2), *on(GPU, 2)],
)
def test_all_ranks_get_the_root_s_state(place: Place, world_size: int) -> None:
    place.run(world_size, checks.broadcast_everything, place.kit)


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 2, 3), *on(STAND_IN, 2), *on(GPU, 2)])
def test_the_first_difference_is_named_on_every_rank(place: Place, world_size: int) -> None:
    by_rank = place.run(world_size, checks.differ, place.kit)
    assert by_rank == [by_rank[0]] * world_size


def test_an_array_that_cannot_be_written_to_is_told_before_anything_is_sent() -> None:
    SHM.run(2, checks.write_where_it_cannot)


def test_what_one_rank_cannot_read_is_told_to_all() -> None:
    first, second = SHM.run(2, checks.send_what_cannot_be_read)
    assert first == second
    assert "rank 1: the root's tree cannot be unpickled on this rank: SystemExit: an extension is missing" in first


def test_containers_of_odd_classes() -> None:
    SHM.run(2, checks.broadcast_odd_containers)


def test_a_tree_that_cannot_be_taken_apart_is_told_before_anything_is_sent() -> None:
    SHM.run(2, checks.refuse_before_anything_is_sent)


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 2), *always_on(STAND_IN_STAGED, 2)])
def test_two_values_for_one_memory_are_refused(place: Place, world_size: int) -> None:
    first, second = place.run(world_size, checks.share_memory_between_leaves)
    assert first == second
    assert "rank 1: b/c: shares memory with a, but not on the root" in first
