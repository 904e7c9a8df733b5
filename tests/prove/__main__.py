"""Everything deep, in parts: `make prove`, or `make prove PART="fault_matrix kills"`.

    python tests/prove                        # every part, one after the other (hours)
    python tests/prove fault_matrix kills          # these
    python tests/prove --quick                # each much shortened
    python tests/prove --seeds 1000 partitions
    python tests/prove --list

A part is a folder beside this file: its tests run under pytest, then its scripts, named in SCRIPTS, in full. Each says
what it did and how long it took; it fails when one of them does, and then so does this.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# See tests/places.py.
EVERYWHERE = {"GRADSYNC_TEST_PLACES": "all", "GRADSYNC_TEST_DEEP": "1"}
_SHOWN_LINES = 30  # of the output of what fails


class Script(NamedTuple):
    """A script of a part: its options in full, and with --quick."""

    path: str
    full: tuple[str, ...]
    quick: tuple[str, ...]


_PYTEST = ("pytest", "-q", "--timeout", "900", "--import-mode=prepend", "-m", "")
SCRIPTS = {
    "random_training": [Script("tests/random_training.py", ("--programs", "2000"), ("--programs", "40"))],
    "fault_matrix": [Script("benchmarks/fault_matrix.py", (), ("--quick",))],
    "partitions": [Script("tests/prove/partitions/chaos_runs.py", ("--seeds", "200"), ("--seeds", "5"))],
    "kills": [
        Script("tests/prove/kills/chaos.py", ("--rounds", "1000", "--at-a-time", "2"), ("--rounds", "8")),
        Script("tests/prove/kills/restart_soak.py", ("--kills", "300"), ("--kills", "6")),
    ],
    "soak": [
        Script("tests/prove/soak/soak.py", (), ("--calls", "300")),
        Script("tests/prove/soak/leaks.py", (), ("--cycles", "20")),
    ],
}


def commands(part: str, options: argparse.Namespace) -> list[list[str]]:
    """Returns what to run: the part's tests, then its scripts."""
    found = []
    if any((HERE / part).rglob("test_*.py")):
        found.append([sys.executable, "-m", *_PYTEST, str(HERE / part), *options.pytest])
    for script in SCRIPTS.get(part, []):
        words = list(script.quick if options.quick else script.full)
        if options.seeds and "--seeds" in words:
            words[words.index("--seeds") + 1] = str(options.seeds)
        found.append([sys.executable, script.path, *words])
    return found


def parts() -> list[str]:
    folders = {path.name for path in HERE.iterdir() if path.is_dir() and path.name not in ("tools", "__pycache__")}
    return sorted(folders | SCRIPTS.keys())


def run(part: str, options: argparse.Namespace) -> tuple[bool, float, str]:
    """Runs a part to its end; shows the end of the output of what fails, and what was skipped."""
    holds, began, last = True, time.monotonic(), []
    for command in commands(part, options):
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | EVERYWHERE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        lines = done.stdout.splitlines() or [""]
        if done.returncode:
            holds = False
            print("\n".join(lines[-_SHOWN_LINES:]))
        else:
            print("".join(f"{line}\n" for line in lines if line.startswith("SKIPPED")), end="")
        last.append(lines[-1].strip("= "))
    return holds, time.monotonic() - began, "; ".join(last)


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the parts of `make prove`.")
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--quick", action="store_true", help="each script much shortened")
    parser.add_argument("--seeds", type=int, help="of the proxy")
    parser.add_argument("--pytest", nargs="...", default=[], metavar="WORD", help="the rest is for pytest, as -n 2")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    there = parts()
    if unknown := sorted(set(options.parts) - set(there)):
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(there)}")
    if options.list:
        print("\n".join(there))
        return 0
    failed = []
    for part in options.parts or there:
        print(f"{part} ...", flush=True)
        holds, seconds, what = run(part, options)
        print(f"{part}: {'holds' if holds else 'FAILS'} after {seconds:.0f} s: {what}", flush=True)
        failed += [] if holds else [part]
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
