"""Measures how long a run takes from its command to the first all-reduce, for gradsync and its peers, in one run.

    python benchmarks/beside_peers.py --install  # makes the peers' environments under benchmarks/.environments
    python benchmarks/start_up.py              # writes benchmarks/results/start_up.json
    python benchmarks/start_up.py --quick      # few rounds, writes nothing

The clock starts before the launcher's process exists, and stops when the first all-reduce has returned on the last
rank. The peers are torchrun with gloo, and mpiexec of MPICH and of Open MPI with mpi4py. Contenders take turns, round
by round, every second round backwards; a contender counts with the median of its rounds. The exit code is 1 when a
promise is not kept.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from measurement import Seconds, add_output, provenance, write_result
from peers import systems
from peers.contenders import GRADSYNC, MPICH, OPENMPI, SYSTEMS, TORCH

FOLDER = Path(__file__).parent
PROMISED_SECONDS = {2: 0.35, 8: 1.2}  # by number of ranks, on two cores
ROUNDS, QUICK_ROUNDS, WARM_UP = 15, 3, 1
RUN_SECONDS = 120.0
LAUNCHERS = {
    GRADSYNC: "gradsync run",
    TORCH: "torchrun, gloo",
    MPICH: "mpiexec of MPICH",
    OPENMPI: "mpiexec of Open MPI",
}
# Open MPI refuses to run as root, the usual user of a container, and to start more ranks than cores.
OPENMPI_AS_HERE = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def command_of(system: str, ranks: int) -> list[str]:
    """Returns the command that starts so many ranks of a system."""
    if system == GRADSYNC:
        return [sys.executable, "-m", "gradsync", "run", "-n", str(ranks), str(FOLDER / "first_all_reduce.py")]
    programs = systems.ENVIRONMENTS / system / "bin"
    if system == TORCH:
        script = str(FOLDER / "first_all_reduce_gloo.py")
        return [str(programs / "torchrun"), "--nproc-per-node", str(ranks), script]
    run = [str(programs / "mpiexec"), "--bind-to" if system == OPENMPI else "-bind-to", systems.BIND_TO]
    return [*run, "-n", str(ranks), str(programs / "python"), str(FOLDER / "first_all_reduce_mpi.py")]


def variables_of(system: str, folder: str) -> dict[str, str]:
    """Returns the variables of a run; temporary files, which some leave behind, go into the folder."""
    # What is installed is compiled already, and sources are compiled once: in the warm-up.
    unwanted = {"PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED"}
    if system != GRADSYNC:
        unwanted.add("PYTHONPATH")  # it is meant for this environment, not for the peers'
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    return {**kept, **systems.THREADS, **OPENMPI_AS_HERE, "TMPDIR": folder}


def seconds_to_first_all_reduce(system: str, ranks: int, folder: str) -> float:
    """Runs a system once.

    Raises:
        RuntimeError: the run failed, or not every rank printed its time.
    """
    command, variables = command_of(system, ranks), variables_of(system, folder)
    began = time.monotonic()
    run = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=RUN_SECONDS)
    moments = [line.split()[-1] for line in run.stdout.splitlines()]  # a launcher may put the rank before it
    if run.returncode != 0 or len(moments) != ranks:
        raise RuntimeError(f"{LAUNCHERS[system]}, {ranks} ranks: {len(moments)} are done; {run.stderr[-2000:]}")
    return max(map(float, moments)) - began


def measure(present: Sequence[str], ranks: int, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each round, by system."""
    samples: dict[str, list[float]] = {system: [] for system in present}
    with tempfile.TemporaryDirectory(prefix="start-up-") as folder:
        for round_ in range(WARM_UP + rounds):
            for system in present[:: 1 if round_ % 2 else -1]:
                samples[system].append(seconds_to_first_all_reduce(system, ranks, folder))
    return {system: of_system[WARM_UP:] for system, of_system in samples.items()}


def rows_of(ranks: int, samples: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Returns a row for each system; gradsync's says whether its promise is kept."""
    rows = []
    for system, of_system in samples.items():
        seconds = Seconds.of(of_system)
        row: dict[str, Any] = {"what": f"{LAUNCHERS[system]}, {ranks} ranks", "seconds": asdict(seconds)}
        if system == GRADSYNC and ranks in PROMISED_SECONDS:
            limit = PROMISED_SECONDS[ranks]
            row |= {"must_seconds": limit, "kept": seconds.median < limit}
        rows.append(row)
    return rows


def version_of(system: str) -> str:
    """Returns the version of a system's communication library."""
    package = {TORCH: "torch", MPICH: "mpich", OPENMPI: "openmpi"}[system]
    python = str(systems.ENVIRONMENTS / system / "bin" / "python")
    source = f"from importlib.metadata import version; print({package!r}, version({package!r}))"
    return subprocess.run([python, "-E", "-c", source], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the time from a command to the first all-reduce.")
    parser.add_argument("--quick", action="store_true", help="few rounds; writes only with --output")
    parser.add_argument("--ranks", nargs="+", type=int, default=[*PROMISED_SECONDS], help="how many; writes likewise")
    parser.add_argument("--rounds", type=int, help=f"of each contender [{ROUNDS}]; writes likewise")
    parser.add_argument("--contenders", nargs="+", choices=SYSTEMS, default=SYSTEMS, help="gradsync always; likewise")
    add_output(parser, "start_up")
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    made = provenance("benchmarks/start_up.py")
    asked_for = {GRADSYNC, *options.contenders}
    present = [system for system in SYSTEMS if system in asked_for and systems.is_installed(system)]
    for system in sorted(asked_for.difference(present)):
        print(f"{LAUNCHERS[system]} is not installed: python benchmarks/beside_peers.py --install")
    rows = [row for ranks in options.ranks for row in rows_of(ranks, measure(present, ranks, rounds))]
    whole = rounds == ROUNDS and options.ranks == [*PROMISED_SECONDS] and len(present) == len(SYSTEMS)
    made["versions"]["systems"] = {system: version_of(system) for system in present if system != GRADSYNC}
    settings = {"ranks": options.ranks, "rounds": rounds, "warm_up": WARM_UP}
    write_result("start_up", options.output, {**made, "settings": settings, "results": rows}, is_whole=whole)
    return int(not all(row.get("kept", True) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
