"""Who is in a group and who is not, and how members wait for one another."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

import gradsync as gs
from contract import expect
from gradsync import process_group
from places import SHM, STAND_IN, Place, on


def leave_out(comm: Any) -> list[str]:
    outside = [group for group in (comm.new_group([0, 2]), comm.split(None if comm.rank == 1 else 0)) if not group]
    assert len(outside) == 2 * (comm.rank == 1)
    assert all(group is not None for group in outside)
    return [repr(group) for group in outside]


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 3), *on(STAND_IN, 3)])
def test_a_rank_that_is_left_out_is_told(place: Place, world_size: int) -> None:
    _, (of_new_group, of_split), _ = place.run(world_size, leave_out)
    assert of_new_group == "<NonMember: rank 1/3 is not a member of the group of ranks 0,2>"
    assert of_split == "<NonMember: rank 1/3 is not a member of any group of the split (it passed color=None)>"


# -- How members wait -----------------------------------------------------------------------------------------------


def name_different_ranks(comm: Any) -> str:
    return str(expect(gs.GradsyncError, lambda: comm.new_group([0, 1] if comm.rank == 0 else [0, 1, 2])))


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 3), *on(STAND_IN, 3)])
def test_members_that_name_different_ranks_are_told_what_to_do(place: Place, world_size: int) -> None:
    texts = place.run(world_size, name_different_ranks, collective_timeout_seconds=2.5)
    assert any(text.startswith(f"rank {rank}/3: new_group of the ranks 0,1") for rank, text in enumerate(texts)), texts
    for text in texts:  # the first to give up is told to the others
        assert "every member must call new_group with the same ranks" in text
        assert "for rank" in text


def end_beside_the_making(comm: Any, how: str) -> tuple[str, float]:
    """Rank 0 waits in new_group; the communicator ends on rank 1, or on rank 0 by another thread."""
    comm.barrier()
    started = time.monotonic()
    if how == "own abort" and comm.rank == 0:
        threading.Timer(0.3, comm.abort, ["the user has had enough"]).start()
    if comm.rank == 0:
        error = expect((gs.RankFailed, gs.CommunicatorClosed), lambda: comm.new_group([0, 1]))  # type: ignore[arg-type]
        return str(error), time.monotonic() - started
    if how == "close":
        comm.close()
    elif how == "abort":
        comm.abort("ValueError in the backward pass")
    client: Any = process_group._client
    client.get("rank 0 has left", timeout_seconds=30.0)
    return "", 0.0


def tell_the_end(comm: Any, how: str) -> tuple[str, float]:
    try:
        return end_beside_the_making(comm, how)
    finally:
        if comm.rank == 0:
            client: Any = process_group._client
            client.set("rank 0 has left", b"")


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("abort", "rank 1 aborted: ValueError in the backward pass"),
        ("close", "rank 1 closed the communicator"),
        ("own abort", "aborted: the user has had enough"),
    ],
)
def test_the_end_of_the_communicator_ends_the_wait_for_members(how: str, text: str) -> None:
    (told, seconds), _ = SHM.run(2, tell_the_end, how)
    assert text in told
    assert seconds < 15
