"""A whole comparison, as a command: options, the measuring of all workloads, the report, the JSON."""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from measurement import add_output, provenance, write_result
from peers import systems
from peers.blocks import measure, started_pairs
from peers.collectives import EXTENTS, RANKS
from peers.contenders import GRADSYNC, SYSTEMS
from peers.rows import NOT_ASKED_FOR, NOT_INSTALLED, Row, rows_of
from peers.systems import PairFailed
from peers.tables import table_of, table_of_verdicts
from peers.targets import Target, judge
from peers.workload import Workload

BLOCKS = 9
QUICK_BLOCKS = 2
SEED = 3
TABLE_WIDTH = 150  # of a log, without a terminal


@dataclass(frozen=True)
class Comparison:
    """One measurement beside the peers.

    Attributes:
        parts: what can be measured alone, by name.
        targets: returns what is promised.
    """

    parts: Mapping[str, Callable[[], list[Workload]]]
    targets: Callable[[], list[Target]]


def main(script: str, comparisons: Mapping[str, Comparison]) -> int:
    """Runs the command.

    Args:
        script: its path in the repository.
        comparisons: by name, which is that of the results too.

    Returns:
        The exit code: 1 when a promise is not kept, 2 when a rank failed.
    """
    options = _parse_options(comparisons)
    if options.install:
        systems.install()
        return 0
    comparison = comparisons[options.what]
    # As after Ctrl-C: ends all that was started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    made = provenance(script)
    workloads = [
        workload for part, make in comparison.parts.items() if options.only in (None, part) for workload in make()
    ]
    if options.quick:
        workloads = [workload.quick() for workload in workloads]
    blocks = QUICK_BLOCKS if options.quick else options.blocks
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    try:
        rows, versions = run(workloads, options.contenders, blocks, console)
    except PairFailed as error:
        print(f"{options.what}: {error}", file=sys.stderr)
        return 2
    verdicts = judge(comparison.targets(), rows)
    console.print(table_of_verdicts(verdicts))
    made["versions"]["systems"] = versions
    whole = not options.quick and options.only is None and set(options.contenders) == set(SYSTEMS)
    results = {"rows": [asdict(row) for row in rows], "targets": [verdict.as_json() for verdict in verdicts]}
    result = {**made, "settings": settings_of(workloads, blocks), **results}
    write_result(options.what, options.output, result, is_whole=whole)
    return 1 if any(verdict.must_kept is False for verdict in verdicts) else 0


def _parse_options(comparisons: Mapping[str, Comparison]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure gradsync beside its peers over shared memory.")
    parser.add_argument("what", nargs="?", choices=tuple(comparisons), help="what to measure")
    parser.add_argument("--install", action="store_true", help="make the peers' environments, and nothing else")
    parser.add_argument("--quick", action="store_true", help="few rounds; writes only with --output")
    parser.add_argument("--only", metavar="PART", help="one part; writes likewise")
    parser.add_argument(
        "--contenders", nargs="+", choices=SYSTEMS, default=SYSTEMS, help="systems; gradsync always; writes likewise"
    )
    parser.add_argument("--blocks", type=int, default=BLOCKS, help=f"of each contender [{BLOCKS}]")
    add_output(parser, "WHAT")
    options = parser.parse_args()
    if options.what is None and not options.install:
        parser.error(f"name what to measure: {', '.join(comparisons)}")
    parts = comparisons[options.what].parts if options.what else {}
    if options.only is not None and options.only not in parts:
        parser.error(f"--only {options.only}: the parts of {options.what} are {', '.join(parts)}")
    return options


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


def settings_of(workloads: Sequence[Workload], blocks: int) -> dict[str, Any]:
    """Returns the settings that are needed to measure the same again."""
    return {
        "ranks": RANKS,
        "size_means": {w.collective: EXTENTS[w.collective].size_means for w in workloads if not w.is_list},
        "blocks": blocks,
        "seed": SEED,
        "rounds_a_block": {workload.name: workload.rounds for workload in workloads},
        "warm_up_rounds_a_block": {workload.name: workload.warm_up for workload in workloads},
        "calls_a_round": {workload.name: workload.calls for workload in workloads},
        "threads": systems.THREADS | {"torch.set_num_threads": "1"},
        "mpi_bind_to": systems.BIND_TO,
    }
