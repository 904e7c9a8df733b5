"""The README is true: its code runs, its output is what is printed, its figures are those that were measured."""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gradsync as gs
from gradsync.communicators.collectives.asynchronous import Asynchronous
from gradsync.communicators.collectives.objects import Objects

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import readme  # noqa: E402

TEXT = (ROOT / "README.md").read_text()


def blocks(language: str, text: str = TEXT) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def commands() -> list[str]:
    """Each `$ command` of the README."""
    lines = [line for block in blocks("console") for line in block.splitlines() if line.startswith("$ ")]
    return [line.removeprefix("$ ").split("#")[0].strip() for line in lines]


@pytest.mark.timeout(200)  # one of the commands waits for a deadline
@pytest.mark.parametrize("page", readme.PAGES, ids=lambda page: page.name)
def test_generated_parts_are_up_to_date(page: Path) -> None:
    text = page.read_text()
    made = readme.render(text)
    difference = "".join(difflib.unified_diff(text.splitlines(True), made.splitlines(True)))
    assert not difference, f"run `python benchmarks/readme.py`:\n{difference}"


def test_every_command_but_make_is_run() -> None:
    run = re.findall(r"<!-- exit code \d+ -->\n```console\n\$ (.*)\n", TEXT)
    assert run == [command for command in commands() if not command.startswith("make ")]


def test_output_is_what_the_command_prints_on_both_streams() -> None:
    assert readme.play("gradsync --version && python -c 'exit(\"told on stderr\")'", 1).endswith("\ntold on stderr\n")


def test_another_exit_code_than_the_readme_says_is_refused() -> None:
    with pytest.raises(RuntimeError, match="ended with 3 in place of 0:\nhello\n"):
        readme.play("echo hello; exit 3", 0)


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = [command.split()[1] for command in commands() if command.startswith("make ")]
    targets += re.findall(r"`make ([a-z-]+)`", TEXT)
    assert {"demo", "test", "lint"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_make_soak_does_what_it_says() -> None:
    [said] = re.findall(r"\$ make soak +# (.*)", TEXT)
    assert f"  ## {said}\n" in (ROOT / "Makefile").read_text()


def test_every_collective_is_shown_as_it_is_called() -> None:
    homes = {"asynchronous": Asynchronous, "objects": Objects}
    shown = set()
    for code in re.findall(r"`(comm\.[a-z_.]+\([^`]*\))`", TEXT):
        call = ast.parse(code, mode="eval").body
        assert isinstance(call, ast.Call)
        *path, name = ast.unparse(call.func).split(".")[1:]
        method = getattr(homes[path[0]] if path else gs.Communicator, name)
        inspect.signature(method).bind("self", *call.args, **{keyword.arg: keyword.value for keyword in call.keywords})
        shown.add(name)
    collectives = {name for name in vars(Asynchronous) if not name.startswith("_")}
    assert collectives | {"new_group", "split", "split_by_machine"} <= shown


def test_every_error_is_explained() -> None:
    public = {name for name in gs.__all__ if name not in ("WORLD", "comm")}
    errors = {
        name for name in public if isinstance(getattr(gs, name), type) and issubclass(getattr(gs, name), Exception)
    }
    assert "RankFailed" in errors
    assert [name for name in errors if f"{name}`" not in TEXT] == []


def test_files_that_it_names_exist() -> None:
    named = re.findall(r"`((?:benchmarks|examples|src|tests)/[\w/.]+\w)`", TEXT)
    assert "benchmarks/results/full_speed.json" in named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_make_demo_runs_the_demo() -> None:
    """`make demo` is this command, after installing; CI and the test of the example run the rest."""
    recipe = (ROOT / "Makefile").read_text().partition("\ndemo:")[2].splitlines()[1]
    assert recipe.endswith("gradsync run -n 2 examples/train_digits.py")


@pytest.mark.parametrize("page", readme.PAGES, ids=lambda page: page.name)
def test_python_blocks_run(tmp_path: Path, page: Path) -> None:
    for number, code in enumerate(blocks("python", page.read_text())):
        script = tmp_path / f"block_{number}.py"
        script.write_text(code)
        alone = "__main__" in code  # it starts its own ranks
        launcher = [] if alone else ["-m", "gradsync", "run", "-n", "2"]
        done = subprocess.run(
            [sys.executable, *launcher, str(script)],
            capture_output=True, text=True, timeout=100, check=False, env=dict(os.environ),
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, ""), code
        expected = re.findall(r"by rank: (\[.*?\])", code)
        assert not expected or done.stdout.strip() == expected[0]


def test_the_commands_for_several_machines_run(tmp_path: Path) -> None:
    """With two launchers on this machine in place of two machines, and a rank each in place of eight."""
    section = TEXT.partition("\n## Several machines\n")[2].partition("\n## ")[0]
    [block] = re.findall(r"```sh\n(.*?)```", section, flags=re.DOTALL)
    block = block.replace("head:29400", f"127.0.0.1:{gs.free_port()}").replace("-n 8", "-n 1")
    secret, *nodes = block.replace("gradsync run", f"{shlex.quote(sys.executable)} -m gradsync run").splitlines()
    (tmp_path / "train.py").write_text(
        "import gradsync as gs\n"
        "with gs.init_process_group('shm') as comm:\n"
        "    print(comm.objects.all_gather(comm.rank))\n"
    )
    subprocess.run(secret, shell=True, cwd=tmp_path, check=True, timeout=60)
    started = [
        subprocess.Popen(node, shell=True, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for node in nodes
    ]
    told = [process.communicate(timeout=100) for process in started]
    assert [process.returncode for process in started] == [0, 0], told
    assert [out for out, _ in told] == ["[rank 0] [0, 1]\n", "[rank 1] [0, 1]\n"]


MACHINE: dict[str, Any] = {
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
