"""How a pair of ranks of each system is installed and started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from peers.collectives import RANKS
from peers.contenders import GRADSYNC, MPICH, OPENMPI, TORCH
from peers.crew import Crew, Start

BENCHMARKS = Path(__file__).resolve().parents[1]
ENVIRONMENTS = BENCHMARKS / ".environments"
# Where pip sees several builds of this version, it takes the one for the CPU.
PACKAGES = {
    # msgpack, ml_dtypes and click for the tests of gradsync beside it.
    TORCH: ("torch==2.13.0", "numpy", "msgpack", "ml_dtypes", "click"),
    OPENMPI: ("mpi4py", "openmpi", "numpy", "msgpack", "ml_dtypes"),  # the last two for the tests of gradsync over it
    MPICH: ("mpi4py", "mpich", "numpy"),
}
#: For tests of gradsync only: no contender.
PACKAGES_FOR_TESTS = {"intelmpi": ("mpi4py", "impi-rt", "numpy", "msgpack", "ml_dtypes")}
# Bound to cores, Open MPI was no faster on idle cores, and slower beside busy ones; MPICH binds to none by default.
BIND_TO = "none"
# Two ranks on two cores: what gradsync's launcher and torchrun set as well.
THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def install(wanted: Sequence[str] = tuple(PACKAGES)) -> None:
    """Makes those of the wanted environments that are missing.

    Raises:
        subprocess.CalledProcessError: pip failed; it has told why.
    """
    for system in wanted:
        packages = {**PACKAGES, **PACKAGES_FOR_TESTS}[system]
        wanted_text = "\n".join(packages)
        if is_installed(system) and _stamp(system).read_text() == wanted_text:
            continue
        folder = ENVIRONMENTS / system
        print(f"installing {' '.join(packages)} into {os.path.relpath(folder)} (once) ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([_program(system, "python"), "-m", "pip", "install", "--quiet", *packages], check=True)
        _stamp(system).write_text(wanted_text)


def is_installed(system: str) -> bool:
    """Returns whether ranks of the system can be started. gradsync's run in the controller's environment."""
    return system == GRADSYNC or _stamp(system).exists()


def started(system: str, folder: str) -> Crew:
    """Starts two ranks of a system, by one process for both or one for each.

    Args:
        system: one of SYSTEMS.
        folder: private to this run, with a path short enough for a socket in it.

    Raises:
        CrewFailed: they did not start.
    """

    def starts(address: str) -> list[Start]:
        return [replace(start, variables={**THREADS, **start.variables}) for start in _STARTS[system](address)]

    return Crew(system, folder, starts, RANKS, BENCHMARKS)


def _start_gradsync(address: str) -> list[Start]:
    run = [sys.executable, "-m", "gradsync", "run", "-n", str(RANKS)]
    return [Start([*run, "-m", "peers.rank", GRADSYNC, address])]


def _start_torch(address: str) -> list[Start]:
    # Without it, gloo looks for the interface of the host's name.
    common = {"GLOO_SOCKET_IFNAME": "lo", "INIT_METHOD": f"file://{address}.init"}
    return [Start(_rank_command(TORCH, address), {"RANK": str(rank), **common}) for rank in range(RANKS)]


def _start_openmpi(address: str) -> list[Start]:
    run = [_program(OPENMPI, "mpirun"), "--bind-to", BIND_TO, "-n", str(RANKS)]
    # Open MPI refuses to run as root, the usual user of a container.
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return [Start([*run, *_rank_command(OPENMPI, address)], allowed)]


def _start_mpich(address: str) -> list[Start]:
    run = [_program(MPICH, "mpiexec"), "-bind-to", BIND_TO, "-n", str(RANKS)]
    return [Start([*run, *_rank_command(MPICH, address)])]


_STARTS: dict[str, Callable[[str], list[Start]]] = {
    GRADSYNC: _start_gradsync,
    TORCH: _start_torch,
    OPENMPI: _start_openmpi,
    MPICH: _start_mpich,
}


def _rank_command(system: str, address: str) -> list[str]:
    # -E: variables such as PYTHONPATH are meant for the controller's environment.
    return [_program(system, "python"), "-E", "-m", "peers.rank", system, address]


def _program(system: str, name: str) -> str:
    return str(ENVIRONMENTS / system / "bin" / name)


def _stamp(system: str) -> Path:
    """Returns the file that says that an environment is complete."""
    return ENVIRONMENTS / system / "installed"
