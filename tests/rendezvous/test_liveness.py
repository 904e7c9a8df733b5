"""Ranks that are silent: a process that is stopped, gone or out of reach has failed; one that is only busy has not."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys

import pytest

import gradsync as gs
from commands import wait_until
from gradsync.machine import machine_identity  # a peer on this machine has to say so; no public name gives it
from gradsync.rendezvous.server import RendezvousServer
from rendezvous.clients import connect, failure_of, together
from rendezvous.peer import SECRET, Kind, Peer, joining


@pytest.fixture
def programs(tmp_path):
    """Three processes whose name is no help to whoever reads /proc."""
    path = tmp_path / "x) T ("
    path.symlink_to(sys.executable)
    with contextlib.ExitStack() as stack:
        started = [subprocess.Popen([path, "-S", "-c", "input()"], stdin=subprocess.PIPE) for _ in range(3)]
        for process in started:
            stack.enter_context(process)
            stack.callback(process.kill)
        yield started


@pytest.mark.slow  # ten seconds
def test_of_two_silent_ranks_the_one_whose_process_is_stopped_or_gone_has_failed(programs):
    """Gone, and its connection is still open: a child holds it. The other one, silent for longer, may only be busy."""
    busy, stopped, gone = programs

    def failure(process, number):
        with (
            RendezvousServer(3, secret=SECRET) as server,
            Peer.of_client(server.address) as first,
            Peer.of_client(server.address) as second,
        ):
            first.send(Kind.JOIN, *joining(1, 3, machine=machine_identity(), pid=busy.pid))
            second.send(Kind.JOIN, *joining(2, 3, machine=machine_identity(), pid=process.pid))
            with connect(server, 0, 3) as client:
                process.send_signal(number)
                return failure_of(client)

    for error in together(lambda: failure(stopped, signal.SIGSTOP), lambda: failure(gone, signal.SIGKILL)):
        assert type(error) is gs.RankFailed
        assert (error.rank, error.phase, error.was_silent) == (2, "running", True)


PARTITION = """
import subprocess, threading
from gradsync.errors import RendezvousError
from gradsync.rendezvous.client import RendezvousClient
from gradsync.rendezvous.server import RendezvousServer
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
with RendezvousServer(1, secret=b"s" * 16) as server:
    client = RendezvousClient.connect(server.address, secret=b"s" * 16, rank=0, world_size=1)
    client.set("key", b"value")
    subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
    try:
        client.get("never", timeout_seconds=60)
    except RendezvousError as error:
        print(type(error).__name__)
    client.abandon()
"""


@pytest.mark.skipif(shutil.which("unshare") is None or shutil.which("ip") is None, reason="no unshare or ip here")
def test_a_cut_network_is_an_error_of_a_rank_that_waits(cli):
    """Loopback goes down under the connection, in a network namespace of its own."""
    if cli.program("unshare", "-rn", "ip", "link", "set", "lo", "up").code:
        pytest.skip("no network namespace can be made here")
    result = cli.program("unshare", "-rn", sys.executable, "-c", PARTITION)
    assert (result.code, result.out) == (0, "RendezvousError\n"), result.err


STEPS = """
import sys, time
import numpy as np
import gradsync as gs
from pathlib import Path
with gs.init_process_group("shm") as comm:
    begun = time.monotonic()
    comm.barrier()
    Path(sys.argv[1], f"begun {comm.rank}").touch()
    while comm.all_reduce(np.array(time.monotonic() - begun), "min") < 15.0:
        time.sleep(0.02)
    Path(sys.argv[1], f"ended {comm.rank}").touch()
"""


@pytest.mark.slow
def test_a_launcher_that_is_stopped_ends_no_job_that_does_not_need_it(cli, script, tmp_path):
    process = cli.start("run", "-n", 2, script(STEPS), tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("begun *"))) == 2)
    process.send_signal(signal.SIGSTOP)
    try:
        wait_until(lambda: len(list(tmp_path.glob("ended *"))) == 2 or len(cli.processes()) < 3)
        assert len(list(tmp_path.glob("ended *"))) == 2
    finally:
        process.send_signal(signal.SIGCONT)
    assert process.result().code == 0


def test_a_stopped_server_delays_no_deadline_and_no_report(cli):
    process = cli.start("serve", "--world-size", 1, "--secret-file", "-", stdin=subprocess.PIPE)
    process.stdin.write(SECRET.hex() + "\n")
    process.stdin.flush()
    with connect(process.stdout.readline().strip()) as client:
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(gs.RendezvousError):
            client.get("key", timeout_seconds=0.1)
        client.report_failure("ValueError: 7")  # returns at once
        assert client.has_failed()
        client.abandon()
        process.kill()
        with pytest.raises(gs.CommunicatorClosed):
            client.check()
