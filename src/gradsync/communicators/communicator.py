"""The communicator: every public collective checks its arguments, makes the agreement, and calls the backend.

Each collective is one method, in three steps. It checks its arguments, with the same errors on every backend and
before any other rank is involved. It makes the agreement, which the ranks compare. Then `_run` holds the communicator
for this collective and calls the backend, which moves the bytes. The asynchronous collectives are the same methods:
`_Submitter` has another `_run`, which submits. A call that repeats an earlier one (same collective, operator or root,
shape and dtype) takes the backend's plan from `_find_known`, which checks only the flags of the arrays.

Every rank of the communicator must call the same methods in the same order with the same shape, dtype, operator and
root. If the ranks disagree, all of them get PlanMismatch before data moves, and the communicator stays usable. On NCCL,
ranks that leave a repeated sequence of collectives may notice too late: then the error has `broken`, and the
communicator cannot be used any more.
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
from gradsync.communicators.agreement import ROWS, Agreement, Description, agreement_on, digest_of
from gradsync.communicators.backend import (
    Backend,
    Bounds,
    Message,
    Run,
    Shape,
    Sizes,
    bounds_of,
    checked_rank,
    part_of,
    rank_range,
    row_elements,
    row_shape,
)
from gradsync.communicators.collective_queue import LostFailure, submit
from gradsync.communicators.groups import (
    NO_COLOR,
    CommunicatorTree,
    NonMember,
    await_members,
    listed,
    reporting_failures,
)
from gradsync.communicators.host_arrays import overlaps_itself
from gradsync.communicators.lifetime import Lifetime, culprit_of
from gradsync.communicators.mismatch import mismatch
from gradsync.errors import CommunicatorClosed, InvalidArgument, PlanMismatch, UnsupportedDtype, describe, shown
from gradsync.futures import CollectiveEnd, CollectiveFuture, check_may_call, pending
from gradsync.machine import machine_identity
from gradsync.reduction import Array, ReduceOp, check_operation

if TYPE_CHECKING:
    from typing_extensions import Self

    from gradsync.communicators.objects import Objects

BYTE = np.dtype(np.uint8)

_TOO_MUCH = 2**63  # the limit of NumPy's sizes, and of the numbers that ranks exchange
_MAX_KNOWN = 1024  # kinds of calls that a communicator remembers
_UNKNOWN = -1  # a number of rows that the caller has not given


#: One checked collective of one rank: its name in errors, the agreement, a function that moves the bytes, and two
#: arrays. With arrays the function is a backend's plan: function(source, target, agreement), and the target is the
#: result. Without arrays it is called as function(launch) and returns the result.
CollectiveCall = tuple[str, Agreement, Callable[..., Any], Array | None, Array | None]


#: For a call that may be repeated: its operator or root, and a function that returns the backend's plan for such calls.
_MakePlan = tuple[Any, Callable[[], Run | None]]


class _Known(NamedTuple):
    """A kind of call that was made before: one collective, operator or root, shape and dtype.

    Attributes:
        agreement: the agreement of the call.
        run: the backend's plan of the call.
        shape: the shape of the result.
        in_place: whether the array itself receives the result if the caller gives no `out`; otherwise a new array does.
    """

    agreement: Agreement
    run: Run
    shape: Shape
    in_place: bool


class Communicator:
    """A fixed group of ranks that run collectives together.

    One thread at a time may use a communicator; a second thread gets an error that says so. A collective that fails in
    the middle (a rank died, a deadline passed, Ctrl-C) breaks the communicator for all its ranks: every later call
    raises CommunicatorClosed with the first reason. Only PlanMismatch leaves the communicator usable, unless the error
    has `broken`.

    Args:
        backend: the backend, which moves the bytes. The communicator owns it from now on.

    Attributes:
        rank: this process's number, 0 <= rank < world_size.
        world_size: number of ranks.
        ranks: the world rank of each rank of this communicator; errors use world ranks.
        label: this rank's name in errors: "rank 1/4".
        backend: "local", "shm", "nccl" or "mpi".
        device: the device of the communicator's arrays: "cpu", or a CUDA device such as "cuda:0".
        recorder: the flight recorder, with the last collectives of this rank: `print(comm.recorder.describe())`.
    """

    device: str = "cpu"
    _debug: bool = False  # whether the ranks agree on every collective before it, and gradients are watched

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
        self._known: dict[Any, _Known] = {}
        # Members of the backend that bucketing uses, or that each collective reads.
        self._arrays = backend.arrays
        self._runs_beside_host = backend.runs_beside_host
        self._plans_for = backend.plans_for
        self._converts = backend.converts
        self._finder = backend.finder
        self._squares = backend.squares
        self._timeout_seconds = backend.timeout_seconds
        self._checked_stream = backend.checked_stream
        self._mark_work = backend.mark_work
        self._mark_end = backend.mark_end
        self._follow_work = backend.follow_work
        # Set by the process group: is called instead of close() or abort() when a `with` block ends.
        self._on_exit: Callable[[BaseException | None], None] | None = None
        if backend.begins_with_barrier:
            self.barrier()

    # -- Reductions ----------------------------------------------------------------------------------------------

    def all_reduce(self, array: Any, op: str | ReduceOp = "sum", *, out: Any = None, stream: Any = None) -> Any:
        """Reduces `array` over all ranks, element by element; every rank gets the result.

        Every rank must call it, with equal shapes, dtypes and operators. Elements correspond by index, in any memory
        layout: one rank's array may be C-ordered and another's Fortran-ordered.

        Args:
            array: array of any shape and layout on this communicator's device. Receives the result when `out` is
                None.
            op: "sum", "mean", "prod", "min" or "max". "mean" needs a floating or complex dtype; half precision is
                accumulated in float32 on the CPU.
            out: array of the same shape and dtype for the result; `array` then stays unchanged.
            stream: CUDA stream that orders the operation; None is CuPy's current stream. Unused on the CPU.

        Returns:
            `out`, or `array` when `out` is None.

        Raises:
            UnsupportedDtype: the dtype does not support the operator.
            InvalidArgument: not an array, wrong `out`, or a read-only target.
            PlanMismatch: the ranks disagree.
            RankFailed: another rank died or aborted.
            CollectiveTimeout: a rank did not arrive before the deadline.
            CommunicatorClosed: closed, aborted, or inherited through a fork.
            NcclError: NCCL or the GPU failed.
        """
        call = self._find_known("all_reduce", op, array, out)
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

        Every rank must call it, with equal shapes, dtypes, operators and roots. On the CPU the result has the same bits
        as that of all_reduce, except for products of complex numbers. On a GPU NCCL may add the ranks in another order.

        Args:
            array: as for all_reduce. Receives the result on the root when `out` is None; unchanged on other ranks.
            op: as for all_reduce.
            root: the rank that gets the result.
            out: on the root, an array of the same shape and dtype for the result. Ignored on other ranks.
            stream: CUDA stream that orders the operation. Unused on the CPU.

        Returns:
            On the root `out`, or `array` when `out` is None; None on other ranks.

        Raises:
            InvalidArgument: a root outside the communicator, or as for all_reduce.
            UnsupportedDtype, PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed, NcclError: as for
                all_reduce.
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

        Every rank must call it, with equal shapes, dtypes, operators and sizes. As with reduce, the result has the same
        bits as that of all_reduce on the CPU, except for products of complex numbers.

        Args:
            array: as for all_reduce; its rows (first axis; a 0-d array is one row) are divided in rank order.
            op: as for all_reduce.
            sizes: number of rows of each rank; None is equal parts.
            out: array for this rank's rows; may be exactly these rows of `array`. None makes a new array.
            stream: CUDA stream that orders the operation. Unused on the CPU.

        Returns:
            This rank's rows of the result: `out`, or a new array.

        Raises:
            InvalidArgument: rows that do not divide equally, sizes that are not the rows of the array, wrong `out`.
            UnsupportedDtype, PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed, NcclError: as for
                all_reduce.
        """
        call = self._find_known("reduce_scatter", op, array, out) if sizes is None else None
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

    # -- Movements: rows are along the first axis; a 0-d array is one row ----------------------------------------

    def broadcast(self, array: Any, root: int = 0, *, stream: Any = None) -> Any:
        """Copies the root's `array` into the `array` of every other rank, in place.

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
            PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed, NcclError: as for all_reduce.
        """
        call = self._find_known("broadcast", root, array, None) if type(root) is int else None
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

    def all_gather(self, array: Any, *, sizes: Sizes = None, out: Any = None, stream: Any = None) -> Any:
        """Concatenates the arrays of all ranks along the first axis, in rank order; every rank gets the result.

        Every rank must call it, with equal dtypes, the same `sizes`, and shapes that differ at most in the number of
        rows.

        Args:
            array: array of any layout and dtype without Python objects, on this communicator's device.
            sizes: number of rows of each rank. None: equal numbers. "ask": the ranks exchange the numbers first.
            out: array for the result; `array` may be exactly this rank's rows of it. None makes a new array.
            stream: CUDA stream that orders the operation. Unused on the CPU.

        Returns:
            `out`, or a new array.

        Raises:
            InvalidArgument: not an array, sizes that do not fit, `out` with sizes "ask", or a wrong `out`.
            UnsupportedDtype, PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed, NcclError: as for
                broadcast.
        """
        call = self._find_known("all_gather", None, array, out) if sizes is None else None
        return self._run(call or self._gathering("all_gather", array, None, sizes, out), stream)

    def gather(self, array: Any, root: int = 0, *, sizes: Sizes = None, out: Any = None, stream: Any = None) -> Any:
        """Concatenates the arrays of all ranks along the first axis, in rank order; the root gets the result.

        Every rank must call it, with equal dtypes, the same root and `sizes`, and shapes that differ at most in the
        number of rows.

        Args:
            array: as for all_gather.
            root: the rank that gets the result.
            sizes: as for all_gather.
            out: on the root as for all_gather. Ignored on other ranks.
            stream: CUDA stream that orders the operation. Unused on the CPU.

        Returns:
            On the root `out`, or a new array; None on other ranks.

        Raises:
            InvalidArgument: a root outside the communicator, or as for all_gather.
            UnsupportedDtype, PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed, NcclError: as for
                broadcast.
        """
        root = checked_rank(self._backend, "gather", "root", root)
        return self._run(self._gathering("gather", array, root, sizes, out if self.rank == root else None), stream)

    def _gathering(self, what: str, array: Any, root: int | None, sizes: Sizes, out: Any) -> CollectiveCall:
        """Makes the call of a gather; if the root is None, of an all_gather."""
        source = self._native_array(array, what)
        rows, *rest = source.shape or (1,)
        to_root = "" if root is None else f"root {root}"
        # NumPy limits the size of empty rows as if they had one element.
        row_bytes = math.prod([length or 1 for length in rest]) * source.dtype.itemsize
        if (sizes is None or isinstance(sizes, str)) and rows * self.world_size * row_bytes >= _TOO_MUCH:
            raise InvalidArgument(f"{self.label}: {what} of {rows} rows from each rank does not fit into an array")

        if isinstance(sizes, str):
            if sizes != "ask":
                raise InvalidArgument(f'{self.label}: {what} needs sizes as a list, None or "ask", got {sizes!r}')
            if out is not None:
                raise InvalidArgument(f'{self.label}: {what} with out= needs sizes as a list, got "ask"')
            asking = agreement_on(what, (ROWS, *rest), source.dtype, _joined("rows asked for", to_root))

            def ask_and_gather(launch: Any) -> Any:
                answers = [numbers[0] for numbers in self._backend.share_numbers([rows], asking)]
                _, _, gather, _, _ = self._gathering(what, source, root, answers, None)
                return gather(launch)

            return what, asking, ask_and_gather, None, None
        if sizes is None:
            of_ranks = (rows,) * self.world_size
            agreement = agreement_on(what, source.shape, source.dtype, to_root)
        else:
            of_ranks = self._checked_sizes(what, "sizes", sizes, row_bytes=row_bytes)
            if of_ranks[self.rank] != rows:
                raise InvalidArgument(
                    f"{self.label}: {what}: sizes {list(of_ranks)} give this rank {of_ranks[self.rank]} rows, but its "
                    f"array has {rows}"
                )
            detail = _joined(f"rows {list(of_ranks)}", to_root)
            agreement = agreement_on(what, (ROWS, *rest), source.dtype, detail)
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
        """Divides the rows of the root's `array` in rank order; each rank gets its part.

        Every rank must call it, with the same root and sizes, and with parts of equal dtypes; without sizes also of
        equal shapes.

        Args:
            array: on the root an array of any layout and dtype without Python objects, on this communicator's device.
                Ignored on other ranks: pass None.
            root: the rank that has the rows.
            sizes: number of rows of each rank; None is equal parts.
            out: array for this rank's rows. Required on all ranks but the root, because only the root knows the rows'
                shape and dtype.
            stream: CUDA stream that orders the operation. Unused on the CPU.

        Returns:
            This rank's rows: `out`, or a new array.

        Raises:
            InvalidArgument: a root outside the communicator, rows that do not divide equally, sizes that do not add up
                to the array's rows, or a wrong or missing `out`.
            UnsupportedDtype, PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed, NcclError: as for
                broadcast.
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

        Every rank must call it, with equal dtypes; without sizes also with equal shapes.

        Args:
            array: array of any layout and dtype without Python objects, on this communicator's device.
            send_sizes: number of rows for each rank. None, on all ranks: equal parts. A list, on all ranks: the ranks
                exchange the lists first.
            recv_sizes: number of rows from each rank, if this rank knows them: they are compared with the senders'
                lists.
            out: array for the result; with `send_sizes` it needs `recv_sizes`. None makes a new array.
            stream: CUDA stream that orders the operation. Unused on the CPU.

        Returns:
            The received rows, in rank order: `out`, or a new array.

        Raises:
            InvalidArgument: rows that do not divide equally, sizes that do not add up to the array's rows, wrong `out`.
            PlanMismatch: the ranks disagree, or a rank expects another number of rows than another rank sends to it.
            UnsupportedDtype, RankFailed, CollectiveTimeout, CommunicatorClosed, NcclError: as for broadcast.
        """
        is_even = send_sizes is None and recv_sizes is None
        call = self._find_known("all_to_all", None, array, out) if is_even else None
        if call is not None:
            return self._run(call, stream)
        what = "all_to_all"
        source = self._native_array(array, what)
        rows, *rest = source.shape or (1,)
        if send_sizes is None and recv_sizes is not None:
            raise InvalidArgument(f"{self.label}: {what} with recv_sizes needs send_sizes, got None")
        sending = receiving = self._checked_division(what, "send_sizes", send_sizes, rows)
        if send_sizes is None:
            agreement = agreement_on(what, source.shape, source.dtype, "")
        else:
            agreement = agreement_on(what, (ROWS, *rest), source.dtype, "uneven rows")
            if recv_sizes is not None:
                receiving = self._checked_sizes(what, "recv_sizes", recv_sizes)
            elif out is None:
                receiving = (_UNKNOWN,) * self.world_size
            else:
                raise InvalidArgument(f"{self.label}: {what} with send_sizes and out needs recv_sizes, got None")
        target = None if out is None else self._checked_out(what, out, (sum(receiving), *rest), source.dtype)

        def call_with(coming: tuple[int, ...], largest: int) -> CollectiveCall:
            sent = _parts(source.shape, sending, source.dtype.itemsize, self.rank)
            received = _parts(source.shape, coming, source.dtype.itemsize, self.rank)
            of_ranks = sent.byte_bounds, received.byte_bounds, largest * sent.row_bytes

            def transfer(flat: Array, flat_target: Array) -> None:
                self._backend.all_to_all(flat.view(BYTE), flat_target.view(BYTE), *of_ranks, agreement)

            plan = (None, partial(self._backend.plan_all_to_all, source.nbytes)) if is_even else None
            return self._call(what, agreement, source, target, transfer, out, shape=received.shape, plan=plan)

        def share_sizes_and_move(launch: Any) -> Any:
            _, _, move, _, _ = call_with(*self._share_sizes(sending, receiving, agreement))
            return move(launch)

        if is_even:
            return self._run(call_with(receiving, sending[0]), stream)
        return self._run((what, agreement, share_sizes_and_move, None, None), stream)

    def _share_sizes(
        self, sending: Sequence[int], receiving: Sequence[int], agreement: Agreement
    ) -> tuple[tuple[int, ...], int]:
        """Returns the number of rows from each rank, and the largest part between any two ranks.

        Raises:
            PlanMismatch: on every rank, if any rank expects another number of rows than another rank sends to it.
        """
        n = self.world_size
        shared = self._backend.share_numbers([*sending, *receiving], agreement)
        for receiver, numbers in enumerate(shared):
            for sender, expected in enumerate(numbers[n:]):
                if expected not in (_UNKNOWN, shared[sender][receiver]):
                    raise mismatch(self.label, agreement, self._descriptions(shared))
        return tuple([numbers[self.rank] for numbers in shared]), max([max(numbers[:n]) for numbers in shared])

    def _descriptions(self, shared: Sequence[Sequence[int]]) -> dict[int, Description]:
        n = self.world_size
        return {
            rank: Description("all_to_all", detail=f"sends rows {list(numbers[:n])}, expects {_expected(numbers[n:])}")
            for rank, numbers in zip(self.ranks, shared, strict=True)
        }

    # -- Messages: two ranks receive them in the order of sending; there are no tags -----------------------------

    def send(self, array: Any, dest: int, *, stream: Any = None) -> None:
        """Sends an array to one other rank, which must call recv. Returns when that rank has received it.

        If two ranks both send first, or both receive first, they wait for each other until the deadline: use exchange.
        On a GPU it returns when the message has been launched.

        Args:
            array: array of any shape, layout and dtype without Python objects, on this communicator's device.
            dest: the receiving rank, not this one.
            stream: CUDA stream that orders the operation. Unused on the CPU.

        Raises:
            InvalidArgument: not an array, or `dest` is not another rank of this communicator.
            UnsupportedDtype: the dtype holds Python objects.
            PlanMismatch: the other rank expects another shape or dtype, or runs another collective; raised on both.
            RankFailed, CollectiveTimeout, CommunicatorClosed, NcclError: as for all_reduce.
        """
        dest = self._checked_peer("send", "dest", dest)
        source = self._native_array(array, "send")
        agreement = self._message_agreement(source, self.rank, dest)

        def transfer(flat: Array, _: None) -> None:
            self._backend.exchange(Message(dest, flat.view(BYTE), agreement), None)

        return cast(None, self._run(self._call("send", agreement, source, None, transfer), stream))

    def recv(self, array: Any, source: int, *, stream: Any = None) -> Any:
        """Receives an array from one other rank, which must call send.

        Args:
            array: array for the values, of the sent shape and dtype, in any layout, on this communicator's device.
            source: the sending rank, not this one.
            stream: CUDA stream that orders the operation. Unused on the CPU.

        Returns:
            `array`.

        Raises:
            InvalidArgument: not a writable array, or `source` is not another rank of this communicator.
            UnsupportedDtype, PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed, NcclError: as for send.
        """
        source = self._checked_peer("recv", "source", source)
        target = self._native_array(array, "recv")
        self._check_writable("recv", target, remedy="pass another array")
        agreement = self._message_agreement(target, source, self.rank)

        def transfer(_: None, flat: Array) -> None:
            self._backend.exchange(None, Message(source, flat.view(BYTE), agreement))

        return self._run(self._call("recv", agreement, None, target, transfer, array), stream)

    def exchange(self, array: Any, *, dest: int, out: Any, source: int, stream: Any = None) -> Any:
        """Sends an array to one rank and at the same time receives an array from the same or another rank.

        Two ranks that exchange with each other cannot deadlock, nor a ring in which each rank sends to the next. Among
        more ranks, exchanges with one partner each, in different orders, wait for each other until CollectiveTimeout.
        The other side of each message may also be a plain send or recv.

        Args:
            array: the array to send, as for send.
            dest: the receiving rank; may be this one if `source` is this one too.
            out: array for the received values, of their shape and dtype; may share memory with `array`.
            source: the rank to receive from.
            stream: CUDA stream that orders the operation. Unused on the CPU.

        Returns:
            `out`.

        Raises:
            InvalidArgument: not an array, not a rank of this communicator, or a read-only `out`.
            UnsupportedDtype, PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed, NcclError: as for send.
        """
        dest = self._checked_peer("exchange", "dest", dest, is_self_allowed=True)
        source = self._checked_peer("exchange", "source", source, is_self_allowed=True)
        if (dest == self.rank) != (source == self.rank):
            raise InvalidArgument(
                f"{self.label}: exchange with itself needs both dest and source {self.rank}, got dest {dest}, "
                f"source {source}"
            )
        outgoing = self._native_array(array, "exchange")
        target = self._native_array(out, "exchange: out")
        self._check_writable("exchange", target, "out", "pass another array")
        sending = self._message_agreement(outgoing, self.rank, dest)
        receiving = self._message_agreement(target, source, self.rank)
        if dest == self.rank and sending.digest != receiving.digest:
            raise InvalidArgument(
                f"{self.label}: exchange with itself needs out of shape {outgoing.shape} and dtype {outgoing.dtype}, "
                f"got shape {target.shape} and dtype {target.dtype}"
            )

        def transfer(flat: Array, flat_target: Array) -> None:
            message = Message(dest, flat.view(BYTE), sending)
            self._backend.exchange(message, Message(source, flat_target.view(BYTE), receiving))

        return self._run(self._call("exchange", sending, outgoing, target, transfer, out), stream)

    def _message_agreement(self, array: Array, sender: int, receiver: int) -> Agreement:
        way = f"rank {self.ranks[sender]} to rank {self.ranks[receiver]}"
        return agreement_on("message", array.shape, array.dtype, way, is_message=True)

    def _checked_peer(self, what: str, name: str, peer: int, *, is_self_allowed: bool = False) -> int:
        number = integer_of(peer)
        if number is None or not 0 <= number < self.world_size or (number == self.rank and not is_self_allowed):
            allowed = rank_range(self._backend) + ("" if is_self_allowed else f", and not {self.rank}, this rank")
            raise InvalidArgument(f"{self.label}: {what} needs {name} from {allowed}, got {shown(peer)}")
        return number

    # -- Barrier, futures, objects -------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Waits until every rank has called it.

        Raises:
            PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed: as for all_reduce.
        """
        agreement = agreement_on("barrier", (), None, "")
        call = "barrier", agreement, lambda _launch: self._backend.barrier(agreement), None, None
        return cast(None, self._run(call, None))

    @cached_property
    def asynchronous(self) -> Asynchronous:
        """The collectives as futures: `communicator.asynchronous.all_reduce(array)` returns at once."""
        return Asynchronous(self)

    @cached_property
    def objects(self) -> Objects:
        """Collectives on Python objects: `communicator.objects.all_gather(anything)`."""
        from gradsync.communicators.objects import Objects

        return Objects(self._backend)

    # -- Groups --------------------------------------------------------------------------------------------------

    @cached_property
    def _tree(self) -> CommunicatorTree:
        """The communicators made from the same world."""
        return CommunicatorTree(self.recorder.group, self._lifetime.raised)

    def new_group(self, ranks: Iterable[int]) -> Communicator | NonMember:
        """Makes a group of some of these ranks, numbered in ascending order.

        Only the members need to call it, and all of them with the same ranks. If groups have common members, these must
        all make the groups in the same order, and call the groups' collectives in the same order. The process group
        closes its groups. Close a group that is not needed any more. This matters most over MPI: it has room for some
        2,000 groups, and a group that is only deleted in Python still takes room.

            group = comm.new_group([0, 2])
            if group:
                group.all_reduce(array)

        Args:
            ranks: the members, as numbered in this communicator, in any order.

        Returns:
            The group; on a rank that is not a member a NonMember, which is false and not None.

        Raises:
            InvalidArgument: no ranks, a rank twice, or a rank outside this communicator.
            RendezvousTimeout: a member did not call new_group within the time limit of this communicator's collectives;
                the text names the missing members.
            RankFailed, BackendUnavailable, CommunicatorClosed, NcclError: the group cannot be made. If one rank fails
                here, all ranks fail. Aborting this communicator ends the wait for the members.
        """
        members = self._checked_members(ranks)
        if pending:
            check_may_call(self.label, "new_group")
        self._lifetime.check_usable("new_group")
        if self.rank not in members:
            return NonMember(self.label, f"the group of ranks {self._listed(members)}")
        return self._make_group("new_group", members, partial(self._backend.connect_group, members))

    def split(self, color: int | None, key: int = 0) -> Communicator | NonMember:
        """Makes a group of the ranks of each color.

        Every rank must call it.

        Args:
            color: any integer of 64 bits. A rank with None joins no group.
            key: orders the ranks of a group; ranks with equal keys keep their order.

        Returns:
            The group of this rank's color; for None a NonMember, which is false and not None.

        Raises:
            InvalidArgument: color or key is not an integer of 64 bits.
            PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed, NcclError: as for all_reduce.
            RendezvousTimeout, BackendUnavailable: as for new_group.
        """
        agreement = agreement_on("split", (), None, "")
        number = 0 if color is None else self._checked_word("color", color)
        mine = [0 if color is None else 1, number, self._checked_word("key", key)]
        shared = self._share_numbers("split", mine, agreement)
        colors = list(dict.fromkeys([number for has_color, number, _ in shared if has_color]))
        if color is None:
            with reporting_failures(self._backend, "split"):
                self._backend.split_group(NO_COLOR, 0, (), "")
            return NonMember(self.label, "any group of a split in which its color was None")
        same = [rank for rank, (has_color, number, _) in enumerate(shared) if has_color and number == color]
        members = tuple(sorted(same, key=lambda rank: (shared[rank][2], rank)))
        connect = partial(self._backend.split_group, colors.index(color), members.index(self.rank), members)
        return self._make_group("split", members, connect)

    def split_by_machine(self) -> Communicator:
        """Makes a group of the ranks on each machine. Every rank must call it.

        Ranks in different containers of one machine count as on different machines: they cannot see each other's
        processes.

        Returns:
            The group of this rank's machine.

        Raises:
            PlanMismatch, RankFailed, CollectiveTimeout, RendezvousTimeout, CommunicatorClosed, ...: as for split.
        """
        import socket  # imported here to keep the start of a rank short

        machine = digest_of("machine", machine_identity() or socket.gethostname())
        return cast(Communicator, self.split(machine - 2**63))  # it has a color

    def _make_group(
        self, what: str, members: tuple[int, ...], connect: Callable[[str], Backend | None]
    ) -> Communicator:
        """Makes the group of some members, one of which is this rank; `connect(name)` makes its backend."""
        name = self._tree.new_name(self._listed(members))
        with reporting_failures(self._backend, what):
            await_members(self._backend, what, members, name)
            group = Communicator(cast(Backend, connect(name)))  # not None: this rank is a member
        if self._debug:
            group._use_debug_mode()
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
            needed = "an integer of 64 bits or None" if name == "color" else "an integer of 64 bits"
            raise InvalidArgument(f"{self.label}: split needs {name} to be {needed}, got {value!r}")
        return number

    # -- Closing and aborting ------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether the communicator can no longer be used."""
        return self._lifetime.ended_because is not None

    def close(self) -> None:
        """Closes the communicator and frees its resources. Not collective. Idempotent.

        First it waits for submitted asynchronous collectives, each with its own deadline, and on NCCL up to 20 s for
        launched work. Otherwise it never waits for other ranks. A rank that still needs this one afterwards gets
        RankFailed.

        Raises:
            RankFailed, CollectiveTimeout, PlanMismatch, NcclError: a failure on the GPU that no call has raised yet.
        """
        # Read before draining, which adds failures.
        was_raised, raised = self._lifetime.was_raised, self._lifetime.raised.copy()
        failure = None if self.closed else self._backend.drain()
        try:
            self._lifetime.close()
        finally:
            self._backend.await_announced()
        if failure is not None and not was_raised and not raised.has(failure):
            raise failure

    def abort(self, reason: str, *, culprit: int | None = None) -> None:
        """Breaks the communicator for all ranks: the others get RankFailed in their current or next collective.

        Args:
            reason: the text for every rank, e.g. "ValueError in the backward pass".
            culprit: the rank that the others' RankFailed names; None is this rank.
        """
        self._lifetime.raised.was_aborted = True  # the caller knows: closing raises no further failure
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

    def _use_debug_mode(self) -> None:
        """For gradsync's own use: from now on the ranks agree on every collective before data moves.

        Every rank must call it. It changes nothing for a backend that always compares digests before data moves.
        """
        self._debug = True
        self._backend.agree_always()

    def _share_numbers(self, what: str, numbers: Sequence[int], agreement: Agreement) -> list[list[int]]:
        """Returns the numbers of every rank, by rank; for gradsync's own use.

        Every rank must call it, with an equal count of numbers.

        Args:
            what: the operation's name in errors.
            numbers: up to some thousands of 64-bit integers.
            agreement: this rank's agreement.

        Raises:
            PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed, NcclError: as for all_reduce.
        """
        shared: list[list[int]] = self._run(
            (what, agreement, lambda _launch: self._backend.share_numbers(numbers, agreement), None, None), None
        )
        return shared

    def _agree(self, agreement: Agreement) -> None:
        """Checks that all ranks have the same agreement; may wait for all ranks. For bucketing.

        Raises:
            PlanMismatch: the ranks' digests differ.
        """
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
        """Makes the call of a checked collective: flattens its arrays, calls the backend, and delivers the result.

        Args:
            what: the collective's name in errors.
            agreement: the collective's agreement.
            source: the native array to send; None if this rank sends nothing.
            target: the native array that receives the result; None if there is none, see `shape`.
            transfer: transfer(flat source, flat target) calls the backend.
            given: the caller's array that holds the result afterwards, to be returned; None returns the native target.
            shape: the shape of the new array that receives the result if there is no target; None if this rank gets no
                result.
            in_place: whether the backend may write the result over the source, if the target is the source.
            own_part: see _flat_source.
            plan: how to get the backend's plan for repeated calls; None if it plans no such calls.
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
                self._remember(what, agreement, source, plan, None if in_place else shape)
            return result if given is None else given

        return what, agreement, move, None, None

    def _run(self, call: CollectiveCall, stream: Any) -> Any:
        """Runs a checked collective; returns its result."""
        what, agreement, move, source, target = call
        if target is not None and not self._runs_beside_host:  # a plan on the CPU: there is no stream
            with self._lifetime.collective(what, agreement):
                move(source, target, agreement)
            return target
        stream = self._checked_stream(stream, what)
        with self._lifetime.collective(what, agreement):
            with self._backend.launching(stream) as launch:
                if target is not None:
                    move(source, target, agreement)
                    return target
                result = move(launch)
            self._backend.await_host_results(launch)
        return result

    # -- Repeated calls ------------------------------------------------------------------------------------------

    def _find_known(self, what: str, detail: Any, array: Any, out: Any) -> CollectiveCall | None:
        """Returns a call that repeats an earlier one, after a check of the flags of its arrays.

        Returns:
            None for any other call: the caller of this method then makes all checks, which raise the errors.
        """
        if type(array) is not self._plans_for:
            return None
        try:
            known = self._known.get((what, detail, array.shape, array.dtype))
        except TypeError:  # the operator cannot be hashed: it is invalid
            return None
        if known is None:
            return None
        agreement, run, shape, in_place = known
        flags = array.flags
        if not flags.c_contiguous:
            return None
        if self._runs_beside_host:
            is_known = in_place and out is None and self._backend.takes(array)
            return (what, agreement, run, array, array) if is_known else None
        if out is not None:
            if type(out) is not np.ndarray or out.shape != shape or out.dtype != array.dtype:
                return None
            flags = out.flags
            return (what, agreement, run, array, out) if flags.c_contiguous and flags.writeable else None
        if not in_place:
            return what, agreement, run, array, np.empty(shape, array.dtype)
        return (what, agreement, run, array, array) if flags.writeable else None

    def _remember(
        self, what: str, agreement: Agreement, source: Array, plan: _MakePlan, new_shape: Shape | None
    ) -> None:
        """Stores the backend's plan, if there is one, for `_find_known`. Only a running collective may call it.

        Args:
            what, agreement, source, plan: as for `_call`.
            new_shape: the shape of the result, for which each call needs `out` or a new array; None if the array itself
                receives the result.
        """
        detail, make_plan = plan
        run = make_plan()
        if run is None:
            return
        if len(self._known) >= _MAX_KNOWN:
            del self._known[next(iter(self._known))]  # the oldest
        shape = source.shape if new_shape is None else new_shape
        self._known[what, detail, source.shape, source.dtype] = _Known(agreement, run, shape, new_shape is None)

    # -- Checks --------------------------------------------------------------------------------------------------

    def _native_array(self, array: Any, what: str) -> Array:
        """Returns `array` as this backend's own array type over the same memory; for bucketing too.

        Args:
            array: the caller's argument.
            what: the operation's name in the error.

        Raises:
            InvalidArgument: not an array, or an array on another device.
            UnsupportedDtype: the elements are Python objects.
        """
        if type(array) is np.ndarray and not array.dtype.hasobject:  # nearly always; saves making the label
            return array
        native: Array = self._arrays.native(array, f"{self.label}: {what}")
        return native

    def _checked_reduction(self, what: str, array: Any, op: str | ReduceOp) -> tuple[Array, ReduceOp]:
        """Returns the native array, and the operator, which the array's dtype supports."""
        is_native = type(array) is np.ndarray and not array.dtype.hasobject  # nearly always
        source = array if is_native else self._native_array(array, what)
        try:
            if not isinstance(op, str):
                ReduceOp.parse(op)  # before the cache below, which needs a hashable operator
            return source, _operator(op, source.dtype)
        except (InvalidArgument, UnsupportedDtype) as error:
            raise type(error)(f"{self.label}: {what}: {error}") from None

    def _checked_target(self, what: str, source: Array, out: Any) -> Array:
        """Returns the native array for a result like the source: the caller's `out`, or the source for None."""
        if out is None:
            self._check_writable(what, source)
            return source
        return self._checked_out(what, out, source.shape, source.dtype)

    def _check_writable(self, what: str, target: Array, name: str = "array", remedy: str = "pass out=") -> None:
        """Raises InvalidArgument if the collective cannot write to an argument.

        Args:
            what: the operation's name in the error.
            target: the native array.
            name, remedy: the argument's name, and the advice in the error.
        """
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
        """Returns a caller's `out` as a native array, if it has the result's shape and dtype."""
        target = out if type(out) is np.ndarray and out.dtype == dtype else self._native_array(out, f"{what}: out")
        if target.shape != shape or target.dtype != dtype:
            raise InvalidArgument(
                f"{self.label}: {what} needs out of shape {shape} and dtype {dtype}, "
                f"got shape {target.shape} and dtype {target.dtype}"
            )
        self._check_writable(what, target, "out", "pass another array")
        return target

    def _checked_sizes(
        self, what: str, name: str, sizes: Any, total: int | None = None, *, row_bytes: int = 1
    ) -> tuple[int, ...]:
        """Returns the number of rows of each rank; their sum must be `total`, if that is known."""
        try:
            checked = tuple(map(operator.index, sizes))
        except TypeError:
            checked = ()
        if len(checked) != self.world_size or min(checked) < 0 or sum(checked) * max(row_bytes, 1) >= _TOO_MUCH:
            raise InvalidArgument(
                f"{self.label}: {what} needs {name} as {self.world_size} numbers of rows, each 0 or more and together "
                f"less than 2**63 bytes, got {sizes!r}"
            )
        if total is not None and sum(checked) != total:
            raise InvalidArgument(
                f"{self.label}: {what}: {name} {list(checked)} add up to {sum(checked)} rows, but the array has {total}"
            )
        return checked

    def _checked_division(self, what: str, name: str, sizes: Any, rows: int) -> tuple[int, ...]:
        """Returns the number of rows of each rank's part of an array; equal parts if `sizes` is None."""
        if sizes is not None:
            return self._checked_sizes(what, name, sizes, rows)
        if rows % self.world_size:
            raise InvalidArgument(
                f"{self.label}: {what} needs a multiple of {self.world_size} rows for equal parts, got {rows}: "
                f"pass {name}="
            )
        return (rows // self.world_size,) * self.world_size

    # -- Arrays --------------------------------------------------------------------------------------------------

    def _flat_source(self, source: Array, target: Array | None, own_part: slice | None) -> Array:
        """Returns the elements of a source as a flat array that can be read while the target is written.

        Args:
            source: native array.
            target: native array for the results; None if writing them cannot change elements of the source that are
                still to be read.
            own_part: the bytes of this rank's part of the larger array. If these are exactly the smaller array, the
                call is in place, which the backend allows.
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
        """Whether the smaller array is exactly the larger array's bytes `own_part`, and both are contiguous."""
        arrays = self._arrays
        if own_part is None or not arrays.is_viewed_flat(source) or not arrays.is_viewed_flat(target):
            return False
        part, whole = sorted(
            [arrays.byte_bounds(source), arrays.byte_bounds(target)], key=lambda ends: ends[1] - ends[0]
        )
        return part == (whole[0] + own_part.start, whole[0] + own_part.stop)

    def _flat_target(self, target: Array) -> Array:
        """Returns a flat array for a target's elements: a view of the target, if that is contiguous on the device."""
        if not self._runs_beside_host and target.flags.c_contiguous:
            return target if target.ndim == 1 else target.ravel()
        arrays = self._arrays
        flat: Array = arrays.flat(target) if arrays.is_viewed_flat(target) else arrays.empty_flat(target)
        return flat

    def _deliver(self, flat: Any, target: Array, launch: Any) -> None:
        """Copies the results to the target, if `flat` is not a view of it."""
        if self._runs_beside_host:
            self._backend.keep(target, flat)
            self._backend.bring_back(flat, target, launch)
        elif not target.flags.c_contiguous:
            self._arrays.write_back(flat, target)


_Parameters = ParamSpec("_Parameters")


class _Submitter(Communicator):
    """A communicator, with the same backend and lifetime, that submits each collective and returns its future."""

    def __init__(self, communicator: Communicator) -> None:
        vars(self).update(vars(communicator))

    def _run(self, call: CollectiveCall, stream: Any) -> CollectiveFuture:
        if not self._runs_beside_host:
            return submit(self._lifetime, call[0], partial(super()._run, call, stream))
        what, agreement, move, source, result = call
        name = f"{self.label}: {what}"
        stream = self._checked_stream(stream, what)
        end = CollectiveEnd()
        producers = [self._mark_work()] if stream is None else None
        context = self._lifetime.collective(what, agreement)
        try:
            with context, self._backend.launching(stream, producers) as launch:
                if result is None:
                    result = move(launch)
                else:
                    move(source, result, agreement)
        except Exception as error:
            closed = isinstance(error, CommunicatorClosed)  # the failure that closed the communicator was reported
            end.finish(None, error, log_entry=None if closed else LostFailure(name, error, self._lifetime))
        else:
            end.finish(result, None, launch)
        return CollectiveFuture(name, end)


def _submitting(
    collective: Callable[Concatenate[Communicator, _Parameters], Any],
) -> Callable[Concatenate[Asynchronous, _Parameters], CollectiveFuture]:
    """Returns the asynchronous form of a collective."""

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
    """`communicator.asynchronous`: the collectives, with the same arguments, as CollectiveFutures at once.

    Every rank must submit its collectives in the same order, blocking ones included. A blocking collective first waits
    for all collectives that its thread has submitted. Wrong arguments raise at once; all other errors are raised by the
    future's result() and wait(). If no code asks a failed future, the failure is logged. A failed collective fails only
    its own future. Until a future is done, the collective's arrays belong to gradsync.

    Messages wait in the same queue as other collectives: send is not MPI's Isend. If two ranks each submit a recv
    before the send that the other needs, they wait for each other until the deadline. Use exchange, which sends and
    receives at once, or let the lower rank send first and the higher rank receive first.

    A done-callback must not call or submit collectives, on any backend: that raises InvalidArgument, see
    CollectiveFuture.add_done_callback. To wait in a done-callback for a future that is not done raises FutureNotReady.

    On the CPU a collective waits in a queue and runs in another thread. On a GPU it is launched at once: without a
    stream it runs on the communicator's own stream, after the current stream's work so far, and result() makes the
    current stream wait for it.

    Args:
        communicator: runs the collectives.
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
    """The parts of the ranks in a flat array of rows.

    Attributes:
        shape: the shape of all rows; with a first axis, as a 0-d array is one row.
        part_shape: the shape of this rank's rows.
        bounds, byte_bounds: the bounds of the ranks' parts, in elements and in bytes.
        own_bytes: this rank's part, in bytes.
        row_bytes: the size of a row.
    """

    shape: Shape
    part_shape: Shape
    bounds: Bounds
    byte_bounds: Bounds
    own_bytes: slice
    row_bytes: int


@lru_cache(maxsize=1024)
def _parts(shape: Shape, sizes: tuple[int, ...], itemsize: int, rank: int) -> _Parts:
    """Returns the parts of an array with rows like those of `shape`; `sizes` has the number of rows of each rank."""
    rest = row_shape(shape)[1:]
    row = row_elements((0, *rest))
    byte_bounds = bounds_of(sizes, row * itemsize)
    return _Parts(
        (sum(sizes), *rest),
        (sizes[rank], *rest),
        bounds_of(sizes, row),
        byte_bounds,
        part_of(byte_bounds, rank),
        row * itemsize,
    )


@lru_cache(maxsize=1024)
def _operator(op: str | ReduceOp, dtype: np.dtype[Any]) -> ReduceOp:
    """Returns the operator of a reduction.

    Raises:
        InvalidArgument: not an operator.
        UnsupportedDtype: the dtype does not support the operator.
    """
    parsed = ReduceOp.parse(op)
    check_operation(parsed, dtype)
    return parsed


def _joined(*details: str) -> str:
    return ", ".join([detail for detail in details if detail])


def _expected(numbers: Sequence[int]) -> str:
    return "any" if _UNKNOWN in numbers else str(list(numbers))
