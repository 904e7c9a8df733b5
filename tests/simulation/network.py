"""The network: byte streams with latency, partial reads and writes, resets, and links that carry nothing."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from simulation.scheduler import Scheduler

USER_TIMEOUT_SECONDS = 5.5  # until a kernel gives up a connection on which nothing is acknowledged


@dataclass(frozen=True)
class Weather:
    """How a network is, one draw for each run.

    Attributes:
        latency_seconds: at most, each way.
        window_bytes: how much a stream takes that is not read.
        most_bytes: of one read or write; 1: byte by byte.
        accept_seconds: until the server sees a connection that was made, at most.
    """

    latency_seconds: float = 0.002
    window_bytes: int = 65536
    most_bytes: int = 65536
    accept_seconds: float = 0.0


class Pipe:
    """One direction of a connection."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.arrived = bytearray()
        self.ending: str | None = None  # how it has ended, once that has arrived: "fin" or "reset"
        self.is_finished = False  # nothing is put in any more
        self.has_no_reader = False  # what arrives is answered by a reset
        self._under_way: deque[tuple[float, bytes | str]] = deque()
        self._bytes_under_way = 0
        self._last_arrival = 0.0

    @property
    def room(self) -> int:
        """How many bytes it takes now."""
        return self.link.weather.window_bytes - self._bytes_under_way - len(self.arrived)

    def put(self, data: bytes | str) -> None:
        """Sends bytes, or the end: "fin" or "reset"."""
        scheduler = self.link.scheduler
        if isinstance(data, str):
            self.is_finished = True
        else:
            self._bytes_under_way += len(data)
        latency = scheduler.choices.random() * self.link.weather.latency_seconds
        self._last_arrival = max(self._last_arrival, scheduler.now + latency)
        self._under_way.append((self._last_arrival, data))
        scheduler.at(self._last_arrival, self.deliver)

    def deliver(self) -> None:
        """Lets arrive what is due, unless the link carries nothing."""
        now = self.link.scheduler.now
        while self._under_way and self._under_way[0][0] <= now and not self.link.is_cut:
            _, data = self._under_way.popleft()
            if isinstance(data, str):
                self.ending = data
                continue
            self._bytes_under_way -= len(data)
            if self.has_no_reader:
                self.link.other(self).put("reset")
            elif self.ending is None:
                self.arrived += data


class Link:
    """The two directions of one connection, and whether anything gets through."""

    def __init__(self, scheduler: Scheduler, weather: Weather) -> None:
        self.scheduler = scheduler
        self.weather = weather
        self.is_cut = False
        self.is_given_up = False  # by the kernels at both ends
        self.pipes = Pipe(self), Pipe(self)
        self._cuts = 0

    def other(self, pipe: Pipe) -> Pipe:
        """Returns the other direction."""
        return self.pipes[pipe is self.pipes[0]]

    def cut(self, seconds: float | None) -> None:
        """Loses everything for so long, or for good; after a while the kernels give the connection up."""
        self.is_cut = True
        self._cuts += 1
        number = self._cuts
        if seconds is not None:
            self.scheduler.at(self.scheduler.now + seconds, self._mend)
        if seconds is None or seconds > USER_TIMEOUT_SECONDS:
            self.scheduler.at(self.scheduler.now + USER_TIMEOUT_SECONDS, lambda: self._give_up(number))

    def reset(self) -> None:
        """Ends both directions by force."""
        for pipe in self.pipes:
            pipe.put("reset")

    def _mend(self) -> None:
        self.is_cut = False
        for pipe in self.pipes:
            pipe.deliver()

    def _give_up(self, number: int) -> None:
        if self.is_cut and self._cuts == number:
            self.is_given_up = True


class Network:
    """All links and listeners of one run."""

    def __init__(self, scheduler: Scheduler, weather: Weather) -> None:
        self.scheduler = scheduler
        self.weather = weather
        self.listeners: dict[int, Any] = {}  # by port
        self._next_port = 40_000

    def free_port(self) -> int:
        """Returns a port that nobody has had."""
        self._next_port += 1
        return self._next_port
