"""One connection as the server sees it: handshake first, then messages; bounded buffers, never blocking.

Sits between `event_loop`, which says when the socket is ready, and `handshake` and `wire`, which judge the
bytes.
"""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any

from gradsync.rendezvous.handshake import ServerHandshake
from gradsync.rendezvous.messages import FrameType, Message
from gradsync.rendezvous.wire import (
    MAX_FRAME_BYTES,
    MAX_HANDSHAKE_FRAME_BYTES,
    FrameError,
    FrameReader,
    Session,
)

MAX_OUTPUT_BYTES = 1024**2


class ConnectionLost(Exception):
    """The peer is gone, or does not read what it is sent; the text says which."""


class ServerConnection:
    """One accepted connection.

    Args:
        number: names the connection towards the core.
        stream: the non-blocking socket.
        handshake: the fresh state machine of this connection.
        deadline: monotonic seconds by which the connection must have sent its first authenticated message.

    Attributes:
        is_stranger: True until the first authenticated message.
        wants_write: True while output waits for the peer to read.
        is_watched_for_room: whether the loop waits for room for that output; the loop's own.
    """

    def __init__(self, number: int, stream: socket.socket, handshake: ServerHandshake, deadline: float) -> None:
        self.number = number
        self.stream = stream
        self.deadline = deadline
        self.is_stranger = True
        self.is_watched_for_room = False
        self._handshake = handshake
        self._session: Session | None = None
        self._reader = FrameReader()
        self._output = bytearray()

    @property
    def wants_write(self) -> bool:
        """Whether output waits for the peer to read."""
        return bool(self._output)

    def receive(self) -> list[Message]:
        """Reads once and returns the messages that are now complete.

        Raises:
            ConnectionLost: the peer closed or reset the connection.
            RendezvousError: the peer sent something unacceptable.
        """
        size = MAX_HANDSHAKE_FRAME_BYTES if self.is_stranger else MAX_FRAME_BYTES
        try:
            data = self.stream.recv(size)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError as error:
            raise ConnectionLost(error.strerror or str(error)) from error
        if not data:
            raise ConnectionLost("connection closed")
        self._reader.feed(data)
        messages = []
        while (frame := self._reader.next_frame()) is not None:
            if self._session is not None:
                messages.append(self._session.open(frame))
                self.is_stranger = False
                continue
            step = self._handshake.receive(frame)
            if isinstance(step, Session):
                self._session = step
                self._reader.limit_bytes = MAX_FRAME_BYTES
            else:
                self._output += step
        self._reader.note_time(time.monotonic(), was_complete=bool(messages))
        return messages

    @property
    def is_stuck(self) -> bool:
        """Whether the peer has left a message unfinished for too long."""
        return self._reader.is_stuck(time.monotonic())

    def send(self, frame_type: FrameType, fields: tuple[Any, ...]) -> None:
        """Queues a message for an authenticated peer.

        Raises:
            ConnectionLost: too much waits already: the peer does not read.
        """
        if self._session is None:
            raise FrameError("a message was queued before the handshake ended")
        self._output += self._session.seal(frame_type, *fields)
        if len(self._output) > MAX_OUTPUT_BYTES:
            raise ConnectionLost(f"it has left more than {MAX_OUTPUT_BYTES} bytes unread")

    def hang_up(self) -> None:
        """Ends the stream and closes it: a copy of the descriptor in a forked process must not keep it open."""
        with contextlib.suppress(OSError):  # the peer was faster
            self.stream.shutdown(socket.SHUT_RDWR)
        self.stream.close()

    def flush(self) -> None:
        """Writes as much output as the peer takes now.

        Raises:
            ConnectionLost: the peer is gone.
        """
        while self._output:
            try:
                sent = self.stream.send(self._output)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise ConnectionLost(error.strerror or str(error)) from error
            del self._output[:sent]
