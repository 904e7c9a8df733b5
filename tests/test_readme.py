"""The README is true: its code runs, its output is what is printed, its figures are those that were measured."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import readme  # noqa: E402

TEXT = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


def commands() -> list[tuple[str, str]]:
    """Each `$ command` of the README with the output shown below it."""
    found = []
    for block in blocks("console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append((command.split("#")[0].strip(), output))
    return found


def test_generated_parts_are_up_to_date() -> None:
    made = readme.render(TEXT)
    difference = "".join(difflib.unified_diff(TEXT.splitlines(True), made.splitlines(True)))
    assert not difference, f"run `python benchmarks/readme.py`:\n{difference}"


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = [command.split()[1] for command, _ in commands() if command.startswith("make ")]
    assert {"demo", "test", "lint"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_make_demo_runs_the_demo() -> None:
    """`make demo` is this command, after installing; CI and the test of the example run the rest."""
    recipe = (ROOT / "Makefile").read_text().partition("\ndemo:")[2].splitlines()[1]
    assert recipe.endswith("gradsync run -n 2 examples/train_digits.py")


@pytest.mark.parametrize(("command", "output"), [c for c in commands() if c[0].startswith("gradsync ")])
def test_gradsync_commands_print_what_is_shown(command: str, output: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command.split()], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == output


def test_python_blocks_run(tmp_path: Path) -> None:
    for number, code in enumerate(blocks("python")):
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
