"""check_consistency, and the same comparison by callbacks: before the first two steps, and every so many."""

from __future__ import annotations

import struct

import numpy as np
import pytest

import gradsync as gs
from arrays import arrays_of, contribution
from bucketing.reference import Heard, step


def arrays_to_compare():
    """Of every kind; Fortran order and strides are no difference in values."""
    return {
        "scalar": np.asarray(1.5),
        "empty": np.zeros((0, 3), np.float32),
        "matrix": contribution(0, (50, 70), "float32"),
        "brain": contribution(0, (9,), "bfloat16"),
        "flags": contribution(0, (9,), "bool"),
        "nan": np.array([np.nan, -0.0]),
    }


@pytest.mark.ranks(on={"shm": (3,), "fake": (2,), "gpu": (2,)})
def test_equal_arrays_pass_in_every_form(comm):
    arrays = arrays_of(comm)
    mine = {name: arrays.put(array) for name, array in arrays_to_compare().items()}
    if comm.rank == 1:
        mine = dict(reversed(mine.items()))
        mine["matrix"] = arrays.put(np.asfortranarray(arrays_to_compare()["matrix"]))
    gs.check_consistency(mine)
    gs.check_consistency(mine.items())
    gs.check_consistency(list(mine.items()), communicator=comm)
    gs.check_consistency([arrays.put(array) for array in arrays_to_compare().values()])
    gs.check_consistency([])
    gs.check_consistency({"dates": np.zeros(3, "M8[s]"), "strided": np.arange(20.0).reshape(4, 5)[::2, ::2]})


def flipped():
    array = arrays_to_compare()["matrix"]
    array.view(np.uint32)[-1, -1] ^= 1
    return array


OTHER_NAN = np.array([struct.unpack("d", struct.pack("Q", 0x7FF8000000000001))[0], -0.0])
#: What rank 1 has instead, and the first name that differs.
DIFFERENCES = [
    ({"matrix": flipped()}, "matrix"),
    ({"nan": np.array([np.nan, 0.0])}, "nan"),
    ({"nan": OTHER_NAN}, "nan"),
    ({"scalar": np.asarray([1.5])}, "scalar"),
    ({"empty": np.zeros((0, 4), np.float32)}, "empty"),
    ({"matrix": arrays_to_compare()["matrix"].view(np.int32)}, "matrix"),
    ({"matrix": flipped(), "flags": np.zeros(3, bool)}, "matrix"),
    ({"more": np.ones(2)}, "more"),
]


def changes():
    """Pairs of arrays of one shape and dtype that differ little."""
    ones, many = np.ones(40_000), np.arange(40_000.0)  # three pieces of a digest
    for at in (0, 1, 16_383, 16_384, 39_998):
        for signs in ((at,), (at, at + 1), (at, (at + 16_384) % 40_000)):
            other = ones.copy()
            other[list(signs)] *= -1
            yield ones, other
        yield many, np.roll(many, at + 1)
        other = many.copy()
        other[[at, (at + 16_384) % 40_000]] = other[[(at + 16_384) % 40_000, at]]
        yield many, other
    for size in range(1, 20):
        for at in range(size):
            yield np.zeros(size, np.uint8), (np.arange(size) == at).astype(np.uint8)


@pytest.mark.ranks(2)
def test_no_small_change_has_the_same_digest(comm):
    pairs = list(changes())
    with pytest.raises(gs.PlanMismatch, match=f"; {len(pairs)} of {len(pairs)} arrays differ"):
        gs.check_consistency([pair[comm.rank] for pair in pairs])


@pytest.mark.ranks(on={"shm": (2, 3), "fake": (2,), "gpu": (2,)})
def test_the_first_array_that_differs_is_named_on_every_rank(comm):
    arrays = arrays_of(comm)
    for changed, name in DIFFERENCES:
        mine = arrays_to_compare() | (changed if comm.rank == 1 else {})
        with pytest.raises(gs.PlanMismatch, match=f"'{name}'") as raised:
            gs.check_consistency({name: arrays.put(array) for name, array in mine.items()})
        descriptions = raised.value.descriptions
        assert sorted(descriptions) == list(range(comm.world_size))
        assert [rank for rank in descriptions if descriptions[rank] != descriptions[0]] == [1]
        assert len(set(comm.objects.all_gather(str(raised.value).partition(":")[2]))) == 1
    with pytest.raises(gs.PlanMismatch, match="'#1'"):
        gs.check_consistency([arrays.put(np.ones(3))] * (comm.rank + 1))
    gs.check_consistency({name: arrays.put(array) for name, array in arrays_to_compare().items()})


@pytest.mark.parametrize(
    "wrong",
    [np.ones(3), np.ones((3, 2)), 3, None, "w", {"w": 1.0}, {"w": 1}, [("1", np.ones(1)), (1, np.ones(1))]],
    ids=repr,
)
def test_what_cannot_be_compared_is_refused(alone, wrong):
    with pytest.raises(gs.InvalidArgument):
        gs.check_consistency(wrong, alone)
    with pytest.raises(gs.UnsupportedDtype):
        gs.check_consistency({"o": np.array([None])}, alone)


# -- Before the first step ---------------------------------------------------------------------------------------------


def warnings_of(comm, parameters, arrays, **options):
    """The warnings of two steps with these parameters."""
    with Heard() as lines:
        sync = gs.AllreduceCallback("sum", comm, parameters=parameters, threshold_bytes=8, **options)
        named = parameters if isinstance(parameters, dict) else dict(enumerate(parameters))
        for _ in range(2):
            with sync.backward():
                for name, of in named.items():
                    shape = of.shape if hasattr(of, "shape") else of[0]
                    sync(name if named is parameters else of, arrays.put(np.ones(shape)))
            sync.results()
    return lines


@pytest.mark.ranks(on={"shm": (2, 3), "fake": (2,), "mpi": (2,)})
def test_parameters_that_differ_before_the_first_step_are_named_once_on_rank_0(comm):
    arrays, last = arrays_of(comm), comm.rank == comm.world_size - 1
    weights = {
        "same": arrays.put(np.arange(3.0)),
        "empty": arrays.put(np.zeros((0, 2))),
        "nan": arrays.put(np.array([np.nan, -0.0])),
        "w": arrays.put(np.full(4, float(last))),
        "zero": arrays.put(np.array([-0.0 if last else 0.0])),
    }
    for parameters, name in ((weights, "'w'"), (list(weights.values()), "#3")):
        lines = warnings_of(comm, parameters, arrays)
        assert len(lines) == (comm.rank == 0)
        assert all(f"{name}: rank {comm.world_size - 1} " in line and "bcast_list_" in line for line in lines)
    comm.barrier()
    gs.bcast_list_(list(weights.values()))
    assert warnings_of(comm, weights, arrays) == []


@pytest.mark.ranks(2)
def test_an_update_inside_the_block_is_named_as_the_cause_and_of_a_part_as_a_possible_one(comm):
    for updated, cause in (
        ("wb", "they were changed inside the block, before"),
        ("w", "changed inside the block[?] Update"),
    ):
        parameters = {"w": np.zeros(3), "b": np.zeros(2)}
        sync = gs.AllreduceCallback("mean", name=updated, parameters=parameters, diverged="raise")
        with pytest.raises(gs.PlanMismatch, match=cause):  # noqa: SIM117
            with sync.backward():
                for name, parameter in parameters.items():
                    sync(name, np.full(parameter.shape, comm.rank + 1.0))
                for name in updated:
                    parameters[name] -= comm.rank + 1.0  # still this rank's own


@pytest.mark.ranks(2)
def test_what_cannot_be_known_is_not_warned_of(comm):
    arrays = arrays_of(comm)
    comm.broadcast(arrays.put(np.zeros(1)))  # else there is another notice, see test_notices.py
    mine = {"w": np.full(4, float(comm.rank)), "b": np.full(2, float(comm.rank))}
    shapes = {name: (array.shape, array.dtype) for name, array in mine.items()}
    read_only = {name: array.copy() for name, array in mine.items()}
    for array in read_only.values():
        array.setflags(write=False)
    # Shapes on one rank, or on all; arrays that the program cannot have broadcast in place.
    for parameters in (shapes if comm.rank else mine, shapes, read_only):
        assert warnings_of(comm, parameters, arrays) == []
    with Heard() as lines:  # gradients, which differ: they are no parameters
        step(gs.AllreduceCallback("sum", comm, parameters=mine), mine)
    assert lines == []


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_view", [False, True])
def test_a_rank_without_gradients_compares_too(comm, is_view):
    weights = {"w": np.full(4, float(comm.rank)), "b": np.zeros(2)}
    options = {"missing": "zero", "gradient_as_bucket_view": is_view}
    with Heard() as lines:
        step(gs.AllreduceCallback("sum", comm, parameters=weights, **options), {"b": np.ones(2)} if comm.rank else {})
    assert len(lines) == (comm.rank == 0)
    assert all("'w'" in line for line in lines)


# -- Every so many steps -----------------------------------------------------------------------------------------------


def train(sync, weights, steps, begin=0, change=lambda number: None):
    """Makes steps that change all weights alike; `change` is called before each, with its number."""
    for number in range(begin, begin + steps):
        change(number)
        step(sync, {name: np.ones_like(w) for name, w in weights.items()})
        for w in weights.values():
            w -= 0.1


def diverge(comm, at, steps=6, **options):
    """Rank 1 changes "b" before step number `at`; the warnings."""
    weights = {"w": np.zeros(2), "b": np.zeros(2)}
    sync = gs.AllreduceCallback("mean", comm, parameters=weights, check_every=2, **options)

    def change(number):
        weights["b"] += (comm.rank == 1) * (number == at)

    with Heard() as lines:
        train(sync, weights, steps, change=change)
    return lines


@pytest.mark.ranks(2, 3)
def test_parameters_that_have_diverged_are_named_with_the_last_step_in_which_they_were_equal(comm):
    for at in (3, 4):  # the ranks compare before steps 0, 2 and 4
        lines = diverge(comm, at)
        assert len(lines) == (comm.rank == 0)
        for line in lines:
            assert "'b': rank 1 " in line
            assert "equal before step 3" in line
            assert "differ before step 5" in line
    assert diverge(comm, 5) == []
    assert len(diverge(comm, 1, steps=9)) == (comm.rank == 0)  # once
    group = comm.split(0, key=-comm.rank)
    lines = diverge(group, 1)  # rank 1 of the group is named by its rank in the world
    assert len(lines) == (group.rank == 0)
    assert all(f"rank {group.ranks[1]} has other" in line for line in lines)


@pytest.mark.ranks(on={"shm": (2, 3), "mpi": (2,)})
def test_divergence_can_be_an_error_of_all_ranks(comm):
    """No gradient has changed, and after a broadcast the step can be repeated."""
    weights = {"w": np.zeros(2), "b": np.zeros(2)}
    sync = gs.AllreduceCallback("mean", comm, parameters=weights, check_every=3, diverged="raise", clip_norm=10.0)
    train(sync, weights, 3)
    weights["b"] += comm.rank
    gradients = {name: np.full(2, float(comm.rank)) for name in weights}
    for _ in range(2):
        with pytest.raises(gs.PlanMismatch, match="'b'.* 1 of 2 arrays") as raised:
            step(sync, gradients)
        assert sorted(raised.value.descriptions) == list(comm.ranks)
        assert [gradient.tolist() for gradient in gradients.values()] == [[comm.rank] * 2] * 2
    gs.bcast_list_(list(weights.values()))
    mean = (comm.world_size - 1) / 2
    assert [result.tolist() for result in step(sync, gradients).values()] == [[mean] * 2] * 2
    weights["b"] += comm.rank
    train(sync, weights, 2)
    with pytest.raises(gs.PlanMismatch, match="equal before step 4"):
        train(sync, weights, 1)


@pytest.mark.ranks(2)
def test_a_difference_that_has_been_mended_is_told_again_if_it_comes_back(comm):
    weights = {"w": np.full(2, float(comm.rank))}
    sync = gs.AllreduceCallback("mean", comm, parameters=weights, check_every=1)
    counts = []
    for mends in (False, False, True, False):
        with Heard() as lines:
            if mends:
                gs.bcast_list_(list(weights.values()))
            else:
                weights["w"] += comm.rank
            train(sync, weights, 1)
        counts.append(len(lines))
    assert counts == ([1, 0, 0, 1] if comm.rank == 0 else [0] * 4)


@pytest.mark.ranks(2)
def test_arrays_that_name_gradients_are_compared_too(comm):
    w, b = np.zeros(2), np.ones(3)
    sync = gs.AllreduceCallback("mean", comm, check_every=2)
    with Heard() as lines:
        for number in range(4):
            with sync.backward():
                futures = [sync(each, np.ones_like(each)) for each in ((w, b) if comm.rank else (b, w))]
            for each in (w, b):
                each -= 0.1
            w += comm.rank * (number == 1)
        assert all(future.done() for future in futures)
    assert len(lines) == (comm.rank == 0)
    assert all("float64[2]" in line and "1 of 2 arrays" in line for line in lines)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("form", ["list", "mapping"])
@pytest.mark.parametrize("diverged", ["warn", "raise"])
def test_parameters_in_another_order_are_a_mismatch(comm, form, diverged):
    """Their gradients would be mixed. Biases of zeros cannot be told apart, and change nothing."""
    values = [np.full(3, 1.0), np.full(3, 2.0), np.zeros(3), np.zeros(3), np.full(2, 1.0)]
    if comm.rank == comm.world_size - 1:
        values[:2] = values[1::-1]
    parameters = values if form == "list" else dict(zip("abcde", values, strict=True))
    sync = gs.AllreduceCallback("mean", comm, parameters=parameters, diverged=diverged, name="one")
    gradients = {id(each): np.full(each.shape, float(comm.rank)) for each in values}
    with pytest.raises(gs.PlanMismatch, match="other order"), sync.backward():
        for name, each in zip("abcde", values, strict=True):
            sync(name if form == "mapping" else each, gradients[id(each)])
    assert all((gradient == comm.rank).all() for gradient in gradients.values())


@pytest.mark.ranks(2)
def test_ranks_that_have_some_values_in_common_have_diverged(comm):
    """Zeros here and there are no order."""
    weights = {"a": np.full(3, 1.0 + comm.rank), "b": np.full(3, 2.0), "c": np.full(3, 1.0 * comm.rank)}
    sync = gs.AllreduceCallback("mean", comm, parameters=weights)
    with Heard() as lines:
        train(sync, weights, 1)
    assert len(lines) == (comm.rank == 0)
    assert all("'a'" in line and "2 of 3" in line for line in lines)


@pytest.mark.ranks(2)
def test_arrays_that_never_change_are_told_of_once(comm):
    weights = {"w": np.zeros(2), "b": np.zeros(2)}
    options = {"parameters": weights, "check_every": 2}
    with Heard() as lines:  # w = w - lr * g: the arrays that the callback has stay as they are
        sync = gs.AllreduceCallback("mean", comm, **options)
        for _ in range(8):
            step(sync, {name: np.ones(2) for name in weights})
    assert len(lines) == (comm.rank == 0)
    assert all("w -= lr * g" in line and "2 steps" in line for line in lines)
    rebound = dict(weights)
    frozen = {"w": np.zeros(2), "b": np.zeros(2)}
    with Heard() as lines:
        sync = gs.AllreduceCallback("mean", comm, parameters=rebound, check_every=2)  # the dict has the new arrays
        for _ in range(6):
            rebound |= {name: rebound[name] - 0.1 * result for name, result in step(sync, weights).items()}
            weights = {name: np.ones(2) for name in rebound}
        sync = gs.AllreduceCallback("mean", comm, parameters=frozen, check_every=2)  # one of them is frozen
        for _ in range(6):
            frozen["w"] -= step(sync, {name: np.ones(2) for name in frozen})["w"]
        sync = gs.AllreduceCallback("mean", comm, nonfinite="skip", **options)  # no step is used
        for _ in range(6):
            step(sync, {name: np.full(2, np.inf) for name in weights})
        sync = gs.AllreduceCallback("mean", comm, **options)  # no rank has a batch
        for _ in range(6):
            with sync.backward(weight=0):
                pass
    assert lines == []


@pytest.mark.ranks(2)
def test_a_rank_without_a_batch_compares_too(comm):
    weights = {"w": np.zeros(2)}
    sync = gs.AllreduceCallback("mean", comm, parameters=weights, check_every=1)
    with Heard() as lines:
        for number in range(3):
            with sync.backward(weight=float(number % 2 == comm.rank)):
                if number % 2 == comm.rank:
                    sync("w", np.ones(2))
            weights["w"] -= 0.1 * sync.results()["w"] + comm.rank * (number == 1)
    assert len(lines) == (comm.rank == 0)


@pytest.mark.ranks(2)
def test_the_first_step_that_has_a_batch_compares(comm):
    weights = {"w": np.full(2, float(comm.rank))}
    sync = gs.AllreduceCallback("mean", comm, check_every=50)
    with Heard() as lines:
        for weight in (0, 1):
            with sync.backward(weight=weight):
                if weight:
                    sync("w", np.ones(2))
            sync.results()
        sync = gs.AllreduceCallback("mean", comm, parameters=weights, check_every=50, name="known")
        for weight in (0, 1):
            with sync.backward(weight=weight):
                sync("w", np.ones(2))
            sync.results()
    assert [line for line in lines if "nobody knows" not in line] == [line for line in lines if "'w'" in line]
    assert len([line for line in lines if "'w'" in line]) == (comm.rank == 0)


@pytest.mark.ranks(2, fresh=True)
def test_the_notice_of_no_broadcast_names_the_group(comm):
    group = comm.split(0)
    sync = gs.AllreduceCallback("mean", group)
    with Heard() as lines, sync.backward():
        sync("w", np.ones(2))
    assert ["gs.bcast_list_(arrays, group=comm)" in line for line in lines] == [True] * (comm.rank == 0)
    sync.results()


@pytest.mark.ranks(2)
def test_arrays_that_only_one_rank_cannot_compare_are_not_compared(comm):
    w, b = np.zeros(2), np.ones(3)
    w.setflags(write=bool(comm.rank))
    sync = gs.AllreduceCallback("mean", comm)
    with Heard() as lines:
        with sync.backward():
            sync(w, np.ones(2))
            sync(b, b if comm.rank else np.ones(3))  # of rank 1, nothing is known
        sync.results()
    assert [line for line in lines if "nobody knows" not in line] == []


@pytest.mark.ranks(2)
def test_ranks_that_differ_in_these_options_are_told(comm):
    for options in ({"check_every": 1 + comm.rank}, {"diverged": ("warn", "raise")[comm.rank]}):
        sync = gs.AllreduceCallback("mean", comm, name="one", parameters={"w": np.zeros(2)}, **options)
        with pytest.raises(gs.PlanMismatch, match="options differ"):
            step(sync, {"w": np.ones(2)})


@pytest.mark.parametrize("options", [{"check_every": -1}, {"check_every": 1.5}, {"diverged": "error"}], ids=repr)
def test_options_of_the_comparison_are_checked(alone, options):
    with pytest.raises(gs.InvalidArgument, match=next(iter(options))):
        gs.AllreduceCallback("mean", alone, **options)


@pytest.mark.ranks(on={"fake": (2,), "cupy": (2,), "gpu": (2,)})
def test_parameters_on_a_gpu_are_compared_before_buckets_go(comm):
    """Each rank hands over in another order, so that buckets are complete at other times."""
    arrays = arrays_of(comm)
    weights = {name: arrays.put(np.full(3, float(at))) for at, name in enumerate("abcd")}
    sync = gs.AllreduceCallback("mean", comm, parameters=weights, check_every=2, threshold_bytes=24)
    with Heard() as lines:
        for number in range(5):
            names = list(weights) if comm.rank else list(weights)[::-1]
            results = step(sync, {name: arrays.put(np.full(3, float(comm.rank))) for name in names})
            for name, w in weights.items():
                w -= results[name]
            weights["c"] += comm.rank * (number == 2)
    assert len(lines) == (comm.rank == 0)
    assert all("'c'" in line and "equal before step 3" in line for line in lines)


@pytest.mark.ranks(2, on=("shm",))
def test_a_state_that_nobody_broadcast_shows_before_the_second_step(comm):
    weights, momentum = np.zeros(3), np.full(3, comm.rank)
    sync = gs.AllreduceCallback(parameters={"w": weights}, diverged="raise", name="second step")
    step(sync, {"w": np.ones(3)})
    weights -= momentum
    with pytest.raises(gs.PlanMismatch, match="equal before step 1, and they differ before step 2"):
        step(sync, {"w": np.ones(3)})
