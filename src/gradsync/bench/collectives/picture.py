"""The collectives as a picture: of each the time and the bus bandwidth over the size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradsync.bench.collectives.rows import Row
from gradsync.bench.measurement import Seconds
from gradsync.bench.picture import draw_times, picture, tick_times

_WIDTH, _ROW_HEIGHT = 9.0, 2.9


def plot(rows: Sequence[Row], title: str, path: str | Path) -> None:
    """Writes a PNG: a line of two panels for each collective; bars are quartiles over the blocks.

    Raises:
        OSError: the file cannot be written.
    """
    collectives = list(dict.fromkeys(row.case.collective for row in rows))
    with picture(path, _WIDTH, 0.6 + _ROW_HEIGHT * len(collectives), 150) as figure:
        panels = figure.subplots(len(collectives), 2, squeeze=False)
        for collective, (of_time, of_bandwidth) in zip(collectives, panels, strict=True):
            _draw(of_time, of_bandwidth, [row for row in rows if row.case.collective == collective])
            _label(of_time, collective, "time (µs)")
            _label(of_bandwidth, collective, "bus bandwidth (GB/s)")
            of_time.set_yscale("log")
            tick_times(of_time)
            of_bandwidth.set_ylim(bottom=0)
        for axes in panels[-1]:
            axes.set_xlabel("size (bytes)")
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", frameon=False)
        figure.align_ylabels()
        figure.suptitle(title, fontsize="medium")


def _draw(of_time: Any, of_bandwidth: Any, rows: Sequence[Row]) -> None:
    timed = [(row, seconds) for row in rows if (seconds := _fastest(row)) is not None]
    if not timed:
        return
    sizes = [row.size_bytes for row, _ in timed]
    common: dict[str, Any] = {"marker": "o", "markersize": 4, "linewidth": 1.3, "label": rows[0].contender}
    draw_times(of_time, sizes, [seconds for _, seconds in timed], 1e-6, capsize=2, elinewidth=0.8, **common)
    buses = [(row.best_bus_bytes_per_second() or 0.0) / 1e9 for row, _ in timed]
    of_bandwidth.plot(sizes, buses, **common)


def _fastest(row: Row) -> Seconds | None:
    found = [form.seconds for form in row.forms.values() if form.seconds is not None]
    return min(found, key=lambda seconds: seconds.median, default=None)


def _label(axes: Any, collective: str, quantity: str) -> None:
    axes.set_xscale("log", base=4)
    axes.xaxis.minorticks_off()
    axes.xaxis.set_major_formatter(lambda value, _position: _size_label(value))
    axes.set_title(collective, fontsize="small", loc="left")
    axes.set_ylabel(quantity)
    axes.grid(alpha=0.3, which="major")


def _size_label(size_bytes: float) -> str:
    """Returns a size as short as an axis needs it: 64, 4K, 16M."""
    for unit, factor in (("G", 1024**3), ("M", 1024**2), ("K", 1024)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:g}{unit}"
    return f"{size_bytes:g}"
