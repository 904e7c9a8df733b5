"""The report on ranks that are stuck names the first difference between their histories, and circles of waiting.

Against these functions of their own: end to end, each case would take a deadline.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gradsync.diagnostics.compare import Call, Wait, circle, first_divergence

CALLS = [Call(digest, name) for digest, name in enumerate(("all_reduce(sum)", "broadcast(root 0)", "barrier", "flush"))]
programs = st.lists(st.sampled_from(CALLS), min_size=1, max_size=40)


def remembered(calls, begun, entries=1000):
    """What a rank remembers that has begun so many collectives of a program."""
    return {number: calls[number - 1] for number in range(max(begun - entries, 0) + 1, begun + 1)}


@given(programs, st.integers(2, 5), st.data())
def test_the_first_call_that_differs_is_named_where_ranks_remember_it(program, ranks, data):
    """Whatever comes after it, however far each rank has come; and nothing is made up."""
    number = data.draw(st.integers(1, len(program)))
    victim = data.draw(st.integers(0, ranks - 1))
    other = data.draw(st.sampled_from([call for call in CALLS if call != program[number - 1]]))
    changed = [*program[: number - 1], other, *data.draw(st.permutations(program[number:]))]
    begun = st.integers(0, len(program))
    entries = data.draw(st.integers(1, 40))
    histories = {
        rank: remembered(changed if rank == victim else program, data.draw(begun), entries)
        for rank in data.draw(st.permutations(range(ranks)))
    }
    others = [history for rank, history in histories.items() if rank != victim]
    shared = [
        at
        for at in histories[victim]
        if any(at in history for history in others) and changed[at - 1] != program[at - 1]
    ]
    found = first_divergence("world", histories)
    assert (found and found.number) == (min(shared) if shared else None)
    if found is not None:
        assert dict(found.sides)[changed[found.number - 1]] == (victim,)
        assert sorted(rank for _, of_side in found.sides for rank in of_side) == sorted(
            rank for rank, history in histories.items() if found.number in history
        )


@given(programs, st.data())
def test_a_difference_is_certainly_the_first_where_the_call_before_it_is_known(program, data):
    number, remembers = data.draw(st.integers(1, len(program))), data.draw(st.integers(1, 40))
    changed = [*program]
    changed[number - 1] = data.draw(st.sampled_from([call for call in CALLS if call != program[number - 1]]))
    found = first_divergence(
        "world", {0: remembered(program, len(program)), 1: remembered(changed, len(program), remembers)}
    )
    assert found is None or found.is_certainly_first == (number == 1 or number > len(program) - remembers + 1)


def wait(rank, group, *for_ranks):
    return Wait(rank, group, 3, "barrier", for_ranks)


def test_a_long_circle_is_found_and_what_waits_for_it_is_not_in_it():
    ranks = 3000
    long = circle([*[wait(rank, "g", (rank + 1) % ranks) for rank in range(ranks)], wait(ranks, "g", 0)])
    assert [one.rank for one in long] == list(range(ranks))


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
