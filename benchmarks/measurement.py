"""Shared by the benchmarks: statistics of samples, and the machine and versions of a result."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from gradsync.bench import report
from gradsync.bench.report import Seconds

__all__ = ["Seconds", "provenance", "slowest_rank"]


def slowest_rank(samples_by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Returns the slowest rank's time of each round."""
    return [max(round_) for round_ in zip(*samples_by_rank, strict=True)]


def provenance(script: str) -> dict[str, Any]:
    """Returns the command, the date, the machine and the versions of a result.

    Args:
        script: the script's path in the repository.
    """
    return report.provenance(["python", script, *sys.argv[1:]])
