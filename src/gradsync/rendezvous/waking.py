"""How another thread, or a signal's handler, wakes the event loop."""

from __future__ import annotations

import contextlib
import selectors
import socket


class Waker:
    """A socket that becomes readable when somebody wakes whoever waits for it.

    Args:
        selector: by which that one waits.

    Attributes:
        receiver: as the selector knows it.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self.receiver, self._sender = socket.socketpair()
        self.receiver.setblocking(False)
        self._sender.setblocking(False)
        selector.register(self.receiver, selectors.EVENT_READ)

    def wake(self) -> None:
        """Makes it readable; safe from any thread and from a signal handler."""
        with contextlib.suppress(OSError):  # full: the loop is about to wake; closed: it has ended
            self._sender.send(b"\0")

    def quiet(self) -> None:
        """Takes what has made it readable."""
        self.receiver.recv(4096)

    def close(self) -> None:
        """Closes both ends."""
        self.receiver.close()
        self._sender.close()
