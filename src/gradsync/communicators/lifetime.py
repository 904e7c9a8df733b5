"""Who may use a communicator, and how it ends: one collective at a time, until it is closed, aborted or forked away."""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType
from typing import TYPE_CHECKING

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.collective_queue import Job, await_earlier, await_submitted, fail_submitted, pending
from gradsync.errors import (
    CollectiveTimeout,
    CommunicatorClosed,
    InvalidArgument,
    PlanMismatch,
    RankFailed,
    describe,
)

if TYPE_CHECKING:
    from gradsync.communicators.base import Communicator


class Lifetime:
    """The state of one communicator between its making and its release.

    Args:
        communicator: whose hooks _announce_close, _announce_abort and _release are called, and whose flight recorder
            is written.

    Attributes:
        ended_because: why it cannot be used; None while it may be.
        was_told: whether a failure has been raised to the caller outside of a collective.
        last_job: what was submitted for it last; see collective_queue.py.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._recorder = communicator.recorder
        self._lock = threading.Lock()
        self._claiming = threading.Lock()
        self._announced = True
        self.was_told = False
        self.last_job: Job | None = None
        self._turn = _Turn(self)
        self._inside = ""
        self._released = False
        self.ended_because: str | None = None
        self._untold: BaseException | None = None  # a failure that no call has raised yet
        with _registering:
            _of_this_process.add(self)

    def turn(self, what: str, agreement: Agreement) -> _Turn:
        """Returns a context that holds the communicator for one collective, named `what` in errors.

        Waits for what was submitted before it. First: who waits must not have told the turn its name.
        """
        if pending:
            await_earlier(self)
        turn = self._turn
        turn.what = what
        turn.agreement = agreement
        return turn

    def close(self) -> None:
        """Ends it in order; see Communicator.close. Raises a failure that no call has raised."""
        if pending and self.ended_because is None:
            await_submitted(self)
        if self._claim_end("it was closed"):
            try:
                self._communicator._announce_close()
            finally:
                self._announced = True
        self._end_use()
        if self._untold is not None:
            error, self._untold = self._untold, None
            raise error

    def abort(self, reason: str, culprit: int | None) -> None:
        """Ends it for all ranks; see Communicator.abort."""
        if self._claim_end(f"it was aborted: {reason}"):
            try:
                self._communicator._announce_abort(reason, culprit)
            finally:
                self._announced = True
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
                self.ended_because = f"it failed: {_headline(error)}"
        self._end_use()

    def note_told(self) -> None:
        """Notes that the failure is being raised outside of a collective, by a future: closing need not raise it."""
        with self._claiming:
            self.was_told = True
            self._untold = None

    def _claim_end(self, because: str) -> bool:
        """Ends it for new collectives; returns whether this call did, and now has to tell the others."""
        with self._claiming:
            if self.ended_because is not None:
                return False
            self._announced = False  # what the announcement needs must not be released before it
            self.ended_because = because
            return True

    def disown(self) -> None:
        """Ends it in a forked child, which has the parent's memory but not its place in the group."""
        self.ended_because = "it belongs to the process that this one was forked from"
        self._lock = threading.Lock()  # the parent's thread that may hold it is not here
        self._claiming = threading.Lock()
        self._released = True  # what there is to release is the parent's
        self.last_job = None  # the thread that would run it is not here

    def enter(self, what: str, agreement: Agreement) -> None:
        """Begins a collective, and its entry in the flight recorder.

        Raises:
            CommunicatorClosed: it has ended.
            InvalidArgument: another thread is inside a collective.
        """
        if not self._lock.acquire(False):
            if self.ended_because is not None:  # it is being released
                raise self.ended_error(what)
            raise InvalidArgument(
                f"{self._communicator.label}: {what} while another thread is inside {self._inside} of this "
                "communicator: one thread at a time may use it"
            )
        # Whoever interrupts from here on, Ctrl-C included, must not leave the lock behind.
        try:
            self._inside = what
            if self.ended_because is not None:  # looked at under the lock: close() releases only when it is free
                self.check_usable(what)
            self._recorder.begin(agreement)
        except BaseException:
            self._lock.release()
            raise

    def check_usable(self, what: str) -> None:
        """Raises a failure that no call has raised yet, or that it has ended.

        Raises:
            CommunicatorClosed: it has ended.
            RankFailed, CollectiveTimeout, PlanMismatch, NcclError: the failure.
        """
        if self._untold is not None:
            error, self._untold = self._untold, None
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
        """Ends a collective; one that failed midway ends the communicator for all ranks."""
        try:
            self._recorder.end(error is not None)
            if self._untold is not None and str(error) == str(self._untold):
                self._untold = None  # this call has raised it
            unharmed = error is None or (isinstance(error, PlanMismatch) and not error.broken)
            if error is not None and not unharmed:
                self.abort(f"in {self._inside}: {_headline(error)}", _culprit_of(error))
        finally:
            self._lock.release()
            if self.ended_because is not None:
                self._release_when_idle()

    def _end_use(self) -> None:
        """Fails what was submitted and has not begun, and releases."""
        try:
            if pending:
                fail_submitted(self)
        finally:  # their done-callbacks are the caller's
            self._release_when_idle()

    def _release_when_idle(self) -> None:
        """Releases once; leaves it to the thread inside a collective, where there is one."""
        if self._lock.acquire(False):
            try:
                if not self._released and self._announced:
                    self._released = True
                    self._communicator._release()
                    self._communicator._leave_group()
            finally:
                self._lock.release()


class _Turn:
    """The context of one collective; one object serves all, because collectives do not nest."""

    __slots__ = ("_lifetime", "agreement", "what")

    agreement: Agreement

    def __init__(self, lifetime: Lifetime) -> None:
        self._lifetime = lifetime
        self.what = ""

    def __enter__(self) -> None:
        self._lifetime.enter(self.what, self.agreement)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lifetime.leave(error)


def _headline(error: BaseException) -> str:
    """Returns an error without the reports of all ranks that a verdict brings; it has been raised in full."""
    return describe(error).partition("\n")[0]


def _culprit_of(error: BaseException) -> int | None:
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
