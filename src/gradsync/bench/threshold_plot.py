"""A sweep over thresholds as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradsync.bench.picture import draw_times, picture
from gradsync.bench.text import MEGABYTE, megabytes
from gradsync.bench.thresholds import Row, recommend


def plot(rows: Sequence[Row], title: str, path: str | Path) -> None:
    """Writes a PNG: the time of a step and of packing alone over the threshold, quartiles as bars.

    Raises:
        OSError: the file cannot be written.
    """
    with picture(path, 8, 5) as figure:
        _draw(figure.add_subplot(), rows, title)


def _draw(axes: Any, rows: Sequence[Row], title: str) -> None:
    thresholds = [row.contender.threshold_bytes / MEGABYTE for row in rows]
    label = "step (median, quartiles)"
    draw_times(axes, thresholds, [row.seconds for row in rows], 1e-3, marker="o", capsize=3, label=label)
    packs = [1e3 * row.pack_seconds.median for row in rows if row.pack_seconds]
    if packs:
        axes.plot(thresholds, packs, marker=".", linestyle="--", label="packing and splitting alone")
    chosen = recommend(rows).contender.threshold_bytes
    axes.axvline(chosen / MEGABYTE, color="tab:green", linestyle=":", label=f"recommended: {megabytes(chosen)}")
    axes.set_xscale("log")
    axes.set_xticks(thresholds, [f"{threshold:.3g}" for threshold in thresholds], minor=False)
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("threshold of a bucket (MB of 1024² bytes)")
    axes.set_ylabel("time per step (ms)")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
