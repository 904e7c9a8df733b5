"""The communicator between processes of one host without a GPU: NumPy over a shared memfd.

Small messages take one barrier: every rank publishes its values and reduces all of them in rank order. Large ones
stream through in chunks: a rank publishes the slices that others own, reduces its own slice and writes the result
back into the others' memory, from where they fetch it. So every value is computed once, by one rank, in rank order:
all ranks get the same bits, and the same inputs give the same bits from run to run, whatever the path.
"""

from __future__ import annotations

import contextlib
import platform
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.base import Communicator
from gradsync.communicators.shared_barrier import SharedBarrier, header_bytes
from gradsync.communicators.shared_segment import SegmentOffer, create_segment, map_segment, take_segment
from gradsync.communicators.stream_plan import Chunk, Region, plan_stream
from gradsync.errors import BackendUnavailable
from gradsync.reduction import Array, ReduceOp, accumulation_dtype, reduce_into
from gradsync.rendezvous.client import RendezvousClient

# A chunk's slices of all ranks stay in a core's second-level cache (1 MB on the machine where this was measured).
CHUNK_BYTES = 256 * 1024
# Up to here one barrier and n reads of everything beat two barriers and a share of the work.
SMALL_BYTES = 64 * 1024


class SharedMemoryCommunicator(Communicator):
    """Ranks on one Linux x86-64 host that share memory.

    Args:
        descriptor: of a segment of segment_bytes(world_size); taken over and closed.
        rank: this rank.
        world_size: number of ranks.
        timeout_seconds: how long a collective waits for a rank.
        check_for_failure: raises when a rank is known to have died.
    """

    backend = "shm"

    def __init__(
        self,
        descriptor: int,
        rank: int,
        world_size: int,
        *,
        timeout_seconds: float = 300.0,
        check_for_failure: Callable[[], None],
    ) -> None:
        super().__init__(rank, world_size)
        self._mapping = map_segment(descriptor)
        self._memory = memoryview(self._mapping)
        header = header_bytes(world_size)
        self._barrier = SharedBarrier(self._memory[:header], rank, world_size, timeout_seconds, check_for_failure)
        self._exchange = _Slots(self._memory[header:], world_size, CHUNK_BYTES)
        self._stream = _Slots(self._memory[header + self._exchange.bytes :], world_size, CHUNK_BYTES)
        self._scratch = _Scratch(CHUNK_BYTES)

    def _all_reduce_list(
        self, sources: Sequence[Array], targets: Sequence[Array], op: ReduceOp, agreement: Agreement
    ) -> None:
        sizes = tuple([source.size for source in sources])
        dtype = sources[0].dtype
        if sum(sizes) * dtype.itemsize <= SMALL_BYTES:
            self._reduce_small(sources, targets, op, agreement)
            return
        chunk_elements = CHUNK_BYTES // dtype.itemsize
        chunks = plan_stream(sizes, chunk_elements, dtype.itemsize, self.rank, self.world_size)
        self._reduce_stream(chunks, sources, targets, op, agreement)

    def _reduce_small(
        self, sources: Sequence[Array], targets: Sequence[Array], op: ReduceOp, agreement: Agreement
    ) -> None:
        dtype = sources[0].dtype
        total = sum([source.size for source in sources])
        slots = self._exchange.of(dtype)[(self._barrier.round + 1) & 1]
        np.concatenate(sources, out=slots[self.rank][:total])
        self._barrier.meet(agreement)
        contributions = [slot[:total] for slot in slots]
        accumulator = self._scratch.accumulator(dtype, total)
        if len(targets) == 1:
            reduce_into(op, contributions, targets[0], accumulator)
            return
        result = self._scratch.result(dtype, total)
        reduce_into(op, contributions, result, accumulator)
        begin = 0
        for target in targets:
            end = begin + target.size
            target[...] = result[begin:end]
            begin = end

    def _reduce_stream(
        self,
        chunks: Sequence[Chunk],
        sources: Sequence[Array],
        targets: Sequence[Array],
        op: ReduceOp,
        agreement: Agreement,
    ) -> None:
        """Keeps three chunks in flight: one published, one reduced, one fetched between two barriers.

        A rank publishes into its own slot only after fetching the chunk that was there two steps before, and others
        touch that slot only between the barriers after its publication and after their reduction.
        """
        slots = self._stream.of(sources[0].dtype)
        own_slots = [slots[parity][self.rank] for parity in (0, 1)]
        count = len(chunks)
        for step in range(count + 2):
            if step >= 2:
                for region in chunks[step - 2].others:
                    _split(own_slots[step & 1], region, targets)
            if step < count:
                for region in chunks[step].others:
                    _pack(sources, region, own_slots[step & 1][region.begin : region.end])
            if 1 <= step <= count:
                self._reduce_own(chunks[step - 1].own, slots[(step - 1) & 1], sources, targets, op)
            if step <= count:
                self._barrier.meet(agreement)

    def _reduce_own(
        self,
        region: Region,
        slots: Sequence[Array],
        sources: Sequence[Array],
        targets: Sequence[Array],
        op: ReduceOp,
    ) -> None:
        """Reduces this rank's slice of a chunk, and writes the result back to where each peer fetches it."""
        begin, end, pieces = region
        length = end - begin
        if not length:
            return
        dtype = slots[0].dtype
        if len(pieces) == 1:
            array, low, high = pieces[0]
            own, target = sources[array][low:high], targets[array][low:high]
        else:
            own = self._scratch.own(dtype, length)
            _pack(sources, region, own)
            target = own
        # Reducing in rank order would overwrite an operand not yet read where this rank is third or later.
        result = target if self.rank <= 1 else self._scratch.result(dtype, length)
        contributions = [own if rank == self.rank else slots[rank][begin:end] for rank in range(self.world_size)]
        reduce_into(op, contributions, result, self._scratch.accumulator(dtype, length))
        for rank in range(self.world_size):
            if rank != self.rank:
                slots[rank][begin:end] = result
        if len(pieces) > 1:
            _split(result, Region(0, length, pieces), targets)
        elif result is not target:
            target[...] = result

    def _broadcast(self, flat: Array, root: int, agreement: Agreement) -> None:
        if not flat.size:
            self._barrier.meet(agreement)
            return
        data = flat.view(np.uint8)
        for begin in range(0, data.size, CHUNK_BYTES):
            part = data[begin : begin + CHUNK_BYTES]
            slot = self._exchange.of(data.dtype)[(self._barrier.round + 1) & 1][root][: part.size]
            if self.rank == root:
                slot[...] = part
            self._barrier.meet(agreement)
            if self.rank != root:
                part[...] = slot

    def _agree(self, agreement: Agreement) -> None:
        self._barrier.meet(agreement)

    def _announce_close(self) -> None:
        self._barrier.announce_closed()

    def _announce_abort(self, reason: str, culprit: int | None) -> None:
        self._barrier.announce_abort(reason, culprit)

    def _release(self) -> None:
        self._exchange.release()
        self._stream.release()
        self._barrier.release()
        # Where a traceback still holds a view, the mapping goes with the last one.
        with contextlib.suppress(BufferError):
            self._memory.release()
            self._mapping.close()

    def _forget_after_fork(self) -> None:
        self._released = True  # the mapping is shared with the parent: nothing may be written into it


def segment_bytes(world_size: int) -> int:
    """Returns how much memory the ranks share."""
    return header_bytes(world_size) + 2 * _Slots.bytes_for(world_size, CHUNK_BYTES)


def connect_shared_memory(
    client: RendezvousClient,
    *,
    group: str = "world",
    timeout_seconds: float = 120.0,
    collective_timeout_seconds: float = 300.0,
) -> SharedMemoryCommunicator:
    """Builds the communicator of all ranks of a rendezvous. Every rank must call it with the same group.

    Args:
        client: this rank's connection, joined.
        group: a name not used before in this generation.
        timeout_seconds: for meeting the others and handing over the memory.
        collective_timeout_seconds: how long a collective waits for a rank.

    Raises:
        BackendUnavailable: not Linux on x86-64, no memory, or the ranks are not on one host.
        RendezvousTimeout, RankFailed: a rank did not come, or died.
    """
    check_platform()
    deadline = time.monotonic() + timeout_seconds
    key = f"shm/{group}"
    try:
        if client.rank == 0:
            descriptor = create_segment(segment_bytes(client.world_size))
            _offer(client, key, descriptor, deadline)
        else:
            ticket = client.get(key, timeout_seconds=timeout_seconds)
            descriptor = take_segment(ticket, max(1.0, deadline - time.monotonic()))
    except BackendUnavailable as error:
        client.report_failure(str(error))
        raise
    communicator = SharedMemoryCommunicator(
        descriptor,
        client.rank,
        client.world_size,
        timeout_seconds=collective_timeout_seconds,
        check_for_failure=client.check,
    )
    communicator.barrier()
    return communicator


def _offer(client: RendezvousClient, key: str, descriptor: int, deadline: float) -> None:
    offer = SegmentOffer()
    try:
        client.set(key, offer.ticket)
        offer.serve(descriptor, client.world_size - 1, deadline, client.check)
    finally:
        offer.close()


def check_platform() -> None:
    """Refuses where the barrier's memory ordering does not hold.

    Raises:
        BackendUnavailable: not Linux on x86-64.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ("x86_64", "AMD64"):
        raise BackendUnavailable(f"shared memory runs on Linux x86-64 only, this is {sys.platform} on {machine}")


class _Slots:
    """Two buffers for each rank in shared memory, as arrays of any dtype."""

    def __init__(self, memory: memoryview, world_size: int, bytes_each: int) -> None:
        self.bytes = self.bytes_for(world_size, bytes_each)
        self._memory = memory[: self.bytes]
        self._world_size = world_size
        self._bytes_each = bytes_each
        self._arrays: dict[np.dtype[Any], tuple[tuple[Array, ...], tuple[Array, ...]]] = {}

    @staticmethod
    def bytes_for(world_size: int, bytes_each: int) -> int:
        return 2 * world_size * bytes_each

    def of(self, dtype: np.dtype[Any]) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """Returns [parity][rank] -> the whole buffer as a 1-D array."""
        arrays = self._arrays.get(dtype)
        if arrays is None:
            whole = np.frombuffer(self._memory, np.uint8).reshape(2, self._world_size, self._bytes_each)
            even, odd = (tuple(row.view(dtype) for row in half) for half in whole)
            arrays = self._arrays[dtype] = (even, odd)
        return arrays

    def release(self) -> None:
        self._arrays.clear()
        with contextlib.suppress(BufferError):  # see SharedMemoryCommunicator._release
            self._memory.release()


class _Scratch:
    """Private memory for one slice, as arrays of any dtype; allocated once."""

    def __init__(self, size_bytes: int) -> None:
        self._own = np.empty(size_bytes, np.uint8)
        self._result = np.empty(size_bytes, np.uint8)
        self._accumulator = np.empty(0, np.float32)

    def own(self, dtype: np.dtype[Any], length: int) -> Array:
        return self._own[: length * dtype.itemsize].view(dtype)

    def result(self, dtype: np.dtype[Any], length: int) -> Array:
        return self._result[: length * dtype.itemsize].view(dtype)

    def accumulator(self, dtype: np.dtype[Any], length: int) -> Array | None:
        """Returns room for half precision to add up in, or None where the dtype adds up in itself."""
        if accumulation_dtype(dtype) == dtype:
            return None
        if self._accumulator.size < length:
            self._accumulator = np.empty(length, np.float32)
        return self._accumulator[:length]


def _pack(sources: Sequence[Array], region: Region, into: Array) -> None:
    """Copies the region's pieces, one after the other, into a 1-D array of its length."""
    pieces = region.pieces
    if len(pieces) == 1:
        array, begin, end = pieces[0]
        into[...] = sources[array][begin:end]
    else:
        np.concatenate([sources[array][begin:end] for array, begin, end in pieces], out=into)


def _split(chunk: Array, region: Region, targets: Sequence[Array]) -> None:
    """Copies the region of a chunk into the pieces of the targets that lie there."""
    at = region.begin
    for array, begin, end in region.pieces:
        until = at + end - begin
        targets[array][begin:end] = chunk[at:until]
        at = until
