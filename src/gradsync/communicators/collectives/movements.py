"""The collectives that move rows without computing: broadcast, all_gather, gather, scatter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from gradsync.communicators.agreement import ROWS, Agreement, agreement_on
from gradsync.communicators.backend import part_of
from gradsync.communicators.collective_call import (
    BYTE,
    CollectiveBase,
    CollectiveCall,
    Shape,
    bounds_of,
    row_elements,
    row_shape,
)
from gradsync.errors import InvalidArgument
from gradsync.reduction import Array

#: Rows by rank; "ask" where ranks do not know the others': they are exchanged first.
Sizes = Sequence[int] | Literal["ask"] | None


class Movements(CollectiveBase):
    """Part of a communicator's public methods. Rows are what the first axis counts; a 0-d array is one row."""

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
            PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed, NcclError: as for all_reduce.
        """
        result = self._shortcut("broadcast", array, None, root)
        if result is not None:
            return result
        return self._run(self._broadcast_call(array, root), stream)

    def _broadcast_call(self, array: Any, root: int = 0) -> CollectiveCall:
        root = self._checked_root("broadcast", root)
        native = self.native_array(array, "broadcast")
        if self.rank != root:
            self._check_writable("broadcast", native, remedy="pass a copy")
        agreement = broadcast_agreement(native.shape, native.dtype, root)

        def move(launch: Any) -> Any:
            flat = self.arrays.flat(native)
            self._keep(native, flat)
            self._broadcast_list([flat.view(BYTE)], root, agreement)
            if self.rank != root:
                self._bring_back(flat, native, launch)
            return array

        return CollectiveCall("broadcast", agreement, move)

    def all_gather(self, array: Any, *, sizes: Sizes = None, out: Any = None, stream: Any = None) -> Any:
        """Concatenates the arrays of all ranks along the first axis, in rank order; every rank gets the result.

        Every rank must call it, with equal dtypes, equal shapes but for the number of rows, and the same `sizes`.

        Args:
            array: array of any layout and dtype without Python objects, on this communicator's device.
            sizes: rows of each rank. None: as many on each. "ask": the ranks do not know; they exchange them first.
            out: array for the result, of which `array` may be exactly this rank's rows; None makes a new one.
            stream: CUDA stream that orders the operation. Unused on the CPU.

        Returns:
            `out`, or a new array.

        Raises:
            InvalidArgument: not an array, sizes that do not fit, `out` with sizes "ask", or a wrong `out`.
            UnsupportedDtype, PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed, NcclError: as for
                broadcast.
        """
        result = self._shortcut("all_gather", array, out, "") if sizes is None else None
        if result is not None:
            return result
        return self._run(self._all_gather_call(array, sizes=sizes, out=out), stream)

    def _all_gather_call(self, array: Any, *, sizes: Sizes = None, out: Any = None) -> CollectiveCall:
        return self._gathering("all_gather", array, None, sizes, out)

    def gather(self, array: Any, root: int = 0, *, sizes: Sizes = None, out: Any = None, stream: Any = None) -> Any:
        """Concatenates the arrays of all ranks along the first axis, in rank order; the root gets the result.

        Every rank must call it, with equal dtypes, equal shapes but for the number of rows, and the same root and
        `sizes`.

        Args:
            array: as for all_gather.
            root: the rank that gets the result.
            sizes: as for all_gather.
            out: on the root as for all_gather. Not looked at elsewhere.
            stream: CUDA stream that orders the operation. Unused on the CPU.

        Returns:
            On the root `out`, or a new array; None elsewhere.

        Raises:
            InvalidArgument: a root outside the communicator, or as for all_gather.
            UnsupportedDtype, PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed, NcclError: as for
                broadcast.
        """
        return self._run(self._gather_call(array, root, sizes=sizes, out=out), stream)

    def _gather_call(self, array: Any, root: int = 0, *, sizes: Sizes = None, out: Any = None) -> CollectiveCall:
        root = self._checked_root("gather", root)
        return self._gathering("gather", array, root, sizes, out if self.rank == root else None)

    def _gathering(self, what: str, array: Any, root: int | None, sizes: Sizes, out: Any) -> CollectiveCall:
        """Makes the call of a gather; without a root all ranks receive."""
        source = self.native_array(array, what)
        rows, *rest = row_shape(source.shape)
        to_root = "" if root is None else f"root {root}"
        if isinstance(sizes, str):
            if sizes != "ask":
                raise InvalidArgument(f'{self.label}: {what} needs sizes as a list, None or "ask", got {sizes!r}')
            if out is not None:
                raise InvalidArgument(f'{self.label}: {what} needs sizes as a list where out is given, got "ask"')
            asking = agreement_on(what, (ROWS, *rest), source.dtype, _joined("rows asked for", to_root))

            def ask_and_move(launch: Any) -> Any:
                known = tuple([numbers[0] for numbers in self._share_numbers([rows], asking)])
                detail = _joined(f"rows {list(known)}", to_root)
                agreement = agreement_on(what, (ROWS, *rest), source.dtype, detail)
                return self._gather_rows(source, known, root, None, agreement, launch)

            return CollectiveCall(what, asking, ask_and_move)
        if sizes is None:
            known = (rows,) * self.world_size
            agreement = gather_agreement(what, source.shape, source.dtype, to_root)
        else:
            row_bytes = row_elements((rows, *rest)) * source.dtype.itemsize
            known = self._checked_sizes(what, "sizes", sizes, row_bytes=row_bytes)
            if known[self.rank] != rows:
                raise InvalidArgument(
                    f"{self.label}: {what}: sizes {list(known)} give this rank {known[self.rank]} rows, its array has "
                    f"{rows}"
                )
            detail = _joined(f"rows {list(known)}", to_root)
            agreement = agreement_on(what, (ROWS, *rest), source.dtype, detail)
        target = None if out is None else self._checked_out(what, out, (sum(known), *rest), source.dtype)

        def move(launch: Any) -> Any:
            result = self._gather_rows(source, known, root, target, agreement, launch)
            return result if out is None else out

        return CollectiveCall(what, agreement, move)

    def _gather_rows(
        self,
        source: Array,
        sizes: Sequence[int],
        root: int | None,
        target: Array | None,
        agreement: Agreement,
        launch: Any,
    ) -> Array | None:
        """Gathers rows into the target, a new one for None; returns it, or None on a rank that gets nothing."""
        rest = row_shape(source.shape)[1:]
        bounds = bounds_of(sizes, row_elements((0, *rest)) * source.dtype.itemsize)
        if root is not None and root != self.rank:
            flat = self._flat_source(source)
            self._keep(source, flat)
            self._gather(flat.view(BYTE), None, bounds, root, agreement)
            return None
        if target is None:
            target = self.arrays.empty((sum(sizes), *rest), source.dtype, source)
        flat = self._flat_source(source, target, target_part=part_of(bounds, self.rank))
        flat_target = self._flat_target(target)
        self._keep(source, flat)
        if root is None:
            self._all_gather(flat.view(BYTE), flat_target.view(BYTE), bounds, agreement)
        else:
            self._gather(flat.view(BYTE), flat_target.view(BYTE), bounds, root, agreement)
        self._deliver(flat_target, target, launch)
        return target

    def scatter(
        self,
        array: Any,
        root: int = 0,
        *,
        sizes: Sequence[int] | None = None,
        out: Any = None,
        stream: Any = None,
    ) -> Any:
        """Deals out the rows of the root's `array` in rank order; each rank gets its own.

        Every rank must call it, with the same root and sizes, and with parts of equal dtypes, and equal shapes but for
        given sizes.

        Args:
            array: on the root an array of any layout and dtype without Python objects, on this communicator's device.
                Not looked at elsewhere: pass None.
            root: the rank whose rows are dealt out.
            sizes: rows of each rank; None is equal parts.
            out: array for this rank's rows; only the root may leave it out, as only it knows their shape and dtype.
            stream: CUDA stream that orders the operation. Unused on the CPU.

        Returns:
            This rank's rows: `out`, or a new array.

        Raises:
            InvalidArgument: a root outside the communicator, rows that do not divide equally, sizes that are not the
                rows of the array, wrong `out`, or none where it is needed.
            UnsupportedDtype, PlanMismatch, RankFailed, CollectiveTimeout, CommunicatorClosed, NcclError: as for
                broadcast.
        """
        return self._run(self._scatter_call(array, root, sizes=sizes, out=out), stream)

    def _scatter_call(
        self, array: Any, root: int = 0, *, sizes: Sequence[int] | None = None, out: Any = None
    ) -> CollectiveCall:
        what = "scatter"
        root = self._checked_root(what, root)
        is_root = self.rank == root
        if is_root and array is None:
            raise InvalidArgument(f"{self.label}: {what} needs an array on its root, which is this rank; got None")
        if not is_root and out is None:
            raise InvalidArgument(
                f"{self.label}: {what} needs out= on every rank but its root, rank {self.ranks[root]}, which alone "
                "knows the shape and dtype of the rows; got None"
            )
        source = self.native_array(array, what) if is_root else None
        model = self.native_array(out, f"{what}: out") if source is None else source
        shape, dtype = row_shape(model.shape), model.dtype
        if sizes is not None:
            known = self._checked_sizes(what, "sizes", sizes, shape[0] if is_root else None)
        elif is_root:
            known = self._equal_sizes(what, "sizes", shape[0])
        else:
            known = (shape[0],) * self.world_size
        part_shape = (known[self.rank], *shape[1:])
        target = None if out is None else self._checked_out(what, out, part_shape, dtype)
        detail = f"root {root}" if sizes is None else f"root {root}, rows {list(known)}"
        agreement = agreement_on(what, part_shape if sizes is None else (ROWS, *shape[1:]), dtype, detail)
        bounds = bounds_of(known, row_elements(shape) * dtype.itemsize)

        def move(launch: Any) -> Any:
            result = self.arrays.empty(part_shape, dtype, model) if target is None else target
            flat_target = self._flat_target(result)
            if source is None:
                self._scatter(None, flat_target.view(BYTE), bounds, root, agreement)
            else:
                flat = self._flat_source(source, result)
                self._keep(source, flat)
                self._scatter(flat.view(BYTE), flat_target.view(BYTE), bounds, root, agreement)
            self._deliver(flat_target, result, launch)
            return result if out is None else out

        return CollectiveCall(what, agreement, move)


def broadcast_agreement(shape: Shape, dtype: np.dtype[Any], root: int) -> Agreement:
    """Returns what the ranks of a broadcast must have in common."""
    return agreement_on("broadcast", shape, dtype, f"root {root}")


def gather_agreement(what: str, shape: Shape, dtype: np.dtype[Any], to_root: str = "") -> Agreement:
    """Returns what the ranks of a gather or an all_gather of equal parts must have in common."""
    return agreement_on(what, shape, dtype, to_root)


def _joined(*details: str) -> str:
    return ", ".join([detail for detail in details if detail])
