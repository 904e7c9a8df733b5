"""What gradsync promises on a GPU, and whether the rows keep it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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

LEAST_SHARE_OF_COPY = 0.8  # of the speed of the fastest copy
MOST_OF_DDP = 1.0  # of its reducer's time


def whole_list(model: str) -> str:
    """Returns the workload's name where a model's gradients share one bucket."""
    return f"{model}, one bucket"


def judge(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns each promise about a published model that was measured, with the figure, and whether it is kept."""
    found = {(row.part, row.workload, row.contender): row for row in rows}
    speeds = [row.bytes_per_second for row in rows if row.part == COPY and row.bytes_per_second is not None]
    targets = []
    for model in MODELS:
        for contender in (PACK, SPLIT):
            row = found.get((PACKING, whole_list(model), contender))
            if speeds and row is not None and row.bytes_per_second is not None:
                share = row.bytes_per_second / max(speeds)
                what = f"{whole_list(model)}: {contender}, speed / the fastest copy's"
                targets.append(_target(what, share, LEAST_SHARE_OF_COPY, kept=share >= LEAST_SHARE_OF_COPY))
        ours, theirs = (found.get((STEP, model, name)) for name in (GRADSYNC, DDP))
        if ours is not None and ours.seconds and theirs is not None and theirs.seconds:
            ratio = ours.seconds.median / theirs.seconds.median
            targets.append(
                _target(f"{model}: step, time / that of {DDP}", ratio, MOST_OF_DDP, kept=ratio <= MOST_OF_DDP)
            )
    return targets


def _target(what: str, measured: float, limit: float, *, kept: bool) -> dict[str, Any]:
    return {"what": what, "measured": measured, "limit": limit, "kept": kept}
