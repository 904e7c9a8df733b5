"""The soak of tests/prove/kills/restart_soak.py in a shortened form, and that it finds what is wrong."""

from __future__ import annotations

import random

import restart_soak


def test_kills_and_restarts_end_with_the_same_bits() -> None:
    runs = restart_soak.soak(kills=3, seed=4, epochs=40)
    assert [run.faults for run in runs] == [[]] * len(runs)  # more than one where a training was over before its turn
    assert sum(len(run.struck) for run in runs) == 3


def test_other_bits_are_a_fault() -> None:
    want = restart_soak.undisturbed(3)
    other = {**want, "weights": bytes(len(want["weights"]))}
    run = restart_soak.disturbed(random.Random(0), 0, 3, other)
    assert run.struck == []
    assert run.faults[0] == "weights differs from the undisturbed run's"
