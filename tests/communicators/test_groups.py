"""Groups: who is in them, that they do not disturb each other, and that nothing is left of them."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradsync as gs
from contract import expect, meet_on_disk
from gradsync import process_group
from gradsync.communicators.groups import CommunicatorTree, listed
from gradsync.communicators.lifetime import RaisedFailures
from places import SHM, STAND_IN, STAND_IN_STUCK, Place, on

LATER = 30.0  # seconds for what must come at all


def total(comm: Any, value: float) -> float:
    """Returns the sum of the members' values."""
    array = np.full(3, float(value))
    comm.all_reduce(array)
    return float(array[0])


# -- Who is in it -------------------------------------------------------------------------------------------------


def test_groups_of_one_process() -> None:
    with gs.init_process_group("local") as comm:
        assert comm.ranks == (0,)
        for group in (comm.new_group([0]), comm.split(7), comm.split_by_machine(), gs.new_group([0])):
            assert group
            assert group.ranks == (0,)
            assert total(group, 5) == 5
        for mask in ([False], [True]):
            with pytest.raises(gs.InvalidArgument, match="distinct ranks"):
                comm.new_group(mask)
    assert group.closed
    with pytest.raises(gs.InvalidArgument, match="not initialised"):
        gs.new_group([0])


def test_a_closed_communicator_makes_no_group() -> None:
    with gs.init_process_group("local") as comm:
        comm.close()
        with pytest.raises(gs.CommunicatorClosed, match="new_group was called on a local communicator"):
            comm.new_group([0])
        with pytest.raises(gs.CommunicatorClosed, match="split"):
            comm.split(0)


# -- Side by side -------------------------------------------------------------------------------------------------


def begin_anew(comm: Any) -> None:
    for _ in range(3):
        n = comm.world_size
        group = gs.new_group(range(n))
        pair = gs.new_group([0, 1])
        assert total(group, 1) == n
        gs.destroy_process_group()
        assert group.closed
        assert not pair or pair.closed
        expect(gs.CommunicatorClosed, group.barrier)
        comm = gs.init_process_group(comm.backend, timeout_seconds=LATER, collective_timeout_seconds=LATER)
    gs.destroy_process_group()  # in order: another rank may still be on its way out of init_process_group


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 3), *on(STAND_IN, 2)])
def test_groups_end_with_the_process_group_and_come_again(place: Place, world_size: int) -> None:
    place.run(world_size, begin_anew)


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


@pytest.mark.parametrize(("place", "world_size"), on(SHM, 3))
def test_nothing_leaks(place: Place, world_size: int) -> None:
    for counts in place.run(world_size, come_and_go, 60):
        assert len(set(counts[10:])) == 1, set(counts[10:])


# -- What goes wrong ----------------------------------------------------------------------------------------------


def drop_a_group(comm: Any) -> str:
    """Rank 0 drops a group that the other one still needs: first a forked child of it, which is no member."""
    group = comm.new_group(range(comm.world_size))
    if comm.rank == 0:
        child = os.fork()
        if child == 0:
            del group
            gc.collect()
            os._exit(0)
        os.waitpid(child, 0)
    comm.barrier()
    assert total(group, 1) == comm.world_size
    if comm.rank == 0:
        del group
        gc.collect()
        comm.barrier()
        return ""
    comm.barrier()
    error = expect(gs.RankFailed, group.barrier)
    assert error.rank == 0
    return str(error)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_who_waits_in_a_group_that_another_rank_has_dropped_is_told() -> None:
    _, text = SHM.run(2, drop_a_group)
    assert "rank 0 closed the communicator while this rank still needed it" in text
    assert text.endswith("for uneven data see docs/uneven.md")


def die_while_others_make_a_group(comm: Any, victim: int, folder: Path) -> str:
    meet_on_disk(comm, folder)
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    error = expect(gs.RankFailed, lambda: comm.new_group(range(comm.world_size)))
    assert error.rank == victim
    return str(error)


# Not rank 0 of the stand-in, which serves its collectives.
@pytest.mark.parametrize(("place", "victim"), [(SHM, 0), (SHM, 2), (STAND_IN, 2)])
def test_a_member_dies_while_others_make_a_group(place: Place, victim: int, tmp_path: Path) -> None:
    started = time.monotonic()
    outcomes = place.outcomes(3, die_while_others_make_a_group, victim, tmp_path)
    assert time.monotonic() - started < 20
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert f"rank {victim}" in outcome.returned()


def miss_the_making(comm: Any) -> str:
    if comm.rank == 2:
        client: Any = process_group._client
        deadline = time.monotonic() + LATER
        while not client.has_failed():
            assert time.monotonic() < deadline
            time.sleep(0.02)  # as if it computed
        return str(expect(gs.RankFailed, lambda: comm.new_group([0, 1, 2])))
    error = expect(gs.GradsyncError, lambda: comm.new_group([0, 1, 2]))
    # The first to reach its deadline tells the others.
    assert isinstance(error, gs.RankFailed) or error.missing_ranks == (2,)
    return str(error)


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 3), *on(STAND_IN, 3)])
def test_a_member_that_does_not_come_to_the_making_is_named(place: Place, world_size: int) -> None:
    texts = place.run(world_size, miss_the_making, collective_timeout_seconds=2.5)
    assert all("for rank 2" in text for text in texts), texts
    assert "in new_group: RendezvousTimeout" in texts[2]


def die_inside(comm: Any, folder: Path) -> tuple[int | None, str]:
    group = comm.new_group([0, 2])
    others = comm.new_group([0, 1])
    meet_on_disk(comm, folder)
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.rank == 0:
        error = expect(gs.RankFailed, lambda: [total(group, 1) for _ in range(100)])
    else:
        error = expect(gs.RankFailed, others.barrier)
    return error.rank, str(error)


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 3), *on(STAND_IN, 3)])
def test_a_member_that_dies_in_a_collective_has_its_number_in_the_world(
    place: Place, world_size: int, tmp_path: Path
) -> None:
    outcomes = place.outcomes(world_size, die_inside, tmp_path)
    for outcome in outcomes[:2]:
        rank, text = outcome.returned()
        assert rank == 2
        assert "rank 2" in text


def leave_after_the_world_has_heard(comm: Any, folder: Path) -> None:
    rank, _ = die_inside(comm, folder)
    assert rank == 2
    deadline = time.monotonic() + LATER
    while not comm.closed:  # by its watcher
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_failure_that_a_group_has_raised_is_not_raised_by_the_end_of_the_world(tmp_path: Path) -> None:
    for outcome in STAND_IN.outcomes(3, leave_after_the_world_has_heard, tmp_path)[:2]:
        outcome.returned()


def stay_away(comm: Any, found_seconds: float) -> tuple[tuple[int, ...], str]:
    group = comm.new_group([1, 2])
    if comm.rank == 1:
        error = expect(gs.CollectiveTimeout, lambda: total(group, 1))
        return error.missing_ranks, str(error)
    client: Any = process_group._client
    deadline = time.monotonic() + LATER
    while not client.has_failed():
        assert time.monotonic() < deadline
        time.sleep(0.02)  # as if it computed
    time.sleep(found_seconds)
    error = expect(gs.CollectiveTimeout, (group or comm).barrier)
    return error.missing_ranks, str(error)


# After a while the watchers of all groups have found the failure before a call does: it is raised once all the same.
@pytest.mark.parametrize(
    ("place", "found_seconds"), [(SHM, 0.0), (SHM, 0.5), (STAND_IN_STUCK, 0.0), (STAND_IN_STUCK, 0.5)]
)
def test_who_is_absent_has_its_number_in_the_world(place: Place, found_seconds: float) -> None:
    for missing, text in place.run(3, stay_away, found_seconds, collective_timeout_seconds=2.5):
        assert missing == (2,)
        assert re.search(r"rank 1 waited \S+ s in all_reduce\(sum\) #\d+ \(.*\) for rank 2", text.partition("\n")[0])
        assert re.search(r"collectives of group .world/1,2#1., newest first:\n    #\d+ all_reduce\(sum\)", text)


def test_names_are_short_and_differ() -> None:
    """Also those of groups of a thousand ranks, whose members no name can list."""
    tree = CommunicatorTree("world", RaisedFailures())
    names = [tree.new_name(listed(ranks)) for ranks in (range(1000), range(1001), [0, 2], [2, 0], [0, 2])]
    assert names[2:] == ["world/0,2#1", "world/2,0#1", "world/0,2#2"]
    assert names[0].startswith("world/1000 ranks from 0, ")
    assert len(set(names)) == 5
    assert max(map(len, names)) < 64
