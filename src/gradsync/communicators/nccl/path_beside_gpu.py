"""The host path of a communicator between GPUs: shared memory where the ranks share some, else the rendezvous server.

Objects must not wait for the GPU, nor take its memory. So a communicator over shared memory is made beside the one over
NCCL, once it is needed; where ranks are on several machines, bytes go through the server's store.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.backend import Bounds
from gradsync.communicators.host_path import HostPath, OwnPath
from gradsync.communicators.nccl.store_path import StorePath
from gradsync.communicators.shared_memory.communicator import (
    SharedMemoryCommunicator,
    connect_shared_memory,
)
from gradsync.communicators.shared_memory.platform_check import check_platform
from gradsync.communicators.verdicts import NEWS_SECONDS, Verdicts
from gradsync.errors import BackendUnavailable, GradsyncError
from gradsync.machine import machine_identity
from gradsync.reduction import Array
from gradsync.rendezvous.group_client import CommunicatorClient, GroupClient

if TYPE_CHECKING:
    from gradsync.communicators.collective_call import CollectiveBase

_IDENTITY_BYTES = 16
_UNKNOWN = bytes(_IDENTITY_BYTES)

_log = logging.getLogger("gradsync")

T = TypeVar("T")


class PathBesideGpu(HostPath):
    """The path of a communicator between GPUs; chosen at its first use, when all ranks have agreed to use it.

    Args:
        owner: the communicator, in whose turn this runs and by whose hook the ranks agree.
        client: this rank's connection to the rendezvous server; its ranks are the owner's.
        verdicts: the server's, on the owner.
        timeout_seconds: how long a collective waits for a rank.
        raise_cause: raises what has ended the owner, or makes waiting vain, where something does.
    """

    def __init__(
        self,
        owner: CollectiveBase,
        client: CommunicatorClient,
        verdicts: Verdicts,
        timeout_seconds: float,
        raise_cause: Callable[[], None],
    ) -> None:
        self._owner = owner
        self._client = client
        self._verdicts = verdicts
        self._timeout_seconds = timeout_seconds
        self._raise_cause = raise_cause
        self._store = StorePath(client, owner.recorder.group, verdicts, timeout_seconds, raise_cause)
        self._beside: SharedMemoryCommunicator | None = None
        self._path: HostPath | None = None

    def share_numbers(self, numbers: Sequence[int], agreement: Agreement) -> list[list[int]]:
        """See HostPath."""
        self._owner._agree(agreement)
        return self._move(agreement, lambda path: path.share_numbers(numbers, agreement))

    def all_gather(self, source: Array, bounds: Bounds, agreement: Agreement) -> Array:
        """See HostPath."""
        return self._move(agreement, lambda path: path.all_gather(source, bounds, agreement))

    def gather(self, source: Array, bounds: Bounds, root: int, agreement: Agreement) -> Array | None:
        """See HostPath."""
        return self._move(agreement, lambda path: path.gather(source, bounds, root, agreement))

    def scatter(self, source: Array | None, bounds: Bounds, root: int, agreement: Agreement) -> Array:
        """See HostPath."""
        return self._move(agreement, lambda path: path.scatter(source, bounds, root, agreement))

    def end(self, reason: str | None) -> None:
        """See HostPath."""
        if self._beside is None:
            return
        if reason is None:
            self._beside.close()
        else:
            self._beside.abort(reason)

    def _move(self, agreement: Agreement, move: Callable[[HostPath], T]) -> T:
        """Calls move(path); a failure there is raised as what has ended the owner, where that is its cause.

        Not a context manager: the function that takes a turn must be running as long as the turn lasts.
        """
        try:
            path = self._path = self._path or self._choose(agreement)
            if self._beside is None:
                return move(path)
            with self._beside.lifetime.turn(agreement.headline(), agreement):
                return move(path)
        except GradsyncError:
            # Another rank has left this path because of what has happened to it elsewhere: that is the news.
            self._verdicts.await_news(NEWS_SECONDS, self._raise_cause)
            raise

    def _choose(self, agreement: Agreement) -> HostPath:
        """Makes the path; every rank finds the same."""
        world_size = self._owner.world_size
        if world_size == 1:
            return self._store  # where nothing moves
        mine = np.frombuffer(_memory_identity(), np.uint8)
        bounds = range(0, (world_size + 1) * _IDENTITY_BYTES, _IDENTITY_BYTES)
        found = self._store.all_gather(mine, bounds, agreement).tobytes()
        first = found[:_IDENTITY_BYTES]
        if first == _UNKNOWN or found != first * world_size:
            _log.info(
                "%s: Python objects go through the rendezvous server: not all ranks share memory", self._owner.label
            )
            return self._store
        group = GroupClient(self._client, range(world_size), f"{self._owner.recorder.group}/objects")
        self._beside = connect_shared_memory(
            group,
            group=group.name,
            timeout_seconds=self._timeout_seconds,
            collective_timeout_seconds=self._timeout_seconds,
        )
        return OwnPath(self._beside)


def _memory_identity() -> bytes:
    """Returns what is equal for ranks that can share memory as ../shared_memory does; zeros where that is not known."""
    try:
        check_platform()
        network = os.readlink("/proc/self/ns/net")  # the memory is handed over by a socket
    except (BackendUnavailable, OSError):
        return _UNKNOWN
    machine = machine_identity()
    if not machine:
        return _UNKNOWN
    return blake2b(f"{machine} {network} {os.getuid()}".encode(), digest_size=_IDENTITY_BYTES).digest()
