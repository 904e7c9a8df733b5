"""Notices of the server to whoever runs it, written by a thread of their own.

A terminal that stands still, or a pipe that nobody reads, blocks who writes to it; the server must go on.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading

_WAITING_NOTICES = 100  # more than anybody reads; then the newest are dropped
_END_SECONDS = 0.2

_log = logging.getLogger("gradsync.rendezvous")


class NoticeWriter:
    """Passes notices to the log, in order."""

    def __init__(self) -> None:
        self._texts: queue.Queue[str | None] = queue.Queue(_WAITING_NOTICES)
        self._thread: threading.Thread | None = None

    def tell(self, text: str) -> None:
        """Hands over a notice; never waits."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="gradsync-notices", daemon=True)
            self._thread.start()
        self._put(f"gradsync: {text}")

    def end(self) -> None:
        """Ends the thread, after what it has been handed over; waits a moment at most."""
        if self._thread is not None:
            self._put(None)
            self._thread.join(_END_SECONDS)

    def _put(self, text: str | None) -> None:
        with contextlib.suppress(queue.Full):
            self._texts.put_nowait(text)

    def _write(self) -> None:
        while (text := self._texts.get()) is not None:
            _log.warning("%s", text)
