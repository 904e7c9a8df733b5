"""The step that several rows time: the gradients of a backward pass are averaged over the ranks.

"new" arrays: a step begins with arrays that it has never seen, as after most backward passes; making them does not
count. "kept": the same arrays in each step. "views": the gradients live in the buckets.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np

import gradsync as gs
import models
import systems
from systems import Step

Arrays = list[np.ndarray]
# The arrays of the last step, of any contender: as in a loop, they are there while new ones are made.
LAST: Arrays = []
NUMBERS = itertools.count()  # of callbacks: the ranks make them in one order


def average(contender: str, gradients: models.Gradients, arrays: str, **options: Any) -> Step:
    """Returns a step of a contender, whose results have been checked. It returns its seconds.

    Args:
        contender: "by hand": all in one array, one all_reduce, split again; "DDP"; "mpi4py": one Allreduce and one
            division for each; "copy": no ranks, each copies its gradients; or anything else: gradsync.
        gradients: dtypes and shapes.
        arrays: "new", "kept" or "views".
        options: for gradsync's callback.
    """
    comm = systems.comm()
    if contender == "DDP":
        return ddp(systems.gloo(), gradients, arrays)
    kept = [] if arrays == "new" else _filled(gradients)
    if contender in OTHERS:
        reduce = OTHERS[contender]
    else:
        if arrays == "views":
            parameters = {str(number): (shape, dtype) for number, (dtype, shape) in enumerate(gradients)}
            options |= {"parameters": parameters, "gradient_as_bucket_view": True}
        sync = gs.AllreduceCallback("mean", comm, name=f"number {next(NUMBERS)}", **options)
        reduce = partial(_hand_over, sync)
        if arrays == "views":
            buffers = sync.gradient_buffers()
            kept = [buffers[name] for name in parameters]
            for array in kept:
                array.fill(comm.rank + 1)

    def step() -> float:
        LAST[:] = kept or _filled(gradients)
        comm.barrier()  # making them does not count, and no rank waits for another that still makes its own
        began = time.perf_counter()
        reduce(LAST)
        return time.perf_counter() - began

    if contender != "copy":
        for _ in range(3):  # the second and the third may take other paths
            for array in kept:
                array.fill(comm.rank + 1)
            step()
            _check(LAST)
    return step


def python_calls(contender: str, gradients: models.Gradients, arrays: str) -> float:
    """Returns how many functions of Python a step calls, for each gradient."""
    step = average(contender, gradients, arrays)
    count = 0

    def profile(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count / len(gradients)


def _filled(gradients: models.Gradients) -> Arrays:
    arrays = [np.empty(shape, dtype) for dtype, shape in gradients]
    for array in arrays:
        array.fill(systems.comm().rank + 1)
    return arrays


def _check(arrays: Sequence[Any]) -> None:
    expected = (systems.comm().world_size + 1) / 2
    for array in arrays:
        np.testing.assert_allclose(np.asarray(array, np.float64), expected, rtol=1e-2 if array.itemsize < 4 else 1e-6)


def _hand_over(sync: gs.AllreduceCallback, arrays: Arrays) -> None:
    with sync.backward():
        futures = [sync(str(number), array) for number, array in enumerate(arrays)]
    for future in futures:
        future.result()


def _by_hand(arrays: Arrays) -> None:
    flat = np.concatenate([array.reshape(-1) for array in arrays])
    flat = systems.comm().all_reduce(flat, "mean")
    begin = 0
    for array in arrays:
        array[...] = flat[begin : begin + array.size].reshape(array.shape)
        begin += array.size


def _mpi(arrays: Arrays) -> None:
    mpi = systems.mpi()
    for array in arrays:
        mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, array)
        array /= mpi.COMM_WORLD.size


def _copy(arrays: Arrays) -> None:
    for array in arrays:
        array.copy()


OTHERS = {"by hand": _by_hand, "mpi4py": _mpi, "copy": _copy}


def ddp(
    dist: Any, gradients: models.Gradients, arrays: str, device: Any = "cpu", wait: Callable[[], None] = lambda: None
) -> Step:
    """DistributedDataParallel's reducer: what it adds to a backward pass, which hands out finished gradients.

    Autograd takes over tensors that nobody else holds, without a copy; what remains is its walk over the parameters.
    The same pass in no_sync() is that walk alone; the median of its last times is subtracted.

    Args:
        dist: torch.distributed with its process group.
        gradients, arrays: see `average`.
        device: of the gradients.
        wait: waits until the device is idle.
    """
    import torch

    kept = [
        torch.full(shape, dist.get_rank() + 1.0, dtype=getattr(torch, dtype), device=device)
        for dtype, shape in gradients
    ]

    class HandOut(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, *_weights: Any) -> Any:
            return torch.zeros((), device=device)  # so that autograd's thread of this device walks the graph

        @staticmethod
        def backward(_: Any, *_gradients: Any) -> Any:
            return tuple(gradient.detach() for gradient in handed_out)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.ParameterList([torch.zeros_like(each) for each in reversed(kept)])

        def forward(self) -> Any:
            return HandOut.apply(*reversed(list(self.weights)))

    handed_out = kept
    model = torch.nn.parallel.DistributedDataParallel(Model(), gradient_as_bucket_view=arrays == "views")

    def backward() -> float:
        nonlocal handed_out
        model.zero_grad(set_to_none=True)
        handed_out = [each.clone() for each in kept] if arrays == "new" else kept
        loss = model()
        wait()
        dist.barrier()
        began = time.perf_counter()
        loss.backward()
        wait()
        return time.perf_counter() - began

    alone: deque[float] = deque(maxlen=9)

    def step() -> float:
        with model.no_sync():
            alone.append(backward())
        return backward() - median(alone)

    for _ in range(3):
        for each in kept:
            each.fill_(dist.get_rank() + 1.0)
        step()
        _check([weight.grad.cpu() for weight in model.module.weights])
    return step
