"""The thread that reads: what it does by itself, what cannot hold it up, and how it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from rendezvous_ranks import SECRET, connect, connect_all, run_threads, server_process

from contract import wait_until
from gradsync.errors import (
    CollectiveTimeout,
    CommunicatorClosed,
    GradsyncError,
    RankFailed,
    RendezvousError,
    RendezvousTimeout,
)
from gradsync.machine import machine_identity
from gradsync.rendezvous import client as client_module
from gradsync.rendezvous import connection as connection_module
from gradsync.rendezvous.connection import Connection, dial
from gradsync.rendezvous.frames import DEATH, INVALID, SILENCE, STUCK, TO_GENERATION, FrameType
from gradsync.rendezvous.handshake import ServerProcess
from gradsync.rendezvous.liveness import ProcessState
from gradsync.rendezvous.server import RendezvousServer
from gradsync.rendezvous.wire import MAX_FRAME_BYTES, FrameReader, Session
from kits import interrupt

KEY = b"k" * 32
LONG_SECONDS = 30.0


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "gradsync-reader"]


def session(*, is_server: bool) -> Session:
    return Session(send_key=KEY, receive_key=KEY, is_server=is_server)


class Wire:
    """A connection over a socket pair, whose turns the test takes itself, and a clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, machine: str = "") -> None:
        self.server, stream = socket.socketpair()
        self.server.settimeout(LONG_SECONDS)
        stream.setblocking(False)
        reader = FrameReader()
        reader.limit_bytes = MAX_FRAME_BYTES
        process = ServerProcess.of(machine or machine_identity(), 7)
        self.connection = Connection(stream, session(is_server=False), reader, b"", process, "server:1", "rank 0/2")
        self.state = ProcessState.RUNNING
        self.pids: list[int | None] = []
        self.now = time.monotonic()
        self._session = session(is_server=True)
        self._reader = FrameReader()
        self._reader.limit_bytes = MAX_FRAME_BYTES
        monkeypatch.setattr(connection_module, "inspect_peer", self._look_at)
        monkeypatch.setattr(connection_module.time, "monotonic", lambda: self.now)
        self.connection._interval_seconds = 0.5
        self.connection.beat_at = self.now + 0.5
        self.connection._server_peer.reset(self.now)

    def _look_at(self, pid: int | None, _stream: socket.socket) -> ProcessState:
        self.pids.append(pid)
        return self.state

    def push(self, *messages: tuple) -> bool:
        self.server.sendall(b"".join(self._session.seal(*message) for message in messages))
        return self.connection.run_once(has_input=True)

    def join(self) -> None:
        self.connection.post(FrameType.JOIN, 0, 2, "machine", "node7", 7)
        assert self.received() == [FrameType.JOIN]

    def beat(self, times: int, seconds: float = 0.5) -> list[FrameType]:
        """Lets time pass; returns what the server got."""
        for _ in range(times):
            self.now += seconds
            self.connection.run_once(has_input=False)
        return self.received()

    def close(self) -> None:
        self.connection.abandon()
        self.server.close()

    def received(self) -> list[FrameType]:
        self.server.setblocking(False)
        try:
            self._reader.feed(self.server.recv(1024**2))
        except BlockingIOError:
            return []
        types = []
        while (frame := self._reader.next_frame()) is not None:
            types.append(self._session.open(frame).type)
        return types


@pytest.fixture
def wire(monkeypatch):
    made = Wire(monkeypatch)
    yield made
    made.close()


def test_one_thread_reads_for_a_client_and_all_its_groups() -> None:
    before = len(readers())
    with RendezvousServer(1, secret=SECRET) as server, connect(server, 0, 1) as client:
        groups = [client.group([0], f"group {n}") for n in range(3)]
        for group in groups:
            group.barrier()
        assert len(readers()) == before + 1
        assert readers()[-1].daemon
    assert len(readers()) == before


# Heartbeats, and whom they judge.


@pytest.mark.parametrize(("machine", "pid"), [("", 7), ("elsewhere", None)])
def test_rank_beats_and_looks_at_the_server_from_when_it_asks_to_join(monkeypatch, machine, pid) -> None:
    wire = Wire(monkeypatch, machine)
    assert wire.beat(10) == []
    wire.join()
    assert wire.beat(3) == [FrameType.HEARTBEAT] * 3
    assert wire.beat(1) == [FrameType.HEARTBEAT]
    assert set(wire.pids) == {pid}  # a process elsewhere cannot be looked at
    wire.close()


def test_who_was_late_to_its_own_clock_judges_nobody(wire: Wire) -> None:
    wire.join()
    wire.state = ProcessState.STOPPED
    wire.beat(3)
    wire.beat(1, seconds=60.0)  # this rank was stopped
    wire.beat(2)
    assert wire.connection.failure is None
    wire.beat(3)
    assert "was stopped" in str(wire.connection.failure)


@pytest.mark.parametrize("state", [state for state in ProcessState if state.is_fatal])
def test_lost_server_is_a_failure_that_sticks(wire: Wire, state: ProcessState) -> None:
    wire.join()
    wire.state = state
    wire.beat(3)
    assert wire.connection.failure is None
    wire.beat(1)
    assert str(wire.connection.failure).startswith("rank 0/2: the rendezvous server at server:1 (pid 7) " + state.value)
    assert not wire.connection.run_once(has_input=True)


def test_a_refused_message_that_nobody_waits_for_is_logged(wire: Wire, caplog) -> None:
    wire.join()
    wire.push((FrameType.REFUSED, 9, INVALID, "leave needs existing ranks"))
    assert [record.getMessage() for record in caplog.records] == [
        "rank 0/2: the rendezvous server refused a message: leave needs existing ranks"
    ]


@pytest.mark.parametrize(("kind", "is_told"), [(DEATH, True), (SILENCE, True), (STUCK, False)])
def test_a_failure_of_the_world_is_told_once(wire: Wire, monkeypatch, kind: int, is_told: bool) -> None:
    told: list[Exception] = []
    monkeypatch.setattr(connection_module, "on_failure", told.append)
    before = set(threading.enumerate())
    wire.join()
    wire.push((FrameType.PULSE,), (FrameType.FAILED, TO_GENERATION, kind, 1, "running", [], "rank 1/2 died"))
    wire.server.close()
    assert not wire.connection.run_once(has_input=True)
    for thread in set(threading.enumerate()) - before:
        thread.join(LONG_SECONDS)
    assert told == [wire.connection.failure] * is_told


def test_the_end_of_a_connection_that_never_joined_is_not_told(wire: Wire, monkeypatch) -> None:
    """A flooded server drops it, and the client tries again."""
    told: list[Exception] = []
    monkeypatch.setattr(connection_module, "on_failure", told.append)
    before = set(threading.enumerate())
    wire.join()
    wire.server.close()
    assert not wire.connection.run_once(has_input=True)
    assert set(threading.enumerate()) <= before
    assert told == []


def test_slow_server_is_worth_one_warning(wire: Wire, caplog) -> None:
    wire.join()
    wire.beat(40)
    wire.push((FrameType.PULSE,))
    assert wire.connection.failure is None
    assert [record.getMessage() for record in caplog.records] == [
        "rank 0/2: the rendezvous server at server:1 (pid 7) has sent nothing for 5 s, but runs "
        "(perhaps in a long call that holds Python's lock)",
        "rank 0/2: the rendezvous server at server:1 (pid 7) responds again",
    ]
    assert set(wire.pids) == {7}


def test_a_message_that_is_never_finished_is_a_failure(wire: Wire) -> None:
    """As bytes keep coming, its length was altered; without any bytes the peer is silent."""
    wire.join()
    wire.server.sendall(b"\0\0\1\0")
    assert wire.connection.run_once(has_input=True)
    wire.now += 5.0
    wire.push((FrameType.PULSE,))
    assert wire.connection.failure is None
    wire.now += 0.5
    wire.push((FrameType.PULSE,))
    text = "the peer's last message has been incomplete for 5 s: the data was probably altered"
    assert text in str(wire.connection.failure)


def test_a_heartbeat_waits_for_nobody_who_sends(wire: Wire) -> None:
    wire.join()
    with wire.connection._sending:
        assert wire.beat(1) == []  # who sends just now is as good a sign of life
    assert wire.beat(1) == [FrameType.HEARTBEAT]


def test_a_heartbeat_waits_for_no_room(wire: Wire) -> None:
    wire.join()
    for number in range(100):
        wire.connection.post(FrameType.SET, str(number), bytes(60_000))
    unsent = len(wire.connection._unsent)
    assert unsent > 0
    for _ in range(3):  # without the server reading anything
        wire.now += 0.5
        wire.connection.run_once(has_input=False)
    assert len(wire.connection._unsent) == unsent  # nor does anything pile up


def test_what_found_no_room_goes_later_in_order(wire: Wire) -> None:
    wire.join()
    for number in range(100):
        wire.connection.post(FrameType.SET, str(number), bytes(60_000))
    types: list[FrameType] = []
    while len(types) < 100:
        types += wire.received()
        wire.connection.run_once(has_input=False)
    assert types == [FrameType.SET] * 100


# What comes in.

REPLY = (FrameType.REPLY, 5, b"value")
FAILED = (FrameType.FAILED, 0, DEATH, 1, "running", (), "rank 1/2 died")


@pytest.fixture
def full():
    """A connection to a peer that reads nothing, and the peer's end; no request fits the socket's buffer."""
    server, stream = socket.socketpair()
    stream.setblocking(False)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    reader = FrameReader()
    reader.limit_bytes = MAX_FRAME_BYTES
    connection = Connection(stream, session(is_server=False), reader, b"", ServerProcess(), "server:1", "rank 0/2")
    yield connection, server
    connection.abandon()
    server.close()


def ask_too_much(connection: Connection, timeout_seconds: float) -> object:
    return connection.ask("set 'key'", timeout_seconds, FrameType.SET, "key", b"x" * 50_000)


def test_a_request_keeps_its_deadline_while_the_server_does_not_read(full, monkeypatch) -> None:
    monkeypatch.setattr(connection_module, "_ANSWERED_WITHIN_SECONDS", 0.1)
    connection, _ = full
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            ask_too_much(connection, 0.2)
        except RendezvousTimeout as error:
            errors.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(LONG_SECONDS)
    assert len(connection._unsent) > 0
    assert "set 'key' reached its deadline of 0.2 s, and the rendezvous server at server:1 did not answer" in str(
        errors[0]
    )


def test_a_failure_ends_a_request_while_the_server_does_not_read(full) -> None:
    connection, server = full
    connection.start(0.5)
    pushed = (0, DEATH, 1, "running", [], "rank 1/2 died")

    def push() -> None:
        while not connection._unsent:
            time.sleep(0.001)
        server.sendall(session(is_server=True).seal(FrameType.FAILED, *pushed))

    thread = threading.Thread(target=push)
    thread.start()
    began = time.monotonic()
    with pytest.raises(RankFailed, match="rank 1/2 died"):
        ask_too_much(connection, LONG_SECONDS)
    assert time.monotonic() - began < LONG_SECONDS / 2
    assert len(connection._unsent) > 0
    thread.join()


@pytest.mark.parametrize("bytes_sent", [b"", b"\0" * 100])
def test_end_and_garbage_are_sticky(wire: Wire, bytes_sent: bytes) -> None:
    wire.server.sendall(bytes_sent)
    wire.server.close()
    assert not wire.connection.run_once(has_input=True)
    for _ in range(2):
        with pytest.raises(RendezvousError, match="rank 0/2: the rendezvous server at server:1 is gone"):
            wire.connection.raise_failure()


def test_failure_in_the_same_bytes_as_the_end_is_the_one_that_is_told(wire: Wire) -> None:
    wire.push(REPLY, FAILED)
    wire.server.close()
    assert not wire.connection.run_once(has_input=True)
    with pytest.raises(RankFailed, match="rank 0/2: rank 1/2 died") as caught:
        wire.connection.raise_failure()
    assert (caught.value.rank, caught.value.phase) == (1, "running")


def test_a_descriptor_that_was_closed_elsewhere_is_no_untyped_error(wire: Wire) -> None:
    os.close(wire.connection._stream.fileno())
    assert not wire.connection.run_once(has_input=True)
    with pytest.raises(RendezvousError, match="Bad file descriptor"):
        wire.connection.raise_failure()
    wire.connection._stream.detach()


def test_a_failure_reaches_a_rank_that_calls_nothing(pair) -> None:
    pair[1].abandon()
    wait_until(pair[0].has_failed)


# Others ask this rank.


def test_a_blocked_callback_holds_up_neither_answers_nor_heartbeats(pair) -> None:
    blocked, goes_on, beats = threading.Event(), threading.Event(), threading.Semaphore(0)

    def report() -> tuple[str, dict[str, list[tuple[int, int, str, bool]]]]:
        blocked.set()
        assert goes_on.wait(LONG_SECONDS)
        return "", {}

    def positions() -> dict[str, int]:
        beats.release()
        return {}

    def work() -> None:
        assert blocked.wait(LONG_SECONDS)
        for _ in range(2):
            assert beats.acquire(timeout=LONG_SECONDS)
        goes_on.set()

    def time_out() -> None:
        with pytest.raises(CollectiveTimeout):
            pair[1].report_stuck("world", 7, "all_reduce #7", 300.0, [0])

    pair[0].describe_with(positions, report)
    run_threads([work, time_out])


def test_callbacks_that_raise_or_say_too_much_harm_nobody(pair) -> None:
    pair[0].describe_with(lambda: 1 / 0, lambda: 1 / 0)
    calls = [(n, n, "x" * 500, True) for n in range(300)]
    groups = {"g" * 2000: -3, **{str(n): n for n in range(40)}}
    pair[1].describe_with(lambda: groups, lambda: ("é" * 20_000, {"0": calls}))
    with pytest.raises(CollectiveTimeout) as caught:
        pair[0].report_stuck("world", 7, "all_reduce #7", 300.0, [1])
    assert "(its report failed: ZeroDivisionError: division by zero)" in str(caught.value)
    assert "ééé" in str(caught.value)


def test_absence_is_one_failure_with_what_every_rank_does() -> None:
    with RendezvousServer(3, secret=SECRET) as server:
        clients = connect_all(server, 3)
        reports, positions = ["in wait()", "in load_batch()", "in wait()"], [7, 6, 7]
        for rank, client in enumerate(clients):
            client.describe_with(lambda r=rank: {"world": positions[r]}, lambda r=rank: (reports[r], {}))

        def report(rank: int) -> None:
            clients[rank].report_stuck("world", 7, "all_reduce #7 (float32, 4 KB)", 300.0, None)

        errors = run_threads([lambda: report(0), lambda: report(2), lambda: clients[1].get("never")])
        for rank, error in zip((0, 2, 1), errors, strict=True):
            assert type(error) is CollectiveTimeout
            assert error.missing_ranks == (1,)
            text = str(error).removeprefix(f"rank {rank}/3: ")
            assert text.startswith("ranks 0 and 2 waited 300 s in all_reduce #7 (float32, 4 KB)")
        assert len({str(error).partition(": ")[2] for error in errors}) == 1
        for client in clients:
            client.report_waiting("world", 7, "all_reduce #7", 5.0, [1])  # too late, and harmless
            client.close()


# The end.


def test_the_thread_ends_with_the_client(pair) -> None:
    threads = [client._connection._thread for client in pair]
    assert all(thread.is_alive() for thread in threads)
    pair[0].close()
    pair[1].abandon()
    assert not any(thread.is_alive() for thread in threads)


def in_a_process(code: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


LEAVING = """
import atexit, sys
from gradsync.rendezvous.client import RendezvousClient
client = RendezvousClient.connect(sys.argv[1], secret=bytes.fromhex(sys.argv[2]), rank=1, world_size=2)
atexit.register(client.close)
client.barrier()
"""


def test_who_leaves_at_exit_says_so() -> None:
    with (
        RendezvousServer(2, secret=SECRET) as server,
        in_a_process(LEAVING, server.address, SECRET.hex()) as leaving,
        connect(server, 0, 2) as client,
    ):
        client.barrier()
        with pytest.raises(RankFailed) as caught:
            client.get("never", timeout_seconds=LONG_SECONDS)
        assert caught.value.phase == "left"
        assert leaving.wait(LONG_SECONDS) == 0


FORKING = """
import os, sys, threading
from gradsync.rendezvous.client import RendezvousClient
from gradsync.errors import CommunicatorClosed
client = RendezvousClient.connect(sys.argv[1], secret=bytes.fromhex(sys.argv[2]), rank=1, world_size=2)
group = client.group([1], "group")
held, done = threading.Event(), threading.Event()

def hold():
    with client._connection._sending:
        held.set()
        done.wait()

threading.Thread(target=hold, daemon=True).start()
held.wait()
child = os.fork()
if child == 0:
    for use in (client.barrier, client.check, group.barrier, lambda: client.set("k", b"")):
        try:
            use()
        except CommunicatorClosed as error:
            assert "belongs to the process that made it" in str(error), error
        else:
            os._exit(1)
    client.report_failure("nobody hears this")
    client.report_waiting("world", 1, "barrier #1", 5.0, None)
    client.announce_left("comm", 1)
    group.close()
    client.abandon()
    client.close()
    print(os.getpid(), flush=True)
    sys.stdin.readline()  # it outlives its parent
    os._exit(0)
done.set()
client.barrier()
sys.stdin.readline()
"""


def test_a_fork_replaces_locks_and_keeps_no_descriptor() -> None:
    """The child can use nothing, waits for no lock, and does not keep the death of its parent from being seen."""
    with (
        RendezvousServer(2, secret=SECRET) as server,
        in_a_process(FORKING, server.address, SECRET.hex()) as parent,
        connect(server, 0, 2) as client,
    ):
        child = int(parent.stdout.readline())
        client.barrier(timeout_seconds=LONG_SECONDS)
        parent.kill()
        with pytest.raises(RankFailed, match="died"):
            client.get("never", timeout_seconds=LONG_SECONDS)
        os.kill(child, signal.SIGKILL)


def test_a_failure_is_reported_without_a_wait_for_the_server() -> None:
    """Rank 0 may host it in a thread, and hold Python's lock."""
    with server_process() as (server, address):
        client = connect(address, 0, 1)
        server.send_signal(signal.SIGSTOP)
        reporting = threading.Thread(target=client.report_failure, args=("ValueError: 7",), daemon=True)
        reporting.start()
        reporting.join(10.0)  # it takes no time
        assert not reporting.is_alive()
        assert client.has_failed()
        client.abandon()
        server.kill()
        with pytest.raises(CommunicatorClosed):
            client.check()


def test_a_server_that_is_stopped_before_it_answers_a_join_is_found_without_the_deadline(monkeypatch) -> None:
    with server_process() as (server, address):

        def dial_and_stop(*args, **keywords):
            dialled = dial(*args, **keywords)
            server.send_signal(signal.SIGSTOP)
            return dialled

        monkeypatch.setattr(client_module, "dial", dial_and_stop)
        with pytest.raises(RendezvousError, match=rf"\(pid {server.pid}\) was stopped") as found:
            connect(address, 0, 1)
        assert not isinstance(found.value, RendezvousTimeout)
        server.kill()


def test_a_rank_that_is_interrupted_while_it_joins_tells_the_others_why(monkeypatch) -> None:
    wait, has_joined = Connection._wait, threading.Event()

    def interrupted_wait(self, pending, deadline):
        while not self.is_accepted:
            time.sleep(0.001)
        if self.label == "rank 0/3":
            has_joined.set()
            return wait(self, pending, deadline)
        raise KeyboardInterrupt

    monkeypatch.setattr(Connection, "_wait", interrupted_wait)
    with RendezvousServer(3, secret=SECRET) as server:
        waiting = threading.Thread(target=lambda: outcomes.append(outcome_of(lambda: connect(server, 0, 3))))
        outcomes: list = []
        waiting.start()
        assert has_joined.wait(LONG_SECONDS)
        with pytest.raises(KeyboardInterrupt):
            connect(server, 1, 3)
        waiting.join(LONG_SECONDS)
        [failure] = outcomes
        assert isinstance(failure, RankFailed)
        assert (failure.rank, failure.phase) == (1, "joining")
        assert "failed while joining: KeyboardInterrupt" in str(failure)


def outcome_of(function):
    try:
        return function()
    except GradsyncError as error:
        return error


# Ctrl-C.

CALLS = {
    "barrier": lambda client: client.barrier(timeout_seconds=0.002),
    "exchange": lambda client: client.exchange("x", b"", timeout_seconds=0.002),
    "set": lambda client: client.set("k", b"v"),
    "report_stuck": lambda client: client.report_stuck("world", 1, "barrier #1", 5.0, [1]),
    "report_failure": lambda client: client.report_failure("why"),
    "announce_left": lambda client: client.announce_left("comm", 1),
    "close": lambda client: client.close(),
}


@pytest.mark.parametrize("name", CALLS)
def test_ctrl_c_at_any_call_of_a_wait_keeps_nobody_from_ending(name: str) -> None:
    number, struck = 0, True
    while struck:
        number += 1
        with RendezvousServer(2, secret=SECRET) as server:
            waiting, other = connect_all(server, 2)
            struck = interrupt(lambda client=waiting: CALLS[name](client), number)
            assert run_threads([waiting.close, other.close]) == [None, None], f"call {number}"
            waiting.abandon()
    assert number > 5


@pytest.mark.parametrize("name", ["barrier", "set", "announce_left"])
def test_a_rank_goes_on_after_ctrl_c_in_any_place_of_a_request(name: str) -> None:
    """Each frame has the number after the last one's; the server ends a connection that loses or repeats a number."""
    struck, number = True, 0
    with RendezvousServer(2, secret=SECRET) as server:
        waiting, other = connect_all(server, 2)
        while struck:
            number += 1
            struck = interrupt(lambda: CALLS[name](waiting), number)
            waiting.set("after", b"%d" % number)
            assert other.get("after") == b"%d" % number
        run_threads([waiting.close, other.close])
    assert number > 5


def test_a_stream_closed_between_two_turns_of_the_reader_ends_it(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    def turn(*, has_input: bool) -> bool:
        assert wire.connection._stream.fileno() >= 0
        wire.connection.abandon()  # in a program another thread does it, while the reader gets no processor
        return True

    monkeypatch.setattr(wire.connection, "run_once", turn)
    wire.connection._run()
