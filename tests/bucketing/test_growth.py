"""Hundreds of equal steps need no more memory than one, and a steady step allocates next to nothing."""

from __future__ import annotations

import growth_checks as checks
import pytest

from contract import IS_EVERYWHERE
from places import SHM


@pytest.mark.parametrize(("world_size", "steps"), [(1, 1000), (2, 500)] if IS_EVERYWHERE else [(2, 200)])
def test_nothing_grows(world_size: int, steps: int) -> None:
    modes = tuple(checks.MODES) if IS_EVERYWHERE else ("views", "watched")  # the most that is kept between steps
    assert SHM.run(world_size, checks.measure, modes, steps) == [[]] * world_size


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_that_the_program_drops_are_freed_at_once(world_size: int) -> None:
    assert SHM.run(world_size, checks.keep_dropped_gradients) == [[]] * world_size
