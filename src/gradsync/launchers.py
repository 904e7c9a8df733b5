"""Who this process is: its rank, as the launcher says that has started it, and where its ranks meet.

| launcher | rank, world size | the same on this machine |
| --- | --- | --- |
| gradsync, torchrun, or by hand | `RANK`, `WORLD_SIZE` | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` |
| mpiexec of Open MPI | `OMPI_COMM_WORLD_RANK`, `_SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK`, `_LOCAL_SIZE` |
| mpiexec of MPICH or Intel MPI, Cray (PMI) | `PMI_RANK`, `PMI_SIZE` | `MPI_LOCALRANKID`, ... or `PMI_LOCAL_RANK`, ... |
| srun of Slurm | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` | `SLURM_LOCALID`, `SLURM_STEP_TASKS_PER_NODE` |

The first whose variables are set counts, and those that disagree with it are an error: a launcher has inherited
another's variables, and nobody can know which are right. But a launcher may be started by another, once on each
machine: torchrun's agents by srun or mpiexec, the daemons of mpiexec by srun, and gradsync's launcher by any.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from gradsync.arguments import LARGEST_PORT, is_loopback
from gradsync.environment import ADDRESS, BACKEND, OF_A_RUN, SECRET_FILE, log_warning, parse_integer, value_of
from gradsync.errors import InvalidArgument
from gradsync.machine import read_stat

GRADSYNC, SLURM = "gradsync", "Slurm"
FROM_MPI = "mpi4py"  # the ranks are those of an mpi4py communicator, see gs.from_mpi
#: The launchers whose ranks may use MPI, by `RankEnvironment.source`; "MPI" if MPI itself said the rank.
SOURCES_WITH_MPI = ("Open MPI", "PMI", SLURM, "MPI", FROM_MPI)
RUN_ID = "TORCHELASTIC_RUN_ID"  # torchrun names each run by it, and so does gradsync's launcher
RUN_ID_OF_GRADSYNC = "gradsync-"

#: What to do where each task of srun is alone in MPI_COMM_WORLD.
CONNECT_SRUN = (
    "srun did not connect MPI: `srun --mpi=pmi2` (MPICH, Intel MPI) or `--mpi=pmix` (Open MPI); `srun --mpi=list` "
    "shows what there is"
)

_OF_MPI = ("OMPI_COMM_WORLD_", "PMIX_", "PMI_", "MPI_LOCAL", "HYDI_")
_OF_TORCHRUN = {"GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"}
_HINTS = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PREFIXES_OF_HINTS = ("OMPI_", "PMI", "MPI_LOCAL", "HYDI_", "MV2_COMM_WORLD_")
# Variables that say nothing if they have this value: Slurm's of a single task, and those of launchers that gradsync
# does not know.
_ALONE = {
    **{"SLURM_NTASKS": "1", "SLURM_NPROCS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    **{"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1", "PADDLE_TRAINER_ID": "0", "PADDLE_TRAINERS_NUM": "1"},
    **{"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "1", "PALS_RANKID": "0", "FLUX_TASK_RANK": "0"},
}
# Steps of Slurm that srun has not made, such as batch scripts and the shells of salloc, have this number or more.
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0
# Below the ports that Linux gives to outgoing connections, by default 32768 and higher.
_FIRST_PORT = _PORTS = 15_000


class RankEnvironment(NamedTuple):
    """This process's rank, and where the ranks meet.

    Attributes:
        rank, world_size: the number of this process, from 0, and of all.
        local_rank, local_world_size: the same on this machine; equal to rank and world_size if no launcher says them.
        address: GRADSYNC_ADDRESS, where a server runs, or None.
        master_addr, master_port: MASTER_ADDR and MASTER_PORT. Where they are missing and srun has started ranks on
            several machines: the step's first host, and a port that is computed from the step's name.
        source: who said the rank: "gradsync", "RANK" (torchrun, or by hand), "Open MPI", "PMI", "Slurm", "MPI" (MPI
            itself) or "arguments" (of init_process_group(); also of a process without a launcher).
        run_name: the name of the run on this machine, if all ranks are here and no address is given: the same for all
            its ranks, and another for each other run. It can be part of a file's name.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str | None = None
    master_addr: str | None = None
    master_port: int | None = None
    source: str = ""
    run_name: str | None = None


#: The rank environment of a world of one rank.
ALONE = RankEnvironment(0, 1, 0, 1, source="arguments")


class WorldSettings(NamedTuple):
    """The arguments of init_process_group() with these names, completed from the environment; `place` is the rank.

    `mpi_comm` is the mpi4py communicator of these ranks, where gs.from_mpi() was given one; else they are those of
    MPI_COMM_WORLD, if they use MPI.
    """

    place: RankEnvironment
    address: str | None
    device: str | None
    timeout_seconds: float
    collective_timeout_seconds: float
    allow_shared_gpu: bool
    mpi_comm: Any = None


class _Place(NamedTuple):
    """A process's rank as one launcher gives it; None means unknown."""

    source: str
    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None


class _Launcher(NamedTuple):
    """The variables by which a launcher says a rank. Where several names are given, the first that is set counts."""

    name: str
    rank: str
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...]
    companions: tuple[str, ...]

    def names(self, environ: Mapping[str, str]) -> list[str]:
        """Returns the names of this launcher's variables that are set."""
        names = (self.rank, *self.world_size, *self.local_rank, *self.local_world_size, *self.companions)
        return _set(environ, names)

    def find(self, environ: Mapping[str, str]) -> _Place | None:
        """Returns the rank that this launcher says, or None.

        Raises:
            InvalidArgument: one of its variables is malformed or out of range, or lacks the other of its pair.
        """
        size_name = _first(environ, self.world_size)
        if value_of(environ, self.rank) is None and value_of(environ, size_name) is None:
            return None
        for known, missing in ((self.rank, size_name), (size_name, self.rank)):
            if value_of(environ, missing) is None:
                raise InvalidArgument(f"{known}={environ[known]!r} is set, but {missing} is not; set both or neither")
        world_size = _integer(environ, size_name, 1) or 1
        rank = _integer(environ, self.rank, 0, world_size - 1, f" ({size_name} - 1)") or 0
        local_rank, local_size = _first(environ, self.local_rank), _first(environ, self.local_world_size)
        if value_of(environ, local_rank) is None:
            return _Place(self.name, rank, world_size)
        size = (
            _tasks_here(environ)
            if self.name == SLURM
            else _integer(environ, local_size, 1, world_size, f" ({size_name})")
        )
        why = "" if size is None else f" ({local_size} - 1)"
        return _Place(
            self.name, rank, world_size, _integer(environ, local_rank, 0, (size or world_size) - 1, why), size
        )


_RANK = _Launcher(
    *("RANK", "RANK", ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    ("MASTER_ADDR", "MASTER_PORT", ADDRESS, SECRET_FILE, RUN_ID),
)
_OPEN_MPI = _Launcher(
    *("Open MPI", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",)),
    *(("OMPI_COMM_WORLD_LOCAL_RANK",), ("OMPI_COMM_WORLD_LOCAL_SIZE",), ("PMIX_NAMESPACE",)),
)
_PMI = _Launcher(
    *("PMI", "PMI_RANK", ("PMI_SIZE",), ("MPI_LOCALRANKID", "PMI_LOCAL_RANK")),
    *(("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"), ("PMI_FD",)),
)
_SLURM = _Launcher(  # SLURM_NTASKS may be of the whole allocation, where the step is smaller
    *(SLURM, "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_LOCALID",)),
    *(("SLURM_STEP_TASKS_PER_NODE",), ("SLURM_STEP_ID", "SLURM_STEPID")),
)


# -- This process's rank ----------------------------------------------------------------------------------------------


def read_environment(environ: Mapping[str, str] = os.environ) -> RankEnvironment | None:
    """Returns this process's rank, as its launcher says it (see the table above); None without a launcher.

    Raises:
        InvalidArgument: a variable is malformed or out of range, or two launchers disagree; the error names them.
    """
    place = _find_place(environ)
    return None if place is None else _complete(environ, place)


def is_launched() -> bool:
    """Whether a launcher has given this process a rank: gradsync's, torchrun, mpiexec, srun, or RANK set by hand.

    A script that also runs by itself can pass the backend `"auto" if gs.is_launched() else "local"`, and is not told
    that no launcher was found.

    Raises:
        InvalidArgument: a variable is malformed, or the variables of launchers contradict each other.
    """
    return _find_place(os.environ) is not None


def is_task_of_srun(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether srun has started this process as one of several tasks, and no other launcher after it."""
    with contextlib.suppress(InvalidArgument):
        place = _find_place(environ)
        return place is not None and place.source == SLURM and place.world_size > 1
    return False


def is_rank_of_gradsync(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether gradsync's launcher has started this process, or one that has started this one."""
    return environ.get(RUN_ID, "").startswith(RUN_ID_OF_GRADSYNC)


def environment_of_arguments(rank: int, world_size: int) -> RankEnvironment:
    """Returns the rank environment for a rank that the program has given; variables say where the ranks meet.

    Raises:
        InvalidArgument: a variable is malformed; the error names it.
    """
    return _complete(os.environ, _Place("arguments", rank, world_size))


def alone_without_launcher() -> RankEnvironment:
    """Returns the rank environment of a process without a launcher, and logs that it is a world of one rank.

    Raises:
        InvalidArgument: a variable suggests that a launcher has started this process; the error names it.
    """
    hints = _set(os.environ, (*(name for name in OF_A_RUN if name != BACKEND), *_HINTS))
    hints += [name for name in sorted(os.environ) if name.startswith(_PREFIXES_OF_HINTS)]
    hints += [name for name, alone in _ALONE.items() if value_of(os.environ, name) not in (None, alone)]
    if hints:
        what, lacking = hints[0], "RANK and WORLD_SIZE are not set"
        if what.startswith("SLURM_"):
            what, lacking = f"{what}={os.environ[what]}", "SLURM_STEP_ID, which srun sets for its tasks, is not"
        raise no_rank_is_known(f"{what} is set, which suggests a launcher, but {lacking}")
    log_warning(
        "gradsync: no launcher has started this process, so it is a world of one rank (for two: gradsync run -n 2 "
        "script.py)"
    )
    return ALONE


def no_rank_is_known(reason: str) -> InvalidArgument:
    """Returns the error for a process that should be one of several ranks, but does not know its rank."""
    return InvalidArgument(
        f"no rank is known: {reason}. Start the script with `gradsync run -n 2 script.py` or `mpiexec -n 2 python "
        'script.py`, pass rank= and world_size=, or, for one process, use GRADSYNC_BACKEND=local or backend="local"'
    )


def _find_place(environ: Mapping[str, str]) -> _Place | None:
    first, by = None, _RANK
    for launcher in (_RANK, _OPEN_MPI, _PMI):
        place = launcher.find(environ)
        if place is None:
            continue
        if first is None:
            first, by = place, launcher
        elif (place.rank, place.world_size) != (first.rank, first.world_size):
            # torchrun's agents, one on each machine, may be ranks of mpiexec.
            if value_of(environ, RUN_ID) is None or _integer(environ, "GROUP_WORLD_SIZE", 1) != place.world_size:
                raise _contradiction(environ, by, launcher)
        elif first.local_rank is None:
            first = place._replace(source=first.source)
    if first is None:
        return _slurm_place(environ)
    with contextlib.suppress(InvalidArgument):  # Slurm's may be of a process that has started the other launcher
        slurm = _slurm_place(environ)
        if slurm is not None and (slurm.rank, slurm.world_size) == (first.rank, first.world_size):
            first = slurm._replace(source=first.source) if first.local_rank is None else first
        elif slurm is not None and by is _RANK and slurm.world_size > first.world_size and RUN_ID not in environ:
            first = None  # each task of the step would be one of too few ranks
    if first is None:
        raise _contradiction(environ, by, _SLURM)
    return first._replace(source=GRADSYNC) if by is _RANK and is_rank_of_gradsync(environ) else first


def _contradiction(environ: Mapping[str, str], first: _Launcher, second: _Launcher) -> InvalidArgument:
    values, unset = [], []
    for launcher in (first, second):
        names = (launcher.rank, _first(environ, launcher.world_size))
        values.append(" ".join(f"{name}={environ[name].strip()}" for name in names))
        unset.append(" ".join(launcher.names(environ)))
    return InvalidArgument(
        f"{values[0]} and {values[1]} name different ranks for this process: one launcher has inherited the variables "
        f"of another launcher. Before you start the ranks, unset the variables of the wrong launcher: either\n"
        f"  unset {unset[0]}\nor\n  unset {unset[1]}"
    )


def _set(environ: Mapping[str, str], names: Iterable[str]) -> list[str]:
    return [name for name in names if value_of(environ, name) is not None]


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next(iter(_set(environ, names)), names[0])


def _integer(environ: Mapping[str, str], name: str, lowest: int, highest: int = 10**9, why: str = "") -> int | None:
    text = value_of(environ, name)
    return None if text is None else parse_integer(name, text, lowest, highest, why)


# -- Where the ranks meet ---------------------------------------------------------------------------------------------


def _complete(environ: Mapping[str, str], place: _Place) -> RankEnvironment:
    """Adds where the ranks meet to a process's rank."""
    address = ADDRESS.read(environ)
    master_addr, master_port, run_name = value_of(environ, "MASTER_ADDR"), read_master_port(environ), None
    if place.world_size > 1 and not address:
        is_here = place.local_world_size == place.world_size  # then MASTER_ADDR does not matter
        master_addr = master_addr if is_here else _read_host(environ)
        if is_here or (master_addr is not None and is_loopback(master_addr)):
            run_name = _name_run(environ, place.source, master_port)
        elif place.source == SLURM:
            master_addr, master_port = master_addr or _first_host(environ), master_port or _step_port(environ)
    return RankEnvironment(
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.rank if place.local_rank is None else place.local_rank,
        local_world_size=place.local_world_size or place.world_size,
        address=address,
        master_addr=master_addr,
        master_port=master_port,
        source=place.source,
        run_name=run_name,
    )


def read_master_port(environ: Mapping[str, str]) -> int | None:
    """Returns the port in MASTER_PORT, or None if it is not set.

    Raises:
        InvalidArgument: the variable is no port.
    """
    return _integer(environ, "MASTER_PORT", 1, LARGEST_PORT)


def _read_host(environ: Mapping[str, str]) -> str | None:
    """Returns the host in MASTER_ADDR, an IPv6 address also in brackets; None if it is not set."""
    host = value_of(environ, "MASTER_ADDR")
    if host is None:
        return None
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if "/" in bare or bare.count(":") == 1:
        raise InvalidArgument(
            f"MASTER_ADDR needs to be the name or the address of a host, without a port, got {host!r}"
        )
    return bare


def _name_run(environ: Mapping[str, str], source: str, master_port: int | None) -> str | None:
    """Returns `RankEnvironment.run_name`: from Slurm's step, MASTER_PORT or, for MPI, the process that started all."""
    if source == SLURM:
        return re.sub(r"[^\w.-]", "_", _step_name(environ))
    if master_port is not None:
        return f"port-{master_port}.{value_of(environ, 'TORCHELASTIC_RESTART_COUNT') or 0}"
    launcher = {each.name: each for each in (_OPEN_MPI, _PMI)}.get(source)
    return launcher and _name_of_launcher(source, {f"{n}={environ[n]}".encode() for n in launcher.names(environ)})


def _name_of_launcher(source: str, own: set[bytes]) -> str | None:
    """Returns a name from the closest ancestor without a rank's own variables: mpiexec, or its daemon.

    No variable of mpiexec names its run, but on one machine one process has started all its ranks. It may not be
    visible: each rank may be in a container of its own. Then there is no name.
    """
    process = read_stat(os.getpid())
    while process is not None and process.parent > 0:
        pid = process.parent
        process, variables = read_stat(pid), set[bytes]()
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            variables = set(file.read().split(b"\0"))
        if not own <= variables:
            return f"{source.replace(' ', '')}-{pid}-{process.start_time if process else 0}"
    return None


# -- Slurm ------------------------------------------------------------------------------------------------------------


def _slurm_place(environ: Mapping[str, str]) -> _Place | None:
    """Returns the rank of a process that srun has started; None in a batch script, although SLURM_PROCID is 0 there."""
    step = value_of(environ, _first(environ, _SLURM.companions))
    is_special = step is None or (step.isdecimal() and int(step) >= _FIRST_SPECIAL_STEP)
    return None if is_special or value_of(environ, "SLURM_PROCID") is None else _SLURM.find(environ)


def _tasks_here(environ: Mapping[str, str]) -> int | None:
    """Returns the number of tasks on this node, from a list such as "4(x2),1": 4 on each of two nodes, 1 on another."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    text, node = value_of(environ, name), _integer(environ, "SLURM_NODEID", 0) or 0
    if text is None:
        return None
    entry = r"([1-9]\d{0,6})(?:\(x([1-9]\d{0,6})\))?"
    if not re.fullmatch(f"{entry}(,{entry})*", text):
        raise InvalidArgument(f"{name} needs to be a list such as 4(x2),1, got {text!r}")
    for tasks, nodes in re.findall(entry, text):
        node -= int(nodes or 1)
        if node < 0:
            return int(tasks)
    raise InvalidArgument(f"SLURM_NODEID={environ['SLURM_NODEID']} has no entry in {name}={text!r}")


def _first_host(environ: Mapping[str, str]) -> str | None:
    """Returns the first host of the Slurm step, on which Slurm starts rank 0 by default; None without a list of hosts.

    The list has the syntax that `scontrol show hostnames` reads, such as "rack[1-2]node[03-04,7],login".
    """
    hosts = value_of(environ, _first(environ, ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"))) or ""
    first = re.match(r"(?:[^,\[\]]|\[[^\[\]]*\])+", hosts)
    return None if first is None else re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


def _step_port(environ: Mapping[str, str]) -> int:
    """Returns a port that is the same for all tasks of a Slurm step, and most likely another in other steps."""
    import zlib  # imported here: only steps on several machines need it

    return _FIRST_PORT + zlib.crc32(_step_name(environ).encode()) % _PORTS


def _step_name(environ: Mapping[str, str]) -> str:
    """Returns a name that is unique among the Slurm steps on its hosts. A requeued job gets a new name."""
    job = value_of(environ, _first(environ, ("SLURM_JOB_ID", "SLURM_JOBID"))) or ""
    again = value_of(environ, "SLURM_RESTART_COUNT") or "0"
    return f"slurm-{job}.{value_of(environ, _first(environ, _SLURM.companions))}.{again}"


# -- Processes beside the ranks of a launcher -------------------------------------------------------------------------


def variables_of_mpi(environ: Mapping[str, str]) -> set[str]:
    """Returns the names of the variables that mpiexec has set for its rank.

    If that rank is gradsync's launcher, the launcher's own ranks do not inherit them: they are not ranks of mpiexec.
    """
    return {name for name in environ if name.startswith(_OF_MPI)}


def without_launcher() -> dict[str, str]:
    """Returns the environment variables without those that launchers set for a rank."""
    theirs = {*OF_A_RUN, *_RANK.names(os.environ), *variables_of_mpi(os.environ), *_OF_TORCHRUN}
    prefixes = ("TORCHELASTIC_", "SLURM_")
    return {n: v for n, v in os.environ.items() if n not in theirs and not n.startswith(prefixes)}


def find_mpiexec() -> str | None:
    """Returns the path of mpiexec: beside this Python, where pip installs it, else in PATH; None if there is none."""
    import shutil  # imported here, because the import takes a millisecond

    beside = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    return beside if os.access(beside, os.X_OK) else shutil.which("mpiexec")
