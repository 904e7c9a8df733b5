"""Joining and leaving the world: from arguments, from variables, and the errors on the way."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

import gradsync as gs
from commands import wait_until
from conftest import why_no_gpu
from ranks import become

LAUNCHERS = ("GRADSYNC_", "SLURM_", "OMPI_", "PMI", "MPI_", "HYDI_", "MASTER_", "LOCAL_", "RANK", "WORLD_SIZE")


@pytest.fixture(autouse=True)
def nobody_started_this(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)
    yield
    gs.destroy_process_group()


def test_a_world_of_one():
    assert not gs.is_initialized()
    assert not gs.is_distributed()
    gs.group_barrier()
    with gs.init_process_group("local") as comm:
        assert gs.is_initialized()
        assert gs.get_communicator() is gs.WORLD is comm
        assert (comm.rank, comm.world_size, comm.backend, comm.device) == (0, 1, "local", "cpu")
        assert not gs.is_distributed()
        with pytest.raises(gs.InvalidArgument, match="initialised already"):
            gs.init_process_group("local")
    assert not gs.is_initialized()
    assert comm.closed
    with pytest.raises(gs.InvalidArgument, match="not initialised"):
        gs.get_communicator()
    gs.destroy_process_group()


def test_groups_end_with_the_process_group():
    """Also one that nobody holds any more, or of which only a part is held; and nothing keeps a world alive."""
    world = gs.init_process_group("local")
    objects, asynchronous = world.new_group([0]).objects, world.new_group([0]).asynchronous
    gc.disable()
    try:
        dropped = weakref.ref(world.new_group([0]))
        gs.destroy_process_group()
        assert dropped() is None or dropped().closed
    finally:
        gc.enable()
    with pytest.raises(gs.CommunicatorClosed):
        objects.all_gather("a")
    with pytest.raises(gs.CommunicatorClosed):
        asynchronous.barrier().result()
    world = weakref.ref(world)
    del objects, asynchronous
    gc.collect()
    assert world() is None


@pytest.mark.parametrize(
    ("variables", "arguments", "backend"),
    [
        ({}, {"rank": 0, "world_size": 1}, "local"),
        ({"GRADSYNC_BACKEND": " local "}, {}, "local"),
        ({"GRADSYNC_BACKEND": "shm"}, {"rank": 0, "world_size": 1}, "shm"),
        ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, {}, "local"),  # a batch script
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "23456"}, {}, "local"),
    ],
)
def test_auto_takes_what_the_variables_and_the_world_say(monkeypatch, variables, arguments, backend):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with gs.init_process_group(**arguments) as comm:
        assert (comm.rank, comm.world_size, comm.backend) == (0, 1, backend)


@pytest.mark.parametrize(
    ("arguments", "error", "word"),
    [
        ({"address": "127.0.0.1:4000"}, gs.InvalidArgument, "no rank is known"),
        ({"backend": "shm"}, gs.InvalidArgument, "no rank is known"),
        ({"backend": "mpi"}, gs.GradsyncError, "`mpiexec -n 2 python script.py`|pip install mpi4py"),
        ({"backend": "gloo"}, gs.InvalidArgument, "unknown backend 'gloo'"),
        ({"rank": 2, "world_size": 2}, gs.InvalidArgument, "rank .* got 2"),
        ({"rank": -1, "world_size": 2}, gs.InvalidArgument, "got -1"),
        ({"rank": "0", "world_size": 1}, gs.InvalidArgument, "got '0'"),
        ({"rank": 0, "world_size": 0}, gs.InvalidArgument, "world_size"),
        ({"rank": 0}, gs.InvalidArgument, "must be given together"),
        ({"world_size": 2}, gs.InvalidArgument, "must be given together"),
        ({"rank": 0, "world_size": 2}, gs.InvalidArgument, "MASTER_ADDR"),
        ({"rank": 0, "world_size": 2, "address": "nowhere"}, gs.InvalidArgument, "host:port"),
        ({"rank": 0, "world_size": 2, "backend": "local"}, gs.InvalidArgument, "world_size of 1"),
        ({"backend": "local", "device": "cuda:0"}, gs.InvalidArgument, "'cuda:0'"),
        ({"rank": 0, "world_size": 1, "timeout_seconds": 0}, gs.InvalidArgument, "timeout_seconds"),
        ({"rank": 0, "world_size": 2, "backend": "mpi"}, gs.BackendUnavailable, "mpi"),
        ({"rank": 0, "world_size": 2, "address": "192.0.2.1:9"}, gs.AuthenticationError, "GRADSYNC_SECRET_FILE"),
    ],
)
def test_bad_arguments_fail_at_once(arguments, error, word):
    with pytest.raises(error, match=word):
        gs.init_process_group(**arguments)
    assert not gs.is_initialized()


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("timeout", "collective_timeout_seconds"),
        ("init_method", "address="),
        ("device_id", "device="),
        ("wold_size", "did you mean world_size?"),
        ("colour", "unexpected keyword argument 'colour'"),
    ],
)
def test_unknown_arguments_say_what_to_use(name, word):
    with pytest.raises(TypeError) as raised:
        gs.init_process_group("local", **{name: 1})
    assert word in str(raised.value)
    assert not gs.is_initialized()


def test_a_process_that_nobody_started_says_once_that_it_is_alone(caplog, monkeypatch):
    with gs.init_process_group() as comm:
        assert comm.world_size == 1
    [line] = [record.getMessage() for record in caplog.records]
    assert "no launcher has started this process" in line
    monkeypatch.setenv("GRADSYNC_TIMEOUTS", "3")
    with gs.init_process_group():
        pass
    line = caplog.records[-1].getMessage()
    assert "did you mean GRADSYNC_COLLECTIVE_TIMEOUT_SECONDS?" in line


HINTS = {
    **{"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"},
    **{"GRADSYNC_ADDRESS": "node0:4000", "HOROVOD_SIZE": "2", "PADDLE_TRAINER_ID": "1"},
    **{"OMPI_MCA_orte_bound_at_launch": "1", "PMIX_RANK": "0", "PMI_FD": "9", "MPI_LOCALNRANKS": "2"},
    **{"SLURM_NTASKS": "2", "SLURM_NPROCS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"},
    **{"HYDI_CONTROL_FD": "9", "MV2_COMM_WORLD_RANK": "0"},
}


@pytest.mark.parametrize("name", HINTS)
def test_what_hints_at_a_launcher_is_an_error(name, monkeypatch):
    """Else each of N processes would take itself for the only one, and all would write the same checkpoint."""
    monkeypatch.setenv(name, HINTS[name])
    lacks = "SLURM_STEP_ID" if name.startswith("SLURM") else "RANK and WORLD_SIZE"
    with pytest.raises(gs.InvalidArgument, match=f"no rank is known: {name}(=.)? is set, .* but {lacks}"):
        gs.init_process_group()
    with gs.init_process_group("local") as comm:  # who says so is believed
        assert comm.world_size == 1


@pytest.mark.parametrize(
    ("variables", "error", "word"),
    [
        ({"RANK": "0"}, gs.InvalidArgument, "WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, gs.InvalidArgument, "MASTER_ADDR"),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "GRADSYNC_BACKEND": "loco"},
            gs.InvalidArgument,
            "'loco' in GRADSYNC_BACKEND",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
            gs.BackendUnavailable,
            "4 ranks, of which 2 are on this host",
        ),
    ],
)
def test_variables_that_are_wrong_or_too_few_are_named(monkeypatch, variables, error, word):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(error, match=word):
        gs.init_process_group()


def test_nccl_without_a_gpu_says_why():
    if why_no_gpu() is None:
        pytest.skip("there is a GPU here")
    with pytest.raises(gs.BackendUnavailable, match="'nccl' cannot run here: .+ use 'shm'"):
        gs.init_process_group("nccl", rank=0, world_size=1)


# -- Ranks that a user starts without any launcher; how they find each other: tests/rendezvous/test_hosting.py ---------


@pytest.fixture
def by_hand(tmp_path):
    """The variables of all ranks but their number."""
    tmp_path.chmod(0o700)  # for the file of the secret
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(gs.free_port()), "XDG_RUNTIME_DIR": str(tmp_path)}


@pytest.mark.ranks(2)
def test_ranks_with_different_addresses_say_where_theirs_is_from(rank, by_hand):
    become(**by_hand, RANK=rank, WORLD_SIZE=2, GRADSYNC_SECRET="5a" * 32)
    text = (
        "rank 0 waits for ranks on this machine, with MASTER_PORT=[0-9]+; every rank needs the same, and no GRADSYNC_A",
        "rank 1 has the address 127.0.0.1:[0-9]+ from address=; every rank needs the same address",
    )
    with pytest.raises(gs.RendezvousTimeout, match=text[rank]) as raised:
        gs.init_process_group(address=f"127.0.0.1:{gs.free_port()}" if rank else None, timeout_seconds=2)
    assert rank == 1 or raised.value.missing_ranks == (1,)


@pytest.mark.ranks(2)
def test_process_groups_follow_each_other_though_one_rank_leaves_late(rank, by_hand, tmp_path):
    """Now the one that hosts the server, now the other."""
    become(**by_hand, RANK=rank, WORLD_SIZE=2)
    for late in (0, 1, 0, 1):
        comm = gs.init_process_group(timeout_seconds=60)
        assert gs.get_communicator().all_reduce(np.ones(3))[0] == 2
        time.sleep(0.2 * (rank == late))
        gs.destroy_process_group()
        with pytest.raises(gs.CommunicatorClosed):
            comm.barrier()
    assert not list(tmp_path.iterdir())


# -- Which backend -----------------------------------------------------------------------------------------------------


@pytest.mark.ranks(3)
def test_auto_without_a_gpu_takes_shared_memory(rank):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with gs.init_process_group() as comm:
        assert comm.backend == "shm"


def gpus_of_this_machine(count):
    """In a rank of the fake: the device files of a driver, by which gradsync counts GPUs without loading CUDA."""
    listdir = os.listdir
    os.listdir = lambda path=".": [*listdir(path), *(f"nvidia{n}" for n in range(count * (path == "/dev")))]
    os.environ["FAKE_CUPY_DEVICES"] = str(count)


@pytest.mark.ranks(2, on=("fake",))
@pytest.mark.parametrize(
    ("count", "hidden", "backends"),
    [(1, None, {True: "nccl", False: "shm"}), (2, None, {False: "nccl"}), (2, 1, {False: "shm"})],
)
def test_auto_takes_nccl_only_where_each_rank_has_a_gpu_or_may_share_one(rank, count, hidden, backends):
    gpus_of_this_machine(count)
    if rank == hidden:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for may_share, backend in backends.items():
        with gs.init_process_group(allow_shared_gpu=may_share) as comm:
            assert comm.backend == backend
        gs.destroy_process_group()


@pytest.mark.ranks(2)
def test_a_rank_that_asks_for_a_backend_and_one_that_does_not_is_an_error_on_both(rank):
    with pytest.raises(gs.InvalidArgument, match="rank 1 asks for backend 'shm', rank 0 for 'auto'"):
        gs.init_process_group("shm" if rank else "auto")


# -- synchronized ------------------------------------------------------------------------------------------------------


@gs.synchronized
def halve(value, *, by=2.0):
    """Divides."""
    return value / by


def test_a_synchronized_function_stays_what_it_was():
    assert (halve(3.0), halve(3.0, by=3.0)) == (1.5, 1.0)
    assert (halve.__name__, halve.__doc__) == ("halve", "Divides.")
    with pytest.raises(ZeroDivisionError):
        halve(1.0, by=0.0)


@pytest.mark.ranks(3)
def test_all_ranks_have_called_a_synchronized_function_before_one_goes_on(comm, tmp_path):
    @gs.synchronized
    def leave_a_file():
        (tmp_path / str(comm.rank)).touch()
        return comm.rank

    assert leave_a_file() == comm.rank
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.ranks(2, fresh=True)
def test_a_rank_whose_synchronized_function_raises_does_not_wait(comm):
    if comm.rank == 0:
        with pytest.raises(ZeroDivisionError):
            halve(1.0, by=0.0)
        comm.abort("there is nothing by which to divide")
    else:
        with pytest.raises(gs.RankFailed, match="nothing by which to divide"):
            halve(1.0)
    wait_until(lambda: comm.closed)
