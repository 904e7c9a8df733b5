"""What holds up the ranks that wait to join: others that have not come yet, that stand still, or that have ended.

Part of the server's core, without I/O. Whoever starts ranks on the server's machine tells which processes they are:
while others wait, one that has not come is looked at as one that has come and fallen silent.
"""

from __future__ import annotations

from gradsync.rendezvous import verdict_texts
from gradsync.rendezvous.events import Action, Ended, Look, Notice, OfProcess, Started
from gradsync.rendezvous.finding import Finding
from gradsync.rendezvous.roster import Roster
from gradsync.rendezvous.silence import LATE_AFTER_SECONDS, LOOK_EVERY_SECONDS, Judgement, Silence
from gradsync.rendezvous.waiting import Failure

_NOTICE_INTERVAL_SECONDS = 5.0


class Joining:
    """Looks after the generation that is to form next."""

    def __init__(self) -> None:
        self._pids: dict[int, int] = {}  # of the ranks that can be looked at
        self._ended: dict[int, str] = {}  # how, by rank
        self._silences: dict[int, Silence] = {}  # of the ranks that were looked at last
        self._lost: dict[int, tuple[Finding, float]] = {}  # what was found, and for how many seconds
        self._notice_at: float | None = None
        self._look_at: float | None = None

    def next_deadline(self) -> float | None:
        """Returns when the next notice or look is due, in monotonic seconds, or None."""
        due = (self._notice_at, self._look_at)
        return min((time_due for time_due in due if time_due is not None), default=None)

    def hear(self, now: float, event: OfProcess) -> None:
        """Takes in what is known of a rank's process; one that has ended joins no generation any more."""
        if isinstance(event, Started):
            self._pids[event.rank] = event.pid
        elif isinstance(event, Ended):
            self._ended[event.rank] = event.how
        else:
            self._judge(now, event.rank, event.finding)

    def rest(self) -> None:
        """Nobody waits to join."""
        self._notice_at = self._look_at = None
        self._lost.clear()

    def failure(self, roster: Roster) -> Failure | None:
        """Returns why this generation can never form, or None."""
        for rank, how in self._ended.items():
            if rank not in roster.members:
                return verdict_texts.ended(roster, rank, how)
        for rank, (finding, seconds) in self._lost.items():
            if rank not in roster.members:
                return verdict_texts.standstill(roster, rank, self._pids[rank], finding, seconds)
        return None

    def take_due(self, now: float, roster: Roster) -> list[Action]:
        """Looks at the ranks that keep the others waiting, and names them, each every so often."""
        return [*self._looks(now, roster), *self._notices(now, roster)]

    def _notices(self, now: float, roster: Roster) -> list[Notice]:
        if self._notice_at is None:
            self._notice_at = now + _NOTICE_INTERVAL_SECONDS
        if now < self._notice_at:
            return []
        self._notice_at = now + _NOTICE_INTERVAL_SECONDS
        return [Notice(verdict_texts.incomplete(roster))]

    def _looks(self, now: float, roster: Roster) -> list[Look]:
        if not self._pids or (self._look_at is not None and now < self._look_at):
            return []
        # Who comes late was itself stopped, perhaps together with them (Ctrl-Z): what it knows of them counts no more.
        is_new = self._look_at is None or now - self._look_at > LATE_AFTER_SECONDS
        known = {} if is_new else self._silences
        absent = [rank for rank in self._pids if rank not in roster.members]
        self._silences = {rank: known.get(rank) or Silence(now) for rank in absent}
        self._look_at = now + LOOK_EVERY_SECONDS
        return [] if is_new else [Look(rank, self._pids[rank]) for rank in absent]

    def _judge(self, now: float, rank: int, finding: Finding) -> None:
        """Takes what was found of a process; that one has ended is told by whoever started it, who knows how."""
        silence = self._silences.get(rank)
        if silence is None:
            return
        if finding is not Finding.STOPPED:
            silence.hear(now)
        elif silence.judge(now, finding) is Judgement.LOST:
            self._lost[rank] = (finding, now - silence.heard_at)
