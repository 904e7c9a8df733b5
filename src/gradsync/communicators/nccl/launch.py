"""Launches: collectives on a GPU. The GPU may run a collective after its call has returned.

A GpuLaunch keeps the collective's memory alive, checks whether the collective has ended, and copies results to host
arrays.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import cupy
import numpy as np

from gradsync.arguments import integer_of
from gradsync.communicators.backend import Backend, Launch
from gradsync.communicators.nccl.library import Nccl
from gradsync.diagnostics import Running, finish
from gradsync.errors import CollectiveTimeout, InvalidArgument, NcclError, describe
from gradsync.futures import again, refuse_wait_in_callback

_log = logging.getLogger("gradsync")

# A waiting thread first checks without a pause, because most collectives take microseconds. Later the thread sleeps
# between checks.
_CHECKS_WITHOUT_SLEEP = 200
_SLEEP_SECONDS = 100e-6
# How long `wait` waits after the deadline, so that the watcher can find the reason: longer than a rank waits for the
# server's report (FAILURE_WITHIN_SECONDS of the rendezvous).
_VERDICT_SECONDS = 12.0
_MAX_MARKS = 64

CUDA_SUCCESS, _CUDA_NOT_READY = 0, 600
# CUDA's errors for calls that are forbidden during a graph capture; such an error does not mean that the GPU has
# failed. Source: cudaError_t.
_CUDA_CAPTURE = range(900, 909)
_CUDA_CAPTURE_IMPLICIT = 906  # the null stream was queried, and a stream that synchronizes with it captures a graph


class Events:
    """CUDA events of one device. Launches use events again, because creating an event takes longer than recording one.

    It is safe to record an event again. A stream that already waits for the event goes on waiting only for the work
    before the previous record. A stream that begins to wait after the new record also waits for the work between the
    two records. This stream may wait longer than needed, but it never waits for its own work.
    """

    def __init__(self) -> None:
        self._free: list[tuple[Any, Any]] = []
        # The keys contain the thread too, because the default streams of all threads have the same handle. The values
        # contain the stream, so that CUDA does not give the stream's handle to another stream.
        self._marks: dict[tuple[int, int], tuple[Any, Any]] = {}

    def take(self) -> tuple[Any, Any]:
        """Returns two events that no launch uses."""
        try:
            return self._free.pop()
        except IndexError:
            return cupy.cuda.Event(disable_timing=True), cupy.cuda.Event(disable_timing=True)

    def give_back(self, events: tuple[Any, Any]) -> None:
        """Makes the two events of a launch that has ended available to other launches."""
        self._free.append(events)

    def mark(self, stream: Any) -> Any:
        """Records an event on a stream, after the work that is already queued, and returns the event.

        Each thread uses one event for each stream again and again, so that the method is fast enough to be called for
        every gradient. The stream's device must be the current device: the default streams of all devices have the
        same handle, and CUDA takes this handle as the default stream of the current device.
        """
        key = threading.get_ident(), stream.ptr
        found = self._marks.get(key)
        if found is None:
            if len(self._marks) >= _MAX_MARKS:
                self._marks.clear()
            found = self._marks[key] = stream, cupy.cuda.Event(disable_timing=True)
        found[1].record(stream)
        return found[1]


class GpuLaunch(Launch):
    """One collective or message on a GPU. It ends when the GPU reaches its event `ended`.

    Attributes:
        name: the collective's name in errors and logs.
        has_begun: whether the ranks have agreed on it, so that NCCL may have begun.
        peers: of a message, the world rank of its other rank; None for a collective.
        memory: the arrays that the GPU reads or writes. Without these references, CuPy's pool would reuse the memory
            while a stream still uses it.
        stream, thread: the stream on which the collective runs, and the id of the thread that launched it.
        started: the CUDA event recorded before the collective. The collective's time limit begins when the GPU reaches
            this event, so it does not include the time of earlier work on the GPU.
        ended: the CUDA event recorded after the collective.
        recorded: the collective's entry in the flight recorder; set when the collective is launched.
        seen_started_at: the time at which the watcher found that the collective has begun.
        is_over: whether the collective has ended, or failed.
        error: the collective's failure, or None.
        callbacks: the functions to call when the collective has ended or failed.

    Args:
        backend: the communicator's backend.
        nccl: this rank's NCCL communicator.
        events: the pool of CUDA events of the communicator's device.
        stream: the stream on which the collective runs.
        tell: a function that is told of its failure before the program is.
    """

    # Nearly every launch keeps these defaults. Class attributes hold the defaults, because setting attributes for each
    # launch would take time.
    is_done = False  # also later: streams must wait for its end
    has_begun = False
    peers: Sequence[int] | None = None
    recorded: Running | None = None
    seen_started_at: float | None = None
    is_over = False
    error: BaseException | None = None
    _calls_back = False  # whether callbacks have still to be called; a callback that is added meanwhile runs after them

    def __init__(
        self, backend: Backend, nccl: Nccl, events: Events, stream: Any, tell: Callable[[BaseException], None]
    ) -> None:
        self._backend = backend
        self._tell = tell
        self._nccl = nccl
        self._events = events
        self.stream = stream
        self.started, self.ended = events.take()
        self.thread = threading.get_ident()
        self.memory: list[Any] = []
        self._host_results: list[tuple[Any, Any]] = []  # (bytes in pinned memory, NumPy array)
        self.callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return f"{self._backend.label}: a collective"

    # -- While launching -----------------------------------------------------------------------------------------

    def keep(self, *arrays: Any) -> None:
        """See Launch."""
        self.memory += arrays

    def write_back(self, flat: Any, native: Any) -> None:
        """See Launch. A host array gets its values when the GPU has ended: the current stream copies to pinned memory,
        and the host from there.
        """
        if not isinstance(native, np.ndarray):
            self.keep(flat, native)
            self._backend.arrays.write_back(flat, native)
            return
        await_results_in(native)  # otherwise an earlier collective could overwrite the new result
        pinned = cupy.cuda.alloc_pinned_memory(max(flat.nbytes, 1))
        staging = np.frombuffer(pinned, np.uint8, flat.nbytes)
        if flat.nbytes:
            flat.view(np.uint8).get(out=staging, blocking=False)
        self.memory.append(flat)
        self._host_results.append((staging, native))
        self.has_host_results = True

    def record_end(self) -> None:
        """Records the event `ended` on the stream, after all work of the collective."""
        self.ended.record(self.stream)
        if self._host_results:
            with _registering:
                _with_host_results.add(self)

    def will_write(self, array: Any) -> bool:
        """Whether the collective still has to write a result to the memory of the given host array."""
        return not self.is_over and any(np.may_share_memory(native, array) for _, native in self._host_results)

    # -- Work ----------------------------------------------------------------------------------------------------

    def done(self) -> bool:
        """See Work."""
        return self.is_over or self._settle()

    def order(self, name: str = "", stream: Any = None, timeout_seconds: float | None = None) -> None:
        """See Work."""
        if self.has_host_results:
            self._wait(name or self.name, timeout_seconds)
        elif self.error is not None or not self.is_over:
            self._raise_error()
            device_id = self._nccl.device_id
            with cupy.cuda.Device(device_id):  # a default stream's handle means the current device's stream
                waiting = as_stream(stream, device_id, self.name)
                try:
                    waiting.wait_event(self.ended)
                except cupy.cuda.runtime.CUDARuntimeError as error:
                    if error.status in _CUDA_CAPTURE:
                        raise InvalidArgument(_is_capturing(self.name)) from error
                    raise

    def wait(self, timeout_seconds: float | None = None) -> None:
        """See Work."""
        self._wait(self.name, timeout_seconds)

    def failure(self) -> BaseException | None:
        """See Work."""
        if self.error is not None:
            self._tell(self.error)
        return self.error

    def _wait(self, name: str, timeout_seconds: float | None) -> None:
        if not self.done():
            refuse_wait_in_callback(name)
            self.await_end(timeout_seconds)
        self._raise_error()

    def await_end(self, timeout_seconds: float | None = None) -> None:
        """Makes the host wait until the work has ended or failed. Raises only CollectiveTimeout."""
        seconds = self._backend.timeout_seconds if timeout_seconds is None else timeout_seconds
        deadline = time.monotonic() + seconds
        # If the collective has begun on the GPU, the watcher finds the missing ranks, and every rank gets the same
        # error.
        verdict_by = deadline + (_VERDICT_SECONDS if timeout_seconds is None else 0.0)
        checks = 0
        while not self.done():
            checks += 1
            if checks > _CHECKS_WITHOUT_SLEEP:
                now = time.monotonic()
                if now >= deadline and (now >= verdict_by or not self.started.done):
                    state = "has begun it" if self.started.done else "is still busy with earlier work of this rank"
                    raise CollectiveTimeout(f"{self.name} did not end within {seconds:g} s: the GPU {state}")
                time.sleep(_SLEEP_SECONDS)

    def when_done(self, function: Callable[[], None]) -> None:
        """See Work."""
        with self._lock:
            if not self.is_over or self._calls_back:
                self.callbacks.append(function)
                return
        self._call(function)

    # -- Its end -------------------------------------------------------------------------------------------------

    def take_memory(self) -> list[Any]:
        """Returns all references of the launch to the memory that the GPU reads or writes, and drops them."""
        memory = [*self.memory, *self._host_results]
        self.memory.clear()
        self._host_results.clear()
        return memory

    def _settle(self) -> bool:
        """Returns whether the launch has ended.

        If the GPU has reached `ended`, first copies results to the host and ends the launch.
        """
        # `self.ended.done` is not used here, because it stays False for ever if the GPU has failed.
        status = cupy.cuda.runtime.eventQuery(self.ended.ptr)
        if status == _CUDA_NOT_READY or status in _CUDA_CAPTURE:  # _CUDA_CAPTURE: another thread captures a graph
            return False
        if status == CUDA_SUCCESS:
            try:
                self._nccl.check()
            except NcclError:
                return False  # the collective has ended without a result; the watcher will find the reason
        self.end(None if status == CUDA_SUCCESS else self._device_error(status))
        return True

    def _device_error(self, status: int) -> NcclError:
        cause = cupy.cuda.runtime.CUDARuntimeError(status)
        return NcclError(
            f"{self.name}: the GPU failed in this collective, or in earlier work of this rank: {cause}; run the script "
            "with CUDA_LAUNCH_BLOCKING=1, or under compute-sanitizer, to find the kernel",
            code=1,
            name="ncclUnhandledCudaError",
        )

    def end(self, error: BaseException | None) -> None:
        """Ends the launch, with an error if one is given; does nothing if the launch has ended already."""
        has_ended = error is None  # otherwise the GPU may still use the memory
        with self._lock:
            if self.is_over:
                return
            if has_ended:
                error = self._copy_to_host()
            self.error = error
            self._calls_back = bool(self.callbacks)
            self.is_over = True
            if self.recorded is not None:
                finish(self.recorded, failed=error is not None)
            if has_ended:
                self.take_memory()
        if error is None:
            self._events.give_back((self.started, self.ended))

    def _copy_to_host(self) -> NcclError | None:
        """Copies results to the host arrays. If a copy fails, returns the error."""
        try:
            for staging, native in self._host_results:
                native[...] = staging.view(native.dtype).reshape(native.shape)
        except Exception as error:  # e.g. the program has made the array read-only, or resized it
            return NcclError(f"{self.name}: gradsync could not copy its result into the host array: {describe(error)}")
        return None

    def _raise_error(self) -> None:
        error = self.failure()
        if error is not None:
            raise again(error)

    def _call(self, function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:  # also SystemExit, because this thread calls the callbacks of other launches too
            _log.error("a callback at the end of %s raised %s", self.name, describe(error))

    def call_back(self) -> None:
        """Calls the functions in `callbacks` in their order, also functions that are added meanwhile."""
        while self._calls_back:
            with self._lock:
                callbacks, self.callbacks = self.callbacks, []
                self._calls_back = bool(callbacks)
            for function in callbacks:
                self._call(function)


_with_host_results: weakref.WeakSet[GpuLaunch] = weakref.WeakSet()
_registering = threading.Lock()  # a set must not grow while another thread iterates over it


def await_results_in(array: Any) -> None:
    """Waits until all launches of this process that write a result to the given host array have ended or failed."""
    with _registering:
        launches = [launch for launch in _with_host_results if launch.will_write(array)]
    for launch in launches:
        with contextlib.suppress(CollectiveTimeout):  # the launch's own future raises the error
            launch.await_end()


def as_stream(stream: Any, device_id: int, who: str) -> Any:
    """Returns a CuPy stream for a stream that the program has passed to gradsync.

    Args:
        stream: a CuPy stream, a PyTorch stream, a stream's handle as an integer, or an object with CUDA's method
            `__cuda_stream__`; None means the calling thread's current stream on the device.
        device_id: the CUDA number of the device to which the stream must belong.
        who: the name of the caller, with which an error's text begins.

    Raises:
        InvalidArgument: `stream` is not a stream, or belongs to another GPU.
    """
    if stream is None:
        return cupy.cuda.get_current_stream(device_id)
    if hasattr(stream, "ptr"):
        given = stream.device_id
        if given not in (-1, device_id):  # -1: CuPy does not know the stream's device
            raise InvalidArgument(f"{who} needs a stream of cuda:{device_id}, got one of cuda:{given}")
        return stream
    if not hasattr(stream, "__cuda_stream__"):
        handle = integer_of(getattr(stream, "cuda_stream", stream))
        if handle is None:
            needed = "a CuPy or PyTorch stream, its handle as an integer, or an object with __cuda_stream__"
            given = "an array" if hasattr(stream, "shape") else repr(stream)
            raise InvalidArgument(f"{who} needs a stream: {needed}; got {given}")
        stream = SimpleNamespace(__cuda_stream__=lambda: (0, handle))
    return cupy.cuda.Stream.from_external(stream)


def refuse_capturing(stream: Any, label: str, what: str) -> None:
    """Raises an error if a stream captures a CUDA graph.

    Queries the driver once, and does not wait. A collective's agreement between the ranks, its deadline and its events
    run on the host, and a CUDA graph cannot contain them. Without this check, CUDA would raise error 905 or 907 in the
    middle of the call, when the other ranks already wait for this rank.

    Args:
        stream: the CuPy stream to check.
        label, what: the names of this rank and of the call, for the error's text.

    Raises:
        InvalidArgument: the stream captures a graph; or it is the null stream, and another stream that synchronizes
            with the null stream captures a graph.
    """
    try:
        if not stream.is_capturing():
            return
    except RuntimeError as error:  # CuPy raises this error if the capture is invalid
        if getattr(error, "status", _CUDA_CAPTURE_IMPLICIT) not in _CUDA_CAPTURE:
            return  # the GPU has failed; the launch will raise the error
    raise InvalidArgument(_is_capturing(f"{label}: {what}"))


def _is_capturing(who: str) -> str:
    return (
        f"{who} cannot be part of a CUDA graph, but the stream captures a graph: end the capture first, or use "
        "another stream"
    )
