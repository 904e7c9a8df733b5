"""The collectives that compute: all_reduce, reduce, reduce_scatter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradsync.communicators.agreement import Agreement, agreement_on
from gradsync.communicators.backend import part_of
from gradsync.communicators.collective_call import (
    CollectiveBase,
    CollectiveCall,
    Shape,
    bounds_of,
    row_elements,
    row_shape,
)
from gradsync.errors import InvalidArgument, UnsupportedDtype
from gradsync.reduction import Array, ReduceOp, check_operation


class Reductions(CollectiveBase):
    """Part of a communicator's public methods."""

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
        result = self._shortcut("all_reduce", array, out, op)
        if result is not None:
            return result
        return self._run(self._all_reduce_call(array, op, out=out), stream)

    def _all_reduce_call(self, array: Any, op: str | ReduceOp = "sum", *, out: Any = None) -> CollectiveCall:
        source = self.native_array(array, "all_reduce")
        op = self._checked_op("all_reduce", op, source)
        if out is None:
            target = source
            self._check_writable("all_reduce", target)
        else:
            target = self._checked_out("all_reduce", out, source.shape, source.dtype)
        agreement = all_reduce_agreement(source.shape, source.dtype, op)

        def move(launch: Any) -> Any:
            flat_source = self._flat_source(source, None if target is source else target)
            flat_target = flat_source if target is source else self._flat_target(target)
            self._keep(source, flat_source)
            self._all_reduce_list([flat_source], [flat_target], op, agreement)
            self._deliver(flat_target, target, launch)
            return array if out is None else out

        return CollectiveCall("all_reduce", agreement, move)

    def reduce(
        self, array: Any, op: str | ReduceOp = "sum", root: int = 0, *, out: Any = None, stream: Any = None
    ) -> Any:
        """Reduces `array` over all ranks, element by element; the root gets the result.

        Every rank must call it, with equal shapes, dtypes, operators and roots. On the CPU the result has the bits that
        all_reduce gives, but for products of complex numbers; on a GPU NCCL may take the ranks in another order.

        Args:
            array: as for all_reduce. Receives the result on the root when `out` is None; other ranks keep theirs.
            op: as for all_reduce.
            root: the rank that gets the result.
            out: on the root, an array of the same shape and dtype for the result. Not looked at elsewhere.
            stream: CUDA stream that orders the operation. Unused on the CPU.

        Returns:
            On the root `out`, or `array` when `out` is None; None elsewhere.

        Raises:
            InvalidArgument: a root outside the communicator, or as for all_reduce.
            UnsupportedDtype, PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed, NcclError: as for
                all_reduce.
        """
        return self._run(self._reduce_call(array, op, root, out=out), stream)

    def _reduce_call(self, array: Any, op: str | ReduceOp = "sum", root: int = 0, *, out: Any = None) -> CollectiveCall:
        source = self.native_array(array, "reduce")
        op = self._checked_op("reduce", op, source)
        root = self._checked_root("reduce", root)
        target = None
        if self.rank == root and out is not None:
            target = self._checked_out("reduce", out, source.shape, source.dtype)
        elif self.rank == root:
            target = source
            self._check_writable("reduce", target)
        agreement = agreement_on("reduce", source.shape, source.dtype, f"{op.value}, root {root}")

        def move(launch: Any) -> Any:
            flat_source = self._flat_source(source, None if target is source else target)
            self._keep(source, flat_source)
            if target is None:
                self._reduce(flat_source, None, op, root, agreement)
                return None
            flat_target = flat_source if target is source else self._flat_target(target)
            self._reduce(flat_source, flat_target, op, root, agreement)
            self._deliver(flat_target, target, launch)
            return array if out is None else out

        return CollectiveCall("reduce", agreement, move)

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

        Every rank must call it, with equal shapes, dtypes, operators and sizes. The bits of the result are those of
        all_reduce where those of reduce are.

        Args:
            array: as for all_reduce; its rows (first axis; a 0-d array is one row) are dealt out in rank order.
            op: as for all_reduce.
            sizes: rows of each rank; None is equal parts.
            out: array for this rank's rows; may be exactly these rows of `array`. None makes a new one.
            stream: CUDA stream that orders the operation. Unused on the CPU.

        Returns:
            This rank's rows of the result: `out`, or a new array.

        Raises:
            InvalidArgument: rows that do not divide equally, sizes that are not the rows of the array, wrong `out`.
            UnsupportedDtype, PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed, NcclError: as for
                all_reduce.
        """
        result = self._shortcut("reduce_scatter", array, out, op) if sizes is None else None
        if result is not None:
            return result
        return self._run(self._reduce_scatter_call(array, op, sizes=sizes, out=out), stream)

    def _reduce_scatter_call(
        self, array: Any, op: str | ReduceOp = "sum", *, sizes: Sequence[int] | None = None, out: Any = None
    ) -> CollectiveCall:
        what = "reduce_scatter"
        source = self.native_array(array, what)
        op = self._checked_op(what, op, source)
        shape = row_shape(source.shape)
        given = None if sizes is None else self._checked_sizes(what, "sizes", sizes, shape[0])
        sizes = self._equal_sizes(what, "sizes", shape[0]) if given is None else given
        part_shape = (sizes[self.rank], *shape[1:])
        target = None if out is None else self._checked_out(what, out, part_shape, source.dtype)
        agreement = reduce_scatter_agreement(source.shape, source.dtype, op, given)
        bounds = bounds_of(sizes, row_elements(shape))
        own_bytes = part_of(bounds_of(sizes, row_elements(shape) * source.dtype.itemsize), self.rank)

        def move(launch: Any) -> Any:
            result = self.arrays.empty(part_shape, source.dtype, source) if target is None else target
            flat_source = self._flat_source(source, result, source_part=own_bytes)
            flat_target = self._flat_target(result)
            self._keep(source, flat_source)
            self._reduce_scatter(flat_source, flat_target, bounds, op, agreement)
            self._deliver(flat_target, result, launch)
            return result if out is None else out

        return CollectiveCall(what, agreement, move)

    def _checked_op(self, what: str, op: str | ReduceOp, source: Array) -> ReduceOp:
        """Returns an operator that the dtype table has for the array."""
        try:
            parsed = ReduceOp.parse(op)
            check_operation(parsed, source.dtype)
        except (InvalidArgument, UnsupportedDtype) as error:
            raise type(error)(f"{self.label}: {what}: {error}") from None
        return parsed


def all_reduce_agreement(shape: Shape, dtype: np.dtype[Any], op: ReduceOp) -> Agreement:
    """Returns what the ranks of an all_reduce must have in common."""
    return agreement_on("all_reduce", shape, dtype, op.value)


def reduce_scatter_agreement(
    shape: Shape, dtype: np.dtype[Any], op: ReduceOp, sizes: Sequence[int] | None = None
) -> Agreement:
    """Returns what the ranks of a reduce_scatter must have in common; sizes as they were given."""
    return agreement_on(
        "reduce_scatter", shape, dtype, op.value if sizes is None else f"{op.value}, rows {list(sizes)}"
    )
