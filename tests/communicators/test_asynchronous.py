"""communicator.asynchronous between ranks: the results of the synchronous form, one order, errors in futures."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradsync as gs
from contract import expect, wait_until
from gradsync.communicators.local import local_communicator
from rank_processes import run_ranks, run_ranks_for_outcomes

WAIT = 20.0


# -- Results ---------------------------------------------------------------------------------------------------------


def beside_the_host(comm: Any) -> None:
    import cupy

    array, ended = cupy.ones(1000, cupy.float32), threading.Event()
    for stream in (None, cupy.cuda.Stream(non_blocking=True)):
        future = comm.asynchronous.all_reduce(array, stream=stream)
        assert future.result() is array
        future.add_done_callback(lambda _: ended.set())
        assert ended.wait(WAIT)
        ended.clear()
    assert array.get().tolist() == [4.0] * 1000
    bad = comm.asynchronous.all_reduce(cupy.ones(3 + comm.rank))
    expect(gs.PlanMismatch, bad.result)
    assert "gradsync-collectives" not in [thread.name for thread in threading.enumerate()]


def test_a_gpu_is_beside_the_host_by_itself() -> None:
    run_ranks(2, beside_the_host, backend="nccl", stand_in=True)


# -- Beside the caller -----------------------------------------------------------------------------------------------


def compute_meanwhile(comm: Any, path: str) -> int:
    """Rank 1 comes late: when rank 0 lets it know, through a pipe, that it has computed all the while."""
    if comm.rank == 0:
        os.mkfifo(path)
    comm.barrier()
    pipe, computed = os.open(path, os.O_RDWR), 0
    begun = comm.recorder.begun
    if comm.rank == 0:
        future = comm.asynchronous.all_reduce(np.ones(3))
        deadline = time.monotonic() + WAIT
        while (comm.recorder.begun == begun or computed < 50) and time.monotonic() < deadline:
            computed += int(np.ones((50, 50)).dot(np.ones(50)).sum() > 0)
        assert not future.done()
        os.write(pipe, b"x")
    else:
        assert os.read(pipe, 1) == b"x"
        future = comm.asynchronous.all_reduce(np.ones(3))
    assert future.result(WAIT)[0] == 2.0
    os.close(pipe)
    return computed


def test_the_main_thread_computes_while_a_collective_waits_for_a_late_rank(tmp_path: Path) -> None:
    assert run_ranks(2, compute_meanwhile, str(tmp_path / "pipe"))[0] >= 50


# -- Order -----------------------------------------------------------------------------------------------------------


def overlapping_groups(comm: Any) -> None:
    """Without one order, rank 1 would meet rank 0 in one group while rank 2 waits for it in the other."""
    pairs = [comm.new_group(ranks) for ranks in ([0, 1], [1, 2], [0, 2])]
    mine = [pair for pair in pairs if pair]
    expected, futures = [], []
    for step in range(100):
        for pair in mine:
            futures.append(pair.asynchronous.all_reduce(np.full(10, float(comm.rank + step))))
            expected.append(float(sum(pair.ranks) + 2 * step))
        if step % 10 == 0:
            comm.barrier()
            assert all(future.done() for future in futures), "the world's barrier came before the groups' work"
    assert [future.result(WAIT)[0] for future in futures] == expected
    for pair in mine:
        pair.close()


def test_groups_that_overlap_keep_one_order() -> None:
    run_ranks(3, overlapping_groups)


def crosswise(comm: Any) -> None:
    """Two threads with a communicator each; on the ranks they submit in opposite orders."""
    groups = [comm.new_group([0, 1]), comm.new_group([0, 1])]
    turns = [threading.Event(), threading.Event()]
    results: list[float] = []

    def work(number: int) -> None:
        group = groups[number]
        if number != comm.rank:
            assert turns[comm.rank].wait(WAIT)
        future = group.asynchronous.all_reduce(np.ones(3))
        turns[number].set()
        results.append(future.result(WAIT)[0])
        group.barrier()
        results.extend(group.asynchronous.all_reduce(np.ones(3)).result(WAIT)[0] for _ in range(100))

    threads = [threading.Thread(target=work, args=[number]) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT)
    assert results == [2.0] * 202
    for group in groups:
        group.close()


def test_threads_that_submit_in_different_orders_on_the_ranks() -> None:
    run_ranks(2, crosswise)


def ending(future: gs.CollectiveFuture) -> str:
    """Waits for the end; returns the name of the error."""
    with contextlib.suppress(gs.GradsyncError):
        future.wait(timeout=WAIT)
    return type(future.exception()).__name__


def others_end(comm: Any) -> list[str]:
    group = comm.new_group([0, 1])
    if comm.rank == 1:
        comm.abort("the disk is full")
        group.barrier()
        return []
    broken = [comm.asynchronous.all_reduce(np.ones(3)) for _ in range(2)]
    fine = group.asynchronous.barrier()
    assert fine.result(WAIT) is None
    return [ending(future) for future in broken]


def test_a_rank_that_fails_breaks_the_futures_of_its_communicator() -> None:
    assert run_ranks(2, others_end)[0] == ["RankFailed", "CommunicatorClosed"]


def die(comm: Any) -> list[str]:
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    futures = [comm.asynchronous.all_reduce(np.ones(3)) for _ in range(3)]
    return [ending(future) for future in futures]


def test_a_rank_that_dies_fails_all_futures() -> None:
    survivor, _ = run_ranks_for_outcomes(2, die)
    assert survivor.returned() == ["RankFailed", "CommunicatorClosed", "CommunicatorClosed"]


def miss_the_deadline(comm: Any, path: str) -> None:
    if comm.rank == 1:
        reached = Path(path)
        wait_until(lambda: reached.exists())  # not in the collective while the other's deadline passes
        expect(gs.CollectiveTimeout, comm.barrier)
        return
    futures = [comm.asynchronous.barrier() for _ in range(2)]
    assert expect(gs.CollectiveTimeout, lambda: futures[0].result(WAIT)).missing_ranks == (1,)
    expect(gs.CommunicatorClosed, lambda: futures[1].result(WAIT))
    Path(path).touch()


def test_each_collective_has_its_deadline(tmp_path: Path) -> None:
    run_ranks(2, miss_the_deadline, str(tmp_path / "reached"), collective_timeout_seconds=0.3)


def abort_under_way(comm: Any) -> list[str]:
    """Rank 0 aborts while its first collective waits for rank 1, and the others wait for the first."""
    group = comm.new_group([0, 1])
    if comm.rank == 1:
        group.barrier()
        expect(gs.RankFailed, comm.barrier, "asked to")
        return []
    begun = comm.recorder.begun
    futures = [comm.asynchronous.barrier() for _ in range(4)]
    wait_until(lambda: comm.recorder.begun > begun)
    comm.abort("asked to")
    assert [future.done() for future in futures[1:]] == [True] * 3
    endings = [ending(future) for future in futures]
    group.barrier()
    return endings


def test_abort_with_collectives_under_way() -> None:
    first, _ = run_ranks(2, abort_under_way)
    assert first == ["RankFailed"] + ["CommunicatorClosed"] * 3


def close_under_way(comm: Any) -> list[Any]:
    group = comm.new_group([0, 1])
    futures = [group.asynchronous.all_reduce(np.full(100_000, float(i))) for i in range(10)]
    group.close()
    return [future.result(0)[0] for future in futures]


def test_close_lets_what_was_submitted_end() -> None:
    assert run_ranks(2, close_under_way) == [[2.0 * i for i in range(10)]] * 2


def interrupted(comm: Any) -> None:
    group = comm.new_group([0, 1])
    if comm.rank == 1:
        group.barrier()
    future = comm.asynchronous.all_reduce(np.ones(3))
    threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT]).start()
    future.result()


def test_ctrl_c_ends_the_wait_for_a_future_and_tells_the_others() -> None:
    first, second = run_ranks_for_outcomes(2, interrupted)
    assert isinstance(first.error, KeyboardInterrupt)
    assert isinstance(second.error, gs.RankFailed)
    assert "KeyboardInterrupt" in str(second.error)


# -- The end of the program ------------------------------------------------------------------------------------------

PROGRAM = """
import signal, sys, time
import numpy as np
import gradsync as gs
from gradsync.communicators import collective_queue

collective_queue._LEAVING_SECONDS = float(sys.argv[1])
comm = gs.init_process_group("shm")
group = comm.new_group([0, 1])
if comm.rank == 0:
    futures = [comm.asynchronous.all_reduce(np.ones(10)) for _ in range(3)]
    print("ending at", time.time(), flush=True)
    {ending}
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, which may come before the news
    try:
        {other}
    except gs.RankFailed:
        try:
            comm.barrier()
        except gs.RankFailed as error:
            print("heard:", error, flush=True)
"""


def run_program(
    tmp_path: Path, ending: str, other: str, leaving_seconds: float = 1.0
) -> tuple[subprocess.CompletedProcess[str], float]:
    """Runs two ranks, and returns also the seconds from the end of rank 0's program to the end of all."""
    script = tmp_path / "script.py"
    script.write_text(PROGRAM.format(ending=ending, other=other))
    command = [sys.executable, "-m", "gradsync", "run", "-n", "2", str(script), str(leaving_seconds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done, time.time() - float(done.stdout.partition("ending at ")[2].split()[0])


@pytest.mark.parametrize(
    ("ending", "code", "reason"),
    [
        ("pass", 0, "the program ended with 3 unfinished asynchronous collectives"),
        ("sys.exit(3)", 3, "SystemExit: 3"),
        ("raise ValueError('the news')", 1, "ValueError: the news"),
    ],
)
def test_a_rank_that_ends_with_collectives_under_way(tmp_path: Path, ending: str, code: int, reason: str) -> None:
    done, seconds = run_program(tmp_path, ending, "group.barrier()")
    assert done.returncode == code, done.stderr
    assert f": {reason}" in done.stdout
    assert seconds < WAIT  # and not the deadline of a collective


def test_a_rank_that_ends_lets_the_others_have_what_comes_in_time(tmp_path: Path) -> None:
    other = "time.sleep(0.3); print([comm.all_reduce(np.ones(10))[0] for _ in range(3)])"
    done, seconds = run_program(tmp_path, "pass", other, leaving_seconds=WAIT / 2)
    assert done.returncode == 0, done.stderr
    assert "[2.0, 2.0, 2.0]" in done.stdout.replace("np.float64(", "").replace(")", "")
    assert seconds < WAIT


FAILS = """
import sys
import numpy as np
import gradsync as gs

def main(comm):
    failed = comm.asynchronous.all_reduce(np.ones(4 + comm.rank))
    comm.barrier()
    if comm.rank == 0:
        waiting = comm.asynchronous.broadcast(np.ones(4), root=1)
        {ending}
    comm.recv(np.ones(1), source=0)

with gs.init_process_group("shm") as comm:
    main(comm)
"""


@pytest.mark.parametrize(
    ("ending", "logged"), [("sys.exit(3)", 1), ("raise ValueError('the news')", 1), ("raise KeyboardInterrupt", 0)]
)
def test_a_failure_that_nobody_asks_for_is_logged_beside_what_ends_the_program(
    tmp_path: Path, ending: str, logged: int
) -> None:
    script = tmp_path / "script.py"
    script.write_text(FAILS.format(ending=ending))
    command = [sys.executable, "-m", "gradsync", "run", "-n", "2", "--log-dir", str(tmp_path), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    log = (tmp_path / "rank-0.log").read_text()
    asked = "failed, and its future was never asked for the result: "
    assert (log.count(asked), log.count(asked + "PlanMismatch")) == (logged, logged), (log, done.stderr)


def test_it_says_whose_it_is() -> None:
    with local_communicator() as comm:
        assert repr(comm.asynchronous) == f"<asynchronous collectives of {comm!r}>"
