"""What average_gradients must do on every backend; run inside ranks."""

from __future__ import annotations

import collections
import dataclasses
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import gradsync as gs
from contract import contribution, expect
from kits import make_kit


class Layer(NamedTuple):
    weight: Any
    bias: Any


@dataclasses.dataclass(frozen=True)
class Block:
    first: Any
    scale: Any = None


def tree_of(rank: int, kit: Any) -> dict[Any, Any]:
    """A rank's gradients: containers of all kinds, several dtypes, odd layouts; every second rank's dicts reversed."""
    put = lambda *arguments: kit.put(contribution(rank, *arguments))  # noqa: E731
    tree = {
        "encoder": collections.OrderedDict(
            conv=kit.put(np.asfortranarray(contribution(rank, (7, 9), "float32"))), bias=put((), "float64")
        ),
        "blocks": [Layer(put((400, 50), "float32"), put((50,), "float16")), Block(put((3,), "complex64"))],
        "strided": kit.put(contribution(rank, (6, 6), "float32"))[::2, ::3],
        "empty": ({}, put((0, 4), "float32"), None),
        7: put((5,), "float32"),
    }
    return dict(reversed(tree.items())) if rank % 2 else tree


def leaves(tree: Any) -> dict[str, Any]:
    """The arrays by their paths, whatever the order."""
    found: dict[str, Any] = {}

    def walk(path: str, value: Any) -> None:
        if isinstance(value, dict):
            children = value.items()
        elif isinstance(value, Layer):
            children = value._asdict().items()
        elif isinstance(value, (list, tuple)):
            children = enumerate(value)
        elif dataclasses.is_dataclass(value):
            children = vars(value).items()
        else:
            found[path] = value
            return
        for key, child in children:
            walk(f"{path}/{key}", child)

    walk("", tree)
    return found


def average_everything(comm: Any, kit_name: str) -> None:
    kit = make_kit(comm, kit_name)
    for op in ("mean", "SUM"):
        for again in range(2):
            given = tree_of(comm.rank, kit)
            before = leaves(given)
            got = gs.average_gradients(given, op=op, communicator=comm if again else None)
            assert (type(got["encoder"]), list(got)) == (collections.OrderedDict, list(given))
            assert (type(got["blocks"][0]), type(got["blocks"][1])) == (Layer, Block)
            inputs = [leaves(tree_of(rank, make_kit(comm, "numpy"))) for rank in range(comm.world_size)]
            found = leaves(got)
            assert found.keys() == before.keys() == inputs[0].keys()
            for path, array in found.items():
                assert array is before[path], path  # reduced in place
                if array is not None:
                    check_sum(path, kit.get(array), [of_rank[path] for of_rank in inputs], op)


def check_sum(path: str, got: Any, inputs: list[Any], op: str) -> None:
    wide = np.sum([np.asarray(array, np.complex128) for array in inputs], axis=0)
    wanted = wide / len(inputs) if op == "mean" else wide
    precision = np.finfo(got.dtype).eps * 2 * len(inputs)
    np.testing.assert_allclose(np.asarray(got, np.complex128), wanted, rtol=precision, atol=precision, err_msg=path)


def average_what_is_no_array(comm: Any) -> None:
    """Numbers come back as numbers; what cannot be written to as new arrays, which share no memory."""
    fixed = np.full(3, float(comm.rank))
    fixed.setflags(write=False)
    middle = (comm.world_size - 1) / 2
    got = gs.average_gradients({"a": fixed, "b": fixed, "c": np.float32(comm.rank), "d": float(comm.rank), "e": None})
    assert (fixed == comm.rank).all()
    assert (got["a"] == middle).all()
    assert (got["b"] == middle).all()
    assert not np.shares_memory(got["a"], got["b"])
    assert got["a"].ctypes.data % 64 == 0
    assert (got["c"], type(got["c"]), got["d"], type(got["d"]), got["e"]) == (middle, np.float32, middle, float, None)
    assert gs.average_gradients(comm.rank, op="sum") == sum(range(comm.world_size))
    alone = np.full(2, float(comm.rank))
    assert gs.average_gradients(alone) is alone
    assert (alone == middle).all()
    assert gs.average_gradients({"nothing": [None, ()]}) == {"nothing": [None, ()]}


def differ(comm: Any, kit_name: str) -> list[str]:
    """Rank 1 has another tree, in one way after the other; no array is touched, and the ranks can go on."""
    kit = make_kit(comm, kit_name)
    put = lambda *shape: kit.put(np.full(shape, float(comm.rank), np.float32))  # noqa: E731
    # (rank 1's, what the error has)
    odd: list[tuple[Any, str]] = [
        ({"w": put(3), "v": {"b": put(4)}}, "v/b: float32[4]"),
        ({"w": put(3), "v": {"b": kit.put(np.zeros(2))}}, "v/b: float64[2]"),
        ({"w": put(3), "v": {"b": None}}, "v/b: None"),
        ({"w": put(3), "v": {"c": put(2)}}, "v/c: float32[2]"),
        ({"w": put(3), "v": {}}, "average_gradients(mean) of 1 arrays"),
        ({"w": put(3)}, "rank 0: v/b: float32[2]"),
        ({}, "rank 0: v/b: float32[2]"),
    ]
    told = []
    for wrong, text in odd:
        weights = put(3)
        tree = wrong if comm.rank == 1 else {"w": weights, "v": {"b": put(2)}}
        error = expect(gs.PlanMismatch, partial(gs.average_gradients, tree), text)
        assert (kit.get(weights) == comm.rank).all()
        told.append(str(error).partition(":")[2])
    op = "sum" if comm.rank == 1 else "mean"
    expect(gs.PlanMismatch, lambda: gs.average_gradients([put(2)], op=op), "average_gradients(sum) of 1 arrays")
    assert (kit.get(gs.average_gradients(put(2))) == (comm.world_size - 1) / 2).all()
    return told


def refuse(comm: Any) -> None:
    """Every rank alike, before anything is sent; so that the ranks can go on."""
    weights = np.zeros(8)
    inside: list[Any] = []
    inside.append(inside)
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    average, wrong = gs.average_gradients, gs.InvalidArgument
    expect(wrong, lambda: average({"a": {"b": "text"}}), "a/b is str, not a gradient")
    expect(wrong, lambda: average({"a": weights, "b": weights[4:]}), "gradient of b shares memory with the gradient of")
    expect(wrong, lambda: average({1: weights, "1": np.zeros(2)}), "two values of the tree have the path 1")
    expect(wrong, lambda: average(inside), "0: this list contains itself")
    expect(wrong, lambda: average(deep), "nested too deep")
    expect(wrong, lambda: average([weights], op="max"), "max")
    expect(wrong, lambda: average([weights], "sum"), "pass op= and communicator= by name")
    expect(wrong, lambda: average([weights], gs.AllreduceCallback(), op="sum"), "op= together with a callback")
    expect(wrong, lambda: average([weights], gs.AllreduceCallback(), communicator=comm), "communicator= together")
    expect(gs.UnsupportedDtype, lambda: average({"a": [np.zeros(2, int)]}), "a/0: mean is not defined for dtype int64")
    expect(gs.UnsupportedDtype, lambda: average({"a": True}), "a: ")
    assert average({"a": weights})["a"] is weights


def go_through_a_callback(comm: Any, kit_name: str) -> None:
    """The callback's knobs hold, step after step, also for a rank whose dicts have another order."""
    kit = make_kit(comm, kit_name)
    sync = gs.AllreduceCallback("sum", clip_norm=5.0, threshold_bytes=64)
    for _ in range(3):
        tree = {"a": kit.put(np.full(9, 1.0)), "b": [kit.put(np.full(16, 1.0)), None]}
        got = gs.average_gradients(tree if comm.rank else dict(reversed(tree.items())), sync)
        assert abs(sync.norm - 5.0 * comm.world_size) < 1e-12
        np.testing.assert_allclose(kit.get(got["b"][0]), 1.0, rtol=1e-6)
        assert got["b"][1] is None
    assert sync.statistics.steps == 3


def keep_out_of_it(comm: Any) -> None:
    """One rank alone looks at nothing, and so costs nothing."""
    tree = {"a": object()}
    assert gs.average_gradients(tree) is tree
    comm.close()
    expect(gs.CommunicatorClosed, lambda: gs.average_gradients([np.zeros(2)], gs.AllreduceCallback(group=comm)))


def large_lists(comm: Any) -> None:
    """More than one collective, of two dtypes that alternate."""
    size = 3 * 2**20
    tree = [np.full(size, float(comm.rank), ("float32", "float64")[i % 2]) for i in range(6)]
    before = comm.recorder.describe()
    got = gs.average_gradients(tree)
    assert before != comm.recorder.describe()
    for array in got:
        assert (array == (comm.world_size - 1) / 2).all()
