"""bcast_list_ and pack_allreduce_split between processes, on every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradsync as gs
from contract import contribution, expect
from gradsync.communicators.local import local_communicator
from kits import make_kit
from places import GPU, GPU_MIXED, SHM, STAND_IN, STAND_IN_MIXED, STAND_IN_SLOW, STAND_IN_STAGED, Place, always_on, on

TWO_RANKS = [*on(SHM, 2), *on(STAND_IN, 2), *on(GPU, 2)]


def parameters(rank: int) -> list[np.ndarray[Any, Any]]:
    return [
        contribution(rank, (), "float64"),
        contribution(rank, (0, 4), "float32"),
        np.asfortranarray(contribution(rank, (7, 9), "float64")),
        contribution(rank, (12,), "int64"),
        contribution(rank, (3, 3), "bool"),
        contribution(rank, (400, 500), "float32"),
        contribution(rank, (5,), "bfloat16"),
    ]


def broadcast_everything(comm: Any, kit_name: str) -> None:
    kit = make_kit(comm, kit_name)
    for root in range(comm.world_size):
        strided = kit.put(np.full((20, 30), comm.rank, np.float32))
        dates = np.full(3, comm.rank, "datetime64[s]")  # in host memory everywhere: CuPy has none
        mine = [*map(kit.put, parameters(comm.rank)), strided[::2, ::3], dates]
        for array in mine:
            if comm.rank == root and isinstance(array, np.ndarray):
                array.setflags(write=False)
        gs.bcast_list_(mine, root=root)
        for got, want in zip(mine, parameters(root), strict=False):
            np.testing.assert_array_equal(kit.get(got), want)
        assert (kit.get(strided)[::2, ::3] == root).all()
        assert (kit.get(strided)[1::2] == comm.rank).all()
        assert (dates == np.datetime64(root, "s")).all()
    gs.bcast_list_([])
    gs.bcast_list_(array for array in [kit.put(np.ones(2))])
    gs.bcast_list_([kit.put(np.ones(2))], communicator=comm)
    gs.bcast_list_([kit.put(np.ones(2))], group=comm)


@pytest.mark.parametrize(
    ("place", "world_size"),
    [
        *on(SHM, 1, 2, 3),
        *on(STAND_IN, 1, 2, 3),
        *on(STAND_IN_SLOW, 2),
        *always_on(STAND_IN_STAGED, 2),
        *always_on(STAND_IN_MIXED, 2),
        *on(GPU, 1, 2, 4),
        *on(GPU_MIXED, 2),
    ],
)
def test_bcast_list(place: Place, world_size: int) -> None:
    place.run(world_size, broadcast_everything, place.kit)


def broadcast_wrongly(comm: Any, kit_name: str) -> str:
    kit = make_kit(comm, kit_name)
    odd = comm.rank == 1
    first = kit.put(np.full(3, float(comm.rank)))
    second = kit.put(np.full((2, 2) if odd else (4,), float(comm.rank)))
    error = expect(gs.PlanMismatch, lambda: gs.bcast_list_([first, second]))
    expect(gs.PlanMismatch, lambda: gs.bcast_list_([first] * (2 if odd else 1)))
    expect(gs.PlanMismatch, lambda: gs.bcast_list_([first], root=1 if odd else 0))
    assert (kit.get(first) == comm.rank).all()
    read_only = np.ones(2)
    read_only.setflags(write=False)
    if comm.world_size == 2 and odd:
        expect(gs.InvalidArgument, lambda: gs.bcast_list_([read_only]), "array 0 is read-only")
    expect(gs.InvalidArgument, lambda: gs.bcast_list_([first], root=2), "root must be 0 to 1")
    expect(gs.InvalidArgument, lambda: gs.bcast_list_([1.0]), "array 0")
    expect(gs.InvalidArgument, lambda: gs.bcast_list_({"w": first}), "pass list(parameters.values())")
    expect(gs.InvalidArgument, lambda: gs.bcast_list_(first), "pass [array]")
    expect(gs.InvalidArgument, lambda: gs.bcast_list_([first], comm), "pass it by name, communicator=")
    expect(gs.InvalidArgument, lambda: gs.broadcast_tree([first], comm), "pass it by name, communicator=")
    expect(gs.InvalidArgument, lambda: gs.bcast_list_([first], 0, comm, group=comm), "two names for one parameter")
    last = comm.new_group([1])
    if last:
        expect(gs.InvalidArgument, lambda: gs.bcast_list_([first], 1, last), "root must be 0 to 0, numbered within")
    gs.bcast_list_([first])
    assert (kit.get(first) == 0).all()
    return str(error).partition(":")[2]


@pytest.mark.parametrize(("place", "world_size"), TWO_RANKS)
def test_bcast_list_refuses_before_anything_is_sent(place: Place, world_size: int) -> None:
    first, second = place.run(world_size, broadcast_wrongly, place.kit)
    assert first == second
    assert "float64[4]" in first
    assert "float64[2, 2]" in first


def pack(comm: Any, kit_name: str) -> None:
    kit = make_kit(comm, kit_name)
    arrays = [kit.put(a) for a in (np.full((2, 3), comm.rank + 1.0), np.full((), comm.rank + 2.0), np.zeros((0,)))]
    shapes = [a.shape for a in arrays]
    n = comm.world_size
    for method, scale in (("sum", n), ("MEAN", 1)):
        got = gs.pack_allreduce_split(arrays, shapes, comm, method)
        assert [g.shape for g in got] == shapes
        assert np.allclose(kit.get(got[0]), scale * (n + 1) / 2)
        assert np.allclose(kit.get(got[1]), scale * (n + 3) / 2)
    assert (kit.get(arrays[0]) == comm.rank + 1).all()


@pytest.mark.parametrize(
    ("place", "world_size"), [*on(SHM, 1, 2), *on(STAND_IN, 1, 2), *on(STAND_IN_STAGED, 2), *on(GPU, 1, 2)]
)
def test_pack_allreduce_split(place: Place, world_size: int) -> None:
    place.run(world_size, pack, place.kit)


def test_pack_allreduce_split_refuses() -> None:
    comm = local_communicator()
    with pytest.raises(gs.InvalidArgument, match="reduce_method"):
        gs.pack_allreduce_split([np.ones(1)], [(1,)], comm, "max")
    with pytest.raises(gs.InvalidArgument, match="one dtype"):
        gs.pack_allreduce_split([np.ones(1), np.ones(1, "f4")], [(1,), (1,)], comm)
    with pytest.raises(gs.InvalidArgument, match="as many elements"):
        gs.pack_allreduce_split([np.ones(2)], [(3,)], comm)
    with pytest.raises(gs.InvalidArgument, match="at least one"):
        gs.pack_allreduce_split([], [], comm)
