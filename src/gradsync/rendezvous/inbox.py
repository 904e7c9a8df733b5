"""What a client receives, sorted for all its threads: answers, pushes of the server, the generation's failure.

Sits between `request_channel` and `client_connection`. Of the threads that wait, one at a time reads for all. None
reads while it answers a push, such as another rank's question: a communicator may take a lock for that, and the
holder of that lock may wait for an answer of the server. The thread that sends the heartbeats reads when nobody else
does, so that a push meets somebody while this rank computes.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from gradsync.errors import GradsyncError, RendezvousError
from gradsync.rendezvous.answers import failure_of
from gradsync.rendezvous.client_connection import ClientConnection, StreamEnded
from gradsync.rendezvous.messages import TO_GENERATION, FrameType, Message
from gradsync.rendezvous.wire import FrameError


@dataclass(eq=False, slots=True)
class Pending:
    """A request that waits for its answer; its sequence is known once it is being sent."""

    sequence: int | None = None
    answer: Message | None = None


_IDLE_WITHIN_SECONDS = 1.0
_PUSHES = (FrameType.ASKED, FrameType.INQUIRE)


class Inbox:
    """Reads one connection for every thread of a client.

    Args:
        connection: authenticated; nobody else reads from it.
        who: the rank as messages name it, e.g. "rank 1/4".
        answer_push: called with each push that wants an answer, and with the first failure, without any lock held.

    Attributes:
        failure: what every request raises from now on, or None; the first one stays.
        server: the machine and the pid of the server, once it has accepted this rank's join; else None.
        heard_at: when the last message came, in monotonic seconds.
    """

    def __init__(
        self,
        connection: ClientConnection,
        who: str,
        answer_push: Callable[[Message], None],
    ) -> None:
        self.failure: GradsyncError | None = None
        self.server: tuple[str, int] | None = None
        self.heard_at = time.monotonic()
        self._connection = connection
        self._poll_input = connection.poll_input
        self._who = who
        self._answer_push = answer_push
        # Always taken by `with self._lock`: a Condition's own `with`, and a call of acquire, leave it taken for ever
        # where Ctrl-C comes just then.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._is_read = False  # whether a thread reads the connection now
        self._pending: dict[int, Pending] = {}
        self._pushes: deque[Message] = deque()

    def expect(self, pending: Pending, sequence: int) -> None:
        """Begins to look out for the answer to the request of this sequence."""
        pending.sequence = sequence
        self._pending[sequence] = pending

    def forget(self, pending: Pending) -> None:
        """Ends that: the request is answered or given up, and a late answer meets nobody."""
        if pending.sequence is not None:
            del self._pending[pending.sequence]

    def raise_failure(self) -> None:
        """Raises the failure, if there is one."""
        if self.failure is not None:
            raise copy.copy(self.failure)

    def await_answer(self, pending: Pending, deadline: float) -> Message | None:
        """Returns the answer to a request, or None when the deadline (monotonic seconds) comes first.

        Raises:
            GradsyncError: the failure.
        """
        while True:
            if self._is_my_turn(pending, deadline):
                self._read(deadline)
            self._answer_pushes()
            if pending.answer is not None:
                return pending.answer
            self.raise_failure()
            if time.monotonic() >= deadline:
                return None

    def poll(self) -> bool:
        """Reads what has come in; never waits, one poll call when nothing has. Returns whether a message was read."""
        was_read = False
        # A thread that waits for an answer reads the connection itself, and sees what comes.
        if not self._lock.locked():
            with self._lock:
                if not self._is_read and self.failure is None and self._poll_input(0):
                    was_read = self._sort_all(0.0)
        if self._pushes:
            self._answer_pushes()
        return was_read

    def lose(self, error: RendezvousError) -> GradsyncError:
        """Notes that the connection is of no more use; returns the failure, which may be an earlier one."""
        if self.failure is None:
            self.failure = RendezvousError(
                f"{self._who}: the rendezvous server at {self._connection.address} is gone ({error}); "
                "it was stopped or killed, or the network between failed"
            )
        return self.failure

    def give_up(self, failure: GradsyncError) -> None:
        """Notes a failure found otherwise than by reading, unless there is one, and wakes the threads that wait."""
        with self._lock:
            if self.failure is None:
                self.failure = failure
            self._changed.notify_all()

    def stop(self, failure: GradsyncError) -> None:
        """Replaces the failure, and wakes the threads that wait for another one to read."""
        with self._lock:
            self.failure = failure
            self._changed.notify_all()

    def await_end(self, deadline: float) -> None:
        """Reads until the server closes the connection; returns at once when another thread reads.

        Raises:
            StreamEnded: the server has closed it.
            FrameError: the bytes received are not acceptable.
        """
        with self._lock:
            if self._is_read:
                return
            self._is_read = True
        try:
            while self._connection.receive(deadline) is not None:
                pass
        finally:
            self._end_reading()

    def await_idle(self) -> None:
        """Waits until no thread reads any more; the connection has been shut down, which wakes one that does.

        Returns after a moment in any case: it may be this very thread that reads, below a signal handler.
        """
        with self._lock:
            self._changed.wait_for(lambda: not self._is_read, _IDLE_WITHIN_SECONDS)

    def _is_my_turn(self, pending: Pending, deadline: float) -> bool:
        """Waits until nobody else reads, there is news for this thread, or the deadline; returns whether to read."""

        def has_news() -> bool:
            return pending.answer is not None or self.failure is not None or bool(self._pushes)

        with self._lock:
            if self._is_read:
                left_seconds = min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
                self._changed.wait_for(lambda: not self._is_read or has_news(), left_seconds)
            if self._is_read or has_news():
                return False
            self._is_read = True
            return True

    def _read(self, deadline: float) -> None:
        """Waits for bytes and sorts all messages that they complete; this thread reads."""
        try:
            self._sort_all(deadline)
        finally:
            self._end_reading()

    def _end_reading(self) -> None:
        with self._lock:
            self._is_read = False
            self._changed.notify_all()

    def _sort_all(self, deadline: float) -> bool:
        """Sorts the next message, and the others that came with it: nothing would announce them a second time."""
        try:
            message = self._connection.receive(deadline)
            if message is None:
                return False
            self.heard_at = time.monotonic()
            while message is not None:
                self._sort(message)
                message = self._connection.next_buffered()
            return True
        except (StreamEnded, FrameError) as error:
            raise copy.copy(self.lose(error)) from error

    def _sort(self, message: Message) -> None:
        if message.type is FrameType.PULSE:
            return
        if message.type is FrameType.SEATED:
            _, machine, pid = message.fields
            self.server = (machine, pid)
        elif message.type in _PUSHES:
            self._pushes.append(message)
        elif message.type is FrameType.FAILED and message.fields[0] == TO_GENERATION:
            if self.failure is None:
                self.failure = failure_of(message, self._who)
                self._pushes.append(message)  # who answers pushes hears of it too
        elif (pending := self._pending.get(message.fields[0])) is not None:
            pending.answer = message
        # Else the late answer to a request that was given up: nobody waits for it.

    def _answer_pushes(self) -> None:
        while self._pushes:
            try:
                push = self._pushes.popleft()
            except IndexError:  # another thread was faster
                return
            self._answer_push(push)
