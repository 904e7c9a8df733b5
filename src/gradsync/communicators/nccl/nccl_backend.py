"""The backend between GPUs: CuPy arrays over NCCL.

A single collective runs on the caller's stream. A gradient bucket runs on the communicator's own: it waits there for
the work that made the gradients, is packed, reduced and split, and records its end, all without the host waiting.
"""

from __future__ import annotations

import copy
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import cupy
import numpy as np

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.backend import Backend, Bounds, Message
from gradsync.communicators.nccl.agreements import Answer, NcclAgreements, Question
from gradsync.communicators.nccl.device_arrays import DeviceArrays
from gradsync.communicators.nccl.ending import call_if_alive, end_rest, tell_others
from gradsync.communicators.nccl.handle import NcclHandle
from gradsync.communicators.nccl.joining import join_group, split_group
from gradsync.communicators.nccl.launch import Launch, as_stream, refuse_capturing
from gradsync.communicators.nccl.launch_order import launch_order
from gradsync.communicators.nccl.movement import NcclMovement
from gradsync.communicators.nccl.pack_kernels import FusedPacker, pack_layout
from gradsync.communicators.nccl.predicted_agreement import TEXTS_WITHIN_SECONDS
from gradsync.communicators.nccl.reduction import NcclReduction
from gradsync.communicators.nccl.store_path import StorePath
from gradsync.communicators.nccl.watcher import Watcher
from gradsync.communicators.nccl.work_marks import WorkMarks
from gradsync.communicators.verdicts import NEWS_SECONDS, Verdicts
from gradsync.diagnostics import tracing
from gradsync.errors import CollectiveTimeout, CommunicatorClosed, GradsyncError, NcclError, PlanMismatch, describe
from gradsync.reduction import ReduceOp
from gradsync.rendezvous.client import RendezvousClient

_DRAIN_SECONDS = 10.0  # how long close() lets queued collectives end
_TELL_SECONDS = 1.0  # and how long it waits for the server to hear of a failure


class NcclBackend(Backend):
    """Ranks with a GPU each.

    Takes CuPy arrays, other arrays on the device by DLPack or `__cuda_array_interface__` without a copy, and host
    arrays, which are copied to the device and back. min and max follow NCCL where a value is NaN.

    Args:
        handle: NCCL's communicator.
        client: this rank's connection to the rendezvous server.
        group: the communicator's name, not used before in this generation.
        timeout_seconds: how long a collective may wait for a rank.
    """

    name = "nccl"
    runs_beside_host = True
    arrays: DeviceArrays
    client: RendezvousClient

    def __init__(self, handle: NcclHandle, client: RendezvousClient, group: str, timeout_seconds: float) -> None:
        super().__init__(client, group, timeout_seconds)
        self.device = f"cuda:{handle.device_id}"
        self.arrays = DeviceArrays(handle.device_id)
        self._device = cupy.cuda.Device(handle.device_id)
        with self._device:
            self._packer = FusedPacker()
        self._handle = handle
        self._verdicts = Verdicts(client, self.recorder)
        self._agreements = NcclAgreements(client, group, self.label, timeout_seconds, self._verdicts)
        self._movement = NcclMovement(handle, self.rank, self.world_size)
        self._reduction = NcclReduction(handle, self._movement, self.rank, self.world_size)
        self._flat: Any = None  # where arrays are packed: by one launch at a time, because they run one after the other
        self._numbers: Any = None  # room for those that ranks share
        self._launch: Launch | None = None  # the one being made
        with self._device:
            self._stream = cupy.cuda.Stream(non_blocking=True)  # where buckets are reduced
        self._last: Launch | None = None
        self._order = launch_order(handle.device_id)
        self._marks = WorkMarks()
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
    def take_over(cls, handle: NcclHandle, client: RendezvousClient, group: str, timeout_seconds: float) -> NcclBackend:
        """Makes a backend, or ends the handle."""
        try:
            return cls(handle, client, group, timeout_seconds)
        except BaseException:
            handle.leave()
            raise

    def agree_always(self) -> None:
        self._agreements.always_ask()

    # -- Reductions ----------------------------------------------------------------------------------------------

    def all_reduce(self, sources: Sequence[Any], targets: Sequence[Any], op: ReduceOp, agreement: Agreement) -> None:
        laps = tracing.laps_of(self.recorder)
        self.agree(agreement)
        if laps is not None:
            laps.end("waiting")
        self.keep(*sources, *targets)
        if len(sources) == 1:
            self._reduction.all_reduce(sources[0], targets[0], op)
            if laps is not None:
                laps.end("launching")
            return
        if self.world_size == 1 and not self.force_packing:
            for source, target in zip(sources, targets, strict=True):
                if target is not source:
                    target[...] = source
            return
        flat = self._packed(sources)
        if laps is not None:
            laps.end("packing")
        if flat.size:
            packed = flat.view(sources[0].dtype)
            self._reduction.all_reduce(packed, packed, op)
            if laps is not None:
                laps.end("launching")
            self._packer.split(flat, targets)
            if laps is not None:
                laps.end("splitting")

    def reduce(self, source: Any, target: Any | None, op: ReduceOp, root: int, agreement: Agreement) -> None:
        self.agree(agreement)
        self._reduction.reduce(source, target, op, root)

    def reduce_scatter(self, source: Any, target: Any, bounds: Bounds, op: ReduceOp, agreement: Agreement) -> None:
        self.agree(agreement)
        self._reduction.reduce_scatter(source, target, bounds, op)

    # -- Movements -----------------------------------------------------------------------------------------------

    def broadcast(self, flats: Sequence[Any], root: int, agreement: Agreement) -> None:
        self.agree(agreement)
        if len(flats) == 1:
            self._movement.broadcast(flats[0], root)
        elif self.world_size > 1:
            flat = self._packed(flats)
            self._movement.broadcast(flat, root)
            if self.rank != root:
                self._packer.split(flat, flats)

    def all_gather(self, source: Any, target: Any, bounds: Bounds, agreement: Agreement) -> None:
        self.agree(agreement)
        self._movement.all_gather(source, target, bounds)

    def gather(self, source: Any, target: Any | None, bounds: Bounds, root: int, agreement: Agreement) -> None:
        self.agree(agreement)
        self._movement.gather(source, target, bounds, root)

    def scatter(self, source: Any | None, target: Any, bounds: Bounds, root: int, agreement: Agreement) -> None:
        self.agree(agreement)
        self._movement.scatter(source, target, bounds, root)

    def all_to_all(
        self,
        source: Any,
        target: Any,
        send_bounds: Bounds,
        receive_bounds: Bounds,
        largest: int,
        agreement: Agreement,
    ) -> None:
        self.agree(agreement)
        self._movement.all_to_all(source, target, send_bounds, receive_bounds)

    def exchange(self, send: Message | None, receive: Message | None) -> None:
        if send is not None and receive is not None and send.peer == self.rank:
            self._movement.copy(send.flat, receive.flat)  # there is nobody to agree with
            return
        launches: dict[Question, Callable[[], None]] = {}
        if send is not None:
            way = Question(self.rank, send.peer, send.agreement)
            launches[way] = partial(self._movement.send, send.flat, send.peer)
        if receive is not None:
            way = Question(receive.peer, self.rank, receive.agreement)
            launches[way] = partial(self._movement.receive, receive.flat, receive.peer)
        mismatch = None
        for answers in self._agree_on_messages(list(launches)):
            with self._handle.group():
                for question, answer in answers.items():
                    mismatch = mismatch or answer.mismatch
                    if answer.agreed is not None:  # whatever becomes of the other message: this one is waited for
                        launches[question]()
        if mismatch is not None:
            raise mismatch

    def share_numbers(self, numbers: Sequence[int], agreement: Agreement) -> list[list[int]]:
        mine = np.array(numbers, np.int64)
        shared = np.empty((self.world_size, mine.size), np.int64)
        # On the communicator's own stream, where the host need not wait for all that the caller's has to do.
        self._make_room(mine.nbytes + shared.nbytes)
        with self.launching(None, []) as launch:
            self.agree(agreement)
            source = self._numbers[: mine.nbytes]
            target = self._numbers[mine.nbytes : mine.nbytes + shared.nbytes]
            source.set(mine.view(np.uint8))
            self._movement.all_gather(source, target, [rank * mine.nbytes for rank in range(self.world_size + 1)])
            launch.bring_back(target, shared)
        launch.wait()
        numbers_by_rank: list[list[int]] = shared.tolist()
        return numbers_by_rank

    def _make_room(self, size_bytes: int) -> None:
        """Makes room for numbers where there is too little: memory of our own stream, which alone uses it."""
        if self._numbers is None or self._numbers.size < size_bytes:
            with self._device, self._stream:
                self._numbers = cupy.empty(size_bytes, np.uint8)

    # -- Meeting -------------------------------------------------------------------------------------------------

    def agree(self, agreement: Agreement) -> None:
        self._raise_failure()
        if self.world_size > 1:
            self._watcher.end_call()  # the agreement has a deadline of its own
            try:
                agreed = self._agreements.next(agreement)
            except GradsyncError as error:
                self._raise_disagreement(error)
            if self._launch is not None:
                self._launch.agreed.append(agreed)
        if self._launch is not None:
            self._watcher.begin_call(self._launch)

    def meet(self, agreement: Agreement) -> None:
        token = cupy.zeros(1, np.int32)
        self.all_reduce([token], [token], ReduceOp.SUM, agreement)
        self.bring_back(token, np.zeros(1, np.int32), self._launch)  # and so the host waits for it

    def _agree_on_messages(self, questions: Sequence[Question]) -> Iterator[dict[Question, Answer]]:
        self._raise_failure()
        try:
            for answers in self._agreements.on_messages(questions):
                if self._launch is not None:
                    self._launch.agreed += [answer.agreed for answer in answers.values() if answer.agreed is not None]
                    self._watcher.begin_call(self._launch)
                yield answers
                self._watcher.end_call()
        except GradsyncError as error:
            self._raise_disagreement(error)

    def _raise_disagreement(self, error: GradsyncError) -> NoReturn:
        """Raises why this rank may not launch, or what it has launched before that others did not."""
        if isinstance(error, PlanMismatch):
            if error.broken:
                self._fail(error, told=True)
            raise error
        self._raise_failure()  # the server may have told only that this rank has failed
        if self._agreements.were_overtaken:  # and whoever found that has left: the watcher is about to tell it
            self._verdicts.await_news(TEXTS_WITHIN_SECONDS + NEWS_SECONDS, self._raise_failure)
        raise error

    # -- Memory --------------------------------------------------------------------------------------------------

    def keep(self, *arrays: Any) -> None:
        """Keeps arrays until the launch that is being made has ended."""
        if self._launch is not None:
            self._launch.keep(*arrays)

    def bring_back(self, flat: Any, native: Any, launch: Any) -> None:
        if isinstance(native, np.ndarray):
            launch.bring_back(flat, native)
        else:
            self.keep(flat, native)
            self.arrays.write_back(flat, native)

    def _packed(self, arrays: Sequence[Any]) -> Any:
        """Packs arrays into the first bytes of the flat buffer, grown where it is too small, and returns those."""
        size_bytes = pack_layout(tuple([array.nbytes for array in arrays])).total_bytes
        if self._flat is None or self._flat.size < size_bytes:
            # Initialised once; what the gaps between arrays hold is reduced too, and does not matter.
            self._flat = cupy.zeros(size_bytes, np.uint8)
        flat = self._flat[:size_bytes]
        if size_bytes:
            self.keep(flat)
            self._packer.pack(arrays, flat)
        return flat

    # -- Launching, groups and the end ---------------------------------------------------------------------------

    def mark_work(self) -> Any:
        if self.lifetime.is_inherited:  # CUDA would refuse first, and not say why
            raise self.lifetime.ended_error("a collective")
        with self._device:
            return self._marks.mark(cupy.cuda.get_current_stream())

    def mark_end(self) -> Launch:
        with self.launching(None) as launch:
            pass
        return launch

    def follow_work(self, marks: Sequence[Any]) -> None:
        with self._device:
            _follow(cupy.cuda.get_current_stream(), marks)

    def await_told(self) -> None:
        if self._telling is not None:
            self._telling.wait(_TELL_SECONDS)

    def connect_group(self, members: tuple[int, ...], name: str) -> NcclBackend:
        deadline = time.monotonic() + self.timeout_seconds
        client = self.client.group(members, name)
        try:
            handle = join_group(client, self._handle.library, self._device.id, name, deadline)
            return self.take_over(handle, client, name, self.timeout_seconds)
        except BaseException:
            client.close()
            raise

    def split_group(self, color: int, key: int, members: tuple[int, ...], name: str) -> NcclBackend | None:
        library = self._handle.library
        if not library.can_split:
            return self.connect_group(members, name) if members else None
        if self._last is not None:
            self._last.wait()  # NCCL may hang where a collective of the communicator still runs
        try:
            raw = split_group(self.client, self._handle, color, key, self.timeout_seconds)
        except GradsyncError as error:
            self._fail(error, told=True)
            raise
        if not members:
            return None
        client = self.client.group(members, name)
        handle = NcclHandle(library, raw, self._device.id, client.label)
        return self.take_over(handle, client, name, self.timeout_seconds)

    def checked_stream(self, stream: Any, what: str) -> Any:
        who = f"{self.label}: {what}"
        checked = None if stream is None else as_stream(stream, self._device.id, who)
        # The current one too where another is given: arrays are made there, and the given one waits for it.
        current = cupy.cuda.get_current_stream(self._device.id)
        refuse_capturing(current, who)
        if checked is not None and checked is not current:
            refuse_capturing(checked, who)
        return checked

    @contextmanager
    def launching(self, stream: Any, producers: Sequence[Any] | None = None) -> Iterator[Launch]:
        self._raise_failure()
        with self._device:
            if producers is not None:
                where, results_on = self._stream, cupy.cuda.get_current_stream()
            else:
                current, results_on = cupy.cuda.get_current_stream(), None
                where = current if stream is None else stream
                # Arrays of other libraries are ordered on the current stream when they are taken over.
                producers = [] if stream is None else [self._marks.mark(current)]
            launch = Launch(
                f"{self.label}: a collective",
                self._raise_failure,
                self.lifetime.note_told,
                self._handle,
                self._device.id,
                self.timeout_seconds,
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
                    self._raise_failure()  # where an abort has freed a call that was stuck
                finally:
                    self._watcher.end_call()
                    self._launch = outer

    def await_host_results(self, launch: Any) -> None:
        if launch.has_host_results:
            launch.wait()

    def announce_close(self) -> None:
        self._agreements.announce_closed()

    def announce_abort(self, reason: str, culprit: int | None) -> None:
        aborted = CommunicatorClosed(f"{self.label}: the communicator was aborted: {reason}")
        error = self._verdicts.known() or aborted
        if self._begin_to_fail(error):
            self._begin_abort(reason, culprit)

    def look_for_ended(self, missing: list[int]) -> None:
        self._raise_failure()
        self._agreements.look_for_closed_members(missing)

    def make_host_path(self) -> StorePath:
        group = self.recorder.group
        return StorePath(self.client, group, self._verdicts, self.timeout_seconds, self.agree, self._raise_end)

    def _raise_end(self) -> None:
        """Raises why a rank that waits for others on the host would wait in vain, where that is so."""
        self._raise_failure()
        self._agreements.look_for_closed_ranks()

    def release(self) -> None:
        if not self._has_failed():
            self.drain()
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
        self._handle.begin_abort(partial(tell_others, self.client, reason, culprit, self._telling))

    def drain(self) -> GradsyncError | None:
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
