"""The rendezvous server: one event loop over all connections, and the core that decides (`protocol`).

gradsync's launcher runs the server in its own process, `gradsync serve` runs it alone, and otherwise rank 0 hosts it.
The server binds its port when it is made, then serves in a background thread or in the calling thread, and never
blocks on one peer. The server limits the number, lifetime and buffers of connections that have not authenticated yet.
So these connections cannot use up its memory and its open files.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from itertools import islice
from types import TracebackType
from typing import Any

from gradsync.arguments import integer_of
from gradsync.environment import check_removed_variables
from gradsync.errors import InvalidArgument, RendezvousError
from gradsync.machine import Latch, machine_identity
from gradsync.rendezvous.frames import (
    MAX_RANKS,
    REFUSED,
    Action,
    Close,
    Ended,
    Event,
    FrameType,
    Inspect,
    Inspected,
    Lost,
    Message,
    Notice,
    Received,
    Send,
    Started,
    Tick,
)
from gradsync.rendezvous.handshake import NONCE_BYTES, ServerHandshake, ServerProcess, check_secret
from gradsync.rendezvous.liveness import inspect_peer
from gradsync.rendezvous.protocol import RendezvousCore
from gradsync.rendezvous.sockets import (
    ConnectionLost,
    bind_listener,
    format_address,
    make_room,
    receive_some,
    send_some,
    tune_stream,
)
from gradsync.rendezvous.wire import (
    MAX_FRAME_BYTES,
    MAX_HANDSHAKE_FRAME_BYTES,
    FrameError,
    FrameReader,
    Session,
)

HANDSHAKE_SECONDS = 5.0
MAX_UNAUTHENTICATED = 64  # in addition to one connection for each rank, because all ranks may connect at once
MAX_OUTPUT_BYTES = 1024**2
_CLOSING_SECONDS = 1.0  # how long the last bytes may take that are sent to a connection before it is closed
_STOP_SECONDS = 10.0
_ACCEPTS_AT_ONCE = 64
_ACCEPT_PAUSE_SECONDS = 0.1
# A heartbeat costs time mostly because the event loop wakes up. With many ranks and no requests, the loop waits a
# moment to handle several heartbeats at once. With few ranks this wait saves less time than it delays requests.
_BATCH_SECONDS_PER_RANK = 40e-6
_BATCH_FROM_SECONDS, _BATCH_UP_TO_SECONDS = 5e-3, 40e-3
_WAITING_NOTICES = 100  # while this number of notices waits for the log, the server drops new notices
_NOTICES_END_SECONDS = 0.2

_log = logging.getLogger("gradsync.rendezvous")


class ServerConnection:
    """One accepted connection: first the handshake, then messages. Its buffers are bounded; its methods never block.

    Args:
        number: the connection's number in the core.
        stream: the non-blocking socket.
        handshake: the state machine of this connection's handshake, not started yet.
        deadline: the time by which the connection's first authenticated message must arrive, in monotonic seconds;
            once the core has closed the connection: the time by which its last bytes must be written.

    Attributes:
        is_unauthenticated: True until the first authenticated message.
        reader: cuts the received bytes into frames.
        output: bytes that wait to be written.
        is_closing: whether the core has closed the connection.
        is_watched_for_room: whether the event loop waits for the stream to become writable; set by the event loop.
    """

    def __init__(self, number: int, stream: socket.socket, handshake: ServerHandshake, deadline: float) -> None:
        self.number = number
        self.stream = stream
        self.deadline = deadline
        self.is_unauthenticated = True
        self.is_closing = False
        self.is_watched_for_room = False
        self._handshake = handshake
        self._session: Session | None = None
        self.reader = FrameReader()
        self.output = bytearray()

    def receive(self) -> list[Message]:
        """Reads once and returns the messages that are now complete.

        Raises:
            RendezvousError: the connection has ended, or the peer sent an invalid frame or a wrong proof.
        """
        size = MAX_HANDSHAKE_FRAME_BYTES if self.is_unauthenticated else MAX_FRAME_BYTES
        self.reader.feed(receive_some(self.stream, size), time.monotonic())
        messages: list[Message] = []
        while (frame := self.reader.next_frame()) is not None:
            if self._session is None:
                step = self._handshake.receive(frame)
                if isinstance(step, Session):
                    self._session = step
                    self.reader.limit_bytes = MAX_FRAME_BYTES
                else:
                    self.output += step
                continue
            messages.append(self._session.open(frame))
            self.is_unauthenticated = False
        return messages

    def send(self, frame_type: FrameType, fields: tuple[Any, ...]) -> None:
        """Queues a message for an authenticated peer.

        Raises:
            ConnectionLost: too many bytes wait to be sent, because the peer does not read.
            FieldError: a field does not fit the schema.
            FrameError: the handshake has not ended.
        """
        if self._session is None:
            raise FrameError("a message was queued before the handshake ended")
        self.output += self._session.seal(frame_type, *fields)
        if len(self.output) > MAX_OUTPUT_BYTES:
            raise ConnectionLost(f"the peer has not read the last {MAX_OUTPUT_BYTES} bytes sent to it")

    def close(self) -> None:
        """Shuts the stream down, then closes it: the connection ends even if a forked process holds a copy."""
        with contextlib.suppress(OSError):  # the peer has closed the stream already
            self.stream.shutdown(socket.SHUT_RDWR)
        self.stream.close()


class RendezvousServer:
    """The server of one run.

    Args:
        world_size: the number of launched ranks, from 1.
        secret: the run's secret, at least 16 bytes.
        host: the interface to bind; loopback by default.
        port: the port to bind; 0 lets the kernel choose a free port.
        listener: a listening socket from `bind_listener` to use instead of host and port; the server closes it.
        host_rank: the rank whose process runs the server, see `RendezvousCore`; None if no rank does.

    Attributes:
        address: the address that the server has bound, e.g. "127.0.0.1:43211" or "[::1]:4000".

    Raises:
        InvalidArgument: an argument is out of its range, the secret is too short or not bytes, or an environment
            variable is set that gradsync no longer has.
        RendezvousError: the address cannot be bound.
    """

    def __init__(
        self,
        world_size: int,
        *,
        secret: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        listener: socket.socket | None = None,
        host_rank: int | None = None,
    ) -> None:
        size = integer_of(world_size)
        if size is None or not 1 <= size <= MAX_RANKS:
            raise InvalidArgument(f"the rendezvous needs a world_size from 1 to {MAX_RANKS}, got {world_size}")
        world_size = size
        secret = check_secret(secret)
        check_removed_variables()
        listener = listener or bind_listener(host, port)
        self.address = format_address(listener)
        machine = machine_identity()
        self._core = RendezvousCore(world_size, machine=machine, host=host_rank)
        self._secret = secret
        self._listener = listener
        self._run_id = os.urandom(8).hex()  # the keys of every session are derived from this id too
        self._process = ServerProcess.of(machine, os.getpid())
        self._claimed = False
        self._runner: int | None = None  # the thread that runs the event loop
        self._thread: threading.Thread | None = None  # the same thread, if the server has started it
        self._stopping = False
        self._empty = Latch(is_set=True)  # set while there is no connection
        self._over = Latch()  # set once the event loop has ended
        make_room(2 * world_size + MAX_UNAUTHENTICATED)
        self._max_members = 2 * world_size + 16  # twice, because one generation may leave while the next one joins
        self._max_unauthenticated = world_size + MAX_UNAUTHENTICATED
        self._batch_seconds = _batch_seconds(world_size)
        self._is_quiet = False  # whether only heartbeats arrived in this iteration of the event loop
        self._notices = _NoticeWriter()
        self._connections: dict[int, ServerConnection] = {}
        self._unauthenticated: dict[int, ServerConnection] = {}  # the oldest first, which has the earliest deadline
        self._closing: dict[int, ServerConnection] = {}  # closed by the core, with bytes to write; the oldest first
        self._lost: deque[tuple[ServerConnection, str]] = deque()
        self._queued: deque[Event] = deque()  # results of inspections, and events from other threads
        self._accept_resumes_at: float | None = None
        self._next_number = 0
        tune_stream(listener)  # accepted sockets inherit the options: the server sets the options only once
        self._selector = selectors.DefaultSelector()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._selector.register(listener, selectors.EVENT_READ)
        _servers.add(self)

    def __enter__(self) -> RendezvousServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Serves in a background daemon thread.

        Raises:
            RendezvousError: the server was started or stopped before.
        """
        self._claim()
        self._thread = threading.Thread(target=self._run, name=f"gradsync-rendezvous-{self.address}", daemon=True)
        self._thread.start()

    def serve_forever(self) -> None:
        """Serves in the calling thread until `stop`, which a signal handler or another thread may call.

        Raises:
            RendezvousError: the server was started or stopped before.
        """
        self._claim()
        self._run()

    def stop(self) -> None:
        """Stops the server: closes all connections and frees the port. Waits up to 20 s for the end of the event loop.

        If the serving thread itself calls `stop` (from a signal handler during `serve_forever`), `stop` returns at
        once, and the loop ends soon after. Idempotent.
        """
        self._stopping = True
        self._wake()
        if not self._claimed:
            self._claimed = True
            self._close()
        elif self._runner != threading.get_ident():
            self._over.wait(_STOP_SECONDS)
            if self._thread is not None:
                self._thread.join(_STOP_SECONDS)

    def note_start(self, rank: int, pid: int) -> None:
        """Records the start of a rank's process on this machine.

        If the process is paused (SIGSTOP) before it joins, the ranks that wait for it to join get an error.

        Args:
            rank: the rank's number.
            pid: the process id.
        """
        self._submit(Started(rank, pid))

    def note_end(self, rank: int, how: str) -> None:
        """Records that a rank's process has ended; ranks that wait for it to join get an error.

        Args:
            rank: the rank's number.
            how: how the process ended, in words, e.g. "ended with exit code 0".
        """
        self._submit(Ended(rank, how))

    def wait_until_empty(self, timeout_seconds: float) -> bool:
        """Waits until no connection is open; returns False at the deadline. For a process that hosts the server.

        Args:
            timeout_seconds: how long to wait at most.
        """
        return self._empty.wait(timeout_seconds)

    def abandon(self) -> None:
        """Closes a forked child's copies of the descriptors, without any I/O; the parent's streams stay open."""
        self._claimed = True
        self._empty, self._over = Latch(is_set=True), Latch(is_set=True)  # a thread may have held the old ones' locks
        with contextlib.suppress(OSError):
            self._close_descriptors(connection.stream for connection in self._connections.values())

    def _claim(self) -> None:
        if self._claimed:
            raise RendezvousError(
                f"the rendezvous server at {self.address} was started or stopped before; make a new server"
            )
        self._claimed = True

    # The event loop: one selector over all sockets.

    def _run(self) -> None:
        """Serves until `stop`, then closes everything."""
        self._runner = threading.get_ident()
        try:
            while not self._stopping:
                ready = self._selector.select(self._wait_seconds())
                self._is_quiet = bool(ready)
                for key, mask in ready:
                    self._handle_ready(key, mask)
                    if self._lost:
                        self._drop_lost()
                self._handle_time(time.monotonic())
                self._drop_lost()
                if self._is_quiet and self._batch_seconds:
                    time.sleep(self._batch_seconds)
        finally:
            self._close()

    def _close(self) -> None:
        """Closes every descriptor; the peers see the end of their streams."""
        self._close_descriptors(self._connections.values())
        self._empty.set()
        self._notices.end()
        self._over.set()

    def _close_descriptors(self, streams: Iterable[socket.socket | ServerConnection]) -> None:
        self._selector.close()
        for closable in (*streams, self._listener, self._wake_receiver, self._wake_sender):
            with contextlib.suppress(OSError):  # the program may have closed the descriptor itself
                closable.close()
        self._connections.clear()

    def _submit(self, event: Event) -> None:
        """Queues an event for the core; safe in any thread."""
        self._queued.append(event)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # the pipe is full, so the loop wakes soon; or closed, so the loop has ended
            self._wake_sender.send(b"\0")

    def _wait_seconds(self) -> float | None:
        due = [self._core.next_deadline(), self._accept_resumes_at]
        for waiting in (self._unauthenticated, self._closing):
            due += [connection.deadline for connection in islice(waiting.values(), 1)]
        earliest = min((time_due for time_due in due if time_due is not None), default=None)
        return None if earliest is None else max(0.0, earliest - time.monotonic())

    def _handle_ready(self, key: selectors.SelectorKey, mask: int) -> None:
        if key.data is not None:
            if key.data.number not in self._connections:  # the connection was dropped earlier in this iteration
                return
            if mask & selectors.EVENT_WRITE:
                self._flush(key.data)
            if mask & selectors.EVENT_READ:
                self._receive(key.data)
        elif key.fileobj is self._listener:
            self._accept()
        else:
            self._wake_receiver.recv(4096)
            self._handle_event(Tick())  # this handles the queued events too

    def _handle_time(self, now: float) -> None:
        no_handshake = f"no handshake within {HANDSHAKE_SECONDS:g} s"
        for waiting, cause in ((self._unauthenticated, no_handshake), (self._closing, "closed by the server")):
            while (oldest := next(iter(waiting.values()), None)) is not None and oldest.deadline <= now:
                self._drop(oldest, cause)
        deadline = self._core.next_deadline()
        if deadline is not None and deadline <= now:
            self._handle_event(Tick())
        if self._accept_resumes_at is not None and self._accept_resumes_at <= now:
            self._accept_resumes_at = None
            self._selector.register(self._listener, selectors.EVENT_READ)

    # Connections.

    def _accept(self) -> None:
        self._is_quiet = False
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                stream, _ = self._listener.accept()
            except OSError as error:
                self._survive_accept_error(error)
                return
            self._admit(stream)

    def _survive_accept_error(self, error: OSError) -> None:
        """Accepts nothing for 0.1 s if no descriptor or memory is free; otherwise the loop would spin."""
        if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
            return  # no connection waits, or the peer has aborted its connection
        self._notices.write(f"the rendezvous server cannot accept connections: {error.strerror}")
        if self._unauthenticated:
            self._drop(next(iter(self._unauthenticated.values())), "no file descriptor is free")
        self._selector.unregister(self._listener)
        self._accept_resumes_at = time.monotonic() + _ACCEPT_PAUSE_SECONDS

    def _admit(self, stream: socket.socket) -> None:
        if len(self._unauthenticated) >= self._max_unauthenticated:
            self._drop(next(iter(self._unauthenticated.values())), "too many connections without a handshake")
        stream.setblocking(False)
        self._next_number += 1
        handshake = ServerHandshake(self._secret, self._run_id, os.urandom(NONCE_BYTES), self._process)
        connection = ServerConnection(self._next_number, stream, handshake, time.monotonic() + HANDSHAKE_SECONDS)
        if not self._connections:
            self._empty.clear()
        self._connections[connection.number] = connection
        self._unauthenticated[connection.number] = connection
        self._selector.register(stream, selectors.EVENT_READ, connection)

    def _receive(self, connection: ServerConnection) -> None:
        try:
            messages = connection.receive()
        except RendezvousError as error:
            self._lost.append((connection, str(error)))
            return
        except Exception as error:
            self._end_after_error(connection.number, error)
            return
        if not connection.is_unauthenticated and connection.number in self._unauthenticated:
            del self._unauthenticated[connection.number]
            if len(self._connections) - len(self._unauthenticated) > self._max_members:
                self._refuse(connection, messages[0].sequence)
                return
        if connection.output:
            self._flush(connection)
        for message in messages:
            if connection.is_closing or connection.number not in self._connections:
                return  # the core has closed the connection, for example after a LEAVE
            self._is_quiet = self._is_quiet and message.type is FrameType.HEARTBEAT
            self._handle_event(Received(connection.number, message))

    def _refuse(self, connection: ServerConnection, sequence: int) -> None:
        """Refuses an authenticated connection, because more connections are open than a correct run needs."""
        text = f"the server has more than {self._max_members} authenticated connections; close some"
        self._perform([Send(connection.number, FrameType.REFUSED, (sequence, REFUSED, text)), Close(connection.number)])

    def _flush(self, connection: ServerConnection) -> None:
        if connection.output:
            try:
                send_some(connection.stream, connection.output)
            except ConnectionLost as error:
                self._lost.append((connection, str(error)))
                return
        wants_room = bool(connection.output)
        if connection.is_closing and not wants_room:
            self._lost.append((connection, "closed by the server"))
            return
        if wants_room != connection.is_watched_for_room:
            connection.is_watched_for_room = wants_room
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wants_room else 0)
            self._selector.modify(connection.stream, events, connection)

    def _drop_lost(self) -> None:
        while self._lost:
            self._drop(*self._lost.popleft())

    def _drop(self, connection: ServerConnection, cause: str) -> None:
        if self._connections.pop(connection.number, None) is None:
            return
        self._unauthenticated.pop(connection.number, None)
        self._closing.pop(connection.number, None)
        self._selector.unregister(connection.stream)
        connection.close()
        if not self._connections:
            self._empty.set()
        _log.debug("rendezvous: connection %d ended: %s", connection.number, cause)
        self._handle_event(Lost(connection.number, cause))

    # The core.

    def _handle_event(self, event: Event) -> None:
        self._perform(self._decide(event))
        while self._queued:  # a loop, not a recursion, because one iteration may inspect thousands of ranks
            self._perform(self._decide(self._queued.popleft()))

    def _decide(self, event: Event) -> list[Action]:
        """Returns the core's actions. An error over what one connection has sent ends only this connection."""
        try:
            return self._core.handle(time.monotonic(), event)
        except Exception as error:
            if not isinstance(event, Received | Lost):
                raise
            self._end_after_error(event.connection, error)
            return []

    def _end_after_error(self, number: int, error: Exception) -> None:
        text = f"an error in the rendezvous server: {error!r}"
        self._notices.write(f"connection {number} ended after {text}")
        _log.debug("rendezvous: connection %d ended after an error", number, exc_info=error)
        if number in self._connections:
            self._lost.append((self._connections[number], text))

    def _perform(self, actions: list[Action]) -> None:
        """Carries out actions, then writes their output."""
        for connection in dict.fromkeys(map(self._carry_out, actions)):
            if connection is not None:
                self._flush(connection)

    def _carry_out(self, action: Action) -> ServerConnection | None:
        """Carries out one action; returns the connection to flush, or None."""
        if isinstance(action, Notice):
            self._notices.write(action.text)
            return None
        if isinstance(action, Inspect):
            self._inspect(action)
            return None
        connection = self._connections.get(action.connection)
        if connection is None:
            return None
        if isinstance(action, Send):
            try:
                connection.send(action.type, action.fields)
            except (ConnectionLost, ValueError) as error:  # a message that is invalid must fail only this connection
                self._lost.append((connection, str(error)))
                return None
        elif not connection.is_closing:  # `_flush` drops the connection once its last bytes are written
            connection.is_closing = True
            connection.deadline = time.monotonic() + _CLOSING_SECONDS
            self._closing[connection.number] = connection
        return connection

    def _inspect(self, action: Inspect) -> None:
        """Inspects a silent peer, and queues the result for the core."""
        stream = None
        if action.peer >= 0:
            connection = self._connections.get(action.peer)
            if connection is None:
                return
            stream = connection.stream
        try:
            self._queued.append(Inspected(action.peer, inspect_peer(action.pid, stream)))
        except Exception as error:
            self._end_after_error(action.peer, error)


# A forked child must not keep the port or the streams open: the end of a stream shows a rank that the server is gone.
_servers: weakref.WeakSet[RendezvousServer] = weakref.WeakSet()


def _abandon_copies() -> None:
    for server in list(_servers):
        server.abandon()
    _servers.clear()


os.register_at_fork(after_in_child=_abandon_copies)


def _batch_seconds(ranks: int) -> float:
    """Returns how long to wait so that the loop handles several heartbeats together; 0 for few ranks."""
    seconds = min(ranks * _BATCH_SECONDS_PER_RANK, _BATCH_UP_TO_SECONDS)
    return seconds if seconds >= _BATCH_FROM_SECONDS else 0.0


class _NoticeWriter:
    """Writes notices to the log, in order, in a separate thread.

    A paused terminal or a full pipe blocks this thread, so that it does not block the server.
    """

    def __init__(self) -> None:
        self._texts: queue.Queue[str | None] = queue.Queue(_WAITING_NOTICES)
        self._thread: threading.Thread | None = None

    def write(self, text: str) -> None:
        """Queues a notice, or drops it if the queue is full; never waits."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gradsync-notices", daemon=True)
            self._thread.start()
        self._put(f"gradsync: {text}")

    def end(self) -> None:
        """Asks the thread to write the queued notices and then end; waits at most 0.2 s."""
        if self._thread is not None:
            self._put(None)
            self._thread.join(_NOTICES_END_SECONDS)

    def _put(self, text: str | None) -> None:
        with contextlib.suppress(queue.Full):
            self._texts.put_nowait(text)

    def _run(self) -> None:
        while (text := self._texts.get()) is not None:
            _log.warning("%s", text)
