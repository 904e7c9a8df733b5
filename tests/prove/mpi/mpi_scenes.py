"""What ranks of mpiexec do when something goes wrong: mpi_scenes.py SCENE [TIMEOUT]. Run by test_mpi.py."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

import gradsync as gs
from gradsync.communicators import failures
from gradsync.communicators.mpi import mpi_backend, mpi_reduction
from gradsync.communicators.mpi.mpi_job import has_job_failed, loaded_mpi

LAST = 1  # the rank that misbehaves
LONG_SECONDS = 40.0  # for what comes to its end in another way


def tell(text: object) -> None:
    """Prints a line by itself: ranks share the output."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def reduce_once(comm: Any) -> None:
    comm.all_reduce(np.ones(1000))


def raises(comm: Any) -> None:
    if comm.rank == LAST:
        raise ValueError("wrong shapes in layer 3")
    reduce_once(comm)


def exits(comm: Any) -> None:
    if comm.rank == LAST:
        sys.exit(3)
    reduce_once(comm)


def is_stopped(comm: Any) -> None:
    if comm.rank == LAST:
        os.kill(os.getpid(), signal.SIGSTOP)
    reduce_once(comm)


def stays_away(comm: Any) -> None:
    if comm.rank == LAST:
        time.sleep(LONG_SECONDS)
    reduce_once(comm)


def closes(comm: Any) -> None:
    if comm.rank == LAST:
        comm.close()
        time.sleep(LONG_SECONDS)
    reduce_once(comm)


def aborts(comm: Any) -> None:
    if comm.rank == LAST:
        comm.abort("I have seen enough")
        time.sleep(LONG_SECONDS)
    reduce_once(comm)


class Failing:
    """MPI's communicator, whose gathers and messages fail."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def fail(self, *_: Any, **__: Any) -> None:
        from mpi4py import MPI

        raise MPI.Exception(MPI.ERR_OTHER)

    Iallgather = Isend = fail


def a_request_of_objects_fails(comm: Any) -> None:
    """It ends like one of arrays: with gradsync's own error, and the buffers are kept."""
    if comm.rank == 0:
        backend = comm._backend
        backend._comm = backend._requests.comm = Failing(backend._comm)
    try:
        comm.objects.all_gather("x")
    except gs.MpiError:
        tell(f"MpiError, buffers kept: {comm._backend._requests.has_abandoned}")
        raise


def answers_other_ranks_differently(comm: Any) -> None:
    """Each disagreement is raised on all that are part of it, and the communicator goes on."""
    array = np.ones(1000)
    for mine, theirs in [
        (lambda: comm.broadcast(array), lambda: comm.all_reduce(array)),
        (lambda: comm.recv(array, 0), lambda: comm.all_reduce(array)),
        (lambda: comm.send(array, 0), comm.barrier),
        (lambda: comm.exchange(array, dest=0, out=array.copy(), source=0), comm.barrier),
    ]:
        try:
            (mine if comm.rank == LAST else theirs)()
        except gs.PlanMismatch as error:
            tell(f"{comm.rank}: {error.descriptions}")
            assert error.places.keys() == error.descriptions.keys(), error
            assert all(__file__ in line for line in error.places.values()), error
        assert comm.all_reduce(np.ones(3))[0] == comm.world_size
    tell("went on")


def sends_to_the_other_first(comm: Any) -> None:
    """Both ranks do."""
    failures.WARN_AFTER_SECONDS = 0.2
    array, peer = np.ones(3), 1 - comm.rank
    comm.exchange(array, dest=peer, out=array.copy(), source=peer)
    if comm.rank == 0:
        comm.send(array, 1)  # the line of rank 0
    else:
        comm.send(array, 0)  # the line of rank 1


def one_of_an_exchange_is_refused(comm: Any) -> None:
    """Ranks 0 and 1 exchange around a ring of three, while rank 2 waits for both in a collective."""
    array = np.ones(1000)
    after, before = (comm.rank + 1) % 3, (comm.rank - 1) % 3
    for _ in range(20):
        try:
            if comm.rank == 2:
                comm.barrier()
            else:
                comm.exchange(array, dest=after, out=array.copy(), source=before)
            tell("nobody told")
        except gs.PlanMismatch as error:
            assert set(error.descriptions) == {0, 1, 2}, error
        assert comm.all_reduce(np.ones(3))[0] == 3
    tell("went on")


def neither_half_of_an_exchange_fits(comm: Any) -> None:
    """Each half is told of as what it is, though both are between the same two ranks."""
    mine, room = np.ones(3 + comm.rank), np.ones(10 + comm.rank)
    for _ in range(10):
        try:
            comm.exchange(mine, dest=1 - comm.rank, out=room, source=1 - comm.rank)
            tell("nobody told")
        except gs.PlanMismatch as error:
            way = f"rank {1 - comm.rank} to rank {comm.rank}"  # what is received is looked at first
            assert all(way in text for text in error.descriptions.values()), error
        assert comm.all_reduce(np.ones(3))[0] == 2
    tell("went on")


def a_message_follows_a_collective_at_once(comm: Any) -> None:
    """A rank that has left a collective greets the last one, which still is in it, and looks around."""
    backend = comm._backend
    for number in range(4):
        array = np.full(1000, comm.rank)
        meet = comm.send if number < 2 else comm.recv
        comm.barrier()
        if comm.rank == LAST:
            while not any(backend._comm.Iprobe(0, tag) for tag in range(2, 6)):
                pass
            backend._refuse_messages()
            meet = comm.recv if number < 2 else comm.send
        meet(array, 1 - comm.rank)
        assert (array == (0 if number < 2 else LAST)).all()
    tell("went on")


def gradients_differ_late_in_a_bucket(comm: Any) -> None:
    """Behind more than a hundred thousand letters that are equal."""
    sync = gs.AllreduceCallback("mean", comm)
    gradients = [np.ones(1) for _ in range(5000)]
    if comm.rank == LAST:
        gradients[4990] = np.ones((1, 1))
    try:
        with sync.backward():
            for number, gradient in enumerate(gradients):
                sync(f"the weights of layer number {number}", gradient)
    except gs.PlanMismatch as error:
        tell(str(error).replace("\n", " | "))


def small_arrays_travel_with_the_agreement(comm: Any) -> None:
    """Sizes about the largest that do, alone and in a list; and nothing is written where the ranks differ."""
    limit = comm._backend._agreement.payload_bytes
    for size in (0, 1, limit - 1, limit, limit + 1):
        for dtype in ("uint8", "float16", "float32", "complex128"):
            n = size // np.dtype(dtype).itemsize
            values = np.arange(n) % 7
            array = (values + comm.rank).astype(dtype)
            comm.all_reduce(array)
            total = sum((values + rank for rank in range(comm.world_size)), np.zeros(n, int))
            assert (array == total).all(), (size, dtype)
    for sizes in ((3, 5), (limit // 4 - 8, 8), (limit // 4 - 8, 9), (limit // 8, limit // 8, 1)):
        arrays = [np.full(size, comm.rank + 1, np.float32) for size in sizes]
        parts = gs.pack_allreduce_split(arrays, [array.shape for array in arrays], comm, "sum")
        assert all((part == sum(range(1, comm.world_size + 1))).all() for part in parts), sizes
        sync = gs.AllreduceCallback("sum", comm)
        with sync.backward():
            futures = [sync(number, array) for number, array in enumerate(arrays)]
        assert all((future.result() == sum(range(1, comm.world_size + 1))).all() for future in futures), sizes
    before = np.arange(1000, dtype=np.float32)
    for others in (np.zeros(999, np.float32), np.zeros(10**6, np.float32), np.zeros(1000)):
        array = before.copy() if comm.rank != LAST else others
        try:
            comm.all_reduce(array)
            raise AssertionError("the ranks differ")
        except gs.PlanMismatch as error:
            assert "all_reduce" in str(error)
        assert comm.rank == LAST or (array == before).all()
        reduce_once(comm)
    try:
        comm.barrier() if comm.rank == LAST else comm.all_reduce(before)
        raise AssertionError("the ranks differ")
    except gs.PlanMismatch:
        reduce_once(comm)
    tell("went on")


def memory_of_what_was_given_up_stays(comm: Any) -> None:
    """The last rank agrees, and then stays away: MPI may still write where the result was to go."""
    if comm.rank == LAST:
        mpi_reduction.reduce_into = lambda *_: time.sleep(LONG_SECONDS)
    result = np.empty(100_000)
    place = weakref.ref(result)
    try:
        comm.all_reduce(np.ones(100_000), out=result)
    except (gs.CollectiveTimeout, gs.RankFailed) as error:
        name = type(error).__name__
    del result, comm
    gc.collect()
    tell(f"{name}, and its memory stays: {place() is not None}")


def threads_use_groups_of_their_own(comm: Any) -> None:
    """Two communicators of the same ranks, each on a thread of its own."""
    from concurrent.futures import ThreadPoolExecutor

    groups = [comm.new_group(range(comm.world_size)) for _ in range(2)]

    def work(group: Any) -> float:
        array = np.full(20_000, 1.0)
        for _ in range(200):
            group.all_reduce(array, "mean")
        return float(array.sum())

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, groups)) == [20_000.0, 20_000.0]
    tell("went on")


def groups_come_and_go(comm: Any) -> None:
    """More than MPICH has room for at a time."""
    for _ in range(1200):
        group = comm.new_group(range(comm.world_size))
        group.barrier()
        group.close()
    tell("went on")


def generations_follow(_comm: Any) -> None:
    for number in range(5):
        gs.destroy_process_group()
        comm = gs.init_process_group("mpi")
        assert comm.all_reduce(np.full(3, number))[0] == number * comm.world_size
    tell("went on")


def backends_by_turns(comm: Any) -> None:
    """The ranks of an MPI job share memory within a block; and the other way round."""
    with gs.override_backend("shm") as shared:
        assert shared.backend == "shm"
        assert shared.all_reduce(np.ones(3))[0] == comm.world_size
    gs.destroy_process_group()
    world = gs.init_process_group("shm")
    with gs.override_backend("mpi") as over_mpi:
        assert over_mpi.backend == "mpi"
        assert over_mpi.all_reduce(np.ones(3))[0] == world.world_size
    for backend in ("mpi", "shm"):  # each meets in its own way
        gs.destroy_process_group()
        assert gs.init_process_group(backend, timeout_seconds=20).all_reduce(np.ones(3))[0] == comm.world_size
    tell("went on")


def is_interrupted_while_it_reduces(comm: Any) -> None:
    """Ctrl-C comes to one rank beside its waits, while the next chunk is on its way."""
    array, reduce_into = np.ones(4_000_000), mpi_reduction.reduce_into

    def interrupted(*arguments: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        reduce_into(*arguments)

    if comm.rank == LAST:
        mpi_reduction.reduce_into = interrupted
    try:
        comm.all_reduce(array)
    except (KeyboardInterrupt, gs.RankFailed) as error:
        tell(f"{type(error).__name__}, to be ended by MPI_Abort: {has_job_failed()}")


def one_is_late_for_a_group(comm: Any) -> None:
    """It lets the others in, and does not come itself: their call of MPI cannot be taken back."""
    run_with_timeout = mpi_backend.run_with_timeout

    def late(*arguments: Any) -> Any:
        time.sleep(4.0)
        return run_with_timeout(*arguments)

    if comm.rank == LAST:
        mpi_backend.run_with_timeout = late
    try:
        comm.new_group(range(comm.world_size))
    except (gs.CollectiveTimeout, gs.RankFailed) as error:
        tell(f"{type(error).__name__}, to be ended by MPI_Abort: {has_job_failed()}")


def a_child_of_a_fork_fails(comm: Any) -> None:
    """It ends alone."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        assert loaded_mpi() is None
        raise ValueError("in the child")
    assert os.waitpid(child, 0)[1] == 1 << 8
    reduce_once(comm)
    tell("went on")


SCENES: dict[str, Callable[[Any], None]] = {
    scene.__name__: scene
    for scene in (
        raises,
        exits,
        is_stopped,
        stays_away,
        closes,
        aborts,
        a_request_of_objects_fails,
        answers_other_ranks_differently,
        sends_to_the_other_first,
        one_of_an_exchange_is_refused,
        neither_half_of_an_exchange_fits,
        a_message_follows_a_collective_at_once,
        gradients_differ_late_in_a_bucket,
        small_arrays_travel_with_the_agreement,
        memory_of_what_was_given_up_stays,
        threads_use_groups_of_their_own,
        groups_come_and_go,
        generations_follow,
        backends_by_turns,
        is_interrupted_while_it_reduces,
        one_is_late_for_a_group,
        a_child_of_a_fork_fails,
    )
}


def main(scene: str, timeout_seconds: float = LONG_SECONDS) -> None:
    comm = gs.init_process_group("mpi", collective_timeout_seconds=timeout_seconds)
    for _ in range(20):
        comm.all_reduce(np.ones(1000), "mean")
    tell(f"pid {os.getpid()}")
    began = time.monotonic()
    try:
        SCENES[scene](comm)
    finally:
        tell(f"rank {comm.rank} after {time.monotonic() - began:.2f} s")


if __name__ == "__main__":
    main(sys.argv[1], *map(float, sys.argv[2:]))
