"""The benchmark of the buckets, with gradsync's ranks only: what takes part, what is promised of it, what is shown."""

from __future__ import annotations

import itertools
import json
import logging
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import gradsync as gs

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import buckets
import comparison_tables
from measurement import Seconds
from peers import comparison, systems
from peers.bucket_targets import PEERS, bucket_targets
from peers.callback_settings import SETTINGS
from peers.comparison import run
from peers.contenders import (
    AUTO_THRESHOLD,
    BY_HAND,
    DDP,
    DDP_VIEWS,
    DIFFERENCES,
    GRADSYNC,
    IN_BUCKETS,
    KNOBS,
    LOCAL_COPY,
    OPENMPI_FLAT,
    OPENMPI_PER_TENSOR,
    SYSTEMS,
    THRESHOLDS,
)
from peers.operation import Operation, take_turns
from peers.rank import Requests, WrongResult
from peers.rows import MEASURED, NOT_INSTALLED, Row
from peers.targets import Target, judge
from peers.workload import BUSY, IDLE, Workload

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the benchmark's ranks share memory on Linux")

EVERY_SETTING = (*THRESHOLDS, AUTO_THRESHOLD, *KNOBS)
SHAPES = ((7, 3), (1,), (5000,), (40, 50))
WITH_SETTINGS = Workload("gradients", SHAPES, True, rounds=2, warm_up=1, settings=EVERY_SETTING)
WORKLOADS = {w.name: w for make in buckets.COMPARISON.parts.values() for w in make()}
MODELS = ("ResNet-50", "GPT-2 small")
SMALL = "10,000 gradients of 100"


# -- What takes part -----------------------------------------------------------------------------------------


def test_every_setting_computes_its_means_and_takes_turns_with_the_default(monkeypatch):
    monkeypatch.setattr(systems, "ENVIRONMENTS", Path("/nonexistent"))
    rows, _ = run([WITH_SETTINGS], SYSTEMS, 2, Console(quiet=True))
    assert [row.contender for row in rows] == [GRADSYNC, *EVERY_SETTING]
    assert {(row.status, row.seconds.samples, len(row.blocks)) for row in rows} == {(MEASURED, 4, 2)}


def test_settings_that_workloads_name_are_there():
    assert set(SETTINGS) == set(EVERY_SETTING)
    assert {setting for workload in WORKLOADS.values() for setting in workload.settings} == set(SETTINGS)


def test_each_list_is_timed_beside_busy_processes_but_the_largest():
    of_lists = {name: workload.states for name, workload in WORKLOADS.items() if not workload.settings}
    assert of_lists == {MODELS[0]: (IDLE, BUSY), MODELS[1]: (IDLE,), SMALL: (IDLE, BUSY)}


def test_the_threshold_has_been_found_before_the_rounds(caplog):
    caplog.set_level(logging.INFO, "gradsync")
    # Of 1 MiB each: thresholds make one bucket of them, or three.
    operation = SETTINGS[AUTO_THRESHOLD]([np.ones((1024, 256), np.float32) for _ in range(3)])
    with pytest.raises(RuntimeError, match="the search for a threshold comes before the rounds"):
        operation.run()
    with gs.init_process_group("local"):
        operation.prepare_block()
        assert "from now on; tried: " in caplog.text
        operation.run()


class OnItsOwnArrays:
    """A system whose one contender has arrays of its own, and results that are off by a factor."""

    rank = 0

    def __init__(self, factor: float = 1.0, rounding: float = 0.0) -> None:
        self.factor, self.rounding = factor, rounding
        self.blocks = 0

    def operations(self, workload, arrays):
        own, means = workload.make_arrays(), workload.make_arrays()

        def reduce() -> None:
            for mean, given in zip(means, own, strict=True):
                np.multiply(given, np.float32(1.5 * self.factor), out=mean)  # rank 1 has twice as much

        def begin() -> None:
            self.blocks += 1

        return {"own": Operation(reduce, lambda: means, prepare_block=begin, inputs=own, rounding=self.rounding)}


PLAIN = replace(WITH_SETTINGS, settings=())


def test_inputs_go_where_the_contender_has_them_and_each_block_is_prepared():
    system = OnItsOwnArrays()
    requests = Requests(system)
    requests.prepare(PLAIN)
    assert system.blocks == 1
    system.barrier = lambda: None
    [(name, seconds)] = requests.time(["own"]).items()
    assert (name, len(seconds)) == ("own", PLAIN.rounds)
    assert system.blocks == 2


def test_settings_take_turns_round_by_round_and_every_second_one_backwards():
    turns: list[str] = []
    operations = {name: Operation(partial(turns.append, name), None) for name in "abc"}
    seconds = take_turns(operations, PLAIN, lambda: None)
    assert "".join(turns) == "abccbaabc"
    assert {name: len(of_one) for name, of_one in seconds.items()} == dict.fromkeys("abc", PLAIN.rounds)


def test_results_may_be_off_by_their_rounding_and_no_further():
    Requests(OnItsOwnArrays(1.003, 1 / 256)).prepare(PLAIN)
    for factor, rounding in ((1.003, 0.0), (1.005, 1 / 256)):
        with pytest.raises(WrongResult, match="rank 0: own, step 1 of gradients: array 0 is wrong"):
            Requests(OnItsOwnArrays(factor, rounding)).prepare(PLAIN)


# -- What is promised ----------------------------------------------------------------------------------------


def test_targets_are_of_things_that_are_measured():
    for target in bucket_targets():
        workload = WORKLOADS[target.workload]
        assert {target.contender, *target.against} <= {*workload.contenders, *DIFFERENCES}
        assert {target.state, target.against_state} <= set(workload.states)


def test_each_must_and_each_reach():
    promised = {
        (target.workload, target.contender, target.against or target.unit): (target.must, target.reach)
        for target in bucket_targets()
        if (target.must, target.reach) != (None, None)
    }
    expected = {(SMALL, GRADSYNC, "us a gradient"): (4.0, 2.0)}
    for model in MODELS:
        expected |= {
            (model, GRADSYNC, (LOCAL_COPY,)): (1.1, 0.9),
            (model, GRADSYNC, (DDP,)): (1 / 6, None),
            (model, GRADSYNC, (OPENMPI_PER_TENSOR,)): (None, 1 / 1.5),
            (model, IN_BUCKETS, (LOCAL_COPY,)): (0.75, 0.6),
            (model, IN_BUCKETS, PEERS): (None, 1 / 2.5),
            (f"{model}, thresholds", AUTO_THRESHOLD, tuple(THRESHOLDS)): (1.1, 1.05),
        }
        for threshold in THRESHOLDS:
            expected[f"{model}, thresholds", threshold, tuple(THRESHOLDS)] = (1.5, 1.2)
    assert promised == expected
    assert [size / 2**20 for size in THRESHOLDS.values()] == [0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100]


@pytest.mark.parametrize(
    ("milliseconds", "must_kept", "reach_kept"), [(20, True, True), (40, True, False), (41, False, False)]
)
def test_limit_that_counts_time_for_each_part(milliseconds, must_kept, reach_kept):
    [verdict] = judge([small_target()], [row(SMALL, GRADSYNC, 1e-3 * milliseconds)])
    assert verdict.ratio == pytest.approx(milliseconds / 10)
    assert (verdict.must_kept, verdict.reach_kept) == (must_kept, reach_kept)


def test_another_contender_than_the_default_one_is_judged():
    rows = [row("w", GRADSYNC, 9.0), row("w", IN_BUCKETS, 1.0), row("w", LOCAL_COPY, 2.0)]
    [verdict] = judge([Target("w", (LOCAL_COPY,), must=0.6, contender=IN_BUCKETS)], rows)
    assert (verdict.ratio, verdict.must_kept, verdict.reach_kept) == (0.5, True, None)


def test_a_threshold_is_held_against_the_best_of_all_with_itself():
    seconds = dict(zip(THRESHOLDS, itertools.count(10), strict=False))
    rows = [row("GPT-2 small, thresholds", name, of_one) for name, of_one in seconds.items()]
    verdicts = judge(bucket_targets(), rows)
    assert [(v.target.contender, v.ratio) for v in verdicts] == [(name, of / 10) for name, of in seconds.items()]
    assert [v.must_kept for v in verdicts] == [True] * 6 + [False] * 3


def test_difference_that_is_lost_in_noise_is_no_rival():
    rows = [row("w", GRADSYNC, 1.0), row("w", DDP_VIEWS, -0.1), row("w", DDP, 3.0)]
    [verdict] = judge([Target("w", (DDP, DDP_VIEWS), must=0.5)], rows)
    assert verdict.ratio is None


@pytest.mark.parametrize("options", [{"against": ()}, {"against": ("a",), "unit_seconds": 1.0}], ids=["none", "both"])
def test_limit_is_of_a_ratio_or_of_a_time(options):
    with pytest.raises(ValueError, match="a limit is held against contenders, or counts units of time"):
        Target("w", **options)


@pytest.mark.parametrize(("milliseconds", "exit_code"), [(30, 0), (50, 1)])
def test_exit_code_says_whether_promises_are_kept(milliseconds, exit_code, tmp_path, monkeypatch):
    rows = [
        row(SMALL, GRADSYNC, 1e-3 * milliseconds),
        row(SMALL, IN_BUCKETS, 1e-2),
        row(SMALL, BY_HAND, 5e-3),
    ]
    monkeypatch.setattr(comparison, "run", lambda *_: (rows, {}))
    monkeypatch.setattr(comparison.signal, "signal", lambda *_: None)  # which main() sets for its process
    monkeypatch.setattr(sys, "argv", ["buckets.py", "--quick", "--only", "small", "--output", str(tmp_path / "b.json")])
    assert replace(buckets.COMPARISON, targets=small_targets).main() == exit_code
    written = json.loads((tmp_path / "b.json").read_text())
    first = written["targets"][0]
    assert (first["ratio"], first["must_kept"]) == (pytest.approx(milliseconds / 10), exit_code == 0)
    assert written["settings"]["blocks"] == comparison.QUICK_BLOCKS


def small_targets() -> list[Target]:
    return [target for target in bucket_targets() if (target.workload, target.state) == (SMALL, IDLE)]


def small_target() -> Target:
    return small_targets()[0]


def row(workload: str, contender: str, seconds: float, state: str = IDLE) -> Row:
    return Row(workload, state, contender, MEASURED, Seconds.of([seconds] * 2), seconds)


# -- What is shown -------------------------------------------------------------------------------------------


def as_results(rows: list[Row]) -> dict[str, object]:
    return json.loads(json.dumps({"rows": [{**vars(r), "seconds": r.seconds and vars(r.seconds)} for r in rows]}))


def test_lists_have_a_line_for_each_state_and_both_ways_over_mpi():
    workloads = [WORKLOADS[MODELS[0]], WORKLOADS[f"{MODELS[0]}, knobs"]]
    rows = [row(w.name, name, 0.02, state) for w in workloads for state in w.states for name in w.contenders]
    seconds = {OPENMPI_FLAT: 0.07, DDP: 0.085}
    rows = [replace(r, seconds=Seconds.of([seconds.get(r.contender, 0.02)])) for r in rows]
    absent = [name for name in workloads[0].contenders if name.startswith("MPICH")]
    rows = [replace(r, seconds=None, status=NOT_INSTALLED) if r.contender in absent else r for r in rows]
    rows += [row(MODELS[0], name, 0.085, state) for state in (IDLE, BUSY) for name in (DDP, DDP_VIEWS)]
    assert comparison_tables.lists(as_results(rows)) == [
        "| milliseconds | gradsync | gradsync, bucket views | by hand | local copy | DDP | DDP, bucket views | gloo "
        "| Open MPI, each / flat |",
        "| --- |" + " --- |" * 8,
        "| ResNet-50 | 20 | 20 | 20 | 20 | 85 | 85 | 20 | 20 / 70 |",
        "| ResNet-50, busy cores | 20 | 20 | 20 | 20 | 85 | 85 | 20 | 20 / 70 |",
    ]


def test_thresholds_have_a_column_each():
    rows = [row("ResNet-50", GRADSYNC, 0.5), row("ResNet-50, thresholds", GRADSYNC, 0.5)]
    rows += [row("ResNet-50, thresholds", name, 0.01 * n) for n, name in enumerate((*THRESHOLDS, AUTO_THRESHOLD), 1)]
    assert comparison_tables.thresholds(as_results(rows)) == [
        "| milliseconds | 0.25 MB | 0.5 MB | 1 MB | 2.5 MB | 5 MB | 10 MB | 25 MB | 50 MB | 100 MB | auto |",
        "| --- |" + " --- |" * 10,
        "| ResNet-50 | 10 | 20 | 30 | 40 | 50 | 60 | 70 | 80 | 90 | 100 |",
    ]


def test_knobs_stand_beside_the_plain_step():
    rows = [row("ResNet-50", GRADSYNC, 0.5), row("ResNet-50, knobs", GRADSYNC, 0.02)]
    rows += [row("ResNet-50, knobs", knob, 0.03) for knob in KNOBS]
    lines = comparison_tables.knobs(as_results(rows))
    assert lines[:4] == [
        "| ResNet-50, knobs | milliseconds | over the plain step |",
        "| --- | --- | --- |",
        "| plain | 20 | 1.00 |",
        "| compression float16 | 30 | 1.50 |",
    ]
    assert len(lines) == 3 + len(KNOBS)
