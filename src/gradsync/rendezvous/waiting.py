"""Requests and the waits they turn into: who asked, until when, and for what.

Part of the server's core: `places`, `keys` and `protocol` open waits and answer them, `protocol` ends those whose
deadline has come.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass
from typing import Protocol

from gradsync.rendezvous.agreements import Verdict
from gradsync.rendezvous.events import Send
from gradsync.rendezvous.messages import ABSENCE, DEATH, INVALID, MAX_VERDICT_BYTES, SILENCE, FrameType, clip_text

_MISSING_RANK_BYTES = 3  # of a rank in a list, at most
_MAX_RANKS_BESIDE_TEXT = 12 * 1024  # the frame has room for the rest beside what is left of the text


def verdict_room_bytes(missing_ranks: int) -> int:
    """Returns how long the text of a failure may be, so that it fits one frame beside so many missing ranks."""
    return MAX_VERDICT_BYTES - _MISSING_RANK_BYTES * min(missing_ranks, _MAX_RANKS_BESIDE_TEXT)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request, or a whole generation, cannot go on.

    Attributes:
        rank: the culprit, or one of them.
        phase: where it was: joining, running or left.
        text: the whole story.
        missing: of an absence, the ranks that did not come, as far as they are known; None for anything else.
        is_silence: whether the culprit was found stopped, gone or out of reach.
    """

    rank: int
    phase: str
    text: str
    missing: tuple[int, ...] | None = None
    is_silence: bool = False

    def tell(self, connection: int, sequence: int) -> Send:
        """Returns the message that says so, in answer to a request or (sequence 0) to a whole generation."""
        kind = ABSENCE if self.missing is not None else SILENCE if self.is_silence else DEATH
        missing = self.missing or ()
        text = clip_text(self.text, verdict_room_bytes(len(missing)))
        return Send(connection, FrameType.FAILED, (sequence, kind, self.rank, self.phase, missing, text))


@dataclass(slots=True)  # not frozen: one is made for every message, and freezing triples what that costs
class Request:
    """One request of one rank, never changed, and the ways to answer it."""

    connection: int
    rank: int
    sequence: int
    now: float

    def reply(self, value: object = None) -> Send:
        """Answers with a value."""
        return Send(self.connection, FrameType.REPLY, (self.sequence, value))

    def decide(self, verdict: Verdict, position: int) -> Send:
        """Answers with a verdict, and the position that brought it."""
        return Send(self.connection, FrameType.VERDICT, (self.sequence, int(verdict), position))

    def refuse(self, text: str, kind: int = INVALID) -> Send:
        """Answers that the request cannot be granted."""
        return Send(self.connection, FrameType.REFUSED, (self.sequence, kind, clip_text(text)))

    def fail(self, failure: Failure) -> Send:
        """Answers that the request can no longer be granted, because another rank is gone."""
        return failure.tell(self.connection, self.sequence)

    def time_out(self, missing_ranks: tuple[int, ...], whereabouts: str) -> Send:
        """Answers that the deadline came first."""
        fields = (self.sequence, missing_ranks, clip_text(whereabouts))
        return Send(self.connection, FrameType.TIMED_OUT, fields)


class Place(Protocol):
    """What a wait waits at: a barrier, a key, an id, or the forming of a generation."""

    def withdraw(self, wait: Wait) -> None:
        """Forgets this wait, as if it had never come."""

    def missing_ranks(self) -> tuple[int, ...]:
        """Returns the ranks that hold it up, where they are known.

        Ranks that came and gave up are named only when no others are missing: waits with the same deadline
        end one after the other, and the later must not blame the earlier.
        """


@dataclass(eq=False, slots=True)
class Wait:
    """A request that waits at a place until its deadline (monotonic seconds)."""

    request: Request
    deadline: float
    place: Place
    open: bool = True


class WaitTable:
    """All open waits, by deadline and by connection."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Wait]] = []
        self._order = itertools.count()
        self._by_connection: dict[int, dict[int, Wait]] = {}
        self._open = 0

    def add(self, request: Request, timeout_ms: int, place: Place) -> Wait:
        """Opens a wait of so many milliseconds from the request's time."""
        wait = Wait(request, request.now + timeout_ms / 1000.0, place)
        heapq.heappush(self._heap, (wait.deadline, next(self._order), wait))
        self._by_connection.setdefault(request.connection, {})[request.sequence] = wait
        self._open += 1
        return wait

    def close(self, wait: Wait) -> None:
        """Ends a wait: it was answered or withdrawn. Closing it again does nothing."""
        if not wait.open:
            return
        wait.open = False
        self._open -= 1
        waits = self._by_connection[wait.request.connection]
        del waits[wait.request.sequence]
        if not waits:
            del self._by_connection[wait.request.connection]
        # Most waits end long before their deadline: without this, their entries would pile up for that long.
        if len(self._heap) > 2 * self._open + 64:
            self._heap = [entry for entry in self._heap if entry[2].open]
            heapq.heapify(self._heap)

    def find(self, connection: int, sequence: int) -> Wait | None:
        """Returns the open wait of this request, if it still waits."""
        return self._by_connection.get(connection, {}).get(sequence)

    def close_all(self, connection: int) -> list[Wait]:
        """Ends the open waits of one connection and returns them, in the order of their requests."""
        waits = list(self._by_connection.get(connection, {}).values())
        for wait in waits:
            self.close(wait)
        return waits

    def count(self, connection: int) -> int:
        """Returns how many waits a connection has open."""
        return len(self._by_connection.get(connection, ()))

    def pop_due(self, now: float) -> Wait | None:
        """Returns and closes one wait whose deadline has come, or None."""
        deadline = self.next_deadline()
        if deadline is None or deadline > now:
            return None
        wait = self._heap[0][2]
        self.close(wait)
        return wait

    def next_deadline(self) -> float | None:
        """Returns the earliest deadline of an open wait, or None."""
        while self._heap and not self._heap[0][2].open:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
