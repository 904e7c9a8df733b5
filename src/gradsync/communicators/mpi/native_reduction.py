"""Which reductions MPI does itself, and how: its datatypes and operators for the dtype table."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gradsync.reduction import Array, ReduceOp, accumulation_dtype, divide_into, dtype_name

_BYTE = np.dtype(np.uint8)


class Native(NamedTuple):
    """A reduction that MPI does.

    Attributes:
        datatype, op: MPI's.
        dtype: in which it is done; half precision is widened.
        wire: as which the elements are shown to MPI: bool as bytes.
        divisor: what the result is divided by; 0 for no mean.
    """

    datatype: Any
    op: Any
    dtype: np.dtype[Any]
    wire: np.dtype[Any]
    divisor: int

    def shown(self, array: Array) -> list[Any]:
        """Returns an array as MPI takes it."""
        return [array.view(self.wire), self.datatype]

    def finish(self, result: Array, target: Array) -> None:
        """Brings the result, which may be wider, to where it belongs."""
        if self.divisor:
            divide_into(result, self.divisor, result)
        np.copyto(target, result, casting="same_kind")


def native_reduction(mpi: Any, op: ReduceOp, dtype: np.dtype[Any], world_size: int) -> Native | None:
    """Returns how MPI reduces elements of a dtype of the dtype table; None where it does not as NumPy would."""
    wide = accumulation_dtype(dtype)
    if op in (ReduceOp.MIN, ReduceOp.MAX) and wide.kind == "f":
        return None  # MPI does not say what becomes of NaN
    datatypes = {
        "float32": mpi.FLOAT,
        "float64": mpi.DOUBLE,
        "complex64": mpi.C_FLOAT_COMPLEX,
        "complex128": mpi.C_DOUBLE_COMPLEX,
        "bool": mpi.UINT8_T,
        **{
            f"{sign}int{bits}": getattr(mpi, f"{sign.upper()}INT{bits}_T")
            for sign in ("", "u")
            for bits in (8, 16, 32, 64)
        },
    }
    ops = {
        ReduceOp.SUM: mpi.SUM,
        ReduceOp.MEAN: mpi.SUM,
        ReduceOp.PROD: mpi.PROD,
        ReduceOp.MIN: mpi.MIN,
        ReduceOp.MAX: mpi.MAX,
    }
    wire = _BYTE if dtype.kind == "b" else wide
    divisor = world_size if op is ReduceOp.MEAN else 0
    return Native(datatypes[dtype_name(wide)], ops[op], wide, wire, divisor)
