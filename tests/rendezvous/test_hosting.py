"""Which process hosts the server, and how others find it and its secret, if gradsync has not started the ranks."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
import pytest

import gradsync as gs
from commands import wait_until
from gradsync.rendezvous.server import RendezvousServer
from ranks import become
from rendezvous.peer import SECRET


def free_port():
    """A port that is free, as the next one is; below those that the kernel gives to connections."""
    while True:
        port = random.SystemRandom().randrange(12_000, 30_000)
        with socket.socket() as probe, socket.socket() as beside, contextlib.suppress(OSError):
            probe.bind(("", port))
            beside.bind(("", port + 1))
            return port


def torchrun(rank, size, **others):
    return {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size} | others


def by_hand(rank, size, **others):
    return {"RANK": rank, "WORLD_SIZE": size} | others


@pytest.fixture
def secret_file(tmp_path):
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_text(SECRET.hex())
    return path


LAUNCHERS = {
    "torchrun": lambda rank, port, _: torchrun(rank, 2, MASTER_ADDR=socket.gethostname(), MASTER_PORT=port),
    "by hand": lambda rank, port, _: by_hand(rank, 2, MASTER_ADDR="localhost", MASTER_PORT=port),
    "by hand, with a secret": lambda rank, port, secret: by_hand(
        rank, 2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, GRADSYNC_SECRET_FILE=secret
    ),
    "an address": lambda rank, *_: by_hand(rank, 2),
    "an IPv6 address": lambda rank, *_: by_hand(rank, 2),
    "an address and a secret": lambda rank, _, secret: by_hand(rank, 2, GRADSYNC_SECRET_FILE=secret),
    "srun": lambda rank, *_: {
        "SLURM_PROCID": rank,
        "SLURM_NTASKS": 2,
        "SLURM_STEP_NUM_TASKS": 2,
        "SLURM_LOCALID": rank,
        "SLURM_JOB_ID": 4711,
        "SLURM_STEP_ID": 0,
        "SLURM_STEP_TASKS_PER_NODE": 2,
        "SLURM_STEP_NODELIST": "node0",
    },
}


ADDRESSES = {"an address": "127.0.0.1", "an IPv6 address": "[::1]", "an address and a secret": "localhost"}


@pytest.fixture
def port():
    return free_port()


@pytest.fixture
def taken_port():
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", LAUNCHERS)
def test_rank_0_hosts_and_the_others_find_it(rank, how, port, secret_file, tmp_path):
    if how == "an IPv6 address" and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700, exist_ok=True)
    become(**LAUNCHERS[how](rank, port, secret_file), XDG_RUNTIME_DIR=folder)
    address = f"{ADDRESSES[how]}:{port}" if how in ADDRESSES else None
    for number in (1, 2):  # a second process group meets at the same server
        with gs.init_process_group("shm", address=address, timeout_seconds=60) as comm:
            assert (comm.rank, comm.world_size) == (rank, 2)
            assert comm.all_reduce(np.full(2, number)).tolist() == [2 * number] * 2
        gs.destroy_process_group()
    assert list(folder.iterdir()) == []  # what the next run could take for its own


def test_a_first_host_of_slurm_that_others_cannot_reach_is_told_as_such(monkeypatch, secret_file, caplog):
    here = LAUNCHERS["srun"](0) | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "localhost"}
    for name, value in (here | {"GRADSYNC_SECRET_FILE": secret_file}).items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(gs.RendezvousTimeout, match="rank 1"):
        gs.init_process_group("shm", timeout_seconds=1)
    assert "gradsync: the first host of Slurm's list of nodes is localhost, which is " in caplog.text


@pytest.mark.ranks(2, ends={0: -9})
@pytest.mark.parametrize("is_rebuilt", [False, True])
def test_the_death_of_a_rank_0_that_hosts_ends_the_run_and_says_how_it_would_not(rank, port, tmp_path, is_rebuilt):
    become(**by_hand(rank, 2, MASTER_ADDR="localhost", MASTER_PORT=port), XDG_RUNTIME_DIR=tmp_path)
    comm = gs.init_process_group("shm")
    if is_rebuilt:
        comm = gs.rebuild()
    comm.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(gs.RendezvousError, match="rank 0 hosted it: to survive its death, use gradsync run, or start"):
        comm.barrier()
    with pytest.raises(gs.RendezvousError, match=r"is gone .*gradsync serve"):
        gs.rebuild()


@contextlib.contextmanager
def answering(address, text):
    """A program at an address that says a text to each that comes."""
    host, _, port = address.rpartition(":")
    with socket.create_server((host, int(port))) as listener, contextlib.suppress(OSError):
        thread = threading.Thread(target=lambda: [listener.accept()[0].sendall(text) for _ in range(9)], daemon=True)
        thread.start()
        yield
        listener.shutdown(socket.SHUT_RDWR)


def another_server(address):
    return RendezvousServer(2, secret=SECRET, port=int(address.rpartition(":")[2]))


AT_ITS_ADDRESS = {
    "nobody": lambda _: contextlib.nullcontext(),
    "a server of another run": another_server,
    "another program": lambda address: answering(address, b"SSH-2.0-OpenSSH_9.6\r\n" * 9),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("who", AT_ITS_ADDRESS)
def test_what_a_killed_run_has_left_misleads_no_later_one(rank, who, port, tmp_path):
    folder, stale, stack = tmp_path / "runtime", tmp_path / "stale", contextlib.ExitStack()
    folder.mkdir(mode=0o700, exist_ok=True)
    become(**by_hand(rank, 2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port), XDG_RUNTIME_DIR=folder)
    if rank == 0:
        with subprocess.Popen([sys.executable, "-c", "import gradsync as gs; gs.init_process_group('shm')"]) as killed:
            wait_until(lambda: list(folder.glob("*.secret")))
            killed.kill()
        [left] = folder.glob("*.secret")
        stack.enter_context(AT_ITS_ADDRESS[who](left.read_text().split()[1]))
        stale.touch()
        time.sleep(0.5)  # so that the other rank has read it
    wait_until(stale.exists)
    with gs.init_process_group("shm", timeout_seconds=60) as comm:
        comm.barrier()
    gs.destroy_process_group()
    assert list(folder.iterdir()) == []
    stack.close()


@pytest.mark.slow  # three seconds
@pytest.mark.ranks(2)
def test_rank_0_may_be_held_up_between_its_file_and_its_first_answer(rank, port, monkeypatch, tmp_path):
    def start_late(server):
        time.sleep(3.0)
        start(server)

    start = RendezvousServer.start
    monkeypatch.setattr(RendezvousServer, "start", start_late)
    become(**by_hand(rank, 2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port), XDG_RUNTIME_DIR=tmp_path)
    with gs.init_process_group("shm", timeout_seconds=30) as comm:
        comm.barrier()


@pytest.mark.ranks(3)
def test_the_deadline_of_the_host_tells_the_others_who_is_missing(rank, port, secret_file, tmp_path):
    """Else they would hear only that the server is gone."""
    become(**by_hand(rank, 3, GRADSYNC_SECRET_FILE=secret_file))
    if rank == 2:
        return
    if rank == 0:
        wait_until((tmp_path / "dials").exists)
    else:
        (tmp_path / "dials").touch()
    with pytest.raises(gs.RendezvousTimeout) as raised:
        gs.init_process_group("shm", address=f"127.0.0.1:{port}", timeout_seconds=2.0 if rank == 0 else 60.0)
    assert raised.value.missing_ranks == (2,)


# -- What is missing, or wrong ----------------------------------------------------------------------------------------


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """alone(RANK=...) makes this process a rank with these variables, for calls that find no other rank."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)

    def set_all(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return set_all


THERE = {"GRADSYNC_ADDRESS": "127.0.0.1:4000"}
OF_A_LAUNCHER = THERE | {"GRADSYNC_SECRET_FILE": "fd:876"}
TOO_LITTLE = {
    "no address": (by_hand(1, 2), None, gs.InvalidArgument, "MASTER_ADDR"),
    "no port": (by_hand(1, 2, MASTER_ADDR="node0"), None, gs.InvalidArgument, "MASTER_ADDR"),
    "only a port": (by_hand(1, 2, MASTER_PORT=29500), None, gs.InvalidArgument, "MASTER_ADDR"),
    "no secret of the server": (by_hand(1, 2, **THERE), None, gs.AuthenticationError, "GRADSYNC_SECRET_FILE"),
    "a process that a rank has started": (by_hand(1, 2, **OF_A_LAUNCHER), None, gs.InvalidArgument, "unset all"),
    **{
        f"no secret for {address}": (by_hand(1, 2), address, gs.AuthenticationError, "GRADSYNC_SECRET_FILE")
        for address in ("node0:4000", "192.0.2.1:4000", "0.0.0.0:4000", "[fe80::1]:4000")
    },
}


@pytest.mark.parametrize("what", TOO_LITTLE)
def test_a_rank_that_knows_too_little_says_what_to_set(alone, what):
    variables, address, error, word = TOO_LITTLE[what]
    alone(**variables)
    with pytest.raises(error, match=word):
        gs.init_process_group("shm", address=address, timeout_seconds=1.0)


def test_a_taken_port_is_an_error_that_says_where_the_port_came_from(alone, taken_port):
    alone(**by_hand(0, 2))
    with pytest.raises(gs.RendezvousError, match="address=") as raised:
        gs.init_process_group("shm", timeout_seconds=5.0, address=f"127.0.0.1:{taken_port}")
    assert not isinstance(raised.value, gs.RendezvousTimeout)


def test_a_rank_whose_rank_0_does_not_come_names_it(alone):
    alone(**by_hand(1, 2, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port()))
    with pytest.raises(gs.RendezvousTimeout) as raised:
        gs.init_process_group("shm", timeout_seconds=0.3)
    assert raised.value.missing_ranks == (0,)


@pytest.mark.parametrize("what", ["open to others", "a link", "of this user alone"])
def test_without_a_runtime_folder_ranks_meet_in_a_folder_of_this_user_alone(alone, monkeypatch, tmp_path, what):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    alone(**by_hand(1, 2, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port()), XDG_RUNTIME_DIR=tmp_path / "nowhere")
    folder = tmp_path / f"gradsync-{os.geteuid()}"
    if what == "open to others":
        folder.mkdir()
        folder.chmod(0o755)
    elif what == "a link":
        folder.symlink_to(tmp_path)
    if os.path.isdir(f"/run/user/{os.geteuid()}"):
        pytest.skip("this user has a runtime folder")
    expected = gs.RendezvousTimeout if what == "of this user alone" else gs.AuthenticationError
    with pytest.raises(expected):
        gs.init_process_group("shm", timeout_seconds=0.1)
    if what == "of this user alone":
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_host_that_fails_leaves_neither_its_file_nor_its_port(alone, tmp_path):
    port = free_port()
    alone(**by_hand(0, 2))
    with pytest.raises(gs.RendezvousTimeout) as raised:
        gs.init_process_group("shm", address=f"127.0.0.1:{port}", timeout_seconds=0.3)
    assert raised.value.missing_ranks == (1,)
    assert list(tmp_path.iterdir()) == []
    RendezvousServer(1, secret=SECRET, port=port).stop()


def test_a_name_that_means_loopback_here_is_worth_a_warning(alone, secret_file, monkeypatch, caplog):
    """Debian and Ubuntu map a machine's own name to 127.0.1.1: ranks on other machines would dial in vain."""
    look_up = socket.getaddrinfo

    def look_up_as_debian(host, *args, **options):
        return look_up("127.0.1.1" if host in ("node0", b"node0") else host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up_as_debian)
    others = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "node0", "MASTER_PORT": free_port()}
    alone(**by_hand(0, 2, **others), GRADSYNC_SECRET_FILE=secret_file)
    with caplog.at_level(logging.WARNING, "gradsync"), pytest.raises(gs.RendezvousTimeout):
        gs.init_process_group("shm", timeout_seconds=0.5)
    assert "127.0.1.1" in caplog.text


@pytest.mark.slow
def test_a_rank_that_dials_in_vain_says_so_every_few_seconds(alone, secret_file, caplog):
    alone(**by_hand(1, 2, GRADSYNC_ADDRESS=f"127.0.0.1:{free_port()}"), GRADSYNC_SECRET_FILE=secret_file)
    with caplog.at_level(logging.WARNING, "gradsync"), pytest.raises(gs.RendezvousTimeout, match="gradsync serve"):
        gs.init_process_group("shm", timeout_seconds=8.0)
    assert "refused" in caplog.text


@pytest.mark.ranks(2)
def test_neighbouring_jobs_of_torchrun_do_not_collide(rank, taken_port, tmp_path):
    """The job with the next MASTER_PORT has its store there."""
    tmp_path.chmod(0o700)
    become(**torchrun(rank, 2, MASTER_ADDR="127.0.0.1", MASTER_PORT=taken_port - 1), XDG_RUNTIME_DIR=tmp_path)
    with gs.init_process_group("shm", timeout_seconds=60 if rank == 0 else 3) as comm:
        comm.barrier()
