"""What is made in pages is up to date: files, output of commands, figures. test_pages.py has all else of them."""

from __future__ import annotations

import difflib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import readme  # noqa: E402


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
    monkeypatch.setattr(readme, "RESULTS", folder)
    (folder / f"{name}.json").write_text(json.dumps({**MACHINE, "results": results}))
    return readme.table(name).splitlines()


def test_results_that_are_not_there_yet_are_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    assert readme.table("detection") == "Not measured yet.\n"


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
    raised = {"worst_seconds": 0.004, "target_seconds": 0.5}
    reported = {"worst_seconds": 0.111, "target_seconds": 0.5}
    down = {"worst_seconds": 0.15, "target_seconds": None}
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
        "| SIGKILL | barrier | 2 | 0.11 s | 0.5 s | 0.15 s |  | yes | 0 |",
        "| SIGKILL | barrier | 2 |  |  |  |  | NO | 1 |",
        "| SIGKILL | barrier | 2 | not here | | | | | |",
    ]
