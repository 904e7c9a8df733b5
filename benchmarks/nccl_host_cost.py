"""Measures what a steady all_reduce over NCCL costs the host, here and in another checkout, on the stand-in for NCCL.

    python benchmarks/nccl_host_cost.py --old ../first-edition  # writes benchmarks/results/nccl_host_cost.json
    python benchmarks/nccl_host_cost.py --old ../first-edition --quick  # one short block, writes nothing

Two ranks reduce 1,000 float32 values again and again, in place, on the current stream. Each block runs the ranks of
both checkouts, one after the other, in an order that changes; both use the stand-in of this checkout. Timed is the
thread that calls, until all_reduce returns:

- "idle": the stream has nothing to do when the call comes,
- "flat out": 50 calls come one after the other, and the stream falls behind.

"seconds" is the time on the clock, "cpu_seconds" the processor time of that thread. Both include the work of the
stand-in, which a GPU's driver would do in another time. A block counts with the median of its calls, and with the
slower rank; a ratio is the median over the blocks.

No GPU takes part: the figures compare two checkouts, and say nothing about NCCL. The exit code is 1 when the new
checkout takes more than 0.6 of the processor time of the old one, 2 when a rank failed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

BLOCKS, SEED, LIMIT = 9, 5, 0.6
WARM_UP, CALLS, BURST = 60, 400, 50
OLD, NEW = "old", "new"
IDLE, FLAT_OUT = "idle", "flat out"
_HERE = Path(__file__).resolve().parent
_STAND_IN = _HERE.parent / "tests" / "stand_in"


def run_rank(calls: int) -> dict[str, Any]:
    """Measures on one rank; both ranks must call it. Uses only public names that every edition has."""
    import cupy
    import numpy as np

    import gradsync as gs

    comm = gs.init_process_group("nccl")
    array = cupy.zeros(1000, np.float32)
    stream = cupy.cuda.get_current_stream()

    for _ in range(WARM_UP):
        comm.all_reduce(array)
    gc.collect()
    gc.disable()
    found: dict[str, Any] = {}
    for name, burst in ((IDLE, 1), (FLAT_OUT, BURST)):
        wall, processor = [], []
        for _ in range(max(calls // burst, 1)):
            stream.synchronize()  # no barrier: a loop that repeats all_reduce needs no agreement
            time.sleep(0.001)  # for the threads of the stand-in to come to rest
            wall_began, processor_began = time.perf_counter(), time.thread_time()
            for _ in range(burst):
                comm.all_reduce(array)
            processor.append((time.thread_time() - processor_began) / burst)
            wall.append((time.perf_counter() - wall_began) / burst)
        found[name] = {"seconds": median(wall), "cpu_seconds": median(processor)}
    comm.barrier()
    gs.destroy_process_group()
    return found


def run_block(checkout: Path, calls: int) -> dict[str, Any]:
    """Returns the slower rank's figures of one block.

    Raises:
        subprocess.CalledProcessError: a rank failed.
    """
    path = os.pathsep.join([str((checkout / "src").resolve()), str(_STAND_IN)])
    command = [sys.executable, "-m", "gradsync", "run", "-n", "2", "--no-prefix", str(Path(__file__).resolve())]
    done = subprocess.run(
        [*command, "--rank", str(calls)],
        env={**os.environ, "PYTHONPATH": path, "GRADSYNC_STAND_IN_DEVICES": "2"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    )
    ranks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {
        name: {clock: max(rank[name][clock] for rank in ranks) for clock in ("seconds", "cpu_seconds")}
        for name in (IDLE, FLAT_OUT)
    }


def rows_of(blocks: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Returns the figures of each case, and the ratio of new to old."""
    rows = []
    for case in (IDLE, FLAT_OUT):
        for clock in ("seconds", "cpu_seconds"):
            of_block = {name: [block[case][clock] for block in blocks[name]] for name in (OLD, NEW)}
            ratios = [new / old for old, new in zip(of_block[OLD], of_block[NEW], strict=True)]
            rows.append(
                {
                    "case": case,
                    "clock": clock,
                    "step_seconds": {name: median(seconds) for name, seconds in of_block.items()},
                    "new_to_old": median(ratios),
                    "range": [min(ratios), max(ratios)],
                    **({"limit": LIMIT, "kept": median(ratios) <= LIMIT} if clock == "cpu_seconds" else {}),
                }
            )
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measures, shows and writes; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, help="the other checkout")
    parser.add_argument("--rank", type=int, metavar="CALLS", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="one short block; writes only with --output")
    parser.add_argument("--output", type=Path, help="where the JSON goes [benchmarks/results/nccl_host_cost.json]")
    options = parser.parse_args(arguments)
    if options.rank is not None:
        print(json.dumps(run_rank(options.rank)), flush=True)
        return 0
    if options.old is None:
        parser.error("--old is needed")
    from measurement import provenance, write_result
    from two_checkouts import commit_of

    made = provenance("benchmarks/nccl_host_cost.py")
    made["command"] = "python benchmarks/nccl_host_cost.py --old OLD"
    checkouts, order = {OLD: options.old, NEW: _HERE.parent}, random.Random(SEED)
    blocks: dict[str, list[dict[str, Any]]] = {OLD: [], NEW: []}
    try:
        for _ in range(1 if options.quick else BLOCKS):
            for name in order.sample([OLD, NEW], 2):
                blocks[name].append(run_block(checkouts[name], 2 * BURST if options.quick else CALLS))
    except subprocess.CalledProcessError as error:
        print(f"nccl_host_cost: {error}", file=sys.stderr)
        return 2
    rows = rows_of(blocks)
    commits = {name: commit_of(path) for name, path in checkouts.items()}
    settings = {"blocks": len(blocks[NEW]), "calls": CALLS, "burst": BURST, "warm_up": WARM_UP, "seed": SEED}
    result = {**made, "commits": commits, "settings": settings, "rows": rows}
    write_result("nccl_host_cost", options.output, result, is_whole=not options.quick)
    return int(not all(row.get("kept", True) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
