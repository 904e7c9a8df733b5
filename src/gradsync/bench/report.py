"""Helpers for all measurements: statistics, units, a description of the machine, and files of results.

The extra `plot` installs matplotlib. Only the functions that draw plots import matplotlib.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import json
import math
import os
import platform
import shlex
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

import gradsync
from gradsync.errors import BackendUnavailable, GradsyncError, InvalidArgument, size_text
from gradsync.machine import usable_cores

_LOG_WIDTH = 120  # the width of a table if standard output is not a terminal
_QUIET_LOAD = 0.5  # the load per core above which the machine counts as busy
_PANEL_WIDTH, _PANEL_HEIGHT, _MOST_TICKS = 4.5, 2.9, 9
_FEW_DECADES = 1e4  # if the limits of an axis have a smaller ratio, the axis has room for three ticks per decade


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


def provenance(command: Sequence[str]) -> dict[str, Any]:
    """Returns a description of how a result was measured: command, date, machine and versions.

    Args:
        command: the command line, as a list of words.
    """
    return {
        "command": shlex.join(command),
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


def check_outputs(json_path: str | None, plot_path: str | None) -> None:
    """Checks that the output files can be written; a command calls this function before it measures.

    Raises:
        InvalidArgument: a file cannot be written.
        BackendUnavailable: the command should draw a plot, and matplotlib is missing.
    """
    for path in filter(None, (json_path, plot_path)):
        folder = os.path.dirname(path) or "."
        if not os.path.isdir(folder):
            raise InvalidArgument(f"{path!r} cannot be written: there is no folder {folder!r}")
        if os.path.isdir(path) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
            raise InvalidArgument(f"{path!r} cannot be written")
    if plot_path is not None and importlib.util.find_spec("matplotlib") is None:
        raise BackendUnavailable("--plot needs matplotlib: pip install matplotlib")


def write_json(path: str | None, made: dict[str, Any], result: dict[str, Any]) -> None:
    """Writes a result and its provenance to a JSON file, and prints the name of the file.

    Args:
        path: the path of the file; if None, the function writes nothing.
        made: the value that provenance() returned before the measurement.
        result: the measured values.

    Raises:
        GradsyncError: the file cannot be written.
    """
    if path is None:
        return
    made["machine"]["load_average_after"] = os.getloadavg()[0]
    try:
        Path(path).write_text(json.dumps({**made, **result}, indent=2) + "\n")
    except OSError as error:
        raise GradsyncError(f"{path!r} cannot be written: {error.strerror}") from None
    print(f"written to {path}")


@contextlib.contextmanager
def picture(path: str | Path, width: float, height: float, dots_per_inch: int = 120) -> Iterator[Any]:
    """Yields a matplotlib figure, and writes it to a PNG file when the `with` block ends.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # needs no display, and keeps matplotlib's settings
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    yield figure
    figure.savefig(path, format="png", dpi=dots_per_inch)


class Panel(NamedTuple):
    """One panel of a plot: a line that shows times over sizes.

    Attributes:
        title: the text above the panel.
        sizes: the sizes in bytes, ascending.
        times: one time per size, drawn as its median with a bar between its quartiles.
        is_logarithmic: whether the vertical axis is logarithmic; if False, the axis is linear and begins at 0.
        chosen: the size at which the panel draws a vertical line, as the recommended size; None for no line.
    """

    title: str
    sizes: Sequence[float]
    times: Sequence[Seconds]
    is_logarithmic: bool = False
    chosen: float | None = None


def plot(panels: Sequence[Panel], title: str, x_label: str, path: str) -> None:
    """Writes a PNG file with panels, one above the other.

    Args:
        panels: the panels.
        title: the title above the panels.
        x_label: the label of the horizontal axes.
        path: the path of the PNG file.

    Raises:
        OSError: the file cannot be written.
    """
    with picture(path, 2 * _PANEL_WIDTH, 0.6 + _PANEL_HEIGHT * len(panels), 150) as figure:
        all_axes = figure.subplots(len(panels), squeeze=False)[:, 0]
        for axes, panel in zip(all_axes, panels, strict=True):
            _draw(axes, panel)
        all_axes[-1].set_xlabel(x_label)
        figure.align_ylabels()
        figure.suptitle(title, fontsize="medium")


def _draw(axes: Any, panel: Panel) -> None:
    medians = [1e3 * each.median for each in panel.times]
    below = [1e3 * (each.median - each.lower_quartile) for each in panel.times]
    above = [1e3 * (each.upper_quartile - each.median) for each in panel.times]
    style: dict[str, Any] = {"marker": "o", "markersize": 4, "linewidth": 1.3}
    axes.errorbar(panel.sizes, medians, yerr=[below, above], capsize=2, elinewidth=0.8, **style)
    if panel.chosen is not None:
        axes.axvline(panel.chosen, color="tab:green", linestyle=":", label=f"recommended: {size_text(panel.chosen)}")
        axes.legend()
    axes.set_xscale("log")
    shown = panel.sizes[:: math.ceil(len(panel.sizes) / _MOST_TICKS) or 1]
    axes.set_xticks(shown, [size_text(size) for size in shown], fontsize="x-small")
    axes.minorticks_off()
    if panel.is_logarithmic:
        axes.set_yscale("log")
        _tick(axes)
    else:
        axes.set_ylim(bottom=0)
    axes.set_title(panel.title, fontsize="small", loc="left")
    axes.set_ylabel("time (ms)")
    axes.grid(alpha=0.3, which="major")


def _tick(axes: Any) -> None:
    """Puts the ticks of a logarithmic axis at 1, 10, 100 and so on; on a short axis also at 2, 5, 20, 50 and so on."""
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < _FEW_DECADES * low else (1.0,)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
