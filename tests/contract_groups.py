"""The contract of groups: made of some ranks, in any order, overlapping, and closed in any order."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any

import numpy as np

import gradsync as gs
from contract import assert_identical, contribution, expect, note


def assert_works(group: Any, kit: Any, ranks: tuple[int, ...], call: int = 0) -> None:
    """Reduces, gathers and moves within a group, and compares with what the members gave."""
    world_rank = ranks[group.rank]
    assert (group.ranks, group.world_size) == (ranks, len(ranks))
    of_ranks = [contribution(rank, (11,), "int64", call) for rank in ranks]
    mine = contribution(world_rank, (11,), "int64", call)
    assert_identical(kit.get(group.all_reduce(kit.put(mine.copy()))), np.sum(of_ranks, axis=0))
    assert_identical(kit.get(group.all_gather(kit.put(mine))), np.concatenate(of_ranks))
    root = call % group.world_size
    assert_identical(kit.get(group.broadcast(kit.put(mine.copy()), root)), of_ranks[root])
    after, before = (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size
    came = group.exchange(kit.put(mine), dest=after, out=kit.put(np.zeros_like(mine)), source=before)
    assert_identical(kit.get(came), of_ranks[before])
    group.barrier()


def check_the_world_as_a_group(comm: Any, kit: Any) -> None:
    assert comm.ranks == tuple(range(comm.world_size))
    assert f"rank {comm.rank}/{comm.world_size}" in repr(comm)


def check_a_barrier_holds_all(comm: Any, kit: Any) -> None:
    """Nobody leaves before the last one has come, whoever that is: each rank in turn has work to do first."""
    for late in range(2 * comm.world_size):
        if comm.rank == late % comm.world_size:
            kit.get(kit.put(np.sort(contribution(comm.rank, (200_000,), "float64", late))))
        came = time.monotonic()  # one clock for all processes of a machine
        comm.barrier()
        went = time.monotonic()
        times = comm.objects.all_gather((came, went))
        assert max(came for came, _ in times) <= min(went for _, went in times)
    note("barrier", "")


def check_split_by_color_and_key(comm: Any, kit: Any) -> None:
    n = comm.world_size
    with closing(comm.split(comm.rank % 2, key=-comm.rank)) as group:
        members = tuple(rank for rank in reversed(range(n)) if rank % 2 == comm.rank % 2)
        assert_works(group, kit, members)
    with closing(comm.split(7)) as group:  # equal keys: in the order of the ranks
        assert_works(group, kit, tuple(range(n)))
    group = comm.split(None if comm.rank == n - 1 else 1)
    assert bool(group) == (comm.rank != n - 1)
    if group:
        assert_works(group, kit, tuple(range(n - 1)))
        group.close()
    comm.barrier()


def check_new_groups_overlap(comm: Any, kit: Any) -> None:
    """Used alternately, each rank in up to three of them: no group may wait for another."""
    n = comm.world_size
    every = [range(n), range(n - 1), range(1, n), {0}, {n - 1, 0}, reversed(range(n))]
    wanted = [ranks for ranks in map(tuple, every) if ranks]
    groups = [comm.new_group(ranks) for ranks in wanted]
    for ranks, group in zip(wanted, groups, strict=True):
        assert bool(group) == (comm.rank in ranks)
    for call in range(4):
        for ranks, group in zip(wanted, groups, strict=True):
            if group:
                assert_works(group, kit, tuple(sorted(ranks)), call)  # numbered in ascending order
    # Each rank closes in an order of its own.
    for place in np.random.default_rng(comm.rank).permutation(len(groups)):
        if groups[place]:
            groups[place].close()
            groups[place].close()
            expect(gs.CommunicatorClosed, groups[place].barrier)
    comm.barrier()


def check_groups_of_groups(comm: Any, kit: Any) -> None:
    half = comm.split(comm.rank // 2)
    pair = half.split(0, key=-half.rank)
    first = 2 * (comm.rank // 2)
    members = tuple(rank for rank in (first + 1, first) if rank < comm.world_size)
    assert_works(pair, kit, members)
    half.close()  # the parent first
    assert_works(pair, kit, members, call=1)
    pair.close()


def check_groups_come_and_go(comm: Any, kit: Any) -> None:
    """The same members again and again are a new group each time."""
    for call in range(5):
        with closing(comm.new_group(range(comm.world_size))) as group:
            assert_works(group, kit, comm.ranks, call)


def check_the_group_of_a_machine(comm: Any, kit: Any) -> None:
    with closing(comm.split_by_machine()) as group:
        assert_works(group, kit, comm.ranks)  # all ranks of the tests are on one


def check_refused_groups(comm: Any, kit: Any) -> None:
    n = comm.world_size
    for wrong in ([n], [-1], [0, 0], ["0"], [0.0], [None], 0, None, []):
        expect(gs.InvalidArgument, lambda w=wrong: comm.new_group(w), f"rank {comm.rank}/")
    for wrong in ("red", 1.5, [1], "", [], 0.0, False, 2**63):
        expect(gs.InvalidArgument, lambda w=wrong: comm.split(w), "color")
    expect(gs.InvalidArgument, lambda: comm.split(0, key="first"), "key")
    assert (kit.get(comm.all_reduce(kit.put(np.ones(2)))) == n).all()


def check_disagreement_within_a_group(comm: Any, kit: Any) -> None:
    """Told to the members, by their numbers in the world; other ranks and groups do not notice."""
    n = comm.world_size
    if n < 3:
        return
    group = comm.new_group([n - 1, 1])
    if group:
        error = expect(gs.PlanMismatch, lambda: group.all_reduce(kit.put(np.ones(3 + group.rank))))
        assert set(error.descriptions) == {1, n - 1}
        assert_works(group, kit, group.ranks)
        group.close()
    assert (kit.get(comm.all_reduce(kit.put(np.ones(2)))) == n).all()
