"""Some of the ranks as if they were all, and what is left of them with the server."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from core_bench import Bench
from rendezvous_ranks import SECRET, connect_all, run_ranks

from gradsync.errors import CollectiveTimeout, InvalidArgument, RankFailed, RendezvousTimeout
from gradsync.rendezvous.client import RendezvousClient
from gradsync.rendezvous.frames import THE_WORLD, FrameType, event_key
from gradsync.rendezvous.server import RendezvousServer

SECONDS = 30.0


def stored(core: Any) -> list[int]:
    """Returns how many things stand in each store of the one generation, and how many groups are half forgotten."""
    [generation] = core._generations
    return [
        len(generation.keys._values),
        generation.keys._stored_bytes,
        len(generation.exchanges._open),
        len(generation.departures._left),
    ]


# -- Who is who ---------------------------------------------------------------------------------------------------


def test_members_are_numbered_as_listed() -> None:
    def work(client: RendezvousClient) -> Any:
        assert client.world_ranks == (0, 1, 2, 3)
        assert client.label == f"rank {client.rank}/4"
        if client.rank == 1:
            return None
        group = client.group([3, 0, 2], "world/3,0,2#1")
        inner = None if client.rank == 0 else group.group([2, 0], "world/2,3#1")
        assert inner is None or inner.world_ranks == (2, 3)
        assert group.generation == client.generation
        return group.rank, group.world_size, group.world_ranks, group.label, inner and inner.rank

    with RendezvousServer(4, secret=SECRET) as server:
        results = run_ranks(server, 4, work)
    label = "rank {}/3 of group 'world/3,0,2#1' (rank {} of the world)"
    assert results == [
        (1, 3, (3, 0, 2), label.format(1, 0), None),
        None,
        (2, 3, (3, 0, 2), label.format(2, 2), 0),
        (0, 3, (3, 0, 2), label.format(0, 3), 1),
    ]


@pytest.mark.parametrize("members", [[], [1], [0, 0], [0, 2], [-1, 0]])
def test_bad_members(members: list[int]) -> None:
    def work(client: RendezvousClient) -> None:
        if client.rank == 0:
            with pytest.raises(InvalidArgument, match="group 'g' need to be distinct, from 0 to 1"):
                client.group(members, "g")

    with RendezvousServer(2, secret=SECRET) as server:
        assert run_ranks(server, 2, work) == [None, None]


# -- What they share ----------------------------------------------------------------------------------------------


def use_all(group: RendezvousClient) -> None:
    """Leaves something of every kind with the server."""
    group.set(f"from/{group.rank}", bytes([group.rank]))
    group.barrier(timeout_seconds=SECONDS)
    for rank in range(group.world_size):
        assert group.get(f"from/{rank}", timeout_seconds=SECONDS) == bytes([rank])
    values = [b"of %d" % rank for rank in range(group.world_size)]
    assert group.exchange("all", values[group.rank], timeout_seconds=SECONDS) == values
    root = group.world_size - 1
    if group.rank == root:
        group.set("id", bytes([root]) * 128)
    assert group.get("id", from_rank=root, timeout_seconds=SECONDS) == bytes([root]) * 128
    group.set(event_key(group.name, 0, group.world_ranks[group.rank]), b"what it was")


def test_groups_share_what_they_like_and_leave_nothing() -> None:
    groups = [members for size in (1, 2, 3) for members in itertools.permutations(range(3), size)]

    def stored_now() -> list[int]:
        values, value_bytes, barriers, left = stored(server._core)
        assert barriers <= 1  # another rank may have come to the next barrier
        return [values, value_bytes, left]

    def work(client: RendezvousClient) -> list[int]:
        client.set("kept", b"of the world")
        client.barrier(timeout_seconds=SECONDS)
        before = stored_now()
        client.barrier(timeout_seconds=SECONDS)
        for repeat, members in itertools.product(range(3), groups):
            if client.rank in members:
                group = client.group(members, f"world/{members}#{repeat}")
                use_all(group)
                group.close()
                group.close()
        client.barrier(timeout_seconds=SECONDS)
        assert stored_now() == before
        client.barrier(timeout_seconds=SECONDS)
        return before

    with RendezvousServer(3, secret=SECRET) as server:
        first, *others = run_ranks(server, 3, work)
    assert isinstance(first, list), first
    assert others == [first, first]


def test_one_name_means_two_things_in_two_groups() -> None:
    def work(client: RendezvousClient) -> bytes:
        group = client.group([0, 1] if client.rank < 2 else [2, 3], "low" if client.rank < 2 else "high")
        if group.rank == 0:
            group.set("key", group.name.encode())
        value = group.get("key", timeout_seconds=SECONDS)
        group.barrier(timeout_seconds=SECONDS)
        if group.rank == 1:
            group.delete("key")
            group.delete("key")  # a key that is not set
        return value

    with RendezvousServer(4, secret=SECRET) as server:
        assert run_ranks(server, 4, work) == [b"low", b"low", b"high", b"high"]


def test_a_member_that_does_not_come_is_named_by_its_number_in_the_world() -> None:
    def work(client: RendezvousClient) -> Any:
        if client.rank == 0:
            return None
        group = client.group([2, 1], "pair")
        if client.rank == 1:
            with pytest.raises(RendezvousTimeout) as caught:
                group.barrier(timeout_seconds=0.1)
            client.set("told", b"")
            return caught.value.missing_ranks
        client.get("told", timeout_seconds=SECONDS)
        return None

    with RendezvousServer(3, secret=SECRET) as server:
        assert run_ranks(server, 3, work) == [None, (2,), None]


def test_absence_in_a_group() -> None:
    with RendezvousServer(3, secret=SECRET) as server:
        clients = connect_all(server, 3)
        try:
            group = clients[0].group([2, 0], "pair")
            clients[0].describe_with(lambda: {"pair": 4}, lambda: ("here", {}))
            with pytest.raises(CollectiveTimeout) as caught:
                group.report_stuck("pair", 4, "barrier #4", 7.0, None)
            assert caught.value.missing_ranks == (2,)  # rank 1 is no member
            assert group.has_failed()
            with pytest.raises(CollectiveTimeout):
                group.check()
        finally:
            for client in clients:
                client.close()


def test_failure_of_a_member_is_told_to_all() -> None:
    with RendezvousServer(3, secret=SECRET) as server:
        clients = connect_all(server, 3)
        try:
            clients[0].group([2, 0], "pair").report_failure("no room")
            for client in clients[1:]:
                with pytest.raises(RankFailed, match="no room"):
                    client.get("never", timeout_seconds=SECONDS)
        finally:
            for client in clients:
                client.close()


# -- The server's side, with a virtual clock ----------------------------------------------------------------------


class ForgettingBench(Bench):
    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.join_all()

    def fill(self, scope: str) -> None:
        self.send(0, FrameType.SET, f"{scope}/key", b"value")
        self.send(0, FrameType.SET, f"{scope}/agree/1/0", b"1")
        self.send(0, FrameType.EXCHANGE, f"{scope}/ready", [0], b"")

    def forget(self, rank: int, scope: str, ranks: list[int] | None = None) -> None:
        self.send(rank, FrameType.LEAVE, scope, ranks, 0)


def test_the_last_word_counts() -> None:
    bench = ForgettingBench(3)
    bench.fill("world/0,1#10")
    kept = stored(bench.core)
    bench.fill("world/0,1#1")
    full = stored(bench.core)
    bench.forget(0, "world/0,1#1", [0, 1])
    bench.forget(0, "world/0,1#1", [0, 1])
    bench.forget(2, "world/0,1#1", [0, 1])  # no member
    assert stored(bench.core)[:-1] == full[:-1]
    bench.forget(1, "world/0,1#1", [0, 1])
    assert stored(bench.core) == kept  # a longer number is another name


@pytest.mark.parametrize("leaves_the_world_first", [False, True])
def test_who_has_left_the_world_has_left_its_groups(leaves_the_world_first: bool) -> None:
    bench = ForgettingBench(3)
    kept = stored(bench.core)
    bench.fill("world/0,1#1")
    leave_group, leave_world = (0, "world/0,1#1", [0, 1]), (1, THE_WORLD)
    for leave in (leave_world, leave_group) if leaves_the_world_first else (leave_group, leave_world):
        assert stored(bench.core) != kept
        bench.forget(*leave)
    assert stored(bench.core) == kept


def test_who_waits_for_what_is_forgotten_still_has_its_deadline() -> None:
    bench = ForgettingBench(2)
    waits = [
        bench.send(0, FrameType.EXCHANGE, "g/b", [0, 1], b""),
        bench.send(0, FrameType.GET, "g/key", None),
    ]
    bench.forget(0, "g")
    bench.forget(1, "g")
    bench.take(0)
    for wait in waits:
        bench.cancel(0, wait)
    assert stored(bench.core) == [0] * 4
    answers = {message[1]: message[0] for message in bench.take(0)}
    assert answers == dict.fromkeys(waits, FrameType.TIMED_OUT)
