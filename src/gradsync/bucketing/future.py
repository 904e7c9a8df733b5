"""The promise of one reduced gradient."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

from gradsync.completion import Completion
from gradsync.errors import CollectiveTimeout, FutureNotReady, GradsyncError

_log = logging.getLogger("gradsync")
_lock = threading.Lock()  # one for all futures: held for a few assignments, and a training step makes hundreds


class GradientFuture:
    """Resolves to the reduced gradient when its bucket has been reduced.

    Until then the gradient belongs to gradsync: do not write to it. Made by AllreduceCallback. On a GPU it has its
    value as soon as the bucket is launched; result() then orders the current stream, not the host, after the reduction.

    Args:
        name: how error messages call the gradient.
        timeout_seconds: how long result() waits, in a thread other than the one that hands over gradients, when it is
            not told.
    """

    __slots__ = (
        "_callbacks",
        "_completion",
        "_error",
        "_event",
        "_name",
        "_owner_thread",
        "_timeout_seconds",
        "_value",
    )

    def __init__(self, name: str, timeout_seconds: float = 300.0) -> None:
        self._name = name
        self._timeout_seconds = timeout_seconds
        self._value: Any = None
        self._error: BaseException | None = None
        self._completion: Completion | None = None  # of a reduction that runs beside the host
        self._event: threading.Event | None = None
        self._callbacks: list[Callable[[GradientFuture], None]] | None = []  # None once resolved
        # Only this thread can launch the bucket, so it must not wait for itself.
        self._owner_thread = threading.get_ident()

    @property
    def name(self) -> str:
        """How error messages call the gradient."""
        return self._name

    def done(self) -> bool:
        """Whether the gradient is reduced, failed or cancelled; never blocks."""
        return self._callbacks is None and (self._completion is None or self._completion.done())

    def result(self, timeout: float | None = None) -> Any:
        """Returns the reduced gradient.

        On a GPU the current stream waits for the reduction, the host does not: work queued afterwards sees the result.
        A gradient that was handed over in host memory is waited for.

        Args:
            timeout: seconds that the host waits for the bucket's launch; None is 300 s.

        Returns:
            The array that was handed to the callback, with the reduced values in it (a fresh array where that one
            could not be written to).

        Raises:
            FutureNotReady: the bucket is not launched, and only the calling thread can launch it.
            CollectiveTimeout: the wait reached its deadline.
            GradientCancelled: the backward pass ended with an exception.
            PlanMismatch, RankFailed, ...: whatever ended the collective.
        """
        self._await_launch(timeout)
        if self._error is not None:
            raise self._error
        if self._completion is not None:
            self._completion.order()
        return self._value

    def wait(self, stream: Any = None, *, timeout: float | None = None) -> None:
        """Waits for the reduction as result() does, without raising what the collective raised.

        Args:
            stream: CUDA stream that shall wait; None is the current one. Unused on the CPU.
            timeout: as for result().

        Raises:
            FutureNotReady, CollectiveTimeout: as for result().
        """
        self._await_launch(timeout)
        if self._completion is not None:
            with contextlib.suppress(GradsyncError):
                self._completion.order(stream)

    def exception(self) -> BaseException | None:
        """Returns what ended the reduction, or None when it succeeded; an error before it is done."""
        if not self.done():
            self._raise_not_ready("exception()")
        if self._error is None and self._completion is not None:
            try:
                self._completion.wait()  # over already: returns or raises at once
            except GradsyncError as error:
                return error
        return self._error

    def add_done_callback(self, function: Callable[[GradientFuture], None]) -> None:
        """Calls function(self) once done; at once when it is done already.

        On the CPU it runs in the thread that reduces the bucket, on a GPU in one of the communicator's. An exception
        in it is logged, not raised.
        """
        with _lock:
            if self._callbacks is not None:
                self._callbacks.append(function)
                return
        self._run_when_done(function)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the reduced gradient; an error before it is ready."""
        return tuple(self._ready_value("shape").shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the reduced gradient; an error before it is ready."""
        return self._ready_value("dtype").dtype

    @property
    def device(self) -> Any:
        """Device of the reduced gradient; an error before it is ready."""
        return getattr(self._ready_value("device"), "device", "cpu")

    def numpy(self) -> Any:
        """Returns the reduced gradient in host memory; an error before it is ready."""
        value = self._ready_value("numpy()")
        if self._completion is not None:
            self._completion.order()
        return value.get() if hasattr(value, "get") else value

    def __repr__(self) -> str:
        state = "pending" if not self.done() else "ready" if self.exception() is None else "failed"
        return f"<GradientFuture of {self._name}: {state}>"

    # -- For the callback ----------------------------------------------------------------------------------------

    def resolve(self, value: Any, completion: Completion | None = None) -> None:
        """Gives the future its value: ready now, or at the end of the reduction that was launched."""
        self._finish(value, None, completion)

    def fail(self, error: BaseException) -> None:
        """Makes result() raise `error`."""
        self._finish(None, error, None)

    def _finish(self, value: Any, error: BaseException | None, completion: Completion | None) -> None:
        with _lock:
            callbacks, event = self._callbacks, self._event
            if callbacks is None:
                return
            self._value, self._error, self._completion = value, error, completion
            self._callbacks = None
        if event is not None:
            event.set()
        for function in callbacks:
            self._run_when_done(function)

    def _await_launch(self, timeout: float | None) -> None:
        """Waits until the future has its value or its error."""
        if self._callbacks is None:
            return
        if threading.get_ident() == self._owner_thread:
            raise FutureNotReady(
                f"{self._name} is not ready: its bucket is not full yet; call flush(), or leave the "
                "`with callback.backward()` block, before asking for it"
            )
        seconds = self._timeout_seconds if timeout is None else timeout
        if not self._waitable().wait(seconds):
            raise CollectiveTimeout(f"{self._name} was not reduced within {seconds:g} s")

    def _waitable(self) -> threading.Event:
        """Makes the event on first need: most futures are never waited for from another thread."""
        with _lock:
            if self._event is None:
                self._event = threading.Event()
            if self._callbacks is None:
                self._event.set()
            return self._event

    def _run_when_done(self, function: Callable[[GradientFuture], None]) -> None:
        if self._completion is None:
            self._run(function)
        else:
            self._completion.when_done(lambda _error: self._run(function))

    def _run(self, function: Callable[[GradientFuture], None]) -> None:
        try:
            function(self)
        except Exception:
            _log.exception("a done-callback of %s raised", self._name)

    def _raise_not_ready(self, what: str) -> None:
        raise FutureNotReady(f"{what} of {self._name} is not ready: its bucket has not been reduced yet")

    def _ready_value(self, what: str) -> Any:
        if self._callbacks is not None:
            self._raise_not_ready(what)
        if self._error is not None:
            raise self._error
        return self._value
