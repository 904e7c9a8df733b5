"""What came out: for each case the time of both forms, the bandwidths, and what was wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradsync.bench.collectives.cases import Case
from gradsync.bench.measurement import Seconds


@dataclass(frozen=True)
class FormResult:
    """One form, out of place or in place.

    Attributes:
        seconds: of a call: over the blocks, each the mean of its iterations on its slowest rank; None where the form is
            not offered.
        wrong: elements that differ from NumPy's result, on all ranks together; None where that was not checked.
        refusal: why it is not offered.
    """

    seconds: Seconds | None = None
    wrong: int | None = None
    refusal: str = ""


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        contender: what was timed, as "gradsync/shm".
        case: what was timed.
        itemsize: bytes of an element.
        forms: by name.
    """

    contender: str
    case: Case
    itemsize: int
    forms: Mapping[str, FormResult]

    @property
    def size_bytes(self) -> int:
        """What counts as the size."""
        return self.case.kind.size_bytes(self.case.count, self.itemsize, self.case.ranks)

    def algorithm_bytes_per_second(self, form: str) -> float | None:
        """Returns the size over the time; None where there is no time."""
        seconds = self.forms[form].seconds
        return self.size_bytes / seconds.median if seconds else None

    def bus_bytes_per_second(self, form: str) -> float | None:
        """Returns what each link has carried at least. Source: nccl-tests, doc/PERFORMANCE.md."""
        found = self.algorithm_bytes_per_second(form)
        return None if found is None else found * self.case.kind.bus_factor(self.case.ranks)

    def best_bus_bytes_per_second(self) -> float | None:
        """Returns that of the faster form."""
        found = [self.bus_bytes_per_second(form) for form in self.forms]
        return max((value for value in found if value is not None), default=None)


def wrong_in_all(rows: Sequence[Row]) -> int:
    """Returns how many elements were wrong in all forms of all rows."""
    return sum(form.wrong or 0 for row in rows for form in row.forms.values())


def as_dictionary(row: Row) -> dict[str, Any]:
    """Returns a row for JSON; times in seconds, bandwidths in bytes per second."""
    return {
        "contender": row.contender,
        "collective": row.case.collective,
        "size_bytes": row.size_bytes,
        "count": row.case.count,
        "dtype": row.case.dtype,
        "op": row.case.op or None,
        "ranks": row.case.ranks,
        "forms": {
            name: {
                "seconds": vars(form.seconds) if form.seconds else None,
                "algorithm_bytes_per_second": row.algorithm_bytes_per_second(name),
                "bus_bytes_per_second": row.bus_bytes_per_second(name),
                "wrong": form.wrong,
                "not_offered_because": form.refusal or None,
            }
            for name, form in row.forms.items()
        },
    }
