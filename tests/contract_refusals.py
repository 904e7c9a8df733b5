"""The contract of what is refused: the same error on every communicator, on this rank, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import gradsync as gs
from contract import HOST_ONLY_DTYPES, contribution, expect
from gradsync.reduction import OPERATIONS_BY_DTYPE, ReduceOp

Call = Callable[[], Any]


class Sparse:
    """What a sparse array of SciPy or CuPy looks like from here."""

    shape, dtype = (3, 3), np.dtype(np.float64)

    def tocoo(self) -> Sparse:
        return self


NOT_ARRAYS = [
    [1.0, 2.0],
    (1.0,),
    3.0,
    None,
    "text",
    np.float32(1.0),
    Sparse(),
    np.ma.masked_array([1.0], [True]),
    memoryview(b"bytes"),
]


def calls_with(comm: Any, array: Any) -> dict[str, Call]:
    """Returns a call of each collective on the array, root 0, with which only the array may be wrong."""
    other = (comm.rank + 1) % comm.world_size
    part = np.zeros(1)
    messages = {"send": lambda: comm.send(array, other), "recv": lambda: comm.recv(array, other)}
    return {
        "all_reduce": lambda: comm.all_reduce(array),
        "reduce": lambda: comm.reduce(array),
        "reduce_scatter": lambda: comm.reduce_scatter(array),
        "broadcast": lambda: comm.broadcast(array),
        "all_gather": lambda: comm.all_gather(array),
        "all_gather, asking": lambda: comm.all_gather(array, sizes="ask"),
        "gather": lambda: comm.gather(array),
        "scatter": lambda: comm.scatter(array, comm.rank),
        "all_to_all": lambda: comm.all_to_all(array),
        **(messages if comm.world_size > 1 else {}),
        "exchange": lambda: comm.exchange(array, comm.rank, part, comm.rank),
        "exchange into": lambda: comm.exchange(part, comm.rank, array, comm.rank),
    }


def interleaved(comm: Any, kit: Any, attempts: Iterator[None]) -> None:
    """Runs attempts that must be refused, and collectives in between: nothing may have reached another rank."""
    for number, _ in enumerate(attempts):
        if number % 8 == 0:
            assert (kit.get(comm.all_reduce(kit.put(np.ones(3)))) == comm.world_size).all()
    assert (kit.get(comm.all_reduce(kit.put(np.ones(2)))) == comm.world_size).all()


def refused(kind: type[Exception], call: Call, text: str = "") -> Iterator[None]:
    expect(kind, call, text)
    yield


def check_what_is_no_array(comm: Any, kit: Any) -> None:
    def attempts() -> Iterator[None]:
        for wrong in NOT_ARRAYS:
            for call in calls_with(comm, wrong).values():
                yield from refused(gs.InvalidArgument, call, f"rank {comm.rank}/{comm.world_size}")

    interleaved(comm, kit, attempts())


def check_python_objects_in_arrays(comm: Any, kit: Any) -> None:
    def attempts() -> Iterator[None]:
        for dtype in (object, [("weight", "f4"), ("owner", object)]):
            for call in calls_with(comm, np.zeros(comm.world_size, dtype)).values():
                yield from refused(gs.UnsupportedDtype, call)

    interleaved(comm, kit, attempts())


def check_operations_without_a_meaning(comm: Any, kit: Any) -> None:
    def attempts() -> Iterator[None]:
        for name, operations in OPERATIONS_BY_DTYPE.items():
            array = kit.put(contribution(comm.rank, (comm.world_size,), name))
            for op in sorted({op.value for op in ReduceOp} - {op.value for op in operations}):
                yield from refused_reductions(gs.UnsupportedDtype, comm, array, op, op)
        for dtype in HOST_ONLY_DTYPES.values():
            yield from refused_reductions(gs.UnsupportedDtype, comm, np.zeros(comm.world_size, dtype), "sum")
        for wrong in ("average", "", None, 1, np.add):
            yield from refused_reductions(gs.InvalidArgument, comm, kit.put(np.zeros(comm.world_size)), wrong, "oper")

    interleaved(comm, kit, attempts())


def refused_reductions(kind: type[Exception], comm: Any, array: Any, op: Any, text: str = "") -> Iterator[None]:
    yield from refused(kind, lambda: comm.all_reduce(array, op), text)
    yield from refused(kind, lambda: comm.reduce(array, op), text)
    yield from refused(kind, lambda: comm.reduce_scatter(array, op), text)


def check_wrong_roots(comm: Any, kit: Any) -> None:
    def attempts() -> Iterator[None]:
        array = kit.put(np.zeros(comm.world_size))
        for wrong in (-1, comm.world_size, "0", None, 0.0, True):
            yield from refused(gs.InvalidArgument, lambda w=wrong: comm.broadcast(array, w), "root")
            yield from refused(gs.InvalidArgument, lambda w=wrong: comm.reduce(array, "sum", w), "root")
            yield from refused(gs.InvalidArgument, lambda w=wrong: comm.gather(array, w), "root")
            yield from refused(gs.InvalidArgument, lambda w=wrong: comm.scatter(array, w, out=array[:1]), "root")

    interleaved(comm, kit, attempts())


def check_wrong_peers(comm: Any, kit: Any) -> None:
    def attempts() -> Iterator[None]:
        array, n = kit.put(np.zeros(3)), comm.world_size
        for wrong in (-1, n, "0", None, 0.0, True, comm.rank):
            yield from refused(gs.InvalidArgument, lambda w=wrong: comm.send(array, w), "dest")
            yield from refused(gs.InvalidArgument, lambda w=wrong: comm.recv(array, w), "source")
            if wrong is not comm.rank:
                yield from refused(gs.InvalidArgument, lambda w=wrong: comm.exchange(array, w, array, 0), "dest")
                yield from refused(gs.InvalidArgument, lambda w=wrong: comm.exchange(array, 0, array, w), "source")
        mine, other = comm.rank, (comm.rank + 1) % n
        if mine != other:
            yield from refused(gs.InvalidArgument, lambda: comm.exchange(array, mine, array, other))
            yield from refused(gs.InvalidArgument, lambda: comm.exchange(array, other, array, mine))
        yield from refused(gs.InvalidArgument, lambda: comm.exchange(array, mine, kit.put(np.zeros(4)), mine))

    interleaved(comm, kit, attempts())


def check_wrong_targets(comm: Any, kit: Any) -> None:
    """Of another shape or dtype, read-only, overlapping itself, or no array at all."""
    n = comm.world_size
    whole, part, all_parts = (2 * n, 3), (2, 3), (2 * n * n, 3)
    source = kit.put(np.ones(whole, np.float32))

    def into(out: Any) -> dict[tuple[int, ...], list[Call]]:
        return {
            whole: [
                lambda: comm.all_reduce(source, out=out),
                lambda: comm.reduce(source, "sum", comm.rank, out=out),
                lambda: comm.all_to_all(source, out=out),
            ],
            part: [
                lambda: comm.reduce_scatter(source, out=out),
                lambda: comm.scatter(source, comm.rank, out=out),
            ],
            all_parts: [
                lambda: comm.all_gather(source, out=out),
                lambda: comm.gather(source, comm.rank, out=out),
            ],
        }

    def attempts() -> Iterator[None]:
        for shape in (whole, part, all_parts):
            rows = shape[0]
            for wrong in (
                np.ones((3, rows), np.float32),
                np.ones((rows + 1, 3), np.float32),
                np.ones(shape),
                kit.put(np.ones(shape, np.float16)),
                kit.put(np.ones((rows, 3, 1), np.float32)),
                read_only(np.ones(shape, np.float32)),
                np.lib.stride_tricks.as_strided(np.zeros(4 * rows, np.float32), shape, (4, 4)),
                [0.0] * 6,
                Sparse(),
            ):
                for call in into(wrong)[shape]:
                    yield from refused(gs.InvalidArgument, call, f"rank {comm.rank}/{n}")

    interleaved(comm, kit, attempts())


def check_read_only_arrays(comm: Any, kit: Any) -> None:
    def attempts() -> Iterator[None]:
        fixed, other = read_only(np.ones(3)), (comm.rank + 1) % comm.world_size
        yield from refused(gs.InvalidArgument, lambda: comm.all_reduce(fixed), "read-only")
        yield from refused(gs.InvalidArgument, lambda: comm.reduce(fixed, "sum", comm.rank), "read-only")
        if other != comm.rank:
            yield from refused(gs.InvalidArgument, lambda: comm.broadcast(fixed, other), "read-only")
            yield from refused(gs.InvalidArgument, lambda: comm.recv(fixed, other), "read-only")
        target = np.zeros(3)
        yield from refused(gs.InvalidArgument, lambda: comm.exchange(target, comm.rank, fixed, comm.rank), "read-only")

    interleaved(comm, kit, attempts())


def read_only(array: Any) -> Any:
    array.setflags(write=False)
    return array


def check_rows_that_do_not_divide(comm: Any, kit: Any) -> None:
    def attempts() -> Iterator[None]:
        for rows in range(1, comm.world_size):
            array = kit.put(np.ones((rows, comm.world_size)))
            yield from refused(gs.InvalidArgument, lambda a=array: comm.reduce_scatter(a), "sizes")
            yield from refused(gs.InvalidArgument, lambda a=array: comm.scatter(a, comm.rank), "sizes")
            yield from refused(gs.InvalidArgument, lambda a=array: comm.all_to_all(a), "send_sizes")
        zero_d = kit.put(np.ones(()))
        if comm.world_size > 1:
            yield from refused(gs.InvalidArgument, lambda: comm.reduce_scatter(zero_d), "sizes")
            yield from refused(gs.InvalidArgument, lambda: comm.all_to_all(zero_d), "send_sizes")

    interleaved(comm, kit, attempts())


def check_sizes_that_do_not_fit(comm: Any, kit: Any) -> None:
    n = comm.world_size
    array = kit.put(np.ones((2 * n, 2)))

    def attempts() -> Iterator[None]:
        too_few, too_many = [2] * (n - 1), [2] * (n + 1)
        negative = [2] * n
        negative[0] = -2
        for wrong in (too_few, too_many, [1] * n, negative, [2.0] * n, ["2"] * n, 2, "tell", [None] * n):
            yield from refused(gs.InvalidArgument, lambda w=wrong: comm.reduce_scatter(array, sizes=w), "sizes")
            yield from refused(gs.InvalidArgument, lambda w=wrong: comm.scatter(array, comm.rank, sizes=w), "sizes")
            yield from refused(gs.InvalidArgument, lambda w=wrong: comm.all_to_all(array, send_sizes=w), "sizes")
            yield from refused(gs.InvalidArgument, lambda w=wrong: comm.all_gather(array, sizes=w), "sizes")
            yield from refused(gs.InvalidArgument, lambda w=wrong: comm.gather(array, sizes=w), "sizes")
        fits = [2] * n
        yield from refused(gs.InvalidArgument, lambda: comm.all_to_all(array, recv_sizes=fits), "send_sizes")
        room = kit.put(np.zeros((2 * n, 2)))
        yield from refused(gs.InvalidArgument, lambda: comm.all_to_all(array, send_sizes=fits, out=room), "recv_sizes")
        room = kit.put(np.zeros((2 * n * n, 2)))
        yield from refused(gs.InvalidArgument, lambda: comm.all_gather(array, sizes="ask", out=room), "sizes")

    interleaved(comm, kit, attempts())


def check_scatter_without_room(comm: Any, kit: Any) -> None:
    def attempts() -> Iterator[None]:
        root = (comm.rank + 1) % comm.world_size
        if root != comm.rank:
            yield from refused(gs.InvalidArgument, lambda: comm.scatter(None, root), "out=")
        yield from refused(gs.InvalidArgument, lambda: comm.scatter(None, comm.rank))

    interleaved(comm, kit, attempts())
