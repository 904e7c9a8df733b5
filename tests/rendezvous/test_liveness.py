"""Heartbeats between real processes and threads: who is stopped is named, who is busy is not, a verdict meets all."""

from __future__ import annotations

import logging
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
from rendezvous_ranks import SECRET, connect, connect_all, server_process

from gradsync.errors import CollectiveTimeout, RankFailed, RendezvousError
from gradsync.rendezvous.server import RendezvousServer

NEVER_SECONDS = 60.0  # for what no rank waits that is told of a failure

RANK = """
import ctypes, sys
from gradsync.rendezvous.client import RendezvousClient
client = RendezvousClient.connect(sys.argv[1], secret=bytes.fromhex(sys.argv[2]), rank=1, world_size=2)
client.barrier("start")
if sys.argv[3] == "busy":
    ctypes.PyDLL(None).usleep(3_000_000)  # a PyDLL call keeps Python's lock
    client.barrier("end")
    client.close()
else:
    sys.stdin.read()
"""


@contextmanager
def rank_process(server: RendezvousServer, what: str):
    command = [sys.executable, "-c", RANK, server.address, SECRET.hex(), what]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def test_stopped_rank_fails_the_others_with_its_name() -> None:
    with (
        RendezvousServer(2, secret=SECRET) as server,
        rank_process(server, "wait") as victim,
        connect(server, 0, 2) as client,
    ):
        client.barrier("start")
        victim.send_signal(signal.SIGSTOP)
        stopped_at = time.monotonic()
        with pytest.raises(RankFailed) as caught:
            client.barrier("needs all", timeout_seconds=NEVER_SECONDS)
        assert time.monotonic() - stopped_at < NEVER_SECONDS / 2
    assert (caught.value.rank, caught.value.phase, caught.value.was_silent) == (1, "running", True)
    assert f"rank 1/2 (pid {victim.pid}) was stopped (SIGSTOP?)" in str(caught.value)


def test_rank_that_holds_pythons_lock_for_seconds_is_not_condemned() -> None:
    with RendezvousServer(2, secret=SECRET) as server, rank_process(server, "busy") as busy:
        with connect(server, 0, 2) as client:
            client.barrier("start")
            client.barrier("end", timeout_seconds=NEVER_SECONDS)
        assert busy.wait(30) == 0


def test_stopped_server_is_told_to_a_rank_that_waits() -> None:
    with server_process() as (process, address), connect(address, 0, 1) as client:
        process.send_signal(signal.SIGSTOP)
        stopped_at = time.monotonic()
        with pytest.raises(RendezvousError, match=rf"server at {address} \(pid {process.pid}\) was stopped"):
            client.get("never", timeout_seconds=NEVER_SECONDS)
        assert time.monotonic() - stopped_at < NEVER_SECONDS / 2
        with pytest.raises(RendezvousError, match="was stopped"):
            client.check()


PARTITION = """
import subprocess, threading
from gradsync.errors import RendezvousError
from gradsync.rendezvous import connection
from gradsync.rendezvous.client import RendezvousClient
from gradsync.rendezvous.server import RendezvousServer
connection.machine_identity = lambda: "a machine of its own"
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
with RendezvousServer(1, secret=b"s" * 16) as server:
    client = RendezvousClient.connect(server.address, secret=b"s" * 16, rank=0, world_size=1)
    is_told = threading.Event()
    client.describe_with(lambda: is_told.set() or {}, lambda: ("", {}))
    assert is_told.wait(30)
    subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
    try:
        client.get("never", timeout_seconds=60)
    except RendezvousError as error:
        print(error)
    client.abandon()
"""


def test_partition_is_told_to_a_rank_that_waits() -> None:
    """Loopback goes down under a connection, in a network namespace of its own."""
    try:
        subprocess.run(["unshare", "-rn", "ip", "link", "set", "lo", "up"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespace can be made here: {error}")
    command = ["unshare", "-rn", sys.executable, "-c", PARTITION]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    # The server, which has no other rank to tell, tells the operator.
    assert re.fullmatch(r"(gradsync: rank 0/1 \(pid \d+\) cannot be reached: .*\n)?", done.stderr)
    assert "rank 0/1: the rendezvous server at 127.0.0.1:" in done.stdout
    assert "cannot be reached: its machine acknowledges nothing" in done.stdout


def test_absence_is_raised_although_the_server_does_not_answer() -> None:
    with server_process() as (process, address), connect(address, 0, 1) as client:
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(
            CollectiveTimeout, match=r"rank 0/1: waited 7 s in barrier #3 for rank 2; .* did not answer"
        ):
            client.report_stuck("world", 3, "barrier #3", 7.0, [2])


def test_waiting_is_told_once_to_the_operator(caplog) -> None:
    noticed = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            noticed.set()

    log = logging.getLogger("gradsync.rendezvous")
    listener = Listener()
    log.addHandler(listener)
    try:
        with RendezvousServer(2, secret=SECRET) as server, caplog.at_level("WARNING"):
            clients = connect_all(server, 2)
            clients[0].report_waiting("world", 4, "barrier #4", 5.0, [1])
            assert noticed.wait(30)
            for client in clients:
                client.close()
    finally:
        log.removeHandler(listener)
    [text] = [record.getMessage() for record in caplog.records if "wait" in record.getMessage()]
    assert text.startswith("gradsync: rank 0 has waited 5 s in barrier #4 for rank 1; rank 1 (pid ")
