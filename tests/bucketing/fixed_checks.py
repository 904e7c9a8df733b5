"""What AllreduceCallback(parameters=...) must do on every backend; run inside rank processes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from naive_reference import (
    SPECS,
    Values,
    by_rank,
    expect_equal,
    fill,
    on_host,
    put_all,
    reduced,
    step,
    values_for,
)

import gradsync as gs
from contract import expect
from kits import make_kit

SMALL = {name: SPECS[name] for name in ("matrix", "one", "double", "scalar", "empty", "two")}


def shuffled(values: Values, rank: int, number: int) -> Values:
    names = list(values)
    np.random.default_rng([rank, number]).shuffle(names)
    return {name: values[name] for name in names}


def headlines(comm: Any, begun: int) -> list[str]:
    """Returns what was launched since so many collectives had begun, as the recorder tells it."""
    return [entry.what.headline() for entry in comm.recorder.entries() if entry.number > begun]


def reductions(comm: Any, begun: int) -> list[str]:
    return [line for line in headlines(comm, begun) if line.startswith("all_reduce(")]


def come_in_any_order(comm: Any, kit_name: str) -> list[list[str]]:
    """Gradients that come in another order on each rank and in each step; returns the order of the launches."""
    kit = make_kit(comm, kit_name)
    launched_by_threshold = []
    for threshold_bytes in (1, 700, 10 * 1024**2):
        callback = gs.AllreduceCallback("mean", comm, threshold_bytes=threshold_bytes, parameters=SPECS)
        arrays = put_all(kit, values_for(comm.rank, 0))
        launched: list[list[str]] = []
        for number in range(6):
            values = shuffled(values_for(comm.rank, number), comm.rank, number if number < 4 else 4)
            for name, each in values.items():
                if number == 2 and name in ("one", "huge"):
                    arrays[name] = kit.put(each.copy())
                fill(arrays[name], each)
            begun = comm.recorder.begun
            futures = {name: callback(name, arrays[name]) for name in values}
            launched.append(reductions(comm, begun))
            assert callback.statistics.steps == number  # all buckets are complete, but only the flush ends the step
            callback.flush()
            assert callback.statistics.steps == number + 1
            assert reductions(comm, begun) == launched[-1]
            assert not callback.filled
            got = {name: on_host(futures[name].result()) for name in SPECS}
            expect_equal(comm, got, reduced(by_rank(comm.world_size, number)), (number, threshold_bytes))
            assert all(futures[name].result() is arrays[name] for name in SPECS)
        assert launched == [launched[0]] * 6
        launched_by_threshold.append(launched[0])
        if threshold_bytes == 1:
            assert [line.partition("[")[2].partition("]")[0] for line in launched[0]] == launch_order(threshold_bytes)
    return launched_by_threshold


def launch_order(threshold_bytes: int) -> list[str]:
    """Returns the names of gradients that go alone in the order in which their buckets are complete."""
    assert threshold_bytes == 1
    return [*(name for name in SPECS if name != "empty"), "empty"]


def name_them_by_arrays(comm: Any, kit_name: str) -> None:
    """A list of arrays: each is known by identity, whatever it is equal to."""
    kit = make_kit(comm, kit_name)
    parameters = list(put_all(kit, values_for(0, 0, SMALL)).values())
    callback = gs.AllreduceCallback("sum", comm, parameters=parameters, threshold_bytes=700)
    for number in range(3):
        values = values_for(comm.rank, number, SMALL)
        named = dict(zip(values, parameters, strict=True))
        arrays = put_all(kit, values)
        with callback.backward():
            futures = {name: callback(named[name], arrays[name]) for name in shuffled(values, comm.rank, number)}
        got = {name: on_host(futures[name].result()) for name in SMALL}
        expect_equal(comm, got, reduced(by_rank(comm.world_size, number, SMALL), "sum"), number)
    twin = kit.put(on_host(parameters[0]))
    expect(gs.InvalidArgument, lambda: callback(twin, kit.put(on_host(twin))), "is not among the callback's parameters")


def right_steps(comm: Any, kit: Any, callback: Any) -> None:
    """Runs steps in which nothing is missing."""
    for number in range(2):
        got = step(callback, put_all(kit, values_for(comm.rank, number, SMALL)))
        expect_equal(comm, got, reduced(by_rank(comm.world_size, number, SMALL)), number)


def miss_some(comm: Any, kit_name: str) -> list[str]:
    """missing="error": the same error on all ranks where all miss the same, PlanMismatch where not all do."""
    kit = make_kit(comm, kit_name)
    told = []
    for threshold_bytes in (1, 700, 10 * 1024**2):
        for how in ("all", "the last rank", "all but the first rank", "another on each"):
            callback = gs.AllreduceCallback("mean", comm, threshold_bytes=threshold_bytes, parameters=SMALL)
            right_steps(comm, kit, callback)
            of_all = [names_missing(how, list(SMALL), rank, comm.world_size) for rank in range(comm.world_size)]
            values = values_for(comm.rank, 0, SMALL)
            given = {name: each for name, each in values.items() if name not in of_all[comm.rank]}

            def hand_over(callback: Any = callback, given: Values = given) -> None:
                step(callback, put_all(kit, given))

            if not any(of_all):
                hand_over()
                continue
            if of_all.count(of_all[0]) == comm.world_size:
                error = expect(gs.MissingGradient, hand_over, ", ".join(map(repr, of_all[0])))
            else:
                error = expect(gs.PlanMismatch, hand_over)
                assert not isinstance(error, gs.MissingGradient)
                without = {rank: text for rank, text in error.descriptions.items() if "without a gradient for" in text}
                assert without
                assert set(error.descriptions) == set(range(comm.world_size))
                for rank, text in without.items():
                    assert all(repr(name) in text for name in of_all[rank])
            told.append(str(error).partition(":")[2])
            callback.flush()  # an empty step is one
            right_steps(comm, kit, callback)
    return told


def names_missing(how: str, names: list[str], rank: int, world_size: int) -> list[str]:
    if how == "all":
        return [names[0], names[3]]
    if how == "another on each":
        return [names[rank]]
    misses = rank == world_size - 1 if how == "the last rank" else rank > 0
    return [names[2]] if misses else []


def fill_with_zeros(comm: Any, kit_name: str) -> None:
    """missing="zero": each rank misses others, and all get the sum of what there is."""
    kit = make_kit(comm, kit_name)
    for threshold_bytes in (1, 700, 10 * 1024**2):
        callback = gs.AllreduceCallback("mean", comm, threshold_bytes=threshold_bytes, parameters=SMALL, missing="zero")
        arrays = put_all(kit, values_for(comm.rank, 0, SMALL))
        for number, missing in enumerate(missing_by_step(comm.world_size)):
            given = by_rank(comm.world_size, number, SMALL)
            for values, names in zip(given, missing, strict=True):
                for name in names:
                    values[name][...] = 0
            names = [name for name in SMALL if name not in missing[comm.rank]]
            for name in names:
                fill(arrays[name], given[comm.rank][name])
            got = step(callback, {name: arrays[name] for name in names})
            assert set(callback.filled) == set(missing[comm.rank]), number
            got |= {name: on_host(each) for name, each in callback.filled.items()}
            expect_equal(comm, {name: got[name] for name in SMALL}, reduced(given), (number, threshold_bytes))
        assert callback.statistics.steps == number + 1


def keep_what_was_filled_in(comm: Any, kit_name: str) -> None:
    """The results of parameters without a gradient are the program's to keep: later steps leave them as they are."""
    kit, last = make_kit(comm, kit_name), comm.world_size - 1
    callback = gs.AllreduceCallback("sum", comm, parameters={"a": ((2,), "float64")}, missing="zero")
    kept = []
    for number in range(4):
        with callback.backward():
            future = callback("a", kit.put(np.full(2, 1.0 + number))) if comm.rank == last else None
        kept.append(callback.filled["a"] if future is None else future.result())
    assert [on_host(each).tolist() for each in kept] == [[1.0 + number] * 2 for number in range(4)]


def missing_by_step(world_size: int) -> Iterator[list[tuple[str, ...]]]:
    """Yields the names that each rank has no gradient for."""
    names = list(SMALL)
    nothing: tuple[str, ...] = ()
    yield [nothing] * world_size
    yield [nothing] * world_size
    yield [(names[rank],) for rank in range(world_size)]
    yield [(names[rank],) for rank in range(world_size)]
    yield [tuple(names)] * world_size  # an empty step: zeros everywhere
    yield [nothing] * world_size
    yield [*[nothing] * (world_size - 1), tuple(names)]
    yield [tuple(names[rank:]) for rank in range(world_size)]
    yield [nothing] * world_size


def work_in_a_group(comm: Any, kit_name: str) -> None:
    """Two groups at once, with callbacks of their own; and one callback over the world between their steps."""
    kit = make_kit(comm, kit_name)
    group = comm.split(comm.rank % 2)
    of_group = gs.AllreduceCallback("mean", group, parameters=SMALL, threshold_bytes=700)
    of_world = gs.AllreduceCallback("sum", comm, parameters=SMALL)
    for number in range(3):
        values = values_for(comm.rank, number, SMALL)
        got = step(of_group, put_all(kit, shuffled(values, comm.rank, number)))
        wanted = reduced([values_for(rank, number, SMALL) for rank in group.ranks])
        expect_equal(comm, {name: got[name] for name in SMALL}, wanted, number)
        got = step(of_world, put_all(kit, values))
        expect_equal(comm, got, reduced(by_rank(comm.world_size, number, SMALL), "sum"), number)
    group.close()


def begin_the_world_again(_comm: Any, kit_name: str) -> None:
    """A callback without a group goes on in the next world; what it knew of arrays it forgets."""
    callback = gs.AllreduceCallback("mean", parameters=SMALL, threshold_bytes=700)
    plain = gs.AllreduceCallback("mean", threshold_bytes=700)
    viewed = gs.AllreduceCallback("mean", parameters=SMALL, threshold_bytes=700, gradient_as_bucket_view=True)
    backend = gs.get_communicator().backend
    arrays: dict[str, Any] = {}
    for generation in range(3):
        if generation:
            gs.destroy_process_group()
            expect(gs.InvalidArgument, partial(callback, "one", arrays["one"]), "init_process_group")
            gs.init_process_group(backend)
        comm = gs.get_communicator()
        kit = make_kit(comm, kit_name)
        arrays = arrays or put_all(kit, values_for(comm.rank, 0, SMALL))
        for number in range(3):
            values = values_for(comm.rank, number, SMALL)
            for each in (callback, plain, viewed):
                for name, array in arrays.items():
                    fill(array, values[name])
                order = list(SMALL) if each is plain else list(shuffled(values, comm.rank, number))
                got = step(each, {name: arrays[name] for name in order})
                wanted = reduced(by_rank(comm.world_size, number, SMALL))
                expect_equal(comm, {name: got[name] for name in SMALL}, wanted, (generation, number))
        comm.barrier()
