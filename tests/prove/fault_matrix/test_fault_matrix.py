"""Cells of the fault matrix that matter most, and quick rows of the detection table: named, and nothing is left.

benchmarks/fault_matrix.py, which the part runs too, has all other cells.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

from failure_tables import told
from failures.matrix import Cell, row_of
from failures.observation import DOWN, RAISED, REPORTED, observe
from failures.points import CLOSE, HALF_OPEN, INIT, JOINED, KILL, MIDDLE_BUCKET, SPAWN, STOP
from failures.rows import rows

# A rank that is killed, and what the matrix has found: a rank that is lost within its first half second after joining
# was not missed; a descriptor closed under a rank was an untyped error.
CELLS = [Cell(SPAWN, KILL, "0"), Cell(JOINED, STOP, "0"), Cell(INIT, HALF_OPEN, "2"), Cell(MIDDLE_BUCKET, CLOSE, "1")]
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


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_cell(cell: Cell) -> None:
    result = observe(row_of(cell), 1)
    assert result.complaints == []
    assert result.left_behind == []
    assert told(result.as_json()["measured"]) is not None


def test_quick_rows_name_the_culprit_and_leave_nothing(tmp_path):
    output = tmp_path / "detection.json"
    script = str(ROOT / "benchmarks" / "failure_detection.py")
    command = [sys.executable, script, "--rounds", "1", "--only", *QUICK, "--output", output]
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
        assert result["skipped"] or (result["culprit_named"] and measured), result
        assert result["left_behind"] == []
    assert results["killed-in-all_reduce-4"]["errors"] == {"RankFailed": 3}
    table = done.stdout
    assert all(row.failure in table for row in rows() if row.name in QUICK)
