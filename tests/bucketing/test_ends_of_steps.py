"""How a step may end: twice, empty, with a callback that leaves, with its group; and what is left then."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

import gradsync as gs
from gradsync.communicators.local import local_communicator
from rank_processes import run_ranks

SHAPES = {"a": ((3,), "float32"), "b": ((2, 2), "float32")}


def test_a_flush_within_the_block_is_not_followed_by_a_step_of_zeros() -> None:
    callback = gs.AllreduceCallback(
        "mean", local_communicator(), parameters=SHAPES, gradient_as_bucket_view=True, missing="zero", nonfinite="skip"
    )
    views = callback.gradient_buffers()
    for names in (("a", "b"), ("a",)):
        for view in views.values():
            view[...] = np.inf
        with callback.backward():
            for name in names:
                callback(name, views[name])
            callback.flush()
        assert np.isinf(views["a"]).all()
        assert callback.skip_step
        assert list(callback.filled) == [name for name in SHAPES if name not in names]
    assert callback.statistics.steps == 2


def test_a_step_whose_gradients_have_all_come_wants_its_flush_all_the_same() -> None:
    callback = gs.AllreduceCallback("mean", parameters=SHAPES)
    with (
        pytest.raises(gs.InvalidArgument, match="gradients of all parameters were handed over, and their step has not"),
        gs.init_process_group("local", rank=0, world_size=1),
    ):
        for name, (shape, dtype) in SHAPES.items():
            callback(name, np.ones(shape, dtype))


def test_an_empty_step_with_zeros_follows_a_full_one() -> None:
    callback = gs.AllreduceCallback("mean", local_communicator(), parameters=SHAPES, missing="zero")
    with callback.backward():
        for name, (shape, dtype) in SHAPES.items():
            callback(name, np.ones(shape, dtype))
    with callback.backward():
        pass
    assert list(callback.filled) == list(SHAPES)
    assert callback.statistics.steps == 2


@pytest.mark.parametrize("hook", [None, lambda bucket: bucket.buffer])
@pytest.mark.parametrize("fails", [False, True])
def test_a_done_callback_that_leaves_keeps_no_other_gradient_from_its_end(fails: bool, hook: Any) -> None:
    callback = gs.AllreduceCallback("sum", local_communicator())
    callback.register_hook(hook)

    def leave(_: Any) -> None:
        raise SystemExit(3)

    gradients = [np.ones(2, dtype) for dtype in ("float32", "float64", "complex64")]
    futures = [callback(number, gradient) for number, gradient in enumerate(gradients)]
    for future in futures:
        future.add_done_callback(leave)
    with pytest.raises(SystemExit), callback.backward():
        if fails:
            raise ValueError("no such batch")
    assert all(future.done() for future in futures)
    assert all(isinstance(future.exception(), gs.GradientCancelled) == fails for future in futures)
    with callback.backward():
        future = callback(0, gradients[0])
    assert (future.result() == 1).all()


def test_a_group_that_has_ended_does_not_hold_the_callback() -> None:
    callback = gs.AllreduceCallback("mean")
    with (
        pytest.raises(gs.InvalidArgument, match="never reduced"),
        gs.init_process_group("local", rank=0, world_size=1),
    ):
        future = callback("w", np.ones(2))
    with gs.init_process_group("local", rank=0, world_size=1):
        again = callback("w", np.ones(2))
        callback.flush()
    with pytest.raises(gs.GradientCancelled, match="the process group ended before"):
        future.result()
    assert (again.result() == 1).all()


def test_figures_of_the_last_step_go_with_a_failed_one() -> None:
    callback = gs.AllreduceCallback("sum", local_communicator(), clip_norm=float("inf"), nonfinite="raise")
    callback("w", np.array([3.0, 4.0]))
    callback.flush()
    assert callback.norm == 5
    callback("w", np.array([np.nan]))
    with pytest.raises(gs.NonFiniteGradient, match="'w' on rank 0"):
        callback.flush()
    assert callback.norm is None
    assert not callback.skip_step


def test_views_of_a_place_in_another_form_are_that_place() -> None:
    parameters = {"row": ((1, 3), "float32"), "shared": ((2,), "float64"), "too": ((2,), "float64")}
    callback = gs.AllreduceCallback("sum", local_communicator(), parameters=parameters, gradient_as_bucket_view=True)
    views = callback.gradient_buffers()
    views["row"][...] = 7
    outside = np.full(2, 2.0)
    with callback.backward():
        row = callback("row", views["row"].reshape(-1)[None])
        copies = [callback(name, outside) for name in ("shared", "too")]  # copied: sharing harms nobody
    assert row.result().base is views["row"].base
    assert (row.result() == 7).all()
    assert [future.result().tolist() for future in copies] == [[2, 2], [2, 2]]


def hand_over_in_two_threads(comm: Any) -> list[str]:
    """Rank 1 lets rank 0's bucket wait; meanwhile another thread of rank 0 uses its callback."""
    sync, waits, told = gs.AllreduceCallback("sum", comm, threshold_bytes=8), threading.Event(), []
    with sync.backward():
        if comm.rank == 1:
            waits.wait(0.3)
        else:

            def second() -> None:
                waits.wait(0.1)
                for call in (lambda: sync("b", np.ones(1)), sync.flush):
                    try:
                        call()
                    except gs.InvalidArgument as error:
                        told.append(str(error))

            thread = threading.Thread(target=second)
            thread.start()
        first = sync("a", np.ones(1))  # fills its bucket
        if comm.rank == 0:
            thread.join()
        second_future = sync("b", np.ones(1))
    assert (first.result() == 2).all()
    assert (second_future.result() == 2).all()
    return told


def test_a_second_thread_in_a_callback_is_told_so() -> None:
    told, _ = run_ranks(2, hand_over_in_two_threads)
    assert [text.split(" was called ")[0] for text in told] == ["rank 0/2: callback(param, grad)", "rank 0/2: flush()"]
    assert all("was still running" in text and "one thread at a time" in text for text in told)


def count_meetings(comm: Any, options: dict[str, Any]) -> int:
    sync, gradients = gs.AllreduceCallback("mean", comm, **options), [np.ones(3) for _ in range(2)]
    for _ in range(3):
        before, seconds = comm.recorder.begun, sync.statistics.communication_seconds
        with sync.backward():
            for number, gradient in enumerate(gradients):
                sync(number, gradient)
            if comm.rank == 1:
                time.sleep(0.05)
    assert comm.rank == 1 or sync.statistics.communication_seconds - seconds > 0.04  # waiting in the flush too
    return comm.recorder.begun - before


@pytest.mark.parametrize("options", [{}, {"nonfinite": "raise"}, {"clip_norm": 1.0, "nonfinite": "skip"}])
def test_a_step_ends_with_one_meeting_of_the_ranks(options: dict[str, Any]) -> None:
    assert run_ranks(2, count_meetings, options) == [2, 2]  # one is the bucket's
