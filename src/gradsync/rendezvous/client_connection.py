"""One connection as a client sees it: dialled with retries, authenticated, then messages with deadlines.

Sits between `client`, which knows what to ask, and `handshake` and `wire`, which judge the bytes. All waiting
is one poll with the time that is left; the socket itself never blocks.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import select
import socket
import time
from typing import Any

from gradsync.errors import AuthenticationError, RendezvousError, RendezvousTimeout
from gradsync.rendezvous.handshake import NONCE_BYTES, ClientHandshake
from gradsync.rendezvous.messages import FrameType, Message
from gradsync.rendezvous.sockets import parse_address, tune_stream
from gradsync.rendezvous.wire import MAX_FRAME_BYTES, FrameError, FrameReader, Session

_HANDSHAKE_SECONDS = 5.0
# A server that is flooded drops its oldest strangers, and looks from here like a service that ends each connection:
# several attempts over several seconds tell them apart.
_HANDSHAKE_ATTEMPTS = 5
_FLOOD_SECONDS = 5.0
_DIAL_SECONDS = 5.0
_FIRST_BACKOFF_SECONDS = 0.005
_LAST_BACKOFF_SECONDS = 0.5


class StreamEnded(RendezvousError):
    """The peer closed or reset the connection."""


class ClientConnection:
    """An authenticated connection to a rendezvous server; made by `dial`.

    Args:
        stream: the connected, non-blocking socket.
        address: the server's address, for messages.

    Attributes:
        address: as given.
        run_id: the server's run, known after the handshake.
    """

    def __init__(self, stream: socket.socket, address: str) -> None:
        self.address = address
        self.run_id = ""
        self._stream = stream
        self._reader = FrameReader()
        self._session: Session | None = None
        self._unsent = bytearray()
        self._readable = select.poll()
        self._readable.register(stream, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(stream, select.POLLOUT)
        # What `RequestChannel.check` polls: bound once, because it runs inside spin loops.
        self.poll_input = self._readable.poll

    def authenticate(self, secret: bytes, deadline: float) -> None:
        """Runs the handshake.

        Raises:
            FrameError, StreamEnded, RendezvousTimeout: the peer is no gradsync server, or too busy.
            AuthenticationError: the peer does not know the secret.
        """
        handshake = ClientHandshake(secret, secrets.token_bytes(NONCE_BYTES))
        self._write(handshake.hello(), deadline)
        while (frame := self._reader.next_frame()) is None:
            if not self._fill(deadline):
                raise RendezvousTimeout("no answer to the handshake")
        proof, self._session = handshake.receive(frame)
        self.run_id = handshake.run_id
        self._reader.limit_bytes = MAX_FRAME_BYTES
        self._unsent += proof  # travels with the first message

    def send(self, deadline: float, frame_type: FrameType, *fields: Any) -> int:
        """Sends a message and returns its sequence.

        Args:
            deadline: monotonic seconds by which the kernel must have taken it.

        Raises:
            FieldError: a field does not fit its schema; nothing was sent.
            StreamEnded, RendezvousTimeout: the server is gone, or does not read.
        """
        session = self._authenticated()
        sequence = session.next_send_sequence
        self._write(session.seal(frame_type, *fields), deadline)
        return sequence

    def post(self, frame_type: FrameType, *fields: Any) -> bool:
        """Sends a message that needs no answer, without waiting; returns False when there is no room now.

        Raises:
            FieldError: a field does not fit its schema; nothing was sent.
            StreamEnded: the server is gone.
        """
        if self._unsent:
            self._write_some()
        if self._unsent:
            return False
        self._unsent += self._authenticated().seal(frame_type, *fields)
        self._write_some()
        return True

    def receive(self, deadline: float) -> Message | None:
        """Returns the next message, or None when the deadline (monotonic seconds) comes first.

        Raises:
            FrameError: the bytes received are not acceptable.
            StreamEnded: the server closed the connection.
        """
        while (frame := self._reader.next_frame()) is None:
            if not self._fill(deadline):
                return None
        return self._authenticated().open(frame)

    def take_buffered(self) -> Message | None:
        """Reads what is there now and returns the next whole message, or None; never waits."""
        frame = self._reader.next_frame()
        if frame is None and self._read_some():
            frame = self._reader.next_frame()
        return None if frame is None else self._authenticated().open(frame)

    def shut_down(self) -> None:
        """Ends the stream in both directions; wakes a thread that waits in `receive`."""
        with contextlib.suppress(OSError):  # the server was faster
            self._stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the descriptor; no other I/O."""
        self._stream.close()

    def _authenticated(self) -> Session:
        if self._session is None:
            raise FrameError("a message was handled before the handshake ended")
        return self._session

    def _write(self, data: bytes, deadline: float) -> None:
        self._unsent += data
        while True:
            self._write_some()
            if not self._unsent:
                return
            if not self._writable.poll(_milliseconds_until(deadline)) and time.monotonic() >= deadline:
                raise RendezvousTimeout(f"the rendezvous server at {self.address} does not read what it is sent")

    def _write_some(self) -> None:
        try:
            sent = self._stream.send(self._unsent)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            raise StreamEnded(error.strerror or str(error)) from error
        del self._unsent[:sent]

    def _fill(self, deadline: float) -> bool:
        """Waits for bytes and reads them; returns False when the deadline came first."""
        while not self._read_some():
            if not self._readable.poll(_milliseconds_until(deadline)) and time.monotonic() >= deadline:
                return False
        return True

    def _read_some(self) -> bool:
        """Reads what is there; returns whether there was anything."""
        try:
            data = self._stream.recv(MAX_FRAME_BYTES)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            raise StreamEnded(error.strerror or str(error)) from error
        if not data:
            raise StreamEnded("connection closed by the server")
        self._reader.feed(data)
        return True


def _milliseconds_until(deadline: float) -> float:
    """Returns the time left, rounded up so that a wait never ends early; 0 once the deadline has passed."""
    left = (deadline - time.monotonic()) * 1000.0
    return 0 if left <= 0 else min(left + 1.0, 2**30)


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
        RendezvousError: something else speaks on that port.
    """
    parse_address(address)
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
            handshakes += 1
            connection, cause = _try_handshake(stream, address, secret, deadline, who)
            if connection is not None:
                return connection
            if handshakes == 1:
                give_up_at = time.monotonic() + _FLOOD_SECONDS
            if handshakes >= _HANDSHAKE_ATTEMPTS and time.monotonic() >= give_up_at:
                raise RendezvousError(
                    f"{who}: {address} accepts connections but ends each before a handshake ({cause}): "
                    "another service or run holds this port"
                )
        # Jitter keeps ranks that started together from knocking together.
        pause = backoff_seconds * random.uniform(0.5, 1.0)
        if time.monotonic() + pause >= deadline:
            raise RendezvousTimeout(
                f"{who}: no rendezvous server at {address} within {deadline - started:.3g} s; last cause: {cause}"
            )
        time.sleep(pause)
        backoff_seconds = min(backoff_seconds * 1.5, _LAST_BACKOFF_SECONDS)


def _connect(address: str, deadline: float) -> socket.socket:
    """Returns a connected socket, or raises OSError."""
    timeout_seconds = max(deadline - time.monotonic(), 0.001)
    stream = socket.create_connection(parse_address(address), timeout=timeout_seconds)
    try:
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
        if isinstance(error, AuthenticationError):
            raise AuthenticationError(f"{who}: {address}: {error}") from None
        if isinstance(error, (FrameError, RendezvousTimeout)):
            raise RendezvousError(
                f"{who}: {address} does not speak the rendezvous protocol ({error}): "
                "another service or run holds this port"
            ) from error
        if isinstance(error, RendezvousError):
            raise RendezvousError(f"{who}: {address}: {error}") from None
        raise
    return connection, ""
