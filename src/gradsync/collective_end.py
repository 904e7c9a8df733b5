"""How a collective has ended, or that it has not: what its futures wait for.

One for each collective. Those who asked for it alone have one future; the gradients of a bucket have one each, and
share this: so a bucket of ten thousand gradients ends once, not ten thousand times.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from gradsync.completion import Completion
from gradsync.errors import GradsyncError, InvalidArgument, caller

_log = logging.getLogger("gradsync")

#: What a collective has to look at before it begins, any thread's; nearly always nothing. Submitted jobs that are not
#: over, in order; done-callbacks that run; and an error that one of those has got, to be raised again. Not behind a
#: function: every collective looks here, and a call would cost it more than all that it finds here otherwise.
pending: dict[object, Any] = {}
_REFUSED = "what a done-callback was refused"
_lock = threading.Lock()  # one for all: held for a few assignments, and a training step makes hundreds


class _Here(threading.local):
    """What each thread knows of itself.

    Attributes:
        is_in_callback: whether it runs a done-callback.
    """

    is_in_callback = False


_here = _Here()


def check_may_call(label: str, what: str) -> None:
    """Refuses a collective in a done-callback: ranks would run it at different places in their order.

    To be called where `pending` holds something.

    Args:
        label: this rank, e.g. "rank 0/2".
        what: names the collective.

    Raises:
        InvalidArgument: the calling thread is in a done-callback, or one was refused a collective and nobody but the
            log has been told.
    """
    if _here.is_in_callback:
        place = caller()
        error = InvalidArgument(
            f"{label}: {what} in a done-callback{'' if place is None else f', at {place}'}: done-callbacks must not "
            "call collectives: ranks would run them at different places in their order; call it once flush() or "
            "result() has returned"
        )
        pending.setdefault(_REFUSED, error)
        raise error
    raise_refused()


def is_in_callback() -> bool:
    """Whether the calling thread runs a done-callback."""
    return _here.is_in_callback


def raise_refused() -> None:
    """Raises again, once, what a done-callback was refused: there it has only been logged.

    Raises:
        InvalidArgument: as for check_may_call; nothing in a done-callback.
    """
    if not _here.is_in_callback:
        error = pending.pop(_REFUSED, None)
        if error is not None:
            raise _again(error).with_traceback(None) from error


class Untold(Protocol):
    """A failure that is logged unless somebody is told of it."""

    def forget(self) -> None:
        """Somebody has been told."""


class CollectiveEnd:
    """The end of a collective.

    Args:
        completing_thread: the only thread that can bring it about; None is the calling one.

    Attributes:
        value: what the collective has returned.
        completion: of one that runs beside the host, once it is launched.
        has_result: whether it has ended well, and what it has computed is there: nothing is to be waited for.
    """

    __slots__ = (
        "_callbacks",
        "_completing_thread",
        "_error",
        "_untold",
        "_waiting",
        "completion",
        "has_result",
        "value",
    )

    def __init__(self, completing_thread: int | None = None) -> None:
        self._completing_thread = completing_thread or threading.get_ident()
        self.value: Any = None
        self.completion: Completion | None = None
        self.has_result = False
        self._error: BaseException | None = None
        self._untold: Untold | None = None
        # A lock for each thread that waits, released at the end. Not an Event for all: its own lock stays taken where
        # Ctrl-C comes as a wait begins, and then who ends the collective would wait for ever.
        self._waiting: tuple[threading.Lock, ...] = ()
        self._callbacks: list[Callable[[], None]] | None = []  # None once it has been launched or has failed

    @property
    def is_pending(self) -> bool:
        """Whether it has yet to be launched or to fail."""
        return self._callbacks is not None

    def is_over(self) -> bool:
        """Whether the collective has ended or failed; never blocks."""
        return self._callbacks is None and (self.completion is None or self.completion.done())

    def is_completed_by_caller(self) -> bool:
        """Whether only the calling thread can bring it about."""
        return threading.get_ident() == self._completing_thread

    def await_finish(self, seconds: float | None) -> bool:
        """Waits until it is launched or has failed; returns whether it is."""
        at_the_end = threading.Lock()
        at_the_end.acquire()
        with _lock:
            if self._callbacks is None:
                return True
            self._waiting = (*self._waiting, at_the_end)
        if at_the_end.acquire(timeout=-1 if seconds is None else min(max(seconds, 0.0), threading.TIMEOUT_MAX)):
            return True
        with _lock:  # a future may be asked again and again
            self._waiting = tuple([other for other in self._waiting if other is not at_the_end])
            return self._callbacks is None

    def add_callback(self, function: Callable[[Any], None], future: Any) -> None:
        """Calls function(future) once it is over; at once, in the calling thread, when it is."""
        call = partial(_run, function, future)
        with _lock:
            if self._callbacks is not None:
                self._callbacks.append(call)
                return
        self._run_when_over(call)

    def finish(
        self,
        value: Any,
        error: BaseException | None,
        completion: Completion | None = None,
        untold: Untold | None = None,
    ) -> None:
        """Ends it, unless it has ended: with a value or an error, or at the completion of what was launched.

        Args:
            value: what the collective returns.
            error: what it has failed with.
            completion: of what was launched.
            untold: shall log the error when nobody asks.
        """
        with _lock:
            callbacks, waiting = self._callbacks, self._waiting
            if callbacks is None:
                if untold is not None:
                    untold.forget()
                return
            self.value, self._error, self.completion, self._untold = value, error, completion, untold
            self._callbacks, self._waiting = None, ()
            self.has_result = error is None and completion is None
        for at_the_end in waiting:
            at_the_end.release()
        leaving: BaseException | None = None
        for call in callbacks:
            try:
                self._run_when_over(call)
            except BaseException as left:  # SystemExit, Ctrl-C: the others have a right to be called
                leaving = leaving or left
        if leaving is not None:
            raise leaving

    def disown(self, error: BaseException) -> None:
        """Fails in the child of a fork, where nobody completes it, and calls nobody."""
        self._waiting = ()  # the parent's threads are not here
        if self._callbacks is not None:
            self._error = error
            self._callbacks = None

    def failure(self) -> BaseException | None:
        """Returns what a collective that is over has ended with."""
        if self._error is None and self.completion is not None:
            try:
                self.completion.wait()  # over already: returns or raises at once
            except GradsyncError as error:
                return error
        return self._error

    def tell_failure(self) -> BaseException | None:
        """The same, for somebody who asks."""
        if self._untold is not None:
            self._untold.forget()
        return self.failure()

    def raise_error(self) -> None:
        """Raises what the launch has failed with."""
        if self._error is not None:
            if self._untold is not None:
                self._untold.forget()
            raise _again(self._error)

    def _run_when_over(self, call: Callable[[], None]) -> None:
        if self.completion is None:
            call()
        else:
            self.completion.when_done(lambda _error: call())


def _run(function: Callable[[Any], None], future: Any) -> None:
    was_in_callback, mark = _here.is_in_callback, object()
    pending[mark], _here.is_in_callback = None, True
    try:
        function(future)
    except Exception:
        _log.exception("a done-callback of %s raised", future.name)
    finally:
        _here.is_in_callback = was_in_callback
        pending.pop(mark, None)


def _again(error: BaseException) -> BaseException:
    """Returns an error to be raised: raised itself each time, it would gather the frames of all who have asked."""
    try:
        fresh = copy.copy(error)
    except Exception:  # a foreign class that cannot be made again
        return error
    if type(fresh) is not type(error):
        return error
    fresh.__cause__, fresh.__context__ = error.__cause__, error.__context__
    fresh.__suppress_context__ = error.__suppress_context__
    return fresh.with_traceback(error.__traceback__)


def _begin_anew_after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # the parent's thread that may hold it is not in the child
    _here.is_in_callback = False


os.register_at_fork(after_in_child=_begin_anew_after_fork)
