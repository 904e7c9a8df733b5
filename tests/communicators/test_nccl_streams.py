"""The NCCL communicator and streams: nothing is read before it is written, or given away while it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from places import GPU, STAND_IN, STAND_IN_SLOW, Place, always_on, on

CHECKS = (
    "reduce_what_slow_streams_make",
    "use_results_on_other_streams",
    "reuse_memory_at_once",
    "take_memory_that_another_thread_has_just_freed",
    "finish_late",
    "wait_in_a_callback",
    "run_on_given_streams",
    "refuse_wrong_streams",
    "refuse_streams_that_are_capturing",
    "outlive_a_capture_that_forbids_all_threads_to_look",
)


def check(comm: Any, name: str) -> Any:
    """Runs a check; only ranks have a CuPy, so that only they import it."""
    import nccl_checks

    function: Callable[[Any], Any] = getattr(nccl_checks, name)
    return function(comm)


@pytest.mark.parametrize(
    ("place", "world_size"), [*on(STAND_IN, 1, 2), *always_on(STAND_IN_SLOW, 2), *on(GPU, 1, 2, 4)]
)
@pytest.mark.parametrize("name", CHECKS)
def test_streams(place: Place, world_size: int, name: str) -> None:
    place.run(world_size, check, name)


@pytest.mark.parametrize(("place", "world_size"), [*on(STAND_IN, 2, 3), *on(GPU, 2)])
@pytest.mark.parametrize("name", ["keep_callbacks_from_the_watcher", "keep_callbacks_of_a_failure_from_the_watcher"])
def test_a_slow_callback_keeps_nobody_from_noticing_failures(place: Place, world_size: int, name: str) -> None:
    place.run(world_size, check, name)


def test_pinned_memory_is_given_back() -> None:
    STAND_IN.run(2, check, "give_pinned_memory_back")


@pytest.mark.parametrize(("place", "world_size"), [*on(STAND_IN, 1, 2, 3), *on(GPU, 2)])
def test_a_steady_step_compares_each_launch_and_waits_for_nothing_else(place: Place, world_size: int) -> None:
    for counts in place.run(world_size, check, "count_calls_of_a_steady_step"):
        packed = {} if world_size == 1 else {"pack_chunks": 4, "split_chunks": 4, "call": 4, "exchange": 5}
        assert counts == packed


@pytest.mark.parametrize(("place", "world_size"), [*on(STAND_IN, 2), *on(GPU, 2)])
def test_many_launches_take_few_looks(place: Place, world_size: int) -> None:
    place.run(world_size, check, "leave_a_gpu_that_is_behind_alone")
