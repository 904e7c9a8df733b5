"""Pictures of measurements. Only what draws imports matplotlib, which the extra `plot` brings."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradsync.bench.measurement import Seconds
from gradsync.errors import BackendUnavailable

_FEW_DECADES = 1e4  # between which three ticks each have room


def check_plotting() -> None:
    """Makes sure that pictures can be made, before anything is measured for one.

    Raises:
        BackendUnavailable: matplotlib is missing; the text says how to install it.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise BackendUnavailable("--plot needs matplotlib: pip install 'gradsync[plot]'")


def tick_times(axes: Any) -> None:
    """Puts ticks on the logarithmic time axis of a drawn panel: 1, 2 and 5 where decades alone would be too few."""
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < _FEW_DECADES * low else (1.0,)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")


@contextmanager
def picture(path: str | Path, width: float, height: float, dots_per_inch: int = 120) -> Iterator[Any]:
    """Gives a figure to draw in, and writes it as PNG.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # needs no display, and sets nothing for the process
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    yield figure
    figure.savefig(path, format="png", dpi=dots_per_inch)


def draw_times(axes: Any, at: Sequence[float], times: Sequence[Seconds], unit_seconds: float, **style: Any) -> None:
    """Draws a line of medians, with bars from quartile to quartile.

    Args:
        axes: to draw on.
        at: where each time stands.
        times: as many.
        unit_seconds: of the axis: 1e-3 draws milliseconds.
        style: of the line, for matplotlib.
    """
    medians = [each.median / unit_seconds for each in times]
    below = [(each.median - each.lower_quartile) / unit_seconds for each in times]
    above = [(each.upper_quartile - each.median) / unit_seconds for each in times]
    axes.errorbar(at, medians, yerr=[below, above], **style)
