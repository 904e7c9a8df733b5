"""The benchmark of what is always on: its contenders leave out what they say; an interval tells cost from noise."""

from __future__ import annotations

import random
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import gradsync as gs
from rank_processes import run_ranks

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import steady_contenders
import steady_cost

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the benchmark's ranks share memory on Linux")


def leave_out(comm: gs.Communicator) -> dict[str, int]:
    """Returns how many entries of the flight recorder a step makes, by contender; the usual one comes last again."""
    model = steady_contenders.Model([(3,), (4, 5)], work=1, width=4)
    begun = {}
    for name in [*steady_cost.CONTENDERS, steady_cost.USUAL]:
        with steady_cost.CONTENDERS[name](comm, model):
            before = comm.recorder.begun
            model.step()
            begun[name] = comm.recorder.begun - before
    return begun


def test_contenders_leave_out_what_they_say() -> None:
    for begun in run_ranks(2, leave_out):
        assert begun == {
            steady_cost.USUAL: 2,
            "recorder": 0,
            "agreement": 1,  # of the two, the one on the end of the step
            "heartbeats": 2,
            steady_cost.ALL_THREE: 0,
            "debug mode": 2,
            "tracing": 2,
        }


def disagree_without_agreement(comm: gs.Communicator) -> None:
    model = steady_contenders.Model([(3,)], work=1, width=4)
    with steady_contenders.without_agreement(comm, model):
        comm.all_reduce(np.ones(4), "sum" if comm.rank else "max")  # nobody compares
    with pytest.raises(gs.PlanMismatch):
        comm.all_reduce(np.ones(4), "sum" if comm.rank else "max")


def test_without_agreement_nobody_compares() -> None:
    run_ranks(2, disagree_without_agreement)


def test_the_silent_ones_are_apart() -> None:
    chance = random.Random(1)
    rounds = [name for _ in range(50) for name in steady_cost._order(chance)]
    assert {name: rounds.count(name) for name in rounds} == dict.fromkeys(steady_cost.CONTENDERS, 50)
    silent = [name in steady_cost.SILENT for name in rounds]
    assert not any(one and after for one, after in pairwise(silent))


@pytest.mark.parametrize(("cost", "is_above"), [(0.0, False), (0.005, False), (0.03, True)])
def test_a_cost_is_told_from_noise(cost: float, is_above: bool) -> None:
    random = np.random.default_rng(3)
    # Steps of some milliseconds, of which a busy machine holds up every second one, by any length.
    steps = [
        1 + random.normal(0, 0.02, (300, 4)) ** 2 + random.binomial(1, 0.5, (300, 4)) * random.exponential(1)
        for _ in "ab"
    ]
    found = steady_cost.cost_of("all", (steps[0] * (1 + cost)).tolist(), steps[1].tolist(), None)
    assert found.low <= cost <= found.high
    assert found.high - found.low < 0.01
    assert (found.low > steady_cost.TARGET) == is_above


def test_a_quick_run_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    results = Path(steady_cost.__file__).parent / "results" / "steady_cost.json"
    before = results.read_bytes() if results.exists() else None
    assert steady_cost.main(["--quick"]) in (0, 1)  # two rounds tell nothing of the cost
    assert (results.read_bytes() if results.exists() else None) == before
    told = capsys.readouterr().out
    assert all(name in told for name in ("three layers", *steady_cost.WITHOUT, *steady_cost.WITH))
