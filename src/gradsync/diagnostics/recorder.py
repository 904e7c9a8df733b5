"""The flight recorder: which collectives a rank has begun, and when each ended, for the day on which one does not.

Always on, so it has to cost next to nothing: an entry is one short list in a ring, made when the collective begins and
completed when it ends. What it was is turned into text only when somebody reads. Any thread may read at any moment.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

from gradsync.environment import FLIGHT_RECORDER_ENTRIES

_REMEMBERED_RECORDERS = 16  # also when their communicators have ended: a failure ends them, and is looked into then


class Recorded(Protocol):
    """What a collective, or a message between two ranks, is; must keep no array alive."""

    @property
    def is_message(self) -> bool:
        """Whether it is a message: those do not count, as other ranks of the group have no part in them."""

    @property
    def digest(self) -> int:
        """Equal on two ranks that mean the same."""

    def headline(self) -> str:
        """Returns it in one line."""

    def facts(self) -> dict[str, Any]:
        """Returns what it is in parts, for JSON: operation, dtype, shape or gradients, root or peer."""

    @property
    def describe(self) -> Callable[[], str]:
        """Returns, when called, what the ranks must agree on about it, in as many lines as that takes."""


class Place(NamedTuple):
    """Whose recorder it is.

    Attributes:
        rank: the rank in the communicator.
        ranks: the members' numbers in the world, by rank.
        backend: of the communicator.
    """

    rank: int
    ranks: tuple[int, ...]
    backend: str


# The fields of an Entry, to be completed in place. A list, because making an object costs twice as much, and because
# it is copied in one step: a reader never sees half an entry, nor fields of two.
Running = list[Any]
_ENDED, _FAILED = 3, 4


class Entry(NamedTuple):
    """One collective of this rank.

    Attributes:
        number: counted from 1 on its communicator; ranks that run the same program count alike. A message has that of
            the collective before it.
        what: tells what it is.
        began: when this rank entered it, in time.monotonic() seconds.
        ended: when it ended, on a GPU when that was seen; None while it runs.
        failed: whether it ended with an error.
    """

    number: int
    what: Recorded
    began: float
    ended: float | None
    failed: bool

    @property
    def title(self) -> str:
        """The collective in a sentence: "all_reduce(sum) #57 (float32[1000] 4 kB)"."""
        headline = self.what.headline()
        name, bracket, details = headline.partition(") ")  # "broadcast(root 0) float32[3] 12 bytes"
        name, details = (name + ")", details) if bracket else headline.partition(" ")[::2]
        place = f"after #{self.number}" if self.what.is_message else f"#{self.number}"
        return f"{name} {place} ({details})" if details else f"{name} {place}"

    def describe(self, now: float) -> str:
        """Returns e.g. "#57 all_reduce(sum) float32[1000] 4 kB done in 1.2 ms, 3.4 s ago"."""
        title = f"{'after ' if self.what.is_message else ''}#{self.number} {self.what.headline()}"
        if self.ended is None:
            return f"{title} running for {seconds_text(now - self.began)}"
        how = "failed after" if self.failed else "done in"
        return f"{title} {how} {seconds_text(self.ended - self.began)}, {seconds_text(now - self.ended)} ago"


class FlightRecorder:
    """The last collectives of one communicator. One thread writes at a time, any number read.

    Args:
        group: the communicator's name.
        entries: how many it remembers; None takes GRADSYNC_FLIGHT_RECORDER_ENTRIES, or 64.
        place: whose it is; those that are somebody's are found by `recorders`.

    Attributes:
        group, place: see above.
        begun: how many collectives this rank has begun.
    """

    __slots__ = ("__weakref__", "_noted", "_ring", "_running", "_size", "begun", "group", "place")

    def __init__(self, group: str, entries: int | None = None, place: Place | None = None) -> None:
        self.group = group
        self.place = place
        self.begun = 0
        self._noted = 0  # with messages
        self._size = max(FLIGHT_RECORDER_ENTRIES.read(), _least_entries) if entries is None else entries
        self._ring: list[Running | None] = [None] * self._size
        self._running: Running | None = None
        if place is not None:
            _in_use.add(self)
            _latest.append(self)

    def remember(self, entries: int) -> None:
        """Remembers at least so many from now on."""
        while self._size < entries:
            noted = self._noted
            ring: list[Running | None] = [None] * entries
            for number in range(max(noted - self._size, 0) + 1, noted + 1):
                ring[number % entries] = self._ring[number % self._size]
            if self._noted == noted:  # else one has begun meanwhile, which the copy may lack
                self._ring, self._size = ring, entries

    def begin(self, what: Recorded) -> None:
        """Notes that a collective begins."""
        if not what.is_message:
            self.begun += 1
        self._noted = noted = self._noted + 1
        self._running = self._ring[noted % self._size] = [self.begun, what, monotonic(), None, False]

    def end(self, failed: bool = False) -> None:
        """Notes that it has ended, unless it was handed over."""
        running = self._running
        if running is not None:
            self._running = None
            if failed:
                running[_FAILED] = True  # first: a reader must not take it for done
            running[_ENDED] = monotonic()

    def hand_over(self) -> Running | None:
        """Leaves it to the caller to `finish` what runs now: on a GPU it ends long after the call that began it."""
        running, self._running = self._running, None
        return running

    @property
    def last(self) -> Entry | None:
        """What was begun last."""
        running = self._ring[self._noted % self._size]
        return None if running is None else Entry(*running)

    def entries(self) -> list[Entry]:
        """Returns what it remembers, oldest first."""
        return sorted((Entry(*running) for running in list(self._ring) if running is not None), key=_began)

    def describe(self, last: int = 8) -> str:
        """Returns the last collectives as text, newest first, one a line; "" where there are none."""
        newest = self.entries()[::-1][:last]
        now = monotonic()
        return "\n".join([entry.describe(now) for entry in newest])


_least_entries = 0
_in_use: WeakSet[FlightRecorder] = WeakSet()
_latest: deque[FlightRecorder] = deque(maxlen=_REMEMBERED_RECORDERS)


def recorders() -> list[FlightRecorder]:
    """Returns those of this process's communicators, and of the last that have ended; any thread may ask."""
    for _ in range(8):
        try:
            return list(dict.fromkeys([*_latest, *_in_use]))
        except RuntimeError:  # another thread has just made one
            continue
    return list(_latest.copy())


def remember_at_least(entries: int) -> None:
    """Has this process's recorders, and those to come, remember at least so many; 0 lets those to come be as ever."""
    global _least_entries
    _least_entries = entries
    for recorder in recorders():
        recorder.remember(entries)


def _forget_after_fork() -> None:
    _in_use.clear()
    _latest.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


def finish(running: Running, *, failed: bool) -> None:
    """Notes that a collective which was handed over has ended."""
    running[_FAILED] = failed
    running[_ENDED] = monotonic()


def seconds_text(seconds: float) -> str:
    """Returns a duration to read: "12.0 us", "1.2 ms", "300.0 s"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1.0 else f"{seconds:.1f} s"


def size_text(size_bytes: int) -> str:
    """Returns a size to read, in decimal units: "72 bytes", "25.6 MB"."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.3g} {name}"
    return f"{size_bytes} bytes"


def names_text(names: Sequence[str], shown: int = 2) -> str:
    """Returns the first of the names, and how many there are besides: "[conv1.weight, conv1.bias, 12 more]"."""
    more = len(names) - shown
    return f"[{', '.join([*names[:shown], *([f'{more} more'] if more > 0 else [])])}]"


def _began(entry: Entry) -> tuple[int, float]:
    return entry.number, entry.began
