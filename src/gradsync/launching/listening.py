"""A listener of the launching process, which its forked ranks do not keep open."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from gradsync.launching.signal_inbox import own_descriptors
from gradsync.rendezvous.sockets import bind_listener


@contextlib.contextmanager
def own_listener(host: str, port: int, *, if_taken: str = "use port 0 for a free port") -> Iterator[socket.socket]:
    """Gives a listening socket and closes it when the context ends; with port 0 the kernel picks one.

    Args:
        host, port, if_taken: see `bind_listener`.

    Raises:
        InvalidArgument, RendezvousError: see `bind_listener`.
    """
    with bind_listener(host, port, if_taken=if_taken) as listener:
        descriptor = listener.fileno()
        own_descriptors.add(descriptor)
        try:
            yield listener
        finally:
            own_descriptors.discard(descriptor)
