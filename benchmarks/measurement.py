"""What a benchmark's result consists of: samples summed up, and the machine and versions they come from."""

from __future__ import annotations

import sys
from typing import Any

from gradsync.bench import measurement
from gradsync.bench.measurement import Seconds, slowest_rank

__all__ = ["Seconds", "provenance", "slowest_rank"]


def provenance(script: str) -> dict[str, Any]:
    """Returns where and how a result was made.

    Args:
        script: the script's path in the repository.
    """
    return measurement.provenance(["python", script, *sys.argv[1:]])
