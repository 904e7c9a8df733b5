"""What steps of an AllreduceCallback must do whose arrays come again, or almost; run inside rank processes."""

from __future__ import annotations

import gc
import time
import weakref
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
from kits import bring_to_rest, make_kit


def repeat_the_same_arrays(comm: Any, kit_name: str, thresholds: tuple[int, ...]) -> None:
    """The very same arrays five times, with other values each time, give what new arrays give."""
    kit = make_kit(comm, kit_name)
    for method in ("mean", "sum"):
        for threshold_bytes in thresholds:
            steady = gs.AllreduceCallback(method, comm, threshold_bytes=threshold_bytes)
            fresh = gs.AllreduceCallback(method, comm, threshold_bytes=threshold_bytes)
            arrays = put_all(kit, values_for(comm.rank, 0))
            for number in range(5):
                values = values_for(comm.rank, number)
                for name, array in arrays.items():
                    fill(array, values[name])
                got = step(steady, arrays)
                expect_equal(comm, got, reduced(by_rank(comm.world_size, number), method), number)
                of_new = step(fresh, put_all(kit, values))
                for name, array in arrays.items():
                    assert got[name].tobytes() == of_new[name].tobytes() == on_host(array).tobytes(), (number, name)


DEVIATIONS = (
    *("array", "two arrays", "swapped", "strided", "read-only", "other memory"),
    *("order", "name", "shape", "dtype", "fewer", "fewest", "without the first", "more", "more in the middle", "none"),
)


def deviate(comm: Any, kit_name: str, thresholds: tuple[int, ...], deviations: tuple[str, ...] = DEVIATIONS) -> None:
    """Between three steady steps each, one that is another in some way."""
    kit = make_kit(comm, kit_name)
    for threshold_bytes in thresholds:
        callback = gs.AllreduceCallback("mean", comm, threshold_bytes=threshold_bytes)
        arrays = put_all(kit, values_for(comm.rank, 0))
        number = 0
        for how in (*deviations, ""):
            for way in ("", "", "", how):
                number += 1
                given = [arranged(values, way) for values in by_rank(comm.world_size, number)]
                gradients = handed_over(kit, arrays, given[comm.rank], way)
                got = step(callback, gradients)
                expect_equal(comm, got, reduced(given) if given[0] else {}, (how, way, threshold_bytes))
                for name, array in gradients.items():
                    if isinstance(array, np.ndarray) and not array.flags.writeable:
                        assert on_host(array).tobytes() == given[comm.rank][name].tobytes()
                        array.setflags(write=True)
                    else:
                        assert on_host(array).tobytes() == got[name].tobytes(), (how, name)


def arranged(values: Values, way: str) -> Values:
    """Returns a step's gradients, in the order in which they come, in a step that is another one in some way."""
    names = list(values)
    if way == "order":
        names[3], names[4] = names[4], names[3]
    elif way == "fewer":
        names = names[:-2]
    elif way == "fewest":
        names = names[:1]
    elif way == "without the first":
        names = names[1:]
    elif way == "none":
        names = []
    chosen = {name: values[name] for name in names}
    if way == "shape":
        chosen["one"] = chosen["one"].reshape(8, 5)
    elif way == "dtype":
        chosen["one"] = chosen["one"].astype(np.float64)
    elif way == "name":
        chosen = {"three" if name == "two" else name: each for name, each in chosen.items()}
    elif way == "more":
        chosen["more"] = values["one"] + 1
    elif way == "more in the middle":
        items = list(chosen.items())
        chosen = dict([*items[:4], ("more", values["one"] + 1), *items[4:]])
    return chosen


def handed_over(kit: Any, arrays: dict[str, Any], values: Values, way: str) -> dict[str, Any]:
    """Returns the arrays of a step: those of the steps before, but for what is to be another one."""
    gradients = {}
    for name, each in values.items():
        array = arrays.get(name)
        is_new = array is None or array.shape != each.shape or array.dtype != each.dtype
        if (name == "matrix" and way in ("array", "two arrays")) or (name == "last" and way == "two arrays") or is_new:
            array = kit.put(each.copy())
        elif name in ("one", "two") and way == "swapped":
            array = arrays["two" if name == "one" else "one"]
        elif name == "one" and way == "strided":
            array = kit.put(np.zeros((each.size, 2), each.dtype))[:, 1]
        elif name == "one" and way == "other memory" and hasattr(array, "_become"):  # the stand-in lets us do it
            other = kit.put(each.copy())
            array._become(other.data, other._host, None)
        fill(array, each)
        if name == "one" and way == "read-only" and isinstance(array, np.ndarray):
            array.setflags(write=False)
        gradients[name] = array
    return gradients


class Foreign:
    """An array of another library: it supports DLPack, and nothing else."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def reduce_foreign_arrays(comm: Any, kit_name: str) -> None:
    """Results lie in their memory, and the futures give them; also where the very same come again."""
    kit = make_kit(comm, kit_name)
    specs = {name: SPECS[name] for name in ("matrix", "one", "double")}
    for recurs in (True, False):
        callback = gs.AllreduceCallback("sum", comm, threshold_bytes=700)
        arrays = put_all(kit, values_for(comm.rank, 0, specs))
        foreign = {name: Foreign(array) for name, array in arrays.items()}
        for number in range(4):
            if not recurs:
                foreign = {name: Foreign(array) for name, array in arrays.items()}
            for name, values in values_for(comm.rank, number, specs).items():
                fill(arrays[name], values)
            with callback.backward():
                futures = {name: callback(name, gradient) for name, gradient in foreign.items()}
            assert all(future.result() is foreign[name] for name, future in futures.items())
            got = {name: on_host(array) for name, array in arrays.items()}
            expect_equal(comm, got, reduced(by_rank(comm.world_size, number, specs), "sum"), number)


def hold_no_memory(comm: Any, kit_name: str, options: dict[str, Any]) -> None:
    """Arrays that are new in each step go with the step; those that came again, with the first step without them."""
    kit = make_kit(comm, kit_name)
    specs = {name: SPECS[name] for name in ("matrix", "one", "double", "huge")}
    callback = gs.AllreduceCallback("mean", comm, threshold_bytes=700, **options)

    def are_gone(held: list[Any]) -> bool:
        bring_to_rest(comm)
        deadline = time.monotonic() + 60.0
        while True:  # on a GPU arrays are held until their launch has been seen to end
            gc.collect()
            is_over = all(reference() is None for reference in held)
            if is_over or comm.backend != "nccl" or time.monotonic() > deadline:
                return is_over
            time.sleep(0.01)

    for number in range(4):
        arrays = put_all(kit, values_for(comm.rank, number, specs))
        step(callback, arrays)
        held = [weakref.ref(array) for array in arrays.values()]
        del arrays
        assert are_gone(held), f"step {number}"
    arrays = put_all(kit, values_for(comm.rank, 0, specs))
    for _ in range(4):
        step(callback, arrays)
    held = [weakref.ref(array) for array in arrays.values()]
    del arrays
    step(callback, put_all(kit, values_for(comm.rank, 0, specs)))
    assert are_gone(held)
