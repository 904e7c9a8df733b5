"""Finds a free port for the user's server, and keeps the port free until that server binds it."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections import deque
from collections.abc import Iterator

from gradsync.arguments import LARGEST_PORT

_KERNEL_RANGE = "/proc/sys/net/ipv4/ip_local_port_range"
_DEFAULT_KERNEL_RANGE = (32768, 60999)
_LOWEST_PORT = 1024  # only root may bind lower ports
_ENOUGH_PORTS = 1000
_MOST_PORTS = 4096
_MOST_KEPT = 64

# The descriptors that reserve the newest ports. The deque has integers, because Python prints a warning if a socket
# object is still open at exit.
_kept: deque[int] = deque()


def free_port() -> int:
    """Returns a TCP port that is not in use, for a server on any interface of this machine.

    No socket is bound to the port, so every kind of server can bind the port, with or without SO_REUSEADDR. The port is
    outside the range from which the kernel takes ports for servers that bind port 0 and for outgoing connections. So
    the port stays free until the caller's server binds it, unless another program asks for this port number. If that
    range leaves fewer than 1,000 ports on each side, the port is inside the range. Then another program can get the
    port before the caller's server. A process reserves its 64 newest ports: while the process lives, no other call of
    `free_port` on this machine, or in this container, returns one of them.

    Raises:
        OSError: no port is free.
    """
    port, reservation = _take_port()
    _kept.append(reservation)
    while len(_kept) > _MOST_KEPT:
        os.close(_kept.popleft())
    return port


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Yields a free port that stays reserved until the context ends; see `free_port`."""
    port, reservation = _take_port()
    try:
        yield port
    finally:
        os.close(reservation)


def _take_port() -> tuple[int, int]:
    """Returns a free port, and the descriptor that reserves it."""
    ports = _ports_to_try()
    first = int.from_bytes(os.urandom(4), "little")
    for step in range(len(ports)):
        port = ports[(first + step) % len(ports)]
        reservation = _reserve(port)
        if reservation is None:
            continue
        if _is_free(port):
            return port, reservation
        os.close(reservation)
    raise OSError(errno.EADDRINUSE, f"none of the ports {ports[0]} to {ports[-1]} is free")


def _ports_to_try() -> range:
    """Returns ports outside the kernel's ephemeral range; if too few ports are outside, the ports inside that range."""
    try:
        with open(_KERNEL_RANGE) as file:
            low, high = map(int, file.read().split())
    except (OSError, ValueError):
        low, high = _DEFAULT_KERNEL_RANGE
    above = range(high + 1, LARGEST_PORT + 1)
    below = range(max(_LOWEST_PORT, low - _MOST_PORTS), low)
    for ports in (above, below):
        if len(ports) >= _ENOUGH_PORTS:
            return ports
    return range(max(_LOWEST_PORT, low), high + 1)


def _reserve(port: int) -> int | None:
    """Reserves a port: binds an abstract socket name, and returns the socket's descriptor; None if the name is taken.

    Like a port, an abstract name belongs to a network namespace. The name disappears with the process that holds it.
    """
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        holder.bind(f"\0gradsync-port-{port}")
    except OSError as error:
        holder.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return holder.detach()


def _is_free(port: int) -> bool:
    """Returns whether a server could bind the port on all interfaces, and therefore on any one of them."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind(("", port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):  # the errors without IPv4 or IPv6
                raise
    return True
