"""A rank that fails because of another one passes on who that is, and is not taken for the cause by a third."""

from __future__ import annotations

from typing import Any

import gradsync as gs
from rank_processes import run_ranks_for_outcomes


def pass_on(comm: Any) -> None:
    """Rank 1 has heard of rank 0's failure before anybody else, and leaves its block because of it."""
    comm.barrier()
    if comm.rank == 1:
        raise gs.RankFailed("rank 0 aborted: no such batch", rank=0)
    while True:
        comm.barrier()


def culprits_of(outcomes: list[Any]) -> list[int | None]:
    return [getattr(outcome.error, "rank", None) for outcome in outcomes]


def test_a_third_rank_hears_of_the_culprit_and_not_of_the_messenger() -> None:
    outcomes = run_ranks_for_outcomes(3, pass_on, backend="shm")
    assert [type(outcome.error) for outcome in outcomes] == [gs.RankFailed] * 3
    assert culprits_of(outcomes) == [0, 0, 0]
