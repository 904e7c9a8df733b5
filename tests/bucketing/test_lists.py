"""Lists of arrays: pack, split, reduce and broadcast."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import gradsync as gs
from arrays import arrays_of, contribution
from bucketing.reference import outcome

array_lists = st.sampled_from(["f4", "f8", "i2", "c8", "?"]).flatmap(
    lambda dtype: st.lists(
        hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)), min_size=1, max_size=8
    )
)
layouts = st.sampled_from([np.ascontiguousarray, np.asfortranarray, lambda a: a[..., ::-1] if a.ndim else a])


@settings(max_examples=50)
@given(array_lists, layouts)
def test_split_is_the_inverse_of_concat(arrays, change_layout):
    given = [np.asarray(change_layout(array)).reshape(array.shape) for array in arrays]
    shapes = [array.shape for array in given]
    offsets = gs.get_offsets(shapes)
    flat = gs.param_pack_concat(given, offsets)
    assert flat.shape == (sum(array.size for array in given),)
    for original, view in zip(given, gs.param_pack_split(flat, offsets, shapes), strict=True):
        np.testing.assert_array_equal(view, original)
        assert view.size == 0 or np.shares_memory(view, flat)


def test_offsets_are_begin_and_end_of_each():
    assert gs.get_offsets([(2, 3), (), (0, 4), (5,), None]) == [0, 6, 6, 7, 7, 7, 7, 12, 12, 13]
    assert gs.get_offsets([]) == []
    arrays = [np.ones(2), np.ones(3)]
    assert gs.param_pack_concat(arrays, np.array([0, 2, 2, 5])).sum() == 5
    assert gs.param_pack_concat(arrays, "on a device", [0, 2, 2, 5]).sum() == 5
    out = np.zeros(10)
    flat = gs.param_pack_concat(arrays, [0, 2, 2, 5], out=out)
    assert np.shares_memory(flat, out)
    assert out.tolist() == [1.0] * 5 + [0.0] * 5


@pytest.mark.parametrize(
    "call",
    [
        lambda: gs.param_pack_concat([], []),
        lambda: gs.param_pack_concat([np.ones(2), np.ones(2, "f4")], [0, 2, 2, 4]),
        lambda: gs.param_pack_concat([np.ones(2)], [0, 3]),
        lambda: gs.param_pack_concat([np.ones(2)], [0, 2, 2, 4]),
        *[
            lambda out=out: gs.param_pack_concat([np.ones(2)], [0, 2], out=out)
            for out in (np.zeros(1), np.zeros(2, "f4"), np.zeros((2, 2)), np.zeros(8)[::2])
        ],
        lambda: gs.param_pack_split(np.zeros(5), [0, 6], [(2, 3)]),
        lambda: gs.param_pack_split(np.zeros(6), [0, 5], [(2, 3)]),
        lambda: gs.param_pack_split(np.zeros(12)[::2], [0, 6], [(2, 3)]),
        lambda: gs.get_offsets([(2, -1)]),
        lambda: gs.get_offsets([(2, 1.5)]),
        lambda: gs.get_offsets([3]),
    ],
)
def test_what_does_not_fit_is_refused(call):
    with pytest.raises(gs.InvalidArgument):
        call()


def parameters(rank):
    return [
        contribution(rank, (), "float64"),
        contribution(rank, (0, 4), "float32"),
        np.asfortranarray(contribution(rank, (7, 9), "float64")),
        contribution(rank, (12,), "int64"),
        contribution(rank, (3, 3), "bool"),
        contribution(rank, (400, 500), "float32"),
        contribution(rank, (5,), "bfloat16"),
    ]


@pytest.mark.ranks(on={"shm": (2, 3), "fake": (2,), "gpu": (2,), "mpi": (2,)})
def test_bcast_list_copies_the_roots_arrays_in_place(comm):
    arrays = arrays_of(comm)
    for root in range(comm.world_size):
        strided = arrays.put(np.full((20, 30), comm.rank, np.float32))
        dates = np.full(3, comm.rank, "datetime64[s]")  # in host memory everywhere: CuPy has none
        mine = [*map(arrays.put, parameters(comm.rank)), strided[::2, ::3], dates]
        if comm.rank == root:
            for array in mine:
                if isinstance(array, np.ndarray):
                    array.setflags(write=False)
        gs.bcast_list_(mine, root=root)
        for got, want in zip(mine, parameters(root), strict=False):
            np.testing.assert_array_equal(arrays.get(got), want)
        assert (arrays.get(strided)[::2, ::3] == root).all()
        assert (arrays.get(strided)[1::2] == comm.rank).all()
        assert (dates == np.datetime64(root, "s")).all()
    gs.bcast_list_([])
    gs.bcast_list_(array for array in [arrays.put(np.ones(2))])
    gs.bcast_list_([arrays.put(np.ones(2))], communicator=comm)
    gs.bcast_list_([arrays.put(np.ones(2))], group=comm)


@pytest.mark.ranks(2, on=("shm", "fake", "gpu"))
def test_bcast_list_refuses_before_anything_is_sent(comm):
    arrays, is_odd = arrays_of(comm), comm.rank == 1
    first = arrays.put(np.full(3, float(comm.rank)))
    second = arrays.put(np.full((2, 2) if is_odd else (4,), float(comm.rank)))
    for mine, root in (([first, second], 0), ([first] * (1 + is_odd), 0), ([first], int(is_odd))):
        with pytest.raises(gs.PlanMismatch) as raised:
            gs.bcast_list_(mine, root=root)
        assert raised.value.descriptions[0] != raised.value.descriptions[1]
        assert (arrays.get(first) == comm.rank).all()
    last = comm.new_group([1])
    wrong = [
        (([first], 2), {}),
        (([1.0],), {}),
        (({"w": first},), {}),
        ((first,), {}),
        (([first], comm), {}),
        (([first], 0, comm), {"group": comm}),
        *([(([first], 1, last), {})] if last else []),
    ]
    for arguments, options in wrong:
        with pytest.raises(gs.InvalidArgument):
            gs.bcast_list_(*arguments, **options)
    gs.bcast_list_([first])
    assert (arrays.get(first) == 0).all()


@pytest.mark.parametrize("name", ["bcast_list_", "broadcast_tree"])
def test_an_array_that_one_rank_cannot_write_to_fails_all_ranks_alike(run_in_group, name):
    def broadcast(comm):
        array = np.full(2, float(comm.rank))
        array.setflags(write=comm.rank != 1)
        error = outcome(getattr(gs, name), [array], 0, comm)
        comm.barrier()
        return type(error)

    assert run_in_group(2, broadcast) == [gs.InvalidArgument] * 2


@pytest.mark.ranks(2, on=("shm", "fake", "gpu"))
def test_pack_allreduce_split_reduces_a_list_in_one_collective(comm):
    arrays, n = arrays_of(comm), comm.world_size
    given = [arrays.put(a) for a in (np.full((2, 3), comm.rank + 1.0), np.full((), comm.rank + 2.0), np.zeros((0,)))]
    for method, scale in (("sum", n), ("MEAN", 1)):
        got = gs.pack_allreduce_split(given, [a.shape for a in given], comm, method)
        assert [each.shape for each in got] == [a.shape for a in given]
        assert np.allclose(arrays.get(got[0]), scale * (n + 1) / 2)
        assert np.allclose(arrays.get(got[1]), scale * (n + 3) / 2)
    assert (arrays.get(given[0]) == comm.rank + 1).all()  # the inputs are as they were
    one = arrays.put(np.ones(1))
    for wrong in (
        ([one], [(1,)], comm, "max"),
        ([one, arrays.put(np.ones(1, "f4"))], [(1,), (1,)], comm),
        ([one], [(3,)], comm),
        ([], [], comm),
    ):
        with pytest.raises(gs.InvalidArgument):
            gs.pack_allreduce_split(*wrong)
