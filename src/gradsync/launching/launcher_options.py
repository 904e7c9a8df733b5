"""What `launcher` is given: checked when a function is decorated, long before anything starts."""

from __future__ import annotations

from dataclasses import dataclass

from gradsync.arguments import check_integer, check_port
from gradsync.environment import BACKENDS
from gradsync.errors import InvalidArgument
from gradsync.machine import default_process_count

_DEVICE_BACKENDS = {"auto": "auto", "cpu": "shm", "gpu": "nccl"}


@dataclass(frozen=True)
class LauncherOptions:
    """The arguments of `launcher`, as its documentation explains them.

    Raises:
        InvalidArgument: one is out of its range, or does not fit the others.
    """

    n_gpus: int | None = None
    world_size: int | None = None
    rank_start: int = 0
    master_ip: str = "localhost"
    port: int = 0
    device_type: str = "auto"
    backend: str = "auto"
    start_method: str | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_place()
        if self.device_type not in _DEVICE_BACKENDS:
            raise InvalidArgument(f"launcher needs device_type 'auto', 'cpu' or 'gpu', got {self.device_type!r}")
        if self.backend not in BACKENDS:
            raise InvalidArgument(f"launcher needs a backend of {', '.join(BACKENDS)}, got {self.backend!r}")
        if self.device_type == "cpu" and self.backend == "nccl":
            raise InvalidArgument("launcher got backend 'nccl' with device_type 'cpu'; NCCL moves GPU arrays only")
        if self.start_method is not None:
            from gradsync.launching.start_method_choice import chosen_start_method

            chosen_start_method("launcher", self.start_method)

    @property
    def group_backend(self) -> str:
        """What `init_process_group` is given."""
        return _DEVICE_BACKENDS[self.device_type] if self.backend == "auto" else self.backend

    @property
    def master_host(self) -> str:
        """The interface of the rendezvous server, with "localhost" as a number: every rank is to bind the same one."""
        return "127.0.0.1" if self.master_ip == "localhost" else self.master_ip

    @property
    def is_on_loopback(self) -> bool:
        """Whether only this machine can reach the rendezvous server."""
        import ipaddress  # here: ranks import this file at their start

        try:
            return ipaddress.ip_address(self.master_host).is_loopback
        except ValueError:
            return False

    def count_processes(self) -> tuple[int, int]:
        """Gives the number of processes on this machine, and of ranks of the run.

        Raises:
            BackendUnavailable: GPUs are asked for, and there is none.
        """
        count = self.n_gpus or default_process_count(self.device_type)
        if self.world_size is None:
            return count, count
        return min(count, self.world_size - self.rank_start), self.world_size

    def _check_numbers(self) -> None:
        numbers = {"rank_start": check_integer("launcher", "rank_start", self.rank_start, 0)}
        numbers["port"] = check_port("launcher", "port", self.port)
        for name in ("n_gpus", "world_size"):
            if getattr(self, name) is not None:
                numbers[name] = check_integer("launcher", name, getattr(self, name), 1)
        for name, number in numbers.items():
            object.__setattr__(self, name, number)
        if not isinstance(self.master_ip, str) or not self.master_ip:
            raise InvalidArgument(f"launcher needs master_ip to be an address or a host's name, got {self.master_ip!r}")

    def _check_place(self) -> None:
        """Checks that the ranks of this node lie in the run, and that it knows where to meet the others."""
        if self.rank_start > 0 and self.world_size is None:
            raise InvalidArgument(
                f"launcher with rank_start {self.rank_start} is one of several nodes and needs world_size, "
                "the number of ranks on all of them"
            )
        end = self.rank_start + (self.n_gpus or 1)
        if self.world_size is not None and end > self.world_size:
            raise InvalidArgument(
                f"launcher needs rank_start + n_gpus to be at most world_size {self.world_size}, "
                f"got {self.rank_start} + {self.n_gpus or 1}"
            )
        if self.rank_start > 0 and self.port == 0:
            raise InvalidArgument(
                f"launcher with rank_start {self.rank_start} needs the port of the node with rank_start 0, got port 0"
            )
