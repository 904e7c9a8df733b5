"""The compared servers, the phases of their simulated ranks, and the interface of such a rank."""

from __future__ import annotations

from typing import Protocol

GRADSYNC = "gradsync"
TCPSTORE = "TCPStore"
CONTENDERS = (GRADSYNC, TCPSTORE)

JOIN = "join"  # connect, authenticate, and wait until all have joined
PUT_ID = "put id"  # rank 0 hands 128 bytes in ...
GET_ID = "get id"  # ... and all others ask for them
BARRIER = "barrier"
LEAVE = "leave"
PHASES = (JOIN, PUT_ID, GET_ID, BARRIER)
UNIQUE_ID = bytes(range(128))  # as long as an NCCL id


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
