"""The shared-memory backend for NumPy arrays: the ranks of one host exchange data through a memfd.

This file makes the shared memory and connects the ranks; the other files of this folder move the bytes.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.backend import Backend, Bounds, Message, Run, bounds_of
from gradsync.communicators.failures import CAUSE_SECONDS, FailureMonitor, await_cause
from gradsync.communicators.host_copy import memcpy_is_slow
from gradsync.communicators.shared_memory.all_reduce import SMALL_BYTES, ListAllReduce, OneShot
from gradsync.communicators.shared_memory.arena import ROUND_BYTES, SLOT_BYTES, ShmContext, areas_of, segment_bytes
from gradsync.communicators.shared_memory.barrier import ANY_ROUND, SharedBarrier
from gradsync.communicators.shared_memory.collectives import (
    MAX_CHUNKS_KEPT,
    Broadcast,
    Plans,
    ReduceScatter,
    all_gather,
    all_to_all,
)
from gradsync.communicators.shared_memory.point_to_point import PointToPoint
from gradsync.communicators.shared_memory.segment import (
    check_platform,
    create_segment,
    map_segment,
    populate,
    share_segment,
)
from gradsync.environment import RankEnvironment, WorldSettings
from gradsync.errors import BackendUnavailable
from gradsync.machine import begin_on_core
from gradsync.reduction import Array, ReduceOp
from gradsync.rendezvous.client import RendezvousClient


class ShmBackend(Backend):
    """The backend for ranks on one Linux x86-64 host, which share memory.

    Args:
        descriptor: the file descriptor of a segment with segment_bytes(world_size) bytes. The backend closes it.
        client: this rank's connection to the rendezvous server.
        group: the name of the communicator.
        timeout_seconds: how long a collective waits for a rank.
        chunk_bytes: the size of the chunks of large lists: at most SLOT_BYTES, and the same on all ranks.
    """

    name = "shm"
    begins_with_barrier = True  # otherwise only the first collective would notice a rank that cannot map the memory

    client: RendezvousClient

    def __init__(
        self,
        descriptor: int,
        client: RendezvousClient,
        group: str,
        timeout_seconds: float,
        chunk_bytes: int,
    ) -> None:
        super().__init__(client, group, timeout_seconds)
        rank, world_size = self.rank, self.world_size
        # The kernel may have moved several ranks to one core while they joined, so each rank now begins on a core of
        # its own. The core depends on the world rank, because all groups use the same cores.
        begin_on_core(self.ranks[rank])
        self._mapping = map_segment(descriptor)
        populate(self._mapping, 0, len(self._mapping))
        self._memory = memoryview(self._mapping)
        self._areas = areas = areas_of(self._memory, world_size)
        failures = FailureMonitor(client, self.recorder)
        self._barrier = SharedBarrier(areas, rank, self.ranks, self.label, timeout_seconds, failures)
        self._context = context = ShmContext(rank, world_size, self._barrier, areas, chunk_bytes, self.recorder)
        self._plans = Plans(context)
        self._channels = PointToPoint(areas, context.slots(np.dtype(np.uint8))[0], rank, self._barrier)
        # If the program drops a group without closing it, other ranks may still wait in a collective of this group.
        self._when_dropped = weakref.finalize(self, _announce_dropped, self._barrier, os.getpid())
        self._when_dropped.atexit = False

    def all_reduce(
        self, sources: Sequence[Array], targets: Sequence[Array], op: ReduceOp, agreement: Agreement
    ) -> None:
        if self.world_size == 1:
            self._barrier.agree(agreement)
            for source, target in zip(sources, targets, strict=True):
                if target is not source:
                    np.copyto(target, source)
            return
        source = sources[0]
        if len(sources) == 1 and source.nbytes <= SMALL_BYTES:
            self._plans.of(OneShot, source.dtype, source.size, op).run(source, targets[0], agreement)
        else:
            ListAllReduce(self._context, sources, targets, op).run(agreement)

    def reduce(self, source: Array, target: Array | None, op: ReduceOp, root: int, agreement: Agreement) -> None:
        result = source[:0] if target is None else target
        self.reduce_scatter(source, result, self.only_part(root, source.size), op, agreement)

    def reduce_scatter(self, source: Array, target: Array, bounds: Bounds, op: ReduceOp, agreement: Agreement) -> None:
        self._plans.of(ReduceScatter, source.dtype, tuple(bounds), op).run(source, target, agreement)

    def broadcast(self, flats: Sequence[Array], root: int, agreement: Agreement) -> None:
        self._plans.of(Broadcast, tuple([flat.size for flat in flats]), root).run(flats, agreement)

    def all_gather(self, source: Array, target: Array, bounds: Bounds, agreement: Agreement) -> None:
        self._plans.of(all_gather, tuple(bounds)).run(source, target, agreement)

    def all_to_all(
        self,
        source: Array,
        target: Array,
        send_bounds: Bounds,
        receive_bounds: Bounds,
        largest: int,
        agreement: Agreement,
    ) -> None:
        plan = self._plans.of(all_to_all, tuple(send_bounds), tuple(receive_bounds), largest)
        plan.run(source, target, agreement)

    def exchange(self, send: Message | None, receive: Message | None) -> None:
        self._channels.move(send, receive)

    # -- Plans for arrays of at most one round, or at most MAX_CHUNKS_KEPT chunks --------------------------------

    def plan_all_reduce(self, size: int, dtype: np.dtype[Any], op: ReduceOp) -> Run | None:
        size_bytes = size * dtype.itemsize
        if not 0 < size_bytes <= MAX_CHUNKS_KEPT * self._context.chunk_bytes or self.world_size == 1:
            return None
        if size_bytes > SMALL_BYTES:
            return partial(self._plans.all_reduce_large, op)
        run: Run = self._plans.of(OneShot, dtype, size, op).run
        return run

    def plan_reduce_scatter(self, size: int, dtype: np.dtype[Any], op: ReduceOp) -> Run | None:
        part = size // self.world_size
        if not 0 < part * dtype.itemsize <= self._context.share_bytes:
            return None
        run: Run = self._plans.of(ReduceScatter, dtype, bounds_of([part] * self.world_size, 1), op).run
        return run

    def plan_broadcast(self, size_bytes: int, root: int) -> Run | None:
        if not 0 < size_bytes <= ROUND_BYTES:
            return None
        run: Run = self._plans.of(Broadcast, (size_bytes,), root).run_one
        return run

    def plan_all_gather(self, size_bytes: int) -> Run | None:
        if not 0 < size_bytes <= ROUND_BYTES:
            return None
        run: Run = self._plans.of(all_gather, bounds_of([size_bytes] * self.world_size, 1)).run
        return run

    def plan_all_to_all(self, size_bytes: int) -> Run | None:
        part = size_bytes // self.world_size
        if not 0 < part <= self._context.share_bytes:
            return None
        bounds = bounds_of([part] * self.world_size, 1)
        run: Run = self._plans.of(all_to_all, bounds, bounds, part).run
        return run

    def connect_group(self, members: tuple[int, ...], name: str) -> ShmBackend:
        client, seconds = self.client.group(members, name), self.timeout_seconds
        return connect_shared_memory(client, name, seconds, seconds)

    def raise_if_ended(self, missing: list[int]) -> None:
        with contextlib.suppress(ValueError):  # another thread has released the memory; the next check raises
            self._barrier.check_for_failures(lambda: missing, 0.0, ANY_ROUND)

    def agree(self, agreement: Agreement) -> None:
        self._barrier.agree(agreement)

    def announce_close(self) -> None:
        self._barrier.announce_closed()

    def announce_abort(self, reason: str, culprit: int | None) -> None:
        self._barrier.announce_abort(reason, culprit)

    def release(self) -> None:
        self._when_dropped.detach()
        # These objects form reference cycles. This method deletes the objects, so that the memory is freed now, and not
        # by a later garbage collection.
        self._plans.release()
        self._context.release()
        del self._plans, self._context, self._channels
        # If a traceback still holds a view, the mapping is freed with the last view.
        with contextlib.suppress(BufferError):
            for area in self._areas.values():
                area.release()
            self._memory.release()
            self._mapping.close()
        del self._areas, self._memory, self._mapping


def _announce_dropped(barrier: SharedBarrier, pid: int) -> None:
    if os.getpid() == pid:  # a forked child shares the memory with its parent, which still uses the communicator
        barrier.announce_closed()


def check(_place: RankEnvironment) -> None:
    """Raises BackendUnavailable if this machine does not run Linux on x86-64; see BackendModule."""
    check_platform()


def offer(settings: WorldSettings) -> str:
    """Raises BackendUnavailable if shared memory cannot connect the ranks; see BackendModule."""
    place = settings.place
    check(place)
    if place.local_world_size != place.world_size:
        raise BackendUnavailable(
            "shared memory needs all ranks on one host; "
            f"{place.local_world_size} of {place.world_size} ranks are on this host"
        )
    if place.rank == 0:  # rank 0 makes the memory for all
        os.close(create_segment(segment_bytes(place.world_size)))
    return ""


def connect(client: RendezvousClient, settings: WorldSettings, group: str) -> ShmBackend:
    """Returns this rank's backend; see BackendModule and connect_shared_memory."""
    return connect_shared_memory(client, group, settings.timeout_seconds, settings.collective_timeout_seconds)


def connect_shared_memory(
    client: RendezvousClient, group: str, timeout_seconds: float, collective_timeout_seconds: float
) -> ShmBackend:
    """Returns this rank's shared-memory backend for a group. Every rank must call this function with the same group.

    If this function raises an error, the caller must report the error to the other ranks, which would otherwise wait
    for this rank.

    Args:
        client: this rank's client of the rendezvous server.
        group: the name of the group, which no earlier group of this generation has used.
        timeout_seconds: how long this rank waits for the other ranks in each step of sharing the memory.
        collective_timeout_seconds: how long a collective waits for a rank.

    Raises:
        BackendUnavailable: this machine does not run Linux on x86-64, there is not enough memory, or the ranks are not
            on one host and in one pid namespace.
        RendezvousTimeout, RankFailed: another rank did not call this function in time, or died.
        CollectiveTimeout, RendezvousError: the world has failed, or the connection to the rendezvous server was lost.
    """
    check_platform()
    key, is_slow = f"shm/{group}", memcpy_is_slow()

    def broadcast(ticket: bytes) -> bytes:
        nonlocal is_slow
        data = client.exchange(key, bytes([is_slow]) + ticket, timeout_seconds=timeout_seconds)[0]
        is_slow = data[0] == 1
        return data[1:]

    make = (lambda: create_segment(segment_bytes(client.world_size))) if client.rank == 0 else None
    try:
        descriptor = share_segment(make, broadcast, partial(client.barrier, key, timeout_seconds=timeout_seconds))
    except BackendUnavailable:
        if client.rank != 0:
            await_cause(CAUSE_SECONDS, client.check)  # if rank 0 is gone because of a failure, raises that failure
        raise
    return ShmBackend(descriptor, client, group, collective_timeout_seconds, SLOT_BYTES if is_slow else SLOT_BYTES // 2)
