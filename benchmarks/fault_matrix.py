"""Causes each fault in each phase of a run, in each rank and in the launcher, with real processes.

    python benchmarks/fault_matrix.py            # all cells; writes benchmarks/results/fault_matrix.json (8 minutes)
    python benchmarks/fault_matrix.py --quick    # a sample with each phase and each fault; writes nothing
    python benchmarks/fault_matrix.py --only stop "first bucket"   # cells with all of these in their name

Each cell is three ranks of `gradsync run`. It is measured when the last rank that needs to know has raised an error of
ours, when the launcher has named the culprit, and when all is down; and looked at who is named, and what is left:
processes, ports, shared memory, files, and what a surviving rank still holds once it has closed everything. Two cells
are measured at a time, because they mostly wait. The exit code is 1 when somebody else was named than the culprit, or
something was left; a time above its target is only shown.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from failures.matrix import VICTIMS, Cell, cells, row_of, why_not
from failures.observation import DOWN, RAISED, REPORTED, Result, observe
from failures.points import FAULTS, PHASES
from measurement import provenance, write_result

FOLDER = Path(__file__).parent
OUTPUT = FOLDER / "results" / "fault_matrix.json"
ROUNDS = 2
AT_A_TIME = 2


def sample() -> list[Cell]:
    """Returns a sample of cells: each phase, each fault, each victim, and the first of the slow cells."""
    possible = [cell for cell in cells() if why_not(cell) is None]
    chosen = []
    for number, phase in enumerate(PHASES):
        fault, victim = FAULTS[number % len(FAULTS)], VICTIMS[number % len(VICTIMS)]
        of_phase = [cell for cell in possible if cell.phase == phase]
        chosen.append(min(of_phase, key=lambda cell: (cell.fault != fault, cell.victim != victim)))
    return chosen


def measure(wanted: Sequence[Cell], rounds: int, at_a_time: int) -> list[Result]:
    """Returns the results of all cells, in their order."""
    pool = ThreadPoolExecutor(at_a_time)
    try:
        pending = [pool.submit(observe, row_of(cell), rounds) for cell in wanted]
        results = []
        for number, future in enumerate(pending, 1):
            results.append(future.result())
            print(f"{number}/{len(wanted)} {_line_of(results[-1])}", *results[-1].problems(), sep="\n", flush=True)
        return results
    finally:
        pool.shutdown(cancel_futures=True)  # which matters for Ctrl-C


def _line_of(result: Result) -> str:
    times = ", ".join(
        f"{what} {summary['worst_seconds']:.2f} s"
        for what in (RAISED, REPORTED, DOWN)
        if (summary := result.summary(what)) is not None
    )
    return f"{result.row.name}: {times or 'no error, as it must be'}"


def as_dictionary(
    wanted: Sequence[Cell], results: Sequence[Result], made: dict[str, Any], settings: dict[str, Any]
) -> dict[str, Any]:
    """Returns the whole result, with the combinations that are no cell, and why."""
    body = [
        {"phase": cell.phase, "fault": cell.fault, "victim": cell.victim, **_without_texts(result)}
        for cell, result in zip(wanted, results, strict=True)
    ]
    left_out = [
        {"phase": cell.phase, "fault": cell.fault, "victim": cell.victim, "reason": reason}
        for cell in cells()
        if (reason := why_not(cell)) is not None
    ]
    summary = {
        "cells": len(results),
        "rounds": sum(len(result.rounds) for result in results),
        "wrong_or_unclean": sum(not result.is_good for result in results),
        "late": sum(bool(result.missed) for result in results),
    }
    return {**made, "settings": settings, "summary": summary, "results": body, "left_out": left_out}


def _without_texts(result: Result) -> dict[str, Any]:
    found = result.as_json()
    return {key: found[key] for key in ("measured", "errors", "culprit_named", "complaints", "left_behind")}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fault by phase by victim, with real processes.")
    parser.add_argument("--quick", action="store_true", help="a sample with each phase and each fault")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="cells with all of these in their name")
    parser.add_argument("--rounds", type=int, help=f"of each cell [{ROUNDS}; 1 with --quick]")
    parser.add_argument("--at-a-time", type=int, default=AT_A_TIME, help=f"cells that run at once [{AT_A_TIME}]")
    parser.add_argument(
        "--json", dest="output", type=Path, help="where the JSON goes [benchmarks/results/fault_matrix.json]"
    )
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    wanted = sample() if options.quick else [cell for cell in cells() if why_not(cell) is None]
    wanted = [cell for cell in wanted if all(text in cell.name for text in options.only)]
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a process that ignores the signal hands that on to its children
    rounds = options.rounds or (1 if options.quick else ROUNDS)
    made = provenance("benchmarks/fault_matrix.py")
    began = time.monotonic()
    results = measure(wanted, rounds, options.at_a_time)
    bad = sum(not result.is_good for result in results)
    print(f"{len(results)} cells in {time.monotonic() - began:.0f} s: {bad or 'none'} wrong or unclean")
    settings = {"rounds": rounds, "cells_at_a_time": options.at_a_time}
    result, whole = as_dictionary(wanted, results, made, settings), not (options.quick or options.only)
    write_result("fault_matrix", options.output, result, is_whole=whole)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
