"""The promise of one reduced gradient."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

from gradsync.collective_future import CollectiveFuture
from gradsync.errors import GradsyncError


class GradientFuture(CollectiveFuture):
    """Resolves to the reduced gradient when its bucket has been reduced.

    Until then the gradient belongs to gradsync: do not write to it. Made by AllreduceCallback. On a GPU it has its
    value as soon as the bucket is launched; result() then orders the current stream, not the host, after the reduction.
    It gives the array that was handed to the callback, with the reduced values in it (a fresh array where that one
    could not be written to), and raises FutureNotReady before the launch in the thread that hands over gradients: only
    that one can launch the bucket. GradientCancelled means that the backward pass ended with an exception.

    Args:
        name: how error messages call the gradient.
        timeout_seconds: how long result() waits, in a thread other than the one that hands over gradients, when it is
            not told; None is 300 s.
    """

    __slots__ = ()

    _DEFAULT_TIMEOUT_SECONDS: ClassVar[float | None] = 300.0
    _HELD_UP: ClassVar[str] = (
        "its bucket is not full yet; call flush(), or leave the `with callback.backward()` block, before asking for it"
    )
    _PENDING: ClassVar[str] = "its bucket has not been reduced yet"
    _MISSED: ClassVar[str] = "was not reduced"

    def wait(self, stream: Any = None, *, timeout: float | None = None) -> None:
        """Waits as result() does, without raising what the reduction raised: the step's flush() has.

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

    def _ready_value(self, what: str) -> Any:
        if self._callbacks is not None:
            self._raise_not_ready(what)
        self._raise_error()
        return self._value
