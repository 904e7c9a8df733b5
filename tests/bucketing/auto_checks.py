"""What threshold_bytes="auto" must do on every backend; run inside rank processes."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from naive_reference import Specs, by_rank, expect_equal, put_all, reduced, step, values_for

import gradsync as gs
from kits import make_kit

MOST_STEPS = 20
#: 2 MB: of the thresholds that are tried, three give other buckets.
SPECS: Specs = {f"p{i}": ((50_000,), np.float32) for i in range(10)}


def specs_for(number: int, changes: bool) -> Specs:
    """Returns the gradients of a step; where they change, they do in the middle of the search, and back."""
    if changes and 4 <= number < 7:
        return dict(list(SPECS.items())[:-1])
    if changes and number == 7:
        return {**SPECS, "more": ((5,), np.float64)}
    return SPECS


def settle(comm: Any, kit_name: str, changes: bool, is_told: bool) -> list[Any]:
    """Returns the threshold after each step, and what was logged; the results are right in each step."""
    kit = make_kit(comm, kit_name)
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("gradsync")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    callback = gs.AllreduceCallback(
        "mean", comm, threshold_bytes="auto", first_bucket_bytes=300_000, parameters=SPECS if is_told else None
    )
    thresholds = []
    last = 8 if changes else 0
    for number in range(last + MOST_STEPS + 3):
        specs = specs_for(number, changes)
        values = values_for(comm.rank, number % 3, specs)
        got = step(callback, put_all(kit, values))
        expect_equal(comm, got, reduced(by_rank(comm.world_size, number % 3, specs)), number)
        thresholds.append(callback.threshold_bytes)
    decided = [line for line in lines if "threshold_bytes is" in line]
    assert len(decided) == 1, lines
    assert "MiB from now on; tried:" in decided[0]
    assert comm.label in decided[0]
    assert len(set(thresholds[last + MOST_STEPS - 1 :])) == 1
    assert f"{thresholds[-1] / 2**20:g} MiB" in decided[0]
    assert len(set(thresholds)) > 2  # some were tried
    return thresholds
