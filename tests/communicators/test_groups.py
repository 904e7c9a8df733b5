"""Groups: who is in them, that they do not disturb each other, and that nothing is left of them."""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

import gradsync as gs
from contract import expect
from gradsync import process_group
from places import SHM, STAND_IN, STAND_IN_STUCK, Place, on

LATER = 30.0  # seconds for what must come at all


def total(comm: Any, value: float) -> float:
    """Returns the sum of the members' values."""
    array = np.full(3, float(value))
    comm.all_reduce(array)
    return float(array[0])


# -- Who is in it -------------------------------------------------------------------------------------------------


def every_subset(comm: Any) -> None:
    for size in range(1, comm.world_size + 1):
        for members in itertools.combinations(range(comm.world_size), size):
            group = comm.new_group(reversed(members))
            if comm.rank not in members:
                assert not group
                continue
            assert group.ranks == members
            assert (group.rank, group.world_size) == (members.index(comm.rank), size)
            assert (group.backend, group.device) == (comm.backend, comm.device)
            assert f"(rank {comm.rank} of the world)" in group.label or comm.world_size == 1
            assert total(group, comm.rank) == sum(members)
            values = np.full(2, comm.rank)
            group.broadcast(values, root=size - 1)
            assert values[0] == members[-1]
            group.close()
    assert total(comm, 1) == comm.world_size


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 1, 2, 3, 4), *on(STAND_IN, 2, 3)])
def test_every_subset_can_be_a_group(place: Place, world_size: int) -> None:
    place.run(world_size, every_subset)


def split_and_count(comm: Any) -> None:
    n, rank = comm.world_size, comm.rank
    halves = comm.split(rank % 2, key=-rank)
    expected = [r for r in reversed(range(n)) if r % 2 == rank % 2]
    assert halves.ranks == tuple(expected)
    assert halves.rank == expected.index(rank)
    assert total(halves, rank) == sum(expected)
    some = comm.split(None if rank == 0 else -(2**63), key=2**63 - 1)
    assert bool(some) == (rank != 0)
    if some:
        assert some.ranks == tuple(range(1, n))
        some.barrier()
    assert not comm.split(None)
    alone = halves.split(halves.rank)
    assert (alone.ranks, alone.world_size) == ((rank,), 1)
    machine = comm.split_by_machine()
    assert machine.ranks == tuple(range(n))
    assert total(machine, rank) == n * (n - 1) / 2


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 1, 2, 3, 4), *on(STAND_IN, 2, 3)])
def test_split(place: Place, world_size: int) -> None:
    place.run(world_size, split_and_count)


def test_groups_of_one_process() -> None:
    with gs.init_process_group("local") as comm:
        assert comm.ranks == (0,)
        for group in (comm.new_group([0]), comm.split(7), comm.split_by_machine(), gs.new_group([0])):
            assert group
            assert group.ranks == (0,)
            assert total(group, 5) == 5
    assert group.closed
    with pytest.raises(gs.InvalidArgument, match="not initialised"):
        gs.new_group([0])


@pytest.mark.parametrize("ranks", [[], [1], [-1], [0, 0], 0, None, "0", [0.0], [0, 2**70]])
def test_bad_ranks_are_told(ranks: Any) -> None:
    with gs.init_process_group("local") as comm, pytest.raises(gs.InvalidArgument, match="distinct ranks from 0 to 0"):
        comm.new_group(ranks)


@pytest.mark.parametrize(("color", "key"), [("red", 0), (1.0, 0), (True, 0), (2**63, 0), (0, None), (0, -(2**63) - 1)])
def test_bad_colors_are_told(color: Any, key: Any) -> None:
    with gs.init_process_group("local") as comm, pytest.raises(gs.InvalidArgument, match="integer of 64 bits"):
        comm.split(color, key)


def test_a_closed_communicator_makes_no_group() -> None:
    with gs.init_process_group("local") as comm:
        comm.close()
        with pytest.raises(gs.CommunicatorClosed, match="new_group on a local communicator"):
            comm.new_group([0])
        with pytest.raises(gs.CommunicatorClosed, match="split"):
            comm.split(0)


# -- Side by side -------------------------------------------------------------------------------------------------


def alternate(comm: Any, rounds: int) -> None:
    """Overlapping groups in turn: every rank uses those that it is in, in one order for all."""
    n = comm.world_size
    subsets = [(0, 1), (1, 2), (0, 2), tuple(range(n)), (0, 1, 2)]
    groups = [comm.new_group(subset) for subset in subsets]
    order = np.random.default_rng(3)
    for step in range(rounds):
        index = int(order.integers(0, len(subsets)))
        if groups[index]:
            assert total(groups[index], comm.rank + step) == sum(subsets[index]) + step * len(subsets[index])
        if step % 50 == 0:
            assert total(comm, 1) == n


@pytest.mark.parametrize(("place", "world_size", "rounds"), [(SHM, 3, 500), (SHM, 4, 500), (STAND_IN, 3, 60)])
def test_overlapping_groups_in_turn(place: Place, world_size: int, rounds: int) -> None:
    place.run(world_size, alternate, rounds)


def close_in_any_order(comm: Any) -> None:
    for order in itertools.permutations(range(3)):
        parent = comm.split(0)
        child = parent.new_group(range(comm.world_size))
        grandchild = child.split(0, key=-comm.rank)
        groups = [parent, child, grandchild]
        for place, index in enumerate(order):
            groups[index].close()
            for other in order[place + 1 :]:  # closing one ends no other
                assert not groups[other].closed
                assert total(groups[other], 1) == comm.world_size
    assert total(comm, 1) == comm.world_size


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 2, 3), *on(STAND_IN, 2)])
def test_groups_end_in_any_order(place: Place, world_size: int) -> None:
    place.run(world_size, close_in_any_order)


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


def die_while_others_make_a_group(comm: Any, victim: int) -> str:
    comm.barrier()
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    error = expect(gs.RankFailed, lambda: comm.new_group(range(comm.world_size)))
    assert error.rank == victim
    return str(error)


# Not rank 0 of the stand-in, which serves its collectives.
@pytest.mark.parametrize(("place", "victim"), [(SHM, 0), (SHM, 2), (STAND_IN, 2)])
def test_a_member_dies_while_others_make_a_group(place: Place, victim: int) -> None:
    started = time.monotonic()
    outcomes = place.outcomes(3, die_while_others_make_a_group, victim)
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
    assert all("missing: rank 2" in text for text in texts), texts
    assert "in new_group: RendezvousTimeout" in texts[2]


def die_inside(comm: Any) -> tuple[int | None, str]:
    group = comm.new_group([0, 2])
    others = comm.new_group([0, 1])
    comm.barrier()
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.rank == 0:
        error = expect(gs.RankFailed, lambda: [total(group, 1) for _ in range(100)])
    else:
        error = expect(gs.RankFailed, others.barrier)
    return error.rank, str(error)


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 3), *on(STAND_IN, 3)])
def test_a_member_that_dies_in_a_collective_has_its_number_in_the_world(place: Place, world_size: int) -> None:
    outcomes = place.outcomes(world_size, die_inside)
    for outcome in outcomes[:2]:
        rank, text = outcome.returned()
        assert rank == 2
        assert "rank 2" in text


def leave_after_the_world_has_heard(comm: Any) -> None:
    rank, _ = die_inside(comm)
    assert rank == 2
    deadline = time.monotonic() + LATER
    while not comm.closed:  # by its watcher
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_failure_that_a_group_has_raised_is_not_raised_by_the_end_of_the_world() -> None:
    for outcome in STAND_IN.outcomes(3, leave_after_the_world_has_heard)[:2]:
        outcome.returned()


def go_on_without(comm: Any, rounds: int) -> int:
    """Rank 0 has no part in the group: it comes to its end without any collective, and the members to theirs."""
    group = comm.new_group(range(1, comm.world_size))
    for _ in range(rounds if group else 0):
        assert total(group, 1) == comm.world_size - 1
    assert comm.recorder.begun == begun_at_start(comm)
    assert total(comm, 1) == comm.world_size
    return group.recorder.begun if group else 0


def begun_at_start(comm: Any) -> int:
    return 1 if comm.backend == "shm" else 0  # the barrier that ends its making


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 3), *on(STAND_IN, 3)])
def test_who_is_no_member_goes_on(place: Place, world_size: int) -> None:
    outside, *members = place.run(world_size, go_on_without, 20)
    assert outside == 0
    assert all(begun >= 20 for begun in members)


def stay_away(comm: Any, warm_up: int, found_seconds: float) -> tuple[tuple[int, ...], str]:
    group = comm.new_group([1, 2])
    if comm.rank == 1:
        for _ in range(warm_up):
            total(group, 1)
        error = expect(gs.CollectiveTimeout, lambda: total(group, 1))
        return error.missing_ranks, str(error)
    if comm.rank == 2:
        for _ in range(warm_up):
            total(group, 1)
    client: Any = process_group._client
    deadline = time.monotonic() + LATER
    while not client.has_failed():
        assert time.monotonic() < deadline
        time.sleep(0.02)  # as if it computed
    time.sleep(found_seconds)
    error = expect(gs.CollectiveTimeout, (group or comm).barrier)
    return error.missing_ranks, str(error)


# With ten collectives before it NCCL launches without asking, and its watcher finds the absence.
# After a while the watchers of all groups have found the failure before a call does: it is raised once all the same.
@pytest.mark.parametrize(("warm_up", "found_seconds"), [(0, 0.0), (10, 0.0), (0, 0.5)])
@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 3), *on(STAND_IN_STUCK, 3)])
def test_who_is_absent_has_its_number_in_the_world(
    place: Place, world_size: int, warm_up: int, found_seconds: float
) -> None:
    for missing, text in place.run(world_size, stay_away, warm_up, found_seconds, collective_timeout_seconds=2.5):
        assert missing == (2,)
        assert re.search(r"rank 1 waited \S+ s in all_reduce\(sum\) #\d+ \(.*\) for rank 2", text.partition("\n")[0])
        assert re.search(r"collectives of group .world/1,2#1., newest first:\n    #\d+ all_reduce\(sum\)", text)


def disagree(comm: Any) -> tuple[list[int], str]:
    group = comm.new_group([0, 2])
    if not group:
        return [], ""
    error = expect(gs.PlanMismatch, lambda: group.all_reduce(np.ones(2 + comm.rank)))
    assert total(group, 1) == 2
    return sorted(error.descriptions), str(error)


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 3), *on(STAND_IN, 3)])
def test_who_disagrees_has_its_number_in_the_world(place: Place, world_size: int) -> None:
    for ranks, text in place.run(world_size, disagree)[::2]:
        assert ranks == [0, 2]
        assert "rank 2: all_reduce of float64[4]" in text
