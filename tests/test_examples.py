"""The examples do what they say; what examples/failures print is in the README, and checked with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(*words: object) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "gradsync", "run", "-n", "2", *map(str, words)]
    environment = {name: value for name, value in os.environ.items() if name != "GRADSYNC_STATE_DIR"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    return done.returncode, done.stdout, done.stderr


def checkpoint(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "checkpoint.npz") as saved:
        return dict(saved)


def train(folder: Path, *words: object) -> tuple[int, str, str]:
    return run("--max-restarts", 2, "--state-dir", folder, EXAMPLES / "resume_after_failure.py", *words)


@pytest.mark.parametrize("epoch", [1, 3, 6])
def test_a_resumed_training_ends_with_the_bits_of_an_uninterrupted_one(tmp_path: Path, epoch: int) -> None:
    code, whole, _ = train(tmp_path / "whole")
    assert code == 0
    code, resumed, told = train(tmp_path / "resumed", "--fail-in-epoch", epoch)
    assert code == 0, told
    assert "was killed by SIGKILL" in told
    assert told.count("starting all ranks again") == 1
    assert resumed == whole  # every epoch once: the ones before the failure are not trained again
    expected, found = checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "resumed")
    assert found.keys() == expected.keys() == {"weights", "velocity", "epochs_done"}
    for name, array in expected.items():
        assert found[name].tobytes() == array.tobytes(), name


def test_a_finished_training_is_not_repeated(tmp_path: Path) -> None:
    code, _, _ = train(tmp_path)
    assert code == 0
    assert sorted(os.listdir(tmp_path)) == ["checkpoint.npz"]
    assert train(tmp_path) == (0, "", "")


def test_without_a_place_for_checkpoints_it_says_how_to_get_one() -> None:
    code, _, told = run(EXAMPLES / "resume_after_failure.py")
    assert code == 2
    assert "start with gradsync run --max-restarts 2, or --state-dir DIR" in told


@pytest.mark.parametrize(("ranks", "batches"), [(1, [31]), (2, [16, 15]), (3, [11, 10, 10])])
def test_uneven_batches_end_with_one_model(ranks: int, batches: list[int]) -> None:
    code, shown, told = run("-n", ranks, EXAMPLES / "uneven_batches.py")
    assert (code, told) == (0, "")
    found = f"batches by rank {batches}, {10 * batches[0]} steps: weights [1. 2. 3.], bias [4.]"
    assert shown.removeprefix("[rank 0] ") == found + "\n"


@pytest.mark.parametrize("ranks", [1, 2, 3])
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


def test_every_failure_has_its_place_in_the_pages() -> None:
    text = (EXAMPLES.parent / "docs" / "failures.md").read_text()
    shown = [path.name for path in (EXAMPLES / "failures").glob("*.py") if f"examples/failures/{path.name}\n" in text]
    assert sorted(shown) == ["dies.py", "disagrees.py", "port_taken.py", "raises.py", "stalls.py"]
    assert len(shown) == len(list((EXAMPLES / "failures").glob("*.py")))
