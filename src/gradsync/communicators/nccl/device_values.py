"""Arithmetic on the values of device arrays: scaled into another dtype, checked to be finite, their squares summed.

ArrayKind (host_arrays.py) says what each must do; host_values.py has the forms for the host. All of it is work on the
current stream of the current device, and nothing here waits for it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import cupy
import numpy as np

from gradsync.communicators.nccl.value_kernels import SOURCE, THREADS_PER_BLOCK, blocks_for
from gradsync.reduction import dtype_name, part_dtype, part_pairs, product_dtype

_WITH_KERNELS = ("float16", "bfloat16", "float32", "float64")


def multiply(source: Any, factor: float, out: Any) -> None:
    """See ArrayKind; one pass: CuPy's kernels convert what they read and write."""
    if factor == 1.0:
        if out is not source:
            cupy.copyto(out, source, casting="unsafe")
        return
    for values, target in part_pairs(source, out):
        wide = product_dtype(values.dtype, target.dtype)
        with np.errstate(over="ignore"):  # of the factor, in float32
            scale = wide.type(factor)
        cupy.multiply(values, scale, out=target, dtype=wide, casting="unsafe")


def divide(flat: Any, count: int) -> None:
    """See ArrayKind; half precision in float32, which has every count."""
    parts = flat.view(part_dtype(flat.dtype))
    wide = product_dtype(parts.dtype, parts.dtype)
    cupy.divide(parts, wide.type(count), out=parts, dtype=wide, casting="unsafe")


def all_finite(flat: Any) -> Any:
    """See ArrayKind."""
    parts = flat.view(part_dtype(flat.dtype))
    finite = cupy.ones((), np.bool_)
    name = dtype_name(parts.dtype)
    if name in _WITH_KERNELS and parts.size:
        _launch(f"check_{name}", parts, finite)
    return finite


def sum_of_squares(flat: Any) -> Any:
    """See ArrayKind."""
    parts = flat.view(part_dtype(flat.dtype))
    name = dtype_name(parts.dtype)
    if not parts.size:
        return cupy.zeros((), np.float64)
    if name not in _WITH_KERNELS:
        wide = parts.astype(np.float64)
        return (wide * wide).sum()
    sums = cupy.empty(blocks_for(parts.size) * THREADS_PER_BLOCK, np.float64)
    _launch(f"square_{name}", parts, sums)
    return sums.sum()


def _launch(kernel: str, values: Any, result: Any) -> None:
    grid, block = (blocks_for(values.size), 1, 1), (THREADS_PER_BLOCK, 1, 1)
    _kernels().get_function(kernel)(grid, block, (values, np.uint64(values.size), result))


@lru_cache(maxsize=1)
def _kernels() -> Any:
    """Compiled for each device when a kernel is first asked for there."""
    return cupy.RawModule(code=SOURCE)
