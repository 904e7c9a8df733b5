"""The benchmark of the collectives, with gradsync's ranks alone: what is timed, what it must give, what is told."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import collectives
import page_tables
from measurement import Seconds
from peers import systems
from peers.collectives import ALL_GATHER, BROADCAST, EXTENTS, RANKS, REDUCE_SCATTER
from peers.comparison import as_json, run, settings_of
from peers.contenders import DDP_START_UP, GLOO, GRADSYNC, MPICH, MPICH_ARRAY, OPENMPI, TORCH
from peers.operation import NotOffered, Operation
from peers.rank import Requests, WrongResult
from peers.rows import MEASURED, NOT_INSTALLED, NOT_OFFERED, Row, rows_of
from peers.targets import TIMED_COLLECTIVES, collective_targets, judge
from peers.workloads import COLLECTIVE_SIZES_BYTES, IDLE, Workload, single_array

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the benchmark's ranks share memory on Linux")

ARRAYS = [single_array(4096, collective).quick() for collective in TIMED_COLLECTIVES]
PARAMETERS = Workload("parameters", ((7, 3), (), (5000,)), True, rounds=2, warm_up=1, collective=BROADCAST)
WORKLOADS = [*ARRAYS, PARAMETERS]


def test_every_workload_is_timed_and_absent_peers_are_told(monkeypatch):
    monkeypatch.setattr(systems, "ENVIRONMENTS", Path("/nonexistent"))
    rows, versions = run(WORKLOADS, [GRADSYNC, TORCH], 2, Console(quiet=True))
    assert [(row.workload, row.contender) for row in rows if row.status == MEASURED] == [
        (workload.name, GRADSYNC) for workload in WORKLOADS
    ]
    assert {row.status for row in rows if row.contender in (GLOO, DDP_START_UP)} == {NOT_INSTALLED}
    made = {"machine": {}, "versions": {}}
    written = json.loads(as_json(made, versions, settings_of(WORKLOADS, 2), rows, judge(collective_targets(), rows)))
    assert written["settings"]["size_means"].keys() == set(TIMED_COLLECTIVES)
    assert len(written["rows"]) == len(rows)


class OneRank:
    """A system whose collective gives on rank 1 whatever it is told to."""

    rank = 1

    def __init__(self, result) -> None:
        self._result = result

    def operations(self, workload, arrays):
        (source,) = arrays
        target = workload.make_target(source)

        def call():
            np.copyto(target, self._result(source))

        return {"one": Operation(call, lambda: [target])}


def expected_on_rank_1(workload: Workload) -> np.ndarray:
    """The result, worked out by hand from the inputs of both ranks."""
    (first,), (second,) = (workload.make_arrays() for _ in range(RANKS))
    workload.fill([first], 0)
    workload.fill([second], 1)
    half = first.size // 2
    return {
        "all_gather": np.concatenate([first, second]),
        "reduce_scatter": first[half:] + second[half:],
        "broadcast": first,
        "all_to_all": np.concatenate([first[half:], second[half:]]),
    }[workload.collective]


@pytest.mark.parametrize("workload", ARRAYS, ids=lambda workload: workload.name)
def test_only_what_a_collective_has_to_give_is_timed(workload):
    expected = expected_on_rank_1(workload)
    assert Requests(OneRank(lambda _: expected)).prepare(workload) == {"one": True}
    with pytest.raises(WrongResult, match=r"rank 1: one, step 1 of .*: array 0 is wrong"):
        Requests(OneRank(lambda _: expected[::-1])).prepare(workload)


@pytest.mark.parametrize("collective", EXTENTS)
def test_size_is_that_of_what_the_extent_says(collective):
    (source,) = single_array(65536, collective).make_arrays()
    target = single_array(65536, collective).make_target(source)
    sizes = {ALL_GATHER: (1, RANKS), REDUCE_SCATTER: (RANKS, 1)}.get(collective, (1, 1))
    assert (source.nbytes, target.nbytes) == tuple(65536 * times for times in sizes)
    assert (target is source) == (EXTENTS[collective].target_sizes == 0)


def test_collective_that_a_peer_does_not_have_is_told(monkeypatch, tmp_path):
    def refuse(_):
        raise NotOffered("ProcessGroupGloo does not support reduce_scatter")

    assert Requests(OneRank(refuse)).prepare(ARRAYS[1]) == {"one": False}
    absent = dict.fromkeys((OPENMPI, MPICH), NOT_INSTALLED)
    rows = {row.contender: row for row in rows_of(ARRAYS[1], [], absent)}
    assert rows[GLOO].status == NOT_OFFERED
    assert rows[MPICH_ARRAY].status == NOT_INSTALLED


def test_targets_are_of_things_that_are_measured():
    workloads = {w.name: w for make in collectives.COMPARISON.parts.values() for w in make()}
    targets = collective_targets()
    assert {target.workload for target in targets} == set(workloads)
    assert all(set(target.against) <= set(workloads[target.workload].contenders) for target in targets)
    promised = {target.against for target in targets if target.must is not None and target.workload.startswith("all_g")}
    assert promised == {(GLOO,), (MPICH_ARRAY,)}
    small = [target for target in targets if target.workload.endswith(" 4 KB")]
    assert all(target.must is None for target in small)
    assert len(small) == 3 * len(TIMED_COLLECTIVES)
    assert min(COLLECTIVE_SIZES_BYTES) == 4096


def test_table_of_the_readme_has_a_column_for_each_peer_that_was_there(tmp_path, monkeypatch):
    def row(workload: str, contender: str, seconds: float | None, status: str = MEASURED) -> dict[str, object]:
        return asdict(Row(workload, IDLE, contender, status, seconds and Seconds.of([seconds] * 2)))

    rows = [
        row("all_gather 4 KB", GRADSYNC, 1e-5),
        row("all_gather 4 KB", GLOO, 1e-3),
        row("all_gather 4 KB", MPICH_ARRAY, None, NOT_INSTALLED),
        row("reduce_scatter 4 KB", GRADSYNC, 2e-5),
        row("reduce_scatter 4 KB", GLOO, None, NOT_OFFERED),
        row("parameters of ResNet-50", GRADSYNC, 0.01),
        row("parameters of ResNet-50", DDP_START_UP, 0.02),
    ]
    machine = {"cpu": "A CPU", "usable_cores": 2}
    written = {"machine": machine, "versions": {"python": "3.11.7", "numpy": "2.4.6"}, "rows": rows}
    (tmp_path / "collectives.json").write_text(json.dumps(written))
    monkeypatch.setattr(page_tables, "RESULTS", tmp_path)
    lines = page_tables.table("collectives").splitlines()
    assert lines[:-2] == [
        "| milliseconds | gradsync | DDP on gloo | gloo |",
        "| --- | --- | --- | --- |",
        "| all_gather 4 KB | 0.01 |  | 1 |",
        "| reduce_scatter 4 KB | 0.02 |  | not offered |",
        "| parameters of ResNet-50 | 10 | 20 |  |",
    ]
    assert lines[-1].startswith("Two ranks on A CPU, 2 cores")
