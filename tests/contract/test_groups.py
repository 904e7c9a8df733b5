"""Groups: who is in them, that they do not disturb each other, and how they end."""

import copy
import gc
import os
import pickle
import signal
import threading

import numpy as np
import pytest

import gradsync as gs
from arrays import arrays_of, assert_identical, contribution
from commands import wait_until
from ranks import ALSO_ALONE, EVERYWHERE, ON_GPU, THREE_OF_FAKE


def assert_works(group, ranks, call=0):
    """Reduces, gathers and moves within a group, and compares with what the members gave."""
    arrays = arrays_of(group)
    assert (group.ranks, group.world_size) == (tuple(ranks), len(ranks))
    of_ranks = [contribution(rank, 11, "int64", call) for rank in ranks]
    mine = of_ranks[group.rank]
    assert_identical(arrays.get(group.all_reduce(arrays.put(mine))), np.sum(of_ranks, axis=0))
    assert_identical(arrays.get(group.all_gather(arrays.put(mine))), np.concatenate(of_ranks))
    root = call % group.world_size
    assert_identical(arrays.get(group.broadcast(arrays.put(mine), root)), of_ranks[root])
    after, before = (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size
    came = group.exchange(arrays.put(mine), dest=after, out=arrays.put(np.zeros_like(mine)), source=before)
    assert_identical(arrays.get(came), of_ranks[before])
    group.barrier()


def total(group, value=1.0):
    """The sum of the members' values."""
    arrays = arrays_of(group)
    return float(arrays.get(group.all_reduce(arrays.put(np.full(3, value))))[0])


@pytest.mark.ranks(on=ALSO_ALONE | ON_GPU)
def test_the_world_and_its_machine(comm):
    assert comm
    assert comm.ranks == tuple(range(comm.world_size))
    assert f"rank {comm.rank}/{comm.world_size}" in repr(comm)
    with comm.split_by_machine() as group:
        assert_works(group, comm.ranks)  # all ranks of the tests are on one
    assert group.closed


@pytest.mark.ranks(on=EVERYWHERE | THREE_OF_FAKE | ON_GPU)
def test_split_by_color_and_key(comm):
    n = comm.world_size
    with comm.split(comm.rank % 2, key=-comm.rank) as group:
        assert_works(group, [rank for rank in reversed(range(n)) if rank % 2 == comm.rank % 2])
    with comm.split(7) as group:  # equal keys: in the order of the ranks
        assert_works(group, range(n))
    for color, key in ((-(2**63), 2**63 - 1), (2**63 - 1, -(2**63)), (np.int64(3), np.int8(1))):
        with comm.split(color, key) as group:
            assert_works(group, range(n))
    group = comm.split(None if comm.rank == n - 1 else 1)
    assert bool(group) == (comm.rank != n - 1)
    if group:
        assert_works(group, range(n - 1))
        group.close()


@pytest.mark.ranks(on=EVERYWHERE)
def test_members_of_new_group_keep_the_order_of_the_world(comm):
    n = comm.world_size
    for ranks in (range(n), range(n)[::-1], {0}, [n - 1, 0] if n > 1 else [0], np.arange(n)):
        members = sorted(map(int, ranks))
        group = comm.new_group(ranks)
        assert bool(group) == (comm.rank in members)
        if group:
            assert_works(group, members)
            group.close()


@pytest.mark.ranks(on=EVERYWHERE | THREE_OF_FAKE | ON_GPU)
def test_overlapping_groups_used_in_turns(comm):
    """Each rank is in up to five of them: no group may wait for another. They end in another order on each rank."""
    n = comm.world_size
    wanted = [ranks for ranks in map(tuple, (range(n), range(n - 1), range(1, n), {0}, {n - 1, 0})) if ranks]
    groups = [(group, ranks) for ranks in wanted if (group := comm.new_group(ranks))]
    for call in range(4):
        for group, ranks in groups:
            assert_works(group, sorted(ranks), call)
    comm.barrier()
    for group, _ in groups[:: 1 if comm.rank % 2 else -1]:
        group.close()
        with pytest.raises(gs.CommunicatorClosed):
            group.barrier()
    assert total(comm) == n


@pytest.mark.ranks(on=EVERYWHERE)
def test_groups_of_groups_outlive_their_parents(comm):
    half = comm.split(comm.rank // 2)
    pair = half.split(0, key=-half.rank)
    first = 2 * (comm.rank // 2)
    members = [rank for rank in (first + 1, first) if rank < comm.world_size]
    assert_works(pair, members)
    half.close()
    assert_works(pair, members, call=1)
    pair.close()


@pytest.mark.ranks(3, fresh=True)
def test_groups_end_with_the_process_group_and_come_again(comm):
    for _ in range(2):
        group = gs.new_group(range(3))
        alone = comm.new_group([comm.rank])
        assert total(group) == 3
        gs.destroy_process_group()
        assert group.closed
        assert alone.closed
        with pytest.raises(gs.InvalidArgument):
            gs.new_group([0])
        comm = gs.init_process_group(comm.backend)
    comm.barrier()


# -- Who is no member -------------------------------------------------------------------------------------------------


@pytest.mark.ranks(1, on=("local", "shm"))
def test_who_is_no_member_does_not_take_the_world_for_the_group(comm):
    nobody = comm.split(None)
    assert not nobody
    assert nobody is not None
    for other in (nobody, copy.copy(nobody), pickle.loads(pickle.dumps(nobody))):
        assert "NonMember" in repr(other)
        assert not hasattr(other, "rank")
        with pytest.raises(AttributeError, match="not a member"):
            other.all_reduce(np.ones(2))
    array = np.ones(2)
    for call in (
        lambda group: gs.bcast_list_([array], communicator=group),
        lambda group: gs.bcast_list_([array], group=group),
        lambda group: gs.broadcast_tree({"w": array}, communicator=group),
        lambda group: gs.check_consistency([array], group),
        lambda group: gs.group_barrier(group),
        lambda group: gs.shard_indices(5, communicator=group),
        lambda group: gs.pack_allreduce_split([array], [(2,)], group),
        lambda group: gs.AllreduceCallback(group=group),
        lambda group: gs.comm.all_gather(1, group=group),
        lambda group: gs.comm.gather(1, group=group),
    ):
        for wrong in (nobody, [0, 1], 3):
            with pytest.raises(gs.InvalidArgument, match="if group" if wrong is nobody else "Communicator"):
                call(wrong)


# -- What goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.ranks(on=EVERYWHERE)
def test_refused_groups(comm):
    n = comm.world_size
    if comm.rank == 0:  # alone: nothing has reached the others
        for wrong in ([n], [-1], [0, 0], ["0"], [0.0], [None], [True] * 2, 0, None, []):
            with pytest.raises(gs.InvalidArgument, match=f"rank 0/{n}"):
                comm.new_group(wrong)
        for wrong in ("red", 1.5, [1], "", [], 0.0, False, 2**63):
            with pytest.raises(gs.InvalidArgument, match="color"):
                comm.split(wrong)
        with pytest.raises(gs.InvalidArgument, match="key"):
            comm.split(0, key="first")
    assert total(comm) == n
    with comm.new_group(range(n)) as group:  # it numbers its ranks itself, and says so
        for call in (lambda: group.broadcast(np.ones(3), n), lambda: group.send(np.ones(3), n)):
            with pytest.raises(gs.InvalidArgument, match="group" if comm.backend != "local" else ""):
                call()
        group.barrier()


@pytest.mark.ranks(3, on=("shm", "debug", "mpi"))
def test_disagreement_within_a_group_names_ranks_of_the_world(comm):
    """Other ranks and groups do not notice."""
    group, arrays = comm.new_group([2, 1]), arrays_of(comm)
    if group:
        with pytest.raises(gs.PlanMismatch) as raised:
            group.all_reduce(arrays.put(np.ones(3 + group.rank)))
        assert set(raised.value.descriptions) == {1, 2}
        assert_works(group, group.ranks)
        group.close()
    assert total(comm) == 3


@pytest.mark.ranks(3, options={"collective_timeout_seconds": 1.5}, fresh=True)
def test_members_that_name_other_ranks_hear_of_it(comm):
    with pytest.raises(gs.GradsyncError, match="same ranks"):
        comm.new_group([0, 1] if comm.rank == 0 else [0, 1, 2])
    assert_over(comm)


@pytest.mark.ranks(3, options={"collective_timeout_seconds": 1.5}, fresh=True)
def test_a_member_that_does_not_come_to_the_making_is_named(comm):
    if comm.rank == 2:
        wait_until(lambda: is_broken(comm))
        assert_over(comm)
        return
    with pytest.raises((gs.RendezvousTimeout, gs.RankFailed)) as raised:
        comm.new_group(comm.ranks)
    # The first to reach its deadline tells the others.
    assert isinstance(raised.value, gs.RankFailed) or raised.value.missing_ranks == (2,)
    assert "for rank 2" in str(raised.value)
    assert_over(comm)


def assert_over(comm):
    """The world hears of it, too; else its end would raise it, since no call has."""
    with pytest.raises(gs.GradsyncError):
        for _ in range(1000):
            comm.barrier()


def is_broken(comm):
    """Whether the other ranks have given up; tried with a group of this rank alone, for which nobody waits."""
    try:
        comm.new_group([comm.rank]).close()
    except (gs.RankFailed, gs.CommunicatorClosed, gs.RendezvousError):
        return True
    return False


@pytest.mark.ranks(3, ends={2: -signal.SIGKILL})
@pytest.mark.parametrize("when", ["making", "collective"])
def test_a_member_that_dies_has_its_number_in_the_world(comm, when):
    group, others = comm.new_group([0, 2]), comm.new_group([0, 1])
    comm.barrier()
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(gs.RankFailed) as raised:
        for _ in range(1000):
            comm.new_group(range(3)) if when == "making" else (group or others).barrier()
    assert raised.value.rank == 2
    assert_over(comm)


@pytest.mark.ranks(2, on=("shm",), fresh=True)
@pytest.mark.parametrize("how", ["close", "abort", "own abort"])
def test_the_end_of_the_communicator_ends_the_wait_for_members(comm, how, tmp_path):
    comm.barrier()
    if comm.rank == 1:
        if how != "own abort":
            comm.close() if how == "close" else comm.abort("ValueError in the backward pass")
        wait_until((tmp_path / "over").exists)
        return
    if how == "own abort":
        threading.Timer(0.2, comm.abort, ["the user has had enough"]).start()
    with pytest.raises((gs.RankFailed, gs.CommunicatorClosed)) as raised:
        comm.new_group([0, 1])
    if how != "own abort":
        assert raised.value.rank == 1
    (tmp_path / "over").touch()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.ranks(2, on=("shm",), fresh=True)
def test_who_waits_in_a_group_that_another_rank_has_dropped_hears_of_it(comm):
    """The end of a forked child drops nothing: it is no member."""
    group = comm.new_group(comm.ranks)
    if comm.rank == 0:
        child = os.fork()
        if child == 0:
            del group
            gc.collect()
            os._exit(0)
        os.waitpid(child, 0)
    comm.barrier()
    assert total(group) == 2
    if comm.rank == 0:
        del group
        gc.collect()
        comm.barrier()
        return
    comm.barrier()
    with pytest.raises(gs.RankFailed) as raised:
        group.barrier()
    assert raised.value.rank == 0
