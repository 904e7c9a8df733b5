"""The work of one stream: executed in order, by a thread of its own."""

from __future__ import annotations

import os
import queue
import random
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ._errors import CAPTURE_IMPLICIT, CAPTURE_INVALIDATED, CAPTURE_UNSUPPORTED, NOT_READY, CUDARuntimeError

GLOBAL, THREAD_LOCAL, RELAXED = range(3)  # cudaStreamCaptureMode


class Ticket(NamedTuple):
    """A place in a queue: done when everything up to it has been executed."""

    queue: WorkQueue
    number: int

    @property
    def done(self) -> bool:
        return self.queue.completed >= self.number

    def wait(self) -> None:
        """Blocks until this place is reached."""
        self.queue.wait(self.number)


class Capture:
    """Work that streams record for a CUDA graph instead of executing it.

    Source: the CUDA runtime API, cudaStreamBeginCapture, cudaThreadExchangeStreamCaptureMode and the errors 900 to 907.

    Args:
        queue: of the stream where it begins.
        mode: forbidden calls of which threads invalidate it: of all threads, of its own, or of none.
    """

    running: ClassVar[list[Capture]] = []

    def __init__(self, queue: WorkQueue, mode: int) -> None:
        self.queues = [queue]
        self.works: list[Callable[[], None]] = []
        self.is_valid = True
        self.has_ended = False
        self._mode = mode
        self._thread = threading.get_ident()
        queue.capture = self
        self.running.append(self)

    def join(self, queue: WorkQueue) -> None:
        """Adds another stream to the capture."""
        queue.capture = self
        self.queues.append(queue)

    def end(self) -> None:
        """Ends it for all its streams; raises where it has been spoilt."""
        self.running.remove(self)
        self.has_ended = True
        for captured in self.queues:
            captured.capture = None
        if not self.is_valid:
            raise CUDARuntimeError(CAPTURE_INVALIDATED)

    @classmethod
    def spoils(cls) -> bool:
        """Whether a call that this thread makes, and that no capture allows, has ended a capture by that."""
        if not cls.running:
            return False
        mine = threading.get_ident()
        spoilt = [c for c in list(cls.running) if c._mode == GLOBAL or (c._mode == THREAD_LOCAL and c._thread == mine)]
        for capture in spoilt:
            capture.is_valid = False
        return bool(spoilt)


class WorkQueue:
    """The work of one stream, in order.

    Args:
        device: of the stream; it knows every queue and keeps the error of work that raised.
        ptr: the handle of the stream; 0 is the legacy null stream.
        is_blocking: whether the null stream waits for it, and it for the null stream.
    """

    def __init__(self, device: Any, ptr: int, is_blocking: bool) -> None:
        self.device = device
        self.ptr = ptr
        self.is_blocking = is_blocking
        self.capture: Capture | None = None
        self.submitted = 0
        self.completed = 0
        self._work: queue.SimpleQueue[tuple[Callable[[], None], list[Ticket]] | None] = queue.SimpleQueue()
        self._progress = threading.Condition()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], None]) -> Ticket:
        """Queues work and returns its place; the sticky error of the device is raised instead."""
        self.device.check()
        if self.is_capturing():
            self.capture.works.append(work)
            return Ticket(self, self.submitted)
        with self.device.submission:  # keeps the waits between the null stream and others free of cycles
            if self._thread is None:
                self._thread = threading.Thread(target=self._execute, name=f"stream {self.ptr}", daemon=True)
                self._thread.start()
            waits = self.device.implicit_waits(self)
            self.submitted += 1
            self._work.put((work, waits))
            return Ticket(self, self.submitted)

    def mark(self) -> Ticket:
        """Returns a place behind all queued work, and behind other streams' work that new work would wait for."""
        self.device.check()
        if not self.is_capturing() and not self.device.implicit_waits(self):
            return self.last()
        return self.submit(_do_nothing)

    def is_capturing(self) -> bool:
        """Whether work is captured; raises if the capture is invalid, or of a stream that waits for this one."""
        if not Capture.running and self.capture is None:  # nearly always
            return False
        if self.capture is not None and not self.capture.is_valid:
            raise CUDARuntimeError(CAPTURE_INVALIDATED)
        if self is self.device.null_queue and any(q.is_blocking for c in Capture.running for q in c.queues):
            raise CUDARuntimeError(CAPTURE_IMPLICIT)
        return self.capture is not None

    def _refuse_capture(self) -> None:
        if self.is_capturing():
            self.capture.is_valid = False
            raise CUDARuntimeError(CAPTURE_UNSUPPORTED)

    def last(self) -> Ticket:
        """Returns the place of the last queued work."""
        return Ticket(self, self.submitted)

    def wait(self, number: int) -> None:
        """Blocks until as much work has been executed."""
        if self.completed < number:
            with self._progress:
                self._progress.wait_for(lambda: self.completed >= number)

    def synchronize(self) -> None:
        """Blocks until all work queued so far has been executed, and raises the sticky error."""
        self._refuse_capture()
        _wait_for_all(self.device.implicit_waits(self))
        self.last().wait()
        self.device.check()

    def query(self) -> int:
        """Returns cudaSuccess when all is done, cudaErrorNotReady, or the sticky error's status; never raises."""
        is_done = self.last().done and not self.device.implicit_waits(self)
        return self.device.status() or (0 if is_done else NOT_READY)

    def retire(self) -> None:
        """Ends the thread once the work is done; nothing is submitted any more.

        Without the lock: the garbage collector calls this anywhere, also where `submit` waits for a thread to start.
        """
        if self._thread is not None:
            self._work.put(None)

    def _execute(self) -> None:
        np.seterr(all="ignore")  # a GPU computes infinities without a word
        delay = _delays(self.ptr)
        while (item := self._work.get()) is not None:
            work, waits = item
            _wait_for_all(waits)
            delay()
            if self.device.error is None:
                try:
                    work()
                except BaseException as error:
                    self.device.fail(error)
            del item, work, waits  # its arrays must not be kept until the next work
            with self._progress:
                self.completed += 1
                self._progress.notify_all()


def _do_nothing() -> None:
    pass


def _wait_for_all(tickets: list[Ticket]) -> None:
    for ticket in tickets:
        ticket.wait()


def _delays(ptr: int) -> Callable[[], None]:
    """Returns a function to call before each piece of work: a seeded random pause, if the environment asks for it."""
    longest = float(os.environ.get("FAKE_CUPY_DELAY_MS", "0")) / 1e3
    if longest <= 0:
        return lambda: None
    generator = random.Random(f"{os.environ.get('FAKE_CUPY_SEED', '0')}/{os.getpid()}/{ptr}")
    return lambda: time.sleep(generator.uniform(0, longest))
