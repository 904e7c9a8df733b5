"""Shared by the benchmarks: statistics of samples, the machine and versions of a result, ranks, and the JSON file."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import gradsync
from gradsync.machine import usable_cores
from page_tables import LAYOUTS

RESULTS = Path(__file__).parent / "results"
_QUIET_LOAD = 0.5  # the load per core above which the machine counts as busy


def slowest_rank(samples_by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Returns the slowest rank's time of each round."""
    return [max(round_) for round_ in zip(*samples_by_rank, strict=True)]


def busy_machine() -> str:
    """Returns a warning if the load average is above half of the usable cores; else ""."""
    load = os.getloadavg()[0]
    if load <= _QUIET_LOAD * usable_cores():
        return ""
    return f"this machine is busy (load average {load:.1f}), so the measured times are longer than usual"


@dataclass(frozen=True)
class Seconds:
    """The median and the quartiles of repeated timings, in seconds."""

    median: float
    lower_quartile: float
    upper_quartile: float
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Seconds:
        """Returns the median and the quartiles of one or more timings in seconds."""
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0], 1)
        lower, median, upper = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, lower, upper, len(samples))

    @property
    def spread(self) -> float:
        """The distance between the quartiles divided by the median."""
        return (self.upper_quartile - self.lower_quartile) / self.median if self.median else 0.0

    def __str__(self) -> str:
        return milliseconds(self.median)


def provenance(script: str) -> dict[str, Any]:
    """Returns a description of how a result was measured: command, date, machine and versions.

    Args:
        script: the script's path in the repository.
    """
    return {
        "command": shlex.join(["python", script, *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": _field("/proc/cpuinfo", "model name"),
            "usable_cores": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "kernel": platform.release(),
            "load_average_before": os.getloadavg()[0],
        },
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "gradsync": gradsync.__version__,
        },
    }


def _field(path: str, name: str) -> str:
    """Returns the first value of `name` in a file with lines `name : value`; "unknown" if there is none."""
    with contextlib.suppress(OSError):
        for line in Path(path).read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return "unknown"


def milliseconds(seconds: float) -> str:
    """Returns a time in milliseconds as text, such as "1.23 ms" or "1,234 ms"."""
    value = 1e3 * seconds
    return f"{value:,.0f} ms" if value >= 999.5 else f"{value:.3g} ms"


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
