"""`make bench-compare`: its recipe, run on two results of pytest-benchmark."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parents[3] / "Makefile"
BENCHMARK = "def test_speed(benchmark):\n    benchmark.pedantic(sum, ([1, 2],), rounds=3)\n"


@pytest.fixture
def results(tmp_path: Path) -> list[Path]:
    (tmp_path / "test_some.py").write_text(BENCHMARK)
    found = [tmp_path / "old.json", tmp_path / "new.json"]
    # Told that it is a worker of xdist's, as these tests may be, pytest-benchmark measures nothing.
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    for path in found:
        options = ["-q", "-p", "no:cacheprovider", f"--benchmark-json={path}", "test_some.py"]
        subprocess.run(
            [sys.executable, "-m", "pytest", *options],
            cwd=tmp_path, env=alone, check=True, capture_output=True, timeout=60,
        )  # fmt: skip
    return found


def test_two_results_are_put_side_by_side(results: list[Path], tmp_path: Path) -> None:
    [recipe] = re.findall(r"\$\(BIN\)/(pytest-benchmark compare .*)", MAKEFILE.read_text())
    command = recipe.replace("$(OLD)", str(results[0])).replace("$(NEW)", str(results[1]))
    program = "import sys; from pytest_benchmark.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", program, *command.split()[1:]],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("test_speed")]
    assert len(lines) == 2, done.stdout
    assert ["old" in lines[0] or "old" in lines[1], "new" in lines[0] or "new" in lines[1]] == [True, True]


def test_without_two_results_it_says_what_to_do(tmp_path: Path) -> None:
    """The recipe's own check, by make itself, with nothing to install before it."""
    [check] = re.findall(r"^\t@(ls \$\(OLD\) .*)$", MAKEFILE.read_text(), flags=re.MULTILINE)
    script = check.replace("$(OLD)", "no.json").replace("$(NEW)", "none.json")
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, "run `make bench` twice" in done.stdout) == (2, True)
