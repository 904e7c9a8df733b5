"""Names of gradients, names of callbacks, and programs that use them crosswise: right numbers, or PlanMismatch."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import enum
import fractions
import gc
import pathlib
import pickle
import threading
from typing import NamedTuple

import numpy as np
import pytest

import gradsync as gs
from arrays import arrays_of
from bucketing.reference import step


class Layer(enum.Enum):
    WEIGHT = 1
    BIAS = 2


@dataclasses.dataclass(frozen=True)
class Key:
    layer: int
    name: str


class Place(NamedTuple):
    layer: int
    name: str


class Word(enum.StrEnum):
    WEIGHT = "w"
    BIAS = "b"


class OtherWord(enum.StrEnum):
    WEIGHT = "w"


class Module:
    """Has no repr of its own: what Python shows is an address."""

    def method(self):
        pass


class Alike:
    """Says the same of each."""

    def __repr__(self):
        return "Alike(3, 4)"


NAMES = {
    "str": ("w", "b"),
    "int": (7, -1),
    "tuple": (("layer", 1), ("layer", 2)),
    "bytes": (b"w", b"b"),
    "str and None": ("w", None),
    "numpy": tuple(np.array(["w", "b"])),
    "enum": (Layer.WEIGHT, Layer.BIAS),
    "nested tuple": (("layer", ("0", "w")), ("layer", ("0", "b"))),
    "float": (0.5, 1.5),
    "frozenset": (frozenset({1}), frozenset({2})),
    "dataclass": (Key(0, "w"), Key(0, "b")),
    "path": (pathlib.PurePosixPath("a/w"), pathlib.PurePosixPath("a/b")),
    "bool": (True, False),
    "named tuple": (Place(0, "w"), Place(0, "b")),
    "text enum": (Word.WEIGHT, Word.BIAS),
    "fraction and date": (fractions.Fraction(1, 3), datetime.date(2026, 11, 28)),
    "class": (Layer, Key),
    "odd text": ("'w\n: float32[3]", "\ud800 \N{GREEK SMALL LETTER ALPHA}"),
    "number and text": (1, "1"),
    "range and complex": (range(3), 1j),
}


def reduce_two(comm, names, *, is_crosswise, parameters=None):
    """The means of two gradients of these names, 1 and 100 on all ranks; crosswise: rank 1 hands over the other first.

    Names are made on each rank, from their texts where that is possible.
    """
    arrays = arrays_of(comm)
    sync, results = gs.AllreduceCallback("mean", comm, parameters=parameters), []
    for _ in range(3):
        futures = {}
        for at in (1, 0) if is_crosswise and comm.rank else (0, 1):
            futures[at] = sync(names[at], arrays.put(np.full(3, (1.0, 100.0)[at])))
        sync.flush()
        results.append((float(futures[0].numpy()[0]), float(futures[1].numpy()[0])))
    return results


RIGHT = [[(1.0, 100.0)] * 3] * 2


@pytest.mark.parametrize("place", ["shm", "fake"])
def test_parameters_are_named_by_anything(run_on_ranks, place):
    """In one order, or with parameters= in any."""
    for names in [*NAMES.values(), (np.zeros(3), np.ones(3))]:
        assert run_on_ranks(2, lambda comm, names=names: reduce_two(comm, names, is_crosswise=False), on=place) == RIGHT
    for names in NAMES.values():
        parameters = dict.fromkeys(names, ((3,), "float64"))
        if len(parameters) < len(names):  # equal ones cannot be two keys of a dict
            continue
        reduce = lambda comm, names=names, parameters=parameters: reduce_two(  # noqa: E731
            comm, names, is_crosswise=True, parameters=parameters
        )
        assert run_on_ranks(2, reduce, on=place) == RIGHT


@pytest.mark.parametrize("kind", NAMES)
def test_the_order_of_hand_over_is_free(run_in_group, kind):
    assert run_in_group(2, lambda comm: reduce_two(comm, NAMES[kind], is_crosswise=True)) == RIGHT


@pytest.mark.parametrize(
    "make",
    [
        lambda _: Module(),
        lambda _: id(Module()),
        lambda _: f"{Module()}.weight",
        lambda value: (Module(), value),
        lambda value: lambda: value,
        lambda _: Module().method,
    ],
    ids=["object", "id", "its text", "in a tuple", "function", "method"],
)
def test_a_name_that_differs_between_ranks_is_refused(alone, make):
    with pytest.raises(gs.InvalidArgument, match="differs between"):
        gs.AllreduceCallback("mean", alone)(make(1), np.ones(3))


@pytest.mark.parametrize("name", ["colour 0xdeadbeef", 0xDEADBEEF, 2**41 + 1, "w at 0", b"0x1234567"])
def test_a_name_that_only_looks_like_an_address_is_a_name(alone, name):
    assert step(gs.AllreduceCallback("mean", alone), {name: np.ones(3)})[name].tolist() == [1.0] * 3


def test_arrays_are_names_by_their_place_in_parameters(run_on_ranks):
    def use(comm):
        names = [np.zeros(3), np.zeros(3)]  # equal ones: each is known by identity
        results = reduce_two(comm, names, is_crosswise=True, parameters=names)
        sync = gs.AllreduceCallback("mean", comm, parameters=names)
        with pytest.raises(gs.InvalidArgument):
            sync(names[0].copy(), np.ones(3))
        return results

    assert run_on_ranks(2, use) == RIGHT


@pytest.mark.parametrize("place", ["shm", "fake"])
def test_arrays_as_names_may_come_in_any_order(run_in_group, place):
    """Known by their values at the first use: it does not matter that the ranks' arrays then differ."""

    def use(comm):
        arrays = arrays_of(comm)
        weights = [arrays.put(np.full((3,), value)) for value in (1.0, 2.0)]
        weights.append(arrays.put(np.full((3,), 1.0, np.float32)))  # of another dtype
        sync = gs.AllreduceCallback("sum", comm)
        for number in range(3):
            order = [0, 1, 2] if comm.rank == number % 2 else [2, 1, 0]
            futures = {at: sync(weights[at], arrays.put(np.full(3, 10.0**at))) for at in order}
            sync.flush()
            assert [float(arrays.get(futures[at].result())[0]) for at in range(3)] == [2.0, 20.0, 200.0]
            for weight in weights:
                weight += comm.rank

    run_in_group(2, use, on=place)


def test_arrays_as_names_may_be_new_in_each_step(alone):
    """`weight = weight - step` makes a new array, also one of equal values; ids come again."""
    sync, weight = gs.AllreduceCallback("sum", alone), np.ones(3)
    for _ in range(5):
        weight = weight - 0.0
        assert step_of_one(sync, weight, np.ones(3)).tolist() == [1.0] * 3


def step_of_one(sync, name, gradient):
    future = sync(name, gradient)
    sync.flush()
    return future.result()


def test_arrays_of_equal_values_cannot_be_told_apart(alone):
    a, b = np.zeros(3), np.zeros(3)
    sync = gs.AllreduceCallback("sum", alone)
    with pytest.raises(gs.InvalidArgument, match="parameters="), sync.backward():  # in one step
        sync(a, np.ones(3))
        sync(b, np.ones(3))
    step_of_one(sync, a, np.ones(3))
    with pytest.raises(gs.InvalidArgument, match="parameters="):  # in two: another rank may use them the other way
        sync(b, np.ones(3))


@pytest.mark.parametrize(
    ("name", "other"), [(Word.WEIGHT, OtherWord.WEIGHT), (True, 1), (1, 1.0), (Word.WEIGHT, "w")], ids=str
)
def test_names_that_are_equal_are_refused(alone, name, other):
    """Each rank has one of them; results() would have both under one key."""
    for first, second in ((name, other), (other, name)):
        sync = gs.AllreduceCallback("sum", alone)
        step_of_one(sync, first, np.ones(3))
        with pytest.raises(gs.InvalidArgument, match="are equal"):
            step_of_one(sync, second, np.ones(3))
        step_of_one(sync, first, np.ones(3))


def test_text_is_one_name_in_any_class(alone):
    sync = gs.AllreduceCallback("sum", alone)
    for name in ("w", np.str_("w"), type("Text", (str,), {})("w")) * 2:
        step_of_one(sync, name, np.ones(3))
        assert list(sync.results()) == ["w"]


def test_a_callback_cannot_be_copied(alone):
    """The ranks could take the copy for the original."""
    sync = gs.AllreduceCallback("sum", alone)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="a name of its own"):
            copied(sync)


def test_names_that_look_alike_are_refused(alone):
    sync = gs.AllreduceCallback("sum", alone)
    with pytest.raises(gs.InvalidArgument, match="its own"), sync.backward():
        for name in (Alike(), Alike()):
            sync(name, np.ones(3))
    with pytest.raises(gs.InvalidArgument, match="its own"):  # the ranks could give them in another order
        gs.AllreduceCallback("sum", alone, parameters={Alike(): ((3,), "float64"), Alike(): ((3,), "float64")})


def differ_in_arrays(comm, value, shape=(3,)):
    sync = gs.AllreduceCallback("mean", comm)
    with pytest.raises(gs.PlanMismatch) as raised, sync.backward():
        sync(np.full(shape, value), np.ones(3))
    return str(raised.value)


def test_arrays_as_names_that_differ_between_ranks_are_a_mismatch_with_the_remedy(run_on_ranks):
    for text in run_on_ranks(2, lambda comm: differ_in_arrays(comm, comm.rank)):
        assert "values" in text.splitlines()[-1]
        assert "parameters=" in text.splitlines()[-1]


def test_a_name_out_of_an_array_of_names_is_that_name(alone):
    """Each look into the array makes a new object."""
    for names in (np.array(["w", "v"]), np.array([3, 4])):
        for parameters in (None, dict.fromkeys(names.tolist(), ((2,), "float64"))):
            sync = gs.AllreduceCallback("sum", alone, parameters=parameters)
            for each in (names, names.tolist(), names):
                step(sync, {name: np.ones(2) for name in each})
            with pytest.raises(gs.InvalidArgument), sync.backward():  # twice
                for name in (names[0], names[1], names[0]):
                    sync(name, np.ones(2))


# -- Two callbacks -----------------------------------------------------------------------------------------------------


def reduce_one(comm, sync, value):
    """One step of one gradient; what it was reduced to."""
    gradient = arrays_of(comm).put(np.full(4, float(value)))
    return round(float(step(sync, {"w": gradient})["w"][0]), 6)  # NCCL's mean adds up thirds


def make_two(comm, **options):
    generator = gs.AllreduceCallback("mean", comm, **options)
    discriminator = gs.AllreduceCallback("mean", comm, **options)
    return generator, discriminator


def make_named_in_any_order(comm):
    names = ["generator", "discriminator"]
    made = {name: gs.AllreduceCallback("mean", comm, name=name) for name in (names[::-1] if comm.rank else names)}
    return made["generator"], made["discriminator"]


PARAMETERS = {"w": ((4,), "float64")}
WAYS = {
    "two lines": make_two,
    "two lines, parameters": lambda comm: make_two(comm, parameters=PARAMETERS),
    "two lines, views": lambda comm: make_two(comm, parameters=PARAMETERS, gradient_as_bucket_view=True),
    "two lines, values": lambda comm: make_two(comm, clip_norm=1e9, nonfinite="skip"),
    "names in a loop": lambda comm: tuple(gs.AllreduceCallback("mean", comm, name=name) for name in "ab"),
    "names": make_named_in_any_order,
}


@pytest.mark.ranks(on={"shm": (3,), "fake": (2,)})
@pytest.mark.parametrize(("way", "right_steps"), [*[(way, 0) for way in WAYS], ("two lines", 2)])
def test_callbacks_that_are_used_crosswise_are_a_mismatch(comm, way, right_steps):
    """At the first use and later; all ranks hear of it, and go on in one order."""
    generator, discriminator = WAYS[way](comm)
    for _ in range(right_steps):
        assert [reduce_one(comm, generator, 1), reduce_one(comm, discriminator, 1000)] == [1.0, 1000.0]
    is_odd = comm.rank == comm.world_size - 1
    with pytest.raises(gs.PlanMismatch) as raised:
        for sync in (discriminator, generator) if is_odd else (generator, discriminator):
            reduce_one(comm, sync, 1 if sync is generator else 1000)
    assert set(raised.value.descriptions) == set(range(comm.world_size))
    assert raised.value.descriptions[0] != raised.value.descriptions[comm.world_size - 1]
    assert "name=" in str(raised.value)  # the remedy
    for _ in range(2):
        assert [reduce_one(comm, generator, 1), reduce_one(comm, discriminator, 1000)] == [1.0, 1000.0]


@pytest.mark.ranks(on={"shm": (3,), "debug": (2,)})
def test_callbacks_with_parameters_that_are_used_crosswise_after_right_steps(comm):
    test_callbacks_that_are_used_crosswise_are_a_mismatch(comm, "two lines, views", 2)


@pytest.mark.ranks(2, on=("fake",), fresh=True)
def test_over_nccl_that_is_found_after_the_launch_and_ends_the_communicator(comm):
    generator, discriminator = WAYS["two lines, parameters"](comm)
    for _ in range(2):
        assert [reduce_one(comm, generator, 1), reduce_one(comm, discriminator, 1000)] == [1.0, 1000.0]
    with pytest.raises(gs.PlanMismatch) as raised:
        for sync in (discriminator, generator) * 2 if comm.rank else (generator, discriminator) * 2:
            reduce_one(comm, sync, 1)
    assert raised.value.broken
    assert raised.value.descriptions[0] != raised.value.descriptions[1]
    assert "name=" in str(raised.value)  # the remedy
    assert comm.closed


FIRST_USES = {
    "empty flush": ({}, lambda sync, _: sync.flush()),
    "gradient_buffers": (
        {"parameters": PARAMETERS, "gradient_as_bucket_view": True},
        lambda sync, _: sync.gradient_buffers(),
    ),
    "average_gradients": ({}, lambda sync, gradient: gs.average_gradients({"w": gradient}, sync)),
    "missing": ({"parameters": PARAMETERS, "missing": "zero"}, lambda sync, _: sync.flush()),
}


@pytest.mark.ranks(2, on=("shm", "fake"))
@pytest.mark.parametrize("use", FIRST_USES)
def test_whatever_is_first_done_with_a_callback_finds_that_it_is_another(comm, use):
    options, call = FIRST_USES[use]
    generator, discriminator = make_two(comm, **options)
    gradient = arrays_of(comm).put(np.ones(4))
    with pytest.raises(gs.PlanMismatch):
        for sync in (discriminator, generator) if comm.rank else (generator, discriminator):
            call(sync, gradient)


@pytest.mark.ranks(2, on=("shm", "fake"))
def test_a_first_use_meets_a_later_one_of_another_callback(comm):
    generator, discriminator = make_two(comm)
    assert reduce_one(comm, generator, 1) == 1.0
    with pytest.raises(gs.PlanMismatch):
        reduce_one(comm, discriminator if comm.rank else generator, 1)
    different = gs.AllreduceCallback("mean", comm, name="a" if comm.rank else "b")
    with pytest.raises(gs.PlanMismatch):
        reduce_one(comm, different, 1)


def use_lazily(comm):
    """Each rank makes a callback when it needs it, in another order."""

    def train_generator():
        return reduce_one(comm, gs.AllreduceCallback("mean", comm), 1)

    def train_discriminator():
        return reduce_one(comm, gs.AllreduceCallback("mean", comm), 100)

    both = [train_generator, train_discriminator]
    return sorted(train() for train in (both[::-1] if comm.rank else both))


def use_lazily_from_a_helper(comm):
    """A helper makes a callback when it is first needed, in another order on each rank, and keeps it."""
    made = {}

    def train(which, value):
        if which not in made:
            made[which] = gs.AllreduceCallback("mean", comm)
        return reduce_one(comm, made[which], value)

    both = {"generator": 1, "discriminator": 100}
    return sorted(train(which, both[which]) for which in (sorted(both) if comm.rank else both))


@pytest.mark.parametrize("use", [use_lazily, use_lazily_from_a_helper])
def test_callbacks_that_are_made_lazily_are_never_mixed(run_in_group, use):
    with contextlib.suppress(gs.PlanMismatch, gs.InvalidArgument, gs.RankFailed):
        assert run_in_group(2, use) == [[1.0, 100.0]] * 2


ALIKE = {
    "a loop": lambda comm: [gs.AllreduceCallback("mean", comm) for _ in range(2)],
    "one line": lambda comm: (gs.AllreduceCallback("mean", comm), gs.AllreduceCallback("mean", comm)),
    "a helper": lambda comm: [make_one(comm), make_one(comm)],
    "a name": lambda comm: [gs.AllreduceCallback("mean", comm, name="model") for _ in range(2)],
    "a group and the world": lambda comm: [gs.AllreduceCallback("mean", group) for group in (None, comm)],
}


def make_one(comm):
    return gs.AllreduceCallback("mean", comm)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ALIKE)
def test_callbacks_that_look_alike_are_refused_at_their_first_use_while_both_are_alive(comm, way):
    first, second = ALIKE[way](comm)
    for call in (lambda: first("w", np.ones(4)), lambda: second("w", np.ones(4)), lambda: second.flush()) * 2:
        with pytest.raises(gs.InvalidArgument, match="name="):
            call()
    del first
    assert reduce_one(comm, second, 1) == 1.0
    first, third = ALIKE[way](comm)
    with pytest.raises(gs.InvalidArgument, match="name="):
        third.flush()
    assert reduce_one(comm, second, 1) == 1.0  # it was in use before


@pytest.mark.ranks(2)
def test_a_file_is_known_by_its_place_in_its_package(comm, tmp_path, monkeypatch):
    """Two copies of a file differ; the folder of the program, which may differ between machines, does not matter."""
    made = []
    for root, package in ((f"rank{comm.rank}", "gan"), (f"rank{comm.rank}", "vae"), ("both", "gan")):
        monkeypatch.syspath_prepend(tmp_path / root)
        file = str(tmp_path / root / package / "train.py")
        variables = {}
        exec(compile("import gradsync as gs\nsync = gs.AllreduceCallback()\n", file, "exec"), variables)
        made.append(variables["sync"])
        if root != "both":
            assert reduce_one(comm, made[-1], 1) == 1.0
    with pytest.raises(gs.InvalidArgument, match=r"gan/train\.py:2 "):
        made[2]("w", np.ones(3))


# -- Programs that are right -------------------------------------------------------------------------------------------


class InACircle:
    def __init__(self, comm):
        self.callback, self.itself = gs.AllreduceCallback("mean", comm), self


@pytest.mark.ranks(on={"shm": (2, 3), "fake": (2,)})
def test_callbacks_that_only_one_rank_makes_and_never_uses_are_no_mismatch(comm):
    spare = []
    for epoch in range(3):
        if comm.rank == 0:
            spare.append(gs.AllreduceCallback("mean", comm))
        generator = gs.AllreduceCallback("mean", comm)
        if comm.rank == 0:
            spare += [gs.AllreduceCallback("mean", comm), gs.AllreduceCallback("sum")]
        discriminator = gs.AllreduceCallback("mean", comm)
        for _ in range(2):
            assert [reduce_one(comm, generator, epoch), reduce_one(comm, discriminator, 7)] == [epoch, 7.0]
    gc.disable()  # one that cannot be used any more does not count, also before Python has collected it
    try:
        owners = []
        for _ in range(2 if comm.rank == 0 else 1):
            owners = [InACircle(comm)]
        assert reduce_one(comm, owners[0].callback, 5) == 5.0
    finally:
        gc.enable()


@pytest.mark.ranks(2, on=("shm", "fake"))
def test_callbacks_that_threads_make_in_any_order_have_names(comm):
    for number in range(10):
        made, barrier = {}, threading.Barrier(2)

        def make(which, made=made, barrier=barrier):
            barrier.wait()
            made[which] = gs.AllreduceCallback("mean", comm, name=which)

        threads = [threading.Thread(target=make, args=(which,)) for which in ("generator", "discriminator")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        results = [reduce_one(comm, made["generator"], number), reduce_one(comm, made["discriminator"], 1000)]
        assert results == [number, 1000.0]


@pytest.mark.ranks(2, on=("shm", "fake"))
def test_a_callback_follows_the_communicator_that_stands_in_for_the_world(comm):
    generator = gs.AllreduceCallback()
    discriminator = gs.AllreduceCallback()
    for _ in range(2):
        assert [reduce_one(comm, generator, 1), reduce_one(comm, discriminator, 1000)] == [1.0, 1000.0]
        with gs.override_backend(comm.backend):
            assert [reduce_one(comm, discriminator, 1000), reduce_one(comm, generator, 1)] == [1000.0, 1.0]
