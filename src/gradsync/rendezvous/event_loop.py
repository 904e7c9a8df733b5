"""The server's event loop: one selector over all sockets, one core that decides. Never blocks on one peer.

Sits under `server`, which owns the thread, and over `protocol`. Strangers, connections that have not authenticated and
joined yet, are few, short-lived and bounded: they cannot disturb a run.
"""

from __future__ import annotations

import errno
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque

from gradsync.errors import RendezvousError
from gradsync.rendezvous.events import Action, Close, Event, Look, Lost, Notice, Probe, Received, Send, Tick
from gradsync.rendezvous.handshake import NONCE_BYTES, ServerHandshake
from gradsync.rendezvous.messages import REFUSED, FrameType
from gradsync.rendezvous.notices import NoticeWriter
from gradsync.rendezvous.probing import answer_look, answer_probe
from gradsync.rendezvous.protocol import RendezvousCore
from gradsync.rendezvous.server_connection import ConnectionLost, ServerConnection
from gradsync.rendezvous.sockets import tune_stream
from gradsync.rendezvous.waking import Waker
from gradsync.rendezvous.wire import UNFINISHED

HANDSHAKE_SECONDS = 5.0
MAX_STRANGERS = 64  # beside one for each rank: all may come at once, and none is to be turned away for that
_CLOSING_SECONDS = 1.0  # for a peer to read its last message
_ACCEPTS_PER_TURN = 64
_ACCEPT_PAUSE_SECONDS = 0.1
# Most of what a heartbeat costs is to wake for it. Where many ranks live quietly, the loop lets some come together;
# where they are few that is not worth the delay to whoever asks something meanwhile.
_GATHER_SECONDS_PER_RANK = 40e-6
_GATHER_FROM_SECONDS, _GATHER_UP_TO_SECONDS = 5e-3, 40e-3

_log = logging.getLogger("gradsync.rendezvous")


class EventLoop:
    """Serves one listener until told to stop.

    Args:
        listener: the listening socket; owned and closed by the loop.
        core: decides what happens.
        secret, run_id: for the handshakes.
        ranks: how many are expected, for one generation.
    """

    def __init__(
        self,
        listener: socket.socket,
        core: RendezvousCore,
        *,
        secret: bytes,
        run_id: str,
        ranks: int,
    ) -> None:
        self._listener = listener
        self._core = core
        self._secret = secret
        self._run_id = run_id
        self._max_members = 2 * ranks + 16  # one generation may leave while the next one joins
        self._max_strangers = ranks + MAX_STRANGERS
        self._gather_seconds = _gather_seconds(ranks)
        self._is_quiet = False  # whether nothing but heartbeats has come in this turn
        self._stopping = False
        self._notices = NoticeWriter()
        self._connections: dict[int, ServerConnection] = {}
        self._empty = threading.Event()  # set while there is no connection
        self._empty.set()
        self._strangers: dict[int, ServerConnection] = {}  # oldest first, so the earliest deadline first
        self._closing: dict[int, ServerConnection] = {}  # earliest deadline first
        self._lost: deque[tuple[ServerConnection, str]] = deque()
        self._queued: deque[Event] = deque()  # what was found of silent peers, and what other threads tell
        self._accept_resumes_at: float | None = None
        self._next_number = 0
        listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._waker = Waker(self._selector)
        self._selector.register(listener, selectors.EVENT_READ)

    def request_stop(self) -> None:
        """Asks the loop to end; safe from any thread and from a signal handler."""
        self._stopping = True
        self._waker.wake()

    def tell(self, event: Event) -> None:
        """Has the core take an event; safe from any thread."""
        self._queued.append(event)
        self._waker.wake()

    def wait_until_empty(self, timeout_seconds: float) -> bool:
        """Waits, in another thread than the loop's, until every connection has ended; returns whether that is so."""
        return self._empty.wait(timeout_seconds)

    def run(self) -> None:
        """Serves until `request_stop`, then closes everything."""
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
                if self._is_quiet and self._gather_seconds:
                    time.sleep(self._gather_seconds)
        finally:
            self.close()

    def close(self, *, is_copy: bool = False) -> None:
        """Closes every descriptor, without a word to the peers: the end of the stream tells them.

        Args:
            is_copy: whether these are a forked child's copies, whose streams are to go on.
        """
        self._selector.close()
        for connection in self._connections.values():
            if is_copy:
                connection.stream.close()
            else:
                connection.hang_up()
        self._connections.clear()
        self._listener.close()
        self._waker.close()
        if not is_copy:
            self._notices.end()

    def _wait_seconds(self) -> float | None:
        due = [self._core.next_deadline(), self._accept_resumes_at]
        due += [next(iter(group.values())).deadline for group in (self._strangers, self._closing) if group]
        earliest = min((time_due for time_due in due if time_due is not None), default=None)
        return None if earliest is None else max(0.0, earliest - time.monotonic())

    def _handle_ready(self, key: selectors.SelectorKey, mask: int) -> None:
        if key.fileobj is self._listener:
            self._accept()
        elif key.fileobj is self._waker.receiver:
            self._waker.quiet()
            self._tell_core(Tick())  # and what is queued
        elif key.data.number in self._connections:  # it may have been dropped in this very turn
            if mask & selectors.EVENT_WRITE:
                self._flush(key.data)
            if mask & selectors.EVENT_READ:
                self._receive(key.data)

    def _handle_time(self, now: float) -> None:
        for group, cause in (
            (self._strangers, f"no handshake within {HANDSHAKE_SECONDS:g} s"),
            (self._closing, "it does not read its last message"),
        ):
            while group and (connection := next(iter(group.values()))).deadline <= now:
                self._drop(connection, cause)
        deadline = self._core.next_deadline()
        if deadline is not None and deadline <= now:
            self._tell_core(Tick())
        if self._accept_resumes_at is not None and self._accept_resumes_at <= now:
            self._accept_resumes_at = None
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _accept(self) -> None:
        self._is_quiet = False
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                stream, _ = self._listener.accept()
            except OSError as error:
                self._survive_accept_error(error)
                return
            self._admit(stream)

    def _survive_accept_error(self, error: OSError) -> None:
        """The listener stays readable while descriptors are short: pause instead of spinning."""
        if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
            return  # there is no other, or the one was aborted before it was accepted
        self._notices.tell(f"the rendezvous server cannot accept connections: {error.strerror}")
        if self._strangers:
            self._drop(next(iter(self._strangers.values())), "descriptors are short")
        self._selector.unregister(self._listener)
        self._accept_resumes_at = time.monotonic() + _ACCEPT_PAUSE_SECONDS

    def _admit(self, stream: socket.socket) -> None:
        if len(self._strangers) >= self._max_strangers:
            self._drop(next(iter(self._strangers.values())), "too many connections without a handshake")
        try:
            tune_stream(stream)
        except OSError:  # reset already
            stream.close()
            return
        self._next_number += 1
        handshake = ServerHandshake(self._secret, self._run_id, os.urandom(NONCE_BYTES))
        connection = ServerConnection(self._next_number, stream, handshake, time.monotonic() + HANDSHAKE_SECONDS)
        self._connections[connection.number] = connection
        self._empty.clear()
        self._strangers[connection.number] = connection
        self._selector.register(stream, selectors.EVENT_READ, connection)

    def _receive(self, connection: ServerConnection) -> None:
        try:
            messages = connection.receive()
        except (ConnectionLost, RendezvousError) as error:
            self._lost.append((connection, str(error)))
            return
        if not connection.is_stranger and connection.number in self._strangers:
            del self._strangers[connection.number]
            if len(self._connections) - len(self._strangers) > self._max_members:
                self._refuse(connection, messages[0].sequence)
                return
        if connection.wants_write:
            self._flush(connection)
        for message in messages:
            if connection.number in self._closing or connection.number not in self._connections:
                return  # what follows a goodbye or a refusal is not heard
            self._is_quiet = self._is_quiet and message.type is FrameType.HEARTBEAT
            self._tell_core(Received(connection.number, message))

    def _refuse(self, connection: ServerConnection, sequence: int) -> None:
        """Turns an authenticated connection away: more of them than any correct run needs are open."""
        text = f"the server has more than {self._max_members} authenticated connections; close some"
        self._perform(Send(connection.number, FrameType.REFUSED, (sequence, REFUSED, text)))
        self._perform(Close(connection.number))
        self._flush(connection)

    def _tell_core(self, event: Event) -> None:
        self._queued.appendleft(event)
        while self._queued:  # in a loop: thousands of ranks may be looked at in one turn
            touched: dict[int, ServerConnection] = {}
            for action in self._core.handle(time.monotonic(), self._queued.popleft()):
                connection = self._perform(action)
                if connection is not None:
                    touched[connection.number] = connection
            for connection in touched.values():
                self._flush(connection)

    def _perform(self, action: Action) -> ServerConnection | None:
        """Carries out one action; returns the connection that has something to flush."""
        if isinstance(action, Notice):
            self._notices.tell(action.text)
            return None
        if isinstance(action, Look):
            self._queued.append(answer_look(action))
            return None
        connection = self._connections.get(action.connection)
        if connection is None:
            return None
        if isinstance(action, Probe):
            if connection.is_stuck:
                self._lost.append((connection, UNFINISHED))
            self._queued.append(answer_probe(action, connection.stream))
            return None
        if isinstance(action, Send):
            try:
                connection.send(action.type, action.fields)
            except ConnectionLost as error:
                self._lost.append((connection, str(error)))
                return None
        elif isinstance(action, Close) and connection.number not in self._closing:
            connection.deadline = time.monotonic() + _CLOSING_SECONDS
            self._closing[connection.number] = connection
        return connection

    def _flush(self, connection: ServerConnection) -> None:
        try:
            connection.flush()
        except ConnectionLost as error:
            self._lost.append((connection, str(error)))
            return
        if not connection.wants_write and connection.number in self._closing:
            self._drop(connection, "closed by the server")
            return
        if connection.wants_write != connection.is_watched_for_room:
            connection.is_watched_for_room = connection.wants_write
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_write else 0)
            self._selector.modify(connection.stream, events, connection)

    def _drop_lost(self) -> None:
        while self._lost:
            self._drop(*self._lost.popleft())

    def _drop(self, connection: ServerConnection, cause: str) -> None:
        if self._connections.pop(connection.number, None) is None:
            return
        self._strangers.pop(connection.number, None)
        self._closing.pop(connection.number, None)
        self._selector.unregister(connection.stream)
        connection.hang_up()
        if not self._connections:
            self._empty.set()
        _log.debug("rendezvous: connection %d ended: %s", connection.number, cause)
        self._tell_core(Lost(connection.number, cause))


def _gather_seconds(ranks: int) -> float:
    """Returns how long to let the heartbeats of so many ranks come together; 0 where they are few."""
    seconds = min(ranks * _GATHER_SECONDS_PER_RANK, _GATHER_UP_TO_SECONDS)
    return seconds if seconds >= _GATHER_FROM_SECONDS else 0.0
