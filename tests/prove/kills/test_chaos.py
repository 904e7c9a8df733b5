"""The random kills of tests/prove/kills/chaos.py in a shortened form: nothing is left behind."""

from __future__ import annotations

import random

import chaos
import pytest


@pytest.mark.parametrize("seed", range(4))
def test_random_kills_leave_nothing(seed: int) -> None:
    # Between them, four seeds strike every kind of victim with every signal once or more.
    generator = random.Random(seed)
    kinds = [(victim, number) for victim in chaos.VICTIMS for number in chaos.SIGNALS]
    for victim, number in kinds[seed::4]:
        kill = chaos.run_round(generator, victim, number)
        assert kill.faults == (), str(kill)
