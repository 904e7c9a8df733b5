"""The contract of a communicator: public methods check, private hooks move bytes.

Everything a caller can get wrong is told here, once, in the same words on every backend. A backend subclasses
`Communicator` and writes the hooks of backend.py; it may rely on their stated preconditions.

All collectives are collective in the strict sense: every rank of the communicator must call the same methods in the
same order with the same shape, dtype, operator and root. Ranks that disagree get PlanMismatch, all of them, before
data moves, and can go on; on NCCL, ranks that leave what they have repeated may find out too late: then the error is
`broken`, and so is the communicator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from gradsync.communicators.agreement import Agreement, agreement_on
from gradsync.communicators.backend import Backend
from gradsync.communicators.host_arrays import overlaps_itself
from gradsync.communicators.lifetime import Lifetime
from gradsync.completion import Completion
from gradsync.errors import InvalidArgument, PlanMismatch, describe
from gradsync.flight_recorder import FlightRecorder
from gradsync.reduction import Array, ReduceOp, check_operation

if TYPE_CHECKING:
    from typing_extensions import Self


class Communicator(Backend):
    """A fixed group of ranks that run collectives together.

    One thread at a time may use a communicator; a second one gets an error that says so. A collective that fails in
    the middle (a rank died, a deadline passed, Ctrl-C) breaks the communicator for all its ranks: every later call
    raises CommunicatorClosed with the first reason. Only PlanMismatch leaves it usable, unless it says `broken`.

    Attributes:
        rank: this process's number, 0 <= rank < world_size.
        world_size: number of ranks.
        backend: "local", "shm", "nccl" or "mpi".
        device: where arrays live: "cpu", or a CUDA device such as "cuda:0".
        recorder: remembers the last collectives of this rank; `print(communicator.recorder.describe())`.
    """

    backend: str
    device: str = "cpu"

    def __init__(self, rank: int, world_size: int, group: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self.recorder = FlightRecorder(group)
        self.lifetime = Lifetime(self)
        # Called in place of close() or abort() when a `with` block ends; for process_group.py.
        self.on_exit: Callable[[BaseException | None], None] | None = None

    # -- Collectives -------------------------------------------------------------------------------------------

    def all_reduce(self, array: Any, op: str | ReduceOp = "sum", *, out: Any = None, stream: Any = None) -> Any:
        """Reduces `array` over all ranks, element by element; every rank gets the result.

        Every rank must call it, with equal shapes, dtypes and operators. Elements correspond by index, whatever the
        memory layout: a Fortran-ordered array on one rank meets a C-ordered one on another rightly.

        Args:
            array: array of any shape and layout on this communicator's device. Receives the result when `out` is
                None.
            op: "sum", "mean", "prod", "min" or "max". "mean" needs a floating or complex dtype; half precision is
                accumulated in float32 on the CPU.
            out: array of the same shape and dtype for the result; `array` is then left as it is.
            stream: CUDA stream that orders the operation; None is CuPy's current stream. Unused on the CPU.

        Returns:
            `out`, or `array` when `out` is None.

        Raises:
            UnsupportedDtype: the dtype table has no such operator for the dtype.
            InvalidArgument: not an array, wrong `out`, or a read-only target.
            PlanMismatch: the ranks disagree.
            RankFailed: another rank died or aborted.
            CollectiveTimeout: a rank did not arrive before the deadline.
            CommunicatorClosed: closed, aborted, or inherited through a fork.
            NcclError: NCCL or the GPU failed.
        """
        if out is None and self._all_reduce_prepared(array, op):
            return array
        op = ReduceOp.parse(op)
        source = self.native_array(array, "all_reduce")
        check_operation(op, source.dtype)
        result = array if out is None else out
        target = self._checked_target("all_reduce", source, source if out is None else self.native_array(out, "out"))
        agreement = agreement_on("all_reduce", source.shape, source.dtype, op.value)
        with self.lifetime.turn("all_reduce", agreement):
            with self._launching(stream) as launch:
                flat_source = self.arrays.flat(source)
                if target is not source and self.arrays.share_memory(source, target):
                    flat_source = flat_source.copy()  # results would overwrite values that are still to be read
                flat_target = flat_source
                if target is not source:
                    viewed = self.arrays.is_viewed_flat(target)
                    flat_target = self.arrays.flat(target if viewed else self.arrays.empty_like(flat_source))
                self._keep(source, target)
                self._all_reduce_list([flat_source], [flat_target], op, agreement)
                self._bring_back(flat_target, target, launch)
            self._await_host_results(launch)
        return result

    def broadcast(self, array: Any, root: int = 0, *, stream: Any = None) -> Any:
        """Copies the root's `array` into every other rank's, in place.

        Every rank must call it, with equal shapes, dtypes and roots.

        Args:
            array: array of any shape, layout and dtype without Python objects, on this communicator's device.
            root: the rank whose values all ranks get.
            stream: CUDA stream that orders the operation. Unused on the CPU.

        Returns:
            `array`.

        Raises:
            InvalidArgument: not an array, a root outside the communicator, or a read-only target.
            UnsupportedDtype: the dtype holds Python objects.
            PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: as for all_reduce.
        """
        self._check_root(root)
        native = self.native_array(array, "broadcast")
        if self.rank != root:
            self._checked_target("broadcast", native, native)
        agreement = agreement_on("broadcast", native.shape, native.dtype, f"root {root}")
        with self.lifetime.turn("broadcast", agreement):
            with self._launching(stream) as launch:
                flat = self.arrays.flat(native)
                self._keep(native, flat)
                self._broadcast(flat, root, agreement)
                if self.rank != root:
                    self._bring_back(flat, native, launch)
            self._await_host_results(launch)
        return array

    def barrier(self) -> None:
        """Returns once every rank has called it.

        Raises:
            PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: as for all_reduce.
        """
        agreement = agreement_on("barrier", (), None, "")
        with self.lifetime.turn("barrier", agreement):
            self._meet(agreement)

    # -- For the layers above: bucketing -----------------------------------------------------------------------

    def all_reduce_list(
        self,
        sources: Sequence[Array],
        targets: Sequence[Array],
        op: ReduceOp,
        agreement: Agreement,
        *,
        write_backs: Sequence[tuple[Array, Array]] = (),
        producers: Sequence[Any] = (),
    ) -> Completion | None:
        """Reduces a list of arrays as one collective: what a gradient bucket needs.

        Every rank must call it with lists of equal sizes and dtypes. The arguments are trusted: the bucketing layer
        has checked them.

        Args:
            sources: 1-D contiguous arrays of one dtype, on the communicator's device.
            targets: where the results go: for each source an array of its size and dtype, or the source itself.
            op: an operator that the dtype table allows.
            agreement: what this rank believes all ranks are about to do.
            write_backs: pairs of a target and the native array that gets its values afterwards.
            producers: marks (see mark_work) of the work that made the sources.

        Returns:
            None when the results are there; on a GPU, where the reduction runs on a stream of its own, its end.

        Raises:
            PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: as for all_reduce.
        """
        with self.lifetime.turn("all_reduce", agreement), self._launching(None, producers) as launch:
            self._all_reduce_list(sources, targets, op, agreement)
            for target, native in write_backs:
                self._bring_back(target, native, launch)
        return launch

    def native_array(self, array: Any, what: str) -> Array:
        """Returns `array` as this backend's own array type over the same memory.

        Args:
            array: what a caller handed in.
            what: names the operation in the error.

        Raises:
            InvalidArgument: not an array, or one that this communicator cannot reach.
            UnsupportedDtype: the elements are Python objects.
        """
        if type(array) is np.ndarray and not array.dtype.hasobject:  # nearly always; spares making the label
            return array
        native: Array = self.arrays.native(array, f"{self.label}: {what}")
        return native

    def mark_work(self) -> Any:
        """Returns what a stream can wait for to come after the caller's work so far; None on the CPU."""
        return None

    def agree(self, agreement: Agreement) -> None:
        """Makes sure that every rank goes on with the same agreement; moves no data. May wait for all ranks.

        Raises:
            PlanMismatch: the ranks' digests differ.
        """
        with self.lifetime.turn("agree", agreement):
            self._agree(agreement)

    # -- Life and death ----------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether the communicator can no longer be used."""
        return self.lifetime.ended_because is not None

    def close(self) -> None:
        """Releases the communicator in order. Not collective, and may be repeated.

        On the CPU it never blocks on other ranks; on NCCL it lets queued collectives end, for 20 s at most. A rank
        that still needs this one afterwards gets RankFailed.

        Raises:
            RankFailed, CollectiveTimeout, PlanMismatch, NcclError: a failure on the GPU that no call has raised yet.
        """
        self.lifetime.close()

    def abort(self, reason: str, *, culprit: int | None = None) -> None:
        """Breaks the communicator for all ranks at once: those inside or entering a collective get RankFailed.

        Args:
            reason: told to every rank, e.g. "ValueError in the backward pass".
            culprit: the rank that the others' RankFailed names; None is this rank.
        """
        self.lifetime.abort(reason, culprit)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.on_exit is not None:
            self.on_exit(error)
        elif error is None or isinstance(error, PlanMismatch) or self.world_size == 1:
            self.close()
        else:
            self.abort(describe(error))

    def __repr__(self) -> str:
        ended = self.lifetime.ended_because
        state = "" if ended is None else f", closed: {ended}"
        return f"<{type(self).__name__} rank {self.rank}/{self.world_size} on {self.device} ({self.backend}){state}>"

    @property
    def label(self) -> str:
        """How error messages name this rank: "rank 1/4"."""
        return f"rank {self.rank}/{self.world_size}"

    # -- Checks ------------------------------------------------------------------------------------------------

    def _checked_target(self, method: str, source: Array, target: Array) -> Array:
        if target is not source and (target.shape != source.shape or target.dtype != source.dtype):
            raise InvalidArgument(
                f"{self.label}: {method} needs out of shape {source.shape} and dtype {source.dtype}, "
                f"got shape {target.shape} and dtype {target.dtype}"
            )
        if not self.arrays.writeable(target):
            raise InvalidArgument(f"{self.label}: {method} cannot write into a read-only array: pass out=")
        if overlaps_itself(target):
            raise InvalidArgument(
                f"{self.label}: {method} cannot write into an array whose elements overlap "
                f"(strides {target.strides}): pass out="
            )
        return target

    def _check_root(self, root: int) -> None:
        if not isinstance(root, int) or not 0 <= root < self.world_size:
            raise InvalidArgument(f"{self.label}: root must be 0 to {self.world_size - 1}, got {root!r}")
