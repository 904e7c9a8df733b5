"""check_consistency, and the warning before the first step that parameters differ."""

from __future__ import annotations

import struct

import numpy as np
import pytest

import gradsync as gs
from arrays import arrays_of, contribution
from bucketing.reference import Heard, step


def arrays_to_compare():
    """Of every kind; Fortran order and strides are no difference in values."""
    return {
        "scalar": np.asarray(1.5),
        "empty": np.zeros((0, 3), np.float32),
        "matrix": contribution(0, (50, 70), "float32"),
        "brain": contribution(0, (9,), "bfloat16"),
        "flags": contribution(0, (9,), "bool"),
        "nan": np.array([np.nan, -0.0]),
    }


@pytest.mark.ranks(on={"shm": (3,), "fake": (2,), "gpu": (2,)})
def test_equal_arrays_pass_in_every_form(comm):
    arrays = arrays_of(comm)
    mine = {name: arrays.put(array) for name, array in arrays_to_compare().items()}
    if comm.rank == 1:
        mine = dict(reversed(mine.items()))
        mine["matrix"] = arrays.put(np.asfortranarray(arrays_to_compare()["matrix"]))
    gs.check_consistency(mine)
    gs.check_consistency(mine.items())
    gs.check_consistency(list(mine.items()), communicator=comm)
    gs.check_consistency([arrays.put(array) for array in arrays_to_compare().values()])
    gs.check_consistency([])
    gs.check_consistency({"dates": np.zeros(3, "M8[s]"), "strided": np.arange(20.0).reshape(4, 5)[::2, ::2]})


def flipped():
    array = arrays_to_compare()["matrix"]
    array.view(np.uint32)[-1, -1] ^= 1
    return array


OTHER_NAN = np.array([struct.unpack("d", struct.pack("Q", 0x7FF8000000000001))[0], -0.0])
#: What rank 1 has instead, and the first name that differs.
DIFFERENCES = [
    ({"matrix": flipped()}, "matrix"),
    ({"nan": np.array([np.nan, 0.0])}, "nan"),
    ({"nan": OTHER_NAN}, "nan"),
    ({"scalar": np.asarray([1.5])}, "scalar"),
    ({"empty": np.zeros((0, 4), np.float32)}, "empty"),
    ({"matrix": arrays_to_compare()["matrix"].view(np.int32)}, "matrix"),
    ({"matrix": flipped(), "flags": np.zeros(3, bool)}, "matrix"),
    ({"more": np.ones(2)}, "more"),
]


@pytest.mark.ranks(on={"shm": (2, 3), "fake": (2,), "gpu": (2,)})
def test_the_first_array_that_differs_is_named_on_every_rank(comm):
    arrays = arrays_of(comm)
    for changed, name in DIFFERENCES:
        mine = arrays_to_compare() | (changed if comm.rank == 1 else {})
        with pytest.raises(gs.PlanMismatch, match=f"'{name}'") as raised:
            gs.check_consistency({name: arrays.put(array) for name, array in mine.items()})
        descriptions = raised.value.descriptions
        assert sorted(descriptions) == list(range(comm.world_size))
        assert [rank for rank in descriptions if descriptions[rank] != descriptions[0]] == [1]
        assert len(set(comm.objects.all_gather(str(raised.value).partition(":")[2]))) == 1
    with pytest.raises(gs.PlanMismatch, match="'#1'"):
        gs.check_consistency([arrays.put(np.ones(3))] * (comm.rank + 1))
    gs.check_consistency({name: arrays.put(array) for name, array in arrays_to_compare().items()})


@pytest.mark.parametrize(
    "wrong",
    [np.ones(3), np.ones((3, 2)), 3, None, "w", {"w": 1.0}, {"w": 1}, [("1", np.ones(1)), (1, np.ones(1))]],
    ids=repr,
)
def test_what_cannot_be_compared_is_refused(alone, wrong):
    with pytest.raises(gs.InvalidArgument):
        gs.check_consistency(wrong, alone)
    with pytest.raises(gs.UnsupportedDtype):
        gs.check_consistency({"o": np.array([None])}, alone)


# -- Before the first step ---------------------------------------------------------------------------------------------


def warnings_of(comm, parameters, arrays, **options):
    """The warnings of two steps with these parameters."""
    with Heard() as lines:
        sync = gs.AllreduceCallback("sum", comm, parameters=parameters, threshold_bytes=8, **options)
        named = parameters if isinstance(parameters, dict) else dict(enumerate(parameters))
        for _ in range(2):
            with sync.backward():
                for name, of in named.items():
                    shape = of.shape if hasattr(of, "shape") else of[0]
                    sync(name if named is parameters else of, arrays.put(np.ones(shape)))
    return lines


@pytest.mark.ranks(on={"shm": (2, 3), "fake": (2,)})
def test_parameters_that_differ_before_the_first_step_are_named_once_on_rank_0(comm):
    arrays, last = arrays_of(comm), comm.rank == comm.world_size - 1
    weights = {
        "same": arrays.put(np.arange(3.0)),
        "empty": arrays.put(np.zeros((0, 2))),
        "nan": arrays.put(np.array([np.nan, -0.0])),
        "w": arrays.put(np.full(4, float(last))),
        "zero": arrays.put(np.array([-0.0 if last else 0.0])),
    }
    for parameters, name in ((weights, "'w'"), (list(weights.values()), "#3")):
        lines = warnings_of(comm, parameters, arrays)
        assert len(lines) == (comm.rank == 0)
        assert all(f"{name}: rank {comm.world_size - 1} " in line and "bcast_list_" in line for line in lines)
    comm.barrier()
    gs.bcast_list_(list(weights.values()))
    assert warnings_of(comm, weights, arrays) == []


@pytest.mark.ranks(2)
def test_what_cannot_be_known_is_not_warned_of(comm):
    arrays = arrays_of(comm)
    mine = {"w": np.full(4, float(comm.rank)), "b": np.full(2, float(comm.rank))}
    shapes = {name: (array.shape, array.dtype) for name, array in mine.items()}
    read_only = {name: array.copy() for name, array in mine.items()}
    for array in read_only.values():
        array.setflags(write=False)
    # Shapes on one rank, or on all; arrays that the program cannot have broadcast in place.
    for parameters in (shapes if comm.rank else mine, shapes, read_only):
        assert warnings_of(comm, parameters, arrays) == []
    with Heard() as lines:  # gradients, which differ: they are no parameters
        step(gs.AllreduceCallback("sum", comm, parameters=mine), mine)
    assert lines == []


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_view", [False, True])
def test_a_rank_without_gradients_compares_too(comm, is_view):
    weights = {"w": np.full(4, float(comm.rank)), "b": np.zeros(2)}
    options = {"missing": "zero", "gradient_as_bucket_view": is_view}
    with Heard() as lines:
        step(gs.AllreduceCallback("sum", comm, parameters=weights, **options), {"b": np.ones(2)} if comm.rank else {})
    assert len(lines) == (comm.rank == 0)
    assert all("'w'" in line for line in lines)
