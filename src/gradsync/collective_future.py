"""The promise of one collective's result: what `communicator.asynchronous` gives, and what a gradient's future is."""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from gradsync.completion import Completion
from gradsync.errors import CollectiveTimeout, FutureNotReady, GradsyncError

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger("gradsync")
_lock = threading.Lock()  # one for all futures: held for a few assignments, and a training step makes hundreds


class Untold(Protocol):
    """A failure that is logged unless somebody is told of it."""

    def forget(self) -> None:
        """Somebody has been told."""


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

    __slots__ = (
        "_callbacks",
        "_completing_thread",
        "_completion",
        "_error",
        "_event",
        "_name",
        "_timeout_seconds",
        "_untold",
        "_value",
    )

    _DEFAULT_TIMEOUT_SECONDS: ClassVar[float | None] = None
    # What error messages say after the name.
    _HELD_UP: ClassVar[str] = "it comes after the done-callback that asks for it; return from that first"
    _PENDING: ClassVar[str] = "it has not ended yet"
    _MISSED: ClassVar[str] = "did not end"

    def __init__(self, name: str, timeout_seconds: float | None = None, completing_thread: int | None = None) -> None:
        self._name = name
        self._timeout_seconds = timeout_seconds
        self._completing_thread = completing_thread or threading.get_ident()
        self._value: Any = None
        self._error: BaseException | None = None
        self._untold: Untold | None = None
        self._completion: Completion | None = None  # of a collective that runs beside the host
        self._event: threading.Event | None = None
        self._callbacks: list[Callable[[Any], None]] | None = []  # None once resolved

    @property
    def name(self) -> str:
        """How error messages call it."""
        return self._name

    def done(self) -> bool:
        """Whether it has ended or failed; never blocks."""
        return self._callbacks is None and (self._completion is None or self._completion.done())

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
            PlanMismatch, RankFailed, ...: whatever ended the collective.
        """
        self._await_launch(timeout)
        self._raise_error()
        if self._completion is not None:
            self._completion.order()
        return self._value

    def wait(self, stream: Any = None, *, timeout: float | None = None) -> None:
        """Waits, and raises, as result() does.

        Args:
            stream: CUDA stream that shall wait; None is the current one. Unused on the CPU.
            timeout: as for result().

        Raises:
            FutureNotReady, CollectiveTimeout, PlanMismatch, RankFailed, ...: as for result().
        """
        self._await_launch(timeout)
        self._raise_error()
        if self._completion is not None:
            self._completion.order(stream)

    def exception(self) -> BaseException | None:
        """Returns what ended the collective, or None when it succeeded; an error before it is done."""
        if not self.done():
            self._raise_not_ready("exception()")
        if self._untold is not None:
            self._untold.forget()
        return self._failure()

    def add_done_callback(self, function: Callable[[Self], None]) -> None:
        """Calls function(self) once done; at once, in the calling thread, when it is done already.

        Else it runs in the thread that completes the future: on the CPU the one that ran the collective, on a GPU one
        of the communicator's. An exception in it is logged, not raised. What of collectives in it: see
        communicator.asynchronous.
        """
        with _lock:
            if self._callbacks is not None:
                self._callbacks.append(function)
                return
        self._run_when_done(function)

    def __repr__(self) -> str:
        if not self.done():
            state = "pending"
        else:
            error = self._failure()
            state = "ready" if error is None else f"failed with {type(error).__name__}"
        return f"<{type(self).__name__} of {self._name}: {state}>"

    # -- For those who make it -----------------------------------------------------------------------------------

    def resolve(self, value: Any, completion: Completion | None = None) -> None:
        """Gives the future its value: ready now, or at the end of the collective that was launched."""
        self._finish(value, None, completion)

    def fail(self, error: BaseException, untold: Untold | None = None) -> None:
        """Makes result() raise `error`; `untold` shall log it when nobody asks."""
        self._finish(None, error, None, untold)

    def disown(self, error: BaseException) -> None:
        """Makes result() raise `error` in the child of a fork, where nobody completes it, and calls nobody."""
        self._event = None  # the parent's threads that held it are not here
        if self._callbacks is not None:
            self._error = error
            self._callbacks = None

    def _finish(
        self,
        value: Any,
        error: BaseException | None,
        completion: Completion | None,
        untold: Untold | None = None,
    ) -> None:
        with _lock:
            callbacks, event = self._callbacks, self._event
            if callbacks is None:
                if untold is not None:
                    untold.forget()
                return
            self._value, self._error, self._completion, self._untold = value, error, completion, untold
            self._callbacks = None
        if event is not None:
            event.set()
        leaving: BaseException | None = None
        for function in callbacks:
            try:
                self._run_when_done(function)
            except BaseException as left:  # SystemExit, Ctrl-C: the others have a right to be called
                leaving = leaving or left
        if leaving is not None:
            raise leaving

    def _failure(self) -> BaseException | None:
        """Returns what a collective that is over has ended with."""
        if self._error is None and self._completion is not None:
            try:
                self._completion.wait()  # over already: returns or raises at once
            except GradsyncError as error:
                return error
        return self._error

    def _raise_error(self) -> None:
        if self._error is not None:
            if self._untold is not None:
                self._untold.forget()
            raise _again(self._error)

    def _await_launch(self, timeout: float | None) -> None:
        """Waits until the future has its value or its error."""
        if self._callbacks is None:
            return
        if self._is_held_up():
            raise FutureNotReady(f"{self._name} is not ready: {self._HELD_UP}")
        own = self._DEFAULT_TIMEOUT_SECONDS if self._timeout_seconds is None else self._timeout_seconds
        seconds = own if timeout is None else timeout
        if not self._waitable().wait(seconds):
            raise CollectiveTimeout(f"{self._name} {self._MISSED} within {seconds:g} s")

    def _is_held_up(self) -> bool:
        """Whether nobody would complete it while the calling thread waits."""
        return threading.get_ident() == self._completing_thread

    def _waitable(self) -> threading.Event:
        """Makes the event on first need: most futures are never waited for from another thread."""
        with _lock:
            if self._event is None:
                self._event = threading.Event()
            if self._callbacks is None:
                self._event.set()
            return self._event

    def _run_when_done(self, function: Callable[[Any], None]) -> None:
        if self._completion is None:
            self._run(function)
        else:
            self._completion.when_done(lambda _error: self._run(function))

    def _run(self, function: Callable[[Any], None]) -> None:
        try:
            function(self)
        except Exception:
            _log.exception("a done-callback of %s raised", self._name)

    def _raise_not_ready(self, what: str) -> None:
        raise FutureNotReady(f"{what} of {self._name} is not ready: {self._PENDING}")


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


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()  # the parent's thread that may hold it is not in the child


os.register_at_fork(after_in_child=_renew_lock)
