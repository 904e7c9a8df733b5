"""The backend between GPUs: CuPy arrays over NCCL.

A blocking collective runs on the stream that its caller passes, or on the current stream; a bucket and an asynchronous
collective run on the communicator's own stream, after the work that makes their arrays. The host only launches.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import cupy
import numpy as np

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.backend import Backend, Bounds, Message, part_of
from gradsync.communicators.failures import FailureMonitor
from gradsync.communicators.nccl.arrays import DeviceArrays
from gradsync.communicators.nccl.library import Nccl
from gradsync.communicators.nccl.pack import Packer, pack_layout
from gradsync.communicators.nccl.streams import as_stream, is_per_thread, on_device, refuse_capturing
from gradsync.communicators.nccl.verify import Verification
from gradsync.communicators.nccl.work import GpuWork, Watched, await_callbacks
from gradsync.diagnostics import trace
from gradsync.environment import DEBUG
from gradsync.errors import (
    CollectiveTimeout,
    CommunicatorClosed,
    GradsyncError,
    NcclError,
    PlanMismatch,
    describe,
)
from gradsync.reduction import ReduceOp, dtype_name
from gradsync.rendezvous.client import RendezvousClient

_DRAIN_SECONDS = 10.0  # how long close() waits for running collectives
_REPORT_SECONDS = 1.0  # how long close() waits until the server knows of a failure
_CALLBACK_SECONDS = 10.0  # how long close() waits for the done-callbacks of collectives that have ended
_MAX_MARKS = 64
_FIRST_NUMBERS = 15  # that ranks exchange with a digest: with it 128 bytes
_HALF_PRECISION = ("float16", "bfloat16")


class _Device:
    """What all communicators of a process share on a GPU.

    A collective occupies a part of the GPU while it waits for the other ranks. Collectives of two communicators that
    start in different orders on two ranks may keep each other from starting, and hang. So they run one after another,
    in the order of their launches, and one thread launches at a time. Source: NCCL's documentation, "Using multiple
    NCCL communicators concurrently" and "Thread safety".

    Attributes:
        launching: held while a thread launches.
        last: what was launched last.
    """

    def __init__(self) -> None:
        self.launching = threading.RLock()  # reentrant, because a signal handler may launch, too
        self.last: GpuWork | None = None


_devices: dict[int, _Device] = {}


class NcclBackend(Backend):
    """The backend for ranks with GPUs.

    Contiguous arrays on the device are used without a copy: CuPy's, and others by DLPack or `__cuda_array_interface__`.
    Host arrays are copied to the device and back.

    Args:
        client: this rank's connection to the rendezvous server.
        device_id: the CUDA number of this rank's device.
        group: the communicator's name, which no other has had since the last start of the ranks.
        timeout_seconds: how long a collective may wait for a rank.
        deadline: for connecting the ranks, in time.monotonic() seconds.

    Attributes:
        force_packing: whether a world of one rank packs and splits lists as a larger one does, for benchmarks.
    """

    name = "nccl"
    on_gpu = True
    force_packing = False
    arrays: DeviceArrays
    client: RendezvousClient

    def __init__(
        self, client: RendezvousClient, device_id: int, group: str, timeout_seconds: float, deadline: float
    ) -> None:
        super().__init__(client, group, timeout_seconds)
        self.device = f"cuda:{device_id}"
        self._device_id = device_id
        self._shared = _devices.setdefault(device_id, _Device())
        with on_device(device_id):  # before the ranks connect, as this may fail
            self._packer = Packer()
            self._stream = cupy.cuda.Stream(non_blocking=True)  # for buckets and asynchronous collectives
        self.arrays = DeviceArrays(device_id)
        self._is_debugging = DEBUG.read()
        self._failures = FailureMonitor(client, self.recorder)
        self._marks = threading.local()  # see _mark
        self._flat: Any = None  # for packed arrays; launches run one after the other, so one will do
        self._launch: GpuWork | None = None  # what is being launched, if anything
        self._last: GpuWork | None = None
        self._met: set[int] = set()  # the ranks with which messages have been launched
        self._verifying: GpuWork | None = None  # the last comparison of what was launched
        self._nccl = nccl = Nccl(client, device_id, group, deadline)
        try:
            self._verify = Verification(client, self.recorder, self.label, timeout_seconds, self._failures)
            self._watched = Watched(self, nccl, self._failures, self._verify)
        except BaseException:
            nccl.abort()  # the caller reports the error to the other ranks
            raise
        # The finalizer does not run at interpreter exit: there the process group closes its communicators, and other
        # communicators cannot hang (see library.py).
        # It must not hold `_watched`: the traceback of its failure has frames that hold this object.
        weakref.finalize(self, nccl.leave, partial(_end_rest, weakref.ref(self._watched), client)).atexit = False
        if self._is_debugging:  # later the host would wait for ranks that compare their messages, and wait for this one
            self._meet_all()

    # -- Reductions ----------------------------------------------------------------------------------------------

    def all_reduce(
        self,
        sources: Sequence[Any],
        targets: Sequence[Any],
        op: ReduceOp,
        agreement: Agreement,
        factor: Any = 1.0,
    ) -> None:
        """See Backend. The factor may be an array on the device, see `share_weight`."""
        end_phase = trace.phases_of(self.recorder)
        self._begin(agreement, *sources, *targets)
        end_phase("waiting")
        op, factor = self._op_and_factor(op, factor, sources[0].dtype)
        if len(sources) == 1:
            source, target = sources[0], targets[0]
            if factor is not None:
                self._copy_times(source, target, factor)
                source = target
            self._nccl.all_reduce(source, target, op)
            end_phase("launching")
        elif self.world_size == 1 and not self.force_packing:
            for source, target in zip(sources, targets, strict=True):
                self._copy_times(source, target, factor)
        else:
            flat, table = self._pack(sources)
            packed = flat.view(sources[0].dtype)
            if factor is not None:
                self.arrays.multiply_in_place([packed], factor)
            end_phase("packing")
            self._nccl.all_reduce(packed, packed, op)
            end_phase("launching")
            self._packer.split(table if targets is sources else self._table(targets), flat)
            end_phase("splitting")

    def reduce(self, source: Any, target: Any | None, op: ReduceOp, root: int, agreement: Agreement) -> None:
        self._begin(agreement)
        op, source = self._op_and_source(op, source)
        self._nccl.reduce(source, target, op, root)

    def reduce_scatter(self, source: Any, target: Any, bounds: Bounds, op: ReduceOp, agreement: Agreement) -> None:
        self._begin(agreement)
        op, source = self._op_and_source(op, source)
        if _is_even(bounds):
            self._nccl.reduce_scatter(source, target, op)
            return
        with self._nccl.group():
            for root in range(self.world_size):
                part = source[part_of(bounds, root)]
                self._nccl.reduce(part, target if root == self.rank else None, op, root)

    def _op_and_factor(self, op: ReduceOp, factor: Any, dtype: np.dtype[Any]) -> tuple[ReduceOp, Any]:
        """Returns what NCCL does, and by what this rank's values are multiplied before; None: by nothing.

        The mean of half precision: NCCL would round the factor 1 / n to half precision.
        """
        if op is ReduceOp.MEAN and dtype_name(dtype) in _HALF_PRECISION and self.world_size & (self.world_size - 1):
            return ReduceOp.SUM, factor / self.world_size
        return op, None if isinstance(factor, float) and factor == 1.0 else factor

    def _op_and_source(self, op: ReduceOp, source: Any) -> tuple[ReduceOp, Any]:
        op, factor = self._op_and_factor(op, 1.0, source.dtype)
        if factor is None:
            return op, source
        scaled = cupy.empty_like(source)
        assert self._launch is not None
        self._launch.keep(scaled)
        self._copy_times(source, scaled, factor)
        return op, scaled

    def _copy_times(self, source: Any, target: Any, factor: Any) -> None:
        """Copies a flat array, which may be the target itself, times a factor; None: as it is."""
        _copy_bytes(source, target)
        if factor is not None:
            self.arrays.multiply_in_place([target], factor)

    # -- Movements -----------------------------------------------------------------------------------------------

    def broadcast(self, flats: Sequence[Any], root: int, agreement: Agreement) -> None:
        self._begin(agreement)
        if len(flats) == 1:
            self._nccl.broadcast(flats[0], root)
        elif self.world_size > 1:
            flat, table = self._pack(flats)
            self._nccl.broadcast(flat, root)
            if self.rank != root:
                self._packer.split(table, flat)

    def all_gather(self, source: Any, target: Any, bounds: Bounds, agreement: Agreement) -> None:
        self._begin(agreement)
        if _is_even(bounds):
            self._nccl.all_gather(source, target)
        else:
            self._move(dict.fromkeys(range(self.world_size), source), _parts(target, bounds))

    def all_to_all(
        self,
        source: Any,
        target: Any,
        send_bounds: Bounds,
        receive_bounds: Bounds,
        largest: int,
        agreement: Agreement,
    ) -> None:
        self._begin(agreement)
        self._move(_parts(source, send_bounds), _parts(target, receive_bounds))

    def _move(self, outgoing: dict[int, Any], incoming: dict[int, Any]) -> None:
        """Sends parts to other ranks and receives parts from other ranks, all at once; copies this rank's own part."""
        own, room = outgoing.pop(self.rank, None), incoming.pop(self.rank, None)
        if room is not None:
            _copy_bytes(own, room)
        self._nccl.exchange(outgoing.items(), incoming.items())

    def barrier(self, agreement: Agreement) -> None:
        self._gather_numbers([], agreement, [self.mark_work()])

    def share_numbers(self, numbers: Sequence[int], agreement: Agreement) -> list[list[int]]:
        # On the communicator's own stream, so that the host need not wait for the work on the caller's stream.
        return self._gather_numbers(numbers, agreement, [])

    def _gather_numbers(self, numbers: Sequence[int], agreement: Agreement, after: Collection[Any]) -> list[list[int]]:
        """Gathers numbers, and the digest with them: the host waits for them anyway, and compares.

        Ranks that differ may have different numbers of numbers, with which NCCL would hang. So the same number of them
        goes with the digest in every call, and the others follow when it is known that the ranks do the same.
        """
        first = [agreement.digest - 2**63, *numbers[:_FIRST_NUMBERS]]
        rows = self._gather_row(first + [0] * (1 + _FIRST_NUMBERS - len(first)), agreement, after)
        self._verify.raise_if_different([row[0] for row in rows], agreement, self._verify.next_number())
        if rest := numbers[_FIRST_NUMBERS:]:
            others = self._gather_row(rest, None, [])
            return [row[1:] + more for row, more in zip(rows, others, strict=True)]
        return [row[1 : 1 + len(numbers)] for row in rows]

    def _gather_row(
        self, numbers: Sequence[int], agreement: Agreement | None, after: Collection[Any]
    ) -> list[list[int]]:
        mine = np.array(numbers, np.int64)
        rows = np.empty((self.world_size, mine.size), np.int64)
        with self.launching(None, after) as launch:
            if agreement is not None and self._is_debugging:
                self.compare(agreement)
            self._begin(None)  # nothing for verify(), because it is compared here
            target = cupy.empty(rows.nbytes, np.uint8)
            self._nccl.all_gather(cupy.asarray(mine).view(np.uint8), target)
            launch.write_back(target, rows)
        launch.wait()
        gathered: list[list[int]] = rows.tolist()
        return gathered

    # -- Messages ------------------------------------------------------------------------------------------------

    def exchange(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        awaited: Collection[Message] = (),
        seconds: float | None = None,
    ) -> None:
        """See Backend. All messages of a call are launched together, and none later."""
        messages = [*sends, *receives]
        if not messages:
            return
        with self.launching(None, [each.mark for each in messages]) as launch:
            launch.peers = sorted({self.ranks[each.peer] for each in messages if each.peer != self.rank})
            launch.recorded = [self.recorder.begun, messages[0].agreement, time.monotonic(), None, False]
            launch.keep(*[each.flat for each in messages])
            sent_to, received_from = ([each for each in these if each.peer != self.rank] for these in (sends, receives))
            if self._is_debugging:
                self._verify.compare_messages(sent_to, received_from)
                sent_to, received_from = ([m for m in these if not m.is_over] for these in (sent_to, received_from))
            own = [[each.flat for each in these if each.peer == self.rank] for these in (sends, receives)]
            for source, target in zip(*own, strict=True):
                _copy_bytes(source, target)
            sent = [(each.peer, each.flat) for each in sent_to if each.flat.size]
            received = [(each.peer, each.flat) for each in received_from if each.flat.size]
            to_new, from_new = self._greetings({peer for peer, _ in [*sent, *received]})
            self._begin(None)
            self._nccl.exchange(to_new + sent, from_new + received)
            messages = [message for message in messages if not message.is_over]
            for message in messages:
                if message.target is not None:
                    launch.write_back(message.flat, message.target)
                    message.target = None
        for message in messages:  # now: another thread that sees that they are over asks for the end of the launch
            message.end(work=launch)

    def _greetings(self, peers: Collection[int]) -> tuple[list[tuple[int, Any]], list[tuple[int, Any]]]:
        """Returns a byte to send to, and to receive from, each of these ranks with which there was no message yet.

        Two ranks connect when they first meet, and NCCL fails if their groups then have other ways between them: a send
        on one rank, and a receive and a send on the other. With the bytes both groups have both ways.
        """
        new = set(peers) - self._met
        if not new:
            return [], []
        self._met |= new
        both = cupy.empty(2, np.uint8)
        assert self._launch is not None
        self._launch.keep(both)
        return [(peer, both[:1]) for peer in new], [(peer, both[1:]) for peer in new]

    def _meet_all(self) -> None:
        with self.launching(None, []):
            greetings = self._greetings(set(range(self.world_size)) - {self.rank})
            self._begin(None)
            self._nccl.exchange(*greetings)

    # -- Agreement -----------------------------------------------------------------------------------------------

    def compare(self, agreement: Agreement) -> None:
        self._watched.raise_failure()
        if self.world_size > 1:
            try:
                self._verify.compare(agreement)
            except GradsyncError as error:
                self._watched.raise_failure()  # the failure that ended the communicator, and so caused the error
                raise self._verify.explain(error) from None

    def verify(self) -> GpuWork:
        with self.launching(None, [self.mark_work()]) as launch:
            self._begin(None)
            verification = self._verify
            result = np.empty(2, np.int64)
            launched, count, history = verification.take_launched()
            numbers = cupy.asarray(np.array([launched, -launched]))
            self._nccl.all_reduce(numbers, numbers, ReduceOp.MAX)
            launch.write_back(numbers, result)
            launch.has_host_results = False  # who waits for the step's gradients need not wait for these
            number = verification.next_number()
            earlier, self._verifying = self._verifying, launch

            def outcome() -> BaseException | None:
                if earlier is not None and earlier.done() and earlier.error is not None:
                    return earlier.error  # also where a thread looks at this one first: all ranks exchange the same
                return verification.verdict(int(result[0]), -int(result[1]), number, count, history)

            launch.outcome = outcome
        return launch

    def stray(self, agreement: Agreement) -> PlanMismatch:
        error = self._verify.strayed(agreement)
        if self._watched.abort(error, self._verify.reason(agreement)):
            self.fail(error, is_known=True)
        return error

    def share_weight(self, weight: float, agreement: Agreement) -> tuple[Any, GpuWork, Any]:
        # A part of each weight is added up, too: of all weights together there may be no float64.
        total = np.empty(2)
        # After the current stream, which may still read the last factor, in the memory of the new one.
        with self.launching(None, [self.mark_work()]) as launch:
            mine = cupy.array([weight, weight / self.world_size])
            self._begin(agreement, mine)
            sums = cupy.empty_like(mine)
            self._nccl.all_reduce(mine, sums, ReduceOp.SUM)
            factor = mine[1:] / cupy.maximum(sums[1:], np.finfo(np.float64).smallest_subnormal)
            launch.write_back(sums, total)
        launch.has_host_results = False
        return factor, launch, total

    def _begin(self, agreement: Agreement | None, *arrays: Any) -> None:
        """Is called before any call of NCCL in a launch, because the call may block."""
        launch = self._launch
        assert launch is not None
        launch.keep(*arrays)
        if agreement is not None:
            if self._is_debugging:
                self.compare(agreement)
            self._verify.add(agreement)
        launch.has_begun = True
        self._watched.call = launch

    # -- Memory --------------------------------------------------------------------------------------------------

    def _pack(self, arrays: Sequence[Any]) -> tuple[Any, Any]:
        """Packs arrays into the flat buffer; returns the part of the buffer in use, and the table."""
        size_bytes = pack_layout(tuple([array.nbytes for array in arrays])).total_bytes
        if self._flat is None or self._flat.size < size_bytes:
            # Zeros, so that NCCL reads initialised memory only: it reduces the gaps between the arrays too.
            self._flat = cupy.zeros(size_bytes, np.uint8)
        flat, table = self._flat[:size_bytes], self._table(arrays)
        self._packer.pack(table, flat)
        return flat, table

    def _table(self, arrays: Sequence[Any]) -> Any:
        """Returns the table of arrays for the packer. The launch keeps it, and the flat buffer."""
        assert self._launch is not None
        table = self._packer.table(arrays)
        self._launch.keep(self._flat, table)
        return table

    # -- Launching -----------------------------------------------------------------------------------------------

    def mark_work(self, stream: Any = None) -> Any:
        with on_device(self._device_id):
            current = cupy.cuda.get_current_stream()
            mark = self._mark(current)
            if stream is None or stream is current:
                return mark
            stream.wait_event(mark)
            return self._mark(stream)

    def _mark(self, stream: Any) -> Any:
        """Records an event on a stream: for each thread and stream the same, which is fast enough for every gradient.

        It is safe to record an event again. A stream that waits for it already goes on waiting for the work before the
        previous record only; one that begins to wait now waits for all.
        """
        # By thread, because the default streams of all threads have the same handle, and a thread may get the number of
        # one that has ended. The stream is kept, so that no other one gets its handle.
        marks: dict[Any, Any] = vars(self._marks)
        if stream.ptr not in marks:
            if len(marks) >= _MAX_MARKS:
                marks.clear()
            marks[stream.ptr] = stream, cupy.cuda.Event(disable_timing=True)
        mark = marks[stream.ptr][1]
        mark.record(stream)
        return mark

    def follow_work(self, marks: Collection[Any]) -> None:
        with on_device(self._device_id):
            _follow(cupy.cuda.get_current_stream(), marks)

    def checked_stream(self, stream: Any, what: str) -> Any:
        with on_device(self._device_id):
            who = f"{self.label}: {what}"
            checked = None if stream is None else as_stream(stream, self._device_id, who)
            # The current stream must not capture either: gradsync allocates new arrays on the current stream, and makes
            # a given stream wait for the current stream.
            current = cupy.cuda.get_current_stream()
            refuse_capturing(current, who)
            if checked is not None and checked is not current:
                refuse_capturing(checked, who)
            return checked

    @contextlib.contextmanager
    def launching(self, stream: Any, after: Collection[Any] | None = None) -> Iterator[GpuWork]:
        self._watched.raise_failure()
        with on_device(self._device_id):
            if not self._shared.launching.acquire(timeout=self.timeout_seconds):
                raise CollectiveTimeout(
                    f"{self.label}: another thread has been launching a collective of another communicator for "
                    f"{self.timeout_seconds:g} s: launch all from one thread, or in the same order on all ranks"
                )
            outer, results_on = self._launch, self.arrays.launching.results_on
            try:
                current = where = cupy.cuda.get_current_stream()
                if after is not None:
                    where = self._stream
                    _follow(where, after)
                elif stream is not None:
                    where = stream
                    # When gradsync converts an array of another library, only the current stream waits for the work
                    # that computes the array. So this launch's stream must wait for the current stream.
                    where.wait_event(self._mark(current))
                self._launch = launch = GpuWork(self._watched, where)
                last = self._shared.last
                if last is not None and (last.stream is not where or is_per_thread(where)):
                    where.wait_event(last.ended)
                self.arrays.launching.results_on = None if after is None else current
                with where:
                    launch.started.record(where)
                    try:
                        yield launch
                    except BaseException as error:
                        self._end_launch(launch, outer, error)
                        if isinstance(error, (NcclError, CommunicatorClosed)):
                            self._watched.raise_failure()  # the cause: another thread has ended the communicator
                        if isinstance(error, NcclError):
                            self._watched.raise_cause(error)
                        raise
                    self._end_launch(launch, outer, None)
                self._watched.raise_failure()
            finally:
                self._watched.call = None
                self._launch = outer
                self.arrays.launching.results_on = results_on
                self._shared.launching.release()

    def _end_launch(self, launch: GpuWork, outer: GpuWork | None, error: BaseException | None) -> None:
        """Records the end of a launch, and hands it over to the watcher."""
        if not launch.has_begun and isinstance(error, PlanMismatch):
            return
        launch.record_end()
        if outer is None and launch.recorded is None:
            launch.recorded = self.recorder.hand_over()
        self._last = self._shared.last = launch
        self._watched.add(launch)

    # -- Groups and the end --------------------------------------------------------------------------------------

    def connect_group(self, members: tuple[int, ...], name: str) -> NcclBackend:
        client, seconds = self.client.group(members, name), self.timeout_seconds
        try:
            return NcclBackend(client, self._device_id, name, seconds, time.monotonic() + seconds)
        except BaseException:
            client.close()
            raise

    def announce(self, aborted_because: str | None = None, culprit: int | None = None) -> None:
        if aborted_because is None:
            self._verify.announce_closed()
            return
        failure = self._failures.failure()
        aborted = CommunicatorClosed(f"{self.label}: the communicator was aborted: {aborted_because}")
        self._watched.abort(aborted if failure is None else self._verify.explain(failure), aborted_because, culprit)

    def raise_if_ended(self, missing: list[int]) -> None:
        self._watched.raise_failure()
        self._verify.raise_if_left([self.ranks[rank] for rank in missing])

    def release(self) -> None:
        if not self._watched.has_failed():
            self._await_last()
            self._watched.reap()  # so that the recorder has the end of every launch
        self._watched.stop()
        if not self._watched.has_failed():
            self._nccl.destroy()

    def drain(self) -> None:
        self._await_last()
        self._watched.fail_if_found()
        self._watched.await_reported(_REPORT_SECONDS)
        await_callbacks(_CALLBACK_SECONDS)

    def _await_last(self) -> None:
        """Waits a limited time for launched work; ends the communicator if that does not end."""
        try:
            if self._last is not None:
                self._last.await_end(_DRAIN_SECONDS)
        except CollectiveTimeout as error:
            if self._watched.abort(error, describe(error)):
                self.fail(error)


def _is_even(bounds: Bounds) -> bool:
    """Whether all parts have the same size."""
    return all(end - begin == bounds[1] - bounds[0] for begin, end in pairwise(bounds))


def _parts(whole: Any, bounds: Bounds) -> dict[int, Any]:
    """Returns the part of each rank, except the empty parts."""
    return {rank: whole[begin:end] for rank, (begin, end) in enumerate(pairwise(bounds)) if begin < end}


def _copy_bytes(source: Any, target: Any) -> None:
    """Copies a flat array's bytes on the device, unless source and target are the same memory."""
    if source.size and source.data.ptr != target.data.ptr:
        target.data.copy_from_device_async(source.data, source.nbytes)


def _follow(stream: Any, marks: Collection[Any]) -> None:
    """Makes a stream wait for each of the events once, even if several gradients of a bucket have the same event."""
    for event in set(marks):
        stream.wait_event(event)


def _end_rest(reference: weakref.ref[Watched], client: RendezvousClient) -> None:
    """Ends the looks for failures, after Python has collected a communicator."""
    watched = reference()
    if watched is not None:
        watched.stop()
    if client.name:  # only a group's client has a name; the world's client stays open
        client.close()
