"""A peer that speaks the rendezvous' wire format by itself, for what a rank's own client and server never send.

This file alone among the tests knows the format. A new version of the protocol changes it, and no test.

    frame      length (4 bytes, of what follows), kind (1), sequence (8), body, MAC (32, HMAC-SHA256)
    HELLO      "gradsync", version, the client's nonce; the MAC is zeros                   client to server
    CHALLENGE  "gradsync", version, the server's nonce, run id; the server's proof
    PROOF      empty; the client's proof
    then       a msgpack array under the key of its direction: the number of a request (0: there will be no answer),
               and the fields. Those of a REPLY begin with its status, and whether it is the last one to this request.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import msgpack

SECRET = bytes(range(32))
VERSION = 15
LONGEST_FRAME, LONGEST_OF_A_STRANGER = 64 * 1024, 512
PATIENCE_SECONDS = 60.0
_HEADER = struct.Struct("!IBQ")


class Kind(enum.IntEnum):
    HELLO, CHALLENGE, PROOF = 1, 2, 3
    JOIN, SET, GET, DELETE, EXCHANGE, LEAVE, FAIL, BEAT, WAITING, STATUS = range(16, 26)
    REPLY, FAILED, LEFT, ASK = range(64, 68)


class Status(enum.IntEnum):
    OK, INVALID, REFUSED, TIMED_OUT, FAILED = range(5)


REQUESTS = Kind.JOIN, Kind.SET, Kind.GET, Kind.DELETE, Kind.EXCHANGE  # those that are answered


class Message(NamedTuple):
    kind: int
    request: int
    fields: list[Any]

    @property
    def status(self) -> int:
        assert self.kind == Kind.REPLY
        return self.fields[0]

    @property
    def values(self) -> list[Any]:
        assert self.kind == Kind.REPLY
        return self.fields[2:]


def unsigned(kind: int, sequence: int, body: bytes) -> bytes:
    """A frame without its MAC."""
    return _HEADER.pack(len(body) + _HEADER.size - 4 + 32, kind, sequence) + body


def hello(version: int = VERSION) -> bytes:
    return unsigned(Kind.HELLO, 0, b"gradsync" + bytes([version]) + os.urandom(32))


def challenge(version: int = VERSION) -> bytes:
    body = b"gradsync" + bytes([version]) + os.urandom(32) + b"run"
    return unsigned(Kind.CHALLENGE, 0, body)


def joining(
    rank: int = 0,
    size: int = 1,
    *,
    world: str = "",
    last: int | None = None,
    min_ranks: int = 0,
    machine: str = "machine",
    pid: int = 0,
    seconds: float = 60.0,
) -> tuple[Any, ...]:
    """The fields of a JOIN; from another machine, unless it is named."""
    return world, rank, size, last, min_ranks, machine, "host", pid, int(seconds * 1000)


def proof(secret: bytes, who: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret, b"gradsync 1 %b proof\0" % who + transcript, "sha256")


class Peer:
    """One end of a connection.

    Args:
        stream: the connected socket.
        alter: a function of the name of a step and its bytes that gives what is sent in their place.
    """

    def __init__(self, stream: socket.socket, alter: Callable[[str, bytes], bytes] = lambda _, data: data) -> None:
        stream.settimeout(PATIENCE_SECONDS)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.stream = stream
        self._alter = alter
        self._keys = b"", b""  # to send, to receive
        self._sequences = [0, 0]
        self._requests = 0

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()

    @classmethod
    def of_client(cls, address: str, secret: bytes = SECRET, *, version: int = VERSION, alter: Any = None) -> Peer:
        """Connects, and proves that it knows the secret."""
        peer = cls(socket.create_connection(_parse(address)), *([alter] if alter else []))
        with suppress(OSError):  # the other side has ended it already: the test finds that
            said = hello(version)
            peer.put("hello", said + bytes(32))
            answer = peer.raw_frame()
            transcript = said + answer[:-32]
            ending = unsigned(Kind.PROOF, 1, b"")
            transcript += ending
            peer.put("proof", ending + proof(secret, b"client", transcript))
            peer.begin(secret, transcript, is_server=False)
        return peer

    def answer_hello(self, secret: bytes = SECRET, *, version: int = VERSION) -> None:
        """The server's side of the handshake."""
        transcript = self.raw_frame()[:-32]
        said = challenge(version)
        transcript += said
        self.put("challenge", said + proof(secret, b"server", transcript))
        ending = self.raw_frame()
        if not ending:
            raise EOFError("the client has ended the connection")
        transcript += ending[:-32]
        assert ending[-32:] == proof(secret, b"client", transcript)
        self.begin(secret, transcript, is_server=True)

    def begin(self, secret: bytes, transcript: bytes, *, is_server: bool) -> None:
        digest = hashlib.sha256(transcript).digest()
        ways = b"client to server", b"server to client"
        up, down = (hmac.digest(secret, b"gradsync 1 %b\0" % way + digest, "sha256") for way in ways)
        self._keys = (down, up) if is_server else (up, down)
        self._sequences = [1, 2] if is_server else [2, 1]

    def seal(self, kind: int, *fields: Any, request: int = 0, body: bytes | None = None) -> bytes:
        """The next frame; `body` in place of the request and the fields is for what is no array of them."""
        body = msgpack.packb((request, *fields)) if body is None else body
        data = unsigned(kind, self._sequences[0], body)
        self._sequences[0] += 1
        return data + hmac.digest(self._keys[0], data, "sha256")

    def put(self, step: str, data: bytes) -> None:
        self.stream.sendall(self._alter(step, data))

    def send(self, kind: int, *fields: Any, request: int | None = None) -> int:
        """Sends a message, and gives the number of its request."""
        if request is None:
            self._requests += kind in REQUESTS
            request = self._requests if kind in REQUESTS else 0
        self.put("message", self.seal(kind, *fields, request=request))
        return request

    def reply(self, asked: Message, *values: Any, status: int = Status.OK, is_last: bool = True) -> None:
        """Answers a client's request."""
        self.send(Kind.REPLY, status, is_last, *values, request=asked.request)

    def join(self, rank: int = 0, size: int = 1, **others: Any) -> Message:
        """Joins, see `joining`, and gives the answer."""
        return self.ask(Kind.JOIN, *joining(rank, size, **others))

    def ask(self, kind: int, *fields: Any) -> Message:
        request = self.send(kind, *fields)
        answer = self.answer()
        assert answer.kind == Kind.FAILED or answer.request == request
        return answer

    def raw_frame(self) -> bytes:
        """The next frame of the stream; b"" at its end."""
        length = self._exactly(4)
        return length and length + self._exactly(int.from_bytes(length, "big"))

    def receive(self) -> Message | None:
        """The next message, or None at the end of the stream."""
        data = self.raw_frame()
        if not data:
            return None
        assert hmac.digest(self._keys[1], data[:-32], "sha256") == data[-32:]
        _, kind, sequence = _HEADER.unpack_from(data)
        assert sequence == self._sequences[1]
        self._sequences[1] += 1
        request, *fields = msgpack.unpackb(data[_HEADER.size : -32])
        return Message(kind, request, fields)

    def answer(self) -> Message:
        """The next message that says more than that a request is known and waits."""
        while (message := self.receive()) is not None:
            if not _only_accepts(message):
                return message
        raise EOFError("the connection has ended")

    def rest(self) -> list[Message]:
        """What still comes until the other side ends the connection, or leaves, but for what `answer` leaves out."""
        messages: list[Message] = []
        with suppress(ConnectionResetError):
            while (message := self.receive()) is not None and message.kind != Kind.LEAVE:
                messages.append(message)
        return [message for message in messages if not _only_accepts(message) and message.kind != Kind.BEAT]

    def leave(self) -> None:
        """Leaves the world, and waits until the server has ended the connection."""
        self.send(Kind.LEAVE, "", None, 0)
        assert self.rest() == []

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.stream.recv(size - len(data))
            if not more:
                return b""
            data += more
        return data


class FakeServer:
    """Listens, and does in a thread for each connection what a function of the `Peer` says.

    Attributes:
        errors: what the function raised, but for the ends of connections.
    """

    def __init__(self, serve: Callable[[Peer], None], alter: Any = None) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.errors: list[BaseException] = []
        self._serve, self._alter = serve, alter
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(PATIENCE_SECONDS)
        self._listener.close()
        assert kind is not None or not self.errors, self.errors

    def _run(self) -> None:
        while True:
            try:
                stream, _ = self._listener.accept()
            except OSError:
                return
            with Peer(stream, *([self._alter] if self._alter else [])) as peer:
                try:
                    self._serve(peer)
                except (EOFError, ConnectionError):
                    pass
                except BaseException as error:
                    self.errors.append(error)


def accept_join(peer: Peer) -> None:
    """Answers HELLO and JOIN as a server of one rank."""
    peer.answer_hello()
    asked = peer.answer()
    assert asked.kind == Kind.JOIN
    peer.reply(asked, [], is_last=False)
    peer.reply(asked, 1, [0])


def _only_accepts(message: Message) -> bool:
    return message.kind == Kind.REPLY and message.fields == [Status.OK, False, []]


def _parse(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
