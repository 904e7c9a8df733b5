"""The benchmark against the peers, with gradsync's ranks only: turns, failures, verdicts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import full_speed
from measurement import Seconds
from memory_mode import FAST, SLOW, mode_of
from peers import pair as pair_module
from peers import systems
from peers.blocks import Block
from peers.collectives import RANKS
from peers.comparison import run
from peers.contenders import (
    BY_HAND,
    DDP,
    DIFFERENCES,
    GRADSYNC,
    IN_BUCKETS,
    LOCAL_COPY,
    OF_A_LIST,
    SYSTEMS,
    whole_backward,
)
from peers.operation import Operation
from peers.pair import Pair, PairFailed
from peers.rank import Requests, WrongResult
from peers.rows import MEASURED, NOT_INSTALLED, Row, rows_of
from peers.systems import Start
from peers.targets import Target, Verdict, all_reduce_targets, judge
from peers.workload import BUSY, IDLE, Workload

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the benchmark's ranks share memory on Linux")

LIST = Workload("three gradients", ((7, 3), (1,), (5000,)), True, rounds=2, warm_up=1)
ARRAY = Workload("an array", ((1000,),), False, rounds=3, warm_up=1, calls=4, states=(IDLE, BUSY))


# -- With ranks ----------------------------------------------------------------------------------------------


def test_contenders_take_turns_and_absent_ones_are_told(monkeypatch):
    monkeypatch.setattr(systems, "ENVIRONMENTS", Path("/nonexistent"))
    rows, versions = run([LIST, ARRAY], SYSTEMS, 2, Console(quiet=True))
    assert list(versions) == [GRADSYNC]
    measured = {(row.workload, row.contender, row.state): row for row in rows if row.status == MEASURED}
    assert list(measured) == [
        (LIST.name, GRADSYNC, IDLE),
        (LIST.name, IN_BUCKETS, IDLE),
        (LIST.name, BY_HAND, IDLE),
        (LIST.name, LOCAL_COPY, IDLE),
        (ARRAY.name, GRADSYNC, IDLE),
        (ARRAY.name, GRADSYNC, BUSY),
    ]
    assert [row.seconds.samples for row in measured.values()] == [4, 4, 4, 4, 6, 6]
    assert all(len(row.blocks) == 2 and row.by_mode for row in measured.values())
    others = [row for row in rows if row.status != MEASURED]
    assert {row.status for row in others} == {NOT_INSTALLED}
    assert {row.contender for row in others} >= {DDP, "Open MPI per tensor", "MPICH"}


def test_error_in_a_rank_is_told_and_ends_both(tmp_path):
    with Pair(GRADSYNC, str(tmp_path)) as pair:
        pair.ask("prepare", ARRAY)
        with pytest.raises(PairFailed, match=r"gradsync: asked for time: (?s:.)*KeyError: 'nobody'"):
            pair.ask("time", ["nobody"])
        assert not alive(pair)


def test_killed_rank_is_told_and_the_other_one_ended(tmp_path):
    with Pair(GRADSYNC, str(tmp_path)) as pair:
        os.kill(pair.pids[1], signal.SIGKILL)
        with pytest.raises(PairFailed, match="gradsync: asked for prepare"):
            pair.ask("prepare", ARRAY)
        assert not alive(pair)


def test_ranks_that_do_not_start_are_told_with_what_they_wrote(tmp_path, monkeypatch):
    command = [sys.executable, "-c", "raise SystemExit('no such library')"]
    monkeypatch.setattr(pair_module, "starts", lambda system, address: [Start(command)])
    with pytest.raises(PairFailed, match=r"gradsync: did not start: (?s:.)*no such library"):
        Pair(GRADSYNC, str(tmp_path))


def alive(pair: Pair) -> list[int]:
    pids = []
    for pid in pair.pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 0)
            pids.append(pid)
    return pids


def test_ranks_of_other_systems_need_no_gradsync():
    """Their environments have none, nor rich, which only the controller draws tables with."""
    absent = "import sys; sys.modules.update(gradsync=None, rich=None); "
    modules = ", ".join(f"peers.{name}" for name in ("rank", "operation", "workload", "collectives", "contenders"))
    done = subprocess.run(
        [sys.executable, "-c", f"{absent}import {modules}"],
        cwd=systems.BENCHMARKS, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


# -- What ranks compute --------------------------------------------------------------------------------------


class Lazy:
    """A system that reduces nothing."""

    rank = 1

    def operations(self, workload, arrays):
        return {"lazy": Operation(lambda: None, lambda: arrays)}


@pytest.mark.parametrize("workload", [LIST, ARRAY], ids=lambda workload: workload.name)
def test_contender_that_computes_something_else_is_not_timed(workload):
    with pytest.raises(WrongResult, match=r"rank 1: lazy, step 1 of .*: array 0 is wrong"):
        Requests(Lazy()).prepare(workload)


@pytest.mark.parametrize("workload", [LIST, ARRAY], ids=lambda workload: workload.name)
def test_known_result_is_the_reduction_of_the_inputs(workload):
    by_rank = [workload.make_arrays() for _ in range(RANKS)]
    for rank, arrays in enumerate(by_rank):
        workload.fill(arrays, rank)
    reduced = [
        np.sum(pair, axis=0) / np.float32(RANKS if workload.is_list else 1) for pair in zip(*by_rank, strict=True)
    ]
    assert workload.wrong(reduced, 0) is None
    reduced[-1][-1] += 1
    assert workload.wrong(reduced, 0) == len(reduced) - 1


# -- What comes out ------------------------------------------------------------------------------------------


def test_rows_are_binned_by_memory_mode_and_ddp_is_a_difference():
    seconds = dict.fromkeys(OF_A_LIST, 1.0) | {whole_backward(DDP): 5.0}
    blocks = [
        Block(name, IDLE, speed, [factor * seconds[name]] * 2)
        for name in seconds
        for speed, factor in ((20.0, 1.0), (2.0, 2.0))
    ]
    rows = {row.contender: row for row in rows_of(LIST, blocks, {})}
    assert rows[whole_backward(DDP)].by_mode[SLOW].median == 10
    assert rows[DDP].by_mode[FAST].median == 4
    assert rows[DDP].by_mode[SLOW].median == 8
    assert rows[DDP].median() == 7.5 - 1.5


def test_modes_are_told_apart():
    assert [mode_of(speed) for speed in (2.3, 5.0, 7.0, 40.0)] == [SLOW, SLOW, FAST, FAST]


def test_targets_are_of_things_that_are_measured():
    workloads = {w.name: w for make in full_speed.COMPARISON.parts.values() for w in make()}
    for target in all_reduce_targets():
        workload = workloads[target.workload]
        assert set(target.against) <= {*workload.contenders, *DIFFERENCES}
        assert {target.state, target.against_state} <= set(workload.states)


@pytest.mark.parametrize(
    ("ours", "must_kept", "reach_kept"), [(0.9, True, True), (1.0, True, True), (1.5, True, False), (2.1, False, False)]
)
def test_verdict_compares_with_the_fastest(ours, must_kept, reach_kept):
    target = Target("w", ("a", "b"), must=2.0, reach=1.0)
    (verdict,) = judge([target], [row(GRADSYNC, ours), row("a", 3.0), row("b", 1.0)])
    assert (verdict.ratio, verdict.must_kept, verdict.reach_kept) == (ours, must_kept, reach_kept)


def test_nothing_is_judged_of_an_absent_contender():
    absent = Row("w", IDLE, "a", NOT_INSTALLED)
    target = Target("w", ("a",), must=2.0)
    (verdict,) = judge([target], [row(GRADSYNC, 1.0), absent])
    assert verdict == Verdict(target, None)
    assert verdict.must_kept is None


def row(contender: str, seconds: float) -> Row:
    return Row("w", IDLE, contender, MEASURED, Seconds.of([seconds] * 2), seconds)
