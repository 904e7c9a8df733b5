"""The supervisor's loop: waits for all that can happen to the ranks of a run, and stops them in order.

It waits for a rank's end (told by its guard), its report, a signal to the launcher, and the next step of stopping;
nothing is polled.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable

from gradsync.launching.out_of_memory import OomWatch
from gradsync.launching.outcome import Outcome, RankOutcome
from gradsync.launching.output import Notices
from gradsync.launching.rank_process import RankProcess
from gradsync.launching.signals import FAILED_ELSEWHERE, NEWS_ELSEWHERE, SUFFERED_ELSEWHERE, SignalInbox

# After a failure the other ranks learn of it over the rendezvous: they may first end by themselves. A failure
# that only tells of another rank's waits longer, so that that rank can tell its own, where it may still come to it.
_SETTLE_SECONDS = 0.1
_ROOT_CAUSE_SECONDS = 1.0
_AFTER_SILENCE_SECONDS = 0.05  # all who have waited in vain know it at the same moment
_UNKILLABLE_SECONDS = 1.8  # a little more than the guard tries

_SILENT = Notices(None)
_GIVE_UP = 0  # stands among the signals of the steps

# Seconds to wait after the previous step, then the signal to send.
_Step = tuple[float, int]
_KILL: tuple[_Step, ...] = ((0.0, signal.SIGKILL), (_UNKILLABLE_SECONDS, _GIVE_UP))


class Watch:
    """The started ranks of a run. None of them is left when the context ends.

    Args:
        signals: what comes to the launcher.
        grace_seconds: between SIGTERM and SIGKILL.
        notices: where a Ctrl-C is answered with a line.
        on_news: called with a rank when it, or its guard, has told something.
        on_stopping: called when the ranks are first told to stop, or the last one has failed, with whether all that
            is known is that they suffer from a rank which is not among them.

    Attributes:
        signal_number: the signal that ends the job, once one has come.
    """

    def __init__(
        self,
        signals: SignalInbox,
        grace_seconds: float,
        notices: Notices = _SILENT,
        on_news: Callable[[RankProcess], None] | None = None,
        on_stopping: Callable[[bool], None] | None = None,
    ) -> None:
        self._signals = signals
        self._grace_seconds = grace_seconds
        self._end: tuple[_Step, ...] = ((grace_seconds, signal.SIGKILL), _KILL[1])
        self._memory = OomWatch()
        self._notices = notices
        self._on_news = on_news
        self._on_stopping = on_stopping
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals.descriptor, selectors.EVENT_READ)
        self._ranks: list[RankProcess] = []
        self._running: dict[int, RankProcess] = {}
        self._found_stopped: set[int] = set()  # by a signal, when a rank failed
        # rank -> (position among the failures, whether the ranks had been told to stop)
        self._failures: dict[int, tuple[int, bool]] = {}
        self._steps: list[_Step] = []
        self._step_time = 0.0
        self._told_to_stop = False
        self._gave_up = False
        self._has_failed_elsewhere = False
        self.signal_number: int | None = None

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        # Normally nothing is left to do; after an exception in the launcher itself the ranks end here.
        if self._running and not self._gave_up:
            self._plan(_KILL)
            self.run()
        for rank in self._running.values():
            rank.abandon()
        self._selector.close()

    def add(self, rank: RankProcess) -> None:
        """Takes a started rank under watch."""
        self._ranks.append(rank)
        self._running[rank.rank] = rank
        self._selector.register(rank.status, selectors.EVENT_READ, rank)
        self._selector.register(rank.report, selectors.EVENT_READ, rank)
        if rank.sentinel >= 0:
            self._selector.register(rank.sentinel, selectors.EVENT_READ, rank)

    def is_told_to_end(self) -> bool:
        """Takes the signals that have come, and tells whether one ends the job; for while `run` does not run."""
        for number in self._signals.read():
            self._take_signal(number)
        return self.signal_number is not None or self._has_failed_elsewhere

    def run(self) -> Outcome:
        """Waits until all ranks have ended, stopping them when one fails or a signal comes."""
        while self._running and not self._gave_up:
            timeout = max(0.0, self._step_time - time.monotonic()) if self._steps else None
            for key, _ in self._selector.select(timeout):
                if key.data is None:
                    for number in self._signals.read():
                        self._take_signal(number)
                elif key.data.rank in self._running:
                    self._take_event(key.data, key.fd)
                    if self._on_news is not None:
                        self._on_news(key.data)
            self._take_due_step()
        for rank in self._running.values():
            self._note_failure(rank)
        if self._failures and not self._told_to_stop and self._on_stopping is not None:  # there was none left to stop
            self._on_stopping(self._only_suffers())
        return Outcome(tuple(self._outcome_of(rank) for rank in self._ranks), self.signal_number)

    def _take_event(self, rank: RankProcess, descriptor: int) -> None:
        if descriptor in (rank.status, rank.sentinel):
            is_there = rank.read_status() and descriptor == rank.status
            if rank.exit_code is not None or not is_there:
                self._take_end(rank)
            if not is_there:
                self._reap(rank)
            return
        if not rank.read_report():
            self._selector.unregister(descriptor)
        if rank.error is not None:  # at once: its threads may keep the process alive
            self._note_failure(rank)

    def _take_end(self, rank: RankProcess) -> None:
        """Takes how a rank ended; its guard may still be busy with what it has left behind."""
        rank.read_report(None)
        if rank.exit_code == -signal.SIGKILL and not rank.sent_kill and rank.memory_kill is None:
            rank.memory_kill = self._memory.describe() if self._memory.kills() else None
        if rank.exit_code != 0 or rank.error is not None:
            self._note_failure(rank)

    def _reap(self, rank: RankProcess) -> None:
        for descriptor in (rank.status, rank.report, rank.sentinel):
            with contextlib.suppress(KeyError, ValueError):  # ended before, or never there
                self._selector.unregister(descriptor)
        del self._running[rank.rank]
        rank.reap()
        if rank.exit_code != 0 or rank.error is not None:
            self._note_failure(rank)
        if self._running and self._running.keys() <= self._silent_ranks():
            self._stop_after(0.0)

    def _note_failure(self, rank: RankProcess) -> None:
        """Remembers a failure, and has the other ranks stopped soon."""
        if rank.rank in self._failures:
            return
        self._failures[rank.rank] = (len(self._failures), self._told_to_stop)
        if not self._told_to_stop:
            self._found_stopped.update(other.rank for other in self._running.values() if other.is_stopped())
        if rank.error is not None and rank.error.is_unsendable:
            return  # the others may end their work
        self._stop_after(self._settle_seconds(rank))

    def _silent_ranks(self) -> set[int | None]:
        """Gives the ranks that others have waited for in vain: they have nothing to tell."""
        errors = [rank.error for rank in self._ranks if rank.error is not None]
        return {error.missed_rank for error in errors if error.is_of_silence}

    def _stop_after(self, settle_seconds: float) -> None:
        """Has the ranks told to stop after so long, unless that happens sooner anyway."""
        if not self._steps:
            self._plan(((settle_seconds, signal.SIGTERM), *self._end))
        elif not self._told_to_stop:
            self._step_time = min(self._step_time, time.monotonic() + settle_seconds)

    def _settle_seconds(self, rank: RankProcess) -> float:
        """Gives how long the other ranks may end by themselves, or tell what this failure is only a consequence of."""
        error = rank.error
        if error is None or not error.is_consequence:
            return _SETTLE_SECONDS
        if error.is_of_silence:
            return _AFTER_SILENCE_SECONDS
        culprits = [other for other in self._ranks if other.rank == error.missed_rank]
        has_nothing_to_tell = any(other.rank not in self._running or other.is_stopped() for other in culprits)
        return _SETTLE_SECONDS if has_nothing_to_tell else _ROOT_CAUSE_SECONDS

    def _take_signal(self, number: int) -> None:
        """Forwards the first signal; a Ctrl-C after it kills at once, and anything else is old news."""
        if number == NEWS_ELSEWHERE:
            return
        if number in (FAILED_ELSEWHERE, SUFFERED_ELSEWHERE):
            self._has_failed_elsewhere = True
            self._stop_after(_SETTLE_SECONDS if number == FAILED_ELSEWHERE else _ROOT_CAUSE_SECONDS)
        elif number == signal.SIGTSTP:
            self._suspend()
        elif self.signal_number is None:
            self.signal_number = number
            if self._told_to_stop:  # the ranks are on their way out already
                self._plan(_KILL)
            elif number == signal.SIGINT:
                half = self._grace_seconds / 2  # a script that takes no notice of Ctrl-C may take one of SIGTERM
                self._plan(((0.0, number), (half, signal.SIGTERM), (half, signal.SIGKILL), _KILL[1]))
                if self._running:
                    them = "it" if len(self._running) == 1 else "them"
                    self._notices.tell(f"gradsync: stopping {_count(len(self._running))} (Ctrl-C again kills {them})")
            else:
                self._plan(((0.0, number), *self._end))
        elif number == signal.SIGINT:
            self._plan(_KILL)
        self._take_due_step()

    def _suspend(self) -> None:
        """Stops the ranks and this process, as Ctrl-Z asks; goes on with them when the shell says so.

        The ranks first: a rank that runs while its launcher stands still takes it for dead.
        """
        self._send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._send(signal.SIGCONT)

    def _plan(self, steps: tuple[_Step, ...]) -> None:
        self._steps = list(steps)
        self._step_time = time.monotonic() + steps[0][0]

    def _take_due_step(self) -> None:
        """Sends the next signal of stopping when its time has come."""
        if not self._steps or not self._running or time.monotonic() < self._step_time:
            return
        number = self._steps.pop(0)[1]
        if number == _GIVE_UP:
            self._gave_up = True
            return
        if not self._told_to_stop and self._on_stopping is not None:
            self._on_stopping(self._only_suffers())
        were_asked, self._told_to_stop = self._told_to_stop, True
        if number == signal.SIGKILL:
            why = ", not ended when asked to" if were_asked else ""
            self._notices.tell(f"gradsync: killing {_count(len(self._running))}{why}")
        self._send(number)
        if self._steps:
            self._step_time = time.monotonic() + self._steps[0][0]

    def _only_suffers(self) -> bool:
        """Whether no failure is known here but such as only tell of a rank elsewhere."""
        failed = [rank for rank in self._ranks if rank.rank in self._failures]
        return self.signal_number is None and all(r.error is not None and r.error.is_consequence for r in failed)

    def _send(self, number: int) -> None:
        for rank in self._running.values():
            rank.send_signal(number)

    def _outcome_of(self, rank: RankProcess) -> RankOutcome:
        order, was_stopped = self._failures.get(rank.rank, (None, False))
        return RankOutcome(
            rank=rank.rank,
            pid=rank.pid,
            # A rank that reported an error has failed with 1, whatever stopped the rest of it.
            exit_code=rank.exit_code if rank.error is None else 1,
            result=rank.result,
            error=rank.error,
            order=order,
            was_stopped=was_stopped,
            memory_kill=rank.memory_kill,
            was_found_stopped=rank.rank in self._found_stopped,
            peak_bytes=rank.peak_bytes,
        )


def _count(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"
