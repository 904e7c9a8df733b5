"""What a person reads after a mistake, as it was approved: tests/cli/mistakes/NAME.py is one, NAME.txt what it prints.

The first line of a mistake is the command that runs it. `pytest tests/cli/test_texts.py --force-regen` writes the texts
anew; a change of one is reviewed in a commit of its own. What differs from run to run and from machine to machine is
masked.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
from pathlib import Path

import pytest

import gradsync as gs

MISTAKES = Path(__file__).parent / "mistakes"
SOURCE = Path(gs.__file__).parent

_FRAME = rf'(?:  File "{SOURCE}/[^\n]*|    {SOURCE}/\S+:\d+ in [^\n]*)\n'
MASKS = [
    (r"(?m)^ +[~^]+\n", ""),  # where in the line: not with every Python
    (rf"{_FRAME}(?:(?:    |      )(?! *(?:File |/))[^\n]*\n)*", ""),  # how our own code came there
    (r"\bgradsync(?:\.[a-z_]+)+\.(?=[A-Z])", "gradsync."),  # of an error's class
    (re.escape(str(MISTAKES)), "DIR"),
    (r"\bpid \d+", "pid N"),
    (rf"\bon {re.escape(socket.gethostname())}\b", "on HOST"),
    (r"0x[0-9a-f]+", "0xN"),
    (r"rank (\d)(?:/\d \(pid N\) failed(?: while joining)?| aborted): ", r"rank \1 failed: "),  # who said it
    (r"gradsync: ranks? .* also failed: .*\n", ""),  # if it is in time to say so
    (r"gradsync: \d of \d ranks have joined; waiting for .*\n", ""),  # on a busy machine
    # Whether the other ranks are in time to report the same error is chance.
    (r"\branks [\d, and]+ failed with the same error; this is the error of (.*):", r"\1 failed with exit code 1:"),
    (r"\b\d+(?:\.\d+)?(?:e-?\d+)? ?(?:us|ms|s)\b", "T"),
]


def masked(text: str) -> str:
    for pattern, mask in MASKS:
        text = re.sub(pattern, mask, text)
    return text


def by_rank(text: str) -> str:
    """Puts the lines of each rank together: which rank prints first is chance."""
    lines = text.splitlines(keepends=True)
    return "".join(sorted(lines, key=lambda line: (re.match(r"\[rank (\d+)\]", line) or ["", ""])[0]))


@pytest.mark.parametrize("path", sorted(MISTAKES.glob("*.py")), ids=lambda path: path.stem)
def test_a_mistake_prints_what_was_approved(path, cli, file_regression):
    command, *notes = path.read_text().partition("\n")[0].removeprefix("# ").split("  # ")
    words = shlex.split(command)
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}  # `python` is this one
    while "=" in words[0]:
        name, _, environment[name] = words.pop(0).partition("=")
    if words[0] == "gradsync":
        words[:1] = ["python", "-m", "gradsync"]
    done = cli.program(*[word.replace("{}", str(path)) for word in words], typed="", environment=environment)
    parts = {"exit code": f"{done.code}\n", "stdout": by_rank(done.out), "stderr": by_rank(done.err)}
    text = masked("".join(f"--- {name}\n{part}" for name, part in parts.items() if part))
    if "either rank" in " ".join(notes):  # the first that fails
        text = re.sub(r"(?m)\brank [01](?= \(pid|/2:|:?$)", "rank R", text)
    if "either line" in " ".join(notes):
        text = re.sub(r'(?m)(  File "DIR/.*", line )\d+(.*\n).*\n', r"\1N\2", text)
    file_regression.check(text, fullpath=path.with_suffix(".txt"))
