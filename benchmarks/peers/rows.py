"""The results: the distribution of rounds for each workload, state of the cores, and contender."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from measurement import Seconds
from peers.blocks import Block
from peers.contenders import DIFFERENCES
from peers.memory_mode import FAST, SLOW
from peers.workload import Workload

MEASURED = "measured"
NOT_INSTALLED = "not installed"
NOT_OFFERED = "not offered"
NOT_ASKED_FOR = "not asked for"


@dataclass(frozen=True)
class Row:
    """One contender on one workload.

    Attributes:
        workload: its name.
        state: of the cores.
        contender: its name.
        status: MEASURED, or the reason why not.
        seconds: over all rounds; None if it was not measured.
        mean_seconds: the same rounds' mean: beside busy processes the median may tell only of rounds that met none.
        by_mode: the same by memory mode; a mode that was not met is missing.
        blocks: median and memory speed of each block, in the order they were run.
    """

    workload: str
    state: str
    contender: str
    status: str
    seconds: Seconds | None = None
    mean_seconds: float | None = None
    by_mode: dict[str, Seconds] = field(default_factory=dict)
    blocks: list[dict[str, float]] = field(default_factory=list)

    def median(self, mode: str | None = None) -> float | None:
        """Returns the median in seconds, overall or in one memory mode; None where there is none."""
        seconds = self.seconds if mode is None else self.by_mode.get(mode)
        return seconds.median if seconds else None


def rows_of(workload: Workload, blocks: Sequence[Block], absent: dict[str, str]) -> list[Row]:
    """Returns the rows of a workload's blocks.

    Args:
        workload: what was timed.
        blocks: of all contenders.
        absent: system -> why it was not measured.
    """
    rows = []
    for state in workload.states:
        of_state = {
            name: Row(workload.name, state, name, absent[system])
            if system in absent
            else _of_contender(workload, state, name, [b for b in blocks if (b.contender, b.state) == (name, state)])
            for name, system in workload.contenders.items()
        }
        rows += [*of_state.values(), *_differences(of_state)]
    return rows


def _of_contender(workload: Workload, state: str, contender: str, blocks: list[Block]) -> Row:
    if not blocks:
        return Row(workload.name, state, contender, NOT_OFFERED)
    by_mode = {mode: [block for block in blocks if block.memory_mode == mode] for mode in (FAST, SLOW)}
    return Row(
        workload.name,
        state,
        contender,
        MEASURED,
        _pooled(blocks),
        statistics.fmean(seconds for block in blocks for seconds in block.seconds),
        {mode: _pooled(of_mode) for mode, of_mode in by_mode.items() if of_mode},
        [{"median": Seconds.of(b.seconds).median, "memory_gb_per_second": b.memory_gb_per_second} for b in blocks],
    )


def _pooled(blocks: list[Block]) -> Seconds:
    return Seconds.of([seconds for block in blocks for seconds in block.seconds])


def _differences(rows: dict[str, Row]) -> list[Row]:
    """Returns the rows that are the difference of two: the time of one less the median of the other."""
    return [
        _difference(name, rows[whole], rows[part])
        for name, (whole, part) in DIFFERENCES.items()
        if whole in rows and part in rows
    ]


def _difference(name: str, whole: Row, part: Row) -> Row:
    if whole.seconds is None or part.seconds is None or whole.mean_seconds is None or part.mean_seconds is None:
        return Row(whole.workload, whole.state, name, whole.status)
    mean = whole.mean_seconds - part.mean_seconds
    by_mode = {mode: _less(whole.by_mode[mode], part.by_mode[mode]) for mode in whole.by_mode if mode in part.by_mode}
    return Row(whole.workload, whole.state, name, MEASURED, _less(whole.seconds, part.seconds), mean, by_mode)


def _less(whole: Seconds, part: Seconds) -> Seconds:
    return Seconds(
        whole.median - part.median,
        whole.lower_quartile - part.median,
        whole.upper_quartile - part.median,
        whole.samples,
    )
