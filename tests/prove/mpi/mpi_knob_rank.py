"""A rank of mpiexec that runs the checks of the callback's knobs, one after the other: mpi_knob_rank.py."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS), str(TESTS / "bucketing")]

import average_checks
import callback_hook_checks
import fixed_checks
import knob_checks
import steady_checks
import view_checks
from naive_reference import THRESHOLDS

import gradsync as gs

CHECKS = (
    lambda comm: steady_checks.repeat_the_same_arrays(comm, "numpy", THRESHOLDS),
    lambda comm: steady_checks.deviate(comm, "numpy", THRESHOLDS[1:2]),
    lambda comm: fixed_checks.come_in_any_order(comm, "numpy"),
    lambda comm: fixed_checks.miss_some(comm, "numpy"),
    lambda comm: fixed_checks.fill_with_zeros(comm, "numpy"),
    lambda comm: view_checks.live_in_buckets(comm, "numpy", view_checks.CASES),
    lambda comm: view_checks.copy_into_the_buckets(comm, "numpy"),
    lambda comm: knob_checks.begin_early(comm, "numpy"),
    lambda comm: knob_checks.watch(comm, "numpy"),
    lambda comm: callback_hook_checks.hand_buckets_to_hooks(comm, "numpy"),
    lambda comm: callback_hook_checks.differ(comm, "numpy"),
    lambda comm: callback_hook_checks.combine(comm, "numpy"),
    lambda comm: average_checks.average_everything(comm, "numpy"),
    lambda comm: average_checks.average_what_is_no_array(comm),
    lambda comm: average_checks.differ(comm, "numpy"),
)

if __name__ == "__main__":
    with gs.init_process_group("mpi") as world:
        for check in CHECKS:
            check(world)
        sys.stdout.write(f"rank {world.rank} has come through all checks\n")
