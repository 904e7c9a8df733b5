"""NumPy's numbers are as good as Python's wherever a number is asked for; True and False are none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradsync as gs
from contract import expect
from gradsync import comm as gs_comm
from launching import rank_functions
from places import SHM, STAND_IN, Place, on

TWO = np.int64(2)


def test_numbers_of_processes_and_ports() -> None:
    ranks = [(0, 2), (1, 2)]
    assert gs.launch(rank_functions.place_in_group, (), TWO, "localhost", np.uint16(gs.free_port())) == ranks
    launched = gs.launcher(rank_functions.rank_of_group, TWO, np.int32(2), np.int8(0), port=np.int32(gs.free_port()))
    assert launched() == [0, 1]
    context = gs.spawn(rank_functions.place_in_group, nprocs=TWO, backend="shm")
    assert [queue.get() for queue in context.return_queues] == ranks


def test_the_place_of_a_rank() -> None:
    with gs.init_process_group(
        rank=np.int64(0),
        world_size=np.int32(1),
        timeout_seconds=np.float32(30),
        collective_timeout_seconds=np.int64(60),
    ) as comm:
        assert (type(comm.rank), type(comm.world_size)) == (int, int)
        gs_comm.create_local_process_group(np.int16(1))


@pytest.mark.parametrize("no_integer", [True, np.True_, 2.0, np.float64(2), "2", np.array([2, 2])])
def test_what_is_no_integer_is_refused(no_integer: Any) -> None:
    calls = [
        lambda: gs.launch(rank_functions.place_in_group, (), no_integer),
        lambda: gs.spawn(rank_functions.place_in_group, nprocs=no_integer),
        lambda: gs.launcher(rank_functions.place_in_group, no_integer),
        lambda: gs.launcher(rank_functions.place_in_group, port=no_integer),
        lambda: gs.init_process_group("local", rank=0, world_size=no_integer),
        lambda: gs.AllreduceCallback(threshold_bytes=no_integer),
        lambda: gs_comm.create_local_process_group(no_integer),
        lambda: gs.shard_indices(no_integer, epoch=0, seed=0),
        lambda: gs.get_offsets([(no_integer,)]),
    ]
    for call in calls:
        expect(gs.InvalidArgument, call)


def pass_integers(comm: Any) -> None:
    rank, n = comm.rank, comm.world_size
    last = np.uint8(n - 1)
    assert comm.objects.broadcast(rank, last) == n - 1
    assert (comm.objects.gather(rank, last) or []) == (list(range(n)) if rank == n - 1 else [])
    assert comm.objects.scatter(list(range(n)), last) == rank
    host = np.full(4, rank, np.float32)
    xp = np
    if comm.backend == "nccl":
        import cupy

        xp = cupy
    array = xp.asarray(host)
    comm.broadcast(array, last)
    assert (array == n - 1).all()
    comm.reduce(array, "sum", last)
    gs.bcast_list_([array], root=last)
    comm.exchange(array, dest=np.uint8((rank + 1) % n), out=xp.empty(4, np.float32), source=np.uint8((rank - 1) % n))
    assert comm.split(np.int64(rank % 2), np.int16(-rank)) is not None
    sync = gs.AllreduceCallback("sum", threshold_bytes=np.int64(64))
    assert type(sync.threshold_bytes) is int
    for _ in range(2):
        gradients = [xp.ones(8, np.float32) for _ in range(5)]
        with sync.backward():
            futures = [sync(number, gradient) for number, gradient in enumerate(gradients)]
        assert all((future.result() == n).all() for future in futures)
    gs_comm.create_local_process_group(np.int64(n))


@pytest.mark.parametrize(("place", "n"), [*on(SHM, 2, 3), *on(STAND_IN, 2)])
def test_collectives_take_numpy_integers(place: Place, n: int) -> None:
    place.run(n, pass_integers)


def test_the_shape_none_is_one_element() -> None:
    offsets = gs.get_offsets([None, (2,), (), (np.int64(1), 2)])
    assert offsets == [0, 1, 1, 3, 3, 4, 4, 6]
    parts = gs.param_pack_split(np.arange(6), offsets, [None, (2,), (), (np.int64(1), 2)])
    assert [part.shape for part in parts] == [(1,), (2,), (), (1, 2)]
    for wrong in (5, "ab", (1.5,), (-1,), (None,)):
        with pytest.raises(gs.InvalidArgument, match="param_pack_split needs shapes of integers >= 0"):
            gs.param_pack_split(np.arange(5), [0, 5], [wrong])  # type: ignore[list-item]
        with pytest.raises(gs.InvalidArgument, match="get_offsets needs shapes of integers >= 0"):
            gs.get_offsets([wrong])  # type: ignore[list-item]
