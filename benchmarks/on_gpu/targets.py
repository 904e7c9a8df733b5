"""What gradsync promises on a GPU, and whether the rows keep it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from models import MODELS
from on_gpu.rows import Row

# The parts.
COPY = "copy"
PACKING = "packing"
STEP = "step"
SHARED = "shared"

# The contenders that targets are about.
PACK = "pack"
SPLIT = "split"
GRADSYNC = "gradsync"
DDP = "DDP's reducer"
DDP_VIEWS = "DDP's reducer, bucket views"


@dataclass(frozen=True)
class Target:
    """A promise and what was measured.

    Attributes:
        what: what was measured.
        measured: a ratio; None where it could not be measured.
        must: the limit that is promised; None: nothing is.
        reach: the limit that is aimed at; None: nothing is.
        at_least: whether the limits are from below.
    """

    what: str
    measured: float | None
    must: float | None = None
    reach: float | None = None
    at_least: bool = False

    @property
    def must_kept(self) -> bool | None:
        """None without a promise, or without a measurement."""
        return self._within(self.must)

    @property
    def reach_kept(self) -> bool | None:
        """None without an aim, or without a measurement."""
        return self._within(self.reach)

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "must_kept": self.must_kept, "reach_kept": self.reach_kept}

    def _within(self, limit: float | None) -> bool | None:
        if limit is None or self.measured is None:
            return None
        return self.measured >= limit if self.at_least else self.measured <= limit


def whole_list(model: str) -> str:
    """Returns the workload's name where a model's gradients share one bucket."""
    return f"{model}, one bucket"


def judge(rows: Sequence[Row]) -> list[Target]:
    """Holds the rows of the published models against the targets; parts that were not run have none."""
    found = {(row.part, row.workload, row.contender): row for row in rows}
    speeds = [row.bytes_per_second for row in rows if row.part == COPY]
    fastest_copy = max((speed for speed in speeds if speed is not None), default=None)
    targets = []
    for model in MODELS:
        for contender in (PACK, SPLIT):
            row = found.get((PACKING, whole_list(model), contender))
            if row is not None:
                speed = _quotient(row.bytes_per_second, fastest_copy)
                what = f"{whole_list(model)}: {contender}, speed / the fastest copy's"
                targets.append(Target(what, speed, must=0.8, reach=0.9, at_least=True))
        ours = found.get((STEP, model, GRADSYNC))
        if ours is not None:
            for theirs, must, reach in ((DDP, 1.0, None), (DDP_VIEWS, None, 1.0)):
                ratio = _quotient(_median(ours), _median(found.get((STEP, model, theirs))))
                targets.append(Target(f"{model}: step, time / that of {theirs}", ratio, must, reach))
    return targets


def table_of_targets(targets: Sequence[Target]) -> Table:
    """Returns every target and whether it was met."""
    table = Table(title="Targets")
    table.add_column("what")
    for heading in ("measured", "must", "reach"):
        table.add_column(heading, justify="right")
    for target in targets:
        sign = ">=" if target.at_least else "<="
        table.add_row(
            target.what,
            "not measured" if target.measured is None else f"{target.measured:.2f}",
            _limit(sign, target.must, target.must_kept),
            _limit(sign, target.reach, target.reach_kept),
        )
    return table


def _limit(sign: str, limit: float | None, kept: bool | None) -> str:
    return "" if limit is None else f"{sign} {limit:.2f} " + {None: "?", True: "yes", False: "[red]NO[/red]"}[kept]


def _median(row: Row | None) -> float | None:
    return None if row is None or row.seconds is None else row.seconds.median


def _quotient(number: float | None, by: float | None) -> float | None:
    return None if number is None or by is None else number / by
