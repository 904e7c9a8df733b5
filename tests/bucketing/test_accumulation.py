"""accumulate(): local passes are added up, bit for bit as by hand, and reduced once."""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import re
import subprocess
import sys
from typing import Any

import accumulation_checks as checks
import numpy as np
import pytest

import gradsync as gs
from gradsync.communicators.local import local_communicator
from places import GPU, SHM, STAND_IN, STAND_IN_MIXED, STAND_IN_STAGED, Place, always_on, on

PLACES = [*on(SHM, 1, 2), *on(STAND_IN, 2), *always_on(STAND_IN_STAGED, 2), *always_on(STAND_IN_MIXED, 2), *on(GPU, 2)]


@pytest.mark.parametrize("options", checks.OPTIONS, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize(("place", "world_size"), PLACES)
def test_sums_are_those_by_hand(place: Place, world_size: int, options: dict[str, Any]) -> None:
    if "gradient_as_bucket_view" in options and place.kit != "cupy" and place is not SHM:
        pytest.skip("futures give the device's views there")
    place.run(world_size, checks.add_up, place.kit, options)


@pytest.mark.parametrize("in_buckets", [False, True])
@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 1, 2), *on(STAND_IN, 2), *on(GPU, 2)])
def test_scratch_memory_is_said_to_be_such(place: Place, world_size: int, in_buckets: bool) -> None:
    place.run(world_size, checks.add_up_scratch, place.kit, in_buckets)


@pytest.mark.parametrize(("place", "world_size"), PLACES)
def test_what_came_in_local_passes_alone_is_handed_over(place: Place, world_size: int) -> None:
    place.run(world_size, checks.hand_over_what_came_before_alone, place.kit)


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 2), *on(STAND_IN, 2), *on(GPU, 2)])
def test_ranks_that_accumulate_differently_are_told(place: Place, world_size: int) -> None:
    place.run(world_size, checks.differ_in_passes, place.kit)


@pytest.fixture
def sync() -> Any:
    with local_communicator() as comm:
        yield gs.AllreduceCallback("sum", comm)


def test_a_running_total_is_refused(sync: Any) -> None:
    total = np.zeros(3)
    for number in range(2):
        with sync.accumulate():
            total += 1
            if number:
                with pytest.raises(gs.InvalidArgument, match="running total.*accumulate\\(reused=True\\)"):
                    sync("p", total[:])  # another view of the same memory
            else:
                sync("p", total)


@pytest.mark.parametrize("make", [bytearray, lambda size: mmap.mmap(-1, size), lambda size: (ctypes.c_byte * size)()])
@pytest.mark.parametrize("show", [np.frombuffer, lambda memory: np.ndarray(3, buffer=memory)])
def test_a_running_total_in_memory_that_is_no_array_is_refused(sync: Any, make: Any, show: Any) -> None:
    memory = make(24)
    with sync.accumulate():
        sync("p", show(memory))  # a new array each time
    with sync.accumulate(), pytest.raises(gs.InvalidArgument, match="running total"):
        sync("p", show(memory))
    sync.discard()


def test_new_bytes_in_old_memory_are_not_refused_or_kept(sync: Any) -> None:
    scratch = np.ones(3)
    for number in range(100):
        with sync.accumulate(reused=number % 2 == 1):
            sync("p", np.frombuffer(bytearray(24)) if number % 2 == 0 else scratch)
    assert len(sync._step.sums.by_key["p"].handed_over) < 5
    sync.discard()


def test_new_arrays_in_old_memory_are_not_refused(sync: Any) -> None:
    for number in range(100):
        with sync.accumulate():
            future = sync("p", np.full(50_000, 1.0))  # NumPy gives the memory of the last one again
            assert future.result()[0] == number + 1
    sync.discard()


def test_the_sum_so_far_cannot_be_handed_over_or_written_to(sync: Any) -> None:
    with sync.accumulate():
        so_far = sync("p", np.ones(3)).result()
    with pytest.raises(ValueError, match="read-only"):
        so_far += 1
    with pytest.raises(gs.InvalidArgument, match="the sum of its earlier passes"):
        sync("p", so_far)


def test_passes_end_with_flush_with_backward_and_with_the_block(sync: Any) -> None:
    with sync.accumulate():
        sync("p", np.ones(3))
        with pytest.raises(gs.InvalidArgument, match="twice in one local pass"):
            sync("p", np.ones(3))
        sync.flush()
        with sync.backward():
            sync("p", np.ones(3))
        sync("p", np.ones(3))
    assert sync._step.reducer.events.local_passes == 3
    with sync.backward():
        future = sync("p", np.ones(3))
    assert (future.result() == 4).all()


def test_a_pass_that_raises_drops_the_sums(sync: Any) -> None:
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), sync.accumulate():
            sync("p", np.ones(3))
            raise ZeroDivisionError
    with sync.backward():
        future = sync("p", np.ones(3))
    assert (future.result() == 1).all()


@pytest.mark.parametrize(
    ("misuse", "said"),
    [
        (lambda sync: sync("p", np.ones(4)), r"must be float64\[3\].*got float64\[4\]"),
        (lambda sync: sync("p", np.ones(3, int)), "got int64"),
        (lambda sync: sync("p", None), "is None"),
        (lambda sync: sync("p", [1.0]), "make it an array"),
        (lambda sync: sync.no_sync().__enter__(), "not possible within accumulate"),
        (lambda sync: sync.accumulate().__enter__(), "not possible within accumulate"),
        (lambda sync: sync.discard(), "leave that block first"),
        (lambda sync: sync.accumulate(reused=1).__enter__(), "reused as True or False"),
    ],
)
def test_misuse_is_told(sync: Any, misuse: Any, said: str) -> None:
    with sync.accumulate():
        sync("p", np.ones(3))
    with sync.accumulate(), pytest.raises(gs.InvalidArgument, match=said):
        misuse(sync)


def test_not_in_the_middle_of_a_step(sync: Any) -> None:
    sync("p", np.ones(3))
    for begin in (sync.accumulate().__enter__, sync.discard):
        with pytest.raises(gs.InvalidArgument, match="before handed-over gradients are reduced"):
            begin()
    sync.flush()


def test_leftover_sums_are_a_warning_and_do_not_set_the_exit_code() -> None:
    code = """
import gradsync as gs, numpy as np
with gs.init_process_group("local"):
    sync = gs.AllreduceCallback()
    with sync.accumulate():
        sync("p", np.ones(3))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stderr.count("the gradients of 'p' were added up in accumulate() and never reduced") == 1


def test_sums_whose_group_or_callback_has_gone_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """As a warning, once; discard() says that they are not wanted."""
    told = r"the gradients of 'p' were added up in accumulate\(\) and never reduced over the ranks: .* discard\(\)"
    sync: Any = gs.AllreduceCallback("sum")
    with caplog.at_level(logging.WARNING, "gradsync"):
        for is_wanted in (True, False):
            with gs.init_process_group("local", rank=0, world_size=1):
                with sync.accumulate():
                    sync("p", np.ones(3))
                if not is_wanted:
                    sync.discard()
            with gs.init_process_group("local", rank=0, world_size=1):
                with sync.backward():
                    future = sync("p", np.ones(3))
                assert (future.result() == 1).all()
        [record] = caplog.records
        assert re.search(told, record.getMessage())
        caplog.clear()
        for is_wanted in (True, False):
            with local_communicator() as comm:
                sync = gs.AllreduceCallback("sum", comm)
                with sync.accumulate():
                    sync("p", np.ones(3))
                if not is_wanted:
                    sync.discard()
                del sync
                gc.collect()
        [record] = caplog.records
        assert re.search(told, record.getMessage())


def test_complex_and_infinite_values_add_up_without_warnings(sync: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for value in (np.inf, -np.inf):
            with sync.accumulate():
                sync("p", np.full(2, value))
                sync("c", np.full(2, 1j))
        with sync.backward():
            futures = [sync("p", np.ones(2)), sync("c", np.ones(2, complex))]
    assert np.isnan(futures[0].result()).all()
    assert (futures[1].result() == 1 + 2j).all()
    assert not caplog.records


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 2, 3), *on(STAND_IN, 2), *on(GPU, 2)])
def test_ranks_without_batches_shadow_steps_with_local_passes(place: Place, world_size: int) -> None:
    place.run(world_size, checks.add_up_with_uneven_batches, place.kit)


@pytest.mark.parametrize(("place", "world_size"), [*on(SHM, 2), *on(STAND_IN, 2), *on(GPU, 2)])
def test_a_hook_gets_the_sums(place: Place, world_size: int) -> None:
    place.run(world_size, checks.add_up_before_a_hook, place.kit)


def test_a_step_that_fails_takes_its_sums_with_it(sync: Any) -> None:
    for name in ("p", "q"):
        with sync.accumulate():
            sync(name, np.ones(3))
    with pytest.raises(ZeroDivisionError), sync.backward():
        sync("p", np.ones(3))
        raise ZeroDivisionError
    with sync.backward():
        futures = [sync(name, np.ones(3)) for name in ("p", "q")]
    assert [future.result()[0] for future in futures] == [1, 1]
    assert sync.filled == {}


def test_scratch_memory_is_found_again_after_another_array(sync: Any) -> None:
    scratch = np.ones(3)
    for gradient in (scratch, np.ones(3)):
        with sync.accumulate():
            sync("p", gradient)
    with pytest.raises(gs.InvalidArgument, match=r"reused=True"):
        sync("p", scratch)
    sync.flush()
    assert (sync.filled["p"] == 2).all()


@pytest.mark.parametrize("is_own", [False, True])
def test_sums_do_not_lie_in_the_buckets(is_own: bool) -> None:
    """Else who zeroes a buffer, or writes a gradient into it, would change a sum, and a local pass the last results."""
    with local_communicator() as comm:
        sync = gs.AllreduceCallback("sum", comm, parameters={"p": ((3,), "float64")}, gradient_as_bucket_view=True)
        buffer = sync.gradient_buffers()["p"]
        with sync.backward():
            last = sync("p", np.full(3, 5.0))
        with sync.accumulate():
            sync("p", np.ones(3))
        assert (last.result() == 5).all()
        buffer[...] = 0
        if is_own:
            buffer[...] = 1
        with sync.backward():
            future = sync("p", buffer if is_own else np.ones(3))
        assert (future.result() == 2).all()
        assert future.result() is buffer


def test_an_array_of_a_reused_pass_is_refused_in_a_pass_that_is_not_reused(sync: Any) -> None:
    gradient = np.ones(3)
    for _ in range(3):
        with sync.accumulate(reused=True):
            sync("p", gradient)
    with sync.accumulate(), pytest.raises(gs.InvalidArgument, match="running total"):
        sync("p", gradient)
