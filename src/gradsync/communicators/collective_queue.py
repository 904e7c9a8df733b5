"""Queues of asynchronous collectives. A queue runs its collectives in its own thread, in the order of submission.

Each thread of the program that submits collectives has a queue of its own. So the collectives of one thread run in the
order in which the thread calls them: a blocking collective first waits until the queue of its thread is empty. The
order of two threads' collectives may differ between ranks. If all threads used one queue, ranks could therefore wait
for each other in a circle. If several threads use the same communicator, its collectives run in the order of
submission.

If the program never asks a failed future for its result, gradsync logs the failure when the future is deleted or the
program ends. LostFailure and Job name the exceptions.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from gradsync.communicators.agreement import on_behalf
from gradsync.errors import Caller, CommunicatorClosed, GradsyncError, RankFailed, caller, describe, uncaught_error
from gradsync.futures import CollectiveEnd, CollectiveFuture, check_may_call, is_in_callback, pending, raise_refused

_IDLE_SECONDS = 1.0  # how long the thread of a queue waits for the next collective before it ends
_LEAVING_SECONDS = 1.0  # how long the end of the program waits for unfinished collectives
_ENDING_SECONDS = 0.2  # how long the end of the program then waits for each queue's thread

_log = logging.getLogger("gradsync")


class QueuedLifetime(Protocol):
    """The part of a communicator's Lifetime that the queues use.

    Attributes:
        submitting: a reentrant lock, which a thread holds while it submits a collective.
        last_job: the communicator's last submitted collective; None if that collective has ended.
        raised: the RaisedFailures of the communicator's world.
    """

    raised: Any
    submitting: Any
    last_job: Job | None

    @property
    def label(self) -> str:
        """This rank's name in errors."""

    def ended_error(self, what: str) -> CommunicatorClosed:
        """Returns the error for a collective, named `what`, that was called after the communicator's end."""

    def abort(self, reason: str, culprit: int | None) -> None:
        """Ends the communicator for all ranks."""


# -- Jobs ------------------------------------------------------------------------------------------------------------


class _ThreadState(threading.local):
    """The state of the calling thread.

    Attributes:
        queue: the queue of the collectives that this thread submits; None before the first such collective.
        is_serving: whether this thread is the worker thread of a queue.
    """

    queue: CollectiveQueue | None = None
    is_serving = False


_this_thread = _ThreadState()


def unfinished_jobs() -> list[Job]:
    """Returns the submitted jobs that have not ended, in the order of submission."""
    return [job for job in list(pending.values()) if isinstance(job, Job)]


class Job:
    """One collective in a queue.

    Args:
        end: the object that gives the future the collective's result or error.
        lifetime: the lifetime of the collective's communicator.
        what: the collective's name in errors.
        run: a function that runs the collective and returns its result.
        submitted_at: the line of the program that submitted the collective.
        previous: the job that was submitted to the same communicator before this one, perhaps in another queue.

    Attributes:
        end: the argument `end` until the collective has ended. Afterwards `end` is an object that all ended jobs share,
            and that does not refer to the future's error.
        lifetime, what: the arguments of the same names.
        has_begun: whether the collective has begun; it may have ended.
    """

    __slots__ = ("_not_over", "_previous", "_run", "_submitted_at", "end", "has_begun", "lifetime", "what")

    def __init__(
        self,
        end: CollectiveEnd,
        lifetime: QueuedLifetime,
        what: str,
        run: Callable[[], Any],
        submitted_at: Caller | None,
        previous: Job | None = None,
    ) -> None:
        self.end = end
        self.lifetime = lifetime
        self.what = what
        self.has_begun = False
        self._run = run
        self._submitted_at = submitted_at
        self._previous = previous
        # A lock, because the inner lock of an Event stays held if Ctrl-C arrives as a wait begins.
        self._not_over = threading.Lock()
        self._not_over.acquire()

    @property
    def name(self) -> str:
        """This rank's name and the collective's name, for the errors of the future."""
        return f"{self.lifetime.label}: {self.what}"

    def run(self) -> None:
        """Runs the collective, then the done-callbacks of its future. This method never raises.

        If the future has already failed, this method does not run the collective; the callbacks have already run.
        """
        try:
            if self._previous is not None:
                self._previous.wait()
            self.has_begun = True
            if not self.end.is_over():
                self._complete()
        except BaseException as error:  # SystemExit too: the thread has other jobs
            _log.error("a done-callback of %s raised %s", self.name, describe(error))
        finally:
            del self._run  # the function holds the caller's arrays
            self._previous = None
            with self.lifetime.submitting:
                if self.lifetime.last_job is self:  # a reference would keep the result alive
                    self.lifetime.last_job = None
            pending.pop(self, None)
            self._not_over.release()
            # The error's traceback refers to this job: a cycle would delay the error's log entry. If the program has
            # deleted the future, the entry is written here, after the release: a logging handler may wait for the job.
            self.end = _over

    def wait(self) -> None:
        """Waits until the collective and its done-callbacks have run."""
        with self._not_over:
            pass

    def wait_until(self, deadline: float) -> None:
        """Waits like `wait`, but at most until time.monotonic() reaches the deadline."""
        if self._not_over.acquire(timeout=max(0.0, deadline - time.monotonic())):
            self._not_over.release()

    def _complete(self) -> None:
        on_behalf.submitted_at = self._submitted_at
        try:
            result = self._run()
        except BaseException as error:
            self.end.finish(None, error, log_entry=self._prepare_to_raise(error))
        else:
            self.end.finish(result, None)

    def _prepare_to_raise(self, error: BaseException) -> LostFailure | None:
        """Removes frames from the error's traceback. Returns a log entry, in case the program never gets the error."""
        traceback.clear_frames(error.__traceback__)  # the frames hold the caller's arrays
        if error.__traceback__ is not None:
            error.__traceback__ = error.__traceback__.tb_next  # drops this job's frame, which refers to `end`
        if isinstance(error, CommunicatorClosed):  # the failure that ended the communicator has been reported
            return None
        if isinstance(error, RankFailed) and self.lifetime.raised.was_aborted:  # this rank has ended the collective
            return None
        return LostFailure(self.name, error)


_over = CollectiveEnd()  # the `end` of all jobs that have ended
_over.finish(None, None)


# -- Failures that the program never asks for --------------------------------------------------------------------------


class LostFailure:
    """The log entry of a failed future, for an error that the program has not got from the future.

    gradsync writes the entry when the future is deleted, or at the end of the program.

    Args:
        name: the collective's name in errors.
        error: the future's error.
    """

    __slots__ = ("__weakref__", "_text")

    def __init__(self, name: str, error: BaseException) -> None:
        self._text = (
            "" if _is_ending else f"{name} failed, and its future was never asked for the result: {describe(error)}"
        )
        with _registering:
            _all.add(self)
        _register_exit()

    def forget(self) -> None:
        """Discards the log entry. Call this method when the program has got the error from the future."""
        self._text = ""

    def log(self) -> None:
        """Logs the failure, once.

        If Ctrl-C or a gradsync error ends the program, this method logs nothing: the failure may be the same one.
        """
        text, self._text = self._text, ""
        if text and not isinstance(uncaught_error(), (GradsyncError, KeyboardInterrupt)):
            _log.error("%s", text)

    def __del__(self) -> None:
        self.log()


_all: weakref.WeakSet[LostFailure] = weakref.WeakSet()
_registering = threading.Lock()  # a set must not change while another thread iterates over it
_is_ending = False  # whether the program is ending


# -- Queues ----------------------------------------------------------------------------------------------------------


class CollectiveQueue:
    """The queue of collectives that one thread submits, and the worker thread that runs them.

    The worker thread starts with the first job, and ends after 1 s without jobs.

    Attributes:
        last: the last submitted job; None after the worker thread has found no further job.
    """

    def __init__(self) -> None:
        self.last: Job | None = None
        self._jobs: deque[Job] = deque()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._idle_seconds = _IDLE_SECONDS

    def submit(self, lifetime: QueuedLifetime, what: str, run: Callable[[], Any]) -> CollectiveFuture:
        """Appends a collective; see the function `submit`."""
        with lifetime.submitting, self._lock:
            self._begin_serving()
            end = CollectiveEnd()
            job = Job(end, lifetime, what, run, caller(), lifetime.last_job)
            self._jobs.append(job)  # first, because Ctrl-C may arrive here: nothing may wait for a job that never runs
            pending[job] = job
            self.last = lifetime.last_job = job
            self._changed.notify()
        return CollectiveFuture(job.name, end)

    def end(self) -> None:
        """Makes the worker thread end once the queue is empty; waits up to 0.2 s for the thread's end."""
        with self._lock:
            self._idle_seconds = 0.0
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(_ENDING_SECONDS)

    def _begin_serving(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            _register_exit()
            self._thread = threading.Thread(target=self._serve, name="gradsync-collectives", daemon=True)
            self._thread.start()
            _serving.add(self)

    def _serve(self) -> None:
        _this_thread.queue, _this_thread.is_serving = self, True
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Waits for the next job and runs it. Returns False if no job was submitted within 1 s, or `end` was called."""
        with self._lock:
            if not self._jobs:
                self.last = None  # the job may hold the last reference to a communicator
                self._changed.wait(self._idle_seconds)
            if not self._jobs:
                self._thread = None
                _serving.discard(self)
                return False
            job = self._jobs.popleft()
        job.run()
        return True


_serving: set[CollectiveQueue] = set()  # the queues with a running thread
_is_registered = False


def submit(lifetime: QueuedLifetime, what: str, run: Callable[[], Any]) -> CollectiveFuture:
    """Appends a collective to the calling thread's queue, and returns the collective's future.

    Args:
        lifetime: the lifetime of the collective's communicator.
        what: the collective's name in errors.
        run: a function that runs the collective and returns its result.

    Raises:
        InvalidArgument: the caller is a done-callback, or an earlier done-callback has tried to run a collective; see
            check_may_call.
    """
    if pending:
        check_may_call(lifetime.label, what)
    if _this_thread.queue is None:
        _this_thread.queue = CollectiveQueue()
    return _this_thread.queue.submit(lifetime, what, run)


def await_earlier(lifetime: QueuedLifetime, what: str) -> None:
    """Waits, before a blocking collective named `what`, for the collectives that were submitted earlier.

    The function waits for the collectives that this thread has submitted to any communicator, and for the collectives
    that any thread has submitted to this communicator. Ctrl-C ends the wait.

    Raises:
        InvalidArgument: the conditions are those of `submit`; or a done-callback has tried to run a collective during
            the wait.
    """
    if _this_thread.is_serving and not is_in_callback():
        return  # a worker thread runs its queue in order; threads of the program raise the errors of done-callbacks
    check_may_call(lifetime.label, what)
    if _this_thread.queue is not None and (last := _this_thread.queue.last) is not None:
        last.wait()
    await_submitted(lifetime)
    raise_refused()


def await_submitted(lifetime: QueuedLifetime) -> None:
    """Waits for the collectives that any thread has submitted to one communicator.

    In a queue's worker thread the function does nothing, because the thread would wait for itself.
    """
    if not _this_thread.is_serving and (last := lifetime.last_job) is not None:
        last.wait()


def fail_submitted(lifetime: QueuedLifetime) -> None:
    """After a communicator's end, fails the futures of its submitted collectives that have not begun, in order.

    In a queue's worker thread the function does nothing, because these collectives will fail when the thread runs them.
    """
    if _this_thread.is_serving:
        return
    for job in unfinished_jobs():
        if job.lifetime is lifetime and not job.has_begun:
            job.end.finish(None, lifetime.ended_error(job.what))


def _register_exit() -> None:
    """Registers the exit handler that ends the queues. Python calls this handler before that of the process group.

    The process group's handler closes the communicators one by one. If the queues still ran, close() would wait for
    collectives that the other ranks never begin.
    """
    global _is_registered
    if not _is_registered:
        _is_registered = True
        atexit.register(_end_at_exit)


def _end_at_exit() -> None:
    global _is_ending
    with _registering:
        lost = list(_all)
    for entry in lost:
        entry.log()
    _is_ending = True  # failures caused by the program's end are not logged
    failure = uncaught_error()
    deadline = time.monotonic() + (_LEAVING_SECONDS if failure is None else 0.0)
    for job in unfinished_jobs():
        job.wait_until(deadline)
    left = unfinished_jobs()
    if failure is None:
        reason = f"the program ended with {len(left)} unfinished asynchronous collectives: wait for their futures first"
    else:
        reason = describe(failure)
    for lifetime in dict.fromkeys([job.lifetime for job in left]):
        lifetime.abort(reason, None)
    for queue in list(_serving):
        queue.end()


def _begin_anew_after_fork() -> None:
    """Resets this module in a forked child, which is not a rank and has no worker threads.

    The log entries of failed futures are discarded, because the parent process writes them.
    """
    global _is_registered, _registering
    _registering = threading.Lock()
    for failure in list(_all):
        failure.forget()
    _this_thread.queue, _this_thread.is_serving = None, False
    _is_registered = False
    _serving.clear()
    for job in unfinished_jobs():
        job.end.disown(CommunicatorClosed(f"{job.name} was submitted by the parent process of this forked process"))
    pending.clear()


os.register_at_fork(after_in_child=_begin_anew_after_fork)
