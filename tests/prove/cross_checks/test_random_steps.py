"""Random steps, drawn by hypothesis: arrays that come again or do not, in any order, with some missing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from random_steps import MODES, NAMES, SOURCES, Program, RandomStep, play

from rank_pool import RankPool

pytestmark = pytest.mark.timeout(400)  # shrinking what fails takes new ranks for each attempt

hypothesis_settings = hypothesis.settings(
    max_examples=40,
    derandomize="CI" in os.environ,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)


@st.composite
def programs(draw: Any, world_size: int) -> Program:
    mode = draw(st.sampled_from(MODES))
    subsets = st.lists(st.sampled_from(NAMES), unique=True, max_size=len(NAMES))
    steps: list[RandomStep] = []
    for number in range(draw(st.integers(1, 7))):
        if steps and draw(st.booleans()):  # loops repeat themselves
            steps.append(steps[-1])
            continue
        if mode == "plain" or (mode == "learnt" and number == 0):
            names = [draw(subsets) if mode == "plain" else list(NAMES)] * world_size
        elif mode == "zero":
            names = [draw(subsets) for _ in range(world_size)]
        else:
            names = [draw(st.permutations(NAMES)) for _ in range(world_size)]
        sources = [{name: draw(st.sampled_from(("own", *SOURCES))) for name in NAMES} for _ in range(world_size)]
        steps.append(RandomStep(names, sources, draw(st.booleans())))
    return Program(mode, draw(st.sampled_from(["mean", "sum"])), draw(st.sampled_from([1, 700, 10**7])), steps)


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[Any, RankPool]]:
    made = {
        "shm": RankPool(2, backend="shm"),
        "local": RankPool(1, backend="local"),
        "nccl": RankPool(2, backend="nccl", stand_in=True),
    }
    yield made
    for pool in made.values():
        pool.close()


@pytest.mark.parametrize(
    ("backend", "world_size", "kit"),
    [("shm", 2, "numpy"), ("local", 1, "numpy"), ("nccl", 2, "cupy"), ("nccl", 2, "mixed")],
)
def test_random_steps(pools: dict[str, RankPool], backend: str, world_size: int, kit: str) -> None:
    @hypothesis_settings
    @hypothesis.given(program=programs(world_size))
    def check(program: Program) -> None:
        pools[backend].run(play, kit, program)

    check()
