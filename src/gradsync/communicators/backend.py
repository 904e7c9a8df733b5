"""What a backend writes: the methods that move bytes between the ranks of one communicator.

`Communicator` has a Backend. It checks everything first; a backend may rely on what is said here. All arrays that it is
given are flat: 1-D, contiguous and on its device. What only moves is given as bytes (uint8). docs/architecture.md shows
how a backend is written.
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
from gradsync.communicators.nonfinite import NonFiniteFinder
from gradsync.communicators.resident import ResidentMemory, aligned_zeros
from gradsync.diagnostics import FlightRecorder, Place
from gradsync.errors import GradsyncError, InvalidArgument, shown
from gradsync.futures import Completion
from gradsync.reduction import Array, ReduceOp

if TYPE_CHECKING:
    from gradsync.communicators.lifetime import Lifetime
    from gradsync.rendezvous.client import RendezvousClient

Shape = tuple[int, ...]
#: Where the parts of the ranks lie in a flat array: rank r's is [bounds[r], bounds[r + 1]), in elements.
Bounds = Sequence[int]
#: How many rows each rank has; None: as many on each; "ask": the ranks exchange them first.
Sizes = Sequence[int] | Literal["ask"] | None

_INLINE = nullcontext()  # how a collective on the CPU is launched: the caller's thread runs it


class Message(NamedTuple):
    """One array on its way between two ranks.

    Attributes:
        peer: the other rank, as it is numbered in this communicator.
        flat: bytes to be sent, or room for what comes.
        agreement: what the two ranks must agree on.
    """

    peer: int
    flat: Array
    agreement: Agreement


#: A plan: run(source, target, agreement) does a collective on C-contiguous arrays of any shape, which may be one array
#: or overlap in any way: all of the source has been read before the target is written.
Run = Callable[[Array, Array, Agreement], None]


class PreparedList(Protocol):
    """The all-reduce of one list of arrays, with what stays from call to call worked out; see Backend.prepare."""

    def run(self, agreement: Agreement) -> None:
        """Does what `Backend.all_reduce` would do with the arrays."""


class Backend(ABC):
    """Moves bytes between the ranks of one communicator.

    A method that is given an agreement must raise PlanMismatch on every rank, before it has moved anything, where the
    ranks' digests differ. Other failures may leave targets in any state: they end the communicator.

    Args:
        client: this rank's connection to the rendezvous server; its members are the ranks. None: one rank, alone.
        group: the communicator's name, not used before in this generation.
        timeout_seconds: how long a collective waits for a rank.

    Attributes:
        name: "shm", "nccl", ...
        device: where its arrays live: "cpu", or a CUDA device such as "cuda:0".
        arrays: how it handles arrays.
        runs_beside_host: whether a collective has only been launched when its method returns.
        meets_at_once: whether the ranks meet in a barrier when the communicator is made.
        plans_for: the class of the arrays that plans take.
        force_packing: whether lists are packed into a flat buffer, and split, in a world of one too, as NCCL does in
            others: so benchmarks can measure what packing costs.
        finder: of what is not finite, where lists and resident memory can be looked at while they are reduced.
        client, timeout_seconds: as given.
        rank, world_size, ranks, label: this rank, as Communicator has it.
        recorder: of the communicator.
        lifetime: of the communicator; set by that.
    """

    name: str
    device: str = "cpu"
    arrays: ArrayKind = HostArrays()
    runs_beside_host = False
    meets_at_once = False
    force_packing = False
    plans_for: Any = np.ndarray
    finder: NonFiniteFinder | None = None
    lifetime: Lifetime

    def __init__(self, client: RendezvousClient | None, group: str, timeout_seconds: float = 300.0) -> None:
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
        """Reduces each source, at least one, all of one dtype, into its target: of its size, or the source itself."""

    def prepare(
        self, sources: Sequence[Array], targets: Sequence[Array], op: ReduceOp, *, looks: bool
    ) -> PreparedList | None:
        """Works out what `all_reduce` will do with these very arrays, again and again; None where that gains nothing.

        With `looks`, and where there is a finder, that takes note of what is not finite.

        Other ranks may go the unprepared way in the same call. `release` lets go of what it holds of the communicator.
        """
        return None

    def reduce(self, source: Array, target: Array | None, op: ReduceOp, root: int, agreement: Agreement) -> None:
        """Reduces into the root's target, which may be its source; None elsewhere."""
        self.all_reduce([source], [self.arrays.empty_like(source) if target is None else target], op, agreement)

    @abstractmethod
    def reduce_scatter(self, source: Array, target: Array, bounds: Bounds, op: ReduceOp, agreement: Agreement) -> None:
        """Reduces; each rank gets its part. The target may be exactly this rank's part of the source."""

    def make_resident(self, size_bytes: int, agreement: Agreement) -> ResidentMemory:
        """Makes this rank's part; all ranks have agreed on the size, and will tell each other whether they have theirs.

        Raises:
            BackendUnavailable: it cannot be had.
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
        looks: bool,
    ) -> None:
        """Reduces a range in place. Preconditions: see Communicator.all_reduce_resident.

        With `looks`, and where there is a finder, that takes note of what is not finite.
        """
        values = memory.view(begin_bytes, end_bytes, dtype)
        self.all_reduce([values], [values], op, agreement)
        if mean_over is not None:
            self.arrays.divide(values, mean_over)

    # -- Movements, in bytes -----------------------------------------------------------------------------------

    @abstractmethod
    def broadcast(self, flats: Sequence[Array], root: int, agreement: Agreement) -> None:
        """Copies the root's arrays, at least one, into the others', which are writable."""

    @abstractmethod
    def all_gather(self, source: Array, target: Array, bounds: Bounds, agreement: Agreement) -> None:
        """Gathers all parts on all ranks. The source may be exactly this rank's part of the target."""

    def gather(self, source: Array, target: Array | None, bounds: Bounds, root: int, agreement: Agreement) -> None:
        """Gathers all parts in the root's target, of which its source may be exactly its part; None elsewhere."""
        everything = self.arrays.scratch(bounds[-1], source.dtype) if target is None else target
        self.all_gather(source, everything, bounds, agreement)

    def scatter(self, source: Array | None, target: Array, bounds: Bounds, root: int, agreement: Agreement) -> None:
        """Hands each rank its part of the root's source; None elsewhere."""
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
        """Hands each rank its part of every rank's source; `largest` is the largest part between any two ranks."""

    @abstractmethod
    def exchange(self, send: Message | None, receive: Message | None) -> None:
        """Sends one message, or receives one, or both at once."""

    @abstractmethod
    def share_numbers(self, numbers: Sequence[int], agreement: Agreement) -> list[list[int]]:
        """Returns the numbers of every rank, int64, as many on each. Waits, and moves them on the host's behalf."""

    # -- Plans: for calls that recur, with whole arrays and equal parts; None where the methods above are as good -----
    # Ranks that run a plan meet others that use these methods. `release` lets go of what plans hold.

    def takes(self, array: Array) -> bool:
        """Whether a plan may use an array of the class `plans_for`, which may be written to; NumPy's are not asked."""
        return True

    def plan_all_reduce(self, size: int, dtype: np.dtype[Any], op: ReduceOp) -> Run | None:
        """Plans `all_reduce` of one array of so many elements."""
        return None

    def plan_reduce_scatter(self, size: int, dtype: np.dtype[Any], op: ReduceOp) -> Run | None:
        """Plans `reduce_scatter` of an array of so many elements."""
        return None

    def plan_broadcast(self, size_bytes: int, root: int) -> Run | None:
        """Plans `broadcast` of one array, which is source and target."""
        return None

    def plan_all_gather(self, size_bytes: int) -> Run | None:
        """Plans `all_gather` of so much from each rank."""
        return None

    def plan_all_to_all(self, size_bytes: int) -> Run | None:
        """Plans `all_to_all` of so much on each rank."""
        return None

    # -- Meeting -----------------------------------------------------------------------------------------------

    @abstractmethod
    def agree(self, agreement: Agreement) -> None:
        """Raises PlanMismatch when the ranks' digests differ; waits for the others where it must, to know."""

    def meet(self, agreement: Agreement) -> None:
        """Waits for all ranks and raises PlanMismatch when their digests differ."""
        self.agree(agreement)

    def agree_always(self) -> None:
        """From now on, on all ranks, agrees on every collective before data moves; for the debug mode."""

    # -- Groups ------------------------------------------------------------------------------------------------

    @abstractmethod
    def connect_group(self, members: tuple[int, ...], name: str) -> Backend:
        """Makes the backend of some of these ranks, listed by their new numbers. Called by the members only."""

    def split_group(self, color: int, key: int, members: tuple[int, ...], name: str) -> Backend | None:
        """Makes this rank's group of a split, in which every rank takes part.

        Args:
            color: a small number for the group, or NO_COLOR.
            key: this rank's number in the group.
            members, name: see connect_group; empty where there is no color.
        """
        return self.connect_group(members, name) if members else None

    def look_for_ended(self, missing: list[int]) -> None:
        """Raises RankFailed where a rank has aborted the communicator, or one of those that are missing closed it.

        Called outside of the communicator's turn. What the rendezvous server tells need not be looked for.
        """

    def make_host_path(self) -> HostPath:
        """Returns the way of Python objects; made at the first collective on objects, by all ranks."""
        return OwnPath(self)

    # -- Launching ---------------------------------------------------------------------------------------------

    def checked_stream(self, stream: Any, what: str) -> Any:
        """Returns what a caller of `what` gave as its stream, as `launching` takes it. Not used on the CPU.

        Raises:
            InvalidArgument: it is none, or of another device; it, or the current one, is capturing a CUDA graph. Before
                the ranks meet: it is one caller's mistake.
        """
        return stream

    def launching(
        self, stream: Any, producers: Sequence[Any] | None = None
    ) -> AbstractContextManager[Completion | None]:
        """Surrounds the methods that move data; gives what tells the end of their work, or None where it has ended.

        Args:
            stream: where the work goes; None is the current stream.
            producers: not None: the work goes to the communicator's own stream, after the work of these.
        """
        return _INLINE

    def keep(self, *arrays: Array) -> None:
        """Keeps arrays from being given to others until the launch that is being made has ended."""

    def bring_back(self, flat: Array, native: Array, launch: Any) -> None:
        """Brings the values of `flat` to `native`, within `launching`, unless it is a view of it."""
        self.arrays.write_back(flat, native)

    def await_host_results(self, launch: Any) -> None:
        """Waits for those results of a launch that belong in host memory."""

    def mark_work(self) -> Any:
        """Returns what a stream can wait for to come after the caller's work; None on the CPU."""
        return None

    def mark_end(self) -> Completion | None:
        """Returns the end of the caller's work so far, for a future; None on the CPU."""
        return None

    def follow_work(self, marks: Sequence[Any]) -> None:
        """What is queued on the current stream from now on comes after the marked work."""

    # -- Ending ------------------------------------------------------------------------------------------------

    def drain(self) -> GradsyncError | None:
        """Waits, for a bounded time, for what was launched, before close(); returns what that has failed with."""
        return None

    def announce_close(self) -> None:
        """Tells the other ranks that this one will not come again. Must not block and must not raise."""

    def announce_abort(self, reason: str, culprit: int | None) -> None:
        """Tells the other ranks to stop. Must not block and must not raise."""

    def await_told(self) -> None:
        """Waits, for a bounded time, until the other ranks have heard of the end; the last step of close()."""

    def release(self) -> None:
        """Gives back descriptors, memory and threads. Called once, with no collective running; must not block."""


class HostPath(ABC):
    """How bytes of host memory travel between ranks, which Python objects need; on GPUs they keep off the GPU.

    Within the communicator's turn. Every rank must call the same methods.

    Sources and results are 1-D arrays of uint8; `bounds` says where the parts of the ranks lie, and is the same on all
    ranks.
    """

    @abstractmethod
    def share_numbers(self, numbers: Sequence[int], agreement: Agreement) -> list[list[int]]:
        """Agrees on the collective that begins; returns the numbers of every rank, as many on each.

        Raises:
            PlanMismatch: the ranks disagree; nothing was moved.
        """

    @abstractmethod
    def all_gather(self, source: Array, bounds: Bounds, agreement: Agreement) -> Array:
        """Returns the parts of all ranks; `source` is this rank's."""

    @abstractmethod
    def gather(self, source: Array, bounds: Bounds, root: int, agreement: Agreement) -> Array | None:
        """Returns the parts of all ranks on the root, None elsewhere; `source` is this rank's."""

    @abstractmethod
    def scatter(self, source: Array | None, bounds: Bounds, root: int, agreement: Agreement) -> Array:
        """Returns this rank's part of the root's source; None elsewhere."""


class OwnPath(HostPath):
    """The methods of a backend whose arrays live in host memory.

    Args:
        backend: of the communicator in whose turn this runs.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def share_numbers(self, numbers: Sequence[int], agreement: Agreement) -> list[list[int]]:
        """See HostPath."""
        return self._backend.share_numbers(numbers, agreement)

    def all_gather(self, source: Array, bounds: Bounds, agreement: Agreement) -> Array:
        """See HostPath."""
        target = np.empty(bounds[-1], np.uint8)
        self._backend.all_gather(source, target, bounds, agreement)
        return target

    def gather(self, source: Array, bounds: Bounds, root: int, agreement: Agreement) -> Array | None:
        """See HostPath."""
        target = np.empty(bounds[-1], np.uint8) if self._backend.rank == root else None
        self._backend.gather(source, target, bounds, root, agreement)
        return target

    def scatter(self, source: Array | None, bounds: Bounds, root: int, agreement: Agreement) -> Array:
        """See HostPath."""
        rank = self._backend.rank
        target = np.empty(bounds[rank + 1] - bounds[rank], np.uint8)
        self._backend.scatter(source, target, bounds, root, agreement)
        return target


def checked_rank(backend: Backend, what: str, name: str, rank: object) -> int:
    """Returns an argument, called `name`, that must be the number of one of the communicator's ranks.

    Raises:
        InvalidArgument: it is not.
    """
    number = integer_of(rank)
    if number is None or not 0 <= number < backend.world_size:
        raise InvalidArgument(f"{backend.label}: {what} needs {name} from {rank_range(backend)}, got {shown(rank)}")
    return number


def rank_range(backend: Backend) -> str:
    """Returns how the ranks are numbered, for errors."""
    within = ", numbered within the group" if "group" in backend.label else ""
    return f"0 to {backend.world_size - 1}{within}"


def part_of(bounds: Bounds, rank: int) -> slice:
    """Returns where one rank's part lies."""
    return slice(bounds[rank], bounds[rank + 1])


def largest_part(bounds: Bounds) -> int:
    """Returns the elements of the largest part."""
    return max([end - begin for begin, end in pairwise(bounds)])


def row_shape(shape: Shape) -> Shape:
    """Returns a shape with a first axis: a 0-d array is one row."""
    return shape or (1,)


def bounds_of(sizes: Sequence[int], row: int) -> Bounds:
    """Returns where the parts of `sizes` rows lie, given what a row holds."""
    return (0, *accumulate([size * row for size in sizes]))


def row_elements(shape: Shape) -> int:
    """Returns the elements in one row of an array of that shape, which has a first axis."""
    return prod(shape[1:])
