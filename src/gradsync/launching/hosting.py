"""The address and secret of a launch's rendezvous server, which this launcher or another launcher hosts.

Several launchers need a common secret, from GRADSYNC_SECRET_FILE or GRADSYNC_SECRET on every node. On loopback neither
variable needs to be set: the first launcher makes a secret and writes it to a file of mode 0600 in the user's runtime
directory. If gradsync did not launch the ranks, rank 0 makes and writes the secret (`rendezvous/hosting.py`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator

from gradsync.arguments import DEFAULT_TIMEOUT_SECONDS, join_address, parse_address
from gradsync.environment import SECRET, SECRET_FILE, take_secret
from gradsync.errors import AuthenticationError, RendezvousTimeout
from gradsync.launching.signals import own_descriptors
from gradsync.machine import interface_of
from gradsync.rendezvous.secret_files import Endpoint, publish, secret_path, wait_for
from gradsync.rendezvous.sockets import bind_listener, format_address, look_up

_FIRST_LAUNCHER_SECONDS = DEFAULT_TIMEOUT_SECONDS  # as long as init_process_group() waits
_PROBE_SECONDS = 1.0


@contextlib.contextmanager
def own_listener(host: str, port: int, *, if_taken: str = "use port 0 for a free port") -> Iterator[socket.socket]:
    """Yields a listening socket and closes it when the context ends; with port 0 the kernel picks a free port.

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


def own_address(host: str) -> str | None:
    """Returns the IP address of a host name or address; None if it does not belong to this machine."""
    try:
        address = str(look_up(host, 0)[0][4][0])
    except (OSError, ValueError):  # not a host name or address
        return None
    return None if not host or interface_of(address) is None else address


@contextlib.contextmanager
def launcher_endpoint(
    host: str, port: int, rank_start: int, *, has_others: bool
) -> Iterator[tuple[Endpoint | None, socket.socket | None]]:
    """Yields the rendezvous server's endpoint for a call of `launcher`, and its socket if this process hosts it.

    The endpoint and the socket are None if this call starts all ranks and `host` is loopback: the supervisor then makes
    an endpoint.

    Args:
        host, port: the address at which the first launcher hosts the server.
        rank_start: the rank of this launcher's first process.
        has_others: whether other launchers start ranks of the same run.

    Raises:
        AuthenticationError: there is no secret, and other machines can reach the server.
        RendezvousError: the address cannot be bound.
        RendezvousTimeout: the node with rank_start 0 did not start hosting in time.
    """
    is_on_loopback = _is_loopback(host)
    if not has_others and is_on_loopback:
        yield None, None
        return
    secret = take_secret()
    if secret is None and not is_on_loopback:
        raise AuthenticationError(
            f"launcher at {host} needs a secret, because other machines can reach this address: put a secret into a "
            f"file of mode 0600 and set {SECRET_FILE} to its path on every node, or set {SECRET}; if all launchers run "
            "on one machine, master_ip='localhost' needs no secret"
        )
    if rank_start > 0:
        address = join_address(host, port)
        yield Endpoint(address, secret or _find_secret(address, rank_start)), None
        return
    with own_listener(host, port) as listener:
        address = format_address(listener)
        if has_others and port == 0:
            port = listener.getsockname()[1]
            import logging  # imported here to keep the start short

            logging.getLogger("gradsync").warning(
                "this launcher hosts the rendezvous at %s: pass port=%d to the launchers of the other nodes",
                address,
                port,
            )
        with contextlib.nullcontext(secret) if secret else _published_secret(address) as known:
            yield Endpoint(address, known), listener


def _is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach a server at this host."""
    import ipaddress  # imported here to keep the start short

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # the host is a name
        return False


@contextlib.contextmanager
def _published_secret(address: str) -> Iterator[bytes]:
    """Writes a new secret to a file, in which this machine's other launchers find it until the context ends."""
    secret = os.urandom(32)
    path = secret_path(address)
    publish(path, Endpoint(address, secret))
    try:
        yield secret
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _find_secret(address: str, rank_start: int) -> bytes:
    """Waits for the secret that the first launcher publishes, and returns it."""
    path, stale, deadline = secret_path(address), None, time.monotonic() + _FIRST_LAUNCHER_SECONDS
    while (found := wait_for(path, stale, deadline)) is not None:
        if _listens(address):
            return found.secret
        stale = found  # an earlier run has left this file: the first launcher binds the port before it writes a file
    raise RendezvousTimeout(
        f"launcher with rank_start {rank_start}: after {_FIRST_LAUNCHER_SECONDS:g} s {path} has no secret of this run. "
        f"The launcher with rank_start 0 writes the secret when it hosts {address}: start that launcher on this "
        f"machine, or set {SECRET_FILE} for both launchers to the path of a file with the same secret",
        missing_ranks=(0,),
    )


def _listens(address: str) -> bool:
    """Returns whether a server accepts connections at the address."""
    try:
        socket.create_connection(parse_address(address), _PROBE_SECONDS).close()
    except OSError:
        return False
    return True
