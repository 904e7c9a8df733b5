"""How ranks that have a GPU each come to a communicator of NCCL: by an id of their own, or by splitting one there is.

NCCL's calls for both wait for all ranks and cannot be interrupted: the ranks enter them when all stand before them.
"""

from __future__ import annotations

import time
from typing import Any

import cupy

from gradsync.communicators.nccl.handle import NcclHandle
from gradsync.communicators.nccl.library import NcclLibrary
from gradsync.errors import CollectiveTimeout, RendezvousTimeout
from gradsync.machine import run_with_timeout
from gradsync.rendezvous.client import RendezvousClient


def join_group(
    client: RendezvousClient, library: NcclLibrary, device_id: int, group: str, deadline: float
) -> NcclHandle:
    """Returns this rank's end of a new communicator of the client's ranks; every one of them must call it.

    Whoever calls it reports a failure to the other ranks, which would wait for this one otherwise.

    Args:
        client: the way of these ranks to the rendezvous server.
        library: NCCL.
        device_id: this rank's device, which no other rank has.
        group: a name not used before in this generation.
        deadline: for meeting the others, in time.monotonic() seconds.

    Raises:
        NcclError: NCCL failed.
        RendezvousTimeout, RankFailed: a rank did not come, or died.
    """

    def left() -> float:
        return max(0.0, deadline - time.monotonic())

    key = f"nccl/{group}/id"
    if client.rank == 0:
        client.set(key, library.make_unique_id())
    unique_id = client.get(key, from_rank=0, timeout_seconds=left())
    client.barrier(f"nccl/{group}/ready", timeout_seconds=left())
    raw = _init_rank(client, library, unique_id, device_id, left())
    return NcclHandle(library, raw, device_id, client.label)


def _init_rank(client: RendezvousClient, library: NcclLibrary, unique_id: bytes, device_id: int, seconds: float) -> Any:
    """Returns CuPy's communicator."""
    label = client.label

    def init() -> Any:
        with cupy.cuda.Device(device_id), library.errors("ncclCommInitRank", label):
            return library.binding.NcclCommunicator(client.world_size, unique_id, client.rank)

    try:
        return run_with_timeout(init, "gradsync-nccl-init", seconds, client.check)
    except TimeoutError as error:
        raise RendezvousTimeout(
            f"{label}: ncclCommInitRank on cuda:{device_id} did not return within {seconds:.3g} s, although all ranks "
            "had come to it: a network that drops NCCL's connections (NCCL_SOCKET_IFNAME chooses the interface), or "
            "a stuck GPU; NCCL_DEBUG=INFO tells more"
        ) from error


def split_group(client: RendezvousClient, handle: NcclHandle, color: int, key: int, timeout_seconds: float) -> Any:
    """Splits a communicator, on which nothing runs: cheaper than join_group. Every rank of it must call it.

    Args:
        client: the way of its ranks to the rendezvous server.
        handle: this rank's end of it.
        color: number of this rank's group, 0 or more; -1 (NCCL_SPLIT_NOCOLOR) where it is in none.
        key: this rank's number in its group.
        timeout_seconds: for meeting the others.

    Returns:
        CuPy's communicator of this rank's group; of no use where it is in none.

    Raises:
        NcclError: NCCL failed.
        CollectiveTimeout, RendezvousTimeout, RankFailed: a rank did not come, or died. The communicator that was to
            be split cannot be used any more.
    """
    deadline = time.monotonic() + timeout_seconds
    client.barrier("nccl/split", timeout_seconds=timeout_seconds)

    def split() -> Any:
        with cupy.cuda.Device(handle.device_id):
            return handle.call("commSplit", color, key)

    seconds = max(0.0, deadline - time.monotonic())
    try:
        return run_with_timeout(split, "gradsync-nccl-split", seconds, client.check)
    except TimeoutError as error:
        raise CollectiveTimeout(
            f"{client.label}: ncclCommSplit on cuda:{handle.device_id} did not return within {seconds:.3g} s, although "
            "all ranks had come to it; NCCL_DEBUG=INFO tells more"
        ) from error
