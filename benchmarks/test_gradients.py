"""The gradients of a step, averaged over the ranks, beside what one would use instead."""

from __future__ import annotations

import pytest

import models
import steps
from compare import Compare, contenders

KINDS = {"new": "step, new arrays", "kept": "step, kept arrays", "views": "step, bucket views"}


def rounds_of(model: str) -> int:
    return 20 if model == "ResNet-50" else 8


@pytest.mark.parametrize("arrays", ["new", "kept"])
@contenders("gradsync", "by hand", "DDP", "mpi4py", "copy")
def test_step(compare: Compare, contender: str, arrays: str, model: str) -> None:
    gradients = models.gradients_of(model, few=compare.disabled)
    name = f"{KINDS[arrays]}: {models.name_of(model)}"
    team = compare(name, steps.average, gradients, arrays, rounds=rounds_of(model), warm_up=2)
    if contender in ("gradsync", *compare.commits) and model == "10,000 small":
        calls, *_ = team.ask("run", steps.python_calls, contender, gradients, arrays)
        compare.note(python_calls_a_gradient=calls)


@contenders("gradsync", "DDP")
def test_bucket_views(compare: Compare, model: str) -> None:
    name = f"{KINDS['views']}: {models.name_of(model)}"
    gradients = models.gradients_of(model, few=compare.disabled)
    compare(name, steps.average, gradients, "views", rounds=rounds_of(model), warm_up=2)
