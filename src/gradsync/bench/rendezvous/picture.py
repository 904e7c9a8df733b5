"""The rendezvous as a picture: how long each step takes over the number of ranks, contenders side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradsync.bench.picture import STYLES, picture, tick_times
from gradsync.bench.rendezvous.rows import STEPS, Row


def plot(rows: Sequence[Row], title: str, path: str | Path) -> None:
    """Writes a PNG: a panel for each step; bars are quartiles.

    Raises:
        OSError: the file cannot be written.
    """
    contenders = list(dict.fromkeys(row.contender for row in rows))
    with picture(path, 10, 3.9, 150) as figure:
        panels = figure.subplots(1, len(STEPS), sharey=True)
        for step, axes in zip(STEPS, panels, strict=True):
            for contender, style in zip(contenders, STYLES, strict=False):
                _draw(axes, [row for row in rows if row.contender == contender], step, style)
            axes.set_title(step, fontsize="small", loc="left")
            axes.set_xlabel("ranks")
        tick_times(panels[0])  # which all share
        panels[0].set_ylabel("time of all ranks together (ms)")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        figure.suptitle(title, fontsize="medium")


def _draw(axes: Any, rows: Sequence[Row], step: str, style: dict[str, str]) -> None:
    ranks = [row.ranks for row in rows]
    times = [row.steps[step] for row in rows]
    medians = [1e3 * seconds.median for seconds in times]
    below = [1e3 * (seconds.median - seconds.lower_quartile) for seconds in times]
    above = [1e3 * (seconds.upper_quartile - seconds.median) for seconds in times]
    common: dict[str, Any] = {**style, "markersize": 4, "linewidth": 1.3, "label": rows[0].contender}
    axes.errorbar(ranks, medians, yerr=[below, above], capsize=2, elinewidth=0.8, **common)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ranks, [f"{count:,}" for count in ranks])
    axes.xaxis.minorticks_off()
    axes.grid(alpha=0.3)
