"""average_gradients: all gradients at once, on every backend."""

from __future__ import annotations

import average_checks as checks
import pytest

from places import GPU, SHM, STAND_IN, STAND_IN_MIXED, STAND_IN_SLOW, STAND_IN_STAGED, Place, always_on, on
from rank_processes import run_ranks


@pytest.mark.parametrize(
    ("place", "world_size"),
    [
        *on(SHM, 1, 2, 3),
        *on(STAND_IN, 2),
        *on(STAND_IN_STAGED, 2),
        *always_on(STAND_IN_MIXED, 2),
        *on(STAND_IN_SLOW, 2),
        *on(GPU, 2),
    ],
)
def test_every_leaf_is_averaged_and_every_container_kept(place: Place, world_size: int) -> None:
    place.run(world_size, checks.average_everything, place.kit)


@pytest.mark.parametrize("world_size", [2, 3])
def test_numbers_and_arrays_that_nobody_may_write_to(world_size: int) -> None:
    SHM.run(world_size, checks.average_what_is_no_array)


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 2, 3), *on(STAND_IN, 2)])
def test_the_first_difference_is_named_on_every_rank(place: Place, world_size: int) -> None:
    by_rank = place.run(world_size, checks.differ, place.kit)
    assert by_rank == [by_rank[0]] * world_size


def test_what_is_no_tree_of_gradients_is_refused() -> None:
    SHM.run(2, checks.refuse)


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 1, 2), *on(STAND_IN, 2)])
def test_a_callback_does_what_it_was_made_for(place: Place, world_size: int) -> None:
    place.run(world_size, checks.go_through_a_callback, place.kit)


def test_one_rank_costs_nothing() -> None:
    run_ranks(1, checks.keep_out_of_it, backend="local")


def test_long_lists_of_several_dtypes() -> None:
    SHM.run(2, checks.large_lists)
