"""The communicator between GPUs: CuPy arrays over NCCL.

A single collective runs on the caller's stream. A gradient bucket runs on the communicator's own: it waits there for
the work that made the gradients, is packed, reduced and split, and records its end, all without the host waiting.
"""

from __future__ import annotations

import copy
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import cupy

from gradsync.communicators.nccl.collectives import NcclCollectives
from gradsync.communicators.nccl.ending import call_if_alive, end_rest, tell_others
from gradsync.communicators.nccl.handle import NcclHandle
from gradsync.communicators.nccl.joining import join_group, split_group
from gradsync.communicators.nccl.launch import Launch, as_stream
from gradsync.communicators.nccl.launch_order import launch_order
from gradsync.communicators.nccl.store_path import StorePath
from gradsync.communicators.nccl.watcher import Watcher
from gradsync.communicators.nccl.work_marks import WorkMarks
from gradsync.errors import CollectiveTimeout, CommunicatorClosed, GradsyncError, NcclError, PlanMismatch, describe
from gradsync.rendezvous.client import RendezvousClient

_DRAIN_SECONDS = 10.0  # how long close() lets queued collectives end
_TELL_SECONDS = 1.0  # and how long it waits for the server to hear of a failure


class NcclCommunicator(NcclCollectives):
    """Ranks with a GPU each.

    Takes CuPy arrays, other arrays on the device by DLPack or `__cuda_array_interface__` without a copy, and host
    arrays, which are copied to the device and back. min and max follow NCCL where a value is NaN.

    Args:
        handle: NCCL's communicator.
        client: this rank's connection to the rendezvous server.
        group: the communicator's name, not used before in this generation.
        timeout_seconds: how long a collective may wait for a rank.

    Attributes:
        force_packing: whether a world of one packs and splits its buckets too, so that benchmarks can measure it.
    """

    backend = "nccl"

    def __init__(self, handle: NcclHandle, client: RendezvousClient, group: str, timeout_seconds: float) -> None:
        super().__init__(handle, client, group, timeout_seconds)
        with self._device:
            self._stream = cupy.cuda.Stream(non_blocking=True)  # where buckets are reduced
        self._last: Launch | None = None
        self._order = launch_order(handle.device_id)
        self._marks = WorkMarks(self._device)
        self._timeout_seconds = timeout_seconds
        self._failure: BaseException | None = None
        self._failing = threading.RLock()  # a signal's handler may close while its own thread holds it
        self._telling: threading.Event | None = None  # set when the others have heard of this rank's failure
        failed = weakref.WeakMethod(self._fail)
        self._watcher = Watcher(
            handle,
            client,
            self._verdicts,
            self._agreements,
            label=self.label,
            device_id=handle.device_id,
            timeout_seconds=timeout_seconds,
            on_failure=lambda error: call_if_alive(failed, error),
        )
        # Not at exit: the process group closes its communicator then, and what is left cannot hang (handle.py).
        rest = partial(end_rest, self._watcher, self._agreements, client)
        weakref.finalize(self, handle.leave, rest).atexit = False

    @classmethod
    def take_over(
        cls, handle: NcclHandle, client: RendezvousClient, group: str, timeout_seconds: float
    ) -> NcclCommunicator:
        """Makes a communicator, or ends the handle."""
        try:
            return cls(handle, client, group, timeout_seconds)
        except BaseException:
            handle.leave()
            raise

    def mark_work(self) -> Any:
        return self._marks.mark()

    def mark_end(self) -> Launch:
        with self._launching(None) as launch:
            pass
        return launch

    def follow_work(self, marks: Sequence[Any]) -> None:
        with self._device:
            _follow(cupy.cuda.get_current_stream(), marks)

    def close(self) -> None:
        """See Communicator.close; waits for what is queued, and raises a failure that no call has told yet."""
        was_told, told = self.lifetime.was_told or self.family.was_aborted, self.family.told()
        failure = None if self.closed else self._await_last_launch()
        try:
            super().close()
        finally:
            if self._telling is not None:
                self._telling.wait(_TELL_SECONDS)
        if failure is not None and not was_told and str(failure) not in told:
            raise failure

    def _connect_group(self, members: tuple[int, ...], name: str) -> NcclCommunicator:
        deadline = time.monotonic() + self._timeout_seconds
        client = self._client.group(members, name)
        try:
            handle = join_group(client, self._handle.library, self._device.id, name, deadline)
            return self.take_over(handle, client, name, self._timeout_seconds)
        except BaseException:
            client.close()
            raise

    def _split_group(self, color: int, key: int, members: tuple[int, ...], name: str) -> NcclCommunicator | None:
        library = self._handle.library
        if not library.can_split:
            return self._connect_group(members, name) if members else None
        if self._last is not None:
            self._last.wait()  # NCCL may hang where a collective of the communicator still runs
        try:
            raw = split_group(self._client, self._handle, color, key, self._timeout_seconds)
        except GradsyncError as error:
            self._fail(error, told=True)
            raise
        if not members:
            return None
        client = self._client.group(members, name)
        handle = NcclHandle(library, raw, self._device.id, client.label)
        return self.take_over(handle, client, name, self._timeout_seconds)

    @contextmanager
    def _launching(self, stream: Any, producers: Sequence[Any] | None = None) -> Iterator[Launch]:
        self._raise_failure()
        with self._device:
            if producers is not None:
                where, results_on = self._stream, cupy.cuda.get_current_stream()
            else:
                where = results_on = as_stream(stream, self._device.id)
                # Arrays of other libraries are ordered on the current stream when they are taken over.
                producers = [] if stream is None else [self.mark_work()]
            launch = Launch(
                f"{self.label}: a collective",
                self._raise_failure,
                self.lifetime.note_told,
                self._handle,
                self._device.id,
                self._timeout_seconds,
            )
            self._order_after_others(where, producers)
            with where, self.arrays.results_on(results_on):
                launch.started.record(where)
                outer, self._launch = self._launch, launch
                launch.is_part = outer is not None
                try:
                    yield launch
                except PlanMismatch:
                    if launch.agreed:  # one message of two has been launched
                        self._take_into_care(launch, where)
                    raise
                except (NcclError, CommunicatorClosed) as error:
                    self._take_into_care(launch, where)
                    self._raise_failure()  # the cause, where another thread has ended the communicator
                    if isinstance(error, NcclError):
                        self._watcher.raise_cause(error)
                    raise
                except BaseException:
                    self._take_into_care(launch, where)
                    raise
                else:
                    self._take_into_care(launch, where)
                finally:
                    self._launch = outer

    def _await_host_results(self, launch: Any) -> None:
        if launch.has_host_results:
            launch.wait()

    def _announce_close(self) -> None:
        self._agreements.announce_closed()

    def _announce_abort(self, reason: str, culprit: int | None) -> None:
        aborted = CommunicatorClosed(f"{self.label}: the communicator was aborted: {reason}")
        error = self._verdicts.known() or aborted
        if self._begin_to_fail(error):
            self._begin_abort(reason, culprit)

    def _look_for_ended(self, missing: list[int]) -> None:
        self._raise_failure()
        self._agreements.look_for_closed_members(missing)

    def _make_host_path(self) -> StorePath:
        group = self.recorder.group
        return StorePath(self._client, group, self._verdicts, self._timeout_seconds, self._agree, self._raise_end)

    def _raise_end(self) -> None:
        """Raises why a rank that waits for others on the host would wait in vain, where that is so."""
        self._raise_failure()
        self._agreements.look_for_closed_ranks()

    def _release(self) -> None:
        if not self._has_failed():
            self._await_last_launch()
            if self._last is not None:
                self._order.forget(self._last.ended)
        self._watcher.stop()
        self._agreements.close()
        if not self._has_failed():
            self._handle.destroy()

    def _order_after_others(self, stream: Any, producers: Sequence[Any]) -> None:
        """Makes a stream wait for the work that its inputs come from, and for the collective before."""
        _follow(stream, producers)
        self._order.follow(stream)

    def _take_into_care(self, launch: Launch, stream: Any) -> None:
        launch.record_end(stream)
        if not launch.is_part:
            launch.recorded = self.recorder.hand_over()
        self._last = launch
        self._order.note(launch.ended, stream)
        self._watcher.add(launch)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self.lifetime.note_told(self._failure)
            raise copy.copy(self._failure)

    def _has_failed(self) -> bool:
        """Whether it has failed; waits for whoever is about to fail it, and has failed its launches."""
        with self._failing:
            return self._failure is not None

    def _begin_to_fail(self, error: BaseException) -> bool:
        """Marks the communicator and its launches as failed; returns whether this was the first failure."""
        with self._failing:
            if self._failure is not None:
                return False
            self._watcher.fail_launches(error)
            self._failure = error  # last: who sees it finds every launch at its end
        return True

    def _fail(self, error: GradsyncError, *, told: bool = False) -> None:
        """Breaks the communicator for a failure that the watcher, or an agreement, has found."""
        if not self._begin_to_fail(error):
            return
        self.lifetime.fail(error, told=told)
        # What the server told, it tells all; what only this rank has seen, the others must hear from it.
        own = isinstance(error, (CollectiveTimeout, NcclError)) and self._verdicts.known() is None
        self._begin_abort(describe(error) if own else None)

    def _begin_abort(self, reason: str | None, culprit: int | None = None) -> None:
        """Aborts on another thread: neither the server nor NCCL may hold up the one that failed."""
        self._telling = threading.Event()
        self._handle.begin_abort(partial(tell_others, self._client, reason, culprit, self._telling))

    def _await_last_launch(self) -> GradsyncError | None:
        """Lets queued collectives end before the communicator is destroyed; returns what they have failed with."""
        try:
            if self._last is not None:
                self._last.wait(_DRAIN_SECONDS)
        except GradsyncError as error:
            if isinstance(error, CollectiveTimeout) and self._begin_to_fail(error):
                self._begin_abort(describe(error))
            return error
        return None


def _follow(stream: Any, marks: Sequence[Any]) -> None:
    """Makes a stream wait for marked work; for each mark once, as the gradients of a bucket share theirs."""
    for event in {id(event): event for event in marks}.values():
        stream.wait_event(event)
