"""How a client gets its connection: dialled with retries until the server is up, then authenticated.

Sits between `client` and `client_connection`.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any

from gradsync.arguments import parse_address
from gradsync.environment import check_removed_variables
from gradsync.errors import AuthenticationError, RendezvousError, RendezvousTimeout
from gradsync.rendezvous.client_connection import ClientConnection, StreamEnded
from gradsync.rendezvous.sockets import look_up, tune_stream
from gradsync.rendezvous.wire import FrameError

_HANDSHAKE_SECONDS = 5.0
_NO_ANSWER = "no answer to the handshake: a busy server, or another service"
# A server that is flooded drops its oldest strangers, and looks from here like a service that ends each connection:
# several attempts over several seconds tell them apart.
_HANDSHAKE_ATTEMPTS = 5
_FLOOD_SECONDS = 5.0
_DIAL_SECONDS = 5.0
_FIRST_BACKOFF_SECONDS = 0.005
_LAST_BACKOFF_SECONDS = 0.5


def dial(address: str, *, secret: bytes, deadline: float, who: str) -> ClientConnection:
    """Returns an authenticated connection; retries while the server is not up yet.

    Args:
        address: "host:port" or "[IPv6]:port".
        secret: the run's secret.
        deadline: monotonic seconds.
        who: the caller as messages name it, e.g. "rank 1/4".

    Raises:
        RendezvousTimeout: no server was reached by the deadline; the text has the address and the last cause.
        AuthenticationError: the server does not know the secret.
        InvalidArgument: a variable is set that has gone (`check_removed_variables`).
        RendezvousError: something else speaks on that port.
    """
    parse_address(address)
    check_removed_variables()
    started = time.monotonic()
    backoff_seconds = _FIRST_BACKOFF_SECONDS
    handshakes = 0
    give_up_at = deadline
    while True:
        try:
            stream = _connect(address, min(deadline, time.monotonic() + _DIAL_SECONDS))
        except OSError as error:
            cause = error.strerror or str(error) or type(error).__name__
        else:
            connection, cause = _try_handshake(stream, address, secret, deadline, who)
            if connection is not None:
                return connection
            handshakes += cause != _NO_ANSWER
            if handshakes == 1:
                give_up_at = time.monotonic() + _FLOOD_SECONDS
            if handshakes >= _HANDSHAKE_ATTEMPTS and time.monotonic() >= give_up_at:
                raise RendezvousError(
                    f"{who}: {address} accepts connections but ends each before a handshake ({cause}): "
                    "another service or run holds this port"
                )
        # Jitter keeps ranks that started together from knocking together.
        pause = backoff_seconds * (0.5 + os.urandom(1)[0] / 512)
        if time.monotonic() + pause >= deadline:
            raise RendezvousTimeout(
                f"{who}: no rendezvous server at {address} within {deadline - started:.3g} s; last cause: {cause}",
                cause=cause,
            )
        time.sleep(pause)
        backoff_seconds = min(backoff_seconds * 1.5, _LAST_BACKOFF_SECONDS)


def _connect(address: str, deadline: float) -> socket.socket:
    """Returns a connected socket, or raises OSError."""
    host, port = parse_address(address)
    targets = look_up(host, port)
    while True:
        # An address that swallows what is sent to it leaves the others of that name their share of the time.
        timeout_seconds = max((deadline - time.monotonic()) / len(targets), 0.001)
        family, kind, protocol, _, target = targets.pop(0)
        try:
            return _connect_to(socket.socket(family, kind, protocol), target, timeout_seconds)
        except OSError:
            if not targets:
                raise


def _connect_to(stream: socket.socket, target: Any, timeout_seconds: float) -> socket.socket:
    try:
        stream.settimeout(timeout_seconds)
        stream.connect(target)
        # Dialling a free port of the ephemeral range can connect a socket to itself; that is no server.
        if stream.getsockname() == stream.getpeername():
            raise ConnectionRefusedError("Connection refused (the socket met itself)")
        tune_stream(stream)
    except OSError:
        stream.close()
        raise
    return stream


def _try_handshake(
    stream: socket.socket, address: str, secret: bytes, deadline: float, who: str
) -> tuple[ClientConnection | None, str]:
    """Returns the authenticated connection, or None and why another attempt is worth it."""
    connection = ClientConnection(stream, address)
    handshake_deadline = min(deadline, time.monotonic() + _HANDSHAKE_SECONDS)
    try:
        connection.authenticate(secret, handshake_deadline)
    except BaseException as error:
        connection.close()
        if isinstance(error, StreamEnded):
            return None, str(error)
        if isinstance(error, RendezvousTimeout):  # a server that has much to do answers later
            return None, _NO_ANSWER
        if isinstance(error, AuthenticationError):
            raise AuthenticationError(f"{who}: {address}: {error}") from None
        if isinstance(error, FrameError):
            raise RendezvousError(
                f"{who}: {address} does not speak the rendezvous protocol ({error}): "
                "another service or run holds this port"
            ) from error
        if isinstance(error, RendezvousError):
            raise RendezvousError(f"{who}: {address}: {error}") from None
        raise
    return connection, ""
