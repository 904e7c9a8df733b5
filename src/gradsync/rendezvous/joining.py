"""What holds up the ranks that wait to join: others that have not come yet, or that have ended and never will.

Part of the server's core, without I/O.
"""

from __future__ import annotations

from gradsync.rendezvous import verdict_texts
from gradsync.rendezvous.events import Notice
from gradsync.rendezvous.roster import Roster
from gradsync.rendezvous.waiting import Failure

_NOTICE_INTERVAL_SECONDS = 5.0


class Joining:
    """Looks after the generation that is to form next."""

    def __init__(self) -> None:
        self._ended: dict[int, str] = {}  # how, by rank
        self._notice_at: float | None = None

    def next_deadline(self) -> float | None:
        """Returns when the next notice is due, in monotonic seconds, or None."""
        return self._notice_at

    def note_end(self, rank: int, how: str) -> None:
        """Notes that a rank's process has ended, in words: it joins no generation any more."""
        self._ended[rank] = how

    def rest(self) -> None:
        """Nobody waits to join."""
        self._notice_at = None

    def failure(self, roster: Roster) -> Failure | None:
        """Returns why this generation can never form, or None."""
        for rank, how in self._ended.items():
            if rank not in roster.members:
                return verdict_texts.ended(roster, rank, how)
        return None

    def notices(self, now: float, roster: Roster) -> list[Notice]:
        """Names the ranks that keep the others waiting, every few seconds."""
        if self._notice_at is None:
            self._notice_at = now + _NOTICE_INTERVAL_SECONDS
        if now < self._notice_at:
            return []
        self._notice_at = now + _NOTICE_INTERVAL_SECONDS
        return [Notice(verdict_texts.incomplete(roster))]
