"""Signals to the launcher as bytes on a pipe, so that the supervisor's one loop can wait for them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalInbox:
    """While entered in the main thread, collects SIGINT, SIGTERM and SIGHUP instead of letting them act.

    Other threads cannot install handlers: there the inbox stays empty. A signal that the process ignores
    (nohup, a background job) stays ignored; but for SIGCHLD, because with that ignored the kernel throws exit codes
    away, and a failed rank would look like a good one. What came and was not read acts on leaving.
    """

    def __init__(self) -> None:
        self._previous: dict[signal.Signals, Callable[..., Any] | int] = {}

    def __enter__(self) -> SignalInbox:
        self.descriptor, self._writer = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._writer, False)
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                previous = signal.getsignal(number)
                # None: a handler that was not installed from Python, which we could not restore.
                if previous is not None and previous != signal.SIG_IGN:
                    self._previous[number] = previous
                    signal.signal(number, self._note)
            if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
                self._previous[signal.SIGCHLD] = signal.SIG_IGN
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        unread = self.read()
        os.close(self.descriptor)
        os.close(self._writer)
        for unread_number in unread:
            signal.raise_signal(unread_number)

    def read(self) -> list[int]:
        """Gives the signals that came since the last call, without waiting."""
        try:
            return list(os.read(self.descriptor, 64))
        except BlockingIOError:
            return []

    def _note(self, number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, bytes([number]))
