"""A simulated rank of gradsync: the library's own handshake, frames and messages, as its client sends them."""

from __future__ import annotations

import os

from gradsync.machine import machine_identity
from gradsync.rendezvous.frames import THE_WORLD, FrameType, Message
from gradsync.rendezvous.handshake import NONCE_BYTES, ClientHandshake
from gradsync.rendezvous.wire import MAX_FRAME_BYTES, FrameReader, Session
from simulated_ranks.contenders import BARRIER, GET_ID, JOIN, LEAVE, PUT_ID, UNIQUE_ID

_MACHINE = machine_identity()  # a real rank reads it once; here one process is a thousand ranks


class GradsyncRank:
    """See SimulatedRank.

    Args:
        rank, world_size: which of how many.
        secret: the run's.

    Attributes:
        pulses: how many heartbeats the server has answered.
    """

    def __init__(self, rank: int, world_size: int, secret: bytes) -> None:
        self.is_done = False
        self.pulses = 0
        self._rank = rank
        self._world_size = world_size
        self._secret = secret
        self._session: Session | None = None

    def begin(self, phase: str) -> bytes:
        self.is_done = False
        if phase == JOIN:
            self._handshake = ClientHandshake(self._secret, os.urandom(NONCE_BYTES))
            self._reader, self._session = FrameReader(), None
            return self._handshake.hello()
        return self._request(phase)

    def hear(self, data: bytes) -> bytes:
        self._reader.feed(data)
        answer = b""
        while (frame := self._reader.next_frame()) is not None:
            if self._session is None:
                proof, self._session = self._handshake.receive(frame)
                self._reader.limit_bytes = MAX_FRAME_BYTES
                fields = self._rank, self._world_size, _MACHINE, "node", os.getpid()
                answer += proof + self._session.seal(FrameType.JOIN, *fields)
            else:
                self._take(self._session.open(frame))
        return answer

    def heartbeat(self) -> bytes:
        return self._seal(FrameType.HEARTBEAT, {"world": 1000})

    def _request(self, phase: str) -> bytes:
        if phase == PUT_ID:
            return self._seal(FrameType.SET, "id", UNIQUE_ID)
        if phase == GET_ID:
            return self._seal(FrameType.GET, "id", 0)
        if phase == BARRIER:
            return self._seal(FrameType.EXCHANGE, "all ready", None, b"")
        if phase == LEAVE:
            return self._seal(FrameType.LEAVE, THE_WORLD, None, 0)
        raise ValueError(phase)

    def _take(self, message: Message) -> None:
        if message.type is FrameType.PULSE:
            self.pulses += 1
        elif message.type is FrameType.REPLY:
            self.is_done = True
        else:
            raise RuntimeError(f"rank {self._rank}: {message.type.name} {message.fields}")

    def _seal(self, frame_type: FrameType, *fields: object) -> bytes:
        if self._session is None:
            raise RuntimeError(f"rank {self._rank} has not joined")
        return self._session.seal(frame_type, *fields)
