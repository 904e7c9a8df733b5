"""The communicator between GPUs: CuPy arrays over NCCL.

A single collective runs on the caller's stream. A gradient bucket runs on the communicator's own: it waits there for
the work that made the gradients, is packed, reduced and split, and records its end, all without the host waiting.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import cupy
import numpy as np

from gradsync.bucketing.pack_kernels import FusedPacker, pack_layout
from gradsync.communicators.agreement import Agreement
from gradsync.communicators.base import Communicator
from gradsync.communicators.device_arrays import DeviceArrays
from gradsync.communicators.nccl_ending import call_if_alive, end_forgotten, tell_others
from gradsync.communicators.nccl_handle import NcclHandle
from gradsync.communicators.nccl_launch import Launch, as_stream
from gradsync.communicators.nccl_reduction import NcclReduction
from gradsync.communicators.nccl_watcher import Watcher
from gradsync.communicators.predicted_agreement import PredictedAgreement
from gradsync.communicators.verdicts import Verdicts
from gradsync.communicators.work_marks import WorkMarks
from gradsync.errors import CollectiveTimeout, CommunicatorClosed, GradsyncError, NcclError, PlanMismatch, describe
from gradsync.reduction import ReduceOp
from gradsync.rendezvous.client import RendezvousClient

_DRAIN_SECONDS = 10.0  # how long close() lets queued collectives end
_TELL_SECONDS = 1.0  # and how long it waits for the server to hear of a failure


class NcclCommunicator(Communicator):
    """Ranks with a GPU each.

    Takes CuPy arrays, other arrays on the device by DLPack or `__cuda_array_interface__` without a copy, and host
    arrays, which are copied to the device and back. min and max follow NCCL where a value is NaN.

    Args:
        handle: NCCL's communicator, on `device_id`.
        client: this rank's connection to the rendezvous server.
        group: the communicator's name, not used before in this generation.
        device_id: CUDA's number of the device in this process.
        timeout_seconds: how long a collective may wait for a rank.

    Attributes:
        force_packing: whether a world of one packs and splits its buckets too, so that benchmarks can measure it.
    """

    backend = "nccl"

    def __init__(
        self, handle: NcclHandle, client: RendezvousClient, *, group: str, device_id: int, timeout_seconds: float
    ) -> None:
        super().__init__(client.rank, client.world_size, group)
        self.device = f"cuda:{device_id}"
        self.arrays = DeviceArrays(device_id)
        self.force_packing = False
        self._handle = handle
        self._client = client
        self._device = cupy.cuda.Device(device_id)
        with self._device:
            self._stream = cupy.cuda.Stream(non_blocking=True)  # where buckets are reduced
            self._packer = FusedPacker()
        self._reduction = NcclReduction(handle, self.world_size)
        self._flat: Any = None  # where buckets are packed; belongs to self._stream
        self._launch: Launch | None = None  # the one being made
        self._last: tuple[Launch, Any] | None = None  # the one before, and its stream
        self._marks = WorkMarks(self._device)
        self._timeout_seconds = timeout_seconds
        self._failure: BaseException | None = None
        self._failing = threading.Lock()
        self._telling: threading.Event | None = None  # set when the others have heard of this rank's failure
        self._verdicts = Verdicts(client, self.recorder)
        self._agreement = PredictedAgreement(client, group, self.label, timeout_seconds, self._verdicts)
        failed = weakref.WeakMethod(self._fail)
        self._watcher = Watcher(
            handle,
            client,
            self._verdicts,
            self._agreement,
            label=self.label,
            device_id=device_id,
            timeout_seconds=timeout_seconds,
            on_failure=lambda error: call_if_alive(failed, error),
        )
        # Not at exit: the process group closes its communicator then, and what is left cannot hang (nccl_handle.py).
        weakref.finalize(self, end_forgotten, handle, self._watcher, self._agreement).atexit = False

    def mark_work(self) -> Any:
        return self._marks.mark()

    def close(self) -> None:
        """See Communicator.close; waits for what is queued, and raises a failure that no call has told yet."""
        was_told = self.lifetime.was_told
        failure = None if self.closed else self._await_last_launch()
        try:
            super().close()
        finally:
            if self._telling is not None:
                self._telling.wait(_TELL_SECONDS)
        if failure is not None and not was_told:
            raise failure

    def _all_reduce_list(
        self, sources: Sequence[Any], targets: Sequence[Any], op: ReduceOp, agreement: Agreement
    ) -> None:
        self._agree(agreement)
        self._keep(*sources, *targets)
        if len(sources) == 1:
            self._reduction.all_reduce(sources[0], targets[0], op)
            return
        if self.world_size == 1 and not self.force_packing:
            for source, target in zip(sources, targets, strict=True):
                if target is not source:
                    target[...] = source
            return
        flat = self._flat_buffer(pack_layout(tuple([source.nbytes for source in sources])).total_bytes)
        if flat.size:
            self._keep(flat)
            self._packer.pack(sources, flat)
            packed = flat.view(sources[0].dtype)
            self._reduction.all_reduce(packed, packed, op)
            self._packer.split(flat, targets)

    def _broadcast(self, flat: Any, root: int, agreement: Agreement) -> None:
        self._agree(agreement)
        self._reduction.broadcast(flat, root)

    def _agree(self, agreement: Agreement) -> None:
        self._raise_failure()
        if self.world_size == 1:
            return
        try:
            self._agreement.next(agreement)
        except PlanMismatch as error:
            if error.broken:
                self._fail(error, told=True)
            raise

    def _meet(self, agreement: Agreement) -> None:
        with self._launching(None) as launch:
            token = cupy.zeros(1, np.int32)
            self._all_reduce_list([token], [token], ReduceOp.SUM, agreement)
        launch.wait()

    @contextmanager
    def _launching(self, stream: Any, producers: Sequence[Any] | None = None) -> Iterator[Launch]:
        self._raise_failure()
        with self._device:
            if producers is not None:
                where = self._stream
            else:
                where = as_stream(stream, self._device.id)
                # Arrays of other libraries are ordered on the current stream when they are taken over.
                producers = [] if stream is None else [self.mark_work()]
            launch = Launch(
                f"{self.label}: a collective",
                self._raise_failure,
                self.lifetime.note_told,
                self._handle,
                self._device.id,
                self._agreement.position,
                self._timeout_seconds,
            )
            self._order_after_others(where, producers)
            with where:
                launch.started.record(where)
                self._launch = launch
                try:
                    yield launch
                except PlanMismatch:
                    raise  # before anything was launched
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
                    self._launch = None

    def _bring_back(self, flat: Any, native: Any, launch: Any) -> None:
        if isinstance(native, np.ndarray):
            launch.bring_back(flat, native)
        else:
            self._keep(flat, native)
            self.arrays.write_back(flat, native)

    def _await_host_results(self, launch: Any) -> None:
        if launch.has_host_results:
            launch.wait()

    def _announce_close(self) -> None:
        self._agreement.announce_closed()

    def _announce_abort(self, reason: str, culprit: int | None) -> None:
        aborted = CommunicatorClosed(f"{self.label}: the communicator was aborted: {reason}")
        error = self._verdicts.known() or aborted
        if self._begin_to_fail(error):
            self._begin_abort(reason)

    def _release(self) -> None:
        if self._failure is None:
            self._await_last_launch()
        self._watcher.stop()
        self._agreement.close()
        if self._failure is None:
            self._handle.destroy()

    def _order_after_others(self, stream: Any, producers: Sequence[Any]) -> None:
        """Makes a stream wait for the work that its inputs come from, and for the collective before."""
        for event in {id(event): event for event in producers}.values():
            stream.wait_event(event)
        # NCCL wants the collectives of a communicator one after the other.
        if self._last is not None and self._last[1] is not stream:
            stream.wait_event(self._last[0].ended)

    def _take_into_care(self, launch: Launch, stream: Any) -> None:
        launch.ended.record(stream)
        launch.recorded = self.recorder.hand_over()
        self._last = (launch, stream)
        self._watcher.add(launch)

    def _keep(self, *arrays: Any) -> None:
        """Keeps arrays until the launch that is being made has ended."""
        if self._launch is not None:
            self._launch.keep(*arrays)

    def _flat_buffer(self, size_bytes: int) -> Any:
        """Returns the first bytes of the flat buffer, grown where it is too small; only for the bucket stream."""
        if self._flat is None or self._flat.size < size_bytes:
            # Initialised once; what the gaps between gradients hold is reduced too, and does not matter.
            self._flat = cupy.zeros(size_bytes, np.uint8)
        return self._flat[:size_bytes]

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self.lifetime.note_told()
            raise copy.copy(self._failure)

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

    def _begin_abort(self, reason: str | None) -> None:
        """Aborts on another thread: neither the server nor NCCL may hold up the one that failed."""
        self._telling = threading.Event()
        self._handle.begin_abort(partial(tell_others, self._client, reason, self._telling))

    def _await_last_launch(self) -> GradsyncError | None:
        """Lets queued collectives end before the communicator is destroyed; returns what they have failed with."""
        try:
            if self._last is not None:
                self._last[0].wait(_DRAIN_SECONDS)
        except GradsyncError as error:
            if isinstance(error, CollectiveTimeout) and self._begin_to_fail(error):
                self._begin_abort(describe(error))
            return error
        return None
