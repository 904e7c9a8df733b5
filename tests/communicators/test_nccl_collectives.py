"""The collectives, messages and groups of the NCCL communicator, beyond the contract: streams, memory, failures."""

from __future__ import annotations

from typing import Any

import pytest

from places import GPU, STAND_IN, STAND_IN_SLOW, STAND_IN_STUCK, Place, always_on, on

STUCK = [*on(STAND_IN_STUCK, 3), *on(GPU, 3)]


def check(comm: Any, name: str, *args: Any) -> Any:
    """Runs a check; only ranks have a CuPy, so that only they import it."""
    import nccl_collective_checks

    return getattr(nccl_collective_checks, name)(comm, *args)


@pytest.mark.parametrize(("place", "world_size"), [*on(STAND_IN, 1), *always_on(STAND_IN_SLOW, 2), *on(GPU, 1, 2, 4)])
@pytest.mark.parametrize("name", ["follow_slow_streams", "drop_results_at_once"])
def test_streams(place: Place, world_size: int, name: str) -> None:
    place.run(world_size, check, name)


@pytest.mark.parametrize(("place", "world_size"), [*on(STAND_IN, 1, 2, 3), *on(GPU, 1, 2)])
@pytest.mark.parametrize(
    "name",
    [
        "stage_both_ways",
        "reuse_host_arrays_at_once",
        "broadcast_in_one_go",
        "leave_no_group_open",
        "judge_values",
    ],
)
def test_arrays_and_calls(place: Place, world_size: int, name: str) -> None:
    place.run(world_size, check, name)


@pytest.mark.parametrize(("place", "world_size"), [*on(STAND_IN, 2), *always_on(STAND_IN, 3), *on(GPU, 3)])
@pytest.mark.parametrize("name", ["take_means_of_half_precision", "round_means_of_half_precision_once"])
def test_means_of_half_precision(place: Place, world_size: int, name: str) -> None:
    place.run(world_size, check, name)


# Messages.


@pytest.mark.parametrize(("place", "world_size"), [*on(STAND_IN_STUCK, 2), *on(STAND_IN_SLOW, 2), *on(GPU, 2)])
def test_an_exchange_meets_plain_messages_in_any_order(place: Place, world_size: int) -> None:
    place.run(world_size, check, "meet_exchange_in_any_order")


@pytest.mark.parametrize(("place", "world_size"), [*on(STAND_IN_STUCK, 3), *on(STAND_IN_SLOW, 3), *on(GPU, 3)])
@pytest.mark.parametrize("name", ["break_out_of_a_ring", "agree_on_one_message_of_two"])
def test_rings(place: Place, world_size: int, name: str) -> None:
    place.run(world_size, check, name)


@pytest.mark.parametrize(("place", "world_size"), STUCK)
@pytest.mark.parametrize("how", ["stays", "closes"])
def test_a_message_that_does_not_come(place: Place, world_size: int, how: str) -> None:
    options = {"collective_timeout_seconds": 2.5 if how == "stays" else 20.0}
    text, *others = place.run(world_size, check, "wait_for_a_message_in_vain", how, **options)
    if how == "stays":
        assert "for rank 1" in text.partition("\n")[0]
        assert all("for rank 1" in other for other in others)
    else:
        assert "rank 1 closed the communicator while this rank still needed it" in text


# Groups.


@pytest.mark.parametrize(("place", "world_size"), [*on(STAND_IN, 2, 4), *on(GPU, 2, 4)])
def test_split_beside_a_collective(place: Place, world_size: int) -> None:
    place.run(world_size, check, "split_beside_a_collective")


@pytest.mark.parametrize(("place", "world_size"), [*on(STAND_IN_STUCK, 3), *on(STAND_IN_SLOW, 3), *on(GPU, 2, 3)])
@pytest.mark.parametrize("name", ["take_turns_with_overlapping_groups", "launch_groups_in_one_order"])
def test_groups_beside_each_other(place: Place, world_size: int, name: str) -> None:
    place.run(world_size, check, name)


@pytest.mark.parametrize(("place", "world_size"), [*on(STAND_IN, 2, 3), *on(GPU, 2)])
def test_threads_launch_in_one_order_on_default_streams_of_their_own(place: Place, world_size: int) -> None:
    place.run(world_size, check, "launch_in_one_order_from_two_threads")


@pytest.mark.parametrize(("place", "world_size"), STUCK)
def test_the_deadline_of_a_group_names_ranks_of_the_world(place: Place, world_size: int) -> None:
    text, *others = place.run(world_size, check, "end_a_group_by_its_member", collective_timeout_seconds=2.5)
    assert "for rank 1" in text.partition("\n")[0]
    assert all("for rank 1" in other for other in others)
