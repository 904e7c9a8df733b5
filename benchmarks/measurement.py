"""Shared by the benchmarks: statistics of samples, and the machine and versions of a result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from gradsync.bench import report
from gradsync.bench.report import Seconds

__all__ = ["Seconds", "output_of", "provenance", "slowest_rank"]


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
