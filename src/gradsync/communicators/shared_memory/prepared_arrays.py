"""Which arrays a prepared collective can take: contiguous NumPy arrays, and where its result goes."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradsync.communicators.backend import Shape
from gradsync.reduction import Array


class ArraysOfOneKind:
    """The arrays of collectives of one shape and dtype.

    What a rank gives is published before anything is written, so a result may go to the very memory that it came from,
    or overlap it: what still reads the array after that has to see to it.

    Args:
        result_shape: of the result.
        dtype: of the arrays.
        in_place: whether the array receives the result where no `out` is given; else a new one does.
    """

    def __init__(self, result_shape: Shape, dtype: np.dtype[Any], *, in_place: bool) -> None:
        self._result_shape = result_shape
        self._dtype = dtype
        self._in_place = in_place

    def target(self, array: Array, out: Any) -> Array | None:
        """Returns where the result goes; None where these arrays are for the long way.

        Args:
            array: what the rank gives, of the shape and dtype that were prepared for.
            out: what the caller gave.
        """
        flags = array.flags
        if not flags.c_contiguous:
            return None
        if out is None:
            if self._in_place:
                return array if flags.writeable else None
            return np.empty(self._result_shape, array.dtype)  # one equal to ours may still be another: numpy.record
        if type(out) is not np.ndarray or out.shape != self._result_shape or out.dtype != self._dtype:
            return None
        flags = out.flags
        return out if flags.c_contiguous and flags.writeable else None
