"""A rank of mpiexec that runs the checks of the callback's knobs, one after the other: mpi_knob_rank.py."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS), str(TESTS / "bucketing")]

import accumulation_checks
import average_checks
import callback_checks
import callback_hook_checks
import fixed_checks
import knob_checks
import steady_checks
import view_checks
from naive_reference import THRESHOLDS

import gradsync as gs

ACCUMULATION = [
    partial(accumulation_checks.add_up, kit_name="numpy", options=each) for each in accumulation_checks.OPTIONS
]

CHECKS = (
    lambda comm: steady_checks.repeat_the_same_arrays(comm, "numpy", THRESHOLDS),
    lambda comm: steady_checks.deviate(comm, "numpy", THRESHOLDS[1:2]),
    lambda comm: fixed_checks.come_in_any_order(comm, "numpy"),
    lambda comm: fixed_checks.miss_some(comm, "numpy"),
    lambda comm: fixed_checks.fill_with_zeros(comm, "numpy"),
    lambda comm: fixed_checks.stand_in_for_others(comm, "numpy"),
    lambda comm: view_checks.live_in_buckets(comm, "numpy", view_checks.CASES),
    lambda comm: view_checks.copy_into_the_buckets(comm, "numpy"),
    lambda comm: view_checks.stand_in_for_others(comm, "numpy"),
    lambda comm: knob_checks.begin_early(comm, "numpy"),
    lambda comm: knob_checks.watch(comm, "numpy"),
    lambda comm: callback_hook_checks.hand_buckets_to_hooks(comm, "numpy"),
    lambda comm: callback_hook_checks.differ(comm, "numpy"),
    lambda comm: callback_hook_checks.combine(comm, "numpy"),
    lambda comm: average_checks.average_everything(comm, "numpy"),
    lambda comm: average_checks.average_what_is_no_array(comm),
    lambda comm: average_checks.differ(comm, "numpy"),
    lambda comm: callback_checks.accumulate(comm, "numpy"),
    lambda comm: callback_checks.refuse_in_no_sync(comm, "numpy"),
    *(
        partial(accumulation_checks.add_up, kit_name="numpy", options=options)
        for options in accumulation_checks.OPTIONS
    ),
    lambda comm: accumulation_checks.add_up_scratch(comm, "numpy", in_buckets=False),
    lambda comm: accumulation_checks.add_up_scratch(comm, "numpy", in_buckets=True),
    lambda comm: accumulation_checks.hand_over_what_came_before_alone(comm, "numpy"),
    lambda comm: accumulation_checks.differ_in_passes(comm, "numpy"),
    lambda comm: accumulation_checks.add_up_with_uneven_batches(comm, "numpy"),
    lambda comm: accumulation_checks.add_up_before_a_hook(comm, "numpy"),
)

if __name__ == "__main__":
    with gs.init_process_group("mpi") as world:
        for check in CHECKS:
            check(world)
        sys.stdout.write(f"rank {world.rank} has come through all checks\n")
