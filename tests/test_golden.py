"""What people read when they use gradsync: help, doctor, bench, and the output of mistakes, as it was approved.

    python tests/test_golden.py                        # writes all of tests/golden anew
    python tests/test_golden.py one_step_less world_size  # or some

tests/golden/mistakes/NAME.py is a mistake, with the command that runs it in its first line, and NAME.txt what that
prints. A change of such a text is reviewed in a commit of its own. What differs from run to run and from machine to
machine is masked.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import gradsync as gs
from gradsync.cli import main

GOLDEN = Path(__file__).parent / "golden"
SOURCE = Path(gs.__file__).parent
DEEP = "GRADSYNC_TEST_DEEP"  # "1" runs also those that take long, or whose way other tests show

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory on Linux")


# -- Masks -----------------------------------------------------------------------------------------------------------

_FRAME = rf'(?:  File "{SOURCE}/[^\n]*|    {SOURCE}/\S+:\d+ in [^\n]*)\n'
_SECONDS = r"\b\d+(?:\.\d+)?(?:e-?\d+)? ?(?:us|ms|s)\b"
MASKS = [
    (r"(?m)^ +[~^]+\n", ""),  # where in the line: not with every Python
    (r"(?m)^gradsync: the gradient of .* is read-only until .*\n", ""),  # a note: not with Python 3.10
    (rf"{_FRAME}(?:(?:    |      )(?! *(?:File |/))[^\n]*\n)*", ""),  # how our own code came there
    (r"\bgradsync(?:\.[a-z_]+)+\.(?=[A-Z])", "gradsync."),  # of an error's class
    (re.escape(str(GOLDEN / "mistakes")), "DIR"),
    (r"\bpid \d+", "pid N"),
    (rf"\bon {re.escape(socket.gethostname())}\b", "on HOST"),
    (r"0x[0-9a-f]+", "0xN"),
    (
        r"rank (\d)(?:/\d \(pid N\) failed(?: while joining)?| aborted): ",
        r"rank \1 failed: ",
    ),  # who told it
    (r"gradsync: ranks? .* also failed: .*\n", ""),  # if it is in time to say so
    (r"gradsync: \d of \d ranks have joined; waiting for .*\n", ""),  # on a busy machine a rank may take 5 s to join
    # Whether the other ranks are in time to report the same error is chance.
    (r"\branks [\d, and]+ failed with the same error; this is the error of (.*):", r"\1 failed with exit code 1:"),
    (_SECONDS, "T"),
]


def masked(text: str) -> str:
    for pattern, mask in MASKS:
        text = re.sub(pattern, mask, text)
    return text


def by_rank(text: str) -> str:
    """Puts the lines of each rank together: which rank prints first is chance."""
    lines = text.splitlines(keepends=True)
    return "".join(sorted(lines, key=lambda line: (re.match(r"\[rank (\d+)\]", line) or ["", ""])[0]))


def without_numbers(text: str) -> str:
    """Leaves the words of a table of measurements, and how many columns it has."""
    exit_code, separator, text = text.partition("--- stdout\n")
    text = re.sub(r"(?m)^# this machine is busy.*\n|^this machine is busy.*\n", "", text)
    text = re.sub(r"\d[\d.,e-]*(?: ?(?:[KMG]?B/s|[KMG]?B|us|ms|s)\b)?", "N", text)
    return exit_code + separator + re.sub(r"\n\n\n+", "\n\n", re.sub(r"  +", "  ", text))


# -- Cases -----------------------------------------------------------------------------------------------------------


def run(command: str, *script: str) -> str:
    """Runs a command, with variables before it as in a shell; returns what it printed."""
    words = shlex.split(command)
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("GRADSYNC_", "PYTHON")) and k != "RANK"}
    environ |= {"PYTHONPATH": str(SOURCE.parent), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environ[name] = value
    words = [word.replace("{}", *script) if script else word for word in words]
    if words[0] == "gradsync":
        words[:1] = [sys.executable, "-m", "gradsync"]
    done = subprocess.run(
        words, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=100
    )
    parts = {"exit code": f"{done.returncode}\n", "stdout": by_rank(done.stdout), "stderr": by_rank(done.stderr)}
    return "".join(f"--- {name}\n{part}" for name, part in parts.items() if part)


def mistake(path: Path) -> str:
    command, notes = command_and_notes(path)
    text = masked(run(command, str(path)))
    if "either rank" in notes:  # the first that fails
        text = re.sub(r"(?m)\brank [01](?= \(pid|/2:|:?$)", "rank R", text)
    if "either line" in notes:
        text = re.sub(r'(?m)(  File "DIR/.*", line )\d+(.*\n).*\n', r"\1N\2", text)
    return text


def command_and_notes(path: Path) -> list[str]:
    """Splits the first line of a mistake: "# gradsync run -n 2 {}  # either rank"."""
    return [*path.read_text().partition("\n")[0].removeprefix("# ").split("  # "), ""][:2]


def help_of(words: str) -> str:
    return CliRunner(env={"COLUMNS": "100"}).invoke(main, [*words.split(), "--help"], prog_name="gradsync").output


def commands(command: click.Command = main, name: str = "") -> Iterator[str]:
    """Yields "", "bench", "bench collectives", ..."""
    yield name
    for each, below in getattr(command, "commands", {}).items():
        yield from commands(below, f"{name} {each}".strip())


def doctor() -> str:
    """Gives the rows that do not depend on the machine, and of the others which there are."""
    text = run("RANK=1 WORLD_SIZE=4 GRADSYNC_BACKND=shm gradsync doctor --backend local --timeout 60")
    rows = re.split(r"\n(?! )", text)
    of_machine = ("MPI", "driver", "GPU", "CuPy", "NCCL", "container", "network", "/dev/shm", "cores", "limits")
    kept = []
    for row in rows:
        what = re.split(r"  +", row)
        if not (len(what) > 1 and what[1].startswith(of_machine)):
            kept.append(row)
    return re.sub(r"\d+ more lines are", "N more lines are", masked("\n".join(kept)))


def bench_thresholds() -> str:
    text = run(
        "gradsync bench thresholds --model {} -n 2 --backend shm --steps 1 --thresholds 0.0005,1",
        str(GOLDEN / "shapes.json"),
    )
    shown = "\n\n".join(text.split("\n\n")[:2])  # the rest depends on what was measured
    return without_numbers(shown.replace("  <- fastest", ""))


def bench_collectives() -> str:
    return without_numbers(
        run("gradsync bench collectives -c all_reduce,gather,exchange -b 1K -e 1K -n 2 --iters 1 --backend shm")
    )


def cases() -> dict[Path, Callable[[], str]]:
    """Returns what makes the text of each file."""
    found: dict[Path, Callable[[], str]] = {}
    for words in commands():
        found[GOLDEN / "help" / f"{words.replace(' ', '_') or 'gradsync'}.txt"] = lambda words=words: help_of(words)
    for path in (GOLDEN / "mistakes").glob("*.py"):
        found[path.with_suffix(".txt")] = lambda path=path: mistake(path)
    for function in (doctor, bench_thresholds, bench_collectives):
        found[GOLDEN / f"{function.__name__}.txt"] = function
    return found


CASES = cases()


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_output_is_as_approved(path: Path) -> None:
    script = path.with_suffix(".py")
    if script.exists() and "deep" in command_and_notes(script)[1] and os.environ.get(DEEP) != "1":
        pytest.skip(f"runs with {DEEP}=1")
    made = CASES[path]().splitlines()
    approved = path.read_text().splitlines() if path.exists() else []
    if any("did not answer" in line for line in made):
        made = CASES[path]().splitlines()  # on a busy machine a rank may take 0.4 s to say where it is
    assert made == approved, f"if it shall be so: python tests/test_golden.py {path.stem}, in a commit of its own"


def test_no_output_is_left_over() -> None:
    assert set(GOLDEN.rglob("*.txt")) == CASES.keys()


def write(names: list[str]) -> None:
    for path, make in CASES.items():
        if not names or path.stem in names:
            path.parent.mkdir(exist_ok=True)
            path.write_text(make())
            print(path)


if __name__ == "__main__":
    write(sys.argv[1:])
