"""Every public collective on the real CuPy: dtypes, operators, kinds of arrays, streams, futures.

On a GPU all values are checked. Over host memory they are where no kernel of CuPy makes them: where NCCL itself
reduces the dtype, and where bytes only move. Elsewhere (see `is_checked`, and arrays that are not contiguous) the test
shows that CuPy takes each call, and that NVRTC compiles each kernel. With five ranks that is for sm_70, 80, 90 and 100.
"""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradsync as gs

KERNELS_RUN = "HOST_CUDA_BUILD" not in os.environ  # on a GPU
FLOATING = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
INTEGERS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
OPERATORS = {
    **{np.dtype(dtype): ["sum", "prod", "min", "max", "mean"] for dtype in FLOATING},
    **{np.dtype(dtype): ["sum", "prod", "mean"] for dtype in (np.complex64, np.complex128)},
    **{np.dtype(dtype): ["sum", "prod", "min", "max"] for dtype in INTEGERS},
    np.dtype(np.bool_): ["min", "max"],
}
each_dtype = pytest.mark.parametrize("dtype", OPERATORS, ids=str)


def is_checked(dtype: np.dtype[Any], op: str, world_size: int) -> bool:
    """Whether the values must be right: NCCL reduces the dtype by itself, or kernels that convert and multiply run."""
    if KERNELS_RUN:
        return True
    if op == "mean" and dtype.itemsize == 2:
        return world_size.bit_count() == 1
    return dtype not in (np.int16, np.uint16) and (dtype.kind != "c" or op != "prod")


def of_rank(rank: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Small numbers, so that sums and products are exact in each dtype."""
    numbers = np.random.default_rng(rank).integers(0, 4, shape)
    return (numbers * (1 + 1j) if dtype.kind == "c" else numbers).astype(dtype)


def reduced(comm: Any, op: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    """What NumPy makes of the arrays of all ranks."""
    wide = {"c": np.complex128, "f": np.float64, "V": np.float64}.get(dtype.kind, dtype)
    parts = [of_rank(rank, dtype, shape).astype(wide) for rank in range(comm.world_size)]
    ufunc = {"sum": np.add, "mean": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}[op]
    result = ufunc.reduce(parts, dtype=parts[0].dtype)
    if op == "mean":  # of complex numbers NCCL divides both parts
        result = (np.atleast_1d(result).view(np.float64) / comm.world_size).view(result.dtype).reshape(shape)
    return result.astype(dtype)


def on_gpu(array: Any) -> Any:
    import cupy

    return cupy.asarray(array)


def another_device(comm: Any) -> Any:
    import cupy

    return cupy.cuda.Device((int(comm.device.removeprefix("cuda:")) + 1) % cupy.cuda.runtime.getDeviceCount())


def check(result: Any, expected: np.ndarray, *, values: bool = True) -> None:
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    if values:
        np.testing.assert_array_equal(result.get() if hasattr(result, "get") else result, expected)


@each_dtype
@pytest.mark.ranks(on={"cupy": (1, 2, 3, 5), "gpu": (2,)})
def test_reductions(comm, dtype) -> None:
    shape = (2 * comm.world_size, 5)
    own = of_rank(comm.rank, dtype, shape)
    for op in OPERATORS[dtype]:
        values, expected = is_checked(dtype, op, comm.world_size), reduced(comm, op, dtype, shape)
        array = on_gpu(own)
        assert comm.all_reduce(array, op) is array
        check(array, expected, values=values)
        array, out = on_gpu(own), on_gpu(np.zeros_like(own))
        assert comm.all_reduce(array, op, out=out) is out
        check(out, expected, values=values)
        check(array, own)
        for root in range(comm.world_size):
            array = on_gpu(own)
            result = comm.reduce(array, op, root)
            assert (result is array) == (comm.rank == root)
            if comm.rank == root:
                check(array, expected, values=values)
            else:
                check(array, own)
        part = slice(2 * comm.rank, 2 * comm.rank + 2)
        check(comm.reduce_scatter(on_gpu(own), op), expected[part], values=values)
        sizes = [shape[0] - comm.world_size + 1] + [1] * (comm.world_size - 1)
        begin = sum(sizes[: comm.rank])
        rows = expected[begin : begin + sizes[comm.rank]]
        check(comm.reduce_scatter(on_gpu(own), op, sizes=sizes), rows, values=values)
        check(comm.all_reduce(own.copy(), op), expected, values=values)  # in host memory


@each_dtype
@pytest.mark.ranks(on={"cupy": (1, 2, 3), "gpu": (2,)})
def test_movements(comm, dtype) -> None:
    size, rank = comm.world_size, comm.rank
    parts = [of_rank(r, dtype, (size, 3)) for r in range(size)]
    for place in (on_gpu, np.copy):  # arrays in host memory are staged
        check(comm.broadcast(place(parts[rank]), size - 1), parts[size - 1])
        check(comm.all_gather(place(parts[rank])), np.concatenate(parts))
        check(comm.all_to_all(place(parts[rank])), np.stack([part[rank] for part in parts]))
        gathered = comm.gather(place(parts[rank]), size - 1)
        assert (gathered is None) == (rank != size - 1)
        if gathered is not None:
            check(gathered, np.concatenate(parts))
        out = comm.scatter(gathered, size - 1, out=place(np.zeros_like(parts[0])))
        check(out, parts[rank])
        # Uneven: rank r has r + 1 rows, and gives r rows to each.
        sizes = [r + 1 for r in range(size)]
        uneven = [of_rank(r, dtype, (r + 1, 2)) for r in range(size)]
        check(comm.all_gather(place(uneven[rank]), sizes=sizes), np.concatenate(uneven))
        out = place(np.zeros((sum(sizes), 2), dtype))
        check(comm.all_gather(place(uneven[rank]), sizes=sizes, out=out), np.concatenate(uneven))
        sent = of_rank(rank, dtype, (rank * size, 2))
        received = np.concatenate([of_rank(r, dtype, (r * size, 2))[rank * r :][:r] for r in range(size)])
        check(comm.all_to_all(place(sent), send_sizes=[rank] * size, recv_sizes=list(range(size))), received)
        after, before = (rank + 1) % size, (rank - 1) % size
        out = comm.exchange(place(parts[rank]), dest=after, out=place(np.zeros_like(parts[0])), source=before)
        check(out, parts[before])
        if rank == 0 and size > 1:
            comm.send(place(parts[0]), 1)
        elif rank == 1:
            check(comm.recv(place(np.zeros_like(parts[0])), 0), parts[0])


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

    own, total = of_rank(comm.rank, np.dtype(np.float32), (3, 4)), reduced(comm, "sum", np.dtype(np.float32), (3, 4))
    for wrapped in (WithDlpack, with_cuda_array_interface):
        array = on_gpu(own)
        comm.all_reduce(wrapped(array))
        check(array, total)
        assert isinstance(comm.all_gather(wrapped(array)), cupy.ndarray)
    array = on_gpu(own)
    read_only = with_cuda_array_interface(array, read_only=True)
    with pytest.raises(gs.InvalidArgument):
        comm.all_reduce(read_only)
    check(comm.all_reduce(read_only, out=cupy.empty_like(array)), total)
    with pytest.raises(gs.InvalidArgument):
        comm.all_reduce([1.0])
    with pytest.raises(gs.UnsupportedDtype):
        comm.all_reduce(np.array([object()]))
    if cupy.cuda.runtime.getDeviceCount() > 1:
        with another_device(comm):
            elsewhere = cupy.empty(3, np.float32)
        with pytest.raises(gs.InvalidArgument):
            comm.all_reduce(elsewhere)
    check(comm.all_reduce(on_gpu(own)), total)  # nothing of this has broken the communicator


@each_dtype
@pytest.mark.ranks(on={"cupy": (1, 3, 5), "gpu": (1,)})
def test_layouts(comm, dtype) -> None:
    """A kernel of CuPy copies arrays that are not contiguous, and fills 0-d ones."""
    op = OPERATORS[dtype][-1]
    own, expected = of_rank(comm.rank, dtype, (6, 4)), reduced(comm, op, dtype, (6, 4))
    for view in (np.s_[::2], np.s_[:, 1:3], np.s_[::-1], np.s_[1:5], "transposed"):
        pick = np.transpose if view == "transposed" else lambda array, view=view: array[view]
        array = pick(on_gpu(own))
        assert comm.all_reduce(array, op) is array
        check(array, pick(expected), values=KERNELS_RUN)
        assert comm.all_reduce(array, op, out=array.copy()).shape == array.shape
        assert comm.all_gather(array).shape == (comm.world_size * array.shape[0], array.shape[1])
        assert comm.broadcast(array) is array
    for shape in ((), (0,), (0, 3), (1, 0)):
        own = of_rank(comm.rank, dtype, shape)
        expected = reduced(comm, op, dtype, shape)
        for place in (on_gpu, np.copy):
            values = is_checked(dtype, op, comm.world_size) and (shape != () or place is np.copy or KERNELS_RUN)
            check(comm.all_reduce(place(own), op), expected, values=values)
            assert comm.all_gather(place(own)).size == comm.world_size * own.size
    strided = np.asfortranarray(of_rank(comm.rank, dtype, (4, 3)))  # in host memory: NumPy copies it
    assert comm.all_reduce(strided, op) is strided
    check(strided, reduced(comm, op, dtype, (4, 3)), values=is_checked(dtype, op, comm.world_size))


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

    own, total = of_rank(comm.rank, np.dtype(np.float32), (6,)), reduced(comm, "sum", np.dtype(np.float32), (6,))
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
    if cupy.cuda.runtime.getDeviceCount() > 1:
        with another_device(comm):
            foreign = cupy.cuda.Stream()
        with pytest.raises(gs.InvalidArgument):
            comm.all_reduce(on_gpu(own), stream=foreign)


@pytest.mark.ranks(on={"cupy": (1, 2, 3), "gpu": (1, 2)})
def test_futures_of_collectives(comm) -> None:
    size, rank, kind = comm.world_size, comm.rank, np.dtype(np.float32)
    own, total = of_rank(rank, kind, (size, 2)), reduced(comm, "sum", kind, (size, 2))
    parts = [of_rank(r, kind, (size, 2)) for r in range(size)]
    later = comm.asynchronous
    for place in (on_gpu, np.copy):
        futures = {
            "all_reduce": (later.all_reduce(place(own)), total),
            "reduce": (later.reduce(place(own), "sum", 0), total if rank == 0 else None),
            "reduce_scatter": (later.reduce_scatter(place(own)), total[rank : rank + 1]),
            "broadcast": (later.broadcast(place(own)), parts[0]),
            "all_gather": (later.all_gather(place(own)), np.concatenate(parts)),
            "gather": (later.gather(place(own)), np.concatenate(parts) if rank == 0 else None),
            "scatter": (
                later.scatter(place(own) if rank == 0 else None, out=place(own[:1])),
                parts[0][rank : rank + 1],
            ),
            "all_to_all": (later.all_to_all(place(own)), np.stack([part[rank] for part in parts])),
            "exchange": (
                later.exchange(place(own), dest=(rank + 1) % size, out=place(own), source=(rank - 1) % size),
                parts[(rank - 1) % size],
            ),
        }
        called: list[str] = []
        all_called = threading.Event()
        for name, (future, _) in futures.items():
            future.add_done_callback(lambda _, name=name, called=called: called.append(name))
        next(reversed(futures.values()))[0].add_done_callback(lambda _, event=all_called: event.set())
        for future, expected in futures.values():
            result = future.result(timeout=60)
            assert (result is None) == (expected is None)
            if expected is not None:
                check(result, expected)
        assert all_called.wait(60)
        assert called == list(futures)
        assert all(future.done() and future.exception() is None for future, _ in futures.values())


@pytest.mark.ranks(on={"cupy": (1, 2, 3), "gpu": (1, 2)})
def test_groups_and_objects(comm) -> None:
    import cupy

    size, rank = comm.world_size, comm.rank
    comm.barrier()
    gs.group_barrier(comm)
    assert gs.synchronized(lambda: rank)() == rank
    loss = on_gpu(np.array([rank + 1.0]))[0]  # a 0-d view
    assert gs.comm.reduce_dict({"loss": loss}, average=False) == {"loss": size * (size + 1) / 2}
    with gs.override_backend("shm" if size > 1 else "local") as other:
        assert other.all_reduce(np.ones(2)).tolist() == [size, size]
    assert comm.objects.all_gather({"rank": rank}) == [{"rank": r} for r in range(size)]
    assert comm.objects.gather(rank) == (list(range(size)) if rank == 0 else None)
    assert comm.objects.broadcast("word" if rank == 0 else None) == "word"
    assert comm.objects.scatter(list(range(size)) if rank == 0 else None) == rank
    assert comm.device == f"cuda:{cupy.cuda.Device().id}"
    for group in (comm.new_group(range(size)), comm.split(0, key=-rank), comm.split_by_machine()):
        with group:
            assert int(group.all_reduce(on_gpu(np.ones(1))).get()[0]) == size
    last = comm.new_group([size - 1])
    if rank == size - 1:
        check(last.all_reduce(on_gpu(np.ones(3))), np.ones(3))
        last.close()
    else:
        assert isinstance(last, gs.NonMember)


@pytest.mark.ranks(on={"cupy": (1, 2, 3), "gpu": (1, 2)})
def test_lists_and_trees(comm) -> None:
    """`param_pack_concat`, and what uses it, runs a kernel of CuPy."""
    shapes, kinds = [(7,), (2, 2), (3, 1)], [np.float32, np.float64, np.int8]
    sources = [of_rank(0, np.dtype(kind), shape) for shape, kind in zip(shapes, kinds, strict=True)]

    def arrays() -> list[Any]:
        return [on_gpu(source if comm.rank == 0 else np.zeros_like(source)) for source in sources]

    targets = arrays()
    gs.bcast_list_(targets)
    tree = gs.broadcast_tree({"layers": arrays()})
    for target, source in zip([*targets, *tree["layers"]], sources * 2, strict=True):
        check(target, source)
    gs.check_consistency(targets)
    gradients = {"a": on_gpu(np.full(3, comm.rank, np.float32)), "b": [on_gpu(np.full((2, 2), comm.rank, np.float16))]}
    averaged = gs.average_gradients(gradients, op="sum")
    for result in (averaged["a"], averaged["b"][0]):
        check(result, np.full(result.shape, sum(range(comm.world_size)), result.dtype))
    callback = gs.make_allreduce_cb("sum", comm)
    gradients = {"a": on_gpu(np.full(3, comm.rank, np.float32))}
    averaged = gs.average_gradients(gradients, callback)
    check(averaged["a"], np.full(3, sum(range(comm.world_size)), np.float32))
    equal = [on_gpu(np.ones(shape, np.float32)) for shape in shapes]
    for result, shape in zip(gs.pack_allreduce_split(equal, shapes), shapes, strict=True):
        check(result, np.ones(shape, np.float32), values=KERNELS_RUN)
    offsets = gs.get_offsets(shapes)
    flat = gs.param_pack_concat(equal, on_gpu(np.array(offsets)), offsets)
    assert [view.shape for view in gs.param_pack_split(flat, offsets, shapes)] == shapes
