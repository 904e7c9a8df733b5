"""What stands in a queue of asynchronous collectives, its future, and what each thread knows of its queue.

The queues themselves are in collective_queue.py.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from gradsync.communicators.agreement import on_behalf
from gradsync.communicators.lost_failures import LostFailure
from gradsync.errors import Caller, CommunicatorClosed, describe
from gradsync.futures import CollectiveFuture, pending

if TYPE_CHECKING:
    from gradsync.communicators.collective_queue import CollectiveQueue
    from gradsync.communicators.lifetime import Lifetime

_log = logging.getLogger("gradsync")


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


class QueuedFuture(CollectiveFuture):
    """The future of a collective in a queue."""

    __slots__ = ()

    _HELD_UP: ClassVar[str] = (
        "a done-callback cannot wait for it, as it may come after the callback; return from that first"
    )

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
