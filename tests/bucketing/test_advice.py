"""The last line of PlanMismatch names the difference between the ranks, and the rank that differs."""

from __future__ import annotations

import advice_checks as checks
import pytest

from places import GPU, SHM, STAND_IN, Place, always_on, on

SAME = (
    "hand over the same gradients, of the same shapes and dtypes, in the same order on all ranks; with parameters=..."
)
OPTIONS = "make the callback with the same options on all ranks"
ARRAYS = "pass arrays of the same shape and dtype on all ranks"
LINES = {
    "without the first": f"'w0' is missing here on rank 1: {SAME}",
    "without a middle one": f"'w1' is missing here on rank 1: {SAME}",
    "without the last": f"'w2' is missing here on rank 1: {SAME}",
    "nothing": SAME,
    "one more": f"'w3' is missing here on rank 0: {SAME}",
    "another order": "the order differs: hand over gradients in the same order on all ranks, or pass parameters=...",
    "another shape": f"'b1' differs: float32[3] on rank 0; float32[4] on rank 1: {ARRAYS}",
    "another dtype, reduced later": f"'b1' is missing here on rank 1: {SAME}",
    "another dtype, reduced before": f"'b1' differs: float32[3] on rank 0; float16[3] on rank 1: {ARRAYS}",
    "another name": f"'b1' is missing here on rank 1: {SAME}",
    "clip_norm on one rank": f"the callback's options differ: mean on rank 0; mean, clip_norm 1.0 on rank 1: {OPTIONS}",
    "clip_norm on the others": "the callback's options differ: mean, clip_norm 1.0 on rank 0; mean on rank 1: make",
    "two values of clip_norm": "the callback's options differ: mean, clip_norm 2.0 on rank 0; mean, clip_norm 1.0 on",
    "sum and mean": f"the callback's options differ: mean on rank 0; sum on rank 1: {OPTIONS}",
    "thresholds": "the callback's options differ: mean on rank 0; mean, threshold_bytes 30 on rank 1:",
}
AMONG_THREE = {
    "without a middle one": f"'w1' is missing here on rank 1: {SAME}",
    "one more": f"'w3' is missing here on ranks 0 and 2: {SAME}",
    "another shape": f"'b1' differs: float32[3] on ranks 0 and 2; float32[4] on rank 1: {ARRAYS}",
    "clip_norm on the others": "the callback's options differ: mean, clip_norm 1.0 on ranks 0 and 2; mean on rank 1:",
}


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 2), *always_on(STAND_IN, 2), *on(GPU, 2)])
def test_the_difference_is_named(place: Place, world_size: int, name: str) -> None:
    for line in place.run(world_size, checks.last_line, place.kit, name):
        assert line.startswith(LINES[name])


@pytest.mark.parametrize("name", ["without a middle one", "another shape", "another dtype, reduced later"])
def test_a_rank_that_leaves_a_repeated_plan_is_named(name: str) -> None:
    for line in SHM.run(2, checks.last_line, SHM.kit, name, 3):
        assert line.startswith(LINES[name])


@pytest.mark.parametrize("name", AMONG_THREE)
def test_the_odd_one_of_three_ranks_is_named(name: str) -> None:
    for line in SHM.run(3, checks.last_line, SHM.kit, name):
        assert line.startswith(AMONG_THREE[name])


def test_other_differences_are_named() -> None:
    for line in SHM.run(2, checks.hook_on_one_rank, SHM.kit):
        assert line == f"the callback's options differ: mean on rank 0; mean, hook on rank 1: {OPTIONS}"
    for line in SHM.run(2, checks.missing_parameter, SHM.kit):
        assert line.startswith(SAME)
    for line in SHM.run(2, checks.other_buckets, SHM.kit):
        assert line == f"'w1' differs: float64[3] on rank 0; float64[4] on rank 1: {ARRAYS}"
    for line in SHM.run(2, checks.missing_array, SHM.kit):
        assert line.startswith(f"the numbers of gradients differ: 3 on rank 0; 2 on rank 1: {SAME}")
    for line in SHM.run(2, checks.another_order_of_arrays, SHM.kit):
        assert line == LINES["another order"]
    for line in SHM.run(2, checks.missing_known_array, SHM.kit):
        assert line.startswith(SAME)
    for line in SHM.run(2, checks.another_all_reduce, SHM.kit):
        assert line == "call the same collectives in the same order on all ranks"
    for line in SHM.run(2, checks.another_order_of_many, SHM.kit):
        assert line == LINES["another order"]
    for line in SHM.run(2, checks.other_arrays, SHM.kit):
        assert line == "pass the same arguments, and arrays of the same shape and dtype, on all ranks"
    for line in SHM.run(2, checks.other_callbacks, SHM.kit):
        assert line.endswith('name the callbacks: gs.AllreduceCallback(..., name="generator")')
    for line in SHM.run(2, checks.other_collectives, SHM.kit):
        assert line == "call the same collectives in the same order on all ranks"
