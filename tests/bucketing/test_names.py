"""Names of gradients, names of callbacks, and programs that use them crosswise: right numbers, or PlanMismatch."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import gc
import pathlib
import threading

import numpy as np
import pytest

import gradsync as gs
from arrays import arrays_of
from bucketing.reference import step

REASON = "until bucketing is rebuilt"


class Layer(enum.Enum):
    WEIGHT = 1
    BIAS = 2


@dataclasses.dataclass(frozen=True)
class Key:
    layer: int
    name: str


class Module:
    """Has no repr of its own: what Python shows is an address."""


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
        reduce = lambda comm, names=names, parameters=parameters: reduce_two(  # noqa: E731
            comm, names, is_crosswise=True, parameters=parameters
        )
        assert run_on_ranks(2, reduce, on=place) == RIGHT


# Names that the ranks compare today, as texts: they refuse the order. Others: the gradients are mixed.
@pytest.mark.xfail(raises=(gs.PlanMismatch, AssertionError), reason=REASON)
@pytest.mark.parametrize("kind", ["str", "enum", "nested tuple", "float", "dataclass"])
def test_the_order_of_hand_over_is_free(run_in_group, kind):
    assert run_in_group(2, lambda comm: reduce_two(comm, NAMES[kind], is_crosswise=True)) == RIGHT


def name_by(make):
    """Calls reduce_two with names that only exist on their rank."""
    return lambda comm: reduce_two(comm, (make(1), make(2)), is_crosswise=True)


@pytest.mark.xfail(raises=pytest.fail.Exception, reason=REASON)
def test_a_name_that_shows_an_address_is_refused(run_in_group):
    with pytest.raises(gs.InvalidArgument):
        run_in_group(2, name_by(lambda _: Module()))


def test_arrays_are_names_by_their_place_in_parameters(run_on_ranks):
    def use(comm):
        names = [np.zeros(3), np.zeros(3)]  # equal ones: each is known by identity
        results = reduce_two(comm, names, is_crosswise=True, parameters=names)
        sync = gs.AllreduceCallback("mean", comm, parameters=names)
        with pytest.raises(gs.InvalidArgument):
            sync(names[0].copy(), np.ones(3))
        return results

    assert run_on_ranks(2, use) == RIGHT


@pytest.mark.xfail(raises=AssertionError, reason=REASON)
def test_arrays_as_names_in_any_order_are_right_or_refused(run_in_group):
    with contextlib.suppress(gs.InvalidArgument):
        assert run_in_group(2, name_by(lambda value: np.full(3, value))) == RIGHT


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


def make_by_a_helper(comm):
    def make():
        return gs.AllreduceCallback("mean", comm)

    first = make()
    second = make()
    return first, second


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
    "a loop": lambda comm: tuple(gs.AllreduceCallback("mean", comm) for _ in range(2)),
    "a helper": make_by_a_helper,
    "names": make_named_in_any_order,
}


@pytest.mark.ranks(on={"shm": (3,), "fake": (2,)})
@pytest.mark.parametrize(
    ("way", "right_steps"), [*[(way, 0) for way in WAYS], ("two lines", 2), ("two lines, views", 2)]
)
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


@pytest.mark.xfail(raises=AssertionError, reason=REASON)
def test_callbacks_that_are_made_lazily_are_never_mixed(run_in_group):
    with contextlib.suppress(gs.PlanMismatch):
        assert run_in_group(2, use_lazily) == [[1.0, 100.0]] * 2


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
def test_callbacks_that_threads_make_in_any_order_are_used_in_one(comm):
    for number in range(10):
        made, barrier = {}, threading.Barrier(2)

        def make(which, made=made, barrier=barrier):
            barrier.wait()
            made[which] = gs.AllreduceCallback("mean", comm)

        threads = [threading.Thread(target=make, args=(which,)) for which in ("generator", "discriminator")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        results = [reduce_one(comm, made["generator"], number), reduce_one(comm, made["discriminator"], 1000)]
        assert results == [number, 1000.0]


@pytest.mark.ranks(2, on=("shm", "fake"))
def test_a_callback_follows_the_communicator_that_stands_in_for_the_world(comm):
    generator, discriminator = gs.AllreduceCallback(), gs.AllreduceCallback()
    for _ in range(2):
        assert [reduce_one(comm, generator, 1), reduce_one(comm, discriminator, 1000)] == [1.0, 1000.0]
        with gs.override_backend(comm.backend):
            assert [reduce_one(comm, discriminator, 1000), reduce_one(comm, generator, 1)] == [1000.0, 1.0]
