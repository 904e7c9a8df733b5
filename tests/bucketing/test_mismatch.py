"""PlanMismatch: every rank gets it, with what each rank did, at which line, and the remedy; and can go on."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

import gradsync as gs
from arrays import arrays_of
from bucketing.reference import step

ALL = [("w0", (4,), "float32"), ("w1", (3,), "float32"), ("b1", (3,), "float32"), ("w2", (2,), "float32")]
KNOWN = {name: (shape, dtype) for name, shape, dtype in ALL}


def but(name, *changed):
    return [changed if each[0] == name else each for each in ALL]


#: What rank 1 hands over.
GRADIENTS = {
    "without the first": ALL[1:],
    "without a middle one": [ALL[0], *ALL[2:]],
    "without the last": ALL[:-1],
    "nothing": [],
    "one more": [*ALL, ("w3", (3,), "float32")],
    "another shape": but("b1", "b1", (4,), "float32"),
    "another dtype": but("b1", "b1", (3,), "float64"),
    "another name": but("b1", "bias", (3,), "float32"),
}
#: The options of rank 1, and of the others.
OPTIONS = {
    "clip_norm on one rank": ({"clip_norm": 1.0}, {}),
    "two values of clip_norm": ({"clip_norm": 1.0}, {"clip_norm": 2.0}),
    "sum and mean": ({"reduce_method": "sum"}, {}),
    "buckets": ({"threshold_bytes": 30}, {}),
    "a hook": ({"hook": True}, {}),
    "two policies": ({"nonfinite": "raise"}, {"nonfinite": "skip"}),
    "missing": ({"parameters": KNOWN, "missing": "zero"}, {"parameters": KNOWN}),
    "views": ({"parameters": KNOWN, "gradient_as_bucket_view": True}, {"parameters": KNOWN}),
    "names of the callback": ({"name": "generator"}, {"name": "discriminator"}),
}


def make(comm, *, hook=False, **options):
    sync = gs.AllreduceCallback(group=comm, **options)
    if hook:
        sync.register_hook(lambda bucket: None)
    return sync


def hand_over(comm, sync, given):
    arrays = arrays_of(comm)
    gradients = {name: arrays.put(np.ones(shape, dtype)) for name, shape, dtype in given}
    with sync.backward():
        for name, gradient in gradients.items():
            sync(name, gradient)
    return gradients


def disagree(comm, what, steps_before=0):
    """Rank 1 differs in that; the error that this rank gets, after a step in which the ranks are at one again."""
    options = dict(OPTIONS.get(what, ({}, {}))[comm.rank != 1])
    given = GRADIENTS.get(what, ALL) if comm.rank == 1 else ALL
    if what == "missing" and comm.rank != 1:
        given = ALL[1:]
    sync = make(comm, **options)
    for _ in range(steps_before):
        hand_over(comm, sync, ALL)
    arrays = arrays_of(comm)
    gradients = [(name, arrays.put(np.full(shape, 7.0, dtype))) for name, shape, dtype in given]
    with pytest.raises(gs.PlanMismatch) as raised, sync.backward():
        for name, gradient in gradients:
            sync(name, gradient)
    assert all((arrays.get(gradient) == 7).all() for _, gradient in gradients)
    hand_over(comm, make(comm, name="after"), ALL)
    return raised.value


def check_errors(errors):
    """Each rank has the same, with what each did and where; gives its last line, the remedy."""
    ranks = range(len(errors))
    for error in errors:
        assert type(error) is gs.PlanMismatch
        assert set(error.descriptions) == set(ranks)
        assert error.descriptions[0] != error.descriptions[1] != error.descriptions.get(2)
        assert error.descriptions == errors[0].descriptions
        functions = {rank: line.rpartition(" in ")[2] for rank, line in error.places.items()}
        assert functions == dict.fromkeys(ranks, "disagree")
        assert pickle.loads(pickle.dumps(error)).places == error.places
    (remedy,) = {str(error).splitlines()[-1].strip() for error in errors}
    return remedy


@pytest.mark.parametrize(("place", "ranks"), [("fake", 2), pytest.param("mpi", 3, marks=pytest.mark.mpi)])
@pytest.mark.parametrize("what", ["without the last", "nothing", "another shape", "a hook", "views"])
def test_ranks_that_differ_get_the_same_mismatch(run_on_ranks, what, place, ranks):
    check_errors(run_on_ranks(ranks, disagree, what, on=place))


@pytest.mark.parametrize("what", ["without a middle one", "another shape", "another dtype"])
def test_a_rank_that_leaves_the_plan_of_the_last_steps_is_found(run_on_ranks, what):
    for error in run_on_ranks(2, disagree, what, 3):
        assert error.descriptions[0] != error.descriptions[1]


def test_each_difference_gets_the_same_mismatch_and_the_right_remedy(run_on_ranks, file_regression):
    """The lines of the file are `difference: the last line of the error`."""
    remedies = {what: check_errors(run_on_ranks(3, disagree, what)) for what in [*GRADIENTS, *OPTIONS]}
    scenes = (
        miss_a_known_one,
        differ_in_buffers,
        differ_in_collectives,
        differ_in_callbacks,
        differ_in_weights,
        differ_in_arrays_as_names,
        differ_in_the_order_of_parameters,
    )
    for each in scenes:
        first, second = (str(error).splitlines()[-1].strip() for error in run_on_ranks(2, each))
        assert first == second
        remedies[each.__name__.replace("_", " ")] = first
    file_regression.check("".join(f"{what}: {remedy}\n" for what, remedy in remedies.items()), basename="remedies")


def miss_a_known_one(comm):
    with pytest.raises(gs.PlanMismatch) as raised:
        hand_over(comm, make(comm, parameters=KNOWN), [ALL[0], *ALL[2:]] if comm.rank else ALL)
    return raised.value


def differ_in_buffers(comm):
    parameters = {"w0": ((2,), "float64"), "w1": ((3 + comm.rank,), "float64")}
    with pytest.raises(gs.PlanMismatch) as raised:
        make(comm, parameters=parameters, gradient_as_bucket_view=True).gradient_buffers()
    return raised.value


def differ_in_collectives(comm):
    """One rank ends a step, the other saves a checkpoint."""
    sync = make(comm)
    hand_over(comm, sync, ALL)
    with pytest.raises(gs.PlanMismatch) as raised:
        comm.barrier() if comm.rank else hand_over(comm, sync, ALL)
    return raised.value


def differ_in_callbacks(comm):
    generator = gs.AllreduceCallback("mean", comm)
    discriminator = gs.AllreduceCallback("mean", comm)
    hand_over(comm, generator, ALL)
    hand_over(comm, discriminator, ALL)
    with pytest.raises(gs.PlanMismatch) as raised:
        hand_over(comm, discriminator if comm.rank else generator, ALL)
    return raised.value


def differ_in_weights(comm):
    sync = make(comm)
    with pytest.raises(gs.PlanMismatch) as raised, sync.backward(weight=comm.rank or None):
        sync("w", np.ones(3))
    return raised.value


def differ_in_arrays_as_names(comm):
    sync = make(comm)
    with pytest.raises(gs.PlanMismatch) as raised, sync.backward():
        for value in (7, comm.rank):
            sync(np.full(3, value), np.ones(3))
    return raised.value


def differ_in_the_order_of_parameters(comm):
    parameters = [np.ones(3), np.ones(4)]
    if comm.rank:
        parameters.reverse()
    sync = make(comm, parameters=parameters)
    with pytest.raises(gs.PlanMismatch) as raised, sync.backward():
        for parameter in parameters:
            sync(parameter, parameter.copy())
    return raised.value


def differ_late(comm):
    given = [(f"a parameter with a long name, number {i}", (2, 3), "float32") for i in range(4500)]
    if comm.rank:
        given[4400] = (given[4400][0], (3, 2), "float32")
    with pytest.raises(gs.PlanMismatch) as raised:
        hand_over(comm, make(comm), given)
    return str(raised.value)


def test_the_first_difference_of_a_large_step_is_named(run_on_ranks):
    for text in run_on_ranks(2, differ_late):
        assert "number 4400': float32[2, 3]" in text
        assert "number 4400': float32[3, 2]" in text


# -- The lines of the program ------------------------------------------------------------------------------------------


def mark(text):
    """The line of this file that ends in this comment."""
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{next(number for number, line in enumerate(lines, 1) if line.endswith(f'# {text}'))}"


def flush_too_early(comm):
    if comm.rank == 0:
        comm.barrier()  # waits
    sync = gs.AllreduceCallback("mean", comm)
    sync("a", arrays_of(comm).put(np.ones(10)))
    sync.flush()  # ends the step


def reduce_or_wait(comm):
    if comm.rank == 0:
        comm.all_reduce(arrays_of(comm).put(np.ones(3)))  # reduces
    comm.barrier()  # comes early


def submit_or_wait(comm):
    if comm.rank == 0:
        comm.asynchronous.all_reduce(arrays_of(comm).put(np.ones(3))).result()  # submits
    comm.barrier()  # waits for it


def gather_or_average(comm):
    if comm.rank == 0:
        comm.objects.all_gather("an object")  # gathers
    gs.average_gradients({"a": arrays_of(comm).put(np.ones(3))}, communicator=comm)  # averages


def call_through_a_package(comm):
    """The line is the program's, not that of an installed package that it calls."""
    package = {}
    exec(compile("def call(function):\n    return function()\n", "/x/site-packages/other.py", "exec"), package)
    if comm.rank == 0:
        package["call"](comm.barrier)  # through a package
    package["call"](lambda: comm.objects.all_gather(1))  # too


def send_and_receive(comm):
    if comm.rank == 0:
        comm.send(arrays_of(comm).put(np.ones(3)), 1)  # sends
    if comm.rank == 1:
        comm.recv(arrays_of(comm).put(np.ones(4)), 0)  # receives


def a_group_of_the_last(comm):
    group = comm.new_group([1, 2])
    if group and group.rank == 0:
        group.all_reduce(arrays_of(comm).put(np.ones(3)))  # reduces in the group
    elif group:
        group.barrier()  # waits in the group


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("scene", "first", "others"),
    [
        (flush_too_early, "waits", "ends the step"),
        (reduce_or_wait, "reduces", "comes early"),
        (submit_or_wait, "submits", "waits for it"),
        (gather_or_average, "gathers", "averages"),
        (call_through_a_package, "through a package", "too"),
        (send_and_receive, "sends", "receives"),
        (a_group_of_the_last, "reduces in the group", "waits in the group"),
    ],
)
def test_each_rank_shows_the_line_of_the_program_at_which_each_is(comm, scene, first, others):
    ranks = {send_and_receive: (0, 1), a_group_of_the_last: (1, 2)}.get(scene, (0, 1, 2))
    if comm.rank not in ranks:
        scene(comm)
        return
    with pytest.raises(gs.PlanMismatch) as raised:
        scene(comm)
    error = raised.value
    lines = {rank: mark(first if rank == ranks[0] else others) for rank in ranks}
    assert {rank: place.rpartition(" in ")[0] for rank, place in error.places.items()} == lines
    for rank, line in lines.items():
        assert f"at {line} in " in str(error)
        assert line not in error.descriptions[rank]  # those say what is called, not where


# -- After it ----------------------------------------------------------------------------------------------------------


def repeat_the_step(comm, options):
    """The first bucket is alike on both ranks, the second is not; then the step is repeated."""
    sync = gs.AllreduceCallback("sum", comm, threshold_bytes=16, **options)
    a, b = np.full(2, 1.0 + comm.rank), np.full(2, 1.0 + comm.rank)
    with pytest.raises(gs.PlanMismatch), sync.backward():
        sync("a", a)
        sync("c" if comm.rank else "b", b)
    return [a.tolist(), b.tolist(), *[result.tolist() for result in step(sync, {"a": a, "b": b}).values()]]


def test_after_a_mismatch_no_gradient_has_changed(run_on_ranks):
    reduced = [[3.0, 3.0]] * 2
    assert run_on_ranks(2, repeat_the_step, {}) == [[[1.0] * 2, [1.0] * 2, *reduced], [[2.0] * 2, [2.0] * 2, *reduced]]
