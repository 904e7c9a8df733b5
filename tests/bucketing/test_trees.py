"""Trees: average_gradients and broadcast_tree."""

from __future__ import annotations

import collections
import dataclasses
import gc
import os
import signal
import sys
import threading
import weakref
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import pytest

import gradsync as gs
from arrays import TOLERANCE, HostArrays, arrays_of, contribution
from bucketing.reference import outcome, wide


class Layer(NamedTuple):
    weight: Any
    bias: Any


@dataclasses.dataclass(frozen=True)
class Block:
    first: Any
    scale: Any = None


class Sampler:
    """An object that is no container."""

    def __init__(self, state):
        self.state = state


def tree_of(rank, arrays):
    """A rank's gradients: containers of all kinds, several dtypes, odd layouts; every second rank's dicts reversed."""
    put = lambda *spec: arrays.put(contribution(rank, *spec))  # noqa: E731
    tree = {
        "encoder": collections.OrderedDict(
            conv=arrays.put(np.asfortranarray(contribution(rank, (7, 9), "float32"))), bias=put((), "float64")
        ),
        "blocks": [Layer(put((400, 50), "float32"), put((50,), "float16")), Block(put((3,), "complex64"))],
        "strided": put((6, 6), "float32")[::2, ::3],
        "empty": ({}, put((0, 4), "float32"), None),
        7: put((5,), "bfloat16"),
    }
    return dict(reversed(tree.items())) if rank % 2 else tree


def leaves(value, path=()):
    """The values that are no containers, by path."""
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {path: value}
    return {key: leaf for name, child in value.items() for key, leaf in leaves(child, (*path, str(name))).items()}


# -- average_gradients -------------------------------------------------------------------------------------------------


@pytest.mark.ranks(on={"shm": (2, 3), "fake": (2,), "gpu": (2,)})
@pytest.mark.parametrize("op", ["mean", "SUM"])
def test_every_array_is_averaged_and_every_container_kept(comm, op):
    arrays = arrays_of(comm)
    for group in (None, comm):
        given = tree_of(comm.rank, arrays)
        before = leaves(given)
        got = gs.average_gradients(given, op=op, communicator=group)
        assert (type(got["encoder"]), list(got)) == (collections.OrderedDict, list(given))
        assert (type(got["blocks"][0]), type(got["blocks"][1])) == (Layer, Block)
        of_ranks = [leaves(tree_of(rank, HostArrays())) for rank in range(comm.world_size)]
        assert leaves(got).keys() == of_ranks[0].keys()
        for path, array in leaves(got).items():
            assert array is before[path]  # reduced in place
            if array is not None:
                on_host = arrays.get(array)
                wanted = sum(wide(values[path]) for values in of_ranks) / (comm.world_size if op == "mean" else 1)
                tolerance = 4 * comm.world_size * TOLERANCE[on_host.dtype.name]
                np.testing.assert_allclose(wide(on_host), wanted, rtol=tolerance)


@pytest.mark.ranks(2, 3)
def test_numbers_come_back_as_numbers_and_read_only_arrays_as_new_ones(comm):
    fixed = np.full(3, float(comm.rank))
    fixed.setflags(write=False)
    middle = (comm.world_size - 1) / 2
    got = gs.average_gradients({"a": fixed, "b": fixed, "c": np.float32(comm.rank), "d": float(comm.rank), "e": None})
    assert (fixed == comm.rank).all()
    assert got["a"].tolist() == got["b"].tolist() == [middle] * 3
    assert not np.shares_memory(got["a"], got["b"])
    assert (got["c"], type(got["c"]), got["d"], type(got["d"]), got["e"]) == (middle, np.float32, middle, float, None)
    assert gs.average_gradients(comm.rank, op="sum") == sum(range(comm.world_size))
    assert gs.average_gradients({"nothing": [None, ()]}) == {"nothing": [None, ()]}


@pytest.mark.ranks(on={"shm": (2, 3), "fake": (2,)})
def test_trees_that_differ_are_a_mismatch_and_nothing_is_written(comm):
    arrays = arrays_of(comm)
    put = lambda *shape: arrays.put(np.full(shape, float(comm.rank), np.float32))  # noqa: E731
    wrong = [
        {"w": put(3), "v": {"b": put(4)}},
        {"w": put(3), "v": {"b": arrays.put(np.zeros(2))}},
        {"w": put(3), "v": {"b": None}},
        {"w": put(3), "v": {"c": put(2)}},
        {"w": put(3)},
        {},
    ]
    for odd in wrong:
        weights = put(3)
        with pytest.raises(gs.PlanMismatch) as raised:
            gs.average_gradients(odd if comm.rank == 1 else {"w": weights, "v": {"b": put(2)}})
        assert raised.value.descriptions[0] != raised.value.descriptions[1]
        assert "v/b" in str(raised.value) or "v/c" in str(raised.value)
        assert (arrays.get(weights) == comm.rank).all()
    with pytest.raises(gs.PlanMismatch):
        gs.average_gradients([put(2)], op="sum" if comm.rank == 1 else "mean")
    assert (arrays.get(gs.average_gradients(put(2))) == (comm.world_size - 1) / 2).all()


@pytest.mark.ranks(2)
def test_what_is_no_tree_of_gradients_is_refused(comm):
    weights, inside, deep = np.zeros(8), [], []
    inside.append(inside)
    for _ in range(10_000):
        deep = [deep]
    sync = gs.AllreduceCallback()
    wrong = [
        (gs.InvalidArgument, {"a": {"b": "text"}}, {}),
        (gs.InvalidArgument, {"a": weights, "b": weights[4:]}, {}),
        (gs.InvalidArgument, {1: weights, "1": np.zeros(2)}, {}),
        (gs.InvalidArgument, inside, {}),
        (gs.InvalidArgument, deep, {}),
        (gs.InvalidArgument, [weights], {"op": "max"}),
        (gs.InvalidArgument, [weights], {"callback": "sum"}),
        (gs.InvalidArgument, [weights], {"callback": sync, "op": "sum"}),
        (gs.InvalidArgument, [weights], {"callback": sync, "communicator": comm}),
        (gs.UnsupportedDtype, {"a": [np.zeros(2, int)]}, {}),
        (gs.UnsupportedDtype, {"a": True}, {}),
    ]
    for error, tree, options in wrong:
        with pytest.raises(error):
            gs.average_gradients(tree, **options)
    assert gs.average_gradients({"a": weights})["a"] is weights


@pytest.mark.ranks(2, on=("shm", "fake"))
def test_a_callback_reduces_the_tree_with_its_options(comm):
    arrays = arrays_of(comm)
    sync = gs.AllreduceCallback("sum", clip_norm=5.0, threshold_bytes=64)
    for _ in range(3):
        tree = {"a": arrays.put(np.full(9, 1.0)), "b": [arrays.put(np.full(16, 1.0)), None]}
        got = gs.average_gradients(tree if comm.rank else dict(reversed(tree.items())), sync)
        assert sync.norm == pytest.approx(5.0 * comm.world_size)
        np.testing.assert_allclose(arrays.get(got["b"][0]), 1.0, rtol=1e-6)
        assert got["b"][1] is None
    assert sync.statistics.steps == 3


@pytest.mark.ranks(2)
def test_a_tree_larger_than_one_collective_of_dtypes_that_alternate(comm):
    tree = [np.full(2**20, float(comm.rank), ("float32", "float64")[i % 2]) for i in range(5)]
    assert all((array == 0.5).all() for array in gs.average_gradients(tree))


def test_one_rank_looks_at_nothing(alone):
    assert gs.average_gradients({"a": 2.0}, weight=3) == {"a": 2.0}
    assert gs.average_gradients({"a": 2.0}, weight=0) == {"a": None}
    tree = {"a": object()}
    assert gs.average_gradients(tree) is tree
    with pytest.raises(gs.InvalidArgument):
        gs.average_gradients(tree, gs.AllreduceCallback(group=alone))


@pytest.mark.ranks(on={"shm": (2, 3), "fake": (2,)})
@pytest.mark.parametrize("has_callback", [False, True])
def test_weights_and_what_a_rank_without_a_batch_hands_over(comm, has_callback):
    arrays, last = arrays_of(comm), comm.world_size - 1
    sync = gs.AllreduceCallback("mean") if has_callback else None

    def tree(value):
        fixed = np.full(3, value)
        fixed.setflags(write=False)
        return {"a": arrays.put(np.full(3, value)), "fixed": fixed, "n": [value]}

    total = sum(range(1, comm.world_size + 1))
    wanted = sum(rank * (rank + 1) for rank in range(comm.world_size)) / total
    got = gs.average_gradients(tree(float(comm.rank)), sync, weight=comm.rank + 1)
    np.testing.assert_allclose([*arrays.get(got["a"]), *got["fixed"], *got["n"]], wanted)
    got = gs.average_gradients(tree(np.nan if comm.rank < last else 7.0), sync, weight=float(comm.rank == last))
    assert [*arrays.get(got["a"]), *got["fixed"], *got["n"]] == [7.0] * 7
    got = gs.average_gradients(tree(np.nan), sync, weight=0)  # the end of all streams
    assert got == {"a": None, "fixed": None, "n": [None]}
    for wrong in (-1, np.inf, "1"):
        with pytest.raises(gs.InvalidArgument):
            gs.average_gradients(tree(1.0), weight=wrong)
    with pytest.raises(gs.InvalidArgument):
        gs.average_gradients(tree(1.0), op="sum", weight=1)
    with pytest.raises(gs.PlanMismatch):
        gs.average_gradients(tree(1.0), sync, weight=1 if comm.rank else None)
    assert gs.average_gradients(tree(1.0), sync)["n"] == [1.0]


@pytest.mark.ranks(2)
def test_trees_in_turns_of_any_order_and_shape(comm):
    """Each has a plan of its own, which is kept."""
    for size in (1, 1, 2):
        for tree in ({"a": np.full(size, 1.0), "b": np.full(2, 3.0)}, [np.full(size, 5.0)], {"c": {"a": 7.0}}):
            given = dict(reversed(tree.items())) if comm.rank and isinstance(tree, dict) else tree
            got = leaves(gs.average_gradients(given))
            assert {path: np.unique(value).item() for path, value in got.items()} == {
                path: np.unique(value).item() for path, value in leaves(tree).items()
            }


@pytest.mark.ranks(2, fresh=True)
def test_nothing_keeps_the_arrays_or_the_group(comm):
    with comm.split(0) as group:
        array = np.ones(1000)
        gs.average_gradients({"w": array}, communicator=group)
        gs.broadcast_tree({"w": array}, communicator=group)
    of_array, of_group = weakref.ref(array), weakref.ref(group)
    del array
    assert of_array() is None
    del group
    gc.collect()
    assert of_group() is None


def test_where_a_rank_has_no_gradient_it_gets_what_the_others_gave(run_on_ranks):
    def leave_one_out(comm):
        shapes = dict.fromkeys("ab", ((2,), "float64"))
        sync = gs.AllreduceCallback("mean", comm, parameters=shapes, missing="zero")
        return gs.average_gradients({"a": np.ones(2), "b": np.full(2, 4.0) if comm.rank else None}, sync)

    for got in run_on_ranks(2, leave_one_out):
        assert np.array_equal(got["b"], [2.0, 2.0])


def test_sums_of_integers_do_not_wrap(run_in_group):
    def add(comm):
        return gs.average_gradients({"n": 2**62}, op="sum", communicator=comm)["n"]

    with suppress(gs.InvalidArgument):  # or refused
        assert run_in_group(2, add) == [2**63] * 2


@pytest.mark.slow  # needs PyTorch
def test_a_tensor_whose_elements_share_memory_comes_back_as_a_tensor(run_on_ranks):
    torch = pytest.importorskip("torch")

    def average(comm):
        return type(gs.average_gradients({"g": torch.ones(1).expand(3)}, communicator=comm)["g"]).__name__

    assert run_on_ranks(2, average) == ["Tensor"] * 2


def test_reduce_dict_refuses_masked_numbers(run_on_ranks):
    def reduce(comm):
        """Rank 1 has no valid sample."""
        loss = np.ma.array([6.0, 6.0], mask=[comm.rank == 1] * 2).mean() if comm.rank else np.ma.array(6.0)
        return type(outcome(gs.comm.reduce_dict, {"loss": loss}))

    assert run_on_ranks(2, reduce) == [gs.InvalidArgument] * 2


# -- broadcast_tree ----------------------------------------------------------------------------------------------------


def state_of(rank, arrays):
    """Parameters, buffers and optimiser state of a rank."""
    block = Block(arrays.put(contribution(rank, (5,), "float64")), f"of {rank}")
    momenta = [arrays.put(contribution(rank, (400, 50), "float32")), None, (np.int64(rank),)]
    return {
        "parameters": collections.OrderedDict(
            conv=arrays.put(np.asfortranarray(contribution(rank, (7, 9), "float32"))),
            bias=arrays.put(contribution(rank, (), "float64")),
        ),
        "block": block,
        "layer": Layer(0.1 * rank, momenta),
        "strided": arrays.put(np.full((6, 6), float(rank)))[::2, ::3],
        "dates": np.full(2, rank).astype("datetime64[s]"),
        "empty": [{}, [], ()],
        (1, 2): {3: f"text of rank {rank}", None: b"bytes", "sampler": Sampler(rank)},
        "set": {rank},
        "maybe": None if rank else "something",
    }


def in_another_order(tree):
    return {key: in_another_order(tree[key]) if type(tree[key]) is dict else tree[key] for key in reversed(tree)}


def bits_of(tree, arrays):
    """A tree of which equality is equality of bits, types and order."""
    if dataclasses.is_dataclass(tree):
        return {field.name: bits_of(getattr(tree, field.name), arrays) for field in dataclasses.fields(tree)}
    if isinstance(tree, dict):
        return type(tree).__name__, [(key, bits_of(child, arrays)) for key, child in tree.items()]
    if isinstance(tree, (list, tuple)):
        return type(tree).__name__, [bits_of(child, arrays) for child in tree]
    if hasattr(tree, "shape") and not isinstance(tree, np.generic):
        return tree.shape, str(tree.dtype), arrays.get(tree).tobytes()
    return tree.state if isinstance(tree, Sampler) else (type(tree).__name__, tree)


@pytest.mark.ranks(on={"shm": (2, 3), "fake": (2,), "gpu": (2,)})
def test_all_ranks_get_the_roots_state(comm):
    arrays = arrays_of(comm)
    for root in range(comm.world_size):
        mine = state_of(comm.rank, arrays)
        given = mine if comm.rank == root else in_another_order(mine)
        got = gs.broadcast_tree(given, root)
        assert bits_of(got, arrays) == bits_of(state_of(root, arrays), arrays)
        assert got is not given
        assert got["parameters"]["conv"] is given["parameters"]["conv"]
        assert (given["layer"].weight, given["set"]) == (0.1 * comm.rank, {comm.rank})  # left as it was
        gs.average_gradients(arrays.put(np.zeros(1)))  # from the first step on it goes by copies
    weights = arrays.put(np.full(3, float(comm.rank)))
    assert gs.broadcast_tree(weights, communicator=comm) is weights
    assert (arrays.get(weights) == 0).all()
    assert gs.broadcast_tree(comm.rank, comm.world_size - 1) == comm.world_size - 1
    assert gs.broadcast_tree({}) == {}


@pytest.mark.ranks(on={"shm": (2, 3), "fake": (2,)})
def test_the_first_difference_of_a_tree_is_named_and_nothing_is_written(comm):
    arrays = arrays_of(comm)
    put = lambda *shape: arrays.put(np.full(shape, float(comm.rank), np.float32))  # noqa: E731

    def state(conv, momentum, **more):
        return {"optimizer": {"conv": conv, "others": momentum}, "step": comm.rank} | more

    odd = [
        (state(put(4), [put(2)]), "optimizer/conv"),
        (state(arrays.put(np.zeros(3)), [put(2)]), "optimizer/conv"),
        (state(None, [put(2)]), "optimizer/conv"),
        (state({"w": put(3)}, [put(2)]), "optimizer/conv"),
        (state(put(3), []), "optimizer/others/0"),
        (state(put(3), [put(2), put(1)]), "optimizer/others/1"),
        (state(put(3), (put(2),)), "optimizer/others"),
        (state(put(3), [put(2)], step=[1]), "step"),
        (state(put(3), [put(2)], more=1), "more"),
    ]
    for wrong, path in odd:
        weights = put(3)
        with pytest.raises(gs.PlanMismatch) as raised:
            gs.broadcast_tree(wrong if comm.rank == 1 else state(weights, [put(2)]))
        assert list(raised.value.descriptions) == [1]
        assert raised.value.descriptions[1].startswith(f"{path}: ")
        assert (arrays.get(weights) == comm.rank).all()
    with pytest.raises(gs.PlanMismatch):
        gs.broadcast_tree(put(2), comm.rank % 2)  # another root
    for wrong, root in (([lambda: 0], 0), ([], comm.world_size), ([], comm)):
        with pytest.raises(gs.InvalidArgument):
            gs.broadcast_tree(wrong, root)
    assert (arrays.get(gs.broadcast_tree(put(2), 1)) == 1).all()


@pytest.mark.ranks(on={"shm": (2,), "fake": (2,), "gpu": (2,)})
@pytest.mark.parametrize("number", [np.float32(1.5), np.complex128(1 - 2j), np.bool_(True), 7, 0.25, True])
def test_a_number_and_an_array_without_axes_fit_each_other(comm, number):
    """`momentum = 0.9 * momentum + g` makes a number of an array of shape (), which a new rank still has."""
    kept = np.zeros((), np.asarray(number).dtype)
    weights = np.full(3, float(comm.rank))
    given = {"a": number if comm.rank == 0 else kept, "w": weights, "z": comm.rank}
    for _ in range(2):
        got = gs.broadcast_tree(given)
        assert got["a"] == number
        assert comm.rank == 0 or got["a"] is kept
        assert (got["z"], weights.any()) == (0, False)
        gs.average_gradients(np.zeros(1))
    kept[...] = 0
    root = np.asarray(number)
    got = gs.broadcast_tree({"w": weights, "a": root if comm.rank == 0 else type(number)(0)})
    assert (got["a"].dtype, got["a"].shape, got["a"]) == (root.dtype, (), root)


@pytest.mark.ranks(2, on=("fake", "gpu"))
def test_a_number_does_not_fit_an_array_on_a_device(comm):
    """The rank would go on with an array of NumPy, which CuPy's do not add to."""
    array = arrays_of(comm).put(np.full((), 1.5))
    for tree in ([array], [1.5]) if comm.rank == 0 else ([1.5], [array]):
        with pytest.raises(gs.PlanMismatch):
            gs.broadcast_tree(tree)


@pytest.mark.ranks(2)
def test_a_number_does_not_fit_another_array(comm):
    read_only = np.zeros(())
    read_only.flags.writeable = False
    one = np.zeros(1)
    others = (np.float32, int, "datetime64[s]", ">f8")
    for array in (one, read_only, *[np.zeros((), dtype) for dtype in others]):
        for pair in ((1.5, array), (array, 1.5)):
            if array is read_only and pair[0] is array:  # the root's is only read
                continue
            with pytest.raises(gs.PlanMismatch) as raised:
                gs.broadcast_tree([pair[comm.rank]])
            assert list(raised.value.descriptions) == [1]
            assert not np.asarray(array).astype(float).any()
    with pytest.raises(gs.PlanMismatch):  # the root's number would also change the rows
        gs.broadcast_tree([1.5, one] if comm.rank == 0 else [one.reshape(()), one])
    with pytest.raises(gs.PlanMismatch):
        gs.broadcast_tree([1.5, 2.5] if comm.rank == 0 else [shared := np.zeros(()), shared])


class Unreadable:
    """Its pickle cannot be read on rank 1, and would end that process."""

    def __reduce__(self):
        return end_unless_first, ()


def end_unless_first():
    return "read" if os.environ["RANK"] == "0" else sys.exit("an extension is missing")


@pytest.mark.ranks(2)
def test_what_one_rank_cannot_read_is_a_mismatch_on_all(comm):
    weights = np.full(3, float(comm.rank))
    with pytest.raises(gs.PlanMismatch) as raised:
        gs.broadcast_tree({"w": weights, "s": Unreadable()})
    assert list(raised.value.descriptions) == [1]
    assert (weights == comm.rank).all()


@pytest.mark.ranks(2)
def test_a_tree_that_cannot_be_sent_is_refused_before_anything_is_sent(comm):
    weights = np.full(2, float(comm.rank))
    if comm.rank == 1:
        circle: list[Any] = [weights]
        circle.append({"again": circle})
        deep: Any = weights
        for _ in range(5000):
            deep = [deep]
        for tree in (circle, {float("nan"): weights}, deep, [np.ma.ones(2)]):
            with pytest.raises(gs.InvalidArgument):
                gs.broadcast_tree(tree)
        with pytest.raises(gs.UnsupportedDtype):
            gs.broadcast_tree([np.array([None])])
    gs.broadcast_tree([weights])
    assert not weights.any()


class Network:
    """A model as a program without a library has it; `layers` is where its arrays are."""

    def __init__(self, layers):
        self.layers, self.name = layers, "digits"


class Module(Network):
    def state_dict(self):
        return dict(enumerate(self.layers))


@pytest.mark.ranks(2)
def test_an_object_with_arrays_inside_is_refused_because_they_would_stay_as_they_are(comm):
    weights = np.full(2, float(comm.rank))
    for layers in ([weights], {"first": (Layer(weights, None),)}, [Network([Network(weights)])]):
        for tree, path in ((Network(layers), "the tree"), ({"step": 3, "nets": [Network(layers)]}, "nets/0")):
            with pytest.raises(gs.InvalidArgument, match=rf"{path} is an object \(Network\) .* its arrays, such as"):
                gs.broadcast_tree(tree)
    with pytest.raises(gs.InvalidArgument, match=r"pass its state_dict\(\)"):
        gs.broadcast_tree(Module([weights]))
    without = Network([1.5 + comm.rank, np.random.default_rng(comm.rank), np.random.RandomState(comm.rank), np, len])
    without.layers[3:] = [without, without.layers]  # pickle can send circles
    sent = gs.broadcast_tree({"net": without, "w": weights})
    assert (sent["net"].layers[0], sent["net"].layers[3]) == (1.5, sent["net"])
    assert not weights.any()


@pytest.mark.ranks(2)
def test_sparse_arrays_are_values_that_come_from_the_root(comm):
    sparse = pytest.importorskip("scipy.sparse")
    sent = gs.broadcast_tree({"graph": sparse.csr_array(np.eye(2) * (1 + comm.rank))})
    assert sent["graph"].diagonal().tolist() == [1.0, 1.0]


@pytest.mark.ranks(3, ends={0: -signal.SIGKILL})
@pytest.mark.parametrize("milliseconds", [15, 40, 80])
def test_a_root_that_dies_leaves_nobody_half_of_its_state(comm, milliseconds):
    """It sends 1, 2, 3 ..., until it is killed, most likely in the middle of its arrays."""
    state = [np.zeros(500_000) for _ in range(8)]
    gs.average_gradients(np.zeros(1))  # a step: there is a state
    if comm.rank == 0:
        threading.Timer(milliseconds / 1e3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    with pytest.raises(gs.RankFailed):
        while True:
            if comm.rank == 0:
                for array in state:
                    array += 1
            gs.broadcast_tree(state)
    assert len(set(np.concatenate(state))) == 1


@pytest.mark.ranks(2)
def test_two_values_for_one_memory_are_a_mismatch(comm):
    """Tied weights are one value; arrays that share memory otherwise on the root only are not."""
    first, second = (np.full(4, comm.rank + value) for value in (1.0, 2.0))
    base = np.arange(6.0) + 10 * comm.rank
    for tree in ([first, first], [base[:4], base[2:]], [base[::2], base[1::2]], [first.reshape(2, 2), first]):
        gs.broadcast_tree(tree)
    assert (first == 1).all()
    assert (base == np.arange(6.0)).all()
    gs.broadcast_tree([first, first] if comm.rank == 0 else [first, second])  # tied on the root only
    assert (second == (2 if comm.rank == 0 else 1)).all()
    second[:] = comm.rank
    for tree in ([second, second] if comm.rank else [first, second], [base[:4], base[1:5] if comm.rank else base[2:]]):
        with pytest.raises(gs.PlanMismatch) as raised:
            gs.broadcast_tree(tree)
        assert list(raised.value.descriptions) == [1]
    assert (second == comm.rank).all()


@pytest.mark.ranks(3)
def test_errors_of_a_group_name_ranks_of_the_world(comm):
    group = comm.new_group([0, 2])
    if group:
        with pytest.raises(gs.PlanMismatch, match="rank 2 .the root") as raised:
            gs.broadcast_tree(np.zeros(2 - group.rank), 1, group)
        assert list(raised.value.descriptions) == [0]
        with pytest.raises(gs.PlanMismatch) as raised:
            gs.check_consistency({"w": np.full(1, float(group.rank))}, group)
        assert sorted(raised.value.descriptions) == [0, 2]


# -- Pytrees of JAX ----------------------------------------------------------------------------------------------------


def trees_of_jax(comm):
    """What a program with classes of its own, registered with JAX, gets from both functions."""
    jax = pytest.importorskip("jax")

    class Model:
        def __init__(self, weight, activation):
            self.weight, self.activation = weight, activation

    def flattened(model):
        return ((jax.tree_util.GetAttrKey("weight"), model.weight),), model.activation

    jax.tree_util.register_pytree_with_keys(Model, flattened, lambda activation, rest: Model(*rest, activation))
    model = Model(jax.numpy.full(3, float(comm.rank)), lambda x: x)
    averaged = gs.average_gradients({"model": model, "none": None}, communicator=comm)["model"]
    assert isinstance(averaged.weight, jax.Array)
    assert averaged.activation is model.activation
    assert model.weight[0] == comm.rank
    sent = gs.broadcast_tree(Model(np.full(3, float(comm.rank)), model.activation), 1, comm)
    assert sent.activation is model.activation
    difference = outcome(gs.broadcast_tree, [sent if comm.rank else Model(np.ones(2), None)], 0, comm)
    key = gs.broadcast_tree({"key": jax.random.key(comm.rank)}, 1, comm)["key"]
    assert key == jax.random.key(1)
    return averaged.weight.tolist(), sent.weight.tolist(), str(difference).splitlines()[1]


@pytest.mark.slow  # needs JAX
def test_pytrees_that_are_registered_with_jax(run_on_ranks):
    pytest.importorskip("jax")
    wanted = [0.5] * 3, [1.0] * 3, "  rank 1: 0/weight: float64[3], but float64[2] on the root"
    assert run_on_ranks(2, trees_of_jax) == [wanted] * 2
