"""What ranks of tests/bucketing/test_advice.py do: rank 1 differs from the others in one thing."""

from __future__ import annotations

from typing import Any

import numpy as np

import gradsync as gs
from contract import expect
from kits import make_kit

Given = list[tuple[str, tuple[int, ...], str]]

ALL: Given = [("w0", (4,), "float32"), ("w1", (3,), "float32"), ("b1", (3,), "float32"), ("w2", (2,), "float32")]

#: By name: what rank 1 hands over.
GRADIENTS: dict[str, Given] = {
    "without the first": ALL[1:],
    "without a middle one": [ALL[0], *ALL[2:]],
    "without the last": ALL[:-1],
    "nothing": [],
    "one more": [*ALL, ("w3", (3,), "float32")],
    "another order": [ALL[0], *ALL[:0:-1]],
    "another shape": [*ALL[:2], ("b1", (4,), "float32"), ALL[3]],
    "another dtype, reduced later": [*ALL[:2], ("b1", (3,), "float64"), ALL[3]],
    "another dtype, reduced before": [*ALL[:2], ("b1", (3,), "float16"), ALL[3]],
    "another name": [*ALL[:2], ("bias", (3,), "float32"), ALL[3]],
}

#: By name: the options of rank 1, and those of the others.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "clip_norm on one rank": ({"clip_norm": 1.0}, {}),
    "clip_norm on the others": ({}, {"clip_norm": 1.0}),
    "two values of clip_norm": ({"clip_norm": 1.0}, {"clip_norm": 2.0}),
    "sum and mean": ({"reduce_method": "sum"}, {}),
    "thresholds": ({"threshold_bytes": 30}, {}),
}


def last_line(comm: Any, kit_name: str, name: str, steps_before: int = 0) -> str:
    """Returns the last line of the error that this rank gets."""
    kit, is_odd = make_kit(comm, kit_name), comm.rank == 1
    options = OPTIONS[name][not is_odd] if name in OPTIONS else {}
    callback = gs.AllreduceCallback(group=comm, **options)
    for _ in range(steps_before):
        hand_over(callback, kit, ALL)
    return error_line(lambda: hand_over(callback, kit, GRADIENTS.get(name, ALL) if is_odd else ALL))


def hand_over(callback: gs.AllreduceCallback, kit: Any, given: Given) -> None:
    with callback.backward():
        for name, shape, dtype in given:
            callback(name, kit.put(np.ones(shape, dtype)))


def error_line(call: Any) -> str:
    error = expect(gs.PlanMismatch, call)
    return str(error).splitlines()[-1].strip()


def hook_on_one_rank(comm: Any, kit_name: str) -> str:
    kit, callback = make_kit(comm, kit_name), gs.AllreduceCallback(group=comm)
    if comm.rank == 1:
        callback.register_hook(lambda bucket: None)
    return error_line(lambda: hand_over(callback, kit, ALL))


def missing_parameter(comm: Any, kit_name: str) -> str:
    """The bucket begins alike on all ranks; a later gradient is missing."""
    parameters = {name: (shape, dtype) for name, shape, dtype in ALL}
    kit, callback = make_kit(comm, kit_name), gs.AllreduceCallback(group=comm, parameters=parameters)
    return error_line(lambda: hand_over(callback, kit, [ALL[0], *ALL[2:]] if comm.rank == 1 else ALL))


def other_buckets(comm: Any, kit_name: str) -> str:
    """The ranks differ already in the memory of the buckets."""
    parameters = {"w0": ((2,), "float64"), "w1": ((3 + comm.rank,), "float64")}
    callback = gs.AllreduceCallback(group=comm, parameters=parameters, gradient_as_bucket_view=True)
    return error_line(callback.gradient_buffers)


def missing_array(comm: Any, kit_name: str) -> str:
    """Parameters that are arrays are known by their order, which a missing one changes for all after it."""
    kit, callback = make_kit(comm, kit_name), gs.AllreduceCallback(group=comm)
    arrays = [kit.put(np.ones(size)) for size in (4, 3, 2)]
    for array in arrays[:1] + arrays[2:] if comm.rank == 1 else arrays:
        callback(array, kit.put(np.ones(array.shape)))
    return error_line(callback.flush)


def another_order_of_arrays(comm: Any, kit_name: str) -> str:
    kit, callback = make_kit(comm, kit_name), gs.AllreduceCallback(group=comm)
    arrays = [kit.put(np.ones(size)) for size in (4, 3)]
    for array in reversed(arrays) if comm.rank == 1 else arrays:
        callback(array, kit.put(np.ones(array.shape)))
    return error_line(callback.flush)


def missing_known_array(comm: Any, kit_name: str) -> str:
    """One rank ends its step without the last of the `parameters`."""
    kit = make_kit(comm, kit_name)
    arrays = [kit.put(np.ones(size)) for size in (4, 3, 2)]
    callback = gs.AllreduceCallback(group=comm, parameters=arrays)

    def step() -> None:
        for array in arrays[:2] if comm.rank == 1 else arrays:
            callback(array, kit.put(np.ones(array.shape)))
        callback.flush()

    return error_line(step)


def another_all_reduce(comm: Any, kit_name: str) -> str:
    """One rank makes a step more; the other rank goes on to an all-reduce of its own."""
    kit, callback = make_kit(comm, kit_name), gs.AllreduceCallback(group=comm)
    hand_over(callback, kit, ALL)
    array = kit.put(np.ones(3))
    return error_line(lambda: comm.all_reduce(array) if comm.rank == 1 else hand_over(callback, kit, ALL))


def other_arrays(comm: Any, kit_name: str) -> str:
    """No gradients of a callback."""
    array = make_kit(comm, kit_name).put(np.ones(4 if comm.rank == 1 else 3))
    return error_line(lambda: comm.all_reduce(array))


def other_callbacks(comm: Any, kit_name: str) -> str:
    kit = make_kit(comm, kit_name)
    generator, discriminator = gs.AllreduceCallback(group=comm), gs.AllreduceCallback(group=comm)
    return error_line(lambda: hand_over(discriminator if comm.rank == 1 else generator, kit, ALL))


def other_collectives(comm: Any, kit_name: str) -> str:
    """One rank ends a step, another one saves a checkpoint."""
    kit, callback = make_kit(comm, kit_name), gs.AllreduceCallback(group=comm)
    hand_over(callback, kit, ALL)
    return error_line(comm.barrier if comm.rank == 1 else lambda: hand_over(callback, kit, ALL))


def another_order_of_many(comm: Any, kit_name: str) -> str:
    """More gradients than fit into the text for the other ranks: none is called missing."""
    kit, callback = make_kit(comm, kit_name), gs.AllreduceCallback(group=comm)
    numbers = range(999, -1, -1) if comm.rank == 1 else range(1000)
    return error_line(lambda: hand_over(callback, kit, [(f"number {i}", (), "float32") for i in numbers]))
