"""The hooks of examples/hooks.py between processes: bounded errors, the same bits, and training that converges."""

from __future__ import annotations

import pytest

import hook_checks as checks
from places import GPU, SHM, STAND_IN, Place, on

PLACES = [*on(SHM, 1, 2, 3), *on(STAND_IN, 2), *on(GPU, 2)]


@pytest.mark.parametrize(("place", "world_size"), PLACES)
@pytest.mark.parametrize("kind", ["float16", "bfloat16", "8 bit", "low rank"])
def test_results_are_right_and_have_the_same_bits_on_all_ranks(place: Place, world_size: int, kind: str) -> None:
    results = place.run(world_size, checks.all_of_it, kind)
    assert results == [results[0]] * world_size


@pytest.mark.parametrize("kind", ["8 bit", "low rank", None])
def test_descent_converges(kind: str | None) -> None:
    """To within a hundred-thousandth of the length of the solution, with each hook as without."""
    distances = SHM.run(2, checks.least_squares, kind)
    assert distances == [distances[0]] * 2
    assert distances[0] < 1e-5


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 2), *on(STAND_IN, 2), *on(GPU, 2)])
def test_a_callback_trains_with_each_of_them(place: Place, world_size: int) -> None:
    for distances in place.run(world_size, checks.train):
        assert max(distances) < 1e-3
