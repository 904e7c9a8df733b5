"""Work on a GPU: collectives that run beside the host, their ends, their deadlines and their failures.

A call returns before its collective has ended. Three threads of the process look after all communicators. The watcher
looks for failures and deadlines, and asks the GPU nothing: the driver may not answer while a kernel hangs. A second
thread asks the GPU what has begun and ended. A third one calls the users' callbacks, which may take any time. None
holds a reference to a communicator, so that Python can collect one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, NoReturn

import cupy
import numpy as np

from gradsync.communicators.agreement import on_behalf
from gradsync.communicators.backend import Backend, Launch
from gradsync.communicators.failures import CAUSE_SECONDS, FailureMonitor, await_cause
from gradsync.communicators.nccl.library import Nccl, event_status
from gradsync.communicators.nccl.streams import CAPTURE_ERRORS, as_stream, capture_refusal, is_per_thread, on_device
from gradsync.communicators.nccl.verify import Verification
from gradsync.diagnostics import Entry, Running, finish
from gradsync.errors import CollectiveTimeout, GradsyncError, NcclError, PlanMismatch, RankFailed, describe
from gradsync.futures import again, refuse_wait_in_callback, this_thread
from gradsync.machine import start_thread
from gradsync.rendezvous.client import RendezvousClient

_log = logging.getLogger("gradsync")

# Who waits first looks without a pause, as most collectives take microseconds, and then sleeps in between.
_LOOKS_WITHOUT_SLEEP = 200
_SLEEP_SECONDS = 100e-6
# How long `wait` waits after the deadline, so that the watcher can find the reason: longer than a rank waits for the
# server's report (FAILURE_WITHIN_SECONDS of the rendezvous).
_VERDICT_SECONDS = 12.0
_IDLE_SECONDS = 0.05
_BUSY_SECONDS = 0.005  # the pause between looks while something runs; a done-callback may be late by this time
_KEPT = 4  # so much work may have ended, and keep its memory, until a thread looks: a look costs microseconds
_LEFT_SECONDS = 0.5  # how often a launch that runs asks whether one of its ranks has closed the communicator

_SUCCESS, _NOT_READY = 0, 600


class GpuWork(Launch):
    """One collective, or messages that are launched together. It ends when the GPU reaches its event `ended`.

    Attributes:
        stream, thread: the stream on which it runs, and the id of the thread that launched it.
        started: the event before it. Its deadline counts from there, without the earlier work of this rank's GPU.
        ended: the event after it.
        made_at: when it was made, just before it is launched.
        has_begun: whether NCCL may have begun.
        peers: the world ranks of messages; None for a collective.
        recorded: its entry in the flight recorder; set when it is launched.
        outcome: a function that looks at results in host memory, and returns an error or None.
        seen_started_at: the time at which the GPU was found to have reached `started`.
        is_over: whether it has ended, or failed.
        error: its failure, or None.

    Args:
        watched: the launches of its communicator.
        stream: see above.
    """

    is_done = False  # also later: streams must wait for its end

    def __init__(self, watched: Watched, stream: Any) -> None:
        self._watched = watched
        self.name = f"{watched.label}: a collective"
        self.stream = stream
        self.thread = threading.get_ident()
        self.started = cupy.cuda.Event(disable_timing=True)
        self.ended = cupy.cuda.Event(disable_timing=True)
        self.made_at = time.monotonic()
        self.has_begun = False
        self.peers: Sequence[int] | None = None
        self.recorded: Running | None = None
        self.outcome: Callable[[], BaseException | None] | None = None
        self.seen_started_at: float | None = None
        self._waiting: Any = None  # a stream that waits already: kept, so that no other stream gets its handle
        self.is_over = False
        self.error: BaseException | None = None
        # Without these references, CuPy's pool would give the memory to others while the GPU still uses it.
        self._memory: list[Any] = []
        self._host_results: list[tuple[Any, Any]] = []  # (bytes in pinned memory, NumPy array)
        self._callbacks: list[Callable[[], None]] | None = []  # None: it has ended, and all were called
        self._lock = threading.RLock()  # reentrant, because a signal handler may run in the thread that holds it

    # -- While launching -----------------------------------------------------------------------------------------

    def keep(self, *arrays: Any) -> None:
        self._memory += arrays

    def write_back(self, flat: Any, native: Any) -> None:
        """See Launch. The current stream copies to pinned memory, and the host from there when the work has ended."""
        self.keep(flat, native)
        if not isinstance(native, np.ndarray):
            if not native.flags.c_contiguous:
                native[...] = flat.view(native.dtype).reshape(native.shape)
            return
        await_results_in(native)  # else an earlier collective could overwrite the new result
        pinned = cupy.cuda.alloc_pinned_memory(max(flat.nbytes, 1))
        staging = np.frombuffer(pinned, np.uint8, flat.nbytes)
        if flat.nbytes:
            flat.view(np.uint8).get(out=staging, blocking=False)
        self._host_results.append((staging, native))
        self.has_host_results = True

    def record_end(self) -> None:
        """Records the event `ended` on the stream, after all of the work."""
        self.ended.record(self.stream)
        if self._host_results:
            with _registering:
                _with_host_results.add(self)

    def will_write(self, array: Any) -> bool:
        """Whether it still has to write a result to the memory of a host array."""
        return not self.is_over and any(np.may_share_memory(native, array) for _, native in self._host_results)

    # -- Work ----------------------------------------------------------------------------------------------------

    def done(self) -> bool:
        """See Work. Ends the work if the GPU has reached `ended`: copies results to the host, and looks at them."""
        if self.is_over:
            return True
        status = event_status(self.ended)
        if status == _NOT_READY or status in CAPTURE_ERRORS:  # another thread captures a graph
            return False
        if status == _SUCCESS:
            try:
                self._watched.nccl.check()
            except NcclError:
                return False  # it has ended without a result; the watcher will find the reason
        self.end(None if status == _SUCCESS else self._gpu_error(status))
        return True

    def order(self, name: str = "", stream: Any = None, timeout_seconds: float | None = None) -> None:
        if self.has_host_results:
            self._wait(name or self.name, timeout_seconds)
            return
        self._raise_error()
        if stream is None:
            current = cupy.cuda.get_current_stream(self._watched.device_id)
            if self.is_over or self._waiting == current:  # a program reads all gradients of a step
                return
        with on_device(self._watched.device_id):  # a default stream's handle means the current device's stream
            waiting = as_stream(stream, self._watched.device_id, self.name)  # what is no stream is always refused
            if self.done():
                self._raise_error()
                return
            with capture_refusal(self.name):
                waiting.wait_event(self.ended)
        if stream is None and not is_per_thread(current):
            self._waiting = current

    def wait(self, timeout_seconds: float | None = None) -> None:
        self._wait(self.name, timeout_seconds)

    def failure(self) -> BaseException | None:
        if self.error is not None:
            self._watched.tell(self.error)
        return self.error

    def when_done(self, function: Callable[[], None]) -> None:
        with self._lock:
            if self._callbacks is not None:
                self._callbacks.append(function)
                return
        function()

    def await_end(self, timeout_seconds: float | None = None) -> None:
        """Makes the host wait until the work has ended or failed. Raises only CollectiveTimeout."""
        seconds = self._watched.timeout_seconds if timeout_seconds is None else timeout_seconds
        deadline = time.monotonic() + seconds
        # If the GPU is in a collective, the watcher finds the missing ranks, and every rank gets the same error.
        verdict_by = deadline + (_VERDICT_SECONDS if timeout_seconds is None else 0.0)
        looks = 0
        while not self.done():
            looks += 1
            if looks > _LOOKS_WITHOUT_SLEEP:
                now = time.monotonic()
                is_stuck = now >= deadline and (now >= verdict_by or not _is_gpu_in_collective())
                if is_stuck and not self._watched.has_failed():  # else this work is about to get that failure
                    state = "has begun it" if self.has_started() else "is still busy with earlier work of this rank"
                    raise CollectiveTimeout(f"{self.name} did not end within {seconds:g} s: the GPU {state}")
                time.sleep(_SLEEP_SECONDS)

    def _wait(self, name: str, timeout_seconds: float | None) -> None:
        if not self.done():
            refuse_wait_in_callback(name)
            self.await_end(timeout_seconds)
        self._raise_error()

    def _raise_error(self) -> None:
        error = self.failure()
        if error is not None:
            raise again(error)

    # -- Its end -------------------------------------------------------------------------------------------------

    def has_started(self) -> bool:
        """Whether the GPU has reached `started`."""
        return event_status(self.started) not in (_NOT_READY, *CAPTURE_ERRORS)

    def look_whether_started(self) -> None:
        """Sets `seen_started_at` once the GPU has reached `started`."""
        if self.seen_started_at is None and self.has_started():
            self.seen_started_at = time.monotonic()

    def end(self, error: BaseException | None) -> None:
        """Ends the work, with an error if one is given; does nothing if it has ended already."""
        has_ended = error is None  # otherwise the GPU may still use the memory
        memory: list[Any] = []
        with self._lock:
            if self.is_over:
                return
            if has_ended:
                error = self._copy_to_host() or (None if self.outcome is None else self.outcome())
            self.outcome = None
            self.error = error
            self._callbacks = self._callbacks or None
            self.is_over = True
            if self.recorded is not None:
                finish(self.recorded, failed=error is not None)
            if has_ended:
                memory = self.take_memory()
        del memory  # without the lock, which who ends hanging work needs: without a pool, cudaFree waits for that work

    def take_memory(self) -> list[Any]:
        """Returns all references to the memory that the GPU reads or writes, and drops them."""
        memory = [*self._memory, *self._host_results]
        self._memory.clear()
        self._host_results.clear()
        return memory

    @property
    def has_callbacks(self) -> bool:
        """Whether callbacks have still to be called."""
        return bool(self._callbacks)

    def call_back(self) -> None:
        """Calls the callbacks in their order, also those that are added meanwhile."""
        while True:
            with self._lock:
                callbacks = self._callbacks
                self._callbacks = [] if callbacks else None
            if not callbacks:
                return
            for function in callbacks:
                try:
                    function()
                except BaseException as error:  # also SystemExit: the thread calls the callbacks of others, too
                    _log.error("a callback at the end of %s raised %s", self.name, describe(error))

    def _gpu_error(self, status: int) -> NcclError:
        cause = cupy.cuda.runtime.CUDARuntimeError(status)
        return NcclError(
            f"{self.name}: the GPU failed in this collective, or in earlier work of this rank: {cause}; run the script "
            "under compute-sanitizer to find the kernel",
            code=1,
            name="ncclUnhandledCudaError",
        )

    def _copy_to_host(self) -> NcclError | None:
        """Copies results to the host arrays. If a copy fails, returns the error."""
        try:
            for staging, native in self._host_results:
                native[...] = staging.view(native.dtype).reshape(native.shape)
        except Exception as error:  # e.g. the program has made the array read-only, or resized it
            return NcclError(f"{self.name}: gradsync could not copy its result into the host array: {describe(error)}")
        return None


_with_host_results: weakref.WeakSet[GpuWork] = weakref.WeakSet()
_registering = threading.Lock()  # a set must not grow while another thread iterates over it


def await_results_in(array: Any) -> None:
    """Waits until all work of this process that writes a result to a host array has ended or failed."""
    with _registering:
        writers = [work for work in _with_host_results if work.will_write(array)]
    for work in writers:
        with contextlib.suppress(CollectiveTimeout):  # the work's own future raises the error
            work.await_end()


class Watched:
    """The launches of one communicator, and the failure that ends them.

    Args:
        backend: the communicator's backend, to which this object keeps only a weak reference.
        nccl: this rank's NCCL communicator.
        failures: the failures that the server reports.
        verification: explains failures that the server reports, and knows which ranks have closed the communicator.

    Attributes:
        label, device_id, timeout_seconds, nccl: of the communicator.
        call: the work whose NCCL call has not returned; None if no call runs. A call may block: NCCL may first have to
            connect the ranks, and with CUDA_LAUNCH_BLOCKING=1 every launch waits for its end.
        failure: the error that has broken the communicator; None if it is not broken.
    """

    def __init__(
        self,
        backend: Backend,
        nccl: Nccl,
        failures: FailureMonitor,
        verification: Verification,
    ) -> None:
        assert backend.client is not None
        self.label = backend.label
        self.device_id = nccl.device_id
        self.timeout_seconds = backend.timeout_seconds
        self.nccl = nccl
        self.call: GpuWork | None = None
        self.failure: BaseException | None = None
        self._backend = weakref.ref(backend)
        self._client = backend.client
        self._failures = failures
        self._verification = verification
        self._running: deque[GpuWork] = deque()
        self._found: BaseException | None = None  # the error of work that the GPU has ended
        self._kept: list[tuple[Any, list[Any]]] = []  # the event `ended` and the memory of failed work
        self._reporting: threading.Event | None = None  # set when the server knows of this rank's failure
        self._looked_at = time.monotonic()  # when the GPU has last been asked, and has answered
        self._asked_at = 0.0  # when the ranks that have left were asked for
        self._orphan: GpuWork | None = None  # messages of which a rank had left then
        self._lock = threading.RLock()  # reentrant, because a signal handler may run in the thread that holds it
        self._stopped = False
        _watch(self)

    def add(self, work: GpuWork) -> None:
        """Adds work that was launched."""
        with self._lock:
            self._running.append(work)  # now, so that a signal handler that fails the communicator ends this work
            failure = self.failure
        if failure is not None:
            self._end_running(failure)
        elif len(self._running) > _KEPT:
            self.reap()

    def reap(self) -> None:
        """Drops the work that has ended, with its memory, the oldest first."""
        running = self._running
        while running:
            try:
                head = running[0]
            except IndexError:  # another thread has taken the last one
                return
            if not head.done():
                return
            with self._lock:
                if not running or running[0] is not head:
                    continue
                running.popleft()
            if isinstance(head.error, (NcclError, PlanMismatch)):
                self._found = head.error
            self._drop(head)

    def fail_if_found(self) -> None:
        """Ends the communicator if work that has ended has failed: close() does not wait for the watcher."""
        self.reap()
        if self._found is not None and not self._stopped:
            self.fail(self._found)

    def _end_running(self, error: BaseException) -> None:
        """Ends all work with an error. It does not ask the GPU, which may not answer."""
        with self._lock:
            failed = list(self._running)
            self._running.clear()
        for work in reversed(failed):  # the last first: when one has failed, all later ones have too
            work.end(error)
        for work in failed:
            self._drop(work)

    def _drop(self, work: GpuWork) -> None:
        """Passes the callbacks of work that has ended to their thread.

        If it has failed, keeps its memory, because the GPU may still use it: ncclCommAbort waits for NCCL's own work,
        but not for copies and kernels that are queued on the stream.
        """
        if work.error is not None and (memory := work.take_memory()):
            with self._lock:
                self._kept.append((work.ended, memory))
        if work.has_callbacks:
            _callbacks.put(work.call_back)

    # -- The failure ---------------------------------------------------------------------------------------------

    def raise_failure(self) -> None:
        """Raises the error that has broken the communicator, if it is broken."""
        if self.failure is not None:
            raise again(self.failure)

    def has_failed(self) -> bool:
        """Whether the communicator has failed. If another thread is recording a failure, waits for that thread."""
        with self._lock:
            return self.failure is not None

    def tell(self, error: BaseException) -> None:
        """Ends the communicator because of failed work, whose error the program is about to get."""
        self.fail(error)
        backend = self._backend()
        if backend is not None:
            backend.fail(error, is_known=True)

    def fail(self, error: BaseException) -> None:
        """Ends the communicator because of a failure; does nothing if it has ended."""
        # All ranks know a failure that the server has reported, and a PlanMismatch. One that only this rank knows must
        # be reported to the server.
        own = isinstance(error, (CollectiveTimeout, NcclError)) and self._failures.failure() is None
        backend = self._backend()
        if backend is not None and self.abort(error, describe(error) if own else None):
            fail = getattr(backend, "fail", None)  # None before the Communicator is made
            if fail is not None:
                fail(error)

    def abort(self, error: BaseException, reason: str | None, culprit: int | None = None) -> bool:
        """Breaks the communicator, and ends its work, with an error. Returns False if it was broken before.

        Another thread aborts NCCL's: calls to the server, or of NCCL, could block this one.

        Args:
            error: the error of all work, and of every later call.
            reason: what the thread first reports to the server; None if the server knows.
            culprit: the world rank that caused it, if known.
        """
        with self._lock:
            if self.failure is not None:
                return False
            self._end_running(error)
            self.failure = error  # set last, when all work has ended
        self._reporting = threading.Event()
        self.nccl.abort(partial(_report_failure, self._client, reason, culprit, self._reporting))
        return True

    def await_reported(self, seconds: float) -> None:
        """Waits a limited time until the server knows of this rank's failure, if there is one."""
        if self._reporting is not None:
            self._reporting.wait(seconds)

    def raise_cause(self, error: NcclError) -> NoReturn:
        """Raises the failure that caused an error, if it is known or will soon be known; otherwise raises the error."""
        if self._client.world_size > 1:
            try:
                await_cause(CAUSE_SECONDS, self.raise_known)  # the server may report the cause later
                if error.name == "ncclRemoteError":
                    self._verification.raise_if_left()
            except GradsyncError as cause:
                raise cause from error
        raise error

    def raise_known(self) -> None:
        """Raises a failure that another thread has found, or that the server has reported."""
        self.raise_failure()
        try:
            self._failures.check()
        except GradsyncError as error:
            raise self._verification.explain(error) from None

    def stop(self) -> None:
        """From now on only the ends of work are looked for, and failures ignored. Returns at once."""
        self._stopped = True

    # -- On the threads ------------------------------------------------------------------------------------------

    def has_begun_on_gpu(self) -> bool:
        """Whether the GPU has reached the oldest work that runs; the other work waits behind it."""
        try:
            return self._running[0].has_started()
        except IndexError:  # nothing runs
            return False

    @property
    def is_busy(self) -> bool:
        """Whether work runs, or a thread is launching some."""
        return bool(self._running) or self.call is not None

    def look_for_failures(self) -> bool:
        """Looks once, and ends the communicator if it has failed. Returns whether to look again."""
        if not self._stopped:
            try:
                self._find_failure()
                return True
            except GradsyncError as error:
                found = self._verification.explain(error)
            except Exception as error:  # which no other code would report
                found = NcclError(f"{self.label}: the watcher of collectives failed: {describe(error)}")
            if not self._stopped:
                self.fail(found)
            self._stopped = True
        return bool(self._running or self._kept)  # which end soon: release() has waited for them, or they have failed

    def _find_failure(self) -> None:
        """Raises the error that breaks the communicator, if there is one."""
        self.raise_known()
        if isinstance(self._found, NcclError):
            self.raise_cause(self._found)
        if self._found is not None:
            raise self._found
        with self._lock:
            head = next((work for work in self._running if not work.is_over), None)
        for work in (head, self.call):
            if work is not None and not work.is_over:
                # While the driver does not answer, nobody knows whether the work has begun: the time of silence counts.
                since = work.seen_started_at or max(work.made_at, self._looked_at)
                self._look_at_clock(work, time.monotonic() - since)

    def _look_at_clock(self, work: GpuWork, waited_seconds: float) -> None:
        """Tells the server, which logs a warning, that work or its NCCL call takes long; after the deadline, raises.

        Of several ranks the server chooses one error for all; a rank that is alone tells nobody.
        """
        is_call = work is self.call
        entry = None if is_call or work.recorded is None else Entry(*work.recorded)
        several = self._client.world_size > 1
        on_behalf.thread = work.thread  # a report names the line of the program in this thread
        if waited_seconds > self.timeout_seconds:
            if several:
                self._failures.time_out(waited_seconds, work.peers, entry)
            what = "a call has not returned for" if is_call else "has run for"
            raise CollectiveTimeout(
                f"{work.name}{':' if is_call else ''} {what} {self.timeout_seconds:g} s on cuda:{self.device_id}, and "
                "there is no other rank: the GPU is stuck"
            )
        if several:
            self._failures.warn(waited_seconds, work.peers, entry)
            if waited_seconds > _LEFT_SECONDS and time.monotonic() - self._asked_at > _LEFT_SECONDS:
                self._asked_at = time.monotonic()
                try:
                    self._verification.raise_if_left(work.peers, None if work.peers or entry is None else entry.number)
                except RankFailed:
                    # A rank may have sent a message, and closed the communicator while the message is on its way.
                    if work.peers is None or self._orphan is work:
                        raise
                    self._orphan = work

    def ask_gpu(self) -> None:
        """Looks once which work has begun and ended, and which memory of failed work the GPU no longer uses."""
        try:
            self.reap()
            for work in (self.call, *list(self._running)[:1]):
                if work is not None:
                    work.look_whether_started()
            self._looked_at = time.monotonic()
            self.nccl.check()
        except NcclError as error:
            self._found = self._found or error
        except Exception as error:
            self._found = self._found or NcclError(f"{self.label}: the GPU cannot be asked: {describe(error)}")
        if self._kept and self.nccl.has_ended.is_set():
            # Without the lock: the driver may not answer. This list keeps the memory until the lock is released.
            ended = [kept for kept in list(self._kept) if event_status(kept[0]) == _SUCCESS]
            with self._lock:
                self._kept = [kept for kept in self._kept if not any(kept is each for each in ended)]


def _report_failure(
    client: RendezvousClient, reason: str | None, culprit: int | None, reported: threading.Event
) -> None:
    """Reports this rank's own failure to the server, if `reason` is given, and then sets the event `reported`."""
    try:
        if reason is not None and client.world_size > 1:
            client.report_failure(reason, culprit=culprit)
    finally:
        reported.set()


# -- The threads ------------------------------------------------------------------------------------------------------

_all: list[Watched] = []
_Callbacks = SimpleQueue[Callable[[], None] | None]
_callbacks: _Callbacks = SimpleQueue()  # what the third thread calls; None ends the thread
_caller: threading.Thread | None = None  # the third thread; it may have ended


def _watch(watched: Watched) -> None:
    """Adds a communicator to the threads; starts them for the first one."""
    global _callbacks, _caller
    with _registering:
        if not _all:
            _callbacks = SimpleQueue()  # a new queue: a callback that never returns may block the old queue's thread
            life, arguments = threading.Event(), (watched.device_id, _callbacks)
            for name, run in (("watcher", _look_for_failures), ("gpu", _ask_gpu), ("callbacks", _call_back)):
                thread = threading.Thread(
                    target=run, args=(*arguments, life), name=f"gradsync-nccl-{name}", daemon=True
                )
                try:
                    start_thread(thread)
                except BaseException:
                    life.set()
                    _callbacks.put(None)
                    raise
            _caller = thread  # the last one, which calls
        _all.append(watched)  # last: if no thread can be started, the next communicator tries again


def _is_gpu_in_collective() -> bool:
    with _registering:
        everything = list(_all)
    return any(watched.has_begun_on_gpu() for watched in everything)


def _pause() -> None:
    with _registering:
        is_busy = any(watched.is_busy for watched in _all)
    time.sleep(_BUSY_SECONDS if is_busy else _IDLE_SECONDS)


def _look_for_failures(_: int, callbacks: _Callbacks, over: threading.Event) -> None:
    while not over.is_set():
        with _registering:
            everything = list(_all)
        ended = [watched for watched in everything if not watched.look_for_failures()]
        with _registering:
            for watched in ended:
                _all.remove(watched)
            if not _all and everything:
                over.set()
                callbacks.put(None)
                return
        del everything, ended
        _pause()


def _ask_gpu(device_id: int, _: _Callbacks, over: threading.Event) -> None:
    cupy.cuda.Device(device_id).use()  # else the first question would make a context on the first GPU
    while not over.is_set():
        with _registering:
            everything = list(_all)
        for watched in everything:
            watched.ask_gpu()
        del everything
        _pause()


def _call_back(device_id: int, callbacks: _Callbacks, _: threading.Event) -> None:
    cupy.cuda.Device(device_id).use()  # callbacks use arrays on this device
    while (call := callbacks.get()) is not None:
        call()
        del call  # the memory of its work must not stay allocated until the next work ends


def await_callbacks(seconds: float) -> None:
    """Waits for a limited time until the done-callbacks of all work that has ended were called.

    A program that ends would otherwise lose its last callbacks, and the error of one that calls a collective. Within a
    done-callback it does nothing: the thread would wait for itself.
    """
    if this_thread.callbacks:
        return
    with _registering:
        everything = list(_all)
    for watched in everything:
        watched.reap()
    called = threading.Event()
    with _registering:
        is_serving = bool(_all)
        if is_serving:
            _callbacks.put(called.set)
    if is_serving:
        called.wait(seconds)
    elif _caller is not None:  # it ends after the last callback
        _caller.join(seconds)


def _forget_after_fork() -> None:
    """Resets this module in a forked child, which does not have the threads."""
    global _registering
    _registering = threading.Lock()
    _all.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
