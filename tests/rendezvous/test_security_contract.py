"""What docs/security.md promises and no other test shows: where secrets are not, what strangers cannot make us do."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import gradsync
from gradsync.errors import InvalidArgument
from gradsync.rendezvous import server as server_module
from gradsync.rendezvous import wire
from gradsync.rendezvous.client import RendezvousClient
from gradsync.rendezvous.frames import (
    THE_WORLD,
    Close,
    FrameType,
    Message,
    Received,
    Send,
)
from gradsync.rendezvous.handshake import NONCE_BYTES, ClientHandshake, ServerHandshake
from gradsync.rendezvous.protocol import RendezvousCore
from gradsync.rendezvous.server import RendezvousServer, ServerConnection
from gradsync.rendezvous.wire import FrameError, pack_frame

SECRET = bytes(range(32))

LOOKING = """
import os, sys
from pathlib import Path
import gradsync as gs
from gradsync import environment

def told_to_others(secret):
    forms = (secret, secret.hex().encode(), repr(secret).encode())
    for process in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            try:
                text = (process / name).read_bytes()
            except OSError:
                continue
            if any(form in text for form in forms):
                yield f"{process}/{name}"

with gs.init_process_group("shm") as comm:
    secret = environment.take_secret()
    canary = bytes.fromhex(os.environ["CANARY"])  # that this look would find it
    print("found", list(told_to_others(secret)), len(list(told_to_others(canary))) > 0, len(secret))
    Path(sys.argv[1], f"{comm.rank}").write_bytes(secret)
"""


def test_a_secret_is_in_no_argument_variable_or_log(tmp_path: Path) -> None:
    script = tmp_path / "looking.py"
    script.write_text(LOOKING)
    done = subprocess.run(
        [sys.executable, "-m", "gradsync", "run", "-n", "2", str(script), str(tmp_path)],
        env=os.environ | {"GRADSYNC_LOG": "debug", "CANARY": secrets.token_hex(32)},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert sorted(line for line in done.stdout.splitlines() if "found" in line) == [
        f"[rank {rank}] found [] True 32" for rank in range(2)
    ]
    secret = (tmp_path / "0").read_bytes()
    assert secret == (tmp_path / "1").read_bytes()
    assert "rank 0/2: backend shm" in done.stderr  # the log was on
    for form in (secret.hex(), repr(secret), str(list(secret))):
        assert form not in done.stdout + done.stderr


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


def test_a_secret_may_come_by_standard_input() -> None:
    command = [sys.executable, "-m", "gradsync", "serve", "--world-size", "1", "--secret-file", "-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(SECRET.hex() + "\n")
        server.stdin.flush()
        address = server.stdout.readline().strip()
        with RendezvousClient.connect(address, secret=SECRET, rank=0, world_size=1, timeout_seconds=60) as client:
            assert client.generation == 1
        server.terminate()
        assert server.wait(60) == 0


def test_what_follows_the_secret_on_standard_input_is_left_to_others() -> None:
    code = "from gradsync.environment import read_secret_option as read; print(read('-').hex(), input())"
    told = subprocess.run(
        [sys.executable, "-c", code], input=f"{SECRET.hex()}\nthe rest\n", capture_output=True, text=True, check=True
    )
    assert told.stdout == f"{SECRET.hex()} the rest\n"
    refused = subprocess.run([sys.executable, "-c", code], input="", capture_output=True, text=True, check=False)
    assert "standard input needs to contain a secret" in refused.stderr
    closed = ["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-c", code]
    refused = subprocess.run(closed, capture_output=True, text=True, check=False)
    assert "InvalidArgument: the secret cannot be read from standard input" in refused.stderr


def test_nothing_is_decoded_before_its_mac_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ServerHandshake(SECRET, "run", bytes(NONCE_BYTES))
    client = ClientHandshake(SECRET, bytes(NONCE_BYTES))
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
    folder = Path(gradsync.__file__).parent / "rendezvous"
    code = (
        "import sys, gradsync.rendezvous.client, gradsync.rendezvous.server\n"
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
            for _ in range(ranks + server_module.MAX_UNAUTHENTICATED + 20)
        ]
        for stream in streams[:20]:  # the oldest go first
            assert stream.recv(1) == b""
        assert 60 < len(server._unauthenticated) <= ranks + server_module.MAX_UNAUTHENTICATED
        assert set(threading.enumerate()) <= threads


def test_an_id_is_given_only_when_every_rank_has_authenticated_and_joined() -> None:
    core = RendezvousCore(2, machine="m")
    join = Message(FrameType.JOIN, 2, (0, 2, "m", "node7", 7))
    core.handle(0.0, Received(1, join))
    for early in (
        Message(FrameType.SET, 3, ("id", bytes(128))),
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
    message = Message(FrameType.SET, 3, ("id", unique_id))
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
