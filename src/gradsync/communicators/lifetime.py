"""The state of a communicator: one collective at a time, until it is closed or aborted, or fails.

Ctrl-C may come between any two instructions, also just before the lock is released. So the lock is an entry of a dict,
the thread that holds it and the stack frame of its collective: `setdefault` takes the lock in one instruction. A thread
that finds its own entry, but not the frame on its stack, was interrupted there, and takes the lock away.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from threading import get_ident
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from gradsync.communicators.agreement import Agreement, LayoutsDiffer
from gradsync.communicators.messages import Messages
from gradsync.diagnostics import FlightRecorder
from gradsync.errors import (
    CollectiveTimeout,
    CommunicatorClosed,
    GradsyncError,
    InvalidArgument,
    PlanMismatch,
    RankFailed,
    describe,
    headline,
)
from gradsync.futures import Failed, Work, again, refuse_in_callback, this_thread

if TYPE_CHECKING:
    from typing import Self

    from gradsync.communicators.backend import Backend

_log = logging.getLogger("gradsync")


class Lifetime:
    """The state of one communicator until its backend is released; also the context manager of each collective.

    (Collectives do not nest, so one will do.)

    Args:
        backend: the communicator's, whose flight recorder gets each collective.

    Attributes:
        label: this rank's name in errors.
        ended_because: why the communicator cannot be used; None while it can.
        is_inherited: whether this process was forked, and the communicator is the parent's.
        messages: the pending messages, which each collective starts first.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._recorder = backend.recorder
        self.label = backend.label
        self._holder: dict[None, tuple[int, FrameType]] = {}  # empty, or what runs a collective
        self._ending = threading.RLock()  # reentrant, because a signal handler may run in the thread that holds it
        self._announcement: tuple[str | None, int | None] | None = None  # what the other ranks have yet to be told
        self._is_closed_only = False  # whether close() alone has ended the communicator
        self._what = ""  # the current collective
        self._next: tuple[str, Agreement | None] | None = None
        self._is_released = False
        self.ended_because: str | None = None
        self.is_inherited = False
        self.messages = Messages(backend, self)
        self._failure: BaseException | None = None  # the first one: it has ended the communicator
        self._unraised: BaseException | None = None  # the same, if found outside of a collective: for the next call
        self._in_future: BaseException | None = None  # the same, if only a future has told: for the next call, too
        with _registering:
            _of_this_process.add(self)

    @property
    def has_failed(self) -> bool:
        """Whether the communicator has ended because of a failure or of abort(), not because of close()."""
        return self.ended_because is not None and not self._is_closed_only

    # -- A collective ------------------------------------------------------------------------------------------

    def turn(self, what: str, agreement: Agreement | None) -> Self:
        """Returns the context manager of one collective: `with lifetime.turn("all_reduce", agreement):`.

        It locks the communicator, and records the collective. If the collective fails, the communicator ends for all
        ranks; after a PlanMismatch it does not.

        Args:
            what: the collective's name in errors.
            agreement: describes it; None: it is not recorded. A collective first starts the pending messages; a message
                starts them together with itself.

        Raises:
            InvalidArgument: the caller is a done-callback. __enter__ raises it if another thread runs a collective.
            CommunicatorClosed: the communicator has ended; __enter__ raises this and the other errors of
                `check_usable`.
        """
        self._next = (what, agreement)
        return self

    def __enter__(self) -> None:
        assert self._next is not None
        (what, agreement), mine = self._next, (get_ident(), sys._getframe(1))
        if this_thread.callbacks:
            refuse_in_callback(self.label, what)
        if self._holder.setdefault(None, mine) is not mine:
            self._free_interrupted()
            if self._holder.setdefault(None, mine) is not mine:
                self._refuse(what)
        try:
            if self.ended_because is not None:  # checked under the lock: no thread releases the backend meanwhile
                self.check_usable(what)
            self._what = what
            if agreement is not None:
                self._recorder.begin(agreement)
                if self.messages.unstarted and not agreement.is_message:
                    self.messages.start()
        except BaseException as error:
            self.__exit__(type(error), error if self._what else None, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not _all_go_on(error):
            self._abort_inside(headline(error), culprit_of(error), error)
            self._unraised = None  # this call tells
        self._what = ""
        self._recorder.end(error is not None)
        self._holder.clear()
        if self.ended_because is not None:
            self._release_when_idle()

    def _refuse(self, what: str) -> NoReturn:
        if self.ended_because is not None:  # another thread is releasing the communicator
            self.check_usable(what)
        thread, _ = self._holder.get(None, (None, None))
        who = "this same thread (e.g. interrupted by a signal handler)" if thread == get_ident() else "another thread"
        raise InvalidArgument(
            f"{self.label}: {what} was called while {who} is running {self._what or 'a collective'} on this "
            "communicator: only one thread at a time may use a communicator, and only for one collective"
        )

    # -- The end -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the communicator; logs a failure that was found outside of a collective, if no call has raised it."""
        self._free_interrupted()
        if self._unraised is not None:
            error, self._unraised = self._unraised, None
            _log.error("%s: the communicator had failed: %s", self.label, describe(error))
        self._claim_end("it was closed", (None, None), closed_only=True)
        self._announce()
        self._release_when_idle()

    def abort(self, reason: str, culprit: int | None) -> None:
        """Ends the communicator for all ranks; see Communicator.abort."""
        self._free_interrupted()
        first_line = reason.partition("\n")[0]  # the announcement has all lines
        self._claim_end(f"it was aborted: {first_line}", (reason, culprit))
        self._announce()
        self._release_when_idle()

    def fail(self, error: BaseException, is_known: bool = False) -> None:
        """Ends the communicator because of a failure found outside of a collective.

        Args:
            error: the failure, which the next call raises.
            is_known: whether the program has it already, e.g. from a future. Then no call raises it.
        """
        with self._ending:
            if self.ended_because is None:
                # Before the reason, because a call that sees the reason raises the error.
                self._failure = self._unraised = error
                self.ended_because = f"it failed: {headline(error)}"
            if is_known:
                self._unraised = None
        self._release_when_idle()

    def replace(self, because: str) -> None:
        """Ends the communicator on this rank, also if it has failed: gs.rebuild() has replaced its world."""
        self._free_interrupted()
        with self._ending:
            self._announcement = self._unraised = self._in_future = None
            self.ended_because = because
        self._release_when_idle()

    def check_usable(self, what: str) -> None:
        """Raises an error if the communicator has ended.

        Args:
            what: the collective that was called.

        Raises:
            RankFailed, CollectiveTimeout, PlanMismatch, NcclError, RendezvousError: a failure found outside of a
                collective has ended the communicator, and no call has raised it yet.
            CommunicatorClosed: the communicator has ended for any other reason.
        """
        if self._unraised is not None:
            error, self._unraised = self._unraised, None
            raise error
        if self._in_future is not None:
            error, self._in_future = self._in_future, None
            raise again(error)
        if self.ended_because is not None:
            raise self._closed(what)

    def failed_work(self, error: Exception) -> Work:
        """Returns work for a future with an error. Until somebody reads it there, the next call raises it, too.

        Else a loop that has not come to its future would not learn in time that a rank has died.
        """
        if self.ended_because is None or isinstance(error, CommunicatorClosed):
            return Failed(error)
        self._in_future = error
        return _FailedInFuture(error, self)

    def note_read(self, error: BaseException) -> None:
        """Notes that the program has read an error in a future."""
        if self._in_future is error:
            self._in_future = None

    def _closed(self, what: str) -> CommunicatorClosed:
        return CommunicatorClosed(
            f"{self.label}: {what} was called on a {self._backend.name} communicator that cannot be used: "
            f"{self.ended_because}"
        )

    def disown(self) -> None:
        """Ends the communicator in a forked child, which has the parent's memory but is not a rank."""
        self.ended_because = "it belongs to the parent process of this forked process"
        self.is_inherited = True
        self._holder = {}  # a thread that exists only in the parent may hold the lock
        self._ending = threading.RLock()
        self._what = ""
        self._is_released = True  # the resources belong to the parent
        self.messages.disown(self._closed("a message"))

    def _abort_inside(self, reason: str, culprit: int | None, error: BaseException | None = None) -> None:
        """Ends the communicator because a collective failed after it began: the other ranks must not wait in it."""
        reason = f"in {self._what}: {reason}"
        with self._ending:
            # If another thread has called close(), the other ranks also need the abort: a rank that waits for a third
            # rank ignores a close.
            if self._is_closed_only:
                self._announcement, self._is_closed_only = (reason, culprit), False
            self._failure = self._failure or error
            if isinstance(error, GradsyncError):
                self._unraised = None  # the program hears of a failure once, though a thread may have found it, too
            self._claim_end(f"it was aborted: {reason}", (reason, culprit))
        self._announce()

    def _claim_end(
        self, because: str, announcement: tuple[str | None, int | None], *, closed_only: bool = False
    ) -> None:
        """Sets why the communicator runs no further collectives, unless it has ended already."""
        with self._ending:
            if self.ended_because is None:
                self._announcement = announcement  # set first: until it is sent, the backend is not released
                self._is_closed_only = closed_only
                self.ended_because = because

    def _announce(self) -> None:
        """Tells the other ranks of the end, once. If Ctrl-C interrupts it, call it again."""
        with self._ending:
            if self._announcement is not None:
                self._backend.announce(*self._announcement)
                self._announcement = None

    def _free_interrupted(self) -> None:
        """Ends a collective of this thread that Ctrl-C has left without releasing the lock, if there is one."""
        thread, frame = self._holder.get(None, (None, None))
        if thread == get_ident() and not _is_on_stack(frame):
            if self._what:
                self._abort_inside("it was interrupted", None)
                self._what = ""
            self._recorder.end(failed=True)
            self._holder.clear()

    def _release_when_idle(self) -> None:
        """Releases the backend, once. If a thread runs a collective, that thread does it later."""
        mine = (get_ident(), sys._getframe())
        if self._holder.setdefault(None, mine) is mine:
            try:
                if not self._is_released and self._announcement is None:
                    self._is_released = True
                    self._backend.release()
                    self._leave_group()
            finally:
                self._holder.clear()
            failure = self._failure
            self.messages.end(failure if isinstance(failure, GradsyncError) else self._closed("a message"))
            self._failure = None  # its traceback has frames, and they have arrays, and perhaps a callback of this group

    def _leave_group(self) -> None:
        """Closes a group's rendezvous client; the world's stays open. The server forgets a group that all have left."""
        client = self._backend.client
        if client is not None and client.name == self._recorder.group:
            client.close()


class _FailedInFuture(Failed):
    """See Lifetime.failed_work."""

    def __init__(self, error: BaseException, lifetime: Lifetime) -> None:
        super().__init__(error)
        self._lifetime = lifetime

    def order(self, name: str = "", stream: Any = None, timeout_seconds: float | None = None) -> None:
        self._lifetime.note_read(self.error)
        super().order(name, stream, timeout_seconds)


def _all_go_on(error: BaseException) -> bool:
    """Whether all ranks raise this error, before data moves."""
    return isinstance(error, LayoutsDiffer) or (isinstance(error, PlanMismatch) and not error.broken)


def culprit_of(error: BaseException) -> int | None:
    """Returns the rank that caused an error, or None if the error names no rank."""
    if isinstance(error, CollectiveTimeout) and error.missing_ranks:
        return error.missing_ranks[0]
    return error.rank if isinstance(error, RankFailed) else None


def _is_on_stack(frame: FrameType | None) -> bool:
    """Whether the calling thread is running this frame."""
    caller: FrameType | None = sys._getframe()
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is not None


_of_this_process: weakref.WeakSet[Lifetime] = weakref.WeakSet()
_registering = threading.Lock()  # a set must not change while another thread iterates over it


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
