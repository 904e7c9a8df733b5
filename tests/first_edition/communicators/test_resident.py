"""Memory in which gradients live, where ranks share it: how it ends, what it costs, what goes wrong."""

from __future__ import annotations

import gc
import os
import signal
import time
import tracemalloc
from functools import partial
from typing import Any

import numpy as np
import pytest

import gradsync as gs
from contract import assert_equal_to_reference, contribution, exactly_reduced, expect
from contract_resident import agreed, make, reduce_values
from gradsync.communicators.shared_memory import resident as shared_resident
from gradsync.communicators.shared_memory import segment
from gradsync.errors import BackendUnavailable
from gradsync.reduction import ReduceOp
from rank_processes import run_ranks, run_ranks_for_outcomes

FLOAT32 = np.dtype(np.float32)
SIZE = 300_000


def reduce(comm: Any, memory: Any, size: int = SIZE, op: str = "sum", dtype: Any = FLOAT32) -> None:
    comm.all_reduce_resident(memory, 0, size * dtype.itemsize, dtype, ReduceOp(op), agreed(size))


def reduce_exactly(comm: Any) -> None:
    """Lengths around chunks, slices and lines, with what a cast or a division may get wrong."""
    memory = make(comm, 4_000_000)
    n = comm.world_size
    odd = [np.nan, np.inf, -np.inf, -0.0, 1e-45, 3e38]
    for name in ("float16", "bfloat16", "float32", "float64", "complex64"):
        for size in (0, 1, 15, 16, 17, 63 * n, 64 * n + 1, 24_576 * n, 49_152 * n + 5, 150_001):
            for op in ("sum", "mean"):
                given = [contribution(rank, (size,), name, seed=3) for rank in range(n)]
                for rank, values in enumerate(given):
                    with np.errstate(over="ignore", invalid="ignore"):
                        values[rank : rank + 6] = np.array(odd[: max(0, size - rank)])[:6].astype(values.dtype)
                got = reduce_values(comm, memory, given[comm.rank].copy(), op)
                assert got.tobytes() == exactly_reduced(op, given).tobytes(), (name, size, op)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_bits_are_those_of_a_reduction_in_rank_order(world_size: int) -> None:
    run_ranks(world_size, reduce_exactly)


def allocate_in_a_repeated_reduction(comm: Any) -> dict[str, int]:
    """Returns the most bytes that were newly allocated at any moment of a repeated reduction.

    Of several the least: what another thread of the process allocates meanwhile counts too.
    """
    peaks = {}
    memory = make(comm, 8 * SIZE)
    for name in ("float32", "float16", "bfloat16", "complex64", "int64"):
        for op in ("sum", "mean"):
            if (name, op) == ("int64", "mean"):
                continue
            dtype = contribution(0, (1,), name).dtype
            memory.bytes[...] = 0
            key = f"{name} {op}"
            reduce(comm, memory, op=op, dtype=dtype)
            for _ in range(4):
                tracemalloc.start()
                reduce(comm, memory, op=op, dtype=dtype)
                peaks[key] = min(peaks.get(key, 2**62), tracemalloc.get_traced_memory()[1])
                tracemalloc.stop()
    return peaks


def test_a_repeated_reduction_allocates_nothing() -> None:
    for peaks in run_ranks(2, allocate_in_a_repeated_reduction):
        assert max(peaks.values()) < 64 * 1024, peaks


def mapped() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:gradsync" in line for line in maps)


def end_with_views_alive(comm: Any) -> None:
    group = comm.split(0)
    before = mapped(), len(os.listdir("/proc/self/fd"))
    memory = make(group, 4 * SIZE)
    view = memory.bytes.view(FLOAT32)[10:20]
    view[...] = 3
    reduce(group, memory)
    assert mapped() > before[0]
    group.close()
    expect(gs.CommunicatorClosed, partial(reduce, group, memory), "closed")
    del memory, group
    gc.collect()
    comm.barrier()
    assert (view == 3 * comm.world_size).all()
    view[...] = 1
    assert view.sum() == 10
    del view
    after = mapped(), len(os.listdir("/proc/self/fd"))
    assert after < before  # the group's own is gone too


@pytest.mark.parametrize("world_size", [2, 3])
def test_views_outlive_the_communicator_and_end_the_mapping(world_size: int) -> None:
    run_ranks(world_size, end_with_views_alive)


def make_again_and_again(comm: Any) -> list[tuple[int, int]]:
    counts = []
    for _ in range(8):
        memory = make(comm, 4 * SIZE)
        reduce(comm, memory)
        del memory
        comm.barrier()
        counts.append((mapped(), len(os.listdir("/proc/self/fd"))))
    return counts


def test_memory_that_is_dropped_leaves_nothing() -> None:
    for counts in run_ranks(3, make_again_and_again):
        assert len(set(counts)) == 1, counts


def hold_after_the_end(_comm: Any) -> float:
    """The world's own memory, after the process group has been destroyed."""
    comm = gs.get_communicator()
    memory = make(comm, 4 * SIZE)
    memory.bytes.view(FLOAT32)[...] = 1
    reduce(comm, memory)
    gs.destroy_process_group()
    expect(gs.CommunicatorClosed, lambda: reduce(comm, memory), "closed")
    return float(memory.bytes.view(FLOAT32).sum())


def test_gradients_can_be_read_after_the_end_of_the_process_group() -> None:
    assert run_ranks(2, hold_after_the_end) == [2.0 * SIZE] * 2


def fail_between_reductions(comm: Any, how: str) -> None:
    memory = make(comm, 4 * SIZE)
    for step in range(1000):
        reduce(comm, memory)
        if comm.rank == 1 and step == 20:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("bad batch")


@pytest.mark.parametrize("how", ["killed", "raised"])
def test_a_rank_that_fails_is_noticed(how: str) -> None:
    started = time.monotonic()
    outcomes = run_ranks_for_outcomes(3, fail_between_reductions, how)
    assert time.monotonic() - started < 20
    for survivor in (outcomes[0], outcomes[2]):
        assert isinstance(survivor.error, gs.RankFailed)
        assert survivor.error.rank == 1
        assert how == "killed" or "bad batch" in str(survivor.error)
    assert not [name for name in os.listdir("/dev/shm") if "gradsync" in name]


def fail_to_allocate(comm: Any, where: str) -> str:
    """The last rank, or the first, has no memory; all hear of it, and go on."""
    failing = 0 if where == "create_segment" else comm.world_size - 1
    before = len(os.listdir("/proc/self/fd"))
    kept = getattr(shared_resident, where)
    if comm.rank == failing:

        def refuse(*arguments: Any, **_: Any) -> int:
            if where == "map_segment":
                os.close(arguments[0])
            raise BackendUnavailable("there is not enough memory")

        setattr(shared_resident, where, refuse)
    started = time.monotonic()
    error = expect(gs.BackendUnavailable, lambda: make(comm, 4 * SIZE))
    assert time.monotonic() - started < 10
    setattr(shared_resident, where, kept)
    text = str(error)
    del error
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    reduce(comm, make(comm, 4 * SIZE))
    return text


@pytest.mark.parametrize("where", ["create_segment", "take_segment", "reserve", "map_segment"])
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

        shared_resident.create_segment = shared_resident.take_segment = die  # type: ignore[assignment]
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


def raise_on_overflow(comm: Any) -> None:
    np.seterr(all="raise")
    memory = make(comm, 4 * SIZE)
    view = memory.bytes.view(FLOAT32)
    view[...] = 3e38
    reduce(comm, memory)
    assert np.isinf(view).all()


def test_overflow_is_no_exception() -> None:
    run_ranks(2, raise_on_overflow)
