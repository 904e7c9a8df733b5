"""The report on ranks that are stuck names the first difference between their histories, and circles of waiting.

Against these functions of their own: end to end, each case would take a deadline.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradsync.diagnostics.compare import Call, Wait, circle, circle_text, first_divergence

CALLS = [Call(digest, name) for digest, name in enumerate(("all_reduce(sum)", "broadcast(root 0)", "barrier", "flush"))]
programs = st.lists(st.sampled_from(CALLS), min_size=1, max_size=40)


def remembered(calls, begun, entries=1000):
    """What a rank remembers that has begun so many collectives of a program."""
    return {number: calls[number - 1] for number in range(max(begun - entries, 0) + 1, begun + 1)}


@given(programs, st.integers(2, 5), st.data())
def test_the_first_call_that_differs_is_named_whatever_comes_after(program, ranks, data):
    place = data.draw(st.integers(1, len(program)))
    victim = data.draw(st.integers(0, ranks - 1))
    silent = data.draw(st.sampled_from([None, *(rank for rank in range(ranks) if rank != victim)]))
    other = data.draw(st.sampled_from([call for call in CALLS if call != program[place - 1]]))
    changed = [*program[: place - 1], other, *data.draw(st.permutations(program[place:]))]
    histories = {
        rank: remembered(changed if rank == victim else program, len(program))
        for rank in data.draw(st.permutations(range(ranks)))
        if rank != silent or ranks == 2
    }
    found = first_divergence("world", histories)
    assert (found.number, found.is_certainly_first, dict(found.sides)[other]) == (place, True, (victim,))
    assert sorted(rank for _, of_side in found.sides for rank in of_side) == sorted(histories)
    assert f"rank {victim} called {other.what} as #{place} of group 'world'" in found.text() or len(histories) == 2


@given(programs, st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(1, 64))
def test_ranks_that_have_come_less_far_do_not_differ(program, progress, entries):
    histories = {rank: remembered(program, min(begun, len(program)), entries) for rank, begun in enumerate(progress)}
    assert first_divergence("world", histories) is None


@given(programs, st.integers(1, 20), st.integers(0, 30), st.data())
def test_what_is_not_remembered_is_not_compared(program, entries, behind, data):
    """A difference is found where both ranks remember it, and nothing is made up else."""
    place = data.draw(st.integers(1, len(program)))
    other = data.draw(st.sampled_from([call for call in CALLS if call != program[place - 1]]))
    changed = [*program[: place - 1], other, *program[place:]]
    begun = max(len(program) - behind, 0)
    histories = {0: remembered(program, len(program), entries), 1: remembered(changed, begun, entries)}
    overlap = set(histories[0]) & set(histories[1])
    found = first_divergence("world", histories)
    assert (found is not None) == (place in overlap)
    if found is not None:
        assert (found.number, found.is_certainly_first) == (place, place == 1 or place - 1 in overlap)


def wait(rank, group, *for_ranks):
    return Wait(rank, group, 3, "barrier", for_ranks)


def test_ranks_that_wait_crosswise_are_a_circle():
    found = circle([wait(1, "b", 0), wait(0, "a", 1), wait(2, "c", 0)])
    assert sorted(one.rank for one in found) == [0, 1]
    assert all(f"(#3 of group '{group}')" in circle_text(found) for group in "ab")
    ranks = 3000
    long = circle([wait(rank, "g", (rank + 1) % ranks) for rank in range(ranks)])
    assert [one.rank for one in long] == list(range(ranks))


@pytest.mark.parametrize(
    "waits", [[], [wait(0, "a", 1)], [wait(0, "a", 1, 2), wait(1, "b", 2)], [wait(0, "a"), wait(1, "a")]]
)
def test_waiting_for_who_waits_for_nobody_is_no_circle(waits):
    assert circle(waits) is None


@given(st.lists(st.tuples(st.integers(0, 6), st.sets(st.integers(0, 6), max_size=3)), max_size=10))
def test_a_circle_is_one(edges):
    """Against the textbook: who can reach itself is in a circle."""
    waits = [wait(rank, "g", *sorted(after - {rank})) for rank, after in edges]
    reach = {rank: {other for one in waits if one.rank == rank for other in one.for_ranks} for rank in range(7)}
    for _ in range(7):
        reach = {rank: after | {far for near in after for far in reach[near]} for rank, after in reach.items()}
    found = circle(waits)
    assert (found is not None) == any(rank in after for rank, after in reach.items())
    for one, after in zip(found or [], [*(found or [])[1:], *(found or [])[:1]], strict=True):
        assert after.rank in one.for_ranks
