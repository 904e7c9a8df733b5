"""Measures gradsync against its peers over shared memory: two ranks, every contender in one run.

    python benchmarks/full_speed.py --install  # makes the peers' environments under benchmarks/.environments
    python benchmarks/full_speed.py            # writes benchmarks/results/full_speed.json
    python benchmarks/full_speed.py --quick    # few rounds, writes nothing

The peers are PyTorch over gloo and mpi4py over MPICH and over Open MPI, each in an environment of its own, with a plain
local copy for comparison. Of each system two ranks are started, once; they sleep until it is their turn. A round is a
barrier of that system and then what is timed; it counts with its slowest rank. A contender counts with the median of
its rounds over all blocks. The exit code is 1 when a promise is not kept, 2 when a rank failed.

The largest workload needs about 12 GB of memory, in all ranks together.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from measurement import provenance
from memory_mode import FAST, SLOW
from peers import systems
from peers.blocks import measure, started_pairs
from peers.contenders import GRADSYNC, SYSTEMS
from peers.pair import PairFailed
from peers.rows import NOT_ASKED_FOR, NOT_INSTALLED, Row, rows_of
from peers.targets import Verdict, all_targets, judge
from peers.workloads import RANKS, Workload, busy_cores, gradient_lists, single_arrays

FOLDER = Path(__file__).parent
PARTS = {"lists": gradient_lists, "sizes": single_arrays, "busy": busy_cores}
BLOCKS = 9
QUICK_BLOCKS = 2
SEED = 3
TABLE_WIDTH = 130  # of a log, where no terminal tells its own


def run(
    workloads: Sequence[Workload], asked_for: Iterable[str], blocks: int, console: Console
) -> tuple[list[Row], dict[str, dict[str, str]]]:
    """Measures all workloads with all systems that are asked for and installed.

    Args:
        workloads: what to time, one after the other.
        asked_for: systems; gradsync takes part in any case, since it asks for the memory mode.
        blocks: how many of each contender.
        console: where each workload's table goes once it is done.

    Returns:
        The rows, and the versions by system.

    Raises:
        PairFailed: a rank failed; all have been ended.
    """
    absent = why_absent({GRADSYNC, *asked_for})
    order = random.Random(SEED)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        present = [system for system in SYSTEMS if system not in absent]
        with started_pairs(present, folder) as pairs:
            for workload in workloads:
                of_workload = rows_of(workload, measure(workload, pairs, blocks, order), absent)
                console.print(table_of(of_workload))
                rows += of_workload
            return rows, {system: pair.versions for system, pair in pairs.items()}


def why_absent(asked_for: set[str]) -> dict[str, str]:
    """Returns the systems that cannot take part, and why."""
    reasons = {
        system: NOT_ASKED_FOR if system not in asked_for else "" if systems.is_installed(system) else NOT_INSTALLED
        for system in SYSTEMS
    }
    return {system: reason for system, reason in reasons.items() if reason}


# -- The report ----------------------------------------------------------------------------------------------


def table_of(rows: list[Row]) -> Table:
    """Returns the rows of one workload."""
    table = Table(title=f"{rows[0].workload}: milliseconds of the slowest rank")
    table.add_column("contender", no_wrap=True)
    for heading in ("median", "quartiles", "mean", "rounds", "fast memory", "slow memory", "/ gradsync"):
        table.add_column(heading, justify="right")
    ours = {row.state: row for row in rows if row.contender == GRADSYNC}
    for row in rows:
        what = row.contender if len(ours) == 1 else f"{row.contender}, {row.state}"
        table.add_row(what, *(_cells(row, ours[row.state]) if row.seconds else (row.status,)))
    return table


def _cells(row: Row, ours: Row) -> tuple[str, ...]:
    seconds = row.seconds
    return (
        _milliseconds(seconds.median),
        f"{_milliseconds(seconds.lower_quartile)} .. {_milliseconds(seconds.upper_quartile)}",
        _milliseconds(row.mean_seconds),
        str(seconds.samples),
        *(_milliseconds(row.median(mode)) for mode in (FAST, SLOW)),
        f"{seconds.median / ours.seconds.median:.2f}",
    )


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.3g}"


def table_of_verdicts(verdicts: list[Verdict]) -> Table:
    """Returns every target and whether it was met."""
    table = Table(title="Targets: gradsync's median over the others', of several the fastest")
    for heading in ("workload", "against"):
        table.add_column(heading)
    for heading in ("ratio", "of means", "must", "reach"):
        table.add_column(heading, justify="right")
    for verdict in verdicts:
        target = verdict.target
        state = f" ({target.against_state})" if target.against_state != target.state else ""
        table.add_row(
            target.workload,
            ", ".join(target.against) + state,
            "not measured" if verdict.ratio is None else f"{verdict.ratio:.2f}",
            "" if verdict.ratio_of_means is None else f"{verdict.ratio_of_means:.2f}",
            _limit(target.must, verdict.must_kept),
            _limit(target.reach, verdict.reach_kept),
        )
    return table


def _limit(limit: float | None, kept: bool | None) -> str:
    if limit is None:
        return ""
    return f"<= {limit:.2f} " + {None: "?", True: "yes", False: "[red]NO[/red]"}[kept]


def as_json(
    made: dict[str, Any], versions: dict[str, Any], settings: dict[str, Any], rows: list[Row], verdicts: list[Verdict]
) -> str:
    made["machine"]["load_average_after"] = os.getloadavg()[0]
    made["versions"]["systems"] = versions
    results = {"rows": [asdict(row) for row in rows], "targets": [verdict.as_json() for verdict in verdicts]}
    return json.dumps({**made, "settings": settings, **results}, indent=2) + "\n"


def settings_of(workloads: Sequence[Workload], blocks: int) -> dict[str, Any]:
    """Returns what one needs to know to measure the same again."""
    return {
        "ranks": RANKS,
        "blocks": blocks,
        "seed": SEED,
        "rounds_a_block": {workload.name: workload.rounds for workload in workloads},
        "warm_up_rounds_a_block": {workload.name: workload.warm_up for workload in workloads},
        "calls_a_round": {workload.name: workload.calls for workload in workloads},
        "threads": systems.THREADS | {"torch.set_num_threads": "1"},
        "mpi_bind_to": systems.BIND_TO,
    }


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure gradsync against its peers over shared memory.")
    parser.add_argument("--install", action="store_true", help="make the peers' environments, and nothing else")
    parser.add_argument("--quick", action="store_true", help="few rounds; writes only with --output")
    parser.add_argument("--only", choices=tuple(PARTS), help="one part; writes likewise")
    parser.add_argument(
        "--contenders", nargs="+", choices=SYSTEMS, default=SYSTEMS, help="systems; gradsync always; writes likewise"
    )
    parser.add_argument("--output", type=Path, help="where the JSON goes [benchmarks/results/full_speed.json]")
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    if options.install:
        systems.install()
        return 0
    # As after Ctrl-C: what was started is ended, in order.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    made = provenance("benchmarks/full_speed.py")
    workloads = [workload for part, make in PARTS.items() if options.only in (None, part) for workload in make()]
    if options.quick:
        workloads = [workload.quick() for workload in workloads]
    blocks = QUICK_BLOCKS if options.quick else BLOCKS
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    try:
        rows, versions = run(workloads, options.contenders, blocks, console)
    except PairFailed as error:
        print(f"full_speed: {error}", file=sys.stderr)
        return 2
    verdicts = judge(all_targets(), rows)
    console.print(table_of_verdicts(verdicts))
    whole = not options.quick and options.only is None and set(options.contenders) == set(SYSTEMS)
    output = options.output or (FOLDER / "results" / "full_speed.json" if whole else None)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(as_json(made, versions, settings_of(workloads, blocks), rows, verdicts))
        print(f"written to {os.path.relpath(output)}")
    return 1 if any(verdict.must_kept is False for verdict in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
