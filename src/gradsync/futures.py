"""Futures: how a collective ends, and what waits for it.

A Completion is the end of work on a device, which a future holds between launch and result; on the CPU a collective
has ended when its call returns, and there is none. A CollectiveEnd is the end of a collective, one for each: who asked
for it alone has one future; the gradients of a bucket have one each, and share it: so a bucket of ten thousand
gradients ends once, not ten thousand times.
"""

from __future__ import annotations

import contextlib
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

if TYPE_CHECKING:
    from typing_extensions import Self


class Completion(Protocol):
    """The end of one launched collective. Once it has failed, order() and wait() raise what ended it."""

    @property
    def has_host_results(self) -> bool:
        """Whether results belong in host memory: order() waits for these."""

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

    def when_done(self, function: Callable[[], None]) -> None:
        """Calls function() once it has ended, on a thread of gradsync's own; at once where it has."""


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
        timeout_seconds: how long a future that is given no timeout waits for it; None: as long as the collective
            takes, which has a deadline of its own.

    Attributes:
        timeout_seconds: see above.
        value: what the collective has returned.
        completion: of one that runs beside the host, once it is launched.
        has_result: whether it has ended well, and what it has computed is there: nothing is to be waited for.
        was_asked: whether somebody may have learnt from a future that it is over.
        has_begun: whether the collective has, whose own deadline then counts; of gradients: that of their bucket.
    """

    __slots__ = (
        "_callbacks",
        "_error",
        "_made_by",
        "_untold",
        "_waiting",
        "completion",
        "has_begun",
        "has_result",
        "timeout_seconds",
        "value",
        "was_asked",
    )

    def __init__(self, timeout_seconds: float | None = None) -> None:
        self.timeout_seconds = timeout_seconds
        self._made_by = threading.get_ident()
        self.value: Any = None
        self.completion: Completion | None = None
        self.has_result = False
        self.was_asked = False
        self.has_begun = False
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

    def is_of_caller(self) -> bool:
        """Whether the calling thread has made it: of a bucket, the only one that can launch it."""
        return threading.get_ident() == self._made_by

    def await_launch(self, seconds: float | None) -> bool:
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
            self.completion.when_done(call)


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
        end: of the collective.
    """

    __slots__ = ("_end", "_name")

    _PENDING: ClassVar[str] = "it has not ended yet"
    _LATE: ClassVar[str] = "did not end within {:g} s; it goes on: ask again, or with a longer timeout"

    def __init__(self, name: str, end: CollectiveEnd) -> None:
        self._name = name
        self._end = end

    @property
    def name(self) -> str:
        """How error messages call it."""
        return self._name

    def done(self) -> bool:
        """Whether it has ended or failed; never blocks."""
        end = self._end
        if not end.is_over():
            return False
        end.was_asked = True
        return True

    def result(self, timeout: float | None = None) -> Any:
        """Returns what the collective returns.

        On a GPU the current stream waits for it, the host does not: work queued afterwards sees the result. Results
        that belong in host memory are waited for.

        Args:
            timeout: seconds that the host waits for the end, on a GPU for the launch; None leaves it to the
                collective's own deadline.

        Raises:
            FutureNotReady: only the calling thread can complete it, or a done-callback asks before its end.
            CollectiveTimeout: the wait reached its deadline; the collective goes on.
            InvalidArgument: a timeout that is no number of seconds; or a done-callback has called a collective, and
                that was only logged.
            PlanMismatch, RankFailed, ...: whatever ended the collective.
        """
        self._wait(None, timeout)
        return self._end.value

    def wait(self, stream: Any = None, *, timeout: float | None = None) -> None:
        """Waits, and raises, as result() does.

        Args:
            stream: CUDA stream that shall wait; None is the current one. Unused on the CPU.
            timeout: as for result().

        Raises:
            FutureNotReady, CollectiveTimeout, PlanMismatch, RankFailed, ...: as for result().
        """
        self._wait(stream, timeout)

    def exception(self) -> BaseException | None:
        """Returns what ended the collective, or None when it succeeded; an error before it is done."""
        if not self.done():
            raise self._not_ready("exception()")
        return self._end.tell_failure()

    def add_done_callback(self, function: Callable[[Self], None]) -> None:
        """Calls function(self) once done; at once, in the calling thread, when it is done already.

        Else it runs in the thread that completes the future: on the CPU the one that ran the collective, on a GPU one
        of the communicator's. An exception in it is logged, not raised. It must not call collectives, on any
        backend, nor hand over gradients: that is InvalidArgument, raised there and, as nobody may read the log, again
        by this rank's next flush(), result() or collective. Nor can it wait for a future that is not done:
        FutureNotReady.

        Args:
            function: gets this future.

        Raises:
            InvalidArgument: not a function.
        """
        if not callable(function):
            given = type(function).__name__
            raise InvalidArgument(f"{self.name}: add_done_callback needs a function of the future, got {given}")
        self._end.was_asked = True  # the function may run at any moment from here on
        self._end.add_callback(function, self)

    def __repr__(self) -> str:
        if not self._end.is_over():
            state = "pending"
        else:
            error = self._end.failure()
            state = "ready" if error is None else f"failed with {type(error).__name__}"
        return f"<{type(self).__name__} of {self.name}: {state}>"

    def __reduce__(self) -> NoReturn:
        # Else a copy in another process would wait for what nobody ends.
        raise TypeError(f"the future of {self.name} cannot be pickled or copied: pass its .result()")

    def _wait(self, stream: Any, timeout: float | None) -> None:
        end = self._launched(timeout)
        end.raise_error()
        if end.completion is not None:
            end.completion.order(stream)

    def _launched(self, timeout: float | None) -> CollectiveEnd:
        """Returns the end, once the collective is launched or has failed."""
        if timeout is not None:  # also where nothing is to be waited for: that differs from run to run
            check_seconds(f"the wait for {self.name}", "timeout", timeout)
        if pending:
            raise_refused()
        end = self._end
        if end.is_pending:
            self._await_launch(timeout)
        if end.completion is not None and end.completion.has_host_results:
            self._check_may_wait(end.completion)
        end.was_asked = True
        return end

    def _check_may_wait(self, completion: Completion | None) -> None:
        """Refuses a done-callback that would wait: its thread may be the one that ends what it waits for."""
        if _here.is_in_callback and (completion is None or not completion.done()):
            raise FutureNotReady(
                f"{self.name} is not ready: a done-callback cannot wait for it, as it may come after the callback; "
                "return from that first"
            )

    def _await_launch(self, timeout: float | None) -> None:
        self._check_may_wait(None)
        end = self._end
        seconds = end.timeout_seconds if timeout is None else timeout
        is_launched = end.await_launch(seconds)
        if not is_launched and timeout is None and end.has_begun:
            is_launched = end.await_launch(None)  # its own error says which ranks have not come
        if not is_launched:
            raise CollectiveTimeout(f"{self.name} {self._LATE.format(seconds)}")

    def _not_ready(self, what: str) -> FutureNotReady:
        return FutureNotReady(f"{what} of {self.name} is not ready: {self._PENDING}")


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
        value: what the future gives then.
    """

    __slots__ = ("_value",)

    _PENDING: ClassVar[str] = "its bucket has not been reduced yet"
    _LATE: ClassVar[str] = (
        "was not reduced within {:g} s: its bucket is reduced when it is full, or when the thread that hands over "
        "gradients calls flush()"
    )

    # Ten thousand times a step: it only takes down what it is given, and makes its name when somebody asks for it.
    def __init__(self, name: str, end: CollectiveEnd, value: Any) -> None:
        self._name = name
        self._end = end
        self._value = value

    @property
    def name(self) -> str:
        """How error messages call it."""
        return f"the gradient of {self._name}"

    def result(self, timeout: float | None = None) -> Any:
        """See CollectiveFuture; on the CPU, once the bucket is reduced, this costs one look."""
        end = self._end
        if pending or timeout is not None or not end.has_result:
            self._wait(None, timeout)
        end.was_asked = True
        return self._value

    def wait(self, stream: Any = None, *, timeout: float | None = None) -> None:
        """Waits as result() does, without raising what the reduction raised: the step's flush() has.

        Args:
            stream: CUDA stream that shall wait; None is the current one. Unused on the CPU.
            timeout: as for result().

        Raises:
            FutureNotReady, CollectiveTimeout, InvalidArgument: as for result().
        """
        end = self._launched(timeout)
        if end.completion is not None:
            with contextlib.suppress(GradsyncError):
                end.completion.order(stream)

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
            self._check_may_wait(completion)
            completion.order()
        self._end.was_asked = True
        in_host_memory = value.get() if hasattr(value, "get") else value
        if completion is not None:
            completion.wait()  # an aborted reduction ends too, and leaves no result
        return in_host_memory

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """What NumPy takes a future for, as in np.asarray(future); see numpy()."""
        return np.array(self.numpy(), dtype, copy=copy)

    def _ready_value(self, what: str) -> Any:
        if self._end.is_pending:
            raise self._not_ready(what)
        self._end.raise_error()
        return self._value

    def _await_launch(self, timeout: float | None) -> None:
        if self._end.is_of_caller() and not _here.is_in_callback:
            raise FutureNotReady(
                f"{self.name} is not ready: its bucket is not full yet; call flush(), or leave the "
                "`with callback.backward()` block, before asking for it"
            )
        super()._await_launch(timeout)
