"""Overlaps are found whatever the order, and whatever the step before was like; equal to a naive comparison."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradsync as gs
from gradsync.bucketing.gradient import OverlapCheck
from gradsync.communicators.host_arrays import ArrayKind

BASE = np.zeros(64)
views = st.tuples(st.integers(0, 60), st.integers(0, 12), st.integers(1, 3)).map(
    lambda cut: BASE[cut[0] : cut[0] + cut[1] : cut[2]]
)
steps = st.lists(st.lists(views, max_size=6), max_size=4)


def conflicts(arrays: list[np.ndarray], array: np.ndarray) -> bool:
    return any(np.shares_memory(array, other) for other in arrays)


@given(steps)
def test_equals_a_naive_comparison_step_after_step(sequence: list[list[np.ndarray]]) -> None:
    memory = OverlapCheck()
    for arrays in sequence:
        for _ in range(2):  # the second time the step repeats the one before
            entered: list[np.ndarray] = []
            for number, array in enumerate(arrays):
                name = f"#{number}"
                if array.size and conflicts(entered, array):
                    with pytest.raises(gs.InvalidArgument, match="shares memory"):
                        memory.claim(array, name, ArrayKind(), "rank 0")
                else:
                    memory.claim(array, name, ArrayKind(), "rank 0")
                    entered.append(array)
            memory.clear()


def test_read_only_arrays_may_share() -> None:
    memory = OverlapCheck()
    array = np.ones(4)
    array.setflags(write=False)
    memory.claim(array, "a", ArrayKind(), "rank 0")
    memory.claim(array, "b", ArrayKind(), "rank 0")


def test_a_repeated_step_that_differs_at_its_end_is_checked_whole() -> None:
    memory, first, second = OverlapCheck(), np.ones(4), np.ones(4)
    memory.claim(first, "a", ArrayKind(), "rank 0")
    memory.claim(second, "b", ArrayKind(), "rank 0")
    memory.clear()
    memory.claim(first, "a", ArrayKind(), "rank 0")
    with pytest.raises(gs.InvalidArgument, match="gradient of b shares memory with the gradient of a"):
        memory.claim(first[2:], "b", ArrayKind(), "rank 0")
