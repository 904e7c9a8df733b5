"""The loops of other libraries, as the examples write them: they train what the libraries' own ways train.

Only the ranks import PyTorch and JAX. PyTorch may be in a Python of its own, as `make peers` installs it.
"""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import cross_check_launch as launch
import numpy as np
import pytest

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[2] / "examples"
WITH_JAX = pytest.mark.skipif(find_spec("jax") is None, reason="no JAX: pip install jax")


def check_that_it_learns(shown: str) -> None:
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", shown)]
    assert losses[0] > 0.6
    assert losses[-1] < 0.35


def new_folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_the_loop_of_pytorch(torch_python: str, tmp_path: Path) -> None:
    check_that_it_learns(launch.run_on_gradsync(2, tmp_path, str(EXAMPLES / "torch_loop.py"), python=torch_python))


@WITH_JAX
def test_the_loop_of_jax(tmp_path: Path) -> None:
    check_that_it_learns(launch.run_on_gradsync(2, tmp_path, str(EXAMPLES / "jax_loop.py"), python=sys.executable))


def test_pytorch_trains_bit_for_bit_as_under_ddp(torch_python: str, tmp_path: Path) -> None:
    """With two ranks: halving is exact, and a sum of two has one order."""
    script = str(HERE / "torch_loop_rank.py")
    of_ddp, of_gradsync = new_folder(tmp_path / "ddp"), new_folder(tmp_path / "gradsync")
    launch.run_on_gloo(2, of_ddp, script, "ddp", str(of_ddp))
    launch.run_on_gradsync(2, of_gradsync, script, "gradsync", str(of_gradsync), python=torch_python)
    [wanted, _] = launch.read_results(2, of_ddp)
    for found in launch.read_results(2, of_gradsync):
        assert found.keys() == wanted.keys()
        for name, value in found.items():
            assert value.tobytes() == wanted[name].tobytes(), name


@WITH_JAX
def test_jax_trains_as_in_one_process(tmp_path: Path) -> None:
    script = str(HERE / "jax_loop_rank.py")
    results = {}
    for ranks in (1, 2):
        folder = new_folder(tmp_path / str(ranks))
        launch.run_on_gradsync(ranks, folder, script, str(folder))
        results[ranks] = launch.read_results(ranks, folder)
    [alone], [first, second] = results[1], results[2]
    for name, value in alone.items():
        np.testing.assert_allclose(first[name], value, rtol=1e-4, atol=1e-6)
        assert first[name].tobytes() == second[name].tobytes()
