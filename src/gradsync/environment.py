"""Who am I: this process's rank and how it finds the others, read from environment variables.

The launching layer writes these variables for the ranks it starts; `init_process_group` reads them. Every
GRADSYNC_* name is a constant here, and code has it from here. The secret of a run never stays in the environment: it
is held privately in this module.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gradsync.errors import InvalidArgument
from gradsync.variable_values import read_port, value_of

if TYPE_CHECKING:
    from gradsync.launcher_variables import Place

#: This process's rank, 0 .. world size - 1; set by our launcher, beside RANK.
RANK = "GRADSYNC_RANK"
#: Number of ranks of the run; set by our launcher, beside WORLD_SIZE.
WORLD_SIZE = "GRADSYNC_WORLD_SIZE"
#: This process's number among the ranks of its machine; set by our launcher, beside LOCAL_RANK.
LOCAL_RANK = "GRADSYNC_LOCAL_RANK"
#: Number of ranks on this machine; set by our launcher, beside LOCAL_WORLD_SIZE.
LOCAL_WORLD_SIZE = "GRADSYNC_LOCAL_WORLD_SIZE"
#: host:port of the rendezvous server.
ADDRESS = "GRADSYNC_ADDRESS"
#: "1" when a server (our launcher's, or `gradsync serve`) runs at GRADSYNC_ADDRESS: rank 0 hosts none.
HOSTED = "GRADSYNC_HOSTED"
#: Backend that `init_process_group("auto")` takes: auto, shm, nccl, mpi or local.
BACKEND = "GRADSYNC_BACKEND"
#: "1" lets several ranks share a GPU through NCCL; for tests.
ALLOW_SHARED_GPU = "GRADSYNC_ALLOW_SHARED_GPU"
#: Secret of the run in hexadecimal; removed from the environment when it is read.
SECRET = "GRADSYNC_SECRET"
#: Path of a file that holds the secret in hexadecimal; must be the user's own, mode 0600.
SECRET_FILE = "GRADSYNC_SECRET_FILE"
#: How often our launcher has started all ranks again.
RESTART_COUNT = "GRADSYNC_RESTART_COUNT"
#: How often our launcher starts all ranks again at most.
MAX_RESTARTS = "GRADSYNC_MAX_RESTARTS"
#: Directory that outlives a restart, where a script leaves what it needs to resume.
STATE_DIR = "GRADSYNC_STATE_DIR"
#: How many seconds a collective waits for a rank, whatever the script says; for a long stay in a debugger.
COLLECTIVE_TIMEOUT_SECONDS = "GRADSYNC_COLLECTIVE_TIMEOUT_SECONDS"
#: Level of the `gradsync` logger: debug, info, warning, error or critical.
LOG = "GRADSYNC_LOG"
#: How many collectives the flight recorder of each communicator remembers.
FLIGHT_RECORDER_ENTRIES = "GRADSYNC_FLIGHT_RECORDER_ENTRIES"
#: Folder for dumps of the flight recorder: when a collective fails, when a rank raises, when another rank misses this
#: one, at Ctrl-C, and on SIGUSR2.
DUMP_DIR = "GRADSYNC_DUMP_DIR"
#: Folder into which each rank writes, at its end, when its collectives packed, waited, reduced and split.
TRACE = "GRADSYNC_TRACE"
#: "1" has ranks agree on every collective, and finds gradients that are written to while gradsync has them.
DEBUG = "GRADSYNC_DEBUG"

#: What a backend may be called, wherever one is named.
BACKENDS = ("auto", "nccl", "shm", "mpi", "local")

_secret: bytes | None = None


@dataclass(frozen=True)
class RankEnvironment:
    """What the environment tells this process about its place in the run.

    Attributes:
        rank: number of this process in the run, 0 .. world_size - 1.
        world_size: number of processes in the run.
        local_rank: number of this process on its machine; the rank, where no variable tells it.
        local_world_size: number of processes on this machine; the world size, where no variable tells it.
        address: host:port of the rendezvous server, or None.
        secret: secret of the run, or None. Never shown in the repr.
        hosted: whether a server runs at `address` already: our launcher's, or `gradsync serve`.
        master_addr: MASTER_ADDR; without it the first host of a Slurm step over several hosts, else None.
        master_port: MASTER_PORT, or one that such a step's number gives, or None; it belongs to the user, not to the
            rendezvous server.
        run_name: name of the run among those of this machine; only where all ranks are on it, and mpiexec or srun
            did not tell where to meet.
        backend: GRADSYNC_BACKEND, "auto" when it is not set.
        source: who set the variables: "gradsync", "RANK" (torchrun or by hand), "Open MPI", "PMI" or "Slurm"; "MPI"
            where MPI itself was asked.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str | None = None
    secret: bytes | None = field(default=None, repr=False)
    hosted: bool = False
    master_addr: str | None = None
    master_port: int | None = None
    backend: str = "auto"
    source: str = ""
    run_name: str | None = None


def read_environment(environ: MutableMapping[str, str] = os.environ) -> RankEnvironment | None:
    """Reads who this process is, from the first launcher below that left its variables.

    | precedence | launcher | variables |
    | --- | --- | --- |
    | 1 | gradsync | `GRADSYNC_RANK`, `_WORLD_SIZE`, `_LOCAL_RANK`, `_LOCAL_WORLD_SIZE` |
    | 2 | torchrun, or by hand | `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE` |
    | 3 | mpiexec of Open MPI | `OMPI_COMM_WORLD_RANK`, `_SIZE`, `_LOCAL_RANK`, `_LOCAL_SIZE` |
    | 4 | mpiexec of MPICH or Intel MPI (PMI) | `PMI_RANK`, `PMI_SIZE`, `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` |
    | 5 | srun (Slurm) | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` or `SLURM_NTASKS`, `SLURM_LOCALID` |

    1 to 4 must agree on rank and world size where several are set: otherwise one launcher was started where another's
    variables were set, and which of them is the outer one cannot be told. Two cases are clear. Slurm's variables are
    inherited by all that runs in a step, so they count alone, or complete another launcher's. Where mpiexec started
    torchrun's agents, one on each machine, torchrun's variables count.

    MASTER_ADDR, MASTER_PORT and the other GRADSYNC_* variables are read alike for all of them.
    GRADSYNC_SECRET is removed from `environ`.

    Args:
        environ: the variables.

    Returns:
        The place of this process, or None when no launcher left its variables.

    Raises:
        InvalidArgument: a variable is malformed, out of range, or lacks its counterpart, or two launchers name
            different places; the text names the variables.
    """
    from gradsync.launcher_variables import LauncherVariables, find_place  # here: our launcher does not need it

    ours = LauncherVariables("gradsync", RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, (ADDRESS, HOSTED))
    place = find_place(environ, ours)
    return None if place is None else _complete(environ, place)


def hold_secret(secret: bytes) -> None:
    """Keeps the secret of this run for `take_secret`; for ranks whose launcher sends it over a pipe."""
    global _secret
    _secret = secret


def take_secret(environ: MutableMapping[str, str] = os.environ) -> bytes | None:
    """Gives the secret of this run, and removes it from the environment.

    GRADSYNC_SECRET comes first, then GRADSYNC_SECRET_FILE. What was found here, or handed to
    `hold_secret`, is kept privately, so that later calls give it again.

    Args:
        environ: the variables; GRADSYNC_SECRET is removed from them.

    Returns:
        The secret, or None when there is none.

    Raises:
        InvalidArgument: the variable or the file does not hold a secret, or others can read the file.
    """
    text, path = environ.pop(SECRET, None), value_of(environ, SECRET_FILE)
    if text is not None:
        from gradsync.secret_file import parse_secret  # here, like the next: our launcher's ranks need neither

        secret = parse_secret(text, SECRET)
    elif path is not None:
        from gradsync.secret_file import read_secret_file

        secret = read_secret_file(path)
    else:
        return _secret if environ is os.environ else None
    if environ is os.environ:
        hold_secret(secret)
    return secret


def check_address(text: str, name: str = "address") -> str:
    """Checks that a rendezvous address reads host:port, and returns it.

    Args:
        text: the address; an IPv6 host stands in brackets.
        name: what the error calls it.

    Raises:
        InvalidArgument: it does not.
    """
    from gradsync.rendezvous.sockets import parse_address

    try:
        parse_address(text)
    except InvalidArgument as error:
        raise InvalidArgument(f"{name}: {error}") from None
    return text


def _complete(environ: MutableMapping[str, str], place: Place) -> RankEnvironment:
    """Adds to a place what is read alike for every launcher, and where to meet if only the launcher knows."""
    address = value_of(environ, ADDRESS)
    master_addr, master_port, run_name = value_of(environ, "MASTER_ADDR"), read_port(environ, "MASTER_PORT"), None
    if place.world_size > 1 and not address and not (master_addr and master_port):
        if place.local_world_size == place.world_size:
            from gradsync.run_name import name_run  # here, like the next: start-up counts

            run_name = name_run(environ, place.source)
        elif place.source == "Slurm":
            from gradsync.slurm_variables import first_host, step_port

            master_addr, master_port = master_addr or first_host(environ), master_port or step_port(environ)
    return RankEnvironment(
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.rank if place.local_rank is None else place.local_rank,
        local_world_size=place.local_world_size or place.world_size,
        address=None if address is None else check_address(address, ADDRESS),
        secret=take_secret(environ),
        hosted=value_of(environ, HOSTED) == "1",
        master_addr=master_addr,
        master_port=master_port,
        backend=value_of(environ, BACKEND) or "auto",
        source=place.source,
        run_name=run_name,
    )
