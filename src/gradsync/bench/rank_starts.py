"""The processes to start for ranks of a measurement: under gradsync's launcher, or under mpiexec."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gradsync.bench.crew import Start
from gradsync.environment import OF_A_RUN
from gradsync.launchers import TORCHRUN, variables_of_mpi
from gradsync.machine import blas_thread_variables

# What torchrun, and gradsync's launcher likewise, set beside a rank's place.
_BESIDE_TORCHRUN = {"GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"}
_PREFIXES = ("TORCHELASTIC_", "SLURM_")

# Open MPI refuses to run as root, which is what one is in a container, and more ranks than cores.
_OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


def without_launcher(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the variables less those by which a launcher tells a process its place.

    A shell that a launcher has started hands them on, and ranks would take themselves for those of that launcher.
    """
    inherited = {*OF_A_RUN, *TORCHRUN.set_in(environ), *variables_of_mpi(environ), *_BESIDE_TORCHRUN}
    return {name: value for name, value in environ.items() if name not in inherited and not name.startswith(_PREFIXES)}


def find_mpiexec(environ: Mapping[str, str] = os.environ) -> str | None:
    """Returns mpiexec's path: the one beside this Python, which a wheel of MPI has brought, or that on the PATH."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("mpiexec", path=environ.get("PATH"))


def under_gradsync(ranks: int, arguments: Sequence[str]) -> list[Start]:
    """Returns gradsync's launcher of so many ranks, each `python -m` with these arguments."""
    return [Start([sys.executable, "-m", "gradsync", "run", "-n", str(ranks), "--no-prefix", "-m", *arguments])]


def under_mpiexec(mpiexec: str, ranks: int, arguments: Sequence[str]) -> list[Start]:
    """Returns mpiexec of so many ranks, likewise."""
    variables = blas_thread_variables(ranks) | _OPEN_MPI
    return [Start([mpiexec, "-n", str(ranks), sys.executable, "-m", *arguments], variables)]
