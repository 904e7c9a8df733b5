"""Thousands of equal steps need no more memory than one, and a steady step allocates next to nothing."""

from __future__ import annotations

import growth_checks as checks
import pytest

from places import SHM


@pytest.mark.timeout(300)  # so many steps take minutes where the ranks have no core of their own
@pytest.mark.parametrize(("mode", "steps"), [("plain", checks.STEPS), ("views", checks.STEPS), ("parameters", 500)])
def test_nothing_grows(mode: str, steps: int) -> None:
    assert SHM.run(2, checks.measure, (mode,), steps, timeout=290.0) == [[], []]


def test_nothing_grows_on_one_rank() -> None:
    assert SHM.run(1, checks.measure, tuple(checks.MODES), 1000) == [[]]


def test_watching_allocates_nothing_either() -> None:
    assert SHM.run(2, checks.measure, ("watched",), 500) == [[], []]
