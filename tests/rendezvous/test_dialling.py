"""How a client finds its server: names that stand for several addresses."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time

import pytest
from rendezvous_ranks import SECRET, connect, server_process

from gradsync.errors import RendezvousTimeout
from gradsync.rendezvous import connection as connection_module
from gradsync.rendezvous.connection import dial
from gradsync.rendezvous.server import RendezvousServer
from gradsync.rendezvous.sockets import send_some

WITHIN_SECONDS = 8.0  # of which a good two are the first address's


@pytest.fixture
def blackhole():
    """The address of a listener whose backlog is full: what is sent to it is lost."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.2", 0))
        listener.listen(0)
        for _ in range(3):
            stream = stack.enter_context(socket.socket())
            stream.setblocking(False)
            stream.connect_ex(listener.getsockname())
        yield listener.getsockname()


@pytest.fixture
def head(blackhole, monkeypatch):
    """The address of a name that stands for the blackhole first, and then for 127.0.0.1."""
    targets = [
        (socket.AF_INET, socket.SOCK_STREAM, 0, "", target) for target in (blackhole, ("127.0.0.1", blackhole[1]))
    ]
    look_up = socket.getaddrinfo

    def look_up_head(host, *args, **options):
        return list(targets) if host == b"head" else look_up(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up_head)
    return f"head:{blackhole[1]}"


def test_an_address_that_swallows_all_leaves_time_for_the_next(blackhole, head) -> None:
    with RendezvousServer(1, secret=SECRET, host="127.0.0.1", port=blackhole[1]):
        began = time.monotonic()
        connect(head, 0, 1, timeout_seconds=WITHIN_SECONDS).close()
        assert time.monotonic() - began < WITHIN_SECONDS


def test_the_last_address_says_why(head) -> None:
    with pytest.raises(RendezvousTimeout, match="last cause: Connection refused") as caught:
        dial(head, secret=SECRET, deadline=time.monotonic() + 0.4, label="rank 0/1")
    assert caught.value.cause == "Connection refused"


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_descriptor_that_is_closed_under_the_handshake_is_dialled_again(when, monkeypatch) -> None:
    """As by a program that closes all descriptors that it does not know.

    The server is another process: in this one its next connection could take the number that was closed.
    """
    shake_hands, streams = connection_module._shake_hands, []

    def shake(stream, *arguments):
        streams.append(stream)
        if len(streams) == 1 and when == "before":
            os.close(stream.fileno())
        result = shake_hands(stream, *arguments)
        if len(streams) == 1 and when == "after":
            os.close(stream.fileno())
        return result

    monkeypatch.setattr(connection_module, "_shake_hands", shake)
    with server_process() as (_, address):
        connect(address, 0, 1).close()
    assert len(streams) == 2


def test_a_signal_handler_that_raises_makes_no_byte_be_sent_twice() -> None:
    class Interrupt(Exception):
        pass

    armed, received = [False], bytearray()

    def handle(*_) -> None:
        if armed[0]:
            armed[0] = False
            raise Interrupt

    def read() -> None:
        while data := right.recv(2**16):
            received.extend(data)

    left, right = socket.socketpair()
    reader, unsent, put, interrupts = threading.Thread(target=read), bytearray(), 0, 0
    reader.start()
    before = signal.signal(signal.SIGALRM, handle)
    try:
        while interrupts < 1000:
            signal.setitimer(signal.ITIMER_REAL, 0.0001)
            try:
                armed[0] = True
                for _ in range(60):
                    unsent += b"x"
                    put += 1
                    send_some(left, unsent)
                armed[0] = False
            except Interrupt:
                interrupts += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    while unsent:
        send_some(left, unsent)
    left.close()
    reader.join(30)
    right.close()
    assert len(received) == put
