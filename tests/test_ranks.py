"""The marker `ranks` itself: who fails, what is shown, and that nothing of it reaches the next test."""

import os
import signal

import numpy as np
import pytest

import gradsync as gs
from ranks import Ranks, _call


@pytest.mark.ranks(1, 2, 3, on=("shm",))
@pytest.mark.parametrize("value", [1.5, 2.5])
def test_the_body_runs_on_each_rank(comm, value, tmp_path):
    (tmp_path / f"rank {comm.rank}").touch()
    comm.barrier()
    assert len(list(tmp_path.iterdir())) == comm.world_size
    assert comm.all_reduce(np.full(3, value)).tolist() == [value * comm.world_size] * 3


@pytest.mark.ranks(2, on=("fake",))
def test_the_fake_has_arrays_of_cupy(comm):
    import cupy

    assert comm.all_reduce(cupy.ones(3, np.float32)).get().tolist() == [2.0] * 3


@pytest.mark.ranks(2, on=("mpi",))
def test_mpi_starts_the_ranks(comm):
    assert (comm.backend, comm.world_size) == ("mpi", 2)


@pytest.mark.ranks(3, ends={1: -signal.SIGKILL})
def test_a_rank_may_end_itself(comm):
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(gs.RankFailed) as raised:
        comm.barrier()
    assert raised.value.rank == 1


@pytest.mark.ranks(2)
def test_a_body_may_join_by_itself(rank):
    with gs.init_process_group("shm") as comm:
        assert comm.rank == rank


@pytest.mark.ranks(2)
@pytest.mark.xfail(strict=True, raises=ZeroDivisionError)
def test_what_one_rank_raises_is_what_the_test_raises(comm):
    if comm.rank == 1:
        raise ZeroDivisionError
    comm.barrier()


def test_a_failure_shows_the_traceback_of_each_rank_and_the_next_call_has_new_ranks(ranks_of_two):
    with pytest.raises(ValueError, match="of rank") as raised:
        ranks_of_two.run(_call(raise_on_each, "raise_on_each", {}))
    assert str(raised.value) in raised.value.__notes__[0]  # whichever was first
    assert sorted(note[:10] for note in raised.value.__notes__) == ["--- rank 0", "--- rank 1"]
    for rank in (0, 1):
        assert sum(f"of rank {rank}" in note for note in raised.value.__notes__) == 1
    assert ranks_of_two.run(_call(rank_of, "rank_of", {})) == [0, 1]


def test_a_call_that_was_interrupted_answers_no_later_one(ranks_of_two):
    def interrupt(*_):
        raise TimeoutError

    kept = signal.signal(signal.SIGALRM, interrupt)  # as pytest-timeout does
    try:
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        with pytest.raises(TimeoutError):
            ranks_of_two.run(_call(wait_for_each_other, "wait_for_each_other", {}))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, kept)
    assert ranks_of_two.run(_call(rank_of, "rank_of", {})) == [0, 1]


def test_a_rank_that_should_end_and_does_not_fails_the_test(ranks_of_two):
    with pytest.raises(AssertionError):
        ranks_of_two.run(_call(rank_of, "rank_of", {}), ends={1: -9})


def test_results_come_back_by_rank(run_on_ranks):
    assert run_on_ranks(3, multiplied, 10) == [0, 10, 20]


@pytest.fixture
def ranks_of_two():
    ranks = Ranks("shm", 2, options={}, environment={})
    yield ranks
    ranks.kill()


def raise_on_each(comm):
    raise ValueError(f"of rank {comm.rank}")


def rank_of(comm):
    return comm.rank


def multiplied(comm, factor):
    return comm.rank * factor


def wait_for_each_other(comm):
    signal.pause()
