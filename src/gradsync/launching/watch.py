"""The supervisor's loop: waits for all that can happen to the ranks of a run, and stops them in order.

It waits for a rank's end (its sentinel), its report, a signal to the launcher, and the next step of stopping;
nothing is polled.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import time
from typing import TextIO

from gradsync.launching.outcome import Outcome, RankOutcome
from gradsync.launching.rank_process import RankProcess
from gradsync.launching.signal_inbox import SignalInbox

# After a failure the other ranks learn of it over the rendezvous: they may first end by themselves. A failure
# that only tells of another rank's waits longer, so that that rank can tell its own.
_SETTLE_SECONDS = 0.25
_ROOT_CAUSE_SECONDS = 1.0
_GRACE_SECONDS = 5.0
_UNKILLABLE_SECONDS = 2.0

_GIVE_UP = 0  # stands among the signals of the steps

# Seconds to wait after the previous step, then the signal to send.
_Step = tuple[float, int]
_END: tuple[_Step, ...] = ((_GRACE_SECONDS, signal.SIGKILL), (_UNKILLABLE_SECONDS, _GIVE_UP))


class Watch:
    """The started ranks of a run. None of them is left when the context ends."""

    def __init__(self, signals: SignalInbox, notices: TextIO | None = None) -> None:
        self._signals = signals
        self._notices = notices
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals.descriptor, selectors.EVENT_READ)
        self._ranks: list[RankProcess] = []
        self._running: dict[int, RankProcess] = {}
        # rank -> (position among the failures, whether the ranks had been told to stop)
        self._failures: dict[int, tuple[int, bool]] = {}
        self._steps: list[_Step] = []
        self._step_time = 0.0
        self._told_to_stop = False
        self._gave_up = False
        self._signal_number: int | None = None

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        # Normally nothing is left to do; after an exception in the launcher itself the ranks end here.
        self._send(signal.SIGKILL)
        deadline = time.monotonic() + (0.0 if self._gave_up else _UNKILLABLE_SECONDS)
        for rank in self._running.values():
            rank.abandon(max(0.0, deadline - time.monotonic()))
        self._selector.close()

    def add(self, rank: RankProcess) -> None:
        """Takes a started rank under watch."""
        self._ranks.append(rank)
        self._running[rank.rank] = rank
        self._selector.register(rank.sentinel, selectors.EVENT_READ, rank)
        self._selector.register(rank.report, selectors.EVENT_READ, rank)

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
            self._take_due_step()
        for rank in self._running.values():
            self._note_failure(rank)
        return Outcome(tuple(self._outcome_of(rank) for rank in self._ranks), self._signal_number)

    def _take_event(self, rank: RankProcess, descriptor: int) -> None:
        if descriptor == rank.sentinel:
            self._reap(rank)
            return
        if not rank.read_report():
            self._selector.unregister(descriptor)
        if rank.error is not None:  # at once: its threads may keep the process alive
            self._note_failure(rank)

    def _reap(self, rank: RankProcess) -> None:
        for descriptor in (rank.sentinel, rank.report):
            with contextlib.suppress(KeyError):
                self._selector.unregister(descriptor)
        del self._running[rank.rank]
        if rank.reap() != 0 or rank.error is not None:
            self._note_failure(rank)

    def _note_failure(self, rank: RankProcess) -> None:
        """Remembers a failure, and has the other ranks stopped soon."""
        if rank.rank in self._failures:
            return
        self._failures[rank.rank] = (len(self._failures), self._told_to_stop)
        is_consequence = rank.error is not None and rank.error.is_consequence
        settle = _ROOT_CAUSE_SECONDS if is_consequence else _SETTLE_SECONDS
        if not self._steps:
            self._plan(((settle, signal.SIGTERM), *_END))
        elif not self._told_to_stop:
            self._step_time = min(self._step_time, time.monotonic() + settle)

    def _take_signal(self, number: int) -> None:
        """Forwards the first signal; a Ctrl-C after it kills at once, and anything else is old news."""
        if self._signal_number is None:
            self._signal_number = number
            if self._told_to_stop:  # the ranks are on their way out already
                self._plan(((0.0, signal.SIGKILL), _END[1]))
            elif number == signal.SIGINT:
                self._answer_interrupt()
                self._plan(((0.0, number), (_GRACE_SECONDS, signal.SIGTERM), *_END))
            else:
                self._plan(((0.0, number), *_END))
        elif number == signal.SIGINT:
            self._plan(((0.0, signal.SIGKILL), _END[1]))
        self._take_due_step()

    def _answer_interrupt(self) -> None:
        if self._notices is not None and self._running:
            ranks, them = ("1 rank", "it") if len(self._running) == 1 else (f"{len(self._running)} ranks", "them")
            with contextlib.suppress(OSError):  # nobody reads it
                print(f"gradsync: stopping {ranks} (Ctrl-C again kills {them})", file=self._notices, flush=True)

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
        self._told_to_stop = True
        self._send(number)
        if self._steps:
            self._step_time = time.monotonic() + self._steps[0][0]

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
        )
