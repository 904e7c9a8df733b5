"""gs.from_mpi: communicators over the ranks of mpi4py communicators, beside mpi4py's own collectives."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

import gradsync as gs
from gradsync.mpi import wrap
from ranks import PLACES

MPIEXEC = Path(sys.executable).parent / "mpiexec"

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="no mpi4py: pip install mpi4py mpich"),
]

KINDS = ("world", "half", "cartesian", "reversed")


def made_from_world(kind):
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if kind == "half":
        return world.Split(world.rank % 2)
    if kind == "cartesian":
        return world.Create_cart([world.size // 2 or 1, 2 if world.size > 1 else 1]).Sub([False, True])
    return world.Split(0, -world.rank) if kind == "reversed" else world.Dup()


# -- Beside mpi4py -----------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 4, on=("mpi",))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["shm", "mpi"])
def test_collectives_give_what_those_of_mpi_give(comm, kind, backend):
    from mpi4py import MPI

    of_mpi = made_from_world(kind)
    ours = gs.from_mpi(of_mpi, backend)
    n, rank = ours.world_size, ours.rank
    assert (rank, n) == (of_mpi.rank, of_mpi.size)
    assert ours.backend == (backend if n > 1 else ours.backend)
    random = np.random.default_rng(n)  # the same calls on all ranks
    operators = {"sum": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}
    for _ in range(60):
        size, root = int(random.integers(0, 3000)), int(random.integers(n))
        dtype = str(random.choice(["float32", "float64", "int32", "int64", "complex128"]))
        op = str(random.choice(["sum", "prod"] if dtype == "complex128" else list(operators)))
        mine = ((np.arange(size) * (rank + 2)) % 7 - 2).astype(dtype)
        want, rows = np.empty_like(mine), np.empty((n, size), dtype)
        match str(random.choice(["all_reduce", "reduce", "broadcast", "all_gather", "all_to_all", "exchange"])):
            case "all_reduce":
                of_mpi.Allreduce(mine, want, operators[op])
                got = ours.all_reduce(mine.copy(), op)
            case "reduce":
                of_mpi.Reduce(mine, want, operators[op], root)
                got = ours.reduce(mine.copy(), op, root)
                want = want if rank == root else got
            case "broadcast":
                want = mine.copy()
                of_mpi.Bcast(want, root)
                got = ours.broadcast(mine.copy(), root)
            case "all_gather":
                of_mpi.Allgather(mine, rows)
                got, want = ours.all_gather(mine[None]), rows
            case "all_to_all":
                sent = np.stack([mine + each for each in range(n)]).astype(dtype)
                of_mpi.Alltoall(sent, rows)
                got, want = ours.all_to_all(sent.copy()), rows
            case "exchange":
                of_mpi.Sendrecv(mine, (rank + 1) % n, recvbuf=want, source=(rank - 1) % n)
                got = ours.exchange(mine, dest=(rank + 1) % n, out=np.empty_like(mine), source=(rank - 1) % n)
        np.testing.assert_array_equal(got, want)
    ours.close()
    of_mpi.Free()


@pytest.mark.ranks(2, on=("mpi",))
def test_a_callback_lists_trees_and_objects_take_it(comm):
    from mpi4py import MPI

    ours = gs.from_mpi(MPI.COMM_WORLD, "shm")
    assert gs.from_mpi(MPI.COMM_WORLD, "shm") is ours
    weights = {"w": np.full(3, float(ours.rank))}
    gs.broadcast_tree(weights, 0, ours)
    gs.bcast_list_([weights["w"]], group=ours)
    gs.check_consistency(weights, ours)
    sync = gs.AllreduceCallback("mean", group=ours, parameters=weights)
    with sync.backward(weight=ours.rank + 1):
        future = sync("w", np.full(3, float(ours.rank)))
    assert (future.result() == 2 / 3).all()
    assert ours.objects.all_gather({"rank": ours.rank}) == [{"rank": 0}, {"rank": 1}]
    group = ours.split(0, -ours.rank)
    ours.close()
    assert group.objects.all_gather(group.rank) == [0, 1]  # a group outlives it, as in MPI
    group.close()
    assert gs.from_mpi(MPI.COMM_WORLD, "shm") is not ours
    assert comm.all_reduce(np.ones(1))[0] == 2  # the world's is another one


@pytest.mark.ranks(2, on=("mpi",))
def test_neither_s_end_is_the_other_s(comm):
    from mpi4py import MPI

    for backend in ("shm", "mpi"):
        theirs = MPI.COMM_WORLD.Dup()
        ours = gs.from_mpi(theirs, backend)
        theirs.Free()
        assert ours.all_reduce(np.ones(2))[0] == 2
        ours.close()
        theirs = MPI.COMM_WORLD.Dup()
        gs.from_mpi(theirs, backend).close()
        assert theirs.allreduce(1) == 2
        theirs.Free()


@pytest.mark.ranks(2, on=("mpi",))
def test_the_name_of_a_communicator_may_have_several_lines(comm):
    from mpi4py import MPI

    theirs = MPI.COMM_WORLD.Dup()
    theirs.Set_name("two\nlines")
    with gs.from_mpi(theirs, "shm") as ours:
        assert "two lines-" in ours.label
    theirs.Free()


@pytest.mark.ranks(2, on=("mpi",))
def test_many_come_and_go_and_leave_nothing(comm):
    from mpi4py import MPI

    def count():
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    with gs.from_mpi(MPI.COMM_WORLD, "shm") as ours:  # starts a server
        ours.barrier()
    MPI.COMM_WORLD.Barrier()
    before = count()
    for number in range(40):
        theirs = MPI.COMM_WORLD.Dup()
        with gs.from_mpi(theirs, "mpi" if number % 4 == 0 else "shm") as ours:
            assert ours.objects.all_gather(number) == [number] * 2
        theirs.Free()
    MPI.COMM_WORLD.Barrier()
    after = count()
    assert all(new <= old + 4 for new, old in zip(after, before, strict=True)), (before, after)


@pytest.mark.ranks(2, on=("mpi",))
def test_what_is_no_intracommunicator_is_refused(comm):
    from mpi4py import MPI

    alone = MPI.COMM_WORLD.Split(comm.rank)
    inter = alone.Create_intercomm(0, MPI.COMM_WORLD, 1 - comm.rank)
    for wrong, word in ((inter, "Merge"), (MPI.COMM_NULL, "COMM_NULL"), (comm, "already"), (7, "got int")):
        with pytest.raises(gs.InvalidArgument, match=word):
            gs.from_mpi(wrong)
    for takes in (wrap, lambda group: gs.AllreduceCallback(group=group)):
        with pytest.raises(gs.InvalidArgument, match=r"pass gs.from_mpi\(comm\)"):
            takes(MPI.COMM_WORLD)
    with pytest.raises(gs.InvalidArgument, match="backend"):
        gs.from_mpi(MPI.COMM_WORLD, "smh")
    inter.Free()
    alone.Free()
    with pytest.raises(gs.InvalidArgument, match="rank 1 asks for backend 'mpi'"):
        gs.from_mpi(MPI.COMM_WORLD, "mpi" if comm.rank else "shm")
    assert gs.from_mpi(MPI.COMM_WORLD).backend == "shm"


# -- Programs of their own ---------------------------------------------------------------------------------------------


SAY = """
def say(*words):
    \"\"\"In one write, between which no other rank's can come.\"\"\"
    import os
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""


def mpiexec(cli, n, path, *arguments, **options):
    path.write_text(SAY + path.read_text())
    return cli.program(MPIEXEC, "-n", n, sys.executable, path, *arguments, **options)


@pytest.mark.parametrize("n", [1, 2])
def test_without_a_process_group_and_alone(n, cli, script):
    path = script("""
        import numpy as np
        from mpi4py import MPI
        import gradsync as gs
        comm = gs.from_mpi(MPI.COMM_WORLD)
        say(comm.backend, comm.all_reduce(np.ones(1))[0], gs.is_initialized())
    """)
    done = mpiexec(cli, n, path)
    assert (done.code, done.out) == (0, f"{'local' if n == 1 else 'shm'} {n}.0 False\n" * n), done.err


def test_the_variable_chooses_the_backend(cli, script):
    path = script("""
        from mpi4py import MPI
        import gradsync as gs
        say(gs.from_mpi(MPI.COMM_WORLD).backend, gs.from_mpi(MPI.COMM_WORLD, "shm").backend)
    """)
    done = mpiexec(cli, 2, path, environment={"GRADSYNC_BACKEND": "mpi"})
    assert done == (0, "mpi shm\n" * 2, "")


def test_ranks_that_mpi_does_not_know_are_not_trained_each_alone(cli, script):
    path = script("""
        from mpi4py import MPI
        import gradsync as gs
        print(gs.from_mpi(MPI.COMM_SELF).world_size)
        gs.from_mpi(MPI.COMM_WORLD)
    """)
    done = cli("run", "-n", 2, path)
    assert done.code == 1
    assert done.out.count("] 1") == 2
    assert "MPI.COMM_WORLD has one rank, but gradsync has started 2 ranks: start them with `mpiexec -n 2 " in done.err


@pytest.mark.parametrize("call", ["from_mpi(MPI.COMM_WORLD)", "init_process_group('mpi')", "init_process_group()"])
def test_where_srun_does_not_connect_mpi_the_error_says_how_it_does(cli, script, call):
    path = script(f"from mpi4py import MPI\nimport gradsync as gs\ngs.{call}")
    task = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    done = cli.python(path, environment=task | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"})
    assert done.code == 1
    assert "srun did not connect MPI: `srun --mpi=pmi2` (MPICH, Intel MPI) or `--mpi=pmix` (Open MPI)" in done.err


@pytest.mark.parametrize(
    ("start", "backend"),
    [("from_mpi(MPI.COMM_WORLD, ", "shm"), ("from_mpi(MPI.COMM_WORLD, ", "mpi"), ("init_process_group(", "mpi")],
)
def test_it_ends_before_mpi_is_finalised(start, backend, cli, script):
    path = script(f"""
        import sys
        import numpy as np
        from mpi4py import MPI
        import gradsync as gs
        comm = gs.{start}sys.argv[1])
        comm.all_reduce(np.ones(1))
        MPI.Finalize()
        try:
            comm.all_reduce(np.ones(1))
        except gs.CommunicatorClosed:
            say("closed")
    """)
    done = mpiexec(cli, 2, path, backend)
    assert done == (0, "closed\n" * 2, "")


@pytest.mark.parametrize(
    ("start", "missing"),
    [
        *[("from_mpi(MPI.COMM_WORLD, ", rank) for rank in range(3)],
        *[('init_process_group("mpi", ', rank) for rank in (0, 2)],
    ],
)
def test_a_rank_that_does_not_call_it_is_named(start, missing, cli, script):
    path = script(f"""
        import time
        from mpi4py import MPI
        import gradsync as gs
        if MPI.COMM_WORLD.rank != {missing}:
            try:
                gs.{start}timeout_seconds=1)
            except gs.RendezvousTimeout as error:
                say(f"missing {{error.missing_ranks}}: {{error}}")
                time.sleep(4)  # the others tell it, too
        else:
            time.sleep(100)
    """)
    done = mpiexec(cli, 3, path)
    assert done.code != 0
    assert done.out.count(f"missing ({missing},): ") == 2, done


@pytest.mark.parametrize("backend", ["shm", "mpi"])
def test_the_others_are_told_of_a_rank_that_dies_before_mpi_ends_them(backend, cli, script, tmp_path):
    """mpiexec ends all ranks once it sees that one was killed. So here it sees a shell, which stays."""
    path = script("""
        import os, pathlib, signal, sys
        import numpy as np
        from mpi4py import MPI
        import gradsync as gs
        comm = gs.from_mpi(MPI.COMM_WORLD, sys.argv[1])
        comm.all_reduce(np.ones(1))
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            comm.all_reduce(np.ones(1))
        except gs.RankFailed as error:
            pathlib.Path(sys.argv[2], "heard").write_text(f"{error.rank}")
            os._exit(0)
    """)
    shell = ("sh", "-c", '"$@"; sleep 3', "sh", sys.executable)
    cli.program(MPIEXEC, "-n", 2, *shell, path, backend, tmp_path)
    assert (tmp_path / "heard").read_text() == "1"


@pytest.mark.parametrize("culprit", [0, 1])  # rank 0 hosts the server
def test_an_uncaught_error_of_one_rank_ends_all_and_is_told(culprit, cli, script):
    path = script(f"""
        import numpy as np
        from mpi4py import MPI
        import gradsync as gs
        comm = gs.from_mpi(MPI.COMM_WORLD)
        comm.all_reduce(np.ones(1))
        if comm.rank == {culprit}:
            raise ValueError("wrong shapes in layer 3")
        try:
            comm.all_reduce(np.ones(1))
        except gs.RankFailed as error:
            say("told:", error)
            raise
    """)
    done = mpiexec(cli, 2, path)
    assert done.code != 0
    assert "told: " in done.out, done
    assert "wrong shapes in layer 3" in done.out, done


def test_all_calls_of_mpi_are_made_by_the_caller_s_thread(cli, script):
    """Also where MPI has no more than MPI_THREAD_FUNNELED, as many programs initialise it."""
    path = script("""
        import mpi4py
        mpi4py.rc.thread_level = "funneled"
        import numpy as np
        from mpi4py import MPI
        import gradsync as gs
        assert MPI.Query_thread() == MPI.THREAD_FUNNELED
        say(gs.from_mpi(MPI.COMM_WORLD).all_reduce(np.ones(1))[0])
        try:
            gs.from_mpi(MPI.COMM_WORLD, "mpi")
        except gs.BackendUnavailable as error:
            say("MPI_THREAD_MULTIPLE" in str(error))
    """)
    done = mpiexec(cli, 2, path)
    assert sorted(done.out.split()) == ["2.0", "2.0", "True", "True"], done


@pytest.mark.parametrize("kind", KINDS)
def test_over_nccl_where_each_rank_has_a_gpu(kind, cli, script):
    fake = PLACES["fake"]
    path = script(f"""
        import cupy
        from mpi4py import MPI
        import gradsync as gs
        from backends.test_from_mpi import made_from_world
        cupy.cuda.Device(MPI.COMM_WORLD.rank + 2).use()  # the program's own choice
        of_mpi = made_from_world({kind!r})
        comm = gs.from_mpi(of_mpi, "nccl")
        got = comm.all_reduce(cupy.full(5, MPI.COMM_WORLD.rank + 1.0)).get()
        total = of_mpi.allreduce(MPI.COMM_WORLD.rank + 1.0)
        assert (got == total).all(), (got, total)
        say(comm.backend, comm.device)
    """)
    folders = os.pathsep.join([*fake.folders, str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = mpiexec(cli, 4, path, environment={**fake.environment, "PYTHONPATH": folders})
    assert done.code == 0, done.err
    assert sorted(done.out.splitlines()) == [f"nccl cuda:{rank + 2}" for rank in range(4)]


def test_a_killed_job_leaves_nothing(cli, script):
    path = script("""
        from mpi4py import MPI
        import gradsync as gs
        comm = gs.from_mpi(MPI.COMM_WORLD)
        print("here", flush=True)
        MPI.COMM_WORLD.Barrier()
        import time
        time.sleep(100)
    """)
    running = cli.start_program(MPIEXEC, "-n", 2, sys.executable, path)
    assert running.read_until("here")
    running.send_signal(signal.SIGTERM)
    assert running.result().code != 0
