"""The examples do what they say."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradsync as gs
from places import SHM, Place, on

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(*words: object) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "gradsync", "run", "-n", "2", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    return done.returncode, done.stdout, done.stderr


def checkpoint(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "checkpoint.npz") as saved:
        return dict(saved)


def train(folder: Path, *words: object) -> tuple[int, str, str]:
    return run("--max-restarts", 2, EXAMPLES / "resume_after_failure.py", folder, *words)


def test_a_resumed_training_ends_with_the_bits_of_an_uninterrupted_one(tmp_path: Path) -> None:
    code, whole, _ = train(tmp_path / "whole")
    assert code == 0
    code, resumed, told = train(tmp_path / "resumed", "--fail-in-epoch", 3)
    assert code == 0, told
    assert "was killed by SIGKILL" in told
    assert told.count("starting all ranks again") == 1
    assert resumed == whole  # every epoch once: the ones before the failure are not trained again
    expected, found = checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "resumed")
    assert found.keys() == expected.keys() == {"weights", "velocity", "epochs_done"}
    for name, array in expected.items():
        assert found[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize(("ranks", "samples", "steps"), [(1, [121], 310), (3, [41, 40, 40], 110)])
def test_uneven_batches_end_with_one_model(ranks: int, samples: list[int], steps: int) -> None:
    code, shown, told = run("-n", ranks, EXAMPLES / "uneven_batches.py")
    assert (code, told) == (0, "")
    found = f"samples by rank {samples}, {steps} steps: weights [1. 2. 3.], bias [4.]"
    assert shown.removeprefix("[rank 0] ") == found + "\n"


def uneven_batches_in_one_process(ranks: int, epochs: int) -> list[np.ndarray]:
    """Each step takes the batches of all ranks as one."""
    x = np.random.default_rng(0).normal(size=(121, 3))
    x = np.hstack([x, np.ones((121, 1))])
    model, history = np.zeros(4), []
    for epoch in range(epochs):
        order = gs.shard_indices(121, epoch)
        for begin in range(0, -(-121 // ranks), 4):
            batch = np.concatenate([order[rank::ranks][begin : begin + 4] for rank in range(ranks)])
            model = model - 0.1 * 2 * (x[batch] @ model - x[batch] @ [1.0, 2.0, 3.0, 4.0]) @ x[batch] / len(batch)
            history.append(model)
    return history


def train_on_uneven_batches(comm: Any, epochs: int) -> list[np.ndarray]:
    return runpy.run_path(str(EXAMPLES / "uneven_batches.py"))["train"](epochs)


@pytest.mark.parametrize(("place", "ranks"), on(SHM, 2, 3))
def test_uneven_batches_make_the_steps_of_one_process(place: Place, ranks: int) -> None:
    """Of three ranks two have no batch in the last step of an epoch."""
    for history in place.run(ranks, train_on_uneven_batches, 3):
        np.testing.assert_allclose(history, uneven_batches_in_one_process(ranks, 3), rtol=1e-12)


@pytest.mark.parametrize("ranks", [3])
def test_collectives_on_any_number_of_ranks(ranks: int) -> None:
    code, shown, told = run("-n", ranks, EXAMPLES / "collectives.py")
    assert (code, told) == (0, "")
    numbers = range(ranks)
    wanted = {
        "all_reduce": [[ranks - 1] * 2] * ranks,
        "all_gather": [[rank] * 2 for rank in numbers for _ in numbers],
        "uneven": [rank for rank in numbers for _ in range(rank + 1)],
        "reduce_scatter": [[sum(numbers)] * 2],
        "all_to_all": [[rank] * 2 for rank in numbers],
        "exchange": [[ranks - 1] * 2] * ranks,
        "asynchronous": [float(ranks)] * 3,
        "group": list(numbers[::2]),
        "objects": list(numbers),
    }
    lines = [line.removeprefix("[rank 0] ").split(maxsplit=1) for line in shown.splitlines()]
    assert {name: json.loads(values) for name, values in lines} == wanted


def losses_in(shown: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", shown)]


def test_gradient_accumulation_reduces_once_a_step() -> None:
    code, shown, told = run(EXAMPLES / "gradient_accumulation.py")
    assert (code, told) == (0, "")
    steps = {step: steps_of_one_process(2, step, *ACCUMULATED)[-1].round(3) for step in (1, 10, 100)}
    wanted = [f"step {step}: weights {model[:3]}, bias {model[3:]}" for step, model in steps.items()]
    assert shown.replace("[rank 0] ", "").splitlines() == ["100 all-reduces for 400 small batches", *wanted]


ACCUMULATED = (4, 64)  # small batches in a step of the example, and samples in one


def steps_of_one_process(ranks: int, steps: int, batches: int, samples: int) -> list[np.ndarray]:
    """Plain gradient descent: each step takes the mean over all samples of all ranks at once."""
    sources = [np.random.default_rng(rank) for rank in range(ranks)]
    model, history = np.zeros(4), []
    for _ in range(steps):
        drawn = [source.normal(size=(samples, 3)) for source in sources for _ in range(batches)]
        x = np.hstack([np.concatenate(drawn), np.ones((ranks * batches * samples, 1))])
        model = model - 0.1 * 2 * (x @ model - x @ [1.0, 2.0, 3.0, 4.0]) @ x / len(x)
        history.append(model)
    return history


def accumulate_as_the_example_does(comm: Any, steps: int) -> list[np.ndarray]:
    return runpy.run_path(str(EXAMPLES / "gradient_accumulation.py"))["train"](comm, steps)


@pytest.mark.parametrize(("place", "ranks"), on(SHM, 2))
def test_gradient_accumulation_makes_the_steps_of_one_process(place: Place, ranks: int) -> None:
    """Each step alike: that all ends well would also be so where most of the batches are lost."""
    by_rank = place.run(ranks, accumulate_as_the_example_does, 30)
    for history in by_rank:
        np.testing.assert_allclose(history, steps_of_one_process(ranks, 30, *ACCUMULATED), rtol=1e-12)


def test_mixed_precision_skips_the_same_steps_on_all_ranks() -> None:
    code, shown, told = run(EXAMPLES / "loss_scaling.py")
    assert (code, told) == (0, "")
    assert shown.endswith("weights [1. 2. 3.], 7 of 200 steps skipped\n")


def test_the_transformer_learns_to_write() -> None:
    code, shown, told = run(EXAMPLES / "transformer.py", "--steps", 25)
    assert (code, told) == (0, "")
    losses = losses_in(shown)
    assert len(losses) == 6
    assert losses[0] > 4.4  # a guess among 96 letters
    assert losses[-1] < 3.0


def test_every_example_is_in_the_table() -> None:
    tracked = [path for path in EXAMPLES.rglob("*.*") if path.suffix in (".py", ".sh", ".yaml")]
    shown = re.findall(r"\]\(([\w/.]+)\)", (EXAMPLES / "README.md").read_text())
    assert [path for path in tracked if str(path.relative_to(EXAMPLES)) not in shown] == []
    assert [link for link in shown if not (EXAMPLES / link).exists()] == []
    assert "examples/README.md" in (EXAMPLES.parent / "README.md").read_text()


def test_each_hook_trains_as_the_plain_mean_does() -> None:
    code, shown, told = run(EXAMPLES / "hooks.py")
    assert (code, told) == (0, "")
    distances = dict(re.findall(r"(\w+): weights ([\d.]+)% from those of the plain mean", shown))
    assert list(distances) == ["float16", "bfloat16", "Int8", "PowerSGD"]
    assert all(float(percent) < 0.1 for percent in distances.values())
