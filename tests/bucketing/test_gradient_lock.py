"""A gradient in flight cannot be written to, and can be again after every way out."""

from __future__ import annotations

import sys
from typing import Any

import lock_checks as checks
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gradsync as gs
from gradsync.communicators.local import local_communicator
from places import SHM, STAND_IN_MIXED, STAND_IN_STAGED, Place, always_on, on

PLACES = [*on(SHM, 1, 2, 3), *always_on(STAND_IN_STAGED, 2)]
ON_TWO = [*on(SHM, 2), *always_on(STAND_IN_STAGED, 2)]

CHECKS = [
    checks.lock_each_layout,
    checks.unlock_as_soon_as_done,
    checks.share_a_buffer,
    checks.use_every_knob,
    checks.use_a_hook,
    checks.hand_over_to_two_callbacks,
    checks.hand_over_a_base,
    checks.forget_the_callback,
    checks.fail_together,
    checks.use_in_the_next_step,
]
LAST_CHECKS = [checks.fail_in_a_hook, checks.fail_elsewhere]


def run_all(comm: Any, kit: str) -> None:
    """One after another on the same ranks: each costs milliseconds, the ranks a second."""
    for check in CHECKS:
        check(comm, kit)
    if comm.backend != "nccl":
        checks.live_in_buckets(comm, kit)  # there, they live on the device
        checks.fork_with_gradients_in_flight(comm, kit)
    else:
        checks.stay_apart_on_a_gpu(comm, kit)


def leave_by_each(comm: Any, seeds: int) -> None:
    """Those that a communicator of several ranks survives."""
    for seed in range(seeds):
        for way in ("flush", "refused"):
            checks.leave_by(comm, seed, way)


@pytest.mark.parametrize("check", [*CHECKS, checks.live_in_buckets, checks.fork_with_gradients_in_flight])
def test_alone(check: Any) -> None:
    check(local_communicator(), "numpy")


@pytest.mark.parametrize(("place", "world_size"), PLACES)
def test_on_ranks(place: Place, world_size: int) -> None:
    place.run(world_size, run_all, place.kit)


@pytest.mark.parametrize("check", LAST_CHECKS)
@pytest.mark.parametrize(("place", "world_size"), ON_TWO)
def test_after_a_failure(place: Place, world_size: int, check: Any) -> None:
    place.run(world_size, check, place.kit)


@pytest.mark.parametrize(("place", "world_size"), on(SHM, 2))
def test_after_a_rank_is_lost(place: Place, world_size: int) -> None:
    first = place.outcomes(world_size, checks.lose_a_rank, place.kit)[0]
    assert first.error is None, first.traceback_text


@given(seed=st.integers(0, 10**6), way=st.sampled_from(sorted(checks.LOCAL_WAYS_OUT)))
@settings(deadline=None, max_examples=150)
def test_every_way_out_puts_every_flag_back(seed: int, way: str) -> None:
    checks.leave_by(local_communicator(), seed, way)


@pytest.mark.parametrize(("place", "world_size"), ON_TWO)
def test_every_way_out_of_ranks(place: Place, world_size: int) -> None:
    place.run(world_size, leave_by_each, 12)


@pytest.mark.parametrize("way", sorted(checks.LAST_WAYS_OUT))
@pytest.mark.parametrize(("place", "world_size"), [*ON_TWO, *always_on(STAND_IN_MIXED, 2)])
def test_the_end_of_the_group_puts_every_flag_back(place: Place, world_size: int, way: str) -> None:
    place.run(world_size, checks.leave_by, 3, way)


def test_a_gradient_that_is_locked_is_not_taken_for_a_read_only_one() -> None:
    """Which would get a fresh result, without a word."""
    with local_communicator() as comm:
        first, second = gs.AllreduceCallback("sum", comm), gs.AllreduceCallback("sum", comm)
        gradient = np.ones(3)
        for sync in (first, second):  # known to both from earlier steps
            for _ in range(3):
                with sync.backward():
                    sync("w", gradient)
        first("w", gradient)
        with pytest.raises(gs.InvalidArgument, match="in flight already"):
            second("w", gradient)
        first.flush()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have notes since Python 3.11")
def test_the_error_of_a_write_names_the_gradients() -> None:
    sync = gs.AllreduceCallback(group=local_communicator())
    z, more = np.ones(3), np.ones(2)
    with pytest.raises(ValueError, match="read-only") as caught, sync.backward():
        sync("z", z)
        z += 1
    text = "gradsync: the gradient of 'z' is read-only until its future is done; see docs/your_loop.md"
    assert caught.value.__notes__ == [text]
    with pytest.raises(ValueError, match="read-only") as caught, sync.backward():
        sync("z", z)
        sync("more", more)
        np.add(z, 1, out=z)
    assert caught.value.__notes__[0].startswith("gradsync: the gradients of 'z', 'more' are read-only until their")
    with pytest.raises(ValueError, match="read-only") as caught, sync.backward():  # another array than ours
        np.broadcast_to(1.0, 3)[0] = 2.0
    assert not hasattr(caught.value, "__notes__")
