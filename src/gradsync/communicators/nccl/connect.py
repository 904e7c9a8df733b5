"""Connects the ranks of an NCCL communicator: chooses a device for each rank, and limits the waits for other ranks."""

from __future__ import annotations

import glob
import os
import socket
import time

from gradsync.communicators.backend import Backend
from gradsync.communicators.nccl.library import check_library
from gradsync.environment import DEBUG
from gradsync.errors import BackendUnavailable, InvalidArgument, name_ranks
from gradsync.launchers import RankEnvironment, WorldSettings
from gradsync.machine import boot_id
from gradsync.rendezvous.client import RendezvousClient
from gradsync.rendezvous.wire import MAX_EXCHANGED_BYTES

_MULTI_RANK_GPU_SINCE = 23000  # NCCL 2.30
# Kernels of ranks that share a GPU wait for each other, so they must fit on it at the same time.
_CTAS_OF_A_SHARING_RANK = "4"


def count_devices() -> int:
    """Returns how many GPUs CUDA shows to this process. CuPy must be installed.

    Raises:
        BackendUnavailable: the driver is missing, or CUDA failed.
    """
    import cupy

    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        if not has_driver():
            raise BackendUnavailable(
                "found no NVIDIA driver or GPU; in a container, check that the container was started with GPUs"
            ) from error
        raise BackendUnavailable(f"no usable GPU: {error}") from error


def has_driver() -> bool:
    """Whether there is an NVIDIA driver, of Linux or of Windows (WSL2)."""
    return bool(glob.glob("/dev/nvidia*")) or os.path.exists("/dev/dxg")


def choose_device(wanted: str | None, local_rank: int, count: int, *, allow_shared_gpu: bool) -> int:
    """Returns the CUDA device number for this rank, counted among the devices that this process sees.

    Where a launcher sets CUDA_VISIBLE_DEVICES to one device for each rank, that is number 0. Otherwise LOCAL_RANK=i
    uses device i.

    Args:
        wanted: the device that was asked for, such as "cuda:1"; "cuda" or None leaves the choice.
        local_rank: this rank's number on its host.
        count: the number of visible devices.
        allow_shared_gpu: whether several ranks may use one device.

    Raises:
        InvalidArgument: `wanted` names no CUDA device.
        BackendUnavailable: there is no such device, or none left for this rank.
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
        return 0  # the launcher has chosen; _check_devices finds two ranks with one device
    if allow_shared_gpu:
        return local_rank % count
    raise BackendUnavailable(
        f"local rank {local_rank} has no GPU of its own: {seen}; start fewer ranks, or, if only for tests, pass "
        "allow_shared_gpu=True"
    )


def check(_place: RankEnvironment) -> None:
    """See BackendModule. Raises BackendUnavailable if CuPy, NCCL or a GPU is missing."""
    try:
        check_library()
        if count_devices() == 0:
            raise BackendUnavailable("no GPU is visible")
    except BackendUnavailable as error:
        raise BackendUnavailable(f"backend 'nccl' cannot run here: {error}; use 'shm' on one host") from None


def offer(settings: WorldSettings) -> str:
    """See BackendModule. Raises BackendUnavailable if CuPy, NCCL or a GPU for this rank is missing."""
    version = check_library()
    return device_identity(_device_for(settings), version)


def connect(client: RendezvousClient, settings: WorldSettings, group: str) -> Backend:
    """See BackendModule. The caller must report an error: the other ranks wait for this one.

    Args:
        client: this rank's connection to the rendezvous server.
        settings: the world's; `timeout_seconds` limits the whole call, with ncclCommInitRank.
        group: the group's name, which no other has had since the last start of the ranks.

    Raises:
        InvalidArgument: settings.device names no CUDA device.
        BackendUnavailable: CuPy, NCCL or a GPU is missing, or ranks share a GPU without allow_shared_gpu.
        NcclError: NCCL failed.
        RendezvousTimeout: a rank did not call it in time.
        RendezvousError: the connection to the rendezvous server was lost.
        RankFailed: a rank died.
    """
    deadline = time.monotonic() + settings.timeout_seconds
    version = check_library()  # raises without CuPy, which the imports below need
    device_id = _device_for(settings)
    if settings.allow_shared_gpu:
        _let_ranks_share(version, client.rank)
    import cupy

    cupy.cuda.Device(device_id).use()  # like torch.cuda.set_device: new arrays use this device
    identity = device_identity(device_id, version)
    _check_devices(client, identity, group, deadline, allow_shared_gpu=settings.allow_shared_gpu)
    from gradsync.communicators.nccl.backend import NcclBackend

    seconds = settings.collective_timeout_seconds
    return NcclBackend(client, device_id, group, seconds, deadline)


def _device_for(settings: WorldSettings) -> int:
    """Returns the CUDA device number for this rank; raises as choose_device does."""
    wanted, rank = None if settings.device == "cpu" else settings.device, settings.place.local_rank
    return choose_device(wanted, rank, count_devices(), allow_shared_gpu=settings.allow_shared_gpu)


def _check_devices(
    client: RendezvousClient, identity: str, group: str, deadline: float, *, allow_shared_gpu: bool
) -> None:
    """Raises on every rank if ranks share a GPU without allow_shared_gpu, which NCCL's own error says less well.

    Or if GRADSYNC_DEBUG is not the same on all ranks: some would wait for comparisons.
    """
    debugs = DEBUG.read()
    mine = bytes([debugs]) + identity.encode()[: MAX_EXCHANGED_BYTES // client.world_size - 1]
    by_device: dict[bytes, list[int]] = {}
    seconds = max(0.0, deadline - time.monotonic())
    told = client.exchange(f"nccl/{group}/devices", mine, timeout_seconds=seconds)
    if others := [rank for rank, text in enumerate(told) if text[0] != debugs]:
        raise InvalidArgument(
            f"{client.label}: GRADSYNC_DEBUG is {'' if debugs else 'not '}set here, and on {name_ranks(others)} it is "
            f"{'not' if debugs else 'set'}: set it on all ranks"
        )
    for rank, text in enumerate(told):
        by_device.setdefault(text[1:], []).append(rank)
    shared = {where: ranks for where, ranks in by_device.items() if len(ranks) > 1}
    if shared and not allow_shared_gpu:
        where, ranks = next(iter(shared.items()))
        bus, host = _gpu_of(where)[0], _gpu_of(where)[1].partition(" ")[2]
        raise BackendUnavailable(
            f"{client.label}: ranks {ranks} share the GPU {bus} of {host}: give each rank its own "
            "GPU by CUDA_VISIBLE_DEVICES or device=, or, for tests only, pass allow_shared_gpu=True"
        )

    if len({_gpu_of(where) for where in by_device}) < len(by_device):
        # MIG slices of one GPU, which are one GPU to NCCL. Source: NCCL, src/init.cc, and its issue 1716.
        os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")


def device_identity(device_id: int, nccl_version: int) -> str:
    """Returns text that identifies a GPU among all hosts: PCI bus id, UUID, boot id and host name.

    With thousands of ranks a message has room for the first bytes of each text only, so what identifies the GPU comes
    first. MIG slices of one GPU have one bus id and several UUIDs; NCCL before 2.30 does not allow two ranks with one
    bus id, so for it the UUID is left out.

    Args:
        device_id: the CUDA device number in this process.
        nccl_version: such as 23203.
    """
    import cupy

    bus = cupy.cuda.runtime.deviceGetPCIBusId(device_id)
    # CuPy may cut off the UUID at its first zero byte. What is left will do, beside the bus id.
    uuid = cupy.cuda.runtime.getDeviceProperties(device_id).get("uuid", b"")
    slice_name = uuid.hex() if nccl_version >= _MULTI_RANK_GPU_SINCE else ""
    return f"{bus if isinstance(bus, str) else bus.decode()}/{slice_name} {boot_id()} {socket.gethostname()}"


def _gpu_of(identity: bytes) -> tuple[str, str]:
    """Returns two parts of a device_identity: the device's bus id, and the boot id and name of its host."""
    device, _, machine = identity.decode(errors="replace").partition(" ")
    return device.partition("/")[0], machine


def _let_ranks_share(version: int, rank: int) -> None:
    """Sets the variables with which NCCL accepts several ranks on one GPU; it reads them at its first communicator."""
    os.environ.setdefault("NCCL_MAX_CTAS", _CTAS_OF_A_SHARING_RANK)
    if version >= _MULTI_RANK_GPU_SINCE:
        os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    else:
        # NCCL before 2.30 lets ranks share a GPU only if they seem to be on different hosts. Over their sockets a
        # collective takes milliseconds.
        os.environ.setdefault("NCCL_HOSTID", f"gradsync-rank-{rank}")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        # The GPU alternates between the processes of the ranks, so each message waits for a turn. Others have measured
        # half the time with rings and the simple protocol. What is for several hosts is off, because there is one.
        os.environ.setdefault("NCCL_ALGO", "Ring")
        os.environ.setdefault("NCCL_PROTO", "Simple")
        os.environ.setdefault("NCCL_MNNVL_ENABLE", "0")
        os.environ.setdefault("NCCL_IB_DISABLE", "1")
        os.environ.setdefault("NCCL_RAS_ENABLE", "0")
