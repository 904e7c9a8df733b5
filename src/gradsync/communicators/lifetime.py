"""The state of a communicator, which runs one collective at a time until it is closed or aborted, or fails.

Ctrl-C may interrupt a collective between any two instructions, and a lock would then stay held for ever. So the lock
here is an entry of a dict. A single instruction, which Ctrl-C cannot interrupt, acquires the lock and stores its owner.
The owner is the stack frame of the function that runs the collective in a `with` block. If no thread runs that frame
any more, the function was interrupted, and the lock is free again.
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
from gradsync.communicators.collective_queue import Job, await_earlier, await_submitted, fail_submitted
from gradsync.diagnostics import FlightRecorder
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
    from typing import Self

    from gradsync.rendezvous.client import RendezvousClient


class Ending(Protocol):
    """The part of a Backend that a Lifetime uses; see Backend."""

    name: str
    label: str
    client: RendezvousClient | None
    recorder: FlightRecorder

    def announce_close(self) -> None:
        """Announces to the other ranks that this rank has closed the communicator."""

    def announce_abort(self, reason: str, culprit: int | None) -> None:
        """Announces to the other ranks that they must abort the communicator."""

    def release(self) -> None:
        """Frees the communicator's resources: file descriptors, memory and threads."""


class RaisedFailures:
    """The failures that calls of a world's communicators have raised. close() does not raise them again.

    Attributes:
        was_aborted: whether this rank has aborted one of the communicators.
    """

    def __init__(self) -> None:
        self.was_aborted = False
        self._failures: list[_Failure] = []

    def add(self, error: BaseException) -> None:
        """Records a failure that a call has raised. The failure may have ended other communicators of the world too."""
        if not self.has(error):
            self._failures.append(_failure_of(error))

    def has(self, error: BaseException) -> bool:
        """Whether the program already knows of the failure: a call has raised it, or the program has called abort()."""
        return self.was_aborted or _failure_of(error) in self._failures

    def copy(self) -> RaisedFailures:
        """Returns a copy of this object, to which later failures are not added."""
        copied = RaisedFailures()
        copied.was_aborted, copied._failures = self.was_aborted, self._failures.copy()
        return copied


#: The identity of a failure: the class and the fields of its error, which are the same for all copies of the error.
_Failure = tuple[type[BaseException], dict[str, object]]


def _failure_of(error: BaseException) -> _Failure:
    """Returns the identity of the failure that an error reports. Two copies of one error give the same identity."""
    return type(error), {name: value for name, value in vars(error).items() if not name.startswith("_")}


class Lifetime:
    """The state of one communicator until its backend is released; also the context manager of each collective.

    One context manager is enough for all collectives of a communicator, because collectives do not nest.

    Args:
        backend: the communicator's backend. Each collective is written to the flight recorder of the backend.
        communicator: the communicator. The Lifetime keeps the communicator alive even if the program keeps only, e.g.,
            `communicator.objects`, because the process group closes only communicators that are still alive.

    Attributes:
        raised: the failures that calls have raised; all communicators of a world share this object.
        ended_because: the reason why the communicator cannot be used; None while it can be used.
        is_inherited: whether this process was forked, and the communicator belongs to the parent process.
        was_raised: whether code outside of a collective, e.g. a future, has raised the communicator's failure.
        submitting: a reentrant lock, which a thread holds while it submits a collective of the communicator.
        last_job: the communicator's last submitted collective; None if that collective has ended. See
            collective_queue.py.
    """

    _next_what: str
    _next_agreement: Agreement

    def __init__(self, backend: Ending, communicator: object) -> None:
        self._backend = backend
        self._communicator = communicator
        self.raised = RaisedFailures()
        self._recorder = backend.recorder
        # The lock: the dict is empty, or has the frame that holds the lock. setdefault(None, frame) acquires the lock
        # if it is free, and returns the frame that now holds the lock. clear() releases the lock.
        self._holder: dict[None, FrameType] = {}
        self._make_locks()
        self._announcement: Callable[[], None] | None = None  # announces the end to the other ranks; None if done
        self._is_closed_only = False  # whether close() alone has ended the communicator
        self.was_raised = False
        self.last_job: Job | None = None
        self._what = ""  # the current collective
        self._released = False
        self.ended_because: str | None = None
        self.is_inherited = False
        self._unraised: BaseException | None = None  # a failure that no call has raised yet
        with _registering:
            _of_this_process.add(self)

    @property
    def has_failed(self) -> bool:
        """Whether the communicator has ended because of a failure or of abort(), not because of close()."""
        return self.ended_because is not None and not self._is_closed_only

    def collective(self, what: str, agreement: Agreement) -> Self:
        """Returns the context manager of one collective: `with lifetime.collective("all_reduce", agreement):`.

        The call first waits for collectives that were submitted earlier. The context manager locks the communicator for
        this collective, and records the collective in the flight recorder.

        Args:
            what: the collective's name in errors.
            agreement: the Agreement that describes this collective, for the comparison between the ranks.

        Raises:
            InvalidArgument: the caller is a done-callback, or an earlier done-callback has tried to run a collective;
                see check_may_call. __enter__ raises InvalidArgument if another collective of this communicator is
                running.
            CommunicatorClosed: the communicator has ended; __enter__ raises this and the other errors of
                `check_usable`.
        """
        if pending:  # before `what` is stored, because other collectives run during this wait
            await_earlier(self, what)
        self._next_what = what
        self._next_agreement = agreement
        return self

    def __enter__(self) -> None:
        frame = frame_of(1)  # the function with the `with` block
        what = self._next_what
        while self._holder.setdefault(None, frame) is not frame:
            if not self._clean_up_interrupted():
                self._refuse(what)
        try:
            self._what = what
            if self.ended_because is not None:  # checked under the lock: no thread releases the backend meanwhile
                self.check_usable(what)
            self._recorder.begin(self._next_agreement)
        except BaseException:
            self._recorder.end(failed=True)
            self.__exit__(None, None, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends a collective. If the collective has failed, the communicator ends for all ranks.

        After a PlanMismatch the communicator does not end. If Ctrl-C interrupts this method, the
        next collective, close() or abort() does the rest: see _clean_up_interrupted.
        """
        if error is not None:
            if self._unraised is not None and _failure_of(error) == _failure_of(self._unraised):
                self._unraised = None  # this call has raised it
            if not isinstance(error, PlanMismatch):
                self.raised.add(error)
                self._abort_inside(headline(error), culprit_of(error))
        self._what = ""
        self._recorder.end(error is not None)
        self._holder.clear()
        if self.ended_because is not None:
            self._end_use()

    @property
    def label(self) -> str:
        """This rank's name in errors."""
        return self._backend.label

    def close(self) -> None:
        """Closes the communicator; see Communicator.close. Raises a failure that no call has raised yet."""
        self._clean_up_interrupted()
        if pending and self.ended_because is None:
            await_submitted(self)
        self._claim_end("it was closed", self._backend.announce_close, closed_only=True)
        self._announce()
        self._end_use()
        if self._unraised is not None:
            error, self._unraised = self._unraised, None
            if not self.raised.has(error):
                raise error

    def abort(self, reason: str, culprit: int | None) -> None:
        """Ends the communicator for all ranks; see Communicator.abort."""
        self._clean_up_interrupted()
        first_line = reason.partition("\n")[0]  # the announcement has all lines
        self._claim_end(f"it was aborted: {first_line}", partial(self._backend.announce_abort, reason, culprit))
        self._announce()
        self._end_use()

    def fail(self, error: BaseException) -> None:
        """Ends the communicator because of a failure that was found outside of a collective, or by another thread.

        Args:
            error: the failure. The next call on the communicator raises this error, unless a future has raised it.
        """
        with self._claiming:
            if self.ended_because is None:
                # Set before the reason, because a call that sees the reason raises the error.
                self._unraised = None if self.was_raised else error
                self.ended_because = f"it failed: {headline(error)}"
        self._end_use()

    def note_raised(self, error: BaseException) -> None:
        """Records a failure that a future, or other code outside of a collective, raises: close() will not raise it."""
        self.raised.add(error)
        with self._claiming:
            self.was_raised = True
            self._unraised = None

    def _make_locks(self) -> None:
        # Reentrant, because a signal handler may run in the thread that holds a lock.
        self._claiming = threading.RLock()
        self._announcing = threading.RLock()
        self.submitting = threading.RLock()

    def _claim_end(self, because: str, announcement: Callable[[], None], *, closed_only: bool = False) -> None:
        """Sets the reason why the communicator runs no further collectives, unless it has ended already."""
        with self._claiming:
            if self.ended_because is None:
                self._announcement = announcement  # set first: until it is sent, the backend is not released
                self._is_closed_only = closed_only
                self.ended_because = because

    def _announce(self) -> None:
        """Announces close() or abort() to the other ranks, once. If Ctrl-C interrupts this method, call it again."""
        with self._announcing:
            if self._announcement is not None:
                self._announcement()
                self._announcement = None

    def disown(self) -> None:
        """Ends the communicator in a forked child, which has the parent's memory but is not a rank."""
        self.ended_because = "it belongs to the parent process of this forked process"
        self.is_inherited = True
        self._holder = {}  # a thread that exists only in the parent may hold the lock
        self._make_locks()
        self._released = True  # the resources belong to the parent
        self.last_job = None  # the thread that would run it exists only in the parent

    def _refuse(self, what: str) -> NoReturn:
        if self.ended_because is not None:  # another thread is releasing the communicator
            raise self.ended_error(what)
        is_own = _runs_in(frame_of(), self._holder.get(None))
        who = "this same thread (e.g. interrupted by a signal handler)" if is_own else "another thread"
        raise InvalidArgument(
            f"{self._backend.label}: {what} was called while {who} is running {self._what} on this communicator: only "
            "one thread at a time may use a communicator, and only for one collective"
        )

    def _clean_up_interrupted(self) -> bool:
        """Ends a collective whose __exit__ was interrupted by Ctrl-C or not called. Returns whether there was one."""
        frame = self._holder.get(None)
        if frame is None or _is_running(frame):
            return False
        with self._claiming:
            if self._holder.get(None) is frame:  # no other thread has cleaned up meanwhile
                has_begun = bool(self._what)
                if has_begun:
                    self._abort_inside("it was interrupted", None)
                self._recorder.end(failed=has_begun)
                self._what = ""
                self._holder.clear()
        return True

    def check_usable(self, what: str) -> None:
        """Raises an error if the communicator has ended.

        Args:
            what: the name, in errors, of the collective that was called.

        Raises:
            RankFailed, CollectiveTimeout, PlanMismatch, NcclError, RendezvousError: a failure has ended the
                communicator, and no call has raised it yet.
            CommunicatorClosed: the communicator has ended for any other reason.
        """
        if self._unraised is not None:
            error, self._unraised = self._unraised, None
            self.raised.add(error)
            raise error
        if self.ended_because is not None:
            raise self.ended_error(what)

    def ended_error(self, what: str) -> CommunicatorClosed:
        """Returns the error for a collective, named `what`, that was called after the communicator's end."""
        return CommunicatorClosed(
            f"{self._backend.label}: {what} was called on a {self._backend.name} communicator that cannot "
            f"be used: {self.ended_because}"
        )

    def _abort_inside(self, reason: str, culprit: int | None) -> None:
        """Ends the communicator because a collective failed after it began: the other ranks must not wait in it."""
        reason = f"in {self._what}: {reason}"
        announcement = partial(self._backend.announce_abort, reason, culprit)
        with self._claiming:
            # If another thread has called close(), the other ranks also need the abort: a rank that waits for a third
            # rank ignores a close.
            if self._is_closed_only:
                self._announcement, self._is_closed_only = announcement, False
            self._claim_end(f"it was aborted: {reason}", announcement)
        self._announce()

    def _end_use(self) -> None:
        """Fails the submitted collectives that have not begun, and releases the backend."""
        try:
            if pending:
                fail_submitted(self)
        finally:  # the done-callbacks of the failed futures are user code, and may raise
            self._release_when_idle()

    def _release_when_idle(self) -> None:
        """Releases the backend, once. If a thread is running a collective, that thread releases the backend later."""
        frame = frame_of()
        if self._holder.setdefault(None, frame) is frame:
            try:
                if not self._released and self._announcement is None:
                    self._released = True
                    self._backend.release()
                    self._leave_group()
            finally:
                self._holder.clear()

    def _leave_group(self) -> None:
        """Closes the rendezvous client of a group, so that this rank leaves the group. The world's client stays open.

        When all members have left a group, the server removes the group's entries.
        """
        client = self._backend.client
        if client is not None and client.name == self._recorder.group:
            client.close()


def culprit_of(error: BaseException) -> int | None:
    """Returns the rank that caused an error, or None if the error names no rank."""
    if isinstance(error, CollectiveTimeout) and error.missing_ranks:
        return error.missing_ranks[0]
    return error.rank if isinstance(error, RankFailed) else None


_of_this_process: weakref.WeakSet[Lifetime] = weakref.WeakSet()
_registering = threading.Lock()  # a set must not change while another thread iterates over it


def _is_running(frame: FrameType) -> bool:
    return any(_runs_in(running, frame) for running in sys._current_frames().values())


def _runs_in(innermost: FrameType, frame: FrameType | None) -> bool:
    """Whether `frame` is on the stack whose innermost frame is `innermost`."""
    caller: FrameType | None = innermost
    while caller is not None:
        if caller is frame:
            return True
        caller = caller.f_back
    return False


def usable_recorders() -> list[FlightRecorder]:
    """Returns the flight recorders of the communicators of this process that have not ended. Any thread may call it."""
    with _registering:
        return [lifetime._recorder for lifetime in _of_this_process if lifetime.ended_because is None]


def _disown_after_fork() -> None:
    global _registering
    _registering = threading.Lock()
    for lifetime in list(_of_this_process):
        lifetime.disown()
    _of_this_process.clear()


os.register_at_fork(after_in_child=_disown_after_fork)
