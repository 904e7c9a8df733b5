"""Futures of collectives and of gradients, and CollectiveEnd, the object for which these futures wait.

A CollectiveEnd belongs to one collective, or to one step of a callback, and gets its result or error. An asynchronous
collective has one future. Each gradient of a step has its own future, but they share the step's CollectiveEnd, so that
gradsync finishes one object for a step of ten thousand gradients, not ten thousand objects. A Completion belongs to
what was launched on a GPU: threads and streams can wait for it until the GPU has run it. What runs on the CPU has no
Completion, because it has ended when the call of the backend returns.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol

import numpy as np

from gradsync.arguments import check_seconds
from gradsync.errors import CollectiveTimeout, FutureNotReady, GradsyncError, InvalidArgument, caller
from gradsync.machine import Latch

if TYPE_CHECKING:
    from typing import Self


class Completion(Protocol):
    """Lets threads and streams wait for one collective on a GPU; order() and wait() raise the collective's error."""

    @property
    def has_host_results(self) -> bool:
        """Whether the collective has results in host memory, for which order() waits."""

    def done(self) -> bool:
        """Whether the collective has ended or failed; never waits for the device."""

    def order(self, stream: Any = None) -> None:
        """Makes a stream wait for the collective. The host waits only for results in host memory.

        Args:
            stream: a CUDA stream; None means the current stream.
        """

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Blocks the host until the collective has ended.

        Args:
            timeout_seconds: the deadline of this wait only; None means the collective's own deadline.

        Raises:
            CollectiveTimeout: the wait reached its deadline.
            NcclError, RankFailed, ...: the collective failed with this error.
        """

    def when_done(self, function: Callable[[], None]) -> None:
        """Calls function() on a gradsync thread when the collective ends, or immediately if it has ended already."""


_log = logging.getLogger("gradsync")

#: The reasons why a collective cannot begin immediately, for all threads. The dict contains the submitted jobs that
#: have not ended, in order; the running done-callbacks; and the error of a done-callback that called a collective:
#: gradsync will raise this error again. `pending` is a variable, because every collective checks whether the dict is
#: empty, and a function call would take too long.
pending: dict[object, Any] = {}
_REFUSED = "error of a done-callback"
# One lock for all CollectiveEnds: threads hold it only for a few assignments, and a step may make hundreds of ends.
_lock = threading.Lock()


class _ThreadState(threading.local):
    """The data that gradsync keeps for each thread.

    Attributes:
        is_in_callback: whether the thread is running a done-callback.
    """

    is_in_callback = False


_thread_state = _ThreadState()


def check_may_call(label: str, what: str) -> None:
    """Raises an error if a done-callback calls a collective, because ranks would run collectives in different orders.

    Call this function only if `pending` is not empty.

    Args:
        label: the name of this rank in errors, such as "rank 0/2".
        what: the collective's name.

    Raises:
        InvalidArgument: the calling thread is running a done-callback; or an earlier done-callback called a collective,
            and this function now raises the error of that call again.
    """
    if _thread_state.is_in_callback:
        place = caller()
        error = InvalidArgument(
            f"{label}: {what} in a done-callback{'' if place is None else f', at {place}'}: done-callbacks must not "
            "call collectives, because ranks would run them in different orders; call the collective after flush() or "
            "result() has returned"
        )
        pending.setdefault(_REFUSED, error)
        raise error
    raise_refused()


def is_in_callback() -> bool:
    """Returns whether the calling thread is running a done-callback."""
    return _thread_state.is_in_callback


def raise_refused() -> None:
    """Raises again the error of a done-callback that called a collective: only the done-callback got it before.

    A second call does not raise the error again, and a call within a done-callback raises nothing.

    Raises:
        InvalidArgument: a done-callback called a collective.
    """
    if not _thread_state.is_in_callback:
        error = pending.pop(_REFUSED, None)
        if error is not None:
            raise _again(error).with_traceback(None) from error


class LogEntry(Protocol):
    """The log entry of an error, which gradsync writes only if the program does not get the error from a future."""

    def forget(self) -> None:
        """Drops the log entry, because the program has received the error from a future."""


class CollectiveEnd:
    """The object for which the futures of a collective wait; it holds the collective's result or error.

    Args:
        timeout_seconds: how long a future waits for a collective that has not begun, if the program passes no timeout;
            None means no limit. A collective that has begun has its own deadline.

    Attributes:
        timeout_seconds: see Args.
        value: the collective's result.
        completion: the Completion of a collective that was launched on a GPU; otherwise None.
        has_result: whether the collective has succeeded without a Completion, so that a future need not wait.
        has_begun: whether the collective, or the flush of the step, has begun, so that its own deadline applies.
    """

    __slots__ = (
        "_callbacks",
        "_error",
        "_launched",
        "_log_entry",
        "_made_by",
        "completion",
        "has_begun",
        "has_result",
        "timeout_seconds",
        "value",
    )

    def __init__(self, timeout_seconds: float | None = None) -> None:
        self.timeout_seconds = timeout_seconds
        self._made_by = threading.get_ident()
        self.value: Any = None
        self.completion: Completion | None = None
        self.has_result = False
        self.has_begun = False
        self._error: BaseException | None = None
        self._log_entry: LogEntry | None = None
        self._launched: Latch | None = None  # made by the first thread that waits for the launch
        self._callbacks: list[Callable[[], None]] | None = []  # None once the collective is launched or has failed

    @property
    def is_pending(self) -> bool:
        """Whether the collective has neither been launched nor failed."""
        return self._callbacks is not None

    def is_over(self) -> bool:
        """Whether the collective has ended or failed; never blocks."""
        return self._callbacks is None and (self.completion is None or self.completion.done())

    def is_of_caller(self) -> bool:
        """Returns whether the calling thread made this CollectiveEnd; only that thread can flush its step."""
        return threading.get_ident() == self._made_by

    def await_launch(self, seconds: float | None) -> bool:
        """Waits until the collective is launched or has failed; returns False if the wait exceeds `seconds`."""
        with _lock:
            if self._callbacks is None:
                return True
            self._launched = launched = self._launched or Latch()
        return launched.wait(seconds)

    def add_callback(self, function: Callable[[Any], None], future: Any) -> None:
        """Calls function(future) when the collective is over, or immediately if the collective is over already."""
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
        log_entry: LogEntry | None = None,
    ) -> None:
        """Stores the collective's result, error or Completion, wakes the waiting threads, and runs the done-callbacks.

        The done-callbacks of a Completion run when the GPU has run the collective. A later call of finish() only drops
        its log entry.

        Args:
            value: the collective's result.
            error: the collective's error, or None.
            completion: the Completion of a collective that was launched on a GPU; otherwise None.
            log_entry: the log entry of the error, or None. Once the program reads the error from a future, gradsync
                drops this entry.
        """
        with _lock:
            callbacks = self._callbacks
            if callbacks is None:
                if log_entry is not None:
                    log_entry.forget()
                return
            self.value, self._error, self.completion, self._log_entry = value, error, completion, log_entry
            self._callbacks = None
            self.has_result = error is None and completion is None
        if self._launched is not None:
            self._launched.set()
        leaving: BaseException | None = None
        for call in callbacks:
            try:
                self._run_when_over(call)
            except BaseException as left:  # SystemExit or Ctrl-C must not skip the other callbacks
                leaving = leaving or left
        if leaving is not None:
            raise leaving

    def disown(self, error: BaseException) -> None:
        """Makes the collective fail in a forked child, where no thread would complete it; calls no callbacks."""
        if self._callbacks is not None:
            self._error = error
            self._callbacks = None

    def failure(self) -> BaseException | None:
        """Returns the error of a collective that is over; None if the collective succeeded."""
        if self._error is None and self.completion is not None:
            try:
                self.completion.wait()  # returns or raises immediately, because the collective is over
            except GradsyncError as error:
                return error
        return self._error

    def take_failure(self) -> BaseException | None:
        """Returns failure() to a future, and drops the log entry, because the program now receives the error."""
        if self._log_entry is not None:
            self._log_entry.forget()
        return self.failure()

    def raise_error(self) -> None:
        """Raises the error of a collective on the CPU, or of a launch on a GPU, if there is one; does not wait."""
        if self._error is not None:
            if self._log_entry is not None:
                self._log_entry.forget()
            raise _again(self._error)

    def _run_when_over(self, call: Callable[[], None]) -> None:
        if self.completion is None:
            call()
        else:
            self.completion.when_done(call)


def _run(function: Callable[[Any], None], future: Any) -> None:
    was_in_callback, mark = _thread_state.is_in_callback, object()
    pending[mark], _thread_state.is_in_callback = None, True
    try:
        function(future)
    except Exception:
        _log.exception("a done-callback of %s raised", future.name)
    finally:
        _thread_state.is_in_callback = was_in_callback
        pending.pop(mark, None)


def _again(error: BaseException) -> BaseException:
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
    _thread_state.is_in_callback = False


os.register_at_fork(after_in_child=_begin_anew_after_fork)


class CollectiveFuture:
    """The future of an asynchronous collective: it gives the collective's result.

    Until the future is done, the arrays of the collective belong to gradsync: do not write to them, and do not read the
    arrays that receive results. On a GPU the future has its value as soon as the collective is launched; result() then
    makes the current stream, not the host, wait for the collective. A future cannot be cancelled, because other ranks
    take part in its collective.

    Args:
        name: the collective's name in errors.
        end: the CollectiveEnd of the collective.
    """

    __slots__ = ("_end", "_name")

    _PENDING: ClassVar[str] = "the collective has not ended yet"
    _LATE: ClassVar[str] = (
        "did not end within {:g} s; the collective continues: call result() again, or use a longer timeout"
    )

    def __init__(self, name: str, end: CollectiveEnd) -> None:
        self._name = name
        self._end = end

    @property
    def name(self) -> str:
        """The collective's name in errors."""
        return self._name

    def done(self) -> bool:
        """Whether the collective has ended or failed; never blocks."""
        return self._end.is_over()

    def result(self, timeout: float | None = None) -> Any:
        """Returns the result of the collective, and waits for it if necessary.

        On a GPU the host waits until the collective is launched, and until results in host memory are complete. The
        current stream, not the host, waits for the end of the collective, so that later work on this stream uses the
        result.

        Args:
            timeout: how many seconds the host waits. On the CPU, the host waits until the collective has ended; on a
                GPU, until the collective is launched. None means until the collective's own deadline. The timeout does
                not limit the wait for results in host memory.

        Raises:
            FutureNotReady: the wait might never end, because the caller is a done-callback, or because only the calling
                thread can flush the gradient's step.
            CollectiveTimeout: the wait reached its deadline; the collective continues.
            InvalidArgument: the timeout is not a number of seconds; or a done-callback called a collective, and no call
                outside of done-callbacks has raised the error since.
            PlanMismatch, RankFailed, ...: the collective failed with this error.
        """
        self._wait(None, timeout)
        return self._end.value

    def wait(self, stream: Any = None, *, timeout: float | None = None) -> None:
        """Waits and raises errors like result(), but returns nothing.

        Args:
            stream: the CUDA stream that waits; None means the current stream. On the CPU, gradsync ignores `stream`.
            timeout: the timeout, see result().

        Raises:
            FutureNotReady, CollectiveTimeout, InvalidArgument, PlanMismatch, RankFailed, ...: see result().
        """
        self._wait(stream, timeout)

    def exception(self) -> BaseException | None:
        """Returns the collective's error, or None if it succeeded; raises FutureNotReady before the collective ends."""
        if not self.done():
            raise self._not_ready("exception()")
        return self._end.take_failure()

    def add_done_callback(self, function: Callable[[Self], None]) -> None:
        """Calls function(self) when the future is done.

        If the future is done already, add_done_callback() calls the function immediately, in the calling thread.
        Otherwise the thread that completes the future calls the function: on the CPU the thread that ran the
        collective, on a GPU one of the communicator's threads. gradsync logs the exceptions of the function, and raises
        only SystemExit and KeyboardInterrupt. The function must not call collectives on any backend, and
        must not hand over gradients. A collective or hand-over within the function raises InvalidArgument, and this
        rank's next flush(), result() or collective raises this error again. If the host would have to wait for a future
        within the function, the call that needs the future raises FutureNotReady.

        Args:
            function: the function to call. gradsync passes this future to the function.

        Raises:
            InvalidArgument: `function` is not callable.
        """
        if not callable(function):
            given = type(function).__name__
            raise InvalidArgument(
                f"{self.name}: add_done_callback needs a function that takes the future as its argument, got {given}"
            )
        self._end.add_callback(function, self)

    def __repr__(self) -> str:
        if not self._end.is_over():
            state = "pending"
        else:
            error = self._end.failure()
            state = "ready" if error is None else f"failed with {type(error).__name__}"
        return f"<{type(self).__name__} of {self.name}: {state}>"

    def __reduce__(self) -> NoReturn:
        # No thread would complete a copy of the future in another process.
        raise TypeError(f"the future of {self.name} cannot be pickled or copied: pass its .result()")

    def _wait(self, stream: Any, timeout: float | None) -> None:
        end = self._launched(timeout)
        end.raise_error()
        if end.completion is not None:
            end.completion.order(stream)

    def _launched(self, timeout: float | None) -> CollectiveEnd:
        """Waits until the collective is launched or has failed, and returns its CollectiveEnd."""
        if timeout is not None:  # checked even if no wait is needed, so that a wrong value always raises
            check_seconds(f"the wait for {self.name}", "timeout", timeout)
        if pending:
            raise_refused()
        end = self._end
        if end.is_pending:
            self._await_launch(timeout)
        if end.completion is not None and end.completion.has_host_results:
            self._check_may_wait(end.completion)
        return end

    def _check_may_wait(self, completion: Completion | None) -> None:
        """Raises FutureNotReady if a done-callback would wait for a collective that may need the callback's thread."""
        if _thread_state.is_in_callback and (completion is None or not completion.done()):
            raise FutureNotReady(
                f"{self.name} is not ready: a done-callback cannot wait for a collective, because the collective may "
                "end only after the callback has returned; wait outside of done-callbacks"
            )

    def _await_launch(self, timeout: float | None) -> None:
        self._check_may_wait(None)
        end = self._end
        seconds = end.timeout_seconds if timeout is None else timeout
        is_launched = end.await_launch(seconds)
        if not is_launched and timeout is None and end.has_begun:
            is_launched = end.await_launch(None)  # to get the collective's own error, which names the missing ranks
        if not is_launched:
            raise CollectiveTimeout(f"{self.name} {self._LATE.format(seconds)}")

    def _not_ready(self, what: str) -> FutureNotReady:
        return FutureNotReady(f"{what} of {self.name} is not ready: {self._PENDING}")


class GradientFuture(CollectiveFuture):
    """The future of a gradient, made by AllreduceCallback: it gives the reduced gradient once the step is flushed.

    The result is the array that the program handed over, with the reduced values. If this array is read-only or its
    elements share memory, or if the gradient is a number, the result is a new array. With gradient_as_bucket_view, the
    result is a view of the bucket.

    The future is done when the flush has ended. Before that, result() and wait() raise FutureNotReady in the thread
    that hands over gradients, because only that thread can flush; other threads wait. On a GPU result() makes the
    current stream, not the host, wait for the reduction. If the step failed, result() and wait() raise its error, and
    exception() returns it: GradientCancelled if the backward pass ended with an exception, or the process group ended,
    before the flush.

    Args:
        name: the gradient's name, the same on all ranks.
        end: the CollectiveEnd of the step.
        value: the array that result() returns.
    """

    __slots__ = ("_value",)

    _PENDING: ClassVar[str] = "its step has not been flushed yet"
    _LATE: ClassVar[str] = (
        "was not reduced within {:g} s: it waits for the flush() of the thread that hands over gradients"
    )

    # gradsync makes up to ten thousand of these futures in a step, so __init__ only stores its arguments. The property
    # `name` makes the name when it is needed.
    def __init__(self, name: str, end: CollectiveEnd, value: Any) -> None:
        self._name = name
        self._end = end
        self._value = value

    @property
    def name(self) -> str:
        """The words "the gradient of" and the gradient's name, for errors."""
        return f"the gradient of {self._name}"

    def result(self, timeout: float | None = None) -> Any:
        """See CollectiveFuture.result(); returns the reduced gradient."""
        end = self._end
        if pending or timeout is not None or not end.has_result:
            self._wait(None, timeout)
        return self._value

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the reduced gradient; before the flush, raises FutureNotReady."""
        return tuple(self._ready_value("shape").shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the reduced gradient; raises the same errors as `shape`."""
        return self._ready_value("dtype").dtype

    @property
    def device(self) -> Any:
        """The device of the reduced gradient; raises the same errors as `shape`."""
        return getattr(self._ready_value("device"), "device", "cpu")

    def numpy(self) -> Any:
        """Returns the reduced gradient in host memory.

        Raises:
            FutureNotReady: the gradient's step is not flushed yet, or a done-callback would have to wait.
            PlanMismatch, RankFailed, ...: the reduction failed with this error.
        """
        value = self._ready_value("numpy()")
        completion = self._end.completion
        if completion is not None:
            self._check_may_wait(completion)
            completion.order()
        in_host_memory = value.get() if hasattr(value, "get") else value
        if completion is not None:
            completion.wait()  # raises if the reduction was aborted
        return in_host_memory

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Returns the reduced gradient as a NumPy array, for np.asarray(future); see numpy()."""
        return np.array(self.numpy(), dtype, copy=copy)

    def _ready_value(self, what: str) -> Any:
        if self._end.is_pending:
            raise self._not_ready(what)
        self._end.raise_error()
        return self._value

    def _await_launch(self, timeout: float | None) -> None:
        if self._end.is_of_caller() and not _thread_state.is_in_callback:
            raise FutureNotReady(
                f"{self.name} is not ready: call flush(), or leave the `with callback.backward()` block, before you "
                "read the future"
            )
        super()._await_launch(timeout)
