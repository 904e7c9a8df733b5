"""The check for NaN and infinity, and the norm, between processes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import shared_result_checks as checks
from hypothesis import given
from hypothesis import strategies as st

import gradsync as gs
from gradsync.bucketing.finite_check import FiniteCheck
from gradsync.bucketing.gradient_norm import clip_factor
from gradsync.communicators.pieces import share_of
from places import GPU, SHM, STAND_IN, STAND_IN_SLOW, Place, on

PLACES = [*on(SHM, 1, 2, 3), *on(STAND_IN, 1, 2), *on(STAND_IN_SLOW, 2), *on(GPU, 1, 2)]


@pytest.mark.parametrize(("place", "world_size"), PLACES)
def test_what_is_not_finite_is_found(place: Place, world_size: int) -> None:
    told = place.run(world_size, checks.find_what_is_not_finite)
    assert told == [told[0]] * world_size
    assert f"'w3' on rank {world_size - 1}" in told[0][0]


@pytest.mark.parametrize(("place", "world_size"), PLACES)
def test_an_overflow_is_told(place: Place, world_size: int) -> None:
    told = place.run(world_size, checks.tell_an_overflow)
    assert told == [told[0]] * world_size
    assert world_size == 1 or "of every rank are finite, but the sum overflowed" in told[0]


@pytest.mark.parametrize(("place", "world_size"), PLACES)
def test_a_failed_step_is_forgotten(place: Place, world_size: int) -> None:
    place.run(world_size, checks.forget_a_failed_step)


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 2), *on(STAND_IN, 2)])
def test_off(place: Place, world_size: int) -> None:
    place.run(world_size, checks.find_nothing_when_off)


def test_a_rank_without_gradients() -> None:
    assert SHM.run(2, checks.know_no_names) == ["w", "gradient number 0 of the step"]


@pytest.mark.parametrize(("place", "world_size"), PLACES)
def test_norms(place: Place, world_size: int) -> None:
    told = place.run(world_size, checks.norms)
    assert told == [told[0]] * world_size


@pytest.mark.parametrize("policy", ["on", "", None, True, "Raise"])
def test_unknown_policies(policy: Any) -> None:
    with pytest.raises(gs.InvalidArgument, match="one of 'off', 'raise', 'skip', got"):
        FiniteCheck(policy)


def test_the_factor_that_clips() -> None:
    assert clip_factor(0.0, 1.0) == clip_factor(0.5, 1) == clip_factor(1e-3, math.inf) == 1.0
    assert clip_factor(10.0, 1.0) == 1.0 / (10.0 + 1e-6)  # as torch.nn.utils.clip_grad_norm_
    assert clip_factor(math.inf, 1.0) == 0.0
    assert math.isnan(clip_factor(math.nan, 1.0))
    for max_norm in (0, -1.0, math.nan, True, "1", None):
        with pytest.raises(gs.InvalidArgument, match="max_norm must be a number above 0"):
            clip_factor(1.0, max_norm)  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 100), max_size=8), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 5))
def test_shares_are_all_of_it(sizes: list[int], itemsize: int, world_size: int) -> None:
    shares = [share_of(tuple(sizes), itemsize, rank, world_size) for rank in range(world_size)]
    elements = [(p.array, at) for share in shares for p in share for at in range(p.begin, p.end)]
    assert elements == [(array, at) for array, size in enumerate(sizes) for at in range(size)]
    lengths = [sum(piece.end - piece.begin for piece in share) for share in shares]
    assert max(lengths) <= -(-sum(sizes) // world_size) + 64 // itemsize
