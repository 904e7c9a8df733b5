"""Ranks join while strangers attack their server: a short form of `hostile.py`, which has the figures."""

from __future__ import annotations

import hostile
import pytest

STRANGERS = 600


def test_strangers_harm_nobody() -> None:
    result = hostile.attack(STRANGERS, ranks=8, undisturbed_rounds=3)
    assert result.complaints == []
    assert sum(result.strangers["begun"].values()) == STRANGERS
    assert result.under_attack["count"] >= 8
    assert result.under_attack["p99_seconds"] < 10.0  # of a busy machine: the figure of an idle one is in the JSON


@pytest.mark.parametrize(
    "fault",
    [
        {"descriptors_after": 9},
        {"memory_growth_bytes": 17 * 2**20},
        {"faults": ["rank 3: RankFailed: rank 1 died"]},
        {"strangers": {"begun": {"garbage": 2}, "ended": {"garbage": 1}}},
    ],
)
def test_what_must_not_be_is_told(fault: dict) -> None:
    good = {
        "undisturbed": {},
        "under_attack": {},
        "strangers": {"begun": {"garbage": 2}, "ended": {"garbage": 2}},
        "memory_growth_bytes": 0,
        "descriptors_before": 8,
        "descriptors_after": 8,
        "faults": [],
    }
    assert hostile.Result(**good).complaints == []
    assert len(hostile.Result(**{**good, **fault}).complaints) == 1
