"""What broadcast_tree must do on every backend; run inside ranks."""

from __future__ import annotations

import collections
import dataclasses
import os
import sys
import time
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import gradsync as gs
from contract import contribution, expect
from kits import make_kit


class Schedule(NamedTuple):
    rate: float
    momenta: list[Any]


@dataclasses.dataclass(frozen=True)
class Normalisation:
    mean: Any
    name: str = "layer"
    steps: int = dataclasses.field(default=0, init=False)


class Sampler:
    """An object of no kind that is taken apart."""

    def __init__(self, state: int) -> None:
        self.state = state


def state_of(rank: int, kit: Any) -> dict[str, Any]:
    """Parameters, buffers and optimiser state of a rank."""
    normalisation = Normalisation(kit.put(contribution(rank, (5,), "float64")), f"of {rank}")
    object.__setattr__(normalisation, "steps", rank + 10)
    fixed = np.full(2, rank)
    return {
        "parameters": collections.OrderedDict(
            conv=kit.put(np.asfortranarray(contribution(rank, (7, 9), "float32"))),
            bias=kit.put(contribution(rank, (), "float64")),
        ),
        "normalisation": normalisation,
        "schedule": Schedule(0.1 * rank, [kit.put(contribution(rank, (400, 50), "float32")), None, (np.int64(rank),)]),
        "strided": kit.put(np.full((6, 6), float(rank)))[::2, ::3],
        "dates": fixed.astype("datetime64[s]"),
        "empty": [{}, [], ()],
        (1, 2): {3: f"text of rank {rank}", None: b"bytes", "sampler": Sampler(rank)},
        "set": {rank},
        "maybe": None if rank else "something",
    }


def in_another_order(tree: dict[Any, Any]) -> dict[Any, Any]:
    return {key: in_another_order(tree[key]) if type(tree[key]) is dict else tree[key] for key in reversed(tree)}


def bytes_of(value: Any, kit: Any) -> Any:
    """Returns a tree of which equality is equality of bits."""
    if isinstance(value, np.ndarray) or (hasattr(value, "get") and hasattr(value, "shape")):
        array = value if isinstance(value, np.ndarray) else kit.get(value)
        return (array.shape, str(array.dtype), array.tobytes())
    if isinstance(value, dict):
        return [(key, bytes_of(child, kit)) for key, child in value.items()]
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [bytes_of(child, kit) for child in value])
    if dataclasses.is_dataclass(value):
        return {field.name: bytes_of(getattr(value, field.name), kit) for field in dataclasses.fields(value)}
    return value.state if isinstance(value, Sampler) else (type(value).__name__, value)


def broadcast_everything(comm: Any, kit_name: str) -> None:
    kit = make_kit(comm, kit_name)
    for root in range(comm.world_size):
        mine = state_of(comm.rank, kit)
        given = mine if comm.rank == root else in_another_order(mine)
        conv, mean = given["parameters"]["conv"], given["normalisation"].mean
        got = gs.broadcast_tree(given, root)
        assert bytes_of(got, kit) == bytes_of(state_of(root, kit), kit)
        assert got is not given
        assert got["parameters"]["conv"] is conv
        assert got["normalisation"].mean is mean
        assert type(got["parameters"]) is collections.OrderedDict
        assert type(got["schedule"]) is Schedule
        assert (given["schedule"].rate, given["set"]) == (0.1 * comm.rank, {comm.rank})  # left as it was
    weights = kit.put(np.full(3, float(comm.rank)))
    assert gs.broadcast_tree(weights, communicator=comm) is weights
    assert (kit.get(weights) == 0).all()
    assert gs.broadcast_tree(comm.rank, comm.world_size - 1) == comm.world_size - 1
    assert gs.broadcast_tree({}) == {}


def differ(comm: Any, kit_name: str) -> list[str]:
    """Rank 1 has another tree, in one way after the other; no array is touched, and the ranks can go on."""
    kit = make_kit(comm, kit_name)
    put = lambda *shape: kit.put(np.full(shape, float(comm.rank), np.float32))  # noqa: E731

    def state(conv: Any, momentum: Any) -> dict[str, Any]:
        return {"optimizer": {"momentum": {"conv1": conv}, "others": momentum}, "step": comm.rank}

    # First: on NCCL, ranks that leave what they have repeated would break the communicator.
    expect(gs.PlanMismatch, lambda: gs.broadcast_tree(put(2), comm.rank % 2), "broadcast_tree (root 1)")
    double = kit.put(np.zeros(3))
    odd: list[tuple[dict[str, Any], str]] = [
        (state(put(4), [put(2)]), "rank 1: optimizer/momentum/conv1: float32[4], but float32[3] on the root"),
        (state(double, [put(2)]), "optimizer/momentum/conv1: float64[3], but float32[3] on the root"),
        (state(3.5, [put(2)]), "optimizer/momentum/conv1: a float, but float32[3] on the root"),
        (state(None, [put(2)]), "optimizer/momentum/conv1: None, but float32[3] on the root"),
        (state({"w": put(3)}, [put(2)]), "optimizer/momentum/conv1: a dict of 1, but float32[3] on the root"),
        (state(put(3), []), "optimizer/others/0: missing, but float32[2] on the root"),
        (state(put(3), [put(2), put(1)]), "optimizer/others/1: float32[1], but missing on the root"),
        (state(put(3), (put(2),)), "optimizer/others: a tuple of 1, but a list of 1 on the root"),
        (state(put(3), Schedule(1.0, [])), "optimizer/others: a Schedule of 2, but a list of 1 on the root"),
        ({**state(put(3), [put(2)]), "step": put(1)}, "step: float32[1], but an int on the root"),
        ({**state(put(3), [put(2)]), "step": [1]}, "step: a list of 1, but an int on the root"),
        ({**state(put(3), [put(2)]), "more": 1}, "more: an int, but missing on the root"),
    ]
    told = []
    for wrong, text in odd:
        weights = put(3)
        tree = wrong if comm.rank == 1 else state(weights, [put(2)])
        error = expect(gs.PlanMismatch, partial(gs.broadcast_tree, tree), text)
        assert list(error.descriptions) == [1]
        assert (kit.get(weights) == comm.rank).all()
        told.append(str(error).partition(":")[2])
    error = expect(
        gs.PlanMismatch, lambda: gs.broadcast_tree(put(comm.rank + 1)), "the tree: float32[2], but float32[1] on"
    )
    expect(gs.InvalidArgument, lambda: gs.broadcast_tree([lambda: 0]), "cannot be pickled")
    expect(gs.InvalidArgument, lambda: gs.broadcast_tree([], comm.world_size), "root must be 0 to")
    assert (kit.get(gs.broadcast_tree(put(2), 1)) == 1).all()
    return told


def write_where_it_cannot(comm: Any) -> str:
    """Rank 1 is told before it sends anything, and so can still take part."""
    fixed = np.full(3, float(comm.rank))
    fixed.setflags(write=False)
    if comm.rank == 1:
        error = expect(gs.InvalidArgument, lambda: gs.broadcast_tree({"a": {"b": fixed}}), "a/b is read-only")
        broad = np.broadcast_to(np.zeros(1), (4,)).copy()[:1]
        overlapping = np.lib.stride_tricks.as_strided(broad, (4,), (0,))
        expect(gs.InvalidArgument, lambda: gs.broadcast_tree(overlapping), "the tree overlaps itself")
        expect(gs.InvalidArgument, lambda: gs.broadcast_tree([np.ma.ones(2)]), "broadcast_tree, 0 got a masked array")
        fixed = fixed.copy()
    got = gs.broadcast_tree({"a": {"b": fixed}})
    assert got["a"]["b"] is fixed
    assert (fixed == 0).all()
    return str(error).partition(":")[2] if comm.rank == 1 else ""


class Unreadable:
    """Its pickle cannot be read on rank 1, and would end that process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return end_unless_first, ()


def end_unless_first() -> str:
    if os.environ["GRADSYNC_RANK"] != "0":
        sys.exit("an extension is missing")
    return "read"


class Pair(tuple[Any, ...]):
    """Wants other arguments than its items."""

    def __new__(cls, first: Any, second: Any) -> Pair:
        return super().__new__(cls, (first, second))


@dataclasses.dataclass
class Lazy:
    weights: Any
    cache: Any = dataclasses.field(init=False)


@dataclasses.dataclass
class Spec:
    """Describes an array, and is none."""

    shape: tuple[int, ...]
    dtype: str


def send_what_cannot_be_read(comm: Any) -> str:
    weights = np.full(3, float(comm.rank))
    error = expect(gs.PlanMismatch, lambda: gs.broadcast_tree({"w": weights, "s": Unreadable()}), "cannot be unpickled")
    assert (weights == comm.rank).all()
    assert comm.objects.all_gather(comm.rank) == list(range(comm.world_size))  # all are at the same place
    error_of_object = (
        gs.InvalidArgument,
        lambda: comm.objects.broadcast(Unreadable()),
        "an object from rank 0 that cannot be",
    )
    if comm.rank:
        expect(*error_of_object)
    else:
        comm.objects.broadcast(Unreadable())
    assert comm.objects.all_gather(comm.rank) == list(range(comm.world_size))
    return str(error).partition(":")[2]


def broadcast_odd_containers(comm: Any) -> None:
    rank = comm.rank
    mine = [np.full(2, float(rank)) for _ in range(4)]
    pair = Pair(mine[0], rank)
    pair.name = f"of {rank}"  # type: ignore[attr-defined]
    lazy = Lazy(mine[1])
    tree = {"pair": pair, "lazy": lazy, "spec": Spec((rank, 2), "float32"), "date": time.gmtime(rank)}
    got = gs.broadcast_tree(tree)
    assert type(got["pair"]) is Pair
    assert got["pair"][0] is mine[0]
    assert got["pair"][1] == 0
    assert got["lazy"].weights is mine[1]
    assert not hasattr(got["lazy"], "cache")
    assert got["spec"] == Spec((0, 2), "float32")
    assert got["date"] == time.gmtime(0)
    assert not mine[0].any()
    assert not mine[1].any()
    if rank == 1:
        lazy.cache = 1
    expect(gs.PlanMismatch, lambda: gs.broadcast_tree(lazy), "rank 1: cache: an int, but missing on the root")


def refuse_before_anything_is_sent(comm: Any) -> None:
    """On one rank only: the others hear nothing, and it can still take part."""
    weights = np.full(2, float(comm.rank))
    if comm.rank == 1:
        circle: list[Any] = [weights]
        circle.append({"again": circle})
        deep: Any = weights
        for _ in range(5000):
            deep = [deep]
        for tree, text in [
            ({"c": circle}, "rank 1/2: broadcast_tree: c/1/again: this list contains itself"),
            ({"n": {float("nan"): weights}}, "n: a dict has the key nan, which is not equal to itself"),
            ({"o": Only.the_one}, "o: gradsync cannot copy this Only: TypeError"),
            (deep, "nested too deep"),
        ]:
            expect(gs.InvalidArgument, partial(gs.broadcast_tree, tree), text)
    gs.broadcast_tree([weights])
    assert not weights.any()


class Only(dict[str, Any]):
    """There is one, which nobody can copy."""

    the_one: Only

    def __copy__(self) -> Only:
        raise TypeError("there is one only")


Only.the_one = Only(a=1)


def share_memory_between_leaves(comm: Any) -> str:
    """Arrays of one memory are fine where they are so on the root too; else it would get two values."""
    first, second = (np.full(4, comm.rank + value) for value in (1.0, 2.0))
    base = np.arange(6.0) + 10 * comm.rank
    for tree in ([first, first], [base[:4], base[2:]], [base[::2], base[1::2]], [first.reshape(2, 2), first]):
        gs.broadcast_tree(tree)
    assert (first == 1).all()
    assert (base == np.arange(6.0)).all()
    gs.broadcast_tree([first, first] if comm.rank == 0 else [first, second])  # tied on the root only
    assert (second == (2 if comm.rank == 0 else 1)).all()
    second[:] = comm.rank
    tied = [second, second] if comm.rank == 1 else [first, second]
    error = expect(gs.PlanMismatch, lambda: gs.broadcast_tree({"a": tied[0], "b": {"c": tied[1]}}))
    assert (second == comm.rank).all()
    shifted = base[:4], (base[1:5] if comm.rank == 1 else base[2:])
    expect(
        gs.PlanMismatch,
        lambda: gs.broadcast_tree(shifted),
        "1: shares memory with 0 in a different way than on the root",
    )
    square = np.full((3, 3), float(comm.rank))
    turned = [square, square if comm.rank == 1 else square.T]
    expect(gs.PlanMismatch, lambda: gs.broadcast_tree(turned), "in a different way than on the root")
    return str(error).partition(":")[2]
