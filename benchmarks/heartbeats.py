"""Measures how long a 4 KB all_reduce takes beside heartbeats, of this checkout and of another one, in turns.

    python benchmarks/heartbeats.py --old ../first-edition --output results.json
    python benchmarks/heartbeats.py --old ../first-edition --quick

Two ranks over shared memory time each of their calls; a run gives rank 0's median and 99th percentile. Heartbeats come
every 0.5 s, as ever, and every 0.05 s. A row's ratio is that of the medians over the runs, which alternate.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

import gradsync as gs

HEARTBEAT_SECONDS = (0.5, 0.05)
#: Where a checkout has its interval: this one, and the first edition.
MODULES = ("gradsync.rendezvous.liveness", "gradsync.rendezvous.silence")
HERE = Path(__file__).resolve()


def rank(heartbeat_seconds: float, calls: int) -> None:
    """What each rank does: prints median and 99th percentile, in microseconds."""
    for name in MODULES:
        with suppress(ImportError):
            module = importlib.import_module(name)
            if hasattr(module, "HEARTBEAT_SECONDS"):
                module.HEARTBEAT_SECONDS = heartbeat_seconds  # type: ignore[attr-defined]
    with gs.init_process_group("shm") as comm:
        values = np.zeros(1024, np.float32)
        for _ in range(calls // 4):
            comm.all_reduce(values)
        took = np.empty(calls)
        comm.barrier()
        for call in range(calls):
            began = time.perf_counter()
            comm.all_reduce(values)
            took[call] = time.perf_counter() - began
        if comm.rank == 0:
            print(json.dumps({"median": np.median(took) * 1e6, "p99": np.percentile(took, 99) * 1e6}), flush=True)


def play(checkout: Path, heartbeat_seconds: float, calls: int) -> dict[str, float]:
    """Returns the figures of one run of a checkout."""
    program = ["--rank", str(heartbeat_seconds), str(calls)]
    command = [sys.executable, "-m", "gradsync", "run", "-n", "2", "--no-prefix", str(HERE), *program]
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    run = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=120)
    figures: dict[str, float] = json.loads(run.stdout.strip().splitlines()[-1])
    return figures


def main() -> int:
    """Measures, prints a row for each figure, and writes the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--old", type=Path, help="the other checkout")
    parser.add_argument("--output", type=Path, help="where the JSON goes")
    parser.add_argument("--quick", action="store_true", help="one short run of each")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(float(options.rank[0]), int(options.rank[1]))
        return 0
    if options.old is None:
        parser.error("--old is needed: the other checkout")
    from measurement import provenance  # of this checkout; a rank may run in another

    made = provenance("benchmarks/heartbeats.py") | {
        "command": "python benchmarks/heartbeats.py --old OLD --output RESULTS"
    }
    rounds, calls = (1, 1000) if options.quick else (12, 40_000)
    checkouts = {"old": options.old.resolve(), "new": HERE.parents[1]}
    made["results"] = []
    for heartbeat_seconds in HEARTBEAT_SECONDS:
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
        for _ in range(rounds):
            for name, checkout in checkouts.items():
                runs[name].append(play(checkout, heartbeat_seconds, calls))
        for figure in ("median", "p99"):
            old, new = (statistics.median(run[figure] for run in runs[name]) for name in checkouts)
            row = {"heartbeat_seconds": heartbeat_seconds, "figure": figure, "old_microseconds": old}
            made["results"].append({**row, "new_microseconds": new, "ratio": new / old, "runs": rounds})
            both = f"old {old:.1f} us, new {new:.1f} us: {new / old:.3f}"
            print(f"heartbeats every {heartbeat_seconds} s, {figure}: {both}")
    if options.output is not None:
        options.output.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
