"""What bucketing will do when it is rebuilt: the check for divergence, notices."""

from __future__ import annotations

import numpy as np
import pytest

import gradsync as gs
from bucketing.reference import Heard, step

REASON = "until bucketing is rebuilt"
to_come = pytest.mark.xfail(raises=(TypeError, AttributeError), reason=REASON)
notice_to_come = pytest.mark.xfail(raises=AssertionError, reason=REASON)


def diverge(comm, diverged):
    weights = {"w": np.zeros(2), "b": np.zeros(2)}
    with Heard() as lines:
        sync = gs.AllreduceCallback("mean", comm, parameters=weights, check_every=2, diverged=diverged)
        for number in range(6):
            weights["b"] += comm.rank * (number == 3)
            step(sync, {"w": np.ones(2), "b": np.ones(2)})
            weights["w"] -= 0.1
    return lines


@to_come
def test_parameters_that_have_diverged_are_named(run_in_group):
    first, *_ = run_in_group(2, diverge, "warn")
    assert len(first) == 1
    assert "'b'" in first[0]
    with pytest.raises(gs.PlanMismatch):
        run_in_group(2, diverge, "raise")


def train_with(comm, gradient_of):
    """Three steps in which a program reads its results, or does not; its warnings."""
    w = np.zeros(3)
    with Heard() as lines:
        sync = gs.AllreduceCallback("mean", comm)
        for _ in range(3):
            g = np.full(3, comm.rank + 1.0)
            with sync.backward():
                future = sync("w", gradient_of(g))
            if gradient_of(g) is g:
                w -= 0.1 * future.result()
            del future
    return lines


@notice_to_come
def test_a_result_that_nobody_can_read_is_told_once(run_in_group):
    for lines in run_in_group(2, train_with, lambda gradient: gradient / 1.0):
        assert len([line for line in lines if "'w'" in line]) == 1


@notice_to_come
def test_parameters_that_were_never_broadcast_are_told_once(run_in_group):
    """Nobody knows them as arrays, and nothing was broadcast or compared before the first flush."""
    assert sum(len(lines) for lines in run_in_group(2, train_with, lambda gradient: gradient)) == 1
