"""Groups: who is in them, that they do not disturb each other, and that nothing is left of them."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

import gradsync as gs
from contract import expect
from gradsync.communicators.groups import Family, listed
from gradsync.communicators.lifetime import RaisedFailures
from gradsync.rendezvous import protocol
from gradsync.rendezvous.frames import is_under
from gradsync.rendezvous.protocol import Generation
from gradsync.rendezvous.store import Departures
from places import SHM, STAND_IN, Place, on


def test_names_are_short_and_differ() -> None:
    family = Family("world", RaisedFailures())
    names = [family.new_name(listed(ranks)) for ranks in (range(1000), range(1001), [0, 2], [2, 0], [0, 2])]
    assert names[2:] == ["world/0,2#1", "world/2,0#1", "world/0,2#2"]
    assert len(set(names)) == 5
    assert max(map(len, names)) < 64


# -- Nothing is left ----------------------------------------------------------------------------------------------


def resources() -> tuple[int, int, int]:
    with open("/proc/self/maps") as maps:
        mapped = sum("memfd:gradsync" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), mapped, threading.active_count()


def come_and_go(comm: Any, cycles: int) -> list[tuple[int, int, int]]:
    counts = []
    for cycle in range(cycles):
        group = comm.new_group(range(comm.world_size)) if cycle % 2 else comm.split(comm.rank % 2)
        group.barrier()
        group.close()
        comm.barrier()
        counts.append(resources())
    return counts


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 3), *on(STAND_IN, 2)])
def test_the_server_forgets_them(place: Place, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generations: list[Generation] = []

    def keep(*arguments: Any) -> Generation:
        generations.append(Generation(*arguments))
        return generations[-1]

    monkeypatch.setattr(protocol, "Generation", keep)
    monkeypatch.setattr(Departures, "rank_left", lambda departures, rank: None)  # what is left then, was left over
    place.run(world_size, come_and_go, 20)
    [generation] = generations
    keys = [key for key in generation.keys._values if is_under(key, "world") and "#" in key]
    assert keys == []
    assert {name for name, *_ in generation.barriers._barriers if "#" in name} == set()
    assert {name for name in generation.agreements._groups if "#" in name} == set()
    assert generation.departures._left == {}


def fail_in_the_making(comm: Any) -> str:
    from gradsync.communicators.shared_memory import shm_backend as shared_memory

    if comm.rank == 2:

        def refuse(descriptor: int) -> None:
            os.close(descriptor)
            raise gs.BackendUnavailable("no room")

        shared_memory.map_segment = refuse
    group = None if comm.rank == 1 else lambda: comm.new_group([0, 2])
    if not group:
        return str(expect(gs.RankFailed, comm.barrier))
    return str(expect(gs.GradsyncError, group))


def test_a_member_that_fails_is_told_to_all() -> None:
    texts = SHM.run(3, fail_in_the_making)
    assert texts[2] == "no room"
    for text in texts[:2]:
        assert "rank 2" in text
        assert "in new_group: BackendUnavailable: no room" in text
