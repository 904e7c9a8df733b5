"""The connections of many simulated ranks, carried by one event loop: the same for every contender."""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Sequence

from simulated_ranks.contenders import JOIN, SimulatedRank

_READ_BYTES = 65536
_PATIENCE_SECONDS = 60.0


class Crowd:
    """Simulated ranks, each with a connection of its own.

    Args:
        ranks: the simulated ranks.
        address: of the server.

    Attributes:
        lost: how many connections the server has ended, or the kernel refused; who joins comes again then, as the
            library's client does.
    """

    def __init__(self, ranks: Sequence[SimulatedRank], address: tuple[str, int]) -> None:
        self.lost = 0
        self._ranks = list(ranks)
        self._address = address
        self._streams: dict[int, socket.socket] = {}  # by index of the rank
        self._by_descriptor: dict[int, int] = {}
        self._may_come_again = False
        self._unsent: dict[int, bytes] = {}  # first words of those that are not connected yet
        self._epoll = select.epoll()

    def play(self, phase: str, chosen: slice = slice(None)) -> None:
        """Runs a phase of the chosen ranks; returns once all of them have ended it.

        Raises:
            TimeoutError: they have not ended it within a minute.
        """
        waiting = 0
        self._may_come_again = phase == JOIN
        for index in range(*chosen.indices(len(self._ranks))):
            rank = self._ranks[index]
            if phase == JOIN:
                self._connect(index)
            else:
                self._streams[index].send(rank.begin(phase))
            waiting += not rank.is_done
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while waiting:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{waiting} ranks are not through with {phase!r}; {self.lost} connections lost")
            waiting -= self._turn(1.0)

    def leave(self, phase: str) -> None:
        """Lets all ranks leave, and waits until the server has closed every connection."""
        self._may_come_again = False
        for index, stream in self._streams.items():
            stream.send(self._ranks[index].begin(phase))
        lost = self.lost
        while self._by_descriptor:
            self._turn(_PATIENCE_SECONDS)
        self.lost = lost

    def beat(self, seconds: float, interval_seconds: float) -> int:
        """Sends every rank's heartbeats, evenly spread, and reads the answers; returns how many were sent."""
        began = time.monotonic()
        gap = interval_seconds / len(self._ranks)
        count = round(seconds / gap)
        for number in range(count):
            due = began + number * gap
            while (left := due - time.monotonic()) > 0.0:
                self._turn(left)
            index = number % len(self._ranks)
            self._streams[index].send(self._ranks[index].heartbeat())
            if number % 16 == 0:
                self._turn(0.0)
        return count

    def close(self) -> None:
        """Closes all connections."""
        for stream in self._streams.values():
            stream.close()
        self._epoll.close()

    def _connect(self, index: int) -> None:
        stream = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        stream.setblocking(False)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        error = stream.connect_ex(self._address)
        if error not in (0, errno.EINPROGRESS):
            raise OSError(error, "connect")
        descriptor = stream.fileno()
        self._streams[index] = stream
        self._by_descriptor[descriptor] = index
        self._unsent[descriptor] = self._ranks[index].begin(JOIN)
        self._epoll.register(descriptor, select.EPOLLOUT)

    def _turn(self, timeout_seconds: float) -> int:
        """Serves the connections that are ready; returns how many ranks ended their phase."""
        finished = 0
        for descriptor, _ in self._epoll.poll(timeout_seconds):
            index = self._by_descriptor[descriptor]
            stream, rank = self._streams[index], self._ranks[index]
            first = self._unsent.pop(descriptor, None)
            try:
                if first is not None:
                    stream.send(first)
                    self._epoll.modify(descriptor, select.EPOLLIN)
                    continue
                data = stream.recv(_READ_BYTES)
            except OSError:
                data = b""
            if not data:
                self._lose(descriptor)
                continue
            was_done = rank.is_done
            if answer := rank.hear(data):
                stream.send(answer)
            if rank.is_done and not was_done:
                finished += 1
        return finished

    def _lose(self, descriptor: int) -> None:
        self.lost += 1
        self._unsent.pop(descriptor, None)
        self._epoll.unregister(descriptor)
        index = self._by_descriptor.pop(descriptor)
        if self._may_come_again:
            self._streams[index].close()
            self._connect(index)
