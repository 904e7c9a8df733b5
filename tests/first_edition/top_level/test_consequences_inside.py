"""A rank that fails because of another one passes on who that is, and is not taken for the cause by a third."""

from __future__ import annotations

from typing import Any

import gradsync as gs
from gradsync import process_group
from rank_processes import run_ranks_for_outcomes


def lose_the_server(comm: Any) -> None:
    """Rank 1 cannot hear the server any more, and says so; what it sends would still arrive there."""
    comm.barrier()
    if comm.rank == 1:
        reader = process_group._client._connection._reader
        reader.feed(b"\0" * 100)
    while True:
        comm.barrier()


def culprits_of(outcomes: list[Any]) -> list[int | None]:
    return [getattr(outcome.error, "rank", None) for outcome in outcomes]


def test_a_rank_that_has_lost_the_server_does_not_leave_with_a_goodbye() -> None:
    """Else the others would learn of it only by waiting for it."""
    outcomes = run_ranks_for_outcomes(3, lose_the_server, backend="shm")
    assert [type(outcome.error) for outcome in outcomes] == [gs.RankFailed, gs.RendezvousError, gs.RankFailed]
    assert culprits_of(outcomes) == [1, None, 1]
    for outcome in (outcomes[0], outcomes[2]):
        assert "lost without a goodbye" in str(outcome.error) or "rank 1" in str(outcome.error)
