"""Which backend a process takes: what was asked for, or what suits the machine; nothing that cannot run here."""

from __future__ import annotations

from gradsync.communicators.nccl_connection import count_devices
from gradsync.communicators.nccl_library import NcclLibrary
from gradsync.communicators.shared_memory import check_platform
from gradsync.environment import BACKENDS, RankEnvironment
from gradsync.errors import BackendUnavailable, InvalidArgument
from gradsync.visible_devices import count_gpus


def choose_backend(wanted: str, place: RankEnvironment, *, allow_shared_gpu: bool = False) -> tuple[str, str]:
    """Returns the backend to use, and why in words for the log.

    Args:
        wanted: one of BACKENDS.
        place: who this process is.
        allow_shared_gpu: whether ranks may share a GPU.

    Raises:
        InvalidArgument: no backend has that name, or "local" for several ranks.
        BackendUnavailable: the backend cannot run here, or none can; the text says why.
    """
    if wanted not in BACKENDS:
        raise InvalidArgument(f"unknown backend {wanted!r} in GRADSYNC_BACKEND: use one of {', '.join(BACKENDS)}")
    if wanted == "auto":
        return _suitable_backend(place, allow_shared_gpu=allow_shared_gpu)
    if wanted == "mpi":
        raise BackendUnavailable("backend 'mpi' is not part of this version; use 'shm' on one host")
    if wanted == "local" and place.world_size != 1:
        raise InvalidArgument(f"backend 'local' is for one rank, world_size is {place.world_size}")
    if wanted == "shm":
        check_platform()
    if wanted == "nccl":
        _check_nccl()
    return wanted, "asked for"


def _suitable_backend(place: RankEnvironment, *, allow_shared_gpu: bool) -> tuple[str, str]:
    no_gpus = why_not_nccl(place, allow_shared_gpu=allow_shared_gpu)
    if no_gpus is None:
        return "nccl", "each rank has a GPU"
    if place.world_size == 1:
        return "local", f"one rank; {no_gpus}"
    if place.local_world_size != place.world_size:
        raise BackendUnavailable(
            f"no backend for {place.world_size} ranks with {place.local_world_size} on this host: without a GPU for "
            f"each rank ({no_gpus}), this version joins the ranks of one host"
        )
    check_platform()
    return "shm", f"all ranks are on this host; {no_gpus}"


def why_not_nccl(place: RankEnvironment, *, allow_shared_gpu: bool) -> str | None:
    """Returns why the ranks of this host cannot use NCCL, or None when they can. Loads CuPy only beside a GPU."""
    if count_gpus() == 0:
        return "no GPU is visible"
    try:
        count = _usable_gpus()
    except BackendUnavailable as error:
        return str(error)
    if count < place.local_world_size and not (allow_shared_gpu and count):
        return f"{place.local_world_size} ranks here for {count} visible GPUs"
    return None


def _check_nccl() -> None:
    try:
        if _usable_gpus() == 0:
            raise BackendUnavailable("no GPU is visible")
    except BackendUnavailable as error:
        raise BackendUnavailable(f"backend 'nccl' cannot run here: {error}; use 'shm' on one host") from None


def _usable_gpus() -> int:
    """Loads NCCL, and counts the GPUs that CUDA shows to this process."""
    NcclLibrary()
    return count_devices()
