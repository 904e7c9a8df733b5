"""The norm: its factor, and how ranks share the work on what all of them have."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradsync as gs
from gradsync.bucketing.values import clip_factor
from gradsync.communicators.pieces import share_of


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
