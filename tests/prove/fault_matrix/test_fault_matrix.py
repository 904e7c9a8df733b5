"""A sample of the fault matrix for real, and that it notices a wrong culprit, a late error and what is kept."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import fault_matrix
from failure_tables import told
from failures.matrix import VICTIMS, Cell, cells, row_of, why_not
from failures.observation import observe
from failures.points import CLOSE, FAULTS, HALF_OPEN, INIT, JOINED, KILL, LAUNCHER, MIDDLE_BUCKET, PHASES, SPAWN, STOP

SAMPLE = fault_matrix.sample()
# What the matrix has found: a rank that is lost within its first half second after joining was not missed; a
# descriptor closed under a rank was an untyped error.
FOUND = [Cell(JOINED, STOP, "0"), Cell(INIT, HALF_OPEN, "2"), Cell(MIDDLE_BUCKET, CLOSE, "1")]


@pytest.mark.parametrize("cell", [*SAMPLE, *FOUND], ids=lambda cell: cell.name)
def test_cell(cell: Cell) -> None:
    result = observe(row_of(cell), 1)
    assert result.complaints == []
    assert result.left_behind == []
    assert told(result.as_json()["measured"]) is not None


def test_the_sample_has_each_phase_each_fault_and_each_victim() -> None:
    assert {cell.phase for cell in SAMPLE} == set(PHASES)
    assert {cell.fault for cell in SAMPLE} == set(FAULTS)
    assert {cell.victim for cell in SAMPLE} == set(VICTIMS)


def test_every_combination_is_a_cell_or_has_a_reason() -> None:
    everything = cells()
    assert len(set(everything)) == len(everything) == len(PHASES) * len(FAULTS) * len(VICTIMS)
    left_out = [cell for cell in everything if why_not(cell) is not None]
    assert {cell.victim for cell in left_out if cell.phase != SPAWN} == {LAUNCHER}
    assert len(left_out) == 34


def test_a_victim_that_is_blamed_is_no_culprit() -> None:
    """As if the row said that rank 2 is to blame for what rank 1 does."""
    row = replace(row_of(Cell(MIDDLE_BUCKET, KILL, "1")), culprit=2)
    complaints = observe(row, 1).complaints
    assert any(text.startswith("rank 0 blames rank 1: ") for text in complaints)
    assert "the launcher blames rank 1" in complaints


def test_what_a_surviving_rank_keeps_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A module that every rank imports by itself leaks a descriptor at each error."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, atexit, gradsync\n"
        "from gradsync.rendezvous.membership import Membership\n"
        "close = Membership.close\n"
        "Membership.close = lambda self: (close(self), os.pipe())[0]\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    result = observe(row_of(Cell(MIDDLE_BUCKET, KILL, "1")), 1)
    assert [text.partition(":")[0] for text in sorted(result.left_behind)] == [
        "rank 0 holds descriptors",
        "rank 2 holds descriptors",
    ]


def test_json_has_all_cells_and_the_reasons_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "matrix.json"
    monkeypatch.setattr(sys, "argv", ["fault_matrix.py", "--only", KILL, SPAWN, "@ 0", "--json", str(output)])
    assert fault_matrix.main() == 0
    body = json.loads(output.read_text())
    assert set(body) == {"command", "date", "machine", "versions", "settings", "summary", "results", "left_out"}
    [cell] = body["results"]
    assert (cell["phase"], cell["fault"], cell["victim"], cell["culprit_named"]) == (SPAWN, KILL, "0", True)
    assert cell["measured"]["reported"]["target_seconds"] == 0.2
    assert body["summary"] == {
        "cells": 1,
        "rounds": fault_matrix.ROUNDS,
        "wrong_or_unclean": 0,
        "late": body["summary"]["late"],
    }
    assert len(body["left_out"]) == 34


def test_the_table_marks_what_is_wrong_and_what_is_late() -> None:
    cell = Cell(MIDDLE_BUCKET, KILL, "1")
    good = observe(row_of(cell), 1)
    late = replace(good, row=replace(good.row, told_within=0.0))
    wrong = replace(good, rounds=[replace(good.rounds[0], complaints=("not told",))])
    console = Console(width=fault_matrix.TABLE_WIDTH, record=True, file=io.StringIO())
    console.print(fault_matrix.table_of([cell, replace(cell, phase=INIT)], [late, wrong]))
    text = console.export_text()
    assert " late" in next(line for line in text.splitlines() if MIDDLE_BUCKET in line)
    assert " !!" in next(line for line in text.splitlines() if "init" in line)
