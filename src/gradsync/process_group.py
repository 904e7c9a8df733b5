"""The world of this process: who it is, how it met the others, and its communicator.

Holds the process group: its rendezvous client, the server if this rank hosts it, and, in the slot of
communicators/world.py that it alone fills, its communicator.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from dataclasses import replace

from gradsync.backend_choice import agree_on_backend, check_backend, offer_of, suitable_backend
from gradsync.bootstrap import Host, join
from gradsync.communicators import status
from gradsync.communicators.base import Communicator
from gradsync.communicators.local import LocalCommunicator
from gradsync.communicators.nccl_connection import connect_nccl
from gradsync.communicators.shared_memory import connect_shared_memory
from gradsync.communicators.world import get_world, group_or_world, set_world
from gradsync.environment import BACKENDS, RankEnvironment, allows_shared_gpu, configure_logging, read_environment
from gradsync.environment import collective_timeout_seconds as environment_timeout
from gradsync.errors import GradsyncError, InvalidArgument, PlanMismatch, describe
from gradsync.rendezvous.client import RendezvousClient
from gradsync.visible_devices import count_gpus

_LEAVING_SECONDS = 5.0  # how long a hosting rank's exit waits for the others to leave first

_log = logging.getLogger("gradsync")
_client: RendezvousClient | None = None
_host: Host | None = None  # kept from one generation to the next: others may come back to it before this rank does


def init_process_group(
    backend: str = "auto",
    *,
    rank: int | None = None,
    world_size: int | None = None,
    address: str | None = None,
    device: str | None = None,
    timeout_seconds: float = 120.0,
    collective_timeout_seconds: float = 300.0,
    allow_shared_gpu: bool = False,
) -> Communicator:
    """Meets the other ranks and makes the world's communicator. Every rank must call it.

    Usable with `with`: leaving the block destroys the group; leaving it by an exception tells the other ranks.

    Args:
        backend: "auto", "nccl", "shm" or "local". "auto" takes "nccl" where each rank has a GPU, else "local" for a
            world of one, and "shm" where all ranks are on one host, and says in the log what it took and why;
            GRADSYNC_BACKEND decides for "auto".
        rank: 0 to world_size - 1; None, together with world_size, is the environment's.
        world_size: number of ranks.
        address: host:port where rank 0 hosts the rendezvous; None is the environment's.
        device: where arrays live: None, or "cpu", or for "nccl" "cuda:N" in the numbering of this process; None takes
            the visible GPU of the rank's LOCAL_RANK, or the only visible one. The GPU becomes CuPy's current device.
        timeout_seconds: for meeting the others.
        collective_timeout_seconds: how long a collective waits for a rank; GRADSYNC_COLLECTIVE_TIMEOUT_SECONDS decides,
            where it is set.
        allow_shared_gpu: whether several ranks may use one GPU through NCCL: for tests, and slow. The variable
            GRADSYNC_ALLOW_SHARED_GPU=1 allows it too.

    Returns:
        The world's communicator; gs.get_communicator() gives it again.

    Raises:
        InvalidArgument: initialised already, unknown backend, a rank outside the world, or no environment.
        BackendUnavailable: the backend cannot run here; the text says why.
        AuthenticationError, RendezvousTimeout, RendezvousError, RankFailed: the ranks did not meet.
    """
    global _client, _host
    configure_logging()
    if get_world() is not None:
        raise InvalidArgument("the process group is initialised already: call gs.destroy_process_group() first")
    if backend not in BACKENDS:
        raise InvalidArgument(f"unknown backend {backend!r}: use one of {', '.join(BACKENDS)}")
    _check_seconds(timeout_seconds=timeout_seconds, collective_timeout_seconds=collective_timeout_seconds)
    collective_timeout_seconds = environment_timeout(collective_timeout_seconds)
    place = _place(backend, rank, world_size)
    allow_shared_gpu = allow_shared_gpu or allows_shared_gpu()
    wanted = check_backend(backend if backend != "auto" else place.backend, place, device)
    if wanted == "auto" and place.world_size == 1:
        offer = offer_of(place, device, allow_shared_gpu=allow_shared_gpu)
        wanted, reason = suitable_backend([offer], place, allow_shared_gpu=allow_shared_gpu)
        _tell(place, wanted, reason)
    communicator: Communicator
    if wanted == "local":
        communicator = LocalCommunicator()
    else:
        _client, _host = join(place, address, timeout_seconds, _host)
        _client.describe_with(status.positions, status.report)
        try:
            communicator = _connect(
                wanted,
                _client,
                place,
                device,
                timeout_seconds,
                collective_timeout_seconds,
                allow_shared_gpu=allow_shared_gpu,
            )
        except BaseException as error:
            _client.report_failure(f"in init_process_group: {describe(error)}")
            _leave()
            raise
    communicator.on_exit = _destroy_because_of
    set_world(communicator)
    return communicator


def destroy_process_group() -> None:
    """Leaves the group in order; may be repeated. A later init_process_group() forms a new generation.

    A rank that hosts the rendezvous goes on hosting until its process ends.

    Raises:
        RankFailed, CollectiveTimeout, PlanMismatch, NcclError: a failure on the GPU that no call has raised yet; the
            group has been left all the same.
    """
    communicator = get_world()
    set_world(None)
    try:
        if communicator is not None:
            communicator.on_exit = None
            communicator.close()
    finally:
        _leave()


def is_initialized() -> bool:
    """Whether init_process_group() has been called, and destroy_process_group() not since."""
    return get_world() is not None


def get_communicator() -> Communicator:
    """Returns the world's communicator.

    Raises:
        InvalidArgument: the process group is not initialised.
    """
    return group_or_world(None)


def is_distributed() -> bool:
    """Whether this process is one of several ranks."""
    communicator = get_world()
    return communicator is not None and communicator.world_size > 1


def group_barrier(communicator: Communicator | None = None) -> None:
    """Returns once every rank has called it; at once where nothing is initialised.

    Args:
        communicator: None is the world's.
    """
    communicator = communicator or get_world()
    if communicator is not None:
        communicator.barrier()


def world_attribute() -> Communicator:
    """Returns gs.WORLD; its absence is an AttributeError too, so that hasattr() and inspection work."""
    communicator = get_world()
    if communicator is None:
        raise AttributeError("gs.WORLD exists after gs.init_process_group() and until gs.destroy_process_group()")
    return communicator


def _check_seconds(**values: float) -> None:
    for name, value in values.items():
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
            raise InvalidArgument(f"{name} must be a number of seconds above 0, got {value!r}")


def _place(backend: str, rank: int | None, world_size: int | None) -> RankEnvironment:
    """Returns who this process is: from the arguments, else the environment."""
    if (rank is None) != (world_size is None):
        raise InvalidArgument(f"pass rank and world_size together, got rank={rank!r}, world_size={world_size!r}")
    environment = read_environment()
    if rank is None or world_size is None:
        if environment is not None:
            return environment
        if backend == "local":
            return RankEnvironment(0, 1, 0, 1, source="arguments")
        raise InvalidArgument(
            "no rank is known: RANK and WORLD_SIZE are not set. Start the script with "
            '`gradsync run -n 2 script.py`, pass rank= and world_size=, or use backend="local" for one process'
        )
    if not _is_integer(world_size) or world_size < 1:
        raise InvalidArgument(f"world_size must be an integer of at least 1, got {world_size!r}")
    if not _is_integer(rank) or not 0 <= rank < world_size:
        raise InvalidArgument(f"rank must be 0 to world_size - 1 = {world_size - 1}, got {rank!r}")
    if environment is None or environment.world_size != world_size:
        base = RankEnvironment(rank, world_size, rank, world_size, source="arguments")
        return base if environment is None else replace(base, address=environment.address, hosted=False)
    return replace(environment, rank=rank)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _connect(
    wanted: str,
    client: RendezvousClient,
    place: RankEnvironment,
    device: str | None,
    timeout_seconds: float,
    collective_timeout_seconds: float,
    *,
    allow_shared_gpu: bool,
) -> Communicator:
    """Makes the communicator of the backend between processes on which the ranks agree."""
    chosen, reason = agree_on_backend(client, wanted, place, device, timeout_seconds, allow_shared_gpu=allow_shared_gpu)
    _tell(place, chosen, reason)
    if chosen == "shm":
        return connect_shared_memory(
            client, timeout_seconds=timeout_seconds, collective_timeout_seconds=collective_timeout_seconds
        )
    return connect_nccl(
        client,
        local_rank=place.local_rank,
        device=device,
        timeout_seconds=timeout_seconds,
        collective_timeout_seconds=collective_timeout_seconds,
        allow_shared_gpu=allow_shared_gpu,
    )


def _tell(place: RankEnvironment, chosen: str, reason: str) -> None:
    # A GPU that is there and not used is worth more than a line in the log of those who ask for it.
    unused_gpu = chosen != "nccl" and reason != "asked for" and place.rank == 0 and count_gpus() > 0
    level = logging.WARNING if unused_gpu else logging.INFO
    _log.log(level, "rank %d/%d: backend %s (%s)", place.rank, place.world_size, chosen, reason)


def _destroy_because_of(error: BaseException | None) -> None:
    """Ends the group when its `with` block ends."""
    communicator = get_world()
    try:
        # PlanMismatch is raised on every rank: nobody needs to be told.
        if error is not None and not isinstance(error, PlanMismatch) and _client is not None:
            reason = describe(error)
            if communicator is not None:
                communicator.abort(reason)
            _client.report_failure(reason)
    finally:
        with contextlib.suppress(*([] if error is None else [GradsyncError])):  # the first error is the news
            destroy_process_group()


def _leave() -> None:
    global _client
    client, _client = _client, None
    if client is not None:
        client.close()


def _leave_at_exit() -> None:
    """Leaves at interpreter exit; by an uncaught exception where there is one, so that the others are told."""
    try:
        _destroy_because_of(getattr(sys, "last_value", None))
    finally:
        if _host is not None:
            _host.close(wait_seconds=_LEAVING_SECONDS)


def _forget_after_fork() -> None:
    """The child of a fork is no rank; its copy of the control connection must not hide the parent's death."""
    global _client, _host
    client, _client = _client, None
    host, _host = _host, None
    if client is not None:
        client.abandon()
    if host is not None:
        host.server.abandon()


atexit.register(_leave_at_exit)
os.register_at_fork(after_in_child=_forget_after_fork)
