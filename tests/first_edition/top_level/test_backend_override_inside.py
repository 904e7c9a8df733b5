"""Another backend for the length of a block: which communicator is meant there, and what cannot be had."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import numpy as np

import gradsync as gs
from contract import expect
from gradsync import process_group
from places import STAND_IN
from rank_processes import run_ranks


def total(value: float) -> float:
    """Returns the sum over the ranks of what `group=None` means."""
    array = np.full(3, float(value))
    gs.get_communicator().all_reduce(array)
    return float(array[0])


def stay_as_it_is(comm: Any) -> None:
    with gs.override_backend("shm") as same:
        assert same is comm
        assert gs.get_communicator() is gs.WORLD is comm
        assert total(1) == comm.world_size
    assert process_group._siblings == {}


def test_the_backend_of_the_world_is_the_world() -> None:
    run_ranks(2, stay_as_it_is, backend="shm")


def find_no_memory(comm: Any) -> tuple[str, float]:
    from gradsync.communicators.shared_memory import segment

    if comm.rank == 0:
        segment.available_memory_bytes = lambda: 0.0
    started = time.monotonic()
    error = expect(gs.BackendUnavailable, gs.override_backend("shm").__enter__)
    assert total(1) == comm.world_size  # nothing has happened
    return str(error).partition(": ")[2], time.monotonic() - started


def test_what_one_rank_finds_out_is_told_to_all() -> None:
    environment = {"GRADSYNC_LOCAL_WORLD_SIZE": "2"}
    outcomes = STAND_IN.run(2, find_no_memory, timeout_seconds=30.0, environment=environment)
    assert outcomes[0][0] == outcomes[1][0]
    assert "backend 'shm' cannot join these ranks: rank 0: cannot allocate" in outcomes[0][0]
    assert max(seconds for _, seconds in outcomes) < 20  # the ranks have 30 s


def fail_once_agreed(comm: Any) -> str:
    from gradsync.communicators.shared_memory import shm_backend as shared_memory

    if comm.rank == 1:

        def refuse(ticket: bytes, seconds: float) -> int:
            raise gs.BackendUnavailable("no descriptor is left")

        shared_memory.take_segment = refuse
    error = expect(gs.GradsyncError, gs.override_backend("shm").__enter__)
    with contextlib.suppress(gs.RankFailed):  # the world has ended with it, and may be the first to tell
        gs.destroy_process_group()
    return str(error)


def test_what_fails_after_that_is_reported() -> None:
    first, second = STAND_IN.run(2, fail_once_agreed, timeout_seconds=30.0)
    assert "rank 1" in first
    assert "in override_backend: BackendUnavailable: no descriptor is left" in first
    assert second == "no descriptor is left"
