"""How a step may end: by itself, twice, empty, with a callback that leaves, with its group; and what is left then."""

from __future__ import annotations

from typing import Any

import numpy as np

import gradsync as gs
from gradsync.bucketing.auto_threshold import AutoThreshold
from gradsync.bucketing.plan import GradientSpec
from gradsync.communicators.local import LocalCommunicator


def test_an_empty_step_leaves_what_is_known() -> None:
    callback, gradients = gs.AllreduceCallback("mean", LocalCommunicator()), [np.ones(5) for _ in range(4)]

    def step() -> tuple[Any, ...]:
        for number, gradient in enumerate(gradients):
            callback(number, gradient)
        agreements, works = callback._step.agreements, callback._backward._works
        callback.flush()
        return tuple(agreements._known), works._known.get(0)

    for _ in range(3):
        known = step()
    callback.flush()
    again = step()
    assert all(one is other for (_, one), (_, other) in zip(known[0], again[0], strict=True))
    assert again[1] is known[1]


def test_a_search_for_a_threshold_ends_where_the_gradients_change_again_and_again() -> None:
    search, communicator = AutoThreshold(), LocalCommunicator()
    lists = [[GradientSpec(f"'{name}'", (2**20,), "float32", 4)] * 8 for name in ("generator", "discriminator")]
    thresholds = [search.next_threshold(lists[number % 2], communicator) for number in range(20)]
    assert set(thresholds[6:]) == {gs.AllreduceCallback("sum", communicator).threshold_bytes}
    assert search._is_over
