"""The work of one stream: done in order, by a thread of its own, unless it is captured for a graph."""

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
    """A point in a stream: done when all work up to it is."""

    queue: WorkQueue
    number: int

    @property
    def done(self) -> bool:
        return self.queue.completed >= self.number

    def wait(self) -> None:
        self.queue.wait(self.number)


class Capture:
    """Work that streams record for a CUDA graph instead of doing it.

    Source: the CUDA runtime API, cudaStreamBeginCapture, cudaThreadExchangeStreamCaptureMode and the errors 900 to 907.

    Args:
        queue: of the stream where it begins.
        mode: forbidden calls of which threads invalidate it: of all threads, of its own, or of none.
    """

    running: ClassVar[list[Capture]] = []

    def __init__(self, queue: WorkQueue, mode: int) -> None:
        self.queues: list[WorkQueue] = []
        self.works: list[Callable[[], None]] = []
        self.is_valid, self.has_ended = True, False
        self._mode, self._thread = mode, threading.get_ident()
        self.join(queue)
        self.running.append(self)

    def join(self, queue: WorkQueue) -> None:
        """Adds another stream to it."""
        queue.capture = self
        self.queues.append(queue)

    def end(self) -> None:
        """Ends it on all its streams; raises if it is invalid."""
        self.running.remove(self)
        self.has_ended = True
        for captured in self.queues:
            captured.capture = None
        if not self.is_valid:
            raise CUDARuntimeError(CAPTURE_INVALIDATED)

    @classmethod
    def spoils(cls) -> bool:
        """Whether a call of this thread, which no capture allows, has just invalidated one."""
        mine = threading.get_ident()
        spoilt = [c for c in list(cls.running) if c._mode == GLOBAL or (c._mode == THREAD_LOCAL and c._thread == mine)]
        for capture in spoilt:
            capture.is_valid = False
        return bool(spoilt)


class WorkQueue:
    """The work of one stream, in order.

    Args:
        device: of the stream; it knows every queue, and keeps the error of work that raised.
        ptr: the handle of the stream; 0 is the legacy null stream.
        is_blocking: whether the null stream waits for it, and it for the null stream.
    """

    def __init__(self, device: Any, ptr: int, is_blocking: bool) -> None:
        self.device, self.ptr, self.is_blocking = device, ptr, is_blocking
        self.capture: Capture | None = None
        self.submitted = self.completed = 0
        self._work: queue.SimpleQueue[tuple[Callable[[], None], list[Ticket]] | None] = queue.SimpleQueue()
        self._progress = threading.Condition()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], None]) -> Ticket:
        """Queues work, or raises the sticky error of the device."""
        self.device.check()
        if self.is_capturing():
            self.capture.works.append(work)
            return self.last()
        with self.device.submission:  # keeps the waits between the null stream and others free of cycles
            if self._thread is None:
                self._thread = threading.Thread(target=self._execute, name=f"stream {self.ptr}", daemon=True)
                self._thread.start()
            waits = self.device.implicit_waits(self)
            self.submitted += 1
            self._work.put((work, waits))
            return self.last()

    def last(self) -> Ticket:
        """The point behind all queued work."""
        return Ticket(self, self.submitted)

    def mark(self) -> Ticket:
        """The same, also behind other streams' work that new work would wait for."""
        self.device.check()
        if not self.is_capturing() and not self.device.implicit_waits(self):
            return self.last()
        return self.submit(lambda: None)

    def is_capturing(self) -> bool:
        """Whether work is captured; raises if the capture is invalid, or of a stream that waits for this one."""
        if self.capture is not None and not self.capture.is_valid:
            raise CUDARuntimeError(CAPTURE_INVALIDATED)
        if self is self.device.null_queue and any(q.is_blocking for c in Capture.running for q in c.queues):
            raise CUDARuntimeError(CAPTURE_IMPLICIT)
        return self.capture is not None

    def wait(self, number: int) -> None:
        """Blocks until as much work is done."""
        if self.completed < number:
            with self._progress:
                self._progress.wait_for(lambda: self.completed >= number)

    def synchronize(self) -> None:
        """Blocks until all work queued so far is done, and raises the sticky error."""
        if self.is_capturing():
            self.capture.is_valid = False
            raise CUDARuntimeError(CAPTURE_UNSUPPORTED)
        for ticket in [*self.device.implicit_waits(self), self.last()]:
            ticket.wait()
        self.device.check()

    def query(self) -> int:
        """0 when all is done, cudaErrorNotReady, or the sticky error's code."""
        is_done = self.last().done and not self.device.implicit_waits(self)
        return self.device.status() or (0 if is_done else NOT_READY)

    def retire(self) -> None:
        """Ends the thread after its work. Takes no lock, since the garbage collector calls it anywhere."""
        if self._thread is not None:
            self._work.put(None)

    def _execute(self) -> None:
        np.seterr(all="ignore")  # a GPU computes infinities without a word
        delay = _delays(self.ptr)
        while (item := self._work.get()) is not None:
            work, waits = item
            for ticket in waits:
                ticket.wait()
            delay()
            if self.device.error is None:
                try:
                    work()
                except BaseException as error:
                    self.device.fail(error)
            del item, work, waits  # not to be kept until the next work
            with self._progress:
                self.completed += 1
                self._progress.notify_all()


def _delays(ptr: int) -> Callable[[], None]:
    """What to call before each piece of work: a pause of random length, if the environment asks for it."""
    longest = float(os.environ.get("FAKE_CUPY_DELAY_MS", "0")) / 1e3
    if longest <= 0:
        return lambda: None
    generator = random.Random(f"{os.environ.get('FAKE_CUPY_SEED', '0')}/{os.getpid()}/{ptr}")
    return lambda: time.sleep(generator.uniform(0, longest))
