"""The interface of a backend: ten methods, which move bytes between the ranks of one communicator.

A `Communicator` checks all arguments before it calls its Backend, so a backend can rely on what is said here. Arrays
are flat: 1-D, contiguous and on the backend's device. Collectives that do no arithmetic get them as bytes (uint8).
docs/architecture.md shows how to write a backend.

The collectives take an Agreement. On the CPU, before a target changes, they compare its digest and its layout between
the ranks. If the digests differ, they raise PlanMismatch on every rank (`exchange_mismatch` in failures.py); if only
the layouts differ, LayoutsDiffer (agreement.py). On a GPU all layouts are C order, and who needs a comparison calls
`compare` before, or `verify` afterwards. Every other failure ends the communicator, and the values of the targets are
then undefined. Each wait checks for failures and has a deadline (`FailureMonitor` in failures.py), and moves on all
messages that have been started.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from gradsync.arguments import integer_of
from gradsync.communicators.agreement import Agreement
from gradsync.communicators.host_arrays import ArrayKind
from gradsync.diagnostics import FlightRecorder
from gradsync.errors import InvalidArgument, PlanMismatch, shown
from gradsync.futures import Work
from gradsync.reduction import Array, ReduceOp

if TYPE_CHECKING:
    from gradsync.rendezvous.client import RendezvousClient

Shape = tuple[int, ...]
#: The bounds of the ranks' parts in a flat array: rank r has the elements [bounds[r], bounds[r + 1]).
Bounds = Sequence[int]


class Launch(Work):
    """The run of one collective. This class is for the CPU, where it has ended when the backend's method returns."""

    #: Whether there are results in host memory that the GPU has yet to write; the host then waits for them.
    has_host_results = False

    def keep(self, *arrays: Array) -> None:
        """Holds references to arrays until the work has ended, so that their memory is not used again."""

    def write_back(self, flat: Array, native: Array) -> None:
        """Copies the elements of `flat` to `native`, unless it is a view of it; on a GPU as part of this work."""
        _HOST_ARRAYS.write_back(flat, native)


_HOST_ARRAYS = ArrayKind()
ON_CPU = Launch()
_INLINE = nullcontext(ON_CPU)


class Message:
    """One array that this rank sends to, or receives from, another rank.

    Attributes:
        peer: the other rank's number in the communicator.
        flat: the uint8 array that is sent, or that receives the message.
        agreement: the sender, the receiver, the shape and the dtype, which both must agree on.
        target: the array that a received message belongs to, where `flat` is not a view of it; else None.
        mark: on a GPU, of the work that must end before the array is read or written; see Backend.mark_work.
        is_sent: whether this rank sends it; set for asynchronous ones only.
        is_over: whether the message has ended; on a GPU, whether it was launched.
        error: why it failed; None if it did not.
        work: on a GPU, what was launched.
        after: on the CPU, for a receive: when it has ended, it gives the receives that follow from the same rank, which
            its bytes may tell; see tagged.py.
    """

    def __init__(
        self, peer: int, flat: Array, agreement: Agreement, target: Array | None = None, mark: Any = None
    ) -> None:
        self.peer = peer
        self.flat = flat
        self.agreement = agreement
        self.target = target
        self.mark = mark
        self.is_sent = self.is_over = False
        self.error: BaseException | None = None
        self.work = ON_CPU
        self.after: Callable[[], Sequence[Message]] | None = None
        self._when_over: list[Callable[[], None]] = []

    def end(self, error: BaseException | None = None, work: Launch = ON_CPU) -> Sequence[Message]:
        """Ends the message. Only its backend calls this, on a GPU after `launching`, in which it has written back.

        Returns:
            The receives that the backend starts now.
        """
        if error is None and self.target is not None:
            work.write_back(self.flat, self.target)
        self.error, self.work, self.is_over = error, work, True
        self._call()
        return () if self.after is None else self.after()

    def when_over(self, function: Callable[[], None]) -> None:
        """Calls function() when the message has ended, on a GPU when the GPU has moved it."""
        self._when_over.append(function)
        if self.is_over:  # looked at last: another thread may have ended it meanwhile
            self._call()

    def _call(self) -> None:
        while self._when_over:
            try:
                function = self._when_over.pop(0)
            except IndexError:  # another thread has taken the last one
                return
            self.work.when_done(function)


class Backend(ABC):
    """Moves bytes between the ranks of one communicator.

    Args:
        client: this rank's rendezvous client, whose members are the communicator's ranks; None for a world of one.
        group: the communicator's name, unique since the last init_process_group().
        timeout_seconds: how long a collective waits for another rank.

    Attributes:
        name: "shm", "nccl", ...
        device: the device of the backend's arrays: "cpu", or a CUDA device such as "cuda:0".
        arrays: the functions for the backend's arrays: an ArrayKind for NumPy, DeviceArrays for CuPy.
        on_gpu: whether collectives run on a GPU, beside the host. A method then launches, and does not wait until the
            GPU has run it.
        client, timeout_seconds: the arguments of the same names.
        rank, world_size, ranks, label: as in Communicator.
        recorder: the communicator's flight recorder.
        fail: a function that ends the communicator because of an error found outside of its methods, such as by a
            thread that watches the GPU: Lifetime.fail, which Communicator sets.
    """

    name: str
    device: str = "cpu"
    arrays: ArrayKind = _HOST_ARRAYS
    on_gpu = False
    fail: Callable[..., None]

    def __init__(self, client: RendezvousClient | None, group: str, timeout_seconds: float) -> None:
        self.rank = 0 if client is None else client.rank
        self.world_size = 1 if client is None else client.world_size
        self.client = client
        self.timeout_seconds = timeout_seconds
        self.ranks: tuple[int, ...] = (0,) if client is None else client.world_ranks
        self.label: str = "rank 0/1" if client is None else client.label
        self.recorder = FlightRecorder(group, self.world_size, self.name)

    # -- Collectives -------------------------------------------------------------------------------------------

    @abstractmethod
    def all_reduce(
        self,
        sources: Sequence[Array],
        targets: Sequence[Array],
        op: ReduceOp,
        agreement: Agreement,
        factor: Any = 1.0,
    ) -> None:
        """Reduces each source over all ranks into the target of the same index.

        There is at least one source, and all have the same dtype. A target has the size and dtype of its source, and is
        the source itself, or shares no memory with any source.

        Args:
            sources, targets: see above.
            op: the operator.
            agreement: see above. If the ranks differ in its layout only, the method raises LayoutsDiffer on every rank.
            factor: multiplies this rank's values before they are reduced; each rank has its own. Where it is not 1, the
                op is sum or mean, the dtype is floating or complex, and the sources may be overwritten once the ranks
                have agreed. A number; on a GPU also what share_weight() has returned.
        """

    def all_reduce_with_squares(
        self, flats: Sequence[Array], op: ReduceOp, agreement: Agreement, factor: Any
    ) -> float | None:
        """Runs all_reduce in place, and sums the squares of the results' absolute values, if that saves reading them.

        Returns:
            The sum, in float64, over the results that this rank counts: each is counted by one rank. None, on all
            ranks: no rank has counted.
        """
        self.all_reduce(flats, flats, op, agreement, factor)
        return None

    @abstractmethod
    def reduce_scatter(self, source: Array, target: Array, bounds: Bounds, op: ReduceOp, agreement: Agreement) -> None:
        """Reduces the sources of all ranks; each rank's target gets its part of the result.

        The target may be exactly this rank's part of the source.
        """

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

        What one rank sends to another is what the other expects. `largest` is the size in bytes of the largest part
        that any rank sends to any rank.
        """

    @abstractmethod
    def barrier(self, agreement: Agreement) -> None:
        """Waits until all ranks have called it."""

    # -- Messages ----------------------------------------------------------------------------------------------

    @abstractmethod
    def exchange(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        awaited: Collection[Message] = (),
        seconds: float | None = None,
    ) -> None:
        """Starts messages, any number or none, and waits for some of those that were started, now or earlier.

        The messages from one rank to another arrive in the order in which they were started. Each ends by itself: the
        backend calls its `end`, and on the CPU starts the receives that this returns. If the two ranks of a message
        disagree on it, it ends with PlanMismatch on both. A rank may send to itself.

        Args:
            sends, receives: the messages to start.
            awaited: the messages to wait for. If there are none, or all are over, the method moves all messages on as
                far as that goes without waiting, and returns.
            seconds: after this time the method returns too. None: the wait has the communicator's deadline.
        """

    # -- Groups and the end ------------------------------------------------------------------------------------

    @abstractmethod
    def connect_group(self, members: tuple[int, ...], name: str) -> Backend:
        """Returns the backend of a new group. Only its members call it.

        Args:
            members: the members' ranks in this communicator; members[i] has rank i in the group.
            name: the name of the group.
        """

    @abstractmethod
    def announce(self, aborted_because: str | None = None, culprit: int | None = None) -> None:
        """Tells the other ranks that this rank has closed the communicator, or that all must abort it.

        It must neither block nor raise.

        Args:
            aborted_because: why it is aborted; None: it was closed.
            culprit: the world rank that has failed; None: this rank.
        """

    @abstractmethod
    def release(self) -> None:
        """Frees file descriptors, memory and threads; called once, while no collective runs. Must not wait for long."""

    # -- What most backends need not write ---------------------------------------------------------------------

    def reduce(self, source: Array, target: Array | None, op: ReduceOp, root: int, agreement: Agreement) -> None:
        """Reduces the sources of all ranks into the root's target, which may be its source; the others pass None."""
        self.all_reduce([source], [self.arrays.empty_like(source) if target is None else target], op, agreement)

    def gather(self, source: Array, target: Array | None, bounds: Bounds, root: int, agreement: Agreement) -> None:
        """Copies the sources of all ranks into the root's target, in rank order; the others pass None.

        The root's source may be exactly its part of the target.
        """
        sent, received = self.only_part(root, source.size), bounds
        if target is None:
            # Not source[:0]: `source` may be read-only.
            target, received = np.empty(0, np.uint8), self.only_part(root, 0)
        self.all_to_all(source, target, sent, received, largest_part(bounds), agreement)

    def scatter(self, source: Array | None, target: Array, bounds: Bounds, root: int, agreement: Agreement) -> None:
        """Copies each rank's part of the root's source into that rank's target; the others pass None as source."""
        sent, received = bounds, self.only_part(root, target.size)
        if source is None:
            source, sent = target[:0], self.only_part(root, 0)
        self.all_to_all(source, target, sent, received, largest_part(bounds), agreement)

    def only_part(self, rank: int, size: int) -> Bounds:
        """Returns the bounds of the ranks' parts where all `size` elements are one rank's."""
        return bounds_of([size if other == rank else 0 for other in range(self.world_size)], 1)

    def share_numbers(self, numbers: Sequence[int], agreement: Agreement) -> list[list[int]]:
        """All-gathers int64 numbers, equally many on all ranks; returns each rank's list, in host memory."""
        mine = np.array(numbers, np.int64)
        shared = np.empty((self.world_size, mine.size), np.int64)
        bounds = bounds_of([mine.nbytes] * self.world_size, 1)
        self.all_gather(mine.view(np.uint8), shared.reshape(-1).view(np.uint8), bounds, agreement)
        rows: list[list[int]] = shared.tolist()
        return rows

    def compare(self, agreement: Agreement) -> None:
        """Raises PlanMismatch on every rank unless all ranks are about to do the same. All ranks must call it."""
        self.barrier(agreement)

    def raise_if_ended(self, missing: list[int]) -> None:
        """Raises RankFailed if any rank has aborted the communicator, or a rank in `missing` has closed it.

        A rank that waits for others at the server calls it, while no collective runs. It asks the server for failures
        itself.
        """

    # -- For a GPU ---------------------------------------------------------------------------------------------

    def checked_stream(self, stream: Any, what: str) -> Any:
        """Returns the caller's stream as `launching` takes it; called before the collective begins.

        Raises:
            InvalidArgument: it is not a stream, or another device's; or it or the current stream captures a CUDA graph.
        """
        return stream

    def launching(self, stream: Any, after: Collection[Any] | None = None) -> AbstractContextManager[Launch]:
        """Returns the context manager in which the collectives are called; its __enter__ returns their Launch.

        Args:
            stream: the stream for the work; by default the current stream.
            after: marks (see mark_work) of the work that must end before this work begins. If they are given, even
                none, the work runs on the communicator's own stream. If `after` is None, it runs on `stream`.
        """
        return _INLINE

    def mark_work(self, stream: Any = None) -> Any:
        """Returns a mark of the end of the work that is queued on the current stream, and on `stream`; None on the CPU.

        `stream` is one that `checked_stream` has returned.
        """
        return None

    def follow_work(self, marks: Collection[Any]) -> None:
        """Makes the current stream wait for marked work."""

    def share_weight(self, weight: float, agreement: Agreement) -> tuple[Any, Work, Array]:
        """Adds up the weights of all ranks on the device; the host does not wait.

        Returns:
            This rank's share of all weights, on the device, for all_reduce(factor=): 0 if all weights are 0. The work.
            And an array in host memory, whose first element is the sum of the weights once the work has ended.
        """
        raise NotImplementedError

    def verify(self) -> Work:
        """Launches a comparison of all collectives that the ranks have launched so far. All ranks must call it.

        If the ranks differ, the work fails with PlanMismatch on every rank, and the communicator ends.
        """
        raise NotImplementedError

    def stray(self, agreement: Agreement) -> PlanMismatch:
        """Ends the communicator, because this rank cannot launch what the other ranks may have launched already.

        Args:
            agreement: what this rank would do.

        Returns:
            The error for this rank; the others raise PlanMismatch too.
        """
        raise NotImplementedError

    def drain(self) -> None:
        """Waits for a limited time for launched work and its done-callbacks, and until the server knows of a failure.

        It is the first step of close(), also after the communicator has ended.
        """


def checked_rank(backend: Backend, what: str, name: str, rank: object, *, is_self_allowed: bool = True) -> int:
    """Returns `rank` as an int, which must be a rank of the communicator.

    Args:
        backend: the communicator's backend.
        what: the public method's name in errors.
        name: the argument's name in errors.
        rank: the argument.
        is_self_allowed: whether it may be this rank.

    Raises:
        InvalidArgument: it is no rank of the communicator, or it is this rank and may not be.
    """
    number = integer_of(rank)
    if number is None or not 0 <= number < backend.world_size or (number == backend.rank and not is_self_allowed):
        is_group = backend.client is not None and bool(backend.client.name)
        allowed = f"0 to {backend.world_size - 1}" + (", numbered within the group" if is_group else "")
        allowed += "" if is_self_allowed else f", but not {backend.rank} (this rank)"
        is_null = name in ("dest", "source") and (rank is None or (number is not None and number < 0))
        advice = (
            ": there is no PROC_NULL: call comm.asynchronous.send and .recv for the neighbours that there are"
            if is_null
            else ""
        )
        raise InvalidArgument(
            f"{backend.label}: {what} needs {name} to be a rank from {allowed}, got {shown(rank)}{advice}"
        )
    return number


def part_of(bounds: Bounds, rank: int) -> slice:
    """Returns one rank's part of a flat array, as a slice."""
    return slice(bounds[rank], bounds[rank + 1])


def largest_part(bounds: Bounds) -> int:
    """Returns the size of the largest part."""
    return max([end - begin for begin, end in pairwise(bounds)])


def bounds_of(sizes: Sequence[int], row: int) -> Bounds:
    """Returns the bounds of the ranks' parts; rank r has sizes[r] rows, each of `row` elements."""
    return (0, *accumulate([size * row for size in sizes]))
