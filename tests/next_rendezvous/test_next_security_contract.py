"""What docs/security.md promises and no other test shows: where secrets are not, what strangers cannot make us do."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import gradsync
from gradsync._next.rendezvous import server as server_module
from gradsync._next.rendezvous import wire
from gradsync._next.rendezvous.frames import (
    NEXT_GENERATION,
    PROTOCOL_VERSION,
    THE_WORLD,
    Close,
    FrameType,
    Message,
    Received,
    Send,
)
from gradsync._next.rendezvous.handshake import NONCE_BYTES, RANDOM_BYTES, ClientHandshake, ServerHandshake
from gradsync._next.rendezvous.protocol import RendezvousCore
from gradsync._next.rendezvous.server import RendezvousServer, ServerConnection
from gradsync._next.rendezvous.wire import FrameError, pack_frame
from gradsync.errors import InvalidArgument

SECRET = bytes(range(32))


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("secret", [b"", b"short", None])
def test_no_server_without_a_secret_on_any_interface(host: str, secret: bytes) -> None:
    with pytest.raises(InvalidArgument, match="secret of at least 16 bytes"):
        RendezvousServer(1, secret=secret, host=host)


def test_loopback_unless_another_interface_is_named() -> None:
    with RendezvousServer(1, secret=SECRET) as server:
        assert server.address.startswith("127.0.0.1:")
    with pytest.raises(InvalidArgument):  # what stands for all interfaces to `socket.bind`
        RendezvousServer(1, secret=SECRET, host="")


def test_nothing_is_decoded_before_its_mac_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ServerHandshake(SECRET, "run", bytes(NONCE_BYTES))
    client = ClientHandshake(SECRET, bytes(RANDOM_BYTES))
    proof, upper = client.receive(frame_of(server.receive(frame_of(client.hello()))))
    lower = server.receive(frame_of(proof))
    sealed = upper.seal(FrameType.LEAVE, THE_WORLD, None, 0)
    decoded = []
    monkeypatch.setattr(wire, "_decode", lambda body: decoded.append(body) or ("", None, 0))
    with pytest.raises(FrameError, match="MAC"):
        lower.open(frame_of(sealed[:-1] + bytes([sealed[-1] ^ 1])))
    assert decoded == []
    lower.open(frame_of(sealed))
    assert len(decoded) == 1


def frame_of(data: bytes) -> wire.Frame:
    reader = wire.FrameReader()
    reader.feed(data)
    return reader.next_frame()


def test_no_pickle_on_this_port() -> None:
    """Nor anything else that makes objects of bytes, in what the server and its clients are made of."""
    folder = Path(gradsync.__file__).parent / "_next" / "rendezvous"
    code = (
        "import sys, gradsync._next.rendezvous.client, gradsync._next.rendezvous.server\n"
        "print(*(name for name in ('pickle', 'shelve', 'dill', 'cloudpickle') if name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"
    for path in folder.glob("*.py"):
        assert not any(word in path.read_text() for word in ("pickle", "marshal.", "eval(", "exec(")), path


def test_a_connection_takes_no_more_than_its_limit_before_and_after_authentication() -> None:
    for limit, is_member in ((512, False), (64 * 1024, True)):
        reader = wire.FrameReader()
        if is_member:
            reader.limit_bytes = wire.MAX_FRAME_BYTES
        reader.feed((limit - 3).to_bytes(4, "big"))
        with pytest.raises(FrameError, match=f"to {limit} bytes, the peer announced {limit + 1}"):
            reader.next_frame()
        reader = wire.FrameReader()
        reader.limit_bytes = limit
        reader.feed((limit - 4).to_bytes(4, "big"))
        assert reader.next_frame() is None


def test_strangers_are_bounded_and_cost_no_threads() -> None:
    ranks = 3
    with RendezvousServer(ranks, secret=SECRET) as server, contextlib.ExitStack() as stack:
        host, port = server.address.split(":")
        threads = set(threading.enumerate())
        streams = [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
            for _ in range(ranks + server_module.MAX_STRANGERS + 20)
        ]
        for stream in streams[:20]:  # the oldest go first
            assert stream.recv(1) == b""
        assert 60 < len(server._loop._strangers) <= ranks + server_module.MAX_STRANGERS
        assert set(threading.enumerate()) <= threads


def test_a_deadline_is_absolute_however_often_a_stranger_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HANDSHAKE_SECONDS", 3.0)
    hello = ClientHandshake(SECRET, bytes(RANDOM_BYTES)).hello()
    with RendezvousServer(1, secret=SECRET) as server:
        host, port = server.address.split(":")
        with socket.create_connection((host, int(port)), timeout=0.1) as stream:
            said = 0
            with pytest.raises((ConnectionError, StopIteration)):
                for byte in hello:  # 9 s of bytes, each a tenth of a second after the last
                    stream.sendall(bytes([byte]))
                    said += 1
                    with contextlib.suppress(TimeoutError):
                        next(iter(stream.recv(1)))
        assert 1 < said < len(hello)


def test_an_id_is_given_only_when_every_rank_has_authenticated_and_joined() -> None:
    core = RendezvousCore(2, machine="m", pid=1)
    join = Message(FrameType.JOIN, 2, (PROTOCOL_VERSION, 0, 2, NEXT_GENERATION))
    core.handle(0.0, Received(1, join))
    for early in (
        Message(FrameType.SET, 3, ("id", bytes(128), True)),
        Message(FrameType.GET, 4, ("id", 0)),
    ):
        [answer] = core.handle(0.0, Received(1, early))
        assert isinstance(answer, Send)
        assert (answer.type, answer.fields[2]) == (
            FrameType.REFUSED,
            "this connection has not joined a complete generation yet",
        )
    [closed] = core.handle(0.0, Received(2, Message(FrameType.GET, 2, ("id", 0))))
    assert closed == Close(2)  # who has not joined is not even answered


def test_an_id_is_in_no_repr() -> None:
    unique_id = b"capability" * 12 + bytes(8)
    message = Message(FrameType.SET, 3, ("id", unique_id, True))
    for thing in (message, Received(1, message), Send(1, FrameType.REPLY, (3, unique_id))):
        assert "capability" not in repr(thing)
    assert "capability" not in repr(wire.Frame(FrameType.SET, 3, pack_frame(FrameType.SET, 3, unique_id)))


def test_a_stranger_s_connection_reads_no_more_than_a_handshake_at_once() -> None:
    asked = []

    class Stream:
        def recv(self, size: int) -> bytes:
            asked.append(size)
            return b"\0"

    connection = ServerConnection(1, Stream(), ServerHandshake(SECRET, "run", bytes(NONCE_BYTES)), 0.0)
    assert connection.receive() == []
    assert asked == [512]


def test_a_session_is_for_the_generation_that_its_hello_has_named() -> None:
    """The keys are bound to it, and JOIN has to repeat it: a rank of another generation cannot come in."""
    for joined, is_taken in ((5, True), (6, False), (NEXT_GENERATION, False)):
        client = ClientHandshake(SECRET, bytes(RANDOM_BYTES), 5)
        left, right = socket.socketpair()
        with left, right:
            connection = ServerConnection(1, right, ServerHandshake(SECRET, "run", bytes(NONCE_BYTES)), 0.0)
            left.sendall(client.hello())
            assert connection.receive() == []
            connection.flush()
            proof, session = client.receive(frame_of(left.recv(512)))
            left.sendall(proof + session.seal(FrameType.JOIN, PROTOCOL_VERSION, 0, 2, joined))
            if is_taken:
                [message] = connection.receive()
                assert message.fields[3] == 5
            else:
                with pytest.raises(FrameError, match=f"JOIN names generation {joined}, HELLO has named 5"):
                    connection.receive()
