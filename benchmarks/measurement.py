"""What a benchmark's result consists of: samples summed up, and the machine and versions they come from."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from gradsync.bench import report
from gradsync.bench.report import Seconds

__all__ = ["Seconds", "provenance", "slowest_rank"]


def slowest_rank(samples_by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Returns, of each round, the time of the rank that took longest."""
    return [max(round_) for round_ in zip(*samples_by_rank, strict=True)]


def provenance(script: str) -> dict[str, Any]:
    """Returns where and how a result was made.

    Args:
        script: the script's path in the repository.
    """
    return report.provenance(["python", script, *sys.argv[1:]])
