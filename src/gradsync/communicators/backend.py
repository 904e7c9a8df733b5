"""The interface of a backend: the methods that move bytes between the ranks of one communicator.

A `Communicator` checks all arguments before it calls its Backend, so a backend can rely on the preconditions given
here. The collectives get flat arrays: 1-D, contiguous and on the backend's device. Collectives that do no arithmetic
get their arrays as bytes (uint8). docs/architecture.md shows how to write a backend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gradsync.arguments import integer_of
from gradsync.communicators.agreement import Agreement
from gradsync.communicators.host_arrays import ArrayKind
from gradsync.diagnostics import FlightRecorder
from gradsync.errors import GradsyncError, InvalidArgument, shown
from gradsync.futures import Completion
from gradsync.reduction import Array, ReduceOp

if TYPE_CHECKING:
    from gradsync.communicators.lifetime import Lifetime
    from gradsync.rendezvous.client import RendezvousClient

Shape = tuple[int, ...]
#: The bounds of the ranks' parts in a flat array: rank r has the elements [bounds[r], bounds[r + 1]).
Bounds = Sequence[int]

_INLINE = nullcontext()  # on the CPU the caller's thread runs the collective


class Message(NamedTuple):
    """One array to send to or receive from another rank.

    Attributes:
        peer: the other rank's number in this communicator.
        flat: the uint8 array that is sent, or that receives the message.
        agreement: the message's shape and dtype, which both ranks must agree on.
    """

    peer: int
    flat: Array
    agreement: Agreement


#: A plan: run(source, target, agreement) runs a collective on two C-contiguous arrays of any shape. Source and target
#: may be one array or overlap in any way: the result is the same as for arrays that do not overlap.
Run = Callable[[Array, Array, Agreement], None]


class Backend(ABC):
    """Moves bytes between the ranks of one communicator.

    A collective that takes an agreement must compare the agreement's digest between the ranks before it moves any data.
    If the digests differ, the collective must raise PlanMismatch on every rank. Every other failure ends the
    communicator, and the values of the target arrays are then undefined.

    Args:
        client: this rank's rendezvous client, whose members are the communicator's ranks; None for a world of one rank.
        group: the communicator's name, unique since the last init_process_group().
        timeout_seconds: how long a collective waits for another rank.

    Attributes:
        name: the backend's name: "shm", "nccl", ...
        device: the device of the backend's arrays: "cpu", or a CUDA device such as "cuda:0".
        arrays: the functions for the backend's arrays: an ArrayKind for NumPy, DeviceArrays for CuPy.
        runs_beside_host: whether collectives run on a GPU. On a GPU, a method launches a collective, and does not wait
            until the GPU has run it. share_numbers is an exception.
        begins_with_barrier: whether a new communicator runs a barrier as its first collective.
        client, timeout_seconds: the arguments of the same names.
        rank, world_size, ranks, label: as in Communicator.
        recorder: the communicator's flight recorder.
        lifetime: the communicator's lifetime, which Communicator sets.
    """

    name: str
    device: str = "cpu"
    arrays: ArrayKind = ArrayKind()
    runs_beside_host = False
    begins_with_barrier = False
    lifetime: Lifetime

    def __init__(self, client: RendezvousClient | None, group: str, timeout_seconds: float) -> None:
        self.rank = 0 if client is None else client.rank
        self.world_size = 1 if client is None else client.world_size
        self.client = client
        self.timeout_seconds = timeout_seconds
        self.ranks: tuple[int, ...] = (0,) if client is None else client.world_ranks
        self.label: str = "rank 0/1" if client is None else client.label
        self.recorder = FlightRecorder(group, self.world_size, self.name)

    # -- Reductions --------------------------------------------------------------------------------------------

    @abstractmethod
    def all_reduce(
        self, sources: Sequence[Array], targets: Sequence[Array], op: ReduceOp, agreement: Agreement
    ) -> None:
        """Reduces each source over all ranks, and writes the result to the target with the same index.

        There is at least one source, and all sources have the same dtype. Each target has the size and dtype of its
        source, or is the source itself.
        """

    def reduce(self, source: Array, target: Array | None, op: ReduceOp, root: int, agreement: Agreement) -> None:
        """Reduces the sources of all ranks, and writes the result to the root's target.

        The root's target may be the root's source. The other ranks pass None as target.
        """
        self.all_reduce([source], [self.arrays.empty_like(source) if target is None else target], op, agreement)

    @abstractmethod
    def reduce_scatter(self, source: Array, target: Array, bounds: Bounds, op: ReduceOp, agreement: Agreement) -> None:
        """Reduces the sources of all ranks, and writes each rank's part of the result to that rank's target.

        The target may be exactly this rank's part of the source.
        """

    # -- Other collectives ---------------------------------------------------------------------------------------

    @abstractmethod
    def broadcast(self, flats: Sequence[Array], root: int, agreement: Agreement) -> None:
        """Copies the root's arrays into the writable arrays of the other ranks. There is at least one array."""

    @abstractmethod
    def all_gather(self, source: Array, target: Array, bounds: Bounds, agreement: Agreement) -> None:
        """Copies the sources of all ranks into the target of every rank, in rank order.

        The source may be exactly this rank's part of the target.
        """

    @abstractmethod
    def all_to_all(
        self,
        source: Array,
        target: Array,
        send_bounds: Bounds,
        receive_bounds: Bounds,
        largest: int,
        agreement: Agreement,
    ) -> None:
        """Sends part i of every rank's source to rank i, whose target gets the parts of all ranks in rank order.

        `largest` is the size in bytes of the largest part that any rank sends to any rank. An empty part is not sent.
        """

    def gather(self, source: Array, target: Array | None, bounds: Bounds, root: int, agreement: Agreement) -> None:
        """Copies the sources of all ranks into the root's target, in rank order. The other ranks pass None as target.

        The root's source may be exactly the root's part of the target.
        """
        sent, received = self.only_part(root, source.size), bounds
        if target is None:
            # Not source[:0], because `source` may be read-only.
            target, received = np.empty(0, np.uint8), self.only_part(root, 0)
        self.all_to_all(source, target, sent, received, largest_part(bounds), agreement)

    def scatter(self, source: Array | None, target: Array, bounds: Bounds, root: int, agreement: Agreement) -> None:
        """Copies each rank's part of the root's source into that rank's target. The other ranks pass None as source."""
        sent, received = bounds, self.only_part(root, target.size)
        if source is None:
            source, sent = target[:0], self.only_part(root, 0)
        self.all_to_all(source, target, sent, received, largest_part(bounds), agreement)

    def only_part(self, rank: int, size: int) -> Bounds:
        """Returns the bounds of the ranks' parts if all `size` elements are the part of one rank."""
        return bounds_of([size if other == rank else 0 for other in range(self.world_size)], 1)

    def share_numbers(self, numbers: Sequence[int], agreement: Agreement) -> list[list[int]]:
        """Compares the digest, and all-gathers a list of int64 numbers; returns the list of each rank, in rank order.

        All lists have the same length. The method returns when the numbers are in host memory.
        """
        mine = np.array(numbers, np.int64)
        shared = np.empty((self.world_size, mine.size), np.int64)
        bounds = bounds_of([mine.nbytes] * self.world_size, 1)
        self.all_gather(mine.view(np.uint8), shared.reshape(-1).view(np.uint8), bounds, agreement)
        rows: list[list[int]] = shared.tolist()
        return rows

    @abstractmethod
    def exchange(self, send: Message | None, receive: Message | None) -> None:
        """Sends one message, receives one message, or does both at the same time."""

    # -- Plans for repeated calls with one whole array and equal parts -----------------------------------------
    # A method returns None if a plan would not be faster than the methods above. In one collective some ranks may run a
    # plan, while other ranks call the methods above. `release` frees the plans' resources.

    def plan_all_reduce(self, size: int, dtype: np.dtype[Any], op: ReduceOp) -> Run | None:
        """Returns a plan for `all_reduce` of one array with `size` elements."""
        return None

    def plan_reduce_scatter(self, size: int, dtype: np.dtype[Any], op: ReduceOp) -> Run | None:
        """Returns a plan for `reduce_scatter` of an array with `size` elements."""
        return None

    def plan_broadcast(self, size_bytes: int, root: int) -> Run | None:
        """Returns a plan for `broadcast` of one array of `size_bytes`.

        The root's array is the plan's source; on the other ranks the array is the plan's target.
        """
        return None

    def plan_all_gather(self, size_bytes: int) -> Run | None:
        """Returns a plan for `all_gather` of one array of `size_bytes` from each rank."""
        return None

    def plan_all_to_all(self, size_bytes: int) -> Run | None:
        """Returns a plan for `all_to_all` of one array of `size_bytes` on each rank."""
        return None

    # -- Agreement and barrier ---------------------------------------------------------------------------------

    @abstractmethod
    def agree(self, agreement: Agreement) -> None:
        """Raises PlanMismatch if the digests of the ranks differ. The method may wait for the other ranks."""

    def barrier(self, agreement: Agreement) -> None:
        """Waits until all ranks have called this method. Raises PlanMismatch if the digests of the ranks differ."""
        self.agree(agreement)

    # -- Groups ------------------------------------------------------------------------------------------------

    @abstractmethod
    def connect_group(self, members: tuple[int, ...], name: str) -> Backend:
        """Returns the backend of a new group. Only the group's members call this method.

        Args:
            members: the members' ranks in this communicator; members[i] has rank i in the group.
            name: the name of the group.
        """

    def raise_if_ended(self, missing: list[int]) -> None:
        """Raises RankFailed if any rank has aborted the communicator, or a rank in `missing` has closed it.

        The method is called while this communicator runs no collective. The caller asks the rendezvous server for
        failures, so this method need not ask for them.
        """

    # -- Launching ---------------------------------------------------------------------------------------------

    def checked_stream(self, stream: Any, what: str) -> Any:
        """Checks the caller's stream, and converts it to the type that `launching` accepts. Does nothing on the CPU.

        The method is called before the collective begins, so that a wrong stream is an error on this rank only.

        Raises:
            InvalidArgument: `stream` is not a stream, or belongs to another device; or `stream` or the current stream
                is capturing a CUDA graph.
        """
        return stream

    def launching(
        self, stream: Any, producers: Collection[Any] | None = None
    ) -> AbstractContextManager[Completion | None]:
        """Returns the context manager in which the methods that move data are called.

        On a GPU its __enter__ returns the Completion of the work that these methods launch; on the CPU it returns None.

        Args:
            stream: the stream for the work; by default the current stream.
            producers: marks (see mark_work) of the work that must end before this work begins. If they are given, even
                none, the work runs on the communicator's own stream. If `producers` is None, it runs on `stream`.
        """
        return _INLINE

    def keep(self, *arrays: Array) -> None:
        """Holds references to arrays until the current launch has ended, so that their memory is not reused."""

    def bring_back(self, flat: Array, native: Array, launch: Any) -> None:
        """Copies the values of `flat` to `native`, unless `flat` is a view of `native`. Call it within `launching`."""
        self.arrays.write_back(flat, native)

    def mark_work(self) -> Any:
        """Marks the end of the work that is queued on the current stream.

        Returns the mark, which `follow_work` accepts; None on the CPU.
        """
        return None

    def follow_work(self, marks: Sequence[Any]) -> None:
        """Makes the current stream wait for the work that `mark_work` has marked."""

    # -- Ending ------------------------------------------------------------------------------------------------

    def drain(self) -> GradsyncError | None:
        """Waits a limited time until the launched work has ended. Communicator.close() calls this method first.

        Returns:
            The error of the work; None if there is none.
        """
        return None

    def announce_close(self) -> None:
        """Announces to the other ranks that this rank has closed the communicator.

        This method must neither block nor raise.
        """

    def announce_abort(self, reason: str, culprit: int | None) -> None:
        """Announces to the other ranks that they must abort the communicator.

        This method must neither block nor raise.
        """

    def await_threads(self) -> None:
        """Waits a limited time for the backend's own threads; the last step of close().

        The server must know of this rank's failure, if there is one, and done-callbacks must have been called.
        """

    def release(self) -> None:
        """Frees file descriptors, memory and threads.

        The method is called once, while no collective runs. The method must return within a limited time.
        """


def checked_rank(backend: Backend, what: str, name: str, rank: object, *, is_self_allowed: bool = True) -> int:
    """Returns `rank` as an int, after checking that it is a rank of the communicator.

    Args:
        backend: the backend of the communicator.
        what: the name of the public method in errors.
        name: the name of the argument in errors.
        rank: the value of the argument.
        is_self_allowed: whether the argument may be this rank.

    Raises:
        InvalidArgument: the argument is not a rank of the communicator, or is this rank and `is_self_allowed` is False.
    """
    number = integer_of(rank)
    if number is None or not 0 <= number < backend.world_size or (number == backend.rank and not is_self_allowed):
        is_group = backend.client is not None and bool(backend.client.name)
        allowed = f"0 to {backend.world_size - 1}" + (", numbered within the group" if is_group else "")
        allowed += "" if is_self_allowed else f", but not {backend.rank} (this rank)"
        raise InvalidArgument(f"{backend.label}: {what} needs {name} to be a rank from {allowed}, got {shown(rank)}")
    return number


def part_of(bounds: Bounds, rank: int) -> slice:
    """Returns the slice of a flat array that is one rank's part."""
    return slice(bounds[rank], bounds[rank + 1])


def largest_part(bounds: Bounds) -> int:
    """Returns the number of elements of the largest part."""
    return max([end - begin for begin, end in pairwise(bounds)])


def bounds_of(sizes: Sequence[int], row: int) -> Bounds:
    """Returns the bounds of the ranks' parts; rank r has sizes[r] rows, each of `row` elements."""
    return (0, *accumulate([size * row for size in sizes]))
