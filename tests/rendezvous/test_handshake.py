"""The handshake: both sides agree, or refuse; no altered transcript is accepted."""

from __future__ import annotations

import random

import pytest

from gradsync.errors import AuthenticationError, InvalidArgument, RendezvousError
from gradsync.rendezvous.frames import PROTOCOL_VERSION, FrameType
from gradsync.rendezvous.handshake import (
    MAX_RUN_ID_BYTES,
    ClientHandshake,
    ServerHandshake,
    ServerProcess,
    check_secret,
)
from gradsync.rendezvous.wire import MAX_HANDSHAKE_FRAME_BYTES, Frame, FrameError, FrameReader, Session

SECRET = b"s" * 32


def cut(data: bytes) -> Frame:
    reader = FrameReader()
    reader.feed(data)
    frame = reader.next_frame()
    if frame is None:
        raise FrameError("incomplete")
    return frame


def shake(
    client_secret: bytes = SECRET, server_secret: bytes = SECRET, run_id: str = "run", mutate=None
) -> tuple[Session, Session]:
    """Runs a handshake; `mutate(step, data)` may alter what travels at steps 0, 1 and 2."""
    change = mutate or (lambda step, data: data)
    client = ClientHandshake(client_secret, b"c" * 32)
    server = ServerHandshake(server_secret, run_id, b"n" * 32)
    challenge = server.receive(cut(change(0, client.hello())))
    proof, client_session = client.receive(cut(change(1, challenge)))
    server_session = server.receive(cut(change(2, proof)))
    assert isinstance(server_session, Session)
    return client_session, server_session


def test_both_sides_agree_on_the_session() -> None:
    client, server = shake(run_id="r" * MAX_RUN_ID_BYTES)
    assert server.open(cut(client.seal(FrameType.LEAVE, "", None, 0))).type is FrameType.LEAVE
    assert client.open(cut(server.seal(FrameType.REPLY, 2, b"5"))).fields == (2, b"5")


def test_client_with_another_secret_finds_out_by_itself() -> None:
    with pytest.raises(AuthenticationError, match=r"'run'.*secret here is wrong"):
        shake(client_secret=b"x" * 32)


def test_sessions_of_two_runs_do_not_mix() -> None:
    client, _ = shake(run_id="one")
    _, server = shake(run_id="two")
    with pytest.raises(FrameError, match="MAC"):
        server.open(cut(client.seal(FrameType.LEAVE, "", None, 0)))


def test_every_mutated_transcript_is_refused() -> None:
    rng = random.Random(11)
    for trial in range(6000):
        target = trial % 3

        def mutate(step: int, data: bytes, target: int = target) -> bytes:
            if step != target:
                return data
            position = rng.randrange(len(data))
            return data[:position] + bytes([data[position] ^ rng.randint(1, 255)]) + data[position + 1 :]

        with pytest.raises(RendezvousError):
            shake(mutate=mutate)


def test_proof_reflected_from_the_challenge_is_refused() -> None:
    server = ServerHandshake(SECRET, "run", b"n" * 32)
    challenge = server.receive(cut(ClientHandshake(SECRET, b"c" * 32).hello()))
    assert isinstance(challenge, bytes)
    reflected = cut(challenge)
    with pytest.raises(FrameError):
        server.receive(reflected)


def test_proof_of_an_earlier_connection_is_refused() -> None:
    client = ClientHandshake(SECRET, b"c" * 32)
    old = ServerHandshake(SECRET, "run", b"1" * 32).receive(cut(client.hello()))
    assert isinstance(old, bytes)
    old_proof, _ = client.receive(cut(old))
    server = ServerHandshake(SECRET, "run", b"2" * 32)
    server.receive(cut(client.hello()))
    with pytest.raises(AuthenticationError, match="the client does not know"):
        server.receive(cut(old_proof))


def test_longest_challenge_fits_before_authentication() -> None:
    server = ServerHandshake(SECRET, "r" * MAX_RUN_ID_BYTES, b"n" * 32)
    challenge = server.receive(cut(ClientHandshake(SECRET, b"c" * 32).hello()))
    assert isinstance(challenge, bytes)
    assert len(challenge) <= MAX_HANDSHAKE_FRAME_BYTES


# Recorded frames of older versions: a rank's HELLO and a server's CHALLENGE. Up to version 7 all sent version 1.
OLD_FRAMES = {
    1: (
        "000000520100000000000000006772616473796e6301" + "63" * 32 + "00" * 32,
        "000000550200000000000000006772616473796e6301" + "6e" * 32 + b"run".hex() + "00" * 32,
    ),
    10: (
        "000000520100000000000000006772616473796e630a" + "00" * 8 + "63" * 24 + "00" * 32,
        "000000610200000000000000006772616473796e630a"
        + "6e" * 32
        + "bc020a35b7f9cb1300000007"
        + b"run".hex()
        + "d80cdea91fda7afd7c77b233499f46d5d8102d7ae564d69f47ce888028425402",
    ),
    11: (
        "000000520100000000000000006772616473796e630b" + "00" * 8 + "63" * 24 + "00" * 32,
        "000000610200000000000000006772616473796e630b"
        + "6e" * 32
        + "bc020a35b7f9cb1300000007"
        + b"run".hex()
        + "5976c36930de95c1138dd49dbb45c0a317dadf0f9f7161676c5aa2517eea9d20",
    ),
    12: (
        "000000520100000000000000006772616473796e630c" + "00" * 8 + "63" * 24 + "00" * 32,
        "000000610200000000000000006772616473796e630c"
        + "6e" * 32
        + "bc020a35b7f9cb1300000007"
        + b"run".hex()
        + "a1d2533a373e48ba4ee6d6abaae6d4001c0fc94ae9b71bc1aa3b7d06abdda306",
    ),
    13: (
        "000000520100000000000000006772616473796e630d" + "00" * 8 + "63" * 24 + "00" * 32,
        "000000610200000000000000006772616473796e630d"
        + "6e" * 32
        + "bc020a35b7f9cb1300000007"
        + b"run".hex()
        + "89b31d5863d0ef2c23efbf501d598b3aeb301bafb8a702a6efdec2a3cb813632",
    ),
}


@pytest.mark.parametrize("version", OLD_FRAMES)
def test_versions_that_do_not_fit_are_told_apart_in_the_handshake(version: int) -> None:
    """The older side raises that: it looks at the byte behind "gradsync", and at nothing after it."""
    old_hello, old_challenge = OLD_FRAMES[version]
    server = ServerHandshake(SECRET, "run", b"n" * 32, ServerProcess.of("machine", 7))
    challenge = server.receive(cut(bytes.fromhex(old_hello)))
    assert isinstance(challenge, bytes)
    body = cut(challenge).body
    assert body[:9] == b"gradsync" + bytes([PROTOCOL_VERSION])
    assert len(body) - 41 <= MAX_RUN_ID_BYTES  # the old side measures this before it reads the version
    with pytest.raises(
        RendezvousError, match=f"speaks protocol version {version}, this side version {PROTOCOL_VERSION}; run the same"
    ):
        ClientHandshake(SECRET, b"c" * 32).receive(cut(bytes.fromhex(old_challenge)))


@pytest.mark.parametrize("machine", ["", "boot pid:[1]"])
def test_the_client_learns_which_process_the_server_is(machine: str) -> None:
    client = ClientHandshake(SECRET, b"c" * 32)
    server = ServerHandshake(SECRET, "run", b"n" * 32, ServerProcess.of(machine, 4711))
    challenge = server.receive(cut(client.hello()))
    assert isinstance(challenge, bytes)
    client.receive(cut(challenge))
    assert client.server.pid == 4711
    assert client.server.is_on(machine) == bool(machine)
    assert not client.server.is_on("boot pid:[2]")


@pytest.mark.parametrize("secret", [b"", b"short", "text of sixteen b", None])
def test_weak_secrets_are_refused(secret) -> None:
    with pytest.raises(InvalidArgument, match="at least 16 bytes"):
        check_secret(secret)
