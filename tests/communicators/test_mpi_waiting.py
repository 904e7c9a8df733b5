"""How a rank waits over MPI, without MPI: which ranks count as gone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace

import pytest

from gradsync.communicators.failures import closed_failure
from gradsync.communicators.mpi.mpi_backend import MpiBackend
from gradsync.communicators.mpi.mpi_requests import MpiRequests
from gradsync.errors import RankFailed


def requests_of_rank_0(failures: SimpleNamespace, raise_if_left: Callable[[float, Sequence[int]], None]) -> MpiRequests:
    comm = SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: 3)
    mpi = SimpleNamespace(Request=SimpleNamespace(Testall=None), BYTE=None)
    return MpiRequests(mpi, comm, (0, 1, 2), "rank 0/3", 30.0, failures, raise_if_left)  # type: ignore[arg-type]


def wait_for_ranks_1_and_2(arriving: int) -> list[int]:
    """Waits as rank 0 of 3 until the server has been asked twice; returns the ranks that have not come.

    Rank 2 has closed. While the server answers for the first time, the message of one rank arrives.
    """
    absent, asked = [1, 2], list[Sequence[int]]()

    def raise_if_left(_position: float, ranks: Sequence[int]) -> None:
        asked.append(ranks)
        if arriving in absent:
            absent.remove(arriving)
        if 2 in ranks:
            raise closed_failure("rank 0/3", 2)

    failures = SimpleNamespace(has_failed=lambda: False, check=lambda: None, warn=lambda *_: None)
    requests_of_rank_0(failures, raise_if_left).wait(
        lambda: len(asked) == 2, (), missing=lambda: absent, absent=lambda: absent
    )
    return absent


def test_a_rank_that_came_and_then_closed_is_not_missed_while_another_one_is_awaited() -> None:
    assert wait_for_ranks_1_and_2(arriving=2) == [1]


def test_a_rank_that_closed_and_never_came_is_missed() -> None:
    with pytest.raises(RankFailed, match="rank 2 closed the communicator"):
        wait_for_ranks_1_and_2(arriving=1)


def test_a_failure_ends_the_next_call_but_no_wait_whose_messages_have_arrived() -> None:
    def check() -> None:
        raise closed_failure("rank 0/3", 2)

    requests = requests_of_rank_0(SimpleNamespace(has_failed=lambda: True, check=check), lambda *_: None)
    requests.wait(lambda: True, ())
    backend, message = SimpleNamespace(_requests=requests, world_size=3, rank=0), SimpleNamespace(peer=1)
    for call in (partial(MpiBackend._agree, backend, None), partial(MpiBackend.exchange, backend, message, None)):  # type: ignore[arg-type]
        with pytest.raises(RankFailed, match="rank 2 closed the communicator"):
            call()
