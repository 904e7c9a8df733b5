"""A server and two clients, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rendezvous_ranks import SECRET, connect_all

from gradsync.rendezvous.client import RendezvousClient
from gradsync.rendezvous.server import RendezvousServer


@pytest.fixture
def pair() -> Iterator[list[RendezvousClient]]:
    with RendezvousServer(2, secret=SECRET) as server:
        clients = connect_all(server, 2)
        yield clients
        for client in clients:
            client.close()
