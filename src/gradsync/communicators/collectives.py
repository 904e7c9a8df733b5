"""The public collectives: each checks its arguments, describes the call, and calls the backend.

Arguments are checked before any other rank is involved. Then an Agreement describes the call; `_run` takes the
communicator for it, makes the arrays flat, and calls one method of the backend, which compares the ranks' agreements
and moves the bytes. `Communicator` and `Asynchronous` (communicator.py) differ in `_finish`: one returns the result,
the other a future.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import numpy as np

from gradsync.communicators.agreement import (
    ROWS,
    Agreement,
    Description,
    LayoutsDiffer,
    agreement_on,
    mismatch,
)
from gradsync.communicators.backend import (
    Backend,
    Bounds,
    Message,
    Shape,
    bounds_of,
    checked_rank,
    part_of,
)
from gradsync.communicators.host_arrays import overlaps_itself
from gradsync.communicators.lifetime import Lifetime
from gradsync.errors import InvalidArgument, UnsupportedDtype
from gradsync.futures import Work
from gradsync.reduction import Array, ReduceOp, operator_for
from gradsync.words import refuse_keywords, refuse_removed

BYTE = np.dtype(np.uint8)

_TOO_MUCH = 2**63  # for NumPy's sizes, and for the numbers that ranks exchange

#: The layout of one array in Fortran order; see Agreement.
_FORTRAN = 1


class Collectives(ABC):
    """The collectives of a group of ranks.

    Every rank must call the same collectives in the same order; each says which arguments must be equal on all. Arrays
    may have any shape and layout: NumPy's, CuPy's, or any that DLPack hands over without a copy, in host memory or on
    the communicator's GPU.

    `stream` is the CUDA stream to run on, ignored on the CPU. By default a blocking collective runs on CuPy's current
    stream, and an asynchronous one on the communicator's own.

    All collectives raise:
        InvalidArgument: an argument is wrong, such as an array on another device, or a read-only one for the result; a
            done-callback calls it; another thread runs a collective of this communicator.
        UnsupportedDtype: the elements are Python objects, or the dtype does not support the operator.
        PlanMismatch: the ranks called different collectives, or passed arguments that must be equal and differ. All
            ranks raise it before data moves, and the communicator stays usable.
        RankFailed: another rank has died, or has closed or aborted the communicator.
        CollectiveTimeout: a rank did not call the collective before the deadline, or a GPU did not end it.
        CommunicatorClosed: the communicator was closed or aborted, has failed, or belongs to the parent of this fork.
        NcclError, MpiError: NCCL, the GPU or MPI failed.
        RendezvousError: the connection to the rendezvous server was lost.
    """

    def __init__(self, backend: Backend, lifetime: Lifetime) -> None:
        self._backend = backend
        self._arrays = backend.arrays
        self._lifetime = lifetime
        self._messages = lifetime.messages
        self.rank = backend.rank
        self.world_size = backend.world_size
        self.ranks = backend.ranks
        self.label = backend.label

    @abstractmethod
    def _finish(self, what: str, work: Work, result: Any) -> Any:
        """Returns what the collective `what` returns, whose backend's method has returned."""

    @abstractmethod
    def _after(self, stream: Any) -> list[Any] | None:
        """Returns what `Backend.launching` takes as `after`."""

    @abstractmethod
    def _send_and_receive(
        self, what: str, sends: Sequence[Message], receives: Sequence[Message], stream: Any, result: Any
    ) -> Any:
        """Begins messages, and returns what the call returns."""

    # -- Reductions ----------------------------------------------------------------------------------------------

    def all_reduce(
        self, array: Any, op: str | ReduceOp = "sum", *, out: Any = None, stream: Any = None, **foreign: NoReturn
    ) -> Any:
        """Reduces `array` over all ranks, element by element; every rank gets the result.

        Shapes, dtypes and operators must be equal. Arrays may be in C order on one rank and in Fortran order on
        another; with one order on all ranks no copy is made.

        Args:
            array: the values of this rank; receives the result if `out` is None.
            op: "sum", "mean" (of floating or complex numbers), "prod", "min" or "max". On the CPU, half precision is
                accumulated in float32.
            out: an array of the same shape and dtype for the result. `array` then stays as it is, unless it shares
                memory with `out`.
            stream: see the class.

        Returns:
            `out`, or `array` when `out` is None.
        """
        if foreign:
            _refuse("all_reduce", foreign)
        source, parsed = self._checked_reduction("all_reduce", array, op)
        target = self._checked_target("all_reduce", source, out)
        agreement = agreement_on("all_reduce", source.shape, source.dtype, parsed._value_)
        given = array if out is None else out

        def run(source: Array, target: Array, agreement: Agreement) -> Any:
            def reduce(flat: Array, flat_target: Array) -> None:
                self._backend.all_reduce([flat], [flat_target], parsed, agreement)

            return self._run("all_reduce", agreement, stream, source, target, reduce, given, is_in_place=True)

        try:
            if not self._backend.on_gpu and is_fortran(source) and is_fortran(target):  # as they lie
                turned = source.T
                turned_target = turned if target is source else target.T
                return run(turned, turned_target, agreement._replace(layout=_FORTRAN))
            return run(source, target, agreement)
        except LayoutsDiffer:  # on all ranks
            return run(source, target, agreement)

    def reduce(
        self,
        array: Any,
        op: str | ReduceOp = "sum",
        root: int = 0,
        *,
        out: Any = None,
        stream: Any = None,
        **foreign: NoReturn,
    ) -> Any:
        """Reduces `array` over all ranks, element by element; the root gets the result.

        Shapes, dtypes, operators and roots must be equal. Over shared memory reduce and all_reduce give the same bits,
        except for products of complex numbers; over MPI and NCCL the bits may differ.

        Args:
            array: the values of this rank; on the root it receives the result if `out` is None.
            op: the operator, as for all_reduce.
            root: the rank that gets the result.
            out: on the root, an array of the same shape and dtype for the result; ignored elsewhere.
            stream: see the class.

        Returns:
            On the root `out`, or `array` if `out` is None; elsewhere None.
        """
        if foreign:
            _refuse("reduce", foreign)
        source, parsed = self._checked_reduction("reduce", array, op)
        root = checked_rank(self._backend, "reduce", "root", root)
        is_root = self.rank == root
        target = self._checked_target("reduce", source, out) if is_root else None
        agreement = agreement_on("reduce", source.shape, source.dtype, f"{parsed._value_}, root {root}")

        def reduce(flat: Array, flat_target: Array | None) -> None:
            self._backend.reduce(flat, flat_target, parsed, root, agreement)

        given = (array if out is None else out) if is_root else None
        return self._run("reduce", agreement, stream, source, target, reduce, given, is_in_place=True)

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

        Shapes, dtypes, operators and sizes must be equal. Over shared memory the bits are those of all_reduce, except
        for products of complex numbers.

        Args:
            array: the values of this rank. Its rows, along the first axis, are divided among the ranks in rank order.
            op: the operator, as for all_reduce.
            sizes: the number of rows of each rank; None divides them equally.
            out: an array for this rank's rows of the result, which may be exactly these rows of `array`; None makes a
                new one.
            stream: see the class.

        Returns:
            `out`, or a new array, with this rank's rows of the result.
        """
        source, parsed = self._checked_reduction("reduce_scatter", array, op)
        of_ranks = self._checked_division("reduce_scatter", "sizes", sizes, source.shape[0] if source.shape else 1)
        parts = _parts(source.shape, of_ranks, source.dtype.itemsize, self.rank)
        detail = parsed._value_ if sizes is None else f"{parsed._value_}, rows {list(of_ranks)}"
        agreement = agreement_on("reduce_scatter", source.shape, source.dtype, detail)
        target = None if out is None else self._checked_out("reduce_scatter", out, parts.part_shape, source.dtype)

        def reduce(flat: Array, flat_target: Array) -> None:
            self._backend.reduce_scatter(flat, flat_target, parts.bounds, parsed, agreement)

        shape, own = parts.part_shape, parts.own_bytes
        return self._run("reduce_scatter", agreement, stream, source, target, reduce, out, shape=shape, own_part=own)

    # -- Collectives without arithmetic. Rows are along the first axis; a 0-d array is one row -------------------

    def broadcast(self, array: Any, root: int = 0, *, stream: Any = None, **foreign: NoReturn) -> Any:
        """Copies the root's `array` into the `array` of every other rank, in place.

        Shapes, dtypes and roots must be equal.

        Args:
            array: the values on the root; receives them on the other ranks. Any dtype except Python objects.
            root: the rank whose values all ranks get.
            stream: see the class.

        Returns:
            `array`.
        """
        if foreign:
            _refuse("broadcast", foreign)
        root = checked_rank(self._backend, "broadcast", "root", root)
        native = self.native_array(array, "broadcast")
        if self.rank != root:
            self._check_writable("broadcast", native, remedy="pass a copy")
        agreement = agreement_on("broadcast", native.shape, native.dtype, f"root {root}")

        def copy(flat: Array, _: Array | None) -> None:
            self._backend.broadcast([flat.view(BYTE)], root, agreement)

        target = None if self.rank == root else native
        return self._run("broadcast", agreement, stream, native, target, copy, array, is_in_place=True)

    def all_gather(self, array: Any, *, sizes: Sequence[int] | None = None, out: Any = None, stream: Any = None) -> Any:
        """Concatenates the arrays of all ranks along the first axis, in rank order; every rank gets the result.

        Dtypes and `sizes` must be equal, and shapes may differ in the number of rows only.

        Args:
            array: the rows of this rank. Any dtype except Python objects.
            sizes: the number of rows of each rank; None where all have the same. If each rank knows only its own,
                `comm.all_gather(np.array([len(array)]))` gives the list.
            out: an array for the result; `array` may be exactly this rank's rows of it. None makes a new one.
            stream: see the class.

        Returns:
            `out`, or a new array, with the rows of all ranks.
        """
        return self._gather("all_gather", array, None, sizes, out, stream)

    def gather(
        self,
        array: Any,
        root: int = 0,
        *,
        sizes: Sequence[int] | None = None,
        out: Any = None,
        stream: Any = None,
        **foreign: NoReturn,
    ) -> Any:
        """Concatenates the arrays of all ranks along the first axis, in rank order; the root gets the result.

        Dtypes, roots and `sizes` must be equal, and shapes may differ in the number of rows only.

        Args:
            array: the rows of this rank, as for all_gather.
            root: the rank that gets the result.
            sizes: the number of rows of each rank, as for all_gather.
            out: on the root, an array for the result, as for all_gather; ignored elsewhere.
            stream: see the class.

        Returns:
            On the root the rows of all ranks, in `out` or in a new array; elsewhere None.
        """
        if foreign:
            _refuse("gather", foreign)
        root = checked_rank(self._backend, "gather", "root", root)
        return self._gather("gather", array, root, sizes, out if self.rank == root else None, stream)

    def _gather(
        self, what: str, array: Any, root: int | None, sizes: Sequence[int] | None, out: Any, stream: Any
    ) -> Any:
        """Runs gather, or all_gather if `root` is None."""
        if isinstance(sizes, str):
            refuse_removed(what, f"sizes={sizes!r}")
        source = self.native_array(array, what)
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
        target = None if out is None else self._checked_out(what, out, parts.shape, source.dtype)
        shape = parts.shape if root in (None, self.rank) else None

        def gather(flat: Array, flat_target: Array | None) -> None:
            data, room = flat.view(BYTE), None if flat_target is None else flat_target.view(BYTE)
            if root is not None:
                self._backend.gather(data, room, parts.byte_bounds, root, agreement)
            elif room is not None:
                self._backend.all_gather(data, room, parts.byte_bounds, agreement)

        return self._run(what, agreement, stream, source, target, gather, out, shape=shape, own_part=parts.own_bytes)

    def scatter(
        self,
        array: Any,
        root: int = 0,
        *,
        sizes: Sequence[int] | None = None,
        out: Any = None,
        stream: Any = None,
        **foreign: NoReturn,
    ) -> Any:
        """Divides the rows of the root's `array` among the ranks in rank order.

        Roots and `sizes` must be equal. The root's `array` and the others' `out` must have the same dtype and rows of
        the same shape.

        Args:
            array: on the root, the rows, of any dtype except Python objects; elsewhere None.
            root: the rank that has the rows.
            sizes: the number of rows of each rank; None divides them equally.
            out: an array for this rank's rows. Every rank but the root must pass it: only the root knows their shape
                and dtype.
            stream: see the class.

        Returns:
            `out`, or a new array, with this rank's rows.
        """
        if foreign:
            _refuse("scatter", foreign)
        root = checked_rank(self._backend, "scatter", "root", root)
        is_root = self.rank == root
        if is_root and array is None:
            raise InvalidArgument(f"{self.label}: scatter needs an array on its root, which is this rank; got None")
        if not is_root and out is None:
            raise InvalidArgument(
                f"{self.label}: scatter needs out= on every rank but the root, got None; only the root, rank "
                f"{self.ranks[root]}, knows the shape and dtype of the rows"
            )
        source = self.native_array(array, "scatter") if is_root else None
        model = self.native_array(out, "scatter: out") if source is None else source
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

        def scatter(flat: Array | None, flat_target: Array) -> None:
            data = None if flat is None else flat.view(BYTE)
            self._backend.scatter(data, flat_target.view(BYTE), parts.byte_bounds, root, agreement)

        return self._run("scatter", agreement, stream, source, target, scatter, out, shape=parts.part_shape)

    def all_to_all(
        self,
        array: Any,
        *,
        send_sizes: Sequence[int] | None = None,
        recv_sizes: Sequence[int] | None = None,
        out: Any = None,
        stream: Any = None,
    ) -> Any:
        """Sends part i of the rows of `array` to rank i, from each rank to all.

        Dtypes and the shape of rows must be equal; without sizes the numbers of rows too. Either every rank passes both
        lists of sizes, or none does.

        Args:
            array: the rows of this rank. Any dtype except Python objects.
            send_sizes: the number of rows that this rank sends to each; None divides them equally.
            recv_sizes: the number of rows that this rank receives from each. The ranks compare both lists before
                anything moves, and raise PlanMismatch if they do not fit.
            out: an array for the result; None makes a new one.
            stream: see the class.

        Returns:
            `out`, or a new array, with the received rows in rank order.
        """
        what = "all_to_all"
        source = self.native_array(array, what)
        rows, *rest = source.shape or (1,)
        if (send_sizes is None) != (recv_sizes is None):
            missing = "send_sizes" if send_sizes is None else "recv_sizes"
            raise InvalidArgument(
                f"{self.label}: {what} needs send_sizes and recv_sizes, or neither; {missing} is missing"
            )
        is_even = send_sizes is None
        sending = receiving = self._checked_division(what, "send_sizes", send_sizes, rows)
        if is_even:
            agreement = agreement_on(what, source.shape, source.dtype, "")
        else:
            agreement = agreement_on(what, (ROWS, *rest), source.dtype, "uneven rows")
            receiving = self._checked_sizes(what, "recv_sizes", recv_sizes)
        sent = _parts(source.shape, sending, source.dtype.itemsize, self.rank)
        received = _parts(source.shape, receiving, source.dtype.itemsize, self.rank)
        target = None if out is None else self._checked_out(what, out, received.shape, source.dtype)

        def exchange(flat: Array, flat_target: Array) -> None:
            largest = sending[0] if is_even else self._compare_sizes(sending, receiving, agreement)
            bounds = sent.byte_bounds, received.byte_bounds
            self._backend.all_to_all(
                flat.view(BYTE), flat_target.view(BYTE), *bounds, largest * sent.row_bytes, agreement
            )

        return self._run(what, agreement, stream, source, target, exchange, out, shape=received.shape)

    def _compare_sizes(self, sending: Sequence[int], receiving: Sequence[int], agreement: Agreement) -> int:
        """Compares what each rank sends with what the others expect, and returns the largest number of rows.

        Raises:
            PlanMismatch: a rank expects other numbers of rows than it is sent. Every rank raises it.
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

    def barrier(self) -> Any:
        """Waits until every rank has called it."""
        agreement = agreement_on("barrier", (), None, "")
        return self._run("barrier", agreement, None, None, None, lambda *_: self._backend.barrier(agreement))

    # -- Messages between two ranks: they are received in the order of sending; there are no tags ----------------

    def send(self, array: Any, dest: int, *, stream: Any = None, **foreign: NoReturn) -> Any:
        """Sends an array to one other rank, which must call recv or exchange for the same shape and dtype.

        On the CPU it returns once that rank has begun to receive; on a GPU once NCCL has launched the message. Two
        ranks that both send first, or both receive first, wait for each other until the deadline: use exchange, or
        `asynchronous.send`.

        Args:
            array: the array to send. Any dtype except Python objects.
            dest: the rank that receives it; not this rank.
            stream: see the class.
        """
        if foreign:
            _refuse("send", foreign)
        dest = checked_rank(self._backend, "send", "dest", dest, is_self_allowed=False)
        stream = self._backend.checked_stream(stream, "send")
        return self._send_and_receive("send", [self._outgoing("send", array, dest, stream)], [], stream, None)

    def recv(self, array: Any, source: int, *, stream: Any = None, **foreign: NoReturn) -> Any:
        """Receives an array from one other rank, which must call send or exchange.

        Args:
            array: an array for the values, with the shape and dtype of what is sent.
            source: the rank that sends it; not this rank.
            stream: see the class.

        Returns:
            `array`.
        """
        if foreign:
            _refuse("recv", foreign)
        source = checked_rank(self._backend, "recv", "source", source, is_self_allowed=False)
        stream = self._backend.checked_stream(stream, "recv")
        incoming = self._incoming("recv", "array", array, source, stream)
        return self._send_and_receive("recv", [], [incoming], stream, array)

    def exchange(self, array: Any, *, dest: int, out: Any, source: int, stream: Any = None) -> Any:
        """Sends an array to one rank, and at the same time receives one from that rank or another.

        Neither two ranks that exchange with each other nor a ring of ranks can deadlock. The other rank of a message
        may also call send or recv.

        Args:
            array: the array to send, as for send.
            dest: the rank that receives it; this rank only if `source` is this rank too.
            out: an array for the received values, with their shape and dtype. It may share memory with `array`.
            source: the rank that sends them.
            stream: see the class.

        Returns:
            `out`.
        """
        dest = checked_rank(self._backend, "exchange", "dest", dest)
        source = checked_rank(self._backend, "exchange", "source", source)
        if (dest == self.rank) != (source == self.rank):
            raise InvalidArgument(
                f"{self.label}: an exchange of this rank with itself needs dest={self.rank} and source={self.rank}, "
                f"got dest={dest} and source={source}"
            )
        stream = self._backend.checked_stream(stream, "exchange")
        incoming = self._incoming("exchange", "out", out, source, stream)
        outgoing = self._outgoing("exchange", array, dest, stream, out)
        if dest == self.rank and outgoing.agreement.digest != incoming.agreement.digest:
            raise InvalidArgument(
                f"{self.label}: an exchange of this rank with itself needs out= with the shape and dtype of its array: "
                f"{outgoing.agreement.headline()}, got {incoming.agreement.headline()}"
            )
        return self._send_and_receive("exchange", [outgoing], [incoming], stream, out)

    def _outgoing(self, what: str, array: Any, dest: int, stream: Any, out: Any = None) -> Message:
        native = self.native_array(array, what)
        agreement = self._message_agreement(native, self.rank, dest)
        flat = self._flat_source(native, None if out is None else self.native_array(out, what), None)
        return Message(dest, flat.view(BYTE), agreement, mark=self._backend.mark_work(stream))

    def _incoming(self, what: str, name: str, array: Any, source: int, stream: Any) -> Message:
        native = self.native_array(array, what if name == "array" else f"{what}: {name}")
        self._check_writable(what, native, name, "pass another array")
        agreement = self._message_agreement(native, source, self.rank)
        target = None if self._arrays.is_viewed_flat(native) else native
        flat = self._flat_target(native).view(BYTE)
        return Message(source, flat, agreement, target, self._backend.mark_work(stream))

    def _message_agreement(self, array: Array, sender: int, receiver: int) -> Agreement:
        way = f"rank {self.ranks[sender]} to rank {self.ranks[receiver]}"
        return agreement_on("message", array.shape, array.dtype, way, is_message=True)

    # -- Running -------------------------------------------------------------------------------------------------

    def _run(
        self,
        what: str,
        agreement: Agreement,
        stream: Any,
        source: Array | None,
        target: Array | None,
        transfer: Callable[[Any, Any], None],
        given: Any = None,
        *,
        shape: Shape | None = None,
        is_in_place: bool = False,
        own_part: slice | None = None,
    ) -> Any:
        """Runs a collective whose arguments have been checked.

        Args:
            what: the collective's name in errors.
            agreement: the description of the call.
            stream: the caller's stream.
            source: the array to send, as native_array has returned it; None if this rank sends nothing.
            target: the array for the result, likewise; None if there is no such array yet: see `shape`.
            transfer: calls the backend: transfer(flat source, flat target).
            given: the caller's array for the result, which the call returns; None: it returns the target.
            shape: if `target` is None, the shape of a new array for the result; None if this rank gets no result.
            is_in_place: whether the backend may write the result over the source, if the target is the source.
            own_part: this rank's part of the larger one of the two arrays; see _flat_source.
        """
        backend, arrays, after = self._backend, self._arrays, None
        if backend.on_gpu:
            self._lifetime.check_usable(what)  # in a forked child CUDA's own error would not say why
            stream = backend.checked_stream(stream, what)
            after = self._after(stream)
        with self._lifetime.turn(what, agreement), backend.launching(stream, after) as launch:
            if target is None and shape is not None and source is not None:
                target = arrays.empty(shape, source.dtype, source)
            is_one_array = is_in_place and target is source
            flat: Any = None
            flat_target: Any = None
            if source is not None:
                flat = self._flat_source(source, None if is_one_array else target, own_part)
            if target is not None:
                flat_target = flat if is_one_array else self._flat_target(target)
            if backend.on_gpu:
                launch.keep(*[array for array in (source, flat, target, flat_target) if array is not None])
            transfer(flat, flat_target)
            if target is not None and not arrays.is_viewed_flat(target):
                launch.write_back(flat_target, target)
        return self._finish(what, launch, target if given is None else given)

    # -- Checks --------------------------------------------------------------------------------------------------

    def native_array(self, array: Any, what: str) -> Any:
        """Returns `array` as one of the backend's own type, NumPy's or CuPy's, over the same memory.

        Args:
            array: the caller's argument.
            what: the operation's name in errors.

        Raises:
            InvalidArgument: `array` is not an array, or is on another device.
            UnsupportedDtype: the elements are Python objects.
        """
        if type(array) is np.ndarray and not array.dtype.hasobject:  # nearly always; saves making the label
            return array
        return self._arrays.native(array, f"{self.label}: {what}")

    def _checked_reduction(self, what: str, array: Any, op: str | ReduceOp) -> tuple[Array, ReduceOp]:
        """Returns the array (see native_array), and the operator, which its dtype supports."""
        source = self.native_array(array, what)
        try:
            parsed = operator_for(op, source.dtype)
            if self._backend.on_gpu:
                self._arrays.check_operation(parsed, source.dtype)
            return source, parsed
        except (InvalidArgument, UnsupportedDtype) as error:
            raise type(error)(f"{self.label}: {what}: {error}") from None

    def _checked_target(self, what: str, source: Array, out: Any) -> Array:
        """Returns the array for the result (see native_array): `out`, or the source if `out` is None."""
        if out is None:
            self._check_writable(what, source)
            return source
        return self._checked_out(what, out, source.shape, source.dtype)

    def _check_writable(self, what: str, target: Array, name: str = "array", remedy: str = "pass out=") -> None:
        """Raises InvalidArgument, with the advice `remedy`, if the argument `name` cannot be written to."""
        if type(target) is np.ndarray and target.flags.carray:  # nearly always
            return
        if not self._arrays.writeable(target):
            flaw = "is read-only"
        elif overlaps_itself(target):
            flaw = f"has elements that share memory (strides {target.strides})"
        else:
            return
        raise InvalidArgument(f"{self.label}: {what} writes into {name}, which {flaw}: {remedy}")

    def _checked_out(self, what: str, out: Any, shape: Shape, dtype: np.dtype[Any]) -> Array:
        """Returns `out` as an array (see native_array) of this shape and dtype, which can be written to."""
        target: Array = self.native_array(out, f"{what}: out")
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
        """Returns the caller's numbers of rows by rank; they must add up to `total`, if that is given."""
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
        """Returns the number of rows of each rank's part of an array: equal ones if `sizes` is None."""
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
            source: what native_array has returned.
            target: the array for the result; None if there is none, or if it is the source, to be reduced in place.
            own_part: this rank's part of the larger of the two arrays, as a slice of bytes. If the smaller is exactly
                this part, no copy is needed: backends take arrays that overlap like this.
        """
        arrays = self._arrays
        flat: Array = arrays.flat(source)
        if target is not None and arrays.is_viewed_flat(source) and arrays.share_memory(source, target):
            return flat if self._is_part(source, target, own_part) else flat.copy()
        return flat

    def _is_part(self, source: Array, target: Array, own_part: slice | None) -> bool:
        """Whether both arrays are contiguous, and the smaller is exactly the part `own_part` of the larger."""
        arrays = self._arrays
        if own_part is None or not arrays.is_viewed_flat(source) or not arrays.is_viewed_flat(target):
            return False
        part, whole = sorted(
            [arrays.byte_bounds(source), arrays.byte_bounds(target)], key=lambda ends: ends[1] - ends[0]
        )
        return part == (whole[0] + own_part.start, whole[0] + own_part.stop)

    def _flat_target(self, target: Array) -> Array:
        """Returns a flat array for a target's elements: a view, if it is contiguous and on the device."""
        arrays = self._arrays
        viewed = arrays.is_viewed_flat(target)
        flat: Array = arrays.flat(target) if viewed else arrays.scratch(target.size, target.dtype)
        return flat


def _refuse(what: str, given: Mapping[str, object]) -> None:
    """Raises the TypeError for keyword arguments that a collective does not have, as those of PyTorch."""
    from inspect import signature  # imported here: only errors need it

    refuse_keywords(what, given, signature(getattr(Collectives, what)).parameters, "a collective")


def is_fortran(array: Array) -> bool:
    """Whether an array is contiguous in Fortran order, and not in C order."""
    return bool(array.flags.f_contiguous and not array.flags.c_contiguous)


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
