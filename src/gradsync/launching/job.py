"""The description of a launch: the program, the number of processes, and the options."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gradsync.arguments import DEFAULT_GRACE_SECONDS, check_integer, check_port, check_seconds
from gradsync.errors import BackendUnavailable, InvalidArgument
from gradsync.launching.in_rank.rank_main import Call
from gradsync.rendezvous.secret_files import Endpoint

#: Names of the start methods, see `rank_process`.
START_METHODS = ("spawn", "fork", "forkserver")

_WHO = "the launch"


class Target(NamedTuple):
    """The program that `rank_main` runs in each rank.

    Attributes:
        record: the data that a rank reads at its start (the start record); `marshal` can write all of it.
        command_line: the arguments that `ps` shows for the rank.
        descriptors: file descriptors that the ranks inherit.
        call: the function with its positional and keyword arguments, if the ranks are forked and inherit the call; else
            None.
    """

    record: dict[str, Any]
    command_line: tuple[str, ...]
    descriptors: tuple[int, ...] = ()
    call: Call | None = None

    def mpi_command(self, world_size: int, hosts: Sequence[str] = ()) -> str:
        """Returns the `mpiexec` command that starts these ranks; ranks that use MPI need MPI's own launcher.

        Args:
            world_size: the number of ranks.
            hosts: "host:ranks" for each machine; empty for a run on this machine alone.
        """
        import shlex  # imported here to keep the start short
        import shutil

        on_hosts = ("--host", ",".join(hosts)) if hosts else ()
        command = shlex.join(("mpiexec", "-n", str(world_size), *on_hosts, "python", *self.command_line))
        if shutil.which("mpiexec") is None:
            command += " (no mpiexec is found here: load the cluster's MPI, or pip install mpi4py mpich)"
        return command


@dataclass
class Job:
    """The description of a launch.

    Attributes:
        target: the program of each rank.
        n_ranks: the number of processes on this machine.
        world_size: the number of ranks on all machines; 0 means `rank_start` + `n_ranks`.
        rank_start: the rank of the first process on this machine.
        backend: the backend that `init_process_group("auto")` chooses in the ranks.
        master_addr: the value of MASTER_ADDR in the ranks, for the user's own use.
        master_port: the value of MASTER_PORT in the ranks, for the user's own use; None or 0 chooses a free port.
        rendezvous_port: the port of the rendezvous server on 127.0.0.1; 0 chooses a free port.
        endpoint: the address and secret of a rendezvous server that several launchers share; by default this launcher
            hosts its own server.
        listener: the endpoint's bound socket, if this process runs the server.
        start_method: "spawn", "fork" or "forkserver".
        gpus: the value of CUDA_VISIBLE_DEVICES for each process; by default each inherits this process's value.
        stdin_rank: the rank that gets this process's standard input; the others read /dev/null.
        grace_seconds: the time between SIGTERM and SIGKILL.
        max_restarts: the limit of restarts; a restart starts all ranks again after a failure.
        state_dir: the folder where ranks keep their state across restarts; the ranks find its path in
            GRADSYNC_STATE_DIR.
        removed_variables: the names of variables of this process that ranks do not inherit.
        variables: further environment variables of the ranks.
        own_address: the address of this machine's interface towards the other machines; None if there are no other
            machines, or the address is not known.

    Raises:
        InvalidArgument: a number is out of its range, or the start method is unknown.
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
    endpoint: Endpoint | None = None
    listener: socket.socket | None = None
    start_method: str = "spawn"
    gpus: tuple[str, ...] | None = None
    stdin_rank: int | None = 0
    grace_seconds: float = DEFAULT_GRACE_SECONDS
    max_restarts: int = 0
    state_dir: str | None = None
    removed_variables: frozenset[str] = frozenset()
    variables: Mapping[str, str] = field(default_factory=dict)
    own_address: str | None = None

    def __post_init__(self) -> None:
        if sys.platform != "linux":
            raise BackendUnavailable(
                f"starting ranks needs Linux, this is {sys.platform}: run the script as one rank by itself, with "
                "GRADSYNC_BACKEND=local"
            )
        self._check_numbers()
        if self.world_size == 0:
            self.world_size = self.rank_start + self.n_ranks
        if self.start_method not in START_METHODS:
            raise InvalidArgument(f"the start method needs to be one of {START_METHODS}, got {self.start_method!r}")

    @property
    def ranks(self) -> range:
        """The ranks on this machine."""
        return range(self.rank_start, self.rank_start + self.n_ranks)

    def _check_numbers(self) -> None:
        self.n_ranks = check_integer(_WHO, "the number of processes", self.n_ranks, 1)
        self.rank_start = check_integer(_WHO, "rank_start", self.rank_start, 0)
        if self.world_size != 0:
            self.world_size = check_integer(_WHO, "world_size", self.world_size, self.rank_start + self.n_ranks)
        if self.master_port is not None:
            self.master_port = check_port(_WHO, "master_port", self.master_port)
        self.rendezvous_port = check_port(_WHO, "rendezvous_port", self.rendezvous_port)
        check_seconds(_WHO, "the grace period", self.grace_seconds)
        self.max_restarts = check_integer(_WHO, "max_restarts", self.max_restarts, 0)
