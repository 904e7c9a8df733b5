"""Python objects between ranks: any tree, any size, and what goes wrong is told to all."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

import gradsync as gs
from contract import expect
from gradsync import process_group
from rank_processes import run_ranks, run_ranks_for_outcomes


def move_trees(comm: Any, examples: list[list[Any]]) -> None:
    n = comm.world_size
    for number, objs in enumerate(examples):
        root = number % n
        mine = objs[comm.rank]
        is_root = comm.rank == root
        assert comm.objects.all_gather(mine) == objs[:n]
        assert comm.objects.gather(mine, root) == (objs[:n] if is_root else None)
        assert comm.objects.broadcast(objs if is_root else None, root) == objs
        assert comm.objects.scatter(objs[:n] if is_root else None, root) == mine


# Between GPUs, on the stand-in.


def move_beside_gpu(comm: Any) -> None:
    import cupy

    n = comm.world_size
    array = cupy.full(1000, float(comm.rank))
    for _ in range(3):  # beside what the GPU does
        comm.all_reduce(array)
        move_trees(comm, [[{"rank": rank}, "x" * rank][:1] + [None] * 3 for rank in range(4)])
    move_trees(comm, [[b"", [1], bytes(200_000), {2}], [np.float64(1), 2, (), "é" * 70_000]])
    values = comm.objects.all_gather(np.arange(100_000.0) * comm.rank)
    assert [value[-1] for value in values] == [99_999.0 * rank for rank in range(n)]
    refused = expect(gs.InvalidArgument, lambda: comm.objects.all_gather((lambda: 0) if comm.rank == n - 1 else 1))
    assert f"rank {n - 1}: its object cannot be pickled" in str(refused)
    if n > 1:
        odd = comm.rank == 0
        expect(gs.PlanMismatch, lambda: comm.objects.all_gather(1) if odd else comm.objects.broadcast(1))
    assert comm.objects.all_gather(comm.rank) == list(range(n))
    comm.objects.all_gather("before anyone closes")
    comm.close()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_objects_between_gpus(n: int) -> None:
    run_ranks(n, move_beside_gpu, backend="nccl", stand_in=True)


def abort_while_waiting(comm: Any) -> str:
    comm.objects.all_gather(1)
    if comm.rank == 0:
        timer = threading.Timer(0.2, comm.abort, ["the disk is full"])
        timer.start()
        started = time.monotonic()
        error = expect(gs.GradsyncError, lambda: comm.objects.all_gather(1))
        assert time.monotonic() - started < 10
        timer.join()
        return str(error)
    deadline = time.monotonic() + 20
    while not comm.closed and time.monotonic() < deadline:  # rank 0 waits meanwhile
        time.sleep(0.05)
    return str(expect(gs.GradsyncError, lambda: comm.objects.all_gather(1)))


def test_an_abort_wakes_who_waits_beside_the_gpu() -> None:
    own, other = run_ranks(2, abort_while_waiting, backend="nccl", stand_in=True)
    assert "the disk is full" in own
    assert "the disk is full" in other


def close_while_needed(comm: Any) -> str:
    comm.objects.all_gather(1)
    if comm.rank == 1:
        comm.close()
        expect(gs.RankFailed, lambda: process_group._client.get("nothing", timeout_seconds=20))  # from rank 0's abort
        return ""
    return str(expect(gs.RankFailed, lambda: comm.objects.all_gather(1)))


def test_a_rank_that_has_closed_is_named_beside_the_gpu() -> None:
    told, _ = run_ranks_for_outcomes(2, close_while_needed, backend="nccl", stand_in=True)
    assert "rank 1 closed the communicator" in str(told.result), told.traceback_text


def wait_for_an_absent_rank(comm: Any) -> tuple[Any, bool]:
    comm.objects.all_gather(1)
    if comm.rank == 1:
        expect(gs.CollectiveTimeout, lambda: process_group._client.get("nothing", timeout_seconds=20))
        return expect(gs.CollectiveTimeout, lambda: comm.objects.all_gather(1)).missing_ranks, comm.closed
    return expect(gs.CollectiveTimeout, lambda: comm.objects.all_gather(1)).missing_ranks, comm.closed


def test_an_absent_rank_is_named_beside_the_gpu() -> None:
    options = {"backend": "nccl", "stand_in": True, "collective_timeout_seconds": 2.5}
    assert run_ranks(2, wait_for_an_absent_rank, **options) == [((1,), True)] * 2
