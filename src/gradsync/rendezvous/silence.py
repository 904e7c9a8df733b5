"""When a peer counts as silent, and when silence is a verdict: the clocks of the heartbeats, without I/O.

Used by both ends: the server's core keeps one `Silence` for each rank, in a `SilenceTable`; a client keeps one for the
server. Heartbeats go both ways every HEARTBEAT_SECONDS, less often among many ranks. `joining` keeps one for each rank
that has not come: there a look that finds it running is the sign of life.
"""

from __future__ import annotations

import enum

from gradsync.rendezvous.finding import Finding

HEARTBEAT_SECONDS = 0.5
_MANY_RANKS = 257
_HEARTBEAT_SECONDS_OF_MANY = 1.25  # less than SILENT_AFTER_SECONDS: what is found, and when, stays the same
SILENT_AFTER_SECONDS = 1.5
SLOW_AFTER_SECONDS = 5.0
LATE_AFTER_SECONDS = 1.0  # who comes so late to its own clock was itself not running, and has heard nobody
LOOK_EVERY_SECONDS = 0.5


def heartbeat_seconds(world_size: int) -> float:
    """Returns how often each of so many ranks says that it lives: one server hears them all."""
    return HEARTBEAT_SECONDS if world_size < _MANY_RANKS else _HEARTBEAT_SECONDS_OF_MANY


class Judgement(enum.Enum):
    """What follows from a look at a peer."""

    NONE = enum.auto()
    SLOW = enum.auto()  # silent for long, though nothing is found: worth a warning, once
    LOST = enum.auto()  # found in a fatal state, twice in a row


class Silence:
    """One peer: when it was heard of last, and what was found since.

    Args:
        now: monotonic seconds.

    Attributes:
        heard_at: when it was heard of last.
    """

    __slots__ = ("_is_suspect", "_is_told", "_look_at", "heard_at")

    def __init__(self, now: float) -> None:
        self.heard_at = now
        self._look_at = now
        self._is_suspect = False
        self._is_told = False

    def hear(self, now: float) -> bool:
        """Notes a sign of life; returns whether it ends a silence that was worth a warning."""
        self.heard_at = now
        self._is_suspect = False
        was_told, self._is_told = self._is_told, False
        return was_told

    def restart(self, now: float) -> None:
        """Begins anew: this side was not running, and may have heard nothing because of that."""
        self.heard_at = self._look_at = now
        self._is_suspect = False

    def due_at(self) -> float:
        """Returns when to look at the peer, should nothing be heard of it until then."""
        return max(self.heard_at + SILENT_AFTER_SECONDS, self._look_at)

    def looked(self, now: float) -> None:
        """Notes that the peer is looked at now: the next look is due a moment later."""
        self._look_at = now + LOOK_EVERY_SECONDS

    def judge(self, now: float, finding: Finding) -> Judgement:
        """Takes what a look at the peer has found."""
        if now < self.heard_at + SILENT_AFTER_SECONDS:
            return Judgement.NONE
        was_suspect, self._is_suspect = self._is_suspect, finding.is_fatal
        if finding.is_fatal:
            return Judgement.LOST if was_suspect else Judgement.NONE
        if self._is_told or now < self.heard_at + SLOW_AFTER_SECONDS:
            return Judgement.NONE
        self._is_told = True
        return Judgement.SLOW


class SilenceTable:
    """All peers that are listened for, by connection."""

    def __init__(self) -> None:
        self._silences: dict[int, Silence] = {}
        # When to look through them next. Whoever is heard of meanwhile moves further off, so it never is too late.
        self._due_at: float | None = None

    def begin(self, connection: int, now: float) -> None:
        """Begins to listen for a peer."""
        self._silences[connection] = silence = Silence(now)
        self._due_at = silence.due_at() if self._due_at is None else min(self._due_at, silence.due_at())

    def end(self, connection: int) -> None:
        """Stops listening for a peer; nothing where it was not listened for."""
        if self._silences.pop(connection, None) is not None and not self._silences:
            self._due_at = None

    def hear(self, connection: int, now: float) -> bool:
        """Notes a sign of life; returns whether it ends a silence that was worth a warning."""
        silence = self._silences.get(connection)
        return silence is not None and silence.hear(now)

    def silent_seconds(self, connection: int, now: float) -> float:
        """Returns how long a peer has been silent."""
        return now - self._silences[connection].heard_at

    def next_deadline(self) -> float | None:
        """Returns when `take_due` is to be called, or None."""
        return self._due_at

    def restart_if_late(self, now: float) -> None:
        """Restarts all clocks when nobody looked at them in time: this side was not running."""
        if self._due_at is None or now - self._due_at <= LATE_AFTER_SECONDS:
            return
        for silence in self._silences.values():
            silence.restart(now)
        self._set_due()

    def take_due(self, now: float) -> list[int]:
        """Returns the peers that are silent and to be looked at now."""
        if self._due_at is None or now < self._due_at:
            return []
        due = [connection for connection, silence in self._silences.items() if silence.due_at() <= now]
        for connection in due:
            self._silences[connection].looked(now)
        self._set_due()
        return due

    def judge(self, connection: int, now: float, finding: Finding) -> Judgement:
        """Takes what a look at a peer has found."""
        silence = self._silences.get(connection)
        return Judgement.NONE if silence is None else silence.judge(now, finding)

    def _set_due(self) -> None:
        self._due_at = min(silence.due_at() for silence in self._silences.values())
