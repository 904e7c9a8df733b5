"""Joining and leaving the world: from arguments, from variables, and the errors on the way."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

import gradsync as gs
from commands import wait_until
from conftest import why_no_gpu

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
    """Also one that nobody holds any more, or of which only its objects are held; and nothing keeps a world alive."""
    world = gs.init_process_group("local")
    objects = world.new_group([0]).objects
    gc.disable()
    try:
        dropped = weakref.ref(world.new_group([0]))
        gs.destroy_process_group()
        assert dropped() is None or dropped().closed
    finally:
        gc.enable()
    with pytest.raises(gs.CommunicatorClosed):
        objects.all_gather("a")
    world = weakref.ref(world)
    del objects
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
    **{"GRADSYNC_LOCAL_RANK": "0", "GRADSYNC_ADDRESS": "node0:4000", "GRADSYNC_HOSTED": "1"},
    **{"OMPI_MCA_orte_bound_at_launch": "1", "PMIX_RANK": "0", "PMI_FD": "9", "MPI_LOCALNRANKS": "2"},
    **{"SLURM_NTASKS": "2", "SLURM_NPROCS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"},
    **{"HYDI_CONTROL_FD": "9", "MV2_COMM_WORLD_RANK": "0"},
}


@pytest.mark.parametrize("name", HINTS)
def test_what_hints_at_a_launcher_is_an_error(name, monkeypatch):
    """Else each of N processes would take itself for the only one, and all would write the same checkpoint."""
    monkeypatch.setenv(name, HINTS[name])
    with pytest.raises(gs.InvalidArgument, match=f"no rank is known: {name} is set"):
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


# -- The rendezvous, as a rank sees it ---------------------------------------------------------------------------------


@pytest.fixture
def rank_1(monkeypatch):
    """rank_1(address) sets the variables of rank 1 of 2."""

    def set_variables(address):
        variables = {"RANK": "1", "WORLD_SIZE": "2", "GRADSYNC_HOSTED": "1", "GRADSYNC_SECRET": "00" * 32}
        for name, value in {**variables, "GRADSYNC_ADDRESS": address}.items():
            monkeypatch.setenv(name, value)

    return set_variables


def test_a_rendezvous_that_nobody_hosts_is_named(rank_1):
    with socket.socket() as reserved:  # bound but not listening: connections are refused
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        rank_1(address)
        with pytest.raises(gs.RendezvousTimeout, match=address):
            gs.init_process_group(timeout_seconds=0.5)


@pytest.mark.parametrize("greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n" + b"x" * 200, b""])
def test_another_service_on_the_port_is_recognised(greeting, rank_1):
    over = threading.Event()

    def serve():
        listener.settimeout(0.2)
        while not over.is_set():
            with contextlib.suppress(TimeoutError, ConnectionError):
                stream, _ = listener.accept()
                with stream:
                    stream.sendall(greeting)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        rank_1(f"127.0.0.1:{listener.getsockname()[1]}")
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with pytest.raises(gs.RendezvousError, match="another service or run holds this port"):
                gs.init_process_group(timeout_seconds=60)
        finally:
            over.set()
            thread.join()


@pytest.mark.ranks(2)
def test_process_groups_follow_each_other(rank):
    for _ in range(3):
        comm = gs.init_process_group()
        assert gs.get_communicator().all_reduce(np.ones(3))[0] == 2
        gs.destroy_process_group()
        with pytest.raises(gs.CommunicatorClosed):
            comm.barrier()


def test_a_rank_that_has_joined_already_or_has_another_world_size_is_refused(cli, script, tmp_path):
    path = script("""
        import gradsync as gs, numpy as np
        with gs.init_process_group("shm") as comm:
            print("joined", flush=True)
            input()
            print(comm.all_reduce(np.ones(1)))
    """)
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("5a" * 32)
    server = cli.start("serve", "--world-size", 2, "--secret-file", secret)
    meeting = {"GRADSYNC_ADDRESS": server.stdout.readline().strip(), "GRADSYNC_HOSTED": "1"}
    meeting |= {"GRADSYNC_SECRET_FILE": str(secret)}

    def start(rank, size):
        variables = {"GRADSYNC_RANK": str(rank), "GRADSYNC_WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        return cli.start_program(sys.executable, path, environment=meeting | variables, stdin=-1)

    ranks = [start(rank, 2) for rank in range(2)]
    for each in ranks:
        each.read_until("joined")
    for (rank, size), word in {(1, 2): "rank 1/2 has joined already", (0, 3): "world_size 2"}.items():
        stranger = start(rank, size).result()
        assert (stranger.code, word in stranger.err.splitlines()[-1]) == (1, True), stranger.err
    for each in ranks:
        each.stdin.write("\n")
        each.stdin.flush()
    assert [each.result() for each in ranks] == [(0, "[2.]\n", "")] * 2  # nothing of it has reached them
    server.send_signal(signal.SIGTERM)
    assert server.result().code == 0


# -- Ranks as a user starts them without any launcher: RANK, WORLD_SIZE and MASTER_* only ------------------------------


@pytest.fixture
def plain_ranks(cli, tmp_path):
    """plain_ranks(count, script, *arguments) starts them."""
    port = str(gs.free_port())
    (tmp_path / "runtime").mkdir(mode=0o700)

    def start(count, path, *arguments):
        meeting = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        meeting["XDG_RUNTIME_DIR"] = str(tmp_path / "runtime")
        return [
            cli.start_program(sys.executable, path, *arguments, environment={**meeting, "RANK": str(rank)})
            for rank in range(count)
        ]

    return start


PLAIN = """
    import sys
    import numpy as np
    import gradsync as gs
    comm = gs.init_process_group(timeout_seconds=60)
    print(comm.backend, comm.rank, comm.all_reduce(np.full(3, comm.rank + 1.0))[0], flush=True)
    if "wait" in sys.argv:
        sys.stdin.read()
    if "die" in sys.argv and comm.rank == 1:
        raise KeyError("lost")
    comm.barrier()
"""


def test_plain_ranks_meet_again_after_a_run_that_was_killed(plain_ranks, script, tmp_path):
    """The secret that a killed run has left at the same address is replaced, and nothing is left in the end."""
    path = script(PLAIN)
    killed = plain_ranks(2, path, "wait")
    killed[0].read_until("shm 0")
    for each in killed:
        each.kill()
        each.result()
    expected = [(0, "shm 0 3.0\n", ""), (0, "shm 1 3.0\n", "")]
    assert [each.result() for each in plain_ranks(2, path)] == expected
    assert not list((tmp_path / "runtime").glob("gradsync-*"))


def test_plain_ranks_pass_on_an_uncaught_exception(plain_ranks, script):
    first, second = [each.result() for each in plain_ranks(2, script(PLAIN), "die")]
    assert "KeyError: 'lost'" in second.err
    assert "RankFailed" in first.err
    assert "lost" in first.err
    assert (first.code, second.code) == (1, 1)


def test_plain_ranks_with_different_addresses_say_where_theirs_is_from(plain_ranks, script):
    path = script(f"""
        import os, gradsync as gs
        os.environ["GRADSYNC_SECRET"] = "5a" * 32
        if os.environ["RANK"] == "1":
            os.environ["GRADSYNC_ADDRESS"] = "127.0.0.1:{gs.free_port()}"
        gs.init_process_group(timeout_seconds=2)
    """)
    first, second = [each.result() for each in plain_ranks(2, path)]
    assert "missing: rank 1" in first.err
    assert re.search(r"rank 0 has the address 127.0.0.1:\d+ from MASTER_ADDR and MASTER_PORT", first.err)
    assert re.search(r"rank 1 has the address 127.0.0.1:\d+ from GRADSYNC_ADDRESS", second.err)


@pytest.mark.parametrize("slow", [0, 1])
def test_plain_ranks_form_one_process_group_after_the_other(plain_ranks, script, tmp_path, slow):
    path = script(f"""
        import time, gradsync as gs
        for _ in range(4):
            comm = gs.init_process_group(timeout_seconds=60)
            comm.barrier()
            time.sleep(0.2 * (comm.rank == {slow}))  # one leaves late
            gs.destroy_process_group()
        print("done")
    """)
    assert [each.result() for each in plain_ranks(2, path)] == [(0, "done\n", "")] * 2
    assert not list((tmp_path / "runtime").glob("gradsync-*"))


def test_an_address_can_be_hosted_anew_after_another_has_failed():
    address = f"127.0.0.1:{gs.free_port()}"
    for _ in range(2):
        with gs.init_process_group("shm", rank=0, world_size=1, address=address) as comm:
            assert comm.world_size == 1
        with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(gs.RendezvousError, match="in use"):
            elsewhere = f"127.0.0.1:{taken.getsockname()[1]}"
            gs.init_process_group("shm", rank=0, world_size=1, address=elsewhere, timeout_seconds=10)


def test_a_secret_that_cannot_be_published_leaves_neither_file_nor_port(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    port = gs.free_port()
    in_the_way = tmp_path / f"gradsync-127.0.0.1:{port}.secret"
    in_the_way.mkdir()
    with pytest.raises(IsADirectoryError):
        gs.init_process_group("shm", rank=0, world_size=2, address=f"127.0.0.1:{port}", timeout_seconds=10)
    assert list(tmp_path.iterdir()) == [in_the_way]
    socket.create_server(("127.0.0.1", port)).close()


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
    ("count", "shared", "hidden", "backend"),
    [(2, False, None, "nccl"), (1, True, None, "nccl"), (1, False, None, "shm"), (2, False, 1, "shm")],
)
def test_auto_takes_nccl_only_where_each_rank_has_a_gpu_or_may_share_one(rank, count, shared, hidden, backend):
    gpus_of_this_machine(count)
    if rank == hidden:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with gs.init_process_group(allow_shared_gpu=shared) as comm:
        assert comm.backend == backend


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
