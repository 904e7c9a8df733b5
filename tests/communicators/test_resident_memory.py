"""Memory in which gradients live, where ranks share it: how it ends, what it costs, what goes wrong."""

from __future__ import annotations

import gc
import os
import signal
import time
from typing import Any

import numpy as np
import pytest

import gradsync as gs
from contract import assert_equal_to_reference, contribution, expect
from contract_resident import agreed, make, reduce_values
from gradsync.communicators.for_bucketing import ListReduction
from gradsync.communicators.shared_memory import resident as shared_resident
from gradsync.communicators.shared_memory import segment
from gradsync.errors import BackendUnavailable
from gradsync.reduction import ReduceOp
from rank_processes import run_ranks, run_ranks_for_outcomes

FLOAT32 = np.dtype(np.float32)
SIZE = 300_000


def reduce(comm: Any, memory: Any, size: int = SIZE, op: str = "sum", dtype: Any = FLOAT32) -> None:
    values = memory.bytes[: size * dtype.itemsize].view(dtype)
    ListReduction(comm, [values], [values], ReduceOp(op), resident=memory).run(agreed(size))


def fail_to_allocate(comm: Any, where: str) -> str:
    """The last rank, or the first, has no memory; all hear of it, and go on."""
    failing = 0 if where == "create_segment" else comm.world_size - 1
    before = len(os.listdir("/proc/self/fd"))
    module = segment if where == "open_segment" else shared_resident
    kept = getattr(module, where)
    if comm.rank == failing:

        def refuse(*arguments: Any, **_: Any) -> int:
            if where == "map_segment":
                os.close(arguments[0])
            raise BackendUnavailable("there is not enough memory")

        setattr(module, where, refuse)
    started = time.monotonic()
    error = expect(gs.BackendUnavailable, lambda: make(comm, 4 * SIZE))
    assert time.monotonic() - started < 10
    setattr(module, where, kept)
    text = str(error)
    del error
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    reduce(comm, make(comm, 4 * SIZE))
    return text


@pytest.mark.parametrize("where", ["create_segment", "open_segment", "reserve", "map_segment"])
def test_a_rank_without_memory_tells_all(where: str) -> None:
    texts = run_ranks(3, fail_to_allocate, where)
    failing = 0 if where == "create_segment" else 2
    assert "there is not enough memory" in texts[failing]
    for rank, text in enumerate(texts):
        assert text.startswith(f"rank {rank}/3: make_resident_memory"), text


def die_while_making(comm: Any, failing: int) -> None:
    if comm.rank == failing:

        def die(*_: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        shared_resident.create_segment = segment.open_segment = die  # type: ignore[assignment]
    make(comm, 4 * SIZE)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_dies_while_memory_is_made_is_noticed(failing: int) -> None:
    started = time.monotonic()
    outcomes = run_ranks_for_outcomes(3, die_while_making, failing)
    assert time.monotonic() - started < 20
    for rank, outcome in enumerate(outcomes):
        if rank != failing:
            assert isinstance(outcome.error, gs.RankFailed)
            assert outcome.error.rank == failing


def ask_for_too_much(comm: Any) -> None:
    text = str(expect(gs.BackendUnavailable, lambda: make(comm, 2**50)))
    assert text.startswith(f"{comm.label}: make_resident_memory")
    make(comm, 64)


@pytest.mark.parametrize(("backend", "world_size"), [("local", 1), ("shm", 1), ("shm", 2)])
def test_more_than_there_is_is_refused(backend: str, world_size: int) -> None:
    run_ranks(world_size, ask_for_too_much, backend=backend)


def reduce_large(comm: Any, are_refused: bool) -> None:
    """Memory for huge pages, with and without them."""
    if are_refused:
        segment._MADV_COLLAPSE = 1000
        segment._ATTEMPTS = 0
    size = 5_000_001
    memory = make(comm, 4 * size)
    assert not memory.bytes.any()
    values = contribution(comm.rank, (size,), "float32")
    got = reduce_values(comm, memory, values, "mean")
    assert_equal_to_reference(got, "mean", "float32", (size,), comm.world_size)


@pytest.mark.parametrize("are_refused", [False, True])
def test_memory_is_large_with_and_without_huge_pages(are_refused: bool) -> None:
    run_ranks(3, reduce_large, are_refused)
