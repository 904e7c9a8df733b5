"""Where the ranks of several launchers meet: the first one hosts, the others are told its address.

The secret comes from GRADSYNC_SECRET_FILE or GRADSYNC_SECRET on every node. On loopback it may be missing: the first
launcher then makes one and leaves it in a file of mode 0600 in the user's runtime directory, as rank 0 does where
no launcher of ours is at work (`rendezvous/hosting.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator

from gradsync.arguments import join_address, parse_address
from gradsync.environment import SECRET, SECRET_FILE, take_secret
from gradsync.errors import AuthenticationError, RendezvousTimeout
from gradsync.launching.launcher_options import LauncherOptions
from gradsync.launching.listening import own_listener
from gradsync.rendezvous.secret_files import Endpoint, publish, secret_path, wait_for
from gradsync.rendezvous.sockets import format_address

_MEETING_SECONDS = 120.0  # as long as init_process_group() waits
_PROBE_SECONDS = 1.0

_log = logging.getLogger("gradsync")


@contextlib.contextmanager
def own_endpoint(
    options: LauncherOptions, *, has_other_nodes: bool
) -> Iterator[tuple[Endpoint | None, socket.socket | None]]:
    """Gives where the ranks of one call meet, with the bound socket where it is here, and holds it for them.

    No endpoint where nobody else needs to find it, as all ranks are this call's, on loopback: the supervisor has one.

    Args:
        options: of the launcher.
        has_other_nodes: whether other launchers start ranks of the same run.

    Raises:
        AuthenticationError: no secret, and other machines can reach the server.
        RendezvousError: the address cannot be bound.
        RendezvousTimeout: the node with rank_start 0 did not come.
    """
    if not has_other_nodes and options.is_on_loopback:
        yield None, None
        return
    secret = take_secret()
    if secret is None and not options.is_on_loopback:
        raise AuthenticationError(
            f"launcher at {options.master_ip}, which other machines can reach, needs a secret: put one into a file of "
            f"mode 0600 and name it in {SECRET_FILE} on every node, or set {SECRET}; with master_ip='localhost' "
            "the launchers of one machine need none"
        )
    if options.rank_start > 0:
        yield _find(options, secret), None
        return
    with own_listener(options.master_host, options.port) as listener:
        address = format_address(listener)
        if has_other_nodes and options.port == 0:
            port = listener.getsockname()[1]
            _log.warning(
                "the ranks of this run meet at %s: give port=%d to the launchers of the other nodes", address, port
            )
        with contextlib.nullcontext(secret) if secret else _published_secret(address) as known:
            yield Endpoint(address, known), listener


@contextlib.contextmanager
def _published_secret(address: str) -> Iterator[bytes]:
    """Makes a secret, for launchers of this machine to find while the context lasts."""
    secret = secrets.token_bytes(32)
    path = secret_path(address)
    publish(path, Endpoint(address, secret))
    try:
        yield secret
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _find(options: LauncherOptions, secret: bytes | None) -> Endpoint:
    """Gives where the first node hosts, once it does where its secret must be found."""
    address = join_address(options.master_host, options.port)
    if secret is not None:
        return Endpoint(address, secret)
    path, stale, deadline = secret_path(address), None, time.monotonic() + _MEETING_SECONDS
    while (found := wait_for(path, stale, deadline)) is not None:
        if _is_there(address):
            return Endpoint(address, found.secret)
        stale = found  # an earlier run's: the first node binds the port before it writes the file
    raise RendezvousTimeout(
        f"launcher with rank_start {options.rank_start}: the node with rank_start 0 did not start hosting {address} "
        f"within {_MEETING_SECONDS:g} s (nothing new at {path}); start it on this machine, or name the secret of both "
        f"in {SECRET_FILE}",
        missing_ranks=(0,),
    )


def _is_there(address: str) -> bool:
    try:
        socket.create_connection(parse_address(address), _PROBE_SECONDS).close()
    except OSError:
        return False
    return True
