"""Communicators of some ranks of an NCCL communicator: by an id of their own, or by splitting the one that there is.

The groups of a process share its GPU. Each has a stream, a watcher and agreements of its own, and ends by itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import cupy

from gradsync.communicators.nccl.connection import meet_and_init, take_over
from gradsync.communicators.nccl.handle import NcclHandle, call_with_deadline
from gradsync.errors import CollectiveTimeout
from gradsync.rendezvous.group_client import CommunicatorClient, GroupClient

if TYPE_CHECKING:
    from gradsync.communicators.nccl.communicator import NcclCommunicator


def connect_group(
    client: CommunicatorClient, handle: NcclHandle, members: Sequence[int], name: str, timeout_seconds: float
) -> NcclCommunicator:
    """Builds the communicator of some ranks; every one of them must call it, the others need not.

    Whoever calls it reports a failure to the other ranks, which would wait for this one otherwise.

    Args:
        client: of the communicator that they are taken from.
        handle: of the same.
        members: ranks there, in the order of their new numbers.
        name: not used before in this generation.
        timeout_seconds: for meeting the others, and for the collectives of the group.

    Raises:
        NcclError: NCCL failed.
        RendezvousTimeout, RankFailed: a rank did not come, or died.
    """
    deadline = time.monotonic() + timeout_seconds
    group = GroupClient(client, members, name)
    try:
        return meet_and_init(group, handle.library, handle.device_id, name, deadline, timeout_seconds)
    except BaseException:
        group.close()
        raise


def split_group(
    client: CommunicatorClient,
    handle: NcclHandle,
    color: int,
    key: int,
    members: Sequence[int],
    name: str,
    timeout_seconds: float,
) -> NcclCommunicator | None:
    """Splits a communicator, on which nothing runs: cheaper than connect_group. Every rank of it must call it.

    Args:
        client, handle, timeout_seconds: as for connect_group.
        color: number of this rank's group, 0 or more; -1 (NCCL_SPLIT_NOCOLOR) where it is in none.
        key: this rank's number in its group.
        members, name: of its group, as for connect_group; empty where it is in none.

    Returns:
        The communicator of this rank's group; None where it is in none.

    Raises:
        NcclError: NCCL failed.
        CollectiveTimeout, RendezvousTimeout, RankFailed: a rank did not come, or died. The communicator that was to
            be split cannot be used any more.
    """
    if not handle.library.can_split:
        return connect_group(client, handle, members, name, timeout_seconds) if members else None
    deadline = time.monotonic() + timeout_seconds
    # Like ncclCommInitRank, ncclCommSplit cannot be interrupted: only when all ranks stand before it, they enter.
    client.barrier("nccl/split", timeout_seconds=timeout_seconds)

    def split() -> Any:
        with cupy.cuda.Device(handle.device_id):
            return handle.call("commSplit", color, key)

    seconds = max(0.0, deadline - time.monotonic())
    try:
        raw = call_with_deadline(split, "gradsync-nccl-split", seconds, client.check)
    except TimeoutError as error:
        raise CollectiveTimeout(
            f"{client.label}: ncclCommSplit on cuda:{handle.device_id} did not return within {seconds:.3g} s, although "
            "all ranks had come to it; NCCL_DEBUG=INFO tells more"
        ) from error
    if not members:
        return None
    group = GroupClient(client, members, name)
    return take_over(raw, group, handle.library, handle.device_id, name, timeout_seconds)
