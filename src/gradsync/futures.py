"""Futures of collectives and of gradients, and Work, for which they wait.

A Work is what was begun: a collective on a GPU, a message to another rank, a step of a callback. What runs on the CPU
has ended when the backend's method returns; its Work is DONE. A future is a Work and a value. All gradients of a step
share one Work: a step of ten thousand gradients ends one object.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np

from gradsync.arguments import check_seconds
from gradsync.errors import (
    CollectiveTimeout,
    CommunicatorClosed,
    FutureNotReady,
    InvalidArgument,
    caller,
    describe,
)
from gradsync.machine import Latch

if TYPE_CHECKING:
    from typing import Self

_log = logging.getLogger("gradsync")


# -- Done-callbacks ---------------------------------------------------------------------------------------------------


class _ThisThread(threading.local):
    """How many done-callbacks the calling thread is in."""

    callbacks = 0


this_thread = _ThisThread()


def refuse_in_callback(label: str, what: str) -> None:
    """Raises InvalidArgument in a done-callback: the ranks would run the collective `what` in different orders.

    Args:
        label: this rank's name in errors, such as "rank 0/2".
        what: the collective.
    """
    if this_thread.callbacks:
        place = caller()
        raise InvalidArgument(
            f"{label}: {what} in a done-callback{'' if place is None else f', at {place}'}: done-callbacks must not "
            "call collectives, because ranks would run them in different orders; call the collective after flush() or "
            "result() has returned"
        )


def run_callback(function: Callable[[Any], None], future: CollectiveFuture) -> None:
    """Calls a done-callback; logs what it raises, except SystemExit and Ctrl-C."""
    this_thread.callbacks += 1
    try:
        function(future)
    except Exception:
        _log.exception("a done-callback of %s raised", future.name)
    finally:
        this_thread.callbacks -= 1


# -- What futures wait for --------------------------------------------------------------------------------------------


class Work:
    """What was begun and may not have ended. This class itself is for what has ended without an error."""

    #: Whether the work has ended without an error, so that nobody need wait.
    is_done: bool = True

    def done(self) -> bool:
        """Whether the work has ended or failed; never waits."""
        return True

    def has_ended(self) -> bool:
        """Whether the work is known to have ended or failed; unlike `done`, it never moves a message on."""
        return self.done()

    def order(self, name: str = "", stream: Any = None, timeout_seconds: float | None = None) -> None:
        """Waits until the work has ended; on a GPU until it was launched: a stream then waits for its end.

        Args:
            name: what the future is called in errors.
            stream: a CUDA stream; None means the current stream. Ignored on the CPU.
            timeout_seconds: how long the host waits; None means until the work's own deadline.

        Raises:
            CollectiveTimeout: the wait reached its deadline; the work goes on.
            FutureNotReady: the wait might never end: the caller is a done-callback, or has to end the work itself.
            PlanMismatch, RankFailed, ...: the work failed with this error.
        """

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Makes the host wait until the work has ended, also on a GPU. Raises the errors of `order`."""
        self.order(timeout_seconds=timeout_seconds)

    def failure(self) -> BaseException | None:
        """Returns the error of work that is done; None if it has succeeded."""
        try:
            self.wait()  # which returns or raises at once
        except Exception as error:
            return error
        return None

    def when_done(self, function: Callable[[], None]) -> None:
        """Calls function() when the work has ended: at once if it has, else in the thread that finds its end."""
        function()


DONE = Work()


class Failed(Work):
    """Work that has ended with an error."""

    is_done = False

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def order(self, name: str = "", stream: Any = None, timeout_seconds: float | None = None) -> None:
        raise again(self.error)

    def failure(self) -> BaseException:
        return self.error


# One lock for all that is pending: threads hold it for a few assignments, and a step may make hundreds of them.
_lock = threading.Lock()


class Pending(Work):
    """Work whose owner ends it with finish(): a step of a callback.

    Args:
        timeout_seconds: how long other threads wait for work that has not begun; None means no limit. Work that has
            begun has a deadline of its own.

    Attributes:
        has_begun: whether the work has begun, so that its own deadline applies.
    """

    def __init__(self, timeout_seconds: float | None = None) -> None:
        self.timeout_seconds = timeout_seconds
        self.has_begun = False
        self.is_done = False
        self._made_by = threading.get_ident()
        self._rest: Work = DONE  # what the GPU still has to do
        self._error: BaseException | None = None
        self._ended: Latch | None = None  # made by the first thread that waits
        self._callbacks: list[Callable[[], None]] | None = []  # None after finish()

    @property
    def is_pending(self) -> bool:
        """Whether finish() is still to come."""
        return self._callbacks is not None

    def finish(self, error: BaseException | None, rest: Work = DONE) -> None:
        """Ends the work, wakes the threads that wait, and runs the done-callbacks. A second call does nothing.

        Args:
            error: why it failed, or None.
            rest: what a GPU still has to do. The work is done when that is.
        """
        with _lock:
            callbacks = self._callbacks
            if callbacks is None:
                return
            self._error, self._rest, self._callbacks = error, rest, None
            self.is_done = error is None and rest.is_done
        if self._ended is not None:
            self._ended.set()
        leaving: BaseException | None = None
        for call in callbacks:
            try:
                rest.when_done(call)
            except BaseException as left:  # SystemExit or Ctrl-C must not skip the other callbacks
                leaving = leaving or left
        if leaving is not None:
            raise leaving

    def disown(self, error: BaseException) -> None:
        """Fails the work in a forked child, where nobody would end it; calls no callbacks."""
        if self._callbacks is not None:
            self._error, self._callbacks = error, None

    def done(self) -> bool:
        return self._callbacks is None and (self._error is not None or self._rest.done())

    def order(self, name: str = "", stream: Any = None, timeout_seconds: float | None = None) -> None:
        self._await_end(name, timeout_seconds)
        self._rest.order(name, stream)

    def wait(self, timeout_seconds: float | None = None) -> None:
        self._await_end("", timeout_seconds)
        self._rest.wait(timeout_seconds)

    def failure(self) -> BaseException | None:
        return self._rest.failure() if self._error is None else self._error

    def when_done(self, function: Callable[[], None]) -> None:
        with _lock:
            if self._callbacks is not None:
                self._callbacks.append(function)
                return
        self._rest.when_done(function)

    def _await_end(self, name: str, timeout_seconds: float | None) -> None:
        if self._callbacks is not None:
            refuse_wait_in_callback(name)
            if threading.get_ident() == self._made_by:
                raise FutureNotReady(
                    f"{name} is not ready: call flush(), or leave the `with callback.backward()` block, before you "
                    "read the future"
                )
            seconds = self.timeout_seconds if timeout_seconds is None else timeout_seconds
            ended = self._await(seconds)
            if not ended and timeout_seconds is None and self.has_begun:
                ended = self._await(None)  # to get the work's own error, which names the missing ranks
            if not ended:
                raise CollectiveTimeout(
                    f"{name} was not reduced within {seconds:g} s: it waits for the flush() of the thread that hands "
                    "over gradients"
                )
        if self._error is not None:
            raise again(self._error)

    def _await(self, seconds: float | None) -> bool:
        with _lock:
            if self._callbacks is None:
                return True
            self._ended = ended = self._ended or Latch()
        return ended.wait(seconds)


def refuse_wait_in_callback(name: str) -> None:
    """Raises FutureNotReady in a done-callback, which work may wait for that it waits for."""
    if this_thread.callbacks:
        raise FutureNotReady(
            f"{name} is not ready: a done-callback cannot wait for a collective, because the collective may end only "
            "after the callback has returned; wait outside of done-callbacks"
        )


def again(error: BaseException) -> BaseException:
    """Returns a copy of an error: raising the same object again would add frames to its traceback."""
    try:
        fresh = copy.copy(error)
    except Exception:  # an error of another library may not be copyable
        return error
    if type(fresh) is not type(error):
        return error
    fresh.__cause__, fresh.__context__ = error.__cause__, error.__context__
    fresh.__suppress_context__ = error.__suppress_context__
    return fresh.with_traceback(error.__traceback__)


def _begin_anew_after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # a thread of the parent may have held the old lock
    this_thread.callbacks = 0


os.register_at_fork(after_in_child=_begin_anew_after_fork)


# -- Futures ----------------------------------------------------------------------------------------------------------


class CollectiveFuture:
    """The future of a collective that `communicator.asynchronous` has begun.

    Until it is done, the collective's arrays belong to gradsync: do not write to them, and do not read those for
    results. On a GPU result() makes the current stream wait, not the host. There is no cancel(): other ranks take part.

    Args:
        name: the collective's name in errors.
        work: what was begun.
        value: the result.
    """

    __slots__ = ("_name", "_value", "_work")

    def __init__(self, name: str, work: Work, value: Any) -> None:
        self._name = name
        self._work = work
        self._value = value

    @property
    def name(self) -> str:
        """The collective's name in errors."""
        return self._name

    def done(self) -> bool:
        """Whether the collective has ended or failed; never blocks. A message that has not ended moves on."""
        return self._work.done()

    def result(self, timeout: float | None = None) -> Any:
        """Returns the result, and waits for it if need be.

        On the CPU a collective has run before you get its future. A message (send, recv, exchange) has not: result()
        moves it on, with all others of the communicator, until it has ended. On a GPU the host waits for the launch,
        and for results in host memory; the current stream waits for the end.

        Args:
            timeout: how many seconds the host waits; None means until the collective's own deadline.

        Raises:
            FutureNotReady: the wait might never end: the caller is a done-callback, or the only thread that can flush
                the gradient's step.
            CollectiveTimeout: the wait reached its deadline; the collective goes on.
            InvalidArgument: the timeout is not a number of seconds.
            PlanMismatch, RankFailed, ...: the collective failed with this error.
        """
        self._order(None, timeout)
        return self._value

    def wait(self, stream: Any = None, *, timeout: float | None = None) -> None:
        """Waits as result() does, and raises its errors, but returns nothing.

        Args:
            stream: the CUDA stream that waits; None means the current stream. Ignored on the CPU.
            timeout: see result().

        Raises:
            FutureNotReady, CollectiveTimeout, InvalidArgument, PlanMismatch, RankFailed, ...: see result().
        """
        self._order(stream, timeout)

    def exception(self) -> BaseException | None:
        """Returns the collective's error, or None if it succeeded; raises FutureNotReady before the collective ends."""
        if not self.done():
            raise self._not_ready("exception()")
        return self._work.failure()

    def add_done_callback(self, function: Callable[[Self], None]) -> None:
        """Calls function(self) when the future is done.

        A future that is done calls it at once. Otherwise the thread that finds the end does: on the CPU one that waits
        in a call of this communicator, on a GPU one of gradsync's. What the function raises is logged, except
        SystemExit and KeyboardInterrupt. It must not call collectives, hand over gradients, or wait for a future that
        is not done: these raise InvalidArgument or FutureNotReady there.

        Args:
            function: takes this future.

        Raises:
            InvalidArgument: `function` is not callable.
        """
        if not callable(function):
            given = type(function).__name__
            raise InvalidArgument(
                f"{self.name}: add_done_callback needs a function that takes the future as its argument, got {given}"
            )
        self._work.when_done(partial(run_callback, function, self))

    def __repr__(self) -> str:
        if not self._work.has_ended():  # whoever prints a future changes nothing
            state = "pending"
        else:
            error = self._work.failure()
            state = "ready" if error is None else f"failed with {type(error).__name__}"
        return f"<{type(self).__name__} of {self.name}: {state}>"

    def __reduce__(self) -> NoReturn:
        # In another process nobody would end it.
        raise TypeError(f"the future of {self.name} cannot be pickled or copied: pass its .result()")

    def _refuse_arithmetic(self, other: object = None) -> Any:
        if hasattr(other, "__array__"):  # which may make an array of a gradient's future, as np.asarray() does
            return NotImplemented
        raise TypeError(f"{self.name} is a future, and no array: its .result() is one")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = __rmatmul__ = _refuse_arithmetic
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = __neg__ = _refuse_arithmetic

    def _order(self, stream: Any, timeout: float | None) -> None:
        if timeout is not None:  # checked even if no wait is needed, so that a wrong value always raises
            check_seconds(f"the wait for {self.name}", "timeout", timeout)
        self._work.order(self.name, stream, timeout)

    _PENDING: ClassVar[str] = "the collective has not ended yet"

    def _not_ready(self, what: str) -> FutureNotReady:
        return FutureNotReady(f"{what} of {self.name} is not ready: {self._PENDING}")


class LoggedFuture(CollectiveFuture):
    """The future of a collective that has failed, or of a message, which may. An error that nobody reads is logged."""

    __slots__ = ("_was_read",)

    def __init__(self, name: str, work: Work, value: Any = None) -> None:
        super().__init__(name, work, value)
        self._was_read = False

    def _order(self, stream: Any, timeout: float | None) -> None:
        try:
            super()._order(stream, timeout)
        finally:
            self._was_read = self.done()

    def exception(self) -> BaseException | None:
        error = super().exception()
        self._was_read = True
        return error

    def __del__(self) -> None:
        if not self._was_read and not sys.is_finalizing():
            self._work.when_done(partial(_log_unread, self.name, self._work))


def _log_unread(name: str, work: Work) -> None:
    error = work.failure()
    if error is not None and not isinstance(error, CommunicatorClosed):  # what ended the communicator has been reported
        _log.error("%s failed, and the program has not read its future: %s", name, describe(error))


class GradientFuture(CollectiveFuture):
    """The future of a gradient, which AllreduceCallback returns: the reduced gradient, once the step is flushed.

    The result is the array that you handed over, with the reduced values; a new one, if yours is read-only, its
    elements share memory, or it is a number. With gradient_as_bucket_view it is a view of the bucket.

    It is done when the flush has ended. Before, result() and wait() raise FutureNotReady in the thread that hands over
    gradients, as only that can flush; other threads wait. On a GPU result() makes the current stream wait, not the
    host. If the step failed, result() and wait() raise its error, and exception() returns it: GradientCancelled if the
    backward pass raised, or the process group ended, before the flush.
    """

    __slots__ = ()

    _PENDING: ClassVar[str] = "its step has not been flushed yet"

    @property
    def name(self) -> str:
        """The gradient's name in errors."""
        return f"the gradient of {self._name}"

    def result(self, timeout: float | None = None) -> Any:
        """See CollectiveFuture.result(); returns the reduced gradient."""
        if timeout is not None or not self._work.is_done:
            self._order(None, timeout)
        return self._value

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the reduced gradient; raises FutureNotReady before the flush."""
        return tuple(self._ready_value("shape").shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the reduced gradient; raises as `shape` does."""
        return self._ready_value("dtype").dtype

    @property
    def device(self) -> Any:
        """The device of the reduced gradient; raises as `shape` does."""
        return getattr(self._ready_value("device"), "device", "cpu")

    def numpy(self) -> Any:
        """Returns the reduced gradient in host memory.

        Raises:
            FutureNotReady: the gradient's step is not flushed yet, or a done-callback would have to wait.
            PlanMismatch, RankFailed, ...: the reduction failed with this error.
        """
        value = self._ready_value("numpy()")
        if not self._work.done():
            refuse_wait_in_callback(self.name)
        self._work.order(self.name)
        in_host_memory = value.get() if hasattr(value, "get") else value
        self._work.wait()  # raises if the reduction was aborted
        return in_host_memory

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """The reduced gradient in host memory, for np.asarray(future); see numpy()."""
        return np.array(self.numpy(), dtype, copy=copy)

    def _ready_value(self, what: str) -> Any:
        if getattr(self._work, "is_pending", False):
            raise self._not_ready(what)
        if not self._work.is_done:
            self._work.order(self.name)
        return self._value
