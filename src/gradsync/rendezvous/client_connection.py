"""One connection as a client sees it: authenticated once, then messages with deadlines.

Made by `dialling`, read by `inbox`, over `handshake` and `wire`, which judge the bytes. All waiting is one poll with
the time that is left; the socket itself never blocks.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from gradsync.errors import RendezvousError, RendezvousTimeout
from gradsync.rendezvous.finding import Finding
from gradsync.rendezvous.handshake import NONCE_BYTES, ClientHandshake
from gradsync.rendezvous.messages import FrameType, Message
from gradsync.rendezvous.probing import look_at
from gradsync.rendezvous.wire import MAX_FRAME_BYTES, FrameError, FrameReader, Session


class StreamEnded(RendezvousError):
    """The peer closed or reset the connection."""


class ClientConnection:
    """An authenticated connection to a rendezvous server; made by `dial`.

    One thread at a time may read from it, beside any number that send.

    Args:
        stream: the connected, non-blocking socket.
        address: the server's address, for messages.

    Attributes:
        address: as given.
        own_host: the address of this end.
        run_id: the server's run, known after the handshake.
    """

    def __init__(self, stream: socket.socket, address: str) -> None:
        self.address = address
        self.own_host = str((stream.getsockname() or ("",))[0])  # "" of a socket pair
        self.run_id = ""
        self._stream = stream
        self._reader = FrameReader()
        self._session: Session | None = None
        self._sending = threading.Lock()
        self._unsent = bytearray()
        self._either = select.poll()
        self._either.register(stream, select.POLLIN | select.POLLOUT)
        self._readable = select.poll()
        self._readable.register(stream, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(stream, select.POLLOUT)
        # What `Inbox.poll` polls: bound once, because it runs inside spin loops.
        self.poll_input = self._readable.poll

    def authenticate(self, secret: bytes, deadline: float) -> None:
        """Runs the handshake.

        Raises:
            FrameError, StreamEnded, RendezvousTimeout: the peer is no gradsync server, or too busy.
            AuthenticationError: the peer does not know the secret.
        """
        handshake = ClientHandshake(secret, os.urandom(NONCE_BYTES))
        self._write(handshake.hello(), deadline)
        while (frame := self._reader.next_frame()) is None:
            if not self._fill(deadline):
                raise RendezvousTimeout("no answer to the handshake")
        proof, self._session = handshake.receive(frame)
        self.run_id = handshake.run_id
        self._reader.limit_bytes = MAX_FRAME_BYTES
        self._unsent += proof  # travels with the first message

    @property
    def has_unsent(self) -> bool:
        """Whether something waits for room in the socket."""
        return bool(self._unsent)

    def send(
        self,
        deadline: float,
        frame_type: FrameType,
        *fields: Any,
        announce: Callable[[int], None] | None = None,
        then: tuple[Any, ...] = (),
    ) -> None:
        """Sends a message.

        Args:
            deadline: monotonic seconds by which the kernel must have taken it.
            frame_type, fields: the message.
            then: another one that travels right behind it, its type first.
            announce: told the message's sequence before it goes: another thread may read the answer at once.

        Raises:
            FieldError: a field does not fit its schema; nothing was sent.
            StreamEnded, RendezvousTimeout: the server is gone, or does not read.
        """
        session = self._authenticated()
        with self._sending:
            sequence = session.next_send_sequence
            sealed = session.seal(frame_type, *fields)
            if then:
                sealed += session.seal(*then)
            if announce is not None:
                announce(sequence)
            self._write(sealed, deadline)

    def post(self, frame_type: FrameType, *fields: Any) -> None:
        """Sends a message that needs no answer, without waiting; what finds no room now goes with a later call.

        Raises:
            FieldError: a field does not fit its schema; nothing was sent.
            StreamEnded: the server is gone.
        """
        with self._sending:
            self._unsent += self._authenticated().seal(frame_type, *fields)
            self._write_some()

    def post_if_idle(self, frame_type: FrameType, *fields: Any) -> None:
        """Sends such a message, unless a thread sends one now or an earlier one has found no room yet.

        For signs of life, which any other message is too. Never waits, not even for a thread that does.

        Raises:
            FieldError: a field does not fit its schema; nothing was sent.
            StreamEnded: the server is gone.
        """
        if not self._sending.acquire(False):
            return
        try:
            if not self._unsent:
                self._unsent += self._authenticated().seal(frame_type, *fields)
            self._write_some()
        finally:
            self._sending.release()

    def flush(self) -> bool:
        """Writes what earlier calls left over, without waiting; returns whether nothing is left.

        Raises:
            StreamEnded: the server is gone.
        """
        if self._unsent and not self._sending.locked():  # else a thread that sends takes it along
            with self._sending:  # a call of acquire would leave it taken where Ctrl-C comes as soon as it is
                self._write_some()
        return not self._unsent

    def receive(self, deadline: float) -> Message | None:
        """Returns the next message, or None when the deadline (monotonic seconds) comes first.

        Raises:
            FrameError: the bytes received are not acceptable.
            StreamEnded: the server closed the connection.
        """
        while (frame := self._reader.next_frame()) is None:
            if not self._fill(deadline):
                self._reader.note_time(time.monotonic(), was_complete=False)
                return None
        return self._authenticated().open(frame)

    def next_buffered(self) -> Message | None:
        """Returns the next whole message of those that were read already, or None.

        Raises:
            FrameError: the bytes received are not acceptable.
        """
        frame = self._reader.next_frame()
        if frame is None:
            self._reader.note_time(time.monotonic(), was_complete=True)
            return None
        return self._authenticated().open(frame)

    @property
    def is_stuck(self) -> bool:
        """Whether the server has left a message unfinished for too long."""
        return self._reader.is_stuck(time.monotonic())

    def look_at_server(self, pid: int | None) -> Finding:
        """Returns what can be found out about the server, whose process has this pid if it is on this machine."""
        return look_at(pid, self._stream)

    def input_waiter(self) -> select.poll:
        """Returns another poll object for input, which does not keep this connection alive."""
        waiter = select.poll()
        waiter.register(self._stream.fileno(), select.POLLIN)
        return waiter

    def shut_down(self) -> None:
        """Ends the stream in both directions; wakes a thread that waits in `receive`."""
        with contextlib.suppress(OSError):  # the server was faster
            self._stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the descriptor; no other I/O."""
        with contextlib.suppress(OSError):  # somebody has closed it under us: nothing is left to close
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
            ready = self._readable if self.flush() else self._either
            if not ready.poll(_milliseconds_until(deadline)) and time.monotonic() >= deadline:
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
