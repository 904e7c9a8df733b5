"""Writes the generated parts of the pages: example files, the output of commands, and tables of figures.

    python benchmarks/readme.py  # rewrites README.md and the pages under docs

Output is captured from real runs. SAME_EVERYWHERE replaces parts that differ between runs and machines (process ids,
times, paths).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from page_tables import fill_tables
from source_tables import SOURCES

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
#: Files that a command of a page leaves for the next command of the page.
LEFT_BEHIND = ("dumps", "traced", "trace.json")

#: Patterns, and their replacements in the pages.
SAME_EVERYWHERE = [
    (re.escape(f"{ROOT}/"), ""),
    (r"[^\s\"]*/site-packages/gradsync/", "src/gradsync/"),  # installed, and not run from the sources
    (r"[^\s\"]*/lib/python3[^/\s]*/(?=\w+\.py)", "/usr/lib/python3/"),
    (r"((?:/usr/lib/python3|src/gradsync)/\S+\.py):\d+", r"\1:123"),  # not the user's lines
    (r"(?m)^ +[~^]+\n", ""),  # Python 3.10 does not point at the part of a line that failed
    # How such a rank learns of the failure first, and so its words, is chance.
    (r"(?m)^gradsync: ranks? .* also failed: .*\n", ""),
    (r"\branks [\d, and]+ failed with the same error; this is the error of (.*):", r"\1 failed with exit code 1:"),
    (r"\b(rank (\d+)(?:/\d+)? \(pid )\d+( on [^)\s]+)?", lambda m: m[1] + f"424{m[2]}" + (" on node1" if m[3] else "")),
    (r"\bprocess \d+ \(python[\d.]*\)", "process 4200 (python)"),
    (r"\b(done in|failed after) [\d.]+ \w+", r"\1 0.1 ms"),
    (r"(?<=, )[\d.]+ m?s ago", "6.0 s ago"),
    (r"(?<=, )[\d.]+ [mu]?s before the dump", "6.0 s before the dump"),
    (r"\brunning for [\d.]+ m?s", "running for 6.0 s"),
    (r"\bhas waited [\d.]+ s\b", "has waited 5 s"),
    (r"(?<!has )\bwaited [\d.]+ s\b", "waited 6 s"),
]


def render(text: str) -> str:
    """Returns a page with new content between its markers."""
    commands = re.findall(r"(?m)^\$ (.*)$", text)
    left = [name for name in LEFT_BEHIND if any(name in command for command in commands)]  # not those of other pages
    _clean_up(left)
    try:
        return _made_anew(text)
    finally:
        _clean_up(left)


def _clean_up(names: list[str]) -> None:
    for name in names:
        if (ROOT / name).is_dir():
            shutil.rmtree(ROOT / name)
        else:
            (ROOT / name).unlink(missing_ok=True)


def _made_anew(text: str) -> str:
    text = re.sub(
        r"(<!-- file: (\S+) -->\n```python\n).*?(```\n)",
        lambda m: m[1] + (ROOT / m[2]).read_text() + m[3],
        text,
        flags=re.DOTALL,
    )
    text = re.sub(
        r"(<!-- exit code (\d+) -->\n```console\n\$ ([^\n]+)\n).*?(```\n)",
        lambda m: m[1] + play(m[3], int(m[2])) + m[4],
        text,
        flags=re.DOTALL,
    )
    text = re.sub(
        r"(<!-- from the source: (\S+) -->\n).*?(<!-- end -->\n)",
        lambda m: m[1] + "\n" + "\n".join(SOURCES[m[2]]()) + "\n" + m[3],
        text,
        flags=re.DOTALL,
    )
    return fill_tables(text)


def play(command: str, exit_code: int) -> str:
    """Runs a command of a page, and returns its output in the form of SAME_EVERYWHERE.

    Raises:
        RuntimeError: the command ended with another exit code than the page says.
    """
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            cwd=ROOT,
            env=os.environ | {"PATH": f"{programs(Path(folder))}:{os.environ['PATH']}", "NO_COLOR": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
    if done.returncode != exit_code:
        raise RuntimeError(f"{command} ended with {done.returncode} in place of {exit_code}:\n{done.stdout}")
    output = done.stdout
    for pattern, replacement in SAME_EVERYWHERE:
        output = re.sub(pattern, replacement, output)
    return output


def programs(folder: Path) -> Path:
    """Fills a folder with the programs that the pages call, as this interpreter has them."""
    interpreter = shlex.quote(sys.executable)
    commands = {
        "python": interpreter,
        "gradsync": f"{interpreter} -m gradsync",
        "mpiexec": shlex.quote(str(Path(sysconfig.get_path("scripts")) / "mpiexec")),
    }
    for name, command in commands.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


if __name__ == "__main__":
    for page, text in [(page, render(page.read_text())) for page in PAGES]:
        page.write_text(text)
