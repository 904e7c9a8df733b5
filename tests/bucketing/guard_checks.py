"""Checks of the debug mode that run on every rank; see test_gradient_guard.py."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import gradsync as gs
from kits import make_kit

BIG, SMALL = 3_000_000, 5


def change_before_reduction(comm: gs.Communicator, kit_name: str, **options: Any) -> tuple[Any, ...]:
    """Rank 0 writes to a gradient that waits for its bucket; the others hear that it has failed."""
    kit = make_kit(comm, kit_name)
    names = ["p0", "p1", "p2"]
    if options:  # gradients live in the buckets
        sync = gs.AllreduceCallback("mean", parameters=dict.fromkeys(names, ((SMALL,), "float32")), **options)
        gradients = list(sync.gradient_buffers().values())
    else:
        sync = gs.AllreduceCallback("mean")
        gradients = [kit.put(np.full(SMALL, 1.0 + comm.rank, np.float32)) for _ in names]
    older_view = gradients[1][...]  # NumPy's gradients are read-only meanwhile, but not such a view
    for step in range(3):
        try:
            with sync.backward():
                for number, (name, gradient) in enumerate(zip(names, gradients, strict=True)):
                    sync(name, gradient)
                    if step == 2 and comm.rank == 0 and number == 1:
                        older_view[1] = 7
        except gs.GradientChanged as error:
            return step, error.rank, error.parameter, error.handed_over_at.rpartition("/")[2], str(error)
        except gs.RankFailed as error:
            return step, error.rank, type(error).__name__
    return ("nobody noticed",)


def add_after_reduction(comm: gs.Communicator, kit_name: str, **options: Any) -> str:
    """A gradient is added to that its bucket has taken already, as a tied weight's is."""
    kit = make_kit(comm, kit_name)
    sync = gs.AllreduceCallback("sum", threshold_bytes=64, **options)
    gradients = [kit.put(np.ones(16, np.float32)) for _ in range(2)]
    with pytest.raises((gs.GradientChanged, gs.RankFailed)) as caught, sync.backward():
        for number, gradient in enumerate(gradients):
            sync(number, gradient)
        gradients[0] += 1
    return str(caught.value)


def change_what_is_done(comm: gs.Communicator, kit_name: str, **options: Any) -> None:
    """Who has asked the future may write: the result is the program's."""
    kit = make_kit(comm, kit_name)
    for ask in (
        lambda future: future.result(),
        lambda future: future.wait(),
        lambda future: _until_done(future),
        lambda future: future.numpy(),
        lambda future: future.exception() or _until_done(future),
    ):
        sync = gs.AllreduceCallback("sum", threshold_bytes=64, **options)
        for _ in range(3):
            gradient = kit.put(np.ones(16, np.float32))
            with sync.backward():
                future = sync("p", gradient)
                if options:  # gradients in buckets are reduced together, at the end
                    sync.flush()
                ask(future)
                gradient *= 2
            assert (kit.get(gradient) == 2 * comm.world_size).all()
    written = threading.Event()  # on a GPU a thread of the communicator's calls back

    def write(future: gs.GradientFuture) -> None:
        future.result()[...] = 0
        written.set()

    with sync.backward():
        sync("p", gradient).add_done_callback(write)
    assert written.wait(30)


def _until_done(future: gs.GradientFuture) -> None:
    while not future.done():
        pass


def train_well(comm: gs.Communicator, kit_name: str, **options: Any) -> None:
    """All that a program may do passes, with the same sums as ever."""
    kit = make_kit(comm, kit_name)
    shapes: dict[int, Any] = dict(enumerate([(3, 4), (), (0,), (200,), (BIG // 100,)]))
    parameters = {number: (shape, "float32") for number, shape in shapes.items()}
    in_buckets = "gradient_as_bucket_view" in options
    sync = gs.AllreduceCallback("sum", threshold_bytes=1024, parameters=parameters if in_buckets else None, **options)
    gradients = [kit.put(np.ones(shape, np.float32)) for shape in shapes.values()]
    for step in range(4):
        for gradient in gradients:
            gradient[...] = step + comm.rank
        with sync.backward():
            futures = [sync(number, gradient) for number, gradient in enumerate(gradients)]
        total = sum(step + rank for rank in range(comm.world_size))
        assert all((kit.get(future.result()) == total).all() for future in futures)
        for gradient in gradients:
            gradient[...] = 9  # between steps they are the program's
    comm.barrier()
    assert comm.objects.all_gather(comm.rank) == list(range(comm.world_size))
    half = comm.split(color=comm.rank % 2)
    assert half
    assert half._debug
