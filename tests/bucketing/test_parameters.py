"""bcast_list_ and pack_allreduce_split between processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradsync as gs
from contract import contribution, expect
from gradsync.communicators.local import LocalCommunicator
from rank_processes import run_ranks


def parameters(rank: int) -> list[np.ndarray[Any, Any]]:
    strided = np.zeros((20, 30), np.float32)
    strided[::2, ::3] = contribution(rank, (10, 10), "float32")
    return [
        contribution(rank, (), "float64"),
        contribution(rank, (0, 4), "float32"),
        np.asfortranarray(contribution(rank, (7, 9), "float64")),
        strided[::2, ::3],
        contribution(rank, (12,), "int64"),
        contribution(rank, (3, 3), "bool"),
        contribution(rank, (400, 500), "float32"),
        contribution(rank, (5,), "bfloat16"),
        np.full(3, rank, "datetime64[s]"),
    ]


def broadcast_everything(comm: Any) -> None:
    for root in range(comm.world_size):
        mine = parameters(comm.rank)
        if comm.rank == root:
            for array in mine:
                array.setflags(write=False)
        gs.bcast_list_(mine, root=root)
        for got, want in zip(mine, parameters(root), strict=True):
            np.testing.assert_array_equal(got, want)
    gs.bcast_list_([])
    gs.bcast_list_([np.ones(2)], communicator=comm)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_bcast_list(world_size: int) -> None:
    run_ranks(world_size, broadcast_everything)


def broadcast_wrongly(comm: Any) -> str:
    odd = comm.rank == 1
    first = np.full(3, float(comm.rank))
    second = np.full((2, 2) if odd else (4,), float(comm.rank))
    error = expect(gs.PlanMismatch, lambda: gs.bcast_list_([first, second]))
    expect(gs.PlanMismatch, lambda: gs.bcast_list_([first] * (2 if odd else 1)))
    expect(gs.PlanMismatch, lambda: gs.bcast_list_([first], root=1 if odd else 0))
    assert (first == comm.rank).all()
    read_only = np.ones(2)
    read_only.setflags(write=False)
    if comm.world_size == 2 and odd:
        expect(gs.InvalidArgument, lambda: gs.bcast_list_([read_only]), "array 0 is read-only")
    expect(gs.InvalidArgument, lambda: gs.bcast_list_([first], root=2), "root must be 0 to 1")
    expect(gs.InvalidArgument, lambda: gs.bcast_list_([1.0]), "array 0")
    expect(gs.InvalidArgument, lambda: gs.bcast_list_({"w": first}), "pass list(parameters.values())")
    expect(gs.InvalidArgument, lambda: gs.bcast_list_(first), "pass [array]")
    gs.bcast_list_([first])
    assert (first == 0).all()
    return str(error).partition(":")[2]


def test_bcast_list_refuses_before_anything_is_sent() -> None:
    first, second = run_ranks(2, broadcast_wrongly)
    assert first == second
    assert "float64[4]" in first
    assert "float64[2, 2]" in first


def pack(comm: Any) -> None:
    arrays = [np.full((2, 3), comm.rank + 1.0), np.full((), comm.rank + 2.0), np.zeros((0,))]
    shapes = [a.shape for a in arrays]
    n = comm.world_size
    for method, scale in (("sum", n), ("MEAN", 1)):
        got = gs.pack_allreduce_split(arrays, shapes, comm, method)
        assert [g.shape for g in got] == shapes
        assert np.allclose(got[0], scale * (n + 1) / 2)
        assert np.allclose(got[1], scale * (n + 3) / 2)
    assert (arrays[0] == comm.rank + 1).all()


@pytest.mark.parametrize("world_size", [1, 2])
def test_pack_allreduce_split(world_size: int) -> None:
    run_ranks(world_size, pack)


def test_pack_allreduce_split_refuses() -> None:
    comm = LocalCommunicator()
    with pytest.raises(gs.InvalidArgument, match="reduce_method"):
        gs.pack_allreduce_split([np.ones(1)], [(1,)], comm, "max")
    with pytest.raises(gs.InvalidArgument, match="one dtype"):
        gs.pack_allreduce_split([np.ones(1), np.ones(1, "f4")], [(1,), (1,)], comm)
    with pytest.raises(gs.InvalidArgument, match="as many elements"):
        gs.pack_allreduce_split([np.ones(2)], [(3,)], comm)
    with pytest.raises(gs.InvalidArgument, match="at least one"):
        gs.pack_allreduce_split([], [], comm)
