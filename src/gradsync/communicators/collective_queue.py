"""The queue of asynchronous collectives: they run one after the other, in order of submission, beside their caller.

A process has one, as long as one of its threads submits; each further thread that submits has its own. Within a thread
the order of the program is the order of its collectives, those that it calls without the queue included: they wait
until it is empty. Between threads there is no order that would be the same on every rank, and one queue for all would
make ranks wait for one another crosswise; only those of one communicator keep their order, whoever submits them.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gradsync.communicators.lost_failures import tell_lost_at_exit
from gradsync.communicators.queued_jobs import Job, QueuedFuture, here, jobs_not_over
from gradsync.errors import CommunicatorClosed, caller, describe, uncaught_error
from gradsync.futures import CollectiveFuture, check_may_call, is_in_callback, pending, raise_refused

if TYPE_CHECKING:
    from gradsync.communicators.lifetime import Lifetime

_IDLE_SECONDS = 1.0  # how long the thread of a queue waits for the next collective before it ends
_LEAVING_SECONDS = 1.0  # how long the end of the program waits for collectives that nobody has waited for
_ENDING_SECONDS = 0.2  # and then for each thread


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

    def submit(self, lifetime: Lifetime, what: str, name: str, run: Callable[[], Any]) -> CollectiveFuture:
        """Puts a collective at the end; see the function of this name."""
        with lifetime.submitting, self._lock:
            self._begin_serving()
            future = QueuedFuture(name)
            job = Job(future, lifetime, what, run, caller(), lifetime.last_job)
            self._jobs.append(job)  # first: what Ctrl-C leaves behind is run, and nobody waits for what is not
            pending[job] = job
            self.last = lifetime.last_job = job
            self._changed.notify()
        return future

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
            _end_before_process_group()
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


def submit(lifetime: Lifetime, what: str, name: str, run: Callable[[], Any]) -> CollectiveFuture:
    """Puts a collective at the end of the calling thread's queue.

    Args:
        lifetime: of its communicator.
        what: names the collective in errors.
        name: how the future's errors call it.
        run: runs it and returns its result.

    Raises:
        InvalidArgument: in a done-callback, or because one was refused a collective; see check_may_call.
    """
    if pending:
        check_may_call(lifetime.label, what)
    if here.queue is None:
        here.queue = CollectiveQueue()
    return here.queue.submit(lifetime, what, name, run)


def await_earlier(lifetime: Lifetime, what: str) -> None:
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


def await_submitted(lifetime: Lifetime) -> None:
    """Waits for what any thread has submitted for one communicator; for nothing in a done-callback."""
    if not here.is_serving and (last := lifetime.last_job) is not None:
        last.wait()


def fail_submitted(lifetime: Lifetime) -> None:
    """Fails what has not begun of a communicator that has ended, at once and in order.

    In the thread of a queue it does nothing: what comes later fails by itself, when its turn comes.
    """
    if here.is_serving:
        return
    for job in jobs_not_over():
        if job.lifetime is lifetime and not job.has_begun:
            job.future.fail(lifetime.ended_error(job.what))


def _end_before_process_group() -> None:
    """Has the interpreter end the queues at its exit, before what was registered earlier: the process group's leaving.

    That one closes communicators in order, and so would wait for ranks that never come.
    """
    global _is_registered
    if not _is_registered:
        _is_registered = True
        atexit.register(_end_at_exit)


def _end_at_exit() -> None:
    tell_lost_at_exit()
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
    """The child has neither the threads nor a place in the collectives."""
    global _is_registered
    here.queue, here.is_serving = None, False
    _is_registered = False
    _serving.clear()
    for job in jobs_not_over():
        job.future.disown(
            CommunicatorClosed(f"{job.future.name} was submitted by the process that this one was forked from")
        )
    pending.clear()


os.register_at_fork(after_in_child=_begin_anew_after_fork)
