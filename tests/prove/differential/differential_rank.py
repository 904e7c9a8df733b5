"""One rank of tests/prove/differential/differential.py: runs programs, and writes what came of each, a line a program.

    gradsync run -n 2 tests/prove/differential/differential_rank.py PROGRAMS.json FOLDER

Uses public names of gradsync and nothing else of this repository, so that it runs on every edition.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import gradsync as gs

DEADLINE_SECONDS = 60.0


class PlantedError(Exception):
    """What a program raises by itself."""


def main(programs: str, folder: str) -> None:
    with Path(folder, os.environ["RANK"]).open("w") as lines:
        for program in json.loads(Path(programs).read_text()):
            print(json.dumps(outcome_of(program)), file=lines, flush=True)


def outcome_of(program: dict[str, Any]) -> list[Any]:
    """Runs a program; returns a digest for each of its results, and the error that ended it, if one did."""
    found: list[Any] = []
    play = play_gradients if program["kind"] == "gradients" else play_collectives
    try:
        with gs.init_process_group(collective_timeout_seconds=DEADLINE_SECONDS) as comm:
            play(comm, program, found)
    except (gs.GradsyncError, PlantedError, ValueError) as error:
        found.append(facts_of(error))
    gs.destroy_process_group()
    return found


def facts_of(error: Exception) -> dict[str, Any]:
    """Returns the type of an error, and its fields without wording."""
    facts: dict[str, Any] = {"error": type(error).__name__}
    for name in sorted(set(dir(error)) - set(dir(Exception))):
        value = getattr(error, name)
        if name == "phase":  # what the culprit was doing when it was looked at: chance
            continue
        if name == "descriptions":
            value = sorted(value)  # the ranks
        elif name in ("traceback_text", "handed_over_at"):
            value = bool(value)
        facts[name] = value
    return facts


def digest(*arrays: Any) -> str:
    told = hashlib.sha256()
    for array in arrays:
        is_array = isinstance(array, np.ndarray)
        told.update(f"{array.dtype} {array.shape}".encode() if is_array else repr(array).encode())
        told.update(np.ascontiguousarray(array).tobytes() if is_array else b"")
    return told.hexdigest()[:12]


def values(shape: Any, dtype: str, *seed: int) -> Any:
    """Returns random numbers around 1; sums depend on the order in which they are added up."""
    generator = np.random.default_rng(seed)
    if dtype == "bool" or "int" in dtype:
        return np.asarray(generator.integers(0, 2 if dtype == "bool" else 4, shape)).astype(dtype)
    numbers = generator.uniform(0.5, 1.5, shape)
    if dtype.startswith("complex"):
        numbers = numbers + 1j * generator.uniform(0.5, 1.5, shape)
    return np.asarray(numbers).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


# -- Collectives -----------------------------------------------------------------------------------------------------


def play_collectives(world: Any, program: dict[str, Any], found: list[Any]) -> None:
    comms = [world, *(world.new_group(ranks) for ranks in program["groups"][1:])]
    pending: list[Any] = []

    def settle() -> None:
        found.extend(digest(future.result(), *arrays) for future, *arrays in pending)
        pending.clear()

    for number, step in enumerate(program["steps"]):
        planted = program["planted"]
        if planted and planted["step"] == number:
            settle()  # else it would be chance which collective the others learn in
        if planted and planted["step"] == number and planted["rank"] == world.rank:
            if planted["what"] == "raise":
                raise PlantedError
            if planted["what"] == "leave":
                return
            if planted["what"] == "skip":
                continue
            step = {**step, **planted["instead"]}
        comm = comms[step["group"]]
        if not comm:
            continue
        result = collective(comm, comm.asynchronous if step["is_asynchronous"] else comm, step, number)
        if hasattr(result[0], "result"):
            pending.append(result)
        else:
            found.append(digest(*result))
    settle()
    for comm in reversed(comms[1:]):
        if comm:
            comm.close()


def collective(comm: Any, form: Any, step: dict[str, Any], number: int) -> tuple[Any, ...]:
    """Takes this rank's part in a step; returns the result, or its future, and the array that was given."""
    n, me, kind, op, root = comm.world_size, comm.rank, step["kind"], step["op"], step["root"]
    rows, tail, sizes = step["rows"], step["tail"] or [], step["sizes"]
    one_shape = [] if step["tail"] is None else [rows[0], *tail]

    def made(shape: Any, seed: int = me) -> Any:
        return laid_out(values(shape, step["dtype"], number, seed), step["layout"] + seed)

    def out(shape: Any, *, needed: bool = False) -> Any:
        return made(shape, 99) if needed or step["form"] == "out" else None

    if kind == "barrier":
        return (form.barrier(),)
    if kind == "objects":
        return (comm.objects.all_gather({"rank": me, "text": "x" * (number * 37 % 5000)}),)
    if kind in ("all_reduce", "reduce"):
        array = made(one_shape)
        if kind == "reduce":
            return form.reduce(array, op, root, out=out(one_shape) if me == root else None), array
        return form.all_reduce(array, op, out=out(one_shape)), array
    if kind == "broadcast":
        array = made(one_shape)
        return form.broadcast(array, root), array
    if kind == "reduce_scatter":
        array = made([sum(rows), *tail])
        given = None if sizes == "equal" else rows
        return form.reduce_scatter(array, op, sizes=given, out=out([rows[me], *tail])), array
    if kind in ("all_gather", "gather"):
        array, given = made([rows[me], *tail]), {"equal": None, "given": rows, "ask": "ask"}[sizes]
        into = None if sizes == "ask" or (kind == "gather" and me != root) else out([sum(rows), *tail])
        if kind == "gather":
            return form.gather(array, root, sizes=given, out=into), array
        return form.all_gather(array, sizes=given, out=into), array
    if kind == "scatter":
        array, given = made([sum(rows), *tail]) if me == root else None, None if sizes == "equal" else rows
        return form.scatter(array, root, sizes=given, out=out([rows[me], *tail], needed=me != root)), array
    if kind == "all_to_all":
        table = [[rows[(sender + 2 * receiver) % n] for receiver in range(n)] for sender in range(n)]
        array, from_all = made([sum(table[me]), *tail]), [row[me] for row in table]
        given = (None, None) if sizes == "equal" else (table[me], None if sizes == "ask" else from_all)
        into = None if sizes == "ask" else out([sum(from_all), *tail])
        return form.all_to_all(array, send_sizes=given[0], recv_sizes=given[1], out=into), array
    if kind == "exchange":
        dest, source = (me + 1 + root) % n, (me - 1 - root) % n
        array, room = made([rows[me], *tail]), made([rows[source], *tail], 99)
        return form.exchange(array, dest=dest, out=room, source=source), array
    receiver = (root + 1) % n
    array = made(one_shape)
    if n == 1 or me not in (root, receiver):
        return None, array
    return (form.send(array, receiver) if me == root else form.recv(array, root)), array


def laid_out(array: Any, layout: int) -> Any:
    """Returns the values in another layout of memory."""
    if not array.ndim or layout % 4 == 0:
        return array
    if layout % 4 == 1:
        return np.asfortranarray(array)
    wide = np.zeros((*array.shape, 2), array.dtype)[..., 0] if layout % 4 == 2 else array[::-1].copy()[::-1]
    wide[...] = array
    return wide


# -- Gradients -------------------------------------------------------------------------------------------------------


def play_gradients(comm: Any, program: dict[str, Any], found: list[Any]) -> None:
    specs, planted = program["specs"], program["planted"] or {"step": -1, "rank": -1, "what": ""}
    mine = planted["rank"] == comm.rank
    options = dict(program["options"])
    if options.pop("parameters"):
        options["parameters"] = {name: (tuple(shape), dtype) for name, (shape, dtype) in specs.items()}
    if mine and planted["what"] == "method":
        options["reduce_method"] = "sum" if options["reduce_method"] == "mean" else "mean"
    callbacks = [gs.AllreduceCallback(group=comm, **options) for _ in range(program["callbacks"])]
    own = {name: np.zeros(shape, dtype) for name, (shape, dtype) in specs.items()}
    if program["mode"] == "views":
        own = callbacks[0].gradient_buffers()
    for number, step in enumerate(program["steps"]):
        what = planted["what"] if mine and planted["step"] == number else ""
        order = callbacks[::-1] if what == "crosswise" else callbacks
        for callback in order:
            seed = (program["seed"], number, callbacks.index(callback))
            found.extend(one_step(comm, callback, step, seed, what, own if program["callbacks"] == 1 else {}, specs))
        if what == "leave":
            return


def one_step(comm: Any, callback: Any, step: Any, seed: Any, what: str, own: Any, specs: Any) -> list[Any]:
    """Hands over one step's gradients; returns a digest of each result, the norm, and whether to skip the step."""
    names = list(step["names"][comm.rank])
    if what == "order":
        names = names[1:] + names[:1]
    if what == "less":
        names.pop()
    futures = {}
    if step["has_local_pass"]:
        with callback.no_sync():
            for name in names:
                callback(name, values(*specs[name], *seed, comm.rank))
    with callback.backward():
        for name in names:
            shape, dtype = specs[name]
            if name == names[-1] and what in ("shape", "dtype"):
                shape, dtype = ([*shape, 2], dtype) if what == "shape" else (shape, "complex128")
            array = (
                own.get(name) if step["is_own"] and list(shape) == list(specs[name][0]) and what != "dtype" else None
            )
            if array is None:
                array = np.zeros(shape, dtype)
            array[...] = values(shape, dtype, *seed, comm.rank, len(futures))
            if what == "nan" and array.size:
                array.reshape(-1)[0] = np.nan
            if what == "raise" and name == names[-1]:
                raise PlantedError
            futures[name] = callback(name, float(array.real.sum()) if what == "number" else array)
            if what == "twice":
                callback(name, array)
            if what == "write":
                array += 1
    results = {name: np.array(future.result()) for name, future in futures.items()}
    results |= {name: np.array(array) for name, array in callback.filled.items()}
    told = [f"{name} {digest(array)}" for name, array in results.items()]
    return [*told, f"norm {callback.norm!r}", f"skip_step {callback.skip_step}"]


if __name__ == "__main__":
    main(*sys.argv[1:])
