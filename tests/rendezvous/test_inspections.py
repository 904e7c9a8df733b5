"""A look at processes and connections: stopped, gone, unreachable, running."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys

import pytest

from gradsync.rendezvous.liveness import ProcessState, inspect_peer, inspect_process

SLEEPER = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]


@pytest.fixture
def child():
    with subprocess.Popen(SLEEPER, stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


class Stream:
    """A connection of which the kernel tells this."""

    def __init__(self, unacked: int, last_ack_ms: int, retransmits: int = 0, last_data_ms: int = 0) -> None:
        self.info = struct.pack("=2xB21xI24xII4x", retransmits, unacked, last_data_ms, last_ack_ms)

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option, size) == (socket.IPPROTO_TCP, socket.TCP_INFO, 64)
        return self.info


QUIET = Stream(0, 10**6)
DEAD_LINE = Stream(1, 2300)


def test_process_that_runs_is_stopped_goes_on_and_ends(child) -> None:
    assert inspect_process(child.pid) is ProcessState.RUNNING
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert inspect_peer(child.pid, QUIET) is ProcessState.STOPPED
    child.send_signal(signal.SIGCONT)
    os.waitid(os.P_PID, child.pid, os.WCONTINUED)
    assert inspect_peer(child.pid, QUIET) is ProcessState.RUNNING
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert inspect_process(child.pid) is ProcessState.GONE  # a zombie
    child.wait()
    assert inspect_peer(child.pid, DEAD_LINE) is ProcessState.GONE


def test_name_of_a_process_may_hold_anything(tmp_path) -> None:
    program = tmp_path / "x) T ("
    program.symlink_to(sys.executable)
    with subprocess.Popen([str(program), *SLEEPER[1:]], stdin=subprocess.PIPE) as process:
        assert inspect_process(process.pid) is ProcessState.RUNNING
        process.kill()


def test_process_of_another_user_that_proc_hides_runs(monkeypatch) -> None:
    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    assert inspect_process(2**22 + 1) is ProcessState.RUNNING


@pytest.mark.parametrize(
    ("stream", "state"),
    [
        (QUIET, ProcessState.UNKNOWN),
        (Stream(3, 2200), ProcessState.UNKNOWN),
        (DEAD_LINE, ProcessState.UNREACHABLE),
        # The peer's own retransmissions come; it has our acknowledgements no more than our data.
        (Stream(1, 10, retransmits=3, last_data_ms=2300), ProcessState.UNREACHABLE),
        (Stream(1, 10, retransmits=3, last_data_ms=2200), ProcessState.UNKNOWN),
        (Stream(1, 10, retransmits=2, last_data_ms=9000), ProcessState.UNKNOWN),
    ],
)
def test_machine_that_acknowledges_nothing_is_unreachable(stream: Stream, state: ProcessState) -> None:
    assert inspect_peer(None, stream) is state


def test_real_connection_is_reachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as stream:
        stream.send(b"not read, but acknowledged")
        assert inspect_peer(None, stream) is ProcessState.UNKNOWN
        assert inspect_peer(os.getpid(), stream) is ProcessState.RUNNING


def test_stream_that_is_no_tcp_connection_tells_nothing() -> None:
    left, right = socket.socketpair()
    with left, right:
        assert inspect_peer(None, left) is ProcessState.UNKNOWN
