"""The loops of the examples that need PyTorch or JAX come to the same end as the others."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from cross_check_launch import run_on_gradsync

EXAMPLES = Path(__file__).parents[3] / "examples"


def check_a_loop(shown: str) -> None:
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", shown)]
    assert losses[0] > 0.6
    assert losses[-1] < 0.35


@pytest.mark.skipif(find_spec("jax") is None, reason="no JAX: pip install jax")
def test_the_loop_of_jax(tmp_path: Path) -> None:
    check_a_loop(run_on_gradsync(2, tmp_path, str(EXAMPLES / "jax_loop.py"), python=sys.executable))


def test_the_loop_of_pytorch(torch_python: str, tmp_path: Path) -> None:
    check_a_loop(run_on_gradsync(2, tmp_path, str(EXAMPLES / "torch_loop.py"), python=torch_python))
