"""The search for a threshold, and failures in each mode of an AllreduceCallback."""

from __future__ import annotations

import auto_checks
import mode_failures as failures
import pytest

import gradsync as gs
from places import GPU, SHM, STAND_IN, STAND_IN_STAGED, Place, on

FEW = [*on(SHM, 2), *on(STAND_IN, 2), *on(GPU, 2)]


@pytest.mark.parametrize(("changes", "is_told"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(("place", "world_size"), FEW)
def test_all_ranks_settle_for_one_threshold(place: Place, world_size: int, changes: bool, is_told: bool) -> None:
    thresholds = place.run(world_size, auto_checks.settle, place.kit, changes, is_told)
    assert thresholds == [thresholds[0]] * world_size


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
            (STAND_IN_STAGED, "compressed", "raises"),
            (GPU, "views", "raises"),
            (GPU, "hook", "raises"),
        ]
    ],
)
def test_an_exception_on_one_gpu_reaches_the_others(place: Place, mode: str, how: str) -> None:
    assert place.run(2, failures.raise_in_modes, place.kit, (mode,), (how,)) == [["told"], ["raised"]]


@pytest.mark.parametrize(
    ("place", "mode"),
    [
        pytest.param(place, mode, id=f"{place.name}, {mode}", marks=place.marks)
        for place, modes in [
            (SHM, ("parameters", "views", "compressed", "hook", "watched")),
            (STAND_IN, ("views", "hook")),
            (GPU, ("views",)),
        ]
        for mode in modes
    ],
)
def test_a_killed_rank_is_named_on_the_others(place: Place, mode: str) -> None:
    outcomes = place.outcomes(2, failures.die, place.kit, mode)
    assert outcomes.pop(1).exit_code == -9
    for survivor in outcomes:
        assert isinstance(survivor.error, gs.RankFailed), survivor.traceback_text
        assert survivor.error.rank == 1


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 1), *on(STAND_IN, 1), *on(GPU, 1)])
def test_what_was_not_reduced_is_cancelled(place: Place, world_size: int) -> None:
    place.run(world_size, failures.cancel_what_was_not_reduced, place.kit)
