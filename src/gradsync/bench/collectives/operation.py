"""One form of a collective on one rank: its arrays, and what came of preparing it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gradsync.bench.collectives.cases import Case
from gradsync.bench.collectives.kinds import GATHER, REDUCE, ROOT, SCATTER

SEPARATE, IN_PLACE = "out-of-place", "in-place"


class NotOffered(Exception):
    """There is no such dtype or operator: the text says so."""


@dataclass(frozen=True)
class Buffers:
    """The arrays of one form on one rank.

    Attributes:
        source: what the rank gives; None where it gives nothing.
        target: what it gets into; None where it gets nothing. It may be, or be part of, the source, and the other way
            round.
    """

    source: Any
    target: Any


@dataclass(frozen=True)
class Prepared:
    """What a rank says of a form of a case.

    Attributes:
        wrong: elements of its result that are not what they have to be; None where nothing was checked.
        refusal: why it is not offered; "" where it is.
    """

    wrong: int | None = None
    refusal: str = ""


Empty = Callable[[int, str], Any]  # empty(elements, dtype) returns an array of the device


def make_buffers(rank: int, empty: Empty, case: Case, form: str) -> Buffers:
    """Makes the arrays of a rank, as nccl-tests lays them out.

    In place, what is gathered comes from its own part of the target, and what is dealt out goes to its own part of the
    source. Only the root has the large array of a rooted collective, and the result of a reduction to it.
    """
    return _make_separate(rank, empty, case) if form == SEPARATE else _make_in_place(rank, empty, case)


def _make_separate(rank: int, empty: Empty, case: Case) -> Buffers:
    is_root = rank == ROOT
    source_count = case.count * (case.ranks if case.kind.source_parts == "n" else 1)
    target_count = case.count * (case.ranks if case.kind.target_parts == "n" else 1)
    gives = is_root or case.collective != SCATTER
    gets = is_root or case.collective not in (REDUCE, GATHER)
    return Buffers(
        empty(source_count, case.dtype) if gives else None,
        empty(target_count, case.dtype) if gets else None,
    )


def _make_in_place(rank: int, empty: Empty, case: Case) -> Buffers:
    if case.kind.source_parts == case.kind.target_parts:
        array = empty(case.count * (case.ranks if case.kind.is_dealt else 1), case.dtype)
        return Buffers(array, array)
    gathers = case.kind.target_parts == "n"
    if case.kind.rooted and rank != ROOT:
        part = empty(case.count, case.dtype)
        return Buffers(part, None) if gathers else Buffers(None, part)
    whole = empty(case.count * case.ranks, case.dtype)
    part = whole[rank * case.count : (rank + 1) * case.count]
    return Buffers(part, whole) if gathers else Buffers(whole, part)
