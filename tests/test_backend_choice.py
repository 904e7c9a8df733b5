"""Which backend ranks take, from what each of them could use; and that all take the same one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gradsync as gs
from gradsync.backend_choice import suitable_backend
from gradsync.environment import RankEnvironment, WorldSettings
from rank_processes import run_ranks, run_ranks_for_outcomes

A, B = "+host boot 0000:01:00.0", "+host boot 0000:02:00.0"
NONE = "-no GPU is visible"


def settings(world_size: int, local_world_size: int, *, allow_shared_gpu: bool = False) -> WorldSettings:
    place = RankEnvironment(0, world_size, 0, local_world_size)
    return WorldSettings(place, None, None, 1.0, 1.0, allow_shared_gpu)


@pytest.mark.parametrize(
    ("offers", "shared", "backend", "reason"),
    [
        ([A, B], False, "nccl", "each rank has a GPU"),
        ([A], False, "nccl", "each rank has a GPU"),
        ([A, A], False, "shm", "2 ranks for 1 visible GPUs"),
        ([A, A], True, "nccl", "each rank has a GPU"),
        ([NONE, NONE], False, "shm", "no GPU is visible"),
        ([A, NONE], False, "shm", "rank 1: no GPU is visible"),
        ([A, "-local rank 1 has no GPU of its own"], False, "shm", "rank 1: local rank 1 has no GPU of its own"),
        ([NONE], False, "local", "one rank; no GPU is visible"),
    ],
)
def test_auto_takes_what_all_ranks_can_use(offers: list[str], shared: bool, backend: str, reason: str) -> None:
    n = len(offers)
    chosen, why = suitable_backend(offers, settings(n, n, allow_shared_gpu=shared))
    assert chosen == backend
    assert why.endswith(reason)


def test_across_hosts_every_rank_needs_a_gpu() -> None:
    assert suitable_backend([A, B], settings(2, 1))[0] == "nccl"
    with pytest.raises(gs.BackendUnavailable, match="2 ranks, of which 1 are on this host.*rank 1: no GPU"):
        suitable_backend([A, NONE], settings(2, 1))


def name_of_backend(comm: gs.Communicator) -> str:
    return comm.backend


def test_auto_without_a_gpu_takes_shared_memory() -> None:
    assert run_ranks(3, name_of_backend, environment={"CUDA_VISIBLE_DEVICES": ""}) == ["shm"] * 3


def test_a_rank_that_was_told_and_one_that_was_not() -> None:
    """The same error on both, and neither waits for its deadline."""
    outcomes = run_ranks_for_outcomes(2, name_of_backend, backends=["auto", "shm"])
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome.error, gs.InvalidArgument)
        assert f"rank {rank}/2: rank 1 asks for backend 'shm', rank 0 for 'auto'" in str(outcome.error)


ROW = """
from gradsync import backends

backends.TABLE["pipes"] = backends.BackendRow("pipe_backend")
backends.BACKENDS = ("auto", *backends.TABLE)  # as if the row were in the file
"""
SCRIPT = """
import numpy as np
import gradsync as gs

with gs.init_process_group() as world:
    total = world.all_reduce(np.ones(2))
    if world.rank == 0:
        print(world.backend, *total)
    with gs.override_backend("shm"), gs.override_backend("pipes") as communicator:
        assert communicator is world
"""


def test_a_row_of_the_table_adds_a_backend(tmp_path: Path) -> None:
    """The row and the module are enough: docs/architecture.md says so."""
    (tmp_path / "sitecustomize.py").write_text(ROW)  # every process of this run executes it first
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parent}"}
    command = [sys.executable, "-m", "gradsync", "run", "-n", "2", "--backend", "pipes", str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert "pipes 2.0 2.0" in done.stdout, done.stderr
    assert done.returncode == 0
