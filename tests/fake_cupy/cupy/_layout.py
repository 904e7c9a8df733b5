"""How elements lie in memory, and which elements there are."""

from __future__ import annotations

from typing import Any

import numpy as np


class Flags:
    """How an array lies in memory; there is no `writeable`, as in CuPy."""

    def __init__(self, c_contiguous: bool, f_contiguous: bool, owndata: bool) -> None:
        self.c_contiguous = c_contiguous
        self.f_contiguous = f_contiguous
        self.owndata = owndata

    @property
    def forc(self) -> bool:
        return self.c_contiguous or self.f_contiguous

    def __getitem__(self, name: str) -> bool:
        return {"C_CONTIGUOUS": self.c_contiguous, "F_CONTIGUOUS": self.f_contiguous, "OWNDATA": self.owndata}[name]


def contiguous_strides(shape: tuple[int, ...], itemsize: int, order: str = "C") -> tuple[int, ...]:
    """Returns the strides of contiguous elements."""
    axes = range(len(shape)) if order == "F" else range(len(shape) - 1, -1, -1)
    strides, step = [0] * len(shape), itemsize
    for axis in axes:
        strides[axis] = step
        step *= max(shape[axis], 1)
    return tuple(strides)


def extent_bytes(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> int:
    """Returns the bytes from the first element to the end of the last."""
    steps = zip(shape, strides, strict=True)
    return 0 if 0 in shape else sum((length - 1) * stride for length, stride in steps if stride > 0) + itemsize


def checked_dtype(dtype: Any) -> np.dtype:
    """Returns a dtype that CuPy supports, or raises."""
    dtype = np.dtype(dtype)
    is_ml_dtype = dtype.type.__module__ == "ml_dtypes"
    if (dtype.kind not in "?biufc" or dtype.itemsize > 16 or dtype.char in "gG") and not is_ml_dtype:
        raise ValueError(f"Unsupported dtype {dtype}")
    if dtype.byteorder == ">":
        raise ValueError(f"Unsupported dtype {dtype} with big-endian byte-order")
    return dtype


def basic_index(key: Any) -> tuple[Any, ...]:
    """Returns an index that always gives a view: NumPy gives a scalar for one number too many."""
    key = key if isinstance(key, tuple) else (key,)
    for part in key:
        if not (part is None or part is Ellipsis or isinstance(part, (slice, int, np.integer))):
            raise IndexError(f"the stand-in knows basic indexing only, not {part!r}")
    return key if any(part is Ellipsis for part in key) else (*key, Ellipsis)
