"""Another backend for the length of a block: which communicator is meant there, and what cannot be had."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradsync as gs
from contract import expect
from gradsync import process_group
from places import SHM, STAND_IN, why_no_gpu
from rank_processes import run_ranks


def total(value: float) -> float:
    """Returns the sum over the ranks of what `group=None` means."""
    array = np.full(3, float(value))
    gs.get_communicator().all_reduce(array)
    return float(array[0])


@pytest.mark.parametrize(("name", "text"), [("gloo", "unknown backend 'gloo': use one of local"), ("auto", "auto")])
def test_unknown_names_are_told(name: str, text: str) -> None:
    with pytest.raises(gs.InvalidArgument, match=text), gs.override_backend(name):
        raise AssertionError("it was entered")


def be_refused(comm: Any) -> list[str]:
    texts = []
    for name, error in (("nccl", gs.BackendUnavailable), ("mpi", gs.BackendUnavailable), ("local", gs.InvalidArgument)):
        for _ in range(2):
            started = time.monotonic()
            caught = expect(error, gs.override_backend(name).__enter__)
            assert time.monotonic() - started < 20
            assert gs.get_communicator() is comm
        texts.append(str(caught))
    assert total(1) == comm.world_size  # nothing has happened
    return texts


def test_what_cannot_run_is_refused_on_all_ranks() -> None:
    if why_no_gpu() is None:
        pytest.skip("there is a GPU here")
    for nccl, mpi, local in run_ranks(2, be_refused, backend="shm"):
        assert "backend 'nccl' cannot connect these ranks" in nccl
        assert "gradsync has started these ranks. Start the script with `mpiexec -n 2 python script.py`" in mpi
        assert "needs a world of one rank" in local


def stand_in(comm: Any, other: str) -> None:
    n = comm.world_size
    for _ in range(2):
        with gs.override_backend(other) as sibling:
            assert sibling.backend == other != comm.backend
            assert (sibling.rank, sibling.ranks) == (comm.rank, comm.ranks)
            assert gs.get_communicator() is gs.WORLD is sibling
            assert total(comm.rank) == n * (n - 1) / 2
            gs.group_barrier()
            values = np.full(4, comm.rank)
            gs.bcast_list_([values], root=n - 1)
            assert values[0] == n - 1
            group = gs.new_group([0, n - 1])
            assert not group or group.backend == other
            with gs.override_backend(comm.backend):
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
        comm = gs.init_process_group(comm.backend, timeout_seconds=30)
        assert gs.get_communicator() is comm  # the block was about another world
        assert total(1) == n
    assert sibling.closed
    assert not group or group.closed
    with gs.override_backend(other) as fresh:
        assert fresh is not sibling
        assert total(1) == n


@pytest.mark.parametrize(("backend", "other"), [("nccl", "shm"), ("shm", "nccl")])
@pytest.mark.parametrize("world_size", [2, 3])
def test_another_backend_stands_in_for_the_world(backend: str, other: str, world_size: int) -> None:
    STAND_IN.run(world_size, stand_in, other, backend=backend)


def decide_for_auto(comm: Any, name: str) -> str:
    gs.destroy_process_group()
    with gs.override_backend(name) as nothing:
        assert nothing is None
        with gs.override_backend("shm"), gs.override_backend(name):
            comm = gs.init_process_group(timeout_seconds=30)
        assert gs.get_communicator() is comm
        taken = comm.backend
        gs.destroy_process_group()
        assert gs.init_process_group("shm", timeout_seconds=30).backend == "shm"  # who asks for one, gets it
        gs.destroy_process_group()
    return taken


@pytest.mark.parametrize("name", ["nccl", "shm"])
def test_it_decides_what_auto_takes(name: str) -> None:
    assert STAND_IN.run(2, decide_for_auto, name) == [name] * 2


def test_a_plain_script_overrides_the_backend() -> None:
    with gs.override_backend("local"), gs.init_process_group() as comm:
        assert (comm.rank, comm.world_size, comm.backend) == (0, 1, "local")
        assert total(3) == 3
    with gs.override_backend("mpi"):
        error = expect(gs.GradsyncError, gs.init_process_group)
    assert "this process is alone" in str(error) or "pip install mpi4py" in str(error)


def test_mpi_says_the_rank_where_no_variable_does(tmp_path: Path) -> None:
    mpiexec = Path(sysconfig.get_path("scripts")) / "mpiexec"
    if not mpiexec.exists():
        pytest.skip("there is no mpiexec beside this Python")
    script = tmp_path / "script.py"
    script.write_text(
        "import os\n"
        "from mpi4py import MPI\n"
        "[os.environ.pop(name) for name in list(os.environ) if name.startswith(('PMI', 'MPI', 'OMPI'))]\n"
        "import gradsync as gs\n"
        "with gs.override_backend('mpi'), gs.init_process_group() as comm:\n"
        "    assert comm.rank == MPI.COMM_WORLD.Get_rank()\n"
        "    if comm.rank == 0:\n"
        "        print(comm.backend, comm.world_size)\n"
    )
    command = [str(mpiexec), "-n", "2", sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "mpi 2\n"), done.stderr


def override_in_a_child(comm: Any) -> str:
    """The child is no rank: it must not go to the rendezvous as one."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            told = str(expect(gs.CommunicatorClosed, gs.override_backend("mpi").__enter__))
        except BaseException as error:
            told = repr(error)
        os.write(writing, told.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        told = file.read()
    os.waitpid(pid, 0)
    assert total(1) == comm.world_size
    return told


def test_the_child_of_a_fork_does_not_meet_the_ranks() -> None:
    for told in run_ranks(2, override_in_a_child, backend="shm"):
        assert "override_backend('mpi')" in told
        assert "fork" in told


def override_alone(comm: Any) -> None:
    assert process_group._client is None
    with gs.override_backend("shm") as sibling:
        assert (sibling.backend, sibling.world_size) == ("shm", 1)
        assert total(3) == 3
    assert process_group._client is not None
    with gs.override_backend("local") as same:
        assert same is comm
    gs.destroy_process_group()
    assert process_group._client is None
    assert sibling.closed


def test_a_world_of_one_meets_itself_first() -> None:
    run_ranks(1, override_alone, backend="local")


def become_local(comm: Any) -> None:
    with gs.override_backend("local") as alone:
        assert alone.backend == "local"
        assert total(3) == 3


def test_a_world_of_one_can_be_local() -> None:
    run_ranks(1, become_local, backend="shm")


def check_arguments(comm: Any) -> None:
    error = expect(gs.InvalidArgument, lambda: gs.group_barrier(comm.rank))  # type: ignore[arg-type]
    assert "to be a Communicator or None, got int" in str(error)
    gs.group_barrier(comm)
    gs.group_barrier()
    assert process_group.place_on_machine() == (comm.rank, comm.world_size)


def test_group_barrier_wants_a_communicator() -> None:
    SHM.run(2, check_arguments)
    gs.group_barrier()  # nothing is initialised
    with pytest.raises(gs.InvalidArgument, match="got str"):
        gs.group_barrier("world")  # type: ignore[arg-type]


def come_again_after_an_abort(comm: Any) -> None:
    with gs.override_backend("shm") as sibling:
        if comm.rank == 0:
            sibling.abort("KeyError in the data loader")
        else:
            expect(gs.RankFailed, sibling.barrier, "KeyError in the data loader")
    for _ in range(2):
        expect(gs.CommunicatorClosed, gs.override_backend("shm").__enter__, "gs.destroy_process_group()")
    assert gs.get_communicator() is comm
    assert total(1) == comm.world_size


def test_one_that_has_ended_is_not_handed_out() -> None:
    STAND_IN.run(2, come_again_after_an_abort)


def stay_outside(comm: Any) -> str:
    if comm.rank == 1:
        client: Any = process_group._client
        deadline = time.monotonic() + 30
        while not client.has_failed():
            assert time.monotonic() < deadline
            time.sleep(0.02)  # as if it computed
        return ""
    return str(expect(gs.RendezvousTimeout, gs.override_backend("nccl").__enter__))


def test_who_does_not_enter_is_named() -> None:
    text, _ = run_ranks(2, stay_outside, backend="shm", stand_in=True, timeout_seconds=5.0)
    assert "override_backend('nccl') waited 5 s: every rank of the world must enter the block; missing: rank 1" in text
