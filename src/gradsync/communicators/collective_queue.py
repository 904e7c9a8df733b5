"""The FIFO of asynchronous collectives: they run one after the other, in order of submission, beside their caller.

A process has one, as long as one of its threads submits; each further thread that submits has its own. Within a thread
the order of the program is the order of its collectives, those that it calls without the FIFO included: they wait until
it is empty. Between threads there is no order that would be the same on every rank, and one FIFO for all would make
ranks wait for one another crosswise; only those of one communicator keep their order, whoever submits them.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gradsync.collective_future import CollectiveFuture
from gradsync.errors import CommunicatorClosed, describe

if TYPE_CHECKING:
    from gradsync.communicators.lifetime import Lifetime

_IDLE_SECONDS = 1.0  # how long the thread of a FIFO waits for the next collective before it ends
_LEAVING_SECONDS = 1.0  # how long the end of the program waits for collectives that nobody has waited for
_ENDING_SECONDS = 0.2  # and then for each thread

_log = logging.getLogger("gradsync")


class Job:
    """One collective in a FIFO.

    Args:
        future: of its result.
        lifetime: of its communicator.
        what: names the collective in errors.
        run: runs it.
        previous: the last one of the same communicator before it, which another FIFO may hold.

    Attributes:
        future, lifetime, what: see above.
        has_begun: whether it runs, or has run.
    """

    __slots__ = ("_not_over", "_previous", "_run", "future", "has_begun", "lifetime", "what")

    def __init__(
        self,
        future: CollectiveFuture,
        lifetime: Lifetime,
        what: str,
        run: Callable[[], Any],
        previous: Job | None = None,
    ) -> None:
        self.future = future
        self.lifetime = lifetime
        self.what = what
        self.has_begun = False
        self._run = run
        self._previous = previous
        # Not an Event: that one's own lock stays behind where Ctrl-C meets a wait at the wrong moment.
        self._not_over = threading.Lock()
        self._not_over.acquire()

    def run(self) -> None:
        """Runs it, unless its future has failed meanwhile, and then its done-callbacks; never raises."""
        try:
            if self._previous is not None:
                self._previous.wait()
            self.has_begun = True
            if not self.future.done():
                self._complete()
        except BaseException as error:  # SystemExit too: the thread has others to run
            _log.error("a done-callback of %s raised %s", self.future.name, describe(error))
        finally:
            del self._run  # with the caller's arrays
            self._previous = None
            pending.pop(self, None)
            self._not_over.release()

    def wait(self) -> None:
        """Returns when its done-callbacks have run, which may have called collectives."""
        with self._not_over:
            pass

    def wait_until(self, deadline: float) -> None:
        """The same, but not beyond a moment of time.monotonic()."""
        if self._not_over.acquire(timeout=max(0.0, deadline - time.monotonic())):
            self._not_over.release()

    def _complete(self) -> None:
        try:
            result = self._run()
        except BaseException as error:
            self.future.fail(error)
        else:
            self.future.resolve(result)


class Lane:
    """The FIFO of one thread. Its own thread begins with the first job and ends when there was none for a while.

    Attributes:
        last: the job that was submitted last, unless it is over.
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
        with self._lock:
            future = CollectiveFuture(name, completing_thread=self._serving_thread().ident)
            job = Job(future, lifetime, what, run, lifetime.last_job)
            self._jobs.append(job)  # first: what Ctrl-C leaves behind is run, and nobody waits for what is not
            pending[job] = None
            self.last = lifetime.last_job = job
            self._changed.notify()
        return future

    def end(self) -> None:
        """Lets the thread end as soon as the FIFO is empty, and waits for that, a little."""
        with self._lock:
            self._idle_seconds = 0.0
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(_ENDING_SECONDS)

    def _serving_thread(self) -> threading.Thread:
        if self._thread is None or not self._thread.is_alive():
            _end_before_process_group()
            self._thread = threading.Thread(target=self._serve, name="gradsync-collectives", daemon=True)
            self._thread.start()
            _lanes.add(self)
        return self._thread

    def _serve(self) -> None:
        _here.lane, _here.is_serving = self, True
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
                _lanes.discard(self)
                return False
            job = self._jobs.popleft()
        job.run()
        return True


class _Here(threading.local):
    """What each thread knows of itself."""

    lane: Lane | None = None  # where what it submits goes
    is_serving = False  # whether it is the thread of that FIFO


_here = _Here()
_lanes: set[Lane] = set()  # those with a thread
_is_registered = False

#: Submitted by any thread and not over, in order. Empty nearly always: who calls a collective looks here first.
pending: dict[Job, None] = {}


def submit(lifetime: Lifetime, what: str, name: str, run: Callable[[], Any]) -> CollectiveFuture:
    """Puts a collective at the end of the calling thread's FIFO.

    In a done-callback, which the thread of a FIFO runs, a collective runs at once: so its place in the order is the
    same on every rank, whatever the others have submitted meanwhile.

    Args:
        lifetime: of its communicator.
        what: names the collective in errors.
        name: how the future's errors call it.
        run: runs it and returns its result.
    """
    if _here.is_serving:
        job = Job(CollectiveFuture(name), lifetime, what, run)
        job.run()
        return job.future
    if _here.lane is None:
        _here.lane = Lane()
    return _here.lane.submit(lifetime, what, name, run)


def await_earlier(lifetime: Lifetime) -> None:
    """Waits for what comes before a collective that the calling thread is about to run itself.

    That is what this thread has submitted, and what any thread has for the same communicator; nothing in a
    done-callback. Ctrl-C comes through.
    """
    if not _here.is_serving and _here.lane is not None and (last := _here.lane.last) is not None:
        last.wait()
    await_submitted(lifetime)


def await_submitted(lifetime: Lifetime) -> None:
    """Waits for what any thread has submitted for one communicator; for nothing in a done-callback."""
    if not _here.is_serving and lifetime.last_job is not None:
        lifetime.last_job.wait()


def fail_submitted(lifetime: Lifetime) -> None:
    """Fails what has not begun of a communicator that has ended, at once and in order.

    In the thread of a FIFO it does nothing: what comes later fails by itself, when its turn comes.
    """
    if _here.is_serving:
        return
    for job in list(pending):
        if job.lifetime is lifetime and not job.has_begun:
            job.future.fail(lifetime.ended_error(job.what))


def _end_before_process_group() -> None:
    """Has the interpreter end the FIFOs at its exit, before what was registered earlier: the process group's leaving.

    That one closes communicators in order, and so would wait for ranks that never come.
    """
    global _is_registered
    if not _is_registered:
        _is_registered = True
        atexit.register(_end_at_exit)


def _end_at_exit() -> None:
    failure: BaseException | None = getattr(sys, "last_value", None)
    deadline = time.monotonic() + (_LEAVING_SECONDS if failure is None else 0.0)
    for job in list(pending):
        job.wait_until(deadline)
    left = list(pending)
    if failure is None:
        reason = f"the program ended with {len(left)} asynchronous collectives under way: wait for their futures first"
    else:
        reason = describe(failure)
    for lifetime in dict.fromkeys([job.lifetime for job in left]):
        lifetime.abort(reason, None)
    for lane in list(_lanes):
        lane.end()


def _begin_anew_after_fork() -> None:
    """The child has neither the threads nor a place in the collectives."""
    global _here, _is_registered
    _here = _Here()
    _is_registered = False
    _lanes.clear()
    for job in list(pending):
        job.future.disown(
            CommunicatorClosed(f"{job.future.name} was submitted by the process that this one was forked from")
        )
    pending.clear()


os.register_at_fork(after_in_child=_begin_anew_after_fork)
