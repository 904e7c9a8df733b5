"""How a client finds its server: names that stand for several addresses."""

from __future__ import annotations

import contextlib
import os
import socket
import time

import pytest
from rendezvous_ranks import SECRET, connect, server_process

from gradsync.errors import RendezvousTimeout
from gradsync.rendezvous import connection as connection_module
from gradsync.rendezvous.connection import dial
from gradsync.rendezvous.server import RendezvousServer

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
