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

ROOT = Path(__file__).parent.parent
COLOURS = {
    "packing": "tab:blue",
    "waiting": "lightgrey",
    "reducing": "tab:green",
    "splitting": "tab:orange",
    "launching": "tab:red",
}
ROW = 1.0


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
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    steps = [event for event in events if event.get("cat") == "step"]
    begin = max(event["ts"] for event in steps if event["pid"] == 0) - 300.0
    end = max(event["ts"] + event["dur"] for event in steps) + 300.0
    seen = [event for event in events if event["ph"] != "M" and begin <= event["ts"] <= end]
    ranks = sorted({event["pid"] for event in seen})
    figure, axes = plt.subplots(figsize=(11, 1.9 * len(ranks) + 0.8), layout="constrained")
    labels = []
    for rank in ranks:
        base = -4.0 * ranks.index(rank)
        labels += [(base, f"rank {rank}: gradients"), (base - ROW, "collectives"), (base - 2 * ROW, "phases")]
        for event in seen:
            if event["pid"] == rank:
                _draw_event(axes, event, base, begin)
    arrows: dict[int, list[dict[str, Any]]] = {}
    for event in seen:
        if event["ph"] in "stf":
            arrows.setdefault(event["id"], []).append(event)
    for ends in arrows.values():
        points = [((one["ts"] - begin) / 1e3, -4.0 * ranks.index(one["pid"]) - ROW) for one in ends]
        for start, stop in itertools.pairwise(points):
            axes.annotate("", stop, start, arrowprops={"arrowstyle": "->", "color": "dimgrey", "lw": 0.8})
    axes.set_yticks([place for place, _ in labels], [text for _, text in labels])
    axes.set_xlabel("milliseconds")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for name, colour in COLOURS.items() if name != "launching"]
    axes.legend(handles, [name for name in COLOURS if name != "launching"], loc="upper right", ncols=4)
    axes.set_ylim(-4.0 * len(ranks) + 1.0, 1.6)
    figure.savefig(path, dpi=110)


def _draw_event(axes: Any, event: dict[str, Any], base: float, begin: float) -> None:
    at = (event["ts"] - begin) / 1e3
    category = event.get("cat")
    if event["ph"] == "i":
        axes.plot([at], [base], marker="v", color="black")
        axes.annotate(event["name"], (at, base + 0.25), ha="center", fontsize=7)
    elif category == "collective" and event["ph"] == "X":
        axes.barh(base - ROW, event["dur"] / 1e3, left=at, height=0.7, color="tab:purple", alpha=0.5, edgecolor="black")
        axes.annotate(_short(event), (at, base - ROW), fontsize=7, va="center", clip_on=True)
    elif category == "phase":
        axes.barh(base - 2 * ROW, event["dur"] / 1e3, left=at, height=0.7, color=COLOURS[event["name"]])


def _short(event: dict[str, Any]) -> str:
    args = event["args"]
    return f" bucket {args['bucket']}" if "bucket" in args else f" {args.get('collective', '')}"


if __name__ == "__main__":
    main()
