"""A TCP proxy between ranks and their rendezvous server, which does to their traffic what bad networks do.

It delays, cuts into pieces, and has incidents: a connection that is truncated in the middle of a frame, reset, or
silently dropped, bytes that come twice or corrupted. What happens when is a `Plan`; random ones come from a seed. It
needs no privileges: for the kernels at both ends a dropped connection is half-open, because a socket filter discards
what arrives at the proxy before it is acknowledged.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

TO_SERVER, TO_CLIENT = "to server", "to client"
DIRECTIONS = (TO_SERVER, TO_CLIENT)
TRUNCATE, RESET, DROP, DUPLICATE, CORRUPT = "truncate", "reset", "drop", "duplicate", "corrupt"
INCIDENTS = (TRUNCATE, RESET, DROP, DUPLICATE, CORRUPT)

_SO_ATTACH_FILTER = 26
_DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: return 0, accept no byte
_READ_BYTES = 1 << 16
_END_WITHIN_SECONDS = 5.0


@dataclass(frozen=True)
class Incident:
    """What goes wrong, once.

    Attributes:
        kind: one of INCIDENTS.
        direction: in which the bytes flow that it befalls.
        after_bytes: how many have passed in that direction before.
    """

    kind: str
    direction: str = TO_SERVER
    after_bytes: int = 0


@dataclass(frozen=True)
class Plan:
    """What happens to each connection.

    Attributes:
        delay_seconds: each time that something arrives.
        jitter_seconds: up to so much more, at random.
        piece_bytes: how many bytes are sent on at a time; 0: as they come.
        incident: what happens to the first connection, or None.
    """

    delay_seconds: float = 0.0
    jitter_seconds: float = 0.0
    piece_bytes: int = 0
    incident: Incident | None = None

    @classmethod
    def drawn(cls, seed: int, *, most_bytes: int) -> Plan:
        """Draws a plan with an incident within the first bytes of a direction."""
        generator = random.Random(seed)
        where = generator.choice(DIRECTIONS), generator.randrange(most_bytes)
        return cls(piece_bytes=generator.choice((0, 0, 1, 7)), incident=Incident(generator.choice(INCIDENTS), *where))


class ChaosProxy:
    """Passes connections on to a server, by a plan. Everything is closed when the context ends.

    Args:
        target: "host:port" of the server.
        plan: what happens to the connections.
        seed: of the jitter.
        on_incident: called by a thread of the proxy just before the incident.

    Attributes:
        address: where clients connect in place of the target.
    """

    def __init__(
        self, target: str, plan: Plan | None = None, *, seed: int = 0, on_incident: Callable[[], None] = lambda: None
    ) -> None:
        host, _, port = target.rpartition(":")
        self._target = host.strip("[]"), int(port)
        self._plan = plan or Plan()
        self._random = random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._on_incident = on_incident
        self._links: list[_Link] = []
        self._lock = threading.Lock()
        self._is_dropping = False
        self._thread = threading.Thread(target=self._accept, name="chaos-proxy", daemon=True)

    def __enter__(self) -> ChaosProxy:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(_END_WITHIN_SECONDS)
        self._listener.close()
        with self._lock:
            links, self._links = self._links, []
        for link in links:
            link.close()

    def drop_everything(self) -> None:
        """From now on nothing passes, and nothing is acknowledged; a new connection gets no answer."""
        with self._lock:
            self._is_dropping = True
            for link in self._links:
                link.drop()

    def close_connections(self) -> None:
        """Closes what is connected now, in both directions; new connections are passed on."""
        with self._lock:
            for link in self._links:
                link.hang_up()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            self._connect(client)

    def _connect(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self._target)
        except OSError:
            client.close()
            return
        with self._lock:
            plan = self._plan
            if self._links:
                plan = Plan(plan.delay_seconds, plan.jitter_seconds, plan.piece_bytes)
            link = _Link(client, server, plan, random.Random(self._random.random()), self._on_incident)
            self._links.append(link)
            if self._is_dropping:
                link.drop()
        link.start()


class _Link:
    """One connection that passes through, with a thread for each direction.

    Attributes:
        is_dropping: whether nothing is to be passed on any more.
    """

    def __init__(
        self,
        client: socket.socket,
        server: socket.socket,
        plan: Plan,
        generator: random.Random,
        on_incident: Callable[[], None],
    ) -> None:
        self._streams = client, server
        self._plan = plan
        self._random = generator
        self._on_incident = on_incident
        self.is_dropping = False
        for stream in self._streams:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ways = {TO_SERVER: (client, server), TO_CLIENT: (server, client)}
        self._threads = [
            threading.Thread(target=self._pass_on, args=(direction, *ends), name=f"chaos-{direction}", daemon=True)
            for direction, ends in ways.items()
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def drop(self) -> None:
        """Lets the kernel discard what arrives, unacknowledged, at both ends; nothing is sent on either."""
        self.is_dropping = True
        program = struct.pack("HL", 1, ctypes.addressof(_DROP_ALL))
        for stream in self._streams:
            stream.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)

    def hang_up(self) -> None:
        """Ends both connections in order."""
        for stream in self._streams:
            with contextlib.suppress(OSError):  # ended before
                stream.shutdown(socket.SHUT_RDWR)

    def reset(self) -> None:
        """Ends both connections by a reset."""
        for stream in self._streams:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.hang_up_reading()
        for stream in self._streams:
            stream.close()

    def hang_up_reading(self) -> None:
        """Wakes the thread that waits for the other direction: a socket that is being read is not closed."""
        for stream in self._streams:
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        self.hang_up()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(_END_WITHIN_SECONDS)
        for stream in self._streams:
            stream.close()

    def _pass_on(self, direction: str, source: socket.socket, sink: socket.socket) -> None:
        """The thread of a direction: until either end is closed."""
        incident = self._plan.incident
        passed = _Way(sink, self, incident if incident and incident.direction == direction else None, self._on_incident)
        with contextlib.suppress(OSError):  # an end is gone
            while data := source.recv(_READ_BYTES):
                self._pause()
                size = self._plan.piece_bytes or len(data)
                for begin in range(0, len(data), size):
                    passed.send(data[begin : begin + size])
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def _pause(self) -> None:
        seconds = self._plan.delay_seconds + self._random.random() * self._plan.jitter_seconds
        if seconds > 0.0:
            time.sleep(seconds)


class _Way:
    """One direction of a connection, and what befalls it."""

    def __init__(
        self, sink: socket.socket, link: _Link, incident: Incident | None, on_incident: Callable[[], None]
    ) -> None:
        self._sink = sink
        self._link = link
        self._incident = incident
        self._on_incident = on_incident
        self._passed = 0

    def send(self, data: bytes) -> None:
        """Sends bytes on, until the incident comes among them.

        Raises:
            OSError: the connection has ended, be it by the incident.
        """
        incident = self._incident
        if self._link.is_dropping:
            return
        if incident is None or self._passed + len(data) <= incident.after_bytes:
            self._sink.sendall(data)
            self._passed += len(data)
            return
        self._incident = None
        fine = incident.after_bytes - self._passed
        self._sink.sendall(data[:fine])
        self._passed += fine
        self._on_incident()
        self.send(self._befallen(incident.kind, data, data[fine:]))

    def _befallen(self, kind: str, data: bytes, rest: bytes) -> bytes:
        """Lets the incident happen; returns what is sent in place of the rest of what came at once."""
        if kind == DUPLICATE:
            return rest + data  # what came at once comes twice, as a packet might
        if kind == CORRUPT:
            return bytes([rest[0] ^ 0x10]) + rest[1:]
        {TRUNCATE: self._link.hang_up, RESET: self._link.reset, DROP: self._link.drop}[kind]()
        return b""
