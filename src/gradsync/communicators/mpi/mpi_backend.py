"""The MPI backend, for CPU clusters: NumPy arrays over MPI.

MPI moves the bytes. The rendezvous server detects ranks that have died or do not join a collective, because MPI does
not detect such ranks.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from itertools import accumulate, pairwise
from types import TracebackType
from typing import Any, NoReturn

import numpy as np

from gradsync.communicators.agreement import Agreement, Description, message_mismatch, mismatch
from gradsync.communicators.backend import Backend, Bounds, Message, part_of
from gradsync.communicators.failures import FailureMonitor, raise_if_left
from gradsync.communicators.host_copy import copy_words, cuts, pack_words, pieces_between, split_words, word_dtype
from gradsync.communicators.mpi.mpi_agreement import MpiAgreement
from gradsync.communicators.mpi.mpi_job import check_place, keep_for_ever, load_mpi, to_mpi_error
from gradsync.communicators.mpi.mpi_reduction import MpiReduction
from gradsync.communicators.mpi.waiting import MpiRequests, pieces
from gradsync.diagnostics import tracing
from gradsync.environment import RankEnvironment, WorldSettings
from gradsync.errors import BackendUnavailable, CollectiveTimeout, GradsyncError
from gradsync.futures import Completion
from gradsync.machine import run_with_timeout
from gradsync.reduction import Array, ReduceOp
from gradsync.rendezvous.client import RendezvousClient

# Up to this size the arrays of a list are packed together; larger arrays are sent one by one, without a copy.
_SMALL_BYTES = 256 * 1024
_BROADCAST_BYTES = 4 * 1024 * 1024  # how much of a packed list is sent in one broadcast
_COUNT_LIMIT = 2**31  # MPI 3 needs fewer bytes in a collective with a part for each rank

# The size limits of the descriptions that ranks exchange after a disagreement: for a collective (all ranks together),
# and for a message (each rank).
_TEXTS_BYTES = 64 * 1024 * 1024
_TEXT_BYTES = 4096

# The MPI tags that the sender and the receiver of a message use; both are larger by 1 after an odd number of
# collectives.
_TAG_OF_SENDER, _TAG_OF_RECEIVER = 2, 4


def check(place: RankEnvironment) -> None:
    """See BackendModule. Initialises MPI; raises BackendUnavailable if MPI cannot connect the ranks of the run."""
    if place.source == "gradsync":  # gradsync's launcher removes mpiexec's environment variables for its ranks
        raise BackendUnavailable(
            "backend 'mpi' needs ranks that mpiexec or srun has started, but gradsync has started these ranks. Start "
            f"the script with `mpiexec -n {place.world_size} python script.py`"
        )
    check_place(load_mpi(), place.rank, place.world_size)


def offer(settings: WorldSettings) -> str:
    """See BackendModule. Raises the errors of `check`."""
    check(settings.place)
    return ""


def connect(client: RendezvousClient, settings: WorldSettings, group: str) -> MpiBackend:
    """See BackendModule.

    If this function raises an error, the caller must report it to the other ranks, because they wait for this rank.

    Raises:
        BackendUnavailable: mpi4py is missing, or mpiexec or srun has not started exactly these ranks.
        MpiError: MPI failed.
        RendezvousTimeout, CollectiveTimeout, RankFailed: a rank did not call this function in time, or died.
    """
    mpi = load_mpi()
    check_place(mpi, client.rank, client.world_size)
    comm = _create_comm(mpi, client, group, settings.timeout_seconds)
    return MpiBackend(mpi, comm, client, group, settings.collective_timeout_seconds)


def _create_comm(mpi: Any, client: RendezvousClient, name: str, timeout_seconds: float) -> Any:
    """Creates an MPI communicator of the client's ranks, in the client's order. Each of these ranks must call it.

    MPI_Comm_create_group waits for all ranks, and no deadline can end this wait. So the ranks first wait for each other
    at the rendezvous server, where a deadline can end the wait.

    Args:
        mpi: the module mpi4py.MPI.
        client: this rank's connection to the rendezvous server; the run has the same ranks as MPI_COMM_WORLD.
        name: the group's name, unique since the last init_process_group().
        timeout_seconds: the time limit for all steps.

    Raises:
        MpiError: MPI failed.
        RendezvousTimeout, CollectiveTimeout, RankFailed: a rank did not call this function in time, or died.
    """
    deadline = time.monotonic() + timeout_seconds
    client.barrier(f"mpi/{name}/ready", timeout_seconds=timeout_seconds)
    world = mpi.COMM_WORLD
    members = world.Get_group().Incl(list(client.world_ranks))
    tag = zlib.crc32(name.encode()) % 32768  # every MPI supports tags up to 32767

    inside = [members]  # emptied when MPI's call ends; neither a deadline nor Ctrl-C can end this call

    def create() -> Any:
        try:
            return world.Create_group(members, tag)
        except mpi.Exception as error:
            raise to_mpi_error(error, client.label) from error
        finally:
            inside.clear()
            members.Free()

    try:
        seconds = max(0.0, deadline - time.monotonic())
        return run_with_timeout(create, "gradsync-mpi-join", seconds, client.check)
    except TimeoutError as error:
        raise CollectiveTimeout(
            f"{client.label}: MPI_Comm_create_group did not return within {timeout_seconds:.3g} s, although all ranks "
            "have called it"
        ) from error
    finally:
        if inside:
            keep_for_ever(inside)


class MpiBackend(Backend):
    """The backend for ranks that mpiexec or srun has started.

    Args:
        mpi: the module mpi4py.MPI.
        comm: an MPI communicator of exactly the client's ranks, in the client's order; `release` frees the
            communicator.
        client: this rank's connection to the rendezvous server.
        group: the communicator's name, unique since the last init_process_group().
        timeout_seconds: how long a collective waits for a rank.
    """

    name = "mpi"

    client: RendezvousClient

    def __init__(self, mpi: Any, comm: Any, client: RendezvousClient, group: str, timeout_seconds: float) -> None:
        super().__init__(client, group, timeout_seconds)
        self._mpi = mpi
        self._comm = comm
        self._failures = FailureMonitor(client, self.recorder)
        self._departures = f"mpi/{group}/closed"
        self._raise_if_left = partial(raise_if_left, client, self._departures, self.label)
        self._requests = MpiRequests(mpi, comm, self.ranks, timeout_seconds, self._failures, self._raise_if_left)
        self._errors = _MpiErrors(mpi, self.label, self._requests)
        self._agreement = MpiAgreement(self._requests)
        self._reduction = MpiReduction(self._requests)
        self._flat = np.empty(0, np.uint8)  # the buffer for packed lists

    # -- Reductions --------------------------------------------------------------------------------------------

    def all_reduce(
        self, sources: Sequence[Array], targets: Sequence[Array], op: ReduceOp, agreement: Agreement
    ) -> None:
        laps = tracing.laps_of(self.recorder)
        pairs = list(zip(sources, targets, strict=True))
        small = [pair for pair in pairs if pair[0].nbytes <= _SMALL_BYTES]
        size_bytes = sum([source.nbytes for source, _ in small])
        with np.errstate(all="ignore"):
            if len(small) == len(pairs) and size_bytes <= self._agreement.payload_bytes:
                self._all_reduce_with_agreement(pairs, size_bytes, op, agreement, laps)
                return
            self._agree(agreement)
            if laps is not None:
                laps.end("waiting")
            if len(small) > 1:
                large = [pair for pair in pairs if pair[0].nbytes > _SMALL_BYTES]
                self._all_reduce_packed(small, large, op, laps)
                return
            self._reduction.reduce(pairs, op)
        if laps is not None:
            laps.end("reducing")

    def _all_reduce_with_agreement(
        self,
        pairs: Sequence[tuple[Array, Array]],
        size_bytes: int,
        op: ReduceOp,
        agreement: Agreement,
        laps: tracing.Laps | None,
    ) -> None:
        """Reduces arrays that are small enough to be sent in the same message as the digest of the call."""
        dtype = pairs[0][0].dtype
        words = word_dtype(dtype)
        packed = self._agreement.payload(size_bytes).view(words)
        pack_words([source.view(words) for source, _ in pairs], packed)
        if laps is not None:
            laps.end("packing")
        self._agree(agreement, size_bytes)
        if laps is not None:
            laps.end("waiting")
        flat = pairs[0][1] if len(pairs) == 1 else packed.view(dtype)
        self._reduction.reduce_in_order(op, list(self._agreement.payloads(size_bytes).view(dtype)), flat)
        if laps is not None:
            laps.end("reducing")
        if len(pairs) > 1:
            split_words(packed, [target.view(words) for _, target in pairs])
            if laps is not None:
                laps.end("splitting")

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
        self._reduction.reduce([(flat, flat), *large], op)
        if laps is not None:
            laps.end("reducing")
        split_words(flat.view(words), [target.view(words) for _, target in small])
        if laps is not None:
            laps.end("splitting")

    def reduce(self, source: Array, target: Array | None, op: ReduceOp, root: int, agreement: Agreement) -> None:
        self._agree(agreement)
        with np.errstate(all="ignore"):
            self._reduction.reduce([(source, target)], op, root)

    def reduce_scatter(self, source: Array, target: Array, bounds: Bounds, op: ReduceOp, agreement: Agreement) -> None:
        self._agree(agreement)
        with np.errstate(all="ignore"):
            self._reduction.reduce_scatter(source, target, bounds, op)

    # -- Movements ---------------------------------------------------------------------------------------------

    def broadcast(self, flats: Sequence[Array], root: int, agreement: Agreement) -> None:
        self._agree(agreement)
        small = [flat for flat in flats if flat.size <= _SMALL_BYTES]
        alone = flats
        if len(small) > 1:
            self._broadcast_packed(small, root)
            alone = [flat for flat in flats if flat.size > _SMALL_BYTES]
        for flat in alone:
            self._broadcast(flat, root)

    def _broadcast_packed(self, flats: Sequence[Array], root: int) -> None:
        sizes = tuple([flat.size for flat in flats])
        for begin, end in cuts(sum(sizes), _BROADCAST_BYTES):
            room = self._room(end - begin)
            parts = [flats[array][low:high] for array, low, high in pieces_between(sizes, begin, end)]
            if self.rank == root:
                pack_words(parts, room)
            self._broadcast(room, root)
            if self.rank != root:
                split_words(room, parts)

    def _broadcast(self, flat: Array, root: int) -> None:
        for piece in pieces(flat):
            self._requests.finish([self._comm.Ibcast([piece, self._mpi.BYTE], root)], piece)

    def all_gather(self, source: Array, target: Array, bounds: Bounds, agreement: Agreement) -> None:
        self._agree(agreement)
        self._all_gather(source, target, bounds)

    def _all_gather(self, source: Array, target: Array, bounds: Bounds) -> None:
        own = target[part_of(bounds, self.rank)]
        _copy(source, own)
        if self._goes_directly(bounds):
            peers = self._requests.peers
            self._requests.move([(peer, own) for peer in peers], _parts(target, bounds, peers))
        else:
            request = self._comm.Iallgatherv(self._mpi.IN_PLACE, self._layout(target, bounds))
            self._requests.finish([request], target)

    def gather(self, source: Array, target: Array | None, bounds: Bounds, root: int, agreement: Agreement) -> None:
        self._agree(agreement)
        if target is not None:
            _copy(source, target[part_of(bounds, root)])
        if self._goes_directly(bounds):
            if target is None:
                self._requests.move([(root, source)], [])
            else:
                self._requests.move([], _parts(target, bounds, self._requests.peers))
            return
        if target is None:
            request = self._comm.Igatherv([source, self._mpi.BYTE], None, root)
        else:
            request = self._comm.Igatherv(self._mpi.IN_PLACE, self._layout(target, bounds), root)
        self._requests.finish([request], (source, target))

    def scatter(self, source: Array | None, target: Array, bounds: Bounds, root: int, agreement: Agreement) -> None:
        self._agree(agreement)
        if source is not None:
            _copy(source[part_of(bounds, root)], target)
        if self._goes_directly(bounds):
            if source is None:
                self._requests.move([], [(root, target)])
            else:
                self._requests.move(_parts(source, bounds, self._requests.peers), [])
            return
        if source is None:
            request = self._comm.Iscatterv(None, [target, self._mpi.BYTE], root)
        else:
            request = self._comm.Iscatterv(self._layout(source, bounds), self._mpi.IN_PLACE, root)
        self._requests.finish([request], (source, target))

    def all_to_all(
        self,
        source: Array,
        target: Array,
        send_bounds: Bounds,
        receive_bounds: Bounds,
        largest: int,
        agreement: Agreement,
    ) -> None:
        self._agree(agreement)
        peers = self._requests.peers  # direct messages, because MPI's own algorithms send as many
        _copy(source[part_of(send_bounds, self.rank)], target[part_of(receive_bounds, self.rank)])
        self._requests.move(_parts(source, send_bounds, peers), _parts(target, receive_bounds, peers))

    def share_numbers(self, numbers: Sequence[int], agreement: Agreement) -> list[list[int]]:
        self._agree(agreement)
        return self._share_numbers(numbers)

    def _share_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        mine = np.array(numbers, np.int64)
        shared = np.empty((self.world_size, mine.size), np.int64)
        self._requests.finish([self._comm.Iallgather(mine, shared)], (mine, shared))
        rows: list[list[int]] = shared.tolist()
        return rows

    def _goes_directly(self, bounds: Bounds) -> bool:
        """Whether ranks send direct messages, because there are few ranks, or too many bytes for MPI's collectives."""
        return self._requests.is_direct or bounds[-1] >= _COUNT_LIMIT

    def _layout(self, array: Array, bounds: Bounds) -> list[Any]:
        """Returns an array with one part for each rank as MPI's calls take it: memory, sizes, offsets and datatype."""
        counts = [end - begin for begin, end in pairwise(bounds)]
        return [array, counts, list(bounds[:-1]), self._mpi.BYTE]

    def _room(self, size: int) -> Array:
        """Returns a buffer of `size` bytes. Later calls return the same memory again."""
        if self._flat.size < size:
            self._flat = np.empty(size, np.uint8)
        return self._flat[:size]

    def launching(
        self, stream: Any, producers: Sequence[Any] | None = None
    ) -> AbstractContextManager[Completion | None]:
        return self._errors

    # -- Agreement ---------------------------------------------------------------------------------------------

    def agree(self, agreement: Agreement) -> None:
        with self._errors:  # gradient bucketing calls this method outside of `launching`
            self._agree(agreement)

    def _agree(self, agreement: Agreement, payload_bytes: int = 0) -> None:
        """Checks that all ranks make the same call; see MpiAgreement."""
        self._requests.begun += 1
        if self.world_size == 1:
            return
        self._requests.check()
        if not self._agreement.is_reached(agreement.digest, payload_bytes, self._refuse_messages):
            self._raise_mismatch(agreement)

    def _raise_mismatch(self, agreement: Agreement) -> NoReturn:
        """Exchanges the descriptions of the ranks' calls, and raises the same error on every rank."""
        text = agreement.described().to_text(_TEXTS_BYTES // self.world_size).encode()
        sizes = [size for (size,) in self._share_numbers([len(text)])]
        bounds = [0, *accumulate(sizes)]
        texts = np.empty(bounds[-1], np.uint8)
        self._all_gather(np.frombuffer(text, np.uint8), texts, bounds)
        descriptions = [Description.from_text(texts[begin:end].tobytes().decode()) for begin, end in pairwise(bounds)]
        raise mismatch(self.label, agreement, dict(zip(self.ranks, descriptions, strict=True)))

    # -- Messages ----------------------------------------------------------------------------------------------

    def exchange(self, send: Message | None, receive: Message | None) -> None:
        if send is not None and receive is not None and send.peer == self.rank:
            copy_words(send.flat, receive.flat)
            return
        self._requests.check()
        transfers: list[_Transfer] = []
        if receive is not None:
            transfers.append(_Transfer(self._requests, receive, is_sending=False))
        if send is not None:
            transfers.append(_Transfer(self._requests, send, is_sending=True))

        def is_done() -> bool:  # both transfers advance, because the peer may do one after the other
            return not [transfer for transfer in transfers if not transfer.advance()]

        self._requests.wait(
            is_done,
            transfers,
            missing=lambda: [transfer.peer for transfer in transfers if transfer.pending],
            absent=lambda: [transfer.peer for transfer in transfers if not transfer.has_peer_answered],
        )
        for transfer in transfers:
            if transfer.is_refused:
                self._agree(transfer.agreement)  # joins the peer's collective, which raises PlanMismatch on all ranks
        for transfer in transfers:
            if transfer.texts is not None:
                both = zip((self.rank, transfer.peer), map(Description.from_text, transfer.texts), strict=True)
                raise message_mismatch(self.label, {self.ranks[rank]: description for rank, description in both})

    def _refuse_messages(self) -> None:
        """Refuses the messages to and from this rank that other ranks began before this collective.

        To refuse a message, this rank sends an empty answer to the rank that began the message. A message that began
        after this collective has a different tag, so this method does not refuse it.
        """
        digest = np.zeros(1, np.uint64)
        sender, receiver = _tags_after(self._requests.begun - 1)
        for tag, answer in ((sender, receiver), (receiver, sender)):
            while self._comm.Iprobe(self._mpi.ANY_SOURCE, tag, status := self._mpi.Status()):
                peer = status.Get_source()
                self._comm.Recv(digest, peer, tag)
                self._comm.Isend(digest[:0], peer, answer).Free()  # an empty message uses no memory after this call

    # -- Groups ------------------------------------------------------------------------------------------------

    def connect_group(self, members: tuple[int, ...], name: str) -> MpiBackend:
        client = self.client.group(members, name)
        seconds = self.timeout_seconds
        try:
            comm = _create_comm(self._mpi, client, name, seconds)
            return MpiBackend(self._mpi, comm, client, name, seconds)
        except BaseException:
            client.close()
            raise

    def raise_if_ended(self, missing: list[int]) -> None:
        self._raise_if_left(float("inf"), [self.ranks[rank] for rank in missing])

    # -- Ending ------------------------------------------------------------------------------------------------

    def announce_close(self) -> None:
        self.client.announce_left(self._departures, self._requests.begun)

    def announce_abort(self, reason: str, culprit: int | None) -> None:
        """Reports the abort to the server, which reports it to all ranks: nothing else ends their waits in MPI."""
        if self.world_size == 1 or self._failures.was_raised or self._failures.failure() is not None:
            return

        def report() -> None:
            with suppress(GradsyncError):  # without the report, the server still detects that this rank has gone
                self.client.report_failure(reason, culprit=culprit)

        threading.Thread(target=report, name="gradsync-mpi-abort").start()  # the process's exit waits for this thread

    def release(self) -> None:
        if not self._requests.has_abandoned and not self._mpi.Is_finalized():
            self._comm.Free()
        self._flat = np.empty(0, np.uint8)
        del self._agreement, self._reduction  # frees their memory


class _Transfer:
    """One direction of a send, recv or exchange. MPI matches the messages of two ranks by rank, tag and order.

    Each rank first sends the digest of its description of the message. If the digests are equal, the sender sends the
    bytes. If the digests differ, both ranks send their descriptions. In this way both ranks know of a disagreement
    before any array changes, and `send` returns only when the receiver has begun to receive. A peer that is already
    waiting in a collective refuses the message: it answers with 0 instead of a digest. A rank computes the tag from the
    number of collectives that the rank has begun. Two ranks that exchange a message have begun the same number. So a
    rank that waits in a collective recognises, by the tag, the messages that began before this collective, and refuses
    only these messages.

    Args:
        requests: the object that begins the communicator's MPI requests and waits for them.
        message: the message to send or to receive. To receive, this rank writes the bytes into `message.flat`.
        is_sending: whether this rank sends the message.

    Attributes:
        peer: the rank to which this rank sends, or from which it receives.
        agreement: the digest and the description of the message, on which both ranks must agree.
        pending: the MPI requests of the current step; empty when the message has ended.
        has_peer_answered: whether the peer has answered. A peer that has answered completes the message before it
            closes the communicator.
        is_refused: whether the peer has refused the message, because the peer waits for this rank in a collective.
        texts: the descriptions of this rank and of the peer, if they disagree; else None.
    """

    def __init__(self, requests: MpiRequests, message: Message, *, is_sending: bool) -> None:
        self.peer = message.peer
        self.agreement = message.agreement
        self.has_peer_answered = self.is_refused = False
        self.texts: tuple[str, str] | None = None
        self._test_all = requests.mpi.Request.Testall
        self._steps = self._run(requests, message.flat, is_sending)
        self.pending = next(self._steps)

    def advance(self) -> bool:
        """Continues the message without waiting. Returns whether the message has ended."""
        while self.pending and self._test_all(self.pending):
            self.pending = next(self._steps, [])
        return not self.pending

    def _run(self, requests: MpiRequests, flat: Array, is_sending: bool) -> Iterator[list[Any]]:
        """Begins the steps of the message one after another, and yields the MPI requests of each step."""
        comm, peer, digest = requests.comm, self.peer, self.agreement.digest
        tags = _tags_after(requests.begun)
        tag, peer_tag = tags if is_sending else tags[::-1]
        mine, theirs = np.array([digest], np.uint64), np.zeros(1, np.uint64)
        yield [comm.Irecv(theirs, peer, peer_tag), comm.Isend(mine, peer, tag)]
        self.has_peer_answered = True
        if not theirs[0]:
            self.is_refused = True
        elif int(theirs[0]) != digest:
            text = self.agreement.described().to_text(_TEXT_BYTES).encode()
            room = np.zeros(_TEXT_BYTES, np.uint8)
            yield [comm.Irecv(room, peer, peer_tag), comm.Isend(np.frombuffer(text, np.uint8), peer, tag)]
            both = text, room.tobytes().rstrip(b"\0")  # this rank's text is cut to the size that the peer reads
            self.texts = both[0].decode(errors="replace"), both[1].decode(errors="replace")
        elif flat.size:
            part = [(peer, flat)]
            yield requests.post(part, [], tag) if is_sending else requests.post([], part, peer_tag)


class _MpiErrors(AbstractContextManager[None]):
    """Converts MPI's exceptions to MpiError, or to the failure that caused them, if the server has reported it."""

    def __init__(self, mpi: Any, label: str, requests: MpiRequests) -> None:
        self._exception = mpi.Exception
        self._label = label
        self._requests = requests

    def __enter__(self) -> None:
        pass  # on the CPU there is no launch to begin

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            return
        if not issubclass(kind, GradsyncError):  # e.g. Ctrl-C or MemoryError outside of a wait
            self._requests.abandon(trace)  # the traceback's frames hold the memory that MPI still uses
        if issubclass(kind, self._exception):
            self._requests.await_cause()
            raise to_mpi_error(error, self._label) from error


def _tags_after(collectives: int) -> tuple[int, int]:
    """Returns the sender's and the receiver's tag for a message of ranks that have begun this number of collectives."""
    odd = collectives % 2
    return _TAG_OF_SENDER + odd, _TAG_OF_RECEIVER + odd


def _parts(array: Array, bounds: Bounds, ranks: Sequence[int]) -> list[tuple[int, Array]]:
    """Returns a pair (rank, part of the array) for each of the given ranks."""
    return [(rank, array[part_of(bounds, rank)]) for rank in ranks]


def _copy(source: Array, target: Array) -> None:
    """Copies this rank's own part, unless source and target are the same memory (an in-place call)."""
    if source.size and source.__array_interface__["data"][0] != target.__array_interface__["data"][0]:
        copy_words(source, target)
