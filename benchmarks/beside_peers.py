"""Measures gradsync beside PyTorch over gloo and mpi4py over MPICH and Open MPI, on two ranks over shared memory.

    python benchmarks/beside_peers.py --install    # makes the peers' environments under benchmarks/.environments
    python benchmarks/beside_peers.py all_reduce   # one array, from 4 KB to 100 MB
    python benchmarks/beside_peers.py buckets      # lists of gradients, and the callback's settings
    python benchmarks/beside_peers.py collectives  # the other collectives
    python benchmarks/beside_peers.py buckets --quick  # few rounds, writes nothing

Each writes benchmarks/results/WHAT.json; together they take about half an hour. Each system has an environment of its
own, and two ranks, which are started once and sleep between their turns. A round is a barrier of that system and then
the timed call; it counts with its slowest rank. A contender counts with the median of its rounds over all blocks.
Results go into arrays that exist and are warm. The exit code is 1 when a promise is not kept, 2 when a rank failed. The
largest list takes 14 GB.

all_reduce: its parts are "sizes", and "busy", which has a busy process on each core.

buckets: "lists" are the gradients of two models, "small" 10,000 of 100 elements; all but the largest are timed beside
busy processes too. gradsync takes part with default settings, and with gradients that live inside its buckets. Beside
the peers stand a local copy of all gradients, and what one would write without buckets: concatenate all, all_reduce,
split. A step hands every gradient over, flushes, and asks for each result. "thresholds" and "knobs" are of gradsync
alone: thresholds from 0.25 to 100 MB, and each setting beside the plain step. They differ by little, so they take turns
round by round, every second round backwards.

collectives: a size is that of what a rank gives (all_gather, all_to_all), of what it gets (reduce_scatter), or of the
array (broadcast). The parameters of whole models, as rank 0 gives them to all at the start of a training, go through
bcast_list_; beside it stand what DistributedDataParallel does in its constructor, and MPI's broadcast of each tensor.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from measurement import add_output, provenance, write_result
from peers import systems
from peers.blocks import measure
from peers.collectives import EXTENTS, RANKS
from peers.contenders import GRADSYNC, SYSTEMS
from peers.crew import CrewFailed
from peers.rows import NOT_ASKED_FOR, NOT_INSTALLED, Row, rows_of
from peers.targets import (
    TIMED_COLLECTIVES,
    Target,
    all_reduce_targets,
    bucket_targets,
    collective_targets,
    judge,
)
from peers.workload import Workload
from peers.workloads import (
    busy_cores,
    gradient_lists,
    knobs,
    parameter_lists,
    single_arrays,
    sizes_of,
    small_gradients,
    thresholds,
)

BLOCKS = 9
QUICK_BLOCKS = 2
SEED = 3


@dataclass(frozen=True)
class Comparison:
    """One measurement beside the peers.

    Attributes:
        parts: what can be measured alone, by name.
        targets: returns what is promised.
    """

    parts: Mapping[str, Callable[[], list[Workload]]]
    targets: Callable[[], list[Target]]


#: By name, which is that of the results too.
COMPARISONS = {
    "all_reduce": Comparison({"sizes": single_arrays, "busy": busy_cores}, all_reduce_targets),
    "buckets": Comparison(
        {"lists": gradient_lists, "small": small_gradients, "thresholds": thresholds, "knobs": knobs},
        bucket_targets,
    ),
    "collectives": Comparison(
        {**{name: partial(sizes_of, name) for name in TIMED_COLLECTIVES}, "parameters": parameter_lists},
        collective_targets,
    ),
}


def main() -> int:
    """Runs the command; returns the exit code."""
    options = _parse_options()
    if options.install:
        systems.install()
        return 0
    comparison = COMPARISONS[options.what]
    # As after Ctrl-C: ends all that was started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    made = provenance("benchmarks/beside_peers.py")
    workloads = [
        workload for part, make in comparison.parts.items() if options.only in (None, part) for workload in make()
    ]
    if options.quick:
        workloads = [workload.quick() for workload in workloads]
    blocks = QUICK_BLOCKS if options.quick else options.blocks
    try:
        rows, versions = run(workloads, options.contenders, blocks)
    except CrewFailed as error:
        print(f"{options.what}: {error}", file=sys.stderr)
        return 2
    targets = judge(comparison.targets(), rows)
    made["versions"]["systems"] = versions
    whole = not options.quick and options.only is None and set(options.contenders) == set(SYSTEMS)
    result = {**made, "settings": settings_of(workloads, blocks), "rows": [asdict(row) for row in rows]}
    write_result(options.what, options.output, {**result, "targets": targets}, is_whole=whole)
    broken = [target for target in targets if not target["kept"]]
    for target in broken:
        print(f"promise not kept: {target}")
    return int(bool(broken))


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure gradsync beside its peers over shared memory.")
    parser.add_argument("what", nargs="?", choices=tuple(COMPARISONS), help="what to measure")
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
        parser.error(f"name what to measure: {', '.join(COMPARISONS)}")
    parts = COMPARISONS[options.what].parts if options.what else {}
    if options.only is not None and options.only not in parts:
        parser.error(f"--only {options.only}: the parts of {options.what} are {', '.join(parts)}")
    return options


def run(
    workloads: Sequence[Workload], asked_for: Iterable[str], blocks: int
) -> tuple[list[Row], dict[str, dict[str, str]]]:
    """Measures all workloads with gradsync and all systems that are asked for and installed.

    Args:
        workloads: what to time, one after the other.
        asked_for: systems.
        blocks: how many of each contender.

    Returns:
        The rows, and the versions by system.

    Raises:
        CrewFailed: a rank failed; all have been ended.
    """
    absent = why_absent({GRADSYNC, *asked_for})
    order = random.Random(SEED)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="peers-") as folder, contextlib.ExitStack() as stack:
        pairs = {
            system: stack.enter_context(systems.started(system, folder)) for system in SYSTEMS if system not in absent
        }
        for workload in workloads:
            print(workload.name, flush=True)
            rows += rows_of(workload, measure(workload, pairs, blocks, order), absent)
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


if __name__ == "__main__":
    sys.exit(main())
