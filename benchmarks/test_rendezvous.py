"""How long 1,024 ranks take to meet at a rendezvous server: they join, share an id, and wait for each other.

The server is `gradsync serve`, a process of its own. Its ranks are simulated: one loop in this process speaks for all,
because a thousand real ones do not fit on a machine. So a time has the work of all ranks in it, on one core.
"""

from __future__ import annotations

import gc
import os
import selectors
import socket
import time
from contextlib import closing

import pytest

from compare import Compare, contenders

# A rank's client has a thread of its own, and no machine runs a thousand at once. So the simulated ranks use what is
# below it, private names: the same handshake, the same frames. Only SimulatedRank knows of them.
from gradsync.machine import machine_identity
from gradsync.rendezvous.frames import FrameType
from gradsync.rendezvous.handshake import NONCE_BYTES, ClientHandshake
from gradsync.rendezvous.sockets import raise_limit
from gradsync.rendezvous.wire import MAX_FRAME_BYTES, FrameReader
from systems import Absent, Step, rendezvous_server

UNIQUE_ID = bytes(range(128))  # as long as NCCL's
PATIENCE_SECONDS = 60


class SimulatedRank:
    """A rank with its connection.

    Attributes:
        answer: the server's, to the last request; None until it comes.
    """

    PUT_ID = FrameType.SET, "id", UNIQUE_ID
    GET_ID = FrameType.GET, "id", 0
    BARRIER = FrameType.EXCHANGE, "all ready", None, b""
    MACHINE = machine_identity()  # a real rank reads it once, and this process is a thousand

    def __init__(self, rank: int, ranks: int, address: tuple[str, int], secret: bytes) -> None:
        self.answer = None
        self.stream = socket.create_connection(address, PATIENCE_SECONDS)
        self.stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._join = FrameType.JOIN, rank, ranks, self.MACHINE, "node", os.getpid()
        self._handshake = ClientHandshake(secret, os.urandom(NONCE_BYTES))
        self._reader, self._session = FrameReader(), None
        self.stream.sendall(self._handshake.hello())

    def ask(self, *request: object) -> None:
        self.answer = None
        self.stream.sendall(self._session.seal(*request))

    def read(self) -> None:
        data = self.stream.recv(65536)
        assert data, "the server has closed a rank's connection"
        self._reader.feed(data)
        while (frame := self._reader.next_frame()) is not None:
            if self._session is None:
                proof, self._session = self._handshake.receive(frame)
                self._reader.limit_bytes = MAX_FRAME_BYTES
                self.stream.sendall(proof + self._session.seal(*self._join))
            elif (message := self._session.open(frame)).type is not FrameType.PULSE:
                assert message.type is FrameType.REPLY, message
                self.answer = message.fields


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
        assert all(UNIQUE_ID in rank.answer for rank in others)

    def barrier(self) -> None:
        self._ask(self._ranks, SimulatedRank.BARRIER)

    def close(self) -> None:
        self._selector.close()
        for rank in self._ranks:
            rank.stream.close()

    def _ask(self, ranks: list[SimulatedRank], request: tuple[object, ...]) -> None:
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


def meeting(_: str, size: int, phase: str) -> Step:
    """A step is a whole meeting, of which one phase counts."""
    if raise_limit(size) is not None:
        raise Absent(f"{size} open files: ulimit -Hn {size + 256}")

    def step() -> float:
        seconds = {}
        with rendezvous_server(size) as (server, address, secret), closing(Meeting(size, address, secret)) as ranks:
            gc.disable()  # a real rank is a process; here a collection would stop a thousand of them
            try:
                for name, play in {"join": ranks.join, "id": ranks.share_id, "barrier": ranks.barrier}.items():
                    began = time.perf_counter()
                    play()
                    seconds[name] = time.perf_counter() - began
            finally:
                gc.enable()
                server.kill()  # before its ranks go, which it would mourn one by one
        return sum(seconds.values()) if phase == "all together" else seconds[phase]

    return step


@pytest.mark.parametrize("phase", ["join", "id", "barrier", "all together"])
@contenders("gradsync serve")
def test_meeting(compare: Compare, phase: str) -> None:
    size = 64 if compare.disabled else 1024
    compare(f"{size:,} ranks meet: {phase}", meeting, size, phase, ranks=0, rounds=5, warm_up=1)
