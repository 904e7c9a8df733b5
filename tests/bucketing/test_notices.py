"""Notices of programs that train each rank alone: lost results, and parameters that were never broadcast."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

import gradsync as gs
from arrays import arrays_of
from bucketing.reference import Heard, step

# -- A result that nobody can read -------------------------------------------------------------------------------------


class Foreign:
    """An array of another library, in host memory."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class Parameter:
    """A parameter that has its gradient."""

    grad = None


def drop(sync, comm, kept):
    sync("w", np.ones(3) / 2)


def drop_later(sync, comm, kept):
    with sync.backward():
        future = sync("w", np.ones(3) / 2)
    del future


def drop_a_number(sync, comm, kept):
    sync("w", 1.5)


def drop_a_copy_of_one_that_is_read_only(sync, comm, kept):
    array = np.broadcast_to(np.float64(1.0), 3)
    sync("w", array)
    kept.append(array)


def drop_one_of_two(sync, comm, kept):
    kept.append(sync("b", np.ones(2) / 2))
    sync("w", np.ones(3) / 2)


LOSING = [drop, drop_later, drop_a_number, drop_a_copy_of_one_that_is_read_only, drop_one_of_two]


def steps_of(comm, train, count=5, **options):
    """The warnings of some steps, at whose ends the caller has what `train` leaves in a list."""
    sync, kept = gs.AllreduceCallback("mean", comm, check_every=0, **options), []
    with Heard() as lines:
        for _ in range(count):
            if train.__name__.endswith("_later"):
                train(sync, comm, kept)
            else:
                with sync.backward():
                    train(sync, comm, kept)
    return lines


@pytest.mark.ranks(2)
@pytest.mark.parametrize("train", LOSING)
def test_a_result_that_nobody_can_read_is_told_once(comm, train):
    lines = steps_of(comm, train)
    assert len(lines) == 1
    assert "'w'" in lines[0]
    assert "results()" in lines[0]
    assert "'b'" not in lines[0]


@pytest.mark.ranks(2)
def test_steps_without_blocks_are_told_of_too_but_not_worlds_of_one(comm):
    with gs.new_group([comm.rank]) if comm.world_size == 1 else comm.split(comm.rank) as single:
        assert steps_of(single, drop) == []
    sync = gs.AllreduceCallback("mean", comm, check_every=0)
    with Heard() as lines:
        for _ in range(3):
            sync("w", np.ones(3) / 2)
            sync.flush()
    assert len(lines) == 1


@pytest.mark.ranks(2)
def test_what_can_be_read_is_not_told_of(comm):
    given = {"w": np.ones(3), "b": np.ones(2)}

    def read_futures(sync):
        with sync.backward():
            future = sync("w", np.ones(3) / 2)
        given["w"] -= future.result()

    def read_in_other_ways(sync):
        with sync.backward():
            futures = [sync(name, np.ones(3) / 2) for name in "abcd"]
        np.asarray(futures[0]), futures[1].numpy(), futures[2].shape, futures[3].wait() or futures[3].result()

    def read_in_callbacks(sync):
        with sync.backward():
            sync("w", np.ones(3) / 2).add_done_callback(lambda future: given.update(w=future.result()))

    kept = []

    def keep_futures(sync):
        with sync.backward():
            kept.append(sync("w", np.ones(3) / 2))

    def keep_arrays(sync):
        gradients = {name: np.ones(3) / 2 for name in "ab"}
        with sync.backward():
            for name, gradient in gradients.items():
                sync(name, gradient)
        del gradient
        given["w"] -= gradients["a"]

    def keep_views(sync):
        flat = np.zeros(6)
        with sync.backward():
            sync("w", flat[:3])
            sync("v", flat[3:].reshape(3, 1))
        kept.append(flat)

    def keep_a_view_of_what_was_handed_over(sync):
        with sync.backward():
            gradient = np.ones(4) / 2
            kept.append(gradient.reshape(2, 2))
            sync("w", gradient)
            del gradient

    parameter = Parameter()

    def keep_in_attributes(sync):
        parameter.grad = np.ones(3) / 2
        with sync.backward():
            sync("w", parameter.grad)
        given["w"] -= parameter.grad
        parameter.grad = None

    memory = (ctypes.c_double * 3)()

    def keep_memory_of_other_libraries(sync):
        with sync.backward():
            sync("w", Foreign(np.frombuffer(memory)))
            sync("v", np.frombuffer(bytearray(24)))

    def ask_for_results(sync):
        with sync.backward():
            sync("w", np.ones(3) / 2)
        given["w"] -= sync.results()["w"]

    def average_trees(sync):
        given["w"] -= gs.average_gradients({"w": np.ones(3) / 2}, sync)["w"]

    trains = [
        *(read_futures, read_in_other_ways, read_in_callbacks, keep_futures, keep_arrays, keep_views),
        *(keep_a_view_of_what_was_handed_over, keep_in_attributes, keep_memory_of_other_libraries),
        *(ask_for_results, average_trees),
    ]
    for train in trains:
        sync = gs.AllreduceCallback("mean", comm, check_every=0, name=train.__name__)
        with Heard() as lines:
            for _ in range(5):
                train(sync)
        assert lines == [], train.__name__


@pytest.mark.ranks(2)
def test_programs_that_use_buckets_are_not_told(comm):
    specs, options = {"w": ((3,), "float64")}, {"check_every": 0}
    views = gs.AllreduceCallback("mean", comm, parameters=specs, gradient_as_bucket_view=True, **options)
    hooked = gs.AllreduceCallback("mean", comm, **options)
    hooked.register_hook(lambda bucket: bucket.communicator.all_reduce(bucket.buffer, bucket.op))
    with Heard() as lines:
        for sync in (views, hooked):
            for _ in range(4):
                with sync.backward():
                    sync("w", np.ones(3) / 2)
    assert lines == []


@pytest.mark.ranks(2)
def test_only_the_first_steps_are_watched(comm):
    sync, types = gs.AllreduceCallback("mean", comm, check_every=0), []
    with Heard() as lines:
        for number in range(6):
            with sync.backward():
                future = sync("w", np.ones(3))
                types.append(type(future))
                if number < 4:
                    gradient = np.ones(2)
                    sync("v", gradient)
                else:  # nobody looks any more
                    sync("v", np.ones(2))
            future.result()
    assert lines == []
    assert types[:3] != types[3:] == [type(future)] * 3
    assert {str(future).partition(" ")[0] for future in [future]} == {"<GradientFuture"}
    with sync.backward():
        pass


@pytest.mark.ranks(2)
def test_a_failed_step_loses_nothing(comm):
    sync = gs.AllreduceCallback("mean", comm, check_every=0)
    with Heard() as lines:
        with pytest.raises(gs.PlanMismatch), sync.backward():
            sync(f"w{comm.rank}", np.ones(3) / 2)
        step(sync, {"w": np.ones(3)})
    assert lines == []


# -- Parameters that were never broadcast ------------------------------------------------------------------------------


def warnings_after(comm, prepare, parameters=None, group=None, **options):
    """The warnings of a program that prepares itself, and makes steps with two callbacks."""
    arrays, named = arrays_of(comm), {"w": np.zeros(3)}
    with Heard() as lines:
        prepare(comm, arrays)
        for name in "ab":
            sync = gs.AllreduceCallback("mean", group, name=name, parameters=parameters, **options)
            for _ in range(2):
                with sync.backward():
                    future = sync("w", arrays.put(np.ones(3)))
                named["w"] -= 0.1 * arrays.get(future.result())
    return lines


def nothing(comm, arrays):
    comm.barrier()


@pytest.mark.ranks(on={"shm": (2, 3), "fake": (2,)}, fresh=True)
def test_parameters_that_were_never_broadcast_are_told_once(comm):
    lines = warnings_after(comm, nothing)
    assert len(lines) == (comm.rank == 0)
    assert all("broadcast" in line and "check_every=0" in line for line in lines)


@pytest.mark.ranks(2, fresh=True)
@pytest.mark.parametrize("of", ["shapes", "read-only arrays", "gradients"])
def test_what_is_no_parameter_is_not_compared(comm, of):
    w = np.zeros(3) if of == "gradients" else np.broadcast_to(np.float64(0), 3)
    with Heard() as lines:
        step(gs.AllreduceCallback("mean", parameters={"w": ((3,), "float64") if of == "shapes" else w}), {"w": w})
    assert len(lines) == (comm.rank == 0)


PREPARED = {
    "bcast_list_": lambda comm, arrays: gs.bcast_list_([arrays.put(np.zeros(3))]),
    "broadcast_tree": lambda comm, arrays: gs.broadcast_tree({"w": arrays.put(np.zeros(3)), "n": 1}),
    "broadcast": lambda comm, arrays: comm.broadcast(arrays.put(np.zeros(3))),
    "asynchronous": lambda comm, arrays: comm.asynchronous.broadcast(arrays.put(np.zeros(3))).result(),
    "objects": lambda comm, arrays: comm.objects.broadcast({"w": 1}),
    "check_consistency": lambda comm, arrays: gs.check_consistency([arrays.put(np.zeros(3))]),
    "long ago": lambda comm, arrays: [comm.barrier() for _ in range(100)],
}


@pytest.mark.ranks(2, on=("shm", "fake"), fresh=True)
@pytest.mark.parametrize("prepare", PREPARED)
def test_what_was_broadcast_or_compared_is_not_told_of(comm, prepare):
    assert warnings_after(comm, PREPARED[prepare]) == []


@pytest.mark.ranks(2, fresh=True)
def test_what_the_ranks_compare_or_a_program_switches_off_is_not_told_of(comm):
    for options in ({"check_every": 0}, {"parameters": {"w": np.zeros(3)}}):
        assert warnings_after(comm, nothing, **options) == []


@pytest.mark.ranks(2, fresh=True)
def test_a_group_has_what_the_world_has_broadcast(comm):
    group = comm.split(0)
    assert warnings_after(comm, PREPARED["bcast_list_"], group=group) == []


@pytest.mark.ranks(2, fresh=True)
def test_a_group_is_told_by_itself(comm):
    group = comm.split(comm.rank)
    assert warnings_after(comm, nothing, group=group) == []  # a world of one
    group = comm.split(0)
    assert len(warnings_after(comm, nothing, group=group)) == (comm.rank == 0)


# -- An update inside of the block -------------------------------------------------------------------------------------


def descend(model, gradients):
    for name, gradient in gradients.items():
        model[name] -= 0.1 * gradient


def warnings_of_updates(comm, broadcast, update, **options):
    """The warnings of a program that broadcasts, and calls `update` in each block, after the hand-over."""
    model = {"w": np.full((2, 3), 1.0 + comm.rank), "b": np.zeros(2)}
    state = {"velocity": np.zeros((2, 3)), "mean": np.zeros(2)}
    with Heard() as lines:
        broadcast(model, state)
        sync = gs.AllreduceCallback("mean", name=update.__name__, **options)
        for _ in range(3):
            gradients = {"w": model["w"] + comm.rank, "b": model["b"] + comm.rank + 1}
            with sync.backward():
                for name, gradient in gradients.items():
                    sync(name, gradient)
                update(model, gradients, state)
            if update is not update_in_the_block:
                descend(model, sync.results())
    return lines


def update_in_the_block(model, gradients, state):
    descend(model, gradients)


def update_something_else(model, gradients, state):
    """As a layer's statistics, which are averaged in the forward pass; and one parameter, which is shared."""
    state["mean"] += 1
    model["b"] += 1


BROADCASTS = {
    "bcast_list_": lambda model, state: gs.bcast_list_(list(model.values())),
    "broadcast_tree": lambda model, state: gs.broadcast_tree([model, state, "and so on"]),
}


@pytest.mark.ranks(2, fresh=True)
@pytest.mark.parametrize("broadcast", BROADCASTS)
def test_an_update_inside_the_block_is_told_once(comm, broadcast):
    lines = warnings_of_updates(comm, BROADCASTS[broadcast], update_in_the_block)
    assert len(lines) == (comm.rank == 0)
    assert all("changed inside the block" in line and "sync.results()" in line for line in lines)


@pytest.mark.ranks(2, fresh=True)
@pytest.mark.parametrize("broadcast", BROADCASTS)
def test_other_changes_inside_the_block_are_not_told_of(comm, broadcast):
    assert warnings_of_updates(comm, BROADCASTS[broadcast], update_something_else) == []


@pytest.mark.ranks(2, fresh=True)
def test_updates_inside_the_block_are_not_looked_for_where_a_program_says_so(comm):
    assert warnings_of_updates(comm, BROADCASTS["bcast_list_"], update_in_the_block, check_every=0) == []


@pytest.mark.ranks(2, fresh=True)
def test_what_was_broadcast_is_not_kept(comm):
    """Also where no step comes: a program may broadcast for ever."""
    from gradsync.bucketing.divergence import _broadcast

    kept = np.zeros(3)
    for _ in range(50):
        gs.bcast_list_([kept, np.zeros(2), kept[:2]])
    assert len(_broadcast[comm]) <= 3


@pytest.mark.ranks(2, fresh=True)
def test_a_step_of_another_callback_inside_the_block_may_change_what_was_broadcast(comm):
    """As of two networks alike that learn from each other's outputs."""
    nets = {"first": np.zeros(3), "second": np.zeros(3)}
    gs.bcast_list_(list(nets.values()))
    outer, inner = (gs.AllreduceCallback("mean", name=name) for name in nets)
    with Heard() as lines:
        for _ in range(2):
            with outer.backward():
                outer("w", np.full(3, 1.0 + comm.rank))
                with inner.backward():
                    inner("w", np.full(3, 1.0 + comm.rank))
                nets["second"] -= inner.results()["w"]
            nets["first"] -= outer.results()["w"]
    assert lines == []


@pytest.mark.ranks(2, fresh=True)
def test_gradients_that_were_broadcast_are_no_parameters(comm):
    """A program may broadcast all that it has, also the arrays in which it adds up gradients."""
    total = np.zeros(3)
    gs.bcast_list_([total])
    with Heard() as lines:
        sync = gs.AllreduceCallback("mean")
        for _ in range(2):
            with sync.backward():
                sync("w", total)
                total += comm.rank
    assert lines == []
