"""Which backend ranks take, from what each of them could use; and that all take the same one."""

from __future__ import annotations

import gradsync as gs
from rank_processes import run_ranks, run_ranks_for_outcomes


def name_of_backend(comm: gs.Communicator) -> str:
    return comm.backend


def test_auto_without_a_gpu_takes_shared_memory() -> None:
    assert run_ranks(3, name_of_backend, environment={"CUDA_VISIBLE_DEVICES": ""}) == ["shm"] * 3


def test_a_rank_that_was_told_and_one_that_was_not() -> None:
    """The same error on both, and neither waits for its deadline."""
    outcomes = run_ranks_for_outcomes(2, name_of_backend, backends=["auto", "shm"])
    told = [str(outcome.error) for outcome in outcomes]
    assert isinstance(outcomes[0].error, gs.InvalidArgument)
    assert "rank 1 asks for backend 'shm', rank 0 for 'auto'" in told[0]
    assert isinstance(outcomes[1].error, gs.RankFailed | gs.InvalidArgument)
    assert "for 'auto'" in told[1] or "backend 'auto'" in told[1]
