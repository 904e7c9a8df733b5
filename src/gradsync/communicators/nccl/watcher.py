"""The thread beside an NCCL communicator that sees what no call would: failures, deadlines, ends of launches.

A collective on a GPU returns at once and then may never end; only somebody who looks can tell. The thread holds no
reference to the communicator, so that a forgotten one can be collected.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

import cupy

from gradsync.communicators.agreement import on_behalf
from gradsync.communicators.nccl.agreements import NcclAgreements
from gradsync.communicators.nccl.handle import NcclHandle
from gradsync.communicators.nccl.launch import Launch
from gradsync.communicators.nccl.predicted_agreement import TEXTS_WITHIN_SECONDS
from gradsync.communicators.verdicts import NEWS_SECONDS, Verdicts
from gradsync.diagnostics import Entry
from gradsync.errors import CollectiveTimeout, GradsyncError, NcclError, describe
from gradsync.rendezvous.client import RendezvousClient

_IDLE_SECONDS = 0.05
_BUSY_SECONDS = 0.005  # while something is launched: how late a done-callback may be
_SUSPICIOUS_AFTER_SECONDS = 1.0  # when a running collective makes the thread ask whether a rank has closed


class Watcher:
    """Looks after the launches of one communicator.

    Args:
        handle: NCCL's communicator.
        client: the way of the communicator's ranks to the rendezvous server.
        verdicts: of the server.
        agreements: of the communicator's ranks.
        label: this rank in messages.
        device_id: the device.
        timeout_seconds: how long a collective may run.
        on_failure: called once, on this thread, with what has broken the communicator.
    """

    def __init__(
        self,
        handle: NcclHandle,
        client: RendezvousClient,
        verdicts: Verdicts,
        agreements: NcclAgreements,
        *,
        label: str,
        device_id: int,
        timeout_seconds: float,
        on_failure: Callable[[GradsyncError], None],
    ) -> None:
        self._handle = handle
        self._client = client
        self._verdicts = verdicts
        self._agreements = agreements
        self._label = label
        self._device_id = device_id
        self._timeout_seconds = timeout_seconds
        self._on_failure = on_failure
        self._running: deque[Launch] = deque()
        self._ended: deque[Launch] = deque()  # whose callbacks are to be called
        self._error: BaseException | None = None  # what a launch that comes now has failed with
        self._device_failure: NcclError | None = None  # found at the end of a launch
        self._lock = threading.Lock()
        self._launching_thread = threading.get_ident()
        # The launch that a thread is making, that thread, and since when it waits for nothing but a call to come back.
        self._call: list[Any] | None = None
        self._stopped = threading.Event()
        self._ask_about_closing_at = 0.0
        threading.Thread(target=self._run, name="gradsync-nccl-watcher", daemon=True).start()

    def begin_call(self, launch: Launch) -> None:
        """Watches what a launch does on the host until end_call(): NCCL may wait for other ranks there, and so does
        CUDA with CUDA_LAUNCH_BLOCKING=1.
        """
        self._call = [launch, threading.get_ident(), None]

    def end_call(self) -> None:
        """Ends what begin_call() has begun."""
        self._call = None

    def add(self, launch: Launch) -> None:
        """Takes a launch into care; drops those that have ended."""
        with self._lock:
            error = self._error
            self._launching_thread = threading.get_ident()
            if error is None:
                self._running.append(launch)
        if error is not None:
            launch.fail(error)
            launch.tell()  # the thread may have ended
        self.reap()

    def reap(self) -> None:
        """Lets go of launches that have ended, and of their memory; a stream ends them in order."""
        while (head := self._head()) is not None and head.done():
            with self._lock:
                if self._running and self._running[0] is head:
                    self._ended.append(self._running.popleft())

    def fail_launches(self, error: BaseException) -> None:
        """Fails every launch that has not ended, and those that are still to come."""
        with self._lock:
            self._error = error
            failed = list(self._running)
            self._running.clear()
        for launch in reversed(failed):  # who waits for the first that has failed finds the later ones failed too
            if not launch.done():
                launch.fail(error)
        self._ended.extend(failed)

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
        """Makes the thread end; does not wait for it."""
        self._stopped.set()

    def _run(self) -> None:
        try:
            cupy.cuda.Device(self._device_id).use()
            while not self._stopped.wait(_BUSY_SECONDS if self._running else _IDLE_SECONDS):
                self._look()
        except GradsyncError as error:
            self._report(error)
        except Exception as error:  # CUDA's own above all: nobody else would notice that this thread is gone
            self._report(NcclError(f"{self._label}: looking after collectives failed: {describe(error)}"))
        while self._running or self._ended:  # what is left ends soon: it was waited for, or has failed
            self._end_launches()
            time.sleep(_BUSY_SECONDS)

    def _report(self, error: GradsyncError) -> None:
        if not self._stopped.is_set():
            self._on_failure(error)

    def _end_launches(self) -> None:
        self.reap()
        while self._ended:
            launch = self._ended.popleft()
            launch.tell()
            if isinstance(launch.error, NcclError):
                self._device_failure = launch.error

    def _head(self) -> Launch | None:
        with self._lock:
            return self._running[0] if self._running else None

    def _look(self) -> None:
        """Raises what has broken the communicator."""
        self._end_launches()
        if self._device_failure is not None:
            raise self._device_failure
        self._look_at_others()
        try:
            self._handle.check()
        except NcclError as error:
            self.raise_cause(error)
        head, call = self._head(), self._call
        if head is not None:
            self._look_at_clock(head, time.monotonic())
        if call is not None:
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

    def _look_at_absence(self, head: Launch, ran_seconds: float) -> None:
        """Warns of a collective that runs for long; raises the verdict on one that has reached its deadline."""
        entry = None if head.recorded is None else Entry(*head.recorded)
        on_behalf.thread = self._launching_thread  # whose line is told with a message
        if ran_seconds > self._timeout_seconds and not head.done():
            if self._client.world_size > 1:
                self._verdicts.give_up(ran_seconds, head.peers(), entry)
            raise CollectiveTimeout(
                f"{self._label}: {head.name} has run for {self._timeout_seconds:g} s on cuda:{self._device_id}, alone: "
                "the GPU is stuck"
            )
        if self._client.world_size > 1:
            self._verdicts.warn(ran_seconds, head.peers(), entry)

    def _look_at_call(self, call: list[Any], now: float) -> None:
        """Warns of a call that does not come back, and raises the verdict at the deadline: an abort may free it."""
        launch, thread, since = call
        if since is None:
            if launch.started.done:  # until then it is this rank's own work that may hold the call up
                call[2] = now
            return
        on_behalf.thread = thread
        several = self._client.world_size > 1
        if now - since > self._timeout_seconds and self._call is call:
            if several:
                self._verdicts.give_up(now - since, launch.peers())
            raise CollectiveTimeout(
                f"{self._label}: {launch.name}: a call has not returned for {self._timeout_seconds:g} s on "
                f"cuda:{self._device_id}, alone: the GPU is stuck"
            )
        if several:
            self._verdicts.warn(now - since, launch.peers())

    def _look_at_clock(self, head: Launch, now: float) -> None:
        if head.seen_started_at is None:
            if head.started.done:
                head.seen_started_at = now
                self._ask_about_closing_at = now + _SUSPICIOUS_AFTER_SECONDS
            return
        self._look_at_absence(head, now - head.seen_started_at)
        if now >= self._ask_about_closing_at:
            self._ask_about_closing_at = now + _SUSPICIOUS_AFTER_SECONDS
            head.look_for_closed_ranks()
