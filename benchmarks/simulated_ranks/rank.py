"""What a simulated rank is to the loop that carries its bytes: no sockets here, and no clock."""

from __future__ import annotations

from typing import Protocol


class SimulatedRank(Protocol):
    """One rank of one contender: bytes in, bytes out.

    Attributes:
        is_done: whether the phase that was begun last is over for this rank.
    """

    is_done: bool

    def begin(self, phase: str) -> bytes:
        """Begins a phase; returns what to send."""

    def hear(self, data: bytes) -> bytes:
        """Takes what the server has sent; returns what to send in answer."""

    def heartbeat(self) -> bytes:
        """Returns a sign of life."""
