"""What a measurement's result consists of: samples summed up, and the machine and versions they come from."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import gradsync
from gradsync.machine import usable_cores

_QUIET_LOAD = 0.5  # per core, from what others do


def busy_machine() -> str:
    """Returns what to say before a measurement where something else runs on this machine; "" where it does not."""
    load = os.getloadavg()[0]
    if load <= _QUIET_LOAD * usable_cores():
        return ""
    return f"this machine is busy (load average {load:.1f}): the timings tell of that too"


@dataclass(frozen=True)
class Seconds:
    """The distribution of repeated timings."""

    median: float
    lower_quartile: float
    upper_quartile: float
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Seconds:
        """Sums up timings in seconds, at least one."""
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0], 1)
        lower, median, upper = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, lower, upper, len(samples))

    @property
    def spread(self) -> float:
        """Distance between the quartiles, as a part of the median."""
        return (self.upper_quartile - self.lower_quartile) / self.median if self.median else 0.0

    def __str__(self) -> str:
        return f"{1e3 * self.median:.3g} ms"


def provenance(command: Sequence[str]) -> dict[str, Any]:
    """Returns where, when and how a result was made.

    Args:
        command: that makes it, word by word.
    """
    return {
        "command": shlex.join(command),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
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
    """Returns the first value of that name in a file of `name : value` lines."""
    with contextlib.suppress(OSError):
        for line in Path(path).read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return "unknown"
