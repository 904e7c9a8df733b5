"""Times a step through AllreduceCallback in one process: its bookkeeping alone, and with packing."""

import numpy as np
import pytest

import models
from gradsync.bucketing.callback import AllreduceCallback
from gradsync.communicators.local import local_communicator
from gradsync.futures import CollectiveEnd, GradientFuture


def step(callback, gradients):
    with callback.backward():
        futures = [callback(index, gradient) for index, gradient in enumerate(gradients)]
    return [future.result() for future in futures]


@pytest.mark.parametrize("force_packing", [False, True], ids=["bookkeeping", "packing"])
@pytest.mark.parametrize("threshold_bytes", [1, 10 * 1024**2, 1024**3], ids=["1B", "10MiB", "1GiB"])
@pytest.mark.benchmark(group="step of ResNet-50")
def test_step_on_one_rank(benchmark, force_packing, threshold_bytes):
    gradients = [np.ones(shape, np.float32) for shape in reversed(models.resnet50())]
    with local_communicator(force_packing=force_packing) as communicator:
        callback = AllreduceCallback("mean", communicator, threshold_bytes=threshold_bytes)
        results = benchmark(step, callback, gradients)
    assert all(result is gradient for result, gradient in zip(results, gradients, strict=True))


def test_future_made_and_resolved(benchmark):
    def make():
        end = CollectiveEnd()
        future = GradientFuture("w", end, 1)
        end.finish(None, None)
        return future.result()

    assert benchmark(make) == 1
