"""NCCL and ranks that differ: what is compared before a launch, and what is found out afterwards.

NCCL itself compares nothing: its kernels hang, or mix what does not belong together.
"""

import itertools
import os
import time

import numpy as np
import pytest

import gradsync as gs
from backends.on_cuda import HANGS, SIZE, assert_all, full, meet, side_stream, total
from bucketing.reference import Heard
from commands import wait_until
from obstacle import Obstacle

NAMES = "abc"
two_or_three = pytest.mark.ranks(2, 3, on=("fake",), environment=HANGS)
broken = pytest.mark.ranks(2, 3, on=("fake",), environment=HANGS, fresh=True)


def known(comm, dtype="float32", method="sum", **options):
    """A callback with `parameters=`; each gradient is a bucket."""
    shapes = dict.fromkeys(NAMES, ((SIZE,), dtype))
    return gs.AllreduceCallback(method, comm, threshold_bytes=1, parameters=shapes, **options)


def step(callback, names=NAMES, value=1):
    with callback.backward():
        return [callback(name, full(value)) for name in names]


def await_all(futures):
    for future in futures:
        future.numpy()


def expect_end(comm, error):
    """The error was told on every rank, and nothing goes on."""
    assert error.broken
    with pytest.raises(gs.CommunicatorClosed):
        comm.barrier()
    assert comm.closed


# -- Afterwards: with `parameters=`, at the end of each step ----------------------------------------------------------


def use_callbacks_in_two_orders(comm, callback, other):
    for each in (callback, other) if comm.rank == 0 else (other, callback):
        step(each)


def reduce_by_two_operators(comm, callback, other):
    comm.all_reduce(full(1), "sum" if comm.rank == 0 else "max")


@pytest.mark.parametrize("told_by", ["result", "next launch"])
@pytest.mark.parametrize(
    ("stray", "words"),
    [
        (use_callbacks_in_two_orders, ["[a] of callback 'one'", "[a] of callback 'other'"]),
        (reduce_by_two_operators, ["all_reduce(sum) float32[5000]", "all_reduce(max) float32[5000]"]),
    ],
)
@broken
def test_what_was_launched_is_compared_at_the_end_of_the_step(comm, stray, words, told_by):
    callback, other = known(comm, name="one"), known(comm, name="other")
    for each in (callback, other):
        for future in step(each):
            assert_all(future.result(), comm.world_size)
    with pytest.raises(gs.PlanMismatch) as raised:
        stray(comm, callback, other)
        first, *_ = step(callback)
        if told_by == "result":
            wait_until(first.done)
            first.result()
        else:
            callback("a", full(1))
    error = raised.value
    assert set(error.descriptions) == set(range(comm.world_size))
    lines = str(error).splitlines()
    for rank in range(comm.world_size):
        assert any(line.startswith(f"    rank {rank}: ") and words[rank > 0] in line for line in lines), str(error)
    expect_end(comm, error)


@pytest.mark.parametrize(("more", "words"), [(500, "all_reduce(max)"), (1500, "of which the last 1024 are known")])
@broken
def test_what_differed_hundreds_of_collectives_ago_is_told_and_earlier_ones_are_counted(comm, more, words):
    callback = known(comm)
    reduce_by_two_operators(comm, callback, callback)
    array = full(1, 1)
    for _ in range(more):
        comm.all_reduce(array)
    with pytest.raises(gs.PlanMismatch) as raised:
        await_all(step(callback))
        await_all(step(callback))
    assert f"launched {more + 4} collectives" in str(raised.value)
    assert words in str(raised.value)


@broken
def test_the_last_step_of_a_program_is_told_of_too(comm):
    """Though nobody reads its futures."""
    callback = known(comm)
    reduce_by_two_operators(comm, callback, callback)
    step(callback)
    with Heard() as lines:
        comm.close()
    assert any("the ranks have launched different collectives" in line for line in lines)


@two_or_three
def test_what_the_host_waits_for_is_compared_before_and_all_go_on(comm):
    """A barrier, and the numbers that ranks exchange: nothing of it is told again at the end of a step."""
    callback = known(comm)
    calls = itertools.cycle([comm.barrier, lambda: comm.split(0), lambda: comm.objects.all_gather(None)])
    different = [next(calls) for _ in range(comm.world_size)][comm.rank]
    for _ in range(2):
        with pytest.raises(gs.PlanMismatch) as raised:
            different()
        assert not raised.value.broken
        await_all(step(callback))


# -- A rank that lacks a gradient -------------------------------------------------------------------------------------


@pytest.mark.ranks(2, on=("fake",), environment=HANGS, fresh=True)
def test_the_other_communicators_that_it_ends_name_its_group(comm):
    group = comm.new_group([0, 1])
    callback = known(group)
    await_all(step(callback))
    with pytest.raises(gs.PlanMismatch):
        step(callback, NAMES[: 2 + comm.rank])
        await_all(step(callback))
    wait_until(lambda: comm.closed)
    with pytest.raises(gs.PlanMismatch, match=rf"rank 0: .* in group '{group.recorder.group}'"):
        comm.barrier()


@pytest.mark.parametrize("lacking", ["a", "c"])
@broken
def test_a_rank_that_lacks_a_gradient_of_the_plan_ends_the_step_of_all_at_once(comm, tmp_path, lacking):
    """Though the kernels of the others hang."""
    callback = known(comm)
    await_all(step(callback))
    meet(tmp_path, comm, "the step of all has ended")
    began = time.monotonic()
    names = NAMES.replace(lacking, "") if comm.rank == 1 else NAMES
    with pytest.raises(gs.PlanMismatch) as raised:
        await_all(step(callback, names))
    assert time.monotonic() - began < 10
    error = raised.value
    assert (
        f"rank 1: step (sum) of 3 gradients in 3 buckets, {12 * SIZE} bytes, without a gradient for '{lacking}'"
        in str(error)
    )
    assert ("the other ranks" if comm.rank == 1 else "this rank: ") in str(error)
    assert list(error.descriptions) == [1]
    expect_end(comm, error)


@broken
def test_also_where_another_rank_has_nothing_at_all(comm, tmp_path):
    callback = known(comm)
    await_all(step(callback))
    meet(tmp_path, comm, "the step of all has ended")
    with pytest.raises(gs.PlanMismatch) as raised:
        step(callback, "a" if comm.rank == 1 else "")
    expect_end(comm, raised.value)


@pytest.mark.parametrize(
    ("names", "weight", "told"), [(NAMES, 2.0, "with a weight"), ("", None, "flush of a step without gradients")]
)
@pytest.mark.ranks(2, on=("fake",), environment=HANGS, fresh=True, options={"collective_timeout_seconds": 2.5})
def test_what_no_rank_can_know_alone_is_found_at_the_deadline(comm, names, weight, told):
    """This rank asks the server whether all do so, and the others have launched their buckets."""
    callback = known(comm, method="mean")
    await_all(step(callback))
    with pytest.raises(gs.CollectiveTimeout) as raised:
        if comm.rank == 1:
            with callback.backward(weight=weight):
                for name in names:
                    callback(name, full(1))
        else:
            await_all(step(callback))
    assert told in str(raised.value)
    assert "all_reduce(mean) float32 19.5 KB [a]" in str(raised.value)


@two_or_three
def test_before_the_plan_is_agreed_nothing_has_moved_and_all_go_on(comm):
    callback = known(comm)
    for others in ("abc", "ac"):  # who lacks the first gradient launches nothing
        with pytest.raises(gs.PlanMismatch) as raised:
            step(callback, "bc" if comm.rank == 1 else others)
        assert not raised.value.broken
        assert set(raised.value.descriptions) == set(range(comm.world_size))
        with pytest.raises(gs.MissingGradient):
            step(callback, "bc")
    await_all(step(callback))


@two_or_three
def test_with_missing_zero_all_go_on(comm):
    callback = known(comm, missing="zero")
    for lacking in ("", "a", "c", NAMES):
        step(callback, [name for name in NAMES if comm.rank != 1 or name not in lacking])
        for name, result in callback.results().items():
            assert_all(result, comm.world_size - (name in lacking))


# -- Before: the plan, once -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.ranks(2, on=("fake",))
def test_how_often_the_ranks_compare_through_the_server(comm, is_known):
    from gradsync.communicators.nccl.verify import Verification

    compared, compare = [], Verification.compare

    def noted(self, agreement):
        compared.append(agreement)
        compare(self, agreement)

    callback = known(comm, "float32", "mean") if is_known else gs.AllreduceCallback("mean", comm, threshold_bytes=1)

    def compared_in_steps(count, **options):
        compared.clear()
        for _ in range(count):
            with callback.backward(**options):
                for name in NAMES:
                    callback(name, full(1))
        return len(compared)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Verification, "compare", noted)
        assert compared_in_steps(10) == (1 if is_known else 10)
        assert compared_in_steps(10, weight=comm.rank + 1) == (1 if is_known else 10)
        comm.all_reduce(full(1))
        assert compared_in_steps(1, weight=1.5) == (0 if is_known else 1)


@pytest.mark.ranks(2, on=("fake",), environment=HANGS)
def test_parameters_in_two_orders_are_told_before_anything_moves(comm):
    callback = gs.AllreduceCallback(
        "sum", comm, threshold_bytes=1, parameters=dict.fromkeys("ab" if comm.rank else "ba", ((SIZE,), "float32"))
    )
    with pytest.raises(gs.PlanMismatch, match="order of the parameters differs") as raised:
        step(callback, "ab")
    assert not raised.value.broken
    comm.barrier()


# -- Weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, on=("fake", "gpu"), environment=HANGS)
def test_no_host_waits_for_the_weights_before_it_launches(comm):
    callback = known(comm, method="mean")
    with callback.backward(weight=1):
        for name in NAMES:
            callback(name, full(1))
    producer = side_stream()
    with producer:
        gradients = [full(0) for _ in NAMES]
        with Obstacle(producer) as obstacle, callback.backward(weight=comm.rank + 1):
            for number, (name, gradient) in enumerate(zip(NAMES, gradients, strict=True), 1):
                gradient += comm.rank
                callback(name, gradient)
                assert callback.statistics.all_reduces == len(NAMES) + number
            assert not producer.done or not obstacle.holds
            obstacle.lift()
    assert callback.total_weight == 3
    for result in callback.results().values():
        np.testing.assert_allclose(result.get(), 2 / 3, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    "weights",
    [[1, 2, 3], [5, 5, 5], [0, 2, 4], [7e4, 7e4, 7e4], [1.5e308, 1.5e308, 1.5e308], [1e-310, 3e-310, 0]],
    ids=str,
)
@pytest.mark.ranks(on={"fake": (2, 3), "gpu": (2,)})
def test_means_with_weights(comm, weights, dtype):
    """In float16 neither the weights nor the sums have room."""
    import cupy

    callback = known(comm, dtype, "mean")
    mine, n = weights[comm.rank], comm.world_size
    for value in (6e4, 0.5):
        with callback.backward(weight=mine):
            for name in NAMES if mine else "":
                callback(name, cupy.full(SIZE, value * (1 - comm.rank / 4), dtype))
        with np.errstate(over="ignore"):
            assert callback.total_weight == sum(weights[:n])
        shares = np.array(weights[:n]) / max(weights)
        wanted = value * ((1 - np.arange(n) / 4) * shares).sum() / shares.sum()
        for result in callback.results().values():
            np.testing.assert_allclose(result.get().astype(float), wanted, rtol=1e-5 if dtype == "float32" else 2e-3)


@pytest.mark.ranks(on={"fake": (2, 3), "gpu": (2,)})
def test_weights_that_are_all_0_reduce_nothing_and_a_nan_of_weight_0_does_no_harm(comm):
    callback = known(comm, method="mean")
    for weight in (0, 1, 0):
        mine = weight if comm.rank == 0 else 0
        with callback.backward(weight=mine):
            futures = [callback(name, full(1 if mine else np.nan)) for name in NAMES]
        assert callback.total_weight == weight
        for future in futures:
            if weight:
                assert_all(future.result(), 1)
            else:
                with pytest.raises(gs.GradientCancelled):
                    future.result()


# -- GRADSYNC_DEBUG: everything is compared before --------------------------------------------------------------------


@pytest.mark.ranks(2, on=("fake",))
def test_debug_on_one_rank_only_is_refused(rank):
    if rank == 0:
        os.environ["GRADSYNC_DEBUG"] = "1"
    with pytest.raises(gs.InvalidArgument) as raised:
        gs.init_process_group("nccl")
    for word in ("GRADSYNC_DEBUG", f"rank {rank}/2", f"rank {1 - rank}"):
        assert word in str(raised.value)
    assert not gs.is_initialized()


@pytest.mark.ranks(2, 3, on=("debug",), environment=HANGS)
def test_with_debug_ranks_that_call_different_collectives_are_told_and_go_on(comm):
    callback = known(comm)
    array = full(1)
    attempts = [
        (lambda: comm.all_reduce(array), lambda: comm.all_reduce(array, "max")),
        (lambda: comm.all_reduce(array), lambda: step(callback)),
        (comm.barrier, lambda: comm.broadcast(array)),
        (lambda: comm.all_gather(array), lambda: comm.all_gather(array[1:])),
        (lambda: step(known(comm, name="other")), lambda: step(callback)),
    ]
    for attempt in attempts:
        with pytest.raises(gs.PlanMismatch) as raised:
            attempt[comm.rank == 0]()
        assert not raised.value.broken
        assert set(raised.value.descriptions) == set(range(comm.world_size))
        assert_all(array, 1)
        await_all(step(callback))


@pytest.mark.ranks(2, on=("debug",), environment=HANGS)
def test_with_debug_messages_that_do_not_fit_are_told_and_the_ranks_go_on(comm):
    for size, peer in ((3, 1 - comm.rank), (4, 1 - comm.rank)):
        for way in ("blocking", "asynchronous"):
            array = full(comm.rank, size if comm.rank == 0 else 3)
            if comm.rank == 0:
                call = comm.asynchronous.send if way == "asynchronous" else comm.send
            else:
                call = comm.asynchronous.recv if way == "asynchronous" else comm.recv

            def move(call=call, array=array):
                done = call(array, peer)
                return done.result() if way == "asynchronous" else done

            if size == 3:
                move()
                assert_all(array, 0)
            else:
                with pytest.raises(gs.PlanMismatch) as raised:
                    move()
                assert set(raised.value.descriptions) == {0, 1}
                assert_all(array, comm.rank)
    comm.barrier()
    assert_all(comm.all_reduce(full(comm.rank)), total(comm, 0))
