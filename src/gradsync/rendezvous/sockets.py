"""Sockets of the rendezvous: binding, options, receiving and sending without waiting, the limit of open files.

Only an address that a caller gave is looked up; those of peers are never resolved to names.
"""

from __future__ import annotations

import errno
import socket
from typing import Any

from gradsync.arguments import LARGEST_PORT, join_address
from gradsync.errors import InvalidArgument, RendezvousError

_BACKLOG = 16_384  # all ranks may connect at once; the kernel limits this too: net.core.somaxconn
_KEEPALIVE = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}  # seconds, seconds, probes
_USER_TIMEOUT_MS = 5000
_OTHER_FILES = 256  # room for the process's other open files


def look_up(host: str, port: int) -> list[tuple[Any, ...]]:
    """Returns the addresses of a host name, in the form of `socket.getaddrinfo`.

    Raises:
        OSError: the name has no address, or is not a valid name.
    """
    try:
        # The name is passed as bytes: for text Python loads the tables of international names, which takes
        # milliseconds.
        name = host.encode() if host.isascii() else host
        return list(socket.getaddrinfo(name, port, type=socket.SOCK_STREAM))
    except ValueError:  # the name is too long, or has invalid characters
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known") from None


def format_address(listener: socket.socket) -> str:
    """Returns a bound socket's address as text, "host:port"."""
    return join_address(*listener.getsockname()[:2])


def bind_listener(host: str, port: int, *, if_taken: str = "use port 0 for a free port") -> socket.socket:
    """Returns a listening socket. With port 0 the kernel chooses a free port, and the socket reserves it.

    Args:
        host, port: of the interface, its name or address.
        if_taken: advice for the error when another process holds the port.

    Raises:
        InvalidArgument: the host is empty or the port is out of range.
        RendezvousError: the address cannot be bound.
    """
    if not host or not 0 <= port <= LARGEST_PORT:
        raise InvalidArgument(
            f"the rendezvous needs a host and a port from 0 to {LARGEST_PORT}, got {host!r}, {port!r}"
        )
    try:
        family, kind, protocol, _, target = look_up(host, port)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise RendezvousError(f"the rendezvous cannot use host {host!r}: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise RendezvousError(f"port {port} on {host} is in use; {if_taken}") from None
        raise RendezvousError(f"the rendezvous cannot bind {host} port {port}: {error}") from error
    return listener


def tune_stream(stream: socket.socket) -> None:
    """Sets the options of a stream: it never blocks, sends at once, and notices a dead peer within seconds."""
    stream.setblocking(False)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)


class ConnectionLost(RendezvousError):
    """The peer has closed or reset the connection, or reads no data; the text gives the reason."""


def receive_some(stream: socket.socket, max_bytes: int) -> bytes:
    """Returns the bytes that have arrived, at most `max_bytes`; b"" if there are none. Never waits.

    Raises:
        ConnectionLost: the peer has closed or reset the connection, or the connection has failed.
    """
    try:
        data = stream.recv(max_bytes)
    except (BlockingIOError, InterruptedError):
        return b""
    except OSError as error:
        raise ConnectionLost(error.strerror or str(error)) from error
    if not data:
        raise ConnectionLost("connection closed")
    return data


def send_some(stream: socket.socket, unsent: bytearray) -> None:
    """Sends as many bytes as the socket takes now, and removes them from `unsent`. Never waits.

    Raises:
        ConnectionLost: the peer has closed or reset the connection, or the connection has failed.
    """
    sent: list[int] = []
    try:
        # Python runs no signal handler between the send and the append. Otherwise a handler that raises could leave
        # bytes in `unsent` that were sent, and they would be sent again.
        sent.extend(map(stream.send, (unsent,)))
    except (BlockingIOError, InterruptedError):
        return
    except OSError as error:
        raise ConnectionLost(error.strerror or str(error)) from error
    finally:
        if sent:
            del unsent[: sent[0]]


def make_room(connections: int) -> None:
    """Raises the process's limit of open files for `connections` sockets; logs a warning if it stays too low."""
    allowed = raise_limit(connections)
    if allowed is not None:
        import logging  # imported here to keep the start short

        logging.getLogger("gradsync.rendezvous").warning(
            "gradsync: a rendezvous of this size needs up to %d open files, this process may open %d; raise the "
            "hard limit (ulimit -Hn) if ranks cannot connect",
            connections + _OTHER_FILES,
            allowed,
        )


def raise_limit(files: int) -> int | None:
    """Raises the process's limit of open files to `files` + 256, as far as the hard limit allows.

    The usual limit is 1,024: too low for a server of a thousand ranks, or a launcher of a hundred. Processes that
    start later inherit the new one.

    Returns:
        The new limit if it is still lower than `files` + 256, else None.
    """
    import resource  # imported here to keep the start of a rank short

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = files + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return None
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(allowed, soft), hard))
    return allowed if allowed < needed else None
