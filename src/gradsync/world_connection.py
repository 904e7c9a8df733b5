"""The way to a communicator of the world's ranks: who this process is, which backend, and the connection.

For process_group.py, which holds what is made here.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from gradsync.arguments import integer_of, is_number
from gradsync.backend_choice import agree_on_backend, check_backend, offer_of, suitable_backend
from gradsync.communicators.base import Communicator
from gradsync.communicators.nccl.connection import connect_nccl
from gradsync.communicators.shared_memory.communicator import connect_shared_memory
from gradsync.communicators.world import overriding_backend
from gradsync.environment import (
    ALLOW_SHARED_GPU,
    BACKEND,
    BACKENDS,
    COLLECTIVE_TIMEOUT_SECONDS,
    DEBUG,
    RankEnvironment,
    check_removed_variables,
    read_environment,
    warn_of_unknown_variables,
)
from gradsync.errors import InvalidArgument
from gradsync.machine import count_gpus
from gradsync.rendezvous.client import RendezvousClient
from gradsync.rendezvous.group_client import CommunicatorClient

_log = logging.getLogger("gradsync")


@dataclass(frozen=True)
class WorldSettings:
    """What init_process_group() was told, with what the environment decides.

    Attributes:
        place: who this process is.
        address, device, timeout_seconds, collective_timeout_seconds, allow_shared_gpu, debug: see init_process_group.
    """

    place: RankEnvironment
    address: str | None
    device: str | None
    timeout_seconds: float
    collective_timeout_seconds: float
    allow_shared_gpu: bool
    debug: bool = False


def is_launched() -> bool:
    """Whether a launcher has told this process which rank it is: gradsync's, torchrun, mpiexec or srun.

    A script that is to run by itself too takes `"auto" if gs.is_launched() else "local"` as its backend.

    Raises:
        InvalidArgument: the variables of launchers are malformed, or contradict each other.
    """
    return read_environment() is not None


def requested_backend(backend: str) -> str:
    """Returns the backend that was asked for: by the caller, else by override_backend(), else by GRADSYNC_BACKEND.

    Raises:
        InvalidArgument: no backend has that name.
    """
    if backend not in BACKENDS:
        raise InvalidArgument(f"unknown backend {backend!r}: use one of {', '.join(BACKENDS)}")
    return overriding_backend() or BACKEND.read() if backend == "auto" else backend


def read_settings(
    backend: str,
    rank: int | None,
    world_size: int | None,
    address: str | None,
    device: str | None,
    timeout_seconds: float,
    collective_timeout_seconds: float,
    *,
    allow_shared_gpu: bool,
    debug: bool | None = None,
) -> WorldSettings:
    """Returns the arguments of init_process_group(), checked, with what the environment says.

    Raises:
        InvalidArgument: a rank outside the world, no number of seconds, a variable that has gone, or nobody tells the
            rank.
    """
    check_removed_variables()
    _check_seconds(timeout_seconds=timeout_seconds, collective_timeout_seconds=collective_timeout_seconds)
    place = _find_place(backend, rank, world_size)
    if place.local_rank == 0:  # for all of this machine
        warn_of_unknown_variables()
    return WorldSettings(
        place,
        address,
        device,
        timeout_seconds,
        COLLECTIVE_TIMEOUT_SECONDS.read() or collective_timeout_seconds,
        ALLOW_SHARED_GPU.read() or allow_shared_gpu,
        DEBUG.read() if debug is None else bool(debug),
    )


def _check_seconds(**values: float) -> None:
    for name, value in values.items():
        if not is_number(value) or not value > 0:
            raise InvalidArgument(f"{name} must be a number of seconds above 0, got {value!r}")


def _find_place(backend: str, rank: int | None, world_size: int | None) -> RankEnvironment:
    """Returns who this process is: from the arguments, else the environment."""
    if (rank is None) != (world_size is None):
        raise InvalidArgument(f"pass rank and world_size together, got rank={rank!r}, world_size={world_size!r}")
    environment = read_environment()
    if rank is None or world_size is None:
        return _place_without_launcher(backend) if environment is None else environment
    size, number = integer_of(world_size), integer_of(rank)
    if size is None or size < 1:
        raise InvalidArgument(f"world_size must be an integer of at least 1, got {world_size!r}")
    if number is None or not 0 <= number < size:
        raise InvalidArgument(f"rank must be 0 to world_size - 1 = {size - 1}, got {rank!r}")
    rank, world_size = number, size
    if environment is None or environment.world_size != world_size:
        base = RankEnvironment(rank, world_size, rank, world_size, source="arguments")
        return base if environment is None else replace(base, address=environment.address, hosted=False)
    return replace(environment, rank=rank)


def _place_without_launcher(backend: str) -> RankEnvironment:
    """Returns who this process is where no launcher has left its variables."""
    if backend == "local":
        return RankEnvironment(0, 1, 0, 1, source="arguments")
    if backend == "mpi":
        from gradsync.communicators.mpi.mpi_hosting import mpi_place

        place = mpi_place()  # a launcher whose variables we do not know
        if place is not None:
            return place
        raise InvalidArgument(
            "backend 'mpi' joins ranks that mpiexec or srun has started, and this process is alone. Start the script "
            "with `mpiexec -n 2 python script.py`, by the mpiexec of the MPI that mpi4py has loaded, or use "
            'backend="local" for one process'
        )
    raise InvalidArgument(
        "no rank is known: RANK and WORLD_SIZE are not set. Start the script with `gradsync run -n 2 script.py` or "
        "`mpiexec -n 2 python script.py`, pass rank= and world_size=, or, for one process, use "
        'GRADSYNC_BACKEND=local or backend="local"'
    )


def choose_backend(wanted: str, settings: WorldSettings) -> str:
    """Returns what can be decided before the ranks meet: what was asked for, or what suits one rank; else "auto".

    Raises:
        InvalidArgument, BackendUnavailable: what was asked for cannot run here.
    """
    wanted = check_backend(wanted, settings.place, settings.device)
    if wanted == "auto" and settings.place.world_size == 1:
        offer = offer_of(settings.place, settings.device, allow_shared_gpu=settings.allow_shared_gpu)
        wanted, reason = suitable_backend([offer], settings.place, allow_shared_gpu=settings.allow_shared_gpu)
        _tell(settings.place, wanted, reason)
    return wanted


def connect_world(wanted: str, client: RendezvousClient, settings: WorldSettings) -> Communicator:
    """Makes the world's communicator, over the backend on which the ranks agree; not for "local"."""
    chosen, reason = agree_on_backend(
        client,
        wanted,
        settings.place,
        settings.device,
        settings.timeout_seconds,
        allow_shared_gpu=settings.allow_shared_gpu,
        debug=settings.debug,
    )
    _tell(settings.place, chosen, reason)
    return connect_over(chosen, client, settings, "world")


def connect_over(backend: str, client: CommunicatorClient, settings: WorldSettings, group: str) -> Communicator:
    """Makes the communicator of a client's ranks over "shm", "mpi" or "nccl"; `group` is its name, not used before."""
    communicator = _connect(backend, client, settings, group)
    if settings.debug:
        communicator.use_debug_mode()
    return communicator


def _connect(backend: str, client: CommunicatorClient, settings: WorldSettings, group: str) -> Communicator:
    if backend == "shm":
        return connect_shared_memory(
            client,
            group=group,
            timeout_seconds=settings.timeout_seconds,
            collective_timeout_seconds=settings.collective_timeout_seconds,
        )
    if backend == "mpi":
        from gradsync.communicators.mpi.communicator import connect_mpi  # here: start-up counts

        return connect_mpi(
            client,
            group=group,
            timeout_seconds=settings.timeout_seconds,
            collective_timeout_seconds=settings.collective_timeout_seconds,
        )
    return connect_nccl(
        client,
        local_rank=settings.place.local_rank,
        device=settings.device,
        group=group,
        timeout_seconds=settings.timeout_seconds,
        collective_timeout_seconds=settings.collective_timeout_seconds,
        allow_shared_gpu=settings.allow_shared_gpu,
    )


def _tell(place: RankEnvironment, chosen: str, reason: str) -> None:
    # A GPU that is there and not used is worth more than a line in the log of those who ask for it.
    unused_gpu = chosen != "nccl" and reason != "asked for" and place.rank == 0 and count_gpus() > 0
    level = logging.WARNING if unused_gpu else logging.INFO
    _log.log(level, "rank %d/%d: backend %s (%s)", place.rank, place.world_size, chosen, reason)
