"""The checks that every communicator must pass, at every world size; run inside rank processes.

Every rank runs the same checks in the same order. Contributions are made from (rank, seed), so that each rank can
compute what all the others gave, and the float64 reference with it. A kit makes the arrays: NumPy's, or CuPy's.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

import gradsync as gs
from gradsync.reduction import OPERATIONS_BY_DTYPE, ReduceOp

SHAPES = [(), (0,), (1,), (7,), (3, 0, 2), (13, 17), (64, 257), (70_001,), (300_007,)]
FLOAT_TOLERANCE = {
    "float16": 1e-3,
    "bfloat16": 8e-3,
    "float32": 1e-6,
    "complex64": 1e-6,
    "float64": 1e-14,
    "complex128": 1e-14,
}


class NumpyKit:
    """Arrays in host memory."""

    xp = np

    def put(self, values: np.ndarray[Any, Any]) -> Any:
        return values

    def get(self, array: Any) -> np.ndarray[Any, Any]:
        return array


class CupyKit:
    """Arrays on the communicator's GPU."""

    def __init__(self) -> None:
        import cupy

        self.xp = cupy

    def put(self, values: np.ndarray[Any, Any]) -> Any:
        """A copy on the device in the same kind of layout."""
        if values.ndim > 1 and values.flags.f_contiguous and not values.flags.c_contiguous:
            return self.xp.asfortranarray(self.xp.asarray(np.ascontiguousarray(values)))
        return self.xp.asarray(np.ascontiguousarray(values)).reshape(values.shape)

    def get(self, array: Any) -> np.ndarray[Any, Any]:
        return array.get()


KITS: dict[str, Callable[[], Any]] = {"numpy": NumpyKit, "cupy": CupyKit}


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def contribution(rank: int, shape: tuple[int, ...], name: str, seed: int = 0) -> np.ndarray[Any, Any]:
    """What a rank hands in: values around 1, so that products of four stay in range of every dtype."""
    rng = np.random.default_rng([rank, seed, len(shape)])
    if name == "bool":
        return np.asarray(rng.integers(0, 2, shape).astype(bool))
    if name.startswith(("int", "uint")):
        return np.asarray(rng.integers(0, 4, shape).astype(name))
    values = rng.uniform(0.5, 1.5, shape)
    if name.startswith("complex"):
        values = values + 1j * rng.uniform(0.5, 1.5, shape)
    return np.asarray(values).astype(dtype_of(name))


def reference(op: str, contributions: list[np.ndarray[Any, Any]], name: str) -> np.ndarray[Any, Any]:
    wide = np.complex128 if name.startswith("complex") else np.float64
    stack = np.stack([np.asarray(c).astype(wide) for c in contributions])
    reduce = {"sum": np.sum, "mean": np.mean, "prod": np.prod, "min": np.min, "max": np.max}[op]
    return np.asarray(reduce(stack, axis=0))


def assert_equal_to_reference(got: np.ndarray[Any, Any], op: str, name: str, shape: tuple[int, ...], n: int) -> None:
    want = reference(op, [contribution(r, shape, name) for r in range(n)], name)
    assert got.shape == shape
    assert got.dtype == dtype_of(name)
    if name in FLOAT_TOLERANCE:
        np.testing.assert_allclose(np.asarray(got).astype(want.dtype), want, rtol=FLOAT_TOLERANCE[name] * n, atol=0)
    else:
        np.testing.assert_array_equal(got, want.astype(got.dtype))


def assert_same_bits_everywhere(comm: Any, array: np.ndarray[Any, Any]) -> None:
    mine = np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy()
    from_root = mine.copy()
    comm.broadcast(from_root, 0)
    np.testing.assert_array_equal(mine, from_root)


def check_every_operation_and_dtype(comm: Any, kit: Any) -> None:
    for name, operations in OPERATIONS_BY_DTYPE.items():
        for op in sorted(o.value for o in operations):
            for shape in SHAPES:
                array = kit.put(contribution(comm.rank, shape, name))
                got = comm.all_reduce(array, op)
                assert got is array
                assert_equal_to_reference(kit.get(array), op, name, shape, comm.world_size)
                assert_same_bits_everywhere(comm, kit.get(array))


def check_refused_operations(comm: Any, kit: Any) -> None:
    for name, operations in OPERATIONS_BY_DTYPE.items():
        for op in sorted(set(ReduceOp) - operations, key=lambda op: op.value):
            array = kit.put(contribution(comm.rank, (3,), name))
            expect(gs.UnsupportedDtype, lambda a=array, o=op: comm.all_reduce(a, o.value))
    for dtype in ("datetime64[s]", "U4", ">f4", "O"):
        expect(gs.UnsupportedDtype, lambda d=dtype: comm.all_reduce(np.zeros(3, d)))
    expect(gs.InvalidArgument, lambda: comm.all_reduce(np.zeros(3), "average"), "average")
    for wrong in ([1.0, 2.0], 3.0, None, np.ma.masked_array([1.0], [True])):
        expect(gs.InvalidArgument, lambda w=wrong: comm.all_reduce(w))


def layouts_of(values: np.ndarray[Any, Any], kit: Any) -> list[Any]:
    """The same 2-D values in different memory layouts."""
    rows, columns = values.shape
    wide = kit.xp.zeros((2 * rows, 3 * columns), values.dtype)
    strided = wide[::2, ::3]
    strided[...] = kit.put(values)
    backwards = kit.put(np.ascontiguousarray(values[::-1, ::-1]))[::-1, ::-1]
    return [kit.put(values.copy()), kit.put(np.asfortranarray(values)), strided, backwards]


def check_memory_layouts(comm: Any, kit: Any) -> None:
    for shape in ((3, 5), (400, 301)):
        values = contribution(comm.rank, shape, "float32")
        for number in range(4):
            # Each rank takes another layout: elements must meet by index, not by place in memory.
            array = layouts_of(values, kit)[(number + comm.rank) % 4]
            comm.all_reduce(array, "mean")
            assert_equal_to_reference(np.ascontiguousarray(kit.get(array)), "mean", "float32", shape, comm.world_size)


def check_out(comm: Any, kit: Any) -> None:
    shape = (300, 301)
    values = contribution(comm.rank, shape, "float64")
    for number in range(4):
        source = layouts_of(values, kit)[number]
        if isinstance(source, np.ndarray):
            source.setflags(write=False)
        out = layouts_of(np.zeros(shape), kit)[(number + comm.rank) % 4]
        assert comm.all_reduce(source, "sum", out=out) is out
        np.testing.assert_array_equal(kit.get(source), values)
        assert_equal_to_reference(np.ascontiguousarray(kit.get(out)), "sum", "float64", shape, comm.world_size)
    repeated = np.broadcast_to(np.float64(comm.rank), (4, 4))
    out = np.empty((4, 4))
    comm.all_reduce(repeated, out=out)
    assert (out == sum(range(comm.world_size))).all()


def check_wrong_targets(comm: Any, kit: Any) -> None:
    source = np.ones((2, 3), np.float32)
    read_only = source.copy()
    read_only.setflags(write=False)
    overlapping = np.lib.stride_tricks.as_strided(np.zeros(8, np.float32), (2, 3), (4, 4))
    for wrong in (np.ones((3, 2), np.float32), np.ones((2, 3)), read_only, overlapping, [0.0] * 6):
        expect(gs.InvalidArgument, lambda w=wrong: comm.all_reduce(source, out=w), f"rank {comm.rank}/")
    expect(gs.InvalidArgument, lambda: comm.all_reduce(read_only), "read-only")
    comm.all_reduce(source)
    assert (source == comm.world_size).all()


def check_dlpack(comm: Any, kit: Any) -> None:
    class Foreign:
        """An array of a library that only speaks DLPack."""

        def __init__(self) -> None:
            self.memory = kit.put(np.full(5, comm.rank + 1.0))

        def __dlpack__(self, **options: Any) -> Any:
            return self.memory.__dlpack__(**options)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.memory.__dlpack_device__()

    foreign = Foreign()
    assert comm.all_reduce(foreign) is foreign
    assert (kit.get(foreign.memory) == sum(range(1, comm.world_size + 1))).all()


def check_broadcast(comm: Any, kit: Any) -> None:
    for root in range(comm.world_size):
        for name in ("float32", "bool", "bfloat16", "complex128", "int8"):
            for shape in ((), (0,), (5, 3), (1_000_003,)):
                array = kit.put(contribution(comm.rank, shape, name))
                want = contribution(root, shape, name)
                if comm.rank == root and isinstance(array, np.ndarray):
                    array.setflags(write=False)
                assert comm.broadcast(array, root) is array
                np.testing.assert_array_equal(kit.get(array), want)
        fortran = kit.put(np.asfortranarray(contribution(comm.rank, (30, 40), "float64")))
        comm.broadcast(fortran, root)
        np.testing.assert_array_equal(kit.get(fortran), contribution(root, (30, 40), "float64"))
        stamps = np.full(3, comm.rank, "datetime64[s]")
        comm.broadcast(stamps, root)
        assert (stamps == np.datetime64(root, "s")).all()
    for wrong in (-1, comm.world_size, "0", None):
        expect(gs.InvalidArgument, lambda w=wrong: comm.broadcast(np.zeros(1), w), "root")


def check_disagreement(comm: Any, kit: Any) -> None:
    """Ranks that differ all get PlanMismatch, nothing is written, and the communicator stays usable."""
    if comm.world_size == 1:
        return
    odd = comm.rank == comm.world_size - 1
    small, large = kit.put(np.full(5, 1.0)), kit.put(np.full(300_000, 1.0))
    attempts: list[Callable[[], Any]] = [
        lambda: comm.all_reduce(small[:4] if odd else small),
        lambda: comm.all_reduce(small if odd else large),
        lambda: comm.all_reduce(large[:-1] if odd else large),
        lambda: comm.all_reduce(small.astype("f4") if odd else small),
        lambda: comm.all_reduce(large, "max" if odd else "min"),
        lambda: comm.all_reduce(small.reshape(5, 1) if odd else small.reshape(1, 5)),
        lambda: comm.broadcast(large, 1 if odd else 0),
        lambda: comm.barrier() if odd else comm.all_reduce(small),
        lambda: comm.broadcast(large, 0) if odd else comm.all_reduce(large),
    ]
    for attempt in attempts:
        error = expect(gs.PlanMismatch, attempt)
        assert set(error.descriptions) == set(range(comm.world_size))
        assert len(set(error.descriptions.values())) == 2
        assert (kit.get(small) == 1).all()
        assert (kit.get(large) == 1).all()
        again = kit.put(np.full(3, 1.0))
        comm.all_reduce(again)
        assert (kit.get(again) == comm.world_size).all()


def check_many_calls_in_a_row(comm: Any, kit: Any) -> None:
    rng = np.random.default_rng(11)
    for step in range(400):
        size = int(rng.choice([1, 100, 16_384, 16_385, 70_000]))
        kind = rng.integers(0, 4)
        if kind == 0:
            comm.barrier()
        elif kind == 1:
            root = int(rng.integers(0, comm.world_size))
            array = kit.put(np.full(size, comm.rank * 1000 + step, np.int32))
            comm.broadcast(array, root)
            assert (kit.get(array) == root * 1000 + step).all()
        else:
            array = kit.put(np.full(size, comm.rank + step, np.int32))
            comm.all_reduce(array)
            n = comm.world_size
            assert (kit.get(array) == n * step + n * (n - 1) // 2).all()


def check_same_bits_from_call_to_call(comm: Any, kit: Any) -> None:
    for size in (1000, 100_000):
        first = kit.put(contribution(comm.rank, (size,), "float32"))
        second = first.copy()
        comm.all_reduce(first, "mean")
        comm.all_reduce(second, "mean")
        assert kit.get(first).tobytes() == kit.get(second).tobytes()


def check_path_does_not_matter(comm: Any, kit: Any) -> None:
    """The value of an element does not depend on how large its array was; NCCL does not promise that."""
    if comm.backend == "nccl":
        return
    whole = kit.put(contribution(comm.rank, (200_000,), "float32"))
    part = whole[:10].copy()
    comm.all_reduce(whole)
    comm.all_reduce(part)
    assert kit.get(whole)[:10].tobytes() == kit.get(part).tobytes()


def check_repr(comm: Any, kit: Any) -> None:
    assert f"rank {comm.rank}/{comm.world_size}" in repr(comm)


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


def expect(kind: type[Any], action: Callable[[], Any], text: str = "") -> Any:
    """Returns the error of that kind that the action must raise."""
    try:
        action()
    except kind as error:
        assert text in str(error), f"{text!r} is not in {str(error)!r}"
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def run_all_checks(comm: Any, kit_name: str = "numpy") -> dict[str, str]:
    """Returns the failed checks with their tracebacks; called on every rank."""
    failures = {}
    kit = KITS[kit_name]()
    for check in CHECKS:
        try:
            check(comm, kit)
        except Exception:
            failures[check.__name__] = traceback.format_exc()
            break  # the ranks are no longer at the same place
    comm.close()
    expect(gs.CommunicatorClosed, lambda: comm.all_reduce(np.zeros(1)), "closed")
    return failures
