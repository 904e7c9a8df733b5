"""Hooks in place of all-reduces, settings on which ranks differ, and several knobs at once."""

from __future__ import annotations

from typing import Any

import callback_hook_checks as checks
import pytest

from places import GPU, GPU_MIXED, SHM, STAND_IN, STAND_IN_MIXED, Place, on

PLACES = [
    *on(SHM, 1, 3),
    *on(STAND_IN, 2),
    *on(STAND_IN_MIXED, 2),
    *on(GPU, 1, 2),
    *on(GPU_MIXED, 2),
]


def hooks(comm: Any, kit_name: str) -> None:
    checks.hand_buckets_to_hooks(comm, kit_name)
    checks.refuse_what_hooks_do_wrong(comm, kit_name)


@pytest.mark.parametrize(("place", "world_size"), PLACES)
def test_hooks(place: Place, world_size: int) -> None:
    place.run(world_size, hooks, place.kit)


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 3), *on(STAND_IN, 2), *on(GPU, 2)])
def test_settings_that_differ_are_told_on_every_rank(place: Place, world_size: int) -> None:
    told = place.run(world_size, checks.differ, place.kit)
    assert told == [told[0]] * world_size


@pytest.mark.parametrize(
    ("place", "world_size"), [*on(SHM, 1, 3), *on(STAND_IN, 2), *on(STAND_IN_MIXED, 2), *on(GPU, 1, 2)]
)
def test_knobs_together(place: Place, world_size: int) -> None:
    place.run(world_size, checks.combine, place.kit)
