"""Buckets are packed from the arrays that were handed over, however far the GPU lags behind the host."""

import numpy as np
import pytest

import gradsync as gs
from obstacle import Obstacle

STEPS = 300  # more than there are tables of addresses: some are dropped while kernels that read them still wait


@pytest.mark.ranks(on={"fake": (2,), "gpu": (2,)})
def test_many_sets_of_arrays_are_packed_while_the_gpu_waits(comm) -> None:
    import cupy

    callback = gs.AllreduceCallback("sum", comm)
    steps = []
    side = cupy.cuda.Stream(non_blocking=True)
    with side:
        for _ in range(2):  # the first contact of the ranks blocks the host
            with callback.backward():
                callback("a", cupy.zeros(3, np.float32))
                callback("b", cupy.zeros(5, np.float32))
        with Obstacle(side):
            for step in range(STEPS):
                arrays = [cupy.asarray(np.full(size, step + comm.rank, np.float32)) for size in (3, 5)]
                with callback.backward():
                    steps.append([callback(name, array) for name, array in zip("ab", arrays, strict=True)])
        for step, futures in enumerate(steps):
            for future in futures:
                assert (future.numpy() == 2 * step + 1).all()
