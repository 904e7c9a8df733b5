"""The communicator of CPU clusters: NumPy arrays over MPI.

MPI moves the bytes. The rendezvous tells who has died, or will not come, which MPI does not.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Any

import numpy as np

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.backend import Bounds, Message
from gradsync.communicators.base import Communicator
from gradsync.communicators.closing_notices import ClosingNotices
from gradsync.communicators.host_path import OwnPath
from gradsync.communicators.mpi.agreements import MpiAgreements
from gradsync.communicators.mpi.joining import make_communicator
from gradsync.communicators.mpi.library import to_mpi_error
from gradsync.communicators.mpi.messages import MpiMessages
from gradsync.communicators.mpi.reduction import MpiReduction
from gradsync.communicators.mpi.transport import MpiTransport
from gradsync.communicators.mpi.waiting import MpiWaiting
from gradsync.communicators.shared_memory.host_copy import pack_words, split_words, word_dtype
from gradsync.communicators.shared_memory.stream_plan import pieces_between
from gradsync.communicators.verdicts import Verdicts
from gradsync.completion import Completion
from gradsync.errors import GradsyncError
from gradsync.reduction import Array, ReduceOp
from gradsync.rendezvous.group_client import CommunicatorClient, GroupClient

# Up to here arrays of a list are packed together; larger ones travel by themselves.
_PACKED_BYTES = 256 * 1024
_PACK_BYTES = 4 * 1024 * 1024  # how much is packed at a time


class MpiCommunicator(Communicator):
    """Ranks that mpiexec or srun has started.

    Args:
        mpi: the module mpi4py.MPI.
        comm: a communicator of MPI of exactly these ranks in this order; taken over.
        client: this rank's connection to the rendezvous server.
        group: the communicator's name, not used before in this generation.
        timeout_seconds: how long a collective waits for a rank.
    """

    backend = "mpi"

    _client: CommunicatorClient

    def __init__(self, mpi: Any, comm: Any, client: CommunicatorClient, group: str, timeout_seconds: float) -> None:
        super().__init__(client.rank, client.world_size, group, ranks=client.world_ranks, label=client.label)
        self._client = client
        self._mpi = mpi
        self._comm = comm
        self._timeout_seconds = timeout_seconds
        self._verdicts = Verdicts(client, self.recorder)
        self._closings = ClosingNotices(client, f"mpi/{group}/closed", self.label)
        self._waiting = MpiWaiting(mpi, self.ranks, timeout_seconds, self._verdicts, self._closings)
        self._errors = _MpiErrors(mpi, self.label, self._waiting)
        self._transport = MpiTransport(mpi, comm, self._waiting)
        self._messages = MpiMessages(self._transport, self.ranks, self.label, self._agree)
        self._agreements = MpiAgreements(self._transport, self.ranks, self.label, self._messages.bar_waiting_peers)
        self._reduction = MpiReduction(self._transport)
        self._flat = np.empty(0, np.uint8)  # where lists are packed

    # -- Reductions --------------------------------------------------------------------------------------------

    def _all_reduce_list(
        self, sources: Sequence[Array], targets: Sequence[Array], op: ReduceOp, agreement: Agreement
    ) -> None:
        self._agree(agreement)
        with np.errstate(all="ignore"):
            small = [pair for pair in zip(sources, targets, strict=True) if pair[0].nbytes <= _PACKED_BYTES]
            if len(small) <= 1:
                self._reduction.all_reduce(list(zip(sources, targets, strict=True)), op)
                return
            large = [pair for pair in zip(sources, targets, strict=True) if pair[0].nbytes > _PACKED_BYTES]
            dtype = sources[0].dtype
            words = word_dtype(dtype)
            flat = self._room(sum([source.nbytes for source, _ in small])).view(dtype)
            pack_words([source.view(words) for source, _ in small], flat.view(words))
            self._reduction.all_reduce([(flat, flat), *large], op)
            split_words(flat.view(words), [target.view(words) for _, target in small])

    def _reduce(self, source: Array, target: Array | None, op: ReduceOp, root: int, agreement: Agreement) -> None:
        self._agree(agreement)
        with np.errstate(all="ignore"):
            self._reduction.reduce(source, target, op, root)

    def _reduce_scatter(self, source: Array, target: Array, bounds: Bounds, op: ReduceOp, agreement: Agreement) -> None:
        self._agree(agreement)
        with np.errstate(all="ignore"):
            self._reduction.reduce_scatter(source, target, bounds, op)

    # -- Movements ---------------------------------------------------------------------------------------------

    def _broadcast_list(self, flats: Sequence[Array], root: int, agreement: Agreement) -> None:
        self._agree(agreement)
        small = [flat for flat in flats if flat.size <= _PACKED_BYTES]
        if len(small) > 1:
            self._broadcast_packed(small, root)
        for flat in flats if len(small) <= 1 else [flat for flat in flats if flat.size > _PACKED_BYTES]:
            self._transport.broadcast(flat, root)

    def _broadcast_packed(self, flats: Sequence[Array], root: int) -> None:
        sizes = tuple([flat.size for flat in flats])
        total = sum(sizes)
        for begin in range(0, total, _PACK_BYTES):
            end = min(begin + _PACK_BYTES, total)
            room = self._room(end - begin)
            pieces = [flats[array][low:high] for array, low, high in pieces_between(sizes, begin, end)]
            if self.rank == root:
                pack_words(pieces, room)
            self._transport.broadcast(room, root)
            if self.rank != root:
                split_words(room, pieces)

    def _all_gather(self, source: Array, target: Array, bounds: Bounds, agreement: Agreement) -> None:
        self._agree(agreement)
        self._transport.all_gather(source, target, bounds)

    def _gather(self, source: Array, target: Array | None, bounds: Bounds, root: int, agreement: Agreement) -> None:
        self._agree(agreement)
        self._transport.gather(source, target, bounds, root)

    def _scatter(self, source: Array | None, target: Array, bounds: Bounds, root: int, agreement: Agreement) -> None:
        self._agree(agreement)
        self._transport.scatter(source, target, bounds, root)

    def _all_to_all(
        self,
        source: Array,
        target: Array,
        send_bounds: Bounds,
        receive_bounds: Bounds,
        largest: int,
        agreement: Agreement,
    ) -> None:
        self._agree(agreement)
        self._transport.all_to_all(source, target, send_bounds, receive_bounds)

    def _exchange(self, send: Message | None, receive: Message | None) -> None:
        self._messages.move(send, receive)

    def _share_numbers(self, numbers: Sequence[int], agreement: Agreement) -> list[list[int]]:
        self._agree(agreement)
        rows: list[list[int]] = self._transport.all_gather_numbers(np.array(numbers, np.int64)).tolist()
        return rows

    def _agree(self, agreement: Agreement) -> None:
        with self._errors:
            self._agreements.agree(agreement)

    def _launching(
        self, stream: Any, producers: Sequence[Any] | None = None
    ) -> AbstractContextManager[Completion | None]:
        return self._errors

    def _room(self, size: int) -> Array:
        """Returns memory of so many bytes, which stays from call to call."""
        if self._flat.size < size:
            self._flat = np.empty(size, np.uint8)
        return self._flat[:size]

    # -- Groups ------------------------------------------------------------------------------------------------

    def _connect_group(self, members: tuple[int, ...], name: str) -> MpiCommunicator:
        client = GroupClient(self._client, members, name)
        seconds = self._timeout_seconds
        try:
            comm = make_communicator(self._mpi, client, name, seconds)
            return MpiCommunicator(self._mpi, comm, client, name, seconds)
        except BaseException:
            client.close()
            raise

    def _look_for_ended(self, missing: list[int]) -> None:
        self._closings.look(float("inf"), [self.ranks[rank] for rank in missing])

    def _make_host_path(self) -> OwnPath:
        return OwnPath(self)

    # -- Ending ------------------------------------------------------------------------------------------------

    def _announce_close(self) -> None:
        self._closings.announce(self._waiting.begun)

    def _announce_abort(self, reason: str, culprit: int | None) -> None:
        """Tells the server, which tells all ranks; of MPI's waits nothing else ends them."""
        if self.world_size == 1 or self._verdicts.was_heard or self._verdicts.known() is not None:
            return

        def tell() -> None:
            with suppress(GradsyncError):  # the others find out by themselves that this rank is gone
                self._client.report_failure(reason, culprit=culprit)

        threading.Thread(target=tell, name="gradsync-mpi-abort").start()  # the process waits for it at its end

    def _release(self) -> None:
        if not self._waiting.was_cut_off and not self._mpi.Is_finalized():
            self._comm.Free()
        self._flat = np.empty(0, np.uint8)
        del self._reduction, self._messages, self._agreements


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
