"""The contract of what is refused: the same error on every communicator, on this rank, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
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
        "gather": lambda: comm.gather(array),
        "scatter": lambda: comm.scatter(array, comm.rank),
        "all_to_all": lambda: comm.all_to_all(array),
        **(messages if comm.world_size > 1 else {}),
        "exchange": lambda: comm.exchange(array, dest=comm.rank, out=part, source=comm.rank),
        "exchange into": lambda: comm.exchange(part, dest=comm.rank, out=array, source=comm.rank),
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
            yield from refused_reductions(
                gs.InvalidArgument, comm, kit.put(np.zeros(comm.world_size)), wrong, "op needs to be one of"
            )

    interleaved(comm, kit, attempts())


def refused_reductions(kind: type[Exception], comm: Any, array: Any, op: Any, text: str = "") -> Iterator[None]:
    yield from refused(kind, lambda: comm.all_reduce(array, op), text)
    yield from refused(kind, lambda: comm.reduce(array, op), text)
    yield from refused(kind, lambda: comm.reduce_scatter(array, op), text)


def check_what_the_errors_advise(comm: Any, kit: Any) -> None:
    array = kit.put(np.zeros(comm.world_size))

    def attempts() -> Iterator[None]:
        who = f"rank {comm.rank}/{comm.world_size}: "
        out = "got an array: pass the output array as out="
        yield from refused(
            gs.InvalidArgument, lambda: comm.all_reduce(array, array), f"{who}all_reduce: op needs to be"
        )
        yield from refused(gs.InvalidArgument, lambda: comm.all_reduce(array, array), out)
        yield from refused(gs.InvalidArgument, lambda: comm.gather(array, array), out)
        booleans = kit.put(np.zeros(comm.world_size, bool))
        yield from refused(gs.UnsupportedDtype, lambda: comm.reduce(booleans), f"{who}reduce: sum is not defined")
        yield from refused(gs.InvalidArgument, lambda: comm.all_gather({"a": 1}), "got dict (comm.objects gathers")
        yield from refused(gs.InvalidArgument, lambda: comm.all_gather([array]), "numpy.asarray(...)")
        for number in (0.5, np.float64(0.5)):
            advice = "make it an array with numpy.array(...), or pass numbers to gs.comm.reduce_dict or comm.objects"
            yield from refused(gs.InvalidArgument, partial(comm.all_reduce, number), advice)
            yield from refused(gs.InvalidArgument, partial(comm.broadcast, number), advice)
        yield from refused(gs.UnsupportedDtype, lambda: comm.all_gather(np.array([None])), "comm.objects gathers")
        done = comm.asynchronous.all_gather(array)
        done.result()
        yield from refused(gs.InvalidArgument, lambda: comm.all_reduce(done), "Future: pass its .result()")

    interleaved(comm, kit, attempts())


def check_wrong_roots(comm: Any, kit: Any) -> None:
    def attempts() -> Iterator[None]:
        array = kit.put(np.zeros(comm.world_size))
        for wrong in (-1, comm.world_size, "0", None, 0.0, True):
            text = f"needs root to be a rank from 0 to {comm.world_size - 1}, got {wrong!r}"
            yield from refused(gs.InvalidArgument, lambda w=wrong: comm.broadcast(array, w), f"broadcast {text}")
            yield from refused(gs.InvalidArgument, lambda w=wrong: comm.reduce(array, "sum", w), f"reduce {text}")
            yield from refused(gs.InvalidArgument, lambda w=wrong: comm.gather(array, w), f"gather {text}")
            yield from refused(
                gs.InvalidArgument, lambda w=wrong: comm.scatter(array, w, out=array[:1]), f"scatter {text}"
            )

    interleaved(comm, kit, attempts())


def check_errors_of_a_group(comm: Any, kit: Any) -> None:
    """They, and its repr, say which group it is, and that it numbers its ranks itself."""
    with comm.new_group(range(comm.world_size)) as group:
        if comm.backend != "local":
            assert group.label in repr(group)
            array, numbered = kit.put(np.zeros(3)), f"0 to {comm.world_size - 1}, numbered within the group"
            expect(gs.InvalidArgument, lambda: group.broadcast(array, comm.world_size), numbered)
            expect(gs.InvalidArgument, lambda: group.send(array, comm.world_size), numbered)
        assert (kit.get(group.all_reduce(kit.put(np.ones(3)))) == comm.world_size).all()


def check_wrong_peers(comm: Any, kit: Any) -> None:
    def attempts() -> Iterator[None]:
        array, n = kit.put(np.zeros(3)), comm.world_size

        def exchange(dest: Any, source: Any) -> Any:
            return comm.exchange(array, dest=dest, out=array, source=source)

        for wrong in (-1, n, "0", None, 0.0, True, comm.rank):
            yield from refused(gs.InvalidArgument, lambda w=wrong: comm.send(array, w), "dest")
            yield from refused(gs.InvalidArgument, lambda w=wrong: comm.recv(array, w), "source")
            if wrong is not comm.rank:
                yield from refused(gs.InvalidArgument, lambda w=wrong: exchange(w, 0), "dest")
                yield from refused(gs.InvalidArgument, lambda w=wrong: exchange(0, w), "source")
        mine, other = comm.rank, (comm.rank + 1) % n
        if mine != other:
            yield from refused(gs.InvalidArgument, lambda: exchange(mine, other))
            yield from refused(gs.InvalidArgument, lambda: exchange(other, mine))
        larger = kit.put(np.zeros(4))
        yield from refused(gs.InvalidArgument, lambda: comm.exchange(array, dest=mine, out=larger, source=mine))

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
        in_place = "which is read-only: pass out="
        yield from refused(gs.InvalidArgument, lambda: comm.all_reduce(fixed), in_place)
        yield from refused(gs.InvalidArgument, lambda: comm.reduce(fixed, "sum", comm.rank), in_place)
        out = "all_reduce writes into out, which is read-only: pass another array"
        yield from refused(gs.InvalidArgument, lambda: comm.all_reduce(np.ones(3), out=fixed), out)
        if other != comm.rank:
            yield from refused(gs.InvalidArgument, lambda: comm.broadcast(fixed, other), "read-only: pass a copy")
            yield from refused(gs.InvalidArgument, lambda: comm.recv(fixed, other), "read-only: pass another array")
        target, me = np.zeros(3), comm.rank
        exchange = comm.exchange
        yield from refused(gs.InvalidArgument, lambda: exchange(target, dest=me, out=fixed, source=me), "read-only")

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
        huge = [2] * n
        huge[-1] = 2**70
        yield from refused(
            gs.InvalidArgument, lambda: comm.all_to_all(array, send_sizes=[2] * n, recv_sizes=huge), "recv_sizes"
        )
        if n > 1:
            too_large = [2**59] * n
            too_large[comm.rank] = 2
            yield from refused(gs.InvalidArgument, lambda: comm.all_gather(array[:2], sizes=too_large), "2**63 bytes")
        for wrong in (
            too_few,
            too_many,
            [1] * n,
            negative,
            huge,
            [2**62] * 4 * n,
            [2.0] * n,
            ["2"] * n,
            2,
            "tell",
            [None] * n,
        ):
            yield from refused(gs.InvalidArgument, lambda w=wrong: comm.reduce_scatter(array, sizes=w), "sizes")
            yield from refused(gs.InvalidArgument, lambda w=wrong: comm.scatter(array, comm.rank, sizes=w), "sizes")
            yield from refused(
                gs.InvalidArgument, lambda w=wrong: comm.all_to_all(array, send_sizes=w, recv_sizes=w), "sizes"
            )
            yield from refused(gs.InvalidArgument, lambda w=wrong: comm.all_gather(array, sizes=w), "sizes")
            yield from refused(gs.InvalidArgument, lambda w=wrong: comm.gather(array, sizes=w), "sizes")
        fits = [2] * n
        yield from refused(gs.InvalidArgument, lambda: comm.all_to_all(array, recv_sizes=fits), "send_sizes is missing")
        yield from refused(gs.InvalidArgument, lambda: comm.all_to_all(array, send_sizes=fits), "recv_sizes is missing")
        for gather in (comm.all_gather, comm.gather):
            told = "has no sizes='ask' any more (removed in 0.3): pass the number of rows of each rank"
            yield from refused(gs.InvalidArgument, lambda g=gather: g(array, sizes="ask"), told)

    interleaved(comm, kit, attempts())


def check_scatter_without_room(comm: Any, kit: Any) -> None:
    def attempts() -> Iterator[None]:
        root = (comm.rank + 1) % comm.world_size
        if root != comm.rank:
            text = "needs out= on every rank but the root"
            yield from refused(gs.InvalidArgument, lambda: comm.scatter(None, root), text)
        text = "needs an array on its root, which is this rank; got None"
        yield from refused(gs.InvalidArgument, lambda: comm.scatter(None, comm.rank), text)

    interleaved(comm, kit, attempts())
