"""TLS as an option: who meets whom, what a sniffer sees, who is turned away and in which words."""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import ssl
import struct
import threading
import time
from pathlib import Path

import pytest
from certificates import Authority, Variables, environment
from rendezvous_ranks import JOIN_SECONDS, SECRET, connect, connect_all, run_ranks, run_threads
from wiretaps import Tap, in_the_middle, narrow, relay, small_buffers

from gradsync.errors import AuthenticationError, RankFailed, RendezvousError
from gradsync.rendezvous import dialling, event_loop, tls
from gradsync.rendezvous.client import RendezvousClient
from gradsync.rendezvous.server import RendezvousServer
from gradsync.rendezvous.sockets import RoomNeeded, parse_address
from gradsync.rendezvous.tls import TlsStream
from gradsync.tls_files import read_tls_files

VALUE = b"a value that nobody else is to see"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


def serve(variables: Variables, world_size: int = 1) -> RendezvousServer:
    with environment(variables):
        return RendezvousServer(world_size, secret=SECRET)


def join(server: RendezvousServer | str, variables: Variables, **options) -> RendezvousClient:
    with environment(variables):
        return connect(server, 0, 1, **options)


def refusal(server: RendezvousServer, variables: Variables) -> RendezvousError:
    """What a client gets that is turned away; and others are served after it."""
    with pytest.raises(RendezvousError) as caught:
        join(server, variables).close()
    return caught.value


def meet(client: RendezvousClient) -> bytes:
    client.set(f"from {client.rank}", VALUE * 1000)
    client.barrier()
    return client.get(f"from {1 - client.rank}")


def test_without_a_ca_the_secret_vouches_for_the_certificate(authority: Authority) -> None:
    variables = authority.certificate()
    with environment(variables), RendezvousServer(2, secret=SECRET) as server:
        assert run_ranks(server, 2, meet) == [VALUE * 1000] * 2


def test_with_a_ca_both_sides_show_certificates(authority: Authority) -> None:
    with (
        environment(authority.certificate() | authority.trusted),
        RendezvousServer(2, secret=SECRET) as server,
    ):
        assert run_ranks(server, 2, meet) == [VALUE * 1000] * 2


def test_a_client_may_need_the_ca_alone(authority: Authority) -> None:
    with serve(authority.certificate()) as server, join(server, authority.trusted) as client:
        assert client.barrier() == 1


@pytest.mark.parametrize("is_tls", [False, True])
def test_a_sniffer_reads_values_only_without_tls(authority: Authority, is_tls: bool) -> None:
    variables = authority.certificate() if is_tls else {}
    seen = bytearray()
    with (
        serve(variables) as server,
        Tap(server.address, lambda client, up: relay(client, up, seen)) as tap,
        join(tap.address, variables) as client,
    ):
        client.set("a key", VALUE)
        assert client.get("a key") == VALUE
    assert len(seen) > 500
    assert [part in seen for part in (VALUE, b"a key", server.run_id.encode())] == [not is_tls] * 3


def test_nobody_stands_in_the_middle_even_with_a_certificate_of_the_ca(authority: Authority) -> None:
    """Who passes on the proofs of others unaltered is found out: they cover the server's certificate."""
    with (
        serve(authority.certificate()) as server,
        Tap(server.address, in_the_middle(authority.certificate())) as tap,
        pytest.raises(AuthenticationError, match="does not know this run's secret"),
    ):
        join(tap.address, authority.trusted).close()


def test_wrong_secret(authority: Authority) -> None:
    with serve(authority.certificate()) as server, pytest.raises(AuthenticationError, match="does not know"):
        join(server, authority.trusted, secret=b"x" * 32)


def test_server_of_another_ca(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other")
    with serve(authority.certificate()) as server:
        error = refusal(server, other.trusted)
        assert isinstance(error, AuthenticationError)
        assert "rank 0/1: " + server.address in str(error)
        assert "certificate of the server does not hold (unable to get local issuer certificate)" in str(error)


def test_server_whose_certificate_has_expired(authority: Authority) -> None:
    with serve(authority.certificate(has_expired=True)) as server:
        error = refusal(server, authority.trusted)
        assert isinstance(error, AuthenticationError)
        assert "does not hold (certificate has expired)" in str(error)


@pytest.mark.parametrize(
    ("whose", "reason"),
    [("nobody", "certificate required"), ("another CA", "unknown ca"), ("expired", "certificate expired")],
)
def test_client_whose_certificate_does_not_hold(authority: Authority, tmp_path: Path, whose: str, reason: str) -> None:
    own = {
        "nobody": {},
        "another CA": Authority(tmp_path / "other").certificate(),
        "expired": authority.certificate(has_expired=True),
    }[whose]
    good = authority.certificate() | authority.trusted
    with serve(good) as server:
        began = time.monotonic()
        error = refusal(server, own | authority.trusted)
        assert time.monotonic() - began < JOIN_SECONDS / 2  # at once, and not after several attempts
        assert isinstance(error, AuthenticationError)
        assert f"refuses the TLS certificate of this side ({reason})" in str(error)
        with join(server, good) as client:
            assert client.barrier() == 1


def test_client_without_tls_is_told_that_the_server_has_it(authority: Authority) -> None:
    with serve(authority.certificate()) as server:
        error = refusal(server, {})
        assert "it speaks TLS; set GRADSYNC_TLS_CA" in str(error)


def test_client_with_tls_is_told_that_the_server_has_none(authority: Authority, monkeypatch) -> None:
    monkeypatch.setattr(dialling, "_FLOOD_SECONDS", 0.1)
    with serve({}) as server:
        error = refusal(server, authority.trusted)
        assert "does not use TLS; if so, unset GRADSYNC_TLS_CA" in str(error)
        with join(server, {}) as client:
            assert client.barrier() == 1


def test_older_tls_is_refused(authority: Authority) -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with serve(authority.certificate()) as server, pytest.raises(ssl.SSLError):
        host, port = server.address.split(":")
        with socket.create_connection((host, int(port)), timeout=30) as stream, old.wrap_socket(stream):
            pass


def test_stranger_within_the_handshake_of_tls_is_closed_by_the_deadline(authority: Authority, monkeypatch) -> None:
    monkeypatch.setattr(event_loop, "HANDSHAKE_SECONDS", 0.3)
    with serve(authority.certificate()) as server:
        host, port = server.address.split(":")
        for words in (b"", b"\x16\x03\x01", client_hello()):
            with socket.create_connection((host, int(port)), timeout=30) as stream:
                stream.sendall(words)
                while stream.recv(65536):
                    pass


def client_hello() -> bytes:
    """The first flight of a client that never says more."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing).do_handshake()
    return outgoing.read()


def test_garbage_disturbs_no_joining_ranks(authority: Authority) -> None:
    rng = random.Random(5)
    variables = authority.certificate()
    with environment(variables), RendezvousServer(2, secret=SECRET) as server:
        host, port = server.address.split(":")
        for _ in range(200):
            with socket.create_connection((host, int(port)), timeout=30) as stream:
                stream.sendall(rng.choice([client_hello(), b"\x16\x03\x01"]) + rng.randbytes(rng.randint(0, 200)))
        assert run_ranks(server, 2, meet) == [VALUE * 1000] * 2


def test_peer_that_resets_its_connection_before_it_is_wrapped_disturbs_nobody(authority: Authority) -> None:
    """To `ssl` such a connection is none yet: it would ask for what has come, and then go on in plain text."""
    before = len(os.listdir("/proc/self/fd"))
    with environment(authority.certificate()), socket.create_server(("127.0.0.1", 0)) as listener:
        reset(listener.getsockname())
        accepted, _ = listener.accept()
        with pytest.raises(ConnectionResetError):
            tls.ServerTls(read_tls_files()).wrap(accepted)
    assert len(os.listdir("/proc/self/fd")) == before
    with serve(authority.certificate()) as server:
        for _ in range(200):
            reset(parse_address(server.address))
        with join(server, authority.certificate()) as client:
            assert client.barrier() == 1


def reset(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as stream:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_many_threads_of_one_client(authority: Authority) -> None:
    """One reads for all, beside those that send, which OpenSSL alone does not bear."""

    def work(number: int) -> int:
        for value in range(40):
            client.set(f"{number}", bytes(30_000) + bytes([value]))
            assert client.get(f"{number}")[-1] == value
        return number

    with (
        environment(authority.certificate()),
        RendezvousServer(1, secret=SECRET) as server,
        connect(server, 0, 1) as client,
    ):
        assert run_threads([lambda n=n: work(n) for n in range(6)]) == list(range(6))


def test_nothing_decrypted_stays_where_no_poll_tells_of_it(authority: Authority) -> None:
    with environment(authority.certificate()):
        files = read_tls_files()
    assert files is not None
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    upper = tls.ServerTls(files).wrap(ends[0])
    shaking = threading.Thread(target=read_whole, args=(upper, got := bytearray(), 10_000))
    shaking.start()
    lower, _ = tls.ClientTls(files).connect(ends[1], SECRET, time.monotonic() + 30)
    assert lower.send(bytes(10_000)) == 10_000
    shaking.join(30)
    assert len(got) == 10_000
    upper.close()
    lower.close()


def read_whole(stream: socket.socket, got: bytearray, size: int) -> None:
    """Reads ten bytes whenever a poll says that there are some, as a loop does that knows nothing of TLS."""
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    while len(got) < size and poll.poll(30_000):
        with contextlib.suppress(BlockingIOError):
            got += stream.recv(10)


def test_answers_that_do_not_fit_the_socket_arrive(authority: Authority, monkeypatch) -> None:
    """Written in pieces while the client does not read, and more of a record read than was asked for."""
    monkeypatch.setattr(event_loop, "tune_stream", small_buffers(event_loop.tune_stream))
    with (
        environment(authority.certificate()),
        RendezvousServer(1, secret=SECRET) as server,
        connect(server, 0, 1) as client,
    ):
        values = {f"k{n}": os.urandom(60_000) for n in range(8)}
        for key, value in values.items():
            client.set(key, value)
        got = run_threads([lambda key=key: client.get(key) for key in values])
        assert got == list(values.values())


def test_handshake_that_does_not_fit_the_socket_goes_on(authority: Authority, monkeypatch) -> None:
    """A long chain of certificates waits for room while the client reads it, which takes several turns."""
    waited = []

    class CountedStream(TlsStream):
        def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
            try:
                return super().recv(buflen, flags)
            except RoomNeeded:
                waited.append(self)
                raise

    monkeypatch.setattr(tls, "TlsStream", CountedStream)
    monkeypatch.setattr(event_loop, "tune_stream", small_buffers(event_loop.tune_stream))
    monkeypatch.setattr(dialling, "_connect", lambda *args, whole=dialling._connect: narrow(whole(*args)))
    variables = authority.certificate(chain=120)
    deadline = time.monotonic() + 60
    while not waited:  # a client that reads as fast as the server writes leaves it room
        assert time.monotonic() < deadline
        with serve(variables) as server, join(server, variables) as client:
            assert client.barrier() == 1


def test_lost_rank_is_told(authority: Authority) -> None:
    with environment(authority.certificate()), RendezvousServer(2, secret=SECRET) as server:
        clients = connect_all(server, 2)
        clients[1].abandon()
        with pytest.raises(RankFailed, match="rank 1/2"):
            clients[0].barrier(timeout_seconds=30)
        clients[0].close()


def test_stopping_leaves_no_descriptors(authority: Authority) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with environment(authority.certificate() | authority.trusted), RendezvousServer(2, secret=SECRET) as server:
        assert run_ranks(server, 2, meet) == [VALUE * 1000] * 2
    with pytest.raises(RendezvousError):
        join(server, authority.trusted, timeout_seconds=0.1)
    assert len(os.listdir("/proc/self/fd")) == before
