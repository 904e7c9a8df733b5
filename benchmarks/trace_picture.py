"""Draws a trace of two ranks as a picture, for docs/tracing.md: needs matplotlib.

    python benchmarks/trace_picture.py            # writes docs/trace.png
    python benchmarks/trace_picture.py --out FILE

It runs examples/traced_step.py under `gradsync run --trace`, makes the Chrome trace with `gradsync trace`, and draws
the last step of it as https://ui.perfetto.dev shows it.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from gradsync.bench.report import picture

ROOT = Path(__file__).parent.parent
COLOURS = {
    "packing": "tab:blue",
    "waiting": "lightgrey",
    "reducing": "tab:green",
    "splitting": "tab:orange",
    "launching": "tab:red",
}
ROW = 1.0
_ROWS_OF_RANK = 4.0  # the last one stays empty
_MARGIN_MICROSECONDS = 300.0


@click.command()
@click.option("--out", type=click.Path(dir_okay=False), default=str(ROOT / "docs" / "trace.png"), show_default=True)
def main(out: str) -> None:
    """Traces a small training step, and draws it."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        script = str(ROOT / "examples" / "traced_step.py")
        _gradsync("run", "-n", "2", "--trace", folder, script)
        _gradsync("trace", folder, "--out", str(trace))
        draw(json.loads(trace.read_text())["traceEvents"], Path(out))
    click.echo(out)


def _gradsync(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "gradsync", *arguments], check=True, stdout=subprocess.DEVNULL, timeout=120)


def draw(events: list[dict[str, Any]], path: Path) -> None:
    """Draws the last step: for each rank its gradients, its collectives, and the phases of these."""
    seen, begin = _last_step(events)
    bases = {rank: _ROWS_OF_RANK * -number for number, rank in enumerate(sorted({event["pid"] for event in seen}))}
    with picture(path, 11, 1.9 * len(bases) + 0.8, 110) as figure:
        axes = figure.subplots()
        for event in seen:
            _draw_event(axes, event, bases[event["pid"]], begin)
        for rank, base in bases.items():
            _draw_gradients(axes, [event for event in seen if event["pid"] == rank and event["ph"] == "i"], base, begin)
        _draw_arrows(axes, seen, bases, begin)
        _label(axes, bases)


def _last_step(events: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], float]:
    """Returns the events of the last step, and the time at which the picture begins."""
    steps = [event for event in events if event.get("cat") == "step"]
    last = {event["pid"]: event["ts"] for event in sorted(steps, key=lambda event: float(event["ts"]))}
    begin = min(last.values()) - _MARGIN_MICROSECONDS
    end = max(event["ts"] + event["dur"] for event in steps) + _MARGIN_MICROSECONDS
    return [event for event in events if event["ph"] != "M" and begin <= event["ts"] <= end], begin


def _draw_arrows(axes: Any, seen: list[dict[str, Any]], bases: dict[int, float], begin: float) -> None:
    """Draws an arrow from rank to rank of each collective."""
    arrows: dict[int, list[dict[str, Any]]] = {}
    for event in seen:
        if event["ph"] in "stf":
            arrows.setdefault(event["id"], []).append(event)
    for ends in arrows.values():
        points = [((one["ts"] - begin) / 1e3, bases[one["pid"]] - ROW) for one in ends]
        for start, stop in itertools.pairwise(points):
            axes.annotate("", stop, start, arrowprops={"arrowstyle": "->", "color": "dimgrey", "lw": 0.8})


def _label(axes: Any, bases: dict[int, float]) -> None:
    from matplotlib.patches import Patch

    labels = [
        label
        for rank, base in bases.items()
        for label in ((base, f"rank {rank}: gradients"), (base - ROW, "collectives"), (base - 2 * ROW, "phases"))
    ]
    axes.set_yticks([place for place, _ in labels], [text for _, text in labels])
    axes.set_xlabel("milliseconds")
    shown = {name: colour for name, colour in COLOURS.items() if name != "launching"}  # is NCCL's alone
    handles = [Patch(color=colour, label=name) for name, colour in shown.items()]
    axes.legend(handles=handles, loc="upper right", ncols=len(handles))
    axes.set_ylim(1.0 - _ROWS_OF_RANK * len(bases), 1.6)


def _draw_gradients(axes: Any, gradients: list[dict[str, Any]], base: float, begin: float) -> None:
    """Draws the gradients of a rank; their names take turns on two heights, so that they do not cover each other."""
    for number, event in enumerate(sorted(gradients, key=lambda event: float(event["ts"]))):
        at = (event["ts"] - begin) / 1e3
        axes.plot([at], [base], marker="v", color="black")
        axes.annotate(event["name"], (at, base + (0.25, 0.6)[number % 2]), ha="center", fontsize=7)


def _draw_event(axes: Any, event: dict[str, Any], base: float, begin: float) -> None:
    at = (event["ts"] - begin) / 1e3
    category = event.get("cat")
    if category == "collective" and event["ph"] == "X":
        axes.barh(base - ROW, event["dur"] / 1e3, left=at, height=0.7, color="tab:purple", alpha=0.5, edgecolor="black")
        axes.annotate(_short(event), (at, base - ROW), fontsize=7, va="center", clip_on=True)
    elif category == "phase":
        axes.barh(base - 2 * ROW, event["dur"] / 1e3, left=at, height=0.7, color=COLOURS[event["name"]])


def _short(event: dict[str, Any]) -> str:
    what, bracket, names = event["name"].partition("[")
    return f" {bracket}{names}" if bracket else f" {what.partition('(')[0]}"


if __name__ == "__main__":
    main()
