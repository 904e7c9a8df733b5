"""Random steps of an AllreduceCallback, played against a naive reference; run inside rank processes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from naive_reference import SPECS, Values, expect_equal, fill, on_host, put_all, reduced, values_for

import gradsync as gs
from contract import expect
from kits import make_kit

NAMES = ("one", "two", "matrix", "double", "scalar", "empty", "half", "huge")
CHOSEN = {name: SPECS[name] for name in NAMES}
MODES = ("plain", "parameters", "zero", "views", "learnt")
#: Where a gradient comes from: the array of the steps before, a new one, its neighbour's, one that lies apart, ...
SOURCES = ("own", "new", "swapped", "strided", "read-only")


class RandomStep(NamedTuple):
    """One step.

    Attributes:
        names: by rank, in the order in which it hands them over.
        sources: by rank and name.
        is_repeated: whether a gradient is handed over twice, which is refused.
    """

    names: list[list[str]]
    sources: list[dict[str, str]]
    is_repeated: bool


class Program(NamedTuple):
    """Steps of one callback."""

    mode: str
    method: str
    threshold_bytes: int
    steps: list[RandomStep]


def play(comm: Any, kit_name: str, program: Program) -> None:
    kit = make_kit(comm, kit_name)
    mode, n = program.mode, comm.world_size
    callback = gs.AllreduceCallback(
        program.method,
        comm,
        threshold_bytes=program.threshold_bytes,
        parameters=CHOSEN if mode in ("parameters", "zero") else None,
        missing="zero" if mode == "zero" else "error",
        gradient_as_bucket_view=mode in ("views", "learnt"),
    )
    own = callback.gradient_buffers(CHOSEN) if mode == "views" else put_all(kit, values_for(comm.rank, 0, CHOSEN))
    for number, step in enumerate(program.steps):
        given = [values_for(rank, number, CHOSEN) for rank in range(n)]
        handed = [set(names) for names in step.names]
        for values, names in zip(given, handed, strict=True):
            for name in CHOSEN.keys() - names:
                values[name][...] = 0
        if mode == "zero":
            wanted_names = list(NAMES)
        else:
            wanted_names = [name for name in NAMES if name in handed[comm.rank]]
        mine = step.names[comm.rank]
        arrays = sources_of(kit, own, mine, step.sources[comm.rank], mode)
        futures = {}
        for at, name in enumerate(mine):
            write(arrays[name], given[comm.rank][name])
            futures[name] = callback(name, arrays[name])
            if step.is_repeated and at == 0 and len(mine) > 1:
                again = kit.put(np.ones(3))
                expect(gs.InvalidArgument, lambda n=name, a=again: callback(n, a))
        callback.flush()
        got: Values = {name: on_host(future.result()) for name, future in futures.items()}
        got |= {name: on_host(array) for name, array in callback.filled.items()}
        wanted = reduced([{name: values[name] for name in wanted_names} for values in given], program.method)
        expect_equal(comm, {name: got[name] for name in wanted_names}, wanted if wanted_names else {}, (number, mode))


def sources_of(kit: Any, own: dict[str, Any], names: list[str], sources: dict[str, str], mode: str) -> dict[str, Any]:
    """Returns the array of each gradient."""
    arrays = {name: own[name] for name in names}
    can_swap = {"one", "two"} <= set(names) and mode != "views"
    for name in names:
        shape, dtype = CHOSEN[name]
        source = sources[name]
        if source == "swapped" and name in ("one", "two") and can_swap:
            arrays["one"], arrays["two"] = own["two"], own["one"]
        elif source == "new":
            arrays[name] = kit.put(np.zeros(shape, dtype))
        elif source == "strided" and shape:
            arrays[name] = kit.put(np.zeros((*shape, 2), dtype))[..., 1]
        elif source == "read-only":
            arrays[name] = kit.put(np.zeros(shape, dtype))
            if isinstance(arrays[name], np.ndarray):
                arrays[name].setflags(write=False)
    ids = [id(array) for array in arrays.values()]
    return arrays if len(set(ids)) == len(ids) else {name: own[name] for name in names}


def write(array: Any, values: np.ndarray[Any, Any]) -> None:
    """Writes values into an array, which may be one that cannot be written to."""
    is_read_only = isinstance(array, np.ndarray) and not array.flags.writeable
    if is_read_only:
        array.setflags(write=True)
    fill(array, values)
    if is_read_only:
        array.setflags(write=False)
