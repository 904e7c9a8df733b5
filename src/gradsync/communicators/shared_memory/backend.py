"""The shared-memory backend: the ranks of one host exchange NumPy arrays through memory that all of them map.

kernels.py moves the bytes, segment.py gets the memory, peers.py knows how other ranks end, messages.py keeps messages.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.backend import Backend, Bounds, Message
from gradsync.communicators.failures import FailureMonitor, exchange_mismatch
from gradsync.communicators.shared_memory import kernels, memory
from gradsync.communicators.shared_memory.compiled import RUNNING
from gradsync.communicators.shared_memory.messages import CHECK_SECONDS, Messages
from gradsync.communicators.shared_memory.peers import ANY_ROUND, Peers
from gradsync.communicators.shared_memory.segment import check_allocation, check_platform, share_memory
from gradsync.diagnostics import trace
from gradsync.environment import PLAIN_KERNELS
from gradsync.errors import BackendUnavailable
from gradsync.launchers import RankEnvironment, WorldSettings
from gradsync.machine import begin_on_core
from gradsync.reduction import Array, ReduceOp
from gradsync.rendezvous.client import RendezvousClient

# A chunk of a large list fills a slot. Larger ones do not fit into the cache; smaller ones need more rounds.
_GROUP_SLOT_BYTES = kernels.SLOT_BYTES // 2  # a program may have many groups
_MESSAGE_CHECK_SECONDS = 50e-6  # how often a rank that waits in a collective moves its messages on

_all_reduce_with_squares = partial(kernels.all_reduce, with_squares=True)


class ShmBackend(Backend):
    """The backend for ranks on one Linux host, which share memory.

    Args:
        mapping: the memory of all ranks, from share_memory.
        slot_bytes: see memory.Shared.
        client, group, timeout_seconds: see Backend.
    """

    name = "shm"

    client: RendezvousClient

    def __init__(
        self, mapping: mmap.mmap, slot_bytes: int, client: RendezvousClient, group: str, timeout_seconds: float
    ) -> None:
        super().__init__(client, group, timeout_seconds)
        self._mapping = mapping
        self._shared = memory.Shared(mapping, self.rank, self.world_size, slot_bytes)
        self._failures = FailureMonitor(client, self.recorder)
        self._peers = Peers(self._shared, self.ranks, self.label, timeout_seconds, self._failures)
        self._messages = Messages(self._shared, self._peers, self.ranks, self.label, self._failures)
        # If the program drops a group without closing it, other ranks may still wait in a collective of this group.
        self._when_dropped = weakref.finalize(self, _announce_dropped, self._peers, os.getpid())
        self._when_dropped.atexit = False

    # -- Collectives -------------------------------------------------------------------------------------------

    def all_reduce(
        self,
        sources: Sequence[Array],
        targets: Sequence[Array],
        op: ReduceOp,
        agreement: Agreement,
        factor: float = 1.0,
    ) -> None:
        self._run(kernels.all_reduce, agreement, sources, targets, op, factor)

    def all_reduce_with_squares(
        self, flats: Sequence[Array], op: ReduceOp, agreement: Agreement, factor: float
    ) -> float:
        squares: float = self._run(_all_reduce_with_squares, agreement, flats, flats, op, factor)
        return squares

    def reduce(self, source: Array, target: Array | None, op: ReduceOp, root: int, agreement: Agreement) -> None:
        result = np.empty(0, source.dtype) if target is None else target
        self.reduce_scatter(source, result, self.only_part(root, source.size), op, agreement)

    def reduce_scatter(self, source: Array, target: Array, bounds: Bounds, op: ReduceOp, agreement: Agreement) -> None:
        self._run(kernels.reduce_scatter, agreement, source, target, bounds, op)

    def broadcast(self, flats: Sequence[Array], root: int, agreement: Agreement) -> None:
        self._run(kernels.broadcast, agreement, flats, root)

    def all_gather(self, source: Array, target: Array, bounds: Bounds, agreement: Agreement) -> None:
        self._run(kernels.all_gather, agreement, source, target, bounds)

    def all_to_all(
        self,
        source: Array,
        target: Array,
        send_bounds: Bounds,
        receive_bounds: Bounds,
        largest: int,
        agreement: Agreement,
    ) -> None:
        self._run(kernels.all_to_all, agreement, source, target, send_bounds, receive_bounds, largest)

    def barrier(self, agreement: Agreement) -> None:
        self._run(kernels.meet, agreement)

    def _run(self, kernel: Callable[..., Any], agreement: Agreement, *arguments: object) -> Any:
        """Runs a kernel, which compares the digests of all ranks before it changes an array; returns its result."""
        if self._failures.has_failed():  # looked up here because a short wait ends before the kernel calls check
            self._failures.check()
        call = kernels.Call(agreement.digest, agreement.layout, self._check, trace.phases_of(self.recorder))
        try:
            return kernel(self._shared, *arguments, call)
        except kernels.DigestsDiffer:
            number, group = self._shared.rounds, self._failures.group
            raise exchange_mismatch(self.client, group, number, self.label, agreement, self.ranks) from None

    def _check(self) -> float:
        """Moves messages on, and looks for failures, while this rank waits in the barrier; see kernels.py."""
        has_moved = self._messages.advance()
        self._peers.look_in_round()
        if self._messages.is_idle:
            return CHECK_SECONDS
        return 0.0 if has_moved else _MESSAGE_CHECK_SECONDS

    # -- Messages ----------------------------------------------------------------------------------------------

    def exchange(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        awaited: Collection[Message] = (),
        seconds: float | None = None,
    ) -> None:
        if self._failures.has_failed():
            self._failures.check()
        self._messages.exchange(sends, receives, awaited, seconds)

    # -- Groups and the end ------------------------------------------------------------------------------------

    def connect_group(self, members: tuple[int, ...], name: str) -> ShmBackend:
        client, seconds = self.client.group(members, name), self.timeout_seconds
        return _connect(client, name, _GROUP_SLOT_BYTES, seconds, seconds)

    def announce(self, aborted_because: str | None = None, culprit: int | None = None) -> None:
        if aborted_because is None:
            self._peers.announce_closed()
        else:
            self._peers.announce_abort(aborted_because, culprit)

    def raise_if_ended(self, missing: list[int]) -> None:
        with contextlib.suppress(ValueError):  # another thread has released the memory; the next check raises
            self._peers.look(lambda: missing, 0.0, ANY_ROUND)

    def release(self) -> None:
        self._when_dropped.detach()
        # The memory is freed now, and not by a later garbage collection. A view in a traceback keeps it until it goes.
        self._messages.release()
        self._shared.release()
        with contextlib.suppress(BufferError):
            self._mapping.close()
        del self._mapping


def _announce_dropped(peers: Peers, pid: int) -> None:
    if os.getpid() == pid:  # a forked child shares the memory with its parent, which still uses the communicator
        peers.announce_closed()


# -- Connecting: the functions of BackendModule -----------------------------------------------------------------------


def check(_place: RankEnvironment) -> None:
    """Raises BackendUnavailable if shared memory cannot be used on this machine; see check_platform."""
    check_platform(RUNNING)


def offer(settings: WorldSettings) -> str:
    """Raises BackendUnavailable if shared memory cannot connect the ranks; see BackendModule."""
    place = settings.place
    check(place)
    if place.local_world_size != place.world_size:
        raise BackendUnavailable(
            "shared memory needs all ranks on one host; "
            f"{place.local_world_size} of {place.world_size} ranks are on this host"
        )
    if place.rank == 0:  # for all
        check_allocation(place.world_size * memory.part_bytes(place.world_size, kernels.SLOT_BYTES))
    return ""


def connect(client: RendezvousClient, settings: WorldSettings, group: str) -> ShmBackend:
    """Returns this rank's backend; see BackendModule, and share_memory for the errors."""
    return _connect(client, group, kernels.SLOT_BYTES, settings.timeout_seconds, settings.collective_timeout_seconds)


def _connect(
    client: RendezvousClient, group: str, slot_bytes: int, timeout_seconds: float, collective_timeout_seconds: float
) -> ShmBackend:
    check_platform(RUNNING)
    if client.world_ranks[client.rank] == 0:
        _tell_of_plain_kernels()
    # The kernel may have moved several ranks to one core while they joined, so each rank now begins on a core of its
    # own, and allocates its memory there. By the world rank, because all groups use the same cores.
    begin_on_core(client.world_ranks[client.rank])
    part_bytes = memory.part_bytes(client.world_size, slot_bytes)
    mapping = share_memory(client, f"shm/{group}", part_bytes, RUNNING, timeout_seconds)
    return ShmBackend(mapping, slot_bytes, client, group, collective_timeout_seconds)


@cache
def _tell_of_plain_kernels() -> None:
    """Logs once that collectives are slower than they could be, unless that was asked for."""
    if RUNNING.kind != "C" and not PLAIN_KERNELS.read():
        text = f"gradsync: shared memory runs in plain NumPy, slower than in C: {RUNNING.why_plain}: {RUNNING.remedy}"
        logging.getLogger("gradsync").warning("%s", text)
