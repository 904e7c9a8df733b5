"""The interface of a simulated rank to the loop that carries its bytes, without sockets or clocks."""

from __future__ import annotations

from typing import Protocol


class SimulatedRank(Protocol):
    """One rank of one contender: bytes in, bytes out.

    Attributes:
        is_done: whether this rank has ended the last phase.
    """

    is_done: bool

    def begin(self, phase: str) -> bytes:
        """Begins a phase; returns the bytes to send."""

    def hear(self, data: bytes) -> bytes:
        """Takes bytes from the server; returns the bytes to send."""

    def heartbeat(self) -> bytes:
        """Returns a heartbeat."""
