"""A simulated rank of PyTorch's TCPStore, which sends the requests of its client.

Source: the wire format is that of torch/csrc/distributed/c10d/TCPStoreBackend.hpp and TCPStore.cpp: a byte for the
query, texts and values after their length in 8 bytes, numbers in native byte order. A rank joins as the client's
constructor connects (VALIDATE, PING), then meets the others as torch.distributed's store-based barrier does: it adds to
a counter, whoever completes it sets a key, and all wait for that key.
"""

from __future__ import annotations

import struct

from simulated_ranks.contenders import BARRIER, GET_ID, JOIN, PUT_ID, UNIQUE_ID

_VALIDATE, _SET, _GET, _ADD, _WAIT, _PING = 0, 1, 3, 4, 6, 13
_MAGIC = 0x3C85F7CE
_NUMBER = struct.Struct("=q")
_NONCE = struct.Struct("=I")
_ANSWER_BYTES = {_PING: _NONCE.size, _ADD: _NUMBER.size, _WAIT: 1, _GET: _NUMBER.size + len(UNIQUE_ID)}


class TCPStoreRank:
    """See SimulatedRank.

    Args:
        rank, world_size: which of how many.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.is_done = False
        self._rank = rank
        self._world_size = world_size
        self._phase = ""
        self._awaited = _PING  # which query's answer comes next
        self._buffer = b""

    def begin(self, phase: str) -> bytes:
        self.is_done = False
        self._phase = phase
        if phase == JOIN:
            self._awaited = _PING
            return bytes([_VALIDATE]) + _NONCE.pack(_MAGIC) + bytes([_PING]) + _NONCE.pack(self._rank)
        if phase == PUT_ID:
            self.is_done = True  # TCPStore does not answer
            return bytes([_SET]) + _text(b"/id") + _text(UNIQUE_ID)
        if phase == GET_ID:
            self._awaited = _GET
            return bytes([_GET]) + _text(b"/id")
        if phase == BARRIER:
            return self._add()
        raise ValueError(phase)

    def hear(self, data: bytes) -> bytes:
        self._buffer += data
        if len(self._buffer) < _ANSWER_BYTES[self._awaited]:
            return b""
        answer, self._buffer = self._buffer, b""
        if self._awaited == _PING:
            return self._add()
        if self._awaited == _ADD:
            return self._wait(is_last=_NUMBER.unpack(answer)[0] == self._world_size)
        self.is_done = True
        return b""

    def heartbeat(self) -> bytes:
        raise NotImplementedError("TCPStore has no heartbeats")

    def _add(self) -> bytes:
        self._awaited = _ADD
        return bytes([_ADD]) + _text(f"/{self._phase} count".encode()) + _NUMBER.pack(1)

    def _wait(self, *, is_last: bool) -> bytes:
        self._awaited = _WAIT
        key = _text(f"/{self._phase} complete".encode())
        tell = bytes([_SET]) + key + _text(b"1") if is_last else b""
        return tell + bytes([_WAIT]) + _NUMBER.pack(1) + key


def _text(data: bytes) -> bytes:
    return _NUMBER.pack(len(data)) + data
