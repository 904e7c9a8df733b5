"""The promise of one reduced gradient."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

from gradsync.errors import GradsyncError
from gradsync.futures import CollectiveEnd, CollectiveFuture, pending, raise_refused


class GradientFuture(CollectiveFuture):
    """Resolves to the reduced gradient when its bucket has been reduced.

    Until then the gradient belongs to gradsync: do not write to it. Made by AllreduceCallback. On a GPU it has its
    value as soon as the bucket is launched; result() then orders the current stream, not the host, after the reduction.
    It gives the array that was handed to the callback, with the reduced values in it (a fresh array where that one
    could not be written to; a view of the bucket where gradients live in buckets), and raises FutureNotReady before the
    launch in the thread that hands over gradients: only that one can launch the bucket. GradientCancelled means that
    the backward pass ended with an exception.

    Args:
        name: of the gradient, as ranks know it.
        end: of the bucket's reduction.
        value: what the future gives then; None: what resolve() gives it.
    """

    __slots__ = ("_given",)

    _DEFAULT_TIMEOUT_SECONDS: ClassVar[float | None] = 300.0
    _HELD_UP: ClassVar[str] = (
        "its bucket is not full yet; call flush(), or leave the `with callback.backward()` block, before asking for it"
    )
    _PENDING: ClassVar[str] = "its bucket has not been reduced yet"
    _MISSED: ClassVar[str] = "was not reduced"

    # Ten thousand times a step: it only takes down what it is given, and makes its name when somebody asks for it.
    def __init__(self, name: str, end: CollectiveEnd, value: Any = None) -> None:
        self._name = name
        self._timeout_seconds = None
        self._end = end
        self._given = value

    @property
    def name(self) -> str:
        """How error messages call it."""
        return f"the gradient of {self._name}"

    def wait(self, stream: Any = None, *, timeout: float | None = None) -> None:
        """Waits as result() does, without raising what the reduction raised: the step's flush() has.

        Args:
            stream: CUDA stream that shall wait; None is the current one. Unused on the CPU.
            timeout: as for result().

        Raises:
            FutureNotReady, CollectiveTimeout, InvalidArgument: as for result().
        """
        if pending:
            raise_refused()
        self._await_launch(timeout)
        if self._end.completion is not None:
            with contextlib.suppress(GradsyncError):
                self._end.completion.order(stream)

    def result(self, timeout: float | None = None) -> Any:
        """See CollectiveFuture; on the CPU, once the bucket is reduced, this costs one look."""
        if pending or not self._end.has_result:
            super().wait(timeout=timeout)
        return self._end.value if self._given is None else self._given

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
        """Returns the reduced gradient in host memory; an error before it is ready, and where the reduction failed."""
        value = self._ready_value("numpy()")
        completion = self._end.completion
        if completion is not None:
            completion.order()
        in_host_memory = value.get() if hasattr(value, "get") else value
        if completion is not None:
            completion.wait()  # an aborted reduction ends too, and leaves no result
        return in_host_memory

    def _value(self) -> Any:
        return self._end.value if self._given is None else self._given

    def _ready_value(self, what: str) -> Any:
        if self._end.is_pending:
            self._raise_not_ready(what)
        self._end.raise_error()
        return self._value()
