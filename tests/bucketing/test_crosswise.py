"""Callbacks that ranks use in another order: refused on all of them, and programs that are right are left alone."""

from __future__ import annotations

from typing import Any

import crosswise_checks as checks
import numpy as np
import pytest

import gradsync as gs
from contract import expect
from places import GPU, SHM, STAND_IN, STAND_IN_STAGED, Place, always_on, on
from rank_processes import run_ranks

EVERYWHERE = [*on(SHM, 2, 3), *on(STAND_IN, 2), *on(GPU, 2)]
KNOBS: list[dict[str, Any]] = [{}, {"parameters": {"w": ((4,), "float64")}}]


@pytest.mark.parametrize("knobs", KNOBS, ids=["", "parameters"])
@pytest.mark.parametrize(("place", "world_size"), [*EVERYWHERE, *always_on(STAND_IN_STAGED, 2)])
def test_the_first_use(place: Place, world_size: int, knobs: dict[str, Any]) -> None:
    place.run(world_size, checks.cross_at_first, place.kit, knobs)


@pytest.mark.parametrize(("place", "world_size"), EVERYWHERE)
def test_after_right_steps(place: Place, world_size: int) -> None:
    place.run(world_size, checks.cross_later, place.kit)


@pytest.mark.parametrize(("place", "world_size"), EVERYWHERE)
def test_made_by_one_line(place: Place, world_size: int) -> None:
    place.run(world_size, checks.cross_from_one_line, place.kit)


@pytest.mark.parametrize(("place", "world_size"), EVERYWHERE)
def test_names(place: Place, world_size: int) -> None:
    place.run(world_size, checks.cross_names, place.kit)


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 2), *on(STAND_IN, 2)])
def test_a_name_on_one_rank(place: Place, world_size: int) -> None:
    place.run(world_size, checks.name_on_one_rank, place.kit)


@pytest.mark.parametrize(("place", "world_size"), EVERYWHERE)
def test_the_first_use_meets_a_later_one(place: Place, world_size: int) -> None:
    place.run(world_size, checks.cross_first_with_later, place.kit)


@pytest.mark.parametrize("event", checks.EVENTS)
@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 2), *on(STAND_IN, 2)])
def test_every_event(place: Place, world_size: int, event: str) -> None:
    place.run(world_size, checks.cross_event, place.kit, event)


@pytest.mark.parametrize(("place", "world_size"), EVERYWHERE)
def test_a_first_event_that_differs(place: Place, world_size: int) -> None:
    place.run(world_size, checks.start_with_an_empty_flush, place.kit)


@pytest.mark.parametrize(
    "check",
    [
        checks.make_more_on_one_rank,
        checks.make_at_different_lines,
        checks.drop_one_in_a_circle,
        checks.use_on_two_communicators,
    ],
)
@pytest.mark.parametrize(("place", "world_size"), EVERYWHERE)
def test_a_right_program(place: Place, world_size: int, check: Any) -> None:
    place.run(world_size, check, place.kit)


@pytest.mark.parametrize(("place", "world_size", "rounds"), [(SHM, 2, 200), (SHM, 3, 50), (STAND_IN, 2, 20)])
def test_threads(place: Place, world_size: int, rounds: int) -> None:
    place.run(world_size, checks.make_in_threads, place.kit, rounds)


def test_threads_with_communicators_of_their_own() -> None:
    SHM.run(2, checks.train_in_threads, SHM.kit, 200)


def test_the_ranks_meet_once() -> None:
    assert SHM.run(2, checks.count_collectives, SHM.kit) == [[3, 2, 2, 2]] * 2
    assert SHM.run(1, checks.count_collectives, SHM.kit) == [[2, 2, 2, 2]]


def test_what_the_flight_recorder_shows() -> None:
    first, second = SHM.run(2, checks.what_is_recorded, SHM.kit)
    assert first == second
    assert first[0].startswith("the first step of the callback made at crosswise_checks.py:")
    step = ["all_reduce(mean) float64 32 bytes [w]", "flush(mean) after 1 gradient"]
    assert first[1:3] == step
    assert first[3].startswith("the first step of callback 'generator' made at crosswise_checks.py:")
    assert first[4:] == [f"{line} (callback {which})" for which in ("'generator'", "1") for line in step]


@pytest.mark.parametrize("name", ["", "two\nlines", "x" * 81, 3, b"generator"])
def test_a_name_that_is_none(name: Any) -> None:
    expect(gs.InvalidArgument, lambda: gs.AllreduceCallback(name=name), "needs name as text of 1 to 80 printable")


def test_one_rank_alone() -> None:
    with gs.init_process_group("local") as comm:
        callbacks = [gs.AllreduceCallback(name=name) for name in ("generator", "generator", None)]
        for value, callback in enumerate(callbacks):
            with callback.backward():
                future = callback("w", np.full(3, float(value)))
            assert (future.result() == value).all()
        assert comm.recorder.begun == 6


def differ_under_a_name(comm: Any, name: str) -> str:
    sync = gs.AllreduceCallback("sum", comm, name=name)
    try:
        with sync.backward():
            sync("p", np.ones(2 + comm.rank))
    except gs.PlanMismatch as error:
        return str(error)
    raise AssertionError("the ranks differ")


@pytest.mark.parametrize("name", ["the first use of", "a' (callback 'b', made at c:1)", "all_gather of float64[3]"])
def test_the_advice_does_not_depend_on_what_a_callback_is_called(name: str) -> None:
    for text in run_ranks(2, differ_under_a_name, name):
        assert "'p': float64[2]" in text
        assert "use different callbacks" not in text
        assert "sizes=" not in text
