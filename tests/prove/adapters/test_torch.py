"""PyTorch over gradsync: it trains what DistributedDataParallel trains, and fails as gradsync does.

The ranks run in a Python that has torch: the environment of the benchmarks, where `make peers` has made it.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import cross_check_launch as launch
import numpy as np
import pytest
import torch_checks
from reported_checks import outcomes_in

HERE = Path(__file__).parent
TRAINING = str(HERE / "torch_training_rank.py")
CHECKS = str(HERE / "torch_checks.py")


# -- Beside DistributedDataParallel -------------------------------------------------------------------------------


@pytest.mark.timeout(200)
@pytest.mark.parametrize("world_size", [2, 3])
def test_it_trains_what_ddp_trains(torch_python: str, world_size: int, tmp_path: Path) -> None:
    """Also with parameters that some ranks do not use, or none; with gradients in the buckets, and elsewhere.

    Where no_sync() accumulates, two ranks have the same bits after each of 20 steps: halving is exact, and a sum of two
    has one order.
    """
    results = {}
    for system in ("ddp", "gradsync"):
        folder = tmp_path / system
        folder.mkdir()
        run = launch.run_on_gloo if system == "ddp" else partial(launch.run_on_gradsync, python=torch_python)
        run(world_size, folder, TRAINING, system, str(folder))
        results[system] = launch.read_results(world_size, folder)
    for rank, (ours, theirs) in enumerate(zip(results["gradsync"], results["ddp"], strict=True)):
        assert {name.replace(", without views", "") for name in ours} == theirs.keys()
        for name, value in ours.items():
            known_as = name.replace(", without views", "")
            # After a step buffers are rank 0's here; there they become so with the next forward pass.
            wanted = results["ddp"][0][known_as] if ": norm.running" in name else theirs[known_as]
            np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-7, err_msg=f"rank {rank}, {name}")
            if known_as == "accumulation" and world_size == 2:
                assert value.shape[0] == 20
                np.testing.assert_array_equal(value, wanted, err_msg=f"rank {rank}, {name}")


# -- What it does otherwise, and how it fails --------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcomes(torch_python: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What became of each check on two ranks: "" or its traceback."""
    folder = tmp_path_factory.mktemp("checks")
    launch.run_on_gradsync(2, folder, CHECKS, str(folder), python=torch_python)
    return outcomes_in(folder, 2)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", torch_checks.NAMES)
def test_synchronised(outcomes: dict[str, str], name: str) -> None:
    assert outcomes[name] == ""
