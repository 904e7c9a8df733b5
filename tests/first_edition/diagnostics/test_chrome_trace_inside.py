"""Traces keep to the trace-event format, and show when each bucket was packed, waited for, reduced and split."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradsync as gs
from gradsync.communicators.local import local_communicator
from gradsync.diagnostics import tracing
from gradsync.diagnostics.chrome_trace import chrome_trace
from gradsync.diagnostics.dump_files import read_dumps
from places import STAND_IN
from rank_processes import run_ranks

Event = dict[str, Any]
SMALL, LARGE, STEPS = 1000, 3_000_000, 3
SIZES = (SMALL, SMALL, LARGE, SMALL)


def check_format(trace: Any) -> None:
    """Refuses what the trace-event format does not allow.

    Source: "Trace Event Format", Google: the phases X, i, M, s, t, f and their fields.
    """
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    assert set(trace) >= {"traceEvents"}
    tracks: dict[tuple[int, int], list[Event]] = {}
    flows: dict[int, list[Event]] = {}
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert event["name"]
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        kind = event["ph"]
        assert kind in "XiMstf"
        if kind == "M":
            assert event["name"] in ("process_name", "thread_name", "process_sort_index", "thread_sort_index")
            continue
        assert isinstance(event["ts"], float)
        assert event["ts"] >= 0
        if kind == "X":
            assert event["dur"] >= 0
            tracks.setdefault((event["pid"], event["tid"]), []).append(event)
        elif kind == "i":
            assert event["s"] in "gpt"
        else:
            flows.setdefault(event["id"], []).append(event)
    for events in tracks.values():
        check_nesting(events)
    for arrows in flows.values():
        check_flow(arrows, tracks)


def check_nesting(events: list[Event]) -> None:
    """Slices of one track lie within each other, or beside, in whole nanoseconds, as readers count them."""
    spans = [(round(event["ts"] * 1000), round(event["dur"] * 1000)) for event in events]
    open_until: list[int] = []
    for begin, length in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_until and open_until[-1] <= begin:
            open_until.pop()
        assert not open_until or begin + length <= open_until[-1], (begin, length, open_until)
        open_until.append(begin + length)


def check_flow(arrows: list[Event], tracks: dict[tuple[int, int], list[Event]]) -> None:
    """A flow begins once, ends once, in the order of time, and each of its ends lies on a slice."""
    assert [arrow["ph"] for arrow in arrows] == ["s", *"t" * (len(arrows) - 2), "f"]
    assert [arrow["ts"] for arrow in arrows] == sorted(arrow["ts"] for arrow in arrows)
    assert len({arrow["pid"] for arrow in arrows}) == len(arrows)
    assert len({(arrow["cat"], arrow["name"]) for arrow in arrows}) == 1
    assert arrows[-1]["bp"] == "e"
    for arrow in arrows:
        slices = tracks[arrow["pid"], arrow["tid"]]
        assert any(one["ts"] <= arrow["ts"] <= one["ts"] + one["dur"] + 0.001 for one in slices)


def train(comm: gs.Communicator, folder: str, **options: Any) -> None:
    gradients = [np.ones(size, np.float32) for size in SIZES]
    sync = gs.AllreduceCallback("mean", threshold_bytes=1024**2, **options)
    with gs.trace(folder):
        for _ in range(STEPS):
            with sync.backward():
                for number, gradient in enumerate(gradients):
                    sync(f"p{number}", gradient)
        comm.objects.all_gather("an object")
        if comm.rank < 2:
            comm.exchange(np.ones(3), dest=1 - comm.rank, out=np.empty(3), source=1 - comm.rank)


def slices(trace: Any, category: str, rank: int = 0) -> Iterator[Event]:
    return (e for e in trace["traceEvents"] if e.get("cat") == category and e["ph"] == "X" and e["pid"] == rank)


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_bucket_has_its_phases(tmp_path: Path, ranks: int) -> None:
    run_ranks(ranks, train, str(tmp_path))
    found, _ = read_dumps([tmp_path])
    assert [dump.rank for dump in found] == list(range(ranks))
    trace = chrome_trace(found)
    check_format(trace)
    for rank in range(ranks):
        buckets = [event for event in slices(trace, "collective", rank) if "bucket" in event["args"]]
        assert len(buckets) == 2 * STEPS
        phases: dict[int, dict[str, float]] = {}
        for phase in slices(trace, "phase", rank):
            of_bucket = phases.setdefault(phase["args"]["collective"], {})
            of_bucket[phase["name"]] = of_bucket.get(phase["name"], 0.0) + phase["dur"]
        for bucket in buckets:
            told = phases[bucket["args"]["number"]]
            wanted = {"packing", "waiting", "reducing"}
            # A single small gradient is reduced into itself.
            if bucket["args"]["count"] == LARGE or len(bucket["args"]["gradients"]) > 1:
                wanted |= {"splitting"}
            assert told.keys() == wanted
            assert sum(told.values()) <= bucket["dur"] + 0.1
        steps = list(slices(trace, "step", rank))
        assert [step["args"]["gradients"] for step in steps] == [4] * STEPS
        arrivals = [e for e in trace["traceEvents"] if e.get("cat") == "gradient" and e["pid"] == rank]
        assert [arrival["name"] for arrival in arrivals] == ["p0", "p1", "p2", "p3"] * STEPS
        assert len(list(slices(trace, "message", rank))) == (rank < 2)
    arrows = [event for event in trace["traceEvents"] if event["ph"] == "s"]
    assert len(arrows) >= 3 * STEPS


def test_gradients_in_buckets_are_reduced_where_they_lie(tmp_path: Path) -> None:
    run_ranks(2, train_in_buckets, str(tmp_path))
    trace = chrome_trace(read_dumps([tmp_path])[0])
    check_format(trace)
    assert {phase["name"] for phase in slices(trace, "phase")} >= {"waiting", "reducing"}


def train_in_buckets(comm: gs.Communicator, folder: str) -> None:
    parameters = {f"p{number}": ((size,), "float32") for number, size in enumerate(SIZES)}
    train(comm, folder, parameters=parameters, gradient_as_bucket_view=True)


def test_over_nccl_the_phases_are_the_hosts(tmp_path: Path) -> None:
    STAND_IN.run(2, train, str(tmp_path))
    trace = chrome_trace(read_dumps([tmp_path])[0])
    check_format(trace)
    assert {phase["name"] for phase in slices(trace, "phase")} == {"waiting", "packing", "launching", "splitting"}


def test_over_mpi_the_reduction_is_all_of_mpis(tmp_path: Path) -> None:
    mpiexec = Path(sysconfig.get_path("scripts")) / "mpiexec"
    if not mpiexec.exists():
        pytest.skip("there is no mpiexec beside this Python")
    script = tmp_path / "script.py"
    script.write_text(
        "import numpy as np, gradsync as gs\n"
        "with gs.init_process_group('mpi') as comm:\n"
        "    sync = gs.AllreduceCallback('mean')\n"
        "    with sync.backward():\n"
        "        sync('a', np.ones(100)), sync('b', np.ones(100))\n"
    )
    command = [str(mpiexec), "-n", "2", sys.executable, str(script)]
    environ = os.environ | {"GRADSYNC_TRACE": str(tmp_path / "traced")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    trace = chrome_trace(read_dumps([tmp_path / "traced"])[0])
    check_format(trace)
    for rank in range(2):
        phases = [phase["name"] for phase in slices(trace, "phase", rank)]
        assert phases[-4:] == ["waiting", "packing", "reducing", "splitting"]


def test_a_traced_block_ends_with_its_dump_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with local_communicator() as comm:
        with gs.trace(tmp_path / "a.json"):
            assert tracing.active is not None
            with pytest.raises(gs.InvalidArgument, match="traced already"), gs.trace(tmp_path / "b.json"):
                pass
            for _ in range(200):
                comm.barrier()
        assert tracing.active is None
        [dump], _ = read_dumps([tmp_path])
        assert len(dump.groups[comm.recorder.group].calls) >= 200
    check_format(chrome_trace([dump]))


def test_a_trace_that_is_full_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_MAX_EVENTS", 3)
    with local_communicator() as comm, gs.trace(tmp_path):
        sync = gs.AllreduceCallback("mean", comm)
        with sync.backward():
            for number in range(5):
                sync(number, np.ones(3))
    [dump], _ = read_dumps([tmp_path])
    assert (len(dump.arrivals), dump.left_out) == (3, 2)


def test_other_machines_are_laid_beside_by_the_wall_clock(tmp_path: Path) -> None:
    with local_communicator() as comm, gs.trace(tmp_path):
        comm.barrier()
    [here], _ = read_dumps([tmp_path])
    there = here._replace(rank=1, machine="another boot", host="elsewhere", at=here.at + 500)
    group = {
        name: group._replace(
            calls=tuple(c._replace(began=c.began + 500, ended=(c.ended or 0) + 500) for c in group.calls)
        )
        for name, group in there.groups.items()
    }
    trace = chrome_trace([here, there._replace(groups=group)])
    check_format(trace)
    begins = {e["pid"]: e["ts"] for e in trace["traceEvents"] if e["ph"] == "X"}
    assert begins[0] == pytest.approx(begins[1], abs=1)
