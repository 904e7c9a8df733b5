"""One rank of `gs.spawn`, with the face of a `multiprocessing.Process`, and the two queues that tell its end."""

from __future__ import annotations

import os
import queue
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from gradsync.launching.function_outcome import load_result
from gradsync.launching.rank_process import RankProcess


class RankQueue:
    """What a rank has sent: at most one thing, there as soon as it has come.

    Reads like a queue, and never waits for what cannot come any more: `get` raises `queue.Empty` once the rank has
    ended without sending anything, or what it sent has been taken.

    Args:
        convert: makes of what has come what `get` gives.
    """

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        self._convert = convert
        self._changed = threading.Condition()
        self._things: deque[Any] = deque()
        self._ended = False

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Takes what the rank has sent.

        Args:
            block: whether to wait for it.
            timeout: how many seconds to wait at most.

        Raises:
            queue.Empty: nothing came in time, or nothing can come.
        """
        with self._changed:
            if block:
                self._changed.wait_for(lambda: self._things or self._ended, timeout)
            if not self._things:
                raise queue.Empty
            thing = self._things.popleft()
        return self._convert(thing)

    def get_nowait(self) -> Any:
        """Takes what the rank has sent, if it is there.

        Raises:
            queue.Empty: it is not.
        """
        return self.get(block=False)

    def empty(self) -> bool:
        """Whether there is nothing to take now."""
        return not self._things

    def qsize(self) -> int:
        """How many things there are to take now: 0 or 1."""
        return len(self._things)

    def put(self, thing: Any) -> None:
        """Adds what has come; for the thread that watches the rank."""
        with self._changed:
            self._things.append(thing)
            self._changed.notify_all()

    def end(self) -> None:
        """Tells those who wait that nothing more comes."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()


class SpawnedProcess:
    """One rank of `gs.spawn`; to its user like a `multiprocessing.Process` that has been started.

    Attributes:
        rank: its rank.
        name: "gradsync-rank-1" for rank 1.
        daemon: whether this program ends without waiting for it.
        sentinel: a descriptor that `multiprocessing.connection.wait` takes: readable once the process has ended, and
            all that it has started.
        return_queue: gets what the function returned.
        error_queue: gets the traceback, as text, of the exception that ended it.
    """

    def __init__(self, rank: RankProcess, *, daemon: bool) -> None:
        self._rank = rank
        self.rank = rank.rank
        self.name = f"gradsync-rank-{rank.rank}"
        self.daemon = daemon
        # It stays readable, however many look, and copies of it in forked processes do no harm.
        self.sentinel = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self.sentinel).atexit = False
        self.return_queue = RankQueue(lambda value: load_result(rank.rank, value))
        self.error_queue = RankQueue(str)
        self._told_result = self._told_error = False
        self._begun = threading.Event()
        self._ended = threading.Event()

    def __repr__(self) -> str:
        state = f"stopped exitcode={self.exitcode}" if self._ended.is_set() else "started"
        return f"<{type(self).__name__} name={self.name!r} {state}>"

    @property
    def pid(self) -> int | None:
        """Its process id, waited for until the process has begun; None when it has never come to life."""
        self._begun.wait()
        return self._rank.pid or None

    @property
    def exitcode(self) -> int | None:
        """Its exit code once it has ended; negative: the signal that killed it; None: it runs, or cannot be killed."""
        if not self._ended.is_set():
            return None
        # As in the error that tells of it: a rank that has reported an exception has failed with 1.
        return self._rank.exit_code if self._rank.error is None else 1

    def is_alive(self) -> bool:
        """Whether it, or something that it has started, has not ended."""
        return not self._ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        """Waits for its end.

        Args:
            timeout: how many seconds to wait at most.
        """
        self._ended.wait(timeout)

    def terminate(self) -> None:
        """Sends SIGTERM to it and to what it has started."""
        self._rank.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL to it and to what it has started."""
        self._rank.send_signal(signal.SIGKILL)

    def take_news(self) -> None:
        """Passes on what the rank has told by now; for the thread that watches it."""
        if self._rank.pid:
            self._begun.set()
        if self._rank.result is not None and not self._told_result:
            self._told_result = True
            self.return_queue.put(self._rank.result)
        if self._rank.error is not None and not self._told_error:
            self._told_error = True
            self.error_queue.put(self._rank.error.text)
        if self._rank.is_reaped:
            self.end()

    def end(self) -> None:
        """Tells that the rank has ended, or cannot be killed; for the thread that watches it."""
        if self._ended.is_set():
            return
        self.return_queue.end()
        self.error_queue.end()
        self._ended.set()
        self._begun.set()
        os.eventfd_write(self.sentinel, 1)
