"""What a launch is: program, number of processes, options; and each rank's environment variables.

Those are gradsync's own, torchrun's, and that of the rank's GPU; and unless the user has set them, the number of
threads of linear algebra libraries, and NCCL's network interface.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gradsync import environment
from gradsync.arguments import (
    DEFAULT_GRACE_SECONDS,
    LARGEST_PORT,
    check_integer,
    check_port,
    check_seconds,
    integer_of,
    parse_address,
)
from gradsync.environment import ALLOW_SHARED_GPU
from gradsync.errors import BackendUnavailable, InvalidArgument
from gradsync.launchers import RUN_ID, RUN_ID_OF_GRADSYNC, variables_of_mpi
from gradsync.machine import address_towards, blas_thread_variables, count_gpus, interface_of, visible_gpus
from gradsync.rendezvous.secret_files import Endpoint

_WHO = "the launch"

# A GPU as in CUDA_VISIBLE_DEVICES: a number, a UUID or the beginning of a UUID, or a MIG instance in either notation.
_GPU = re.compile(r"\d+|GPU-[0-9a-fA-F-]+|MIG-[0-9a-fA-F-]+|MIG-GPU-[0-9a-fA-F-]+/\d+/\d+")


class Target(NamedTuple):
    """The program that `rank_main` runs in each rank.

    Attributes:
        record: what a rank reads at its start; `marshal` can write all of it.
        command_line: the arguments that `ps` shows.
        descriptors: file descriptors that the ranks inherit.
        wrapper: the command that starts each rank's interpreter, such as ("numactl", "-N0"); see `Job.wrap`.
    """

    record: dict[str, Any]
    command_line: tuple[str, ...]
    descriptors: tuple[int, ...] = ()
    wrapper: tuple[str, ...] = ()

    def mpi_command(self, world_size: int) -> str:
        """Returns the `mpiexec` command that starts these ranks; ranks that use MPI need MPI's own launcher."""
        import shlex  # imported here to keep the start short
        import shutil

        command = shlex.join(("mpiexec", "-n", str(world_size), "python", *self.command_line))
        if shutil.which("mpiexec") is None:
            command += " (no mpiexec is found here: load the cluster's MPI, or pip install mpi4py mpich)"
        return command


@dataclass
class Job:
    """What to launch.

    Attributes:
        target: the program of each rank.
        n_ranks: the number of processes on this machine.
        world_size: the number of ranks on all machines; 0 means `rank_start` + `n_ranks`.
        rank_start: the rank of the first process on this machine.
        backend: what `init_process_group("auto")` chooses in the ranks.
        master_addr: MASTER_ADDR in the ranks, for the user's own use.
        master_port: MASTER_PORT, likewise; None or 0 is a free port, or the one next to the rendezvous server's if
            several launchers share it.
        rendezvous_port: the rendezvous server's port on 127.0.0.1, if `shared` is None; 0 is a free one.
        shared: the address and secret of the rendezvous server that several launchers share, and its bound socket if
            this launcher hosts it; see `shared_endpoint`. By default the supervisor hosts one, with a new secret.
        gpus: CUDA_VISIBLE_DEVICES of each process; by default that of this process.
        stdin_rank: the rank that gets this process's standard input, or None; the others read /dev/null.
        grace_seconds: how many seconds ranks have to end when asked to, before SIGKILL.
        max_restarts: how often all ranks are started again after a failure.
        min_ranks: while so many ranks of the run live, or can be started again, the failure of a rank ends no other;
            None means all.
        respawns: how many times in all this launcher starts a failed rank again; only with `min_ranks`.
        wrap: the command that starts each rank's interpreter, as a shell splits it, such as "numactl -N0"; "" for none.
        removed_variables: the variables of this process that ranks do not inherit.
        variables: further variables of the ranks.
        own_address: the address of this machine's interface towards the rendezvous server, if several launchers share
            it and the address is known; else None.

    Raises:
        InvalidArgument: a number is out of its range.
        BackendUnavailable: the system is not Linux.
    """

    target: Target
    n_ranks: int
    world_size: int = 0
    rank_start: int = 0
    backend: str = "auto"
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    rendezvous_port: int = 0
    shared: tuple[Endpoint, socket.socket | None] | None = None
    gpus: tuple[str, ...] | None = None
    stdin_rank: int | None = 0
    grace_seconds: float = DEFAULT_GRACE_SECONDS
    max_restarts: int = 0
    min_ranks: int | None = None
    respawns: int = 0
    wrap: str = ""
    removed_variables: frozenset[str] = frozenset()
    variables: Mapping[str, str] = field(default_factory=dict)
    own_address: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if sys.platform != "linux":
            raise BackendUnavailable(
                f"starting ranks needs Linux, this is {sys.platform}: run the script as one rank by itself, with "
                "GRADSYNC_BACKEND=local"
            )
        # The functions and the command that make a job have checked their other options.
        self.n_ranks = check_integer(_WHO, "the number of processes", self.n_ranks, 1)
        if self.master_port is not None:
            self.master_port = check_port(_WHO, "master_port", self.master_port)
        check_seconds(_WHO, "the grace period", self.grace_seconds)
        if self.wrap:
            self.target = self.target._replace(wrapper=_split_wrapper(self.wrap))
        if self.world_size == 0:
            self.world_size = self.rank_start + self.n_ranks
        if self.shared is not None:
            host, port = parse_address(self.shared[0].address)
            self.own_address = address_towards(host, port)
            # The same on all machines, as this process knows no other port that is.
            self.master_port = self.master_port or (port + 1 if port < LARGEST_PORT else port - 1)

    @property
    def has_others(self) -> bool:
        """Whether other launchers have ranks of the same run."""
        return self.world_size > self.n_ranks


def _split_wrapper(text: str) -> tuple[str, ...]:
    import shlex  # imported here, as below, to keep the start short
    import shutil

    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InvalidArgument(f"wrap needs to be a command, got {text!r}: {error}") from None
    if not words or shutil.which(words[0]) is None:
        raise InvalidArgument(f"wrap needs to begin with a program that can be found, got {text!r}")
    return tuple(words)


# -- Environment variables ---------------------------------------------------------------------------------------------


def rank_environment(job: Job, local_rank: int, endpoint: Endpoint, master_port: int, restart: int) -> dict[str, str]:
    """Returns a rank's environment variables: those of this process, and its own.

    Args:
        job: whose rank it is.
        local_rank: the index of the rank on this machine.
        endpoint: the rendezvous server's address and secret.
        master_port: MASTER_PORT.
        restart: how many times all ranks have been started again.
    """
    rank, world_size = str(job.rank_start + local_rank), str(job.world_size)
    # Not for ranks: a secret of this process is of another run, and mpiexec's variables describe this process.
    removed = job.removed_variables | {environment.SECRET, environment.SECRET_FILE} | variables_of_mpi(os.environ)
    kept = {name: value for name, value in os.environ.items() if name not in removed}
    own: dict[str, str] = {
        environment.ADDRESS: endpoint.address,
        environment.BACKEND: job.backend,
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(job.n_ranks),
        "MASTER_ADDR": job.master_addr,
        "MASTER_PORT": str(master_port),
    }
    if job.gpus is not None:
        own["CUDA_VISIBLE_DEVICES"] = job.gpus[local_rank]
    torchrun = {
        # torchrun calls a machine a group. These values are right if all machines have equally many ranks.
        "GROUP_RANK": str(job.rank_start // job.n_ranks),
        "GROUP_WORLD_SIZE": str(-(-job.world_size // job.n_ranks)),
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "TORCHELASTIC_RESTART_COUNT": str(restart),
        "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
        RUN_ID: f"{RUN_ID_OF_GRADSYNC}{os.getpid()}",
        # So that rank 0 hosts PyTorch's store at MASTER_PORT: there is no agent of torchrun.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    return kept | _added_variables(job) | torchrun | dict(job.variables) | own


def log_added_variables(job: Job) -> None:
    """Logs the variables (of NCCL, and for the number of threads) that the launcher sets and the user has not set."""
    environment.configure_logging()
    names = " ".join(f"{name}={value}" for name, value in _added_variables(job).items())
    if names:
        import logging  # imported here to keep the start short

        logging.getLogger("gradsync").info("variables that gradsync sets in the ranks, unless you set them: %s", names)


def _added_variables(job: Job) -> dict[str, str]:
    """Returns the variables that a user may set, and has not set: threads, and NCCL's interface towards the server."""
    added = blas_thread_variables(job.n_ranks)
    if job.own_address is not None and (interface := interface_of(job.own_address)) is not None:
        added["NCCL_SOCKET_IFNAME"] = f"={interface}"  # "=" asks for an exact match
        if ":" in job.own_address:
            added["NCCL_SOCKET_FAMILY"] = "AF_INET6"
    return {name: value for name, value in added.items() if name not in os.environ}


# -- GPUs --------------------------------------------------------------------------------------------------------------


def _parse_gpus(gpus: str | Sequence[int | str]) -> list[str]:
    """Returns the GPUs of a list such as "4,5" or [4, 5], in the syntax of CUDA_VISIBLE_DEVICES."""
    if not isinstance(gpus, str | Sequence) or isinstance(gpus, bytes):
        raise InvalidArgument(f'gpus needs to be text such as "0,1" or a list of GPUs, got {gpus!r}')
    names: list[str] = []
    for entry in gpus.split(",") if isinstance(gpus, str) else gpus:
        name = str(entry if isinstance(entry, str) else integer_of(entry)).strip()
        if not name.isascii() or not _GPU.fullmatch(name):
            raise InvalidArgument(f"gpus needs numbers from 0, GPU-... or MIG-... names, got {entry!r} in {gpus!r}")
        name = str(int(name)) if name.isdigit() else name
        if name in names:
            raise InvalidArgument(
                f"gpus names GPU {name} twice: {gpus!r}; name each GPU once (if ranks should share "
                f"GPUs, set {ALLOW_SHARED_GPU}=1 and name fewer GPUs than ranks)"
            )
        names.append(name)
    if not names:
        raise InvalidArgument("gpus needs at least one GPU, got none")
    return names


def choose_gpus(gpus: str | Sequence[int | str], n_ranks: int | None) -> tuple[str, ...]:
    """Returns the GPU of each rank of this machine.

    If CUDA_VISIBLE_DEVICES is set, each GPU must be in it. If GRADSYNC_ALLOW_SHARED_GPU is set, ranks share GPUs where
    there are fewer GPUs than ranks.

    Args:
        gpus: the GPUs, in the order of the ranks, such as "4,5", [4, 5] or "GPU-8932f937,MIG-GPU-8932f937/1/0": UUIDs,
            MIG instances, or CUDA's numbers of the machine's GPUs (by PCI address if CUDA_DEVICE_ORDER=PCI_BUS_ID).
        n_ranks: the number of ranks; None means one for each GPU.

    Returns:
        The value of CUDA_VISIBLE_DEVICES for each rank, in the order of the ranks.

    Raises:
        InvalidArgument: there are too many GPUs for the ranks, or too few and none may be shared. Or an entry does
            not name a GPU, or names a GPU that an earlier entry names, that does not exist, or that this process may
            not use.
    """
    names = _parse_gpus(gpus)
    n_ranks = n_ranks or len(names)
    if len(names) > n_ranks or (len(names) < n_ranks and not ALLOW_SHARED_GPU.read()):
        raise InvalidArgument(
            f"gpus needs one GPU for each of {n_ranks} ranks, got {len(names)}: {','.join(names)}; "
            f"name {n_ranks} GPUs or start {len(names)} ranks"
        )
    for name in names:
        _check_visible(name)
    return tuple(names[rank % len(names)] for rank in range(n_ranks))


def _check_visible(name: str) -> None:
    """Raises InvalidArgument for a GPU that does not exist, or that this process may not use."""
    visible = visible_gpus(os.environ)
    if visible is None:
        present = count_gpus({})
        if name.isdigit() and 0 < present <= int(name):
            raise InvalidArgument(f"gpus names GPU {name}, and this machine has GPUs 0 to {present - 1}")
        return
    if not any(_is_same(name, entry) for entry in visible):
        raise InvalidArgument(
            f"gpus names GPU {name}, which is not in this process's CUDA_VISIBLE_DEVICES="
            f"{os.environ['CUDA_VISIBLE_DEVICES']}; name only GPUs from this variable, or unset it"
        )


def _is_same(name: str, entry: str) -> bool:
    """Returns whether two entries name the same GPU; compares only their text."""
    if entry.isdigit() or name.isdigit():
        return entry.isdigit() and name.isdigit() and int(entry) == int(name)
    # CUDA accepts the beginning of a UUID, so this function accepts it too.
    return entry.startswith(name) or name.startswith(entry)
