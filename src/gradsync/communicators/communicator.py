"""The communicator: the public collectives, which check their arguments and call the backend.

Each collective is one method, in three steps. First the method checks its arguments, before any other rank is involved.
Then it makes an Agreement: a description of the call. Then `_run` locks the communicator for this collective and calls
the backend. The backend compares the Agreements of the ranks, and moves the bytes. The asynchronous collectives are the
same methods of the subclass `_Submitter`, whose `_run` submits the collective. The backend may make a plan for calls
with the same collective, operator or root, shape and dtype. `_find_stored` finds the plan for a repeated call, and
skips most checks.

Every rank of the communicator must call the same collectives in the same order. The docstring of each method says which
arguments must be equal on all ranks. If the calls do not fit, all ranks raise PlanMismatch before data moves, and the
communicator stays usable.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache, partial, wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, cast

import numpy as np

from gradsync.arguments import integer_of
from gradsync.communicators.agreement import ROWS, Agreement, Description, agreement_on, digest_of, mismatch
from gradsync.communicators.backend import (
    Backend,
    Bounds,
    Message,
    Run,
    Shape,
    bounds_of,
    checked_rank,
    part_of,
)
from gradsync.communicators.collective_queue import LostFailure, submit
from gradsync.communicators.groups import (
    CommunicatorTree,
    NonMember,
    await_members,
    listed,
    reporting_failures,
)
from gradsync.communicators.host_arrays import overlaps_itself
from gradsync.communicators.lifetime import Lifetime, culprit_of
from gradsync.errors import CommunicatorClosed, InvalidArgument, PlanMismatch, UnsupportedDtype, describe
from gradsync.futures import CollectiveEnd, CollectiveFuture, Completion, check_may_call, pending
from gradsync.machine import machine_identity
from gradsync.reduction import Array, ReduceOp, check_operation
from gradsync.removed import refuse_removed

if TYPE_CHECKING:
    from typing import Self

    from gradsync.communicators.objects import Objects

BYTE = np.dtype(np.uint8)

_TOO_MUCH = 2**63  # the limit of NumPy's sizes, and of the numbers that ranks exchange
_MAX_STORED = 1024  # how many plans a communicator stores


#: One checked collective of one rank: its name in errors, the agreement, a function that moves the bytes, and a source
#: and a target. If both arrays are given, the function is a backend's plan, called as function(source, target,
#: agreement), and the target is the result. If both are None, function(launch) returns the result.
CollectiveCall = tuple[str, Agreement, Callable[..., Any], Array | None, Array | None]


#: A pair: the operator or root of a call that may be repeated, and a function that returns the backend's plan for such
#: calls.
_MakePlan = tuple[Any, Callable[[], Run | None]]


class _StoredPlan(NamedTuple):
    """The stored plan for repeated calls of one collective with the same shape, dtype, and operator or root.

    Attributes:
        agreement: the Agreement that describes these calls, for the comparison between the ranks.
        run: the plan that the backend has made for these calls.
        shape: the shape of the result.
        in_place: whether a call without `out` writes the result into its argument `array`. If `in_place` is False, such
            a call makes a new array.
    """

    agreement: Agreement
    run: Run
    shape: Shape
    in_place: bool


class Communicator:
    """A fixed group of ranks that run collectives together.

    Only one thread at a time may run a collective of a communicator. If a thread calls a collective while another
    thread runs one, this call raises InvalidArgument. A collective also raises InvalidArgument if a done-callback calls
    it, or if its `stream` is not a stream of the communicator's GPU or captures a CUDA graph.

    If a collective fails after it has begun (a rank died, a deadline passed, Ctrl-C), the communicator is broken for
    all its ranks. Each rank raises an error in its current or next collective, and CommunicatorClosed in the later
    collectives. After PlanMismatch the communicator stays usable.

    Args:
        backend: the backend, which moves the bytes. The communicator owns the backend. When the communicator ends, it
            releases the backend.

    Attributes:
        rank: this process's number in the communicator, 0 <= rank < world_size.
        world_size: the number of ranks of the communicator.
        ranks: for each rank of this communicator its rank in the world. Errors name failed and missing ranks by their
            ranks in the world.
        label: this rank's name in errors, e.g. "rank 1/4".
        backend: the backend's name: "local", "shm", "nccl" or "mpi".
        device: the device on which the collectives run: "cpu", or a CUDA device such as "cuda:0".
        recorder: the flight recorder: this rank's last collectives and messages on this communicator.
            `print(comm.recorder)` shows them.
    """

    device: str = "cpu"

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.rank = backend.rank
        self.world_size = backend.world_size
        self.ranks = backend.ranks
        self.label = backend.label
        self.backend = backend.name
        self.device = backend.device
        self.recorder = backend.recorder
        self._lifetime = backend.lifetime = Lifetime(backend, self)
        self._plans: dict[Any, _StoredPlan] = {}
        # Members of the backend that bucketing uses, or that each collective reads.
        self._arrays = backend.arrays
        self._runs_beside_host = backend.runs_beside_host
        self._checked_stream = backend.checked_stream
        self._mark_work = backend.mark_work
        self._follow_work = backend.follow_work
        # A function that the process group sets. When a `with` block ends, it is called instead of close() or abort().
        self._on_exit: Callable[[BaseException | None], None] | None = None
        if backend.begins_with_barrier:
            self.barrier()

    # -- Reductions ----------------------------------------------------------------------------------------------

    def all_reduce(self, array: Any, op: str | ReduceOp = "sum", *, out: Any = None, stream: Any = None) -> Any:
        """Reduces `array` over all ranks, element by element; every rank gets the result.

        Every rank must call it, with equal shapes, dtypes and operators. Elements with the same index are reduced. The
        memory layout may differ between ranks: C order on one rank, and Fortran order on another rank.

        Args:
            array: an array of any shape and layout, in host memory or on this communicator's GPU. `array` receives the
                result if `out` is None.
            op: the operator: "sum", "mean", "prod", "min" or "max". "mean" needs a floating or complex dtype. On the
                CPU, half precision is accumulated in float32.
            out: an array of the same shape and dtype for the result. `array` then stays unchanged, unless it shares
                memory with `out`.
            stream: the CUDA stream on which the collective runs. By default, a blocking collective runs on CuPy's
                current stream, and an asynchronous collective on the communicator's own stream. `stream` is ignored on
                the CPU.

        Returns:
            `out`, or `array` when `out` is None.

        Raises:
            UnsupportedDtype: the dtype does not support the operator, or the elements are Python objects.
            InvalidArgument: `op` is not an operator; `array` or `out` is not an array, or is on a different device;
                `out` has a different shape or dtype; the array for the result is read-only, or has elements that share
                memory.
            PlanMismatch: the ranks called different collectives, or passed arguments that must be equal and differ.
            RankFailed: another rank has died, or has closed or aborted the communicator.
            CollectiveTimeout: a rank did not call the collective before the deadline, or the collective did not end on
                a GPU before the deadline.
            CommunicatorClosed: the communicator was closed or aborted, has failed, or belongs to the parent of this
                forked process.
            NcclError: NCCL or the GPU failed.
            MpiError: MPI failed.
            RendezvousError: the connection to the rendezvous server was lost.
        """
        call = self._find_stored("all_reduce", op, array, out)
        if call is None:
            source, parsed = self._checked_reduction("all_reduce", array, op)
            target = self._checked_target("all_reduce", source, out)
            agreement = agreement_on("all_reduce", source.shape, source.dtype, parsed.value)
            call = self._call(
                "all_reduce",
                agreement,
                source,
                target,
                lambda flat, flat_target: self._backend.all_reduce([flat], [flat_target], parsed, agreement),
                array if out is None else out,
                in_place=True,
                plan=(op, partial(self._backend.plan_all_reduce, source.size, source.dtype, parsed)),
            )
        return self._run(call, stream)

    def reduce(
        self, array: Any, op: str | ReduceOp = "sum", root: int = 0, *, out: Any = None, stream: Any = None
    ) -> Any:
        """Reduces `array` over all ranks, element by element; the root gets the result.

        Every rank must call it, with equal shapes, dtypes, operators and roots. Over shared memory, and over MPI with
        up to 16 ranks, reduce and all_reduce give the same bits, except for products of complex numbers. Over NCCL, and
        over MPI with more ranks, the bits may differ: NCCL and MPI may add the ranks' values in a different order.

        Args:
            array: an array as for all_reduce. On the root, `array` receives the result if `out` is None. On the other
                ranks, `array` stays unchanged.
            op: the operator, as for all_reduce.
            root: the rank that gets the result.
            out: on the root, an array of the same shape and dtype for the result. `out` is ignored on the other ranks.
            stream: the CUDA stream on which the collective runs, as for all_reduce.

        Returns:
            On the root, the result: `out`, or `array` if `out` is None. On the other ranks, None.

        Raises:
            InvalidArgument: `root` is not a rank of the communicator, or another argument is wrong (see all_reduce).
            UnsupportedDtype, PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: as for all_reduce.
            NcclError, MpiError, RendezvousError: as for all_reduce.
        """
        source, parsed = self._checked_reduction("reduce", array, op)
        root = checked_rank(self._backend, "reduce", "root", root)
        is_root = self.rank == root
        target = self._checked_target("reduce", source, out) if is_root else None
        agreement = agreement_on("reduce", source.shape, source.dtype, f"{parsed.value}, root {root}")
        call = self._call(
            "reduce",
            agreement,
            source,
            target,
            lambda flat, flat_target: self._backend.reduce(flat, flat_target, parsed, root, agreement),
            (array if out is None else out) if is_root else None,
            in_place=True,
        )
        return self._run(call, stream)

    def reduce_scatter(
        self,
        array: Any,
        op: str | ReduceOp = "sum",
        *,
        sizes: Sequence[int] | None = None,
        out: Any = None,
        stream: Any = None,
    ) -> Any:
        """Reduces `array` over all ranks, element by element; each rank gets its rows of the result.

        Every rank must call it, with equal shapes, dtypes, operators and sizes. Over shared memory, and over MPI with
        up to 16 ranks, reduce_scatter and all_reduce give the same bits, except for products of complex numbers.

        Args:
            array: an array as for all_reduce. The rows of `array` (along the first axis; a 0-d array is one row) are
                divided among the ranks in rank order.
            op: the operator, as for all_reduce.
            sizes: the number of rows of each rank. If `sizes` is None, the rows are divided equally.
            out: an array for this rank's rows of the result; it may be exactly these rows of `array`. If `out` is None,
                a new array is made.
            stream: the CUDA stream on which the collective runs, as for all_reduce.

        Returns:
            `out`, or a new array, with this rank's rows of the result.

        Raises:
            InvalidArgument: the rows cannot be divided equally; `sizes` does not fit the array or the ranks; or another
                argument is wrong (see all_reduce).
            UnsupportedDtype, PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: as for all_reduce.
            NcclError, MpiError, RendezvousError: as for all_reduce.
        """
        call = self._find_stored("reduce_scatter", op, array, out) if sizes is None else None
        if call is None:
            source, parsed = self._checked_reduction("reduce_scatter", array, op)
            of_ranks = self._checked_division("reduce_scatter", "sizes", sizes, source.shape[0] if source.shape else 1)
            parts = _parts(source.shape, of_ranks, source.dtype.itemsize, self.rank)
            detail = parsed.value if sizes is None else f"{parsed.value}, rows {list(of_ranks)}"
            agreement = agreement_on("reduce_scatter", source.shape, source.dtype, detail)
            plan = partial(self._backend.plan_reduce_scatter, source.size, source.dtype, parsed)
            call = self._call(
                "reduce_scatter",
                agreement,
                source,
                None if out is None else self._checked_out("reduce_scatter", out, parts.part_shape, source.dtype),
                lambda flat, target: self._backend.reduce_scatter(flat, target, parts.bounds, parsed, agreement),
                out,
                shape=parts.part_shape,
                own_part=parts.own_bytes,
                plan=(op, plan) if sizes is None else None,
            )
        return self._run(call, stream)

    # -- Collectives without arithmetic. Rows are along the first axis; a 0-d array is one row -------------------

    def broadcast(self, array: Any, root: int = 0, *, stream: Any = None) -> Any:
        """Copies the root's `array` into the `array` of every other rank, in place.

        Every rank must call it, with equal shapes, dtypes and roots.

        Args:
            array: an array of any shape and layout, in host memory or on this communicator's GPU. The elements must not
                be Python objects.
            root: the rank whose values all ranks get.
            stream: the CUDA stream on which the collective runs, as for all_reduce.

        Returns:
            `array`.

        Raises:
            InvalidArgument: `root` is not a rank of the communicator; `array` is not an array, or is on a different
                device; `array` is read-only or has elements that share memory, and this rank is not the root.
            UnsupportedDtype: the elements are Python objects.
            PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: as for all_reduce.
            NcclError, MpiError, RendezvousError: as for all_reduce.
        """
        call = self._find_stored("broadcast", root, array, None) if type(root) is int else None
        if call is None:
            root = checked_rank(self._backend, "broadcast", "root", root)
            native = self._native_array(array, "broadcast")
            if self.rank != root:
                self._check_writable("broadcast", native, remedy="pass a copy")
            agreement = agreement_on("broadcast", native.shape, native.dtype, f"root {root}")
            call = self._call(
                "broadcast",
                agreement,
                native,
                None if self.rank == root else native,
                lambda flat, _: self._backend.broadcast([flat.view(BYTE)], root, agreement),
                array,
                in_place=True,
                plan=(root, partial(self._backend.plan_broadcast, native.nbytes, root)),
            )
        return self._run(call, stream)

    def all_gather(self, array: Any, *, sizes: Sequence[int] | None = None, out: Any = None, stream: Any = None) -> Any:
        """Concatenates the arrays of all ranks along the first axis, in rank order; every rank gets the result.

        Every rank must call it, with equal dtypes, the same `sizes`, and shapes that differ at most in the number of
        rows.

        Args:
            array: an array of any layout, in host memory or on this communicator's GPU. The elements must not be Python
                objects.
            sizes: the number of rows of each rank. If `sizes` is None, all ranks must have the same number of rows.
                `comm.all_gather(np.array([len(array)]))` gives the list if each rank knows only its own number.
            out: an array for the result; `array` may be exactly this rank's rows of `out`. If `out` is None, a new
                array is made.
            stream: the CUDA stream on which the collective runs, as for all_reduce.

        Returns:
            `out`, or a new array, with the rows of all ranks.

        Raises:
            InvalidArgument: `array` or `out` is not an array, or is on a different device; `sizes` does not fit the
                array or the ranks; `out` has a wrong shape or dtype, is read-only, or has elements that share memory;
                the result would be too large for an array.
            UnsupportedDtype, PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: as for broadcast.
            NcclError, MpiError, RendezvousError: as for broadcast.
        """
        call = self._find_stored("all_gather", None, array, out) if sizes is None else None
        return self._run(call or self._gathering("all_gather", array, None, sizes, out), stream)

    def gather(
        self,
        array: Any,
        root: int = 0,
        *,
        sizes: Sequence[int] | None = None,
        out: Any = None,
        stream: Any = None,
    ) -> Any:
        """Concatenates the arrays of all ranks along the first axis, in rank order; the root gets the result.

        Every rank must call it, with equal dtypes, the same root and `sizes`, and shapes that differ at most in the
        number of rows.

        Args:
            array: an array as for all_gather.
            root: the rank that gets the result.
            sizes: the number of rows of each rank, as for all_gather.
            out: on the root, an array for the result, as for all_gather. `out` is ignored on the other ranks.
            stream: the CUDA stream on which the collective runs, as for all_reduce.

        Returns:
            On the root, the rows of all ranks, in `out` or in a new array. On the other ranks, None.

        Raises:
            InvalidArgument: `root` is not a rank of the communicator, or another argument is wrong (see all_gather).
            UnsupportedDtype, PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: as for broadcast.
            NcclError, MpiError, RendezvousError: as for broadcast.
        """
        root = checked_rank(self._backend, "gather", "root", root)
        return self._run(self._gathering("gather", array, root, sizes, out if self.rank == root else None), stream)

    def _gathering(
        self, what: str, array: Any, root: int | None, sizes: Sequence[int] | None, out: Any
    ) -> CollectiveCall:
        """Checks the arguments of gather, or of all_gather if `root` is None, and returns the call to run."""
        if isinstance(sizes, str):
            refuse_removed(what, f"sizes={sizes!r}")
        source = self._native_array(array, what)
        rows, *rest = source.shape or (1,)
        to_root = "" if root is None else f"root {root}"
        # NumPy limits the size of an array as if each axis of length 0 had length 1.
        row_bytes = math.prod([length or 1 for length in rest]) * source.dtype.itemsize
        if sizes is None:
            if rows * self.world_size * row_bytes >= _TOO_MUCH:
                raise InvalidArgument(
                    f"{self.label}: the result of {what} with {rows} rows from each rank is too large for an array"
                )
            of_ranks = (rows,) * self.world_size
            agreement = agreement_on(what, source.shape, source.dtype, to_root)
        else:
            of_ranks = self._checked_sizes(what, "sizes", sizes, row_bytes=row_bytes)
            if of_ranks[self.rank] != rows:
                raise InvalidArgument(
                    f"{self.label}: {what}: sizes {list(of_ranks)} give this rank {of_ranks[self.rank]} rows, but its "
                    f"array has {rows}"
                )
            detail = f"rows {list(of_ranks)}"
            agreement = agreement_on(what, (ROWS, *rest), source.dtype, f"{detail}, {to_root}" if to_root else detail)
        parts = _parts(source.shape, of_ranks, source.dtype.itemsize, self.rank)

        def transfer(flat: Array, target: Any) -> None:
            if root is None:
                self._backend.all_gather(flat.view(BYTE), target.view(BYTE), parts.byte_bounds, agreement)
            else:
                room = None if target is None else target.view(BYTE)
                self._backend.gather(flat.view(BYTE), room, parts.byte_bounds, root, agreement)

        plan = partial(self._backend.plan_all_gather, source.nbytes)
        return self._call(
            what,
            agreement,
            source,
            None if out is None else self._checked_out(what, out, parts.shape, source.dtype),
            transfer,
            out,
            shape=parts.shape if root in (None, self.rank) else None,
            own_part=parts.own_bytes,
            plan=(None, plan) if root is None and sizes is None else None,
        )

    def scatter(
        self,
        array: Any,
        root: int = 0,
        *,
        sizes: Sequence[int] | None = None,
        out: Any = None,
        stream: Any = None,
    ) -> Any:
        """Divides the rows of the root's `array` among the ranks in rank order; each rank gets its rows.

        Every rank must call it with the same `root` and `sizes`. The root's `array` and the other ranks' `out` must
        have the same dtype and rows of the same shape.

        Args:
            array: on the root, an array of any layout, in host memory or on this communicator's GPU. The elements must
                not be Python objects. On the other ranks `array` is ignored: pass None.
            root: the rank that has the rows.
            sizes: the number of rows of each rank. If `sizes` is None, the rows are divided equally.
            out: an array for this rank's rows. Every rank except the root must pass `out`, because only the root knows
                the shape and dtype of the rows.
            stream: the CUDA stream on which the collective runs, as for all_reduce.

        Returns:
            `out`, or a new array, with this rank's rows.

        Raises:
            InvalidArgument: `root` is not a rank of the communicator; the rows cannot be divided equally; `sizes` does
                not fit the array or the ranks; `array` or `out` is not an array, or is on a different device; `out` is
                missing, has a wrong shape or dtype, is read-only, or has elements that share memory.
            UnsupportedDtype, PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: as for broadcast.
            NcclError, MpiError, RendezvousError: as for broadcast.
        """
        root = checked_rank(self._backend, "scatter", "root", root)
        is_root = self.rank == root
        if is_root and array is None:
            raise InvalidArgument(f"{self.label}: scatter needs an array on its root, which is this rank; got None")
        if not is_root and out is None:
            raise InvalidArgument(
                f"{self.label}: scatter needs out= on every rank but the root, got None; only the root, rank "
                f"{self.ranks[root]}, knows the shape and dtype of the rows"
            )
        source = self._native_array(array, "scatter") if is_root else None
        model = self._native_array(out, "scatter: out") if source is None else source
        rows, *rest = model.shape or (1,)
        if is_root:
            of_ranks = self._checked_division("scatter", "sizes", sizes, rows)
        else:
            of_ranks = (rows,) * self.world_size if sizes is None else self._checked_sizes("scatter", "sizes", sizes)
        parts = _parts(model.shape, of_ranks, model.dtype.itemsize, self.rank)
        target = None if out is None else self._checked_out("scatter", out, parts.part_shape, model.dtype)
        if sizes is None:
            agreement = agreement_on("scatter", parts.part_shape, model.dtype, f"root {root}")
        else:
            agreement = agreement_on("scatter", (ROWS, *rest), model.dtype, f"root {root}, rows {list(of_ranks)}")

        def transfer(flat: Array | None, flat_target: Array) -> None:
            data = None if flat is None else flat.view(BYTE)
            self._backend.scatter(data, flat_target.view(BYTE), parts.byte_bounds, root, agreement)

        call = self._call("scatter", agreement, source, target, transfer, out, shape=parts.part_shape)
        return self._run(call, stream)

    def all_to_all(
        self,
        array: Any,
        *,
        send_sizes: Sequence[int] | None = None,
        recv_sizes: Sequence[int] | None = None,
        out: Any = None,
        stream: Any = None,
    ) -> Any:
        """Sends part i of the rows of every rank's `array` to rank i; each rank receives a part from every rank.

        Every rank must call it, with equal dtypes and rows of equal shape. Without sizes the numbers of rows must be
        equal too. Either every rank passes both lists of sizes, or no rank passes any.

        Args:
            array: an array of any layout, in host memory or on this communicator's GPU. The elements must not be Python
                objects.
            send_sizes: the number of rows that this rank sends to each rank. If `send_sizes` is None, the rows are
                divided equally.
            recv_sizes: the number of rows that this rank receives from each rank; given if, and only if, `send_sizes`
                is. The ranks compare the two lists of all ranks before they move data.
            out: an array for the result. If `out` is None, a new array is made.
            stream: the CUDA stream on which the collective runs, as for all_reduce.

        Returns:
            `out`, or a new array, with the received rows in rank order.

        Raises:
            InvalidArgument: the rows cannot be divided equally; only one list of sizes is given, or one does not fit
                the array or the ranks; `array` or `out` is not an array, or is on a different device; `out` has a wrong
                shape or dtype, is read-only, or has elements that share memory.
            PlanMismatch: the ranks called different collectives, or passed arguments that must be equal and differ. Or
                the `recv_sizes` of one rank differ from the numbers of rows that the ranks send to this rank.
            UnsupportedDtype, RankFailed, CollectiveTimeout, CommunicatorClosed: as for broadcast.
            NcclError, MpiError, RendezvousError: as for broadcast.
        """
        is_even = send_sizes is None and recv_sizes is None
        call = self._find_stored("all_to_all", None, array, out) if is_even else None
        if call is not None:
            return self._run(call, stream)
        what = "all_to_all"
        source = self._native_array(array, what)
        rows, *rest = source.shape or (1,)
        if (send_sizes is None) != (recv_sizes is None):
            missing = "send_sizes" if send_sizes is None else "recv_sizes"
            raise InvalidArgument(
                f"{self.label}: {what} needs send_sizes and recv_sizes, or neither; {missing} is missing"
            )
        sending = receiving = self._checked_division(what, "send_sizes", send_sizes, rows)
        if is_even:
            agreement = agreement_on(what, source.shape, source.dtype, "")
        else:
            agreement = agreement_on(what, (ROWS, *rest), source.dtype, "uneven rows")
            receiving = self._checked_sizes(what, "recv_sizes", recv_sizes)
        sent = _parts(source.shape, sending, source.dtype.itemsize, self.rank)
        received = _parts(source.shape, receiving, source.dtype.itemsize, self.rank)
        target = None if out is None else self._checked_out(what, out, received.shape, source.dtype)

        def transfer(flat: Array, flat_target: Array) -> None:
            largest = sending[0] if is_even else self._compare_sizes(sending, receiving, agreement)
            bounds = sent.byte_bounds, received.byte_bounds
            self._backend.all_to_all(
                flat.view(BYTE), flat_target.view(BYTE), *bounds, largest * sent.row_bytes, agreement
            )

        plan = (None, partial(self._backend.plan_all_to_all, source.nbytes)) if is_even else None
        call = self._call(what, agreement, source, target, transfer, out, shape=received.shape, plan=plan)
        return self._run(call, stream)

    def _compare_sizes(self, sending: Sequence[int], receiving: Sequence[int], agreement: Agreement) -> int:
        """Compares what each rank sends with what the others expect, and returns the largest number of rows.

        Raises:
            PlanMismatch: a rank expects other numbers of rows than the ranks send to it. Every rank raises this error.
        """
        n = self.world_size
        shared = self._backend.share_numbers([*sending, *receiving], agreement)
        sent, expected = [numbers[:n] for numbers in shared], [numbers[n:] for numbers in shared]
        if [list(to_one) for to_one in zip(*sent, strict=True)] != expected:
            descriptions = {
                rank: Description(f"all_to_all (sends rows {numbers[:n]}, expects {numbers[n:]})")
                for rank, numbers in zip(self.ranks, shared, strict=True)
            }
            raise mismatch(self.label, agreement, descriptions)
        return max(map(max, sent))

    # -- Messages between two ranks: they are received in the order of sending; there are no tags ----------------

    def send(self, array: Any, dest: int, *, stream: Any = None) -> None:
        """Sends an array to one other rank, which must call recv or exchange.

        On the CPU, send returns only after the rank `dest` has begun to receive the array. On a GPU, send returns when
        NCCL has launched the message. If two ranks both send first, or both receive first, they wait for each other
        until the deadline: use exchange.

        Args:
            array: an array of any shape and layout, in host memory or on this communicator's GPU. The elements must not
                be Python objects.
            dest: the rank that receives the array; it must not be this rank.
            stream: the CUDA stream on which the message is sent, as for all_reduce.

        Raises:
            InvalidArgument: `array` is not an array, or is on a different device; `dest` is not one of the other ranks
                of this communicator.
            UnsupportedDtype: the elements are Python objects.
            PlanMismatch: the other rank expects a different shape or dtype. Both ranks raise this error. On the CPU,
                all ranks raise this error if the other rank waits for this rank in a collective.
            RankFailed, CollectiveTimeout, CommunicatorClosed: as for all_reduce.
            NcclError, MpiError, RendezvousError: as for all_reduce.
        """
        dest = checked_rank(self._backend, "send", "dest", dest, is_self_allowed=False)
        source = self._native_array(array, "send")
        agreement = self._message_agreement(source, self.rank, dest)

        def transfer(flat: Array, _: None) -> None:
            self._backend.exchange(Message(dest, flat.view(BYTE), agreement), None)

        return cast(None, self._run(self._call("send", agreement, source, None, transfer), stream))

    def recv(self, array: Any, source: int, *, stream: Any = None) -> Any:
        """Receives an array from one other rank, which must call send or exchange.

        Args:
            array: an array for the received values, of any layout, in host memory or on this communicator's GPU.
                `array` must have the shape and dtype of the array that was sent.
            source: the rank that sends the array; it must not be this rank.
            stream: the CUDA stream on which the message is received, as for all_reduce.

        Returns:
            `array`.

        Raises:
            InvalidArgument: `array` is not an array, is on a different device, is read-only, or has elements that share
                memory; `source` is not one of the other ranks of this communicator.
            UnsupportedDtype, PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: as for send.
            NcclError, MpiError, RendezvousError: as for send.
        """
        source = checked_rank(self._backend, "recv", "source", source, is_self_allowed=False)
        target = self._native_array(array, "recv")
        self._check_writable("recv", target, remedy="pass another array")
        agreement = self._message_agreement(target, source, self.rank)

        def transfer(_: None, flat: Array) -> None:
            self._backend.exchange(None, Message(source, flat.view(BYTE), agreement))

        return self._run(self._call("recv", agreement, None, target, transfer, array), stream)

    def exchange(self, array: Any, *, dest: int, out: Any, source: int, stream: Any = None) -> Any:
        """Sends an array to one rank, and at the same time receives an array from the same rank or a different one.

        Two ranks that call exchange with each other cannot deadlock. A ring of ranks, in which each rank sends to the
        next one, cannot deadlock either. But three ranks wait until CollectiveTimeout if rank 0 first exchanges arrays
        with rank 1, rank 1 first with rank 2, and rank 2 first with rank 0. The other rank of a message may also call
        send or recv.

        Args:
            array: the array to send, as for send.
            dest: the rank that receives the array. `dest` may be this rank if `source` is this rank too.
            out: an array for the received values; it must have their shape and dtype. `out` may share memory with
                `array`.
            source: the rank that sends the received values.
            stream: the CUDA stream on which the messages are sent and received, as for all_reduce.

        Returns:
            `out`.

        Raises:
            InvalidArgument: `array` or `out` is not an array, or is on a different device; `out` is read-only, or has
                elements that share memory; `dest` or `source` is not a rank of this communicator; only one of `dest`
                and `source` is this rank. A rank that exchanges with itself also raises this error if `out` has a
                different shape or dtype than `array`.
            UnsupportedDtype, PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: as for send.
            NcclError, MpiError, RendezvousError: as for send.
        """
        dest = checked_rank(self._backend, "exchange", "dest", dest)
        source = checked_rank(self._backend, "exchange", "source", source)
        if (dest == self.rank) != (source == self.rank):
            raise InvalidArgument(
                f"{self.label}: an exchange of this rank with itself needs dest={self.rank} and source={self.rank}, "
                f"got dest={dest} and source={source}"
            )
        outgoing = self._native_array(array, "exchange")
        target = self._native_array(out, "exchange: out")
        self._check_writable("exchange", target, "out", "pass another array")
        sending = self._message_agreement(outgoing, self.rank, dest)
        receiving = self._message_agreement(target, source, self.rank)
        if dest == self.rank and sending.digest != receiving.digest:
            raise InvalidArgument(
                f"{self.label}: an exchange of this rank with itself needs out= with shape {outgoing.shape} and "
                f"dtype {outgoing.dtype}, got shape {target.shape} and dtype {target.dtype}"
            )

        def transfer(flat: Array, flat_target: Array) -> None:
            message = Message(dest, flat.view(BYTE), sending)
            self._backend.exchange(message, Message(source, flat_target.view(BYTE), receiving))

        return self._run(self._call("exchange", sending, outgoing, target, transfer, out), stream)

    def _message_agreement(self, array: Array, sender: int, receiver: int) -> Agreement:
        way = f"rank {self.ranks[sender]} to rank {self.ranks[receiver]}"
        return agreement_on("message", array.shape, array.dtype, way, is_message=True)

    # -- Barrier, futures, objects -------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Waits until every rank has called this method.

        Raises:
            PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: as for all_reduce.
            NcclError, MpiError, RendezvousError: as for all_reduce.
        """
        agreement = agreement_on("barrier", (), None, "")
        call = "barrier", agreement, lambda _launch: self._backend.barrier(agreement), None, None
        return cast(None, self._run(call, None))

    @cached_property
    def asynchronous(self) -> Asynchronous:
        """The collectives that return futures, e.g. `communicator.asynchronous.all_reduce(array)`."""
        return Asynchronous(self)

    @cached_property
    def objects(self) -> Objects:
        """The collectives on Python objects, e.g. `communicator.objects.all_gather(anything)`."""
        from gradsync.communicators.objects import Objects

        return Objects(self._backend)

    # -- Groups --------------------------------------------------------------------------------------------------

    @cached_property
    def _tree(self) -> CommunicatorTree:
        """The tree of the communicators that were made from the same world."""
        return CommunicatorTree(self.recorder.group, self._lifetime.raised)

    def new_group(self, ranks: Iterable[int]) -> Communicator | NonMember:
        """Makes a group of some ranks of this communicator. The members keep their order in this communicator.

        Only the members need to call new_group. All members must pass the same ranks, in any order. If several ranks
        are members of the same two groups, these ranks must make the two groups in the same order. These ranks must
        also call the collectives of the two groups in the same order.

        Keep a reference to the group while any rank uses it. Close a group by its method close() when it is not needed
        any more; the end of the process group closes the other groups. This is most important with MPI, which allows
        about 2,000 open groups. A group that is deleted in Python, but not closed, still counts there.

            group = comm.new_group([0, 2])
            if group:
                group.all_reduce(array)

        Args:
            ranks: the members' ranks in this communicator, in any order.

        Returns:
            The group. On a rank that is not a member, the result is a NonMember, which is false in `if group:` but is
            not None.

        Raises:
            InvalidArgument: `ranks` is empty, contains a rank twice, or contains a number that is not a rank of this
                communicator; or a done-callback calls new_group.
            RendezvousTimeout: a member did not call new_group within the time limit of this communicator's collectives.
                The error message names the missing members.
            RankFailed, CollectiveTimeout, BackendUnavailable, NcclError, MpiError: the group cannot be made. If one of
                these errors occurs on one member, new_group fails on all members.
            CommunicatorClosed: this communicator was closed or aborted, or has failed.
            RendezvousError: the connection to the rendezvous server was lost.
        """
        members = self._checked_members(ranks)
        if pending:
            check_may_call(self.label, "new_group")
        self._lifetime.check_usable("new_group")
        if self.rank not in members:
            return NonMember(self.label, f"the group of ranks {self._listed(members)}")
        return self._make_group("new_group", members)

    def split(self, color: int | None, key: int = 0) -> Communicator | NonMember:
        """Divides the ranks into groups, one for each color, like MPI_Comm_split.

        Every rank must call it.

        Args:
            color: a signed 64-bit integer. Ranks with the same color join the same group. If `color` is None, this rank
                joins no group.
            key: a signed 64-bit integer. A group numbers its ranks by ascending key. Ranks with equal keys keep their
                order.

        Returns:
            The group of this rank's color. If `color` is None, the result is a NonMember, which is false in `if group:`
            but is not None.

        Raises:
            InvalidArgument: `color` or `key` is not a signed 64-bit integer.
            PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: as for all_reduce.
            NcclError, MpiError, RendezvousError: as for all_reduce.
            RendezvousTimeout, BackendUnavailable: as for new_group.
        """
        agreement = agreement_on("split", (), None, "")
        number = 0 if color is None else self._checked_word("color", color)
        mine = [0 if color is None else 1, number, self._checked_word("key", key)]
        shared = self._share_numbers("split", mine, agreement)
        if color is None:
            return NonMember(self.label, "any group of the split (it passed color=None)")
        same = [rank for rank, (has_color, number, _) in enumerate(shared) if has_color and number == color]
        members = tuple(sorted(same, key=lambda rank: (shared[rank][2], rank)))
        return self._make_group("split", members)

    def split_by_machine(self) -> Communicator:
        """Divides the ranks into groups, one for each machine. Every rank must call it.

        Containers with their own pid namespaces count as different machines, because their processes cannot see each
        other.

        Returns:
            The group of the ranks on this rank's machine.

        Raises:
            PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: as for split.
            NcclError, MpiError, RendezvousError, RendezvousTimeout, BackendUnavailable: as for split.
        """
        import socket  # imported here to keep the start of a rank short

        machine = digest_of("machine", machine_identity() or socket.gethostname())
        return cast(Communicator, self.split(machine - 2**63))  # not a NonMember, because this rank passes a color

    def _make_group(self, what: str, members: tuple[int, ...]) -> Communicator:
        """Makes a group that this rank belongs to."""
        name = self._tree.new_name(self._listed(members))
        with reporting_failures(self._backend, what):
            await_members(self._backend, what, members, name)
            group = Communicator(self._backend.connect_group(members, name))
        group._tree = self._tree
        self._tree.add(group)
        return group

    def _listed(self, members: Sequence[int]) -> str:
        return listed([self.ranks[member] for member in members])

    def _checked_members(self, ranks: Iterable[int]) -> tuple[int, ...]:
        try:
            members = sorted([-1 if (number := integer_of(rank)) is None else number for rank in ranks])
        except TypeError:
            members = []
        fits = members and members[0] >= 0 and members[-1] < self.world_size and len(set(members)) == len(members)
        if not fits:
            raise InvalidArgument(
                f"{self.label}: new_group needs one or more distinct ranks from 0 to {self.world_size - 1}, "
                f"got {ranks!r}"
            )
        return tuple(members)

    def _checked_word(self, name: str, value: int) -> int:
        number = integer_of(value)
        if number is None or not -(2**63) <= number < 2**63:
            needed = "a signed 64-bit integer or None" if name == "color" else "a signed 64-bit integer"
            raise InvalidArgument(f"{self.label}: split needs {name} to be {needed}, got {value!r}")
        return number

    # -- Closing and aborting ------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether the communicator can no longer be used."""
        return self._lifetime.ended_because is not None

    def close(self) -> None:
        """Closes the communicator and frees its resources. A second call does nothing.

        close() is not a collective. First, close() waits for the submitted asynchronous collectives of the
        communicator, each with its own deadline. On NCCL, close() then waits up to 10 s for launched work, up to 10 s
        for the end of NCCL's communicator, and up to 10 s for done-callbacks. Apart from this, close() does not wait
        for other ranks. If another rank needs this rank in a later collective, the other rank raises RankFailed.

        Raises:
            RankFailed, CollectiveTimeout, PlanMismatch, NcclError, RendezvousError: work on the GPU failed, or gradsync
                found a failure while a GPU worked, and no call has raised the failure yet.
        """
        # Read before draining, which adds failures.
        was_raised, raised = self._lifetime.was_raised, self._lifetime.raised.copy()
        failure = None if self.closed else self._backend.drain()
        try:
            self._lifetime.close()
        finally:
            self._backend.await_threads()
        if failure is not None and not was_raised and not raised.has(failure):
            raise failure

    def abort(self, reason: str, *, culprit: int | None = None) -> None:
        """Ends the communicator for all ranks. The other ranks raise RankFailed in their current or next collective.

        Args:
            reason: the reason that the errors on all ranks show, e.g. "ValueError in the backward pass".
            culprit: the failed rank, by its number in the world; the errors of the other ranks name it. If `culprit` is
                None, these errors name this rank.
        """
        self._lifetime.raised.was_aborted = True  # the caller knows of the failure, so closing need not raise it
        self._lifetime.abort(reason, culprit)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._on_exit is not None:
            self._on_exit(error)
        elif error is None or isinstance(error, PlanMismatch) or self.world_size == 1:
            self.close()
        else:
            self.abort(describe(error), culprit=culprit_of(error))

    def __repr__(self) -> str:
        ended = self._lifetime.ended_because
        state = "" if ended is None else f", closed: {ended}"
        return f"<{type(self).__name__} {self.label} on {self.device} ({self.backend}){state}>"

    # -- For gradsync's own use; arguments are not checked -------------------------------------------------------

    def _share_numbers(self, what: str, numbers: Sequence[int], agreement: Agreement) -> list[list[int]]:
        """All-gathers a list of 64-bit integers; returns the list of each rank, in rank order.

        Every rank must call it, with lists of equal length.
        """
        shared: list[list[int]] = self._run(
            (what, agreement, lambda _launch: self._backend.share_numbers(numbers, agreement), None, None), None
        )
        return shared

    def _mark_end(self) -> Completion | None:
        """Returns the Completion of the work that is queued on the current stream, for a future; None on the CPU."""
        with self._backend.launching(None) as launch:
            return launch

    def _agree(self, agreement: Agreement) -> None:
        """Raises PlanMismatch if the digests of the ranks' Agreements differ; for bucketing. May wait for all ranks."""
        with self._lifetime.collective("agree", agreement):
            self._backend.agree(agreement)

    # -- Running -------------------------------------------------------------------------------------------------

    def _call(
        self,
        what: str,
        agreement: Agreement,
        source: Any,
        target: Any,
        transfer: Callable[[Any, Any], None],
        given: Any = None,
        *,
        shape: Shape | None = None,
        in_place: bool = False,
        own_part: slice | None = None,
        plan: _MakePlan | None = None,
    ) -> CollectiveCall:
        """Returns a CollectiveCall, made from arguments that have been checked.

        When the call runs, it makes the arrays flat, calls the backend, and copies the result to the target.

        Args:
            what: the collective's name in errors.
            agreement: the Agreement that describes this collective, for the comparison between the ranks.
            source: the array to send, as _native_array returned it; None if this rank sends nothing.
            target: the array for the result, as _native_array returned it; None if there is no such array yet: see
                `shape`.
            transfer: a function that calls the backend: transfer(flat source, flat target).
            given: the caller's array for the result, which the call returns. If `given` is None, the call returns
                `target` or the new array.
            shape: if `target` is None, the shape of a new array for the result, or None if this rank gets no result.
            in_place: whether the backend may write the result over the source, if the target is the source.
            own_part: this rank's part of `source` or of the target, whichever is larger, as a slice of bytes; see
                _flat_source.
            plan: a pair: the operator or root, and a function that returns the backend's plan for repeated calls. If
                `plan` is None, no plan is stored.
        """
        is_one_array = in_place and target is source

        def move(launch: Any) -> Any:
            result: Any = target
            if shape is not None and target is None:
                result = self._arrays.empty(shape, source.dtype, source)
            flat = flat_target = None
            if source is not None:
                flat = self._flat_source(source, None if is_one_array else target, own_part)
            if result is not None:
                flat_target = flat if is_one_array else self._flat_target(result)
            transfer(flat, flat_target)
            if result is not None:
                self._deliver(flat_target, result, launch)
            if plan is not None:
                self._store_plan(what, agreement, source, plan, None if in_place else shape)
            return result if given is None else given

        return what, agreement, move, None, None

    def _run(self, call: CollectiveCall, stream: Any) -> Any:
        """Runs a collective whose arguments have been checked, and returns its result."""
        what, agreement, move, source, target = call
        if target is not None:  # a plan: there is no stream
            with self._lifetime.collective(what, agreement):
                move(source, target, agreement)
            return target
        stream = self._checked_stream(stream, what)
        with self._lifetime.collective(what, agreement):
            with self._backend.launching(stream) as launch:
                result = move(launch)
            if launch is not None and launch.has_host_results:
                launch.wait()
        return result

    # -- Repeated calls ------------------------------------------------------------------------------------------

    def _find_stored(self, what: str, detail: Any, array: Any, out: Any) -> CollectiveCall | None:
        """Returns a call that runs a stored plan, if an earlier call has stored one for such arguments; else None.

        This method checks only the class, shape, dtype and flags of the arrays. If the result is None, the public
        method checks all arguments and raises the errors.
        """
        if type(array) is not np.ndarray:
            return None
        try:
            known = self._plans.get((what, detail, array.shape, array.dtype))
        except TypeError:  # the operator cannot be hashed: it is invalid
            return None
        if known is None:
            return None
        agreement, run, shape, in_place = known
        flags = array.flags
        if not flags.c_contiguous:
            return None
        if out is not None:
            if type(out) is not np.ndarray or out.shape != shape or out.dtype != array.dtype:
                return None
            flags = out.flags
            return (what, agreement, run, array, out) if flags.c_contiguous and flags.writeable else None
        if not in_place:
            return what, agreement, run, array, np.empty(shape, array.dtype)
        return (what, agreement, run, array, array) if flags.writeable else None

    def _store_plan(
        self, what: str, agreement: Agreement, source: Array, plan: _MakePlan, new_shape: Shape | None
    ) -> None:
        """Stores the backend's plan, if there is one, for `_find_stored`. Call it only during a collective.

        Args:
            what, agreement, source, plan: see `_call`.
            new_shape: the shape of the new array that a call without `out` makes for its result; None if such a call
                writes the result into its argument `array`.
        """
        detail, make_plan = plan
        run = make_plan()
        if run is None:
            return
        if len(self._plans) >= _MAX_STORED:
            del self._plans[next(iter(self._plans))]  # the oldest
        shape = source.shape if new_shape is None else new_shape
        self._plans[what, detail, source.shape, source.dtype] = _StoredPlan(agreement, run, shape, new_shape is None)

    # -- Checks --------------------------------------------------------------------------------------------------

    def _native_array(self, array: Any, what: str) -> Array:
        """Returns an array of the backend's own type (NumPy or CuPy) over the same memory as `array`.

        Args:
            array: the caller's argument.
            what: the operation's name in the error.

        Raises:
            InvalidArgument: `array` is not an array, or is on another device.
            UnsupportedDtype: the elements are Python objects.
        """
        if type(array) is np.ndarray and not array.dtype.hasobject:  # nearly always; saves making the label
            return array
        native: Array = self._arrays.native(array, f"{self.label}: {what}")
        return native

    def _checked_reduction(self, what: str, array: Any, op: str | ReduceOp) -> tuple[Array, ReduceOp]:
        """Returns the array (see _native_array) and the operator, which the array's dtype supports."""
        source = self._native_array(array, what)
        try:
            parsed = ReduceOp.parse(op)
            check_operation(parsed, source.dtype)
        except (InvalidArgument, UnsupportedDtype) as error:
            raise type(error)(f"{self.label}: {what}: {error}") from None
        return source, parsed

    def _checked_target(self, what: str, source: Array, out: Any) -> Array:
        """Returns the array for the result (see _native_array): the caller's `out`, or the source if `out` is None."""
        if out is None:
            self._check_writable(what, source)
            return source
        return self._checked_out(what, out, source.shape, source.dtype)

    def _check_writable(self, what: str, target: Array, name: str = "array", remedy: str = "pass out=") -> None:
        """Raises InvalidArgument, with the advice `remedy`, if the collective cannot write to the argument `name`."""
        if type(target) is np.ndarray:  # nearly always
            flags = target.flags
            if flags.c_contiguous and flags.writeable:
                return
        if not self._arrays.writeable(target):
            flaw = "is read-only"
        elif overlaps_itself(target):
            flaw = f"has elements that share memory (strides {target.strides})"
        else:
            return
        raise InvalidArgument(f"{self.label}: {what} writes into {name}, which {flaw}: {remedy}")

    def _checked_out(self, what: str, out: Any, shape: Shape, dtype: np.dtype[Any]) -> Array:
        """Returns the caller's `out` as an array (see _native_array), after checking its shape and dtype."""
        target = out if type(out) is np.ndarray and out.dtype == dtype else self._native_array(out, f"{what}: out")
        if target.shape != shape or target.dtype != dtype:
            raise InvalidArgument(
                f"{self.label}: {what} needs out= with shape {shape} and dtype {dtype}, "
                f"got shape {target.shape} and dtype {target.dtype}"
            )
        self._check_writable(what, target, "out", "pass another array")
        return target

    def _checked_sizes(
        self, what: str, name: str, sizes: Any, total: int | None = None, *, row_bytes: int = 1
    ) -> tuple[int, ...]:
        """Returns the caller's number of rows for each rank. If `total` is given, the numbers must add up to it."""
        try:
            checked = tuple(map(operator.index, sizes))
        except TypeError:
            checked = ()
        if len(checked) != self.world_size or min(checked) < 0 or sum(checked) * max(row_bytes, 1) >= _TOO_MUCH:
            raise InvalidArgument(
                f"{self.label}: {what} needs {name} as {self.world_size} integers, the number of rows of each rank: "
                f"each 0 or more, together less than 2**63 bytes, got {sizes!r}"
            )
        if total is not None and sum(checked) != total:
            raise InvalidArgument(
                f"{self.label}: {what}: {name} {list(checked)} add up to {sum(checked)} rows, but the array has {total}"
            )
        return checked

    def _checked_division(self, what: str, name: str, sizes: Any, rows: int) -> tuple[int, ...]:
        """Returns the number of rows of each rank's part of an array. If `sizes` is None, the parts are equal."""
        if sizes is not None:
            return self._checked_sizes(what, name, sizes, rows)
        if rows % self.world_size:
            raise InvalidArgument(
                f"{self.label}: {what} needs a multiple of {self.world_size} rows for equal parts, got {rows}; for "
                f"unequal parts pass {name}="
            )
        return (rows // self.world_size,) * self.world_size

    # -- Arrays --------------------------------------------------------------------------------------------------

    def _flat_source(self, source: Array, target: Array | None, own_part: slice | None) -> Array:
        """Returns a source's elements as a flat array: a copy if the result could overwrite them before they are read.

        Args:
            source: an array that _native_array has returned.
            target: the caller's array for the result; None if there is none, or if it is the source and the backend can
                reduce in place.
            own_part: this rank's part of the larger array, source or target, as a slice of bytes. If the smaller array
                is exactly this part, no copy is needed, because backends accept arrays that overlap in this way.
        """
        if target is None and not self._runs_beside_host and source.flags.c_contiguous:
            return source.ravel()  # the fastest way to a flat view
        arrays = self._arrays
        flat: Array = arrays.flat(source)
        if target is not None and arrays.is_viewed_flat(source) and arrays.share_memory(source, target):
            flat = flat if self._is_in_place(source, target, own_part) else flat.copy()
        self._backend.keep(source, flat)
        return flat

    def _is_in_place(self, source: Array, target: Array, own_part: slice | None) -> bool:
        """Whether both arrays are contiguous, and the smaller array is exactly the part `own_part` of the larger."""
        arrays = self._arrays
        if own_part is None or not arrays.is_viewed_flat(source) or not arrays.is_viewed_flat(target):
            return False
        part, whole = sorted(
            [arrays.byte_bounds(source), arrays.byte_bounds(target)], key=lambda ends: ends[1] - ends[0]
        )
        return part == (whole[0] + own_part.start, whole[0] + own_part.stop)

    def _flat_target(self, target: Array) -> Array:
        """Returns a flat array for a target's elements: a view if the target is contiguous and on the device."""
        if not self._runs_beside_host and target.flags.c_contiguous:
            return target if target.ndim == 1 else target.ravel()
        arrays = self._arrays
        viewed = arrays.is_viewed_flat(target)
        flat: Array = arrays.flat(target) if viewed else arrays.scratch(target.size, target.dtype)
        return flat

    def _deliver(self, flat: Any, target: Array, launch: Any) -> None:
        """Copies the results from `flat` to the target, unless `flat` is a view of the target."""
        if self._runs_beside_host:
            self._backend.keep(target, flat)
            self._backend.bring_back(flat, target, launch)
        elif not target.flags.c_contiguous:
            self._arrays.write_back(flat, target)


_Parameters = ParamSpec("_Parameters")


class _Submitter(Communicator):
    """A copy of a communicator with the same backend and lifetime. The collectives of the copy return futures."""

    def __init__(self, communicator: Communicator) -> None:
        vars(self).update(vars(communicator))

    def _run(self, call: CollectiveCall, stream: Any) -> CollectiveFuture:
        if not self._runs_beside_host:
            return submit(self._lifetime, call[0], partial(super()._run, call, stream))
        what, agreement, move, *_ = call
        name = f"{self.label}: {what}"
        stream = self._checked_stream(stream, what)
        end = CollectiveEnd()
        producers = [self._mark_work()] if stream is None else None
        context = self._lifetime.collective(what, agreement)
        try:
            with context, self._backend.launching(stream, producers) as launch:
                result = move(launch)
        except Exception as error:
            closed = isinstance(error, CommunicatorClosed)  # the failure that ended the communicator has been reported
            end.finish(None, error, log_entry=None if closed else LostFailure(name, error))
        else:
            end.finish(result, None, launch)
        return CollectiveFuture(name, end)


def _submitting(
    collective: Callable[Concatenate[Communicator, _Parameters], Any],
) -> Callable[Concatenate[Asynchronous, _Parameters], CollectiveFuture]:
    """Returns the method of Asynchronous that submits a collective and returns its future."""

    @wraps(collective)
    def asynchronous(self: Asynchronous, /, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> CollectiveFuture:
        future: CollectiveFuture = collective(self._submitter, *args, **kwargs)
        return future

    whole = inspect.getdoc(collective) or ""  # python -OO has none
    asynchronous.__doc__ = f"Returns a CollectiveFuture of the result of Communicator.{collective.__name__}:\n\n{whole}"
    signature = inspect.signature(collective).replace(return_annotation="CollectiveFuture")
    asynchronous.__dict__["__signature__"] = signature
    asynchronous.__qualname__ = f"Asynchronous.{collective.__name__}"
    return asynchronous


class Asynchronous:
    """The collectives of `communicator.asynchronous`: each call submits a collective and returns a CollectiveFuture.

    The collectives take the same arguments as the methods of Communicator. Every rank must submit and call its
    collectives in the same order. A blocking collective first waits for all queued collectives that its thread has
    submitted, and for all queued collectives of its communicator.

    If an argument is wrong, the call itself raises InvalidArgument or UnsupportedDtype. The future's result() and
    wait() raise the errors of the collective. If the program never asks a failed future for its result, gradsync logs
    the failure. There are three exceptions: CommunicatorClosed, RankFailed after this rank has called abort(), and all
    failures if Ctrl-C or an error of gradsync ends the program. If a failure leaves the communicator usable, only the
    future of the failed collective fails. The program must not use a collective's arrays until its future is done.

    Messages wait in the same queue as other collectives, so `send` is not like MPI's Isend. If each of two ranks
    submits a recv before the send that the other rank needs, they wait for each other until the deadline. Use exchange,
    which sends and receives at the same time, or let the lower rank send first and the higher rank receive first.

    A done-callback must not call or submit collectives, on any backend. Such a call raises InvalidArgument: see
    CollectiveFuture.add_done_callback. If a done-callback waits for a future that is not done, the wait raises
    FutureNotReady.

    On the CPU a collective waits in a queue and runs in another thread. On a GPU the call launches the collective; the
    call may first wait until the other ranks make the same call. If no stream is given, the collective runs on the
    communicator's own stream, after the work that is already queued on the current stream. result() makes the current
    stream wait for the collective.

    Args:
        communicator: the communicator that runs the collectives.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._submitter = _Submitter(communicator)

    def __repr__(self) -> str:
        return f"<asynchronous collectives of {self._communicator!r}>"

    all_reduce = _submitting(Communicator.all_reduce)
    reduce = _submitting(Communicator.reduce)
    reduce_scatter = _submitting(Communicator.reduce_scatter)
    broadcast = _submitting(Communicator.broadcast)
    all_gather = _submitting(Communicator.all_gather)
    gather = _submitting(Communicator.gather)
    scatter = _submitting(Communicator.scatter)
    all_to_all = _submitting(Communicator.all_to_all)
    send = _submitting(Communicator.send)
    recv = _submitting(Communicator.recv)
    exchange = _submitting(Communicator.exchange)
    barrier = _submitting(Communicator.barrier)


class _Parts(NamedTuple):
    """The ranks' parts of an array that is divided by rows.

    Attributes:
        shape: the shape of the whole array, with the rows of all ranks.
        part_shape: the shape of this rank's part.
        bounds, byte_bounds: the bounds of the ranks' parts in the flat array, in elements and in bytes.
        own_bytes: the slice of bytes that is this rank's part.
        row_bytes: the size of one row in bytes.
    """

    shape: Shape
    part_shape: Shape
    bounds: Bounds
    byte_bounds: Bounds
    own_bytes: slice
    row_bytes: int


@lru_cache(maxsize=1024)
def _parts(shape: Shape, sizes: tuple[int, ...], itemsize: int, rank: int) -> _Parts:
    """Returns the ranks' parts of an array whose rows have the shape `shape[1:]`; rank r has sizes[r] rows."""
    rest = shape[1:]
    row = math.prod(rest)
    byte_bounds = bounds_of(sizes, row * itemsize)
    return _Parts(
        (sum(sizes), *rest),
        (sizes[rank], *rest),
        bounds_of(sizes, row),
        byte_bounds,
        part_of(byte_bounds, rank),
        row * itemsize,
    )
