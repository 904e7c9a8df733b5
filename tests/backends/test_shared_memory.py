"""Shared memory: arrays of every size, ranks in any step, and what it takes and leaves on the machine."""

import errno
import gc
import logging
import mmap
import os
import platform
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

import gradsync as gs
from arrays import assert_close, assert_identical, assert_same_on_all_ranks, contribution, dtype_of
from commands import wait_until
from gradsync.communicators.shared_memory import segment  # no other way to have two machines
from gradsync.communicators.shared_memory.compiled import RUNNING
from gradsync.machine import machine_identity

# -- Sizes and steps --------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 3)
def test_sizes_around_every_power_of_two(comm):
    """Where one way of moving ends and the next begins, whatever these sizes are; with remainders."""
    n, rank = comm.world_size, comm.rank
    after, before = (rank + 1) % n, (rank - 1) % n
    for power, more in product(range(8, 22), (0, 1)):
        size = 2**power + more
        ranks = [np.arange(size, dtype=np.uint8) + np.uint8(3 * each) for each in range(n)]
        assert_identical(comm.all_reduce(ranks[rank].copy()), np.sum(ranks, axis=0, dtype=np.uint8))
        assert_identical(comm.broadcast(ranks[rank].copy(), power % n), ranks[power % n])
        assert_identical(comm.all_gather(ranks[rank]), np.concatenate(ranks))
        got = comm.exchange(ranks[rank], dest=after, out=np.empty_like(ranks[0]), source=before)
        assert_identical(got, ranks[before])
        if power < 20:
            dealt = comm.all_to_all(np.concatenate([ranks[rank]] * n))
            assert_identical(dealt, np.concatenate(ranks))
            total = comm.reduce_scatter(np.concatenate([ranks[rank]] * n), "max")
            assert_identical(total, np.max(ranks, axis=0))


@pytest.mark.ranks(1, 2, 5)
@pytest.mark.parametrize("dtype", ["float16", "float32", "complex128"])
def test_lists_around_the_size_of_a_chunk(comm, dtype):
    """Steps of one bucket, in the world and in a group, whose chunks are smaller; plain, and with weights."""
    n, wide = comm.world_size, np.complex128 if dtype == "complex128" else np.float64
    weights = np.arange(1.0, n + 1.0)
    shares = {False: np.full(n, 1 / n), True: weights / weights.sum()}
    for communicator, chunk_bytes in ((comm, 512 * 1024), (comm.split(0), 256 * 1024)):
        chunk, sync = chunk_bytes // dtype_of(dtype).itemsize, gs.AllreduceCallback("mean", communicator)
        for seed, sizes in enumerate(
            ([chunk - 1], [chunk], [chunk + 1], [0, chunk // 4, 0, 1], [7] * 40 + [2 * chunk + 1] + [0, 3] * 20)
        ):
            of_ranks = [[contribution(rank, size, dtype, seed) for size in sizes] for rank in range(n)]
            for is_weighted in (False, True):
                with sync.backward(weight=weights[comm.rank] if is_weighted else None):
                    for number, array in enumerate(of_ranks[comm.rank]):
                        sync((seed, number), array.copy())
                results = list(sync.results().values())
                for got, *ranks in zip(results, *of_ranks, strict=True):
                    assert_close(got, shares[is_weighted] @ np.stack(ranks).astype(wide), dtype, n)
                assert_same_on_all_ranks(comm, results)


@pytest.mark.ranks(2)
def test_arrays_of_many_segments(comm):
    for dtype in ("float32", "float16"):
        ranks = [np.arange(1_500_001) % 1000 + rank for rank in range(2)]
        got = comm.all_reduce(ranks[comm.rank].astype(dtype))
        assert_identical(got, (ranks[0] + ranks[1]).astype(dtype))
    memory = np.zeros(7_000_000, np.int8)
    for _ in range(2):  # results come to lie on what is still to be read
        memory[:4_000_000] = np.arange(4_000_000) % 37
        got = comm.all_reduce(memory[:4_000_000], out=memory[3_000_000:])
        assert (got == 2 * (np.arange(4_000_000) % 37)).all()


@pytest.mark.ranks(3)
def test_new_arrays_at_old_addresses(comm):
    """Arrays come again, and others are freed whose address is that of the next: no address means anything."""
    shifted = np.frombuffer(bytearray(400_001), np.uint8)[1:].view(np.float32)
    arrays = [np.empty(100_000 + length, np.float32) for length in (0, 0, 0, 1, 300_000)] + [shifted]
    for turn in range(4):
        for number, array in enumerate(arrays):
            array.fill(comm.rank + turn + number)
            comm.all_reduce(array)
            assert (array == 3 + 3 * (turn + number)).all(), (turn, number)
        arrays[turn] = np.full(arrays[turn].size, 7, np.float32)
    for _ in range(20):
        assert (comm.all_reduce(np.full(100_000, 1.0)) == 3).all()


@pytest.mark.ranks(2, 3)
def test_messages_and_collectives_of_ranks_that_pause_as_they_like(comm):
    """All draw the same steps: each ends as it must, and what did not fit leaves no trace for the next."""
    n, rank = comm.world_size, comm.rank
    steps, pauses = np.random.default_rng(7), np.random.default_rng([7, rank])
    for step in range(150):
        kind = steps.choice(["message", "message", "size", "ring", "barrier", "all_reduce", "gather"])
        size = int(steps.choice([0, 1, 100, 5_000, 200_000, 400_000]))
        first, second = (int(each) for each in steps.permutation(n)[:2])
        if pauses.integers(3) == 0:
            time.sleep(float(pauses.choice([0.0, 1e-5, 1e-3])))
        values, into = np.full(size, step % 100 + rank, np.int16), np.zeros(size, np.int16)
        if kind == "barrier":
            comm.barrier()
        elif kind == "all_reduce":
            assert (comm.all_reduce(values) == n * (step % 100) + n * (n - 1) // 2).all()
        elif kind == "gather":
            comm.gather(values, first)
        elif kind == "ring":
            comm.exchange(values, dest=(rank + 1) % n, out=into, source=(rank - 1) % n)
            assert (into == step % 100 + (rank - 1) % n).all()
        elif rank in (first, second):
            into = np.zeros(size + (kind == "size"), np.int16)
            try:
                comm.send(values, second) if rank == first else comm.recv(into, first)
                assert kind == "message"
                assert rank == first or (into == step % 100 + first).all()
            except gs.PlanMismatch as error:
                assert kind == "size"
                assert set(error.descriptions) == {first, second}


@pytest.mark.ranks(3)
def test_a_rank_may_close_after_its_part_of_a_message(comm):
    for _ in range(20):
        group = comm.split(0)
        if group.rank == 0:
            group.send(np.arange(300_000), 1)
        elif group.rank == 1:
            assert_identical(group.recv(np.zeros(300_000, np.int64), 0), np.arange(300_000))
        group.close()


@pytest.mark.ranks(2)
def test_two_threads_with_a_communicator_each(comm):
    """On the ranks they begin in opposite orders."""
    groups, turns, results = [comm.split(0) for _ in range(2)], [threading.Event() for _ in range(2)], []

    def work(number):
        if number != comm.rank:
            turns[comm.rank].wait()
        else:
            threading.Timer(0.01, turns[number].set).start()
        results.extend(float(groups[number].all_reduce(np.ones(3))[0]) for _ in range(100))

    threads = [threading.Thread(target=work, args=[number]) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [2.0] * 200
    for group in groups:
        group.close()


# -- What it needs ----------------------------------------------------------------------------------------------------


@contextmanager
def limited(what, size_bytes):
    """A limit takes the place of a full machine: both refuse the pages."""
    kept = resource.getrlimit(what)
    resource.setrlimit(what, (size_bytes, kept[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, kept)


@pytest.mark.ranks(2, fresh=True)
def test_more_memory_than_there_is(comm, tmp_path):
    """Refused by the rank that makes it, and known to the other; nothing is left open."""
    comm.barrier()
    before = len(os.listdir("/proc/self/fd"))
    with limited(resource.RLIMIT_FSIZE, 1 << 16), pytest.raises((gs.BackendUnavailable, gs.RankFailed)) as raised:
        comm.split(0)
    (tmp_path / f"{type(raised.value).__name__} {comm.rank}").write_text(str(raised.value))
    del raised
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    # A file is there before its text.
    wait_until(lambda: any("bytes of shared" in file.read_text() for file in tmp_path.glob("BackendUnavailable*")))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("poor", [0, 1, 2])
def test_a_rank_without_memory_while_joining_is_known_to_all(rank, poor):
    """The one that makes the memory, one that allocates its part, and one that maps all parts."""

    def refuse(*_, **__):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    if rank == poor == 1:
        os.posix_fallocate = refuse
    if rank == poor == 2:
        mmap.mmap = refuse
    kind, size = (gs.BackendUnavailable if rank == poor else gs.RankFailed), resource.RLIM_INFINITY
    with limited(resource.RLIMIT_FSIZE, 1 << 12 if rank == poor == 0 else size), pytest.raises(kind) as raised:
        gs.init_process_group("shm")
    assert rank == poor or raised.value.rank == poor
    assert poor == 0 or "memory" in str(raised.value)
    assert not gs.is_initialized()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("what", ["riscv64", "memfd"])
def test_other_processors_and_old_kernels_are_refused(rank, what):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    if what == "riscv64":
        platform.machine = lambda: what
    else:
        os.memfd_create = refuse
    with pytest.raises(gs.BackendUnavailable, match=what):
        gs.init_process_group("shm")


@pytest.mark.ranks(2)
def test_ranks_on_two_machines_are_refused(rank):
    if rank == 1:
        segment.machine_identity = lambda: "another boot pid:[4026531836]"
    with pytest.raises((gs.BackendUnavailable, gs.RankFailed), match="host"):
        gs.init_process_group("shm")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", ["another file", "another pid namespace"])
def test_what_proc_gives_must_be_the_memory_of_the_first_rank(rank, what):
    if rank == 1 and what == "another file":
        opened = os.open
        segment.os.open = lambda path, *flags: opened("/dev/zero" if path.startswith("/proc/") else path, *flags)
    elif rank == 1:
        read = os.readlink
        segment.os.readlink = lambda path: "1" if path == "/proc/self" else read(path)
    with pytest.raises((gs.BackendUnavailable, gs.RankFailed), match=what) as raised:
        gs.init_process_group("shm")
    assert isinstance(raised.value, gs.BackendUnavailable) == (rank == 1)


@pytest.mark.parametrize("is_reaped", [False, True])
def test_the_death_of_the_first_rank_is_why_its_memory_cannot_be_opened(is_reaped):
    """Told also while the server has not seen it yet: its connection breaks after its memory has gone."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as first:
        sent = segment._sign(RUNNING) + f"{machine_identity()}\n{first.pid}\n3\nmemory".encode()
        first.kill()
        os.waitid(os.P_PID, first.pid, os.WEXITED | (0 if is_reaped else os.WNOWAIT))
        answers = iter([sent, b""])
        server = SimpleNamespace(
            rank=1,
            world_size=2,
            world_ranks=(3, 4),
            label="rank 1/2",
            exchange=lambda key, mine, timeout_seconds: [next(answers), mine],
        )
        with pytest.raises(gs.RankFailed, match="rank 3 died") as raised:
            segment.share_memory(server, "key", mmap.PAGESIZE, RUNNING, 5.0)
        assert raised.value.rank == 3


# -- What it leaves ---------------------------------------------------------------------------------------------------


@pytest.mark.ranks(3, ends={1: -signal.SIGKILL})
def test_nothing_has_a_name_that_a_killed_rank_could_leave(comm, tmp_path):
    os.chdir(tmp_path)
    group = comm.split(0)
    group.all_reduce(np.ones(1_000_000))
    with open("/proc/self/maps") as maps:
        assert "/dev/shm/" not in maps.read()  # memory without a name goes with its last process
    assert all("/dev/shm/" not in os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1, 2, *open_files()))
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(gs.RankFailed):
        comm.barrier()
    assert list(tmp_path.iterdir()) == []


def open_files():
    with os.scandir("/proc/self/fd") as entries:
        names = [entry.name for entry in entries]
    return [name for name in names if os.path.exists(f"/proc/self/fd/{name}")]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.ranks(2, ends={1: -signal.SIGKILL})
def test_a_child_that_lives_on_does_not_hide_the_death_of_its_rank(comm, tmp_path):
    """It has copies of its parent's connections."""
    if comm.rank == 1:
        if os.fork() == 0:
            wait_until((tmp_path / "noticed").exists)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(gs.RankFailed) as raised:
        comm.barrier()
    (tmp_path / "noticed").touch()
    assert raised.value.rank == 1
    assert not raised.value.was_silent


@pytest.mark.ranks(2)
def test_the_end_of_a_communicator_gives_its_memory_back(comm):
    def mapped():
        with open("/proc/self/maps") as maps:
            return sum("memfd:" in line for line in maps)

    gc.collect()  # what an earlier test has left to it
    before = mapped()
    group, array = comm.split(0), np.ones(1024, np.float32)
    for _ in range(3):  # what may be kept for the next call
        group.all_reduce(array)
        group.all_gather(array)
        group.reduce_scatter(array)
        group.broadcast(array)
        group.all_to_all(array)
    comm.barrier()
    assert mapped() > before
    group.close()
    assert mapped() == before


# -- Who is waited for ------------------------------------------------------------------------------------------------


@pytest.fixture
def said(tmp_path):
    """A file that appears once the server, which runs in this process, says that a rank is waited for."""
    path = tmp_path / "said"

    class Handler(logging.Handler):
        def emit(self, record):
            text = record.getMessage()
            if (
                "has waited" in text
                and "for rank 1" in text
                and "test_shared_memory.py" not in text.split("for rank")[1]
            ):
                path.touch()

    handler = Handler()
    logging.getLogger("gradsync").addHandler(handler)
    yield path
    logging.getLogger("gradsync").removeHandler(handler)


@pytest.mark.ranks(2)
def test_who_is_waited_for_is_said_long_before_the_deadline(comm, said):
    """After 5 s, which nothing can shorten."""
    comm.barrier()
    if comm.rank == 1:
        wait_until(said.exists)
    comm.barrier()


@pytest.mark.slow
@pytest.mark.ranks(2, options={"collective_timeout_seconds": 2.0}, fresh=True)
def test_a_rank_that_nobody_waits_for_is_left_alone(comm):
    comm.barrier()
    time.sleep(3.0)  # both compute past the deadline
    comm.barrier()
