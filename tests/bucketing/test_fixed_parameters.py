"""Parameters that are told beforehand: any order of arrival, one order of launch, and what is missing."""

from __future__ import annotations

from typing import Any

import fixed_checks as checks
import numpy as np
import pytest

import gradsync as gs
from gradsync.communicators.local import local_communicator
from places import GPU, GPU_MIXED, SHM, STAND_IN, STAND_IN_MIXED, STAND_IN_SLOW, STAND_IN_STAGED, Place, always_on, on

FEW = [*on(SHM, 2), *on(STAND_IN, 2), *on(GPU, 2)]


@pytest.mark.parametrize(
    ("place", "world_size"),
    [
        *on(SHM, 1, 2, 4),
        *on(STAND_IN, 1, 2),
        *on(STAND_IN_SLOW, 2),
        *on(STAND_IN_STAGED, 2),
        *always_on(STAND_IN_MIXED, 2),
        *on(GPU, 1, 2),
        *on(GPU_MIXED, 2),
    ],
)
def test_gradients_come_in_any_order(place: Place, world_size: int) -> None:
    launched = place.run(world_size, checks.come_in_any_order, place.kit)
    assert launched == [launched[0]] * world_size


def combined(comm: Any, kit_name: str) -> None:
    checks.name_them_by_arrays(comm, kit_name)
    checks.fill_with_zeros(comm, kit_name)
    checks.keep_what_was_filled_in(comm, kit_name)
    checks.work_in_a_group(comm, kit_name)


@pytest.mark.parametrize(
    ("place", "world_size"),
    [*on(SHM, 1, 2, 3), *on(STAND_IN, 2), *always_on(STAND_IN_STAGED, 2), *on(STAND_IN_MIXED, 2), *on(GPU, 1, 2)],
)
def test_names_zeros_and_groups(place: Place, world_size: int) -> None:
    place.run(world_size, combined, place.kit)


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 1, 3), *on(STAND_IN, 2), *on(GPU, 2)])
def test_what_is_missing_is_told_on_every_rank(place: Place, world_size: int) -> None:
    told = place.run(world_size, checks.miss_some, place.kit)
    assert told == [told[0]] * world_size


@pytest.mark.parametrize(("place", "world_size"), FEW)
def test_the_world_begins_again_between_steps(place: Place, world_size: int) -> None:
    place.run(world_size, checks.begin_the_world_again, place.kit)


# -- What needs no second process ---------------------------------------------------------------------------------

PARAMETERS = {"a": ((2, 3), "float32"), "b": np.zeros(4), "c": ((), np.dtype("float64"))}


def test_what_does_not_fit_is_refused_and_leaves_no_trace() -> None:
    callback = gs.AllreduceCallback("mean", local_communicator(), parameters=PARAMETERS)
    a, b, c = np.ones((2, 3), np.float32), np.ones(4), np.ones(())
    for number in range(4):
        callback("b", b)
        with pytest.raises(gs.InvalidArgument, match="'d' is not among the callback's parameters, which are 'a', 'b'"):
            callback("d", np.ones(2))
        with pytest.raises(gs.InvalidArgument, match=r"gradient of 'a' must be float32\[2, 3\].* got float32\[3, 2\]"):
            callback("a", np.ones((3, 2), np.float32))
        with pytest.raises(gs.InvalidArgument, match=r"gradient of 'a' must be .* got float64\[2, 3\]"):
            callback("a", np.ones((2, 3)))
        for again in (b, np.ones(4)):
            with pytest.raises(gs.InvalidArgument, match="'b' was handed over twice"):
                callback("b", again)
        with pytest.raises(gs.InvalidArgument, match="gradient of 'c' shares memory with the gradient of 'b'"):
            callback("c", b[1:2].reshape(()))
        with pytest.raises(gs.InvalidArgument, match="hashable"):
            callback([], b)
        callback("a", a)
        callback("c", c if number else np.ones(()))
        assert callback.statistics.steps == number
        callback.flush()
    assert callback.statistics.steps == 4


def test_a_flush_without_gradients_is_an_empty_step() -> None:
    callback = gs.AllreduceCallback("mean", local_communicator(), parameters=PARAMETERS)
    for _ in range(2):
        callback.flush()
    with callback.backward():
        pass
    assert callback.statistics.steps == 0
    assert callback.statistics.all_reduces == 0
    with pytest.raises(gs.MissingGradient, match="no rank has handed over a gradient for 'c'"), callback.backward():
        callback("a", np.ones((2, 3), np.float32))
        future = callback("b", np.ones(4))
    with pytest.raises(gs.MissingGradient):
        future.result()
    callback.flush()
    assert isinstance(gs.MissingGradient("x"), gs.PlanMismatch)


def test_parameters_that_are_none_are_refused() -> None:
    comm = local_communicator()
    for parameters, text in [
        (np.ones(3), "as a mapping"),
        ("ab", "as a mapping"),
        (7, "as a mapping"),
        ({"a": 3}, "parameter 'a'"),
        ({"a": ((2,),)}, "parameter 'a'"),
        ({"a": ((-2,), "float32")}, "integers >= 0"),
        ({"a": ((2,), "float99")}, "parameter 'a'"),
        ([np.ones(2)] * 2, "the same parameter twice"),
    ]:
        with pytest.raises(gs.InvalidArgument, match=text):
            gs.AllreduceCallback("mean", comm, parameters=parameters)
    with pytest.raises(gs.UnsupportedDtype, match="mean is not defined for dtype int32"):
        gs.AllreduceCallback("mean", comm, parameters={"a": ((2,), "int32")})


def test_many_missing_names_are_counted() -> None:
    parameters = {f"p{i}": ((1,), "float32") for i in range(30)}
    callback = gs.AllreduceCallback("sum", local_communicator(), parameters=parameters)
    callback("p29", np.ones(1, np.float32))
    with pytest.raises(gs.MissingGradient, match="'p0', 'p1', .*'p7' and 21 more"):
        callback.flush()


@pytest.mark.parametrize("names", [np.array(["w", "v"]), np.array([3, 4])])
@pytest.mark.parametrize("is_declared", [False, True])
def test_a_name_out_of_an_array_of_names_is_that_name(names: np.ndarray, is_declared: bool) -> None:
    """Each look into the array makes a new object: by identity they would be other parameters."""
    plain = names.tolist()
    declared = dict.fromkeys(plain, ((2,), "float64")) if is_declared else None
    with gs.init_process_group("local") as comm:
        sync = gs.AllreduceCallback("sum", comm, parameters=declared)
        for each in (names, plain, names):
            with sync.backward():
                futures = [sync(name, np.ones(2)) for name in each]
            assert [future.result().tolist() for future in futures] == [[1.0, 1.0]] * 2
        with pytest.raises(gs.InvalidArgument), sync.backward():
            sync(names[0], np.ones(2))
            sync(names[0], np.ones(2))
