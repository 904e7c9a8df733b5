"""The handshake: both sides prove that they know the secret; nothing of a stranger is read, or reaches the ranks."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gradsync as gs
from gradsync.rendezvous.server import RendezvousServer
from rendezvous.clients import connect, on_each, thread_of, world
from rendezvous.peer import (
    LONGEST_OF_A_STRANGER,
    SECRET,
    VERSION,
    FakeServer,
    Kind,
    Peer,
    accept_join,
    challenge,
    hello,
    joining,
    proof,
    unsigned,
)

ANOTHER = b"another secret, of 32 bytes ...."


@pytest.fixture(scope="module")
def forming():
    """A server at which rank 0 of two waits to join; rank 1 comes at the end, and finds the first generation."""
    with (
        RendezvousServer(2, secret=SECRET) as server,
        thread_of(lambda: connect(server, 0, 2, timeout_seconds=3600)) as waiting,
    ):
        yield server
        with connect(server, 1, 2) as client:
            assert client.generation == 1
            first = waiting()
            on_each([first, client], lambda client: client.barrier())
            first.close()


def ended(peer):
    """What the server still sends before it ends the connection, as bytes."""
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while data := peer.stream.recv(4096):
            said += data
    return said


#: What each says first.
STRANGERS = {
    "garbage": lambda: os.urandom(600),
    "HTTP": lambda: b"GET / HTTP/1.1\r\nHost: node\r\n\r\n",
    "TLS": lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(500),
    "a frame longer than a handshake's": lambda: (LONGEST_OF_A_STRANGER - 3).to_bytes(4, "big"),
    "a very long frame": lambda: (2**31).to_bytes(4, "big"),
    "JOIN at once": lambda: unsigned(Kind.JOIN, 0, b"\x90") + bytes(32),
    "PROOF at once": lambda: unsigned(Kind.PROOF, 1, b"") + bytes(32),
    "HELLO with a MAC": lambda: hello() + os.urandom(32),
    "HELLO that is too short": lambda: unsigned(Kind.HELLO, 0, b"gradsync" + bytes([VERSION]) + bytes(31)) + bytes(32),
    "HELLO of another program": lambda: unsigned(Kind.HELLO, 0, b"GRADSYNC" + bytes([VERSION]) + bytes(32)) + bytes(32),
    "HELLO with another number": lambda: unsigned(Kind.HELLO, 1, hello()[13:]) + bytes(32),
}


@pytest.mark.parametrize("what", STRANGERS)
def test_a_stranger_gets_no_answer(forming, what):
    with Peer(socket.create_connection(("127.0.0.1", int(forming.address.rpartition(":")[2])))) as peer:
        peer.stream.sendall(STRANGERS[what]())
        assert ended(peer) == b""


@pytest.mark.parametrize("what", ["another secret", "the server's proof", "of an earlier connection", "a body"])
def test_a_wrong_proof_ends_the_connection_and_joins_nothing(forming, what):
    earlier = {}

    def keep(step, data):
        earlier[step] = data
        return data

    Peer.of_client(forming.address, alter=keep).stream.close()
    host, _, port = forming.address.rpartition(":")
    with Peer(socket.create_connection((host, int(port)))) as peer:
        said = earlier["hello"][:-32] if what == "of an earlier connection" else hello()
        peer.stream.sendall(said + bytes(32))
        answer = peer.raw_frame()
        ending = unsigned(Kind.PROOF, 1, b"x" if what == "a body" else b"")
        secret = ANOTHER if what == "another secret" else SECRET
        transcript = said + answer[:-32] + ending
        sent = ending + proof(secret, b"client", transcript)
        if what == "the server's proof":
            sent = ending + answer[-32:]
        elif what == "of an earlier connection":
            sent = earlier["proof"]
        peer.begin(secret, transcript, is_server=False)
        with contextlib.suppress(OSError):
            peer.stream.sendall(sent + peer.seal(Kind.JOIN, *joining(1, 2), request=1))
        assert ended(peer) == b""


@settings(max_examples=300)
@given(step=st.sampled_from(["hello", "proof", "message"]), at=st.integers(0, 10**6), by=st.integers(1, 255))
def test_no_altered_transcript_joins(forming, step, at, by):
    def alter(name, data):
        first = 4 if name == "hello" else 0  # behind a HELLO of another length, the server waits for more, as we would
        at_here = first + at % (len(data) - first)
        return data[:at_here] + bytes([data[at_here] ^ by]) + data[at_here + 1 :] if name == step else data

    with Peer.of_client(forming.address, alter=alter) as peer, contextlib.suppress(OSError):
        peer.put("message", peer.seal(Kind.JOIN, *joining(1, 2), request=1))
        peer.stream.shutdown(socket.SHUT_WR)  # where a length has grown, more would have to come
        assert ended(peer) == b""


def test_a_client_with_another_secret_says_so_and_proves_nothing():
    said = []

    def serve(peer):
        transcript = peer.raw_frame()[:-32]
        answer = challenge()
        peer.stream.sendall(answer + proof(ANOTHER, b"server", transcript + answer))
        said.append(ended(peer))

    with FakeServer(serve) as server, pytest.raises(gs.AuthenticationError):
        connect(server.address)
    assert said == [b""]
    with RendezvousServer(1, secret=SECRET) as real:
        with pytest.raises(gs.AuthenticationError):
            connect(real, secret=ANOTHER)
        connect(real).close()


@settings(max_examples=60)
@given(at=st.integers(4, 10**6), by=st.integers(1, 255))
def test_a_client_refuses_an_altered_challenge(at, by):
    def alter(step, data):
        at_here = 4 + at % (len(data) - 4)  # an altered length is a server that does not answer
        return data[:at_here] + bytes([data[at_here] ^ by]) + data[at_here + 1 :] if step == "challenge" else data

    with FakeServer(accept_join, alter) as server, pytest.raises(gs.RendezvousError) as raised:
        connect(server.address)
    assert not isinstance(raised.value, gs.RendezvousTimeout)


@pytest.mark.parametrize("version", [1, VERSION - 1, VERSION + 1])
def test_both_sides_notice_another_version(forming, version):
    """A server of ours sends its version where each version has looked; a client of ours looks there."""
    with Peer(socket.create_connection(("127.0.0.1", int(forming.address.rpartition(":")[2])))) as peer:
        peer.stream.sendall(hello(version) + bytes(32))
        assert peer.raw_frame()[13:22] == b"gradsync" + bytes([VERSION])
    with FakeServer(lambda peer: peer.answer_hello(version=version)) as server:
        with pytest.raises(gs.RendezvousError, match="version") as raised:
            connect(server.address)
        assert not isinstance(raised.value, gs.AuthenticationError)


def test_another_service_at_the_address_is_an_error_at_once():
    def serve(peer):
        peer.stream.sendall(b"SSH-2.0-OpenSSH_9.6\r\n" * 9)
        ended(peer)

    with FakeServer(serve) as server, pytest.raises(gs.RendezvousError) as raised:
        connect(server.address)
    assert not isinstance(raised.value, gs.RendezvousTimeout)


@pytest.mark.slow  # five seconds
def test_a_service_that_ends_each_connection_is_an_error_before_the_deadline():
    with FakeServer(lambda peer: None) as server, pytest.raises(gs.RendezvousError) as raised:
        connect(server.address)
    assert not isinstance(raised.value, gs.RendezvousTimeout)


def test_a_client_whose_connection_is_dropped_before_it_has_joined_comes_again():
    """A server that is flooded by strangers drops the oldest."""
    served: list[Peer] = []

    def serve(peer):
        served.append(peer)
        if len(served) == 2:
            peer.answer_hello()
        elif len(served) > 2:
            accept_join(peer)
            peer.rest()

    with FakeServer(serve) as server:
        connect(server.address).close()
    assert len(served) == 3


@pytest.mark.parametrize("secret", [b"", b"15 bytes are too", "sixteen letters!!", None])
def test_a_secret_is_sixteen_bytes_or_more_on_both_sides(secret):
    secret = secret[:15] if isinstance(secret, bytes) else secret
    for host in ("127.0.0.1", "0.0.0.0"):
        with pytest.raises(gs.InvalidArgument):
            RendezvousServer(1, secret=secret, host=host)
    with pytest.raises(gs.InvalidArgument):
        connect("127.0.0.1:9", secret=secret)


def test_secrets_and_values_are_in_no_repr_or_error():
    value = b"capability" * 12
    with world(2) as clients:
        clients[0].set("id", value)
        with pytest.raises(gs.RendezvousTimeout) as raised:
            clients[1].get("other", timeout_seconds=0.01)
        shown = repr(clients[0]) + repr(raised.value) + repr(pickle.dumps(raised.value))
        for text in ("capability", SECRET.hex(), repr(SECRET)):
            assert text not in shown


LOOKING = """
import os, sys
from pathlib import Path
import gradsync as gs
from gradsync import environment  # how a rank finds its secret, which no public name gives

def has(form):
    files = [file for name in ("cmdline", "environ") for file in Path("/proc").glob(f"[0-9]*/{name}")]
    return [str(file) for file in files if form in read(file)]

def read(file):
    try:
        return file.read_bytes()
    except OSError:
        return b""

with gs.init_process_group("shm") as comm:
    secret = environment.read_secret()
    assert len(secret) == 32
    assert has(os.environ["CANARY"].encode()), "this look would not find it"
    print("found", has(secret.hex().encode()) + has(secret) + has(repr(secret).encode()))
    Path(sys.argv[1], str(comm.rank)).write_bytes(secret)
"""


def test_a_secret_is_in_no_argument_variable_or_log(cli, script, tmp_path):
    environment = {"GRADSYNC_LOG": "debug", "CANARY": os.urandom(16).hex()}
    result = cli("run", "-n", 2, script(LOOKING), tmp_path, environment=environment)
    assert result.code == 0, result.err
    assert result.out.count("found []") == 2
    secret = (tmp_path / "0").read_bytes()
    assert secret == (tmp_path / "1").read_bytes()
    assert "backend shm" in result.err  # the log was on
    for form in (secret.hex(), repr(secret), str(list(secret))):
        assert form not in result.out + result.err


def test_no_pickle_at_this_port():
    """Nor anything else that makes objects of bytes is even imported by server and client."""
    code = (
        "import sys, gradsync.rendezvous.client, gradsync.rendezvous.server\n"
        "print(*{'pickle', 'shelve', 'dill', 'cloudpickle'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"
