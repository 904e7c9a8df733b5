"""What is cross-checked: all cases, and every rank's inputs to them, made from a seed.

The ranks of every system import it, so it needs nothing but NumPy. bfloat16, which NumPy lacks, travels as its bits.
"""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import numpy as np

SEED = 5
COLUMNS = 3
ROWS = 4
LARGE_ROWS = 40_000  # of float32: more than a message, a slot or an eager limit of any of the systems

FLOATS = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
OPERATORS = {
    **dict.fromkeys(FLOATS, ("sum", "mean", "prod", "min", "max")),
    **dict.fromkeys(COMPLEX, ("sum", "mean", "prod")),
    **dict.fromkeys(INTEGERS, ("sum", "prod", "min", "max")),
    "bool": ("min", "max"),
}
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")
MESSAGES = ("send_recv", "exchange")
MOVEMENTS = ("broadcast", "all_gather", "gather", "scatter", "all_to_all", *MESSAGES)
OBJECTS = ("objects_all_gather", "objects_gather", "objects_broadcast", "objects_scatter")
MAY_BE_UNEVEN = ("reduce_scatter", "all_gather", "gather", "scatter", "all_to_all")


class Case(NamedTuple):
    """One collective, on arrays of COLUMNS columns.

    Attributes:
        collective: its name.
        dtype: of the arrays.
        op: the operator of a reduction.
        rows: of each of the parts that a rank gives or gets.
        uneven: whether the parts have other numbers of rows in its place.
    """

    collective: str
    dtype: str = "float32"
    op: str = ""
    rows: int = ROWS
    uneven: bool = False

    @property
    def name(self) -> str:
        """How the results are called."""
        words = [self.collective, self.dtype, self.op, "uneven" if self.uneven else f"{self.rows} rows"]
        return " ".join(word for word in words if word)

    @property
    def is_exact(self) -> bool:
        """Whether no rounding can tell two systems apart."""
        return self.op in ("", "min", "max") or self.dtype in INTEGERS

    def sizes(self, world_size: int) -> list[int]:
        """Returns the rows of each rank's part."""
        return [5, 0, 2][:world_size] if self.uneven else [self.rows] * world_size

    def sizes_from(self, rank: int, world_size: int) -> list[int]:
        """Returns the rows that a rank sends to each in all_to_all."""
        return [(3 * rank + other) % 4 if self.uneven else self.rows for other in range(world_size)]

    def sizes_to(self, rank: int, world_size: int) -> list[int]:
        """Returns the rows that a rank receives from each in all_to_all."""
        return [self.sizes_from(other, world_size)[rank] for other in range(world_size)]


def all_cases() -> list[Case]:
    """Returns all that is checked; the peers leave out what they do not have."""
    reductions = [Case(which, dtype, op) for which in REDUCTIONS for dtype, ops in OPERATORS.items() for op in ops]
    movements = [Case(which, dtype) for which in MOVEMENTS for dtype in OPERATORS]
    large = [Case(which, op="sum", rows=LARGE_ROWS) for which in REDUCTIONS]
    large += [Case(which, rows=LARGE_ROWS) for which in MOVEMENTS]
    uneven = [
        Case(which, dtype, "sum" if which in REDUCTIONS else "", uneven=True)
        for which in MAY_BE_UNEVEN
        for dtype in ("uint8", "float32", "complex128")
    ]
    return [*reductions, *movements, *large, *uneven, Case("split"), *[Case(which) for which in OBJECTS]]


def root_of(world_size: int) -> int:
    """Returns the root of all collectives that have one: not rank 0, which is special often enough."""
    return world_size - 1


def input_of(case: Case, rank: int, world_size: int) -> np.ndarray:
    """Returns the array that a rank gives, of bfloat16 the bits."""
    if case.collective == "all_to_all":
        rows = sum(case.sizes_from(rank, world_size))
    elif case.collective in ("reduce_scatter", "scatter"):
        rows = sum(case.sizes(world_size))
    else:
        rows = case.sizes(world_size)[rank]
    # Of NumPy's generators only these words are the same in all versions, and each system may have its own.
    words = np.random.PCG64([SEED, zlib.crc32(case.name.encode()), rank]).random_raw(2 * rows * COLUMNS)
    return _as_dtype(case.dtype, words.reshape(2, rows, COLUMNS))


def object_of(rank: int) -> dict[str, Any]:
    """Returns the object that a rank gives; they differ in size."""
    return {"rank": rank, "losses": [rank / 7] * (1 + 1000 * rank), "name": "Ärger" * rank, "nested": {"none": None}}


def _as_dtype(dtype: str, words: np.ndarray) -> np.ndarray:
    """Returns floats from -2 to 2, so that one tolerance fits all, and integers that overflow."""
    if dtype in INTEGERS:
        return words[0].astype(dtype)
    if dtype == "bool":
        return words[0] % 2 == 1
    real, imaginary = (words >> 11) * 2.0**-51 - 2
    if dtype in COMPLEX:
        return (real + 1j * imaginary).astype(dtype)
    if dtype == "bfloat16":
        return (real.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return real.astype(dtype)


def is_offered(case: Case, system: str) -> bool:
    """Tells whether a peer has what a case asks for, and means the same by it.

    Args:
        case: the case.
        system: "mpich", "openmpi" or "gloo"; gradsync has all.
    """
    if system == "gloo":
        return _is_offered_by_gloo(case)
    if system == "openmpi" and case.op == "sum" and case.dtype in ("int8", "int16", "uint8", "uint16"):
        return False  # on CPUs with AVX it saturates where the others, and NumPy, wrap around
    return case.dtype != "bfloat16" or system not in ("mpich", "openmpi")


def _is_offered_by_gloo(case: Case) -> bool:
    if case.collective == "split":  # its groups cannot be put in another order
        return False
    if case.dtype in ("int16", "uint16", "uint32", "uint64"):
        return case.collective in MESSAGES
    if case.dtype in COMPLEX and (case.op == "prod" or case.collective == "gather"):
        return False
    return not (case.uneven and case.collective in ("all_gather", "gather", "scatter"))
