"""The queue of asynchronous collectives: they run one after the other, in order of submission, beside their caller.

A process has one, as long as one of its threads submits; each further thread that submits has its own. Within a thread
the order of the program is the order of its collectives, those that it calls without the queue included: they wait
until it is empty. Between threads there is no order that would be the same on every rank, and one queue for all would
make ranks wait for one another crosswise; only those of one communicator keep their order, whoever submits them.

Failures of asynchronous collectives that nobody has asked for are logged in the end, as asyncio does it.
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
from gradsync.errors import Caller, CommunicatorClosed, caller, describe, uncaught_error
from gradsync.futures import CollectiveEnd, CollectiveFuture, check_may_call, is_in_callback, pending, raise_refused

_IDLE_SECONDS = 1.0  # how long the thread of a queue waits for the next collective before it ends
_LEAVING_SECONDS = 1.0  # how long the end of the program waits for collectives that nobody has waited for
_ENDING_SECONDS = 0.2  # and then for each thread

_log = logging.getLogger("gradsync")


class Submitter(Protocol):
    """What the queues ask of a communicator: its Lifetime.

    Attributes:
        submitting: held while something is submitted for it; reentrant.
        last_job: what was submitted for it last, unless that is over.
    """

    submitting: Any
    last_job: Job | None

    @property
    def label(self) -> str:
        """This rank in errors."""

    def ended_error(self, what: str) -> CommunicatorClosed:
        """Returns the error of a collective, named `what`, that comes after the communicator's end."""

    def abort(self, reason: str, culprit: int | None) -> None:
        """Ends the communicator for all ranks."""


# -- Jobs ------------------------------------------------------------------------------------------------------------


class Here(threading.local):
    """What each thread knows of itself.

    Attributes:
        queue: where what it submits goes.
        is_serving: whether it is the thread of that queue.
    """

    queue: CollectiveQueue | None = None
    is_serving = False


here = Here()


def jobs_not_over() -> list[Job]:
    """Returns what was submitted and is not over, in order."""
    return [job for job in list(pending.values()) if isinstance(job, Job)]


class Job:
    """One collective in a queue.

    Args:
        end: of the collective.
        lifetime: of its communicator.
        what: names the collective in errors.
        run: runs it.
        submitted_at: the line of the program that has.
        previous: the last one of the same communicator before it, which another queue may hold.

    Attributes:
        end, lifetime, what: see above.
        has_begun: whether it runs, or has run.
    """

    __slots__ = ("_not_over", "_previous", "_run", "_submitted_at", "end", "has_begun", "lifetime", "what")

    def __init__(
        self,
        end: CollectiveEnd,
        lifetime: Submitter,
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
        # Not an Event: that one's own lock stays behind where Ctrl-C meets a wait at the wrong moment.
        self._not_over = threading.Lock()
        self._not_over.acquire()

    @property
    def name(self) -> str:
        """How errors of its future call it."""
        return f"{self.lifetime.label}: {self.what}"

    def run(self) -> None:
        """Runs it, unless its future has failed meanwhile, and then its done-callbacks; never raises."""
        try:
            if self._previous is not None:
                self._previous.wait()
            self.has_begun = True
            if not self.end.is_over():
                self._complete()
        except BaseException as error:  # SystemExit too: the thread has others to run
            _log.error("a done-callback of %s raised %s", self.name, describe(error))
        finally:
            del self._run  # with the caller's arrays
            self._previous = None
            with self.lifetime.submitting:
                if self.lifetime.last_job is self:  # else it would keep the result
                    self.lifetime.last_job = None
            pending.pop(self, None)
            self._not_over.release()

    def wait(self) -> None:
        """Returns when its done-callbacks have run."""
        with self._not_over:
            pass

    def wait_until(self, deadline: float) -> None:
        """The same, but not beyond a moment of time.monotonic()."""
        if self._not_over.acquire(timeout=max(0.0, deadline - time.monotonic())):
            self._not_over.release()

    def _complete(self) -> None:
        on_behalf.submitted_at = self._submitted_at
        try:
            result = self._run()
        except BaseException as error:
            self.end.finish(None, error, untold=self._prepare_to_tell(error))
        else:
            self.end.finish(result, None)

    def _prepare_to_tell(self, error: BaseException) -> LostFailure | None:
        """Readies an error for whoever asks, or for the log when nobody does."""
        traceback.clear_frames(error.__traceback__)  # which hold the caller's arrays
        if error.__traceback__ is not None:
            error.__traceback__ = error.__traceback__.tb_next  # this job's own frame, which holds the end
        if isinstance(error, CommunicatorClosed):  # what has closed it, has told
            return None
        return LostFailure(self.name, error, self.lifetime)


# -- Lost failures ---------------------------------------------------------------------------------------------------


class LostFailure:
    """One failure, as long as its future has it: logged when that goes, unless it was told before.

    Args:
        name: how error messages call the collective.
        error: what ended it.
        lifetime: of its communicator, at whose close it is logged.
    """

    __slots__ = ("__weakref__", "_lifetime", "_text")

    def __init__(self, name: str, error: BaseException, lifetime: Submitter) -> None:
        self._lifetime = weakref.ref(lifetime)
        self._text = "" if _is_ending else f"{name} has failed, and nobody has asked its future: {describe(error)}"
        with _registering:
            _all.add(self)
        _register_exit()

    def forget(self) -> None:
        """Somebody has been told."""
        self._text = ""

    def tell(self) -> None:
        """Logs it, once; not where the program ends with an exception: then there is better to tell."""
        text, self._text = self._text, ""
        if text and uncaught_error() is None:
            _log.error("%s", text)

    def is_of(self, lifetime: Submitter) -> bool:
        """Whether it is one of that communicator."""
        return self._lifetime() is lifetime

    def __del__(self) -> None:
        self.tell()


_all: weakref.WeakSet[LostFailure] = weakref.WeakSet()
_registering = threading.Lock()  # a set must not grow while another thread goes through it
_is_ending = False  # the program has left what is under way to itself


def tell_lost(lifetime: Submitter | None = None) -> None:
    """Logs the failures that nobody has asked for: on one communicator, or on all."""
    if _all:
        with _registering:
            lost = list(_all)
        for failure in lost:
            if lifetime is None or failure.is_of(lifetime):
                failure.tell()


# -- Queues ----------------------------------------------------------------------------------------------------------


class CollectiveQueue:
    """The queue of one thread. Its own thread begins with the first job and ends when there was none for a while.

    Attributes:
        last: the job that was submitted last, unless the queue is idle.
    """

    def __init__(self) -> None:
        self.last: Job | None = None
        self._jobs: deque[Job] = deque()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._idle_seconds = _IDLE_SECONDS

    def submit(self, lifetime: Submitter, what: str, run: Callable[[], Any]) -> CollectiveFuture:
        """Puts a collective at the end; see the function of this name."""
        with lifetime.submitting, self._lock:
            self._begin_serving()
            end = CollectiveEnd()
            job = Job(end, lifetime, what, run, caller(), lifetime.last_job)
            self._jobs.append(job)  # first: what Ctrl-C leaves behind is run, and nobody waits for what is not
            pending[job] = job
            self.last = lifetime.last_job = job
            self._changed.notify()
        return CollectiveFuture(job.name, end)

    def end(self) -> None:
        """Lets the thread end as soon as the queue is empty, and waits for that, a little."""
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
        here.queue, here.is_serving = self, True
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Runs the next job, when it comes; returns False when none has come."""
        with self._lock:
            if not self._jobs:
                self.last = None  # and with it, a communicator that nobody else may hold
                self._changed.wait(self._idle_seconds)
            if not self._jobs:
                self._thread = None
                _serving.discard(self)
                return False
            job = self._jobs.popleft()
        job.run()
        return True


_serving: set[CollectiveQueue] = set()  # those with a thread
_is_registered = False


def submit(lifetime: Submitter, what: str, run: Callable[[], Any]) -> CollectiveFuture:
    """Puts a collective at the end of the calling thread's queue.

    Args:
        lifetime: of its communicator.
        what: names the collective in errors.
        run: runs it and returns its result.

    Raises:
        InvalidArgument: in a done-callback, or because one was refused a collective; see check_may_call.
    """
    if pending:
        check_may_call(lifetime.label, what)
    if here.queue is None:
        here.queue = CollectiveQueue()
    return here.queue.submit(lifetime, what, run)


def await_earlier(lifetime: Submitter, what: str) -> None:
    """Waits for what comes before a collective, named `what`, that the calling thread is about to run itself.

    That is what this thread has submitted, and what any thread has for the same communicator. Ctrl-C comes through.

    Raises:
        InvalidArgument: as for submit; also when a done-callback of what it has waited for was refused.
    """
    if here.is_serving and not is_in_callback():
        return  # the queue has its order; and what a callback was refused is for the program's own threads
    check_may_call(lifetime.label, what)
    if here.queue is not None and (last := here.queue.last) is not None:
        last.wait()
    await_submitted(lifetime)
    raise_refused()


def await_submitted(lifetime: Submitter) -> None:
    """Waits for what any thread has submitted for one communicator; for nothing in a done-callback."""
    if not here.is_serving and (last := lifetime.last_job) is not None:
        last.wait()


def fail_submitted(lifetime: Submitter) -> None:
    """Fails what has not begun of a communicator that has ended, at once and in order.

    In the thread of a queue it does nothing: what comes later fails by itself, when its turn comes.
    """
    if here.is_serving:
        return
    for job in jobs_not_over():
        if job.lifetime is lifetime and not job.has_begun:
            job.end.finish(None, lifetime.ended_error(job.what))


def _register_exit() -> None:
    """Has the interpreter end the queues at its exit, before what was registered earlier: the process group's leaving.

    That one closes communicators in order, and so would wait for ranks that never come.
    """
    global _is_registered
    if not _is_registered:
        _is_registered = True
        atexit.register(_end_at_exit)


def _end_at_exit() -> None:
    global _is_ending
    tell_lost()
    _is_ending = True  # what the program's end makes fail is no news
    failure = uncaught_error()
    deadline = time.monotonic() + (_LEAVING_SECONDS if failure is None else 0.0)
    for job in jobs_not_over():
        job.wait_until(deadline)
    left = jobs_not_over()
    if failure is None:
        reason = f"the program ended with {len(left)} asynchronous collectives under way: wait for their futures first"
    else:
        reason = describe(failure)
    for lifetime in dict.fromkeys([job.lifetime for job in left]):
        lifetime.abort(reason, None)
    for queue in list(_serving):
        queue.end()


def _begin_anew_after_fork() -> None:
    """The child has neither the threads nor a place in the collectives; lost failures are the parent's to tell."""
    global _is_registered, _registering
    _registering = threading.Lock()
    for failure in list(_all):
        failure.forget()
    here.queue, here.is_serving = None, False
    _is_registered = False
    _serving.clear()
    for job in jobs_not_over():
        job.end.disown(CommunicatorClosed(f"{job.name} was submitted by the process that this one was forked from"))
    pending.clear()


os.register_at_fork(after_in_child=_begin_anew_after_fork)
