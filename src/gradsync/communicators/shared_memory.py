"""The communicator between processes of one host without a GPU: NumPy over a shared memfd.

What moves the bytes of a reduction is in shared_reduction.py; here are the segment's layout, the broadcast, and the
way to a communicator.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradsync.communicators.agreement import Agreement, agreement_on
from gradsync.communicators.base import Communicator
from gradsync.communicators.host_copy import copy_words
from gradsync.communicators.prepared_exchange import PreparedExchange, quiet_caller
from gradsync.communicators.shared_barrier import SharedBarrier, header_bytes
from gradsync.communicators.shared_reduction import Exchange, Scratch, SlotArrays, WriteBack
from gradsync.communicators.shared_segment import SegmentOffer, create_segment, map_segment, take_segment
from gradsync.communicators.verdicts import Verdicts
from gradsync.cores import begin_on_core
from gradsync.errors import BackendUnavailable
from gradsync.reduction import Array, ReduceOp
from gradsync.rendezvous.client import RendezvousClient

# What is in flight between two barriers, for each rank. Measured: larger chunks leave the cache, smaller ones pay for
# more barriers and NumPy calls.
CHUNK_BYTES = 1024 * 1024
# Up to here one barrier and n reads of everything beat two barriers and a share of the work.
SMALL_BYTES = 128 * 1024
_MAX_PREPARED = 1024
_OPS = frozenset(op.value for op in ReduceOp)


class SharedMemoryCommunicator(Communicator):
    """Ranks on one Linux x86-64 host that share memory.

    Args:
        descriptor: of a segment of segment_bytes(world_size); taken over and closed.
        client: this rank's connection to the rendezvous server.
        group: the communicator's name.
        timeout_seconds: how long a collective waits for a rank.
    """

    backend = "shm"

    def __init__(
        self,
        descriptor: int,
        client: RendezvousClient,
        group: str,
        timeout_seconds: float,
    ) -> None:
        super().__init__(client.rank, client.world_size, group)
        rank, world_size = self.rank, self.world_size
        begin_on_core(rank)  # now: meeting the others may have brought them together
        self._mapping = map_segment(descriptor)
        self._memory = memoryview(self._mapping)
        header = header_bytes(world_size)
        verdicts = Verdicts(client, self.recorder)
        self._barrier = SharedBarrier(self._memory[:header], rank, world_size, timeout_seconds, verdicts)
        self._exchange_slots = _Slots(self._memory[header:], world_size)
        self._stream_slots = _Slots(self._memory[header + self._exchange_slots.bytes :], world_size)
        scratch = Scratch(CHUNK_BYTES)
        self._exchange = Exchange(self._exchange_slots.of, self._barrier, scratch, rank)
        self._prepared: dict[Any, PreparedExchange] = {}  # by operator, shape and dtype
        self._quietly = quiet_caller()
        self._write_back = WriteBack(self._stream_slots.of, self._barrier, scratch, rank, world_size, CHUNK_BYTES)

    def _all_reduce_list(
        self, sources: Sequence[Array], targets: Sequence[Array], op: ReduceOp, agreement: Agreement
    ) -> None:
        if self.world_size == 1:
            self._barrier.meet(agreement)
            for source, target in zip(sources, targets, strict=True):
                if target is not source:
                    np.copyto(target, source)
            return
        total_bytes = sum([source.nbytes for source in sources])
        reduction = self._exchange if total_bytes <= SMALL_BYTES else self._write_back
        # Overflow and NaN are the caller's business; as exceptions they would hit some ranks and not others.
        with np.errstate(all="ignore"):
            reduction.all_reduce(sources, targets, op, agreement)

    def _all_reduce_prepared(self, array: Any, op: str | ReduceOp) -> bool:
        if type(array) is not np.ndarray or not isinstance(op, str):
            return False
        key = (op, array.shape, array.dtype)
        prepared = self._prepared.get(key)
        if prepared is None:
            small = self.world_size > 1 and array.nbytes <= SMALL_BYTES and op in _OPS
            if not small or not PreparedExchange.suits(array, ReduceOp(op)):
                return False
        if not PreparedExchange.fits(array):
            return False
        agreement = prepared.agreement if prepared else agreement_on("all_reduce", array.shape, array.dtype, op)
        with self.lifetime.turn("all_reduce", agreement):
            if prepared is None:
                prepared = self._prepare(array, ReduceOp(op), agreement)
                self._prepared[key] = prepared
            prepared.all_reduce(array, self._quietly)
        return True

    def _prepare(self, array: Array, op: ReduceOp, agreement: Agreement) -> PreparedExchange:
        if len(self._prepared) >= _MAX_PREPARED:
            self._prepared.clear()
        slots = self._exchange_slots.of(array.dtype)
        return PreparedExchange(agreement, op, array.shape, array.dtype, slots, self._barrier, self.rank)

    def _broadcast(self, flat: Array, root: int, agreement: Agreement) -> None:
        if not flat.size:
            self._barrier.meet(agreement)
            return
        data = flat.view(np.uint8)
        for begin in range(0, data.size, CHUNK_BYTES):
            part = data[begin : begin + CHUNK_BYTES]
            slot = self._exchange_slots.of(data.dtype)[self._barrier.next_parity][root][: part.size]
            if self.rank == root:
                copy_words(part, slot)
            self._barrier.meet(agreement)
            if self.rank != root:
                copy_words(slot, part)

    def _agree(self, agreement: Agreement) -> None:
        self._barrier.meet(agreement)

    def _announce_close(self) -> None:
        self._barrier.announce_closed()

    def _announce_abort(self, reason: str, culprit: int | None) -> None:
        self._barrier.announce_abort(reason, culprit)

    def _release(self) -> None:
        # They refer to one another: dropped by hand, so that the memory goes now and not with the garbage collector.
        del self._exchange, self._write_back
        self._prepared.clear()
        self._exchange_slots.release()
        self._stream_slots.release()
        self._barrier.release()
        # Where a traceback still holds a view, the mapping goes with the last one.
        with contextlib.suppress(BufferError):
            self._memory.release()
            self._mapping.close()
        del self._memory, self._mapping


def segment_bytes(world_size: int) -> int:
    """Returns how much memory the ranks share."""
    return header_bytes(world_size) + 2 * _Slots.bytes_for(world_size)


def connect_shared_memory(
    client: RendezvousClient,
    *,
    group: str = "world",
    timeout_seconds: float = 120.0,
    collective_timeout_seconds: float = 300.0,
) -> SharedMemoryCommunicator:
    """Builds the communicator of all ranks of a rendezvous. Every rank must call it with the same group.

    Whoever calls it reports a failure to the other ranks, which would wait for this one otherwise.

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
    if client.rank == 0:
        descriptor = create_segment(segment_bytes(client.world_size))
        try:
            _offer(client, key, descriptor, deadline)
        except BaseException:
            os.close(descriptor)
            raise
    else:
        ticket = client.get(key, timeout_seconds=timeout_seconds)
        descriptor = take_segment(ticket, max(1.0, deadline - time.monotonic()))
    communicator = SharedMemoryCommunicator(descriptor, client, group, collective_timeout_seconds)
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
    """Two buffers of CHUNK_BYTES for each rank in shared memory, used in turn, as arrays of any dtype."""

    def __init__(self, memory: memoryview, world_size: int) -> None:
        self.bytes = self.bytes_for(world_size)
        self._memory = memory[: self.bytes]
        self._shape = (2, world_size, CHUNK_BYTES)
        self._arrays: dict[np.dtype[Any], SlotArrays] = {}

    @staticmethod
    def bytes_for(world_size: int) -> int:
        return 2 * world_size * CHUNK_BYTES

    def of(self, dtype: np.dtype[Any]) -> SlotArrays:
        """Returns [parity][rank] -> the whole buffer as a 1-D array."""
        arrays = self._arrays.get(dtype)
        if arrays is None:
            whole = np.frombuffer(self._memory, np.uint8).reshape(self._shape)
            arrays = self._arrays[dtype] = tuple(tuple(row.view(dtype) for row in half) for half in whole)
        return arrays

    def release(self) -> None:
        self._arrays.clear()
        with contextlib.suppress(BufferError):  # see SharedMemoryCommunicator._release
            self._memory.release()
