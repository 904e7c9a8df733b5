"""Which launcher started this process, and which place it gave it: the variables of torchrun, MPI and Slurm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gradsync.errors import InvalidArgument
from gradsync.variable_values import read_below, read_integer, read_pair, value_of

SLURM = "Slurm"


class Place(NamedTuple):
    """A process among the ranks of a run, and who said so.

    Attributes:
        source: name of the launcher.
        rank, world_size: its number among all ranks, and theirs.
        local_rank, local_world_size: its number among the ranks of its machine, and theirs; None where nobody told.
    """

    source: str
    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None


class LauncherVariables(NamedTuple):
    """The variables in which one launcher tells a process who it is.

    Attributes:
        name: what to call the launcher.
        rank, world_size, local_rank, local_world_size: names of the variables that make a place.
        companions: what it sets beside them, to be removed with them.
    """

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    companions: tuple[str, ...] = ()

    def set_in(self, environ: Mapping[str, str]) -> list[str]:
        """Gives the names of those that are set."""
        names = (self.rank, self.world_size, self.local_rank, self.local_world_size, *self.companions)
        return [name for name in names if value_of(environ, name) is not None]


TORCHRUN = LauncherVariables(
    "RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", ("MASTER_ADDR", "MASTER_PORT")
)
# PMI_RANK comes twice: Cray's launcher has other names for the place on the machine than MPICH's and Intel's.
MPI_LAUNCHERS = (
    LauncherVariables(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE",),
    ),
    LauncherVariables("PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ("PMI_FD",)),
    LauncherVariables("PMI", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
)
#: Who may have started the ranks of an MPI job, as `RankEnvironment.source` says; "MPI" where only MPI knows.
SOURCES_WITH_MPI = (*dict.fromkeys(launcher.name for launcher in MPI_LAUNCHERS), SLURM, "MPI")
_PREFIXES_OF_MPI = ("OMPI_COMM_WORLD_", "PMIX_", "PMI_", "MPI_LOCAL", "HYDI_")


def find_place(environ: Mapping[str, str], ours: LauncherVariables) -> Place | None:
    """Reads the place from the first launcher that left its variables: `ours`, then the foreign ones, then Slurm.

    What the first one does not tell of the machine is taken from the next one that does.

    Raises:
        InvalidArgument: a variable is malformed, out of range, or lacks its counterpart, or two launchers name
            different places; the text names the variables.
    """
    launchers = [launcher for launcher in (ours, TORCHRUN, *MPI_LAUNCHERS) if _was_here(environ, launcher)]
    if not launchers:
        return _slurm_place(environ)
    places = [_read_place(environ, launcher) for launcher in launchers]
    first = places[0]
    same = [first]
    for launcher, place in zip(launchers[1:], places[1:], strict=True):
        if (place.rank, place.world_size) == (first.rank, first.world_size):
            same.append(place)
        elif not _started_agents(environ, launcher, place):
            raise _contradiction(environ, launchers[0], launcher)
    return _complete(environ, same)


def variables_of_mpi(environ: Mapping[str, str]) -> set[str]:
    """Gives the names of the variables by which mpiexec makes a process its rank.

    Our launcher, where mpiexec has started it, keeps them from its own ranks: each would take itself for the one
    rank of MPI that the launcher is.
    """
    return {name for name in environ if name.startswith(_PREFIXES_OF_MPI)}


def _was_here(environ: Mapping[str, str], launcher: LauncherVariables) -> bool:
    return value_of(environ, launcher.rank) is not None or value_of(environ, launcher.world_size) is not None


def _read_place(environ: Mapping[str, str], launcher: LauncherVariables) -> Place:
    """Reads one launcher's variables."""
    rank, world_size = read_pair(environ, launcher.rank, launcher.world_size)
    if value_of(environ, launcher.local_rank) is None:
        return Place(launcher.name, rank, world_size, None, None)
    if value_of(environ, launcher.local_world_size) is None:
        return Place(launcher.name, rank, world_size, read_below(environ, launcher.local_rank, world_size), None)
    local_rank, local_world_size = read_pair(environ, launcher.local_rank, launcher.local_world_size)
    if local_world_size > world_size:
        raise InvalidArgument(
            f"{launcher.local_world_size} needs to be at most {launcher.world_size}={world_size}, "
            f"got {local_world_size}"
        )
    return Place(launcher.name, rank, world_size, local_rank, local_world_size)


def _complete(environ: Mapping[str, str], same: Sequence[Place]) -> Place:
    """Gives the first place, with what is not told of the machine from the first of the others that tells it all."""
    first = same[0]
    if first.local_rank is not None:
        return first
    for place in same[1:]:
        if place.local_rank is not None and place.local_world_size is not None:
            return place._replace(source=first.source)
    slurm = _inherited_slurm_place(environ)
    if slurm is not None and (slurm.rank, slurm.world_size) == (first.rank, first.world_size):
        return slurm._replace(source=first.source)
    return first


def _slurm_place(environ: Mapping[str, str]) -> Place | None:
    from gradsync.slurm_variables import in_slurm_step, read_slurm_place  # here: start-up counts

    return Place(SLURM, *read_slurm_place(environ)) if in_slurm_step(environ) else None


def _inherited_slurm_place(environ: Mapping[str, str]) -> Place | None:
    """Gives Slurm's place where another launcher's counts: what Slurm says may be about that launcher's daemons."""
    try:
        return None if value_of(environ, "SLURM_PROCID") is None else _slurm_place(environ)
    except InvalidArgument:
        return None


def _started_agents(environ: Mapping[str, str], launcher: LauncherVariables, place: Place) -> bool:
    """Tells whether a launcher started torchrun's agents, one on each machine, rather than the ranks themselves."""
    if launcher is TORCHRUN or value_of(environ, "TORCHELASTIC_RUN_ID") is None:
        return False
    return value_of(environ, "GROUP_WORLD_SIZE") is not None and (
        read_integer(environ, "GROUP_WORLD_SIZE") == place.world_size
    )


def _contradiction(environ: Mapping[str, str], first: LauncherVariables, second: LauncherVariables) -> InvalidArgument:
    values, unset = [], []
    for launcher in (first, second):
        values.append(" ".join(f"{name}={environ[name].strip()}" for name in (launcher.rank, launcher.world_size)))
        unset.append(" ".join(launcher.set_in(environ)))
    return InvalidArgument(
        f"{values[0]} and {values[1]} name different places for this process: one launcher was started where another's "
        f"variables were set. Before starting the ranks, unset those that are not of this run: either\n"
        f"  unset {unset[0]}\nor\n  unset {unset[1]}"
    )
