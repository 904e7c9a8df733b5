"""The first difference between the ranks' histories is named, wherever it is; less progress is no difference."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gradsync.diagnostics.compare import Call, History, Wait, circle, circle_text, first_divergence

CALLS = [Call(digest, name) for digest, name in enumerate(("all_reduce(sum)", "broadcast(root 0)", "barrier", "flush"))]
programs = st.lists(st.sampled_from(CALLS), min_size=1, max_size=40)


def remembered(calls: Sequence[Call], begun: int, entries: int = 1000) -> History:
    """Returns what a rank remembers that has begun so many collectives of a program."""
    numbers = range(max(begun - entries, 0) + 1, begun + 1)
    return {number: calls[number - 1] for number in numbers}


@given(programs, st.integers(2, 5), st.data())
def test_the_place_of_one_changed_call_is_named(program: list[Call], ranks: int, data: st.DataObject) -> None:
    """Whatever comes after it differs too, or not: the first is what counts."""
    place = data.draw(st.integers(1, len(program)))
    victim = data.draw(st.integers(0, ranks - 1))
    other = data.draw(st.sampled_from([call for call in CALLS if call != program[place - 1]]))
    rest = data.draw(st.permutations(program[place:]))
    changed = [*program[: place - 1], other, *rest]
    histories = {rank: remembered(changed if rank == victim else program, len(program)) for rank in range(ranks)}
    found = first_divergence("world", dict(data.draw(st.permutations(list(histories.items())))))
    assert found is not None
    assert found.number == place
    assert found.is_certainly_first
    assert dict(found.sides)[other] == (victim,)
    assert sorted(rank for _, of_side in found.sides for rank in of_side) == list(range(ranks))
    if ranks > 2:
        assert found.sides[-1] == (program[place - 1], tuple(rank for rank in range(ranks) if rank != victim))
        assert found.text().startswith(f"rank {victim} called {other.what} as #{place} of group 'world', where the oth")


@given(programs, st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(1, 64))
def test_ranks_that_have_come_less_far_do_not_differ(program: list[Call], progress: list[int], entries: int) -> None:
    histories = {rank: remembered(program, min(begun, len(program)), entries) for rank, begun in enumerate(progress)}
    assert first_divergence("world", histories) is None


@given(programs, st.integers(1, 20), st.integers(0, 30), st.data())
def test_what_is_not_remembered_is_not_compared(
    program: list[Call], entries: int, behind: int, data: st.DataObject
) -> None:
    """Two ranks with short memories: a difference is found where both remember it, and nothing is made up else."""
    place = data.draw(st.integers(1, len(program)))
    other = data.draw(st.sampled_from([call for call in CALLS if call != program[place - 1]]))
    changed = [*program[: place - 1], other, *program[place:]]
    begun = max(len(program) - behind, 0)
    histories = {0: remembered(program, len(program), entries), 1: remembered(changed, begun, entries)}
    overlap = set(histories[0]) & set(histories[1])
    found = first_divergence("world", histories)
    assert (found is not None) == (place in overlap)
    if found is not None:
        assert found.number == place
        assert found.is_certainly_first == (place == 1 or place - 1 in overlap)
        assert ("not remembered" in found.text()) == (not found.is_certainly_first)


@given(programs, st.integers(3, 5), st.data())
def test_a_rank_without_a_history_hides_no_other(program: list[Call], ranks: int, data: st.DataObject) -> None:
    victim, missing = data.draw(st.permutations(range(ranks)))[:2]
    other = data.draw(st.sampled_from([call for call in CALLS if call != program[0]]))
    assume(missing != victim)
    histories = {
        rank: remembered([other, *program[1:]] if rank == victim else program, len(program))
        for rank in range(ranks)
        if rank != missing
    }
    found = first_divergence("world", histories)
    assert found is not None
    assert (found.number, missing in [rank for _, of_side in found.sides for rank in of_side]) == (1, False)


def test_several_sides_read_as_a_sentence() -> None:
    sides = {0: CALLS[0], 1: CALLS[1], 2: CALLS[0], 3: CALLS[2]}
    found = first_divergence("world", {rank: {1: call} for rank, call in sides.items()})
    assert found is not None
    assert found.text() == (
        "rank 3 called barrier as #1 of group 'world', rank 1 called broadcast(root 0), "
        "where the others called all_reduce(sum)"
    )


def test_of_two_ranks_the_first_is_the_one_to_compare_with() -> None:
    found = first_divergence("world", {0: {1: CALLS[0]}, 1: {1: CALLS[2]}})
    assert found is not None
    assert found.text() == "rank 1 called barrier as #1 of group 'world', where rank 0 called all_reduce(sum)"


def wait(rank: int, group: str, *for_ranks: int) -> Wait:
    return Wait(rank, group, 3, "barrier", for_ranks)


def test_ranks_that_wait_crosswise_are_a_circle() -> None:
    found = circle([wait(1, "b", 0), wait(0, "a", 1), wait(2, "c", 0)])
    assert found is not None
    assert circle_text(found) == (
        "ranks wait for each other in a circle: rank 0 waits in barrier (#3 of group 'a') for rank 1, "
        "rank 1 waits in barrier (#3 of group 'b') for rank 0"
    )


@pytest.mark.parametrize(
    "waits", [[], [wait(0, "a", 1)], [wait(0, "a", 1, 2), wait(1, "b", 2)], [wait(0, "a"), wait(1, "a")]]
)
def test_waiting_for_who_waits_for_nobody_is_no_circle(waits: list[Wait]) -> None:
    assert circle(waits) is None


def test_a_circle_may_be_as_long_as_the_run_is_large() -> None:
    ranks = 3000
    found = circle([wait(rank, "g", (rank + 1) % ranks) for rank in range(ranks)])
    assert found is not None
    assert [one.rank for one in found] == list(range(ranks))


@given(st.lists(st.tuples(st.integers(0, 6), st.sets(st.integers(0, 6), max_size=3)), max_size=10))
def test_a_circle_is_one(edges: list[tuple[int, set[int]]]) -> None:
    """Against the textbook: who can reach itself is in a circle."""
    waits = [wait(rank, "g", *sorted(after - {rank})) for rank, after in edges]
    reach = {rank: {other for one in waits if one.rank == rank for other in one.for_ranks} for rank in range(7)}
    for _ in range(7):
        reach = {rank: after | {far for near in after for far in reach[near]} for rank, after in reach.items()}
    found = circle(waits)
    assert (found is not None) == any(rank in after for rank, after in reach.items())
    if found is not None:
        for one, after in zip(found, [*found[1:], found[0]], strict=True):
            assert after.rank in one.for_ranks
