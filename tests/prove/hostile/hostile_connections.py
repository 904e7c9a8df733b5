"""Strangers at the port of a rendezvous server: each connects and misbehaves in its own way. Run by `hostile.py`.

python tests/prove/hostile/hostile_connections.py HOST PORT COUNT   # prints as JSON what became of them
"""

from __future__ import annotations

import contextlib
import json
import random
import selectors
import socket
import sys
import time
from collections import Counter

from gradsync.rendezvous.frames import FrameType
from gradsync.rendezvous.handshake import NONCE_BYTES, ClientHandshake
from gradsync.rendezvous.wire import MAC_BYTES, pack_frame

_OPEN_AT_ONCE = 400
_NEW_EACH_TURN = 25
_SLOW_BYTE_SECONDS = 0.05
_ENDED_WITHIN_SECONDS = 20.0  # far above the server's deadline of 5 s

DROP = "connect and drop"
SLOW = "slow bytes"
WRONG_PROOF = "wrong proof"
KINDS = (
    "garbage",
    "oversized length",
    SLOW,
    "never speaks",
    DROP,
    "HELLO, then silence",
    WRONG_PROOF,
    "HTTP request",
    "TLS client",
    "large write",
)


class Strangers:
    """Makes so many hostile connections, of each kind in turn, some hundreds open at once."""

    def __init__(self, address: tuple[str, int], count: int, rng: random.Random) -> None:
        self._address = address
        self._count = count
        self._rng = rng
        self._selector = selectors.DefaultSelector()
        self._slow: dict[socket.socket, bytes] = {}  # and what they have still to say
        self.begun: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()  # by the server, or by a stranger that only drops in
        self.refused = 0  # at connecting: the server's queue was full

    def run(self) -> None:
        """Connects them all, and waits until the server has got rid of each."""
        made, slow_at, deadline = 0, 0.0, float("inf")
        while (made < self._count or self._selector.get_map()) and time.monotonic() < deadline:
            for _ in range(min(_NEW_EACH_TURN, self._count - made, _OPEN_AT_ONCE - len(self._selector.get_map()))):
                self._begin(KINDS[made % len(KINDS)])
                made += 1
            if made == self._count and deadline == float("inf"):
                deadline = time.monotonic() + _ENDED_WITHIN_SECONDS
            if time.monotonic() >= slow_at:
                slow_at = time.monotonic() + _SLOW_BYTE_SECONDS
                self._say_slow_bytes()
            for key, _ in self._selector.select(0.002 if made < self._count else _SLOW_BYTE_SECONDS):
                self._hear(key.fileobj, key.data)  # type: ignore[arg-type]

    def _begin(self, kind: str) -> None:
        self.begun[kind] += 1
        try:
            stream = socket.create_connection(self._address, timeout=10)
        except OSError:
            self.refused += 1
            self.ended[kind] += 1
            return
        stream.setblocking(False)
        if kind == DROP:
            stream.close()
            self.ended[kind] += 1
            return
        self._selector.register(stream, selectors.EVENT_READ, kind)
        text = self._first_words(kind)
        if kind == SLOW:
            self._slow[stream] = text
        else:
            with contextlib.suppress(OSError):  # it has been dropped already: others came
                stream.send(text)

    def _first_words(self, kind: str) -> bytes:
        hello = ClientHandshake(bytes(32), self._rng.randbytes(NONCE_BYTES)).hello()
        return {
            "garbage": self._rng.randbytes(self._rng.randint(1, 2000)),
            "oversized length": (2**31).to_bytes(4, "big"),
            "HTTP request": b"GET / HTTP/1.1\r\nHost: node\r\n\r\n",
            "TLS client": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + self._rng.randbytes(500),
            "large write": hello + self._rng.randbytes(100_000),
            "never speaks": b"",
        }.get(kind, hello)

    def _say_slow_bytes(self) -> None:
        for stream, text in list(self._slow.items()):
            with contextlib.suppress(OSError):
                stream.send(text[:1])
            self._slow[stream] = text[1:] or text

    def _hear(self, stream: socket.socket, kind: str) -> None:
        try:
            data = stream.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data and kind == WRONG_PROOF:
            with contextlib.suppress(OSError):
                stream.send(pack_frame(FrameType.PROOF, 1, b"") + self._rng.randbytes(MAC_BYTES))
        if not data:
            self._selector.unregister(stream)
            self._slow.pop(stream, None)
            stream.close()
            self.ended[kind] += 1


def main() -> None:
    host, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    strangers = Strangers((host, port), count, random.Random(count))
    began = time.monotonic()
    strangers.run()
    told = {"begun": strangers.begun, "ended": strangers.ended, "refused": strangers.refused}
    print(json.dumps({**told, "seconds": time.monotonic() - began}))


if __name__ == "__main__":
    main()
