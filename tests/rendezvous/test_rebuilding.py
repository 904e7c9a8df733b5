"""gs.rebuild() at the server: who is waited for, the new numbers, those who are new, floors, and who is left out."""

from __future__ import annotations

import gc
import os
import signal
import threading
import tracemalloc
from contextlib import ExitStack, contextmanager
from itertools import pairwise

import pytest

import gradsync as gs
from commands import wait_until
from gradsync.rendezvous import wire
from gradsync.rendezvous.server import RendezvousServer
from gradsync.rendezvous.worlds import Worlds  # the core: nobody waits nine seconds for what its clock says
from rendezvous.clients import connect, failure_of, join_all, on_each, thread_of, together
from rendezvous.peer import PATIENCE_SECONDS, SECRET, Kind, Peer, Status, joining

SIZE = 4
RUNS = "runs, and has not called gs.rebuild()"


class Run:
    """A server, and the clients of its ranks by their ranks at launch: the latest ones."""

    def __init__(self, server, size):
        self.server, self.size = server, size
        self.of = dict(enumerate(join_all(server, size)))

    def rebuild(self, number, **options):
        """Asks for the next world as one rank."""
        last = options.pop("last", self.of.get(number))
        client = connect(self.server, number, self.size, last=last, **options)
        if number in self.of:
            self.of[number].abandon()
        self.of[number] = client
        return client

    def rebuild_all(self, *numbers, **options):
        """Does so as these ranks, side by side; gives their clients."""
        found = together(*[lambda number=number: self.rebuild(number, **options) for number in numbers])
        for client in found:
            if isinstance(client, BaseException):
                raise client
        return found

    def kill(self, *numbers):
        """Lets ranks die; all others hear of it."""
        for number in numbers:
            self.of.pop(number).abandon()
        for client in self.of.values():
            assert failure_of(client).rank in (numbers if client.numbers is None else range(self.size))


@contextmanager
def running(size=SIZE, **options):
    with RendezvousServer(size, secret=SECRET, **options) as server:
        run = Run(server, size)
        try:
            yield run
        finally:
            together(*[client.abandon for client in run.of.values()])


def world_of(client):
    """What a client says of its world; its members meet in it."""
    found = client.exchange("who", b"%d" % client.rank, timeout_seconds=PATIENCE_SECONDS)
    assert found == [b"%d" % rank for rank in range(client.world_size)]
    return client.generation, client.numbers, client.rank


def death_of(run, number):
    run.kill(number)


def departure_of(run, number):
    run.of.pop(number).close()


def absence_of(run, number):
    """From a collective of the others."""
    first = run.of[(number + 1) % SIZE]
    with pytest.raises(gs.CollectiveTimeout):
        first.report_stuck("g", 1, "all_reduce #1", 5.0, [number])
    run.of.pop(number)


# -- Who is waited for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [death_of, departure_of, absence_of])
@pytest.mark.parametrize("number", [0, 2])
def test_all_who_are_left_are_waited_for_and_numbered_anew(end, number):
    with running() as run:
        end(run, number)
        left = sorted(run.of)
        for _ in range(2):  # who has asked in vain asks again
            with pytest.raises(gs.RendezvousTimeout) as raised:
                run.rebuild(left[0], timeout_seconds=0.1)
            assert raised.value.missing_ranks == tuple(left[1:])
            assert raised.value.missing == ", ".join([f"rank {each} ({RUNS})" for each in left[1:]])
        clients = run.rebuild_all(*left)
        assert on_each(clients, world_of) == [(2, tuple(left), rank) for rank in range(3)]
        assert [client.label for client in clients] == ["rank 0/3", "rank 1/3", "rank 2/3"]


def test_those_who_reached_their_deadline_are_not_those_who_never_came():
    with running() as run:
        run.kill(0)
        waits = [lambda number=number: run.rebuild(number, timeout_seconds=0.3) for number in (1, 2)]
        for error in together(*waits):
            assert type(error) is gs.RendezvousTimeout
            assert error.missing_ranks == (3,)


def test_one_that_leaves_while_others_wait_is_not_waited_for():
    with running() as run:
        run.kill(0)
        with thread_of(lambda: run.rebuild_all(1, 2)) as waiting:
            run.of[3].close()
            assert [client.numbers for client in waiting()] == [(1, 2)] * 2


@pytest.mark.parametrize("kind", [Kind.FAIL, Kind.LEAVE, None])
def test_one_that_gives_up_in_the_queue_harms_nobody_and_may_come_again(kind):
    """By Ctrl-C, or because its connection is cut; its process goes on."""
    with running() as run:
        run.kill(0)
        with thread_of(lambda: run.rebuild(2)) as waiting:
            with Peer.of_client(run.server.address) as peer:
                peer.send(Kind.JOIN, *joining(1, SIZE, last=1))
                assert peer.receive().kind == Kind.REPLY  # it waits
                if kind is not None:
                    peer.send(kind, *{Kind.FAIL: ("KeyboardInterrupt", None), Kind.LEAVE: ("", None, 0)}[kind])
                    assert peer.rest() == []
            clients = run.rebuild_all(1, 3)
            assert [client.numbers for client in (*clients, waiting())] == [(1, 2, 3)] * 3


def test_ctrl_c_while_it_waits():
    with running() as run:
        run.kill(0)
        with thread_of(lambda: run.rebuild(2)) as waiting:
            timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                run.rebuild(1)
            timer.join()
            clients = run.rebuild_all(1, 3)
            assert [client.numbers for client in (*clients, waiting())] == [(1, 2, 3)] * 3


@pytest.mark.parametrize("comes", [False, True])
def test_who_is_stopped_after_the_failure_is_left_out(comes):
    """Before it comes, or in the queue, where it is told so."""
    states, said, lost = {}, {}, []
    worlds = Worlds(
        lambda connection, *message: said.setdefault(connection, []).append(message),
        lambda _: None,
        lambda _: None,
        lambda pid: states.get(pid, "S"),
        machine="m",
        size=SIZE,
        on_lost=lambda number, why: lost.append((number, why)),
    )

    def join(now, rank, connection, last=None):
        fields = joining(rank, SIZE, last=last, machine="m", pid=rank + 1)
        worlds.received(now, connection, wire.Message(wire.Kind.JOIN, 1, list(fields)))

    for rank in range(SIZE):
        join(0.0, rank, rank)
    worlds.lost(1.0, 0, "killed")
    states[2] = "T"
    for rank in (1, 2) if comes else (2,):
        join(2.0, rank, 10 + rank, last=1)
    for now in range(3, 14):
        for connection in (2, 12, 3):
            worlds.received(float(now), connection, wire.Message(wire.Kind.BEAT, 0, [{}]))
        worlds.tick(float(now))
    join(14.0, 3, 13, last=1)
    assert said[12][-1] == said[13][-1] == (wire.Kind.REPLY, 1, Status.OK, True, 2, [2, 3])
    assert [number for number, _ in lost] == [1]
    assert "rank 1/4 (pid 2) was stopped (SIGSTOP?)" in lost[0][1]
    if comes:
        assert said[11][-1][:3] == (wire.Kind.REPLY, 1, Status.REFUSED)


# -- Who is new -------------------------------------------------------------------------------------------------------


def test_who_was_started_again_is_taken_in_at_the_next_rebuild():
    with running() as run:
        run.kill(1, 3)
        with Peer.of_client(run.server.address) as peer:
            peer.send(Kind.JOIN, *joining(3, SIZE))
            assert peer.receive().kind == Kind.REPLY  # it waits, and dies again
        with thread_of(lambda: connect(run.server, 1, SIZE)) as waiting:
            with pytest.raises(gs.RendezvousError, match="alive"):  # it is not new
                connect(run.server, 2, SIZE)
            clients = run.rebuild_all(0, 2, min_ranks=3)
            with waiting() as new:
                assert on_each([*clients, new], world_of) == [(2, (0, 1, 2), rank) for rank in (0, 2, 1)]


def test_a_world_that_has_shrunk_grows_again():
    with running() as run:
        for number in (3, 2):
            run.kill(number)
            run.rebuild_all(*run.of)
        assert {client.numbers for client in run.of.values()} == {(0, 1)}
        with thread_of(lambda: together(*[lambda n=n: connect(run.server, n, SIZE) for n in (2, 3)])) as new:
            clients = run.rebuild_all(0, 1, min_ranks=4)
            assert on_each([*clients, *new()], world_of) == [(4, (0, 1, 2, 3), rank) for rank in range(4)]
            together(*[client.abandon for client in new()])


@pytest.mark.parametrize("died", [1, None])
def test_at_the_edge_of_a_step_nothing_has_failed(died):
    """What still waits in the old world ends; the old numbers are those of the launch, also where one has died."""
    with running() as run:
        if died is not None:
            run.kill(died)
            run.rebuild_all(0, 2, 3)
        size = len(run.of)
        with Peer.of_client(run.server.address) as peer, thread_of(lambda: run.of[0].get("never")) as reading:
            peer.send(Kind.JOIN, *joining(0, 1, world="other"))
            clients = run.rebuild_all(*run.of)
            assert type(reading()) in (gs.CommunicatorClosed, gs.RendezvousError)
        assert on_each(clients, lambda client: client.exchange("e", b"1")) == [[b"1"] * size] * size
        assert {client.numbers for client in clients} == {tuple(sorted(run.of))}


def test_a_request_of_a_world_that_was_replaced_is_answered_at_once():
    with RendezvousServer(1, secret=SECRET) as server, ExitStack() as stack:
        old, new = [stack.enter_context(Peer.of_client(server.address)) for _ in range(2)]
        assert old.join().values == [1, None]
        waiting = old.send(Kind.GET, "key", None, 60_000)
        assert new.join(last=1).values == [2, [0]]
        answer = old.answer()
        assert (answer.request, answer.status) == (waiting, Status.REFUSED)
        assert old.ask(Kind.SET, "key", b"1").status == Status.REFUSED
        old.leave()
        assert new.ask(Kind.SET, "key", b"1").status == Status.OK


# -- How many are needed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("floor", "asked", "needed"), [(1, 0, 1), (2, 0, 2), (3, 0, 3), (1, 3, 3), (3, 1, 3), (2, 4, 4)]
)
def test_a_world_has_as_many_ranks_as_were_asked_for(floor, asked, needed):
    with running(min_ranks=floor) as run:
        run.kill(1, 2, 3)
        if needed == 1:
            assert world_of(run.rebuild(0, min_ranks=asked)) == (2, (0,), 0)
            return
        with pytest.raises(gs.RendezvousTimeout) as raised:
            run.rebuild(0, min_ranks=asked, timeout_seconds=0.1)
        assert raised.value.missing_ranks == (1, 2, 3)
        assert raised.value.missing.endswith(f"rank 3 (not joined); 1 came, and {needed} are needed at least")
        news = list(range(1, needed))
        with thread_of(lambda: together(*[lambda n=n: connect(run.server, n, SIZE) for n in news])) as new:
            assert run.rebuild(0, min_ranks=asked).numbers == tuple(range(needed))
            assert {client.numbers for client in new()} == {tuple(range(needed))}
            together(*[client.abandon for client in new()])


@pytest.mark.parametrize(
    ("left", "asked", "goes_on"), [(1, 0, False), (1, 1, True), (2, 0, True), (2, 3, False), (3, 0, True)]
)
def test_of_several_machines_half_is_needed_unless_somebody_asks_for_another_number(left, asked, goes_on):
    with RendezvousServer(SIZE, secret=SECRET) as server, ExitStack() as stack:
        peers = [stack.enter_context(Peer.of_client(server.address)) for _ in range(SIZE - 1)]
        for rank, peer in enumerate(peers):  # on another machine
            peer.send(Kind.JOIN, *joining(rank, SIZE))
        here = connect(server, SIZE - 1, SIZE)
        for peer in peers:
            assert peer.answer().status == Status.OK
        for peer in peers[left - 1 :]:
            peer.stream.close()
        assert failure_of(here).rank in range(left - 1, SIZE - 1)
        again = [stack.enter_context(Peer.of_client(server.address)) for _ in range(left - 1)]
        for rank, peer in enumerate(again):
            peer.send(Kind.JOIN, *joining(rank, SIZE, last=1, min_ranks=asked))

        def rebuild():
            return connect(
                server, SIZE - 1, SIZE, last=here, min_ranks=asked, timeout_seconds=PATIENCE_SECONDS if goes_on else 0.3
            )

        if goes_on:
            with rebuild() as client:
                assert client.world_size == left
        else:
            with pytest.raises(gs.RendezvousTimeout, match="are needed at least"):
                rebuild()
        here.abandon()


@pytest.mark.parametrize("min_ranks", [-1, 0, 3])
def test_a_wrong_number_is_refused(min_ranks):
    with pytest.raises(gs.InvalidArgument, match="min_ranks"):
        RendezvousServer(2, secret=SECRET, min_ranks=min_ranks)
    if min_ranks:
        with running(2) as run:
            with pytest.raises(gs.RendezvousError, match="min_ranks"):
                connect(run.server, 0, 2, last=run.of[0], min_ranks=min_ranks)
            run.rebuild_all(0, 1)


# -- Who is left out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("have_gone_on", [False, True])
def test_who_was_missing_when_the_others_had_waited_too_long_is_out(have_gone_on):
    lost = []
    with running(on_lost=lambda number, why: lost.append((number, why))) as run:
        late = run.of[2]
        absence_of(run, 2)
        assert type(failure_of(late)) is gs.CollectiveTimeout
        if have_gone_on:
            run.rebuild_all(0, 1, 3)
        with pytest.raises(gs.RendezvousError, match="taken for dead") as raised:
            run.rebuild(2, last=late)
        assert not isinstance(raised.value, gs.RendezvousTimeout)
        assert on_each(run.rebuild_all(0, 1, 3), lambda client: client.world_size) == [3] * 3
        [(number, why)] = lost
        assert number == 2
        assert "all_reduce #1" in why
        late.abandon()


@pytest.mark.parametrize("how", ["its connection was lost", "it comes from an older world", "it was never there"])
def test_who_does_not_belong_to_the_world_is_out(how):
    with running() as run:
        stale = run.of[3]
        if how == "its connection was lost":
            run.kill(3)
            run.rebuild_all(0, 1, 2)
        elif how == "it comes from an older world":
            run.rebuild_all(0, 1, 2, 3)
        else:
            stale.generation = 7
        with pytest.raises(gs.RendezvousError, match="taken for dead"):
            connect(run.server, 3, SIZE, last=stale)


@pytest.mark.parametrize("is_most", [False, True])
def test_if_most_are_missing_they_are_waited_for(is_most):
    """The others may be those in the wrong."""
    lost, missing = [], [1, 2, 3] if is_most else [2, 3]
    with running(on_lost=lambda number, _: lost.append(number)) as run:
        with pytest.raises(gs.CollectiveTimeout):
            run.of[0].report_stuck("g", 1, "all_reduce #1", 5.0, missing)
        assert lost == ([] if is_most else missing)
        left = [number for number in range(SIZE) if number not in lost]
        assert on_each(run.rebuild_all(*left), world_of) == [(2, tuple(left), rank) for rank in range(len(left))]


def test_the_deadline_of_the_rank_that_hosts_the_server_is_its_own():
    with running(host_rank=0) as run:
        run.kill(3)
        with thread_of(lambda: run.rebuild(1)) as waiting:
            with pytest.raises(gs.RendezvousTimeout):
                run.rebuild(0, timeout_seconds=0.3)
            run.rebuild_all(0, 2)
            assert waiting().numbers == (0, 1, 2)


# -- What a launcher hears, and what it costs -------------------------------------------------------------------------


def test_a_launcher_hears_of_each_world():
    told = []
    with running(on_rebuilt=lambda *world: told.append(world)) as run:
        run.kill(1)
        run.rebuild_all(0, 2, 3)
        run.kill(2)
        run.rebuild_all(0, 3)
        run.rebuild_all(0, 3)
        join = together(*[lambda rank=rank: connect(run.server, rank, 2, world="other") for rank in range(2)])
        on_each(join, lambda client: client.close())
    assert [world[:2] for world in told] == [(1, (0, 1, 2, 3)), (2, (0, 2, 3)), (3, (0, 3)), (4, (0, 3))]
    assert all(0.0 <= seconds < PATIENCE_SECONDS for _, _, seconds in told)


def test_the_seconds_count_from_the_failure_or_from_the_first_who_asked():
    told = []
    worlds = Worlds(*[lambda *_: None] * 3, lambda _: "", size=2, on_rebuilt=lambda *world: told.append(world))
    last, connections = None, iter(range(100))
    for began in (0.0, 10.0, 20.0):
        pair = [next(connections) for _ in range(2)]
        for rank, connection in enumerate(pair):
            fields = list(joining(rank, 2, last=last))
            worlds.received(began + 3.0 * rank, connection, wire.Message(wire.Kind.JOIN, 1, fields))
            worlds.received(began + 3.0 * rank + 2.0, connection, wire.Message(wire.Kind.BEAT, 0, [{}]))
        last = len(told)
        if began == 10.0:
            worlds.received(19.0, pair[0], wire.Message(wire.Kind.FAIL, 0, ["it failed", None]))
    assert told == [(1, (0, 1), 0.0), (2, (0, 1), 3.0), (3, (0, 1), 4.0)]


def test_the_core_keeps_nothing_of_the_worlds_that_were_replaced():
    """A thousand times: one dies, one leaves the queue, one is new, and all others come."""
    worlds = Worlds(*[lambda *_: None] * 3, lambda _: "", size=SIZE)
    connections, seats = iter(range(100_000)), {}

    def join(now, rank, last=None):
        connection = next(connections)
        worlds.received(now, connection, wire.Message(wire.Kind.JOIN, 1, list(joining(rank, SIZE, last=last))))
        return connection

    def rebuild(number):
        now, dead = float(number), number % SIZE
        worlds.received(now, seats[0], wire.Message(wire.Kind.SET, 2, [f"key {number}", bytes(1000)]))
        worlds.received(now, seats[1], wire.Message(wire.Kind.GET, 3, ["never", None, 10**9]))
        worlds.lost(now, seats.pop(dead), "killed")
        worlds.lost(now, join(now, next(iter(seats)), last=number), "killed")
        olds = dict(seats)
        seats[dead] = join(now, dead)
        for rank in olds:
            seats[rank] = join(now, rank, last=number)
        for connection in olds.values():
            worlds.lost(now, connection, "replaced")
        worlds.tick(now)

    for rank in range(SIZE):
        seats[rank] = join(0.0, rank)
    lows, number = [], 0
    tracemalloc.start()
    try:
        for _ in range(3):
            sizes = []
            for _ in range(8):  # answered requests stay in a heap until it is cleared, about every 700 rebuilds
                for _ in range(100):
                    rebuild(number := number + 1)
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
            lows.append(min(sizes))
        largest = [str(line) for line in tracemalloc.take_snapshot().statistics("lineno")[:5]]
        # A leak grows each time; another thread of this process may allocate something once.
        assert min(after - before for before, after in pairwise(lows)) < 30_000, largest
    finally:
        tracemalloc.stop()


def test_the_server_and_its_clients_keep_no_thread_and_no_descriptor():
    with running(2) as run:
        run.rebuild_all(0, 1)
        threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            run.rebuild_all(0, 1)
        wait_until(lambda: threading.active_count() <= threads)
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)
        assert run.of[0].generation == 22


def test_while_some_wait_the_log_says_for_whom():
    notices = []
    worlds = Worlds(lambda *_: None, lambda _: None, notices.append, lambda _: "", size=3)

    def join(now, rank, connection, **options):
        worlds.received(now, connection, wire.Message(wire.Kind.JOIN, 1, list(joining(rank, 3, **options))))

    for rank in range(3):
        join(0.0, rank, rank)
    worlds.lost(1.0, 0, "killed")
    join(2.0, 0, 10)
    worlds.tick(20.0)
    assert notices == []  # one that is new waits for nobody
    join(21.0, 1, 11, last=1, min_ranks=3)
    worlds.tick(26.5)
    worlds.lost(27.0, 10, "killed")
    join(27.0, 2, 12, last=1)
    worlds.tick(32.0)
    assert notices == [
        f"2 ranks wait for gs.rebuild(); waiting for rank 2 ({RUNS})",
        "2 ranks wait for gs.rebuild(); waiting for rank 0 (not joined); 2 came, and 3 are needed at least",
    ]
