"""The rendezvous server: asyncio in a thread of the hosting process, and the core that decides (`worlds.py`).

gradsync's launcher runs the server in its own process, `gradsync serve` runs it alone, and otherwise rank 0 hosts it.
It binds its port when it is made. Connections that have not authenticated are few, short-lived and small, so that
strangers cannot use up the memory and the open files of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import queue
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

from gradsync.arguments import integer_of
from gradsync.environment import check_removed_variables
from gradsync.errors import InvalidArgument, RendezvousError
from gradsync.machine import Latch, machine_identity, read_stat, start_thread
from gradsync.rendezvous.sockets import (
    ConnectionLost,
    bind_listener,
    format_address,
    make_room,
    receive_some,
    tune_stream,
)
from gradsync.rendezvous.wire import MAX_FRAME_BYTES, MAX_RANKS, Channel, Kind, Message, Status, check_secret
from gradsync.rendezvous.worlds import Worlds, ignore

HANDSHAKE_SECONDS = 5.0
MAX_UNAUTHENTICATED = 64  # in addition to one connection for each rank, because all ranks may connect at once
MAX_OUTPUT_BYTES = 1024**2
_CLOSING_SECONDS = 1.0  # how long the last bytes may take that are sent to a connection before it is closed
_STOP_SECONDS = 10.0
_ACCEPTS_AT_ONCE = 64
_ACCEPT_PAUSE_SECONDS = 0.1
_WAITING_NOTICES = 100  # while this number of notices waits for the log, the server drops new notices
_NOTICES_END_SECONDS = 0.2

_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)

_log = logging.getLogger("gradsync.rendezvous")


class _Peer(asyncio.Protocol):
    """One accepted connection: first the handshake, then messages.

    Attributes:
        number: the connection's number in the core.
        stream: the socket itself, to close a forked child's copy.
        timer: ends the connection if its handshake, or its last bytes, take too long.
        task: makes the transport; kept here, because asyncio itself keeps only a weak reference.
    """

    def __init__(self, server: RendezvousServer, number: int, stream: socket.socket, channel: Channel) -> None:
        self.number = number
        self.stream = stream
        self._server = server
        self._channel = channel
        self._transport: asyncio.Transport | None = None
        self._cause = ""
        self._is_closing = False
        self.timer: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[Any] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._cause:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        was_open = self._channel.has_received
        try:
            messages = self._channel.feed(data)
            self.flush()
            if self._channel.has_received and not was_open and not self._server.admit(self, messages[0]):
                return
            for message in messages:
                if self._is_closing:
                    return  # the core has closed the connection, for example after a LEAVE
                self._server.receive(self.number, message)
        except RendezvousError as error:
            self.end(str(error))
        except Exception as error:  # in what one connection has sent: it ends only this connection
            text = f"an error in the rendezvous server: {error!r}"
            self._server.notices.write(f"connection {self.number} ended after {text}")
            _log.debug("rendezvous: connection %d ended after an error", self.number, exc_info=error)
            self.end(text)

    def send(self, kind: Kind, request: int, *fields: object) -> None:
        """Seals a message to an authenticated peer, which `flush` sends."""
        self._channel.seal(kind, request, *fields)

    def flush(self) -> None:
        """Hands the channel's bytes to asyncio, which writes them when there is room."""
        transport, outgoing = self._transport, self._channel.outgoing
        if transport is not None and outgoing and not transport.is_closing():
            if transport.get_write_buffer_size() > MAX_OUTPUT_BYTES:  # of answers before this one, which may be longer
                self.end(f"the peer has not read the last {MAX_OUTPUT_BYTES} bytes sent to it")
                return
            transport.write(bytes(outgoing))
            outgoing.clear()

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        """Closes the connection once its last bytes are written, at the latest after a second."""
        if not self._is_closing and self._transport is not None:
            self.flush()
            self._is_closing, self._cause = True, "closed by the server"
            self._transport.close()
            self.stop_timer()
            self.timer = loop.call_later(_CLOSING_SECONDS, self._transport.abort)

    def end(self, cause: str) -> None:
        """Ends the connection now."""
        self._cause = self._cause or cause
        if self._transport is not None:
            self._transport.abort()

    def stop_timer(self) -> None:
        """Cancels `timer`."""
        if self.timer is not None:
            self.timer.cancel()

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None and not self._cause:
            # The error may be of a write: a rank's last words, such as LEAVE, may have arrived.
            with contextlib.suppress(ConnectionLost):
                while data := receive_some(self.stream, MAX_FRAME_BYTES):
                    self.data_received(data)
        self.stop_timer()
        reason = "connection closed" if error is None else getattr(error, "strerror", None) or str(error)
        is_silent = isinstance(error, OSError) and (isinstance(error, TimeoutError) or error.errno in _UNREACHABLE)
        self._server.forget(self, self._cause or reason, is_silent=is_silent and not self._cause)


class RendezvousServer:
    """The server of one run.

    Args:
        world_size: the number of launched ranks, from 1.
        secret: the run's secret, at least 16 bytes.
        host: the interface to bind; loopback by default.
        port: the port to bind; 0 lets the kernel choose a free port.
        listener: a listening socket from `bind_listener` to use instead of host and port; the server closes it.
        host_rank: the rank whose process runs the server, see `Worlds`; None if no rank does.
        min_ranks, respawns, on_lost, on_rebuilt: see `Worlds`. The last two are called in the server's thread, and must
            be quick.

    Attributes:
        address: the address that the server has bound, e.g. "127.0.0.1:43211" or "[::1]:4000".
        notices: the writer of notices.

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
        min_ranks: int = 1,
        respawns: bool = False,
        on_lost: Callable[[int, str], object] = ignore,
        on_rebuilt: Callable[[int, tuple[int, ...], float], object] = ignore,
    ) -> None:
        size = integer_of(world_size)
        if size is None or not 1 <= size <= MAX_RANKS:
            raise InvalidArgument(f"the rendezvous needs a world_size from 1 to {MAX_RANKS}, got {world_size}")
        if not 1 <= min_ranks <= size:
            raise InvalidArgument(f"the rendezvous needs min_ranks from 1 to world_size {size}, got {min_ranks}")
        self._secret = check_secret(secret)
        check_removed_variables()
        self._listener = listener or bind_listener(host, port)
        self.address = format_address(self._listener)
        make_room(2 * size + MAX_UNAUTHENTICATED)
        self._max_members = 2 * size + 16  # twice, because one generation may leave while the next one joins
        self._max_unauthenticated = size + MAX_UNAUTHENTICATED
        self._run_id = os.urandom(8).hex()  # the keys of every connection are derived from this, too
        self.notices = _NoticeWriter()
        self._worlds = Worlds(
            self._send, self._close_peer, self.notices.write, _state_of,
            machine=machine_identity(), size=size, host=host_rank,
            min_ranks=min_ranks, respawns=respawns, on_lost=on_lost, on_rebuilt=on_rebuilt,
        )  # fmt: skip
        self._peers: dict[int, _Peer] = {}
        self._strangers: dict[int, _Peer] = {}  # those that have not authenticated, the oldest first
        self._unsent: dict[int, _Peer] = {}  # those to which the core has said something
        self._admitted: set[int] = set()  # those that have authenticated
        self._next_number = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped: asyncio.Event | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._is_claimed = self._is_stopping = False
        self._runner: int | None = None  # the thread that runs the loop
        self._thread: threading.Thread | None = None  # the same thread, if the server has started it
        self._empty = Latch(is_set=True)  # set while there is no connection
        self._over = Latch()  # set once the loop has ended
        self._calls: deque[Callable[[], None]] = deque()  # what other threads and handlers want done in the loop
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
        start_thread(self._thread)

    def serve_forever(self) -> None:
        """Serves in the calling thread until `stop`, which a signal handler or another thread may call.

        Raises:
            RendezvousError: the server was started or stopped before.
        """
        self._claim(threading.get_ident())  # a handler that calls `stop` from now on must not wait for this thread
        self._run()

    def stop(self) -> None:
        """Stops the server: closes all connections and frees the port. Waits up to 20 s for the end of its thread.

        If the serving thread itself calls `stop` (from a signal handler during `serve_forever`), `stop` returns at
        once, and the server ends soon after. Idempotent.
        """
        self._is_stopping = True
        self._call_soon(self._set_stopped)
        if not self._is_claimed:
            self._is_claimed = True
            self._end()
        elif self._runner != threading.get_ident():
            self._over.wait(_STOP_SECONDS)
            if self._thread is not None:
                self._thread.join(_STOP_SECONDS)

    def make_room_for(self, world_size: int) -> None:
        """Allows the connections of one more world of this size. For a server whose host makes worlds by name."""
        self._max_members += 2 * world_size
        self._max_unauthenticated += world_size
        make_room(self._max_members + MAX_UNAUTHENTICATED)

    def note_start(self, rank: int, pid: int) -> None:
        """Records the start of a launched rank's process on this machine, also again after its end.

        If the process is stopped (SIGSTOP) before it joins, the ranks that wait for it get an error.
        """
        self._call_soon(partial(self._process, rank, pid))

    def note_end(self, rank: int, how: str) -> None:
        """Records that a rank's process has ended, in words; ranks that wait for it to join get an error."""
        self._call_soon(partial(self._process, rank, None, how))

    @property
    def has_joined(self) -> bool:
        """Whether any rank has ever joined."""
        return self._worlds.has_joined

    def wait_until_empty(self, timeout_seconds: float) -> bool:
        """Waits until no connection is open; returns False at the deadline. For a process that hosts the server."""
        return self._empty.wait(timeout_seconds)

    def abandon(self) -> None:
        """Closes a forked child's copies of the sockets, without any I/O; the parent's streams stay open."""
        self._is_claimed, self._loop = True, None
        self._empty, self._over = Latch(is_set=True), Latch(is_set=True)  # a thread may have held the old ones' locks
        for stream in (self._listener, *[peer.stream for peer in self._peers.values()]):
            with contextlib.suppress(OSError):
                stream.close()

    def _claim(self, runner: int | None = None) -> None:
        if self._is_claimed:
            raise RendezvousError(
                f"the rendezvous server at {self.address} was started or stopped before; make a new server"
            )
        self._runner = runner
        self._is_claimed = True

    # -- The loop ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._runner = threading.get_ident()
        try:
            asyncio.run(self._serve())
        finally:
            self._end()

    async def _serve(self) -> None:
        if self._is_stopping:  # the listener may be closed
            return
        loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        self._listener.setblocking(False)
        tune_stream(self._listener)  # accepted sockets inherit the options: the server sets them only once
        loop.add_reader(self._listener, self._accept)
        self._loop = loop
        self._do_calls()
        await self._stopped.wait()
        loop.remove_reader(self._listener)
        for peer in list(self._peers.values()):
            peer.end("the server has ended")
        await asyncio.sleep(0)  # so that asyncio closes the connections

    def _end(self) -> None:
        self._loop = None
        for stream in (self._listener, *[peer.stream for peer in self._peers.values()]):
            with contextlib.suppress(OSError):  # the program may have closed the descriptor itself
                stream.close()
        self._peers.clear()
        self._empty.set()
        self.notices.end()
        self._over.set()

    def _call_soon(self, call: Callable[[], None]) -> None:
        """Has the loop's thread call something; safe in any thread, and in a signal handler."""
        self._calls.append(call)
        loop = self._loop
        if loop is not None:  # else it makes these calls as it begins
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._do_calls)

    def _do_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()

    def _set_stopped(self) -> None:
        assert self._stopped is not None
        self._stopped.set()

    def _accept(self) -> None:
        assert self._loop is not None
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                stream, _ = self._listener.accept()
            except OSError as error:
                self._survive_accept_error(error)
                return
            stream.setblocking(False)
            if len(self._strangers) >= self._max_unauthenticated:
                self._drop_oldest("too many connections without a handshake")
            self._next_number += 1
            peer = _Peer(self, self._next_number, stream, Channel(self._secret, run_id=self._run_id))
            self._empty.clear()
            self._peers[peer.number] = self._strangers[peer.number] = peer
            peer.task = self._loop.create_task(self._loop.connect_accepted_socket(partial(_same, peer), stream))
            peer.timer = self._loop.call_later(HANDSHAKE_SECONDS, self._drop_stranger, peer)

    def _survive_accept_error(self, error: OSError) -> None:
        """Accepts nothing for 0.1 s if no descriptor or memory is free; otherwise the loop would spin."""
        loop = self._loop
        if loop is None or error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
            return  # no connection waits, or the peer has aborted its connection
        self.notices.write(f"the rendezvous server cannot accept connections: {error.strerror}")
        if self._strangers:
            self._drop_oldest("no file descriptor is free")
        loop.remove_reader(self._listener)
        loop.call_later(_ACCEPT_PAUSE_SECONDS, lambda: loop.add_reader(self._listener, self._accept))

    def _drop_oldest(self, cause: str) -> None:
        """Ends the oldest stranger, which does not count from now on: asyncio takes a moment to close it."""
        self._strangers.pop(next(iter(self._strangers))).end(cause)

    def _drop_stranger(self, peer: _Peer) -> None:
        if peer.number in self._strangers:
            peer.end(f"no handshake within {HANDSHAKE_SECONDS:g} s")

    # -- For peers, and for the core -----------------------------------------------------------------------------

    def admit(self, peer: _Peer, message: Message) -> bool:
        """Takes up an authenticated connection; refuses it if more are open than a correct run needs."""
        self._strangers.pop(peer.number, None)
        peer.stop_timer()
        if len(self._admitted) < self._max_members:
            self._admitted.add(peer.number)
            return True
        text = f"the server has more than {self._max_members} authenticated connections; close some"
        peer.send(Kind.REPLY, message.request, Status.REFUSED, True, text)
        self._close_peer(peer.number)
        return False

    def receive(self, number: int, message: Message) -> None:
        """Passes a message to the core."""
        try:
            self._worlds.received(time.monotonic(), number, message)
        finally:
            self._finish()

    def forget(self, peer: _Peer, cause: str, *, is_silent: bool) -> None:
        """Forgets a connection that has ended."""
        if self._peers.pop(peer.number, None) is not None:
            self._strangers.pop(peer.number, None)
            self._admitted.discard(peer.number)
            _log.debug("rendezvous: connection %d ended: %s", peer.number, cause)
            self._worlds.lost(time.monotonic(), peer.number, cause, is_silent=is_silent)
            self._finish()
            if not self._peers:
                self._empty.set()

    def _send(self, number: int, kind: Kind, request: int, *fields: object) -> None:
        peer = self._peers.get(number)
        if peer is not None:
            peer.send(kind, request, *fields)
            self._unsent[number] = peer

    def _close_peer(self, number: int) -> None:
        peer = self._peers.get(number)
        if peer is not None and self._loop is not None:
            peer.close(self._loop)

    def _process(self, rank: int, pid: int | None, how: str = "") -> None:
        self._worlds.process(time.monotonic(), rank, pid, how)
        self._finish()

    def _finish(self) -> None:
        """Sends what the core has said; a peer gets all of it at once."""
        unsent, self._unsent = self._unsent, {}
        for peer in unsent.values():
            peer.flush()
        self._set_timer()

    def _set_timer(self) -> None:
        """Has `_tick` called when the core has something to do."""
        due_at, loop = self._worlds.next_deadline(), self._loop
        if self._timer is not None:
            if due_at is not None and self._timer_at <= due_at:
                return  # it looks again then
            self._timer.cancel()
            self._timer = None
        if due_at is not None and loop is not None:
            self._timer, self._timer_at = loop.call_later(max(due_at - time.monotonic(), 0.0), self._tick), due_at

    def _tick(self) -> None:
        self._timer = None
        try:
            self._worlds.tick(time.monotonic())
        finally:
            self._finish()


def _same(peer: _Peer) -> _Peer:
    return peer


def _state_of(pid: int) -> str:
    """Returns the state of a process of this machine as /proc has it; "" if it is not known, "Z" if it is gone."""
    stat = read_stat(pid)
    if stat is not None:
        return "Z" if stat.state == "X" else stat.state
    try:
        os.kill(pid, 0)  # /proc may hide the processes of other users
    except ProcessLookupError:
        return "Z"
    except OSError:
        pass
    return ""


# A forked child must not keep the port or the streams open: the end of a stream shows a rank that the server is gone.
_servers: weakref.WeakSet[RendezvousServer] = weakref.WeakSet()


def _abandon_copies() -> None:
    for server in list(_servers):
        server.abandon()
    _servers.clear()


os.register_at_fork(after_in_child=_abandon_copies)


class _NoticeWriter:
    """Writes notices to the log, in order, in a separate thread: a paused terminal must not block the server."""

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
