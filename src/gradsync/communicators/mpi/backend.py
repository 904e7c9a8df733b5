"""The MPI backend, for CPU clusters: NumPy arrays over MPI's own nonblocking collectives.

MPI moves and reduces the data. The rendezvous server finds the ranks that have died or stay away, because MPI does not.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
import zlib
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from gradsync.communicators.agreement import Agreement, LayoutsDiffer
from gradsync.communicators.backend import Backend, Bounds, Message, largest_part, part_of
from gradsync.communicators.failures import exchange_mismatch, raise_if_left
from gradsync.communicators.mpi.job import (
    before_finalize,
    check_place,
    duplicate,
    keep_for_ever,
    load_mpi,
    to_mpi_error,
)
from gradsync.communicators.mpi.requests import LARGEST_BYTES, Job, Parts, Requests
from gradsync.diagnostics import trace
from gradsync.errors import BackendUnavailable, CollectiveTimeout, CommunicatorClosed, GradsyncError
from gradsync.launchers import FROM_MPI, GRADSYNC, RankEnvironment, WorldSettings
from gradsync.machine import run_with_timeout
from gradsync.reduction import Array, ReduceOp, accumulation_dtype, divide_into
from gradsync.rendezvous.client import RendezvousClient

# Arrays of a list up to this size are copied into rooms, many in one; larger ones go alone, without a copy.
_SMALL_BYTES = 256 * 1024
_ROOM_BYTES = 4 * 1024 * 1024
_ALL_BITS = 2**64 - 1


def check(place: RankEnvironment) -> None:
    """See BackendModule in backend_choice.py. It initialises MPI.

    Raises:
        BackendUnavailable: MPI cannot connect the ranks of the run.
    """
    if place.source == GRADSYNC:  # gradsync's launcher removes mpiexec's environment variables for its ranks
        raise BackendUnavailable(
            "backend 'mpi' needs ranks that mpiexec or srun has started, but gradsync has started these ranks. Start "
            f"the script with `mpiexec -n {place.world_size} python script.py`"
        )
    mpi = load_mpi()
    if place.source != FROM_MPI:
        check_place(mpi, place.rank, place.world_size)


def offer(settings: WorldSettings) -> str:
    """See BackendModule. Raises the errors of `check`."""
    check(settings.place)
    return ""


def connect(client: RendezvousClient, settings: WorldSettings, group: str) -> MpiBackend:
    """See BackendModule. If this raises, the caller must tell the other ranks, which wait for this one.

    Raises:
        BackendUnavailable: mpi4py is missing, or mpiexec or srun has not started exactly these ranks.
        MpiError: MPI failed.
        RendezvousTimeout, CollectiveTimeout, RankFailed: a rank did not call it in time, or died.
        RendezvousError: the connection to the rendezvous server was lost.
    """
    mpi = load_mpi()
    if settings.mpi_comm is not None:
        comm = duplicate(settings.mpi_comm, client.label, time.monotonic() + settings.timeout_seconds)
    else:
        check_place(mpi, client.rank, client.world_size)
        comm = _create_comm(mpi, mpi.COMM_WORLD, client.world_ranks, client, group, settings.timeout_seconds)
    return MpiBackend(mpi, comm, client, group, settings.collective_timeout_seconds)


def _create_comm(
    mpi: Any, parent: Any, members: Sequence[int], client: RendezvousClient, name: str, timeout_seconds: float
) -> Any:
    """Creates an MPI communicator of these ranks of the parent, in this order. `client` is that of the new group.

    MPI_Comm_create_group waits for all of them, without a deadline. So they first meet at the rendezvous server.
    """
    deadline = time.monotonic() + timeout_seconds
    client.barrier(f"mpi/{name}/ready", timeout_seconds=timeout_seconds)
    group = parent.Get_group().Incl(list(members))
    tag = zlib.crc32(name.encode()) % 32768  # every MPI has tags up to 32767
    try:
        seconds = max(0.0, deadline - time.monotonic())
        comm = run_with_timeout(lambda: parent.Create_group(group, tag), "gradsync-mpi-join", seconds, client.check)
    except mpi.Exception as error:
        raise to_mpi_error(error, client.label) from error
    except BaseException as error:
        keep_for_ever(group)  # neither a deadline nor Ctrl-C ends MPI's call
        if not isinstance(error, TimeoutError):
            raise
        raise CollectiveTimeout(
            f"{client.label}: MPI_Comm_create_group did not return before the timeout of {timeout_seconds:.3g} s, "
            "although all ranks have called this function"
        ) from error
    group.Free()
    return comm


class MpiBackend(Backend):
    """The backend over one MPI communicator.

    Args:
        mpi: the module mpi4py.MPI.
        comm: an MPI communicator of any ranks in any order, which only this backend uses; `release` frees it.
        client: the rendezvous client of the same ranks, in the same order.
        group: the communicator's name, unique since the last init_process_group().
        timeout_seconds: how long a collective waits for a rank.
    """

    name = "mpi"

    client: RendezvousClient

    def __init__(self, mpi: Any, comm: Any, client: RendezvousClient, group: str, timeout_seconds: float) -> None:
        super().__init__(client, group, timeout_seconds)
        comm.Set_errhandler(mpi.ERRORS_RETURN)  # mpi4py then raises them
        self._mpi = mpi
        self._comm = comm
        self._requests = Requests(mpi, comm, client, self.recorder, timeout_seconds)
        if not _open:
            before_finalize(_end_all)
        _open.add(self)

    # -- Reductions --------------------------------------------------------------------------------------------

    def all_reduce(
        self,
        sources: Sequence[Array],
        targets: Sequence[Array],
        op: ReduceOp,
        agreement: Agreement,
        factor: float = 1.0,
    ) -> None:
        """See Backend."""
        end_phase, dtype = trace.phases_of(self.recorder), sources[0].dtype
        with self._requests.using(sources, targets), np.errstate(all="ignore"):
            self._agree(agreement)
            end_phase("waiting")
            sizes = tuple([source.size for source in sources])
            self._requests.run(
                self._all_reduce([(sources[array][part], targets[array][part]) for array, part in batch], op, factor)
                for batch in _batches(sizes, _wide(op, dtype).itemsize, _is_converted(op, dtype))
            )
            end_phase("reducing")

    def _all_reduce(self, pairs: Sequence[tuple[Array, Array]], op: ReduceOp, factor: float) -> Job:
        [(source, target), *others] = pairs
        is_packed = bool(others) or _is_converted(op, source.dtype)
        if is_packed:
            source = target = self._packed([source for source, _ in pairs], op, factor)
        elif factor != 1.0:
            np.multiply(source, factor, out=source)
        sent = self._mpi.IN_PLACE if _is_same(source, target) else _sent_as(source, op)
        yield [self._comm.Iallreduce(sent, _sent_as(target, op), self._op(op))]
        self._finish_reduction(target, op)
        if is_packed:
            _split(target, [target for _, target in pairs])

    def reduce_scatter(self, source: Array, target: Array, bounds: Bounds, op: ReduceOp, agreement: Agreement) -> None:
        """See Backend."""
        step = max(1, _ROOM_BYTES // _wide(op, source.dtype).itemsize // self.world_size)
        with self._requests.using(source, target), np.errstate(all="ignore"):
            self._agree(agreement)
            self._requests.run(
                self._reduce_scatter(
                    [source[min(low + begin, high) : min(low + begin + step, high)] for low, high in pairwise(bounds)],
                    target[begin : begin + step],
                    op,
                )
                for begin in range(0, largest_part(bounds), step)
            )

    def _reduce_scatter(self, parts: Sequence[Array], target: Array, op: ReduceOp) -> Job:
        """Reduces a part for each rank. They are copied, as MPI wants them side by side, and apart from the target."""
        sizes, own = [part.size for part in parts], target.size
        total = sum(sizes)
        room = self._packed(parts, op, more=own + 1)  # MPI must not get one address twice, also where it writes nothing
        result = room[total:]
        # Not in place: MPICH 5.0 then copies between parts that overlap, and ends the process.
        sent, received = _sent_as(room[:total], op), [_sent_as(result, op), own]
        yield [self._comm.Ireduce_scatter(sent, received, sizes, self._op(op))]
        self._finish_reduction(result[:own], op)
        _split(result, [target])

    def _packed(self, sources: Sequence[Array], op: ReduceOp, factor: float = 1.0, more: int = 0) -> Array:
        """Copies arrays into a room, as MPI reduces them; the room has some more elements at its end."""
        size = sum([source.size for source in sources])
        room = self._requests.room(size + more, _wide(op, sources[0].dtype))
        packed = np.concatenate(sources, out=room[:size], casting="same_kind")
        if factor != 1.0:
            np.multiply(packed, factor, out=packed)
        if _is_ordered(op, packed.dtype):
            nans, keys = np.isnan(packed), _sent_as(packed, op)
            _swap_order(keys)
            limits = np.iinfo(keys.dtype)
            keys[nans] = limits.min if op is ReduceOp.MIN else limits.max  # a rank's NaN wins, as in NumPy
        return room

    def _op(self, op: ReduceOp) -> Any:
        return getattr(self._mpi, "SUM" if op is ReduceOp.MEAN else op.name)

    def _finish_reduction(self, values: Array, op: ReduceOp) -> None:
        """Makes the result of what MPI has reduced."""
        if _is_ordered(op, values.dtype):
            _swap_order(_sent_as(values, op))
        elif op is ReduceOp.MEAN:
            divide_into(values, self.world_size, values)

    # -- Movements ---------------------------------------------------------------------------------------------

    def broadcast(self, flats: Sequence[Array], root: int, agreement: Agreement) -> None:
        """See Backend."""
        with self._requests.using(flats):
            self._agree(agreement)
            self._requests.run(
                self._broadcast([flats[array][part] for array, part in batch], root)
                for batch in _batches(tuple([flat.size for flat in flats]), 1)
            )

    def _broadcast(self, flats: Sequence[Array], root: int) -> Job:
        room = flats[0]
        if len(flats) > 1:
            room = self._requests.room(sum([flat.size for flat in flats]), room.dtype)
            if self.rank == root:
                np.concatenate(flats, out=room)
        yield [self._comm.Ibcast([room, self._mpi.BYTE], root)]
        if len(flats) > 1 and self.rank != root:
            _split(room, flats)

    # The ranks send the parts to each other: MPI's own calls count in 32 bits, and MPI_Iallgatherv of Intel MPI 2021.18
    # never ends if one rank has 10 MB and the others nothing.

    def all_gather(self, source: Array, target: Array, bounds: Bounds, agreement: Agreement) -> None:
        """See Backend."""
        own, peers = target[part_of(bounds, self.rank)], self._requests.peers
        with self._requests.using(source, target):
            self._agree(agreement)
            if not _is_same(source, own):
                np.copyto(own, source)
            self._move([(peer, own) for peer in peers], _parts(target, bounds, peers))

    def all_to_all(
        self,
        source: Array,
        target: Array,
        send_bounds: Bounds,
        receive_bounds: Bounds,
        largest: int,
        agreement: Agreement,
    ) -> None:
        """See Backend."""
        peers = self._requests.peers
        with self._requests.using(source, target):
            self._agree(agreement)
            np.copyto(target[part_of(receive_bounds, self.rank)], source[part_of(send_bounds, self.rank)])
            self._move(_parts(source, send_bounds, peers), _parts(target, receive_bounds, peers))

    def _move(self, sends: Parts, receives: Parts) -> None:
        self._requests.finish(self._requests.post(sends, receives))

    def barrier(self, agreement: Agreement) -> None:
        """See Backend."""
        with self._requests.using():
            self._agree(agreement)

    def _agree(self, agreement: Agreement) -> None:
        """Checks that all ranks make the same call: the largest of all digests is the smallest, too."""
        requests = self._requests
        requests.begun += 1
        if self.world_size == 1:
            return
        digest, layout = agreement.digest, agreement.layout
        requests.call[:] = digest, digest ^ _ALL_BITS, layout, layout ^ _ALL_BITS
        requests.finish([self._comm.Iallreduce(requests.call, requests.of_all, self._mpi.MAX)])
        largest, smallest, largest_layout, smallest_layout = requests.of_all.tolist()
        if largest != smallest ^ _ALL_BITS:
            raise exchange_mismatch(self.client, self.recorder.group, requests.begun, self.label, agreement, self.ranks)
        if largest_layout != smallest_layout ^ _ALL_BITS:
            raise LayoutsDiffer

    # -- Messages ----------------------------------------------------------------------------------------------

    def exchange(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        awaited: Collection[Message] = (),
        seconds: float | None = None,
    ) -> None:
        """See Backend."""
        with self._requests.using():
            for message in sends:
                self._requests.start(message, is_sending=True)
            for message in receives:
                self._requests.start(message, is_sending=False)
            self._requests.await_messages(awaited, seconds)

    # -- Groups and the end ------------------------------------------------------------------------------------

    def connect_group(self, members: tuple[int, ...], name: str) -> MpiBackend:
        """See Backend."""
        client = self.client.group(members, name)
        try:
            comm = _create_comm(self._mpi, self._comm, members, client, name, self.timeout_seconds)
            return MpiBackend(self._mpi, comm, client, name, self.timeout_seconds)
        except BaseException:
            client.close()
            raise

    def raise_if_ended(self, missing: list[int]) -> None:
        """See Backend."""
        ranks = [self.ranks[rank] for rank in missing]
        raise_if_left(self.client, self._requests.departures, self.label, math.inf, ranks)

    def announce(self, aborted_because: str | None = None, culprit: int | None = None) -> None:
        """See Backend. The server tells all ranks of the run of an abort: nothing else ends a wait in MPI."""
        requests = self._requests
        if aborted_because is None:
            requests.is_closed = True
            self.client.announce_left(requests.departures, requests.ended)
        elif self.world_size > 1 and not requests.failures.was_raised and requests.failures.failure() is None:

            def report() -> None:
                with suppress(GradsyncError):  # without the report, the server still finds that this rank has gone
                    self.client.report_failure(aborted_because, culprit=culprit)

            threading.Thread(target=report, name="gradsync-mpi-abort").start()  # the process's exit waits for it

    def release(self) -> None:
        """See Backend."""
        _open.discard(self)
        self._requests.release()
        del self._requests  # frees its rooms


_open: weakref.WeakSet[MpiBackend] = weakref.WeakSet()


def _end_all() -> None:
    """Ends all communicators before MPI is finalised: then any call of it would end the process."""
    for backend in list(_open):
        backend.announce()
        backend.fail(CommunicatorClosed("MPI was finalised"), is_known=True)


@lru_cache(maxsize=256)
def _wide(op: ReduceOp, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype in which MPI reduces. Sums of short integers saturate in Open MPI; elsewhere they wrap."""
    if dtype.kind in "iu" and dtype.itemsize < 4 and op in (ReduceOp.SUM, ReduceOp.PROD):
        return np.dtype(f"{dtype.kind}4")
    return accumulation_dtype(dtype)


def _is_converted(op: ReduceOp, dtype: np.dtype[Any]) -> bool:
    """Whether MPI reduces other values than those of the arrays."""
    return _wide(op, dtype) != dtype or _is_ordered(op, dtype)


def _is_ordered(op: ReduceOp, dtype: np.dtype[Any]) -> bool:
    """Whether floats are compared, as integers: MPI does not say what its minimum and maximum of NaN are."""
    return dtype.kind == "f" and op in (ReduceOp.MIN, ReduceOp.MAX)


def _sent_as(values: Array, op: ReduceOp) -> Array:
    """Returns the values in the dtype in which MPI reduces them: it has no minimum of bools."""
    if values.dtype.kind == "b":
        return values.view(np.uint8)
    return values.view(f"i{values.itemsize}") if _is_ordered(op, values.dtype) else values


def _swap_order(keys: Array) -> None:
    """Turns the bits of floats into integers in the order of the floats, or back: negative floats grow downwards."""
    limits = np.iinfo(keys.dtype)
    keys ^= (keys >> (limits.bits - 1)) & limits.max


def _split(room: Array, targets: Sequence[Array]) -> None:
    """Copies a room to its targets, one after the other."""
    begin = 0
    for target in targets:
        np.copyto(target, room[begin : begin + target.size], casting="same_kind")
        begin += target.size


@lru_cache(maxsize=256)
def _batches(sizes: tuple[int, ...], itemsize: int, is_converted: bool = False) -> list[list[tuple[int, slice]]]:
    """Divides a list of arrays into what goes together: many small ones, or all that MPI can take of a large one.

    Args:
        sizes: the arrays' numbers of elements.
        itemsize: the size of an element that MPI gets.
        is_converted: whether also large arrays go through rooms.

    Returns:
        For each batch, the indices of its arrays and their parts.
    """
    room = _ROOM_BYTES // itemsize
    small, largest = (room, room) if is_converted else (_SMALL_BYTES // itemsize, LARGEST_BYTES // itemsize)
    batches: list[list[tuple[int, slice]]] = []
    batch: list[tuple[int, slice]] = []
    free = room
    for array, size in enumerate(sizes):
        if size > small:
            batches += [[(array, slice(low, low + largest))] for low in range(0, size, largest)]
        elif size:
            if size > free:
                batches.append(batch)
                batch, free = [], room
            batch.append((array, slice(size)))
            free -= size
    return [*batches, batch] if batch else batches


def _parts(array: Array, bounds: Bounds, ranks: Sequence[int]) -> list[tuple[int, Array]]:
    return [(rank, array[part_of(bounds, rank)]) for rank in ranks]


def _is_same(one: Array, other: Array) -> bool:
    """Whether two arrays of one size are the same memory."""
    return bool(one.__array_interface__["data"][0] == other.__array_interface__["data"][0])
