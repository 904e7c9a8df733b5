"""What a rank tells of itself: who it is, how far it has come, and, when another rank misses it, what it does.

Part of the client, beside `followers`: `liveness` sends the progress with each heartbeat, an inquiry of the server
asks for the rest. The process group says where to look, by `RendezvousClient.describe_with`.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from itertools import islice

from gradsync.errors import describe
from gradsync.machine import machine_identity
from gradsync.rendezvous.client_connection import ClientConnection, StreamEnded
from gradsync.rendezvous.messages import (
    MAX_GROUP_BYTES,
    MAX_MACHINE_BYTES,
    MAX_REPORT_BYTES,
    MAX_TOLD_GROUPS,
    FrameType,
    clip_text,
)

NOTHING_TO_TELL = "(nothing is known of what it does)"


class SelfReport:
    """Speaks for this rank.

    Args:
        connection: authenticated.
    """

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._positions: Callable[[], dict[str, int]] = dict
        self._report: Callable[[], str] = str

    def describe_with(self, positions: Callable[[], dict[str, int]], report: Callable[[], str]) -> None:
        """Lets these two say how far this rank has come, and what it does."""
        self._positions, self._report = positions, report

    def introduce(self) -> None:
        """Tells the server which process this is, right behind the next message: that is the one that joins.

        A rank that is stopped just after it has joined would not be missed otherwise: the server would not know it.
        """
        host = clip_text(socket.gethostname(), MAX_MACHINE_BYTES)
        self._connection.let_follow(FrameType.INTRODUCE, machine_identity(), host, os.getpid())

    def answer(self, inquiry: int) -> None:
        """Tells the server what this rank does."""
        with contextlib.suppress(StreamEnded):  # whoever reads next finds the server gone, and says so
            self._connection.post(FrameType.STATUS, inquiry, self.progress(), self._text())

    def progress(self) -> dict[str, int]:
        """Returns how many collectives this rank has begun in each group; nothing where that cannot be told."""
        try:
            told = islice(self._positions().items(), MAX_TOLD_GROUPS)
            return {clip_text(group, MAX_GROUP_BYTES): min(max(int(begun), 0), 2**63 - 1) for group, begun in told}
        except Exception:  # the thread that asks can do nothing about it, and the report shows that it is missing
            return {}

    def _text(self) -> str:
        try:
            return clip_text(self._report() or NOTHING_TO_TELL, MAX_REPORT_BYTES)
        except Exception as error:
            return clip_text(f"(its report cannot be made: {describe(error)})", MAX_REPORT_BYTES)
