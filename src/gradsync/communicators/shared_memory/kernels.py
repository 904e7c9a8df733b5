"""The inner loops over shared memory: those in C where they were built, else those in plain NumPy.

Both have the same functions, and give the same bits, except of complex products and norms. plain.py is the reference,
and says what each does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from gradsync.communicators.agreement import LayoutsDiffer
from gradsync.communicators.backend import Bounds
from gradsync.communicators.shared_memory import plain
from gradsync.communicators.shared_memory.compiled import compiled
from gradsync.communicators.shared_memory.memory import Shared
from gradsync.communicators.shared_memory.plain import Call, DigestsDiffer, wait
from gradsync.diagnostics import trace
from gradsync.reduction import Array, ReduceOp

__all__ = [
    "SLOT_BYTES",
    "Call",
    "DigestsDiffer",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "meet",
    "reduce_scatter",
    "wait",
]

#: The size of a slot, which a chunk of a large list fills: one that stays in the cache from its publication until its
#: results are delivered.
SLOT_BYTES = 256 * 1024

# The codes of _kernels.c.
_OPS = {op: code for code, op in enumerate((ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PROD, ReduceOp.MIN, ReduceOp.MAX))}
_DTYPES = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64"),
    *("float16", "bfloat16", "complex64", "complex128"),
)


@lru_cache(maxsize=64)
def _code_of(dtype: np.dtype[Any]) -> int:
    return _DTYPES.index("uint8" if dtype.name == "bool" else dtype.name)


if compiled is None:
    meet, broadcast, all_gather, all_to_all = plain.meet, plain.broadcast, plain.all_gather, plain.all_to_all
    all_reduce, reduce_scatter = plain.all_reduce, plain.reduce_scatter
else:
    compiled.raise_as(DigestsDiffer, LayoutsDiffer, trace.no_phases)
    meet, broadcast = compiled.meet, compiled.broadcast
    all_gather, all_to_all = compiled.all_gather, compiled.all_to_all

    def all_reduce(
        shared: Shared,
        sources: Sequence[Array],
        targets: Sequence[Array],
        op: ReduceOp,
        factor: float,
        call: Call,
        with_squares: bool = False,
    ) -> float | None:
        """See plain.py."""
        code = _code_of(sources[0].dtype)
        squares: float | None = compiled.all_reduce(
            shared, sources, targets, code, _OPS[op], factor, with_squares, call
        )
        return squares

    def reduce_scatter(shared: Shared, source: Array, target: Array, bounds: Bounds, op: ReduceOp, call: Call) -> None:
        """See plain.py."""
        compiled.reduce_scatter(shared, source, target, bounds, _code_of(source.dtype), _OPS[op], call)
