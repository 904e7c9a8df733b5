"""Every public collective on the real CuPy: dtypes, operators, kinds of arrays, streams, futures.

On a GPU all values are checked. Over host memory they are where no kernel of CuPy makes them: arrays that are not
contiguous only show that CuPy takes each call, and that NVRTC compiles each kernel. With five ranks that is for sm_70,
80, 90 and 100.
"""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gradsync as gs
from arrays import (
    DTYPES,
    DeviceArrays,
    arrays_for,
    assert_close,
    assert_identical,
    contribution,
    dtype_of,
    operators_of,
    reduced,
)
from collectives import collectives

KERNELS_RUN = "HOST_CUDA_BUILD" not in os.environ  # on a GPU
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def on_gpu(array: Any) -> Any:
    import cupy

    return cupy.asarray(array)


def on_host(array: Any) -> np.ndarray:
    return array.get() if hasattr(array, "get") else array


def check(result: Any, expected: np.ndarray) -> None:
    assert_identical(on_host(result), expected)


@each_dtype
@pytest.mark.ranks(on={"cupy": (1, 2, 3, 5), "gpu": (2,)})
def test_reductions(comm, dtype) -> None:
    n, rank = comm.world_size, comm.rank
    shape, part = (2 * n, 5), slice(2 * rank, 2 * rank + 2)
    sizes = [shape[0] - n + 1] + [1] * (n - 1)
    rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    own = contribution(rank, shape, dtype)
    for op in operators_of(comm).get(dtype, ()):
        if op == "mean" and np.dtype(dtype).itemsize == 2 and n & (n - 1) and not KERNELS_RUN:
            continue  # CuPy's kernel divides half precision
        expected, array, kept, out = reduced(op, shape, dtype, n), on_gpu(own), on_gpu(own), on_gpu(np.zeros_like(own))
        assert comm.all_reduce(array, op) is array
        assert comm.all_reduce(kept, op, out=out) is out
        check(kept, own)
        results = [(array, expected), (out, expected)]
        results.append((comm.reduce_scatter(on_gpu(own), op), expected[part]))
        results.append((comm.reduce_scatter(on_gpu(own), op, sizes=sizes), expected[rows]))
        results.append((comm.all_reduce(own.copy(), op), expected))  # in host memory
        for root in range(n):
            array = on_gpu(own)
            result = comm.reduce(array, op, root)
            assert (result is array) == (rank == root)
            if rank == root:
                results.append((array, expected))
            else:
                check(array, own)
        for result, wanted in results:
            assert (result.shape, result.dtype) == (wanted.shape, own.dtype)
            assert_close(on_host(result), wanted, dtype, n)


@each_dtype
@pytest.mark.ranks(on={"cupy": (1, 2, 3), "gpu": (2,)})
def test_movements(comm, dtype) -> None:
    size, rank = comm.world_size, comm.rank
    parts = [contribution(r, (size, 3), dtype) for r in range(size)]
    for put in (on_gpu, np.copy):  # arrays in host memory are staged
        check(comm.broadcast(put(parts[rank]), size - 1), parts[size - 1])
        check(comm.all_gather(put(parts[rank])), np.concatenate(parts))
        check(comm.all_to_all(put(parts[rank])), np.stack([part[rank] for part in parts]))
        gathered = comm.gather(put(parts[rank]), size - 1)
        assert (gathered is None) == (rank != size - 1)
        if gathered is not None:
            check(gathered, np.concatenate(parts))
        out = comm.scatter(gathered, size - 1, out=put(np.zeros_like(parts[0])))
        check(out, parts[rank])
        # Uneven: rank r has r + 1 rows, and gives r rows to each.
        sizes = [r + 1 for r in range(size)]
        uneven = [contribution(r, (r + 1, 2), dtype) for r in range(size)]
        check(comm.all_gather(put(uneven[rank]), sizes=sizes), np.concatenate(uneven))
        out = put(np.zeros((sum(sizes), 2), parts[0].dtype))
        check(comm.all_gather(put(uneven[rank]), sizes=sizes, out=out), np.concatenate(uneven))
        sent = contribution(rank, (rank * size, 2), dtype)
        received = np.concatenate([contribution(r, (r * size, 2), dtype)[rank * r :][:r] for r in range(size)])
        check(comm.all_to_all(put(sent), send_sizes=[rank] * size, recv_sizes=list(range(size))), received)
        after, before = (rank + 1) % size, (rank - 1) % size
        out = comm.exchange(put(parts[rank]), dest=after, out=put(np.zeros_like(parts[0])), source=before)
        check(out, parts[before])
        if rank == 0 and size > 1:
            comm.send(put(parts[0]), 1)
        elif rank == 1:
            check(comm.recv(put(np.zeros_like(parts[0])), 0), parts[0])


class WithDlpack:
    """An array of a library that has only DLPack."""

    def __init__(self, array: Any) -> None:
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def with_cuda_array_interface(array: Any, *, read_only: bool = False) -> Any:
    interface = array.__cuda_array_interface__
    interface = {**interface, "data": (interface["data"][0], read_only), "stream": None}
    return SimpleNamespace(__cuda_array_interface__=interface, kept=array)


@pytest.mark.ranks(on={"cupy": (1, 2, 3), "gpu": (1, 2)})
def test_arrays_of_other_libraries(comm) -> None:
    import cupy

    own = contribution(comm.rank, (3, 4), "int32")
    total = reduced("sum", (3, 4), "int32", comm.world_size).astype(np.int32)
    for wrap in (WithDlpack, with_cuda_array_interface):
        array = on_gpu(own)
        comm.all_reduce(wrap(array))
        check(array, total)
        assert isinstance(comm.all_gather(wrap(array)), cupy.ndarray)
    array = on_gpu(own)
    read_only = with_cuda_array_interface(array, read_only=True)
    with pytest.raises(gs.InvalidArgument):
        comm.all_reduce(read_only)
    check(comm.all_reduce(read_only, out=cupy.empty_like(array)), total)
    if cupy.cuda.runtime.getDeviceCount() > 1:
        with cupy.cuda.Device((cupy.cuda.Device().id + 1) % cupy.cuda.runtime.getDeviceCount()):
            elsewhere, foreign = cupy.empty(3, np.float32), cupy.cuda.Stream()
        for refused in (lambda: comm.all_reduce(elsewhere), lambda: comm.all_reduce(array, stream=foreign)):
            with pytest.raises(gs.InvalidArgument):
                refused()
    check(comm.all_reduce(on_gpu(own)), total)  # nothing of this has broken the communicator


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype not in ("int16", "uint16")])
@pytest.mark.ranks(on={"cupy": (1, 3, 5), "gpu": (1,)})
def test_layouts(comm, dtype) -> None:
    """A kernel of CuPy copies arrays that are not contiguous, and fills 0-d ones."""
    op, n = operators_of(comm)[dtype][-1], comm.world_size

    def check_reduced(result: Any, expected: np.ndarray, *, values: bool) -> None:
        assert (result.shape, result.dtype) == (expected.shape, dtype_of(dtype))
        if values:
            assert_close(on_host(result), expected, dtype, n)

    own, expected = contribution(comm.rank, (6, 4), dtype), reduced(op, (6, 4), dtype, n)
    for view in (np.s_[::2], np.s_[:, 1:3], np.s_[::-1], np.s_[1:5], "transposed"):
        pick = np.transpose if view == "transposed" else lambda array, view=view: array[view]
        array = pick(on_gpu(own))
        assert comm.all_reduce(array, op) is array
        check_reduced(array, pick(expected), values=KERNELS_RUN)
        assert comm.all_reduce(array, op, out=array.copy()).shape == array.shape
        assert comm.all_gather(array).shape == (n * array.shape[0], array.shape[1])
        assert comm.broadcast(array) is array
    for shape in ((), (0,), (0, 3), (1, 0)):
        own, expected = contribution(comm.rank, shape, dtype), reduced(op, shape, dtype, n)
        for put in (on_gpu, np.copy):
            values = shape != () or put is np.copy or KERNELS_RUN
            check_reduced(comm.all_reduce(put(own), op), expected, values=values)
            assert comm.all_gather(put(own)).size == n * own.size
    strided = np.asfortranarray(contribution(comm.rank, (4, 3), dtype))  # in host memory: NumPy copies it
    assert comm.all_reduce(strided, op) is strided
    check_reduced(strided, reduced(op, (4, 3), dtype, n), values=True)


def streams() -> dict[str, Any]:
    """Each kind of stream that a program may pass."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    return {
        "none": None,
        "cupy": stream,
        "null": cupy.cuda.Stream.null,
        "per thread": cupy.cuda.Stream.ptds,
        "external": cupy.cuda.Stream.from_external(SimpleNamespace(__cuda_stream__=lambda: (0, stream.ptr))),
        "handle": stream.ptr,
        "protocol": SimpleNamespace(__cuda_stream__=lambda: (0, stream.ptr), kept=stream),
        "torch": SimpleNamespace(cuda_stream=stream.ptr, kept=stream),
    }


@pytest.mark.ranks(on={"cupy": (1, 2, 3), "gpu": (1, 2)})
def test_streams(comm) -> None:
    import cupy

    own = contribution(comm.rank, 6, "int32")
    total = reduced("sum", 6, "int32", comm.world_size).astype(np.int32)
    for stream in streams().values():
        check(comm.all_reduce(on_gpu(own), stream=stream), total)
        future = comm.asynchronous.all_reduce(on_gpu(own), stream=stream)
        future.wait(stream)
        check(future.result(), total)
    for current in (cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(), cupy.cuda.Stream.ptds):
        with current:
            check(comm.all_reduce(on_gpu(own)), total)
            check(comm.asynchronous.all_reduce(on_gpu(own)).result(), total)
    for wrong in ("a stream", 1.5, own):
        with pytest.raises(gs.InvalidArgument):
            comm.all_reduce(on_gpu(own), stream=wrong)


@pytest.mark.ranks(on={"cupy": (1, 2, 3), "gpu": (1, 2)})
def test_futures_of_collectives(comm) -> None:
    for arrays in arrays_for(comm):
        calls = collectives(comm, arrays, (4, 3))
        wanted = {name: call(comm) for name, call in calls.items()}
        futures = {name: call(comm.asynchronous) for name, call in calls.items()}
        called: list[str] = []
        all_called = threading.Event()
        for name, future in futures.items():
            future.add_done_callback(lambda _, name=name, called=called: called.append(name))
        futures["barrier"].add_done_callback(lambda _, event=all_called: event.set())  # the last one
        for name, future in futures.items():
            result = future.result(timeout=60)
            assert (result is None) == (wanted[name] is None)
            if result is not None:
                check(result, on_host(wanted[name]))
        assert all_called.wait(60)
        assert called == list(futures)
        assert all(future.done() and future.exception() is None for future in futures.values())


@pytest.mark.ranks(on={"cupy": (1, 2, 3), "gpu": (1, 2)})
def test_groups_and_objects(comm) -> None:
    n, rank = comm.world_size, comm.rank
    comm.barrier()
    loss = on_gpu(np.array([rank + 1.0]))[0]  # a 0-d view
    assert gs.comm.reduce_dict({"loss": loss}, average=False) == {"loss": n * (n + 1) / 2}
    with gs.override_backend("shm" if n > 1 else "local") as other:
        assert other.all_reduce(np.ones(2)).tolist() == [n, n]
    assert comm.objects.all_gather({"rank": rank}) == [{"rank": r} for r in range(n)]
    for group in (comm.new_group(range(n)), comm.split(0, key=-rank), comm.split_by_machine()):
        with group:
            assert int(group.all_reduce(on_gpu(np.ones(1))).get()[0]) == n
    last = comm.new_group([n - 1])
    if rank == n - 1:
        check(last.all_reduce(on_gpu(np.ones(3))), np.ones(3))
        last.close()


@pytest.mark.ranks(on={"cupy": (1, 2, 3), "gpu": (1, 2)})
def test_lists_and_trees(comm) -> None:
    """`param_pack_concat`, and what uses it, runs a kernel of CuPy."""
    shapes = [(7,), (2, 2), (3, 1)]
    put, total = DeviceArrays().put, sum(range(comm.world_size))

    def arrays(rank: int) -> list[np.ndarray]:
        return [contribution(rank, *each) for each in zip(shapes, ("float32", "float64", "int8"), strict=True)]

    targets, tree = ([put(array) for array in arrays(comm.rank)] for _ in range(2))
    gs.bcast_list_(targets)
    tree = gs.broadcast_tree({"layers": tree})
    for target, source in zip([*targets, *tree["layers"]], arrays(0) * 2, strict=True):
        check(target, source)
    gs.check_consistency(targets)
    for reduce in (lambda tree: gs.average_gradients(tree, op="sum"), lambda tree: gs.average_gradients(tree, sync)):
        sync = gs.make_allreduce_cb("sum", comm)
        gradients = {"a": put(np.full(3, comm.rank, np.float32)), "b": [put(np.full((2, 2), comm.rank, np.float16))]}
        averaged = reduce(gradients)
        for result in (averaged["a"], averaged["b"][0]):
            check(result, np.full(result.shape, total, result.dtype))
    equal = [put(np.ones(shape, np.float32)) for shape in shapes]
    for result, shape in zip(gs.pack_allreduce_split(equal, shapes), shapes, strict=True):
        assert result.shape == shape
        assert not KERNELS_RUN or (result.get() == 1).all()
    offsets = gs.get_offsets(shapes)
    flat = gs.param_pack_concat(equal, put(np.array(offsets)), offsets)
    assert [view.shape for view in gs.param_pack_split(flat, offsets, shapes)] == shapes
