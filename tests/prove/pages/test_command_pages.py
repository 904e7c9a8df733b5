"""The pages on the doctor and the benchmarks are true: each command runs, and each option that they name exists."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from gradsync.bench.collectives import KINDS
from gradsync.cli import main
from gradsync.doctor.checks import CHECKS, Status

ROOT = Path(__file__).parents[3]
DOCTOR, BENCHMARKS = ((ROOT / "docs" / name).read_text() for name in ("doctor.md", "benchmarks.md"))


def commands(text: str) -> list[str]:
    """Each line of the shell blocks."""
    return [line for block in re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL) for line in block.splitlines()]


RUNNABLE = [line for line in commands(DOCTOR) + commands(BENCHMARKS) if line.startswith("gradsync ")]


@pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory on Linux")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("line", RUNNABLE)
def test_every_command_runs(line: str, tmp_path: Path) -> None:
    if "--backend mpi" in line:
        pytest.importorskip("mpi4py")
    command = [sys.executable, "-m", *shlex.split(line)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=110)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    for written in re.findall(r"(?:--json|--plot) (\S+\.\w+)", line):
        assert (tmp_path / written).stat().st_size > 0


def options_of(*path: str) -> set[str]:
    command: click.Command = main
    for name in path:
        assert isinstance(command, click.Group)
        command = command.commands[name]
    return {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}


def test_options_that_are_explained_exist() -> None:
    spans = " ".join(re.findall(r"`([^`\n]+)`", BENCHMARKS + DOCTOR))
    named = set(re.findall(r"(?<![\w-])(--[a-z-]+|-[a-z])(?![\w-])", spans))
    known = options_of("bench", "collectives") | options_of("doctor")
    assert {"-v", "--no-try"} <= named
    assert named <= known


def test_every_check_and_status_is_explained() -> None:
    explained = DOCTOR.partition("## Lines of the report")[2]
    assert [what for what in CHECKS if what not in explained] == []
    assert [status for status in Status if f"`{status.value}`" not in DOCTOR] == []


def test_every_factor_is_the_one_of_the_code() -> None:
    rows = re.findall(r"^\| ([a-z_, ]+) \| (2 \(n - 1\) / n|\(n - 1\) / n|1) \|$", BENCHMARKS, flags=re.MULTILINE)
    written = {name: formula for names, formula in rows for name in names.split(", ")}
    assert set(written) == set(KINDS)
    for name, formula in written.items():
        value = eval(formula.replace("2 (", "2 * ("), {"n": 4})
        assert KINDS[name].bus_factor(4) == value, name
