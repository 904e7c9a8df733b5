"""gs.rebuild(): after a death, or at a step's edge, the ranks that are left make a new world."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import numpy as np
import pytest

import gradsync as gs
from arrays import arrays_of
from bucketing.reference import Heard
from gradsync.mpi import MPI

ON = {"shm": (4,), "fake": (3,)}


def mean_over(sync, comm, value):
    """The mean of `value` over the world, by a callback."""
    with sync.backward():
        sync("w", arrays_of(comm).xp.full(3, float(value)))
    return float(sync.results()["w"][0])


def die(comm, rank):
    """Lets a rank die, and the others find it in a barrier."""
    comm.barrier()
    if comm.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(gs.RankFailed) as caught:
        comm.barrier()
    assert caught.value.rank == rank


@pytest.mark.ranks(on=ON, ends={1: -9})
def test_the_ranks_that_are_left_go_on(comm):
    sync, old, size = gs.AllreduceCallback(), comm, comm.world_size
    assert (comm.member, comm.most_advanced) == (comm.rank, 0)
    mean_over(sync, comm, comm.member)
    die(comm, 1)
    comm = gs.rebuild()
    members = [member for member in range(size) if member != 1]
    assert (comm.world_size, comm.rank, comm.member) == (size - 1, members.index(old.member), old.member)
    assert comm is gs.get_communicator() is gs.WORLD
    assert mean_over(sync, comm, comm.member) == np.mean(members)
    assert comm.objects.all_gather(comm.member) == members
    assert gs.comm.get_rank() == comm.rank


@pytest.mark.ranks(on=ON, ends={0: -9, 2: -9})
def test_one_after_the_other_dies(comm):
    sync, size = gs.AllreduceCallback("sum"), comm.world_size
    for gone, rank in enumerate([0, 1], 1):  # rank 1 of the second world was rank 2
        die(comm, rank)
        comm = gs.rebuild()
        assert comm.world_size == size - gone
        assert mean_over(sync, comm, 1.0) == size - gone


@pytest.mark.ranks(4, on=("shm",), ends={0: -9, 3: -9})
def test_two_die_at_once(comm):
    if comm.rank in (0, 3):
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(gs.RankFailed):
        while True:
            comm.barrier()
    comm = gs.rebuild()
    while comm.world_size > 2:  # the second death came after the first rebuild
        with pytest.raises(gs.RankFailed):
            comm.barrier()
        comm = gs.rebuild()
    assert comm.objects.all_gather(comm.member) == [1, 2]


@pytest.mark.ranks(on={"shm": (3,), "fake": (2,)}, fresh=True)
def test_at_the_edge_of_a_step_all_go_on_as_they_are(comm):
    sync = gs.AllreduceCallback()
    for steps in range(3):
        assert comm.completed_steps == steps
        mean_over(sync, comm, 1.0)
        comm = gs.rebuild()
        assert (comm.rank, comm.completed_steps) == (comm.member, steps + 1)


@pytest.mark.ranks(3, on=("shm",), ends={2: -9})
def test_the_rank_with_the_most_steps_is_known(comm):
    sync = gs.AllreduceCallback(name="of all")
    for _ in range(3):
        mean_over(sync, comm, 1.0)
    pair = comm.new_group([0, 1])
    if comm.rank == 1:  # as one that has ended a flush in which the others failed
        comm.completed_steps += 1
    die(comm, 2)
    comm = gs.rebuild()
    assert (comm.most_advanced, comm.completed_steps) == (1, [3, 4][comm.rank])
    with pytest.raises(gs.CommunicatorClosed, match="make it again"):
        pair.barrier()
    assert comm.new_group([0, 1]).most_advanced == comm.split(0, key=-comm.rank).split(0).most_advanced + 1 == 1
    mean_over(sync, comm, 1.0)
    assert comm.completed_steps == 5  # what was broadcast before has come for sure


@pytest.mark.ranks(3, on=("fake",), ends={2: -9})
def test_steps_over_another_backend_count_too(comm):
    if comm.rank == 1:
        comm.completed_steps += 1
    die(comm, 2)
    comm = gs.rebuild()
    with gs.override_backend("shm") as over_shm:
        assert (over_shm.most_advanced, over_shm.member) == (1, comm.member)
        mean_over(gs.AllreduceCallback(), over_shm, 1.0)
    assert comm.completed_steps == gs.rebuild().completed_steps == 2


@pytest.mark.ranks(on={"shm": (3,), "fake": (3,)}, ends={2: -9})
def test_what_belongs_to_the_old_world_cannot_be_used(comm):
    group, old = comm.new_group([0, 1]), comm
    bound = gs.AllreduceCallback(group=comm, name="bound")
    die(comm, 2)
    gs.rebuild()
    zeros = arrays_of(old).xp.zeros(1)
    reading = lambda: old.rank, lambda: old.world_size, lambda: old.ranks, lambda: old.most_advanced
    for call in (old.barrier, lambda: old.all_reduce(zeros), lambda: mean_over(bound, old, 1.0), *reading):
        with pytest.raises(gs.CommunicatorClosed, match=r"gs\.rebuild\(\) has made a new world: make it again"):
            call()
    if group:
        for call in (group.barrier, lambda: group.rank):
            with pytest.raises(gs.CommunicatorClosed, match="make it again"):
                call()
        with pytest.raises(ZeroDivisionError), group, bound.backward():
            1 / 0  # noqa: B018 - an error of the program stays the one that is raised
    assert "closed: gs.rebuild() has made a new world" in repr(old)
    old.close()
    again = gs.new_group([0])
    assert not again or again.world_size == 1


@pytest.mark.ranks(on={"shm": (3,), "fake": (3,)}, ends={2: -9})
def test_the_block_of_the_first_world_ends_the_last_one(comm):
    with comm:
        die(comm, 2)
        rebuilt = gs.rebuild()
    assert rebuilt.closed
    assert not gs.is_initialized()


class Doubling:
    """A hook with a state."""

    calls = 0

    def __call__(self, bucket):
        self.calls += 1
        bucket.communicator.all_reduce(bucket.buffer, bucket.op)

    def reset(self):
        self.calls = 0


@pytest.mark.ranks(2, on=("shm",), fresh=True)
def test_callbacks_begin_anew(comm):
    sync, hook = gs.AllreduceCallback(clip_norm=1e9), Doubling()
    sync.register_hook(hook)
    mean_over(sync, comm, 1.0)
    assert hook.calls == 1
    assert sync.norm is not None
    started = sync("another", np.ones(2))
    comm = gs.rebuild()
    with pytest.raises(gs.GradientCancelled, match="rebuild"):
        started.result()
    assert (hook.calls, sync.norm, sync.results()) == (0, None, {})
    with sync.backward():  # other gradients than before: no step is known
        sync("b", np.full(2, comm.rank, "float32"))
    assert sync.results()["b"].tolist() == [0.5, 0.5]


@pytest.mark.ranks(on={"shm": (3,), "fake": (3,)}, ends={2: -9})
def test_gradient_buffers_go_on(comm):
    """The program writes gradients into them, and reads the results there."""
    sync = gs.AllreduceCallback("sum", parameters={"w": ((3,), "float64")}, gradient_as_bucket_view=True)
    buffer = sync.gradient_buffers()["w"]
    for _ in range(2):
        with sync.backward():
            buffer[...] = comm.member + 1
            sync("w", buffer)
        assert buffer.tolist() == [sum(range(1, comm.world_size + 1))] * 3
        if comm.world_size == 3:
            die(comm, 2)
            comm = gs.rebuild()


@pytest.mark.ranks(2, on=("shm",), ends={0: -9})
@pytest.mark.parametrize("how", ["no callback", "to a group", "from a group"])
def test_no_rank_is_left_with_half_of_a_state(comm, how):
    """The root dies as soon as rank 1 has written some of its values."""
    everyone = comm.new_group([0, 1])
    if how == "no callback":
        comm = gs.rebuild()
    else:
        mean_over(gs.AllreduceCallback(group=everyone if how == "from a group" else None), comm, 1.0)
    state, root = [np.full(n, float(comm.rank)) for n in (100_000, 5_000_000)], comm.objects.broadcast(os.getpid())

    def kill():
        while state[0][0] == 1.0:
            pass
        os.kill(root, signal.SIGKILL)

    if comm.rank == 1:
        threading.Thread(target=kill, daemon=True).start()
    with contextlib.suppress(gs.RankFailed):
        gs.broadcast_tree(state, communicator=everyone if how == "to a group" else comm)
        time.sleep(30.0 * (comm.rank == 0))
    assert {*state[0].tolist()} == {*state[1].tolist()} == {0.0}


@pytest.mark.ranks(2, on=("shm",), fresh=True)
def test_the_world_of_mpi_is_the_new_one_and_a_stored_one_has_ended(comm):
    stored, part = MPI.COMM_WORLD, MPI.COMM_WORLD.Split(0)
    gs.rebuild()
    assert MPI.COMM_WORLD.allreduce(1) == 2
    for ended in (stored, part):
        with pytest.raises(gs.CommunicatorClosed):
            ended.Barrier()


@pytest.mark.ranks(2, on=("shm",), fresh=True)
def test_who_forgets_the_broadcast_that_a_new_rank_begins_with_is_told(comm):
    comm = gs.rebuild()
    with pytest.raises(gs.PlanMismatch, match=r"after gs\.rebuild\(\), .* all ranks call gs\.broadcast_tree\(state"):
        gs.broadcast_tree({"w": np.zeros(3)}) if comm.rank else comm.all_reduce(np.zeros(3))
    with pytest.raises(gs.PlanMismatch, match=r"the first collective of a rank that was started again has to be the"):
        gs.broadcast_tree([np.zeros(3)] * (1 + comm.rank))


@pytest.mark.ranks(2, on=("shm",), fresh=True)
def test_the_notice_of_no_broadcast_is_of_the_new_world(comm):
    gs.bcast_list_([np.zeros(3)])
    sync = gs.AllreduceCallback()
    with Heard() as lines:
        mean_over(sync, comm, 1.0)
        assert lines == []
        comm = gs.rebuild()
        mean_over(sync, comm, 1.0)
    assert ["nothing was broadcast since gs.rebuild()" in line for line in lines] == [True] * (comm.rank == 0)


@pytest.mark.ranks(2, on=("shm",), fresh=True)
def test_parameters_are_compared_anew(comm):
    weights = np.zeros(3)
    sync = gs.AllreduceCallback(parameters={"w": weights}, diverged="raise")
    mean_over(sync, comm, 1.0)
    mean_over(sync, comm, 1.0)
    weights += comm.rank
    mean_over(sync, comm, 1.0)  # not yet: only every 1,000 steps
    comm = gs.rebuild()
    with pytest.raises(gs.PlanMismatch, match="'w'"):
        mean_over(sync, comm, 1.0)


@pytest.mark.ranks(2, on=("shm",), fresh=True)
def test_pending_messages_of_the_old_world_fail(comm):
    if comm.rank == 0:
        future = comm.asynchronous.recv(np.zeros(2), 1)
    comm = gs.rebuild()
    if comm.rank == 0:
        with pytest.raises(gs.CommunicatorClosed, match="make it again"):
            future.wait()
    comm.barrier()


@pytest.mark.ranks(on={"shm": (3,), "fake": (3,)}, ends={1: -9})
def test_a_death_that_only_a_future_tells_is_raised_by_the_next_call(comm):
    """The recipe's `except gs.RankFailed` must see it."""
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    futures = [comm.asynchronous.all_gather(arrays_of(comm).xp.ones(3)) for _ in range(3)]
    with pytest.raises(gs.RankFailed):
        comm.barrier()
    with pytest.raises(gs.CommunicatorClosed):
        comm.barrier()
    assert gs.rebuild().all_reduce(arrays_of(comm).xp.ones(1))[0] == 2
    with pytest.raises(gs.RankFailed):
        futures[0].wait()


@pytest.mark.ranks(3, on=("shm",), fresh=True, options={"timeout_seconds": 20})
def test_a_rank_that_is_left_and_does_not_come_is_named(comm):
    if comm.rank == 2:
        time.sleep(1.5)
        return
    with pytest.raises(gs.RendezvousTimeout, match=r"rank 2 \(runs, and has not called gs\.rebuild\(\)\)") as caught:
        gs.rebuild(timeout_seconds=0.5)
    assert caught.value.missing_ranks == (2,)


@pytest.mark.ranks(3, on=("shm",), fresh=True)
def test_a_rank_that_leaves_is_not_awaited(comm):
    if comm.rank == 0:
        gs.destroy_process_group()
        return
    time.sleep(0.2)
    comm = gs.rebuild()
    assert comm.objects.all_gather(comm.member) == [1, 2]


@pytest.mark.ranks(3, on=("shm",), ends={0: -9})
def test_too_few_are_refused(comm):
    die(comm, 0)
    with pytest.raises(gs.RendezvousTimeout, match=r"rank 0 \(not joined\); 2 came, and 3 are needed at least"):
        gs.rebuild(min_ranks=3, timeout_seconds=0.5)
    time.sleep(0.5)  # so that the other one has heard, too
    assert gs.rebuild(min_ranks=2).world_size == 2


@pytest.mark.ranks(2, on=("shm",), fresh=True)
def test_an_exception_in_the_body_ends_the_new_world(comm):
    with gs.rebuild() as comm:
        comm.barrier()
    assert not gs.is_initialized()


@pytest.mark.ranks(2, on=("mpi",))
def test_mpi_cannot_go_on_without_a_rank(comm):
    with pytest.raises(gs.BackendUnavailable, match="MPI ends the whole job when a rank dies"):
        gs.rebuild()
    comm.barrier()


@pytest.mark.ranks(1, on=("local",), fresh=True)
def test_a_world_of_one_goes_on(comm):
    sync = gs.AllreduceCallback()
    mean_over(sync, comm, 1.0)
    new = gs.rebuild()
    assert (new.world_size, new.member, new.completed_steps) == (1, 0, 1)
    assert comm.closed
    assert mean_over(sync, new, 2.0) == 2.0


@pytest.mark.ranks(2, on=("shm",), fresh=True)
@pytest.mark.parametrize(
    ("options", "error"),
    [({"min_ranks": 0}, "from 1 to 2"), ({"min_ranks": 3}, "from 1 to 2"), ({"timeout_seconds": -1}, "seconds")],
)
def test_wrong_arguments_are_told_at_once(comm, options, error):
    with pytest.raises(gs.InvalidArgument, match=error):
        gs.rebuild(**options)
    with gs.override_backend("shm"), pytest.raises(gs.InvalidArgument, match="outside of the block"):
        gs.rebuild()
    comm.barrier()


def test_without_a_process_group_it_says_so():
    with pytest.raises(gs.InvalidArgument, match="rebuild: the process group is not initialised"):
        gs.rebuild()
