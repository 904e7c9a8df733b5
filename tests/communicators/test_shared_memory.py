"""What goes wrong between the ranks of the shared-memory communicator, and that it is told at once."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradsync as gs
from contract import contribution, expect, wait_until
from gradsync import process_group
from gradsync.communicators import host_copy
from gradsync.communicators.shared_memory import all_reduce
from rank_processes import run_ranks, run_ranks_for_outcomes


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
    client: Any = process_group._client
    if comm.rank == 1:
        client.get("its wait has ended", timeout_seconds=30.0)
        return str(expect(gs.RankFailed, comm.barrier))
    begun = comm.recorder.begun

    def abort() -> None:
        wait_until(lambda: comm.recorder.begun > begun)
        comm.abort("asked to")

    thread = threading.Thread(target=abort)
    thread.start()
    error = expect(gs.RankFailed, comm.barrier)
    thread.join()
    client.set("its wait has ended", b"")
    return str(error)


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
    # One verdict for all, also for those who first saw that another survivor had given up.
    assert len({str(survivor.error).partition(": ")[2] for survivor in (outcomes[0], outcomes[2])}) == 1


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
        assert "parent process of this forked process" in text


def die_with_a_child(comm: Any, folder: str) -> bool:
    """Returns whether rank 1 had to be found gone: a child that lives on has copies of its connections."""
    if comm.rank == 1:
        if os.fork() == 0:
            wait_until((Path(folder) / "told").exists)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    error = expect(gs.RankFailed, comm.barrier)
    (Path(folder) / "told").touch()
    return error.was_silent


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_that_lives_on_does_not_hide_the_death_of_its_rank(tmp_path: Path) -> None:
    told, _ = run_ranks_for_outcomes(2, die_with_a_child, str(tmp_path), backend="shm")
    assert told.returned() is False


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def abort_with_odd_text(comm: Any) -> str:
    if comm.rank == 0:
        comm.abort("bad \udcff byte")
        return ""
    return str(expect(gs.RankFailed, comm.barrier))


def fail_without_words(comm: Any) -> None:
    with gs.AllreduceCallback("mean", comm).backward():
        if comm.rank == 0:
            raise Unspeakable
    raise AssertionError("rank 0 was not missed")


def test_abort_survives_any_text() -> None:
    assert "rank 0 aborted: bad" in run_ranks(2, abort_with_odd_text)[1]
    failed, told = run_ranks_for_outcomes(2, fail_without_words)
    assert "Unspeakable" in failed.traceback_text
    assert isinstance(told.error, gs.RankFailed)


def raise_on_overflow(comm: Any) -> None:
    np.seterr(all="raise")
    array = np.full(300_000, 3e38, np.float32)
    comm.all_reduce(array)
    assert np.isinf(array).all() == (comm.world_size > 1)


def test_overflow_is_no_exception() -> None:
    run_ranks(2, raise_on_overflow)


def reduce_where_warnings_are_errors(comm: Any) -> None:
    warnings.simplefilter("error")
    for op, expected in (("min", 0), ("max", comm.world_size - 1)):
        for size in (8, 3 * 100_000):  # by one round of the barrier, and by many
            array = np.full(size, comm.rank, np.float32)
            assert (comm.reduce_scatter(np.full(comm.world_size * size, comm.rank, np.float32), op) == expected).all()
            assert (comm.all_reduce(array, op) == expected).all()


def test_minimum_and_maximum_warn_of_nothing() -> None:
    run_ranks(3, reduce_where_warnings_are_errors)


def allocate_in_a_steady_step(comm: Any) -> dict[str, int]:
    """Returns the most bytes that were newly allocated at any moment of a repeated step.

    Of several steps the least: what another thread of the process allocates meanwhile counts too.
    """
    import tracemalloc

    peaks = {}
    for name in ("float32", "float16", "bfloat16", "complex64", "int64"):
        shapes: list[tuple[int, ...]] = [(400, 400), (7,), (300, 1000), (64, 64), ()]
        gradients = [contribution(comm.rank, shape, name) for shape in shapes]
        callback = gs.AllreduceCallback("sum", comm)
        single = contribution(comm.rank, (200_000,), name)
        for step in range(8):
            if step >= 4:
                tracemalloc.start()
            with callback.backward():
                for index, gradient in enumerate(gradients):
                    callback(index, gradient)
            comm.all_reduce(single)
            if step >= 4:
                peaks[name] = min(peaks.get(name, 2**62), tracemalloc.get_traced_memory()[1])
                tracemalloc.stop()
    return peaks


def test_a_steady_step_allocates_no_buffers() -> None:
    """Views and futures cost a few kilobytes, casts of half precision 64 KiB, whatever the size; the data are 2 MB."""
    for peaks in run_ranks(2, allocate_in_a_steady_step):
        assert max(peaks.values()) < 100_000, peaks


def ask_for_more_than_there_is(comm: Any, what: str) -> str:
    """A limit on the size of files takes the place of a full /dev/shm: both refuse the pages."""
    buckets = gs.AllreduceCallback(parameters={"w": ((3_000_000,), "float32")}, gradient_as_bucket_view=True)
    comm.barrier()
    before = len(os.listdir("/proc/self/fd"))
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, unlimited[1]))
    error = expect(
        gs.GradsyncError, {"split": lambda: comm.split(0), "gradient_buffers": buckets.gradient_buffers}[what]
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("what", ["split", "gradient_buffers"])
def test_more_memory_than_there_is_is_refused(what: str) -> None:
    """By the rank that makes it, and told to the other."""
    told = sorted(run_ranks(2, ask_for_more_than_there_is, what))
    assert "bytes of shared memory: [Errno 27] File too large" in told[0]
    assert told[0].startswith("BackendUnavailable: ")
    assert told[1].startswith(("RankFailed: ", "BackendUnavailable: "))


# -- Two ways to copy: by memcpy, and by a ufunc where the processor's memcpy is slow --------------------------------


def reduce_by_either_copy(comm: Any, slow_ranks: set[int]) -> list[bytes]:
    kept = host_copy.memcpy_is_slow
    modules = (host_copy, all_reduce)
    for module in modules:
        module.memcpy_is_slow = lambda: comm.rank in slow_ranks  # type: ignore[attr-defined]
    try:
        results = []
        for size, name in ((1000, "complex64"), (30_001, "float16"), (700_003, "float32"), (700_003, "int8")):
            array = contribution(comm.rank, (size,), name)
            results.append(comm.all_reduce(array.copy()).tobytes())
            results.append(comm.all_gather(array).tobytes())
            results.append(comm.reduce_scatter(np.concatenate([array] * comm.world_size)).tobytes())
        return results
    finally:
        for module in modules:
            module.memcpy_is_slow = kept  # type: ignore[attr-defined]


@pytest.mark.parametrize("slow_ranks", [{0, 1}, {1}])
def test_bits_do_not_depend_on_how_a_processor_copies(slow_ranks: set[int]) -> None:
    """Nor do ranks that have found different ways miss each other."""
    assert run_ranks(2, reduce_by_either_copy, slow_ranks) == run_ranks(2, reduce_by_either_copy, set())


def gather_too_many_empty_rows(comm: Any) -> None:
    """Their number is what an array cannot hold; NumPy counts them as if they were not empty."""
    for shape, dtype in (((2**62, 0), np.int8), ((2**60, 0), np.float32)):
        rows = np.empty(shape, dtype)
        for gather in (comm.all_gather, comm.gather):
            expect(gs.InvalidArgument, partial(gather, rows), "is too large for an array")
    assert comm.all_gather(np.empty((2**61, 0), np.int8)).shape == (2**62, 0)


def test_more_empty_rows_than_an_array_can_hold_are_refused() -> None:
    run_ranks(2, gather_too_many_empty_rows)
