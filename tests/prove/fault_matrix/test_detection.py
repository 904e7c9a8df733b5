"""The detection table: its quick rows for real, and that it notices what is told wrongly or left behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import detection
from failures import runs, scene
from failures.observation import DOWN, RAISED, REPORTED, Result, Row, observe
from failures.rows import rows
from failures.runs import LAUNCHER
from failures.scene import Scene

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are started, and looked at, as Linux does")

SCRIPT = str(Path(detection.__file__))
QUICK = (
    "exits-before-init",
    "killed-in-init",
    "killed-in-all_reduce-4",
    "raises-in-function",
    "out-of-memory-kill",
    "ctrl-c",
    "launcher-killed",
    "duplicate-rank",
    "unpicklable-result",
)
MEASURED = {"target_seconds", "median_seconds", "worst_seconds", "met", "samples"}
LITTER = """
import os, signal, socket, sys, tempfile
from pathlib import Path
from failures import diary

listener = socket.create_server(("127.0.0.1", 0))
if os.fork() == 0:
    signal.pause()
diary.note(diary.READY, address="127.0.0.1:%d" % listener.getsockname()[1])
diary.note(diary.FAULT)
Path(tempfile.gettempdir(), "litter").touch()
"""


def test_quick_rows_name_the_culprit_and_leave_nothing(tmp_path):
    output = tmp_path / "detection.json"
    command = [sys.executable, SCRIPT, "--rounds", "1", "--only", *QUICK, "--output", output]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    body = json.loads(output.read_text())
    assert set(body) == {"command", "date", "machine", "versions", "settings", "results"}
    assert body["settings"] == {"rounds": 1}
    results = {result["name"]: result for result in body["results"]}
    assert set(results) == {*QUICK, "ctrl-c-twice"}
    for result in results.values():
        assert set(result["measured"]) == {RAISED, REPORTED, DOWN}
        measured = [summary for summary in result["measured"].values() if summary is not None]
        assert all(set(summary) == MEASURED and len(summary["samples"]) == 1 for summary in measured)
        assert result["skipped"] or (result["culprit_named"] and measured), result
        assert result["left_behind"] == []
    assert results["killed-in-all_reduce-4"]["errors"] == {"RankFailed": 3}
    table = done.stdout
    assert all(row.failure in table for row in rows() if row.name in QUICK)


def test_names_of_rows_are_told_apart():
    names = [row.name for row in rows(large=True)]
    assert len(set(names)) == len(names)
    assert {row.name for row in detection.chosen(rows(), ["stopped"])} >= {"stopped-computing", "launcher-stopped"}


def test_wrong_culprit_wrong_code_and_missing_errors_are_complained_about():
    row = Row(
        "wrong",
        "SIGKILL",
        "computing",
        2,
        runs.run(2, "computing", "kill"),
        raising=(0, 1),
        errors=("RankFailed",),
        names="rank 7",
        report=("^gradsync: rank 0 .* was killed",),
        exit_codes={LAUNCHER: 3},
    )
    result = observe(row, 1)
    told, silent, report, code = result.complaints
    assert told.startswith("rank 0 got RankFailed: ")
    assert silent == "rank 1 got no error of ours"
    assert "was killed" in report
    assert code == "launcher ended with 137 in place of 3"
    assert not result.is_good
    assert result.left_behind == []


def test_what_is_left_behind_is_told(monkeypatch):
    monkeypatch.setattr(scene, "_LEAVE_SECONDS", 0.1)
    row = Row("litter", "leaves things behind", "nowhere", 1, play_litter)
    result = observe(row, 1)
    process, port, file = result.left_behind
    assert process.startswith("process ")
    assert port.startswith("port ")
    assert Path(file).name == "litter"
    assert not result.is_good
    assert not Path(file).exists()


def play_litter(scene):
    scene.start("litter", ["-c", LITTER])
    scene.wait_for_end("litter")


def test_a_run_that_ends_too_early_is_no_result():
    result = observe(Row("early", "ends", "nowhere", 1, play_early), 1)
    (complaint,) = result.complaints
    assert complaint.startswith("all processes have ended and no 1 ranks ready; printed until then:\nhello")
    assert result.summary(DOWN) is None


def play_early(scene):
    scene.start("early", ["-c", "print('hello')"])
    scene.wait_for_ranks(1)


@pytest.fixture
def _handlers_of_before():
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_handlers_of_before")
def test_exit_code_and_table_tell_of_complaints_and_skipped_rows(monkeypatch, capsys):
    impossible = Row("impossible", "a meteorite", "orbit", 2, play_early, needs=lambda: "no meteorite")
    made = [impossible, Row("early", "ends", "nowhere", 1, play_early)]
    monkeypatch.setattr(detection, "rows", lambda large=False: made)
    monkeypatch.setattr(sys, "argv", ["detection.py", "--rounds", "1", "--only", "e"])
    assert detection.main() == 1
    printed = capsys.readouterr().out
    assert "impossible skipped: no meteorite" in printed
    assert "early: all processes have ended" in printed
    assert Result(impossible, skipped="no meteorite").as_json()["culprit_named"] is None


def test_no_process_outlives_a_scene():
    with Scene() as played:
        pid = played.start("patient", ["-c", "import signal; signal.pause()"])
    assert not Path(f"/proc/{pid}").exists()
