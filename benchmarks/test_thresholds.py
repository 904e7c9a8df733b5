"""Which threshold to take: the time to average a model's gradients, with buckets of several sizes.

pytest benchmarks/test_thresholds.py --shapes shapes.json  # your model; docs/performance.md shows how to write the file
"""

from __future__ import annotations

import models
import steps
from compare import Compare, contenders
from threshold import advice

THRESHOLDS = ("0.5 MB", "1 MB", "2.5 MB", "5 MB", "10 MB", "25 MB", "50 MB")


def step(threshold: str, gradients: models.Gradients) -> steps.Step:
    return steps.average(threshold, gradients, "new", threshold_bytes=threshold)


@contenders(*THRESHOLDS)
def test_threshold(compare: Compare, model: str) -> None:
    name = models.name_of(model)

    def closing(seconds: dict[str, list[float]]) -> str:
        return f"{name}: {advice({float(key.removesuffix(' MB')): each for key, each in seconds.items()})}"

    rounds = 12 if model in ("GPT-2 small", "10,000 small") else 20
    gradients = models.gradients_of(model, few=compare.disabled)
    compare(f"thresholds: {name}", step, gradients, rounds=rounds, closing=closing)
