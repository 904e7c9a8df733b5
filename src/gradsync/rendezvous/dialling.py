"""Dialling: connects to a rendezvous server, authenticates, and tries again until the server is up.

`client` calls `dial` once for each join; `dial` returns a `Connection`.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from typing import Any

from gradsync.arguments import parse_address
from gradsync.environment import check_removed_variables
from gradsync.errors import AuthenticationError, RendezvousError, RendezvousTimeout
from gradsync.rendezvous.connection import Connection
from gradsync.rendezvous.handshake import RANDOM_BYTES, ClientHandshake, ServerProcess
from gradsync.rendezvous.sockets import ConnectionLost, look_up, receive_some, send_some, tune_stream
from gradsync.rendezvous.wire import MAX_FRAME_BYTES, FrameError, FrameReader, Session

_HANDSHAKE_SECONDS = 5.0
_NO_ANSWER = "no answer to the handshake: a busy server, or another service"
# A flooded server drops its oldest unauthenticated connections. Another service ends each connection. A client cannot
# distinguish the two in one attempt, but in several attempts over several seconds.
_HANDSHAKE_ATTEMPTS = 5
_FLOOD_SECONDS = 5.0
_DIAL_SECONDS = 5.0
_FIRST_BACKOFF_SECONDS = 0.005
_LAST_BACKOFF_SECONDS = 0.5


def dial(address: str, *, secret: bytes, deadline: float, label: str, generation: int = 0) -> Connection:
    """Connects to a server and authenticates; retries until the server is up.

    Args:
        address: "host:port" or "[IPv6]:port".
        secret: the run's secret.
        deadline: monotonic seconds.
        label: the caller's name in messages, e.g. "rank 1/4".
        generation: the generation to join; 0 is the one that forms next.

    Raises:
        RendezvousTimeout: no server was reached by the deadline; the text has the address and the last cause.
        AuthenticationError: the server does not know the secret.
        InvalidArgument: an environment variable is set that gradsync no longer has (`check_removed_variables`).
        RendezvousError: another service uses that port.
    """
    parse_address(address)
    check_removed_variables()
    started = time.monotonic()
    backoff_seconds = _FIRST_BACKOFF_SECONDS
    handshakes = 0
    fail_at = deadline
    while True:
        try:
            stream = _connect(address, min(deadline, time.monotonic() + _DIAL_SECONDS))
        except OSError as error:
            cause = error.strerror or str(error) or type(error).__name__
        else:
            made = _try_handshake(stream, address, secret, deadline, label, generation)
            if isinstance(made, Connection):
                return made
            cause = made
            handshakes += cause != _NO_ANSWER
            if handshakes == 1:
                fail_at = time.monotonic() + _FLOOD_SECONDS
            if handshakes >= _HANDSHAKE_ATTEMPTS and time.monotonic() >= fail_at:
                raise RendezvousError(
                    f"{label}: {address} accepts connections but ends each before a handshake ({cause}): "
                    "another service or run holds this port"
                )
        # Jitter, so that ranks that started together do not connect together.
        pause = backoff_seconds * (0.5 + os.urandom(1)[0] / 512)
        if time.monotonic() + pause >= deadline:
            raise RendezvousTimeout(
                f"{label}: no rendezvous server at {address} within {deadline - started:.3g} s; last cause: {cause}",
                cause=cause,
            )
        time.sleep(pause)
        backoff_seconds = min(backoff_seconds * 1.5, _LAST_BACKOFF_SECONDS)


def _connect(address: str, deadline: float) -> socket.socket:
    """Returns a connected socket, or raises OSError."""
    host, port = parse_address(address)
    targets = look_up(host, port)
    while True:
        # Each address gets its share of the time, so that an address that never answers leaves time for the others.
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
        # On a free port of the ephemeral range a socket can connect to itself.
        if stream.getsockname() == stream.getpeername():
            raise ConnectionRefusedError("Connection refused (the socket connected to itself)")
        tune_stream(stream)
    except OSError:
        stream.close()
        raise
    return stream


def _try_handshake(
    stream: socket.socket, address: str, secret: bytes, deadline: float, label: str, generation: int
) -> Connection | str:
    """Returns the authenticated connection, or the cause of a failure after which a retry may succeed."""
    try:
        session, reader, proof, server = _shake_hands(
            stream, secret, generation, min(deadline, time.monotonic() + _HANDSHAKE_SECONDS)
        )
        return Connection(stream, session, reader, proof, server, address, label)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the program may have closed the descriptor itself
            stream.close()
        if isinstance(error, RendezvousTimeout):  # a busy server answers later
            return _NO_ANSWER
        if isinstance(error, (ConnectionLost, OSError)):
            return str(error)
        if isinstance(error, AuthenticationError):
            raise AuthenticationError(f"{label}: {address}: {error}") from None
        if isinstance(error, FrameError):
            raise RendezvousError(
                f"{label}: {address} does not speak the rendezvous protocol ({error}): "
                "another service or run holds this port"
            ) from error
        if isinstance(error, RendezvousError):
            raise RendezvousError(f"{label}: {address}: {error}") from None
        raise


def _shake_hands(
    stream: socket.socket, secret: bytes, generation: int, deadline: float
) -> tuple[Session, FrameReader, bytes, ServerProcess]:
    """Runs the handshake.

    Returns:
        The session; the reader, which holds the bytes that arrived after the handshake; the PROOF, which the caller
        sends together with the first message; and the identity of the server's process.
    """
    handshake = ClientHandshake(secret, os.urandom(RANDOM_BYTES), generation)
    reader, unsent, waiter = FrameReader(), bytearray(handshake.hello()), select.poll()
    while (frame := reader.next_frame()) is None:
        waiter.register(stream, select.POLLIN | select.POLLOUT if unsent else select.POLLIN)
        if not waiter.poll(_milliseconds_until(deadline)) and time.monotonic() >= deadline:
            raise RendezvousTimeout("no answer to the handshake")
        if unsent:
            send_some(stream, unsent)
        reader.feed(receive_some(stream, MAX_FRAME_BYTES), time.monotonic())
    proof, session = handshake.receive(frame)
    reader.limit_bytes = MAX_FRAME_BYTES
    return session, reader, proof, handshake.server


def _milliseconds_until(deadline: float) -> float:
    """Returns the time left, rounded up so that a wait never ends early; 0 once the deadline has passed."""
    left = (deadline - time.monotonic()) * 1000.0
    return 0 if left <= 0 else min(left + 1.0, 2**30)
