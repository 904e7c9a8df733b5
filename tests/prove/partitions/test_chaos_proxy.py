"""Ranks behind the chaos proxy end with right sums or with typed errors; chaos_runs.py has more of them."""

from __future__ import annotations

import pytest
from chaos_proxy import DUPLICATE, INCIDENTS, RESET, TO_CLIENT, TO_SERVER, TRUNCATE, Incident, Plan
from chaos_runs import run_through

AFTER_MEETING_BYTES = 600  # in either direction: the ranks train by then


@pytest.mark.parametrize(
    "plan", [Plan(piece_bytes=1), Plan(delay_seconds=0.02, jitter_seconds=0.03)], ids=["byte by byte", "delayed"]
)
def test_a_slow_network_changes_no_sum(plan: Plan) -> None:
    run = run_through(plan)
    assert run.complaints == ()
    assert run.is_unharmed


@pytest.mark.parametrize("kind", [TRUNCATE, RESET, DUPLICATE])
def test_what_breaks_the_handshake_is_tried_again(kind: str) -> None:
    run = run_through(Plan(incident=Incident(kind, TO_SERVER, 30)))
    assert run.complaints == ()
    assert run.is_unharmed


@pytest.mark.parametrize("kind", INCIDENTS)
@pytest.mark.parametrize("direction", [TO_SERVER, TO_CLIENT])
def test_what_breaks_a_run_is_told_and_names_the_culprit(kind: str, direction: str) -> None:
    run = run_through(Plan(incident=Incident(kind, direction, AFTER_MEETING_BYTES)), steps=None)
    assert run.complaints == ()
    assert run.errors  # of all ranks, but for those that the launcher ends before they have found it
    assert run.exit_code == 1


@pytest.mark.parametrize("seed", range(4))
def test_a_random_incident_is_survived_or_told(seed: int) -> None:
    run = run_through(Plan.drawn(seed, most_bytes=900))
    assert run.complaints == ()
