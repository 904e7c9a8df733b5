"""Python objects between ranks: any tree, any size, and what goes wrong is told to all."""

from __future__ import annotations

import os
import pickle
import signal
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gradsync as gs
from contract import expect
from rank_pool import RankPool
from rank_processes import run_ranks, run_ranks_for_outcomes

LARGE = 25_000_000  # float64: 200 MB

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=50)
)
trees = st.recursive(
    scalars,
    lambda children: (
        st.lists(children, max_size=4)
        | st.tuples(children, children)
        | st.dictionaries(st.text(max_size=5) | st.integers(), children, max_size=4)
        | st.sets(st.integers(), max_size=4)
    ),
    max_leaves=20,
)


def move_trees(comm: Any, examples: list[list[Any]]) -> None:
    n = comm.world_size
    for number, objs in enumerate(examples):
        root = number % n
        mine = objs[comm.rank]
        is_root = comm.rank == root
        assert comm.objects.all_gather(mine) == objs[:n]
        assert comm.objects.gather(mine, root) == (objs[:n] if is_root else None)
        assert comm.objects.broadcast(objs if is_root else None, root) == objs
        assert comm.objects.scatter(objs[:n] if is_root else None, root) == mine


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_trees_arrive_as_they_left(n: int) -> None:
    @settings(max_examples=10, deadline=None)
    @given(examples=st.lists(st.lists(trees, min_size=4, max_size=4), min_size=1, max_size=6))
    def check(examples: list[list[Any]]) -> None:
        pool.run(move_trees, examples)

    with closing(RankPool(n)) as pool:
        check()


def move_large(comm: Any) -> tuple[int, ...]:
    large = np.full(LARGE, 7.0) if comm.rank == 0 else "small"
    gathered = comm.objects.all_gather(large)
    assert gathered[0].nbytes == 8 * LARGE
    assert (gathered[0][:: LARGE // 100] == 7).all()
    gathered[0][0] = 1.0  # a copy of one's own
    assert gathered[1] == "small"
    del gathered
    part = comm.objects.scatter([None, large] if comm.rank == 0 else None)
    return (0,) if part is None else part.shape


def test_200_megabytes() -> None:
    assert run_ranks(2, move_large, timeout=120.0) == [(0,), (LARGE,)]


class Bomb:
    """Comes back everywhere but on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __reduce__(self) -> Any:
        return _explode, (self.rank,)


def _explode(rank: int) -> Bomb:
    if gs.get_communicator().rank == rank:
        raise LookupError("no such class")
    return Bomb(rank)


class Nameless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Refusing:
    """Fails to pickle, with an error that cannot even be told."""

    def __reduce__(self) -> Any:
        raise Nameless


def refuse(comm: Any) -> list[str]:
    texts = []

    def attempt(move: Any) -> None:
        error = expect(gs.InvalidArgument, move)
        texts.append(str(error))
        assert comm.objects.all_gather(comm.rank) == list(range(comm.world_size))

    def nested(rank: int) -> Any:
        return {"a": [1, (lambda: 0) if comm.rank == rank else 2]}

    attempt(lambda: comm.objects.all_gather(nested(1)))
    attempt(lambda: comm.objects.gather(nested(1), 0))
    attempt(lambda: comm.objects.broadcast(nested(0), 0))
    attempt(lambda: comm.objects.scatter([1, nested(0)] if comm.rank == 0 else None))
    attempt(lambda: comm.objects.all_gather(Refusing()))
    attempt(lambda: comm.objects.scatter([1, 2, 3] if comm.rank == 0 else None))
    attempt(lambda: comm.objects.scatter(7 if comm.rank == 0 else [1, 2]))
    return [text.partition(": ")[2] for text in texts]


def test_an_object_that_does_not_pickle_is_told_to_all() -> None:
    first, second = run_ranks(2, refuse)
    assert first == second
    needed = [
        "objects.all_gather moved nothing: rank 1: its object does not pickle",
        "objects.gather moved nothing: rank 1: its object does not pickle",
        "objects.broadcast moved nothing: rank 0: its object does not pickle",
        "objects.scatter moved nothing: rank 0: its object for rank 1 does not pickle",
        "rank 1: its object does not pickle: Nameless: (its text cannot be made: RuntimeError)",
        "rank 0: needs a list of 2 objects, one for each rank, got 3",
        "rank 0: needs a list of 2 objects, one for each rank, got int",
    ]
    for text, part in zip(first, needed, strict=True):
        assert part in text


def keep_the_cause(comm: Any) -> str:
    error = expect(gs.InvalidArgument, lambda: comm.objects.all_gather((lambda: 0) if comm.rank == 0 else 1))
    return type(error.__cause__).__name__


def test_the_rank_itself_is_told_the_cause() -> None:
    culprit, other = run_ranks(2, keep_the_cause)
    assert other == "NoneType"
    assert culprit in ("AttributeError", "PicklingError")


def come_back(comm: Any) -> str:
    try:
        got = comm.objects.all_gather(Bomb(0))
        text = str(len(got))
    except gs.InvalidArgument as error:
        assert isinstance(error.__cause__, LookupError)
        text = str(error)
    assert comm.objects.all_gather(comm.rank) == [0, 1]
    return text


def test_an_object_that_does_not_unpickle_fails_where_it_does_not() -> None:
    culprit, other = run_ranks(2, come_back)
    assert other == "2"
    assert culprit.startswith("rank 0/2: objects.all_gather brought an object of rank 0 that does not unpickle here: ")
    assert "LookupError: no such class" in culprit


def disagree(comm: Any) -> list[str]:
    texts = []
    for first, second in [
        (lambda: comm.objects.all_gather(1), lambda: comm.objects.gather(1)),
        (lambda: comm.objects.broadcast(1, 0), lambda: comm.objects.broadcast(1, 1)),
        (lambda: comm.objects.all_gather(1), lambda: comm.objects.all_gather_for("reduce_dict", 1)),
        (lambda: comm.objects.all_gather(1), comm.barrier),
        (lambda: comm.objects.scatter([1, 2]), lambda: comm.all_gather(np.ones(3))),
    ]:
        error = expect(gs.PlanMismatch, first if comm.rank == 0 else second)
        texts.append(str(error).partition(": ")[2])
        assert comm.objects.all_gather(comm.rank) == [0, 1]
    return texts


def test_different_collectives_are_told_apart() -> None:
    first, second = run_ranks(2, disagree)
    assert first == second
    assert "rank 0: objects.all_gather, at " in first[0]
    assert "\n  rank 1: objects.gather (root 0), at " in first[0]


def name_by_world(comm: Any) -> str:
    group = comm.new_group([0, 2])
    if not group:
        return ""
    assert group.objects.all_gather(comm.rank) == [0, 2]
    error = expect(gs.InvalidArgument, lambda: group.objects.all_gather(open if comm.rank == 0 else (lambda: 0)))
    return str(error)


def test_errors_in_a_group_name_ranks_of_the_world() -> None:
    first, outside, last = run_ranks(3, name_by_world)
    assert outside == ""
    assert first.endswith(last.partition("moved nothing")[2])
    assert "rank 2: its object does not pickle" in first


def die(comm: Any) -> None:
    for step in range(1000):
        comm.objects.all_gather(bytes(3_000_000))
        if comm.rank == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_dies_is_noticed() -> None:
    survivor, dead = run_ranks_for_outcomes(2, die)
    assert dead.exit_code == -signal.SIGKILL
    assert isinstance(survivor.error, gs.RankFailed)
    assert survivor.error.rank == 1


class Interrupting:
    """Pickles for as long as a user bears it."""

    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


def interrupt(comm: Any) -> list[int]:
    if comm.rank == 0:
        expect(KeyboardInterrupt, lambda: comm.objects.all_gather(Interrupting()))
    return comm.objects.all_gather(comm.rank)


def test_an_interrupt_while_pickling_comes_before_the_collective() -> None:
    assert run_ranks(2, interrupt) == [[0, 1], [0, 1]]


def test_pickles_of_this_test_are_what_they_seem() -> None:
    for refused in (Refusing(), lambda: 0):
        with pytest.raises((Nameless, pickle.PicklingError, AttributeError)):
            pickle.dumps(refused)
