"""The watcher: a thread that checks whether launches have ended, have failed or have passed their deadline.

The call of a collective on a GPU returns before the collective has ended, so a thread must check the collective. One
thread of the process checks all communicators. The thread holds no reference to a communicator, so that Python can
garbage-collect a communicator that the program no longer uses. A second thread calls the users' callbacks, so that no
callback delays the watcher.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, NoReturn

import cupy

from gradsync.communicators.agreement import on_behalf
from gradsync.communicators.backend import Backend
from gradsync.communicators.failures import CAUSE_SECONDS, FailureMonitor, await_cause
from gradsync.communicators.nccl.launch import CUDA_SUCCESS, GpuLaunch
from gradsync.communicators.nccl.library import Nccl
from gradsync.diagnostics import Entry
from gradsync.errors import CollectiveTimeout, GradsyncError, NcclError, describe
from gradsync.futures import again, is_in_callback
from gradsync.rendezvous.client import RendezvousClient

_IDLE_SECONDS = 0.05
_BUSY_SECONDS = 0.005  # the pause between checks while a launch runs; a done-callback may be late by this time
# The call of a collective leaves up to this number of launches to the watcher. If there are more launches, the call
# itself checks the oldest launches. Later calls check again only when there are twice as many launches, because a check
# costs as much as a launch, and a GPU that is behind stays behind for a while.
_LEFT_TO_WATCHER = 8


class Watched:
    """The launches of one communicator, which the watcher checks, and the failure that ends them.

    Args:
        backend: the communicator's backend, to which this object keeps only a weak reference.
        nccl: this rank's NCCL communicator.
        failures: the failures that the server reports.

    Attributes:
        call: the launch whose NCCL call has not returned; None if no call runs. A call may block, because NCCL may
            first have to connect the ranks, or because CUDA_LAUNCH_BLOCKING=1 makes every launch wait until the
            collective has ended.
        failure: the error that has broken the communicator; None if it is not broken.
    """

    def __init__(self, backend: Backend, nccl: Nccl, failures: FailureMonitor) -> None:
        assert backend.client is not None
        self.call: GpuLaunch | None = None
        self.failure: BaseException | None = None
        self._backend = weakref.ref(backend)
        self._client = backend.client
        self._label = backend.label
        self._timeout_seconds = backend.timeout_seconds
        self._nccl = nccl
        self._failures = failures
        self._running: deque[GpuLaunch] = deque()
        self._reaped_above = _LEFT_TO_WATCHER
        self._device_failure: NcclError | None = None  # the error of a launch that has ended
        self._kept: list[tuple[Any, list[Any]]] = []  # the event `ended` and the memory of each failed launch
        self._reporting: threading.Event | None = None  # set when the server knows of this rank's failure
        self._lock = threading.RLock()  # reentrant, because a signal handler may run in the thread that holds it
        self._stopped = False
        _watch(self)

    def add(self, launch: GpuLaunch) -> None:
        """Adds a launch to the watcher. If the watcher has many launches, removes launches that have ended."""
        with self._lock:
            self._running.append(launch)  # now, so that a signal handler that fails the communicator ends this launch
            failure = self.failure
        if failure is not None:
            self._end_running(failure)
        if len(self._running) > self._reaped_above:
            self.reap(_LEFT_TO_WATCHER)
            self._reaped_above = max(_LEFT_TO_WATCHER, 2 * len(self._running))

    def reap(self, left: int = 0) -> None:
        """Removes launches that have ended, with their memory, oldest first, until `left` launches remain."""
        running = self._running
        while len(running) > left:
            try:
                head = running[0]
            except IndexError:  # another thread has removed the last launch
                return
            if not head.done():
                return
            with self._lock:
                if not running or running[0] is not head:
                    continue
                running.popleft()
            if head.error is not None and isinstance(head.error, NcclError):
                self._device_failure = head.error
            self._drop(head)

    def _end_running(self, error: BaseException) -> None:
        """Ends every running launch with an error."""
        with self._lock:
            failed = list(self._running)
            self._running.clear()
        for launch in reversed(failed):  # the last launch first: when one launch has failed, all later ones have too
            if not launch.done():
                launch.end(error)
        for launch in failed:
            self._drop(launch)

    def _drop(self, launch: GpuLaunch) -> None:
        """Passes the callbacks of a launch that has ended to the thread of the callbacks.

        If the launch has failed, also keeps its memory, because the GPU may still use it. ncclCommAbort waits for
        NCCL's own work, but not for gradsync's copies and kernels that are queued on the stream.
        """
        if launch.error is not None and launch.memory:
            with self._lock:
                self._kept.append((launch.ended, launch.take_memory()))
        if launch.callbacks:
            _callbacks.put(launch.call_back)

    # -- The failure ---------------------------------------------------------------------------------------------

    def raise_failure(self) -> None:
        """Raises the error that has broken the communicator, if it is broken."""
        if self.failure is not None:
            raise again(self.failure)

    def has_failed(self) -> bool:
        """Whether the communicator has failed. If another thread is recording a failure, waits for that thread."""
        with self._lock:
            return self.failure is not None

    def fail(self, error: BaseException) -> None:
        """Ends the communicator because of a failure of its launches; does nothing if it has ended."""
        # All ranks know a failure that the server has reported. A failure that only this rank knows must be reported to
        # the server.
        own = isinstance(error, (CollectiveTimeout, NcclError)) and self._failures.failure() is None
        backend = self._backend()
        if backend is not None and self.abort(error, describe(error) if own else None):
            fail = getattr(backend, "fail", None)  # None before the Communicator is made
            if fail is not None:
                fail(error)

    def abort(self, error: BaseException, reason: str | None, culprit: int | None = None) -> bool:
        """Breaks the communicator, and ends its launches, with an error. Returns False if it was broken before.

        Another thread aborts the NCCL communicator, because calls to the server or NCCL could block this thread.

        Args:
            error: the error of every running launch and of every later call.
            reason: the failure that the thread first reports to the server; None if the server knows the failure.
            culprit: the world rank that caused the failure, if it is known.
        """
        with self._lock:
            if self.failure is not None:
                return False
            self._end_running(error)
            self.failure = error  # set last, when every launch has ended
        self._reporting = threading.Event()
        self._nccl.abort(partial(_report_failure, self._client, reason, culprit, self._reporting))
        return True

    def await_reported(self, seconds: float) -> None:
        """Waits a limited time until the server knows of this rank's failure, if there is one."""
        if self._reporting is not None:
            self._reporting.wait(seconds)

    def raise_cause(self, error: NcclError) -> NoReturn:
        """Raises the failure that caused an error, if it is known or will soon be known; otherwise raises the error."""
        if self._client.world_size > 1:
            try:
                await_cause(CAUSE_SECONDS, self._raise_known)  # the server may report the cause later
            except GradsyncError as cause:
                raise cause from error
        raise error

    def _raise_known(self) -> None:
        """Raises a failure that another thread has found, or that the server has reported."""
        self.raise_failure()
        self._failures.check()

    def stop(self) -> None:
        """Makes the watcher check only whether launches have ended, and ignore failures. Returns at once."""
        self._stopped = True

    # -- On the watcher's thread ---------------------------------------------------------------------------------

    def check(self) -> bool:
        """Checks the communicator once, and reports its failure. Returns whether to check the communicator again."""
        if self._kept and self._nccl.has_ended.is_set():
            self._free_kept()
        if not self._stopped:
            try:
                self._find_failure()
                return True
            except GradsyncError as error:
                found = error
            except Exception as error:  # usually an error of CUDA, which no other code would report
                found = NcclError(f"{self._label}: the watcher of collectives failed: {describe(error)}")
            if not self._stopped:
                self.fail(found)
            self._stopped = True
            return True
        self.reap()  # the remaining launches end soon: release() has waited for them, or they have failed
        return bool(self._running or self._kept)

    def _free_kept(self) -> None:
        """Frees the memory of the failed launches that the GPU no longer executes."""
        query = cupy.cuda.runtime.eventQuery
        with self._lock:
            before = self._kept  # this reference keeps the memory until the lock is released
            self._kept = [(ended, memory) for ended, memory in before if query(ended.ptr) != CUDA_SUCCESS]

    @property
    def is_busy(self) -> bool:
        """Whether a launch of the communicator runs, or a thread is making a launch."""
        return bool(self._running) or self.call is not None

    def _find_failure(self) -> None:
        """Raises the error that breaks the communicator, if there is one."""
        self.reap()
        if self._device_failure is not None:
            raise self._device_failure
        self._raise_known()
        try:
            self._nccl.check()
        except NcclError as error:
            self.raise_cause(error)
        with self._lock:
            head = self._running[0] if self._running else None
        for launch in (head, self.call):
            if launch is not None:
                self._check_launch(launch, time.monotonic())

    def _check_launch(self, launch: GpuLaunch, now: float) -> None:
        """Reports to the server, which logs a warning, that a launch or its NCCL call takes long.

        After the deadline, raises an error; if there are several ranks, the server chooses the same error for all of
        them. If there is only one rank, this method does not report to the server.
        """
        if launch.seen_started_at is None:
            if launch.started.done:  # before this event, the launch waits for this rank's own work
                launch.seen_started_at = now
            return
        is_call = launch is self.call
        entry = None if is_call or launch.recorded is None else Entry(*launch.recorded)
        waited_seconds = now - launch.seen_started_at
        several = self._client.world_size > 1
        on_behalf.thread = launch.thread  # a report names the line of the program in this thread
        if waited_seconds > self._timeout_seconds and (launch is self.call if is_call else not launch.done()):
            if several:
                self._failures.time_out(waited_seconds, launch.peers, entry)
            what = "a call has not returned for" if is_call else "has run for"
            raise CollectiveTimeout(
                f"{launch.name}{':' if is_call else ''} {what} {self._timeout_seconds:g} s on cuda:"
                f"{self._nccl.device_id}, and there is no other rank: the GPU is stuck"
            )
        if several:
            self._failures.warn(waited_seconds, launch.peers, entry)


def _report_failure(
    client: RendezvousClient, reason: str | None, culprit: int | None, reported: threading.Event
) -> None:
    """Reports this rank's own failure to the server, if `reason` is given, and then sets the event `reported`."""
    try:
        if reason is not None and client.world_size > 1:
            client.report_failure(reason, culprit=culprit)
    finally:
        reported.set()


_all: list[Watched] = []
_registering = threading.Lock()
_Callbacks = SimpleQueue[Callable[[], None] | None]
_callbacks: _Callbacks = SimpleQueue()  # what the second thread calls; None ends the thread
_caller: threading.Thread | None = None  # the second thread; it may have ended


def _watch(watched: Watched) -> None:
    """Adds a communicator to the watcher; starts both threads for the first communicator."""
    global _callbacks, _caller
    with _registering:
        if not _all:
            _callbacks = SimpleQueue()  # a new queue: a callback that never returns may block the old queue's thread
            for name, work in (("gradsync-nccl-watcher", _check_all), ("gradsync-nccl-callbacks", _call_all_back)):
                arguments = watched._nccl.device_id, _callbacks
                _caller = threading.Thread(target=work, args=arguments, name=name, daemon=True)
                _caller.start()
        _all.append(watched)  # last: if no thread can be started, the next communicator tries again


def await_callbacks(seconds: float) -> None:
    """Waits a limited time until the done-callbacks of all launches that have ended were called.

    Otherwise a program that ends would lose its last callbacks, and the error of a callback that calls a collective.
    Within a done-callback the function does nothing, because the thread would wait for itself.
    """
    if is_in_callback():
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


def _check_all(device_id: int, callbacks: _Callbacks) -> None:
    # Without this call, the check of an event would create a CUDA context on the first GPU.
    cupy.cuda.Device(device_id).use()
    while True:
        with _registering:
            everything = list(_all)
        ended = [watched for watched in everything if not watched.check()]
        with _registering:
            for watched in ended:
                _all.remove(watched)
            if not _all:
                callbacks.put(None)
                return
        seconds = _BUSY_SECONDS if any(watched.is_busy for watched in everything) else _IDLE_SECONDS
        del everything, ended
        time.sleep(seconds)


def _call_all_back(device_id: int, callbacks: _Callbacks) -> None:
    cupy.cuda.Device(device_id).use()  # callbacks use arrays on this device
    while (call := callbacks.get()) is not None:
        call()
        del call  # the memory of its launch must not stay allocated until the next launch ends


def _forget_after_fork() -> None:
    """Resets this module in a forked child process, which does not have the threads."""
    global _registering
    _registering = threading.Lock()
    _all.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
