"""Another backend for the length of a block: which communicator is meant there, and what cannot be had."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

import gradsync as gs
from conftest import why_no_gpu


def total(value):
    """The sum over the ranks of what group=None means."""
    return float(gs.get_communicator().all_reduce(np.full(3, float(value)))[0])


@pytest.mark.parametrize(("name", "word"), [("gloo", "unknown backend 'gloo'"), ("auto", "auto")])
def test_unknown_names_are_refused(name, word):
    with pytest.raises(gs.InvalidArgument, match=word), gs.override_backend(name):
        raise AssertionError("it was entered")


@pytest.mark.ranks(2)
def test_what_cannot_run_is_refused_on_all_ranks_and_changes_nothing(comm):
    if why_no_gpu() is None:
        pytest.skip("there is a GPU here")
    for name, error in (("nccl", gs.BackendUnavailable), ("mpi", gs.BackendUnavailable), ("local", gs.InvalidArgument)):
        for _ in range(2):
            with pytest.raises(error), gs.override_backend(name):
                raise AssertionError("it was entered")
            assert gs.get_communicator() is comm
    assert total(1) == 2


@pytest.mark.ranks(3, on=("fake",))
def test_within_the_block_the_world_is_of_the_other_backend(rank):
    for backend, other in (("nccl", "shm"), ("shm", "nccl")):
        with gs.init_process_group(backend) as comm:
            override_again_and_again(comm, other)
        gs.destroy_process_group()


def override_again_and_again(comm, other):
    n, rank, backend = comm.world_size, comm.rank, comm.backend
    for _ in range(2):
        with gs.override_backend(other) as sibling:
            assert sibling.backend == other
            assert (sibling.rank, sibling.ranks) == (comm.rank, comm.ranks)
            assert gs.get_communicator() is gs.WORLD is sibling
            assert total(rank) == n * (n - 1) / 2
            gs.group_barrier()
            values = np.full(4, rank)
            gs.bcast_list_([values], root=n - 1)
            assert values[0] == n - 1
            group = gs.new_group([0, n - 1])
            assert not group or group.backend == other
            with gs.override_backend(backend):
                assert gs.get_communicator() is comm
                assert total(1) == n
                with gs.override_backend(other):
                    assert gs.get_communicator() is sibling
            assert gs.get_communicator() is sibling
        assert gs.get_communicator() is comm
        assert total(1) == n
    with pytest.raises(ZeroDivisionError), gs.override_backend(other):
        _ = 1 / 0
    assert gs.get_communicator() is comm
    with gs.override_backend(other) as again:
        assert again is sibling
        gs.destroy_process_group()  # with a block open
        assert not gs.is_initialized()
        comm = gs.init_process_group(backend)
        assert gs.get_communicator() is comm  # the block was about another world
        assert total(1) == n
    assert sibling.closed
    assert not group or group.closed
    with gs.override_backend(other) as new:
        assert new is not sibling
        assert total(1) == n


@pytest.mark.ranks(2, on=("fake",))
def test_it_decides_what_auto_takes(rank):
    for name in ("nccl", "shm"):
        with gs.override_backend(name) as nothing:
            assert nothing is None
            with gs.override_backend("shm"), gs.override_backend(name):
                comm = gs.init_process_group()
            assert comm.backend == name
            gs.destroy_process_group()
            assert gs.init_process_group("shm").backend == "shm"  # who asks for one gets it
            gs.destroy_process_group()


def test_it_gives_a_plain_script_its_backend():
    with gs.override_backend("local"), gs.init_process_group() as comm:
        assert (comm.rank, comm.world_size, comm.backend) == (0, 1, "local")
    gs.destroy_process_group()
    with gs.override_backend("mpi"), pytest.raises(gs.GradsyncError):
        gs.init_process_group()


def test_a_world_of_one_has_other_backends_too():
    for backend, other in (("local", "shm"), ("shm", "local")):
        with gs.init_process_group(backend, rank=0, world_size=1) as comm:
            with gs.override_backend(other) as sibling:
                assert (sibling.backend, sibling.world_size) == (other, 1)
                assert total(3) == 3
            with gs.override_backend(backend) as same:
                assert same is comm
        gs.destroy_process_group()
        assert sibling.closed


@pytest.mark.ranks(2)
def test_the_child_of_a_fork_does_not_meet_the_ranks(comm):
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with gs.override_backend("mpi"):
                raise AssertionError("it was entered")
        except BaseException as error:
            os.write(writing, type(error).__name__.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        assert file.read() == "CommunicatorClosed"
    os.waitpid(pid, 0)
    assert total(1) == 2


@pytest.mark.ranks(2)
def test_group_barrier_takes_a_communicator_or_nothing(comm):
    for wrong in (comm.rank, "world"):
        with pytest.raises(gs.InvalidArgument, match="Communicator or None"):
            gs.group_barrier(wrong)
    gs.group_barrier(comm)
    gs.group_barrier()


@pytest.mark.ranks(2, on=("fake",), fresh=True)
def test_one_that_was_aborted_is_not_entered_again(comm):
    with gs.override_backend("shm") as sibling:
        if comm.rank == 0:
            sibling.abort("KeyError in the data loader")
        else:
            with pytest.raises(gs.RankFailed, match="KeyError in the data loader"):
                sibling.barrier()
    for _ in range(2):
        with pytest.raises(gs.CommunicatorClosed), gs.override_backend("shm"):
            raise AssertionError("it was entered")
    assert gs.get_communicator() is comm
    assert total(1) == 2


@pytest.mark.ranks(2, on=("fake",), fresh=True)
def test_a_rank_that_does_not_enter_is_named(rank):
    comm = gs.init_process_group("shm", timeout_seconds=3)
    if rank == 1:
        with pytest.raises(gs.GradsyncError):
            while True:
                comm.barrier()  # as if it trained on, until the other gives up
    else:
        with pytest.raises(gs.RendezvousTimeout, match="missing: rank 1"), gs.override_backend("nccl"):
            raise AssertionError("it was entered")


ROW = """
from gradsync import backends

backends.TABLE["pipes"] = backends.BackendRow("pipe_backend")
backends.BACKENDS = ("auto", *backends.TABLE)  # as if the row were in the file
"""


def test_a_row_of_the_table_adds_a_backend(cli, script, tmp_path):
    """The row and the module are enough: docs/architecture.md says so."""
    (tmp_path / "sitecustomize.py").write_text(ROW)  # every process of this run executes it first
    path = script("""
        import numpy as np
        import gradsync as gs
        with gs.init_process_group() as world:
            total = world.all_reduce(np.ones(2))
            if world.rank == 0:
                print(world.backend, *total)
            with gs.override_backend("shm"), gs.override_backend("pipes") as communicator:
                assert communicator is world
    """)
    folders = f"{tmp_path}:{Path(__file__).parent}"
    done = cli("run", "-n", 2, "--backend", "pipes", path, environment={"PYTHONPATH": folders})
    assert (done.code, done.out) == (0, "[rank 0] pipes 2.0 2.0\n"), done.err


@pytest.mark.mpi
def test_mpi_says_the_rank_where_no_variable_does(cli, script):
    path = script("""
        import os
        from mpi4py import MPI
        [os.environ.pop(name) for name in list(os.environ) if name.startswith(("PMI", "MPI", "OMPI"))]
        import gradsync as gs
        with gs.override_backend("mpi"), gs.init_process_group() as comm:
            assert comm.rank == MPI.COMM_WORLD.Get_rank()
            if comm.rank == 0:
                print(comm.backend, comm.world_size)
    """)
    done = cli.program(Path(sys.executable).parent / "mpiexec", "-n", 2, sys.executable, path)
    assert (done.code, done.out) == (0, "mpi 2\n"), done.err
