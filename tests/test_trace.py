"""A trace is a Chrome trace of each rank and of all ranks, and says where the time went."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradsync as gs
from gradsync.diagnostics import trace
from launching import command
from places import SHM, STAND_IN, Place

Event = dict[str, Any]


def events_of(path: Path) -> list[Event]:
    """Reads a file, and refuses what the Trace Event Format does not allow."""
    events: list[Event] = json.loads(path.read_text())["traceEvents"]
    spans: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        assert event["name"]
        assert event["ph"] in "XM"
        if event["ph"] == "X":
            assert event["dur"] >= 0
            spans.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for of_track in spans.values():  # the events of a track lie beside each other, or within each other
        open_until: list[float] = []
        for began, ended in sorted(of_track, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= began:
                open_until.pop()
            assert not open_until or ended <= open_until[-1]
            open_until.append(ended)
    return events


def names(events: list[Event], category: str, rank: int = 0) -> list[str]:
    return [event["name"] for event in events if event.get("cat") == category and event["pid"] == rank]


def train(comm: Any, size: int, late_seconds: float = 0.0) -> list[str]:
    """Rank 1 computes longer than rank 0; returns what the flight recorder has in the end."""
    sync = gs.AllreduceCallback("mean", comm, threshold_bytes=8 * size)
    for _ in range(6):
        time.sleep(late_seconds * comm.rank)
        with sync.backward():
            for name in "abc":
                sync(name, np.ones(size))
    comm.broadcast(np.ones(3))
    pair = comm.split(0)
    pair.asynchronous.all_reduce(np.ones(4)).wait()
    pair.close()
    return [entry.what.headline() for entry in comm.recorder.entries()]


@pytest.mark.parametrize("place", [SHM, STAND_IN])
def test_the_files_have_every_collective_of_both_ranks(tmp_path: Path, place: Place) -> None:
    recorded = place.run(2, train, 300_000, environment={"GRADSYNC_TRACE": str(tmp_path / "traced")})
    joined = events_of(tmp_path / "traced/all-ranks.json")
    for rank in range(2):
        events = events_of(tmp_path / f"traced/rank-{rank}.json")
        assert [event for event in joined if event["pid"] == rank] == events
        world = [event for event in events if event.get("cat") == "collective" and event["args"]["group"] == "world"]
        assert [event["name"] for event in world] == recorded[rank]
        assert len([name for name in names(events, "collective", rank) if name.startswith("all_reduce")]) == 6 * 3 + 1
        assert names(events, "step", rank) == ["step"] * 6
        assert set(names(events, "phase", rank)) >= {"waiting"}
        assert all(event["args"]["state"] == "done" for event in world)
    if place is SHM:
        assert set(names(joined, "phase")) == {"packing", "waiting", "reducing", "splitting"}


@pytest.mark.parametrize("size", [10, 300_000])  # all-reduces without phases, and with
def test_the_summary_says_where_the_time_went_and_who_was_waited_for(tmp_path: Path, size: int) -> None:
    SHM.run(2, train, size, 0.25, environment={"GRADSYNC_TRACE": str(tmp_path)})  # long beside a busy machine's pauses
    steps, parts, late, files = (tmp_path / "summary.txt").read_text().splitlines()
    told = re.fullmatch(r"gradsync: 5 steps of ranks 0 and 1 after the first, (\d+\.\d\d) ms each", steps)
    assert told
    assert float(told[1]) >= 250.0
    of_a_step = {part: float(ms) for part, ms in re.findall(r"(\w[a-z ]*) (\d+\.\d\d) ms \(\d+%\)", parts)}
    assert of_a_step["your code"] >= 125.0  # the mean of both ranks
    assert of_a_step["waiting"] >= 100.0
    assert sum(of_a_step.values()) == pytest.approx(float(told[1]), rel=0.05)
    told = re.fullmatch(
        r"gradsync: most waited for: rank 1, (\S+) ms a step; it came last to \d+ of \d+ collectives", late
    )
    assert told
    assert float(told[1]) >= 200.0
    assert files == f"gradsync: open {tmp_path / 'all-ranks.json'} in https://ui.perfetto.dev"


EXAMPLE = Path(__file__).parents[1] / "examples" / "traced_step.py"
SCRIPT = """
import sys
import numpy as np
import gradsync as gs
with gs.init_process_group("shm") as comm:
    sync = gs.AllreduceCallback("mean")
    for step in range(5):
        with sync.backward():
            sync("w", np.ones(4))
        if step == 3 and "fail" in sys.argv and comm.rank == 1:
            raise KeyError("train-0003")
"""


def test_gradsync_run_ends_with_four_lines(tmp_path: Path) -> None:
    code, out, err = command.run("run", "-n", 2, "--no-prefix", "--trace", tmp_path / "traced", EXAMPLE)
    assert (code, out) == (0, "")
    assert err == (tmp_path / "traced/summary.txt").read_text()
    assert len(err.splitlines()) == 4
    assert sorted(path.name for path in (tmp_path / "traced").iterdir()) == [
        *("all-ranks.json", "rank-0.json", "rank-1.json", "summary.txt")
    ]


def test_a_run_that_fails_leaves_traces_too(tmp_path: Path) -> None:
    script = command.write_script(tmp_path, SCRIPT)
    code, _, err = command.run("run", "-n", 2, "--trace", tmp_path / "traced", script, "fail")
    assert code == 1
    assert "KeyError: 'train-0003'" in err
    for rank in range(2):
        assert names(events_of(tmp_path / f"traced/rank-{rank}.json"), "step", rank) == ["step"] * 4
    [failed] = [event for event in events_of(tmp_path / "traced/rank-0.json") if event["args"].get("state") == "failed"]
    assert failed["name"].startswith("all_reduce(mean)")


def test_the_launcher_does_not_interrupt_a_rank_that_writes_its_trace(tmp_path: Path) -> None:
    # Ranks need about a second to write so many steps, and do so at their exit, when the launcher knows of the failure.
    # It asks them to end 0.1 s later.
    many = SCRIPT.replace("range(5)", "range(20_000)").replace("step == 3", "step == 19_999")
    at_exit = many.replace(
        'with gs.init_process_group("shm") as comm:', 'comm = gs.init_process_group("shm")\nif True:'
    )
    script = command.write_script(tmp_path, at_exit)
    code, _, err = command.run("run", "-n", 2, "--trace", tmp_path / "traced", script, "fail")
    assert code == 1
    assert "KeyError: 'train-0003'" in err
    assert "most waited for" in err
    assert sorted(os.listdir(tmp_path / "traced")) == ["all-ranks.json", "rank-0.json", "rank-1.json", "summary.txt"]


def test_a_rank_that_has_begun_its_next_process_group_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "rank-1.json"
    exists = Path.exists

    def is_there_until_the_look(path: Path) -> bool:
        found = exists(path)
        if path == file:
            path.unlink()
        return found

    file.write_text("")
    monkeypatch.setattr(trace, "active", trace.Tracer(tmp_path))
    monkeypatch.setattr(Path, "exists", is_there_until_the_look)
    trace.end(0, 2)
    assert not caplog.records
    assert os.listdir(tmp_path) == ["rank-0.json"]


def test_a_rank_that_is_killed_leaves_no_trace_and_no_summary(tmp_path: Path) -> None:
    script = command.write_script(tmp_path, SCRIPT.replace("raise KeyError", "import os; os._exit(3)  #"))
    code, _, err = command.run("run", "-n", 2, "--trace", tmp_path / "traced", script, "fail")
    assert (code, "most waited for" in err) == (3, False)
    assert not {"rank-1.json", "all-ranks.json", "summary.txt"} & set(os.listdir(tmp_path / "traced"))


def test_a_second_process_group_adds_to_the_trace(tmp_path: Path) -> None:
    code = """if True:
        import numpy as np, gradsync as gs
        for n in range(2):
            with gs.init_process_group("local") as comm:
                comm.all_reduce(np.ones(n + 1))
    """
    environ = os.environ | {"GRADSYNC_TRACE": str(tmp_path / "traced")}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert len(done.stderr.splitlines()) == 2  # one rank waits for nobody, and made no step
    assert names(events_of(tmp_path / "traced/rank-0.json"), "collective") == [
        *("all_reduce(sum) float64[1] 8 bytes", "all_reduce(sum) float64[2] 16 bytes")
    ]


def test_of_a_long_run_the_last_steps_are_kept_with_all_their_collectives(tmp_path: Path) -> None:
    code = """if True:
        import numpy as np, gradsync as gs
        from gradsync.diagnostics import recorder
        recorder._TRACED_ENTRIES = 64
        with gs.init_process_group("local"):
            sync = gs.AllreduceCallback("sum")
            for _ in range(100):
                with sync.backward():
                    sync("w", np.ones(3))
    """
    environ = os.environ | {"GRADSYNC_TRACE": str(tmp_path / "traced")}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert re.match(r"gradsync: 3[01] steps of rank 0 after the first", done.stderr)  # each has a bucket and a flush
    assert len(names(events_of(tmp_path / "traced/rank-0.json"), "collective")) == 64


def test_files_of_an_earlier_run_are_not_taken_for_those_of_this_one(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"rank-{rank}.json").write_text("of an earlier run")
    (tmp_path / "summary.txt").write_text("of an earlier run")
    SHM.run(2, train, 10, environment={"GRADSYNC_TRACE": str(tmp_path)})
    assert len((tmp_path / "summary.txt").read_text().splitlines()) == 4
    assert len({event["pid"] for event in events_of(tmp_path / "all-ranks.json")}) == 2


def test_a_folder_that_cannot_be_written_to_is_told_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    script = command.write_script(tmp_path, SCRIPT)
    code, _, err = command.refused("run", "-n", 2, "--trace", tmp_path / "file", script)
    told = f"={tmp_path / 'file'}: traces cannot be written there: "
    assert code == 2
    assert f"--trace{told}" in err
    monkeypatch.setenv("GRADSYNC_TRACE", str(tmp_path / "file"))
    with pytest.raises(gs.InvalidArgument, match=re.escape(f"GRADSYNC_TRACE{told}")):
        gs.init_process_group("local")
    assert not gs.is_initialized()


def test_without_the_variable_there_is_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GRADSYNC_TRACE", raising=False)
    with gs.init_process_group("local") as comm:
        comm.barrier()
        assert trace.active is None
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_cannot_be_written_in_the_end_is_a_warning(tmp_path: Path) -> None:
    code = """if True:
        import os, shutil, gradsync as gs
        with gs.init_process_group("local"):
            shutil.rmtree(os.environ["GRADSYNC_TRACE"])
    """
    environ = os.environ | {"GRADSYNC_TRACE": str(tmp_path / "traced")}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert "the trace was not written: FileNotFoundError" in done.stderr
