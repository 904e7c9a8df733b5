"""The devices of this process: which are visible, the choice of each thread, their streams and errors."""

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
from ._work import Ticket, WorkQueue

PER_THREAD = 2  # cudaStreamPerThread
_handles = itertools.count(0x5500_0000_0010, 0x10)
_streams: dict[int, WorkQueue] = {}  # by handle, while the stream exists
_chosen = threading.local()
_is_dead = False  # a fork of a process that has used CUDA
#: Devices on which this process has a context, half a GB each: since CUDA 12, choosing a device makes one at once.
contexts: set[int] = set()


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

    def create_queue(self, is_blocking: bool, *, has_handle: bool = True) -> WorkQueue:
        """The queue of a new stream."""
        queue = WorkQueue(self, next(_handles), is_blocking)
        with self.submission:
            self._queues.add(queue)
            if is_blocking:
                self._blocking.add(queue)
        if has_handle:
            _streams[queue.ptr] = queue
        return queue

    def destroy_queue(self, queue: WorkQueue) -> None:
        """Forgets the handle; the work that is queued is still done."""
        _streams.pop(queue.ptr, None)
        queue.retire()

    def find_queue(self, ptr: int) -> WorkQueue | None:
        """The queue of this device's stream with that handle; None if there is none."""
        if ptr in (0, 1):  # cudaStreamLegacy is 1
            return self.null_queue
        if ptr == PER_THREAD:  # one handle, and a stream for each thread
            if not hasattr(self._of_thread, "queue"):
                self._of_thread.queue = self.create_queue(is_blocking=True, has_handle=False)
            queue: WorkQueue = self._of_thread.queue
            return queue
        found = _streams.get(ptr)
        return found if found is not None and found.device is self else None

    def queue(self, ptr: int) -> WorkQueue:
        """The same, or raises."""
        queue = self.find_queue(ptr)
        if queue is None:
            raise CUDARuntimeError(INVALID_RESOURCE_HANDLE)
        return queue

    def implicit_waits(self, queue: WorkQueue) -> list[Ticket]:
        """The work on other streams that new work must wait for: the rule of the legacy null stream."""
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
        """The code of the sticky error, or 0."""
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
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = int(os.environ.get("FAKE_CUPY_DEVICES", "1"))
    if visible is None:
        return tuple(DeviceState(number, number) for number in range(count))
    if visible.startswith("MIG-"):
        return (DeviceState(0, 0, visible.partition(",")[0]),)  # a process sees a single one
    indices: list[int] = []
    for word in visible.split(","):  # the first word that names no device ends the list
        if not word.strip().isdecimal() or not (index := int(word)) < count or index in indices:
            break
        indices.append(index)
    return tuple(DeviceState(number, index) for number, index in enumerate(indices))


def all_devices() -> tuple[DeviceState, ...]:
    """Every visible device; raises where there is none, and after a fork."""
    if _is_dead:
        raise CUDARuntimeError(INITIALIZATION_ERROR)
    devices = _devices()
    if not devices:
        raise CUDARuntimeError(NO_DEVICE)
    return devices


def device_state(device_id: int) -> DeviceState:
    """The device with that number."""
    devices = all_devices()
    if not 0 <= device_id < len(devices):
        raise CUDARuntimeError(INVALID_DEVICE)
    return devices[device_id]


def current_device() -> DeviceState:
    """This thread's device: the first one until it chooses."""
    if _is_dead:
        raise CUDARuntimeError(INITIALIZATION_ERROR)
    try:
        return _chosen.device
    except AttributeError:
        return device_state(0)


class Device:
    """A device by its number, by default the current one; a context that makes it current."""

    def __init__(self, device: int | Device | None = None) -> None:
        self.id: int = current_device().device_id if device is None else int(device)

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self.id == other.id

    __hash__ = None  # as in CuPy

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"

    def __enter__(self) -> Device:
        left = current_device().device_id
        self.use()
        _stack().append(left)
        return self

    def __exit__(self, *exc_info: object) -> None:
        Device(_stack().pop()).use()  # also where this thread had never chosen one

    def use(self) -> None:
        """Makes it this thread's device."""
        _chosen.device = device_state(self.id)
        contexts.add(self.id)

    def synchronize(self) -> None:
        """Waits for all its streams."""
        device_state(self.id).synchronize()


def _stack() -> list[int]:
    """The devices that this thread's `with` statements have left."""
    if not hasattr(_chosen, "left"):
        _chosen.left = []
    return _chosen.left


def _die_in_fork() -> None:
    global _is_dead
    _is_dead = _devices.cache_info().currsize > 0


os.register_at_fork(after_in_child=_die_in_fork)
