"""What a backend writes: the hooks behind the public methods of a communicator.

The public methods check everything first; a hook may rely on its stated preconditions. All arrays that a hook is given
are flat: 1-D, contiguous and on the communicator's device. What only moves is given as bytes (uint8).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from gradsync.communicators.agreement import Agreement
from gradsync.communicators.host_arrays import ArrayKind, HostArrays
from gradsync.communicators.nonfinite import NonFiniteFinder
from gradsync.communicators.resident import ResidentMemory, aligned_zeros
from gradsync.futures import Completion
from gradsync.reduction import Array, ReduceOp

if TYPE_CHECKING:
    from gradsync.communicators.base import Communicator
    from gradsync.communicators.host_path import HostPath

#: Where the parts of the ranks lie in a flat array: rank r's is [bounds[r], bounds[r + 1]), in elements.
Bounds = Sequence[int]

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


class PreparedList(Protocol):
    """The all-reduce of one list of arrays, with what stays from call to call worked out; see prepare_list."""

    def run(self, agreement: Agreement) -> None:
        """Does what _all_reduce_list would do with the arrays."""


class Backend(ABC):
    """The hooks of one backend, for gradsync's own use.

    Attributes:
        arrays: how it handles arrays.
        runs_beside_host: whether a collective has only been launched when its hook returns.
        finder: of what is not finite, where lists and resident memory can be looked at while they are reduced.
    """

    arrays: ArrayKind = HostArrays()
    runs_beside_host = False
    finder: NonFiniteFinder | None = None

    # -- Reductions --------------------------------------------------------------------------------------------

    @abstractmethod
    def _all_reduce_list(
        self, sources: Sequence[Array], targets: Sequence[Array], op: ReduceOp, agreement: Agreement
    ) -> None:
        """Reduces each source into its target. Preconditions: see all_reduce_list; at least one source."""

    def _prepare_list(
        self, sources: Sequence[Array], targets: Sequence[Array], op: ReduceOp, *, looks: bool
    ) -> PreparedList | None:
        """Works out what _all_reduce_list would do, for calls to come; None where that gains nothing.

        With `looks`, and where there is a finder, that takes note of what is not finite.

        Other ranks may go the unprepared way in the same call. _release lets go of what it holds of the communicator.
        """
        return None

    @abstractmethod
    def _reduce(self, source: Array, target: Array | None, op: ReduceOp, root: int, agreement: Agreement) -> None:
        """Reduces into the root's target, which may be its source; None elsewhere."""

    @abstractmethod
    def _reduce_scatter(self, source: Array, target: Array, bounds: Bounds, op: ReduceOp, agreement: Agreement) -> None:
        """Reduces; each rank gets its part. The target may be exactly this rank's part of the source."""

    def _make_resident(self, size_bytes: int, agreement: Agreement) -> ResidentMemory:
        """Makes this rank's part; all ranks have agreed on the size, and will tell each other whether they have theirs.

        Raises:
            BackendUnavailable: it cannot be had.
        """
        return ResidentMemory(aligned_zeros(self.arrays, size_bytes, "this rank"))

    def _all_reduce_resident(
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
        """Reduces a range in place. Preconditions: see all_reduce_resident.

        With `looks`, and where there is a finder, that takes note of what is not finite.
        """
        values = memory.view(begin_bytes, end_bytes, dtype)
        self._all_reduce_list([values], [values], op, agreement)
        if mean_over is not None:
            self.arrays.divide(values, mean_over)

    # -- Movements, in bytes -----------------------------------------------------------------------------------

    @abstractmethod
    def _broadcast_list(self, flats: Sequence[Array], root: int, agreement: Agreement) -> None:
        """Copies the root's arrays into the others'. Preconditions: at least one; writable except on the root."""

    @abstractmethod
    def _all_gather(self, source: Array, target: Array, bounds: Bounds, agreement: Agreement) -> None:
        """Gathers all parts on all ranks. The source may be exactly this rank's part of the target."""

    @abstractmethod
    def _gather(self, source: Array, target: Array | None, bounds: Bounds, root: int, agreement: Agreement) -> None:
        """Gathers all parts in the root's target, of which its source may be exactly its part; None elsewhere."""

    @abstractmethod
    def _scatter(self, source: Array | None, target: Array, bounds: Bounds, root: int, agreement: Agreement) -> None:
        """Hands each rank its part of the root's source; None elsewhere."""

    @abstractmethod
    def _all_to_all(
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
    def _exchange(self, send: Message | None, receive: Message | None) -> None:
        """Sends one message, or receives one, or both at once."""

    @abstractmethod
    def _share_numbers(self, numbers: Sequence[int], agreement: Agreement) -> list[list[int]]:
        """Returns the numbers of every rank, int64, as many on each. Waits, and moves them on the host's behalf."""

    # -- Meeting -----------------------------------------------------------------------------------------------

    @abstractmethod
    def _agree(self, agreement: Agreement) -> None:
        """Raises PlanMismatch when the ranks' digests differ; waits for the others where it must, to know."""

    def _meet(self, agreement: Agreement) -> None:
        """Waits for all ranks and raises PlanMismatch when their digests differ."""
        self._agree(agreement)

    @abstractmethod
    def _connect_group(self, members: tuple[int, ...], name: str) -> Communicator:
        """Makes the communicator of some of these ranks, listed by their new numbers. Called by the members only."""

    @abstractmethod
    def _make_host_path(self) -> HostPath:
        """Returns the way of Python objects; made at the first collective on objects, by all ranks."""

    def _shortcut(self, what: str, array: Any, out: Any, detail: object) -> Any:
        """A shortcut past all that a public method prepares: does it all, with all checks, and returns the result.

        None, having done nothing, sends the call the long way.

        Args:
            what: the public method.
            array, out: what it was given.
            detail: the operator, or the root, where it has one.
        """
        return None

    # -- Launching ---------------------------------------------------------------------------------------------

    def _launching(
        self, stream: Any, producers: Sequence[Any] | None = None
    ) -> AbstractContextManager[Completion | None]:
        """Surrounds the hooks that move data; gives what tells the end of their work, or None where it has ended.

        Args:
            stream: where the work goes; None is the current stream.
            producers: not None: the work goes to the communicator's own stream, after the work of these.
        """
        return _INLINE

    def _keep(self, *arrays: Array) -> None:
        """Keeps arrays from being given to others until the launch that is being made has ended."""

    def _bring_back(self, flat: Array, native: Array, launch: Any) -> None:
        """Brings the values of `flat` to `native`, within _launching, unless it is a view of it."""
        self.arrays.write_back(flat, native)

    def _await_host_results(self, launch: Any) -> None:
        """Waits for those results of a launch that belong in host memory."""

    # -- Ending ------------------------------------------------------------------------------------------------

    def _announce_close(self) -> None:
        """Tells the other ranks that this one will not come again. Must not block and must not raise."""

    def _announce_abort(self, reason: str, culprit: int | None) -> None:
        """Tells the other ranks to stop. Must not block and must not raise."""

    def _release(self) -> None:
        """Gives back descriptors, memory and threads. Called once, with no collective running; must not block."""


def part_of(bounds: Bounds, rank: int) -> slice:
    """Returns where one rank's part lies."""
    return slice(bounds[rank], bounds[rank + 1])


def largest_part(bounds: Bounds) -> int:
    """Returns the elements of the largest part."""
    return max([end - begin for begin, end in pairwise(bounds)])
