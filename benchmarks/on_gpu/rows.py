"""The results: the distribution of samples for each workload and contender."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from measurement import Seconds

if TYPE_CHECKING:  # it imports CuPy
    from on_gpu.clock import Sample

MEASURED = "measured"


@dataclass(frozen=True)
class Row:
    """One contender on one workload.

    Attributes:
        part: of the benchmark.
        workload: what is done.
        contender: who does it.
        status: MEASURED, or the reason why not.
        seconds: until the device was done; None if it was not measured.
        host_seconds: until the call returned.
        moved_bytes: read plus written by the device; None where that is not what counts.
        late_samples: samples in which the device waited for the host, although only its own time was meant.
    """

    part: str
    workload: str
    contender: str
    status: str = MEASURED
    seconds: Seconds | None = None
    host_seconds: Seconds | None = None
    moved_bytes: int | None = None
    late_samples: int = 0

    @classmethod
    def of(
        cls, part: str, workload: str, contender: str, samples: Sequence[Sample], moved_bytes: int | None = None
    ) -> Row:
        """Sums up samples, at least two."""
        return cls(
            part,
            workload,
            contender,
            seconds=Seconds.of([sample.seconds for sample in samples]),
            host_seconds=Seconds.of([sample.host_seconds for sample in samples]),
            moved_bytes=moved_bytes,
            late_samples=sum(sample.is_late for sample in samples),
        )

    @property
    def bytes_per_second(self) -> float | None:
        """How fast the device moves memory, by the median."""
        return None if self.seconds is None or self.moved_bytes is None else self.moved_bytes / self.seconds.median

    def as_json(self) -> dict[str, Any]:
        seconds, host_seconds = (None if s is None else vars(s) for s in (self.seconds, self.host_seconds))
        return {
            **vars(self),
            "seconds": seconds,
            "host_seconds": host_seconds,
            "bytes_per_second": self.bytes_per_second,
        }


def table_of(title: str, rows: Sequence[Row]) -> Table:
    """Returns the rows of one part."""
    table = Table(title=title)
    for heading in ("workload", "contender"):
        table.add_column(heading)
    for heading in ("median", "quartiles", "host", "GB/s", "late"):
        table.add_column(heading, justify="right")
    for row in rows:
        if row.seconds is None:
            table.add_row(row.workload, row.contender, row.status)
            continue
        speed = row.bytes_per_second
        table.add_row(
            row.workload,
            row.contender,
            str(row.seconds),
            f"{1e3 * row.seconds.lower_quartile:.3g} .. {1e3 * row.seconds.upper_quartile:.3g}",
            str(row.host_seconds or ""),
            "" if speed is None else f"{speed / 1e9:.0f}",
            str(row.late_samples or ""),
        )
    return table
