"""A rank of mpiexec that uses two callbacks crosswise, each check on a communicator of its own."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS), str(TESTS / "bucketing")]

import crosswise_checks as checks

import gradsync as gs

CHECKS = (
    partial(checks.cross_at_first, knobs={}),
    checks.cross_later,
    checks.cross_names,
    checks.cross_first_with_later,
    *[partial(checks.cross_event, event=event) for event in ("bucket", "norm")],
    checks.make_more_on_one_rank,
    checks.make_at_different_lines,
)

if __name__ == "__main__":
    with gs.init_process_group("mpi") as world:
        for check in CHECKS:
            check(world.split(0), "numpy")
        sys.stdout.write(f"rank {world.rank} has come through all checks\n")
