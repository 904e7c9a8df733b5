"""The communicator over MPI: beside mpi4py's own collectives, what ends a job, and what MPI makes hard."""

from __future__ import annotations

import importlib.util
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import gradsync as gs
from arrays import INTEGERS, contribution

MPIEXEC = Path(sys.executable).parent / "mpiexec"
EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="no mpi4py: pip install mpi4py mpich"),
]


# -- Beside mpi4py -----------------------------------------------------------------------------------------------------

COMPLEX = ("complex64", "complex128")
OPERATORS = {
    **dict.fromkeys((*INTEGERS, "float32", "float64"), ("sum", "prod", "min", "max")),
    **dict.fromkeys(COMPLEX, ("sum", "prod")),
}
ROUNDING = {"float32": 1e-6, "float64": 1e-14, "complex64": 1e-6, "complex128": 1e-14}


@pytest.mark.ranks(2, 3, on=("mpi",))
@pytest.mark.parametrize("rows", [4, 40_000])
def test_reductions_give_what_those_of_mpi_give(comm, rows):
    from mpi4py import MPI

    operators = {"sum": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}
    n, shape = comm.world_size, (comm.world_size * rows, 3)
    for dtype, ops in OPERATORS.items():
        for op in ops:
            mine = contribution(comm.rank, shape, dtype)
            of_mpi, of_root, part = np.empty_like(mine), np.empty_like(mine), np.empty((rows, 3), dtype)
            MPI.COMM_WORLD.Allreduce(mine, of_mpi, operators[op])
            MPI.COMM_WORLD.Reduce(mine, of_root, operators[op], root=n - 1)
            MPI.COMM_WORLD.Reduce_scatter_block(mine, part, operators[op])
            found = comm.reduce(mine.copy(), op, n - 1)
            pairs = [(comm.all_reduce(mine.copy(), op), of_mpi), (comm.reduce_scatter(mine.copy(), op), part)]
            pairs += [(comm.asynchronous.all_reduce(mine.copy(), op).result(), of_mpi)]
            pairs += [(found, of_root)] if comm.rank == n - 1 else []
            for got, want in pairs:
                assert (got.shape, got.dtype) == (want.shape, want.dtype)
                tolerance = n * ROUNDING.get(dtype, 0.0) if op in ("sum", "prod") else 0.0
                np.testing.assert_allclose(got, want, rtol=tolerance, atol=0, err_msg=f"{dtype} {op}")


@pytest.mark.ranks(3, on=("mpi",))
def test_each_size_is_right(comm):
    n, rank = comm.world_size, comm.rank
    for size in (0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 4096):
        for dtype in ("uint8", "float16", "float32", "complex128"):
            values = np.arange(size) % 7
            got = comm.all_reduce((values + rank).astype(dtype))
            assert (got == sum((values + other for other in range(n)), np.zeros(size, int))).all(), (size, dtype)
        sync = gs.AllreduceCallback("sum", comm)
        with sync.backward():
            futures = [sync(name, np.full(length, rank + 1.0)) for name, length in enumerate((size, 1, size // 2))]
        assert all((future.result() == n * (n + 1) / 2).all() for future in futures), size


@pytest.mark.ranks(2, on=("mpi",))
def test_what_mpi_leaves_open_is_as_in_numpy(comm):
    """Open MPI adds short integers with saturation, and no MPI says what its minimum and maximum of NaN are."""
    for dtype in ("int8", "uint8", "int16", "uint16", "int32", "int64"):
        info = np.iinfo(dtype)
        values = np.array([info.max, info.min, info.max - 3, 7] * 3000, dtype)
        for each in (values[:4], values):
            with np.errstate(all="ignore"):
                total, product = each + each, each * each
            assert (comm.all_reduce(each.copy()) == total).all()
            assert (comm.all_reduce(each.copy(), "prod") == product).all()
            assert (comm.reduce_scatter(each.copy()) == np.split(total, 2)[comm.rank]).all()
    with_nan = [[np.nan, 1, -np.inf, -np.nan, 0, np.inf], [1, -np.nan, np.nan, np.inf, -0.0, 2]]
    for dtype in ("float16", "float32", "float64"):
        for op, of_numpy in (("min", np.minimum), ("max", np.maximum)):
            mine, other = np.array(with_nan, dtype)[[comm.rank, 1 - comm.rank]]
            np.testing.assert_array_equal(comm.all_reduce(mine.copy(), op), of_numpy(mine, other))


# -- Messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, on=("mpi",))
def test_a_message_that_follows_a_collective_at_once_is_right(comm):
    for number in range(200):
        array = np.full(1000, float(comm.rank))
        comm.barrier()
        meet = comm.send if (number + comm.rank) % 2 else comm.recv
        meet(array, 1 - comm.rank)
        assert (array == (comm.rank if meet == comm.send else 1 - comm.rank)).all()


# -- Threads, groups, generations, other backends ----------------------------------------------------------------------


@pytest.mark.ranks(2, on=("mpi",))
def test_threads_use_groups_of_their_own(comm):
    groups = [comm.new_group(range(comm.world_size)) for _ in range(2)]

    def work(group):
        array = np.full(20_000, 1.0)
        for _ in range(200):
            group.all_reduce(array, "mean")
        return float(array.sum())

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, groups)) == [20_000.0, 20_000.0]
    for group in groups:
        group.close()


@pytest.mark.ranks(2, on=("mpi",))
def test_more_groups_come_and_go_than_an_mpi_has_room_for_at_a_time(comm):
    for _ in range(1200):
        with comm.new_group(range(2)) as group:
            group.barrier()


@pytest.mark.ranks(2, on=("mpi",), fresh=True)
def test_process_groups_and_backends_follow_each_other(comm, tmp_path):
    secret = tmp_path / f"secret of rank {comm.rank}"
    secret.touch(0o600)
    secret.write_text("5a" * 1000)
    os.environ["GRADSYNC_SECRET_FILE"] = str(secret)
    with gs.override_backend("shm") as shared:
        assert shared.all_reduce(np.ones(3))[0] == 2
    for backend in ("mpi", "shm", "mpi", "mpi", "shm"):
        gs.destroy_process_group()
        world = gs.init_process_group(backend)
        assert world.all_reduce(np.ones(3))[0] == 2
        with gs.override_backend("shm" if backend == "mpi" else "mpi") as other:
            assert other.all_reduce(np.ones(3))[0] == 2


# -- What ends a job ---------------------------------------------------------------------------------------------------

SCENES = """
    import os, signal, sys, threading, time
    import numpy as np
    import gradsync as gs

    scene = sys.argv[1]
    seconds = 3.0 if scene in ("stays away", "both send first") else 100.0
    comm = gs.init_process_group("mpi", collective_timeout_seconds=seconds)
    if scene == "closes a group":
        comm = comm.split(0)
    comm.all_reduce(np.ones(1000))
    if comm.rank == 1:
        if scene == "raises":
            raise ValueError("wrong shapes in layer 3")
        if scene == "exits":
            sys.exit(3)
        if scene == "is stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if scene == "aborts":
            comm.abort("I have seen enough")
        if scene.startswith("closes"):
            comm.close()
        if scene in ("aborts", "closes", "closes a group", "is closed in a thread", "stays away"):
            time.sleep(200)
    elif scene == "is closed in a thread":
        threading.Timer(1, comm.close).start()
    try:
        if scene == "both send first":
            comm.send(np.ones(3), 1 - comm.rank)
        comm.all_reduce(np.ones(1000))
    except gs.GradsyncError as error:
        print(f"rank {comm.rank}: {type(error).__name__} {error}", flush=True)
        raise
"""


@pytest.mark.parametrize(
    ("scene", "words"),
    [
        ("raises", ["ValueError: wrong shapes in layer 3", 'raise ValueError("wrong shapes in layer 3")']),
        ("exits", ["rank 0: RankFailed", "rank 1 closed the communicator while this rank still needed it"]),
        ("is stopped", ["rank 0: RankFailed", "was stopped (SIGSTOP?)"]),
        ("aborts", ["rank 0: RankFailed", "I have seen enough"]),
        ("closes", ["rank 0: RankFailed", "rank 1 closed the communicator"]),
        ("closes a group", ["rank 0: RankFailed", "rank 1 closed the communicator"]),
        ("is closed in a thread", ["rank 0: CommunicatorClosed", "another thread"]),
        ("stays away", ["rank 0: CollectiveTimeout", "for rank 1", "time.sleep(200)"]),
        ("both send first", ["rank 0: CollectiveTimeout", "rank 1: CollectiveTimeout", "message"]),
    ],
)
def test_a_job_ends_and_says_why(cli, script, scene, words):
    done = cli.program(MPIEXEC, "-n", 2, sys.executable, script(SCENES), scene)
    assert done.code != 0
    for word in words:
        assert word in done.out + done.err


def test_the_child_of_a_fork_that_fails_does_not_end_the_job(cli, script):
    path = script("""
        import os
        import numpy as np
        import gradsync as gs
        comm = gs.init_process_group("mpi")
        child = os.fork()
        if child == 0:
            raise ValueError("in the child")
        assert os.waitpid(child, 0)[1] == 1 << 8
        comm.all_reduce(np.ones(1000))
        print("went on")
    """)
    done = cli.program(MPIEXEC, "-n", 2, sys.executable, path)
    assert (done.code, done.out.count("went on")) == (0, 2), done.err


def test_a_request_of_objects_that_fails_raises_mpi_error(cli, script, tmp_path):
    """MPI's own failure cannot be had from outside: its communicator is replaced below gradsync."""
    path = script("""
        import os, pathlib, sys, time
        import gradsync as gs
        from mpi4py import MPI

        class Failing:
            def __init__(self, comm):
                self._comm = comm
            def __getattr__(self, name):
                return getattr(self._comm, name)
            def fail(self, *_, **__):
                raise MPI.Exception(MPI.ERR_OTHER)
            Isend = fail

        world, folder = gs.init_process_group("mpi"), pathlib.Path(sys.argv[1])
        backend = world._backend
        backend._comm = backend._requests.comm = Failing(backend._comm)
        got = "nothing"
        try:
            world.objects.all_gather("x")
        except gs.GradsyncError as error:
            got = type(error).__name__
        # What MPI has begun cannot be ended, and the first rank that exits ends the other, whose output may get lost.
        (folder / f"rank {world.rank} got {got}").touch()
        while len(list(folder.glob("rank *"))) < 2:
            time.sleep(0.01)
        os._exit(0)
    """)
    done = cli.program(MPIEXEC, "-n", 2, sys.executable, path, tmp_path)
    found = sorted(file.name for file in tmp_path.glob("rank *"))
    assert found == ["rank 0 got MpiError", "rank 1 got MpiError"], done


def test_memory_that_mpi_may_still_write_outlives_a_group_that_failed(cli, script, tmp_path):
    """What MPI gets is seen below gradsync."""
    path = script("""
        import contextlib, gc, os, pathlib, sys, time, weakref
        import numpy as np
        import gradsync as gs

        class Spy:
            def __init__(self, comm):
                self._comm = comm
            def __getattr__(self, name):
                return getattr(self._comm, name)
            def Iallreduce(self, sent, received, op):
                written.append(weakref.ref(received))
                return self._comm.Iallreduce(sent, received, op)

        world = gs.init_process_group("mpi", collective_timeout_seconds=1)
        folder, written = pathlib.Path(sys.argv[1]), []
        group = world.new_group([0, 1])
        if world.rank == 0:
            backend = group._backend
            backend._comm = backend._requests.comm = Spy(backend._comm)
            with contextlib.suppress(gs.CollectiveTimeout):
                group.all_reduce(np.ones(3))
            del group, backend
            gc.collect()
            (folder / f"kept {[array() is not None for array in written]}").touch()
        while not list(folder.glob("kept *")):
            time.sleep(0.01)
        os._exit(0)
    """)
    done = cli.program(MPIEXEC, "-n", 2, sys.executable, path, tmp_path)
    assert [file.name for file in tmp_path.glob("kept *")] == ["kept [True]"], done


def test_the_readme_runs_under_mpiexec_as_it_is(cli):
    """Ranks of one machine share memory, whoever has started them."""
    done = cli.program(MPIEXEC, "-n", 2, sys.executable, EXAMPLES / "own_loop.py")
    assert (done.code, done.out) == (0, "2 ranks over shm: weights [1. 2. 3.], bias [4.]\n"), done.err
