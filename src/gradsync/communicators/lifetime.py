"""Who may use a communicator, and how it ends: one collective at a time, until it is closed, aborted or forked away."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from sys import _getframe as frame_of
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, Protocol

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.collective_queue import await_earlier, await_submitted, fail_submitted
from gradsync.communicators.lost_failures import tell_lost
from gradsync.communicators.occupancy import Occupancy, Turn
from gradsync.communicators.queued_jobs import Job
from gradsync.diagnostics import dump_at_failure
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
    from gradsync.communicators.backend import Backend
    from gradsync.communicators.communicator import Communicator


class Observer(Protocol):
    """Is called when a communicator ends."""

    def communicator_ended(self, communicator: Communicator) -> None:
        """The communicator cannot be used any more. Called on any thread, perhaps more than once; must not raise."""


class Lifetime:
    """The state of one communicator between its making and its release.

    Args:
        communicator: whose it is.
        backend: of that; its methods announce_close, announce_abort and release are called, its recorder is written.

    Attributes:
        ended_because: why it cannot be used; None while it may be.
        was_told: whether a failure has been raised to the caller outside of a collective.
        submitting: held while something is submitted for it.
        last_job: what was submitted for it last, unless that is over; see collective_queue.py.
    """

    def __init__(self, communicator: Communicator, backend: Backend) -> None:
        self._communicator = communicator
        self._backend = backend
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
        return self._communicator.label

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
            family = self._communicator.family
            if not family.was_aborted and str(error) not in family.told():
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
        self._communicator.family.note_told(error)
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
            observer.communicator_ended(self._communicator)

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
            InvalidArgument: another thread is inside a collective.
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
        raise InvalidArgument(
            f"{self._communicator.label}: {what} while another thread is inside {self._what} of this "
            "communicator: one thread at a time may use it"
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
            self._communicator.family.note_told(error)
            raise error
        if self.ended_because is not None:
            raise self.ended_error(what)

    def ended_error(self, what: str) -> CommunicatorClosed:
        """Returns the error of a collective, named `what`, that comes after the end."""
        return CommunicatorClosed(
            f"{self._communicator.label}: {what} on a {self._communicator.backend} communicator that cannot "
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
                self._communicator.family.note_told(error)
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


def usable_communicators() -> list[Communicator]:
    """Returns the communicators of this process that have not ended; any thread may ask."""
    with _registering:
        return [lifetime._communicator for lifetime in _of_this_process if lifetime.ended_because is None]


def _disown_after_fork() -> None:
    global _registering
    _registering = threading.Lock()
    for lifetime in list(_of_this_process):
        lifetime.disown()
    _of_this_process.clear()


os.register_at_fork(after_in_child=_disown_after_fork)
