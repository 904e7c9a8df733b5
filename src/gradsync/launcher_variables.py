"""Reads the environment variables of launchers: torchrun, MPI's mpiexec, PMI and Slurm.

This process takes its rank from the first launcher that has set its variables. If the launcher gives no address for the
rendezvous, this module takes a host and a port from the Slurm step, or computes a name for the run that is the same for
all ranks on one machine. Errors name the variable.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gradsync.arguments import LARGEST_PORT
from gradsync.errors import InvalidArgument
from gradsync.machine import read_stat

SLURM = "Slurm"


class Place(NamedTuple):
    """A process's rank, and the launcher that gave it.

    Attributes:
        source: the launcher's name.
        rank, world_size: the rank of the process, and the number of ranks.
        local_rank, local_world_size: the rank of the process on its machine, and the number of ranks on this machine;
            None if unknown.
    """

    source: str
    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None


class LauncherVariables(NamedTuple):
    """The environment variables by which one launcher gives a process its rank.

    Attributes:
        name: the launcher's name in messages.
        rank, world_size, local_rank, local_world_size: the names of the environment variables that hold these values.
        companions: the names of the launcher's other variables. A user who unsets the variables of the rank must unset
            the companions too.
    """

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    companions: tuple[str, ...] = ()

    def set_in(self, environ: Mapping[str, str]) -> list[str]:
        """Returns the names of this launcher's variables that are set."""
        names = (self.rank, self.world_size, self.local_rank, self.local_world_size, *self.companions)
        return [name for name in names if value_of(environ, name) is not None]


TORCHRUN = LauncherVariables(
    "RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", ("MASTER_ADDR", "MASTER_PORT")
)
# PMI_RANK is listed twice, because Cray's launcher names the variable of the local rank differently from MPICH's and
# Intel's.
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
#: The values of `RankEnvironment.source` for ranks of an MPI job. "MPI" means that a query to MPI gave the rank.
SOURCES_WITH_MPI = (*dict.fromkeys(launcher.name for launcher in MPI_LAUNCHERS), SLURM, "MPI")
_PREFIXES_OF_MPI = ("OMPI_COMM_WORLD_", "PMIX_", "PMI_", "MPI_LOCAL", "HYDI_")
_HINTS_OF_MPI = ("OMPI_", "PMI", "MPI_LOCAL", "HYDI_", "MV2_COMM_WORLD_")
# Slurm's variables, with their values for a single task. In a container, only SLURM_PROCID may be set.
_SLURM_ALONE = (("SLURM_NTASKS", "1"), ("SLURM_NPROCS", "1"), ("SLURM_STEP_NUM_TASKS", "1"), ("SLURM_PROCID", "0"))

# Steps that were not made by `srun`, such as batch scripts and shells of salloc, have this number or a larger one.
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0
_TASKS_OF_NODES = r"[1-9]\d{0,6}(\(x[1-9]\d{0,6}\))?(,[1-9]\d{0,6}(\(x[1-9]\d{0,6}\))?)*"
# These ports are below those that Linux uses for outgoing connections, 32768 and up.
_FIRST_PORT = 15_000
_PORTS = 15_000


# -- This process's rank ----------------------------------------------------------------------------------------------


def find_place(environ: Mapping[str, str], ours: LauncherVariables) -> Place | None:
    """Returns this process's rank from the first launcher that has set its variables: `ours`, torchrun, MPI's, Slurm.

    If the launcher that gives the rank gives no local rank, the local rank comes from the next launcher that gives one.

    Raises:
        InvalidArgument: a variable is malformed or out of range; only one variable of a rank and its world size is set;
            or two launchers give this process different ranks. The error message names the variables.
    """
    launchers = [
        launcher
        for launcher in (ours, TORCHRUN, *MPI_LAUNCHERS)
        if value_of(environ, launcher.rank) is not None or value_of(environ, launcher.world_size) is not None
    ]
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
    return _with_local_rank(environ, same)


def variables_of_mpi(environ: Mapping[str, str]) -> set[str]:
    """Returns the names of the variables that mpiexec sets for a rank.

    If mpiexec has started gradsync's launcher, the launcher removes these variables from the environment of its own
    ranks. With these variables, each rank would use the MPI rank of the launcher as its own rank.
    """
    return {name for name in environ if name.startswith(_PREFIXES_OF_MPI)}


def find_mpiexec(environ: Mapping[str, str] = os.environ) -> str | None:
    """Returns the path of the mpiexec next to this Python, where MPI's wheels install it; otherwise of that in PATH."""
    import shutil  # imported here, because the import takes a millisecond

    beside = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    return beside if os.access(beside, os.X_OK) else shutil.which("mpiexec", path=environ.get("PATH"))


def hints_of_launcher(environ: Mapping[str, str]) -> list[str]:
    """Returns the names of variables which suggest that a launcher has started a process without a known rank.

    A process that should be one of several ranks must not run as a world of one rank, because N such processes would
    all write the same checkpoint.
    """
    found = TORCHRUN.set_in(environ) + [name for name in sorted(environ) if name.startswith(_HINTS_OF_MPI)]
    return found + [name for name, alone in _SLURM_ALONE if value_of(environ, name) not in (None, alone)]


def _read_place(environ: Mapping[str, str], launcher: LauncherVariables) -> Place:
    rank, world_size = _read_pair(environ, launcher.rank, launcher.world_size)
    if value_of(environ, launcher.local_rank) is None:
        return Place(launcher.name, rank, world_size, None, None)
    if value_of(environ, launcher.local_world_size) is None:
        return Place(launcher.name, rank, world_size, _read_below(environ, launcher.local_rank, world_size), None)
    local_rank, local_world_size = _read_pair(environ, launcher.local_rank, launcher.local_world_size)
    if local_world_size > world_size:
        raise InvalidArgument(
            f"{launcher.local_world_size} needs to be at most {launcher.world_size}={world_size}, "
            f"got {local_world_size}"
        )
    return Place(launcher.name, rank, world_size, local_rank, local_world_size)


def _with_local_rank(environ: Mapping[str, str], same: Sequence[Place]) -> Place:
    """Returns the first place, if necessary with the local rank from the next place that has one, or from Slurm."""
    first = same[0]
    if first.local_rank is not None:
        return first
    for place in same[1:]:
        if place.local_rank is not None and place.local_world_size is not None:
            return place._replace(source=first.source)
    try:
        slurm = None if value_of(environ, "SLURM_PROCID") is None else _slurm_place(environ)
    except InvalidArgument:  # Slurm may have set its variables for the daemons of the other launcher
        slurm = None
    if slurm is not None and (slurm.rank, slurm.world_size) == (first.rank, first.world_size):
        return slurm._replace(source=first.source)
    return first


def _started_agents(environ: Mapping[str, str], launcher: LauncherVariables, place: Place) -> bool:
    """Whether a launcher started torchrun's agents, one on each machine, rather than the ranks themselves."""
    if launcher is TORCHRUN or value_of(environ, "TORCHELASTIC_RUN_ID") is None:
        return False
    return value_of(environ, "GROUP_WORLD_SIZE") is not None and (
        _read_integer(environ, "GROUP_WORLD_SIZE") == place.world_size
    )


def _contradiction(environ: Mapping[str, str], first: LauncherVariables, second: LauncherVariables) -> InvalidArgument:
    values, unset = [], []
    for launcher in (first, second):
        values.append(" ".join(f"{name}={environ[name].strip()}" for name in (launcher.rank, launcher.world_size)))
        unset.append(" ".join(launcher.set_in(environ)))
    return InvalidArgument(
        f"{values[0]} and {values[1]} name different ranks for this process: one launcher was started with another's "
        f"variables set. Before starting the ranks, unset the variables of the other run: either\n"
        f"  unset {unset[0]}\nor\n  unset {unset[1]}"
    )


# -- Slurm ------------------------------------------------------------------------------------------------------------


def _slurm_place(environ: Mapping[str, str]) -> Place | None:
    """Returns the rank of a process that srun has started; None in a batch script, although SLURM_PROCID is 0 there."""
    step = _step_of(environ)
    is_special = step is not None and step.isdecimal() and int(step) >= _FIRST_SPECIAL_STEP
    if value_of(environ, "SLURM_PROCID") is None or step is None or is_special:
        return None
    # SLURM_NTASKS may describe the whole allocation, even if the step is smaller.
    tasks = "SLURM_NTASKS" if value_of(environ, "SLURM_STEP_NUM_TASKS") is None else "SLURM_STEP_NUM_TASKS"
    rank, world_size = _read_pair(environ, "SLURM_PROCID", tasks)
    if value_of(environ, "SLURM_LOCALID") is None:
        return Place(SLURM, rank, world_size, None, None)
    local_world_size = _tasks_here(environ)
    local_rank = _read_below(environ, "SLURM_LOCALID", local_world_size or world_size)
    return Place(SLURM, rank, world_size, local_rank, local_world_size)


def _tasks_here(environ: Mapping[str, str]) -> int | None:
    """Returns the number of tasks on this node; None if SLURM_STEP_TASKS_PER_NODE, such as "4(x2),1", is not set."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    text = value_of(environ, name)
    if text is None:
        return None
    if not re.fullmatch(_TASKS_OF_NODES, text):
        raise InvalidArgument(f"{name} needs to be a list such as 4(x2),1, got {text!r}")
    node = _read_integer(environ, "SLURM_NODEID") if value_of(environ, "SLURM_NODEID") else 0
    for entry in text.split(","):
        tasks, _, repeat = entry.rstrip(")").partition("(x")
        node -= int(repeat or 1)
        if node < 0:
            return int(tasks)
    raise InvalidArgument(f"SLURM_NODEID={environ['SLURM_NODEID']} has no entry in {name}={text!r}")


def first_host(environ: Mapping[str, str]) -> str | None:
    """Returns the first host of the Slurm step, on which Slurm starts rank 0 by default.

    The function expands a list such as "rack[1-2]node[03-04,7],login" as `scontrol show hostnames` does.
    """
    hosts = value_of(environ, "SLURM_STEP_NODELIST") or value_of(environ, "SLURM_JOB_NODELIST") or ""
    first = re.match(r"(?:[^,\[\]]|\[[^\[\]]*\])+", hosts)
    return None if first is None else re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


def step_port(environ: Mapping[str, str]) -> int:
    """Returns a port that is the same for all tasks of a Slurm step, and most likely differs between steps."""
    import zlib  # imported here: only steps on several machines need it

    return _FIRST_PORT + zlib.crc32(_step_name(environ).encode()) % _PORTS


def _step_name(environ: Mapping[str, str]) -> str:
    """Returns a name that is unique among the Slurm steps on its hosts. A requeued job gets a new name."""
    job = value_of(environ, "SLURM_JOB_ID") or value_of(environ, "SLURM_JOBID") or ""
    again = value_of(environ, "SLURM_RESTART_COUNT") or "0"
    return f"slurm-{job}.{_step_of(environ)}.{again}"


def _step_of(environ: Mapping[str, str]) -> str | None:
    return value_of(environ, "SLURM_STEP_ID") or value_of(environ, "SLURM_STEPID")


# -- A name for a run on one machine ----------------------------------------------------------------------------------


def name_run(environ: Mapping[str, str], source: str) -> str | None:
    """Returns a name for this run: the same for all its ranks on this machine, and different for other runs.

    For a Slurm step, the name contains the number of the step. MPI's launchers set no variable that is common to all
    ranks. But all ranks on a machine descend from one process, MPI's launcher or its daemon. So for MPI, the name
    contains the pid and the start time of the launcher or daemon.

    Args:
        environ: the environment variables.
        source: the launcher's name, see `Place.source`.

    Returns:
        The name, which can be part of a file name. None if the user started the ranks by hand, or if each rank runs in
        its own container.
    """
    if source == SLURM:
        return "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in _step_name(environ))
    names = [name for launcher in MPI_LAUNCHERS if launcher.name == source for name in launcher.set_in(environ)]
    if not names:
        return None
    found = _launcher_process({f"{name}={environ[name]}".encode() for name in names})
    return None if found is None else f"{source.replace(' ', '')}-{found[0]}-{found[1]}"


def _launcher_process(own: set[bytes]) -> tuple[int, str] | None:
    """Returns pid and start time of the closest ancestor that does not belong to this rank.

    A shell between the launcher and this process belongs to the rank.

    Args:
        own: variables of this rank, as NAME=value. All processes that belong to the rank inherit them.
    """
    process = read_stat(os.getpid())
    while process is not None and process.parent > 0:
        pid = process.parent
        process = read_stat(pid)
        if not own <= _variables_of(pid):
            return pid, "0" if process is None else process.start_time
    return None


def _variables_of(pid: int) -> set[bytes]:
    """Returns the variables with which a process was started, as NAME=value; empty if another user owns the process."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return set(file.read().split(b"\0"))
    except OSError:
        return set()


# -- One variable at a time -------------------------------------------------------------------------------------------


def value_of(environ: Mapping[str, str], name: str) -> str | None:
    """Returns the text of a variable; None if it is not set or is empty."""
    return environ.get(name, "").strip() or None


def read_port(environ: Mapping[str, str], name: str) -> int | None:
    """Returns the port in a variable, or None if the variable is not set.

    Raises:
        InvalidArgument: the variable is not a port number.
    """
    text = value_of(environ, name)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 1 <= int(text) <= LARGEST_PORT:
        raise InvalidArgument(f"{name} needs to be a port from 1 to {LARGEST_PORT}, got {text!r}")
    return int(text)


def _read_integer(environ: Mapping[str, str], name: str) -> int:
    text = environ[name].strip()
    if not re.fullmatch(r"-?[0-9]{1,9}", text):
        raise InvalidArgument(f"{name} needs to be an integer, got {text!r}")
    return int(text)


def _read_below(environ: Mapping[str, str], name: str, limit: int, limit_text: str = "") -> int:
    """Returns an integer from 0 to limit - 1; `limit_text` says in the error where the limit comes from."""
    value = _read_integer(environ, name)
    if not 0 <= value < limit:
        raise InvalidArgument(f"{name} needs to be from 0 to {limit - 1}{limit_text}, got {value}")
    return value


def _read_pair(environ: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    """Returns a rank and its world size, from two variables."""
    for name, other in ((rank_name, size_name), (size_name, rank_name)):
        if value_of(environ, name) is None:
            raise InvalidArgument(f"{other}={environ[other]!r} is set, but {name} is not; set both or neither")
    size = _read_integer(environ, size_name)
    if size < 1:
        raise InvalidArgument(f"{size_name} needs to be at least 1, got {size}")
    return _read_below(environ, rank_name, size, f" ({size_name} - 1)"), size
