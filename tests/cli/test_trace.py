"""A trace is a Chrome trace of each rank and of all ranks, and says where the time went."""

from __future__ import annotations

import json
import os
import re

import pytest

import gradsync as gs
from arrays import arrays_of
from commands import wait_until

FILES = ["all-ranks.json", "rank-0.json", "rank-1.json", "summary.txt"]
SCRIPT = """
    import sys, time
    import numpy as np
    import gradsync as gs
    with gs.init_process_group() as comm:
        sync = gs.AllreduceCallback("mean", check_every=0)
        for step in range(5):
            time.sleep(0.25 * comm.rank if "late" in sys.argv else 0.0)  # longer than any pause of a busy machine
            with sync.backward():
                mean = sync("w", np.ones(300_000))
            if step == 3 and "raise" in sys.argv and comm.rank == 1:
                raise KeyError("train-0003")
            if step == 3 and "exit" in sys.argv and comm.rank == 1:
                import os
                os._exit(3)
"""


def events_of(path):
    """Reads a file, and refuses what the Trace Event Format does not allow."""
    events = json.loads(path.read_text())["traceEvents"]
    spans = {}
    for event in events:
        assert event["name"]
        assert event["ph"] in "XM"
        if event["ph"] == "X":
            assert event["dur"] >= 0
            spans.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for of_track in spans.values():  # the events of a track lie beside each other, or within each other
        open_until = []
        for began, ended in sorted(of_track, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= began:
                open_until.pop()
            assert not open_until or ended <= open_until[-1]
            open_until.append(ended)
    return events


def names(events, category, rank=0):
    return [event["name"] for event in events if event.get("cat") == category and event["pid"] == rank]


@pytest.mark.ranks(2, on=("shm", "fake"))
def test_the_files_have_every_collective_of_both_ranks(rank, tmp_path, place):
    os.environ["GRADSYNC_TRACE"] = str(tmp_path / "traced")
    with gs.init_process_group("shm" if place == "shm" else "nccl") as comm:
        xp = arrays_of(comm).xp
        sync = gs.AllreduceCallback("mean", comm, threshold_bytes=8 * 300_000)
        for _ in range(6):
            with sync.backward():
                for name in "abc":
                    sync(name, xp.ones(300_000))
        comm.broadcast(xp.ones(3))
        with comm.split(0) as pair:
            pair.asynchronous.all_reduce(xp.ones(4)).wait()
        recorded = [entry.what.headline() for entry in comm.recorder.entries()]
    wait_until((tmp_path / "traced/all-ranks.json").exists)
    events = events_of(tmp_path / f"traced/rank-{rank}.json")
    world = [event for event in events if event.get("cat") == "collective" and event["args"]["group"] == "world"]
    assert [event["name"] for event in world] == recorded
    assert all(event["args"]["state"] == "done" for event in world)
    assert len([name for name in names(events, "collective", rank) if name.startswith("all_reduce")]) == 6 * 3 + 1
    assert names(events, "step", rank) == ["step"] * 6
    assert "waiting" in names(events, "phase", rank)


def test_a_run_ends_with_four_lines_that_say_where_the_time_went_and_who_was_waited_for(cli, script, tmp_path):
    folder = tmp_path / "traced"
    folder.mkdir()
    for name in ("rank-0.json", "rank-2.json", "summary.txt"):
        (folder / name).write_text("of an earlier run")
    done = cli("run", "-n", 2, "--no-prefix", "--trace", folder, script(SCRIPT), "late")
    assert (done.code, done.out) == (0, "")
    assert done.err == (folder / "summary.txt").read_text()
    steps, parts, late, files = done.err.splitlines()
    [milliseconds] = re.findall(r"4 steps of ranks 0 and 1 after the first, (\d+\.\d\d) ms each", steps)
    of_a_step = {part: float(ms) for part, ms in re.findall(r"(\w[a-z ]*) (\d+\.\d\d) ms \(\d+%\)", parts)}
    assert of_a_step["your code"] >= 125.0  # the mean of both ranks
    assert of_a_step["waiting"] >= 100.0
    assert sum(of_a_step.values()) == pytest.approx(float(milliseconds), rel=0.05)
    assert "most waited for: rank 1" in late
    assert str(folder / "all-ranks.json") in files
    joined = events_of(folder / "all-ranks.json")
    assert {event["pid"] for event in joined} == {0, 1}
    for rank in range(2):
        assert [event for event in joined if event["pid"] == rank] == events_of(folder / f"rank-{rank}.json")
    assert {"packing", "waiting", "reducing", "splitting"} >= set(names(joined, "phase"))


def test_a_run_that_fails_leaves_traces_too(cli, script, tmp_path):
    """Also where the ranks write for longer than the launcher would leave them otherwise."""
    many = SCRIPT.replace("range(5)", "range(8_000)").replace("step == 3", "step == 7_999").replace("300_000", "4")
    at_exit = many.replace("with gs.init_process_group() as comm:", "comm = gs.init_process_group()\n    if True:")
    for number, text in enumerate((SCRIPT, at_exit)):
        folder = tmp_path / str(number)
        done = cli("run", "-n", 2, "--trace", folder, script(text), "raise")
        assert done.code == 1
        assert "KeyError: 'train-0003'" in done.err
        assert "most waited for" in done.err
        assert sorted(path.name for path in folder.iterdir()) == FILES
    for rank in range(2):
        assert names(events_of(tmp_path / f"0/rank-{rank}.json"), "step", rank) == ["step"] * 4
    events = events_of(tmp_path / "0/rank-0.json")
    [failed] = [event for event in events if event.get("args", {}).get("state") == "failed"]
    assert failed["name"].startswith("all_reduce(mean, check_every 0)")


def test_a_rank_that_is_killed_leaves_no_trace_and_there_is_no_summary(cli, script, tmp_path):
    done = cli("run", "-n", 2, "--trace", tmp_path / "traced", script(SCRIPT), "exit")
    assert (done.code, "most waited for" in done.err) == (3, False)
    assert not {"rank-1.json", "all-ranks.json", "summary.txt"} & {
        path.name for path in (tmp_path / "traced").iterdir()
    }


SURVIVES = """
    import os, signal
    import numpy as np
    import gradsync as gs
    comm = gs.init_process_group()
    sync, step = gs.AllreduceCallback("mean"), 0
    while True:
        try:
            step = gs.broadcast_tree({"step": step}, root=comm.most_advanced)["step"]
            if step == 8:
                break
            while step < 8:
                with sync.backward():
                    mean = sync("w", np.ones(3))
                step += 1
                if step == 4 and comm.member == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
            comm = gs.rebuild(min_ranks=3 - ALONE)
        except gs.RankFailed:
            comm = gs.rebuild(min_ranks=3 - ALONE)
    gs.destroy_process_group()
"""


@pytest.mark.parametrize("is_replaced", [False, True])
def test_those_who_survive_join_their_traces_and_worlds_are_told_apart(is_replaced, cli, script, tmp_path):
    folder, options = tmp_path / "traced", ["--respawn", 1] if is_replaced else []
    path = script(SURVIVES.replace("ALONE", str(int(not is_replaced))))
    run = cli("run", "-n", 3, "--min-ranks", 2, *options, "--trace", folder, path)
    assert "most waited for: rank" in run.err
    collectives = {}
    for event in events_of(folder / "all-ranks.json"):
        if event.get("cat") == "collective":
            where = event["args"]["group"], event["args"]["number"]
            collectives.setdefault(where, {})[event["pid"]] = event["name"]
    assert {rank for of_ranks in collectives.values() for rank in of_ranks} == ({0, 1, 2} if is_replaced else {0, 2})
    assert all(len({*of_ranks.values()}) == 1 for of_ranks in collectives.values())
    assert {group for group, _ in collectives} >= {"world", "world (2)"}
    assert "world" not in {group for (group, _), of_ranks in collectives.items() if 1 in of_ranks}  # the new rank


def test_a_second_process_group_adds_to_the_trace(cli, script, tmp_path):
    path = script("""
        import numpy as np, gradsync as gs
        for n in range(2):
            with gs.init_process_group("local") as comm:
                comm.all_reduce(np.ones(n + 1))
    """)
    done = cli.python(path, environment={"GRADSYNC_TRACE": str(tmp_path / "traced")})
    assert (done.code, len(done.err.splitlines())) == (0, 2)  # one rank waits for nobody, and made no step
    assert names(events_of(tmp_path / "traced/rank-0.json"), "collective") == [
        *("all_reduce(sum) float64[1] 8 bytes", "all_reduce(sum) float64[2] 16 bytes")
    ]


def test_a_folder_that_cannot_be_written_to_is_an_error_at_the_start(cli, script, tmp_path):
    (tmp_path / "file").write_text("")
    done = cli("run", "-n", 2, "--trace", tmp_path / "file", script(SCRIPT))
    assert (done.code, "--trace" in done.err) == (2, True)
    done = cli.python(script(SCRIPT), environment={"GRADSYNC_TRACE": str(tmp_path / "file")})
    assert (done.code, "InvalidArgument: GRADSYNC_TRACE" in done.err) == (1, True)


def test_a_trace_that_cannot_be_written_in_the_end_is_a_warning(cli, script, tmp_path):
    path = script("""
        import os, shutil, gradsync as gs
        with gs.init_process_group("local"):
            shutil.rmtree(os.environ["GRADSYNC_TRACE"])
    """)
    done = cli.python(path, environment={"GRADSYNC_TRACE": str(tmp_path / "traced")})
    assert (done.code, "the trace was not written: FileNotFoundError" in done.err) == (0, True)
