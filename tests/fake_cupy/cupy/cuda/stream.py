"""Streams and events, after cupy.cuda.stream of CuPy 14."""

from __future__ import annotations

import itertools
import os
import threading
import time
import warnings
import weakref
from typing import Any

from ._devices import PER_THREAD, all_devices, current_device, current_device_id, device_state
from ._errors import (
    CAPTURE_ISOLATION,
    CAPTURE_UNSUPPORTED,
    CAPTURED_EVENT,
    INVALID_RESOURCE_HANDLE,
    NOT_READY,
    CUDARuntimeError,
)
from ._work_queue import RELAXED, Capture, Ticket, WorkQueue

_event_handles = itertools.count(0x5600_0000_0010, 0x10)
events: weakref.WeakValueDictionary[int, Event] = weakref.WeakValueDictionary()  # by handle
_chosen = threading.local()


class _Recording:
    """One record of an event: a place in a stream, and when it was reached."""

    def __init__(self, queue: WorkQueue, has_timing: bool) -> None:
        self.reached_at = 0.0
        self.ticket: Ticket = queue.submit(self._reach) if has_timing else queue.mark()

    def _reach(self) -> None:
        self.reached_at = time.perf_counter()


class Event:
    """A mark in a stream; one that was never recorded counts as done.

    Args:
        block: whether synchronize sleeps; it always does here.
        disable_timing: whether get_elapsed_time refuses it.
        interprocess: needs disable_timing.
    """

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        if interprocess and not disable_timing:
            raise ValueError("Timing must be disabled for interprocess events")
        self.ptr = next(_event_handles)
        self._device = current_device()
        self._has_timing = not disable_timing
        self._recording: _Recording | None = None
        self._capture: Capture | None = None
        events[self.ptr] = self

    @property
    def done(self) -> bool:
        return self._query() == 0

    def record(self, stream: _BaseStream | None = None) -> None:
        """Marks the end of the present work of the stream, by default of the current one."""
        queue = (get_current_stream() if stream is None else stream)._queue()
        if queue.device is not self._device:
            raise CUDARuntimeError(INVALID_RESOURCE_HANDLE)
        self._recording = _Recording(queue, self._has_timing)
        self._capture = queue.capture

    def synchronize(self) -> None:
        """Blocks until the mark is reached."""
        if self._capture is not None:
            raise CUDARuntimeError(CAPTURED_EVENT)
        if self._recording is not None:
            self._recording.ticket.wait()
        self._device.check()

    def _query(self) -> int:
        """Returns a status and never raises, as cudaEventQuery in CuPy: after an error, `done` stays False."""
        if self._capture is not None:
            return CAPTURED_EVENT
        if Capture.spoils():
            return CAPTURE_UNSUPPORTED
        is_done = self._recording is None or self._recording.ticket.done
        if not is_done:
            time.sleep(0)  # a loop of queries would keep the streams' threads from running
        return self._device.status() or (0 if is_done else NOT_READY)


def get_elapsed_time(start_event: Event, end_event: Event) -> float:
    """Returns the milliseconds between two events, both done."""
    recordings = [event._recording for event in (start_event, end_event)]
    if None in recordings or not (start_event._has_timing and end_event._has_timing):
        raise CUDARuntimeError(INVALID_RESOURCE_HANDLE)
    if not (start_event.done and end_event.done):
        raise CUDARuntimeError(NOT_READY)
    return (recordings[1].reached_at - recordings[0].reached_at) * 1e3


class _BaseStream:
    def __init__(self, ptr: int, device_id: int) -> None:
        self.ptr = ptr
        self.device_id = device_id

    def _queue(self, device_id: int = -1) -> WorkQueue:
        """Returns the queue of this handle; the null stream is that of a device, by default of the current one."""
        own = device_id if self.device_id == -1 else self.device_id
        return (current_device() if own == -1 else device_state(own)).queue(self.ptr)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BaseStream) and self.ptr == other.ptr

    def __hash__(self) -> int:
        return self.ptr

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.ptr} (device {self.device_id})>"

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.ptr

    def __enter__(self):
        device_id = self._check_device()
        _stacks()[device_id].append(self)
        _left().append(device_id)
        return self

    def __exit__(self, *exc_info: object) -> None:
        _stacks()[_left().pop()].pop()

    def use(self):
        """Makes this the current stream of its device, in this thread."""
        _stacks()[self._check_device()][-1] = self
        return self

    def _check_device(self) -> int:
        current = current_device_id()
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
        if event._recording is not None and queue.is_capturing():
            queue.capture.is_valid = False
            raise CUDARuntimeError(CAPTURE_ISOLATION)
        if event._recording is not None and not event._recording.ticket.done:
            self._queue().submit(event._recording.ticket.wait)

    def begin_capture(self, mode: int | None = None) -> None:
        """Records work from now on for a graph instead of executing it."""
        if self.ptr in (0, 1):
            raise RuntimeError("cannot capture on the default (legacy) stream")
        Capture(self._queue(), RELAXED if mode is None else mode)

    def end_capture(self) -> Graph:
        """Returns the recorded work."""
        capture = self._queue().capture
        capture.end()
        return Graph(capture.works)

    def is_capturing(self) -> bool:
        """Whether work is recorded for a graph; raises RuntimeError if the capture is invalid."""
        return self._queue().is_capturing()

    def launch_host_func(self, callback: Any, arg: Any) -> None:
        """Queues a call of a host function."""
        self._queue().submit(lambda: callback(arg))


class Graph:
    """Work that was captured.

    Args:
        works: in order.
    """

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def launch(self, stream: _BaseStream | None = None) -> None:
        """Queues it on a stream, by default the current one."""
        queue = (get_current_stream() if stream is None else stream)._queue()
        for work in self._works:
            queue.submit(work)


class Stream(_BaseStream):
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
        if null or ptds:
            super().__init__(0 if null else PER_THREAD, -1)
            return
        state = current_device()
        self._own = state.create_queue(is_blocking=not non_blocking)
        super().__init__(self._own.ptr, state.device_id)

    def __del__(self) -> None:
        if getattr(self, "_own", None) is not None:
            self._own.device.destroy_queue(self._own)

    @staticmethod
    def from_external(obj: Any) -> _BaseStream:
        """Wraps any object with __cuda_stream__."""
        _, ptr = obj.__cuda_stream__()
        stream = _BaseStream.__new__(Stream)
        _BaseStream.__init__(stream, ptr, -1)
        stream._foreign = obj  # its owner must live as long
        return stream


class ExternalStream(_BaseStream):
    """A stream by its handle; deprecated, as in CuPy 14."""

    def __init__(self, ptr: int, device_id: int = -1) -> None:
        warnings.warn(
            "ExternalStream is deprecated. Use Stream.from_external() instead to interoperate with external streams "
            "that implement the CUDA stream protocol.",
            DeprecationWarning,
            stacklevel=2,
        )
        super().__init__(ptr, device_id)


Stream.null = Stream(null=True)
Stream.ptds = Stream(ptds=True)  # one object for all threads, as in CuPy


def get_current_stream(device_id: int = -1) -> _BaseStream:
    """Returns this thread's stream of the device, by default of the current one."""
    return _stacks()[current_device_id() if device_id == -1 else device_id][-1]


def current_queue() -> WorkQueue:
    """Returns the queue of this thread's stream."""
    return get_current_stream()._queue()


def _stacks() -> list[list[_BaseStream]]:
    """Returns this thread's streams by device, the current one last."""
    if not hasattr(_chosen, "stacks"):
        has_own = os.environ.get("CUPY_CUDA_PER_THREAD_DEFAULT_STREAM", "0") != "0"
        _chosen.stacks = [[Stream.ptds if has_own else Stream.null] for _ in all_devices()]
    return _chosen.stacks


def _left() -> list[int]:
    """Returns the devices of this thread's `with` statements, innermost last."""
    if not hasattr(_chosen, "left"):
        _chosen.left = []
    return _chosen.left
