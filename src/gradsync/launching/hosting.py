"""The address and secret of the rendezvous server for `gs.launcher`, which this launcher or another launcher hosts.

Several launchers need a common secret, from GRADSYNC_SECRET_FILE or GRADSYNC_SECRET on every node. On loopback neither
variable needs to be set. The first launcher then writes a new secret to a file of mode 0600 in the user's runtime
directory, and the ranks of the other launchers read this file. If gradsync did not launch the ranks, rank 0 makes and
writes the secret (`rendezvous/hosting.py`).
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

from gradsync.arguments import join_address
from gradsync.environment import SECRET, SECRET_FILE, take_secret
from gradsync.errors import AuthenticationError
from gradsync.machine import interface_of
from gradsync.rendezvous.secret_files import Endpoint, publish, secret_path
from gradsync.rendezvous.sockets import bind_listener, format_address, is_loopback, look_up


def own_address(host: str) -> str | None:
    """Returns the IP address of a host name or address; None if this address does not belong to this machine."""
    try:
        address = str(look_up(host, 0)[0][4][0])
    except (OSError, ValueError):  # not a host name or address
        return None
    return None if not host or interface_of(address) is None else address


@contextlib.contextmanager
def launcher_endpoint(
    host: str, port: int, rank_start: int, *, has_others: bool
) -> Iterator[tuple[Endpoint | None, socket.socket | None]]:
    """Yields the endpoint of the rendezvous server for a call of `launcher`, and its socket if this process hosts it.

    The endpoint and the socket are None if this call starts all ranks and `host` is loopback: the supervisor then makes
    an endpoint. If `host` is loopback and the user has set no secret, the first launcher makes the secret. The other
    launchers get an endpoint with the secret b"". Their ranks read the secret from the first launcher's file, like
    ranks without a launcher (`rendezvous/hosting.py`).

    Args:
        host, port: the address at which the first launcher hosts the server.
        rank_start: the rank of this launcher's first process.
        has_others: whether other launchers start ranks of the same run.

    Raises:
        AuthenticationError: there is no secret, and other machines can reach the server.
        RendezvousError: the address cannot be bound.
    """
    is_on_loopback = is_loopback(host)
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
        yield Endpoint(join_address(host, port), secret or b""), None
        return
    with bind_listener(host, port) as listener:
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


@contextlib.contextmanager
def _published_secret(address: str) -> Iterator[bytes]:
    """Writes a new secret to a file, from which the ranks of this machine's other launchers read it.

    When the context ends, the function removes the file.
    """
    secret = os.urandom(32)
    path = secret_path(address)
    publish(path, Endpoint(address, secret))
    try:
        yield secret
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
