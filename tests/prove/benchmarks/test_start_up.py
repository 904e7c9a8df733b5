"""The start-up benchmark, with gradsync's ranks only: one run, what it is held against, and a run that fails."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import start_up
from peers.contenders import GRADSYNC, MPICH

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the ranks share memory on Linux")


def test_a_run_ends_with_the_last_rank(tmp_path: Path) -> None:
    assert 0 < start_up.seconds_to_first_all_reduce(GRADSYNC, 2, str(tmp_path)) < 60


def test_a_failing_run_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise ValueError('no such batch')")
    command = [*start_up.gradsync_command(), "run", "-n", "2", str(script)]
    monkeypatch.setattr(start_up, "command_of", lambda system, ranks: command)
    with pytest.raises(RuntimeError, match=r"(?s)gradsync run, 2 ranks: 0 are done; .*no such batch"):
        start_up.seconds_to_first_all_reduce(GRADSYNC, 2, str(tmp_path))


def test_contenders_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = []

    def run(system: str, ranks: int, folder: str) -> float:
        turns.append(system)
        return float(len(turns))

    monkeypatch.setattr(start_up, "seconds_to_first_all_reduce", run)
    samples = start_up.measure([GRADSYNC, MPICH], 2, 2)
    assert turns == [MPICH, GRADSYNC, GRADSYNC, MPICH, MPICH, GRADSYNC]
    assert samples == {GRADSYNC: [3.0, 6.0], MPICH: [4.0, 5.0]}


def test_rows_and_promises() -> None:
    ours, theirs = start_up.rows_of(2, {GRADSYNC: [0.3, 0.3], MPICH: [0.6, 0.6]})
    assert (ours.what, ours.kept, ours.ratio) == ("gradsync run, 2 ranks", True, None)
    assert (theirs.what, theirs.kept, theirs.ratio) == ("mpiexec of MPICH, 2 ranks", None, 2.0)
    late, _ = start_up.rows_of(2, {GRADSYNC: [0.4, 0.4], MPICH: [0.6, 0.6]})
    assert late.kept is False
    console = Console(file=io.StringIO(), width=start_up.TABLE_WIDTH, record=True)
    console.print(start_up.table_of([ours, theirs, late]))
    shown = console.export_text()
    assert all(text in shown for text in ("0.300 .. 0.300", "< 0.35 yes", "< 0.35 NO", "2.00"))
    assert start_up.rows_of(3, {GRADSYNC: [9.0, 9.0]})[0].kept is None
