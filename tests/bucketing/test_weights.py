"""Weighted means: each rank counts as much as its batch, a rank without a batch not at all."""

from __future__ import annotations

import math

import numpy as np
import pytest

import gradsync as gs
from arrays import arrays_of, assert_close, dtype_of, in_layout, read_only
from bucketing.reference import SPECS, THRESHOLDS, by_rank, given, reduced

SHAPES = {"a": ((3,), "float64"), "b": ((2, 2), "float32")}


def weighted_step(sync, weight, gradients):
    """Runs one step; the futures' results."""
    with sync.backward(weight=weight):
        futures = {name: sync(name, gradient) for name, gradient in gradients.items()}
    return {name: future.result() for name, future in futures.items()}


@pytest.mark.ranks(2)
def test_the_exchange_of_weights_has_a_name_in_reports(comm):
    weighted_step(gs.AllreduceCallback("mean", comm), 1, {"a": np.ones(3)})
    assert any(entry.title.endswith(" (exchange of batch weights)") for entry in comm.recorder.entries())
    assert "backward(weight=) exchange of batch weights" in str(comm.recorder)


# -- The mean of the joined batch --------------------------------------------------------------------------------------


def slope_of(x, y, w):
    """The mean gradient of least squares over a batch; NaN over none."""
    with np.errstate(invalid="ignore"):
        return 2 * (x @ w - y) @ x / np.float64(len(x))


@pytest.mark.ranks(on={"shm": (1, 2, 3), "mpi": (2,)})
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"parameters": {"w": ((3,), "float64")}},
        {"parameters": {"w": ((3,), "float64")}, "gradient_as_bucket_view": True, "clip_norm": 4.0},
        {"clip_norm": 4.0, "nonfinite": "skip"},
        {"nonfinite": "raise"},
        {"hook": True, "clip_norm": 4.0},
    ],
    ids=repr,
)
def test_training_on_any_splits_is_that_of_one_process_with_the_joined_batches(comm, options):
    """Splits are random, and give some ranks nothing; the last ranks may have no sample in the first step."""
    rng, options = np.random.default_rng(3), dict(options)
    hook, limit = options.pop("hook", None), options.get("clip_norm", math.inf)
    sync = gs.AllreduceCallback("mean", comm, **options)
    if hook:
        sync.register_hook(lambda bucket: bucket.communicator.all_reduce(bucket.buffer, bucket.op))
    w, alone = np.zeros(3), np.zeros(3)
    for number in range(30):
        x = rng.normal(size=(int(rng.integers(1, 12)), 3))
        y = x @ [1.0, 2.0, 3.0] + rng.normal(size=len(x))
        bounds = np.sort(rng.integers(0, len(x) + 1, comm.world_size - 1))
        if number == 0 and "parameters" not in options:
            bounds = np.arange(1, comm.world_size) * len(x) // comm.world_size
        mine = slice(*[0, *bounds, len(x)][comm.rank : comm.rank + 2])
        weight, hands_over = len(x[mine]), rng.integers(0, 2, comm.world_size)
        with sync.backward(weight=weight):
            if weight or hands_over[comm.rank]:  # the gradient of an empty batch is NaN
                sync("w", slope_of(x[mine], y[mine], w))
        w -= 0.05 * sync.results()["w"]
        whole = slope_of(x, y, alone)
        norm = np.linalg.norm(whole)
        alone -= 0.05 * whole * min(1.0, limit / (norm + 1e-6))
        np.testing.assert_allclose(w, alone, rtol=1e-6)
        assert sync.total_weight == len(x)
        if math.isfinite(limit):
            assert sync.norm == pytest.approx(norm, rel=1e-6)


@pytest.mark.ranks(on={"shm": (1, 2, 3), "fake": (2,), "mpi": (3,)})
@pytest.mark.parametrize("threshold_bytes", THRESHOLDS)
@pytest.mark.parametrize("is_known", [True, False])
def test_every_kind_of_gradient_has_its_weighted_mean(comm, threshold_bytes, is_known):
    arrays, n = arrays_of(comm), comm.world_size
    options = {"parameters": SPECS} if is_known else {}
    sync = gs.AllreduceCallback("mean", comm, threshold_bytes=threshold_bytes, **options)
    for number, weights in enumerate([[1.0, 2.0, 3.0], [5, 0, 0.25], [1e-3, 1e3, 1.0], [0, 0, 1], [2, 2, 2]]):
        weights = weights[:n] if any(weights[:n]) else [1, 0, 0][:n]
        results = weighted_step(
            sync, weights[comm.rank], {name: arrays.put(each) for name, each in given(comm.rank, number).items()}
        )
        assert sync.total_weight == sum(weights)
        for name, wanted in reduced(by_rank(n, number), "mean", weights).items():
            assert_close(arrays.get(results[name]), wanted, SPECS[name][1], 2 * n)


@pytest.mark.ranks(1, 2, 3, on=("shm",))
def test_equal_weights_are_the_plain_mean_bit_for_bit(comm):
    """To a hook too."""
    arrays, seen = arrays_of(comm), []

    def hook(bucket):
        seen.append(bucket.op)
        comm.all_reduce(bucket.buffer, bucket.op)

    sync = gs.AllreduceCallback("mean", comm)
    for has_hook in (False, True):
        sync.register_hook(hook if has_hook else None)
        bits = []
        for weight in (None, 1, 0.3, 7e300):
            mine = {name: arrays.put(each) for name, each in given(comm.rank, 1).items()}
            results = weighted_step(sync, weight, mine)
            bits.append([arrays.get(result).tobytes() for result in results.values()])
            assert sync.total_weight == (None if weight is None else pytest.approx(weight * comm.world_size))
        assert all(each == bits[0] for each in bits)
    assert set(seen) == {"mean"}


@pytest.mark.ranks(2, on=("shm", "fake"))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("weights", [(1000.0, 3000.0), (1.7e308, 1e308), (5e-320, 1e-319), (2**40, 1)])
def test_no_weight_makes_a_mean_overflow(comm, dtype, weights):
    arrays, largest = arrays_of(comm), {"float16": 6.5e4, "bfloat16": 3e38, "float32": 3e38}[dtype]
    sync = gs.AllreduceCallback("mean", comm)
    result = weighted_step(sync, weights[comm.rank], {"a": arrays.put(np.full(3, largest, dtype_of(dtype)))})["a"]
    np.testing.assert_allclose(arrays.get(result).astype(float), largest, rtol=1e-2)


@pytest.mark.ranks(2, on=("shm", "fake"))
def test_a_hook_sees_weighted_values_and_a_sum(comm):
    seen, arrays = [], arrays_of(comm)

    def hook(bucket):
        seen.append((bucket.op, arrays.get(bucket.buffer).tolist()))
        comm.all_reduce(bucket.buffer, bucket.op)

    sync = gs.AllreduceCallback("mean", comm)
    sync.register_hook(hook)
    mine = {"a": arrays.put(np.full(2, 4.0)), "b": arrays.put(np.full(1, 8.0 * comm.rank))}
    results = weighted_step(sync, 1 + 2 * comm.rank, mine)
    assert seen == [("sum", [1.0, 1.0, 0.0] if comm.rank == 0 else [3.0, 3.0, 6.0])]
    assert (results["a"].tolist(), results["b"].tolist()) == ([4.0, 4.0], [6.0])


@pytest.mark.ranks(2)
def test_zeros_for_what_is_missing_carry_the_weight(comm):
    sync = gs.AllreduceCallback("mean", comm, parameters=SHAPES, missing="zero")
    with sync.backward(weight=1 + 2 * comm.rank):
        sync("a", np.full(3, 1.0 + comm.rank))
        if comm.rank:
            sync("b", np.full((2, 2), 4.0, "float32"))
    assert sync.results()["a"].tolist() == [1.75] * 3
    assert sync.results()["b"].tolist() == [[3.0] * 2] * 2


@pytest.mark.ranks(2)
def test_nan_of_a_rank_with_a_batch_is_told_and_of_one_without_is_not(comm):
    sync = gs.AllreduceCallback("mean", comm, nonfinite="raise", clip_norm=math.inf)
    for weight, bad in ((0, math.nan), (0, math.inf)):
        results = weighted_step(sync, 1 if comm.rank == 0 else weight, {"a": np.full(2, bad if comm.rank else 3.0)})
        assert results["a"].tolist() == [3.0] * 2
        assert sync.norm == pytest.approx(math.sqrt(18))
    with pytest.raises(gs.NonFiniteGradient):
        weighted_step(sync, 1 + comm.rank, {"a": np.full(2, math.nan if comm.rank else 3.0)})
    assert sync.total_weight is None  # as after any step that failed


# -- Ranks without a batch ---------------------------------------------------------------------------------------------


@pytest.mark.ranks(on={"shm": (1, 2, 3), "fake": (2,), "mpi": (2,)})
@pytest.mark.parametrize("hands_over", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"parameters": SHAPES},
        {"parameters": SHAPES, "missing": "zero"},
        {"parameters": SHAPES, "gradient_as_bucket_view": True},
        {"parameters": SHAPES, "threshold_bytes": 1, "clip_norm": 100.0},
    ],
    ids=["", "parameters", "zero", "views", "clip"],
)
def test_all_ranks_leave_an_uneven_loop_in_the_same_step(comm, options, hands_over):
    """Rank r has 3 + r batches; the mean is that of those that have one."""
    arrays, steps = arrays_of(comm), 0
    sync = gs.AllreduceCallback("mean", comm, **options)
    while True:
        has_batch = steps < 3 + comm.rank
        with sync.backward(weight=2.0 if has_batch else 0):
            for name, (shape, dtype) in SHAPES.items():
                if has_batch or hands_over:
                    sync(name, arrays.put(np.full(shape, comm.rank + 5.0 if has_batch else np.nan, dtype)))
        if sync.total_weight == 0:
            break
        present = [rank for rank in range(comm.world_size) if steps < 3 + rank]
        assert sync.total_weight == 2.0 * len(present)
        for name, result in sync.results().items():
            np.testing.assert_allclose(arrays.get(result), np.full(SHAPES[name][0], np.mean(present) + 5.0))
        assert list(sync.results()) == list(SHAPES)
        steps += 1
    assert steps == sync.statistics.steps == 3 + comm.world_size - 1


@pytest.mark.ranks(1, 2, on=("shm", "fake"))
@pytest.mark.parametrize("options", [{}, {"parameters": SHAPES}, {"parameters": SHAPES, "missing": "zero"}], ids=repr)
def test_where_all_weights_are_0_nothing_is_reduced(comm, options):
    """In the first step too: no rank knows a gradient. Nobody takes arrays for results; a CPU's are as they were."""
    arrays = arrays_of(comm)
    sync = gs.AllreduceCallback("mean", comm, clip_norm=1.0, nonfinite="raise", **options)
    for number in range(3):
        mine = arrays.put(np.array([np.nan, comm.rank, 7.0]))
        with sync.backward(weight=0):
            future = sync("a", mine) if number == 1 else None
        assert (sync.total_weight, sync.results(), sync.statistics.steps) == (0, {}, 0)
        assert (sync.norm, sync.skip_step) == (None, False)
        if future is not None:
            assert isinstance(future.exception(), gs.GradientCancelled)
            with pytest.raises(gs.GradientCancelled, match="total_weight"):
                future.result()
            if comm.device == "cpu":
                np.testing.assert_array_equal(mine, [np.nan, comm.rank, 7.0])
    whole = {name: arrays.put(np.ones(*spec)) for name, spec in SHAPES.items()}
    assert (arrays.get(weighted_step(sync, 3, whole)["a"]) <= 1).all()


@pytest.mark.ranks(2, on=("shm", "fake"))
@pytest.mark.parametrize("layout", ["C", "Fortran", "strided", "reversed", "read-only"])
def test_what_a_rank_without_a_batch_hands_over_is_ignored_however_it_lies(comm, layout):
    arrays, sync = arrays_of(comm), gs.AllreduceCallback("mean", comm)
    for number in range(2):
        values = np.full((4, 6), np.inf if comm.rank else 1.0 + number)
        mine = read_only(arrays.put(values)) if layout == "read-only" else in_layout(values, arrays, layout)
        result = weighted_step(sync, 0 if comm.rank else 4, {"a": mine})["a"]
        assert (arrays.get(result) == 1.0 + number).all()
        if layout == "read-only" and isinstance(mine, np.ndarray):
            assert (mine == values).all()


@pytest.mark.ranks(2, on=("shm", "fake", "mpi"))
def test_a_rank_that_knows_no_gradient_yet_needs_parameters(comm):
    """All ranks are told, no array has changed, and the step can be repeated."""
    arrays = arrays_of(comm)
    sync = gs.AllreduceCallback("mean", comm)
    mine = arrays.put(np.full(3, 5.0))
    for _ in range(2):
        with pytest.raises(gs.PlanMismatch, match=r"rank 1 handed over nothing.*parameters=") as raised:
            weighted_step(sync, 1 - comm.rank, {} if comm.rank else {"a": mine})
        assert set(raised.value.descriptions) == {0, 1}
        assert (arrays.get(mine) == 5.0).all()
    assert (arrays.get(weighted_step(sync, 1 - comm.rank, {"a": mine})["a"]) == 5.0).all()
    weighted_step(sync, 1 - comm.rank, {} if comm.rank else {"a": mine})  # now it knows
    assert (arrays.get(sync.results()["a"]) == 5.0).all()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("missing", ["error", "zero"])
def test_a_rank_with_a_batch_that_lacks_a_gradient_is_as_without_weights(comm, missing):
    sync = gs.AllreduceCallback("mean", comm, parameters=SHAPES, missing=missing)
    gradients = {"a": np.full(3, 2.0)}
    if missing == "zero":
        weighted_step(sync, 1 - comm.rank, {} if comm.rank else gradients)
        assert {name: each.tolist() for name, each in sync.results().items()} == {"a": [2.0] * 3, "b": [[0.0] * 2] * 2}
        return
    with pytest.raises(gs.PlanMismatch):
        weighted_step(sync, 1 - comm.rank, {} if comm.rank else gradients)
    with pytest.raises(gs.MissingGradient):
        weighted_step(sync, 1 + comm.rank, gradients)
    assert gradients["a"].tolist() == [2.0] * 3


@pytest.mark.ranks(2)
def test_a_step_that_differs_from_the_last_is_a_mismatch_to_a_rank_that_hands_over_nothing(comm):
    sync = gs.AllreduceCallback("mean", comm)
    weighted_step(sync, 1, {"a": np.ones(3)})
    with pytest.raises(gs.PlanMismatch):
        weighted_step(sync, 1 - comm.rank, {} if comm.rank else {"a": np.ones(3), "b": np.ones(2)})


# -- Weights that are refused ------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, on=("shm", "fake", "mpi"))
@pytest.mark.parametrize("options", [{}, {"parameters": {"a": ((3,), "float64")}}], ids=repr)
def test_a_weight_on_one_rank_is_a_mismatch_that_changes_nothing(comm, options):
    arrays = arrays_of(comm)
    sync = gs.AllreduceCallback("mean", comm, **options)
    mine = arrays.put(np.full(3, 1.0 + comm.rank))
    for weight in (1.0, 0, 3):
        with pytest.raises(gs.PlanMismatch, match="rank 0 passed no weight"):
            weighted_step(sync, weight if comm.rank else None, {"a": mine})
        if comm.backend != "nccl":
            assert (arrays.get(mine) == 1.0 + comm.rank).all()
        assert sync.total_weight is None
    mine = arrays.put(np.full(3, 1.0 + comm.rank))
    assert (arrays.get(weighted_step(sync, 1 + 2 * comm.rank, {"a": mine})["a"]) == 1.75).all()


@pytest.mark.parametrize(
    "weight", [-1.0, math.inf, math.nan, "4", True, 1j, 10**400, np.ones(1), [2]], ids=lambda weight: repr(weight)[:8]
)
def test_a_weight_is_a_finite_number(alone, weight):
    sync = gs.AllreduceCallback("mean", alone)
    with pytest.raises(gs.InvalidArgument, match="weight"), sync.backward(weight=weight):
        raise AssertionError
    sync("w", np.ones(2))
    with pytest.raises(gs.InvalidArgument, match="weight"):
        sync.flush(weight=weight)
    sync.flush()
    assert sync.total_weight is None


@pytest.mark.parametrize("weight", [3, 2.5, np.int64(4), np.float32(0.5), np.uint8(1)])
def test_a_weight_is_any_number(alone, weight):
    sync = gs.AllreduceCallback("mean", alone)
    assert weighted_step(sync, weight, {"a": np.full(2, 3.0)})["a"].tolist() == [3.0] * 2
    assert (sync.total_weight, type(sync.total_weight)) == (float(weight), float)
    sync("a", np.ones(2))
    sync.flush()
    assert sync.total_weight is None


def test_weights_are_for_means(alone):
    sync = gs.AllreduceCallback("sum", alone)
    with pytest.raises(gs.InvalidArgument, match="mean"), sync.backward(weight=1):
        raise AssertionError
    with pytest.raises(gs.InvalidArgument, match="mean"):
        sync.flush(weight=1)


@pytest.mark.ranks(2)
def test_a_weight_may_come_at_the_flush_unless_buckets_may_go_before(comm):
    sync = gs.AllreduceCallback("mean", comm)
    for number in range(2):  # as many samples as the pass has seen
        with sync.backward():
            mine = sync("a", np.full(2, 1.0 + comm.rank))
            sync.flush(weight=1 + 2 * comm.rank)
        assert (mine.result().tolist(), sync.total_weight, sync.statistics.steps) == ([1.75] * 2, 4.0, number + 1)
    sync = gs.AllreduceCallback("mean", comm, name="known", parameters=SHAPES)
    with pytest.raises(gs.InvalidArgument, match="backward"):
        sync.flush(weight=1)


@pytest.mark.ranks(2)
def test_a_weight_is_that_of_the_whole_block_and_no_longer(comm):
    """A block may have several steps: none of them is a plain mean in silence."""
    sync = gs.AllreduceCallback("mean", comm)
    with sync.backward(weight=1 + 2 * comm.rank):
        for _ in range(2):
            future = sync("a", np.full(2, 1.0 + comm.rank))
            sync.flush()
            assert (future.result().tolist(), sync.total_weight) == ([1.75] * 2, 4.0)
        future = sync("a", np.full(2, 1.0 + comm.rank))
    assert (future.result().tolist(), sync.total_weight) == ([1.75] * 2, 4.0)
    future = sync("a", np.full(2, 1.0 + comm.rank))
    sync.flush()
    assert (future.result().tolist(), sync.total_weight) == ([1.5] * 2, None)


def test_what_was_handed_over_before_a_block_gets_no_weight(alone):
    sync = gs.AllreduceCallback("mean", alone)
    sync("a", np.ones(2))
    with pytest.raises(gs.InvalidArgument, match="hand"), sync.backward(weight=1):
        raise AssertionError
    with sync.backward():
        sync("b", np.ones(2))
    assert list(sync.results()) == ["a", "b"]


def test_a_weight_without_a_block_is_told(alone):
    sync = gs.AllreduceCallback("mean", alone)
    sync.backward(weight=5)
    sync("w", np.ones(2))
    with pytest.raises(gs.InvalidArgument, match=r"backward\(weight=5\) was called without `with`"):
        sync.flush()
    sync.flush()  # told once; the step has ended without a weight
    assert sync.total_weight is None


def test_a_weight_of_a_block_that_fails_is_forgotten(alone):
    sync = gs.AllreduceCallback("mean", alone)
    with pytest.raises(KeyError), sync.backward(weight=2):
        sync("a", np.ones(2))
        raise KeyError
    sync("a", np.ones(2))
    sync.flush()
    assert sync.total_weight is None


def test_a_callback_takes_up_its_communicator_with_the_weight():
    """The first step of a callback that was made before the process group, and one of the next group."""
    sync = gs.AllreduceCallback("mean")
    for number in range(2):
        with gs.init_process_group("local"):
            with sync.backward(weight=number):
                sync("a", np.ones(2))
            assert sync.total_weight == number


@pytest.mark.ranks(2, on=("shm", "fake"))
def test_average_gradients_takes_a_weight(comm):
    put = arrays_of(comm).put
    sync = gs.AllreduceCallback("mean", comm)
    for with_callback in (False, True):
        options = {"callback": sync} if with_callback else {"communicator": comm}
        for weights, wanted in (((1, 2), 5 / 3), ((0, 3), 2.0), ((4, 4), 1.5)):
            tree = {"w": put(np.full(2, 1.0 + comm.rank)), "b": [put(np.full(1, 1.0 + comm.rank))]}
            tree = gs.average_gradients(tree, weight=weights[comm.rank], **options)
            assert arrays_of(comm).get(tree["w"]) == pytest.approx([wanted] * 2)
            assert arrays_of(comm).get(tree["b"][0]) == pytest.approx([wanted])
