"""Failures between ranks on NCCL: every rank gets an error at once that names the rank, and nothing hangs.

A collective that has been launched and misses a rank never ends by itself; STAND_IN_STUCK behaves like that too.
"""

from __future__ import annotations

from typing import Any

import pytest

from contract import IS_EVERYWHERE, seconds_waited
from places import GPU, STAND_IN, STAND_IN_STUCK, Place, always_on, on

STUCK = [*on(STAND_IN_STUCK, 2), *on(GPU, 2)]
LONG_SECONDS = 20.0


def check(comm: Any, name: str, *args: Any) -> Any:
    """Runs a check; only ranks have a CuPy, so that only they import it."""
    import nccl_failure_checks

    return getattr(nccl_failure_checks, name)(comm, *args)


# Ranks that differ.


@pytest.mark.parametrize(("place", "world_size"), [*on(STAND_IN, 2, 3), *on(GPU, 2)])
@pytest.mark.parametrize(("collective", "texts"), [("bucket", ("'d'", "'e'")), ("all_reduce", ("'a'", "float64[3]"))])
def test_a_rank_that_strays_is_found_before_data_move(
    place: Place, world_size: int, collective: str, texts: tuple[str, str]
) -> None:
    told = place.run(world_size, check, "stray_alone", collective)
    assert all("no data was moved" in text for text in told)
    # The first line has the number of the event in this rank's own step.
    stories = {text.partition("\n")[2] for text in told}
    assert len(stories) == 1, "the ranks tell different stories"
    assert all(text in told[0] for text in texts)


@pytest.mark.parametrize(("place", "world_size"), [*on(STAND_IN, 2, 3), *on(GPU, 2)])
def test_ranks_that_all_stray_are_unharmed(place: Place, world_size: int) -> None:
    told = place.run(world_size, check, "stray_together")
    assert set(told) == {told[0]}, "the ranks tell different stories"
    assert "no data was moved" in told[0]


# Ranks that die, or do not come.


@pytest.mark.parametrize(("place", "world_size"), [*on(STAND_IN, 2), *on(GPU, 2)])
def test_a_rank_that_closed_before_a_group_is_named(place: Place, world_size: int) -> None:
    place.run(world_size, check, "close_before_a_group")


@pytest.mark.parametrize(("place", "world_size"), STUCK)
@pytest.mark.parametrize("victim_is_root", [True, False])
def test_a_rank_that_dies_beside_a_stuck_collective_is_named(
    place: Place, world_size: int, victim_is_root: bool
) -> None:
    outcomes = place.outcomes(world_size, check, "die_beside_a_stuck_collective", victim_is_root)
    survivor = outcomes.pop(int(victim_is_root))
    assert outcomes[0].exit_code == -9
    assert survivor.error is None, survivor.traceback_text
    assert survivor.returned() < 15  # 1 s, and what a busy machine adds; a collective has 30 s


@pytest.mark.parametrize(("place", "world_size"), STUCK)
def test_the_deadline_of_a_collective(place: Place, world_size: int) -> None:
    (text, seconds), (told, _) = place.run(world_size, check, "miss_the_deadline", collective_timeout_seconds=2.5)
    assert 2.5 <= seconds_waited(text) < 15.0
    assert "as far as the server knows, every rank has begun it" in text.partition("\n")[0]
    assert seconds < 15
    assert told.partition(": ")[2] == text.partition(": ")[2]


@pytest.mark.parametrize(("place", "world_size"), STUCK)
@pytest.mark.parametrize("collective", ["bucket", "all_reduce"])
def test_the_deadline_of_a_call_that_blocks_the_host(place: Place, world_size: int, collective: str) -> None:
    options: dict[str, Any] = {"collective_timeout_seconds": 2.5, "environment": {"CUDA_LAUNCH_BLOCKING": "1"}}
    text, told = place.run(world_size, check, "miss_the_deadline_in_a_call_that_blocks", collective, **options)
    assert 2.5 <= seconds_waited(text) < 15.0
    assert "as far as the server knows, every rank has begun it" in text.partition("\n")[0]
    assert told.partition(": ")[2] == text.partition(": ")[2]


@pytest.mark.parametrize(("place", "world_size"), STUCK)
def test_the_deadline_of_a_first_contact(place: Place, world_size: int) -> None:
    text, _ = place.run(world_size, check, "miss_a_rank_at_first_contact", collective_timeout_seconds=2.5)
    assert 2.5 <= seconds_waited(text) < 15.0


@pytest.mark.parametrize(("place", "world_size"), STUCK)
def test_what_an_aborted_reduction_leaves_is_no_result(place: Place, world_size: int) -> None:
    place.run(world_size, check, "read_what_misses_a_rank", collective_timeout_seconds=2.5)


@pytest.mark.parametrize(("place", "world_size"), STUCK)
def test_the_deadline_of_a_comparison(place: Place, world_size: int) -> None:
    options = {"collective_timeout_seconds": 2.5}  # more than one round of asking
    text, told = place.run(world_size, check, "miss_the_deadline_of_a_comparison", **options)
    assert 2.5 <= seconds_waited(text) < 15.0
    assert "in all_reduce(sum) #1 (float64[3] 24 bytes) for rank 1" in text.partition("\n")[0]
    assert told.partition(": ")[2] == text.partition(": ")[2]


@pytest.mark.parametrize(("place", "world_size"), STUCK)
def test_a_rank_that_closes_early_is_named(place: Place, world_size: int) -> None:
    text, _ = place.run(world_size, check, "close_early")
    assert "rank 1 closed the communicator while this rank still needed it" in text


@pytest.mark.parametrize(("place", "world_size"), STUCK)
def test_abort_does_not_wait(place: Place, world_size: int) -> None:
    _, told = place.run(world_size, check, "abort_a_stuck_collective")
    assert "enough" in told


@pytest.mark.parametrize(("place", "world_size"), [*on(STAND_IN, 2), *on(GPU, 2)])
@pytest.mark.parametrize("what", ["new_group", "barrier"])
def test_abort_ends_what_this_rank_waits_for_at_the_server(place: Place, world_size: int, what: str) -> None:
    place.run(world_size, check, "abort_beside_a_wait_at_the_server", what)


@pytest.mark.parametrize(("place", "world_size"), [*always_on(STAND_IN, 3), *on(GPU, 3)])
def test_abort_names_its_culprit(place: Place, world_size: int) -> None:
    place.run(world_size, check, "abort_because_of_another_rank")


@pytest.mark.parametrize(("place", "world_size"), STUCK)
@pytest.mark.parametrize("kind", ["device", "host"])
def test_memory_that_queued_work_writes_to_is_kept_after_an_abort(place: Place, world_size: int, kind: str) -> None:
    place.run(world_size, check, "keep_what_queued_work_writes_to", kind)


@pytest.mark.parametrize(("place", "world_size"), STUCK)
def test_closing_beside_a_stuck_collective_fails_its_futures(place: Place, world_size: int) -> None:
    text, _ = place.run(world_size, check, "close_beside_a_stuck_collective")
    assert "did not end within 0.3 s" in text


@pytest.mark.parametrize(("place", "world_size"), STUCK)
def test_closing_while_a_failure_becomes_known_is_no_end_in_order(place: Place, world_size: int) -> None:
    place.run(world_size, check, "close_between_a_launch_that_fails_and_its_communicator")


# Beginnings and endings.


def begin(place: Place, where: str, how: str, seconds: float) -> list[Any]:
    outcomes = place.outcomes(2, check, "begin_without_a_peer", where, how, seconds)
    assert outcomes[0].error is None, outcomes[0].traceback_text
    return outcomes


@pytest.mark.parametrize(("place", "world_size"), STUCK)
def test_a_peer_that_fails_before_ncclcomminitrank(place: Place, world_size: int) -> None:
    told, failed = begin(place, "choose_device", "refuse", LONG_SECONDS)
    assert failed.returned() == "BackendUnavailable: no GPU for me"
    assert told.returned().startswith("RankFailed")
    assert "no GPU for me" in told.returned()


@pytest.mark.parametrize(("place", "world_size"), STUCK)
def test_a_peer_that_dies_before_ncclcomminitrank(place: Place, world_size: int) -> None:
    told, died = begin(place, "_init_rank", "die", LONG_SECONDS)
    assert died.exit_code == -9
    assert told.returned().startswith("RankFailed: rank 0/2: rank 1")


@pytest.mark.parametrize(("place", "world_size"), STUCK)
def test_a_peer_that_does_not_come_to_ncclcomminitrank(place: Place, world_size: int) -> None:
    told, absent = begin(place, "_init_rank", "stay away", 1.0)
    assert told.returned().startswith("RendezvousTimeout: rank 0/2: ncclCommInitRank on cuda:0 did not return within")
    assert absent.error is None, absent.traceback_text


@pytest.mark.parametrize("thread", ["gradsync-nccl-end", "gradsync-nccl-watcher", "gradsync-nccl-callbacks"])
@pytest.mark.parametrize(("place", "world_size"), [*on(STAND_IN_STUCK, 2)])
def test_a_peer_without_a_thread_after_ncclcomminitrank(place: Place, world_size: int, thread: str) -> None:
    told, failed = place.run(world_size, check, "begin_without_a_thread", thread)
    assert failed == "can't start new thread"
    assert "can't start new thread" in told


@pytest.mark.parametrize(("place", "world_size"), [*on(STAND_IN, 1, 2), *on(GPU, 1, 2)])
def test_generation_after_generation(place: Place, world_size: int) -> None:
    place.run(world_size, check, "begin_again")


@pytest.mark.parametrize(("place", "world_size"), [*on(STAND_IN, 1, 2), *on(GPU, 2)])
def test_a_forgotten_communicator_ends(place: Place, world_size: int) -> None:
    place.run(world_size, check, "forget_without_closing")


@pytest.mark.parametrize(("place", "world_size"), [*on(STAND_IN, 2)])
def test_the_garbage_collector_may_strike_anywhere(place: Place, world_size: int) -> None:
    found = place.run(world_size, check, "collect_at_calls", 1 if IS_EVERYWHERE else 7)  # make test: at every seventh
    assert min(found) > 50


@pytest.mark.parametrize(("place", "world_size"), [*on(STAND_IN, 2), *on(GPU, 2)])
def test_an_abort_of_what_has_failed(place: Place, world_size: int) -> None:
    place.run(world_size, check, "abort_what_has_failed")


@pytest.mark.parametrize(("place", "world_size"), [*on(STAND_IN, 2), *on(GPU, 2)])
def test_an_abort_beside_a_call_that_does_not_return(place: Place, world_size: int) -> None:
    place.run(world_size, check, "abort_beside_a_call_that_does_not_return")


def test_an_abort_asks_nothing_of_the_driver_before() -> None:
    STAND_IN.run(2, check, "abort_while_the_driver_is_held")


@pytest.mark.parametrize(("place", "world_size"), [*on(STAND_IN, 2), *on(GPU, 2)])
def test_a_forked_child_cannot_use_it(place: Place, world_size: int) -> None:
    for text in place.run(world_size, check, "fork_and_use"):
        assert "parent process of this forked process" in text
