"""Shared by the benchmarks: statistics of samples, the machine and versions of a result, ranks, and the JSON file."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradsync.bench import report
from gradsync.bench.report import Seconds
from page_tables import LAYOUTS

__all__ = [
    "RESULTS",
    "Seconds",
    "add_output",
    "output_of",
    "provenance",
    "slowest_rank",
    "write_result",
]

RESULTS = Path(__file__).parent / "results"


def slowest_rank(samples_by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Returns the slowest rank's time of each round."""
    return [max(round_) for round_ in zip(*samples_by_rank, strict=True)]


def provenance(script: str) -> dict[str, Any]:
    """Returns the command, the date, the machine and the versions of a result.

    Args:
        script: the script's path in the repository.
    """
    return report.provenance(["python", script, *sys.argv[1:]])


def output_of(command: Sequence[str], variables: Mapping[str, str], timeout_seconds: float) -> dict[str, Any]:
    """Runs a command of ranks; returns the JSON that rank 0 printed as the last line.

    Args:
        command: the program and its arguments.
        variables: added to those of this process.
        timeout_seconds: after which the command is killed.

    Raises:
        RuntimeError: a rank failed; with its standard error.
        subprocess.TimeoutExpired: the command took longer.
    """
    done = subprocess.run(
        command,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the ranks ended with {done.returncode}:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def add_output(parser: argparse.ArgumentParser, name: str) -> None:
    """Adds the option --output; `name` is that of the results."""
    parser.add_argument("--output", type=Path, help=f"where the JSON goes [benchmarks/results/{name}.json]")


def write_result(name: str, output: Path | None, result: dict[str, Any], *, is_whole: bool = True) -> None:
    """Prints a result in the tables of the pages, and writes it as JSON.

    Args:
        name: the name of the results.
        output: the option --output; None is benchmarks/results/NAME.json, and only for a whole measurement.
        result: the result, with its provenance.
        is_whole: whether everything was measured, with all rounds.
    """
    result["machine"]["load_average_after"] = os.getloadavg()[0]
    for table, layout in LAYOUTS.items():
        if table.partition(".")[0] == name:
            print("", *layout(result), "", sep="\n")
    path = output or (RESULTS / f"{name}.json" if is_whole else None)
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {os.path.relpath(path)}")
