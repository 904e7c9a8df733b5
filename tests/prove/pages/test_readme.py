"""What is made in pages is up to date: files, output of commands, figures. test_pages.py has all else of them."""

from __future__ import annotations

import difflib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

import failure_tables
import page_tables
import readme


@pytest.mark.timeout(200)  # one of the commands waits for a deadline
@pytest.mark.parametrize("page", readme.PAGES, ids=lambda page: page.name)
def test_generated_parts_are_up_to_date(page: Path) -> None:
    text = page.read_text()
    made = readme.render(text)
    difference = "".join(difflib.unified_diff(text.splitlines(True), made.splitlines(True)))
    assert not difference, f"run `python benchmarks/readme.py`:\n{difference}"


def test_output_is_what_the_command_prints_on_both_streams() -> None:
    assert readme.play("gradsync --version && python -c 'exit(\"told on stderr\")'", 1).endswith("\ntold on stderr\n")


def test_another_exit_code_than_the_readme_says_is_refused() -> None:
    with pytest.raises(RuntimeError, match="ended with 3 in place of 0:\nhello\n"):
        readme.play("echo hello; exit 3", 0)


MACHINE = {
    "machine": {"cpu": "A CPU", "usable_cores": 2},
    "versions": {"python": "3.11.7", "numpy": "2.4.6"},
}


def made_of(name: str, results: list[dict[str, Any]], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(page_tables, "RESULTS", folder)
    (folder / f"{name}.json").write_text(json.dumps({**MACHINE, "results": results}))
    return page_tables.table(name).splitlines()


def test_results_that_are_not_there_yet_are_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_tables, "RESULTS", tmp_path)
    assert page_tables.table("detection") == "Not measured yet.\n"


def test_start_up_has_a_line_for_each_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = [("gradsync run, 2 ranks", 0.261), ("torchrun, gloo, 2 ranks", 4.1), ("gradsync run, 8 ranks", 0.9)]
    results = [{"what": what, "seconds": {"median": median}} for what, median in times]
    assert made_of("start_up", results, tmp_path, monkeypatch) == [
        "| seconds | 2 ranks | 8 ranks |",
        "| --- | --- | --- |",
        "| gradsync run | 0.26 | 0.90 |",
        "| torchrun, gloo | 4.10 |  |",
        "",
        "Measured on A CPU, 2 cores, Python 3.11.7, NumPy 2.4.6; medians, contenders alternating in one run.",
    ]


def test_detection_has_a_line_for_each_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raised = {"median_seconds": 0.003, "worst_seconds": 0.004, "target_seconds": 0.5}
    reported = {"median_seconds": 0.1, "worst_seconds": 0.611, "target_seconds": 0.5, "met": False}
    down = {"median_seconds": 0.12, "worst_seconds": 0.15, "target_seconds": None}
    killed = {
        "failure": "SIGKILL", "phase": "barrier", "ranks": 2, "skipped": None, "culprit_named": True, "left_behind": [],
        "measured": {"raised": raised, "reported": reported, "down": down},
    }  # fmt: skip
    unnamed = {
        **killed,
        "culprit_named": False,
        "left_behind": ["process 7"],
        "measured": dict.fromkeys(killed["measured"]),
    }
    skipped = {**killed, "skipped": "no GPU"}
    lines = made_of("detection", [killed, unnamed, skipped], tmp_path, monkeypatch)
    assert lines[2:5] == [
        "| SIGKILL | barrier | 2 | 0.10 s | **0.61 s** | 0.5 s | 0.12 s | 0.15 s |  | yes | 0 |",
        "| SIGKILL | barrier | 2 |  | |  |  | |  | NO | 1 |",
        "| SIGKILL | barrier | 2 | not here | | | | | | | |",
    ]


def test_detection_at_a_glance_has_the_failures_that_a_newcomer_thinks_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"median_seconds": 0.1, "worst_seconds": 0.611, "target_seconds": 0.5, "met": False}
    down = {"median_seconds": 0.12, "worst_seconds": 0.15, "target_seconds": None}
    measured = {"raised": None, "reported": told, "down": down}
    of = [dict(zip(("failure", "phase", "ranks"), key, strict=True)) for key in failure_tables.AT_A_GLANCE]
    found = [{**one, "left_behind": [], "culprit_named": True, "measured": measured} for one in of]
    found[1] |= {"left_behind": ["process 7"], "culprit_named": False, "measured": {**measured, "down": None}}
    monkeypatch.setattr(page_tables, "RESULTS", tmp_path)
    (tmp_path / "detection.json").write_text(json.dumps({**MACHINE, "results": found}))
    lines = page_tables.table("detection.at_a_glance").splitlines()
    assert lines[2:4] == [
        "| raises an exception | computing | 0.10 s | **0.61** s | 0.15 s | yes | 0 |",
        "| is killed | all_reduce | 0.10 s | **0.61** s |  | NO | 1 |",
    ]
    assert len(lines) == 2 + len(failure_tables.AT_A_GLANCE) + 2


def cell(phase: str, fault: str, worst: float | None, **others: Any) -> dict[str, Any]:
    reported = None if worst is None else {"worst_seconds": worst, "met": worst < 0.5}
    measured = {"raised": None, "reported": reported, "down": None}
    return {
        "phase": phase,
        "fault": fault,
        "victim": "0",
        "measured": measured,
        "complaints": [],
        "left_behind": [],
        **others,
    }


def test_fault_matrix_has_the_worst_of_all_victims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [
        cell("spawn", "kill", 0.1), cell("spawn", "kill", 0.2), cell("spawn", "stop", 0.7),
        cell("hello", "close", None), cell("hello", "kill", 0.1, left_behind=["process 7"]),
    ]  # fmt: skip
    monkeypatch.setitem(MACHINE, "summary", {"cells": 5, "rounds": 5, "wrong_or_unclean": 1})
    monkeypatch.setitem(MACHINE, "settings", {"cells_at_a_time": 2})
    monkeypatch.setitem(MACHINE["machine"], "load_average_before", 1.2)
    monkeypatch.setitem(MACHINE["machine"], "load_average_after", 3.4)
    lines = made_of("fault_matrix", cells, tmp_path, monkeypatch)
    assert lines[0] == "| seconds | kill | stop | raise | exit 0 | exit 3 | close | half-open |"
    assert lines[2:4] == ["| spawn | 0.20 | **0.70** |  |  |  |  |  |", "| hello | WRONG |  |  |  |  | unharmed |  |"]
    told = "5 cells, 5 runs; not as wanted: kill @ hello @ 0: process 7."
    assert f"{told} 2 cells at a time, load average of the machine 1 to 3." in lines


def test_kills_have_a_line_for_each_victim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = {"kills": 5, "left_something_behind": 0, "by_kind": {"SIGKILL rank": 3, "SIGSTOP launcher": 2}}
    monkeypatch.setitem(MACHINE, "summary", summary)
    lines = made_of("proof_kills", [], tmp_path, monkeypatch)
    assert lines[0] == "| hit | SIGKILL | SIGSTOP |"
    assert lines[2:4] == ["| a launcher | 0 | 2 |", "| a rank | 3 | 0 |"]
    assert "0 of 5 left a process, shared memory, a port or a file behind." in lines


def test_proofs_tell_what_was_not_gone_through_and_what_was_violated() -> None:
    space = {"about": "two ranks join", "ranks": 2, "states": 1234, "moves": 5678, "closed": True, "violation": None}
    found = failure_tables.model_check(
        {"configurations": [space, {**space, "closed": False, "violation": {"what": "x"}}]}
    )
    assert found[2:] == [
        "| two ranks join | 2 | 1,234 | 5,678 | yes | 0 |",
        "| two ranks join | 2 | 1,234 | 5,678 | not all | 1 |",
    ]
    results = {
        "seeds": 20, "events": 3000, "virtual_seconds": 40, "checks": ["one", "two"], "violations": [{"seed": 3}],
        "faults": {"crash": {"seeds": 20, "told": 17}},
    }  # fmt: skip
    assert failure_tables.simulation(results)[2:] == [
        "| crash | 20 | 17 |",
        "",
        "20 seeds, 3,000 events, 40 s of virtual time; 1 violations of 2 checks.",
    ]
