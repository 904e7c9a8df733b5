"""The rendezvous as a picture: how long each step takes over the number of ranks, contenders side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradsync.bench.picture import BARS, LINE, STYLES, draw_times, picture, show_legend, tick_times
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
        show_legend(figure, panels[0])
        figure.suptitle(title, fontsize="medium")


def _draw(axes: Any, rows: Sequence[Row], step: str, style: dict[str, str]) -> None:
    ranks = [row.ranks for row in rows]
    label = rows[0].contender
    draw_times(axes, ranks, [row.steps[step] for row in rows], 1e-3, **BARS, **LINE, **style, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ranks, [f"{count:,}" for count in ranks])
    axes.xaxis.minorticks_off()
    axes.grid(alpha=0.3)
