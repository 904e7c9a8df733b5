"""Failures in each mode of an AllreduceCallback."""

from __future__ import annotations

import mode_failures as failures
import pytest

from places import GPU, SHM, STAND_IN, STAND_IN_STAGED, Place, on


def test_an_exception_and_ctrl_c_reach_the_others() -> None:
    told = SHM.run(3, failures.raise_in_modes, SHM.kit, tuple(failures.MODES), ("raises", "Ctrl-C"))
    failed = 2 * len(failures.MODES)
    assert told == [["told"] * failed, ["told"] * failed, ["raised"] * failed]


@pytest.mark.parametrize(
    ("place", "mode", "how"),
    [
        pytest.param(place, mode, how, id=f"{place.name}, {mode}, {how}", marks=place.marks)
        for place, mode, how in [
            (STAND_IN, "views", "raises"),
            (STAND_IN, "hook", "Ctrl-C"),
            (STAND_IN, "watched", "Ctrl-C"),
            (STAND_IN_STAGED, "parameters", "raises"),
            (GPU, "views", "raises"),
            (GPU, "hook", "raises"),
        ]
    ],
)
def test_an_exception_on_one_gpu_reaches_the_others(place: Place, mode: str, how: str) -> None:
    assert place.run(2, failures.raise_in_modes, place.kit, (mode,), (how,)) == [["told"], ["raised"]]


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 1), *on(STAND_IN, 1), *on(GPU, 1)])
def test_what_was_not_reduced_is_cancelled(place: Place, world_size: int) -> None:
    place.run(world_size, failures.cancel_what_was_not_reduced, place.kit)
