"""The contract of collectives on Python objects."""

from __future__ import annotations

import threading
from itertools import count
from typing import Any

import numpy as np

import gradsync as gs
from contract import expect, note


def object_of(rank: int) -> Any:
    """Returns something of every kind, and of another size on every rank."""
    return {
        "rank": rank,
        "path": ("model", None, [1.5, float("inf")], {"é", "x" * rank}),
        "bytes": bytes(range(256)) * (1000 * rank),
        "values": np.arange(rank * 1000.0),
    }


def assert_equal_objects(got: Any, want: Any) -> None:
    np.testing.assert_equal(got, want)
    assert type(got) is type(want)


def check_objects_of_every_kind(comm: Any, kit: Any) -> None:
    everything = [object_of(rank) for rank in range(comm.world_size)]
    assert_equal_objects(comm.objects.all_gather(everything[comm.rank]), everything)
    for root in range(comm.world_size):
        got = comm.objects.gather(everything[comm.rank], root)
        assert_equal_objects(got, everything if comm.rank == root else None)
        got = comm.objects.broadcast(everything[root] if comm.rank == root else None, root)
        assert_equal_objects(got, everything[root])
        got = comm.objects.scatter(everything if comm.rank == root else None, root)
        assert_equal_objects(got, everything[comm.rank])
    for method in ("all_gather", "gather", "broadcast", "scatter"):
        note(f"objects.{method}", "any that pickles")


def check_small_objects(comm: Any, kit: Any) -> None:
    n = comm.world_size
    for value in (None, (), "", 0, b"", False, [None]):
        assert comm.objects.all_gather(value) == [value] * n
        assert comm.objects.broadcast(value) == value
        assert comm.objects.scatter([value] * n if comm.rank == 0 else None) == value
    assert comm.objects.gather(comm.rank, n - 1) == (list(range(n)) if comm.rank == n - 1 else None)


def check_objects_are_copies(comm: Any, kit: Any) -> None:
    mine = [comm.rank]
    for theirs in comm.objects.all_gather(mine):
        theirs.append("changed")
    assert mine == [comm.rank]


def check_objects_that_do_not_pickle(comm: Any, kit: Any) -> None:
    """Every rank raises, names the rank and the cause, and goes on."""
    culprit = comm.world_size - 1
    value = threading.Lock() if comm.rank == culprit else comm.rank
    for attempt in (
        lambda: comm.objects.all_gather(value),
        lambda: comm.objects.gather(value, 0),
        lambda: comm.objects.broadcast(value, culprit),
        lambda: comm.objects.scatter([value] * comm.world_size, culprit),
    ):
        error = expect(gs.InvalidArgument, attempt, f"rank {culprit}")
        assert "lock" in str(error)
        assert comm.objects.all_gather(comm.rank) == list(range(comm.world_size))


class Stubborn:
    """Pickles, and does not come back."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise LookupError("there is no such class here")


def check_objects_that_do_not_unpickle(comm: Any, kit: Any) -> None:
    error = expect(gs.InvalidArgument, lambda: comm.objects.all_gather(Stubborn()))
    assert "no such class here" in str(error)
    assert comm.objects.all_gather(comm.rank) == list(range(comm.world_size))


def check_refused_objects(comm: Any, kit: Any) -> None:
    n = comm.world_size
    for wrong in (-1, n, "0", None, 0.0, True):
        for method in (comm.objects.gather, comm.objects.broadcast, comm.objects.scatter):
            expect(gs.InvalidArgument, lambda m=method, w=wrong: m([0] * n, w), "root")
    for wrong in ([0] * (n + 1), [], None, 7):  # known to the root alone, and told by every rank
        expect(gs.InvalidArgument, lambda w=wrong: comm.objects.scatter(w if comm.rank == 0 else None, 0))
    assert comm.objects.all_gather(comm.rank) == list(range(n))


def check_disagreement_on_objects(comm: Any, kit: Any) -> None:
    if comm.world_size == 1:
        return
    odd = comm.rank == comm.world_size - 1
    numbers = count()
    for attempt in (
        lambda: comm.objects.all_gather(1) if odd else comm.objects.broadcast(1),
        lambda: comm.objects.gather(1, 0) if odd else comm.objects.gather(1, 1),
        lambda: comm.objects.scatter([1] * comm.world_size) if odd else comm.objects.broadcast(1),
    ):
        error = expect(gs.PlanMismatch, attempt)
        assert set(error.descriptions) == set(range(comm.world_size))
        number = next(numbers)
        assert comm.objects.broadcast(number) == number
