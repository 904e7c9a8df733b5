"""What a rank leaves at the rendezvous server when it closes a communicator, for ranks that would wait for it in vain.

For communicators whose ranks share no memory in which they could tell each other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from gradsync.errors import GradsyncError, RankFailed
from gradsync.rendezvous.group_client import CommunicatorClient


class ClosingNotices:
    """The notices of one communicator.

    Args:
        client: this rank's connection to the rendezvous server; its ranks are the communicator's.
        keys: where the notices stand; the same on all ranks, and nobody else's.
        label: this rank in errors.
    """

    def __init__(self, client: CommunicatorClient, keys: str, label: str) -> None:
        self._client = client
        self._keys = keys
        self._label = label
        self._own_rank = client.world_ranks[client.rank]

    def announce(self, position: int) -> None:
        """Tells the other ranks that this one will not come to the collective of this number, or a later one."""
        with contextlib.suppress(GradsyncError):
            self._client.set(f"{self._keys}/{self._own_rank}", str(position).encode())
            self._client.add(self._keys)

    def look(self, position: float, ranks: Iterable[int] | None = None) -> None:
        """Raises RankFailed when another rank has closed the communicator before it had passed this collective.

        Args:
            position: its number.
            ranks: whom to look for, by their numbers in the world; None is all.
        """
        if not self._client.add(self._keys, 0):
            return
        for rank in self._others() if ranks is None else ranks:
            with contextlib.suppress(TimeoutError):
                came_to = int(self._client.get(f"{self._keys}/{rank}", timeout_seconds=0.0))
                if came_to <= position:
                    raise RankFailed(
                        f"{self._label}: rank {rank} closed the communicator while this rank still needed it; "
                        "do all ranks make the same number of steps?",
                        rank=rank,
                        phase="collective",
                    )

    def _others(self) -> list[int]:
        return [rank for rank in self._client.world_ranks if rank != self._own_rank]
