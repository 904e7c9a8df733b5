"""The last line of PlanMismatch names the difference between the ranks, and the rank that differs."""

from __future__ import annotations

import advice_checks as checks
import pytest

from places import GPU, SHM, STAND_IN, Place, always_on, on

LINES = {
    "without the first": "rank 1 did not hand over 'w0'",
    "without a middle one": "rank 1 did not hand over 'w1'",
    "without the last": "rank 1 did not hand over 'w2'",
    "nothing": "rank 1 did not hand over 'w0'",
    "one more": "rank 0 did not hand over 'w3'",
    "another order": "the gradients are the same, but their order differs",
    "another shape": "'b1' has a different shape on rank 1 than on rank 0: [3] on rank 0, [4] on rank 1",
    "another dtype, reduced later": "'b1' has a different dtype on rank 1 than on rank 0: float32 on rank 0, float64",
    "another dtype, reduced before": "'b1' has a different dtype on rank 1 than on rank 0: float32 on rank 0, float16",
    "another name": "the ranks hand over different gradients here: 'b1' on rank 0, 'bias' on rank 1: use the same",
    "clip_norm on one rank": "clip_norm is set on rank 1 only",
    "clip_norm on the others": "clip_norm is set on rank 0 only",
    "two values of clip_norm": "clip_norm differs: 2.0 on rank 0, 1.0 on rank 1",
    "sum and mean": "reduce_method differs: mean on rank 0, sum on rank 1",
    "thresholds": "threshold_bytes differs: 10485760 on rank 0, 30 on rank 1: make the callback with the same options",
}
AMONG_THREE = {
    "without a middle one": "rank 1 did not hand over 'w1', but ranks 0 and 2 did",
    "another order": "the gradients are the same, but their order differs on rank 1 from the order on ranks 0 and 2: ",
    "one more": "ranks 0 and 2 did not hand over 'w3', but rank 1 did",
    "another shape": "'b1' has a different shape on rank 1 than on ranks 0 and 2: [3] on ranks 0 and 2, [4] on rank 1",
    "clip_norm on the others": "clip_norm is set on ranks 0 and 2 only",
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
    for line in SHM.run(2, checks.other_local_passes, SHM.kit):
        assert line.startswith(
            "the ranks had different numbers of local passes before this step, but need equal numbers: 2 on"
        )
    for line in SHM.run(2, checks.hook_on_one_rank, SHM.kit):
        assert line.startswith("hook is set on rank 1 only")
    for line in SHM.run(2, checks.missing_parameter, SHM.kit):
        assert line.startswith("rank 1 did not hand over 'w1'")
    for line in SHM.run(2, checks.other_buckets, SHM.kit):
        assert line.startswith("'w1' has a different shape on rank 1 than on rank 0")
    for line in SHM.run(2, checks.missing_array, SHM.kit):
        assert line.startswith("the ranks handed over different numbers of gradients: 3 on rank 0, 2 on rank 1: hand")
    for line in SHM.run(2, checks.another_order_of_many, SHM.kit):
        assert line.startswith("the gradients are the same, but their order differs: hand them over in the same order")
    for line in SHM.run(3, checks.other_arrays, SHM.kit):
        assert line == "rank 1 differs from ranks 0 and 2: pass arrays of the same shape on all ranks"
