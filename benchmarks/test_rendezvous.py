"""How long 1,024 ranks take to meet at a rendezvous server: they join, share an id, and wait for each other.

The server is a process of its own: `gradsync serve`, or one that hosts torch's TCPStore. Its ranks are simulated: this
process speaks for all, because a thousand real ones do not fit on a machine. So a time has the work of all ranks in
it, on one core; what the server itself needs is noted beside.
"""

from __future__ import annotations

import gc
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from functools import cache
from statistics import median
from typing import Any

import pytest

from compare import Compare, contenders

# A rank's client has a thread of its own, and no machine runs a thousand at once. So the simulated ranks use what is
# below it, private names: the same handshake, the same messages. Only SimulatedRank knows of them.
from gradsync.machine import machine_identity
from gradsync.rendezvous.sockets import raise_limit
from gradsync.rendezvous.wire import Channel, Kind, Status
from systems import NO_TORCH, Absent, Step, rendezvous_server, started

UNIQUE_ID = bytes(range(128))  # as long as NCCL's
PATIENCE_SECONDS = 60
JOINING_SECONDS = 20  # of TCPStore; it takes about one
TCP_STORE = """
import sys
import time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, int(sys.argv[1]), True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


class SimulatedRank:
    """A rank with its connection.

    Attributes:
        answer: the server's, to the last request; None until it comes.
    """

    MILLISECONDS = PATIENCE_SECONDS * 1000
    PUT_ID = Kind.SET, "id", UNIQUE_ID
    GET_ID = Kind.GET, "id", 0, MILLISECONDS
    BARRIER = Kind.EXCHANGE, "all ready", None, b"", None, MILLISECONDS
    MACHINE = machine_identity()  # a real rank reads it once, and this process is a thousand

    def __init__(self, rank: int, ranks: int, address: tuple[str, int], secret: bytes) -> None:
        self.answer: list[Any] | None = None
        self.stream = socket.create_connection(address, PATIENCE_SECONDS)
        self.stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._join = Kind.JOIN, "", rank, ranks, None, 0, self.MACHINE, "node", os.getpid(), self.MILLISECONDS
        self._channel = Channel(secret)
        self._send()

    def ask(self, kind: Kind, *fields: Any) -> None:
        self.answer = None
        self._channel.seal(kind, 1, *fields)
        self._send()

    def read(self) -> None:
        data = self.stream.recv(65536)
        assert data, "the server has closed a rank's connection"
        was_open = self._channel.is_open
        for message in self._channel.feed(data):
            status, is_last, *values = message.fields
            assert (message.kind, status) == (Kind.REPLY, Status.OK), message.fields
            if is_last:
                self.answer = values
        if self._channel.is_open and not was_open:
            self.ask(*self._join)

    def _send(self) -> None:
        self.stream.sendall(self._channel.outgoing)
        self._channel.outgoing.clear()


class Meeting:
    """All ranks of a run. A phase has ended when the server has answered the last one."""

    def __init__(self, size: int, address: str, secret: str) -> None:
        host, port = address.split(":")
        self._join = size, (host, int(port)), bytes.fromhex(secret)
        self._ranks: list[SimulatedRank] = []
        self._selector = selectors.DefaultSelector()

    def join(self) -> None:
        for number in range(self._join[0]):
            rank = SimulatedRank(number, *self._join)
            self._ranks.append(rank)
            self._selector.register(rank.stream, selectors.EVENT_READ, rank)
        self._serve(self._ranks)

    def share_id(self) -> None:
        """Rank 0 hands in the id, and all others fetch it."""
        first, *others = self._ranks
        self._ask([first], SimulatedRank.PUT_ID)
        self._ask(others, SimulatedRank.GET_ID)
        assert all(rank.answer == [UNIQUE_ID] for rank in others)

    def barrier(self) -> None:
        self._ask(self._ranks, SimulatedRank.BARRIER)

    def close(self) -> None:
        self._selector.close()
        for rank in self._ranks:
            rank.stream.close()

    def _ask(self, ranks: list[SimulatedRank], request: tuple[Any, ...]) -> None:
        for rank in ranks:
            rank.ask(*request)
        self._serve(ranks)

    def _serve(self, ranks: list[SimulatedRank]) -> None:
        waiting = {rank for rank in ranks if rank.answer is None}
        deadline = time.monotonic() + PATIENCE_SECONDS
        while waiting:
            assert time.monotonic() < deadline, f"{len(waiting)} of {len(ranks)} ranks wait for an answer"
            for key, _ in self._selector.select(1):
                key.data.read()
                if key.data.answer is not None:
                    waiting.discard(key.data)


class TorchMeeting:
    """The same with the clients of torch, which wait for each answer: one rank speaks after the other.

    For each client server and client ask DNS for the name of 127.0.0.1: where that is slow, a thousand never join.
    """

    def __init__(self, size: int, port: int) -> None:
        self._size, self._port = size, port
        self._stores: list[Any] = []

    def join(self) -> None:
        from torch.distributed import TCPStore

        options = {"wait_for_workers": False, "timeout": timedelta(seconds=JOINING_SECONDS)}
        deadline = time.monotonic() + JOINING_SECONDS
        for number in range(self._size):
            if time.monotonic() > deadline:
                raise Absent(f"TCPStore: {number:,} of {self._size:,} ranks have joined in {JOINING_SECONDS} s")
            self._stores.append(TCPStore("127.0.0.1", self._port, self._size, False, **options))
        self._meet("joined")

    def share_id(self) -> None:
        self._stores[0].set("id", UNIQUE_ID)
        assert all(store.get("id") == UNIQUE_ID for store in self._stores[1:])

    def barrier(self) -> None:
        self._meet("all ready")

    def close(self) -> None:
        self._stores.clear()

    def _meet(self, name: str) -> None:
        """As torch does: each adds one, the last one sets a key, and all wait for it."""
        for store in self._stores:
            if store.add(name, 1) == self._size:
                store.set(f"{name}: all", "")
        for store in self._stores:
            store.wait([f"{name}: all"])


@contextmanager
def a_meeting(contender: str, size: int) -> Iterator[tuple[subprocess.Popen[str], Meeting | TorchMeeting]]:
    """Yields a new server's process, and its ranks."""
    if contender == "TCPStore":
        command = [sys.executable, "-c", TCP_STORE, str(size)]
        with started(command) as server, closing(TorchMeeting(size, int(server.stdout.readline()))) as torch_ranks:
            yield server, torch_ranks
    else:
        with rendezvous_server(size) as (server, address, secret), closing(Meeting(size, address, secret)) as ranks:
            yield server, ranks


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        user, system = file.read().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


SERVER_SECONDS: dict[str, list[float]] = {}  # what the servers of each contender have needed for a whole meeting


@cache
def why_no_tcp_store(size: int) -> str | None:
    """Plays one meeting, to see whether its ranks come together."""
    try:
        import torch.distributed  # noqa: F401

        with a_meeting("TCPStore", size) as (_, ranks):
            ranks.join()
    except ImportError:
        return NO_TORCH
    except Absent as absent:
        return str(absent)
    return None


def meeting(contender: str, size: int, phase: str) -> Step:
    """A step is a whole meeting, of which one phase counts."""
    if raise_limit(size) is not None:
        raise Absent(f"{size} open files: ulimit -Hn {size + 256}")
    if contender == "TCPStore" and (reason := why_no_tcp_store(size)) is not None:
        raise Absent(reason)
    SERVER_SECONDS[contender] = []

    def step() -> float:
        seconds = {}
        with a_meeting(contender, size) as (server, ranks):
            before = cpu_seconds(server.pid)
            gc.disable()  # a real rank is a process; here a collection would stop a thousand of them
            try:
                for name, play in {"join": ranks.join, "id": ranks.share_id, "barrier": ranks.barrier}.items():
                    began = time.perf_counter()
                    play()
                    seconds[name] = time.perf_counter() - began
            finally:
                gc.enable()
                SERVER_SECONDS[contender].append(cpu_seconds(server.pid) - before)
                server.kill()  # before its ranks go, which it would mourn one by one
        return sum(seconds.values()) if phase == "all together" else seconds[phase]

    return step


@pytest.mark.parametrize("phase", ["join", "id", "barrier", "all together"])
@contenders("gradsync serve", "TCPStore")
def test_meeting(compare: Compare, phase: str) -> None:
    size = 64 if compare.disabled else 1024
    compare(f"{size:,} ranks meet: {phase}", meeting, size, phase, ranks=0, rounds=5, warm_up=1)
    if phase == "all together":
        compare.note(server_CPU_seconds=median(SERVER_SECONDS[compare.contender]))
