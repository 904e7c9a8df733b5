"""Joining and leaving the world: from arguments, from the environment, and the errors on the way."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradsync as gs
from contract import expect
from gradsync import environment
from places import why_no_gpu
from rank_processes import run_ranks


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith(("GRADSYNC_", "SLURM_", "OMPI_", "PMI", "MPI_", "HYDI_")) or name in (
            "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
        ):  # fmt: skip
            monkeypatch.delenv(name)
    yield
    gs.destroy_process_group()


def test_local_in_one_process() -> None:
    assert not gs.is_initialized()
    assert not gs.is_distributed()
    gs.group_barrier()
    with gs.init_process_group("local") as comm:
        assert gs.is_initialized()
        assert gs.get_communicator() is comm
        assert gs.WORLD is comm
        assert (comm.rank, comm.world_size, comm.backend, comm.device) == (0, 1, "local", "cpu")
        assert not gs.is_distributed()
    assert not gs.is_initialized()
    assert comm.closed
    with pytest.raises(gs.InvalidArgument, match="not initialised"):
        gs.get_communicator()
    gs.destroy_process_group()


def test_a_group_of_which_only_its_objects_are_held_ends_with_the_process_group() -> None:
    objects = gs.init_process_group("local").new_group([0]).objects
    assert objects.all_gather("a") == ["a"]
    gs.destroy_process_group()
    with pytest.raises(gs.CommunicatorClosed, match="it was closed"):
        objects.all_gather("a")


def test_a_group_that_its_function_has_dropped_ends_with_the_process_group() -> None:
    """Else ranks that still wait in it would do so until their deadline."""
    world = gs.init_process_group("local")
    gc.disable()
    try:
        group = weakref.ref(world.new_group([0]))
        gs.destroy_process_group()
        held = group()
        assert held is not None
        assert held.closed
    finally:
        gc.enable()


def test_auto_takes_local_for_a_world_of_one(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "gradsync"), gs.init_process_group(rank=0, world_size=1) as comm:
        assert comm.backend == "local"
    assert "backend local (one rank; no GPU is visible)" in caplog.text


def test_the_variable_names_the_backend_of_a_process_that_nobody_started(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("local", " local "):
        monkeypatch.setenv(environment.BACKEND, text)
        with gs.init_process_group() as comm:
            assert (comm.rank, comm.world_size, comm.backend) == (0, 1, "local")
    monkeypatch.setenv(environment.BACKEND, "shm")
    with gs.init_process_group(rank=0, world_size=1) as comm:
        assert comm.backend == "shm"
    monkeypatch.setenv(environment.BACKEND, "loco")
    with pytest.raises(gs.InvalidArgument, match="unknown backend 'loco' in GRADSYNC_BACKEND: use one of auto, local"):
        gs.init_process_group()
    monkeypatch.setenv(environment.BACKEND, "mpi")
    with pytest.raises(gs.GradsyncError, match=r"`mpiexec -n 2 python script.py`|pip install mpi4py"):
        gs.init_process_group()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"address": "127.0.0.1:4000"}, gs.InvalidArgument, "no rank is known.*gradsync run -n 2 script.py"),
        ({"backend": "shm"}, gs.InvalidArgument, "no rank is known"),
        ({"backend": "mpi"}, gs.GradsyncError, "`mpiexec -n 2 python script.py`|pip install mpi4py"),
        ({"backend": "gloo"}, gs.InvalidArgument, "unknown backend 'gloo'"),
        ({"rank": 2, "world_size": 2}, gs.InvalidArgument, "needs rank to be an integer from 0 to 1, got 2"),
        ({"rank": -1, "world_size": 2}, gs.InvalidArgument, "got -1"),
        ({"rank": "0", "world_size": 1}, gs.InvalidArgument, "got '0'"),
        ({"rank": 0, "world_size": 0}, gs.InvalidArgument, "needs world_size to be an integer"),
        ({"rank": 0}, gs.InvalidArgument, "rank and world_size must be given together"),
        ({"world_size": 2}, gs.InvalidArgument, "rank and world_size must be given together"),
        ({"rank": 0, "world_size": 2}, gs.InvalidArgument, "MASTER_ADDR"),
        ({"rank": 0, "world_size": 2, "address": "nowhere"}, gs.InvalidArgument, "host:port"),
        ({"rank": 0, "world_size": 2, "backend": "local"}, gs.InvalidArgument, "needs a world_size of 1"),
        (
            {"backend": "local", "rank": 0, "world_size": 1, "device": "cuda:0"},
            gs.InvalidArgument,
            "device 'cpu', got 'cuda:0'",
        ),
        ({"rank": 0, "world_size": 1, "timeout_seconds": 0}, gs.InvalidArgument, "timeout_seconds"),
        ({"rank": 0, "world_size": 2, "backend": "mpi"}, gs.BackendUnavailable, "mpi"),
        (
            {"rank": 0, "world_size": 2, "address": "192.0.2.1:9"},
            gs.AuthenticationError,
            "GRADSYNC_SECRET_FILE",
        ),
    ],
)
def test_bad_arguments_are_told_at_once(arguments: dict[str, Any], error: type, text: str) -> None:
    started = time.monotonic()
    with pytest.raises(error, match=text):
        gs.init_process_group(**arguments)
    assert time.monotonic() - started < 60  # half of what ranks wait for each other
    assert not gs.is_initialized()


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        (
            "timeout",
            ": use collective_timeout_seconds=... for collectives, or timeout_seconds=... for joining the other ranks",
        ),
        ("init_method", ': use address="host:port", or leave it out if a launcher has started the ranks'),
        ("device_id", ': use device="cuda:0"'),
        ("wold_size", ": did you mean world_size?"),
        ("colour", ""),
    ],
)
def test_unknown_arguments_say_what_to_use(name: str, advice: str) -> None:
    unknown: dict[str, Any] = {name: 1}
    with pytest.raises(TypeError) as caught:
        gs.init_process_group("local", **unknown)
    assert str(caught.value) == f"init_process_group() got an unexpected keyword argument {name!r}{advice}"
    assert not gs.is_initialized()


def test_a_process_that_nobody_started_is_a_world_of_one_and_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_PROCID", "0")  # as in a batch script
    with gs.init_process_group() as comm:
        assert (comm.rank, comm.world_size) == (0, 1)
    assert [record.getMessage() for record in caplog.records] == [
        "gradsync: no launcher has started this process, so it is a world of one rank "
        "(for two: gradsync run -n 2 script.py)"
    ]
    monkeypatch.setenv("GRADSYNC_TIMEOUTS", "3")
    with gs.init_process_group():
        pass
    (_, line) = [record.getMessage() for record in caplog.records]
    assert "so it is a world of one rank" in line
    assert line.endswith("GRADSYNC_TIMEOUTS: gradsync has no such variable and ignores it; did you mean "
                         "GRADSYNC_COLLECTIVE_TIMEOUT_SECONDS?")  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LOCAL_RANK", "0"),
        ("LOCAL_WORLD_SIZE", "1"),
        ("MASTER_ADDR", "node0"),
        ("MASTER_PORT", "29500"),
        ("GRADSYNC_LOCAL_RANK", "0"),
        ("GRADSYNC_ADDRESS", "node0:4000"),
        ("GRADSYNC_HOSTED", "1"),
        ("OMPI_MCA_orte_bound_at_launch", "1"),
        ("PMIX_RANK", "0"),
        ("PMI_FD", "9"),
        ("SLURM_NTASKS", "2"),
        ("SLURM_NPROCS", "2"),
        ("SLURM_STEP_NUM_TASKS", "2"),
        ("SLURM_PROCID", "1"),
        ("MPI_LOCALNRANKS", "2"),
        ("HYDI_CONTROL_FD", "9"),
        ("MV2_COMM_WORLD_RANK", "0"),
    ],
)
def test_what_hints_at_a_launcher_is_named(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each of N jobs would take itself for the only one, and all would write the same checkpoint."""
    monkeypatch.setenv(name, value)
    with pytest.raises(
        gs.InvalidArgument, match=f"no rank is known: {name} is set, which suggests a launcher, but RANK"
    ):
        gs.init_process_group()
    with gs.init_process_group("local") as comm:  # who says so is believed
        assert comm.world_size == 1


def test_nccl_without_a_gpu_says_why() -> None:
    if why_no_gpu() is None:
        pytest.skip("there is a GPU here")
    with pytest.raises(gs.BackendUnavailable, match="'nccl' cannot run here: .+ use 'shm'"):
        gs.init_process_group("nccl", rank=0, world_size=1)


def test_twice_is_an_error() -> None:
    with gs.init_process_group("local"), pytest.raises(gs.InvalidArgument, match="initialised already"):
        gs.init_process_group("local")


def test_missing_master_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(gs.InvalidArgument, match="WORLD_SIZE"):
        gs.init_process_group()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(gs.InvalidArgument, match="MASTER_ADDR"):
        gs.init_process_group()


def test_ranks_on_other_hosts_need_another_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(gs.BackendUnavailable, match="4 ranks, of which 2 are on this host"):
        gs.init_process_group()


def test_unreachable_rendezvous_names_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as reserved:  # bound but not listening: connections are refused
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        monkeypatch.setenv(environment.ADDRESS, address)
        monkeypatch.setenv(environment.HOSTED, "1")
        monkeypatch.setenv(environment.SECRET, "00" * 32)
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(gs.RendezvousTimeout, match=address):
            gs.init_process_group(timeout_seconds=0.5)


def test_wrong_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradsync.rendezvous.server import RendezvousServer

    with RendezvousServer(2, secret=b"right" * 8) as server:
        monkeypatch.setenv(environment.ADDRESS, server.address)
        monkeypatch.setenv(environment.HOSTED, "1")
        monkeypatch.setenv(environment.SECRET, (b"wrong" * 8).hex())
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(gs.AuthenticationError):
            gs.init_process_group(timeout_seconds=60)


@pytest.mark.parametrize("greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n" + b"x" * 200, b""])
def test_another_service_on_the_port(greeting: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def serve() -> None:
        listener.settimeout(0.2)
        while not over.is_set():
            with contextlib.suppress(TimeoutError, ConnectionError):
                stream, _ = listener.accept()
                with stream:
                    stream.sendall(greeting)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        variables = {"RANK": "1", "WORLD_SIZE": "2", environment.HOSTED: "1", environment.SECRET: "00" * 32}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv(environment.ADDRESS, f"127.0.0.1:{listener.getsockname()[1]}")
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with pytest.raises(gs.RendezvousError, match="another service or run holds this port"):
                gs.init_process_group(timeout_seconds=60)
        finally:
            over.set()
            thread.join()


JOINED = """
import numpy as np
import gradsync as gs
comm = gs.init_process_group("shm", timeout_seconds=30)
print("joined", flush=True)
input()
total = np.ones(3)
comm.all_reduce(total)
print(total[0], flush=True)
"""


def test_a_rank_that_has_joined_already_and_a_wrong_world_size_are_refused() -> None:
    from gradsync.rendezvous.server import RendezvousServer

    def start(rank: int, world_size: int) -> subprocess.Popen[str]:
        place = {environment.RANK: rank, environment.WORLD_SIZE: world_size, "LOCAL_WORLD_SIZE": world_size}
        variables = {**os.environ, **{name: str(value) for name, value in place.items()}}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([sys.executable, "-c", JOINED], env={**variables, **meeting}, text=True, **pipes)

    with RendezvousServer(2, secret=b"right" * 8) as server:
        meeting = {environment.ADDRESS: server.address, environment.HOSTED: "1"}
        meeting[environment.SECRET] = (b"right" * 8).hex()
        ranks = [start(rank, 2) for rank in range(2)]
        assert [rank.stdout.readline() for rank in ranks if rank.stdout] == ["joined\n"] * 2
        for rank, world_size, told in [
            (1, 2, "rank 1/2 has joined already"),
            (0, 3, "world_size 2, rank 0 joined with world_size 3"),
        ]:
            stranger = start(rank, world_size)
            out, err = stranger.communicate(timeout=60)
            assert (out, stranger.returncode) == ("", 1), err
            assert told in err.splitlines()[-1]
        for rank in ranks:
            assert rank.stdin
            rank.stdin.write("\n")
            rank.stdin.flush()
        assert [rank.communicate(timeout=60) for rank in ranks] == [("2.0\n", "")] * 2


def initialise_again(comm: Any) -> list[tuple[str, int]]:
    from gradsync import process_group

    seen = []
    for _ in range(3):
        generation = process_group._client.generation
        array = np.ones(3)
        gs.get_communicator().all_reduce(array)
        seen.append((str(array[0]), generation))
        gs.destroy_process_group()
        expect(gs.CommunicatorClosed, comm.barrier)
        comm = gs.init_process_group()
    return seen


def test_a_new_generation_after_destroy() -> None:
    for seen in run_ranks(2, initialise_again):
        assert [value for value, _ in seen] == ["2.0"] * 3
        generations = [generation for _, generation in seen]
        assert generations == sorted(set(generations))


SCRIPT = """
import sys
import numpy as np
import gradsync as gs
comm = gs.init_process_group(timeout_seconds=30)
array = np.full(3, comm.rank + 1.0)
comm.all_reduce(array)
print(comm.backend, comm.rank, array[0])
if "die" in sys.argv and comm.rank == 1:
    raise KeyError("lost")
comm.barrier()
"""


def start_plain_ranks(tmp_path: Path, count: int, *arguments: str, script: str = SCRIPT) -> list[subprocess.Popen[str]]:
    """Starts ranks as a user without our launcher would: RANK, WORLD_SIZE and MASTER_* only."""
    path = tmp_path / "script.py"
    path.write_text(script)
    port = gs.free_port()  # and the one beside it, where the ranks meet, is not one that the kernel hands out either
    processes = []
    for rank in range(count):
        variables = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "XDG_RUNTIME_DIR": str(tmp_path),
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, str(path), *arguments],
                env=variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return processes


def test_plain_ranks_without_our_launcher(tmp_path: Path) -> None:
    (tmp_path / "gradsync-stale.secret").touch()
    outputs = [p.communicate(timeout=60) for p in start_plain_ranks(tmp_path, 2)]
    assert [out for out, _ in outputs] == ["shm 0 3.0\n", "shm 1 3.0\n"], outputs
    assert [path.name for path in tmp_path.glob("gradsync-*.secret")] == ["gradsync-stale.secret"]


def test_ranks_with_different_addresses_say_where_theirs_is_from(tmp_path: Path) -> None:
    script = (
        "import os, gradsync as gs\n"
        "os.environ['GRADSYNC_SECRET'] = '5a' * 32\n"
        "if os.environ['RANK'] == '1':\n"
        f"    os.environ['GRADSYNC_ADDRESS'] = '127.0.0.1:{gs.free_port()}'\n"
        "gs.init_process_group(timeout_seconds=2)"
    )
    (_, first), (_, second) = [p.communicate(timeout=60) for p in start_plain_ranks(tmp_path, 2, script=script)]
    assert "missing: rank 1" in first
    assert re.search(
        r"rank 0 has the address 127.0.0.1:\d+ from MASTER_ADDR and MASTER_PORT; every rank needs the", first
    )
    assert re.search(r"rank 1 has the address 127.0.0.1:\d+ from GRADSYNC_ADDRESS; every rank needs the same", second)


def test_plain_ranks_tell_an_uncaught_exception(tmp_path: Path) -> None:
    (_, first), (_, second) = [p.communicate(timeout=60) for p in start_plain_ranks(tmp_path, 2, "die")]
    assert "KeyError: 'lost'" in second, first
    assert "RankFailed" in first
    assert "lost" in first


def test_a_stale_secret_on_the_same_address_is_replaced(tmp_path: Path) -> None:
    first = start_plain_ranks(tmp_path, 2)
    for process in first:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)
    outputs = [p.communicate(timeout=60) for p in start_plain_ranks(tmp_path, 2)]
    assert [out for out, _ in outputs] == ["shm 0 3.0\n", "shm 1 3.0\n"], outputs


def test_an_address_is_hosted_anew_after_another_one_has_failed() -> None:
    address = f"127.0.0.1:{gs.free_port()}"
    with gs.init_process_group("shm", rank=0, world_size=1, address=address):
        pass
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(gs.RendezvousError, match="in use"):
        elsewhere = f"127.0.0.1:{taken.getsockname()[1]}"
        gs.init_process_group("shm", rank=0, world_size=1, address=elsewhere, timeout_seconds=10)
    with gs.init_process_group("shm", rank=0, world_size=1, address=address, timeout_seconds=10) as comm:
        assert comm.world_size == 1


def test_a_secret_that_cannot_be_published_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    port = gs.free_port()
    in_the_way = tmp_path / f"gradsync-127.0.0.1:{port}.secret"
    in_the_way.mkdir()
    with pytest.raises(IsADirectoryError):
        gs.init_process_group("shm", rank=0, world_size=2, address=f"127.0.0.1:{port}", timeout_seconds=10)
    assert list(tmp_path.iterdir()) == [in_the_way]
    socket.create_server(("127.0.0.1", port)).close()  # nor is the port


AGAIN = """
import sys, time
import gradsync as gs
for _ in range(4):
    comm = gs.init_process_group(timeout_seconds=30)
    comm.barrier()
    if comm.rank == int(sys.argv[1]):
        time.sleep(0.2)
    gs.destroy_process_group()
print("done")
"""


@pytest.mark.parametrize("slow", ["0", "1"])
def test_plain_ranks_form_generation_after_generation(tmp_path: Path, slow: str) -> None:
    processes = start_plain_ranks(tmp_path, 2, slow, script=AGAIN)
    outputs = [p.communicate(timeout=60) for p in processes]
    assert outputs == [("done\n", "")] * 2, outputs
    assert not list(tmp_path.glob("gradsync-*.secret"))
