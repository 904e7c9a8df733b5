"""The soak of tests/prove/kills/restart_soak.py in a shortened form, and that it finds what is wrong."""

from __future__ import annotations

import restart_soak


def test_kills_and_restarts_end_with_the_same_bits() -> None:
    runs = restart_soak.soak(kills=3, seed=4, epochs=40)
    assert [run.faults for run in runs] == [[]] * len(runs)  # more than one where a training was over before its turn
    assert sum(len(run.struck) for run in runs) == 3
