"""The interface of a backend: the methods that move bytes between the ranks of one communicator.

A `Communicator` has a Backend, and checks all arguments first, so a backend can rely on the preconditions given here.
All arrays are flat: 1-D, contiguous and on the backend's device. Collectives that do no arithmetic get bytes (uint8).
docs/architecture.md shows how to write a backend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, pairwise
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np

from gradsync.arguments import integer_of
from gradsync.communicators.agreement import Agreement
from gradsync.communicators.host_arrays import ArrayKind, HostArrays
from gradsync.communicators.host_values import SumOfSquares
from gradsync.communicators.nonfinite import Checks, NonFiniteFinder
from gradsync.communicators.pieces import CACHE_LINE_BYTES
from gradsync.diagnostics import FlightRecorder, Place
from gradsync.errors import BackendUnavailable, GradsyncError, InvalidArgument, shown
from gradsync.futures import Completion
from gradsync.reduction import Array, ReduceOp, Wire

if TYPE_CHECKING:
    from gradsync.communicators.lifetime import Lifetime
    from gradsync.rendezvous.client import RendezvousClient

Shape = tuple[int, ...]
#: The parts of the ranks in a flat array: rank r has the elements [bounds[r], bounds[r + 1]).
Bounds = Sequence[int]
#: The number of rows of each rank; None: equal numbers; "ask": the ranks exchange them first.
Sizes = Sequence[int] | Literal["ask"] | None

_INLINE = nullcontext()  # on the CPU the caller's thread runs the collective


class Message(NamedTuple):
    """One array to send to or receive from another rank.

    Attributes:
        peer: the other rank, as numbered in this communicator.
        flat: uint8 array, to be sent or to be filled.
        agreement: the message's shape and dtype, which both ranks must agree on.
    """

    peer: int
    flat: Array
    agreement: Agreement


#: A plan: run(source, target, agreement) runs a collective on C-contiguous arrays of any shape. They may be one array
#: or overlap in any way: the whole source is read before the target is written.
Run = Callable[[Array, Array, Agreement], None]


class PreparedList(Protocol):
    """The prepared all-reduce of one list of arrays; see Backend.prepare."""

    def run(self, agreement: Agreement) -> None:
        """Runs `Backend.all_reduce` on the arrays."""


class ResidentMemory:
    """This rank's part of the memory for gradients that are reduced in place, without a copy.

    All ranks make it together (make_resident_memory of for_bucketing.py), with the same size on each rank. Views of
    `bytes` stay valid, also after the communicator has ended. The shared-memory backend has a subclass of it
    (shared_memory/resident.py).

    Args:
        data: the memory; see `bytes`.

    Attributes:
        bytes: 1-D uint8 array on the communicator's device, zero at the start, aligned to 64 bytes.
    """

    def __init__(self, data: Array) -> None:
        self.bytes = data

    def view(self, begin_bytes: int, end_bytes: int, dtype: np.dtype[Any]) -> Array:
        """Returns the bytes [begin_bytes, end_bytes) as elements of `dtype`."""
        values: Array = self.bytes[begin_bytes:end_bytes].view(dtype)
        return values


def aligned_zeros(arrays: ArrayKind, size_bytes: int, who: str) -> Array:
    """Returns zeroed bytes on the communicator's device, for ResidentMemory.

    Args:
        arrays: the backend's array kind.
        size_bytes: size of the memory.
        who: the beginning of the error message.

    Raises:
        BackendUnavailable: there is not enough memory.
    """
    try:
        room: Array = arrays.empty((size_bytes + CACHE_LINE_BYTES,), np.dtype(np.uint8), None)
    except MemoryError as error:
        raise BackendUnavailable(f"{who} cannot allocate {size_bytes} bytes: {error}") from error
    begin = -arrays.byte_bounds(room)[0] % CACHE_LINE_BYTES
    data = room[begin : begin + size_bytes]
    data[...] = 0
    return data


class Backend(ABC):
    """Moves bytes between the ranks of one communicator.

    A method that takes an agreement must compare its digest between the ranks before it moves any data. If the digests
    differ, it must raise PlanMismatch on every rank. Other failures may leave targets in any state; they end the
    communicator.

    Args:
        client: this rank's rendezvous client, whose members are the communicator's ranks; None for a world of one rank.
        group: the communicator's name; no communicator of this generation has had that name before.
        timeout_seconds: how long a collective waits for a rank.

    Attributes:
        name: "shm", "nccl", ...
        device: the device of the backend's arrays: "cpu", or a CUDA device such as "cuda:0".
        arrays: the functions for the backend's kind of arrays.
        runs_beside_host: whether collectives run on a GPU: the methods launch them, and do not wait for their end.
        begins_with_barrier: whether a new communicator begins with a barrier.
        plans_for: the class of arrays that plans take.
        force_packing: whether a world of one rank packs lists into a flat buffer and splits it, as NCCL does in larger
            worlds; for benchmarks of the packing.
        converts: whether `prepare` supports a Wire; if not, the caller converts the values.
        finder: collects non-finite values while lists and resident memory are reduced; None if the backend cannot.
        squares: adds up the squares of results in the same way; None if the backend cannot.
        client, timeout_seconds: see above.
        rank, world_size, ranks, label: as in Communicator.
        recorder: the communicator's flight recorder.
        lifetime: the communicator's lifetime, which Communicator sets.
    """

    name: str
    device: str = "cpu"
    arrays: ArrayKind = HostArrays()
    runs_beside_host = False
    begins_with_barrier = False
    force_packing = False
    plans_for: Any = np.ndarray
    converts = False
    finder: NonFiniteFinder | None = None
    squares: SumOfSquares | None = None
    lifetime: Lifetime

    def __init__(self, client: RendezvousClient | None, group: str, timeout_seconds: float) -> None:
        self.client = client
        self.timeout_seconds = timeout_seconds
        self.rank: int = 0 if client is None else client.rank
        self.world_size: int = 1 if client is None else client.world_size
        self.ranks: tuple[int, ...] = (0,) if client is None else client.world_ranks
        self.label: str = "rank 0/1" if client is None else client.label
        self.recorder = FlightRecorder(group, place=Place(self.rank, self.ranks, self.name))

    # -- Reductions --------------------------------------------------------------------------------------------

    @abstractmethod
    def all_reduce(
        self, sources: Sequence[Array], targets: Sequence[Array], op: ReduceOp, agreement: Agreement
    ) -> None:
        """Reduces each source into its target.

        There is at least one source, and all sources have one dtype. Each target has the size and dtype of its source,
        or is the source itself.
        """

    def prepare(
        self, sources: Sequence[Array], targets: Sequence[Array], op: ReduceOp, *, checks: Checks, wire: Wire | None
    ) -> PreparedList | None:
        """Returns the prepared `all_reduce` of these very arrays, for repeated calls; None if that gains nothing.

        With a `wire`, which only a backend that `converts` gets, the values travel in that form on all ranks.

        The backend also makes the `checks` that it has an attribute for. Without checks other ranks may call the
        unprepared `all_reduce` in the same collective. `release` frees the prepared object's resources.
        """
        return None

    def reduce(self, source: Array, target: Array | None, op: ReduceOp, root: int, agreement: Agreement) -> None:
        """Reduces the sources into the root's target, which may be the root's source. Other ranks pass target None."""
        self.all_reduce([source], [self.arrays.empty_like(source) if target is None else target], op, agreement)

    @abstractmethod
    def reduce_scatter(self, source: Array, target: Array, bounds: Bounds, op: ReduceOp, agreement: Agreement) -> None:
        """Reduces the sources, and writes to each rank's target its part of the result.

        The target may be exactly this rank's part of the source.
        """

    def make_resident(self, size_bytes: int, agreement: Agreement) -> ResidentMemory:
        """Makes this rank's resident memory. All ranks have agreed on the size.

        Raises:
            BackendUnavailable: there is not enough memory.
        """
        return ResidentMemory(aligned_zeros(self.arrays, size_bytes, "this rank"))

    def all_reduce_resident(
        self,
        memory: ResidentMemory,
        begin_bytes: int,
        end_bytes: int,
        dtype: np.dtype[Any],
        op: ReduceOp,
        agreement: Agreement,
        mean_over: int | None,
        *,
        checks: Checks,
    ) -> None:
        """Reduces a range of resident memory in place. For the arguments see all_reduce_resident of for_bucketing.py.

        The backend also makes the `checks` that it has an attribute for.
        """
        values = memory.view(begin_bytes, end_bytes, dtype)
        self.all_reduce([values], [values], op, agreement)
        if mean_over is not None:
            self.arrays.divide(values, mean_over)

    # -- Movements, in bytes -----------------------------------------------------------------------------------

    @abstractmethod
    def broadcast(self, flats: Sequence[Array], root: int, agreement: Agreement) -> None:
        """Copies the root's arrays, at least one, into the arrays of the other ranks, which are writable."""

    @abstractmethod
    def all_gather(self, source: Array, target: Array, bounds: Bounds, agreement: Agreement) -> None:
        """Copies the sources of all ranks to every rank's target, in rank order.

        The source may be exactly this rank's part of the target.
        """

    def gather(self, source: Array, target: Array | None, bounds: Bounds, root: int, agreement: Agreement) -> None:
        """Copies the sources of all ranks to the root's target, in rank order. The other ranks pass None as target.

        The root's source may be exactly the root's part of the target.
        """
        everything = self.arrays.scratch(bounds[-1], source.dtype) if target is None else target
        self.all_gather(source, everything, bounds, agreement)

    def scatter(self, source: Array | None, target: Array, bounds: Bounds, root: int, agreement: Agreement) -> None:
        """Sends each rank its part of the root's `source`, which is None on the other ranks."""
        everything = self.arrays.scratch(bounds[-1], target.dtype) if source is None else source
        self.broadcast([everything], root, agreement)
        self.arrays.assign(everything[part_of(bounds, self.rank)], target)

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
        """Sends part i of every rank's source to rank i.

        `largest` is the size of the largest part that any rank sends to any rank.
        """

    @abstractmethod
    def exchange(self, send: Message | None, receive: Message | None) -> None:
        """Sends a message, receives one, or does both at once."""

    @abstractmethod
    def share_numbers(self, numbers: Sequence[int], agreement: Agreement) -> list[list[int]]:
        """Returns the numbers of every rank, by rank. All ranks give equally many int64 numbers. The host waits."""

    # -- Plans for repeated calls with whole arrays and equal parts; None if the methods above are as fast ------------
    # In one collective some ranks may run a plan, and others the methods above. `release` frees the plans' resources.

    def takes(self, array: Array) -> bool:
        """Whether a plan may write to an array of the class `plans_for`; not called for NumPy arrays."""
        return True

    def plan_all_reduce(self, size: int, dtype: np.dtype[Any], op: ReduceOp) -> Run | None:
        """Plans `all_reduce` of one array with `size` elements."""
        return None

    def plan_reduce_scatter(self, size: int, dtype: np.dtype[Any], op: ReduceOp) -> Run | None:
        """Plans `reduce_scatter` of an array with `size` elements."""
        return None

    def plan_broadcast(self, size_bytes: int, root: int) -> Run | None:
        """Plans `broadcast` of one array of `size_bytes`: the source on the root, the target on the other ranks."""
        return None

    def plan_all_gather(self, size_bytes: int) -> Run | None:
        """Plans `all_gather` of one array of `size_bytes` from each rank."""
        return None

    def plan_all_to_all(self, size_bytes: int) -> Run | None:
        """Plans `all_to_all` of one array of `size_bytes` on each rank."""
        return None

    # -- Agreement and barrier ---------------------------------------------------------------------------------

    @abstractmethod
    def agree(self, agreement: Agreement) -> None:
        """Raises PlanMismatch if the ranks' digests differ; may wait for the other ranks."""

    def barrier(self, agreement: Agreement) -> None:
        """Waits for all ranks, and raises PlanMismatch if their digests differ."""
        self.agree(agreement)

    def agree_always(self) -> None:
        """Begins the debug mode: from now on all ranks agree on every collective before data moves."""

    # -- Groups ------------------------------------------------------------------------------------------------

    @abstractmethod
    def connect_group(self, members: tuple[int, ...], name: str) -> Backend:
        """Returns the backend of a new group. Only the group's members call it.

        `members` are their ranks in this communicator; member i gets rank i in the group.
        """

    def split_group(self, color: int, key: int, members: tuple[int, ...], name: str) -> Backend | None:
        """Returns the backend of the group that this rank joins in a split, or None. Every rank must call it.

        Args:
            color: a small number for the group, or NO_COLOR if this rank joins none.
            key: this rank's number in the group.
            members, name: see connect_group; empty for NO_COLOR.
        """
        return self.connect_group(members, name) if members else None

    def raise_if_ended(self, missing: list[int]) -> None:
        """Raises RankFailed if a rank has aborted the communicator, or one of the missing ranks has closed it.

        Called while no collective holds the communicator. It need not check for failures at the rendezvous server.
        """

    def make_host_path(self) -> HostPath:
        """Returns the path for Python objects; all ranks make it at the first collective on objects.

        A backend whose arrays live on a GPU returns one that does not use the GPU.
        """
        return self

    # -- Launching ---------------------------------------------------------------------------------------------

    def checked_stream(self, stream: Any, what: str) -> Any:
        """Returns a caller's stream in the form that `launching` takes; unused on the CPU.

        Called before the collective begins, because a wrong stream is a mistake of one caller only.

        Raises:
            InvalidArgument: not a stream, a stream of another device, or the stream or the current one is capturing a
                CUDA graph.
        """
        return stream

    def launching(
        self, stream: Any, producers: Sequence[Any] | None = None
    ) -> AbstractContextManager[Completion | None]:
        """Returns a context for the methods that move data.

        On a GPU the context gives the Completion of their work, on the CPU None.

        Args:
            stream: the stream for the work; None is the current stream.
            producers: marks (see mark_work) of work that must end first: the methods then use the communicator's own
                stream. None if there are no marks: they use `stream`.
        """
        return _INLINE

    def keep(self, *arrays: Array) -> None:
        """Holds references to arrays until the current launch has ended, so that their memory is not reused."""

    def bring_back(self, flat: Array, native: Array, launch: Any) -> None:
        """Copies the values of `flat` to `native`, within `launching`, unless `flat` is a view of it."""
        self.arrays.write_back(flat, native)

    def await_host_results(self, launch: Any) -> None:
        """Waits until the results of a launch that belong in host memory are there."""

    def mark_work(self) -> Any:
        """Returns a mark of the caller's work so far, for `follow_work`; None on the CPU."""
        return None

    def mark_end(self) -> Completion | None:
        """Returns the end of the caller's work so far, for a future; None on the CPU."""
        return None

    def follow_work(self, marks: Sequence[Any]) -> None:
        """Makes the current stream wait for the marked work."""

    # -- Ending ------------------------------------------------------------------------------------------------

    def drain(self) -> GradsyncError | None:
        """Waits a bounded time for launched work, before close(); returns the work's error, or None."""
        return None

    def announce_close(self) -> None:
        """Announces to the other ranks that this rank has closed the communicator. Must not block nor raise."""

    def announce_abort(self, reason: str, culprit: int | None) -> None:
        """Announces to the other ranks that they must stop. Must not block nor raise."""

    def await_announced(self) -> None:
        """Waits a bounded time until the announcement of the end is sent; the last step of close()."""

    def release(self) -> None:
        """Frees descriptors, memory and threads. Called once, with no collective running; must not block."""


class HostPath(Protocol):
    """Moves bytes in host memory between ranks, for Python objects; see the methods of Backend with these names."""

    def share_numbers(self, numbers: Sequence[int], agreement: Agreement, /) -> list[list[int]]:
        """Agrees on the collective; returns the numbers of every rank."""

    def all_gather(self, source: Array, target: Array, bounds: Bounds, agreement: Agreement, /) -> None:
        """Copies the parts of all ranks to every rank's target."""

    def gather(self, source: Array, target: Array | None, bounds: Bounds, root: int, agreement: Agreement, /) -> None:
        """Copies the parts of all ranks to the root's target."""

    def scatter(self, source: Array | None, target: Array, bounds: Bounds, root: int, agreement: Agreement, /) -> None:
        """Copies each rank's part of the root's source to that rank's target."""


def checked_rank(backend: Backend, what: str, name: str, rank: object) -> int:
    """Returns the rank in the argument called `name`.

    Raises:
        InvalidArgument: it is not a rank of the communicator.
    """
    number = integer_of(rank)
    if number is None or not 0 <= number < backend.world_size:
        raise InvalidArgument(f"{backend.label}: {what} needs {name} from {rank_range(backend)}, got {shown(rank)}")
    return number


def rank_range(backend: Backend) -> str:
    """Returns the range of valid ranks, for errors."""
    within = ", numbered within the group" if "group" in backend.label else ""
    return f"0 to {backend.world_size - 1}{within}"


def part_of(bounds: Bounds, rank: int) -> slice:
    """Returns the slice of one rank's part."""
    return slice(bounds[rank], bounds[rank + 1])


def largest_part(bounds: Bounds) -> int:
    """Returns the elements of the largest part."""
    return max([end - begin for begin, end in pairwise(bounds)])


def row_shape(shape: Shape) -> Shape:
    """Returns the shape with a first axis: a 0-d array is one row."""
    return shape or (1,)


def bounds_of(sizes: Sequence[int], row: int) -> Bounds:
    """Returns the bounds of parts with `sizes` rows of `row` elements."""
    return (0, *accumulate([size * row for size in sizes]))


def row_elements(shape: Shape) -> int:
    """Returns the elements in one row of an array of that shape, which has a first axis."""
    return prod(shape[1:])
