"""The devices of this process: visible devices, the choice of each thread, and their streams and errors."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import threading
import weakref

from ._errors import (
    INITIALIZATION_ERROR,
    INVALID_DEVICE,
    INVALID_RESOURCE_HANDLE,
    LAUNCH_FAILURE,
    NO_DEVICE,
    CUDARuntimeError,
)
from ._work_queue import Ticket, WorkQueue

PER_THREAD = 2  # cudaStreamPerThread
_stream_handles = itertools.count(0x5500_0000_0010, 0x10)
_streams: dict[int, WorkQueue] = {}  # by handle, while the stream exists
_chosen = threading.local()
_is_dead = False  # a fork of a process that has used CUDA


class DeviceState:
    """One device of this process.

    Args:
        device_id: its number here.
        absolute_index: its number on the machine.
        slice_name: of a MIG instance, which has the bus id of its GPU, and a UUID of its own.
    """

    def __init__(self, device_id: int, absolute_index: int, slice_name: str = "") -> None:
        self.device_id = device_id
        uuid = hashlib.sha256(f"{absolute_index} {slice_name}".encode()).digest()[:16]
        self.uuid = uuid.partition(b"\0")[0]  # what CuPy has of it: its declaration is that of a text in C
        self.pci_bus_id = f"0000:{absolute_index:02X}:00.0"
        self.submission = threading.RLock()
        self.kernel = threading.Lock()  # held by the collective that runs: NCCL promises no room for a second one
        self.error: BaseException | None = None
        self._queues: weakref.WeakSet[WorkQueue] = weakref.WeakSet()
        self._blocking: weakref.WeakSet[WorkQueue] = weakref.WeakSet()  # those for which the null stream waits
        self.null_queue = WorkQueue(self, 0, is_blocking=True)
        self._of_thread = threading.local()

    def create_queue(self, is_blocking: bool) -> WorkQueue:
        """Makes the queue of a new stream."""
        queue = WorkQueue(self, next(_stream_handles), is_blocking)
        with self.submission:
            self._queues.add(queue)
            if is_blocking:
                self._blocking.add(queue)
        _streams[queue.ptr] = queue
        return queue

    def destroy_queue(self, queue: WorkQueue) -> None:
        """Forgets the handle; the work that is queued is still done."""
        _streams.pop(queue.ptr, None)
        queue.retire()

    def find_queue(self, ptr: int) -> WorkQueue | None:
        """Returns the queue of this device's stream with that handle, or None."""
        if ptr in (0, 1):  # cudaStreamLegacy is 1
            return self.null_queue
        if ptr == PER_THREAD:
            return self._thread_queue()
        queue = _streams.get(ptr)
        return queue if queue is not None and queue.device is self else None

    def _thread_queue(self) -> WorkQueue:
        """Returns the queue of this thread's own default stream: one handle, and a stream for each thread."""
        queue: WorkQueue | None = getattr(self._of_thread, "queue", None)
        if queue is None:
            queue = self._of_thread.queue = WorkQueue(self, next(_stream_handles), is_blocking=True)
            with self.submission:
                self._queues.add(queue)
                self._blocking.add(queue)
        return queue

    def queue(self, ptr: int) -> WorkQueue:
        """The same, or raises."""
        queue = self.find_queue(ptr)
        if queue is None:
            raise CUDARuntimeError(INVALID_RESOURCE_HANDLE)
        return queue

    def implicit_waits(self, queue: WorkQueue) -> list[Ticket]:
        """Returns the work on other streams that new work must wait for: the rule of the legacy null stream."""
        if queue is self.null_queue:
            tickets = [other.last() for other in list(self._blocking)] if self._blocking.data else []
        else:
            tickets = [self.null_queue.last()] if queue.is_blocking else []
        return [ticket for ticket in tickets if not ticket.done]

    def synchronize(self) -> None:
        """Waits for all streams, and raises the sticky error."""
        with self.submission:
            tickets = [queue.last() for queue in (self.null_queue, *self._queues)]
        for ticket in tickets:
            ticket.wait()
        self.check()

    def fail(self, error: BaseException) -> None:
        """Keeps the first error for good, as a CUDA context does."""
        if self.error is None:
            self.error = error

    def status(self) -> int:
        """Returns the status of the sticky error, or 0."""
        if self.error is None:
            return 0
        return self.error.status if isinstance(self.error, CUDARuntimeError) else LAUNCH_FAILURE

    def check(self) -> None:
        """Raises the sticky error."""
        if self.error is not None:
            raise CUDARuntimeError(self.status()) from self.error


@functools.cache
def _devices() -> tuple[DeviceState, ...]:
    """Looked at once, as CUDA does."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if visible.startswith("MIG-"):
        return (DeviceState(0, 0, visible.partition(",")[0]),)  # a process sees a single one
    return tuple(DeviceState(number, absolute) for number, absolute in enumerate(_visible_indices()))


def _visible_indices() -> list[int]:
    count = int(os.environ.get("FAKE_CUPY_DEVICES", "1"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return list(range(count))
    indices: list[int] = []
    for word in visible.split(","):  # the first word that names no device ends the list
        if not word.strip().isdecimal() or not (index := int(word)) < count or index in indices:
            break
        indices.append(index)
    return indices


def all_devices() -> tuple[DeviceState, ...]:
    """Returns every visible device; raises where there is none, and after a fork."""
    if _is_dead:
        raise CUDARuntimeError(INITIALIZATION_ERROR)
    devices = _devices()
    if not devices:
        raise CUDARuntimeError(NO_DEVICE)
    return devices


def device_state(device_id: int) -> DeviceState:
    """Returns the device with that number."""
    devices = all_devices()
    if not 0 <= device_id < len(devices):
        raise CUDARuntimeError(INVALID_DEVICE)
    return devices[device_id]


def current_device_id() -> int:
    """Returns the number of this thread's device."""
    return current_device().device_id


def current_device() -> DeviceState:
    """Returns this thread's device."""
    if _is_dead:
        raise CUDARuntimeError(INITIALIZATION_ERROR)
    try:
        return _chosen.device
    except AttributeError:
        choose_device(0)
        return _chosen.device


def choose_device(device_id: int) -> None:
    """Makes a device this thread's."""
    _chosen.device = device_state(device_id)


def _die_in_fork() -> None:
    global _is_dead
    _is_dead = _devices.cache_info().currsize > 0


os.register_at_fork(after_in_child=_die_in_fork)
