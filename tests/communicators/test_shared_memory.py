"""What goes wrong between the ranks of the shared-memory communicator, and that it is told at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

import gradsync as gs
from contract import expect
from gradsync.communicators import shared_memory
from rank_processes import run_ranks, run_ranks_for_outcomes


def time_out(comm: Any) -> Any:
    if comm.rank == 2:
        # Not in the collective while the others' deadline passes: this rank is told afterwards.
        started = time.monotonic()
        while time.monotonic() < started + 1.0:
            time.sleep(0.05)
        return type(expect(gs.GradsyncError, comm.barrier)).__name__
    error = expect(gs.GradsyncError, comm.barrier)
    return getattr(error, "missing_ranks", None), str(error)


def test_deadline_names_the_missing_rank() -> None:
    *waiting, late = run_ranks(3, time_out, collective_timeout_seconds=0.3)
    assert late == "RankFailed"
    # The first to reach its deadline names the rank; it may tell the second before that one's own deadline.
    assert any(missing == (2,) and "waited 0.3 s" in text and "rank 2" in text for missing, text in waiting)


def abort_elsewhere(comm: Any) -> str:
    if comm.rank == 0:
        comm.abort("the disk is full")
        return ""
    return str(expect(gs.RankFailed, comm.barrier))


def test_abort_tells_the_reason() -> None:
    _, *others = run_ranks(3, abort_elsewhere)
    assert all("rank 0 aborted: the disk is full" in text for text in others)


def close_early(comm: Any) -> str:
    array = np.ones(1_000_000, np.float32)
    comm.all_reduce(array)
    if comm.rank == 0:
        comm.close()
        comm.close()
        return ""
    return str(expect(gs.RankFailed, comm.barrier))


def test_close_after_the_last_collective_hurts_nobody_but_later_ones() -> None:
    _, *others = run_ranks(3, close_early)
    assert all("rank 0 closed the communicator" in text for text in others)


def abort_while_waiting(comm: Any) -> str:
    if comm.rank == 0:
        timer = threading.Timer(0.05, comm.abort, ["asked to"])
        timer.start()
        error = expect(gs.RankFailed, comm.barrier)
        timer.join()
        return str(error)
    while not comm.closed:
        try:
            time.sleep(0.3)  # rank 0 waits meanwhile, and is aborted by its own thread
            comm.barrier()
        except gs.RankFailed as error:
            return str(error)
    return ""


def test_another_thread_can_abort_a_waiting_collective() -> None:
    own, other = run_ranks(2, abort_while_waiting)
    assert "closed or aborted during a collective" in own
    assert "asked to" in other


def die(comm: Any, payload: int) -> None:
    array = np.ones(payload, np.float32)
    for step in range(1000):
        comm.all_reduce(array)
        if comm.rank == 1 and step == 20:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("payload", [10, 1_000_000])
def test_a_killed_rank_is_noticed_quickly(payload: int) -> None:
    started = time.monotonic()
    outcomes = run_ranks_for_outcomes(3, die, payload)
    assert time.monotonic() - started < 20
    for survivor in (outcomes[0], outcomes[2]):
        assert isinstance(survivor.error, gs.RankFailed)
        assert survivor.error.rank == 1


def fork_and_use(comm: Any) -> str:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            comm.barrier()
            text = "no error"
        except gs.CommunicatorClosed as error:
            text = str(error)
        os.write(write, text.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    comm.barrier()
    text = os.read(read, 1000).decode()
    os.close(read)
    os.close(write)
    return text


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_cannot_use_it() -> None:
    for text in run_ranks(2, fork_and_use):
        assert "forked from" in text


def count_resources(comm: Any) -> list[tuple[int, int, int]]:
    """Descriptors, memory maps and threads after each of several create-use-close cycles."""
    counts = []
    from gradsync import process_group

    client = process_group._bootstrap.client
    for cycle in range(12):
        with shared_memory.connect_shared_memory(client, group=f"cycle {cycle}") as extra:
            array = np.full(300_000, float(extra.rank))
            extra.all_reduce(array)
            del array
        comm.barrier()
        with open("/proc/self/maps") as maps:
            mapped = sum("memfd:gradsync" in line for line in maps)
        counts.append((len(os.listdir("/proc/self/fd")), mapped, threading.active_count()))
    return counts


def test_nothing_leaks() -> None:
    for counts in run_ranks(2, count_resources):
        assert len(set(counts[2:])) == 1, counts


def test_other_processors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory.platform, "machine", lambda: "aarch64")
    with pytest.raises(gs.BackendUnavailable, match="x86-64 only, this is linux on aarch64"):
        shared_memory.check_platform()


def soak(comm: Any, steps: int) -> None:
    """Mixed collectives of random size, dtype and delay; every result is checked, bit for bit."""
    shared, own = np.random.default_rng(5), np.random.default_rng([6, comm.rank])
    n = comm.world_size
    for step in range(steps):
        size = int((shared.integers(0, 3) and shared.integers(0, 60_000)) or shared.integers(0, 50))
        dtype = shared.choice(["int32", "int64", "float32", "float64", "uint8"])
        root = int(shared.integers(0, n))
        if own.random() < 0.02:
            time.sleep(own.random() * 0.002)
        array = np.full(size, comm.rank + step % 7, dtype)
        if shared.random() < 0.7:
            comm.all_reduce(array)
            assert (array == n * (step % 7) + n * (n - 1) // 2).all(), step
        else:
            comm.broadcast(array, root)
            assert (array == root + step % 7).all(), step


@pytest.mark.parametrize("world_size", [2, 4])
def test_soak(world_size: int) -> None:
    run_ranks(world_size, soak, 1500, timeout=100)
