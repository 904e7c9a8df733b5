"""What stands in for sockets, polls and selectors, with the errors that the kernel would give."""

from __future__ import annotations

import errno
import os
import selectors
import socket
from select import POLLERR, POLLHUP, POLLIN, POLLNVAL, POLLOUT
from typing import Any

from simulation.network import Link, Network, Pipe
from simulation.scheduler import Killed, Process, Scheduler

BROKEN = POLLERR | POLLHUP


class VirtualSocket:
    """A TCP socket of the process that makes it."""

    def __init__(self, network: Network, process: Process) -> None:
        self.family, self.type, self.proto = socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP
        self.network = network
        self.process = process
        self.address: tuple[str, int] = ("127.0.0.1", network.free_port())
        self.peer_address: tuple[str, int] | None = None
        self.link: Link | None = None
        self.backlog: list[tuple[float, VirtualSocket]] | None = None  # of a listener: by when they may be accepted
        self.is_closed = False
        self._incoming: Pipe | None = None
        self._outgoing: Pipe | None = None
        self._is_shut = False
        self._timeout: float | None = None
        self._descriptor = process.next_descriptor()
        process.sockets[self._descriptor] = self

    def fileno(self) -> int:
        return -1 if self.is_closed and not self.process.is_dead else self._descriptor

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = seconds

    def gettimeout(self) -> float | None:
        return self._timeout

    def setblocking(self, is_blocking: bool) -> None:
        self._timeout = None if is_blocking else 0.0

    def setsockopt(self, *_: Any) -> None:
        self._give_way()

    def getsockname(self) -> tuple[str, int]:
        return self.address

    def getpeername(self) -> tuple[str, int]:
        if self.peer_address is None:
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
        return self.peer_address

    def bind(self, address: tuple[str, int]) -> None:
        port = address[1] or self.network.free_port()
        if port in self.network.listeners:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        self.address = (address[0], port)

    def listen(self, _: int) -> None:
        self.backlog = []
        self.network.listeners[self.address[1]] = self

    def connect(self, address: tuple[str, int]) -> None:
        self._give_way()
        scheduler, weather = self.network.scheduler, self.network.weather
        arrives_at = scheduler.now + scheduler.choices.random() * 2 * weather.latency_seconds
        scheduler.at(arrives_at, lambda: None)
        if not scheduler.wait(lambda: scheduler.now >= arrives_at, self._timeout):
            raise TimeoutError(errno.ETIMEDOUT, "timed out")
        listener = self.network.listeners.get(address[1])
        if listener is not None and listener.process.is_dead:  # its machine has vanished: nobody answers
            scheduler.wait(lambda: False, self._timeout)
            raise TimeoutError(errno.ETIMEDOUT, "timed out")
        if listener is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        self.peer_address = address
        other = VirtualSocket(self.network, listener.process)
        other.address, other.peer_address = address, self.address
        join(Link(scheduler, weather), self, other)
        visible_at = scheduler.now + scheduler.choices.random() * weather.accept_seconds
        listener.backlog.append((visible_at, other))
        scheduler.at(visible_at, lambda: None)

    def accept(self) -> tuple[VirtualSocket, tuple[str, int]]:
        self._give_way()
        assert self.backlog is not None
        for index, (visible_at, other) in enumerate(self.backlog):
            if visible_at <= self.network.scheduler.now:
                del self.backlog[index]
                return other, other.getpeername()
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    def recv(self, size: int) -> bytes:
        self._give_way()
        self._check_open()
        pipe = self._incoming
        if pipe is None:
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
        if pipe.arrived:
            count = min(size, len(pipe.arrived), self._some())
            data = bytes(pipe.arrived[:count])
            del pipe.arrived[:count]
            self.network.scheduler.note("recv", count)
            return data
        self._raise_error(pipe)
        if pipe.ending is not None or self._is_shut:
            return b""
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    def send(self, data: bytes | bytearray) -> int:
        self._give_way()
        self._check_open()
        pipe = self._outgoing
        if pipe is None or self._incoming is None:
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
        self._raise_error(self._incoming)
        if self._is_shut or pipe.is_finished:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        count = min(len(data), pipe.room, self._some())
        if count <= 0:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        pipe.put(bytes(data[:count]))
        self.network.scheduler.note("send", count)
        return count

    def shutdown(self, _: int) -> None:
        self._give_way()
        self._check_open()
        if self._outgoing is None:
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
        self._is_shut = True
        self.end("fin")

    def close(self) -> None:
        if not self.process.is_dead:  # else its kernel has done it
            self.release()

    def release(self) -> None:
        """What the kernel does with a socket that nobody holds any more."""
        if self.is_closed:
            return
        self.is_closed = True
        self.process.sockets.pop(self._descriptor, None)
        if self.backlog is not None:
            del self.network.listeners[self.address[1]]
            for _, waiting in self.backlog:
                waiting.release()
        if self._incoming is not None:
            self._incoming.has_no_reader = True
        self.end("reset" if self._incoming is not None and self._incoming.arrived else "fin")

    def end(self, how: str) -> None:
        """Ends what this side sends, unless it has."""
        if self._outgoing is not None and not self._outgoing.is_finished:
            self._outgoing.put(how)

    def attach(self, link: Link, incoming: Pipe, outgoing: Pipe) -> None:
        """Makes this one end of a link."""
        self.link, self._incoming, self._outgoing = link, incoming, outgoing

    def readiness(self, mask: int) -> int:
        """Returns which of these poll events there are, and those that always count."""
        if self.is_closed:
            return POLLNVAL
        if self.backlog is not None:
            now = self.network.scheduler.now
            return mask & POLLIN if any(at <= now for at, _ in self.backlog) else 0
        if self._incoming is None or self._outgoing is None or self.link is None:
            return 0
        if self.link.is_given_up or self._incoming.ending == "reset":
            return BROKEN | mask
        found = 0
        if mask & POLLIN and (self._incoming.arrived or self._incoming.ending is not None or self._is_shut):
            found = POLLIN
        if mask & POLLOUT and (self._is_shut or self._outgoing.room > 0):
            found |= POLLOUT
        return found

    def _raise_error(self, incoming: Pipe) -> None:
        assert self.link is not None
        if self.link.is_given_up:
            raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")
        if incoming.ending == "reset":
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")

    def _some(self) -> int:
        """How many bytes this call moves at most."""
        most = self.network.weather.most_bytes
        return 1 + int(self.network.scheduler.choices.random() * most)

    def _give_way(self) -> None:
        if self.process.is_dead:
            raise Killed
        self.network.scheduler.give_way()

    def _check_open(self) -> None:
        if self.is_closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        assert self._is_shut or self._timeout == 0.0, "a call that may block the thread"


def join(link: Link, one: VirtualSocket, other: VirtualSocket) -> None:
    """Makes two sockets the ends of a link."""
    up, down = link.pipes
    one.attach(link, down, up)
    other.attach(link, up, down)


class Poll:
    """A poll object of the process that makes it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._process = scheduler.process
        self._watched: dict[int, tuple[VirtualSocket, int]] = {}

    def register(self, what: Any, mask: int) -> None:
        descriptor = what if isinstance(what, int) else what.fileno()
        if descriptor < 0:
            raise ValueError(f"file descriptor cannot be a negative integer ({descriptor})")
        self._watched[descriptor] = (self._process.sockets[descriptor], mask)

    modify = register

    def unregister(self, what: Any) -> None:
        del self._watched[what if isinstance(what, int) else what.fileno()]

    def poll(self, milliseconds: float | None = None) -> list[tuple[int, int]]:
        if self._process.is_dead:  # asyncio goes on after what its callbacks raise
            raise Killed
        if milliseconds is not None and milliseconds <= 0:
            self._scheduler.give_way()
        elif not self._is_ready():
            self._scheduler.wait(self._is_ready, None if milliseconds is None else milliseconds / 1000.0)
        found = ((descriptor, sock.readiness(mask)) for descriptor, (sock, mask) in self._watched.items())
        return [(descriptor, events) for descriptor, events in found if events]

    def _is_ready(self) -> bool:
        return any(sock.readiness(mask) for sock, mask in self._watched.values())


class Selector(selectors.PollSelector):
    """The library's selector, on such a poll object. The kernel promises no order, so it gives none."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._selector_cls = lambda: Poll(scheduler)  # what the library's class calls to make its poll object
        super().__init__()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(timeout)
        self._scheduler.choices.shuffle(ready)
        return ready
