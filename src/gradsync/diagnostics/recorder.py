"""The flight recorder: it records the last collectives of a rank, and when each collective began and ended.

The recorder is always on, so it must cost almost nothing: an entry is a short list in a ring buffer. The recorder makes
an entry when a collective begins, and completes the entry when the collective ends. An entry becomes text only when a
report, an error or a dump shows it. Any thread may read the entries at any time.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

from gradsync.environment import FLIGHT_RECORDER_ENTRIES

_REMEMBERED_RECORDERS = 16  # reports show the 16 communicators made last, even after these communicators have ended


class Recorded(Protocol):
    """The description of a collective, or of a message between two ranks; it must hold no reference to an array."""

    @property
    def is_message(self) -> bool:
        """Whether this describes a message. A message has no number of its own, because only two ranks take part."""

    @property
    def digest(self) -> int:
        """A number that is equal on ranks that call the same collective."""

    def headline(self) -> str:
        """Returns the description in one line."""

    def lines(self) -> list[str]:
        """Returns everything that the ranks must agree on: first the headline, then a line for each array."""


class Place(NamedTuple):
    """The communicator that a recorder belongs to.

    Attributes:
        rank: the number of this rank in the communicator.
        ranks: the world ranks of the members.
        backend: the name of the communicator's backend.
    """

    rank: int
    ranks: tuple[int, ...]
    backend: str


# A list of the fields of an Entry. The last two fields are set when the collective ends. The recorder uses a list,
# because an object takes longer to make, and because Python copies a list in one step. So a reader never gets only a
# part of an entry, or fields of two entries.
Running = list[Any]
_ENDED, _FAILED = 3, 4


class Entry(NamedTuple):
    """A collective or a message of this rank.

    Attributes:
        number: the number of the collective in its communicator, counted from 1, and the same on all ranks that run the
            same program. A message has the number of the collective before it, or 0 if there is none.
        what: the description of the collective or message.
        began: the time at which this rank entered the collective, in time.monotonic() seconds.
        ended: the time at which the collective ended, in time.monotonic() seconds; None while the collective runs. On a
            GPU this is the time at which the process noticed the end.
        failed: whether the collective ended with an error.
    """

    number: int
    what: Recorded
    began: float
    ended: float | None
    failed: bool

    @property
    def title(self) -> str:
        """The name of the collective with its number, such as "all_reduce(sum) #57 (float32[1000] 3.91 KB)"."""
        headline = self.what.headline()
        name, bracket, details = headline.partition(") ")  # "broadcast(root 0) float32[3] 12 bytes"
        name, details = (name + ")", details) if bracket else headline.partition(" ")[::2]
        place = f"after #{self.number}" if self.what.is_message else f"#{self.number}"
        return f"{name} {place} ({details})" if details else f"{name} {place}"

    def describe(self, now: float) -> str:
        """Returns a line such as "#57 all_reduce(sum) float32[1000] 3.91 KB done in 1.2 ms, 3.4 s ago"."""
        title = f"{'after ' if self.what.is_message else ''}#{self.number} {self.what.headline()}"
        if self.ended is None:
            return f"{title} running for {seconds_text(now - self.began)}"
        how = "failed after" if self.failed else "done in"
        return f"{title} {how} {seconds_text(self.ended - self.began)}, {seconds_text(now - self.ended)} ago"


class FlightRecorder:
    """The last collectives of one communicator.

    Only one thread at a time may record collectives. Any number of threads may read the entries.

    Args:
        group: the communicator's name.
        place: the communicator's members and backend. If `place` is None, `recorders` does not return this recorder.

    Attributes:
        group, place: see Args.
        begun: the number of collectives that this rank has begun.
    """

    __slots__ = ("__weakref__", "_ring", "_running", "begun", "group", "place")

    def __init__(self, group: str, place: Place | None = None) -> None:
        self.group = group
        self.place = place
        self.begun = 0
        self._ring: deque[Running] = deque(maxlen=max(FLIGHT_RECORDER_ENTRIES.read(), _least_entries))
        self._running: Running | None = None
        if place is not None:
            _in_use.add(self)
            _latest.append(self)

    def remember(self, entries: int) -> None:
        """Enlarges the ring buffer to this number of entries. A larger ring buffer keeps its size."""
        while (self._ring.maxlen or 0) < entries:
            begun = self.begun
            ring = deque(self._ring, entries)
            if self.begun == begun:  # otherwise a collective has begun, and the copy may lack it
                self._ring = ring

    def begin(self, what: Recorded) -> None:
        """Records that a collective begins."""
        if not what.is_message:
            self.begun += 1
        self._running = [self.begun, what, monotonic(), None, False]
        self._ring.append(self._running)

    def end(self, failed: bool = False) -> None:
        """Records that the running collective has ended. Does nothing if `hand_over` has returned the collective."""
        running = self._running
        if running is not None:
            self._running = None
            if failed:
                running[_FAILED] = True  # set first, so that no reader takes the collective for a successful one
            running[_ENDED] = monotonic()

    def hand_over(self) -> Running | None:
        """Returns the running collective; None if no collective runs.

        On a GPU a collective continues to run after its call has returned. The caller must pass the returned collective
        to `finish` when the collective ends.
        """
        running, self._running = self._running, None
        return running

    @property
    def last(self) -> Entry | None:
        """The entry that began last; None if there is no entry."""
        ring = self._ring
        return Entry(*ring[-1]) if ring else None

    def entries(self) -> list[Entry]:
        """Returns the remembered entries, the oldest first."""
        return [Entry(*running) for running in self._ring.copy()]  # a copy, because another thread may append

    def describe(self, last: int = 8) -> str:
        """Returns the last collectives as text, the newest first, one on each line; "" if there are none."""
        newest = self.entries()[::-1][:last]
        now = monotonic()
        return "\n".join([entry.describe(now) for entry in newest])


_least_entries = 0
_in_use: WeakSet[FlightRecorder] = WeakSet()
_latest: deque[FlightRecorder] = deque(maxlen=_REMEMBERED_RECORDERS)


def recorders() -> list[FlightRecorder]:
    """Returns the recorders of this process's communicators, and of the last 16 communicators even if they have ended.

    Any thread may call this function.
    """
    for _ in range(8):
        try:
            return list(dict.fromkeys([*_latest, *_in_use]))
        except RuntimeError:  # another thread has just made a recorder
            continue
    return list(_latest.copy())


def remember_at_least(entries: int) -> None:
    """Makes all recorders remember at least this number of entries, including recorders that are made later.

    After remember_at_least(0), new recorders remember the number that GRADSYNC_FLIGHT_RECORDER_ENTRIES sets.
    """
    global _least_entries
    _least_entries = entries
    for recorder in recorders():
        recorder.remember(entries)


def _forget_after_fork() -> None:
    _in_use.clear()
    _latest.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


def finish(running: Running, *, failed: bool) -> None:
    """Records the end of a collective that `hand_over` has returned."""
    running[_FAILED] = failed
    running[_ENDED] = monotonic()


def seconds_text(seconds: float) -> str:
    """Returns a duration as text: "12.0 us", "1.2 ms", "300.0 s"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1.0 else f"{seconds:.1f} s"


def names_text(names: Sequence[str], shown: int = 2) -> str:
    """Returns the first names and the number of other names, such as "[conv1.weight, conv1.bias, 12 more]"."""
    more = len(names) - shown
    return f"[{', '.join([*names[:shown], *([f'{more} more'] if more > 0 else [])])}]"
