"""Which backend the ranks take: what was asked for, or what suits where they run; nothing that cannot run there.

What was asked for is checked before the ranks meet. "auto" is decided when they have met, by rank 0 for all: a rank
alone cannot know whether each of the others has a GPU, and one of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from gradsync.communicators.mpi.library import check_place, load_mpi
from gradsync.communicators.nccl.connection import choose_device, count_devices, device_identity
from gradsync.communicators.nccl.library import NcclLibrary
from gradsync.communicators.shared_memory.platform_check import check_platform
from gradsync.environment import BACKEND, DEBUG, RankEnvironment
from gradsync.errors import BackendUnavailable, GradsyncError, InvalidArgument
from gradsync.launchers import SOURCES_WITH_MPI
from gradsync.machine import count_gpus
from gradsync.rendezvous.client import RendezvousClient
from gradsync.rendezvous.group_client import CommunicatorClient

_GPU = "gpu "  # begins the offer of a rank that has one; what follows tells GPUs apart
_NO_GPU = "no gpu: "
_WANTS = "wants "  # begins what a rank says that was told which backend to take
_MAX_OFFER_BYTES = 4096
_MPIEXEC = "mpiexec -n 8 -hosts a,b python train.py"
_DEVICE = re.compile(r"cpu|cuda(:\d+)?")


def check_backend(wanted: str, place: RankEnvironment, device: str | None) -> str:
    """Returns the backend that was asked for, or "auto", after refusing what cannot run here.

    Args:
        wanted: one of BACKENDS.
        place: who this process is.
        device: what init_process_group was given; a CUDA device asks for "nccl".

    Raises:
        InvalidArgument: it does not run on the device, or "local" for several ranks.
        BackendUnavailable: it cannot run here; the text says why.
    """
    if device is not None and not (isinstance(device, str) and _DEVICE.fullmatch(device)):
        raise InvalidArgument(f"device must be 'cpu', 'cuda' or 'cuda:N', got {device!r}")
    if wanted == "auto" and device is not None and device != "cpu":
        wanted = "nccl"
    if wanted not in ("auto", "nccl") and device not in (None, "cpu"):
        raise InvalidArgument(f"backend {wanted!r} runs on device 'cpu', got {device!r}")
    if wanted == "local" and place.world_size != 1:
        raise InvalidArgument(f"backend 'local' is for one rank, world_size is {place.world_size}")
    if wanted == "shm":
        check_platform()
    if wanted == "mpi":
        check_mpi(place)
    if wanted == "nccl":
        _check_nccl()
    if wanted == "auto" and place.local_world_size != place.world_size and count_gpus() == 0:
        _check_mpi_instead(place, "no GPU is visible")
    return wanted


def offer_of(place: RankEnvironment, device: str | None, *, allow_shared_gpu: bool) -> str:
    """Says which GPU this rank could use, or why it has none; loads CuPy only beside a GPU."""
    if device == "cpu":
        return f"{_NO_GPU}device='cpu' was asked for"
    if count_gpus() == 0:
        return f"{_NO_GPU}no GPU is visible"
    return _gpu_offer(place, device, allow_shared_gpu=allow_shared_gpu)


def share_gpu_offers(
    client: CommunicatorClient,
    place: RankEnvironment,
    device: str | None,
    timeout_seconds: float,
    *,
    allow_shared_gpu: bool,
) -> None:
    """Makes sure that NCCL can join the ranks of a client. Every rank must call it, once.

    Raises:
        BackendUnavailable: on all ranks, where one has no GPU, or several share one and may not.
        RendezvousTimeout, RankFailed: a rank did not come, or died.
    """
    offer = _gpu_offer(place, device, allow_shared_gpu=allow_shared_gpu)
    client.set(f"offer/{client.rank}", offer.encode()[:_MAX_OFFER_BYTES])
    client.barrier("offers", timeout_seconds=timeout_seconds)  # names who does not come
    offers = [client.get(f"offer/{rank}").decode(errors="replace") for rank in range(client.world_size)]
    reason = _why_not_nccl(offers, allow_shared_gpu=allow_shared_gpu)
    if reason is not None:
        raise BackendUnavailable(f"{client.label}: backend 'nccl' cannot join these ranks: {reason}")


def suitable_backend(offers: Sequence[str], place: RankEnvironment, *, allow_shared_gpu: bool) -> tuple[str, str]:
    """Returns the backend for ranks that have made these offers, and why.

    Raises:
        BackendUnavailable: no backend can join them; the text says why.
    """
    no_gpus = _why_not_nccl(offers, allow_shared_gpu=allow_shared_gpu)
    if no_gpus is None:
        return "nccl", "each rank has a GPU"
    if place.world_size == 1:
        return "local", f"one rank; {no_gpus}"
    if place.local_world_size != place.world_size:
        _check_mpi_instead(place, no_gpus)
        return "mpi", f"{place.source} has started ranks on several hosts; {no_gpus}"
    check_platform()
    return "shm", f"all ranks are on this host; {no_gpus}"


def agree_on_backend(
    client: RendezvousClient,
    wanted: str,
    place: RankEnvironment,
    device: str | None,
    timeout_seconds: float,
    *,
    allow_shared_gpu: bool,
    debug: bool = False,
) -> tuple[str, str]:
    """Returns the backend that all ranks take, and why. Every rank must call it, once in a generation.

    Raises:
        InvalidArgument: the ranks ask for different backends, or some for the debug mode and others not.
        BackendUnavailable: no backend can join them.
        RendezvousTimeout, RankFailed: a rank did not come, or died.
    """
    is_open = wanted == "auto"
    offer = offer_of(place, device, allow_shared_gpu=allow_shared_gpu) if is_open else f"{_WANTS}{wanted}"
    client.set(f"backend/offer/{client.rank}", offer.encode()[:_MAX_OFFER_BYTES])
    if client.rank == 0:
        chosen, reason = wanted, "asked for"
        if wanted == "auto":
            offers = [
                client.get(f"backend/offer/{rank}", timeout_seconds=timeout_seconds).decode(errors="replace")
                for rank in range(client.world_size)
            ]
            _check_all_open(offers)
            chosen, reason = suitable_backend(offers, place, allow_shared_gpu=allow_shared_gpu)
        client.set("backend", f"{wanted}\n{chosen}\n{debug}\n{reason}".encode())
    told = client.get("backend", timeout_seconds=timeout_seconds).decode()
    common, chosen, debugs, reason = told.split("\n", 3)
    if debugs != str(debug):
        raise InvalidArgument(
            f"rank {client.rank}/{client.world_size}: rank 0 has debug={debugs}, this rank debug={debug}: it has to be "
            f"the same on all ranks, by init_process_group or {DEBUG}"
        )
    if common != wanted:
        raise InvalidArgument(
            f"rank {client.rank}/{client.world_size}: rank 0 asks for backend {common!r}, this rank for {wanted!r}: "
            f"name one for all, by init_process_group or {BACKEND}"
        )
    return chosen, reason


def _check_all_open(offers: Sequence[str]) -> None:
    for rank, offer in enumerate(offers):
        if offer.startswith(_WANTS):
            raise InvalidArgument(
                f"rank {rank} asks for backend {offer.removeprefix(_WANTS)!r}, rank 0 for 'auto': name one for all, by "
                f"init_process_group or {BACKEND}"
            )


def _why_not_nccl(offers: Sequence[str], *, allow_shared_gpu: bool) -> str | None:
    for rank, offer in enumerate(offers):
        if not offer.startswith(_GPU):
            reason = offer.removeprefix(_NO_GPU)
            return reason if len(offers) == 1 or len(set(offers)) == 1 else f"rank {rank}: {reason}"
    if len(set(offers)) < len(offers) and not allow_shared_gpu:
        return f"{len(offers)} ranks for {len(set(offers))} visible GPUs"
    return None


def _gpu_offer(place: RankEnvironment, device: str | None, *, allow_shared_gpu: bool) -> str:
    try:
        NcclLibrary()
        device_id = choose_device(device, place.local_rank, count_devices(), allow_shared_gpu=allow_shared_gpu)
        return f"{_GPU}{device_identity(device_id)}"
    except GradsyncError as error:
        return f"{_NO_GPU}{error}"


def check_mpi(place: RankEnvironment) -> None:
    """Makes sure that MPI can join the ranks of the run; initialises it.

    Raises:
        BackendUnavailable: it cannot; the text says why.
    """
    if place.source == "gradsync":  # which keeps from its ranks what mpiexec may have told itself
        raise BackendUnavailable(
            "backend 'mpi' joins ranks that mpiexec or srun has started, and gradsync has started these. Start the "
            f"script with `mpiexec -n {place.world_size} python script.py`"
        )
    check_place(load_mpi(), place.rank, place.world_size)


def _check_mpi_instead(place: RankEnvironment, no_gpus: str) -> None:
    """Makes sure that MPI can join ranks of several hosts that have no GPU each.

    Raises:
        BackendUnavailable: it cannot, and there is no other backend; the text says what to do.
    """
    instead = f"start them with mpiexec or srun, as in {_MPIEXEC}; if all are on one machine, set {BACKEND}=shm"
    if place.source in SOURCES_WITH_MPI:
        try:
            check_mpi(place)
            return
        except BackendUnavailable as error:
            instead = str(error)
    raise BackendUnavailable(
        f"no backend for {place.world_size} ranks with {place.local_world_size} on this host: NCCL needs a GPU for "
        f"each rank ({no_gpus}); on the CPU, ranks of several hosts communicate over MPI: {instead}"
    )


def _check_nccl() -> None:
    try:
        NcclLibrary()
        if count_devices() == 0:
            raise BackendUnavailable("no GPU is visible")
    except BackendUnavailable as error:
        raise BackendUnavailable(f"backend 'nccl' cannot run here: {error}; use 'shm' on one host") from None
