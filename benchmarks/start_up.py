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
from pathlib import Path

from rich.console import Console
from rich.table import Table

from basic_costs import Row, as_dictionary, gradsync_command
from measurement import Seconds, add_output, provenance, write_result
from peers import systems
from peers.contenders import GRADSYNC, MPICH, OPENMPI, SYSTEMS, TORCH

FOLDER = Path(__file__).parent
PROMISED_SECONDS = {2: 0.35, 8: 1.2}  # by number of ranks, on two cores
ROUNDS, QUICK_ROUNDS, WARM_UP = 15, 3, 1
RUN_SECONDS = 120.0
TABLE_WIDTH = 110  # of a log, without a terminal
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
        return [*gradsync_command(), "run", "-n", str(ranks), str(FOLDER / "first_all_reduce.py")]
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


def rows_of(ranks: int, samples: dict[str, list[float]]) -> list[Row]:
    """Returns gradsync's row, and the others' against it."""
    detail = f"{ranks} ranks, from before the command's process exists to the first all-reduce of the last rank"
    ours = Seconds.of(samples[GRADSYNC])
    name = f"{LAUNCHERS[GRADSYNC]}, {ranks} ranks"
    rows = [Row(name, detail, ours, must_seconds=PROMISED_SECONDS.get(ranks))]
    return rows + [
        Row(f"{LAUNCHERS[system]}, {ranks} ranks", detail, Seconds.of(of_system), name, ours)
        for system, of_system in samples.items()
        if system != GRADSYNC
    ]


def table_of(rows: Sequence[Row]) -> Table:
    table = Table(title="Command to first all-reduce, last rank: seconds")
    table.add_column("launcher", no_wrap=True)
    for heading in ("median", "quartiles", "rounds", "/ gradsync", "must"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        seconds = row.seconds
        kept = {None: "", True: " yes", False: " [red]NO[/red]"}[row.kept]
        table.add_row(
            row.what,
            f"{seconds.median:.3f}",
            f"{seconds.lower_quartile:.3f} .. {seconds.upper_quartile:.3f}",
            str(seconds.samples),
            f"{row.ratio:.2f}" if row.ratio else "",
            f"< {row.must_seconds}{kept}" if row.must_seconds else "",
        )
    return table


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
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    console.print(table_of(rows))
    whole = rounds == ROUNDS and options.ranks == [*PROMISED_SECONDS] and len(present) == len(SYSTEMS)
    made["versions"]["systems"] = {system: version_of(system) for system in present if system != GRADSYNC}
    settings = {"ranks": options.ranks, "rounds": rounds, "warm_up": WARM_UP}
    write_result("start_up", options.output, as_dictionary(rows, made, settings), is_whole=whole)
    return 1 if any(row.kept is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
