"""Who may use a communicator, and how it ends: one collective at a time, until it is closed, aborted or forked away.

Ctrl-C may cut a collective off between any two steps: a lock would stay behind where it comes after taking it and
before noting that. Here one step, which nothing interrupts, takes the place inside and notes for whom: the frame of the
function whose `with` block it is. A frame that is noted and that no thread runs any more was cut off, and its place is
free.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from sys import _getframe as frame_of
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, NoReturn, Protocol

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.collective_queue import Job, await_earlier, await_submitted, fail_submitted, tell_lost
from gradsync.diagnostics import FlightRecorder, dump_at_failure
from gradsync.errors import (
    CollectiveTimeout,
    CommunicatorClosed,
    InvalidArgument,
    PlanMismatch,
    RankFailed,
    headline,
)
from gradsync.futures import pending

if TYPE_CHECKING:
    from gradsync.rendezvous.client import RendezvousClient


class Ending(Protocol):
    """What a Lifetime asks of the communicator's Backend; see there."""

    name: str
    label: str
    client: RendezvousClient | None
    recorder: FlightRecorder

    def announce_close(self) -> None:
        """Tells the other ranks that this one will not come again."""

    def announce_abort(self, reason: str, culprit: int | None) -> None:
        """Tells the other ranks to stop."""

    def release(self) -> None:
        """Gives back descriptors, memory and threads."""


class Observer(Protocol):
    """Is called when a communicator ends."""

    def communicator_ended(self, lifetime: Lifetime) -> None:
        """The communicator cannot be used any more. Called on any thread, perhaps more than once; must not raise."""


class RaisedFailures:
    """The failures that calls of a world's communicators have raised: closing one of these raises none of them again.

    Attributes:
        was_aborted: whether this rank has aborted one of the communicators.
    """

    def __init__(self) -> None:
        self.was_aborted = False
        self._texts: set[str] = set()

    def add(self, error: BaseException) -> None:
        """Notes that a call has raised this failure: the server's verdict ends all communicators."""
        self._texts.add(str(error))

    def has(self, error: BaseException) -> bool:
        """Whether closing need not raise the failure: a call has, or who has aborted knows that all end."""
        return self.was_aborted or str(error) in self._texts

    def copy(self) -> RaisedFailures:
        """Returns what there is until now."""
        copied = RaisedFailures()
        copied.was_aborted, copied._texts = self.was_aborted, set(self._texts)
        return copied


class Occupancy(dict[None, FrameType]):
    """The place inside: empty, or the frame that has it.

    setdefault(None, frame) takes it, and returns who has it now; clear() leaves it.
    """

    __slots__ = ()

    def cut_off(self) -> FrameType | None:
        """Returns the frame that has the place although no thread runs it any more; None where there is none."""
        frame = self.get(None)
        return None if frame is None or _is_running(frame) else frame


class Turn:
    """The context of one collective; one object serves all of a communicator, because collectives do not nest."""

    __slots__ = ("_lifetime", "agreement", "what")

    agreement: Agreement

    def __init__(self, lifetime: Lifetime) -> None:
        self._lifetime = lifetime
        self.what = ""

    def __enter__(self) -> None:
        self._lifetime.enter(frame_of(1), self.what, self.agreement)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lifetime.leave(error)


class Lifetime:
    """The state of one communicator between its making and its release.

    Args:
        backend: of the communicator; its recorder is written.
        communicator: held by whoever holds this or the backend, as `communicator.objects` does: the process group
            closes only communicators that are still there.

    Attributes:
        raised: the failures that calls have raised: the family's, once it belongs to one.
        ended_because: why it cannot be used; None while it may be.
        is_inherited: whether it belongs to the process that this one was forked from.
        was_told: whether a failure has been raised to the caller outside of a collective.
        submitting: held while something is submitted for it.
        last_job: what was submitted for it last, unless that is over; see collective_queue.py.
    """

    def __init__(self, backend: Ending, communicator: object) -> None:
        self._backend = backend
        self._communicator = communicator
        self.raised = RaisedFailures()
        self._recorder = backend.recorder
        self._occupancy = Occupancy()
        self._make_locks()
        self._announcement: Callable[[], None] | None = None  # which the others have yet to hear
        self._is_closed_only = False  # the others have heard that it was closed, and of no failure
        self.was_told = False
        self.last_job: Job | None = None
        self._turn = Turn(self)
        self._what = ""  # the collective that has begun
        self._released = False
        self.ended_because: str | None = None
        self.is_inherited = False
        self._untold: BaseException | None = None  # a failure that no call has raised yet
        self._observers: weakref.WeakSet[Observer] = weakref.WeakSet()
        with _registering:
            _of_this_process.add(self)

    @property
    def has_failed(self) -> bool:
        """Whether it has ended otherwise than by close()."""
        return self.ended_because is not None and not self._is_closed_only

    def turn(self, what: str, agreement: Agreement) -> Turn:
        """Returns a context that holds the communicator for one collective, named `what` in errors.

        Waits for what was submitted before it. First: who waits must not have told the turn its name.

        Raises:
            InvalidArgument: in a done-callback, or because one was refused a collective; see check_may_call.
        """
        if pending:
            await_earlier(self, what)
        turn = self._turn
        turn.what = what
        turn.agreement = agreement
        return turn

    @property
    def label(self) -> str:
        """This rank in errors."""
        return self._backend.label

    def close(self) -> None:
        """Ends it in order; see Communicator.close. Raises a failure that no call of its family has raised."""
        self._take_back()
        if pending and self.ended_because is None:
            await_submitted(self)
        self._claim_end("it was closed", self._backend.announce_close, closed_only=True)
        self._announce()
        self._end_use()
        tell_lost(self)
        if self._untold is not None:
            error, self._untold = self._untold, None
            if not self.raised.has(error):
                raise error

    def abort(self, reason: str, culprit: int | None) -> None:
        """Ends it for all ranks; see Communicator.abort."""
        self._take_back()
        first_line = reason.partition("\n")[0]  # the others get the whole of it
        self._claim_end(f"it was aborted: {first_line}", partial(self._backend.announce_abort, reason, culprit))
        self._announce()
        self._end_use()

    def fail(self, error: BaseException, *, told: bool) -> None:
        """Ends it because of a failure found between collectives, or by another thread.

        Args:
            error: raised by the next call, once.
            told: whether it is being raised already.
        """
        with self._claiming:
            if self.ended_because is None:
                # First: whoever finds the reason has been told the error.
                self._untold = None if told or self.was_told else error
                self.ended_because = f"it failed: {headline(error)}"
        dump_at_failure(error)
        self._end_use()

    def note_told(self, error: BaseException) -> None:
        """Notes that the failure is being raised outside of a collective, by a future: closing need not raise it."""
        self.raised.add(error)
        with self._claiming:
            self.was_told = True
            self._untold = None

    def observe_end(self, observer: Observer) -> None:
        """Calls an observer at the end, for as long as it lives."""
        with self._claiming:
            self._observers.add(observer)

    def _notify_observers(self) -> None:
        with self._claiming:
            observers = list(self._observers)
        for observer in observers:
            observer.communicator_ended(self)

    def _make_locks(self) -> None:
        # Reentrant: a signal's handler may come while its own thread holds them.
        self._claiming = threading.RLock()
        self._announcing = threading.RLock()
        self.submitting = threading.RLock()

    def _claim_end(self, because: str, announcement: Callable[[], None], *, closed_only: bool = False) -> None:
        """Ends it for new collectives, unless it has ended."""
        with self._claiming:
            if self.ended_because is None:
                self._announcement = announcement  # first: what it needs must not be released before it
                self._is_closed_only = closed_only
                self.ended_because = because

    def _announce(self) -> None:
        """Tells the others of the end, where an interrupted call has left that to do too."""
        with self._announcing:
            if self._announcement is not None:
                self._announcement()
                self._announcement = None

    def disown(self) -> None:
        """Ends it in a forked child, which has the parent's memory but not its place in the group."""
        self.ended_because = "it belongs to the process that this one was forked from"
        self.is_inherited = True
        self._occupancy = Occupancy()  # the parent's thread that may be inside is not here
        self._make_locks()
        self._released = True  # what there is to release is the parent's
        self.last_job = None  # the thread that would run it is not here
        self._notify_observers()

    def enter(self, frame: FrameType, what: str, agreement: Agreement) -> None:
        """Begins a collective, and its entry in the flight recorder.

        Args:
            frame: of the function that is about to run it, as long as that is inside.
            what: its name in errors.
            agreement: what it is.

        Raises:
            CommunicatorClosed: it has ended.
            InvalidArgument: another thread is inside a collective, or this one.
        """
        while self._occupancy.setdefault(None, frame) is not frame:
            if not self._take_back():
                self._refuse(what)
        try:
            self._what = what
            if self.ended_because is not None:  # looked at inside: close() releases only when nobody is
                self.check_usable(what)
            self._recorder.begin(agreement)
        except BaseException:
            self._recorder.end(failed=True)
            self.leave(None)
            raise

    def _refuse(self, what: str) -> NoReturn:
        if self.ended_because is not None:  # it is being released
            raise self.ended_error(what)
        is_own = _runs_in(frame_of(), self._occupancy.get(None))
        who = "this very thread, as from a signal's handler," if is_own else "another thread"
        raise InvalidArgument(
            f"{self._backend.label}: {what} while {who} is inside {self._what} of this communicator: one thread at a "
            "time may use it, for one collective"
        )

    def _take_back(self) -> bool:
        """Ends a collective that was cut off, by Ctrl-C, before it could end itself; returns whether there was one."""
        frame = self._occupancy.cut_off()
        if frame is None:
            return False
        with self._claiming:
            if self._occupancy.get(None) is frame:  # and no other thread has done it meanwhile
                has_begun = bool(self._what)
                if has_begun:
                    self._abort_inside("it was interrupted", None)
                self._recorder.end(failed=has_begun)
                self._what = ""
                self._occupancy.clear()
        return True

    def check_usable(self, what: str) -> None:
        """Raises a failure that no call has raised yet, or that it has ended.

        Raises:
            CommunicatorClosed: it has ended.
            RankFailed, CollectiveTimeout, PlanMismatch, NcclError: the failure.
        """
        if self._untold is not None:
            error, self._untold = self._untold, None
            self.raised.add(error)
            raise error
        if self.ended_because is not None:
            raise self.ended_error(what)

    def ended_error(self, what: str) -> CommunicatorClosed:
        """Returns the error of a collective, named `what`, that comes after the end."""
        return CommunicatorClosed(
            f"{self._backend.label}: {what} on a {self._backend.name} communicator that cannot "
            f"be used: {self.ended_because}"
        )

    def leave(self, error: BaseException | None) -> None:
        """Ends a collective; one that failed midway ends the communicator for all ranks.

        Whoever interrupts it leaves the rest to the next call: see _take_back.
        """
        if error is not None:
            if self._untold is not None and str(error) == str(self._untold):
                self._untold = None  # this call has raised it
            if not isinstance(error, PlanMismatch) or error.broken:
                self.raised.add(error)
                self._abort_inside(headline(error), culprit_of(error))
        self._what = ""
        self._recorder.end(error is not None)
        self._occupancy.clear()
        if error is not None:
            dump_at_failure(error)
        if self.ended_because is not None:
            self._end_use()

    def _abort_inside(self, reason: str, culprit: int | None) -> None:
        """Ends it because of a collective that cannot go on; the others wait in it, or will."""
        reason = f"in {self._what}: {reason}"
        announcement = partial(self._backend.announce_abort, reason, culprit)
        with self._claiming:
            if self._is_closed_only:  # by another thread meanwhile: who waits for a third rank does not look at that
                self._announcement, self._is_closed_only = announcement, False
            self._claim_end(f"it was aborted: {reason}", announcement)
        self._announce()

    def _end_use(self) -> None:
        """Fails what was submitted and has not begun, and releases."""
        self._notify_observers()
        try:
            if pending:
                fail_submitted(self)
        finally:  # their done-callbacks are the caller's
            self._release_when_idle()

    def _release_when_idle(self) -> None:
        """Releases once; leaves it to the thread inside a collective, where there is one."""
        frame = frame_of()
        if self._occupancy.setdefault(None, frame) is frame:
            try:
                if not self._released and self._announcement is None:
                    self._released = True
                    self._backend.release()
                    self._leave_group()
            finally:
                self._occupancy.clear()

    def _leave_group(self) -> None:
        """Lets the server forget what a group's communicator has put there."""
        client = self._backend.client
        if client is not None and client.name == self._recorder.group:
            client.close()


def culprit_of(error: BaseException) -> int | None:
    """Returns the rank that the error is about: who passes on another's failure must not be taken for its cause."""
    if isinstance(error, CollectiveTimeout) and error.missing_ranks:
        return error.missing_ranks[0]
    return error.rank if isinstance(error, RankFailed) else None


_of_this_process: weakref.WeakSet[Lifetime] = weakref.WeakSet()
_registering = threading.Lock()  # a set must not grow while another thread goes through it


def _is_running(frame: FrameType) -> bool:
    return any(_runs_in(running, frame) for running in sys._current_frames().values())


def _runs_in(innermost: FrameType, frame: FrameType | None) -> bool:
    """Whether a frame is that of the innermost function of a thread, or of one of its callers."""
    caller: FrameType | None = innermost
    while caller is not None:
        if caller is frame:
            return True
        caller = caller.f_back
    return False


def usable_recorders() -> list[FlightRecorder]:
    """Returns the recorders of this process's communicators that have not ended; any thread may ask."""
    with _registering:
        return [lifetime._recorder for lifetime in _of_this_process if lifetime.ended_because is None]


def _disown_after_fork() -> None:
    global _registering
    _registering = threading.Lock()
    for lifetime in list(_of_this_process):
        lifetime.disown()
    _of_this_process.clear()


os.register_at_fork(after_in_child=_disown_after_fork)
