"""Reads the environment variables of launchers: torchrun, MPI's mpiexec, PMI and Slurm.

The first launcher with variables gives this process its rank. If it gives no address for the rendezvous, a Slurm step
provides a host and a port, and ranks of one machine find a common name for their run here. Errors name the variable.
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
        rank, world_size: its rank, and the number of ranks.
        local_rank, local_world_size: its number among the ranks of its machine, and their number; None if unknown.
    """

    source: str
    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None


class LauncherVariables(NamedTuple):
    """The variables by which one launcher gives a process its rank.

    Attributes:
        name: the launcher's name in messages.
        rank, world_size, local_rank, local_world_size: names of the variables for a Place.
        companions: other variables that the launcher sets, to be removed with them.
    """

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    companions: tuple[str, ...] = ()

    def set_in(self, environ: Mapping[str, str]) -> list[str]:
        """Returns the names of the variables that are set."""
        names = (self.rank, self.world_size, self.local_rank, self.local_world_size, *self.companions)
        return [name for name in names if value_of(environ, name) is not None]


TORCHRUN = LauncherVariables(
    "RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", ("MASTER_ADDR", "MASTER_PORT")
)
# PMI_RANK is listed twice: Cray's launcher has other names for the local rank than MPICH's and Intel's.
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
#: The values of `RankEnvironment.source` for ranks of an MPI job; "MPI" if the rank is known from MPI itself.
SOURCES_WITH_MPI = (*dict.fromkeys(launcher.name for launcher in MPI_LAUNCHERS), SLURM, "MPI")
_PREFIXES_OF_MPI = ("OMPI_COMM_WORLD_", "PMIX_", "PMI_", "MPI_LOCAL", "HYDI_")
_HINTS_OF_MPI = ("OMPI_", "PMI", "MPI_LOCAL", "HYDI_", "MV2_COMM_WORLD_")
# Slurm's variables for a single task. A container may have got only the task's number from its step.
_SLURM_ALONE = (("SLURM_NTASKS", "1"), ("SLURM_NPROCS", "1"), ("SLURM_STEP_NUM_TASKS", "1"), ("SLURM_PROCID", "0"))

# Slurm numbers the steps that no `srun` made from here on: batch scripts, shells of salloc, and others.
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0
_TASKS_OF_NODES = r"[1-9]\d{0,6}(\(x[1-9]\d{0,6}\))?(,[1-9]\d{0,6}(\(x[1-9]\d{0,6}\))?)*"
# Below the ports that Linux uses for outgoing connections, 32768 and up.
_FIRST_PORT = 15_000
_PORTS = 15_000


# -- This process's rank ----------------------------------------------------------------------------------------------


def find_place(environ: Mapping[str, str], ours: LauncherVariables) -> Place | None:
    """Returns the place from the first launcher with variables: `ours`, torchrun, MPI's, then Slurm.

    If that launcher gives no local rank, it is taken from the next launcher that does.

    Raises:
        InvalidArgument: a variable is malformed, out of range, or lacks its counterpart, or two launchers name
            different places; the text names the variables.
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
    return _complete(environ, same)


def variables_of_mpi(environ: Mapping[str, str]) -> set[str]:
    """Returns the names of the variables that mpiexec sets for a rank.

    If mpiexec has started our launcher, the launcher removes them for its own ranks: otherwise each would use the
    launcher's own MPI rank.
    """
    return {name for name in environ if name.startswith(_PREFIXES_OF_MPI)}


def find_mpiexec(environ: Mapping[str, str] = os.environ) -> str | None:
    """Returns mpiexec's path: next to this Python, where wheels of MPI install it, or on the PATH."""
    import shutil  # imported here, because it takes a millisecond of each rank's start

    beside = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    return beside if os.access(beside, os.X_OK) else shutil.which("mpiexec", path=environ.get("PATH"))


def hints_of_launcher(environ: Mapping[str, str]) -> list[str]:
    """Returns the names of variables that hint at a launcher, for a process without a place.

    A process that should be one of several ranks must not run as a world of one: N such processes would overwrite one
    checkpoint.
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


def _complete(environ: Mapping[str, str], same: Sequence[Place]) -> Place:
    """Returns the first place; if it has no local rank, with the local rank and size of the first other that has."""
    first = same[0]
    if first.local_rank is not None:
        return first
    for place in same[1:]:
        if place.local_rank is not None and place.local_world_size is not None:
            return place._replace(source=first.source)
    try:
        slurm = None if value_of(environ, "SLURM_PROCID") is None else _slurm_place(environ)
    except InvalidArgument:  # Slurm's variables may belong to the other launcher's daemons
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
    """Returns the place in a step of `srun`; None for a plain command in a batch script, which has SLURM_PROCID=0."""
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
    """Returns this node's entry of SLURM_STEP_TASKS_PER_NODE, such as "4(x2),1"; None if it is not set."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    text = value_of(environ, name)
    if text is None:
        return None
    if not re.fullmatch(_TASKS_OF_NODES, text):
        raise InvalidArgument(f"{name} needs the form 4(x2),1, got {text!r}")
    node = _read_integer(environ, "SLURM_NODEID") if value_of(environ, "SLURM_NODEID") else 0
    for entry in text.split(","):
        tasks, _, repeat = entry.rstrip(")").partition("(x")
        node -= int(repeat or 1)
        if node < 0:
            return int(tasks)
    raise InvalidArgument(f"SLURM_NODEID={environ['SLURM_NODEID']} has no entry in {name}={text!r}")


def first_host(environ: Mapping[str, str]) -> str | None:
    """Returns the step's first host, on which Slurm starts rank 0 by default.

    Reads lists such as "rack[1-2]node[03-04,7],login" as `scontrol show hostnames` would.
    """
    hosts = value_of(environ, "SLURM_STEP_NODELIST") or value_of(environ, "SLURM_JOB_NODELIST") or ""
    first = re.match(r"(?:[^,\[\]]|\[[^\[\]]*\])+", hosts)
    return None if first is None else re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


def step_port(environ: Mapping[str, str]) -> int:
    """Returns a port, the same for all tasks of a step, and most likely another one for other steps."""
    import zlib  # imported here: only steps on several machines need it

    return _FIRST_PORT + zlib.crc32(_step_name(environ).encode()) % _PORTS


def _step_name(environ: Mapping[str, str]) -> str:
    """Returns a name, unique among the steps on its hosts; a requeued job gets another name."""
    job = value_of(environ, "SLURM_JOB_ID") or value_of(environ, "SLURM_JOBID") or ""
    again = value_of(environ, "SLURM_RESTART_COUNT") or "0"
    return f"slurm-{job}.{_step_of(environ)}.{again}"


def _step_of(environ: Mapping[str, str]) -> str | None:
    return value_of(environ, "SLURM_STEP_ID") or value_of(environ, "SLURM_STEPID")


# -- A name for a run on one machine ----------------------------------------------------------------------------------


def name_run(environ: Mapping[str, str], source: str) -> str | None:
    """Returns a name for this run: the same for all its ranks on this machine, and different for other runs.

    A Slurm step has a number. MPI's launchers set no variable that is common to all ranks. But all ranks of a machine
    descend from one process, the launcher or its daemon, so its pid and start time are the name.

    Args:
        environ: the variables.
        source: the launcher's name, as `Place.source`.

    Returns:
        The name, valid in a file name; None if the ranks were started by hand, or each in its own container.
    """
    if source == SLURM:
        return "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in _step_name(environ))
    names = [name for launcher in MPI_LAUNCHERS if launcher.name == source for name in launcher.set_in(environ)]
    if not names:
        return None
    found = _launcher_process({f"{name}={environ[name]}".encode() for name in names})
    return None if found is None else f"{source.replace(' ', '')}-{found[0]}-{found[1]}"


def _launcher_process(own: set[bytes]) -> tuple[int, str] | None:
    """Returns pid and start time of the closest ancestor that is not part of a rank, as a shell in between may be.

    Args:
        own: variables of this rank, which all processes of a rank inherit.
    """
    process = read_stat(os.getpid())
    while process is not None and process.parent > 0:
        pid = process.parent
        process = read_stat(pid)
        if not own <= _variables_of(pid):
            return pid, "0" if process is None else process.start_time
    return None


def _variables_of(pid: int) -> set[bytes]:
    """Returns the variables that a process was started with; empty if it belongs to another user."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return set(file.read().split(b"\0"))
    except OSError:
        return set()


# -- One variable at a time -------------------------------------------------------------------------------------------


def value_of(environ: Mapping[str, str], name: str) -> str | None:
    """Returns a variable's text; an empty one counts as not set."""
    return environ.get(name, "").strip() or None


def read_port(environ: Mapping[str, str], name: str) -> int | None:
    """Returns a port, or None if the variable is not set.

    Raises:
        InvalidArgument: the variable is not a port number.
    """
    text = value_of(environ, name)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 1 <= int(text) <= LARGEST_PORT:
        raise InvalidArgument(f"{name} needs to be a port of 1 to {LARGEST_PORT}, got {text!r}")
    return int(text)


def _read_integer(environ: Mapping[str, str], name: str) -> int:
    text = environ[name].strip()
    if not re.fullmatch(r"-?[0-9]{1,9}", text):
        raise InvalidArgument(f"{name} needs to be an integer, got {text!r}")
    return int(text)


def _read_below(environ: Mapping[str, str], name: str, limit: int, limit_text: str = "") -> int:
    """Returns an integer of 0 .. limit - 1; `limit_text` is the limit's origin, for the error."""
    value = _read_integer(environ, name)
    if not 0 <= value < limit:
        raise InvalidArgument(f"{name} needs to be 0 to {limit_text}{limit - 1}, got {value}")
    return value


def _read_pair(environ: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    """Returns a rank and its world size."""
    for name, other in ((rank_name, size_name), (size_name, rank_name)):
        if value_of(environ, name) is None:
            raise InvalidArgument(f"{other}={environ[other]!r} is set, but {name} is not; set both or neither")
    size = _read_integer(environ, size_name)
    if size < 1:
        raise InvalidArgument(f"{size_name} needs to be at least 1, got {size}")
    return _read_below(environ, rank_name, size, f"{size_name} - 1 = "), size
