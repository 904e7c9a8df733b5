"""Chooses the backend for the ranks, "auto" or by name, and makes the communicator over it.

A named backend is checked before the ranks join. "auto" is decided by rank 0 after they have joined, because one rank
cannot know whether every other rank has a GPU of its own. An error of one rank is raised on all ranks; the
other ranks would otherwise wait for that rank.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from gradsync.communicators.communicator import Communicator
from gradsync.communicators.local import local_communicator
from gradsync.environment import BACKEND, DEBUG, RankEnvironment
from gradsync.errors import BackendUnavailable, GradsyncError, InvalidArgument
from gradsync.launchers import SOURCES_WITH_MPI
from gradsync.machine import count_gpus

if TYPE_CHECKING:
    from gradsync.rendezvous.client import RendezvousClient

# The files of a backend are imported where they are needed: most processes use one backend, and should start fast.

_YES, _NO = "+", "-"  # an offer begins with "+" and then has the GPU's identity, or with "-" and the reason against
_MAX_OFFER_BYTES = 4096
_MPIEXEC = "mpiexec -n 8 -hosts a,b python train.py"
_DEVICE = r"cpu|cuda(:\d+)?"
_ERRORS: dict[str, type[GradsyncError]] = {error.__name__: error for error in (InvalidArgument, BackendUnavailable)}

_log = logging.getLogger("gradsync")


class WorldSettings(NamedTuple):
    """The arguments of init_process_group(), completed from the environment.

    Attributes:
        place: this process's rank and its launcher's variables.
        address, device, timeout_seconds, collective_timeout_seconds, allow_shared_gpu, debug: see init_process_group.
    """

    place: RankEnvironment
    address: str | None
    device: str | None
    timeout_seconds: float
    collective_timeout_seconds: float
    allow_shared_gpu: bool
    debug: bool = False


# -- Before the ranks meet --------------------------------------------------------------------------------------------


def choose_before_meeting(wanted: str, settings: WorldSettings) -> str:
    """Returns the named backend, checked, or the backend for a single rank; else "auto".

    Args:
        wanted: one of BACKENDS; "auto" with a CUDA device means "nccl".
        settings: the world's settings.

    Raises:
        InvalidArgument: the backend does not run on the device, or is "local" for several ranks.
        BackendUnavailable: the backend cannot run here; the text has the reason.
    """
    place, device = settings.place, settings.device
    if device is not None and not (isinstance(device, str) and re.fullmatch(_DEVICE, device)):
        raise InvalidArgument(f"device needs to be 'cpu', 'cuda' or 'cuda:N', got {device!r}")
    if wanted == "auto" and device is not None and device != "cpu":
        wanted = "nccl"
    if wanted not in ("auto", "nccl") and device not in (None, "cpu"):
        raise InvalidArgument(f"backend {wanted!r} needs device 'cpu', got {device!r}")
    if wanted == "local" and place.world_size != 1:
        raise InvalidArgument(f"backend 'local' needs a world_size of 1, got {place.world_size}")
    if wanted == "shm":
        _check_shm()
    if wanted == "mpi":
        _check_mpi(place)
    if wanted == "nccl":
        _check_nccl()
    if wanted == "auto" and place.world_size == 1:
        wanted, reason = suitable_backend([_offer_of_gpu(settings, only_if_seen=True)], settings)
        _log_choice(place, wanted, reason)
    elif wanted == "auto" and place.local_world_size != place.world_size and count_gpus() == 0:
        _check_mpi_instead(place, "no GPU is visible")
    return wanted


def suitable_backend(offers: Sequence[str], settings: WorldSettings) -> tuple[str, str]:
    """Returns the best backend for ranks with these offers of GPUs, and the reason.

    Raises:
        BackendUnavailable: no backend can join these ranks; the text has the reason.
    """
    place = settings.place
    no_gpus = _why_not(offers, settings)
    if not no_gpus:
        return "nccl", "each rank has a GPU"
    if place.world_size == 1:
        return "local", f"one rank; {no_gpus}"
    if place.local_world_size != place.world_size:
        _check_mpi_instead(place, no_gpus)
        return "mpi", f"{place.source} has started ranks on several hosts; {no_gpus}"
    _check_shm()
    return "shm", f"all ranks are on this host; {no_gpus}"


def _check_shm() -> None:
    from gradsync.communicators.shared_memory.segment import check_platform

    check_platform()


def _check_mpi(place: RankEnvironment) -> None:
    """Initialises MPI, and checks that it can join the ranks of the run."""
    from gradsync.communicators.mpi.mpi_job import check_place, load_mpi

    if place.source == "gradsync":  # our launcher removes mpiexec's variables for its ranks
        raise BackendUnavailable(
            "backend 'mpi' needs ranks that mpiexec or srun has started, but gradsync has started these. Start the "
            f"script with `mpiexec -n {place.world_size} python script.py`"
        )
    check_place(load_mpi(), place.rank, place.world_size)


def _check_mpi_instead(place: RankEnvironment, no_gpus: str) -> None:
    """Checks that MPI can join ranks on several hosts without a GPU for each; the error has advice."""
    instead = f"start them with mpiexec or srun, as in {_MPIEXEC}; if all are on one machine, set {BACKEND}=shm"
    if place.source in SOURCES_WITH_MPI:
        try:
            _check_mpi(place)
            return
        except BackendUnavailable as error:
            instead = str(error)
    raise BackendUnavailable(
        f"no backend for {place.world_size} ranks with {place.local_world_size} on this host: NCCL needs a GPU for "
        f"each rank ({no_gpus}); on the CPU, ranks of several hosts communicate over MPI: {instead}"
    )


def _check_nccl() -> None:
    from gradsync.communicators.nccl.connect import count_devices
    from gradsync.communicators.nccl.library import Nccl

    try:
        Nccl()
        if count_devices() == 0:
            raise BackendUnavailable("no GPU is visible")
    except BackendUnavailable as error:
        raise BackendUnavailable(f"backend 'nccl' cannot run here: {error}; use 'shm' on one host") from None


# -- After the ranks have joined --------------------------------------------------------------------------------------


def agree_on_backend(client: RendezvousClient, wanted: str, settings: WorldSettings) -> str:
    """Returns the backend for all ranks of the world. Every rank must call it, once in a generation.

    Raises:
        InvalidArgument: the ranks ask for different backends, or only some ask for the debug mode; raised on all ranks.
        BackendUnavailable: no backend can join the ranks; raised on all ranks.
        RendezvousTimeout, RankFailed: a rank did not call it, or died.
    """

    def decide(offers: Sequence[str]) -> str:
        for rank, (its_wanted, debug, _) in enumerate(offer.split("\n", 2) for offer in offers):
            if debug != str(settings.debug):
                raise InvalidArgument(
                    f"rank 0 has debug={settings.debug}, rank {rank} has debug={debug}: all ranks need the same, by "
                    f"init_process_group or {DEBUG}"
                )
            if its_wanted != wanted:
                raise InvalidArgument(
                    f"rank {rank} asks for backend {its_wanted!r}, rank 0 for {wanted!r}: all ranks need the same, by "
                    f"init_process_group or {BACKEND}"
                )
        if wanted != "auto":
            return f"{wanted}\nasked for"
        return "\n".join(suitable_backend([offer.split("\n", 2)[2] for offer in offers], settings))

    mine = _offer_of_gpu(settings, only_if_seen=True) if wanted == "auto" else _YES
    decision = _decide_together(client, f"{wanted}\n{settings.debug}\n{mine}", decide, settings)
    chosen, _, reason = decision.partition("\n")
    _log_choice(settings.place, chosen, reason)
    return chosen


def agree_on_another(client: RendezvousClient, backend: str, settings: WorldSettings) -> None:
    """Checks that another backend can join the ranks of a client. Every rank must call it, once for each client.

    Args:
        client: the ranks' client, used for nothing else.
        backend: "nccl", "shm" or "mpi".
        settings: the world's settings.

    Raises:
        BackendUnavailable: a rank cannot use the backend; raised on all ranks.
        RendezvousTimeout, RankFailed: a rank did not call it, or died.
    """

    def decide(offers: Sequence[str]) -> str:
        if reason := _why_not(offers, settings):
            raise BackendUnavailable(f"backend {backend!r} cannot join these ranks: {reason}")
        return ""

    mine = _offer_of_gpu(settings) if backend == "nccl" else _offer_of_host(backend, settings.place)
    _decide_together(client, mine, decide, settings)


def _decide_together(
    client: RendezvousClient, offer: str, decide: Callable[[Sequence[str]], str], settings: WorldSettings
) -> str:
    """Lets rank 0 decide from the offers of all ranks; returns its decision, or raises its error, on every rank."""
    from gradsync.rendezvous.frames import MAX_EXCHANGED_BYTES  # imported here: a single rank does not need it

    room_bytes = min(_MAX_OFFER_BYTES, MAX_EXCHANGED_BYTES // client.world_size)
    offers = client.exchange("backend/offers", offer.encode()[:room_bytes], timeout_seconds=settings.timeout_seconds)
    if client.rank == 0:
        try:
            decision = f"\n{decide([offer.decode(errors='replace') for offer in offers])}"
        except (InvalidArgument, BackendUnavailable) as error:
            decision = f"{type(error).__name__}\n{error}"
        client.set("backend", decision.encode())
    else:
        decision = client.get("backend", from_rank=0, timeout_seconds=settings.timeout_seconds).decode()
    refused, _, text = decision.partition("\n")
    if refused:
        raise _ERRORS[refused](f"{client.label}: {text}")
    return text


def _offer_of_gpu(settings: WorldSettings, *, only_if_seen: bool = False) -> str:
    """Returns the identity of the GPU that this rank could use, or the reason why it has none.

    Args:
        settings: the world's settings.
        only_if_seen: loads CuPy, which takes long, only if a GPU is visible and the device is not "cpu".
    """
    device = settings.device
    if only_if_seen and device == "cpu":
        return f"{_NO}device='cpu' was asked for"
    if only_if_seen and count_gpus() == 0:
        return f"{_NO}no GPU is visible"
    from gradsync.communicators.nccl.connect import choose_device, count_devices, device_identity
    from gradsync.communicators.nccl.library import Nccl

    try:
        library = Nccl()
        number = choose_device(
            None if device == "cpu" else device,
            settings.place.local_rank,
            count_devices(),
            allow_shared_gpu=settings.allow_shared_gpu,
        )
        return f"{_YES}{device_identity(number, library.version)}"
    except GradsyncError as error:
        return f"{_NO}{error}"


def _offer_of_host(backend: str, place: RankEnvironment) -> str:
    """Returns whether this rank can use shared memory or MPI, and if not the reason."""
    try:
        if backend == "mpi":
            _check_mpi(place)
            return _YES
        if backend != "shm":
            raise BackendUnavailable(f"_offer_of_host() in backends.py does not know backend {backend!r}")
        from gradsync.communicators.shared_memory.shm_backend import check_memory

        _check_shm()
        if place.local_world_size != place.world_size:
            raise BackendUnavailable(
                f"it needs all ranks on one host; {place.local_world_size} of {place.world_size} ranks are on this one"
            )
        if place.rank == 0:  # rank 0 makes the memory for all
            check_memory(place.world_size)
    except BackendUnavailable as error:
        return f"{_NO}{error}"
    return _YES


def _why_not(offers: Sequence[str], settings: WorldSettings) -> str:
    """Returns the reason why a backend cannot join ranks with these offers; "" if it can."""
    for rank, offer in enumerate(offers):
        if not offer.startswith(_YES):
            reason = offer.removeprefix(_NO)
            return reason if len(set(offers)) == 1 else f"rank {rank}: {reason}"
    gpus = [offer for offer in offers if offer != _YES]
    if len(set(gpus)) < len(gpus) and not settings.allow_shared_gpu:
        return f"{len(gpus)} ranks for {len(set(gpus))} visible GPUs"
    return ""


def connect(backend: str, client: RendezvousClient | None, settings: WorldSettings, group: str) -> Communicator:
    """Makes the communicator of a client's ranks over a backend.

    Args:
        backend: a backend that can join the ranks.
        client: the ranks' client; None for "local".
        settings: the world's settings.
        group: the communicator's name, which must be new.

    Raises:
        BackendUnavailable, NcclError, RendezvousTimeout, RankFailed: the ranks could not connect.
    """
    timeouts = {
        "timeout_seconds": settings.timeout_seconds,
        "collective_timeout_seconds": settings.collective_timeout_seconds,
    }
    if client is None:
        communicator = local_communicator(collective_timeout_seconds=settings.collective_timeout_seconds)
    elif backend == "shm":
        from gradsync.communicators.shared_memory.shm_backend import connect_shared_memory

        communicator = Communicator(connect_shared_memory(client, group=group, **timeouts))
    elif backend == "mpi":
        from gradsync.communicators.mpi.mpi_backend import connect_mpi

        communicator = Communicator(connect_mpi(client, group=group, **timeouts))
    elif backend == "nccl":
        from gradsync.communicators.nccl.connect import connect_nccl

        nccl = connect_nccl(
            client,
            local_rank=settings.place.local_rank,
            device=None if settings.device == "cpu" else settings.device,
            group=group,
            timeout_seconds=settings.timeout_seconds,
            collective_timeout_seconds=settings.collective_timeout_seconds,
            allow_shared_gpu=settings.allow_shared_gpu,
        )
        communicator = Communicator(nccl)
    else:
        raise BackendUnavailable(f"connect() in backends.py does not know backend {backend!r}")
    if settings.debug:
        communicator._use_debug_mode()
    return communicator


def _log_choice(place: RankEnvironment, chosen: str, reason: str) -> None:
    # An unused GPU is worth a warning; any other choice is logged at level INFO.
    unused_gpu = chosen != "nccl" and reason != "asked for" and place.rank == 0 and count_gpus() > 0
    level = logging.WARNING if unused_gpu else logging.INFO
    _log.log(level, "rank %d/%d: backend %s (%s)", place.rank, place.world_size, chosen, reason)
