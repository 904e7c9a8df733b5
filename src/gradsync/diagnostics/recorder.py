"""The flight recorder: the last collectives of a rank, and when each began and ended.

It is always on, so it must cost almost nothing: an entry is a short list in a ring buffer, made when a collective
begins, completed when it ends, and turned into text only where a report, an error or a trace shows it. Any thread may
read the entries at any time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import Any, NamedTuple, Protocol

from gradsync.environment import FLIGHT_RECORDER_ENTRIES

_TRACED_ENTRIES = 30_000  # that a recorder keeps during a trace, at least

#: During a trace, which trace.py begins, the recorders of all communicators made since. Otherwise None.
traced: list[FlightRecorder] | None = None


class Recorded(Protocol):
    """A collective, or a message between two ranks, described; it must hold no reference to an array."""

    @property
    def is_message(self) -> bool:
        """Whether it is a message. A message has no number of its own, as only two ranks take part."""

    @property
    def digest(self) -> int:
        """Equal on ranks that call the same collective."""

    def headline(self) -> str:
        """Returns it in one line."""


# The fields of an Entry; the last two are set when the collective ends. A list, because an object takes longer to make,
# and because Python copies a list in one step: a reader never gets a mixture.
Running = list[Any]
_ENDED, _FAILED = 3, 4


class Entry(NamedTuple):
    """A collective or a message of this rank.

    Attributes:
        number: of the collective in its communicator, from 1, the same on all ranks of one program. A message has that
            of the collective before it, or 0.
        what: the collective or message.
        began: when this rank entered it, in time.monotonic() seconds.
        ended: when it ended; None while it runs. On a GPU, when the process noticed the end.
        failed: whether it ended with an error.
    """

    number: int
    what: Recorded
    began: float
    ended: float | None
    failed: bool

    @property
    def title(self) -> str:
        """Its name and number, such as "all_reduce(sum) #57 (float32[1000] 3.91 KB)"."""
        headline = self.what.headline()
        name, bracket, details = headline.partition(") ")  # "broadcast(root 0) float32[3] 12 bytes"
        name, details = (name + ")", details) if bracket else headline.partition(" ")[::2]
        place = f"after #{self.number}" if self.what.is_message else f"#{self.number}"
        return f"{name} {place} ({details})" if details else f"{name} {place}"

    def describe(self, now: float) -> str:
        """Returns it as a line, such as "#57 all_reduce(sum) float32[1000] 3.91 KB done in 1.2 ms, 3.4 s ago"."""
        title = f"{'after ' if self.what.is_message else ''}#{self.number} {self.what.headline()}"
        if self.ended is None:
            return f"{title} running for {seconds_text(now - self.began)}"
        how = "failed after" if self.failed else "done in"
        return f"{title} {how} {seconds_text(self.ended - self.began)}, {seconds_text(now - self.ended)} ago"


class FlightRecorder:
    """The last collectives of one communicator. One thread at a time may record; any may read.

    Args:
        group: the communicator's name.
        world_size: the number of its ranks.
        backend: its backend's name.

    Attributes:
        group, world_size, backend: see Args.
        begun: how many collectives this rank has begun.
    """

    __slots__ = ("_ring", "_running", "backend", "begun", "group", "world_size")

    def __init__(self, group: str, world_size: int = 1, backend: str = "local") -> None:
        self.group = group
        self.world_size = world_size
        self.backend = backend
        self.begun = 0
        least = 0 if traced is None else _TRACED_ENTRIES
        self._ring: deque[Running] = deque(maxlen=max(FLIGHT_RECORDER_ENTRIES.read(), least))
        self._running: Running | None = None
        if traced is not None:
            traced.append(self)

    def __repr__(self) -> str:
        """Returns the group, how many collectives it has begun, and the last of them; see `describe`."""
        title = f"<FlightRecorder of group {self.group!r}: {self.begun} collectives begun>"
        return "\n".join([title, *self.describe().splitlines()])

    def begin(self, what: Recorded) -> None:
        """Records that a collective begins."""
        if not what.is_message:
            self.begun += 1
        self._running = [self.begun, what, monotonic(), None, False]
        self._ring.append(self._running)

    def end(self, failed: bool = False) -> None:
        """Records that the running collective has ended; does nothing if `hand_over` has returned it."""
        running = self._running
        if running is not None:
            self._running = None
            if failed:
                running[_FAILED] = True  # set first, so that no reader takes the collective for a successful one
            running[_ENDED] = monotonic()

    def hand_over(self) -> Running | None:
        """Returns the running collective, for `finish` when it ends: on a GPU it runs on after its call has returned.

        None if none runs.
        """
        running, self._running = self._running, None
        return running

    @property
    def last(self) -> Entry | None:
        """The entry that began last; None if there is none."""
        ring = self._ring
        return Entry(*ring[-1]) if ring else None

    def entries(self) -> list[Entry]:
        """Returns the remembered entries, the oldest first."""
        return [Entry(*running) for running in self._ring.copy()]  # another thread may append

    def describe(self, last: int = 8) -> str:
        """Returns the last collectives as text, a line for each, the newest first; "" if there are none."""
        newest = self.entries()[::-1][:last]
        now = monotonic()
        return "\n".join([entry.describe(now) for entry in newest])


def finish(running: Running, *, failed: bool) -> None:
    """Records the end of what `hand_over` has returned."""
    running[_FAILED] = failed
    running[_ENDED] = monotonic()


def seconds_text(seconds: float) -> str:
    """Returns a duration as text: "12.0 us", "1.2 ms", "300.0 s"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1.0 else f"{seconds:.1f} s"


def names_text(names: Sequence[str]) -> str:
    """Returns names as text, such as "[conv1.weight, conv1.bias, 12 more]"."""
    more = [f"{len(names) - 2} more"] if len(names) > 2 else []
    return f"[{', '.join([*names[:2], *more])}]"
