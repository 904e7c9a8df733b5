"""The backend between GPUs: CuPy arrays over NCCL.

A blocking collective runs on the stream that its caller passes, or on the current stream. A gradient bucket is reduced
on the communicator's own stream. The communicator's stream first waits until the gradients are computed. Then this
stream packs, reduces and splits the bucket, and records an event. The host does not wait for these steps.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import pairwise
from types import TracebackType
from typing import Any, NoReturn

import cupy
import numpy as np

from gradsync.communicators.agreement import Agreement, LayoutsDiffer
from gradsync.communicators.backend import Backend, Bounds, Message, part_of
from gradsync.communicators.failures import FailureMonitor
from gradsync.communicators.nccl.comparison import Comparison, Question
from gradsync.communicators.nccl.device_arrays import DeviceArrays
from gradsync.communicators.nccl.kernels import FusedPacker, pack_layout
from gradsync.communicators.nccl.launch import Events, GpuLaunch, as_stream, refuse_capturing
from gradsync.communicators.nccl.library import Nccl
from gradsync.communicators.nccl.watcher import Watched, await_callbacks
from gradsync.diagnostics import trace
from gradsync.errors import CollectiveTimeout, CommunicatorClosed, GradsyncError, NcclError, PlanMismatch, describe
from gradsync.reduction import ReduceOp, dtype_name
from gradsync.rendezvous.client import RendezvousClient

_DRAIN_SECONDS = 10.0  # how long close() waits for running collectives
# For each dtype that NCCL does not have, the wider dtype in which it is reduced.
_WIDENED = {"int16": np.int32, "uint16": np.uint32}
_REPORT_SECONDS = 1.0  # how long close() waits until the server knows of a failure
_CALLBACK_SECONDS = 10.0  # how long close() waits for the done-callbacks of collectives that have ended
_LOOK_SECONDS = 0.25  # how often who waits for a message looks whether the communicator has failed

# The last launch on each device, by any communicator of this process: its end event, its stream, its thread. A
# collective occupies a part of the GPU while it waits for the other ranks. If collectives of two communicators start in
# different orders on two ranks, each collective may prevent the other from starting, and both hang. So collectives run
# one after another, in the order in which the host launches them. Source: NCCL's documentation, "Using multiple NCCL
# communicators concurrently".
_last_on_device: dict[int, tuple[Any, Any, int]] = {}


class NcclBackend(Backend):
    """The backend for ranks with GPUs.

    The backend uses contiguous CuPy arrays without a copy, and also other contiguous arrays on the device, by DLPack or
    `__cuda_array_interface__`. The backend copies host arrays to the device and back. For NaN, min and max give the
    same result as NCCL.

    Args:
        client: this rank's connection to the rendezvous server.
        device_id: the CUDA number of this rank's device.
        group: the communicator's name; no group since the last start of the ranks has had this name.
        timeout_seconds: how long a collective may wait for a rank.
        deadline: the deadline for connecting the ranks, in time.monotonic() seconds.

    Attributes:
        force_packing: whether a world of one rank copies a list of arrays to a flat buffer and back, as in a larger
            world. Benchmarks set it to measure the time of these copies.
    """

    name = "nccl"
    on_gpu = True
    force_packing = False
    arrays: DeviceArrays
    client: RendezvousClient

    def __init__(
        self,
        client: RendezvousClient,
        device_id: int,
        group: str,
        timeout_seconds: float,
        deadline: float,
    ) -> None:
        super().__init__(client, group, timeout_seconds)
        self.device = f"cuda:{device_id}"
        self.arrays = DeviceArrays(device_id)
        self._device = cupy.cuda.Device(device_id)
        with self._device:  # before the ranks connect, because making these objects may fail
            self._packer = FusedPacker()
            self._stream = cupy.cuda.Stream(non_blocking=True)  # for gradient buckets
        self._failures = FailureMonitor(client, self.recorder)
        self._plain: dict[tuple[Any, ReduceOp], bool] = {}  # by dtype and operator: a few tens of entries
        self._events = Events()
        self._flat: Any = None  # buffer for packed arrays; launches run one after the other, so one buffer is enough
        self._launch: GpuLaunch | None = None  # the launch that is being made, if any
        self._last: GpuLaunch | None = None
        self._nccl = nccl = Nccl(client, device_id, group, deadline)
        try:
            self._comparison = Comparison(client, group, self.label, timeout_seconds, self._failures)
            self._watched = Watched(self, nccl, self._failures)
        except BaseException:
            nccl.abort()  # the caller reports the error to the other ranks
            raise
        # The finalizer does not run at interpreter exit: there the process group closes its communicators, and other
        # communicators cannot hang (see library.py).
        rest = partial(_end_rest, self._watched, self._comparison, client)
        weakref.finalize(self, nccl.leave, rest).atexit = False

    # -- Reductions ----------------------------------------------------------------------------------------------

    def all_reduce(
        self,
        sources: Sequence[Any],
        targets: Sequence[Any],
        op: ReduceOp,
        agreement: Agreement,
        factor: float = 1.0,
    ) -> None:
        end_phase = trace.phases_of(self.recorder)
        launch = self._agree(agreement)
        end_phase("waiting")
        launch.keep(*sources, *targets)
        if len(sources) == 1:
            self._multiply_in_place(sources, factor)
            self._reduce_for_all(sources[0], targets[0], op)
            end_phase("launching")
        elif self.world_size == 1 and not self.force_packing:
            for source, target in zip(sources, targets, strict=True):
                if target is not source:
                    target[...] = source
            self._multiply_in_place(targets, factor)
        else:
            flat = self._packed(sources)
            if flat.size:
                packed = flat.view(sources[0].dtype)
                self._multiply_in_place([packed], factor)
                end_phase("packing")
                self._reduce_for_all(packed, packed, op)
                end_phase("launching")
                self._packer.split(flat, targets)
                end_phase("splitting")

    def _multiply_in_place(self, flats: Sequence[Any], factor: float) -> None:
        if factor != 1.0:
            self.arrays.multiply_in_place(flats, factor)

    def reduce(self, source: Any, target: Any | None, op: ReduceOp, root: int, agreement: Agreement) -> None:
        if not self._is_plain(source.dtype, op):
            super().reduce(source, target, op, root, agreement)
            return
        self._agree(agreement)
        if source.size:
            self._nccl.reduce(source, target, op, root)

    def reduce_scatter(self, source: Any, target: Any, bounds: Bounds, op: ReduceOp, agreement: Agreement) -> None:
        self._agree(agreement)
        if _is_complex_product(source.dtype, op):
            product = cupy.empty_like(source)
            self._multiply(source, product)
            target[...] = product[part_of(bounds, self.rank)]
        elif source.size:
            self._reduce(partial(self._reduce_parts, bounds), source, target, op)

    def _reduce_for_all(self, source: Any, target: Any, op: ReduceOp) -> None:
        if _is_complex_product(source.dtype, op):
            self._multiply(source, target)
        elif source.size:
            self._reduce(self._nccl.all_reduce, source, target, op)

    def _reduce_parts(self, bounds: Bounds, source: Any, target: Any, op: ReduceOp) -> None:
        if _is_even(bounds):
            self._nccl.reduce_scatter(source, target, op)
            return
        with self._nccl.group():
            for root in range(self.world_size):
                part = source[part_of(bounds, root)]
                if part.size:
                    self._nccl.reduce(part, target if root == self.rank else None, op, root)

    def _is_plain(self, dtype: Any, op: ReduceOp) -> bool:
        """Whether NCCL itself correctly reduces arrays of this dtype with this operator."""
        plain = self._plain.get((dtype, op))
        if plain is None:
            indirect = self._must_divide(dtype, op) or _is_complex_product(dtype, op) or dtype_name(dtype) in _WIDENED
            plain = self._plain[dtype, op] = not indirect
        return plain

    def _must_divide(self, dtype: Any, op: ReduceOp) -> bool:
        is_power_of_two = self.world_size & (self.world_size - 1) == 0
        return op is ReduceOp.MEAN and not is_power_of_two and dtype_name(dtype) in ("bfloat16", "float16")

    def _reduce(self, reduce: Callable[[Any, Any, ReduceOp], None], source: Any, target: Any, op: ReduceOp) -> None:
        """Calls reduce(source, target, op); converts the values before and after if NCCL cannot reduce them as given.

        The target has the size of the source, or of a part of it.
        """
        has_room = target.size == source.size  # for the converted source
        if self._is_plain(source.dtype, op):
            reduce(source, target, op)
        elif self._must_divide(source.dtype, op):
            shift = 0 if dtype_name(source.dtype) == "bfloat16" else (self.world_size - 1).bit_length()
            if shift:
                scaled = target if has_room else cupy.empty_like(source)
                cupy.multiply(source, source.dtype.type(2.0**-shift), scaled)
                source = scaled
            reduce(source, target, ReduceOp.SUM)
            self.arrays.divide(target, self.world_size / 2.0**shift)
        else:
            wide = source.astype(_WIDENED[dtype_name(source.dtype)])
            wide_target = wide if has_room else cupy.empty(target.size, wide.dtype)
            reduce(wide, wide_target, op)
            target[...] = wide_target.astype(target.dtype)

    def _multiply(self, source: Any, target: Any) -> None:
        """Multiplies the ranks' sources in rank order, and writes the product to `target`."""
        if not source.size:
            return
        factors = cupy.empty((self.world_size, source.size), source.dtype)
        self._nccl.all_gather(source, factors)
        product = factors[0]
        for factor in factors[1:]:
            product = product * factor
        target[...] = product

    # -- Movements -----------------------------------------------------------------------------------------------

    def broadcast(self, flats: Sequence[Any], root: int, agreement: Agreement) -> None:
        self._agree(agreement)
        if len(flats) == 1:
            self._nccl.broadcast(flats[0], root)
        elif self.world_size > 1:
            flat = self._packed(flats)
            self._nccl.broadcast(flat, root)
            if self.rank != root:
                self._packer.split(flat, flats)

    def all_gather(self, source: Any, target: Any, bounds: Bounds, agreement: Agreement) -> None:
        self._agree(agreement)
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
        self._agree(agreement)
        self._move(_parts(source, send_bounds), _parts(target, receive_bounds))

    def _move(self, outgoing: dict[int, Any], incoming: dict[int, Any]) -> None:
        """Sends parts to other ranks and receives parts from other ranks, all at once; copies this rank's own part."""
        own, room = outgoing.pop(self.rank, None), incoming.pop(self.rank, None)
        if room is not None:
            _copy_bytes(own, room)
        with self._nccl.group():
            for peer, part in outgoing.items():
                self._nccl.send(part, peer)
            for peer, part in incoming.items():
                self._nccl.receive(part, peer)

    def barrier(self, agreement: Agreement) -> None:
        if self._launch is None:  # the ranks only compare
            self._compare(agreement)
            return
        token = cupy.zeros(1, np.int32)
        launch = self._agree(agreement)
        self._nccl.all_reduce(token, token, ReduceOp.SUM)
        launch.write_back(token, np.zeros(1, np.int32))  # makes the host wait

    def share_numbers(self, numbers: Sequence[int], agreement: Agreement) -> list[list[int]]:
        mine = np.array(numbers, np.int64)
        shared = np.empty((self.world_size, mine.size), np.int64)
        # Runs on the communicator's own stream, so that the host need not wait for the work on the caller's stream.
        with self.launching(None, []) as launch:
            self._agree(agreement)
            source, target = cupy.empty(mine.nbytes, np.uint8), cupy.empty(shared.nbytes, np.uint8)
            source.set(mine.view(np.uint8))
            self._nccl.all_gather(source, target)
            launch.write_back(target, shared)
        launch.wait()
        numbers_by_rank: list[list[int]] = shared.tolist()
        return numbers_by_rank

    # -- Messages ------------------------------------------------------------------------------------------------

    def exchange(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        awaited: Collection[Message] = (),
        seconds: float | None = None,
    ) -> None:
        self._watched.raise_failure()
        to_self = [message for message in sends if message.peer == self.rank]
        from_self = [message for message in receives if message.peer == self.rank]
        for send, receive in zip(to_self, from_self, strict=True):
            self._copy_message(send, receive)
        for messages, is_sent in ((sends, True), (receives, False)):
            for message in messages:
                if message.peer != self.rank:
                    self._comparison.begin_message(message, self._settle, is_sent=is_sent)
        try:
            self._move_on(0.0)
            self._await_messages(awaited, seconds)
        except GradsyncError as error:
            self._raise_after(error)

    def _await_messages(self, awaited: Collection[Message], seconds: float | None) -> None:
        """Moves messages on until the awaited ones are over, or for `seconds`."""
        began = time.monotonic()
        while missing := [self.ranks[message.peer] for message in awaited if not message.is_over]:
            waited_seconds = time.monotonic() - began
            left_seconds = (self.timeout_seconds if seconds is None else seconds) - waited_seconds
            if left_seconds <= 0.0:
                if seconds is None:
                    self._failures.time_out(waited_seconds, missing)
                return
            self._failures.warn(waited_seconds, missing)
            self._move_on(min(left_seconds, _LOOK_SECONDS))
            self._watched.raise_failure()

    def _move_on(self, seconds: float) -> None:
        """Launches the messages whose ranks have agreed; waits for the first of them at most `seconds`."""
        question = self._comparison.take(seconds)
        while question is not None:
            question.settle()
            question = self._comparison.take(0.0)

    def _settle(self, question: Question) -> None:
        """Launches a message, or ends it if its two ranks disagree."""
        message = question.message
        assert message is not None  # collectives are taken by _compare
        if message.is_over or self._watched.failure is not None:
            return
        if question.error is not None:
            message.end(question.error)
            return
        with _Launching(self, None, [message.mark], message) as launch:
            launch.keep(message.flat)
            self._begin(launch)
            move = self._nccl.send if question.is_sent else self._nccl.receive
            move(message.flat, message.peer)
            message.end(work=launch)

    def _copy_message(self, send: Message, receive: Message) -> None:
        """Moves a message from this rank to itself."""
        with _Launching(self, None, [send.mark, receive.mark], receive) as launch:
            launch.keep(send.flat, receive.flat)
            _copy_bytes(send.flat, receive.flat)
            for message in (send, receive):
                message.end(work=launch)

    # -- Agreement -----------------------------------------------------------------------------------------------

    def _agree(self, agreement: Agreement) -> GpuLaunch:
        """Compares the collective that is being launched."""
        launch = self._launch
        assert launch is not None
        self._compare(agreement)
        self._begin(launch)
        return launch

    def _compare(self, agreement: Agreement) -> None:
        """Compares a collective. Messages on which the ranks have agreed before are launched before it."""
        self._watched.raise_failure()
        if self.world_size == 1:
            return
        self._watched.call = None  # the comparison has a deadline of its own
        try:
            own = self._comparison.begin(agreement)
            while (question := self._comparison.take(None)) is not own:
                assert question is not None
                question.settle()
            if own.error is not None:
                raise own.error
        except GradsyncError as error:
            self._raise_after(error)

    def _begin(self, launch: GpuLaunch) -> None:
        """Is called before any call of NCCL, because the call may block."""
        self._follow_last(launch)  # a message that was launched since the launch was made
        launch.has_begun = True
        self._watched.call = launch

    def _follow_last(self, launch: GpuLaunch) -> None:
        """Makes a launch wait for the last one on the device; see _last_on_device."""
        last = _last_on_device.get(self._nccl.device_id)
        # The threads are compared too: Stream.ptds is one object, but a different stream in each thread.
        if last is not None and (last[1] is not launch.stream or last[2] != launch.thread):
            launch.stream.wait_event(last[0])

    def _raise_after(self, error: GradsyncError) -> NoReturn:
        """Raises an error, or the failure that ended the communicator and so caused the error."""
        if not isinstance(error, PlanMismatch):
            try:
                self._watched.raise_failure()
            except GradsyncError as cause:
                raise cause from error
        raise error

    def _end_because(self, error: BaseException) -> None:
        """Ends the communicator because of a failed launch, whose error the program is about to get."""
        self._watched.fail(error)
        self.fail(error, is_known=True)

    # -- Memory --------------------------------------------------------------------------------------------------

    def _packed(self, arrays: Sequence[Any]) -> Any:
        """Packs arrays into the flat buffer, and returns the used part of the buffer. Enlarges the buffer if needed."""
        size_bytes = pack_layout(tuple([array.nbytes for array in arrays])).total_bytes
        if self._flat is None or self._flat.size < size_bytes:
            # Zeros, so that NCCL reads only initialized memory: NCCL reduces the gaps between the arrays too. No code
            # uses the values in the gaps.
            self._flat = cupy.zeros(size_bytes, np.uint8)
        flat = self._flat[:size_bytes]
        if size_bytes:
            assert self._launch is not None
            self._launch.keep(flat)
            self._packer.pack(arrays, flat)
        return flat

    # -- Launching, groups and the end ---------------------------------------------------------------------------

    def mark_work(self, stream: Any = None) -> Any:
        with self._device:
            current = cupy.cuda.get_current_stream()
            mark = self._events.mark(current)
            if stream is None or stream is current:
                return mark
            stream.wait_event(mark)
            return self._events.mark(stream)

    def follow_work(self, marks: Collection[Any]) -> None:
        with self._device:
            _follow(cupy.cuda.get_current_stream(), marks)

    def connect_group(self, members: tuple[int, ...], name: str) -> NcclBackend:
        client, seconds = self.client.group(members, name), self.timeout_seconds
        try:
            return NcclBackend(client, self._nccl.device_id, name, seconds, time.monotonic() + seconds)
        except BaseException:
            client.close()
            raise

    def checked_stream(self, stream: Any, what: str) -> Any:
        device_id = self._nccl.device_id
        checked = None if stream is None else as_stream(stream, device_id, f"{self.label}: {what}")
        # The current stream must not capture either: gradsync allocates new arrays on the current stream, and makes a
        # given stream wait for the current stream.
        current = cupy.cuda.get_current_stream(device_id)
        refuse_capturing(current, self.label, what)
        if checked is not None and checked is not current:
            refuse_capturing(checked, self.label, what)
        return checked

    def launching(self, stream: Any, after: Collection[Any] | None = None) -> _Launching:
        self._watched.raise_failure()
        return _Launching(self, stream, after)

    def announce(self, aborted_because: str | None = None, culprit: int | None = None) -> None:
        if aborted_because is None:
            self._comparison.announce_closed()
            return
        aborted = CommunicatorClosed(f"{self.label}: the communicator was aborted: {aborted_because}")
        self._watched.abort(self._failures.failure() or aborted, aborted_because, culprit)

    def raise_if_ended(self, missing: list[int]) -> None:
        self._watched.raise_failure()
        self._comparison.raise_if_closed(missing)

    def release(self) -> None:
        if not self._watched.has_failed():
            self._await_last()
            self._watched.reap()  # so that the recorder has the end of every launch
        self._watched.stop()
        self._comparison.close()
        if not self._watched.has_failed():
            self._nccl.destroy()

    def drain(self) -> None:
        self._await_last()
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


class _Launching:
    """A context manager for one launch: orders the launch after other work, records its end, and raises failures.

    Args:
        backend: the communicator's backend.
        stream, after: see Backend.launching.
        message: the message that is launched; None for a collective. It may be launched within the context of a
            collective, which then comes after it.
    """

    def __init__(
        self, backend: NcclBackend, stream: Any, after: Collection[Any] | None, message: Message | None = None
    ) -> None:
        self._backend = backend
        self._stream = stream
        self._after = after
        self._message = message
        self._entered: list[Any] = []  # CuPy's device and stream contexts, which _leave exits

    def __enter__(self) -> GpuLaunch:
        backend = self._backend
        try:
            if cupy.cuda.runtime.getDevice() != backend._nccl.device_id:
                self._enter(backend._device)
            current = where = cupy.cuda.get_current_stream()
            if self._after is not None:
                where = backend._stream
                _follow(where, self._after)
            elif self._stream is not None:
                where = self._stream
                # When gradsync converts an array of another library, only the current stream waits for the work that
                # computes the array. So this launch's stream must wait for the current stream.
                where.wait_event(backend._events.mark(current))
            self.launch = launch = GpuLaunch(backend, backend._nccl, backend._events, where, backend._end_because)
            backend._follow_last(launch)
            if where is not current:
                self._enter(where)
            launch.started.record(where)
        except BaseException as error:
            self._leave(error)
            raise
        if self._message is not None:
            launch.peers = [backend.ranks[self._message.peer]]
            launch.recorded = [backend.recorder.begun, self._message.agreement, time.monotonic(), None, False]
        self._results_on = backend.arrays.results_on
        backend.arrays.results_on = None if self._after is None else current
        self._outer, backend._launch = backend._launch, launch
        return launch

    def _enter(self, context: Any) -> None:
        context.__enter__()
        self._entered.append(context)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        backend, launch = self._backend, self.launch
        try:
            if launch.has_begun or not isinstance(error, (PlanMismatch, LayoutsDiffer)):
                launch.record_end()
                if self._outer is None and self._message is None:
                    launch.recorded = backend.recorder.hand_over()
                backend._last = launch
                _last_on_device[backend._nccl.device_id] = launch.ended, launch.stream, launch.thread
                backend._watched.add(launch)
            watched = backend._watched
            if watched.failure is not None and (error is None or isinstance(error, (NcclError, CommunicatorClosed))):
                watched.raise_failure()  # the cause of `error`: another thread has ended the communicator
            if isinstance(error, NcclError):
                watched.raise_cause(error)
        finally:
            backend._watched.call = None
            backend._launch = self._outer
            backend.arrays.results_on = self._results_on
            if self._entered:
                self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        while self._entered:
            self._entered.pop().__exit__(type(error), error, None)


def _is_complex_product(dtype: Any, op: ReduceOp) -> bool:
    return op is ReduceOp.PROD and dtype.kind == "c"


def _is_even(bounds: Bounds) -> bool:
    """Whether all parts have the same size."""
    return all(end - begin == bounds[1] - bounds[0] for begin, end in pairwise(bounds))


def _parts(whole: Any, bounds: Bounds) -> dict[int, Any]:
    """Returns the part of each rank, except the empty parts."""
    return {rank: whole[begin:end] for rank, (begin, end) in enumerate(pairwise(bounds)) if begin < end}


def _copy_bytes(source: Any, target: Any) -> None:
    """Copies bytes on the device, unless source and target are the same memory."""
    if source.size and source.data.ptr != target.data.ptr:
        target.data.copy_from_device_async(source.data, source.size)


def _follow(stream: Any, marks: Collection[Any]) -> None:
    """Makes a stream wait for each of the events once, even if several gradients of a bucket have the same event."""
    for event in set(marks):
        stream.wait_event(event)


def _end_rest(watched: Watched, comparison: Comparison, client: RendezvousClient) -> None:
    """Ends the checks for failures and the comparisons, after Python has collected a communicator."""
    watched.stop()
    comparison.close()
    if client.name:  # only a group's client has a name; the world's client stays open
        client.close()
