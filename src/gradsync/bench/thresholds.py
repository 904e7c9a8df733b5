"""What a sweep over thresholds measures, and which threshold follows from it: pure, nothing is run here.

The plan says which thresholds are worth measuring; the rows are made of the ranks' timings; the recommendation is made
of the rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradsync.bench.measurement import Seconds
from gradsync.bench.text import MEGABYTE
from gradsync.bucketing.plan import GradientSpec, plan_buckets
from gradsync.errors import InvalidArgument

DEFAULT_MEGABYTES = "0.25,0.5,1,2,5,10,25,50,100"
# A larger threshold costs memory and delays the first all-reduce: it has to be worth more than this.
TOLERANCE = 0.03


@dataclass(frozen=True)
class Contender:
    """A threshold to measure.

    Attributes:
        threshold_bytes: of a bucket.
        all_reduces: buckets of a step.
        same_buckets: larger thresholds, in bytes, that put the gradients into the same buckets.
    """

    threshold_bytes: int
    all_reduces: int
    same_buckets: tuple[int, ...] = ()


@dataclass(frozen=True)
class Timings:
    """Seconds of each round by the contender's number; each round's are those of its slowest rank.

    Attributes:
        steps: of whole steps: every gradient handed over, every bucket reduced.
        packs: of the same buckets packed and split without moving data; empty where that is not measured.
    """

    steps: Sequence[Sequence[float]]
    packs: Sequence[Sequence[float]]


@dataclass(frozen=True)
class Row:
    """What was measured at a threshold.

    Attributes:
        contender: the threshold.
        seconds: of a step.
        pack_seconds: of packing and splitting alone; None where that is not measured.
        bus_bytes_per_second: 2 (p - 1) / p of the gradients' bytes over the median: what each rank's link carried at
            the least. 0 for one rank.
    """

    contender: Contender
    seconds: Seconds
    pack_seconds: Seconds | None
    bus_bytes_per_second: float

    @property
    def pack_share(self) -> float | None:
        """Packing alone as a part of the step. Where a backend packs on the way, it may be above 1."""
        return None if self.pack_seconds is None else self.pack_seconds.median / self.seconds.median


def parse_megabytes(text: str) -> list[int]:
    """Returns thresholds in bytes, ascending, each once, from "0.25,1,10" in units of 1024**2 bytes.

    Raises:
        InvalidArgument: there is none, or one is no number, or below a byte.
    """
    thresholds = set()
    for part in filter(None, map(str.strip, text.split(","))):
        try:
            size_bytes = round(float(part) * MEGABYTE)
        except (ValueError, OverflowError):
            raise InvalidArgument(f"--thresholds needs numbers of megabytes, as 0.25,1,10; got {part!r}") from None
        if size_bytes < 1:
            raise InvalidArgument(f"--thresholds needs at least one byte each, got {part} MB")
        thresholds.add(size_bytes)
    if not thresholds:
        raise InvalidArgument(f"--thresholds needs at least one number of megabytes, got {text!r}")
    return sorted(thresholds)


def plan_sweep(specs: Sequence[GradientSpec], thresholds: Sequence[int]) -> list[Contender]:
    """Returns what to measure: of thresholds that make the same buckets, the smallest.

    Args:
        specs: the gradients of a step, in the order of arrival.
        thresholds: in bytes, ascending.
    """
    found: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for threshold in thresholds:
        buckets = plan_buckets(specs, threshold)
        found.setdefault(tuple(tuple(slot.position for slot in b.slots) for b in buckets), []).append(threshold)
    return [Contender(same[0], len(buckets), tuple(same[1:])) for buckets, same in found.items()]


def rows_of(contenders: Sequence[Contender], timings: Timings, *, total_bytes: int, ranks: int) -> list[Row]:
    """Sums up timings; at least one round of them."""
    rows = []
    for number, contender in enumerate(contenders):
        seconds = Seconds.of(timings.steps[number])
        packs = Seconds.of(timings.packs[number]) if timings.packs else None
        bus = 2 * (ranks - 1) / ranks * total_bytes / seconds.median if seconds.median else math.inf
        rows.append(Row(contender, seconds, packs, bus))
    return rows


def best(rows: Sequence[Row]) -> Row:
    """Returns the fastest row."""
    return min(rows, key=lambda row: row.seconds.median)


def recommend(rows: Sequence[Row]) -> Row:
    """Returns the smallest threshold within TOLERANCE of the fastest."""
    limit = (1 + TOLERANCE) * best(rows).seconds.median
    return min((row for row in rows if row.seconds.median <= limit), key=lambda row: row.contender.threshold_bytes)


def as_dictionary(row: Row) -> Mapping[str, object]:
    """Returns a row for JSON; times in seconds."""
    packs = row.pack_seconds
    return {
        "threshold_bytes": row.contender.threshold_bytes,
        "same_buckets_threshold_bytes": row.contender.same_buckets,
        "all_reduces": row.contender.all_reduces,
        "seconds": vars(row.seconds),
        "spread": row.seconds.spread,
        "pack_only_seconds": vars(packs) if packs else None,
        "pack_only_share": row.pack_share,
        "bus_bytes_per_second": row.bus_bytes_per_second,
    }
