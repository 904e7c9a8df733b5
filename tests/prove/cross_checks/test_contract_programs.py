"""Random programs of collectives, groups and futures, drawn by hypothesis, on ranks that stay from one to the next."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
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


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[Any, RankPool]]:
    made: dict[Any, RankPool] = {}
    yield made
    for pool in made.values():
        pool.close()


def pool_of(pools: dict[Any, RankPool], world_size: int, **options: Any) -> RankPool:
    key = (world_size, *options.items())
    if key not in pools:
        pools[key] = RankPool(world_size, **options)
    return pools[key]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_random_programs_over_shared_memory(pools: dict[Any, RankPool], world_size: int) -> None:
    pool = pool_of(pools, world_size, backend="shm")

    @hypothesis_settings
    @hypothesis.given(program=programs(world_size, _HOST_DTYPES))
    def check(program: Any) -> None:
        pool.run(play, "numpy", *program)

    check()


@pytest.mark.parametrize("kit", ["cupy", "numpy"])
def test_random_programs_on_the_stand_in_for_nccl(pools: dict[Any, RankPool], kit: str) -> None:
    pool = pool_of(pools, 2, backend="nccl", stand_in=True)

    @hypothesis_settings
    @hypothesis.given(program=programs(2, _DTYPES if kit == "cupy" else _HOST_DTYPES))
    def check(program: Any) -> None:
        pool.run(play, kit, *program)

    check()


def test_random_programs_on_one_local_rank(pools: dict[Any, RankPool]) -> None:
    pool = pool_of(pools, 1, backend="local")

    @hypothesis_settings
    @hypothesis.given(program=programs(1, _HOST_DTYPES))
    def check(program: Any) -> None:
        pool.run(play, "numpy", *program)

    check()


def fail_on_one(comm: Any) -> None:
    assert comm.rank != 1, "wrong bits"
    comm.barrier()


def test_a_pool_tells_a_failure_and_goes_on_with_new_ranks(pools: dict[Any, RankPool]) -> None:
    pool = pool_of(pools, 2, backend="shm")
    with pytest.raises(AssertionError, match=r"rank 1:(.|\n)*wrong bits"):
        pool.run(fail_on_one)
    assert pool.run(rank_of) == [0, 1]


def rank_of(comm: Any) -> int:
    return comm.rank
