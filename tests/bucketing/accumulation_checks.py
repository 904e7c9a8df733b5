"""What accumulate() must do on every backend; run inside rank processes.

What it reduces is bit for bit what a callback gives that is handed gradients added up by hand.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import gradsync as gs
from contract import expect
from kits import make_kit

SHAPES: dict[str, tuple[tuple[int, ...], str]] = {
    "weights": ((5, 3), "float32"),
    "bias": ((3,), "float32"),
    "scale": ((), "float64"),
    "table": ((300,), "float32"),
    "halves": ((7,), "float16"),
}
STEPS = (1, 3, 2, 4)  # passes of each
OPTIONS: list[dict[str, Any]] = [
    {},
    {"threshold_bytes": 100, "clip_norm": 0.5, "nonfinite": "skip"},
    {"parameters": SHAPES},
    {"parameters": SHAPES, "gradient_as_bucket_view": True},
]


def values(rank: int, step: int, number: int, name: str) -> np.ndarray[Any, Any]:
    shape, dtype = SHAPES[name]
    source = np.random.default_rng([rank, step, number, sorted(SHAPES).index(name)])
    return source.normal(size=shape).astype(dtype)


def names_of(number: int, passes: int) -> list[str]:
    """In some local passes a parameter does not come; in the last one all do."""
    return list(SHAPES) if number == passes - 1 else [name for at, name in enumerate(SHAPES) if (at + number) % 3]


def by_hand(rank: int, step: int, passes: int) -> dict[str, np.ndarray[Any, Any]]:
    totals: dict[str, np.ndarray[Any, Any]] = {}
    for number in range(passes):
        for name in names_of(number, passes):
            gradient = values(rank, step, number, name)
            totals[name] = totals[name] + gradient if name in totals else gradient
    return totals


def add_up(comm: Any, kit_name: str, options: dict[str, Any]) -> None:
    """In new arrays; each step against a plain callback, and its local futures against NumPy."""
    kit = make_kit(comm, kit_name)
    sync, plain = (gs.AllreduceCallback("mean", comm, name=name, **options) for name in ("sums", "plain"))
    for step, passes in enumerate(STEPS):
        so_far: dict[str, np.ndarray[Any, Any]] = {}
        for number in range(passes - 1):
            with sync.accumulate():
                given = {name: values(comm.rank, step, number, name) for name in names_of(number, passes)}
                handed = {name: kit.put(each) for name, each in given.items()}
                futures = {name: sync(name, each) for name, each in handed.items()}
                for name, each in given.items():
                    so_far[name] = so_far[name] + each if name in so_far else each
                    assert comm.device != "cpu" or futures[name].done()
                    np.testing.assert_array_equal(kit.get(futures[name].result()), so_far[name])
                    np.testing.assert_array_equal(kit.get(handed[name]), each)  # is left as it was
        with sync.backward():
            last = {name: kit.put(values(comm.rank, step, passes - 1, name)) for name in SHAPES}
            futures = {name: sync(name, each) for name, each in last.items()}
        totals = by_hand(comm.rank, step, passes)
        with plain.backward():  # in the same order: that of a norm's terms decides its last bit
            wanted = {name: plain(name, kit.put(totals[name])) for name in SHAPES}
        same_as(futures, wanted, kit, (step, options))
        assert (sync.norm, sync.skip_step) == (plain.norm, plain.skip_step)
    assert sync.statistics.steps == len(STEPS)


def same_as(got: dict[str, Any], wanted: dict[str, Any], kit: Any, where: Any) -> None:
    for name in SHAPES:
        np.testing.assert_array_equal(kit.get(got[name].result()), kit.get(wanted[name].result()), err_msg=f"{where}")


def add_up_scratch(comm: Any, kit_name: str, in_buckets: bool) -> None:
    """The same arrays in each pass: refused, unless they are said to be scratch; those of the buckets too."""
    kit = make_kit(comm, kit_name)
    sync = gs.AllreduceCallback("sum", comm, parameters=SHAPES, gradient_as_bucket_view=in_buckets)
    plain = gs.AllreduceCallback("sum", comm, name="plain")
    scratch = sync.gradient_buffers() if in_buckets else {name: kit.put(np.empty(*SHAPES[name])) for name in SHAPES}
    for step, passes in enumerate(STEPS):
        for number in range(passes):
            for name in names_of(number, passes):
                scratch[name][...] = kit.put(values(comm.rank, step, number, name))
            if number < passes - 1:
                with sync.accumulate(reused=True):
                    for name in names_of(number, passes):
                        sync(name, scratch[name])
        with sync.backward():
            futures = {name: sync(name, each) for name, each in scratch.items()}
        totals = by_hand(comm.rank, step, passes)
        with plain.backward():  # in the same order: that of a norm's terms decides its last bit
            wanted = {name: plain(name, kit.put(totals[name])) for name in SHAPES}
        same_as(futures, wanted, kit, step)
    with sync.accumulate():
        sync("table", scratch["table"])
    for block in (sync.accumulate, sync.backward):
        if block == sync.accumulate:
            with block():
                expect(gs.InvalidArgument, lambda: sync("table", scratch["table"]), "reused=True")
            with sync.accumulate():
                sync("table", kit.put(np.ones(300, np.float32)))
    expect(gs.InvalidArgument, lambda: sync("table", scratch["table"]), "reused=True")
    sync.discard()
    with sync.backward():
        futures = {name: sync(name, each) for name, each in scratch.items()}
    assert all(future.done() or future.result() is not None for future in futures.values())


def hand_over_what_came_before_alone(comm: Any, kit_name: str) -> None:
    """A parameter without a gradient in the last pass hands over its sum; the result is in `filled`."""
    kit, n = make_kit(comm, kit_name), comm.world_size
    for options in ({}, {"parameters": SHAPES}, {"parameters": SHAPES, "missing": "zero"}):
        sync = gs.AllreduceCallback("sum", comm, name=f"{len(options)} options", **options)
        for _ in range(3):
            for _ in range(2):
                with sync.accumulate():
                    sync("table", kit.put(np.full(300, 1.0, np.float32)))
                    sync("bias", kit.put(np.full(3, 2.0, np.float32)))
            with sync.backward():
                if "missing" not in options:
                    for name in ("weights", "scale", "halves"):
                        sync(name, kit.put(np.ones(*SHAPES[name])))
                future = sync("bias", kit.put(np.full(3, 5.0, np.float32)))
            assert (kit.get(sync.filled["table"]) == 2 * n).all()
            assert (kit.get(future.result()) == 9 * n).all()
            assert set(sync.filled) == ({"table", "weights", "scale", "halves"} if "missing" in options else {"table"})
        with sync.accumulate():
            sync("bias", kit.put(np.ones(3, np.float32)))
        sync.flush() if options == {} else sync.discard()
        assert list(sync.filled) == ["bias"] or options


def differ_in_passes(comm: Any, kit_name: str) -> None:
    """Ranks that accumulate differently are told; afterwards all can go on."""
    kit = make_kit(comm, kit_name)
    sync = gs.AllreduceCallback("sum", comm)
    for _ in range(1 + comm.rank % 2):
        with sync.accumulate():
            sync("p", kit.put(np.ones(3)))
    error = expect(gs.PlanMismatch, lambda: (sync("p", kit.put(np.ones(3))), sync.flush()), "local pass")
    assert "after 2 local passes" in str(error)
    with sync.backward():
        future = sync("p", kit.put(np.ones(3)))  # what was added up went with the step
    assert (kit.get(future.result()) == comm.world_size).all()


def add_up_with_uneven_batches(comm: Any, kit_name: str) -> None:
    """Inside join() ranks without batches shadow steps that have local passes; the mean counts the others."""
    kit = make_kit(comm, kit_name)
    sync = gs.AllreduceCallback("mean", comm)
    with sync.join() as joined:
        for step in range(2 + comm.rank):
            with sync.accumulate():
                sync("p", kit.put(np.full(3, 10.0 * comm.rank)))
            with sync.backward():
                future = sync("p", kit.put(np.full(3, 1.0 + comm.rank)))
            ranks = [rank for rank in range(comm.world_size) if step < 2 + rank]
            wanted = sum(11.0 * rank + 1 for rank in ranks) / len(ranks)
            np.testing.assert_allclose(kit.get(future.result()), np.full(3, wanted), rtol=1e-12)
    assert joined.last_rank == comm.world_size - 1


def add_up_before_a_hook(comm: Any, kit_name: str) -> None:
    kit, n, seen = make_kit(comm, kit_name), comm.world_size, []

    def hook(bucket: Any) -> None:
        seen.append(bucket.names)
        bucket.communicator.all_reduce(bucket.buffer, "sum")

    sync = gs.AllreduceCallback("sum", comm)
    sync.register_hook(hook)
    for _ in range(3):
        for _ in range(2):
            with sync.accumulate():
                sync("p", kit.put(np.ones(3)))
        assert not seen
        with sync.backward():
            future = sync("p", kit.put(np.ones(3)))
        assert (kit.get(future.result()) == 3 * n).all()
        assert seen == [("p",)]
        seen.clear()
