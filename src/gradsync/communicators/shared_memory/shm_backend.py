"""The shared-memory backend for NumPy arrays: the ranks of one host exchange data through a memfd.

This file makes the shared memory and connects the ranks; the other files of this folder move the bytes.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.backend import Backend, Bounds, Message, Range, ResidentMemory, Run, bounds_of
from gradsync.communicators.failures import CAUSE_SECONDS, FailureMonitor, await_cause
from gradsync.communicators.host_copy import memcpy_is_slow
from gradsync.communicators.host_values import Checks, NonFiniteFinder, SumOfSquares
from gradsync.communicators.shared_memory.arena import Scratch, SharedRings, ShmContext, Slots
from gradsync.communicators.shared_memory.barrier import ANY_ROUND, SharedBarrier, header_bytes
from gradsync.communicators.shared_memory.collectives import MAX_CHUNKS_KEPT, Plans, PreparedReduction
from gradsync.communicators.shared_memory.point_to_point import PointToPoint
from gradsync.communicators.shared_memory.resident import Handover, ResidentReduction, SharedResidentMemory
from gradsync.communicators.shared_memory.segment import (
    SegmentOffer,
    check_platform,
    create_segment,
    map_segment,
    populate,
    take_segment,
)
from gradsync.environment import RankEnvironment, WorldSettings
from gradsync.errors import BackendUnavailable
from gradsync.machine import begin_on_core
from gradsync.reduction import Array, ReduceOp, Wire
from gradsync.rendezvous.client import RendezvousClient

# The largest chunk of a large list that a rank publishes between two barriers. Larger chunks do not fit into the cache;
# smaller chunks need more barriers and NumPy calls. This size was measured on a processor with a slow memcpy (Zen 3).
# On a Xeon, chunks of half this size are 5 to 9 % faster for lists of 4 MB and more. Rank 0 measures memcpy for all
# ranks.
CHUNK_BYTES = 1024 * 1024
# The largest number of bytes that a rank publishes in one round of the other collectives, in which some ranks already
# write for the next round while others still read.
ROUND_BYTES = 512 * 1024
# The largest array that is all-reduced in one round: up to this size it is faster if every rank reduces the whole array
# after one barrier than if each rank reduces a share of it between two barriers.
SMALL_BYTES = 128 * 1024


class ShmBackend(Backend):
    """The backend for ranks on one Linux x86-64 host, which share memory.

    Args:
        descriptor: the file descriptor of a segment with segment_bytes(world_size) bytes. The backend closes it.
        client: this rank's connection to the rendezvous server.
        group: the name of the communicator.
        timeout_seconds: how long a collective waits for a rank.
        chunk_bytes: the size of the chunks of large lists: at most CHUNK_BYTES, and the same on all ranks.
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
        # Called now, because the ranks may have been moved to one core while they joined. The core depends on the world
        # rank, because all groups use the same cores.
        begin_on_core(self.ranks[rank])
        self._mapping = map_segment(descriptor)
        self._memory = memoryview(self._mapping)
        header = header_bytes(world_size)
        failures = FailureMonitor(client, self.recorder)
        self._barrier = SharedBarrier(self._memory[:header], rank, self.ranks, self.label, timeout_seconds, failures)
        self._rings = SharedRings(self._memory[header:], world_size, ROUND_BYTES, self._barrier)
        self._slots = Slots(self._memory[header + self._rings.bytes :], world_size, CHUNK_BYTES)
        channels = header + self._rings.bytes + self._slots.bytes
        self._channels = PointToPoint(self._memory[channels:], rank, world_size, self._barrier)
        populate(self._mapping, 0, segment_bytes(world_size))
        scratch = Scratch(CHUNK_BYTES)
        share_bytes = ROUND_BYTES // max(world_size - 1, 1) // 64 * 64
        sizes = SMALL_BYTES, chunk_bytes, ROUND_BYTES, share_bytes
        finder, squares = NonFiniteFinder(world_size), SumOfSquares()
        self._context = context = ShmContext(
            rank, world_size, self._barrier, self._rings, *sizes, self.recorder, finder, squares
        )
        self._plans = Plans(context, scratch, self._slots)
        self._resident_reduction = ResidentReduction(context)
        self.converts = world_size > 1
        self.finder = finder if world_size > 1 else None
        self.squares = squares if world_size > 1 else None
        # If the program drops a group and the garbage collector deletes it, other ranks may still wait in a collective.
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
            self._plans.one_shot(source.dtype, source.size, op).run(source, targets[0], agreement)
        else:
            self._plans.list_reduction(sources, targets, op).run(agreement)

    def prepare(
        self, sources: Sequence[Array], targets: Sequence[Array], op: ReduceOp, *, checks: Checks, wire: Wire | None
    ) -> PreparedReduction | None:
        return self._plans.prepare(sources, targets, op, checks=checks, wire=wire) if self.world_size > 1 else None

    def make_resident(self, size_bytes: int, agreement: Agreement) -> ResidentMemory:
        if self.world_size == 1:
            return super().make_resident(size_bytes, agreement)
        share = partial(self.share_numbers, agreement=agreement)
        handover = Handover(self._context, share, self.raise_if_ended, self.timeout_seconds)
        return handover.make_memory(size_bytes)

    def all_reduce_resident(self, memory: ResidentMemory, part: Range, agreement: Agreement) -> None:
        if not isinstance(memory, SharedResidentMemory):  # the world has only one rank
            super().all_reduce_resident(memory, part, agreement)
            return
        with np.errstate(all="ignore"):  # see quiet_caller
            self._resident_reduction.all_reduce(memory, part, agreement)

    def reduce(self, source: Array, target: Array | None, op: ReduceOp, root: int, agreement: Agreement) -> None:
        self._plans.reduce(source.dtype, source.size, op, root).run(source, target, agreement)

    def reduce_scatter(self, source: Array, target: Array, bounds: Bounds, op: ReduceOp, agreement: Agreement) -> None:
        self._plans.reduce_scatter(source.dtype, tuple(bounds), op).run(source, target, agreement)

    def broadcast(self, flats: Sequence[Array], root: int, agreement: Agreement) -> None:
        if len(flats) == 1:
            self._plans.broadcast(flats[0].size, root).run(flats[0], flats[0], agreement)
        else:
            self._plans.broadcast_list(tuple([flat.size for flat in flats]), root).run(flats, agreement)

    def all_gather(self, source: Array, target: Array, bounds: Bounds, agreement: Agreement) -> None:
        self._plans.gather(tuple(bounds), None).run(source, target, agreement)

    def gather(self, source: Array, target: Array | None, bounds: Bounds, root: int, agreement: Agreement) -> None:
        self._plans.gather(tuple(bounds), root).run(source, target, agreement)

    def scatter(self, source: Array | None, target: Array, bounds: Bounds, root: int, agreement: Agreement) -> None:
        self._plans.scatter(tuple(bounds), root).run(source, target, agreement)

    def all_to_all(
        self,
        source: Array,
        target: Array,
        send_bounds: Bounds,
        receive_bounds: Bounds,
        largest: int,
        agreement: Agreement,
    ) -> None:
        plan = self._plans.all_to_all(tuple(send_bounds), tuple(receive_bounds), largest)
        plan.run(source, target, agreement)

    def exchange(self, send: Message | None, receive: Message | None) -> None:
        self._channels.move(send, receive)

    def share_numbers(self, numbers: Sequence[int], agreement: Agreement) -> list[list[int]]:
        return self._plans.share_numbers(numbers, agreement)

    # -- Plans, for arrays that fit one round, or a few chunks ---------------------------------------------------

    def plan_all_reduce(self, size: int, dtype: np.dtype[Any], op: ReduceOp) -> Run | None:
        size_bytes = size * dtype.itemsize
        if not 0 < size_bytes <= MAX_CHUNKS_KEPT * self._context.chunk_bytes or self.world_size == 1:
            return None
        plans = self._plans
        return (plans.one_shot if size_bytes <= SMALL_BYTES else plans.large)(dtype, size, op).run

    def plan_reduce_scatter(self, size: int, dtype: np.dtype[Any], op: ReduceOp) -> Run | None:
        part = size // self.world_size
        if not 0 < part * dtype.itemsize <= self._context.share_bytes:
            return None
        return self._plans.reduce_scatter(dtype, bounds_of([part] * self.world_size, 1), op).run

    def plan_broadcast(self, size_bytes: int, root: int) -> Run | None:
        return self._plans.broadcast(size_bytes, root).run if 0 < size_bytes <= ROUND_BYTES else None

    def plan_all_gather(self, size_bytes: int) -> Run | None:
        if not 0 < size_bytes <= ROUND_BYTES:
            return None
        return self._plans.gather(bounds_of([size_bytes] * self.world_size, 1), None).run

    def plan_all_to_all(self, size_bytes: int) -> Run | None:
        part = size_bytes // self.world_size
        if not 0 < part <= self._context.share_bytes:
            return None
        bounds = bounds_of([part] * self.world_size, 1)
        return self._plans.all_to_all(bounds, bounds, part).run

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
        # These objects form reference cycles. They are deleted here, so that the memory is freed now, and not by a
        # later garbage collection.
        self._plans.release()
        del self._plans, self._resident_reduction, self._context
        self._rings.release()
        self._slots.release()
        self._channels.release()
        self._barrier.release()
        # If a traceback still holds a view, the mapping is freed with the last view.
        with contextlib.suppress(BufferError):
            self._memory.release()
            self._mapping.close()
        del self._memory, self._mapping


def _announce_dropped(barrier: SharedBarrier, pid: int) -> None:
    if os.getpid() == pid:  # in a forked child the memory is still that of the parent
        barrier.announce_closed()


def segment_bytes(world_size: int) -> int:
    """Returns the size in bytes of a communicator's shared memory."""
    own_bytes = SharedRings.bytes_for(world_size, ROUND_BYTES) + Slots.bytes_for(world_size, CHUNK_BYTES)
    return header_bytes(world_size) + own_bytes + PointToPoint.bytes_for(world_size)


def check(_place: RankEnvironment) -> None:
    """Raises BackendUnavailable if this machine does not run Linux on x86-64; see BackendModule."""
    check_platform()


def offer(settings: WorldSettings) -> str:
    """Raises BackendUnavailable if there is not enough memory, or the ranks are on several hosts; see BackendModule."""
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
        timeout_seconds: the time limit for passing the memory to all ranks.
        collective_timeout_seconds: how long a collective waits for a rank.

    Raises:
        BackendUnavailable: this machine does not run Linux on x86-64, there is not enough memory, or the ranks are not
            on one host.
        RendezvousTimeout, RankFailed: another rank did not call this function in time, or died.
    """
    check_platform()
    deadline = time.monotonic() + timeout_seconds
    key = f"shm/{group}"
    if client.rank == 0:
        descriptor, slow_memcpy = create_segment(segment_bytes(client.world_size)), memcpy_is_slow()
        try:
            _offer(client, key, descriptor, deadline, slow_memcpy=slow_memcpy)
        except BaseException:
            os.close(descriptor)
            raise
    else:
        ticket = client.get(key, from_rank=0, timeout_seconds=timeout_seconds)
        slow_memcpy, ticket = ticket[0] == 1, ticket[1:]
        try:
            descriptor = take_segment(ticket, max(1.0, deadline - time.monotonic()))
        except BackendUnavailable:
            await_cause(CAUSE_SECONDS, client.check)  # if the root is gone because of a failure, that failure is raised
            raise
    chunk_bytes = CHUNK_BYTES if slow_memcpy else CHUNK_BYTES // 2
    return ShmBackend(descriptor, client, group, collective_timeout_seconds, chunk_bytes)


def _offer(client: RendezvousClient, key: str, descriptor: int, deadline: float, *, slow_memcpy: bool) -> None:
    offer = SegmentOffer()
    try:
        client.set(key, bytes([slow_memcpy]) + offer.ticket)
        offer.serve(descriptor, client.world_size - 1, deadline, lambda _served: client.check())
        client.delete(key)  # all ranks have the memory now
    finally:
        offer.close()
