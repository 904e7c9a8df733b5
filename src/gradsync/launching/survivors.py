"""What a launcher hears of its ranks from the rendezvous server, if the run goes on without those that fail."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from typing import NamedTuple


class Lost(NamedTuple):
    """A rank that lives, and that the others have given up: the launcher has to end it.

    Attributes:
        rank: the number of the rank at its launch.
        why: the reason, in words.
    """

    rank: int
    why: str


class Rebuilt(NamedTuple):
    """A new world that ranks have formed.

    Attributes:
        number: counted from 1, which is the world that all ranks have formed at their start.
        ranks: its ranks, by their numbers at the launch.
        seconds: how long it took since the failure.
    """

    number: int
    ranks: tuple[int, ...]
    seconds: float


class News:
    """A context: takes what the server tells, in its own thread, and wakes the supervisor's loop, which reads it.

    Attributes:
        descriptor: readable while there is something to read.
    """

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._news: deque[Lost | Rebuilt] = deque()

    def __enter__(self) -> News:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def on_lost(self, rank: int, why: str) -> None:
        """For the server: a rank is lost, see `Lost`."""
        self._put(Lost(rank, why))

    def on_rebuilt(self, number: int, ranks: tuple[int, ...], seconds: float) -> None:
        """For the server: ranks have formed a world, see `Rebuilt`."""
        self._put(Rebuilt(number, ranks, seconds))

    def read(self) -> list[Lost | Rebuilt]:
        """Returns what has come since the last call, without waiting."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)
        return [self._news.popleft() for _ in range(len(self._news))]

    def _put(self, news: Lost | Rebuilt) -> None:
        self._news.append(news)
        os.eventfd_write(self.descriptor, 1)
