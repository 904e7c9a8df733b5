"""Ranks join while strangers attack their server: a short form of `hostile.py`, which has the figures."""

from __future__ import annotations

import hostile

STRANGERS = 600


def test_strangers_harm_nobody() -> None:
    result = hostile.attack(STRANGERS, ranks=8, undisturbed_rounds=3)
    assert result.complaints == []
    assert sum(result.strangers["begun"].values()) == STRANGERS
    assert result.under_attack["count"] >= 8
    assert result.under_attack["p99_seconds"] < 10.0  # of a busy machine: the figure of an idle one is in the JSON
