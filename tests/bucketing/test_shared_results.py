"""The check for NaN and infinity, and the norm, between processes."""

from __future__ import annotations

import pytest
import shared_result_checks as checks

from places import GPU, SHM, STAND_IN, STAND_IN_SLOW, Place, on

PLACES = [*on(SHM, 1, 2, 3), *on(STAND_IN, 1, 2), *on(STAND_IN_SLOW, 2), *on(GPU, 1, 2)]


@pytest.mark.parametrize(("place", "world_size"), PLACES)
def test_what_is_not_finite_is_found(place: Place, world_size: int) -> None:
    told = place.run(world_size, checks.find_what_is_not_finite)
    assert told == [told[0]] * world_size
    assert f"'w3' on rank {world_size - 1}" in told[0][0]


@pytest.mark.parametrize(("place", "world_size"), PLACES)
def test_an_overflow_is_told(place: Place, world_size: int) -> None:
    told = place.run(world_size, checks.tell_an_overflow)
    assert told == [told[0]] * world_size
    assert world_size == 1 or "of every rank are finite, but the sum overflowed" in told[0]


@pytest.mark.parametrize(("place", "world_size"), PLACES)
def test_a_failed_step_is_forgotten(place: Place, world_size: int) -> None:
    place.run(world_size, checks.forget_a_failed_step)


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 2), *on(STAND_IN, 2)])
def test_off(place: Place, world_size: int) -> None:
    place.run(world_size, checks.find_nothing_when_off)


def test_a_rank_without_gradients() -> None:
    assert SHM.run(2, checks.know_no_names) == ["w", "gradient number 0 of the step"]


@pytest.mark.parametrize(("place", "world_size"), PLACES)
def test_norms(place: Place, world_size: int) -> None:
    told = place.run(world_size, checks.norms)
    assert told == [told[0]] * world_size
