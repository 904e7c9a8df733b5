"""The results: the distribution of rounds for each workload, state of the cores, and contender."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from measurement import Seconds
from peers.blocks import Block
from peers.contenders import DIFFERENCES
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
        block_median_seconds: of each block, in the order they were run.
    """

    workload: str
    state: str
    contender: str
    status: str
    seconds: Seconds | None = None
    block_median_seconds: list[float] = field(default_factory=list)


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
    pooled = Seconds.of([seconds for block in blocks for seconds in block.seconds])
    medians = [Seconds.of(block.seconds).median for block in blocks]
    return Row(workload.name, state, contender, MEASURED, pooled, medians)


def _differences(rows: dict[str, Row]) -> list[Row]:
    """Returns the rows that are the difference of two: the time of one less the median of the other."""
    return [
        _difference(name, rows[whole], rows[part])
        for name, (whole, part) in DIFFERENCES.items()
        if whole in rows and part in rows
    ]


def _difference(name: str, whole: Row, part: Row) -> Row:
    if whole.seconds is None or part.seconds is None:
        return Row(whole.workload, whole.state, name, whole.status)
    less, of_whole = part.seconds.median, whole.seconds
    seconds = Seconds(
        of_whole.median - less, of_whole.lower_quartile - less, of_whole.upper_quartile - less, of_whole.samples
    )
    return Row(whole.workload, whole.state, name, MEASURED, seconds)
