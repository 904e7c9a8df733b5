"""The shipped hooks between processes: bounded errors, the same bits, and training that converges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradsync as gs
import hook_checks as checks
from places import GPU, SHM, STAND_IN, Place, on

PLACES = [*on(SHM, 1, 2, 3), *on(STAND_IN, 2), *on(GPU, 2)]
KINDS = ["8 bit", "low rank"]


@pytest.mark.parametrize(("place", "world_size"), PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_right_and_have_the_same_bits_on_all_ranks(place: Place, world_size: int, kind: str) -> None:
    results = place.run(world_size, checks.all_of_it, kind)
    assert results == [results[0]] * world_size


def test_descent_converges() -> None:
    """To within a hundred-thousandth of the length of the solution, with each hook as without."""
    for kind in (None, *KINDS):
        distances = SHM.run(2, checks.least_squares, kind)
        assert distances == [distances[0]] * 2, kind
        assert distances[0] < 1e-5, kind


@pytest.mark.parametrize("options", [{"rank": 0}, {"rank": True}, {"rank": 1.5}, {"start_after": -1}])
def test_bad_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(gs.InvalidArgument, match="PowerSGDHook needs (rank|start_after) to be an integer of at least"):
        gs.hooks.PowerSGDHook(**options)


def test_seeds_are_for_ever() -> None:
    numbers = gs.hooks._seeded((3, 2), 7)
    assert np.abs(numbers).max() < 1
    assert (numbers == gs.hooks._seeded((3, 2), 7)).all()
    assert (numbers != gs.hooks._seeded((3, 2), 8)).all()
