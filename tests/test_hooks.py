"""The shipped hooks between processes: bounded errors, the same bits, and training that converges."""

from __future__ import annotations

import subprocess
import sys
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
def test_one_step(place: Place, world_size: int, kind: str) -> None:
    results = place.run(world_size, checks.one_step, kind)
    assert results == [results[0]] * world_size


@pytest.mark.parametrize(("place", "world_size"), PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_results_converge_to_the_mean(place: Place, world_size: int, kind: str) -> None:
    place.run(world_size, checks.converge_to_the_mean, kind)


@pytest.mark.parametrize(("place", "world_size"), PLACES)
def test_low_rank_matrices_are_exact(place: Place, world_size: int) -> None:
    place.run(world_size, checks.low_rank_matrices_are_exact)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_descent_converges(world_size: int) -> None:
    """To within a hundred-thousandth of the length of the solution, with each hook as without."""
    for kind in (None, *KINDS):
        distances = SHM.run(world_size, checks.least_squares, kind)
        assert distances == [distances[0]] * world_size, kind
        assert distances[0] < 1e-5, kind


@pytest.mark.parametrize(("place", "world_size"), PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_recovery(place: Place, world_size: int, kind: str) -> None:
    place.run(world_size, checks.recover, kind)


@pytest.mark.parametrize(("place", "world_size"), PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_compressed(place: Place, world_size: int, kind: str) -> None:
    place.run(world_size, checks.leave_as_they_are, kind)


@pytest.mark.parametrize("options", [{"rank": 0}, {"rank": True}, {"rank": 1.5}, {"start_after": -1}])
def test_bad_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(gs.InvalidArgument, match="LowRankHook: (rank|start_after) must be an integer of at least"):
        gs.hooks.LowRankHook(**options)


def test_they_load_lazily() -> None:
    code = "import sys, gradsync; assert 'gradsync.hooks' not in sys.modules; gradsync.hooks.EightBitHook()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_seeds_are_for_ever() -> None:
    numbers = gs.hooks._seeded((3, 2), 7)
    assert np.abs(numbers).max() < 1
    assert (numbers == gs.hooks._seeded((3, 2), 7)).all()
    assert (numbers != gs.hooks._seeded((3, 2), 8)).all()
