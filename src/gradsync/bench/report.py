"""Helpers for all measurements: statistics, units, a description of the machine, and files of results."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

import gradsync
from gradsync.errors import GradsyncError, InvalidArgument
from gradsync.machine import usable_cores

_LOG_WIDTH = 120  # the width of a table if standard output is not a terminal
_QUIET_LOAD = 0.5  # the load per core above which the machine counts as busy


def busy_machine() -> str:
    """Returns a warning if other programs keep this machine busy; else ""."""
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
        return f"{1e3 * self.median:.3g} ms"


def provenance(command: Sequence[str]) -> dict[str, Any]:
    """Returns a description of how a result was measured: command, date, machine and versions.

    Args:
        command: the command line, as a list of words.
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
    """Returns the first value of `name` in a file with lines `name : value`; "unknown" if there is none."""
    with contextlib.suppress(OSError):
        for line in Path(path).read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return "unknown"


def milliseconds(seconds: float) -> str:
    """Returns a time in milliseconds as text such as "1.23 ms", with three significant digits."""
    value = 1e3 * seconds
    return f"{value:,.0f} ms" if value >= 1000 else f"{value:.3g} ms"


def print_table(table: Table, console: Console | None = None) -> None:
    """Prints a table without spaces at the ends of lines.

    Args:
        table: the table.
        console: the rich console that prints the table; the default prints to standard output.
    """
    console = console or Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = _LOG_WIDTH
    for line in console.render_lines(table, pad=False):
        text = Text.assemble(*((segment.text, segment.style or "") for segment in line))
        text.rstrip()
        console.print(text, soft_wrap=True)


# Files.


def check_output(path: str | None) -> None:
    """Checks that a file can be written; a command calls this function before it measures.

    Raises:
        InvalidArgument: the file cannot be written.
    """
    if path is None:
        return
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise InvalidArgument(f"{path!r} cannot be written: there is no folder {folder!r}")
    if os.path.isdir(path) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise InvalidArgument(f"{path!r} cannot be written")


def write_json(path: str | None, made: dict[str, Any], result: dict[str, Any]) -> None:
    """Writes a result and its provenance to a JSON file, and prints the name of the file.

    Args:
        path: the path of the file; if None, the function writes nothing.
        made: the value that provenance() returned before the measurement.
        result: the measured values.
    """
    if path is None:
        return
    made["machine"]["load_average_after"] = os.getloadavg()[0]
    try:
        Path(path).write_text(json.dumps({**made, **result}, indent=2) + "\n")
    except OSError as error:
        raise GradsyncError(f"{path!r} cannot be written: {error.strerror}") from None
    print(f"written to {path}")
