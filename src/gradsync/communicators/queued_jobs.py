"""What stands in a queue of asynchronous collectives, its future, and what each thread knows of its queue.

The queues themselves are in collective_queue.py.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from gradsync.collective_future import CollectiveFuture
from gradsync.communicators.agreement import on_behalf
from gradsync.communicators.lost_failures import LostFailure
from gradsync.errors import CommunicatorClosed, InvalidArgument, describe
from gradsync.stack_report import Caller

if TYPE_CHECKING:
    from gradsync.communicators.collective_queue import CollectiveQueue
    from gradsync.communicators.lifetime import Lifetime

_log = logging.getLogger("gradsync")


class Here(threading.local):
    """What each thread knows of itself.

    Attributes:
        queue: where what it submits goes.
        is_serving: whether it is the thread of that queue.
        may_call: whether it may call collectives: False within a callback that has no place in the order.
    """

    queue: CollectiveQueue | None = None
    is_serving = False
    may_call = True


here = Here()

#: What a collective has to look at before it begins, any thread's; nearly always nothing. Submitted jobs that are not
#: over, in order, and callbacks that must not call collectives (without a job). Not behind a function: every
#: collective looks here, and a call would cost it more than all that it finds here otherwise.
pending: dict[object, Job | None] = {}


def jobs_not_over() -> list[Job]:
    """Returns what was submitted and is not over, in order."""
    return [job for job in list(pending.values()) if job is not None]


class QueuedFuture(CollectiveFuture):
    """The future of a collective in a queue.

    Args:
        name: how error messages call the collective.
        queue: where it is; that of the thread that runs it, for one that a done-callback submits.
        number: counts what was submitted there.
    """

    __slots__ = ("_number", "_queue")

    _HELD_UP: ClassVar[str] = (
        "a done-callback cannot wait for it, as it may come after the callback; return from that first"
    )

    def __init__(self, name: str, queue: CollectiveQueue, number: int) -> None:
        super().__init__(name)
        self._queue = queue
        self._number = number

    def add_done_callback(self, function: Callable[[Any], None]) -> None:
        """See CollectiveFuture, and communicator.asynchronous for collectives in it."""
        super().add_done_callback(function if self._is_in_order() else partial(_without_collectives, function))

    def _is_in_order(self) -> bool:
        """Whether collectives in a callback that is added now have one place in the order, whatever the timing.

        Later, a callback may find the future done, and what was submitted since done or not.
        """
        if self._queue is not here.queue:
            return False
        return self.done() if here.is_serving else self._number == self._queue.submitted

    def _is_held_up(self) -> bool:
        return here.is_serving


class Job:
    """One collective in a queue.

    Args:
        future: of its result.
        lifetime: of its communicator.
        what: names the collective in errors.
        run: runs it.
        submitted_at: the line of the program that has.
        previous: the last one of the same communicator before it, which another queue may hold.

    Attributes:
        future, lifetime, what: see above.
        has_begun: whether it runs, or has run.
    """

    __slots__ = ("_not_over", "_previous", "_run", "_submitted_at", "future", "has_begun", "lifetime", "what")

    def __init__(
        self,
        future: QueuedFuture,
        lifetime: Lifetime,
        what: str,
        run: Callable[[], Any],
        submitted_at: Caller | None,
        previous: Job | None = None,
    ) -> None:
        self.future = future
        self.lifetime = lifetime
        self.what = what
        self.has_begun = False
        self._run = run
        self._submitted_at = submitted_at
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
            with self.lifetime.submitting:
                if self.lifetime.last_job is self:  # else it would keep the result
                    self.lifetime.last_job = None
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
        on_behalf.submitted_at = self._submitted_at
        try:
            result = self._run()
        except BaseException as error:
            self.future.fail(error, self._prepare_to_tell(error))
        else:
            self.future.resolve(result)

    def _prepare_to_tell(self, error: BaseException) -> LostFailure | None:
        """Readies an error for whoever asks, or for the log when nobody does."""
        traceback.clear_frames(error.__traceback__)  # which hold the caller's arrays
        if error.__traceback__ is not None:
            error.__traceback__ = error.__traceback__.tb_next  # this job's own frame, which holds the future
        if isinstance(error, CommunicatorClosed):  # what has closed it, has told
            return None
        return LostFailure(self.future.name, error, self.lifetime)


def _without_collectives(function: Callable[[Any], None], future: CollectiveFuture) -> None:
    """Calls a callback that has no place in the order."""
    could, mark = here.may_call, object()
    pending[mark], here.may_call = None, False
    try:
        function(future)
    finally:
        here.may_call = could
        pending.pop(mark, None)


def check_may_call() -> None:
    """Refuses a collective in a callback that has no place in the order.

    Raises:
        InvalidArgument: the calling thread is in such a callback.
    """
    if not here.may_call:
        raise InvalidArgument(
            "a collective in a done-callback that was added after its thread had submitted something else, or by "
            "another thread: ranks could call it at different places in their order; add the callback right after "
            "submitting its own collective"
        )
