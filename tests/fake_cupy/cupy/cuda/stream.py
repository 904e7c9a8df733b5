"""Streams and events, after cupy.cuda.stream of CuPy 14."""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from typing import Any

from ._devices import PER_THREAD, all_devices, current_device, device_state
from ._errors import (
    CAPTURE_ISOLATION,
    CAPTURE_UNSUPPORTED,
    CAPTURED_EVENT,
    INVALID_RESOURCE_HANDLE,
    NOT_READY,
    CUDARuntimeError,
)
from ._work import RELAXED, Capture, Ticket, WorkQueue

_event_handles = itertools.count(0x5600_0000_0010, 0x10)
events: weakref.WeakValueDictionary[int, Event] = weakref.WeakValueDictionary()  # by handle
_chosen = threading.local()


class Event:
    """A mark in a stream; one that was never recorded counts as done.

    Args:
        block, interprocess: nothing here.
        disable_timing: whether get_elapsed_time refuses it.
    """

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self.ptr = next(_event_handles)
        self._device = current_device()
        self._ticket: Ticket | None = None
        self._capture: Capture | None = None
        self._is_timed, self._seconds = not disable_timing, 0.0
        events[self.ptr] = self

    @property
    def done(self) -> bool:
        return self.query() == 0

    def record(self, stream: Stream | None = None) -> None:
        """Marks the end of the present work of the stream, by default of the current one."""
        queue = (get_current_stream() if stream is None else stream)._queue()
        if queue.device is not self._device:
            raise CUDARuntimeError(INVALID_RESOURCE_HANDLE)
        self._ticket = queue.submit(self._stamp) if self._is_timed else queue.mark()
        self._capture = queue.capture

    def _stamp(self) -> None:
        self._seconds = time.perf_counter()

    def synchronize(self) -> None:
        """Blocks until the mark is reached."""
        if self._capture is not None:
            raise CUDARuntimeError(CAPTURED_EVENT)
        if self._ticket is not None:
            self._ticket.wait()
        self._device.check()

    def query(self) -> int:
        """cudaEventQuery: a code, never an exception; after an error of the device it stays that error's."""
        if self._capture is not None:
            return CAPTURED_EVENT
        if Capture.running and Capture.spoils():
            return CAPTURE_UNSUPPORTED
        is_done = self._ticket is None or self._ticket.done
        if not is_done:
            time.sleep(0)  # a loop of queries would keep the streams' threads from running
        return self._device.status() or (0 if is_done else NOT_READY)


def get_elapsed_time(start_event: Event, end_event: Event) -> float:
    """The milliseconds between two marks."""
    for event in (start_event, end_event):
        if not event._is_timed or event._ticket is None:
            raise CUDARuntimeError(INVALID_RESOURCE_HANDLE)
        if (status := event.query()) != 0:
            raise CUDARuntimeError(status)
    return (end_event._seconds - start_event._seconds) * 1e3


class Stream:
    """A stream of the current device.

    Args:
        null: the legacy null stream.
        non_blocking: whether the null stream and this one ignore each other.
        ptds: the default stream of whichever thread uses it.
    """

    null: Stream
    ptds: Stream

    def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False) -> None:
        self._own: WorkQueue | None = None
        self.ptr, self.device_id = (0 if null else PER_THREAD), -1
        if not (null or ptds):
            self.device_id = current_device().device_id
            self._own = current_device().create_queue(is_blocking=not non_blocking)
            self.ptr = self._own.ptr

    def __del__(self) -> None:
        if getattr(self, "_own", None) is not None:
            self._own.device.destroy_queue(self._own)

    @staticmethod
    def from_external(obj: Any) -> Stream:
        """Wraps any object with __cuda_stream__, and keeps it."""
        stream = Stream(null=True)
        stream.ptr = obj.__cuda_stream__()[1]
        stream._foreign = obj
        return stream

    def _queue(self, device_id: int = -1) -> WorkQueue:
        """The queue of this handle; the null stream's is that of a device, by default of the current one."""
        own = device_id if self.device_id == -1 else self.device_id
        return (current_device() if own == -1 else device_state(own)).queue(self.ptr)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.ptr == other.ptr

    def __hash__(self) -> int:
        return self.ptr

    def __enter__(self) -> Stream:
        device_id = self._check_device()
        _stacks()[device_id].append(self)
        _chosen.left.append(device_id)
        return self

    def __exit__(self, *exc_info: object) -> None:
        _stacks()[_chosen.left.pop()].pop()

    def _check_device(self) -> int:
        current = current_device().device_id
        if self.device_id not in (-1, current):
            raise RuntimeError(
                f"The device that the stream is created on ({self.device_id}) does not match with the current "
                f"device ({current})"
            )
        return current

    @property
    def done(self) -> bool:
        return self._queue().query() == 0

    def synchronize(self) -> None:
        """Blocks until all that was queued is done."""
        self._queue().synchronize()

    def record(self, event: Event | None = None) -> Event:
        """Records an event here; see Event.record."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Makes work from now on wait for the event's present mark."""
        queue, captured = self._queue(), event._capture
        if captured is not None:
            if captured.has_ended:
                raise CUDARuntimeError(CAPTURED_EVENT)
            if queue.capture is None:
                captured.join(queue)
            return
        if event._ticket is not None and queue.is_capturing():
            queue.capture.is_valid = False
            raise CUDARuntimeError(CAPTURE_ISOLATION)
        if event._ticket is not None and not event._ticket.done:
            queue.submit(event._ticket.wait)

    def launch_host_func(self, callback: Any, arg: Any) -> None:
        """Queues a call of a host function."""
        self._queue().submit(lambda: callback(arg))

    def begin_capture(self, mode: int | None = None) -> None:
        """Records work from now on for a graph instead of doing it."""
        if self.ptr in (0, 1):
            raise RuntimeError("cannot capture on the default (legacy) stream")
        Capture(self._queue(), RELAXED if mode is None else mode)

    def end_capture(self) -> Graph:
        """The recorded work."""
        capture = self._queue().capture
        capture.end()
        return Graph(capture.works)

    def is_capturing(self) -> bool:
        """Whether work is recorded for a graph; raises if that is invalid."""
        return self._queue().is_capturing()


class Graph:
    """Work that was captured."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def launch(self, stream: Stream | None = None) -> None:
        """Queues it on a stream, by default the current one."""
        for work in self._works:
            (get_current_stream() if stream is None else stream)._queue().submit(work)


Stream.null = Stream(null=True)
Stream.ptds = Stream(ptds=True)  # one object for all threads, as in CuPy


def get_current_stream(device_id: int = -1) -> Stream:
    """This thread's stream of the device, by default of the current one."""
    return _stacks()[current_device().device_id if device_id == -1 else device_id][-1]


def current_queue() -> WorkQueue:
    """The queue of this thread's stream."""
    return get_current_stream()._queue()


def _stacks() -> list[list[Stream]]:
    """This thread's streams by device, the current one last."""
    if not hasattr(_chosen, "stacks"):
        has_own = os.environ.get("CUPY_CUDA_PER_THREAD_DEFAULT_STREAM", "0") != "0"
        _chosen.stacks = [[Stream.ptds if has_own else Stream.null] for _ in all_devices()]
        _chosen.left = []  # the devices of this thread's `with` statements, innermost last
    return _chosen.stacks
