"""How communicators end: closed, aborted, left by a rank that dies or stays away; and that all ranks hear of it."""

import os
import signal
import threading
from contextlib import suppress

import numpy as np
import pytest

import gradsync as gs
from arrays import arrays_of
from collectives import collectives
from commands import wait_until
from ranks import ALSO_ALONE, COMPARED, EVERYWHERE

# -- In order ---------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(on=ALSO_ALONE)
@pytest.mark.parametrize("is_used", [True, False])
def test_a_closed_communicator_refuses_everything(comm, is_used):
    """Whatever it has or has not been used for before."""
    group, arrays = comm.split(0), arrays_of(comm)
    if is_used:
        for call in collectives(comm, arrays, (3, 2)).values():
            call(group)
    comm.barrier()
    assert not group.closed
    group.close()
    group.close()
    assert group.closed
    assert "closed" in repr(group)
    for form in (group, group.asynchronous):
        for name, call in collectives(comm, arrays, (3, 2)).items():
            with pytest.raises(gs.CommunicatorClosed):
                result = call(form)
                assert form is group.asynchronous, name
                result.result()  # an asynchronous one may fail in its future
    for call in (lambda: group.objects.all_gather(1), lambda: group.new_group([0]), lambda: group.split(0)):
        with pytest.raises(gs.CommunicatorClosed):
            call()
    group.abort("too late")
    assert (arrays.get(comm.all_reduce(arrays.put(np.ones(3)))) == comm.world_size).all()


@pytest.mark.ranks(on=EVERYWHERE)
def test_a_with_block_closes(comm):
    with comm.split(0) as group:
        group.barrier()
    assert group.closed


@pytest.mark.ranks(on=COMPARED)
def test_a_with_block_that_a_mismatch_leaves_closes_too(comm):
    with pytest.raises(gs.PlanMismatch), comm.split(0) as group:
        group.all_reduce(arrays_of(comm).put(np.ones(2 if comm.rank else 3)))
    assert group.closed  # and not aborted: each rank has its own PlanMismatch


@pytest.mark.ranks(on=EVERYWHERE)
def test_asynchronous_collectives_and_their_callbacks_end_before_close_returns(comm):
    """On a GPU the last callbacks of a program were lost."""
    group, arrays, called = comm.split(0), arrays_of(comm), []
    futures = [group.asynchronous.all_reduce(arrays.put(np.full(100_000, float(call)))) for call in range(10)]
    futures[-1].add_done_callback(called.append)
    group.close()
    assert called == futures[-1:]
    for call, future in enumerate(futures):
        assert (arrays.get(future.result(0)) == call * comm.world_size).all()


@pytest.mark.ranks(3, fresh=True)
def test_who_comes_after_another_rank_has_closed_hears_of_it(comm):
    comm.all_reduce(np.ones(1_000_000, np.float32))
    if comm.rank == 0:
        comm.close()  # hurts nobody who is still in the last collective
    else:
        with pytest.raises(gs.RankFailed) as raised:
            comm.barrier()
        assert raised.value.rank == 0


# -- Aborted ----------------------------------------------------------------------------------------------------------


def abort_on_rank_1(comm, reason, culprit=1):
    comm.barrier()
    if comm.rank == 1:
        comm.abort(reason, culprit=None if culprit == 1 else culprit)
    else:
        with pytest.raises(gs.RankFailed, match=reason[:4]) as raised:
            comm.barrier()
        assert raised.value.rank == culprit
    with pytest.raises(gs.CommunicatorClosed, match=reason[:4]):
        comm.barrier()


@pytest.mark.ranks(on={"shm": (3,), "fake": (2,)}, fresh=True)
def test_abort_gives_the_reason_and_the_culprit_to_all(comm):
    abort_on_rank_1(comm, "its loss is NaN", culprit=comm.world_size - 1)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("reason", ["the disk is full", "bad \udcff byte", "long" * 1000], ids=["short", "bad", "long"])
def test_abort_of_a_group_gives_the_reason_to_its_members(comm, reason):
    abort_on_rank_1(comm.split(0), reason)


@pytest.mark.ranks(3)
def test_who_aborted_first_is_told_and_not_who_passes_it_on(comm, tmp_path):
    group = comm.split(0)
    if comm.rank == 1:
        group.abort("the disk is full")
    else:
        if comm.rank == 2:
            wait_until((tmp_path / "passed on").exists)
        with pytest.raises(gs.RankFailed, match=r"^[^:]*: rank 1 aborted: the disk is full"):
            group.barrier()
        (tmp_path / "passed on").touch()


@pytest.mark.ranks(3)
def test_the_end_of_a_group_leaves_the_world(comm):
    for end in (lambda group: group.abort("enough"), lambda group: group.close()):
        group = comm.split(0)
        if comm.rank == 1:
            end(group)
        else:
            with pytest.raises(gs.RankFailed) as raised:
                group.barrier()
            assert raised.value.rank == 1
        comm.barrier()


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError


@pytest.mark.ranks(2, fresh=True)
@pytest.mark.parametrize("kind", [Unspeakable, ZeroDivisionError])
def test_an_error_in_a_with_block_aborts(comm, kind):
    comm.barrier()
    if comm.rank == 0:
        with pytest.raises(kind), comm:
            raise kind
    else:
        with pytest.raises(gs.RankFailed, match=kind.__name__) as raised:
            comm.barrier()
        assert raised.value.rank == 0


@pytest.mark.ranks(3, fresh=True)
@pytest.mark.parametrize("how", ["abort", "close"])
def test_another_thread_may_end_a_collective_that_waits(comm, how, tmp_path):
    """All ranks hear that rank 0 has left; rank 1 does not come before that."""
    if comm.rank == 0:
        begun = comm.recorder.begun

        def end():
            wait_until(lambda: comm.recorder.begun > begun)
            comm.close() if how == "close" else comm.abort("asked to")

        thread = threading.Thread(target=end)
        thread.start()
        with pytest.raises((gs.RankFailed, gs.CommunicatorClosed)):
            comm.barrier()
        thread.join()
        (tmp_path / "over").touch()
        return
    if comm.rank == 1:
        wait_until((tmp_path / "over").exists)
    with pytest.raises(gs.RankFailed) as raised:
        comm.barrier()
    assert raised.value.rank == 0


# -- One at a time ----------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, on=("shm", "fake"))
@pytest.mark.parametrize("who", ["thread", "signal handler"])
def test_a_second_call_within_one_is_refused_and_hurts_nobody(comm, who, tmp_path):
    if comm.rank == 1:
        wait_until((tmp_path / "refused").exists)
        comm.barrier()
        return
    begun, refused = comm.recorder.begun, []

    def call(*_):
        with pytest.raises(gs.InvalidArgument) as raised:
            comm.barrier()
        refused.append(raised.value)
        (tmp_path / "refused").touch()

    def strike():
        wait_until(lambda: comm.recorder.begun > begun)
        call() if who == "thread" else os.kill(os.getpid(), signal.SIGUSR1)

    kept = signal.signal(signal.SIGUSR1, call)
    thread = threading.Thread(target=strike)
    thread.start()
    comm.barrier()
    thread.join()
    signal.signal(signal.SIGUSR1, kept)
    assert len(refused) == 1


@pytest.mark.ranks(2, on=("shm", "fake"), fresh=True)
@pytest.mark.parametrize("form", ["blocking", "future"])
def test_ctrl_c_in_a_wait_reaches_the_user_and_the_others(comm, form, tmp_path):
    if comm.rank == 1:
        wait_until((tmp_path / "interrupted").exists)
        with pytest.raises(gs.RankFailed, match="KeyboardInterrupt|interrupted") as raised:
            comm.barrier()
        assert raised.value.rank == 0
        return
    kept, begun = signal.signal(signal.SIGINT, signal.default_int_handler), comm.recorder.begun
    try:

        def strike():
            wait_until(lambda: comm.recorder.begun > begun)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=strike)
        thread.start()
        with pytest.raises(KeyboardInterrupt), comm:
            if form == "blocking":
                comm.barrier()
            else:
                comm.asynchronous.barrier().result()
        thread.join()
    finally:
        signal.signal(signal.SIGINT, kept)
    (tmp_path / "interrupted").touch()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.ranks(2, fresh=True)
def test_a_forked_child_cannot_use_it(comm):
    future = comm.asynchronous.all_reduce(np.ones(3))
    future.result()
    child = os.fork()
    if child == 0:
        code = 1
        with suppress(BaseException):
            try:
                comm.barrier()
            except gs.CommunicatorClosed:
                code = 7
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    comm.barrier()


# -- Ranks that die, or stay away -------------------------------------------------------------------------------------


@pytest.mark.ranks(on={"shm": (3,), "fake": (2,)}, ends={1: -signal.SIGKILL})
@pytest.mark.parametrize("what", ["all_reduce", "large all_reduce", "recv"])
def test_a_rank_that_dies_is_named(comm, what):
    arrays = arrays_of(comm)
    small, large = arrays.put(np.ones(10, np.float32)), arrays.put(np.ones(300_000, np.float32))
    others = [rank for rank in range(comm.world_size) if rank != 1]
    call = {
        "all_reduce": lambda: comm.all_reduce(small),
        "large all_reduce": lambda: comm.all_reduce(large),
        "recv": lambda: comm.recv(small, 1) if comm.rank != 1 else [comm.send(small, to) for to in others],
    }[what]
    if comm.rank == 1:
        for _ in range(5):
            call()
        arrays.get(small)  # a GPU has done them, too
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(gs.RankFailed) as raised:
        for _ in range(10_000):
            call()
    assert raised.value.rank == 1
    with pytest.raises(gs.CommunicatorClosed):
        comm.barrier()


@pytest.mark.ranks(3, fresh=True)
def test_a_rank_that_leaves_is_named(comm, tmp_path):
    comm.barrier()
    if comm.rank == 1:
        gs.destroy_process_group()
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        return
    with pytest.raises(gs.RankFailed) as raised:
        for _ in range(10_000):
            comm.all_reduce(np.ones(3))
    assert raised.value.rank == 1
    (tmp_path / f"rank {comm.rank} knows").touch()


@pytest.mark.ranks(on={"shm": (3,), "fake": (2,)}, options={"collective_timeout_seconds": 1.5}, fresh=True)
def test_the_deadline_names_the_rank_that_stays_away(comm, tmp_path):
    """All ranks get one verdict, with the stack of the absent one. It is in later errors too, in short."""
    sync, array = gs.AllreduceCallback("sum", comm), arrays_of(comm).put(np.ones(1000, np.float32))
    sync("conv1.weight", array)
    sync.flush()
    comm.barrier()
    if comm.rank == 1:
        load_a_batch(tmp_path / "reached")
    with pytest.raises(gs.CollectiveTimeout, match="load_a_batch") as raised, sync.backward():
        sync("conv1.weight", array)
    (tmp_path / "reached").touch()
    assert raised.value.missing_ranks == (1,)
    assert "conv1.weight" in str(raised.value)
    with pytest.raises(gs.CommunicatorClosed, match="for rank 1") as raised:
        comm.barrier()
    assert "load_a_batch" not in str(raised.value)


def load_a_batch(path):
    """Where rank 1 is while the others wait for it."""
    wait_until(path.exists)


@pytest.mark.ranks(3, options={"collective_timeout_seconds": 1.5}, fresh=True)
def test_who_is_absent_in_a_group_has_its_number_in_the_world(comm, tmp_path):
    group = comm.new_group([1, 2])
    comm.barrier()
    if comm.rank == 1:
        with pytest.raises(gs.CollectiveTimeout) as raised:
            group.all_reduce(np.ones(3))
        (tmp_path / "reached").touch()
    else:
        wait_until((tmp_path / "reached").exists)
        with pytest.raises(gs.CollectiveTimeout) as raised:
            (group or comm).barrier()
    assert raised.value.missing_ranks == (2,)


@pytest.mark.ranks(3, options={"collective_timeout_seconds": 1.5}, fresh=True)
@pytest.mark.parametrize("first", ["send", "recv"])
def test_ranks_that_wait_for_each_other_end_at_the_deadline(comm, first):
    """Each sends to the next one first, or each receives first from the one before it."""
    after, before = (comm.rank + 1) % 3, (comm.rank - 1) % 3
    with pytest.raises(gs.CollectiveTimeout) as raised:
        comm.send(np.ones(3), after) if first == "send" else comm.recv(np.ones(3), before)
    for rank in range(3):  # where each of them waits
        assert f"rank {rank}" in str(raised.value)
    assert "test_lifetime.py" in str(raised.value)
    assert set(raised.value.missing_ranks) <= {0, 1, 2}
    with pytest.raises(gs.CommunicatorClosed):
        comm.barrier()
