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
from typing import Any

from gradsync.errors import describe
from gradsync.machine import machine_identity
from gradsync.rendezvous.client_connection import ClientConnection, StreamEnded
from gradsync.rendezvous.disagreement import Told
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
        self._history: Callable[[], Told] = dict
        self._on_trouble: Callable[[str], None] = _do_nothing

    def describe_with(
        self,
        positions: Callable[[], dict[str, int]],
        report: Callable[[], str],
        history: Callable[[], Told] = dict,
        on_trouble: Callable[[str], None] | None = None,
    ) -> None:
        """Lets these say how far this rank has come, what it does, and what it remembers; the last hears of trouble.

        See Membership.describe_with.
        """
        self._positions, self._report, self._history = positions, report, history
        self._on_trouble = on_trouble or _do_nothing

    def introduction(self) -> tuple[Any, ...]:
        """Returns the message that tells the server who this is: it does not miss a process that it does not know."""
        host = clip_text(socket.gethostname(), MAX_MACHINE_BYTES)
        return FrameType.INTRODUCE, machine_identity(), host, os.getpid()

    def answer(self, inquiry: int) -> None:
        """Tells the server what this rank does."""
        with contextlib.suppress(StreamEnded):  # whoever reads next finds the server gone, and says so
            with contextlib.suppress(Exception):  # the report shows what there is without it
                if history := dict(self._history()):
                    self._connection.post(FrameType.HISTORY, inquiry, history)
            self._connection.post(FrameType.STATUS, inquiry, self.progress(), self._text())
        self.note_trouble("a rank has waited too long for others")  # last: who asks does not wait for what is done then

    def note_trouble(self, text: str) -> None:
        """Hears that the generation has failed, or may be about to."""
        with contextlib.suppress(Exception):  # the thread that tells can do nothing about it
            self._on_trouble(text)

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


def _do_nothing(_text: str) -> None:
    pass
