"""The MPI backend, for CPU clusters: NumPy arrays over MPI.

MPI moves the bytes. The rendezvous server detects ranks that have died or do not join a collective, because MPI does
not detect such ranks.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, NoReturn

import numpy as np

from gradsync.communicators.agreement import Agreement, mismatch
from gradsync.communicators.backend import Backend, Bounds, Message, part_of
from gradsync.communicators.failures import FailureMonitor, exchange_descriptions, publish_description, raise_if_left
from gradsync.communicators.host_copy import copy_words, cuts, pack_words, pieces_between, split_words, word_dtype
from gradsync.communicators.mpi.mpi_job import check_place, keep_for_ever, load_mpi, to_mpi_error
from gradsync.communicators.mpi.mpi_reduction import MpiReduction
from gradsync.communicators.mpi.mpi_requests import MpiRequests, pieces
from gradsync.diagnostics import trace
from gradsync.environment import RankEnvironment, WorldSettings
from gradsync.errors import BackendUnavailable, CollectiveTimeout, GradsyncError
from gradsync.futures import Completion
from gradsync.machine import run_with_timeout
from gradsync.reduction import Array, ReduceOp
from gradsync.rendezvous.client import RendezvousClient

# Up to this size the arrays of a list are packed together; larger arrays are sent one by one, without a copy.
_SMALL_BYTES = 256 * 1024
_BROADCAST_BYTES = 4 * 1024 * 1024  # the largest part of a packed list that is sent in one broadcast

# The largest array that a rank sends with its digest. Between two ranks, sending whole arrays moves no more bytes than
# any other algorithm.
_PAYLOAD_BYTES = 32 * 1024
_PAYLOAD_BYTES_OF_TWO = 256 * 1024

_HEADER_BYTES = 64  # the digest, padded to a cache line

# The MPI tags that the sender and the receiver of a message use; both are larger by 1 after an odd number of
# collectives.
_TAG_OF_SENDER, _TAG_OF_RECEIVER = 2, 4


def check(place: RankEnvironment) -> None:
    """See BackendModule in backend_choice.py. This function initialises MPI.

    Raises:
        BackendUnavailable: MPI cannot connect the ranks of the run.
    """
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

    If this function raises an error, the caller must report the error to the other ranks, which wait for this rank.

    Raises:
        BackendUnavailable: mpi4py is missing, or mpiexec or srun has not started exactly these ranks.
        MpiError: MPI failed.
        RendezvousTimeout, CollectiveTimeout, RankFailed: a rank did not call this function in time, or died.
        RendezvousError: the connection to the rendezvous server was lost.
    """
    mpi = load_mpi()
    check_place(mpi, client.rank, client.world_size)
    comm = _create_comm(mpi, client, group, settings.timeout_seconds)
    return MpiBackend(mpi, comm, client, group, settings.collective_timeout_seconds)


def _create_comm(mpi: Any, client: RendezvousClient, name: str, timeout_seconds: float) -> Any:
    """Creates an MPI communicator of the client's ranks, in the client's order. Each of these ranks must call it.

    MPI_Comm_create_group waits for all ranks, and no deadline can end this wait. So the ranks first wait for each other
    at the rendezvous server, where a deadline can end the wait.
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
            f"{client.label}: MPI_Comm_create_group did not return before the timeout of {timeout_seconds:.3g} s, "
            "although all ranks have called this function"
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
        self._requests = MpiRequests(
            mpi, comm, self.ranks, self.label, timeout_seconds, self._failures, self._raise_if_left
        )
        self._agreement = MpiAgreement(self._requests)
        self._reduction = MpiReduction(self._requests)
        self._flat = np.empty(0, np.uint8)  # the buffer for packed lists

    # -- Reductions --------------------------------------------------------------------------------------------

    def all_reduce(
        self, sources: Sequence[Array], targets: Sequence[Array], op: ReduceOp, agreement: Agreement
    ) -> None:
        """See Backend. Small arrays of a list are packed, and may be sent in the same message as the digest."""
        end_phase = trace.phases_of(self.recorder)
        dtype, words = sources[0].dtype, word_dtype(sources[0].dtype)
        pairs = list(zip(sources, targets, strict=True))
        small = [pair for pair in pairs if pair[0].nbytes <= _SMALL_BYTES]
        large = [pair for pair in pairs if pair[0].nbytes > _SMALL_BYTES]
        size_bytes = sum([source.nbytes for source, _ in small])
        goes_with_digest = not large and size_bytes <= self._agreement.payload_bytes
        is_packed = goes_with_digest or len(small) > 1
        if is_packed:
            packed = (self._agreement.payload if goes_with_digest else self._room)(size_bytes).view(dtype)
            pack_words([source.view(words) for source, _ in small], packed.view(words))
            end_phase("packing")
        self._agree(agreement, size_bytes if goes_with_digest else 0)
        end_phase("waiting")
        with np.errstate(all="ignore"):
            if goes_with_digest:
                packed = targets[0] if len(small) == 1 else packed
                self._reduction.reduce_in_order(op, list(self._agreement.payloads(size_bytes).view(dtype)), packed)
            else:
                self._reduction.all_reduce([(packed, packed), *large] if is_packed else pairs, op)
        end_phase("reducing")
        if is_packed and len(small) > 1:
            split_words(packed.view(words), [target.view(words) for _, target in small])
            end_phase("splitting")

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

    # The ranks send the parts directly to each other, because MPI's own algorithms move as many bytes.

    def all_gather(self, source: Array, target: Array, bounds: Bounds, agreement: Agreement) -> None:
        self._agree(agreement)
        own = target[part_of(bounds, self.rank)]
        _copy(source, own)
        peers = self._requests.peers
        self._requests.move([(peer, own) for peer in peers], _parts(target, bounds, peers))

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
        peers = self._requests.peers
        _copy(source[part_of(send_bounds, self.rank)], target[part_of(receive_bounds, self.rank)])
        self._requests.move(_parts(source, send_bounds, peers), _parts(target, receive_bounds, peers))

    def share_numbers(self, numbers: Sequence[int], agreement: Agreement) -> list[list[int]]:
        self._agree(agreement)
        mine = np.array(numbers, np.int64)
        shared = np.empty((self.world_size, mine.size), np.int64)
        self._requests.finish([self._comm.Iallgather(mine, shared)], (mine, shared))
        rows: list[list[int]] = shared.tolist()
        return rows

    def _room(self, size: int) -> Array:
        """Returns a buffer of `size` bytes. Later calls return the same memory again."""
        if self._flat.size < size:
            self._flat = np.empty(size, np.uint8)
        return self._flat[:size]

    def launching(
        self, stream: Any, producers: Collection[Any] | None = None
    ) -> AbstractContextManager[Completion | None]:
        return self._requests

    # -- Agreement ---------------------------------------------------------------------------------------------

    def agree(self, agreement: Agreement) -> None:
        with self._requests:  # gradient bucketing calls this method outside of `launching`
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
        text = agreement.described().to_text()
        group, number = self._failures.group, self._requests.begun
        raise mismatch(self.label, agreement, exchange_descriptions(self.client, group, number, text, self.ranks))

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
            if transfer.dispute is not None:
                both = self.ranks[self.rank], self.ranks[transfer.peer]
                descriptions = exchange_descriptions(self.client, *transfer.dispute, both)
                raise mismatch(self.label, transfer.agreement, descriptions)

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
        """Reports the abort to the server, which reports the abort to all ranks: nothing else ends waits in MPI."""
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


class MpiAgreement:
    """Exchanges the digests of the ranks' calls before a collective.

    With up to 16 ranks, each rank sends its digest to every other rank. If the array to reduce is small, each rank
    sends the array in the same message as the digest. So the all-reduce needs one exchange of messages instead of
    two. The receiver reads the arrays only if all digests are equal. With more ranks, MPI gathers the digests, because
    MPI's algorithm needs fewer messages.

    Args:
        requests: the object that begins the communicator's MPI requests and waits for them.

    Attributes:
        payload_bytes: the size of the largest array that a rank can send with a digest; -1 if no array can be sent.
    """

    def __init__(self, requests: MpiRequests) -> None:
        self._requests = requests
        n = requests.world_size
        self.payload_bytes = -1
        if requests.is_direct and n > 1:
            self.payload_bytes = _PAYLOAD_BYTES_OF_TWO if n == 2 else _PAYLOAD_BYTES
            # One row for the message of each rank: this rank sends its own row and receives the other rows.
            self._messages = np.zeros((n, _HEADER_BYTES + self.payload_bytes), np.uint8)
            self._digests = self._messages[:, :8].view(np.uint64)[:, 0]
            self._received = [(peer, self._messages[peer]) for peer in requests.peers]
        else:
            self._digests = np.zeros(n, np.uint64)

    def payload(self, size_bytes: int) -> Array:
        """Returns a uint8 buffer, into which the caller writes the array that this rank sends with its next digest."""
        return self._messages[self._requests.rank, _HEADER_BYTES : _HEADER_BYTES + size_bytes]

    def payloads(self, size_bytes: int) -> Array:
        """Returns the arrays that the ranks have sent with their digests, one row for each rank.

        Call this method after the ranks have agreed. The rows are valid until the next agreement.
        """
        return self._messages[:, _HEADER_BYTES : _HEADER_BYTES + size_bytes]

    def is_reached(self, digest: int, payload_bytes: int, poll: Callable[[], None]) -> bool:
        """Exchanges the digests, and returns whether all digests are equal. Every rank gets the same answer.

        Args:
            digest: the 64-bit digest of this rank's call.
            payload_bytes: the number of bytes of `payload` to send with the digest.
            poll: a function to call every few milliseconds during a longer wait.

        Raises:
            RankFailed, CollectiveTimeout, RendezvousError: see MpiRequests.finish.
        """
        requests = self._requests
        if self.payload_bytes < 0:
            mine = np.array([digest], np.uint64)
            requests.finish([requests.comm.Iallgather(mine, self._digests)], (mine, self._digests), poll)
        else:
            self._digests[requests.rank] = digest
            message = self._messages[requests.rank, : _HEADER_BYTES + payload_bytes]
            begun = requests.post([(peer, message) for peer in requests.peers], self._received)
            requests.finish(begun, poll=poll)
        digests: list[int] = self._digests.tolist()
        return digests.count(digest) == requests.world_size


class _Transfer:
    """One direction of a send, recv or exchange. MPI matches the messages of two ranks by rank, tag and order.

    Each rank first sends the digest of its description of the message. If the digests are equal, the sender sends the
    bytes. If the digests differ, both ranks publish their descriptions on the rendezvous server. In this way both ranks
    know of a disagreement before any array changes, and `send` returns only when the receiver has begun to receive. A
    peer that is already waiting in a collective refuses the message: the peer answers with an empty message instead of
    a digest. A rank computes the tag from the number of collectives that the rank has begun. Two ranks that exchange a
    message have begun the same number. So a rank that waits in a collective recognises, by the tag, the messages that
    began before this collective, and refuses only these messages.

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
        dispute: if the ranks disagree, the arguments `group`, `position` and `text` of publish_description; else None.
    """

    def __init__(self, requests: MpiRequests, message: Message, *, is_sending: bool) -> None:
        self.peer = message.peer
        self.agreement = message.agreement
        self.has_peer_answered = self.is_refused = False
        self.dispute: tuple[str, int, str] | None = None
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
            sender, receiver = (requests.rank, peer) if is_sending else (peer, requests.rank)
            channel = f"{requests.failures.group}/{sender}-{receiver}"
            requests.disputes[channel] += 1
            self.dispute = channel, requests.disputes[channel], self.agreement.described().to_text()
            publish_description(requests.failures.client, *self.dispute)
        elif flat.size:
            part = [(peer, flat)]
            yield requests.post(part, [], tag) if is_sending else requests.post([], part, peer_tag)


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
