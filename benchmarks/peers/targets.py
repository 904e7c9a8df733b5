"""The promises, as ratios: gradsync's median over the best peer's, or over a time for each gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from peers.collectives import ALL_GATHER, ALL_TO_ALL, BROADCAST, REDUCE_SCATTER
from peers.contenders import (
    DDP_START_UP,
    GLOO,
    GRADSYNC,
    MPICH_ARRAY,
    MPICH_PER_TENSOR,
    OPENMPI_ARRAY,
    OPENMPI_PER_TENSOR,
)
from peers.memory_mode import FAST, SLOW
from peers.rows import Row
from peers.workload import BUSY, IDLE
from peers.workloads import COLLECTIVE_SIZES_BYTES, SIZES_BYTES, busy_cores, parameter_lists, size_name

AHEAD = 1.0
# From here on the bytes count, and not only the calls.
LARGE_FROM_BYTES = 64 * 2**10
TIMED_COLLECTIVES = (ALL_GATHER, REDUCE_SCATTER, BROADCAST, ALL_TO_ALL)


@dataclass(frozen=True)
class Target:
    """A limit for a ratio.

    Attributes:
        workload: what is timed.
        against: the contenders; of several, the fastest; none where the limits are times.
        must: the promised ratio, or None.
        reach: the aimed ratio, or None.
        state: of the cores while gradsync is timed.
        against_state: of the cores while the others are.
        contender: whose promise it is.
        unit: what the limits count, in words, where they are times.
        unit_seconds: how long one of these is.
    """

    workload: str
    against: tuple[str, ...]
    must: float | None = None
    reach: float | None = None
    state: str = IDLE
    against_state: str = IDLE
    contender: str = GRADSYNC
    unit: str = ""
    unit_seconds: float | None = None

    def __post_init__(self) -> None:
        if bool(self.against) == bool(self.unit_seconds):
            raise ValueError(f"{self}: a limit is held against contenders, or counts units of time")


@dataclass(frozen=True)
class Verdict:
    """A target and what was measured.

    Attributes:
        target: the target.
        ratio: over all rounds, of medians, or of a median and a unit; None where not all contenders were measured.
        ratio_of_means: the same of means; nothing is promised of it.
        ratio_by_mode: the same by memory mode, as far as all contenders were measured in it.
    """

    target: Target
    ratio: float | None
    ratio_of_means: float | None = None
    ratio_by_mode: dict[str, float] = field(default_factory=dict)

    @property
    def must_kept(self) -> bool | None:
        """None without a promise, or without a measurement."""
        return self._within(self.target.must)

    @property
    def reach_kept(self) -> bool | None:
        """None without an aim, or without a measurement."""
        return self._within(self.target.reach)

    def as_json(self) -> dict[str, Any]:
        return {
            **vars(self.target),
            "ratio": self.ratio,
            "ratio_of_means": self.ratio_of_means,
            "ratio_by_mode": self.ratio_by_mode,
            "must_kept": self.must_kept,
            "reach_kept": self.reach_kept,
        }

    def _within(self, limit: float | None) -> bool | None:
        return None if limit is None or self.ratio is None else self.ratio <= limit


def all_reduce_targets() -> list[Target]:
    """Returns the targets of all_reduce, in the order of the pages."""
    sizes = [target for size_bytes in SIZES_BYTES for target in _targets_of_size(size_bytes)]
    busy = [Target(w.name, (GRADSYNC,), must=10.0, reach=4.0, state=BUSY) for w in busy_cores()]
    return [*sizes, *busy]


def _targets_of_size(size_bytes: int) -> list[Target]:
    workload = size_name(size_bytes)
    if size_bytes < LARGE_FROM_BYTES:
        return [Target(workload, (OPENMPI_ARRAY,), must=2.0, reach=AHEAD)]
    targets = [
        Target(workload, (GLOO,), must=AHEAD),
        Target(workload, (MPICH_ARRAY,), must=AHEAD),
        Target(workload, (OPENMPI_ARRAY,), must=AHEAD if size_bytes >= 2**20 else None, reach=AHEAD),
    ]
    if size_bytes >= 10 * 2**20:
        targets.append(Target(workload, (GLOO, MPICH_ARRAY, OPENMPI_ARRAY), reach=1 / 2))
    return targets


def collective_targets() -> list[Target]:
    """Returns the targets of the other collectives; nothing is promised beside Open MPI."""
    sizes = [
        Target(size_name(size_bytes, collective), (other,), must if size_bytes >= LARGE_FROM_BYTES else None)
        for collective in TIMED_COLLECTIVES
        for size_bytes in COLLECTIVE_SIZES_BYTES
        for other, must in ((GLOO, AHEAD), (MPICH_ARRAY, AHEAD), (OPENMPI_ARRAY, None))
    ]
    lists = [
        Target(workload.name, (other,), must)
        for workload in parameter_lists()
        for other, must in ((DDP_START_UP, AHEAD), (MPICH_PER_TENSOR, AHEAD), (OPENMPI_PER_TENSOR, None))
    ]
    return [*sizes, *lists]


def judge(targets: Sequence[Target], rows: Sequence[Row]) -> list[Verdict]:
    """Compares the rows with the targets, without targets of workloads that were not run."""
    by_key = {(row.workload, row.state, row.contender): row for row in rows}
    return [
        _verdict(target, by_key) for target in targets if (target.workload, target.state, target.contender) in by_key
    ]


def _verdict(target: Target, rows: dict[tuple[str, str, str], Row]) -> Verdict:
    ours = rows[target.workload, target.state, target.contender]
    others = [rows[target.workload, target.against_state, name] for name in target.against]

    def ratio_of(value: Callable[[Row], float | None]) -> float | None:
        return _ratio(value(ours), [value(other) for other in others] if others else [target.unit_seconds])

    by_mode = {mode: ratio_of(lambda row, mode=mode: row.median(mode)) for mode in (FAST, SLOW)}
    return Verdict(
        target,
        ratio_of(lambda row: row.median()),
        ratio_of(lambda row: row.mean_seconds),
        {mode: ratio for mode, ratio in by_mode.items() if ratio is not None},
    )


def _ratio(ours: float | None, others: list[float | None]) -> float | None:
    """Returns gradsync's value over the smallest of the peers'; None if a value is missing or lost in noise."""
    known = [value for value in others if value is not None and value > 0]
    return None if ours is None or len(known) < len(others) else ours / min(known)
