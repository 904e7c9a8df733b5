"""What a group has left is dropped by the last of its members that is done with it, and not before."""

from __future__ import annotations

import itertools

import pytest

from gradsync.rendezvous import forgetting
from gradsync.rendezvous.forgetting import Forgetting
from gradsync.rendezvous.roster import Roster

GROUP = "world/0,2#1"
MEMBERS = (0, 2)


class Kept:
    """A store that notes what was dropped."""

    def __init__(self) -> None:
        self.dropped: list[str] = []

    def forget(self, scope: str) -> None:
        self.dropped.append(scope)


class Server:
    """Three ranks, and two stores."""

    def __init__(self) -> None:
        self.roster = Roster(3)
        for rank in range(3):
            self.roster.seat(rank, connection=rank)
        self.stores = [Kept(), Kept()]
        self.forgetting = Forgetting(self.roster, self.stores)

    def leave(self, rank: int) -> None:
        self.roster.mark_left(rank)
        self.forgetting.rank_left(rank)

    @property
    def dropped(self) -> list[str]:
        """What both stores have dropped."""
        assert self.stores[0].dropped == self.stores[1].dropped
        return self.stores[0].dropped


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.mark.parametrize("order", list(itertools.permutations(MEMBERS)))
def test_the_last_member_drops_it(server: Server, order: tuple[int, int]) -> None:
    server.forgetting.hear(order[0], GROUP, MEMBERS)
    server.forgetting.hear(order[0], GROUP, MEMBERS)  # the same word again is no other member's
    assert server.dropped == []
    server.forgetting.hear(order[1], GROUP, MEMBERS)
    assert server.dropped == [GROUP]


def test_who_has_left_is_done_with_all(server: Server) -> None:
    server.forgetting.hear(0, GROUP, MEMBERS)
    server.forgetting.hear(0, "world/0,1,2#1", (0, 1, 2))
    server.leave(2)
    assert server.dropped == [GROUP]
    server.leave(1)
    assert server.dropped == [GROUP, "world/0,1,2#1"]


def test_who_left_before_is_not_waited_for(server: Server) -> None:
    server.leave(2)
    assert server.dropped == []  # the other one may still need it
    server.forgetting.hear(0, GROUP, MEMBERS)
    assert server.dropped == [GROUP]


def test_a_rank_outside_has_no_word(server: Server) -> None:
    server.forgetting.hear(1, GROUP, MEMBERS)
    server.forgetting.hear(0, GROUP, MEMBERS)
    server.leave(1)
    assert server.dropped == []


def test_groups_of_one_name_and_other_members_are_told_apart(server: Server) -> None:
    server.forgetting.hear(0, GROUP, MEMBERS)
    server.forgetting.hear(1, GROUP, (0, 1))
    assert server.dropped == []


def test_a_group_may_come_again(server: Server) -> None:
    for _ in range(2):
        for rank in MEMBERS:
            server.forgetting.hear(rank, GROUP, MEMBERS)
    assert server.dropped == [GROUP, GROUP]


def test_the_groups_that_are_waited_for_have_a_limit(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that half of its members are done with may be finished; more of them stay until the end."""
    monkeypatch.setattr(forgetting, "_MAX_SCOPES", 2)
    for number in range(3):
        server.forgetting.hear(0, f"group {number}", MEMBERS)
    for number in reversed(range(3)):
        server.forgetting.hear(2, f"group {number}", MEMBERS)
    assert server.dropped == ["group 1", "group 0"]
    server.forgetting.hear(0, "group 3", MEMBERS)
    server.forgetting.hear(2, "group 3", MEMBERS)
    assert server.dropped == ["group 1", "group 0", "group 3"]
