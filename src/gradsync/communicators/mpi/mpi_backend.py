"""The backend of CPU clusters: NumPy arrays over MPI.

MPI moves the bytes. The rendezvous tells who has died, or will not come, which MPI does not.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.backend import Backend, Bounds, Message
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.host_copy import pack_words, split_words, word_dtype
from gradsync.communicators.host_path import OwnPath
from gradsync.communicators.mpi.agreements import MpiAgreements
from gradsync.communicators.mpi.joining import make_communicator
from gradsync.communicators.mpi.library import check_place, load_mpi, to_mpi_error
from gradsync.communicators.mpi.messages import MpiMessages
from gradsync.communicators.mpi.reduction import MpiReduction
from gradsync.communicators.mpi.transport import MpiTransport
from gradsync.communicators.mpi.waiting import MpiWaiting
from gradsync.communicators.pieces import cuts, pieces_between
from gradsync.communicators.verdicts import Verdicts, raise_if_left
from gradsync.diagnostics import tracing
from gradsync.errors import GradsyncError
from gradsync.futures import Completion
from gradsync.reduction import Array, ReduceOp
from gradsync.rendezvous.client import RendezvousClient

# Up to here arrays of a list are packed together; larger ones travel by themselves: packing would cost more.
_SMALL_BYTES = 256 * 1024
_BROADCAST_BYTES = 4 * 1024 * 1024  # how much of a packed list is broadcast at a time


def connect_mpi(
    client: RendezvousClient,
    *,
    group: str = "world",
    timeout_seconds: float = 120.0,
    collective_timeout_seconds: float = 300.0,
) -> Communicator:
    """Builds the communicator of all ranks of a rendezvous. Every rank must call it with the same group.

    Whoever calls it reports a failure to the other ranks, which would wait for this one otherwise.

    Args:
        client: this rank's connection, joined.
        group: a name not used before in this generation.
        timeout_seconds: for meeting the others.
        collective_timeout_seconds: how long a collective waits for a rank.

    Raises:
        BackendUnavailable: no mpi4py, or these are not the ranks that mpiexec or srun has started.
        MpiError: MPI failed.
        RendezvousTimeout, CollectiveTimeout, RankFailed: a rank did not come, or died.
    """
    mpi = load_mpi()
    check_place(mpi, client.rank, client.world_size)
    comm = make_communicator(mpi, client, group, timeout_seconds)
    return Communicator(MpiBackend(mpi, comm, client, group, collective_timeout_seconds))


class MpiBackend(Backend):
    """Ranks that mpiexec or srun has started.

    Args:
        mpi: the module mpi4py.MPI.
        comm: a communicator of MPI of exactly these ranks in this order; taken over.
        client: this rank's connection to the rendezvous server.
        group: the communicator's name, not used before in this generation.
        timeout_seconds: how long a collective waits for a rank.
    """

    name = "mpi"

    client: RendezvousClient

    def __init__(self, mpi: Any, comm: Any, client: RendezvousClient, group: str, timeout_seconds: float) -> None:
        super().__init__(client, group, timeout_seconds)
        self._mpi = mpi
        self._comm = comm
        self._verdicts = Verdicts(client, self.recorder)
        self._departures = f"mpi/{group}/closed"
        self._raise_if_left = partial(raise_if_left, client, self._departures, self.label)
        self._waiting = MpiWaiting(mpi, self.ranks, timeout_seconds, self._verdicts, self._raise_if_left)
        self._errors = _MpiErrors(mpi, self.label, self._waiting)
        self._transport = MpiTransport(mpi, comm, self._waiting)
        self._messages = MpiMessages(self._transport, self.ranks, self.label, self.agree)
        self._agreements = MpiAgreements(self._transport, self.ranks, self.label, self._messages.bar_waiting_peers)
        self._reduction = MpiReduction(self._transport)
        self._flat = np.empty(0, np.uint8)  # where lists are packed

    # -- Reductions --------------------------------------------------------------------------------------------

    def all_reduce(
        self, sources: Sequence[Array], targets: Sequence[Array], op: ReduceOp, agreement: Agreement
    ) -> None:
        laps = tracing.laps_of(self.recorder)
        self.agree(agreement)
        if laps is not None:
            laps.end("waiting")
        with np.errstate(all="ignore"):
            pairs = list(zip(sources, targets, strict=True))
            small = [pair for pair in pairs if pair[0].nbytes <= _SMALL_BYTES]
            if len(small) > 1:
                large = [pair for pair in pairs if pair[0].nbytes > _SMALL_BYTES]
                self._all_reduce_packed(small, large, op, laps)
            else:
                self._reduction.all_reduce(pairs, op)
                if laps is not None:
                    laps.end("reducing")

    def _all_reduce_packed(
        self,
        small: Sequence[tuple[Array, Array]],
        large: Sequence[tuple[Array, Array]],
        op: ReduceOp,
        laps: tracing.Laps | None,
    ) -> None:
        dtype = small[0][0].dtype
        words = word_dtype(dtype)
        flat = self._room(sum([source.nbytes for source, _ in small])).view(dtype)
        pack_words([source.view(words) for source, _ in small], flat.view(words))
        if laps is not None:
            laps.end("packing")
        self._reduction.all_reduce([(flat, flat), *large], op)
        if laps is not None:
            laps.end("reducing")
        split_words(flat.view(words), [target.view(words) for _, target in small])
        if laps is not None:
            laps.end("splitting")

    def reduce(self, source: Array, target: Array | None, op: ReduceOp, root: int, agreement: Agreement) -> None:
        self.agree(agreement)
        with np.errstate(all="ignore"):
            self._reduction.reduce(source, target, op, root)

    def reduce_scatter(self, source: Array, target: Array, bounds: Bounds, op: ReduceOp, agreement: Agreement) -> None:
        self.agree(agreement)
        with np.errstate(all="ignore"):
            self._reduction.reduce_scatter(source, target, bounds, op)

    # -- Movements ---------------------------------------------------------------------------------------------

    def broadcast(self, flats: Sequence[Array], root: int, agreement: Agreement) -> None:
        self.agree(agreement)
        small = [flat for flat in flats if flat.size <= _SMALL_BYTES]
        alone = flats
        if len(small) > 1:
            self._broadcast_packed(small, root)
            alone = [flat for flat in flats if flat.size > _SMALL_BYTES]
        for flat in alone:
            self._transport.broadcast(flat, root)

    def _broadcast_packed(self, flats: Sequence[Array], root: int) -> None:
        sizes = tuple([flat.size for flat in flats])
        for begin, end in cuts(sum(sizes), _BROADCAST_BYTES):
            room = self._room(end - begin)
            pieces = [flats[array][low:high] for array, low, high in pieces_between(sizes, begin, end)]
            if self.rank == root:
                pack_words(pieces, room)
            self._transport.broadcast(room, root)
            if self.rank != root:
                split_words(room, pieces)

    def all_gather(self, source: Array, target: Array, bounds: Bounds, agreement: Agreement) -> None:
        self.agree(agreement)
        self._transport.all_gather(source, target, bounds)

    def gather(self, source: Array, target: Array | None, bounds: Bounds, root: int, agreement: Agreement) -> None:
        self.agree(agreement)
        self._transport.gather(source, target, bounds, root)

    def scatter(self, source: Array | None, target: Array, bounds: Bounds, root: int, agreement: Agreement) -> None:
        self.agree(agreement)
        self._transport.scatter(source, target, bounds, root)

    def all_to_all(
        self,
        source: Array,
        target: Array,
        send_bounds: Bounds,
        receive_bounds: Bounds,
        largest: int,
        agreement: Agreement,
    ) -> None:
        self.agree(agreement)
        self._transport.all_to_all(source, target, send_bounds, receive_bounds)

    def exchange(self, send: Message | None, receive: Message | None) -> None:
        self._messages.move(send, receive)

    def share_numbers(self, numbers: Sequence[int], agreement: Agreement) -> list[list[int]]:
        self.agree(agreement)
        rows: list[list[int]] = self._transport.all_gather_numbers(np.array(numbers, np.int64)).tolist()
        return rows

    def agree(self, agreement: Agreement) -> None:
        with self._errors:  # bucketing agrees outside of a launch
            self._agreements.agree(agreement)

    def launching(
        self, stream: Any, producers: Sequence[Any] | None = None
    ) -> AbstractContextManager[Completion | None]:
        return self._errors

    def _room(self, size: int) -> Array:
        """Returns memory of so many bytes, which stays from call to call."""
        if self._flat.size < size:
            self._flat = np.empty(size, np.uint8)
        return self._flat[:size]

    # -- Groups ------------------------------------------------------------------------------------------------

    def connect_group(self, members: tuple[int, ...], name: str) -> Communicator:
        client = self.client.group(members, name)
        seconds = self.timeout_seconds
        try:
            comm = make_communicator(self._mpi, client, name, seconds)
            return Communicator(MpiBackend(self._mpi, comm, client, name, seconds))
        except BaseException:
            client.close()
            raise

    def look_for_ended(self, missing: list[int]) -> None:
        self._raise_if_left(float("inf"), [self.ranks[rank] for rank in missing])

    def make_host_path(self) -> OwnPath:
        return OwnPath(self)

    # -- Ending ------------------------------------------------------------------------------------------------

    def announce_close(self) -> None:
        self.client.announce_left(self._departures, self._waiting.begun)

    def announce_abort(self, reason: str, culprit: int | None) -> None:
        """Tells the server, which tells all ranks; of MPI's waits nothing else ends them."""
        if self.world_size == 1 or self._verdicts.was_heard or self._verdicts.known() is not None:
            return

        def tell() -> None:
            with suppress(GradsyncError):  # the others find out by themselves that this rank is gone
                self.client.report_failure(reason, culprit=culprit)

        threading.Thread(target=tell, name="gradsync-mpi-abort").start()  # the process waits for it at its end

    def release(self) -> None:
        if not self._waiting.was_cut_off and not self._mpi.Is_finalized():
            self._comm.Free()
        self._flat = np.empty(0, np.uint8)
        del self._reduction, self._messages, self._agreements  # and the memory that they keep


class _MpiErrors(AbstractContextManager[None]):
    """Raises what MPI reports as MpiError, or as what the server knows to be its cause: a rank that has died."""

    def __init__(self, mpi: Any, label: str, waiting: MpiWaiting) -> None:
        self._exception = mpi.Exception
        self._label = label
        self._waiting = waiting

    def __enter__(self) -> None:
        pass  # a launch of which there is nothing to wait for

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            return
        if not issubclass(kind, GradsyncError):  # Ctrl-C, or no memory: it may have come beside a wait
            self._waiting.cut_off((), trace)  # whose frames have what MPI still reads and writes
        if issubclass(kind, self._exception):
            self._waiting.await_cause()
            raise to_mpi_error(error, self._label) from error
