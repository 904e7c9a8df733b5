"""The threshold tuner against simulated trainings: in time, the same on all ranks, and never far from the best."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradsync as gs
from gradsync.bucketing.plan import DEFAULT_THRESHOLD_BYTES, GradientSpec, plan_buckets
from gradsync.bucketing.threshold_tuner import CANDIDATES_BYTES, MAX_STEPS, MIB, ThresholdTuner

Cost = Callable[[list[GradientSpec], int], float]


def specs_of(sizes: list[int]) -> list[GradientSpec]:
    return [GradientSpec(f"p{i}", (size,), "float32", 4) for i, size in enumerate(sizes)]


def tune(specs: list[GradientSpec], seconds: Callable[[int, int, bool], float], world_size: int = 2) -> tuple[int, int]:
    """Runs a training: seconds(rank, threshold, warm) is a step's time. Returns the threshold and the steps it took."""
    tuners = [ThresholdTuner() for _ in range(world_size)]
    assert {tuner.threshold_bytes for tuner in tuners} == {DEFAULT_THRESHOLD_BYTES}
    steps = 1
    for tuner in tuners:
        tuner.begin(specs)
    before = DEFAULT_THRESHOLD_BYTES
    while not tuners[0].is_measured:
        thresholds = {tuner.threshold_bytes for tuner in tuners}
        assert len(thresholds) == 1, "ranks in one step with different thresholds"
        (threshold,) = thresholds
        for rank, tuner in enumerate(tuners):
            tuner.add(seconds(rank, threshold, threshold == before))
        before = threshold
        steps += 1
    assert all(tuner.is_measured for tuner in tuners)
    assert steps == tuners[0].total_steps <= MAX_STEPS
    figures = [tuner.figures() for tuner in tuners]
    decisions = {tuner.decide(figures) for tuner in tuners}
    assert len(decisions) == 1
    assert {tuner.threshold_bytes for tuner in tuners} == decisions
    return decisions.pop(), steps


def cost_of(launch_seconds: float, seconds_per_byte: float, backward_seconds: float) -> Cost:
    """Buckets start as they fill during the backward pass, and are reduced one after the other."""

    def cost(specs: list[GradientSpec], threshold: int) -> float:
        total, arrived, free = sum(spec.size_bytes for spec in specs), 0, 0.0
        for bucket in plan_buckets(specs, threshold):
            arrived += bucket.size_bytes
            ready = backward_seconds * arrived / max(total, 1)
            free = max(free, ready) + launch_seconds + bucket.size_bytes * seconds_per_byte
        return max(free, backward_seconds)

    return cost


models = st.lists(st.integers(1, 4_000_000), min_size=1, max_size=60)
costs = st.builds(
    cost_of,
    st.floats(1e-6, 1e-2),
    st.floats(1e-11, 1e-8),
    st.floats(1e-4, 1.0),
)


@given(models, costs, st.floats(0, 0.3), st.integers(1, 4), st.integers(0, 2**32))
def test_the_decision_is_good(sizes: list[int], cost: Cost, noise: float, world_size: int, seed: int) -> None:
    """Whatever the noise, which only ever adds: by no more than it, and by the 2 % of a tie."""
    random, specs = Random(seed), specs_of(sizes)

    def seconds(rank: int, threshold: int, warm: bool) -> float:
        return cost(specs, threshold) * (1 + random.random() * noise) * (1 if warm else 5)

    decision, _ = tune(specs, seconds, world_size)
    best = min(cost(specs, threshold) for threshold in CANDIDATES_BYTES)
    assert cost(specs, decision) <= best * 1.02 * (1 + noise) + 1e-8


def test_a_clear_best_is_found() -> None:
    specs = specs_of([25_000] * 2000)  # 200 MB
    fastest = {threshold: abs(i - 1) + 1.0 for i, threshold in enumerate(CANDIDATES_BYTES)}
    decision, steps = tune(specs, lambda rank, threshold, warm: fastest[threshold] + rank)
    assert (decision, steps) == (CANDIDATES_BYTES[1], 19)


def test_the_slowest_rank_counts() -> None:
    specs = specs_of([250_000] * 200)
    slow = {(0, MIB): 9.0, (1, 100 * MIB): 9.0, (0, 3 * MIB): 2.0, (1, 3 * MIB): 2.0}
    assert tune(specs, lambda rank, threshold, warm: slow.get((rank, threshold), 5.0))[0] == 3 * MIB
    lonely = {(0, MIB): 0.1, (1, MIB): 6.0}  # fastest on one rank only
    assert tune(specs, lambda rank, threshold, warm: lonely.get((rank, threshold), 5.0))[0] == DEFAULT_THRESHOLD_BYTES


def test_ties_go_to_the_default() -> None:
    specs = specs_of([250_000] * 200)
    assert tune(specs, lambda rank, threshold, warm: 1.0)[0] == DEFAULT_THRESHOLD_BYTES
    for gain, decision in ((0.981, DEFAULT_THRESHOLD_BYTES), (0.97, 100 * MIB)):
        assert tune(specs, lambda r, threshold, w, gain=gain: gain if threshold == 100 * MIB else 1.0)[0] == decision


def test_one_disturbed_step_does_not_matter() -> None:
    specs, seen = specs_of([250_000] * 200), set()

    def seconds(rank: int, threshold: int, warm: bool) -> float:
        disturbed = warm and (rank, threshold) not in seen
        seen.add((rank, threshold)) if warm else None
        return (1.0 if threshold == MIB else 2.0) * (50 if disturbed else 1)

    assert tune(specs, seconds)[0] == MIB


def test_equal_plans_are_tried_once() -> None:
    tuner = ThresholdTuner()
    tuner.begin(specs_of([100_000] * 6))  # 2.4 MB: from 3 MiB on one bucket; up to 0.4 MB each gradient alone
    assert tuner.candidates == (MIB // 4, MIB, 10 * MIB)  # of the equal ones the nearest to the default
    assert tuner.total_steps == 16
    for sizes in ([], [5], [10**8]):  # nothing to choose from
        tuner = ThresholdTuner()
        tuner.begin(specs_of(sizes))
        assert (tuner.candidates, tuner.total_steps, tuner.is_measured) == ((DEFAULT_THRESHOLD_BYTES,), 1, True)
        assert tuner.decide([tuner.figures()] * 3) == tuner.threshold_bytes == DEFAULT_THRESHOLD_BYTES


@given(models)
def test_it_is_done_in_time(sizes: list[int]) -> None:
    tuner = ThresholdTuner()
    tuner.begin(specs_of(sizes))
    assert tuner.total_steps <= MAX_STEPS
    assert len(tuner.candidates) == 1 or tuner.total_steps >= 1 + 3 * len(tuner.candidates)


def test_own_candidates() -> None:
    tuner = ThresholdTuner([4000, 400, 4000], default_bytes=1000)
    assert (tuner.candidates, tuner.threshold_bytes) == ((400, 4000), 1000)
    tuner.begin(specs_of([100] * 20))
    assert tuner.threshold_bytes == 400


@pytest.mark.parametrize("candidates", [[], [0], [True], [1.5], list(range(1, 8))])
def test_candidates_that_cannot_be(candidates: list[int]) -> None:
    with pytest.raises(gs.InvalidArgument, match=r"at least 1|1 to 6 candidates"):
        ThresholdTuner(candidates)


def test_figures_that_do_not_fit() -> None:
    tuner = ThresholdTuner()
    tuner.begin(specs_of([5]))
    for figures in ([], [[1, 2]], [[1], []]):
        with pytest.raises(gs.InvalidArgument, match="needs 1 figures of every rank"):
            tuner.decide(figures)
