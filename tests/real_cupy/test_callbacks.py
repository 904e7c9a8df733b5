"""AllreduceCallback on the real CuPy. The kernels that pack and split buckets run over host memory, too, so there
values are checked wherever NCCL itself reduces the dtype; on a GPU all are.
"""

from __future__ import annotations

import itertools
import math
import os
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradsync as gs
from commands import wait_until

KERNELS_RUN = "HOST_CUDA_BUILD" not in os.environ  # on a GPU
SIZES = [(5,), (3, 100), (17,), (), (40_000,)]
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.complex64]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)


def gradients_of(comm: Any, dtype: Any, factor: int = 1) -> dict[str, Any]:
    """One gradient of each size on the device, with the value factor * (rank + 1 + its number)."""
    import cupy

    values = [np.full(size or (1,), factor * (comm.rank + 1 + i), dtype) for i, size in enumerate(SIZES)]
    return {f"w{i}": cupy.asarray(value).reshape(SIZES[i]) for i, value in enumerate(values)}


def check_reduced(comm: Any, results: dict[str, Any], method: str, factor: int = 1) -> None:
    n = comm.world_size
    for i, size in enumerate(SIZES):
        total = factor * sum(rank + 1 + i for rank in range(n))
        result = results[f"w{i}"]
        assert result.shape == size
        np.testing.assert_array_equal(result.get(), np.array(total / n if method == "mean" else total, result.dtype))


def hand_over(callback: Any, gradients: dict[str, Any]) -> dict[str, Any]:
    with callback.backward():
        return {name: callback(name, gradient) for name, gradient in gradients.items()}


@each_dtype
@pytest.mark.ranks(on={"cupy": (1, 2, 3, 5), "gpu": (2,)})
def test_buckets(comm, dtype) -> None:
    for method, threshold in (("sum", None), ("mean", None), ("sum", 1000), ("mean", 1)):
        callback = gs.AllreduceCallback(method, comm, threshold_bytes=threshold)
        for step in (1, 2):
            gradients = gradients_of(comm, dtype, step)
            futures = hand_over(callback, gradients)
            results = {name: future.result() for name, future in futures.items()}
            assert all(results[name] is gradient for name, gradient in gradients.items())
            n = comm.world_size
            if KERNELS_RUN or not (method == "mean" and np.dtype(dtype).itemsize == 2 and n & (n - 1)):
                check_reduced(comm, results, method, step)  # CuPy's kernel divides half precision
            for name, future in futures.items():
                assert (future.shape, future.dtype) == (results[name].shape, np.dtype(dtype))
                np.testing.assert_array_equal(future.numpy(), results[name].get())


@pytest.mark.ranks(on={"cupy": (1, 2, 3), "gpu": (1, 2)})
def test_packing_moves_every_byte_and_no_other(comm) -> None:
    """Gradients at odd addresses and of odd sizes, with noise between them, in chunks of the kernel and less."""
    import cupy

    random = np.random.default_rng(7)  # the same on all ranks
    sizes = [1, 2, 3, 7, 15, 16, 17, 33, 4096, 32 * 1024 - 1, 32 * 1024, 32 * 1024 + 1, 100_003]
    for _ in range(5):
        random.shuffle(sizes)
        gaps = random.integers(0, 40, len(sizes))
        begins = np.cumsum(gaps) + np.cumsum([0, *sizes[:-1]])
        memory = random.integers(-128, 128, int(begins[-1]) + sizes[-1] + 40, np.int8)
        expected, mine = memory.copy(), memory.copy()
        for begin, size in zip(begins, sizes, strict=True):
            part = slice(begin, begin + size)
            expected[part] = memory[part] * np.int8(comm.world_size)
        on_device = cupy.asarray(mine)
        callback = gs.AllreduceCallback("sum", comm, name="bytes")
        views = {
            str(i): on_device[begin : begin + size] for i, (begin, size) in enumerate(zip(begins, sizes, strict=True))
        }
        hand_over(callback, views)
        np.testing.assert_array_equal(on_device.get(), expected)


@pytest.mark.ranks(on={"cupy": (1, 2, 3), "gpu": (1, 2)})
def test_futures_of_gradients(comm) -> None:
    import cupy

    called: list[str] = []
    callback = gs.AllreduceCallback("sum", comm)
    futures = {name: callback(name, gradient) for name, gradient in gradients_of(comm, np.float32).items()}
    first, last = futures["w0"], futures["w4"]
    for name, future in futures.items():
        future.add_done_callback(lambda _, name=name: called.append(name))
    callback.flush()
    wait_until(lambda: len(called) == len(futures))
    assert called == list(futures)
    assert all(future.done() and future.exception() is None for future in futures.values())
    with cupy.cuda.Stream(non_blocking=True) as stream:
        first.wait(stream)
        first.wait()
        check_reduced(comm, {name: future.result(timeout=60) for name, future in futures.items()}, "sum")
    np.testing.assert_array_equal(np.asarray(last), last.numpy())
    assert last.device == cupy.cuda.Device()


@pytest.mark.ranks(on={"cupy": (1, 2, 3), "gpu": (1, 2)})
def test_gradients_on_the_host_and_from_several_streams(comm) -> None:
    import cupy

    total = comm.world_size * (comm.world_size + 1) / 2
    callback = gs.AllreduceCallback("sum", comm)
    streams = [cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(), cupy.cuda.Stream.ptds, cupy.cuda.Stream.null]
    for _ in range(2):
        futures = []
        with callback.backward():
            futures.append(callback("host", np.full(7, comm.rank + 1, np.float32)))
            futures.append(callback("number", np.float32(comm.rank + 1)))
            for i, stream in enumerate(streams):
                with stream:
                    futures.append(callback(i, cupy.asarray(np.full(9, comm.rank + 1, np.float32))))
        for future in futures:
            assert (future.numpy() == total).all()


@each_dtype
@pytest.mark.ranks(on={"cupy": (1, 2, 3, 5), "gpu": (1,)})
def test_nonfinite_and_clip_norm(comm, dtype) -> None:
    """Kernels of CuPy look for NaN, sum squares and scale. Over host memory they are compiled and launched, and the
    driver answers "finite" and "1"; there the fake CuPy shows what the values do.
    """
    n = comm.world_size
    for nonfinite, clip_norm in itertools.product(["off", "raise", "skip"], [None, 1e-9, 1e9]):
        callback = gs.AllreduceCallback("sum", comm, nonfinite=nonfinite, clip_norm=clip_norm)
        for _ in range(2):
            results = hand_over(callback, gradients_of(comm, dtype))
            assert not callback.skip_step
            assert (callback.norm is None) == (clip_norm is None)
            if KERNELS_RUN and clip_norm is not None:
                totals = [sum(rank + 1 + i for rank in range(n)) for i in range(len(SIZES))]
                norm = math.sqrt(sum(math.prod(size) * total**2 for size, total in zip(SIZES, totals, strict=True)))
                np.testing.assert_allclose(callback.norm, norm, rtol=1e-3)
                scaled = complex(results["w0"].numpy()[0]).real
                np.testing.assert_allclose(scaled, totals[0] * min(1.0, clip_norm / norm), rtol=0.02, atol=1e-6)


@each_dtype
@pytest.mark.ranks(on={"cupy": (1, 2, 3), "gpu": (1,)})
def test_weights(comm, dtype) -> None:
    """Kernels of CuPy divide a weight by their sum, which NCCL adds up, and multiply."""
    ranks = range(comm.world_size)
    callback = gs.AllreduceCallback("mean", comm)
    for _ in range(2):
        with callback.backward(weight=comm.rank + 0.5):
            futures = {name: callback(name, gradient) for name, gradient in gradients_of(comm, dtype).items()}
        results = {name: future.result().get() for name, future in futures.items()}
        assert callback.total_weight == sum(rank + 0.5 for rank in ranks)
        if KERNELS_RUN:
            for i, result in enumerate(results.values()):
                mean = sum((rank + 0.5) * (rank + 1 + i) for rank in ranks) / callback.total_weight
                np.testing.assert_allclose(result.astype(np.complex64), mean, rtol=0.02)


@pytest.mark.parametrize("options", [{}, {"nonfinite": "skip", "clip_norm": 1.0}, {"missing": "zero"}], ids=str)
@pytest.mark.ranks(on={"cupy": (1, 2, 3), "gpu": (2,)})
def test_gradients_that_live_in_buckets(comm, options) -> None:
    import cupy

    shapes = {f"w{i}": (size, np.float32) for i, size in enumerate(SIZES)}
    callback = gs.AllreduceCallback("sum", comm, parameters=shapes, gradient_as_bucket_view=True, **options)
    for step in (1, 2):
        buffers = callback.gradient_buffers()
        for name, gradient in gradients_of(comm, np.float32, step).items():
            if gradient.shape:  # a copy to a 0-d array is a kernel's
                buffers[name].set(gradient.get())
        left_out = {"w2"} if options.get("missing") else set()
        futures = hand_over(callback, {name: buffers[name] for name in shapes if name not in left_out})
        results = {name: future.result() for name, future in futures.items()}
        assert all(isinstance(result, cupy.ndarray) for result in results.values())
        if not options:
            results["w3"] = gradients_of(comm, np.float32)["w3"]
            for i in (0, 1, 2, 4):
                total = step * sum(rank + 1 + i for rank in range(comm.world_size))
                np.testing.assert_array_equal(results[f"w{i}"].get(), np.full(SIZES[i], total, np.float32))
        assert set(callback.results()) == set(shapes)


@pytest.mark.ranks(on={"cupy": (1, 2, 3), "gpu": (1, 2)})
def test_hooks(comm) -> None:
    """Hooks use CuPy as they like: kernels, so without values. Without a hook the callback reduces as before."""

    def half(bucket: Any) -> None:
        small = bucket.buffer.astype(np.float16)
        bucket.communicator.all_reduce(small, bucket.op)
        bucket.buffer[...] = small

    def gathered(bucket: Any) -> None:
        every = bucket.communicator.all_gather(bucket.buffer.reshape(1, -1))
        bucket.buffer[...] = every.sum(axis=0)

    callback = gs.AllreduceCallback("sum", comm, name="hooked")
    for hook in (half, gathered, None):
        callback.register_hook(hook)
        gradients = gradients_of(comm, np.float32)
        results = {name: future.result() for name, future in hand_over(callback, gradients).items()}
        assert all(results[name] is gradient for name, gradient in gradients.items())
    check_reduced(comm, results, "sum")


@pytest.mark.ranks(on={"cupy": (2, 3), "gpu": (2,)})
def test_wrong_gradients_are_refused_and_the_next_step_is_right(comm) -> None:
    import cupy

    callback = gs.AllreduceCallback("mean", comm, name="checked")
    if cupy.cuda.runtime.getDeviceCount() > 1:
        with cupy.cuda.Device(0 if cupy.cuda.Device().id else 1):
            elsewhere = cupy.empty(3, np.float32)
        with pytest.raises(gs.InvalidArgument):
            callback("w0", elsewhere)
    integers = cupy.empty(3, np.int32)
    for wrong, error in ((integers, gs.UnsupportedDtype), ("w", gs.InvalidArgument)):
        with pytest.raises(error):
            callback("w0", wrong)
    plan = gs.AllreduceCallback("sum", comm, name="plan")
    with pytest.raises(gs.PlanMismatch):
        hand_over(plan, {f"of rank {comm.rank}": cupy.empty(3 + comm.rank, np.float32)})
    futures = hand_over(gs.AllreduceCallback("sum", comm, name="next"), gradients_of(comm, np.float32))
    check_reduced(comm, {name: future.result() for name, future in futures.items()}, "sum")
