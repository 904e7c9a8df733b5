"""Where ranks meet, and what is missing for that. How they then do: test_process_group, test_foreign_launchers."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
from rendezvous_ranks import run_threads

from gradsync.environment import RankEnvironment
from gradsync.errors import AuthenticationError, InvalidArgument, RendezvousError, RendezvousTimeout
from gradsync.rendezvous import hosting
from gradsync.rendezvous.hosting import JoinedRendezvous, RendezvousPoint, _rendezvous_point, join
from gradsync.rendezvous.sockets import is_loopback


def rank(**known: object) -> RankEnvironment:
    return RankEnvironment(**{"rank": 1, "world_size": 2, "local_rank": 1, "local_world_size": 2, **known})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("known", "where"),
    [
        ({"address": "node0:1", "run_name": "PMI-1-2"}, "node0:1"),
        ({"rank": 0, "world_size": 1, "local_rank": 0, "local_world_size": 1}, "alone"),
        ({"run_name": "PMI-1-2"}, "PMI-1-2"),
        ({"master_addr": "node0", "master_port": 29500}, "node0:29501"),
        ({"master_addr": "node0", "master_port": 65535}, "node0:65534"),
        ({"master_addr": "::1", "master_port": 29500}, "[::1]:29501"),
    ],
)
def test_where(known: dict[str, object], where: str) -> None:
    assert _rendezvous_point(rank(**known), None)[:2] == (where if ":" in where else None, where)
    assert _rendezvous_point(rank(**known), "other:7") == RendezvousPoint("other:7", "other:7", "address=")


@pytest.mark.parametrize("known", [{}, {"master_addr": "node0"}, {"master_port": 29500}])
def test_nowhere_to_meet_names_what_to_set(known: dict[str, object]) -> None:
    with pytest.raises(
        InvalidArgument, match="rank 1/2 needs the address of the rendezvous.*MASTER_ADDR.*gradsync run"
    ):
        _rendezvous_point(rank(**known), None)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.9.9.9", "::1"])
def test_what_only_this_machine_reaches(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("where", ["node0:1", "192.0.2.1:1", "0.0.0.0:1", "[fe80::1]:1"])
def test_what_others_reach_too(where: str) -> None:
    with pytest.raises(AuthenticationError, match="across hosts needs a secret.*GRADSYNC_SECRET_FILE"):
        join(rank(), where, 1.0)


def test_a_process_that_a_rank_started_is_told_that_it_is_none() -> None:
    inherited = rank(address="127.0.0.1:4000", hosted=True, source="gradsync")
    with pytest.raises(AuthenticationError, match="inherited the rank.s variables.*begin with GRADSYNC_"):
        join(inherited, None, 1.0)


@pytest.mark.parametrize(
    ("source", "advice"),
    [
        ("address=", "name another port in address=, on every rank"),
        ("GRADSYNC_ADDRESS", "name another port in GRADSYNC_ADDRESS, on every rank"),
        (
            "MASTER_PORT",
            "it is the one after MASTER_PORT: start again with another MASTER_PORT .*--master-port.*",
        ),
    ],
)
def test_rank_0_tells_where_its_port_came_from_if_it_is_taken(source: str, advice: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        known: dict[str, object] = {"GRADSYNC_ADDRESS": {"address": f"127.0.0.1:{port}"}}.get(source, {})
        if source == "MASTER_PORT":
            known = {"master_addr": "127.0.0.1", "master_port": port - 1}
        address = f"127.0.0.1:{port}" if source == "address=" else None
        with pytest.raises(RendezvousError, match=f"port {port} on 127.0.0.1 is in use; {advice}$"):
            join(rank(rank=0, local_rank=0, **known), address, 5.0)


def test_an_error_names_the_limit_of_the_whole_call(monkeypatch: pytest.MonkeyPatch) -> None:
    start_hosting = hosting._start_hosting

    def start_hosting_slowly(*args: Any, **options: Any) -> JoinedRendezvous:
        time.sleep(0.02)
        return start_hosting(*args, **options)

    monkeypatch.setattr(hosting, "_start_hosting", start_hosting_slowly)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(RendezvousTimeout, match=r"joining reached its deadline of 0\.3 s"):
        join(rank(rank=0, secret=bytes(32)), address, 0.3)


def test_when_the_hosting_rank_reaches_its_deadline_the_others_get_the_missing_ranks() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    whole = {"world_size": 3, "secret": bytes(32), "source": "by hand"}
    at_host, other = run_threads(
        [lambda: join(rank(rank=0, **whole), address, 2.0), lambda: join(rank(rank=1, **whole), address, 60.0)]
    )
    for error in (at_host, other):
        assert isinstance(error, RendezvousTimeout)
        assert error.missing_ranks == (2,)
    assert "joining reached its deadline of" in str(at_host)
    assert "joining ended, because the rank that hosts the server reached its deadline; missing" in str(other)
