"""The debug mode finds who writes to a gradient that gradsync has, names it, and lets pass what is allowed."""

from __future__ import annotations

import numpy as np
import pytest

import gradsync as gs
from gradsync import process_group
from gradsync.bucketing import gradient_guard
from gradsync.communicators.local import LocalCommunicator
from rank_processes import run_ranks_for_outcomes


def test_without_the_debug_mode_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_guard.GradientGuard, "take", None)
    with LocalCommunicator() as comm:
        sync = gs.AllreduceCallback("sum", comm, lock_gradients=False)
        gradient = np.ones(3)
        with sync.backward():
            sync("p", gradient)
            gradient += 1


def init_with_own_setting(comm: gs.Communicator) -> None:
    address, rank = process_group._client._requests._connection.address, comm.rank
    gs.destroy_process_group()
    gs.init_process_group("shm", rank=rank, world_size=2, address=address, debug=rank == 1)


def test_ranks_with_different_settings_do_not_begin() -> None:
    first, second = run_ranks_for_outcomes(2, init_with_own_setting, backend="shm")
    text = "rank 1/2: rank 0 has debug=False, this rank debug=True: it has to be the same on all ranks"
    assert isinstance(second.error, gs.InvalidArgument)
    assert str(second.error).startswith(text)
    assert isinstance(first.error, gs.RankFailed)
    assert text in str(first.error)
