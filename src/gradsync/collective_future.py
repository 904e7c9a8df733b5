"""The promise of one collective's result: what `communicator.asynchronous` gives, and what a gradient's future is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from gradsync.collective_end import CollectiveEnd, Untold, pending, raise_refused
from gradsync.completion import Completion
from gradsync.errors import CollectiveTimeout, FutureNotReady

if TYPE_CHECKING:
    from typing_extensions import Self


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
