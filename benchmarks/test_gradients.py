"""The gradients of a step, averaged over the ranks, beside what one would use instead."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from math import prod

import pytest

import models
import steps
import systems
from compare import Compare, contenders
from gradsync.machine import usable_cores

KINDS = {"new": "step, new arrays", "kept": "step, kept arrays", "views": "step, bucket views"}
BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): sum(range(100_000))"


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


@pytest.fixture
def busy_cores() -> Iterator[None]:
    """As many processes as there are cores, that compute until the test ends, or pytest, however it does."""
    with ExitStack() as stack:
        for _ in range(usable_cores()):
            stack.enter_context(systems.started([sys.executable, "-c", BUSY, str(os.getpid())], deadline_seconds=3600))
        yield


@pytest.mark.usefixtures("busy_cores")
@contenders("gradsync", "by hand", "DDP", "mpi4py")
def test_step_beside_busy_processes(compare: Compare) -> None:
    gradients = models.gradients_of("ResNet-50", few=compare.disabled)
    compare("beside busy processes: ResNet-50", steps.average, gradients, "new", warm_up=2)


def clipped(contender: str, gradients: models.Gradients) -> steps.Step:
    norm = (systems.comm().world_size + 1) / 2 * sum(prod(shape) for _, shape in gradients) ** 0.5
    # A factor so near to 1 that the results are those of the mean.
    options = {"does not clip": {"clip_norm": 2 * norm}, "clips": {"clip_norm": (1 - 5e-7) * norm}}
    return steps.average(contender, gradients, "new", **options.get(contender, {}))


@contenders("no clip_norm", "does not clip", "clips")
def test_clip_norm(compare: Compare) -> None:
    compare("clip_norm: ResNet-50", clipped, models.gradients_of("ResNet-50", few=compare.disabled), warm_up=2)
