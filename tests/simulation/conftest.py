"""Options of the simulation, for whoever runs this folder alone: `pytest tests/simulation --seeds 1000`."""

from __future__ import annotations

import pytest

SEEDS, SEEDS_AT_ONCE = 200, 25
SLOW_SEEDS, SLOW_SEEDS_AT_ONCE = 20_000, 500  # of -m slow


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("simulation")
    group.addoption("--seeds", type=int, help=f"how many seeds to play [{SEEDS}; {SLOW_SEEDS} with -m slow]")
    group.addoption("--seed", type=int, help="play this one, and print all that happens (with -s, or where it fails)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" in metafunc.fixturenames:
        metafunc.parametrize("seeds", _chunks(metafunc.config), ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")


def _chunks(config: pytest.Config) -> list[object]:
    """Returns the ranges of seeds, one for each case, so that they spread over the workers."""
    one = config.getoption("--seed", default=None)
    if one is not None:
        return [range(one, one + 1)]
    count = config.getoption("--seeds", default=None)
    if count is not None:
        return _cut(0, count, SEEDS_AT_ONCE)
    slow = _cut(SEEDS, SLOW_SEEDS, SLOW_SEEDS_AT_ONCE)
    return [*_cut(0, SEEDS, SEEDS_AT_ONCE), *(pytest.param(seeds, marks=pytest.mark.slow) for seeds in slow)]


def _cut(first: int, last: int, at_once: int) -> list[range]:
    return [range(start, min(start + at_once, last)) for start in range(first, last, at_once)]
