"""The thread beside NCCL communicators that sees what no call would: failures, deadlines, ends of launches.

A collective on a GPU returns at once and then may never end; only somebody who looks can tell. One thread of the
process looks after all its communicators, and holds no reference to them, so that a forgotten one can be collected. A
second thread calls the users' callbacks, so that none of them keeps the first from looking.
"""

from __future__ import annotations

import copy
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import NoReturn

import cupy

from gradsync.communicators.agreement import on_behalf
from gradsync.communicators.nccl.launch import Launch
from gradsync.communicators.nccl.library import Nccl
from gradsync.communicators.nccl.speculative_agreement import TEXTS_WITHIN_SECONDS, NcclAgreements
from gradsync.communicators.verdicts import NEWS_SECONDS, Verdicts
from gradsync.diagnostics import Entry
from gradsync.errors import CollectiveTimeout, GradsyncError, NcclError, describe
from gradsync.rendezvous.client import RendezvousClient

_IDLE_SECONDS = 0.05
_BUSY_SECONDS = 0.005  # while something is launched: how late a done-callback may be
# Launches that a call leaves to the thread. Where there are more, a call looks at the oldest, and the next does so when
# there are twice as many: a look costs as much as a launch, and a GPU that is behind stays so.
_LEFT_TO_WATCHER = 8
_SUSPICIOUS_AFTER_SECONDS = 1.0  # when a running collective makes the thread ask whether a rank has closed


class Watched:
    """The launches of one communicator, as the watcher looks after them.

    Args:
        nccl: the communicator.
        client: the way of its ranks to the rendezvous server.
        verdicts: of the server.
        agreements: of the communicator's ranks.
        label: this rank in messages.
        timeout_seconds: how long a collective may run.
        on_failure: a method that is called once, on the watcher's thread, with what has broken the communicator.

    Attributes:
        call: the launch that a thread is making, that thread, and since when it waits for nothing but a call to come
            back: NCCL may wait for other ranks there, and so does CUDA with CUDA_LAUNCH_BLOCKING=1. None: no call.
    """

    def __init__(
        self,
        nccl: Nccl,
        client: RendezvousClient,
        verdicts: Verdicts,
        agreements: NcclAgreements,
        *,
        label: str,
        timeout_seconds: float,
        on_failure: Callable[[GradsyncError], None],
    ) -> None:
        self.call: tuple[Launch, int] | None = None
        self._nccl = nccl
        self._client = client
        self._verdicts = verdicts
        self._agreements = agreements
        self._label = label
        self._timeout_seconds = timeout_seconds
        self._on_failure = weakref.WeakMethod(on_failure)
        self._running: deque[Launch] = deque()
        self._reaped_above = _LEFT_TO_WATCHER
        self._error: BaseException | None = None  # what a launch that comes now has failed with
        self._device_failure: NcclError | None = None  # found at the end of a launch
        self._lock = threading.Lock()
        self._stopped = False
        self._returns_since: tuple[object, float] | None = None  # a call, and when the watcher has begun its clock
        self._ask_about_closing_at = 0.0
        _watch(self)

    def add(self, launch: Launch) -> None:
        """Takes a launch into care; drops those that have ended."""
        with self._lock:
            error = self._error
            if error is None:
                self._running.append(launch)
        if error is not None:
            launch.fail(error)
            _call_back(launch)
        if len(self._running) > self._reaped_above:
            self.reap(_LEFT_TO_WATCHER)
            self._reaped_above = max(_LEFT_TO_WATCHER, 2 * len(self._running))

    def reap(self, left: int = 0) -> None:
        """Drops launches that have ended, and their memory, until no more than so many are left.

        A stream ends them in order.
        """
        running = self._running
        while len(running) > left:
            try:
                head = running[0]
            except IndexError:  # another thread was faster
                return
            if not head.done():
                return
            with self._lock:
                if not running or running[0] is not head:
                    continue
                running.popleft()
            if head.error is not None and isinstance(head.error, NcclError):
                self._device_failure = head.error
            _call_back(head)

    def fail_launches(self, error: BaseException) -> None:
        """Fails every launch that has not ended, and those that are still to come."""
        with self._lock:
            self._error = error
            failed = list(self._running)
            self._running.clear()
        for launch in reversed(failed):  # who waits for the first that has failed finds the later ones failed too
            if not launch.done():
                launch.fail(error)
        for launch in failed:
            _call_back(launch)

    def raise_cause(self, error: NcclError) -> NoReturn:
        """Raises what another rank has done where that is what NCCL has noticed, else the error itself."""
        if self._client.world_size > 1:
            try:
                self._verdicts.await_news(NEWS_SECONDS, self._look_for_cause)
                if self._agreements.were_overtaken:  # another thread has taken that, and reads what the others launched
                    self._verdicts.await_news(TEXTS_WITHIN_SECONDS, self._look_for_cause)
                self._agreements.look_for_closed_ranks()
            except GradsyncError as cause:
                raise cause from error
        raise error

    def stop(self) -> None:
        """Makes the watcher look for nothing but the ends of what is launched; does not wait for it."""
        self._stopped = True

    # -- On the watcher's thread ---------------------------------------------------------------------------------

    def look(self) -> bool:
        """Looks once, and reports what has broken the communicator; returns whether to look again."""
        if not self._stopped:
            try:
                self._look()
            except GradsyncError as error:
                self._report(error)
            except Exception as error:  # CUDA's own above all: nobody else would notice
                self._report(NcclError(f"{self._label}: looking after collectives failed: {describe(error)}"))
            return True
        self.reap()  # what is left ends soon: it was waited for, or has failed
        return bool(self._running)

    @property
    def is_busy(self) -> bool:
        """Whether something is launched, or about to be."""
        return bool(self._running) or self.call is not None

    def _report(self, error: GradsyncError) -> None:
        report = self._on_failure()
        if report is not None and not self._stopped:
            report(error)
        self._stopped = True

    def _look(self) -> None:
        """Raises what has broken the communicator."""
        self.reap()
        if self._device_failure is not None:
            raise self._device_failure
        self._look_at_others()
        try:
            self._nccl.check()
        except NcclError as error:
            self.raise_cause(error)
        with self._lock:
            head = self._running[0] if self._running else None
        if head is not None:
            self._look_at_clock(head, time.monotonic())
        call = self.call
        if call is None:
            self._returns_since = None  # which keeps its launch
        else:
            self._look_at_call(call, time.monotonic())

    def _look_at_others(self) -> None:
        """Raises what the server tells of the other ranks."""
        self._verdicts.check()
        overtaken = self._agreements.overtaken()
        if overtaken is not None:
            raise overtaken

    def _look_for_cause(self) -> None:
        """Raises what another thread has found to have broken the communicator, or what the server tells."""
        if self._error is not None:
            raise copy.copy(self._error)
        self._look_at_others()

    def _look_at_clock(self, head: Launch, now: float) -> None:
        if head.seen_started_at is None:
            if head.started.done:
                head.seen_started_at = now
                self._ask_about_closing_at = now + _SUSPICIOUS_AFTER_SECONDS
            return
        entry = None if head.recorded is None else Entry(*head.recorded)
        stuck = f"{head.name} has run for {self._timeout_seconds:g} s"
        self._look_at_deadline(head, head.thread, now - head.seen_started_at, lambda: not head.done(), stuck, entry)
        if now >= self._ask_about_closing_at:
            self._ask_about_closing_at = now + _SUSPICIOUS_AFTER_SECONDS
            head.look_for_closed_ranks()

    def _look_at_call(self, call: tuple[Launch, int], now: float) -> None:
        launch, thread = call
        if self._returns_since is None or self._returns_since[0] is not call:
            if launch.started.done:  # until then it is this rank's own work that may hold the call up
                self._returns_since = call, now
            return
        stuck = f"{launch.name}: a call has not returned for {self._timeout_seconds:g} s"
        waited_seconds = now - self._returns_since[1]
        self._look_at_deadline(launch, thread, waited_seconds, lambda: self.call is call, stuck, None)

    def _look_at_deadline(
        self,
        launch: Launch,
        thread: int,
        waited_seconds: float,
        still_waits: Callable[[], bool],
        stuck: str,
        entry: Entry | None,
    ) -> None:
        """Warns of what has taken long; raises the verdict on what has reached its deadline."""
        on_behalf.thread = thread  # whose line is told with a message
        several = self._client.world_size > 1
        if waited_seconds > self._timeout_seconds and still_waits():
            if several:
                self._verdicts.give_up(waited_seconds, launch.peers(), entry)
            raise CollectiveTimeout(f"{self._label}: {stuck} on cuda:{self._nccl.device_id}, alone: the GPU is stuck")
        if several:
            self._verdicts.warn(waited_seconds, launch.peers(), entry)


_all: list[Watched] = []
_registering = threading.Lock()
_callbacks: SimpleQueue[Launch | None] = SimpleQueue()


def _watch(watched: Watched) -> None:
    """Looks after one more communicator, on threads that are started for the first."""
    global _callbacks
    with _registering:
        _all.append(watched)
        if len(_all) > 1:
            return
        _callbacks = SimpleQueue()  # its own: a callback that never returns may keep the thread before this one
        for name, work in (("gradsync-nccl-watcher", _look_at_all), ("gradsync-nccl-callbacks", _call_all_back)):
            arguments = watched._nccl.device_id, _callbacks
            threading.Thread(target=work, args=arguments, name=name, daemon=True).start()


def _look_at_all(device_id: int, callbacks: SimpleQueue[Launch | None]) -> None:
    # The one that a process has: without it, looking at an event would take memory of the first.
    cupy.cuda.Device(device_id).use()
    while True:
        with _registering:
            everything = list(_all)
        ended = [watched for watched in everything if not watched.look()]
        with _registering:
            for watched in ended:
                _all.remove(watched)
            if not _all:
                callbacks.put(None)
                return
        seconds = _BUSY_SECONDS if any(watched.is_busy for watched in everything) else _IDLE_SECONDS
        del everything, ended
        time.sleep(seconds)


def _call_all_back(device_id: int, callbacks: SimpleQueue[Launch | None]) -> None:
    cupy.cuda.Device(device_id).use()  # a callback's arrays are there
    while (launch := callbacks.get()) is not None:
        launch.call_back()
        del launch  # what it refers to must not outlive it


def _call_back(launch: Launch) -> None:
    """Has the callbacks of a launch called that is over."""
    if launch.callbacks:
        _callbacks.put(launch)


def _forget_after_fork() -> None:
    """The threads are not in the child."""
    global _registering
    _registering = threading.Lock()
    _all.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
