"""How a step ends: by a flush, an exception, a killed rank, or never; and that what it held is free afterwards."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import nullcontext, suppress

import numpy as np
import pytest

import gradsync as gs
from arrays import arrays_of
from bucketing.reference import in_a_group, step
from commands import wait_until
from interrupts import interrupted

SHAPES = dict.fromkeys("abc", ((10,), "float64"))
MODES = {
    "plain": {},
    "parameters": {"parameters": SHAPES},
    "views": {"parameters": SHAPES, "gradient_as_bucket_view": True},
    "values": {"nonfinite": "raise", "clip_norm": 1e9},
    "zeros": {"parameters": SHAPES, "missing": "zero"},
    "hook": {},
}


def make(comm, mode):
    """A callback of which two gradients fill a bucket."""
    sync = gs.AllreduceCallback("sum", comm, threshold_bytes=160, **MODES[mode])
    if mode == "hook":
        sync.register_hook(lambda bucket: bucket.communicator.all_reduce(bucket.buffer, bucket.op))
    return sync


# -- Exceptions --------------------------------------------------------------------------------------------------------


def fail_in_the_middle(comm, mode, where, error):
    """Rank 1 raises in the third of four steps; returns what this rank saw."""
    arrays = arrays_of(comm)
    sync, futures = make(comm, mode), []
    try:
        for number in range(4):
            futures.clear()
            with sync.backward():
                for at, name in enumerate("abc"):
                    futures.append(sync(name, arrays.put(np.ones(10))))
                    if (comm.rank, number, at) == (1, 2, where):
                        raise error
    except (ValueError, KeyboardInterrupt) as raised:
        assert raised is error
        outcome = "raised"
    except gs.RankFailed as raised:
        assert raised.rank == 1
        assert type(error).__name__ in str(raised)
        outcome = "heard"
    assert all(future.done() for future in futures)
    cancelled = [isinstance(future.exception(), gs.GradientCancelled) for future in futures]
    with pytest.raises(gs.CommunicatorClosed):
        comm.barrier()
    with pytest.raises(gs.CommunicatorClosed):
        step(sync, {"a": arrays.put(np.ones(10))})
    return outcome, any(cancelled) if outcome == "raised" else None


@pytest.mark.parametrize(
    ("mode", "error", "where"),
    [("plain", ValueError("no such batch"), 0), *[(mode, KeyboardInterrupt(), 2) for mode in MODES]],
    ids=repr,
)
def test_an_exception_in_backward_reaches_the_other_ranks(run_in_group, mode, error, where):
    first, raised, last = run_in_group(3, fail_in_the_middle, mode, where, error)
    assert first[0] == last[0] == "heard"
    assert raised[0] == "raised"
    assert raised[1] or where  # what was not reduced is cancelled


@pytest.mark.ranks(2, on=("fake",), fresh=True)  # NCCL's communicators of one process fail together
def test_an_exception_in_backward_reaches_the_other_gpus(comm):
    outcome, _ = fail_in_the_middle(comm, "views", 2, ValueError("no such batch"))
    assert outcome == ("raised" if comm.rank else "heard")


@pytest.mark.parametrize("mode", MODES)
def test_an_exception_cancels_and_the_next_step_is_right(alone, mode):
    sync = make(alone, mode)
    for _ in range(2):
        with pytest.raises(KeyError), sync.backward():
            future = sync("a", np.ones(10))
            raise KeyError("x")
        with pytest.raises(gs.GradientCancelled, match="KeyError"):
            future.result()
        results = step(sync, {name: np.full(10, 3.0) for name in "abc"})
        assert all((result == 3).all() for result in results.values())


@pytest.mark.ranks(3)
def test_a_mismatch_of_some_ranks_is_a_failure_to_the_others(comm):
    """Two of three ranks leave the block by a PlanMismatch that the third has not had."""

    def train(group):
        some = group.new_group([0, 1])
        sync, results = gs.AllreduceCallback("sum", group), []
        for number in range(3):
            try:
                with sync.backward():
                    if number == 1 and group.rank < 2:
                        some.all_reduce(np.ones(3 + group.rank))
                    future = sync("w", np.full(4, 10.0**number))
                results.append(future.result()[0])
            except gs.GradsyncError as error:
                results.append(type(error))
        return results

    middle = gs.PlanMismatch if comm.rank < 2 else gs.RankFailed
    assert in_a_group(comm, train) == [3.0, middle, gs.CommunicatorClosed]


@pytest.mark.ranks(2)
def test_a_failed_step_that_flushed_itself_is_not_flushed_again(comm):
    """On rank 0 the error may come out of the last gradient, on rank 1, which lacks one, out of the flush."""
    parameters = dict.fromkeys("ab", ((4,), "float64"))
    sync = gs.AllreduceCallback("sum", comm, parameters=parameters, missing="zero", nonfinite="raise")
    for number in range(4):
        errors, futures, value = [], [], np.nan if number == 1 else 10.0**number
        calls = [lambda value=value, name=name: sync(name, np.full(4, value)) for name in ("ab", "a")[comm.rank]]
        for call in (*calls, sync.flush):
            try:
                futures.append(call())
            except gs.NonFiniteGradient as error:
                errors.append(error)
        assert bool(errors) == (number == 1)
        assert errors or futures[0].result()[0] == 2 * value


# -- Flush -------------------------------------------------------------------------------------------------------------


def test_a_flush_within_the_block_is_not_followed_by_a_step_of_zeros(alone):
    options = {"gradient_as_bucket_view": True, "missing": "zero", "nonfinite": "skip"}
    sync = gs.AllreduceCallback("mean", alone, parameters=SHAPES, **options)
    views = sync.gradient_buffers()
    for names in ("abc", "a"):
        for view in views.values():
            view[...] = np.inf
        with sync.backward():
            for name in names:
                sync(name, views[name])
            sync.flush()
        assert np.isinf(views["a"]).all()
        assert sync.skip_step
    assert sync.statistics.steps == 2


@pytest.mark.ranks(2)
def test_a_second_thread_in_a_callback_is_refused(comm, tmp_path):
    """Rank 1 comes late to rank 0's flush; meanwhile another thread of rank 0 uses the callback."""
    sync, over = gs.AllreduceCallback("sum", comm), tmp_path / "over"
    step(sync, {"a": np.ones(1)})
    first = sync("a", np.ones(1))
    if comm.rank:
        wait_until(over.exists)
        sync.flush()
    else:
        main = threading.Thread(target=sync.flush)
        main.start()

        def is_refused():
            with pytest.raises(gs.InvalidArgument) as raised:
                sync("b", None)  # refused in any case, and for the other reason once the flush has begun
            return "thread" in str(raised.value)

        wait_until(is_refused)
        with pytest.raises(gs.InvalidArgument, match="thread"):
            sync.flush()
        over.touch()
        main.join()
    assert (first.result() == 2).all()


def test_ctrl_c_in_a_flush_cancels(alone):
    """The thread that flushes gets the interrupt; who waits for a future, a cancelled gradient."""

    def interrupt(bucket):
        if sync.statistics.steps == 1:
            raise KeyboardInterrupt

    sync = gs.AllreduceCallback("sum", alone)
    sync.register_hook(interrupt)
    assert step(sync, {"w": np.ones(3)})["w"].tolist() == [1.0] * 3
    with pytest.raises(KeyboardInterrupt), sync.backward():
        future = sync("w", np.ones(3))
    assert "KeyboardInterrupt" in str(future.exception())
    with pytest.raises(gs.GradientCancelled):
        future.result()
    sync.register_hook(None)
    assert step(sync, {"w": np.ones(3)})["w"].tolist() == [1.0] * 3


def test_a_gradient_that_another_thread_slips_into_a_flush_is_never_taken_for_a_reduced_one(alone):
    sync = gs.AllreduceCallback("sum", alone)
    late = []

    def hand_over(bucket):
        sync._step._is_busy = False  # as another thread saw it, before the flush
        late.append(sync("late", np.ones(3)))

    sync.register_hook(hand_over)
    with pytest.raises(gs.InvalidArgument, match="one thread"), sync.backward():
        sync("w", np.ones(3))
    assert isinstance(late[0].exception(), gs.GradsyncError)


# -- Forgotten gradients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("options", [{}, {"parameters": {"w": ((3,), "float64")}}], ids=repr)
def test_leaving_a_group_with_gradients_that_were_never_flushed_raises(options, is_kept):
    with pytest.raises(gs.InvalidArgument), gs.init_process_group("local"):
        sync = gs.AllreduceCallback("mean", **options)
        future = sync("w", np.ones(3))
        if not is_kept:
            del sync
            gc.collect()
    if is_kept and not options:
        assert isinstance(future.exception(), gs.GradientCancelled)
        with gs.init_process_group("local"):  # the callback goes on in the next one
            assert step(sync, {"w": np.ones(3)})["w"].tolist() == [1.0] * 3


@pytest.mark.ranks(2, fresh=True)
def test_each_rank_that_leaves_with_forgotten_gradients_raises(comm):
    sync = gs.AllreduceCallback("mean")
    future = sync("w", np.ones(3))
    with pytest.raises(gs.InvalidArgument, match=f"rank {comm.rank}/2.*'?w'?"):
        gs.destroy_process_group()
    assert isinstance(future.exception(), gs.GradientCancelled)


SCRIPT = """
import os, sys
import numpy as np
import gradsync as gs

how = sys.argv[1]
world = gs.init_process_group("local")
sync = gs.AllreduceCallback()
sync("weights", np.ones(3))
if how == "ends":
    if os.fork() == 0:
        sys.exit()  # the child of a fork has forgotten nothing
    os.wait()
elif how == "aborted":
    world.abort("enough")
elif how == "exits":
    sys.exit(3)
elif how == "raises":
    raise KeyError("lost")
elif how == "destroys while it raises":
    try:
        raise KeyError("lost")
    finally:
        gs.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("how", "code", "times"),
    [
        ("ends", 0, 1),
        ("exits", 3, 1),
        ("aborted", 0, 0),
        ("raises", 1, 0),  # what it raises says more
        ("destroys while it raises", 1, 0),
    ],
)
def test_the_end_of_a_program_tells_of_forgotten_gradients(cli, script, how, code, times):
    done = cli.python("-W", "ignore::DeprecationWarning", script(SCRIPT), how)
    assert done.code == code, done
    assert done.err.count("'weights'") == times, done
    assert ("KeyError: 'lost'" in done.err) == ("raises" in how)


# -- What a step holds -------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, on=("shm", "fake"))
@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0, "nonfinite": "skip"}, {"parameters": SHAPES}], ids=repr)
def test_gradients_that_the_program_drops_are_freed(comm, options):
    sync = gs.AllreduceCallback("mean", comm, threshold_bytes=160, **options)
    arrays = arrays_of(comm)

    def made():
        return {name: arrays.put(np.ones(10)) for name in "abc"}

    gc.disable()  # by counts of references alone
    try:
        for number in range(4):
            mine = made()
            for _ in range(1 + number % 2):
                step(sync, mine)
            dropped = [weakref.ref(array) for array in mine.values()]
            del mine
            step(sync, made())
            if comm.device != "cpu":  # held until their launch has been seen to end
                wait_until(lambda dropped=dropped: all(reference() is None for reference in dropped))
            assert all(reference() is None for reference in dropped)
    finally:
        gc.enable()


# -- Arrays in flight: what holds whether they are locked, as now, or not ----------------------------------------------


@pytest.mark.parametrize("way_out", ["flush", "exception", "mismatch", "closed"])
def test_after_every_way_out_gradients_are_as_writeable_as_they_were(run_in_group, way_out):
    def use(group):
        base, fixed = np.ones((4, 6)), np.ones(3)
        fixed.setflags(write=False)
        gradients = {"a": np.ones(10), "b": base[::2, 1:4], "c": np.asfortranarray(base), "d": fixed}
        sync = gs.AllreduceCallback("sum", group)
        for _ in range(2):  # the arrays come again
            step(sync, gradients)
        error = {"exception": KeyError, "mismatch": gs.PlanMismatch, "closed": gs.CommunicatorClosed}.get(way_out)
        futures = []
        with pytest.raises(error) if error else nullcontext(), sync.backward():
            names = "abc" if way_out == "mismatch" and group.rank else "abcd"
            futures.extend(sync(name, gradients[name]) for name in names)
            if way_out == "exception":
                raise KeyError("no such batch")
            if way_out == "closed":
                group.close()
        assert all(future.done() for future in futures)
        base[...] = gradients["a"][...] = gradients["b"][...] = gradients["c"][...] = 1.0
        return fixed.flags.writeable

    assert run_in_group(2, use) == [False] * 2


@pytest.mark.ranks(2)
def test_an_array_that_another_callback_has_in_flight_is_refused_or_reduced_by_both(comm):
    """Never taken for a read-only one, which would get a fresh result without a word."""
    first, second = gs.AllreduceCallback("sum", comm, name="first"), gs.AllreduceCallback("sum", comm, name="second")
    gradient = np.ones(3)
    for sync in (first, second):  # known to both from earlier steps
        for _ in range(3):
            gradient[...] = 1.0
            step(sync, {"w": gradient})
    first("w", gradient)
    try:
        future = second("w", gradient)
    except gs.InvalidArgument:
        future = None
    first.flush()
    second.flush()
    assert future is None or future.result() is gradient
    assert gradient.tolist() == [4.0 if future is None else 8.0] * 3


@pytest.mark.parametrize("parameters", [None, dict.fromkeys("ab", ((2,), "float64"))], ids=["as they come", "named"])
def test_after_a_ctrl_c_at_any_point_of_a_step_the_futures_are_done_and_the_next_step_is_right(parameters):
    with gs.init_process_group("shm", rank=0, world_size=1) as world:
        number, came = 1, True
        while came:
            with world.split(0) as group:
                sync = gs.AllreduceCallback("sum", group, parameters=parameters)
                futures = []

                def step(sync=sync, futures=futures):
                    with sync.backward():
                        futures.extend(sync(name, np.ones(2)) for name in "ab")

                came = interrupted(step, number, ends=(KeyboardInterrupt, gs.GradsyncError))
                assert all(future.done() for future in futures), number
                with suppress(gs.CommunicatorClosed):  # it came within a collective
                    step()
                    assert [list(result) for result in sync.results().values()] == [[1.0, 1.0]] * 2, number
            number += 1
