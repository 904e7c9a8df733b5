"""What is timed: a collective of one size, dtype and operator; and what a command line makes of sizes and dtypes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradsync.bench.collectives.kinds import KINDS, Kind
from gradsync.errors import InvalidArgument

#: nccl-tests' names of dtypes, and NumPy's.
DTYPES = {
    **{name: name for name in ("int8", "uint8", "int32", "uint32", "int64", "uint64")},
    **{"half": "float16", "float": "float32", "double": "float64", "bfloat16": "bfloat16"},
    **{name: name for name in ("float16", "float32", "float64", "int16", "uint16")},
}
_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)
_MOST_SIZES = 100


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes:
        collective: its name.
        count: elements of a part, see Kind.
        dtype: NumPy's name.
        op: of a reduction; "" for others.
        ranks: how many.
        iterations, warm_up: calls of a block that are timed, and calls before them.
        checks: whether results are compared with those of NumPy.
    """

    collective: str
    count: int
    dtype: str
    op: str
    ranks: int
    iterations: int
    warm_up: int
    checks: bool

    @property
    def kind(self) -> Kind:
        """What the collective is."""
        return KINDS[self.collective]


def parse_size(text: str) -> int:
    """Returns a size in bytes of "8", "64K" or "1.5M", in units of 1024 as nccl-tests has them.

    Raises:
        InvalidArgument: it is none, or below a byte.
    """
    match = _SIZE.fullmatch(text.strip())
    size_bytes = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size_bytes < 1:
        raise InvalidArgument(f"a size needs to read 8, 64K, 1M or 1G, and be at least a byte; got {text!r}")
    return size_bytes


def sizes_between(begin: int, end: int, factor: float) -> list[int]:
    """Returns the sizes from `begin` on, each `factor` times the one before, up to `end`.

    Raises:
        InvalidArgument: the end is before the beginning, the factor is not above 1, or there are too many.
    """
    if end < begin:
        raise InvalidArgument(f"-e needs to be at least -b, got {end} and {begin} bytes")
    if begin == end:
        return [begin]
    if factor <= 1:
        raise InvalidArgument(f"-f needs to be above 1, got {factor:g}")
    sizes: list[int] = []
    size = float(begin)
    while size <= end:
        sizes.append(round(size))
        size *= factor
        if len(sizes) > _MOST_SIZES:
            raise InvalidArgument(f"-b, -e and -f make more than {_MOST_SIZES} sizes: use a larger factor")
    return sorted(set(sizes))


def parse_dtype(text: str) -> str:
    """Returns NumPy's name of a dtype.

    Raises:
        InvalidArgument: there is none of that name.
    """
    if text not in DTYPES:
        raise InvalidArgument(f"no dtype is called {text!r}: use one of {', '.join(DTYPES)}")
    return DTYPES[text]


def plan_cases(kind: Kind, sizes: Sequence[int], itemsize: int, template: Case) -> list[Case]:
    """Returns the cases of a collective, one for each size that makes arrays of another length.

    Args:
        kind: the collective.
        sizes: in bytes, ascending.
        itemsize: bytes of an element.
        template: with all that does not depend on the collective or the size.
    """
    counts = dict.fromkeys(kind.count(size, itemsize, template.ranks) for size in sizes)
    op = template.op if kind.reduces else ""
    return [replace(template, collective=kind.name, count=count, op=op) for count in counts]
