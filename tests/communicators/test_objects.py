"""Python objects between ranks: any tree, any size, and what goes wrong is told to all."""

from __future__ import annotations

from typing import Any

import numpy as np

import gradsync as gs
from contract import expect
from places import STAND_IN
from rank_processes import run_ranks

LARGE = 5_000_000  # float64: 40 MB, more than a segment holds at once


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


def test_large_objects() -> None:
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
        "objects.all_gather moved nothing: rank 1: its object cannot be pickled",
        "objects.gather moved nothing: rank 1: its object cannot be pickled",
        "objects.broadcast moved nothing: rank 0: its object cannot be pickled",
        "objects.scatter moved nothing: rank 0: its object for rank 1 cannot be pickled",
        "rank 1: its object cannot be pickled: Nameless: (its __str__ raised RuntimeError)",
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
    assert culprit.startswith(
        "rank 0/2: objects.all_gather received an object from rank 0 that cannot be unpickled on this rank: "
    )
    assert "LookupError: no such class" in culprit


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
    assert "rank 2: its object cannot be pickled" in first


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


def move_beside_a_gpu(comm: Any) -> bool:
    values = np.arange(1_000_000) + comm.rank
    for rank, theirs in enumerate(comm.objects.all_gather(values)):
        np.testing.assert_array_equal(theirs, np.arange(1_000_000) + rank)
    with open("/proc/self/maps") as maps:
        return any("memfd:gradsync" in line for line in maps)


def test_objects_on_nccl_take_no_shared_memory() -> None:
    assert STAND_IN.run(2, move_beside_a_gpu) == [False, False]
