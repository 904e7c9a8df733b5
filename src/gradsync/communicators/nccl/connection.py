"""The way to an NCCL communicator: a device for each rank, one id for all, and a deadline for every step."""

from __future__ import annotations

import glob
import os
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gradsync.communicators.nccl.library import NcclLibrary
from gradsync.errors import BackendUnavailable, InvalidArgument, RendezvousTimeout
from gradsync.machine import boot_id
from gradsync.rendezvous.group_client import CommunicatorClient

if TYPE_CHECKING:
    from gradsync.communicators.nccl.communicator import NcclCommunicator

_MULTI_RANK_GPU_SINCE = 23000  # NCCL 2.30
# Ranks on one GPU wait for each other inside their kernels, so all of them must fit on it at once.
_CTAS_OF_A_SHARING_RANK = "4"


def count_devices() -> int:
    """Returns how many GPUs CUDA shows to this process.

    Raises:
        BackendUnavailable: CuPy or the driver is missing; the text says which.
    """
    try:
        import cupy
    except ImportError as error:
        raise BackendUnavailable(f"CuPy cannot be imported: {error}") from error
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        if not has_driver():
            raise BackendUnavailable(
                "there is no NVIDIA driver or GPU here (in a container: was it started with its GPUs?)"
            ) from error
        raise BackendUnavailable(f"no usable GPU: {error}") from error


def has_driver() -> bool:
    """Whether NVIDIA's driver shows itself to this process; also below Windows (WSL2)."""
    return bool(glob.glob("/dev/nvidia*")) or os.path.exists("/dev/dxg")


def choose_device(wanted: str | None, local_rank: int, count: int, *, allow_shared_gpu: bool) -> int:
    """Returns CUDA's number of the device for this rank, as this process sees its devices.

    A launcher that gives each rank its own CUDA_VISIBLE_DEVICES leaves one visible device, number 0; else the ranks
    of a host take the visible devices in the order of LOCAL_RANK.

    Args:
        wanted: "cuda", "cuda:N", or None.
        local_rank: this rank's number on its host.
        count: visible devices.
        allow_shared_gpu: whether ranks may share devices, in turn.

    Raises:
        InvalidArgument: `wanted` is no such text.
        BackendUnavailable: there is no such device.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = f"{count} GPUs are visible (CUDA_VISIBLE_DEVICES{' is not set' if visible is None else '=' + visible})"
    if wanted is not None and wanted != "cuda":
        kind, _, number = wanted.partition(":")
        if kind != "cuda" or not number.isdecimal():
            raise InvalidArgument(f"backend 'nccl' runs on device 'cuda' or 'cuda:N', got {wanted!r}")
        if int(number) >= count:
            raise BackendUnavailable(f"device {wanted!r} does not exist: {seen}")
        return int(number)
    if count == 0:
        raise BackendUnavailable(f"backend 'nccl' needs a GPU: {seen}")
    if local_rank < count:
        return local_rank
    if count == 1 and visible is not None and "," not in visible:
        return 0  # given by the launcher; two ranks on one device are found out when they meet
    if allow_shared_gpu:
        return local_rank % count
    raise BackendUnavailable(
        f"local rank {local_rank} has no GPU of its own: {seen}; start fewer ranks, or pass allow_shared_gpu=True "
        "(for tests: slow)"
    )


def connect_nccl(
    client: CommunicatorClient,
    *,
    local_rank: int,
    device: str | None = None,
    group: str = "world",
    timeout_seconds: float = 120.0,
    collective_timeout_seconds: float = 300.0,
    allow_shared_gpu: bool = False,
) -> NcclCommunicator:
    """Builds the communicator of all ranks of a rendezvous. Every rank must call it with the same group.

    Whoever calls it reports a failure to the other ranks, which would wait for this one otherwise.

    Args:
        client: the way of its ranks to the rendezvous server: every rank has authenticated.
        local_rank: this rank's number on its host.
        device: "cuda:N", or None for the local rank's.
        group: a name not used before in this generation.
        timeout_seconds: for meeting the others, ncclCommInitRank included.
        collective_timeout_seconds: how long a collective waits for a rank.
        allow_shared_gpu: whether ranks may share a GPU: for tests.

    Raises:
        BackendUnavailable: no CuPy, NCCL or GPU, or ranks share a GPU and may not; the text says which.
        NcclError: NCCL failed.
        RendezvousTimeout, RankFailed: a rank did not come, or died.
    """
    deadline = time.monotonic() + timeout_seconds
    library = NcclLibrary()
    device_id = choose_device(device, local_rank, count_devices(), allow_shared_gpu=allow_shared_gpu)
    if allow_shared_gpu:
        _let_ranks_share(library.version, client.rank)
    _use(device_id)
    _check_devices(client, device_id, group, _clock(deadline), allow_shared_gpu=allow_shared_gpu)
    return meet_and_init(client, library, device_id, group, deadline, collective_timeout_seconds)


def meet_and_init(
    client: CommunicatorClient,
    library: NcclLibrary,
    device_id: int,
    group: str,
    deadline: float,
    collective_timeout_seconds: float,
) -> NcclCommunicator:
    """Builds the communicator of the client's ranks, whose devices are known to be fit. Every one must call it.

    Args:
        client: the way of these ranks to the rendezvous server.
        library: NCCL.
        device_id: this rank's device.
        group: a name not used before in this generation.
        deadline: for meeting the others, in time.monotonic() seconds.
        collective_timeout_seconds: how long a collective waits for a rank.

    Raises:
        NcclError, RendezvousTimeout, RankFailed: as for connect_nccl.
    """
    left = _clock(deadline)
    unique_id = client.unique_id(
        f"nccl/{group}", root=0, make_id=library.make_unique_id if client.rank == 0 else None, timeout_seconds=left()
    )
    # ncclCommInitRank cannot be interrupted: only when all ranks stand before it, they enter.
    client.barrier(f"nccl/{group}/ready", timeout_seconds=left())
    raw = _init_rank(client, library, unique_id, device_id, left())
    return take_over(raw, client, library, device_id, group, collective_timeout_seconds)


def _init_rank(
    client: CommunicatorClient, library: NcclLibrary, unique_id: bytes, device_id: int, seconds: float
) -> Any:
    """Returns CuPy's communicator."""
    import cupy

    from gradsync.communicators.nccl.handle import call_with_deadline

    label = client.label

    def init() -> Any:
        with cupy.cuda.Device(device_id), library.errors("ncclCommInitRank", label):
            return library.binding.NcclCommunicator(client.world_size, library.as_unique_id(unique_id), client.rank)

    try:
        return call_with_deadline(init, "gradsync-nccl-init", seconds, client.check)
    except TimeoutError as error:
        raise RendezvousTimeout(
            f"{label}: ncclCommInitRank on cuda:{device_id} did not return within {seconds:.3g} s, although all ranks "
            "had come to it: a network that drops NCCL's connections (NCCL_SOCKET_IFNAME chooses the interface), or "
            "a stuck GPU; NCCL_DEBUG=INFO tells more"
        ) from error


def take_over(
    raw: Any,
    client: CommunicatorClient,
    library: NcclLibrary,
    device_id: int,
    group: str,
    collective_timeout_seconds: float,
) -> NcclCommunicator:
    """Makes our communicator of CuPy's `raw`; the other arguments are as for meet_and_init."""
    from gradsync.communicators.nccl.communicator import NcclCommunicator
    from gradsync.communicators.nccl.handle import NcclHandle

    handle = NcclHandle(library, raw, device_id, client.label)
    try:
        return NcclCommunicator(
            handle, client, group=group, device_id=device_id, timeout_seconds=collective_timeout_seconds
        )
    except BaseException:
        handle.begin_abort()
        raise


def _use(device_id: int) -> None:
    """Makes the device current for the calling thread, as torch.cuda.set_device does: the script's arrays go there."""
    import cupy

    cupy.cuda.Device(device_id).use()


def _clock(deadline: float) -> Callable[[], float]:
    return lambda: max(0.0, deadline - time.monotonic())


def _check_devices(
    client: CommunicatorClient, device_id: int, group: str, left: Callable[[], float], *, allow_shared_gpu: bool
) -> None:
    """Finds ranks on one GPU before NCCL does, in words that help, on every rank."""
    mine = device_identity(device_id)
    client.set(f"nccl/{group}/device/{client.rank}", mine.encode())
    by_device: dict[str, list[int]] = {}
    for rank in range(client.world_size):
        where = client.get(f"nccl/{group}/device/{rank}", timeout_seconds=left()).decode()
        by_device.setdefault(where, []).append(rank)
    shared = {where: ranks for where, ranks in by_device.items() if len(ranks) > 1}
    if shared and not allow_shared_gpu:
        where, ranks = next(iter(shared.items()))
        host, _, bus = where.split(" ")
        raise BackendUnavailable(
            f"{client.label}: ranks {ranks} share the GPU {bus} of {host}: give each its own "
            "(CUDA_VISIBLE_DEVICES, or device=), or pass allow_shared_gpu=True (for tests: slow)"
        )


def device_identity(device_id: int) -> str:
    """Returns what tells this GPU from all others of all hosts: host name, boot id and PCI bus id."""
    import cupy

    bus = cupy.cuda.runtime.deviceGetPCIBusId(device_id)
    return f"{socket.gethostname()} {boot_id()} {bus if isinstance(bus, str) else bus.decode()}"


def _let_ranks_share(version: int, rank: int) -> None:
    """Sets what makes NCCL accept several ranks on one GPU; read by NCCL when the first communicator is made."""
    os.environ.setdefault("NCCL_MAX_CTAS", _CTAS_OF_A_SHARING_RANK)
    if version >= _MULTI_RANK_GPU_SINCE:
        os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    else:
        # Ranks that seem to be on different hosts may share a GPU; they talk through sockets, in milliseconds.
        os.environ.setdefault("NCCL_HOSTID", f"gradsync-rank-{rank}")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
