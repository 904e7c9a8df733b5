"""Which launcher started this process, and which place it gave it: the variables of torchrun, MPI and Slurm."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gradsync.errors import InvalidArgument


class Place(NamedTuple):
    """A process among the ranks of a run, and who said so."""

    source: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


@dataclass(frozen=True)
class LauncherVariables:
    """The variables in which one launcher tells a process who it is."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


# The launcher closest to the process comes first: `mpiexec` inside a Slurm job starts its daemons through
# `srun`, so that its ranks also inherit Slurm variables, which describe those daemons.
_FOREIGN_LAUNCHERS = (
    LauncherVariables("RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    LauncherVariables(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    LauncherVariables("PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def _read_place(environ: Mapping[str, str], source: LauncherVariables) -> tuple[int, int, int, int]:
    """Reads (rank, world size, local rank, local world size) from one launcher's variables."""
    rank, world_size = _read_pair(environ, source.rank, source.world_size)
    if value_of(environ, source.local_rank) is None:
        return rank, world_size, rank, world_size
    if value_of(environ, source.local_world_size) is None:
        return rank, world_size, _read_below(environ, source.local_rank, world_size), world_size
    local_rank, local_world_size = _read_pair(environ, source.local_rank, source.local_world_size)
    if local_world_size > world_size:
        raise InvalidArgument(
            f"{source.local_world_size} needs to be at most {source.world_size}={world_size}, got {local_world_size}"
        )
    return rank, world_size, local_rank, local_world_size


def _in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Tells whether `srun` started this process: a plain command in a batch script has SLURM_PROCID=0 too."""
    return value_of(environ, "SLURM_STEP_ID") is not None or value_of(environ, "SLURM_STEPID") is not None


def _read_slurm_place(environ: Mapping[str, str]) -> tuple[int, int, int, int]:
    """Reads (rank, world size, local rank, local world size) of an `srun` step."""
    # SLURM_NTASKS may still describe the whole allocation where the step is smaller.
    tasks = "SLURM_NTASKS" if value_of(environ, "SLURM_STEP_NUM_TASKS") is None else "SLURM_STEP_NUM_TASKS"
    rank, world_size = _read_pair(environ, "SLURM_PROCID", tasks)
    if value_of(environ, "SLURM_LOCALID") is None:
        return rank, world_size, rank, world_size
    local_world_size = _slurm_tasks_here(environ) or world_size
    return rank, world_size, _read_below(environ, "SLURM_LOCALID", local_world_size), local_world_size


def _slurm_tasks_here(environ: Mapping[str, str]) -> int | None:
    """Gives this node's entry of SLURM_STEP_TASKS_PER_NODE, which reads like "4(x2),1", or None."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    text = value_of(environ, name)
    if text is None:
        return None
    if not re.fullmatch(r"[1-9]\d{0,6}(\(x[1-9]\d{0,6}\))?(,[1-9]\d{0,6}(\(x[1-9]\d{0,6}\))?)*", text):
        raise InvalidArgument(f"{name} needs to read like 4(x2),1, got {text!r}")
    node = _read_integer(environ, "SLURM_NODEID") if value_of(environ, "SLURM_NODEID") else 0
    for entry in text.split(","):
        tasks, _, repeat = entry.rstrip(")").partition("(x")
        node -= int(repeat or 1)
        if node < 0:
            return int(tasks)
    raise InvalidArgument(f"SLURM_NODEID={environ['SLURM_NODEID']} has no entry in {name}={text!r}")


def _read_pair(environ: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    """Reads a rank and the size that bounds it."""
    for name, other in ((rank_name, size_name), (size_name, rank_name)):
        if value_of(environ, name) is None:
            raise InvalidArgument(f"{other}={environ[other]!r} is set, but {name} is not; set both or neither")
    size = _read_integer(environ, size_name)
    if size < 1:
        raise InvalidArgument(f"{size_name} needs to be at least 1, got {size}")
    rank = _read_integer(environ, rank_name)
    if not 0 <= rank < size:
        raise InvalidArgument(f"{rank_name} needs to be 0 to {size_name} - 1 = {size - 1}, got {rank}")
    return rank, size


def _read_below(environ: Mapping[str, str], name: str, limit: int) -> int:
    """Reads an integer of 0 .. limit - 1."""
    value = _read_integer(environ, name)
    if not 0 <= value < limit:
        raise InvalidArgument(f"{name} needs to be 0 to {limit - 1}, got {value}")
    return value


def _read_integer(environ: Mapping[str, str], name: str) -> int:
    text = environ[name].strip()
    if not re.fullmatch(r"-?[0-9]{1,9}", text):
        raise InvalidArgument(f"{name} needs to be an integer, got {text!r}")
    return int(text)


def value_of(environ: Mapping[str, str], name: str) -> str | None:
    """Gives a variable's text; an empty one counts as not set."""
    return environ.get(name, "").strip() or None


def find_place(environ: Mapping[str, str], ours: LauncherVariables) -> Place | None:
    """Reads the place from the first launcher that left its variables: `ours`, then the foreign ones, then Slurm.

    Raises:
        InvalidArgument: a variable is malformed, out of range, or lacks its counterpart; the text names it.
    """
    for launcher in (ours, *_FOREIGN_LAUNCHERS):
        if value_of(environ, launcher.rank) is not None or value_of(environ, launcher.world_size) is not None:
            return Place(launcher.name, *_read_place(environ, launcher))
    if value_of(environ, "SLURM_PROCID") is not None and _in_slurm_step(environ):
        return Place("Slurm", *_read_slurm_place(environ))
    return None
