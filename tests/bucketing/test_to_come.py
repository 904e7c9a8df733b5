"""What bucketing will do when it is rebuilt: weighted means, results(), the check for divergence, notices."""

from __future__ import annotations

import numpy as np
import pytest

import gradsync as gs
from bucketing.reference import Heard, step

REASON = "until bucketing is rebuilt"
to_come = pytest.mark.xfail(raises=(TypeError, AttributeError), reason=REASON)
notice_to_come = pytest.mark.xfail(raises=AssertionError, reason=REASON)


def descend(comm, batches, options):
    """Least squares on batches that are unequal, and end at another step on each rank; the weights."""
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(121, 3)), np.zeros(3)
    y = x @ [1.0, 2.0, 3.0] + 4.0
    sync = gs.AllreduceCallback("mean", comm, **options)
    for batch in batches:
        mine = np.arange(*batch)[comm.rank :: comm.world_size]
        with sync.backward(weight=len(mine)):
            if len(mine):
                sync("w", 2 * (x[mine] @ w - y[mine]) @ x[mine] / len(mine))
        w -= 0.05 * sync.results()["w"]
    return w.tolist()


BATCHES = [(at, min(at + 8, 121)) for at in range(0, 121, 8)]


@to_come
@pytest.mark.parametrize("options", [{}, {"parameters": {"w": ((3,), "float64")}}, {"clip_norm": 1.0}], ids=repr)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_weighted_mean_is_that_of_the_joined_batch(run_in_group, ranks, options):
    alone = run_in_group(1, descend, BATCHES, options)[0]
    for weights in run_in_group(ranks, descend, BATCHES, options):
        assert weights == pytest.approx(alone, rel=1e-6)


def end_together(comm):
    """Rank 1 has a batch less; both leave the loop in the same step."""
    sync, steps = gs.AllreduceCallback("mean", comm, parameters={"w": ((2,), "float64")}), []
    while True:
        has_batch = len(steps) < 3 - comm.rank
        with sync.backward(weight=2.0 if has_batch else 0):
            sync("w", np.full(2, 5.0 if has_batch else np.nan))  # the gradient of an empty batch is NaN
        if sync.total_weight == 0:
            return steps
        steps.append((sync.total_weight, sync.results()["w"].tolist()))


@to_come
def test_a_weight_of_zero_takes_no_part_and_a_sum_of_zero_ends_the_loop(run_in_group):
    assert run_in_group(2, end_together) == [[(4.0, [5.0] * 2), (4.0, [5.0] * 2), (2.0, [5.0] * 2)]] * 2


def weigh_on_one_rank(comm):
    sync = gs.AllreduceCallback("mean", comm)
    with sync.backward(weight=1.0 if comm.rank else None):
        sync("w", np.ones(2))


@to_come
def test_a_weight_on_one_rank_is_a_mismatch(run_in_group):
    with pytest.raises(gs.PlanMismatch):
        run_in_group(2, weigh_on_one_rank)


@to_come
def test_weights_are_finite_and_for_means(alone):
    for method, weight in (("mean", -1.0), ("mean", np.inf), ("mean", np.nan), ("sum", 1.0)):
        sync = gs.AllreduceCallback(method, alone)
        with pytest.raises(gs.InvalidArgument), sync.backward(weight=weight):
            sync("w", np.ones(2))


@to_come
def test_average_gradients_takes_a_weight(run_in_group):
    def average(comm):
        return gs.average_gradients({"w": np.full(2, 1.0 + comm.rank)}, weight=1 + comm.rank, communicator=comm)["w"][0]

    assert run_in_group(2, average) == pytest.approx([5 / 3] * 2)


def keep_results(comm):
    options = {"parameters": dict.fromkeys("ab", ((2,), "float64")), "missing": "zero"}
    sync, kept = gs.AllreduceCallback("mean", comm, **options), []
    for number in range(3):
        with sync.backward():
            future = sync("a", np.ones(2))
            if comm.rank:
                sync("b", np.full(2, 10.0 * (number + 1)))
        assert sync.results()["a"] is future.result()
        kept.append(sync.results()["b"])
    return [each.tolist() for each in kept]


@to_come
def test_results_are_fresh_arrays_that_the_user_may_keep(run_in_group):
    assert run_in_group(2, keep_results) == [[[5.0] * 2, [10.0] * 2, [15.0] * 2]] * 2


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
