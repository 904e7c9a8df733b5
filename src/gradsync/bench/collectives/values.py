"""What ranks put in, and what has to come out: NumPy's results, against which those of every system are counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gradsync.bench.collectives.cases import Case
from gradsync.bench.collectives.kinds import (
    ALL_GATHER,
    ALL_TO_ALL,
    BROADCAST,
    EXCHANGE,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    ROOT,
    SCATTER,
)
from gradsync.reduction import dtype_of

Array = npt.NDArray[Any]

# A prime: the pattern comes back at another place of every cache line, so that misplaced data shows.
_PERIOD = 1009
_EPSILON = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23, "float64": 2.0**-52}
_UFUNCS = {"sum": np.add, "mean": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


def source_of(case: Case, rank: int) -> Array:
    """Returns what a rank gives: small whole numbers, others by rank and by place; never more than a dtype holds."""
    return np.resize(_period(case, rank), case.count * (case.ranks if case.kind.source_parts == "n" else 1))


def _period(case: Case, rank: int) -> Array:
    """Returns what a source repeats; for products 1 and 2, so that those of a few ranks stay exact."""
    most = 2 if case.op == "prod" else 8
    return np.random.default_rng(rank).integers(1, most + 1, _PERIOD).astype(dtype_of(case.dtype))


def expected_of(case: Case, rank: int) -> Array | None:
    """Returns what a rank has to get; None where it gets nothing."""
    if case.kind.rooted and case.collective in (REDUCE, GATHER) and rank != ROOT:
        return None
    if case.collective == BROADCAST:
        return source_of(case, ROOT)
    if case.collective == EXCHANGE:
        return source_of(case, (rank - 1) % case.ranks)
    if case.collective == SCATTER:
        return _part(source_of(case, ROOT), case, rank)
    if case.kind.reduces:
        return _expected_reduction(case, rank)
    sources = [source_of(case, other) for other in range(case.ranks)]
    if case.collective == ALL_TO_ALL:
        sources = [_part(source, case, rank) for source in sources]
    elif case.collective not in (ALL_GATHER, GATHER):
        raise ValueError(case.collective)
    return np.concatenate(sources)


def _expected_reduction(case: Case, rank: int) -> Array:
    """Reduces what the sources repeat, and repeats that."""
    period = _reduced([_period(case, other) for other in range(case.ranks)], case.op)
    if case.collective == REDUCE_SCATTER:
        return _part(np.resize(period, case.count * case.ranks), case, rank)
    return np.resize(period, case.count)


def _part(array: Array, case: Case, rank: int) -> Array:
    return array[rank * case.count : (rank + 1) * case.count]


def _reduced(sources: Sequence[Array], op: str) -> Array:
    """Reduces in float64 where values are floating, else in the dtype itself: integers wrap as they do there."""
    dtype = sources[0].dtype
    wide = dtype if dtype.kind in "iu" else np.dtype(np.float64)
    total = sources[0].astype(wide)
    for source in sources[1:]:
        total = _UFUNCS[op](total, source.astype(wide))
    if op == "mean":
        total = total / len(sources)
    return total.astype(dtype)


def count_wrong(case: Case, result: Array | None, rank: int) -> int:
    """Returns how many elements of a result are not what this rank has to get; all of them where there is none.

    Means, and what has 16 bits, may be off by one rounding for each rank; all else is exact.
    """
    expected = expected_of(case, rank)
    if expected is None:
        return 0
    if result is None or result.shape != expected.shape or result.dtype != expected.dtype:
        return int(expected.size)
    if case.dtype not in _EPSILON or not case.op or (case.op != "mean" and expected.dtype.itemsize > 2):
        return int(np.count_nonzero(result != expected))
    tolerance = case.ranks * _EPSILON[case.dtype]
    found, wanted = result.astype(np.float64), expected.astype(np.float64)
    return int(np.count_nonzero(~(np.abs(found - wanted) <= tolerance * np.abs(wanted))))
