"""The promise of one reduced gradient."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from gradsync.errors import CollectiveTimeout, FutureNotReady

_log = logging.getLogger("gradsync")


class GradientFuture:
    """Resolves to the reduced gradient when its bucket has been reduced.

    Until then the gradient belongs to gradsync: do not write to it. Made by AllreduceCallback.

    Args:
        name: how error messages call the gradient.
        timeout_seconds: how long result() waits, in a thread other than the one that hands over gradients, when it is
            not told.
    """

    __slots__ = (
        "_callbacks",
        "_error",
        "_event",
        "_lock",
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
        self._event: threading.Event | None = None
        self._callbacks: list[Callable[[GradientFuture], None]] | None = []  # None once resolved
        self._lock = threading.Lock()
        # Only this thread can launch the bucket, so it must not wait for itself.
        self._owner_thread = threading.get_ident()

    @property
    def name(self) -> str:
        """How error messages call the gradient."""
        return self._name

    def done(self) -> bool:
        """Whether the gradient is reduced, failed or cancelled; never blocks."""
        return self._callbacks is None

    def result(self, timeout: float | None = None) -> Any:
        """Returns the reduced gradient.

        Args:
            timeout: seconds to wait for it; None is 300 s.

        Returns:
            The array that was handed to the callback, with the reduced values in it (a fresh array where that one
            could not be written to).

        Raises:
            FutureNotReady: the bucket is not launched, and only the calling thread can launch it.
            CollectiveTimeout: the wait reached its deadline.
            GradientCancelled: the backward pass ended with an exception.
            PlanMismatch, RankFailed, ...: whatever ended the collective.
        """
        self.wait(timeout=timeout)
        if self._error is not None:
            raise self._error
        return self._value

    def wait(self, stream: Any = None, *, timeout: float | None = None) -> None:
        """Waits until done(), without raising what the collective raised.

        Args:
            stream: CUDA stream that shall wait in place of the host; unused on the CPU.
            timeout: as for result().

        Raises:
            FutureNotReady, CollectiveTimeout: as for result().
        """
        del stream
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

    def exception(self) -> BaseException | None:
        """Returns what ended the reduction, or None when it succeeded; an error before it is done."""
        self._check_ready("exception()")
        return self._error

    def add_done_callback(self, function: Callable[[GradientFuture], None]) -> None:
        """Calls function(self) once done; at once when it is done already.

        On the CPU it runs in the thread that reduces the bucket. An exception in it is logged, not raised.
        """
        with self._lock:
            if self._callbacks is not None:
                self._callbacks.append(function)
                return
        self._run(function)

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
        return value.get() if hasattr(value, "get") else value

    def __repr__(self) -> str:
        state = "pending" if not self.done() else "failed" if self._error is not None else "ready"
        return f"<GradientFuture of {self._name}: {state}>"

    # -- For the callback ----------------------------------------------------------------------------------------

    def resolve(self, value: Any) -> None:
        """Makes the future ready."""
        self._finish(value, None)

    def fail(self, error: BaseException) -> None:
        """Makes result() raise `error`."""
        self._finish(None, error)

    def _finish(self, value: Any, error: BaseException | None) -> None:
        with self._lock:
            callbacks, event = self._callbacks, self._event
            if callbacks is None:
                return
            self._value, self._error = value, error
            self._callbacks = None
        if event is not None:
            event.set()
        for function in callbacks:
            self._run(function)

    def _waitable(self) -> threading.Event:
        """Makes the event on first need: most futures are never waited for from another thread."""
        with self._lock:
            if self._event is None:
                self._event = threading.Event()
            if self._callbacks is None:
                self._event.set()
            return self._event

    def _run(self, function: Callable[[GradientFuture], None]) -> None:
        try:
            function(self)
        except Exception:
            _log.exception("a done-callback of %s raised", self._name)

    def _check_ready(self, what: str) -> None:
        if not self.done():
            raise FutureNotReady(f"{what} of {self._name} is not ready: its bucket has not been reduced yet")

    def _ready_value(self, what: str) -> Any:
        self._check_ready(what)
        if self._error is not None:
            raise self._error
        return self._value
