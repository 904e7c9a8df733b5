"""Many ranks at once, simulated as the scale benchmark does: each with its own handshake and MACs; nobody is lost."""

from __future__ import annotations

import resource
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rendezvous_ranks import SECRET, connect

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from gradsync.arguments import parse_address
from gradsync.rendezvous import sockets
from gradsync.rendezvous.frames import Inspect, Inspected, Tick
from gradsync.rendezvous.liveness import HEARTBEAT_SECONDS, SILENT_AFTER_SECONDS, heartbeat_seconds
from gradsync.rendezvous.server import RendezvousServer
from gradsync.rendezvous.wire import FrameReader
from simulated_ranks.contenders import BARRIER, GET_ID, JOIN, LEAVE, PUT_ID
from simulated_ranks.crowd import Crowd
from simulated_ranks.gradsync_rank import GradsyncRank

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the simulated ranks use epoll")
RANKS = 256


@pytest.fixture
def crowd_of():
    crowds = []

    def make(server: RendezvousServer, ranks: int) -> Crowd:
        simulated = [GradsyncRank(rank, ranks, SECRET) for rank in range(ranks)]
        crowds.append(Crowd(simulated, parse_address(server.address)))
        return crowds[-1]

    yield make
    for crowd in crowds:
        crowd.close()


def test_a_storm_of_ranks_joins_without_a_loss(crowd_of) -> None:
    with RendezvousServer(RANKS, secret=SECRET) as server:
        crowd = crowd_of(server, RANKS)
        crowd.play(JOIN)
        assert crowd.lost == 0
        assert server._core.formed_count == 1
        crowd.play(PUT_ID, slice(0, 1))
        crowd.play(GET_ID, slice(1, None))
        crowd.play(BARRIER)
        crowd.play(BARRIER)
        crowd.leave(LEAVE)
        assert crowd.lost == 0
        assert server.wait_until_empty(60)


def test_a_quiet_server_gathers_heartbeats_and_still_answers(crowd_of) -> None:
    with RendezvousServer(4, secret=SECRET) as server:
        server._batch_seconds = 0.005
        crowd = crowd_of(server, 4)
        crowd.play(JOIN)
        assert crowd.beat(0.4, 0.1) == 16
        crowd.play(BARRIER)  # behind the heartbeats: they have been answered by then
        assert [rank.pulses for rank in crowd._ranks] == [1 + 4] * 4  # the first one answered its JOIN


def test_thousands_of_silent_ranks_are_looked_at_in_one_turn() -> None:
    """One finding after the other, and not one inside the other: that once ended a server of 1,024 ranks."""

    class Core:
        judged = 0

        def handle(self, now, event):
            if isinstance(event, Inspected):
                self.judged += 1
                return []
            return [Inspect(1, None) for _ in range(3000)]

    server = RendezvousServer(1, secret=SECRET)
    core = Core()
    with socket.socket() as stream:
        server._core = core
        server._connections = {1: SimpleNamespace(number=1, stream=stream, reader=FrameReader())}
        server._handle_event(Tick())
        server._connections = {}
    server.stop()
    assert core.judged == 3000


def test_a_rank_that_is_turned_away_while_it_joins_comes_again(crowd_of, monkeypatch) -> None:
    with RendezvousServer(8, secret=SECRET) as server:
        server._max_unauthenticated = 2
        crowd = crowd_of(server, 8)
        crowd.play(JOIN)
        assert crowd.lost > 0
        assert server._core.formed_count == 1


def test_only_large_runs_gather() -> None:
    gathers = {}
    for ranks in (1, 8, 124, 1024, 16_384):
        server = RendezvousServer(ranks, secret=SECRET)
        gathers[ranks] = server._batch_seconds
        server.stop()
    assert gathers == {1: 0.0, 8: 0.0, 124: 0.0, 1024: 0.04, 16_384: 0.04}


def test_many_ranks_say_less_often_that_they_live_but_often_enough() -> None:
    assert [heartbeat_seconds(ranks) for ranks in (1, 256, 257, 16_384)] == [HEARTBEAT_SECONDS] * 2 + [1.25] * 2
    assert heartbeat_seconds(16_384) < SILENT_AFTER_SECONDS


def test_room_for_connections(monkeypatch, caplog) -> None:
    limits = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
    sockets.make_room(500)
    assert limits == [(1024, 4096)]
    sockets.make_room(2000)
    assert limits[1:] == [(2256, 4096)]
    assert not caplog.records
    sockets.make_room(9000)
    assert limits[2:] == [(4096, 4096)]
    assert "needs up to 9256 open files, this process may open 4096" in caplog.text


def test_the_library_s_own_client_meets_the_simulated_ranks(crowd_of) -> None:
    """What is simulated is what the client sends: both come to one barrier."""
    import threading

    with RendezvousServer(2, secret=SECRET) as server:
        generations = []

        def run() -> None:
            with connect(server, 1, 2) as client:
                client.get("id", from_rank=0)
                client.barrier("all ready")
                generations.append(client.generation)

        thread = threading.Thread(target=run)
        thread.start()
        crowd = Crowd([GradsyncRank(0, 2, SECRET)], parse_address(server.address))
        for phase in (JOIN, PUT_ID, BARRIER):
            crowd.play(phase)
        thread.join(60)
        crowd.leave(LEAVE)
        crowd.close()
        assert generations == [1]
