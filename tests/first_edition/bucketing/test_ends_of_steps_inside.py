"""How a step may end: twice, empty, with a callback that leaves, with its group; and what is left then."""

from __future__ import annotations

from typing import Any

import numpy as np

import gradsync as gs
from gradsync.communicators.local import local_communicator


def test_an_empty_step_leaves_what_is_known() -> None:
    callback, gradients = gs.AllreduceCallback("mean", local_communicator()), [np.ones(5) for _ in range(4)]

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
