"""Futures: how a collective ends, and what waits for it.

A Completion is the end of work on a device, which a future holds between launch and result; on the CPU a collective
has ended when its call returns, and there is none. A CollectiveEnd is the end of a collective, one for each: who asked
for it alone has one future; the gradients of a bucket have one each, and share it: so a bucket of ten thousand
gradients ends once, not ten thousand times.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from gradsync.errors import CollectiveTimeout, FutureNotReady, GradsyncError, InvalidArgument, caller

if TYPE_CHECKING:
    from typing_extensions import Self


class Completion(Protocol):
    """The end of one launched collective. Once it has failed, order() and wait() raise what ended it."""

    def done(self) -> bool:
        """Whether it has ended, or failed; never waits for the device."""

    def order(self, stream: Any = None) -> None:
        """Makes a stream wait for it, without blocking the host.

        Results that belong in host memory are waited for, and are there afterwards.

        Args:
            stream: a CUDA stream; None is the current one.
        """

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Blocks the host until it has ended.

        Args:
            timeout_seconds: bounds this wait only; None leaves it to the collective's own deadline.

        Raises:
            CollectiveTimeout: the deadline came first.
        """

    def before_done(self, function: Callable[[], None]) -> None:
        """Calls function() once it has ended, before done() is True, on any thread; at once where it is True already.

        What function raises is what the collective has failed with.
        """

    def when_done(self, function: Callable[[BaseException | None], None]) -> None:
        """Calls function(error or None) once it has ended, on a thread of the communicator."""


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


class CollectiveFuture:
    """Resolves to what a collective returns, when it has ended.

    Until then the arrays that the collective was given belong to gradsync: do not write to them, and read only what it
    does not write. On a GPU the future has its value as soon as the collective is launched; result() then orders the
    current stream, not the host, after it. A collective that has begun cannot be cancelled: other ranks take part.

    Args:
        name: how error messages call the collective.
        timeout_seconds: how long result() waits when it is not told; None leaves it to the collective's own deadline.
        completing_thread: the only thread that can complete it, which therefore must not wait for it; None is the one
            that makes the future.
    """

    __slots__ = ("_end", "_name", "_timeout_seconds")

    _DEFAULT_TIMEOUT_SECONDS: ClassVar[float | None] = None
    # What error messages say after the name.
    _HELD_UP: ClassVar[str] = "it comes after the done-callback that asks for it; return from that first"
    _PENDING: ClassVar[str] = "it has not ended yet"
    _MISSED: ClassVar[str] = "did not end"

    def __init__(self, name: str, timeout_seconds: float | None = None, completing_thread: int | None = None) -> None:
        self._name = name
        self._timeout_seconds = timeout_seconds
        self._end = CollectiveEnd(completing_thread)

    @property
    def name(self) -> str:
        """How error messages call it."""
        return self._name

    def done(self) -> bool:
        """Whether it has ended or failed; never blocks."""
        return self._end.is_over()

    def result(self, timeout: float | None = None) -> Any:
        """Returns what the collective returns.

        On a GPU the current stream waits for it, the host does not: work queued afterwards sees the result. Results
        that belong in host memory are waited for.

        Args:
            timeout: seconds that the host waits for the end, on a GPU for the launch; None leaves it to the
                collective's own deadline.

        Raises:
            FutureNotReady: only the calling thread can complete it.
            CollectiveTimeout: the wait reached its deadline; the collective goes on.
            InvalidArgument: a done-callback has called a collective; raised here where that was only logged.
            PlanMismatch, RankFailed, ...: whatever ended the collective.
        """
        self.wait(timeout=timeout)
        return self._value()

    def wait(self, stream: Any = None, *, timeout: float | None = None) -> None:
        """Waits, and raises, as result() does.

        Args:
            stream: CUDA stream that shall wait; None is the current one. Unused on the CPU.
            timeout: as for result().

        Raises:
            FutureNotReady, CollectiveTimeout, PlanMismatch, RankFailed, ...: as for result().
        """
        if pending:
            raise_refused()
        self._await_launch(timeout)
        self._end.raise_error()
        if self._end.completion is not None:
            self._end.completion.order(stream)

    def exception(self) -> BaseException | None:
        """Returns what ended the collective, or None when it succeeded; an error before it is done."""
        if not self.done():
            self._raise_not_ready("exception()")
        return self._end.tell_failure()

    def add_done_callback(self, function: Callable[[Self], None]) -> None:
        """Calls function(self) once done; at once, in the calling thread, when it is done already.

        Else it runs in the thread that completes the future: on the CPU the one that ran the collective, on a GPU one
        of the communicator's. An exception in it is logged, not raised. It must not call collectives, on any
        backend, nor hand over gradients: that is InvalidArgument, raised there and, as nobody may read the log, again
        by this rank's next flush(), result() or collective.

        Args:
            function: gets this future.
        """
        self._end.add_callback(function, self)

    def __repr__(self) -> str:
        if not self.done():
            state = "pending"
        else:
            error = self._end.failure()
            state = "ready" if error is None else f"failed with {type(error).__name__}"
        return f"<{type(self).__name__} of {self.name}: {state}>"

    # -- For those who make it -----------------------------------------------------------------------------------

    def resolve(self, value: Any, completion: Completion | None = None) -> None:
        """Gives the future its value: ready now, or at the end of the collective that was launched."""
        self._end.finish(value, None, completion)

    def fail(self, error: BaseException, untold: Untold | None = None) -> None:
        """Makes result() raise `error`; `untold` shall log it when nobody asks."""
        self._end.finish(None, error, None, untold)

    def disown(self, error: BaseException) -> None:
        """Makes result() raise `error` in the child of a fork, where nobody completes it, and calls nobody."""
        self._end.disown(error)

    def _value(self) -> Any:
        """Returns the value of one that has ended well."""
        return self._end.value

    def _await_launch(self, timeout: float | None) -> None:
        """Waits until the future has its value or its error."""
        if not self._end.is_pending:
            return
        if self._is_held_up():
            raise FutureNotReady(f"{self.name} is not ready: {self._HELD_UP}")
        own = self._DEFAULT_TIMEOUT_SECONDS if self._timeout_seconds is None else self._timeout_seconds
        seconds = own if timeout is None else timeout
        if not self._end.await_finish(seconds):
            raise CollectiveTimeout(f"{self.name} {self._MISSED} within {seconds:g} s")

    def _is_held_up(self) -> bool:
        """Whether nobody would complete it while the calling thread waits."""
        return self._end.is_completed_by_caller()

    def _raise_not_ready(self, what: str) -> None:
        raise FutureNotReady(f"{what} of {self.name} is not ready: {self._PENDING}")
