"""Errors that only some ranks have had, steps that fail in other hands, and what ranks repeat afterwards."""

from __future__ import annotations

import numpy as np

import gradsync as gs


def test_a_learned_plan_and_threshold_go_with_their_group() -> None:
    callback = gs.AllreduceCallback("sum", gradient_as_bucket_view=True)
    for name in ("old", "new"):
        with gs.init_process_group("local", rank=0, world_size=1):
            for _ in range(2):
                callback(name, np.ones(3))
                callback.flush()
    assert callback._backward.plan.known_places is not None
