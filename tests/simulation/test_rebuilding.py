"""Worlds that are rebuilt, on a network, a clock and threads that a seed rules: see test_simulation.py.

pytest tests/simulation/test_rebuilding.py --seed 42 -s      # one, with all that happens
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from typing import Any

import pytest

from gradsync.errors import RendezvousError
from gradsync.rendezvous.client import RendezvousClient
from simulation.promises import check, violations
from simulation.rebuilding import FAULTS, PROMISES, play


def test_every_promise_holds(seeds: range) -> None:
    check(seeds, play, PROMISES)


def test_the_seeds_reach_what_they_are_for() -> None:
    """Every fault; worlds that are rebuilt again and again, shrink and grow; ranks that are refused."""
    kinds, worlds, refused, grown = Counter[str](), Counter[int](), 0, 0
    for seed in range(200):
        outcome = play(seed)
        kinds.update(fault.kind for fault in outcome.scenario.faults)
        worlds[len(outcome.formed)] += 1
        sizes = [len(numbers) for _, numbers in outcome.formed.values()]
        grown += any(later > earlier for earlier, later in itertools.pairwise(sizes))
        errors = [call.error for life in outcome.lives for call in life.diary.calls if call.name == "rebuild"]
        refused += any("taken for dead" in str(error) for error in errors)
    assert set(kinds) == set(FAULTS)
    assert {1, 2, 3, 4, 5} <= set(worlds)
    assert refused > 5
    assert grown > 5


def test_a_seed_replays_exactly() -> None:
    assert play(3).trace == play(3).trace != play(4).trace


def with_connect(change: Any) -> type[RendezvousClient]:
    """A client that does something with what a rebuild has brought."""

    class Faulty(RendezvousClient):
        @classmethod
        def connect(cls, *args: Any, **options: Any) -> RendezvousClient:
            return change(super().connect(*args, **options), options)

    return Faulty


def change_numbers(client: RendezvousClient, _: Any) -> RendezvousClient:
    client.numbers = None if client.numbers is None else (*client.numbers[::-1],)
    return client


def wait_too_long(client: RendezvousClient, options: Any) -> RendezvousClient:
    if options["last"] is not None:
        time.sleep(options["timeout_seconds"] + 4.0)
    return client


def refuse(client: RendezvousClient, options: Any) -> RendezvousClient:
    if options["last"] is not None:
        raise RendezvousError("no")
    return client


def raise_what_is_not_ours(client: RendezvousClient, options: Any) -> RendezvousClient:
    if options["last"] is not None:
        raise KeyError("not ours")
    return client


@pytest.mark.parametrize(
    ("promise", "change"),
    [
        ("all_members_say_the_same", change_numbers),
        ("every_call_ends_in_time", wait_too_long),
        ("nobody_waits_without_need", wait_too_long),
        ("who_is_refused_was_left_out", refuse),
        ("those_who_are_left_go_on", refuse),
        ("every_error_is_one_of_ours", raise_what_is_not_ours),
    ],
)
def test_a_broken_promise_is_noticed(promise: str, change: Any) -> None:
    runs = (play(seed, client_class=with_connect(change)) for seed in range(50))
    assert promise in (broken.partition(":")[0] for run in runs for broken in violations(run, PROMISES))
