"""Traces keep to the trace-event format, and show when each bucket was packed, waited for, reduced and split."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import gradsync as gs
from gradsync.cli import main
from gradsync.communicators.local import local_communicator
from gradsync.diagnostics.dump import read_dumps
from places import SHM

Event = dict[str, Any]


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


def slices(trace: Any, category: str, rank: int = 0) -> Iterator[Event]:
    return (e for e in trace["traceEvents"] if e.get("cat") == category and e["ph"] == "X" and e["pid"] == rank)


def test_a_step_after_one_that_failed_begins_with_its_own_first_gradient(tmp_path: Path) -> None:
    with local_communicator() as comm, gs.trace(tmp_path / "a.json"):
        sync = gs.AllreduceCallback("sum", comm, nonfinite="raise")
        with pytest.raises(gs.NonFiniteGradient), sync.backward():
            sync("w", np.array([np.inf]))
        with sync.backward():
            sync("w", np.ones(1))
            sync("v", np.ones(1))
    [dump], _ = read_dumps([tmp_path])
    [step] = dump.steps
    assert [arrival.name for arrival in dump.arrivals if arrival.at >= step.began] == ["w", "v"]


def train(comm: Any, folder: Path) -> None:
    with gs.trace(folder):
        sync = gs.AllreduceCallback("mean", comm, threshold_bytes=800)
        for _ in range(3):
            with sync.backward():
                for number in range(5):
                    sync(f"w{number}", np.ones(100, np.float32))
        comm.barrier()


def test_the_trace_of_two_ranks_keeps_to_the_format_and_shows_all_buckets(tmp_path: Path) -> None:
    SHM.run(2, train, tmp_path / "traced")
    done = CliRunner().invoke(main, ["trace", str(tmp_path / "traced"), "--out", str(tmp_path / "trace.json")])
    assert done.exit_code == 0, done.output
    trace = json.loads((tmp_path / "trace.json").read_text())
    check_format(trace)
    names = [(event["ph"], event["pid"], event["name"]) for event in trace["traceEvents"]]
    for rank in range(2):
        assert sum(ph == "X" and pid == rank and "all_reduce" in name for ph, pid, name in names) >= 9
    assert any(ph in "st" for ph, _, _ in names)


def train_late(comm: Any, folder: str, size: int) -> None:
    """Rank 1 computes longer than rank 0 in each step."""
    sync = gs.AllreduceCallback(group=comm, threshold_bytes=8 * size)
    with gs.trace(folder):
        for _ in range(6):
            time.sleep(0.25 * comm.rank)  # long beside the pauses of a busy machine
            with sync.backward():
                for name in "abc":
                    sync(name, np.ones(size))


@pytest.mark.parametrize(("size", "phase"), [(10, "in small collectives"), (300_000, "waiting")])
def test_the_trace_of_a_good_run_says_where_the_time_went_and_who_waited_for_whom(
    tmp_path: Path, size: int, phase: str
) -> None:
    SHM.run(2, train_late, str(tmp_path), size)
    done = CliRunner().invoke(main, ["trace", str(tmp_path)])
    assert done.exit_code == 0
    steps, rank_0, rank_1, late, next_line, *_ = done.output.splitlines()
    assert re.fullmatch(r"6 steps, \S+ ms each at the median", steps)
    assert rank_0.startswith("  rank 0: ")
    assert rank_1.startswith("  rank 1: ")
    assert share_of(phase, rank_0) > share_of(phase, rank_1)
    assert share_of("outside of gradsync", rank_0) < share_of("outside of gradsync", rank_1)
    words = r"  rank 1 came last to (\d+) of \d+ collectives: the others waited (\S+) s for this rank in 5 steps"
    told = re.fullmatch(words, late)
    assert told, late
    assert int(told[1]) >= 5
    assert float(told[2]) >= 0.9
    assert next_line.startswith("group ")
    assert "dumped because" not in done.output


def share_of(phase: str, line: str) -> int:
    found = re.search(rf"(\d+) % {phase}", line)
    return int(found[1]) if found else 0
