"""all_to_all: every rank hands every rank some of its rows, equal parts or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradsync.communicators.agreement import ROWS, Agreement, Description, agreement_on, mismatch
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

_UNKNOWN = -1  # a number of rows that a rank was not told


class AllToAll(CollectiveBase):
    """Part of a communicator's public methods."""

    def all_to_all(
        self,
        array: Any,
        *,
        send_sizes: Sequence[int] | None = None,
        recv_sizes: Sequence[int] | None = None,
        out: Any = None,
        stream: Any = None,
    ) -> Any:
        """Deals out the rows of every rank's `array`: part i goes to rank i, and rank i's part comes here.

        Every rank must call it, with equal dtypes, and equal shapes but for given sizes.

        Args:
            array: array of any layout and dtype without Python objects, on this communicator's device.
            send_sizes: how many rows go to each rank; None is equal parts, on all ranks. Where it is given, on all
                ranks, the ranks exchange it first.
            recv_sizes: how many rows come from each rank, where this rank knows it: checked against what they send.
            out: array for the result; needs `recv_sizes` beside `send_sizes`. None makes a new one.
            stream: CUDA stream that orders the operation. Unused on the CPU.

        Returns:
            The rows that have come, in rank order: `out`, or a new array.

        Raises:
            InvalidArgument: rows that do not divide equally, sizes that are not the rows of the array, wrong `out`.
            PlanMismatch: the ranks disagree; also where one expects other rows than another one sends.
            UnsupportedDtype, RankFailed, CollectiveTimeout, CommunicatorClosed, NcclError: as for broadcast.
        """
        result = self._shortcut("all_to_all", array, out, "") if send_sizes is None and recv_sizes is None else None
        if result is not None:
            return result
        return self._run(self._all_to_all_call(array, send_sizes=send_sizes, recv_sizes=recv_sizes, out=out), stream)

    def _all_to_all_call(
        self,
        array: Any,
        *,
        send_sizes: Sequence[int] | None = None,
        recv_sizes: Sequence[int] | None = None,
        out: Any = None,
    ) -> CollectiveCall:
        what = "all_to_all"
        source = self.native_array(array, what)
        rows, *rest = row_shape(source.shape)
        if send_sizes is None and recv_sizes is not None:
            raise InvalidArgument(f"{self.label}: {what} needs send_sizes beside recv_sizes")
        if send_sizes is None:
            sending = receiving = self._equal_sizes(what, "send_sizes", rows)
            agreement = all_to_all_agreement(source.shape, source.dtype)
        else:
            sending = self._checked_sizes(what, "send_sizes", send_sizes, rows)
            receiving = (_UNKNOWN,) * self.world_size
            if recv_sizes is not None:
                receiving = self._checked_sizes(what, "recv_sizes", recv_sizes)
            elif out is not None:
                raise InvalidArgument(f"{self.label}: {what} needs recv_sizes where out is given beside send_sizes")
            agreement = agreement_on(what, (ROWS, *rest), source.dtype, "uneven rows")
        target = None if out is None else self._checked_out(what, out, (sum(receiving), *rest), source.dtype)

        def move(launch: Any) -> Any:
            coming, largest = receiving, sending[0]
            if send_sizes is not None:
                coming, largest = self._share_sizes(sending, receiving, agreement)
            result = target
            if result is None:
                result = self.arrays.empty((sum(coming), *rest), source.dtype, source)
            self._deal_rows(source, result, sending, coming, largest, agreement, launch)
            return result if out is None else out

        return CollectiveCall(what, agreement, move)

    def _deal_rows(
        self,
        source: Array,
        target: Array,
        sending: Sequence[int],
        coming: Sequence[int],
        largest: int,
        agreement: Agreement,
        launch: Any,
    ) -> None:
        row_bytes = row_elements(row_shape(source.shape)) * source.dtype.itemsize
        flat, flat_target = self._flat_source(source, target), self._flat_target(target)
        self._keep(source, flat)
        self._all_to_all(
            flat.view(BYTE),
            flat_target.view(BYTE),
            bounds_of(sending, row_bytes),
            bounds_of(coming, row_bytes),
            largest * row_bytes,
            agreement,
        )
        self._deliver(flat_target, target, launch)

    def _share_sizes(
        self, sending: Sequence[int], receiving: Sequence[int], agreement: Agreement
    ) -> tuple[tuple[int, ...], int]:
        """Returns how many rows come from each rank, and the largest part between any two ranks.

        Raises:
            PlanMismatch: on every rank, where one expects other rows than another one sends.
        """
        n = self.world_size
        shared = self._share_numbers([*sending, *receiving], agreement)
        for receiver, numbers in enumerate(shared):
            for sender, expected in enumerate(numbers[n:]):
                if expected not in (_UNKNOWN, shared[sender][receiver]):
                    raise mismatch(self.label, agreement, self._descriptions(shared))
        return tuple([numbers[self.rank] for numbers in shared]), max([max(numbers[:n]) for numbers in shared])

    def _descriptions(self, shared: Sequence[Sequence[int]]) -> dict[int, Description]:
        n = self.world_size
        return {
            rank: Description(f"all_to_all (sends rows {list(numbers[:n])}, expects {_expected(numbers[n:])})")
            for rank, numbers in zip(self.ranks, shared, strict=True)
        }


def all_to_all_agreement(shape: Shape, dtype: np.dtype[Any]) -> Agreement:
    """Returns what the ranks of an all_to_all of equal parts must have in common."""
    return agreement_on("all_to_all", shape, dtype, "")


def _expected(numbers: Sequence[int]) -> str:
    return "any" if _UNKNOWN in numbers else str(list(numbers))
