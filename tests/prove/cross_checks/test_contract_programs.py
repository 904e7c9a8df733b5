"""Random programs of collectives, groups and futures, drawn by hypothesis, on ranks that stay from one to the next."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from typing import Any, TypeVar

import hypothesis
import pytest
from hypothesis import strategies as st
from programs import Step, draw_groups, draw_step, playing

from contract import KITS
from rank_pool import RankPool

T = TypeVar("T")

_DTYPES = ("float32", "int64", "bfloat16", "complex64", "bool", "uint8", "float16", "float64", "int16")
_HOST_DTYPES = (*_DTYPES, "datetime64", "structured", "foreign byte order")
_LARGE = 20_000

pytestmark = pytest.mark.timeout(400)  # shrinking a program that fails takes new ranks for each attempt

hypothesis_settings = hypothesis.settings(
    max_examples=40,
    derandomize="CI" in os.environ,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)


class Drawn:
    """Choices that hypothesis makes, and shrinks towards the first option and the lowest number."""

    def __init__(self, draw: Any) -> None:
        self._draw = draw

    def among(self, options: Sequence[T]) -> T:
        return self._draw(st.sampled_from(list(options)))

    def number(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))


@st.composite
def programs(draw: Any, world_size: int, dtypes: Sequence[str]) -> tuple[list[tuple[int, ...]], list[Step]]:
    choices = Drawn(draw)
    groups = draw_groups(choices, world_size)
    steps = [
        draw_step(choices, groups, dtypes=dtypes, most_rows=choices.among((5, 60, _LARGE)))
        for _ in range(choices.number(1, 8))
    ]
    return groups, steps


def play(comm: Any, kit: str, groups: Sequence[tuple[int, ...]], steps: Sequence[Step]) -> None:
    with playing(comm, KITS[kit](), groups) as player:
        for step in steps:
            player.play(step)


PLACES = [
    (1, "numpy", {"backend": "local"}),
    *[(world_size, "numpy", {"backend": "shm"}) for world_size in (1, 2, 3, 4)],
    *[(2, kit, {"backend": "nccl", "stand_in": True}) for kit in ("cupy", "numpy")],
]


@pytest.mark.parametrize(
    ("world_size", "kit", "options"), PLACES, ids=[f"{place[2]['backend']}, {place[0]}, {place[1]}" for place in PLACES]
)
def test_random_programs(world_size: int, kit: str, options: dict[str, Any]) -> None:
    with closing(RankPool(world_size, **options)) as pool:

        @hypothesis_settings
        @hypothesis.given(program=programs(world_size, _DTYPES if kit == "cupy" else _HOST_DTYPES))
        def check(program: Any) -> None:
            pool.run(play, kit, *program)

        check()
