"""check_consistency: the first array that differs is named on all ranks alike, with how it differs."""

from __future__ import annotations

import struct
from functools import partial
from typing import Any

import numpy as np
import pytest

import gradsync as gs
from contract import contribution, expect
from gradsync import consistency
from gradsync.communicators.local import local_communicator
from kits import make_kit
from places import GPU, SHM, STAND_IN, STAND_IN_MIXED, Place, always_on, on


def arrays() -> dict[str, np.ndarray[Any, Any]]:
    """Of every kind; Fortran order and strides are no difference in values."""
    return {
        "scalar": np.asarray(1.5),
        "empty": np.zeros((0, 3), np.float32),
        "matrix": contribution(0, (50, 70), "float32"),
        "brain": contribution(0, (9,), "bfloat16"),
        "flags": contribution(0, (9,), "bool"),
        "nan": np.array([np.nan, -0.0]),
    }


def agree_in_every_form(comm: Any, kit_name: str) -> None:
    consistency._PIECE_BYTES = 1000  # several pieces of an array on a GPU
    kit = make_kit(comm, kit_name)
    mine = {name: kit.put(array) for name, array in arrays().items()}
    if comm.rank == 1:
        mine = dict(reversed(mine.items()))
        mine["matrix"] = kit.put(np.asfortranarray(arrays()["matrix"]))
    gs.check_consistency(mine)
    gs.check_consistency(mine.items())
    gs.check_consistency(list(mine.items()), communicator=comm)
    gs.check_consistency([kit.put(array) for array in arrays().values()])
    gs.check_consistency([])
    dates = np.zeros(3, "datetime64[s]")
    gs.check_consistency({"dates": dates, "strided": np.arange(20.0).reshape(4, 5)[::2, ::2]})


@pytest.mark.parametrize(
    ("place", "world_size"), [*on(SHM, 1, 3), *on(STAND_IN, 1, 2), *always_on(STAND_IN_MIXED, 2), *on(GPU, 2)]
)
def test_equal_arrays_pass(place: Place, world_size: int) -> None:
    place.run(world_size, agree_in_every_form, place.kit)


def disagree(comm: Any, kit_name: str) -> list[str]:
    """Rank 1 differs, in one thing after the other."""
    consistency._PIECE_BYTES = 1000
    kit = make_kit(comm, kit_name)
    flipped = arrays()["matrix"].copy()
    flipped.view(np.uint32)[-1, -1] ^= 1
    other_nan = np.array([struct.unpack("d", struct.pack("Q", 0x7FF8000000000001))[0], -0.0])
    odd: list[tuple[dict[str, Any], str]] = [
        ({"matrix": flipped}, "'matrix' has different values:"),
        ({"nan": np.array([np.nan, 0.0])}, "'nan' has different values:"),
        ({"nan": other_nan}, "'nan' has different values:"),
        ({"scalar": np.asarray([1.5])}, "'scalar' has different shapes:"),
        ({"empty": np.zeros((0, 4), np.float32)}, "'empty' has different shapes:"),
        ({"matrix": arrays()["matrix"].view(np.int32)}, "'matrix' has different dtypes:"),
        ({"matrix": flipped, "flags": np.zeros(3, bool)}, "'matrix' has different values; 2 of 6 arrays differ:"),
        ({"extra": np.zeros(3)}, "'extra' is missing on some ranks:"),
    ]
    told = []
    for changes, text in odd:
        values = {**arrays(), **(changes if comm.rank == 1 else {})}
        mine = {name: kit.put(array) for name, array in values.items()}
        error = expect(gs.PlanMismatch, partial(gs.check_consistency, mine), text)
        assert sorted(error.descriptions) == list(range(comm.world_size))
        told.append(str(error).partition(":")[2])
    fewer = [kit.put(np.ones(3))] * (comm.rank + 1)
    error = expect(gs.PlanMismatch, lambda: gs.check_consistency(fewer), "'#1' is missing on some ranks")
    gs.check_consistency({name: kit.put(array) for name, array in arrays().items()})
    return [*told, str(error).partition(":")[2]]


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 3), *on(STAND_IN, 2), *on(GPU, 2)])
def test_the_first_difference_is_named_on_every_rank(place: Place, world_size: int) -> None:
    by_rank = place.run(world_size, disagree, place.kit)
    assert by_rank == [by_rank[0]] * world_size
    for text in by_rank[0]:
        assert "the ranks' arrays differ" in text
        assert "the next collective" not in text
    assert "\n  rank 1: float32[50, 70] with digest" in by_rank[0][0]
    assert "\n  rank 0: (no array of this name)" in by_rank[0][7]


def name_ranks_of_the_world(comm: Any) -> None:
    """Ranks 0 and 2 of the world are ranks 0 and 1 of their group; errors name them as the world does."""
    group = comm.new_group([0, 2])
    if not group:
        return
    changed = {"w": np.full(1, float(group.rank))}
    error = expect(gs.PlanMismatch, lambda: gs.check_consistency(changed, group), "\n  rank 2: float64[1]")
    assert sorted(error.descriptions) == [0, 2]
    shorter = np.zeros(2 - group.rank)
    error = expect(gs.PlanMismatch, lambda: gs.broadcast_tree(shorter, 1, group), "rank 2 (the root)")
    assert list(error.descriptions) == [0]


@pytest.mark.parametrize(("place", "world_size"), on(SHM, 3))
def test_errors_of_a_group_name_ranks_of_the_world(place: Place, world_size: int) -> None:
    place.run(world_size, name_ranks_of_the_world)


def test_misuse_is_told() -> None:
    comm = local_communicator()
    for wrong in (np.ones(3), 3, None, "w"):
        with pytest.raises(gs.InvalidArgument, match="needs a mapping of names to arrays"):
            gs.check_consistency(wrong, comm)
    with pytest.raises(gs.InvalidArgument, match="array 'w' needs a NumPy array.*got a float"):
        gs.check_consistency({"w": 1.0}, comm)
    with pytest.raises(gs.InvalidArgument, match="got an int: make it an array"):
        gs.check_consistency({"w": 1}, comm)
    with pytest.raises(gs.InvalidArgument, match="two arrays of the name '1'"):
        gs.check_consistency([("1", np.ones(1)), (1, np.ones(1))], comm)
    with pytest.raises(gs.UnsupportedDtype, match="array 'o'"):
        gs.check_consistency({"o": np.array([None])}, comm)
