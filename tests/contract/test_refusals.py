"""What is refused: by the call itself, on the rank that makes it, before anything is sent.

One rank alone makes each wrong call; then all meet in a collective. Had anything reached the others, they would not.
"""

from functools import partial

import numpy as np
import pytest

import gradsync as gs
from arrays import HOST_DTYPES, OPERATORS, arrays_of, contribution
from ranks import EVERYWHERE, ON_GPU


class Refusals:
    """Collects wrong calls, and checks each of them on one rank, in turns."""

    def __init__(self, comm):
        self._comm, self._arrays, self._number = comm, arrays_of(comm), 0

    def __call__(self, kind, *calls):
        for call in calls:
            self._number += 1
            if self._comm.rank == self._number % self._comm.world_size:
                with pytest.raises(kind) as raised:
                    call()
                assert str(raised.value).startswith(f"rank {self._comm.rank}/{self._comm.world_size}: ")
            if self._number % 16 == 0:
                self.meet()

    def meet(self):
        total = self._comm.all_reduce(self._arrays.put(np.ones(3)))
        assert (self._arrays.get(total) == self._comm.world_size).all()


class Sparse:
    """What a sparse array of SciPy or CuPy looks like from here."""

    shape, dtype = (3, 3), np.dtype(np.float64)

    def tocoo(self):
        return self


def calls_with(comm, array):
    """A call of each collective in which only the array may be wrong."""
    me, other = comm.rank, (comm.rank + 1) % comm.world_size
    part = np.zeros(1)
    calls = [
        lambda: comm.all_reduce(array),
        lambda: comm.reduce(array),
        lambda: comm.reduce_scatter(array),
        lambda: comm.broadcast(array),
        lambda: comm.all_gather(array),
        lambda: comm.gather(array),
        lambda: comm.scatter(array, me),
        lambda: comm.all_to_all(array),
        lambda: comm.exchange(array, dest=me, out=part, source=me),
        lambda: comm.exchange(part, dest=me, out=array, source=me),
        lambda: comm.asynchronous.all_reduce(array),
    ]
    if comm.world_size > 1:
        calls += [lambda: comm.send(array, other), lambda: comm.recv(array, other)]
    return calls


@pytest.mark.ranks(on=EVERYWHERE)
def test_what_is_no_array(comm):
    refused = Refusals(comm)
    masked = np.ma.masked_array([1.0], [True])
    for wrong in ([1.0], (1.0,), 3.0, None, "text", np.float32(1.0), {"a": 1}, Sparse(), masked, memoryview(b"bytes")):
        refused(gs.InvalidArgument, *calls_with(comm, wrong))
    for dtype in (object, [("weight", "f4"), ("owner", object)]):
        refused(gs.UnsupportedDtype, *calls_with(comm, np.zeros(comm.world_size, dtype)))
    refused.meet()


@pytest.mark.ranks(on=EVERYWHERE | ON_GPU)
def test_operators_without_a_meaning(comm):
    refused, arrays = Refusals(comm), arrays_of(comm)

    def reductions(array, op):
        return [partial(each, array, op) for each in (comm.all_reduce, comm.reduce, comm.reduce_scatter)]

    for dtype, operators in OPERATORS.items():
        array = arrays.put(contribution(comm.rank, comm.world_size, dtype))
        for op in {"sum", "mean", "prod", "min", "max"} - set(operators):
            refused(gs.UnsupportedDtype, *reductions(array, op))
    for dtype in HOST_DTYPES.values():
        refused(gs.UnsupportedDtype, *reductions(np.zeros(comm.world_size, dtype), "max"))
    array = arrays.put(np.zeros(comm.world_size))
    for wrong in ("average", "", None, 1, np.add, ["sum"], array):
        refused(gs.InvalidArgument, *reductions(array, wrong))
    refused.meet()


@pytest.mark.ranks(on=EVERYWHERE)
def test_wrong_roots_and_peers(comm):
    refused, n, me, array = Refusals(comm), comm.world_size, comm.rank, arrays_of(comm).put(np.zeros(comm.world_size))
    for wrong in (-1, n, "0", None, 0.0, True):
        refused(
            gs.InvalidArgument,
            lambda: comm.broadcast(array, wrong),
            lambda: comm.reduce(array, "sum", wrong),
            lambda: comm.gather(array, wrong),
            lambda: comm.scatter(array, wrong, out=array[:1]),
            lambda: comm.send(array, wrong),
            lambda: comm.recv(array, wrong),
            lambda: comm.exchange(array, dest=wrong, out=array, source=0),
            lambda: comm.exchange(array, dest=0, out=array, source=wrong),
        )
    other, larger = (me + 1) % n, arrays_of(comm).put(np.zeros(n + 1))
    refused(
        gs.InvalidArgument,
        lambda: comm.send(array, me),
        lambda: comm.recv(array, me),
        lambda: comm.exchange(array, dest=me, out=larger, source=me),
        lambda: comm.broadcast(array, array),
        lambda: comm.scatter(None, me),
    )
    if n > 1:
        refused(
            gs.InvalidArgument,
            lambda: comm.exchange(array, dest=me, out=array, source=other),
            lambda: comm.exchange(array, dest=other, out=array, source=me),
            lambda: comm.scatter(None, other),
        )
    refused.meet()


@pytest.mark.ranks(on=EVERYWHERE)
def test_wrong_targets(comm):
    """Of another shape or dtype, read-only, overlapping itself, or no array at all."""
    refused, arrays, n, me = Refusals(comm), arrays_of(comm), comm.world_size, comm.rank
    source = arrays.put(np.ones((2 * n, 3), np.float32))
    for shape, *calls in (
        (
            (2 * n, 3),
            lambda out: comm.all_reduce(source, out=out),
            lambda out: comm.reduce(source, "sum", me, out=out),
            lambda out: comm.all_to_all(source, out=out),
        ),
        (
            (2, 3),
            lambda out: comm.reduce_scatter(source, out=out),
            lambda out: comm.scatter(source, me, out=out),
        ),
        (
            (2 * n * n, 3),
            lambda out: comm.all_gather(source, out=out),
            lambda out: comm.gather(source, me, out=out),
        ),
    ):
        rows = shape[0]
        fixed = np.ones(shape, np.float32)
        fixed.setflags(write=False)
        for wrong in (
            np.ones((3, rows), np.float32),
            np.ones((rows + 1, 3), np.float32),
            np.ones(shape),
            arrays.put(np.ones(shape, np.float16)),
            arrays.put(np.ones((rows, 3, 1), np.float32)),
            fixed,
            np.lib.stride_tricks.as_strided(np.zeros(4 * rows, np.float32), shape, (4, 4)),
            [0.0] * 6,
            Sparse(),
        ):
            refused(gs.InvalidArgument, *[partial(call, wrong) for call in calls])
    refused.meet()


@pytest.mark.ranks(on=EVERYWHERE)
def test_read_only_arrays_that_would_be_written(comm):
    refused, me, other = Refusals(comm), comm.rank, (comm.rank + 1) % comm.world_size
    fixed, swapped = np.ones(3), np.ones(3, ">f8")
    fixed.setflags(write=False)
    refused(
        gs.InvalidArgument,
        lambda: comm.all_reduce(fixed),
        lambda: comm.all_reduce(np.ones(3), out=fixed),
        lambda: comm.reduce(fixed, "sum", me),
        lambda: comm.exchange(np.ones(3), dest=me, out=fixed, source=me),
    )
    if me != other:
        refused(gs.InvalidArgument, lambda: comm.broadcast(fixed, other), lambda: comm.recv(fixed, other))
    for _ in range(3):
        comm.all_reduce(np.ones(3))
    # What was right for one array is looked at again for the next one like it.
    refused(gs.InvalidArgument, lambda: comm.all_reduce(fixed), lambda: comm.all_reduce(np.ones(3), out=np.ones(2)))
    refused(gs.UnsupportedDtype, lambda: comm.all_reduce(swapped))
    refused.meet()


@pytest.mark.ranks(on=EVERYWHERE)
def test_rows_and_sizes_that_do_not_fit(comm):
    refused, arrays, n, me = Refusals(comm), arrays_of(comm), comm.world_size, comm.rank
    for rows in [*range(1, n), None]:
        array = arrays.put(np.ones(() if rows is None else (rows, n)))
        if rows is not None or n > 1:
            refused(
                gs.InvalidArgument,
                lambda: comm.reduce_scatter(array),
                lambda: comm.scatter(array, me),
                lambda: comm.all_to_all(array),
            )
    array, twos = arrays.put(np.ones((2 * n, 2))), [2] * n
    refused(
        gs.InvalidArgument,
        lambda: comm.all_to_all(array, recv_sizes=twos),
        lambda: comm.all_to_all(array, send_sizes=twos),
        lambda: comm.all_to_all(array, send_sizes=twos, recv_sizes=[*twos[1:], 2**70]),
    )
    wrongs = [twos[1:], [2] * (n + 1), [1] * n, [-2, *twos[1:]], [*twos[1:], 2**70], [2**62] * 4 * n]
    wrongs += [[2.0] * n, ["2"] * n, 2, "tell", [None] * n]
    for sizes in wrongs:
        refused(
            gs.InvalidArgument,
            lambda: comm.reduce_scatter(array, sizes=sizes),
            lambda: comm.scatter(array, me, sizes=sizes),
            lambda: comm.all_to_all(array, send_sizes=sizes, recv_sizes=sizes),
            lambda: comm.all_gather(array, sizes=sizes),
            lambda: comm.gather(array, sizes=sizes),
        )
    if n > 1:
        too_large = [2**59] * n
        too_large[me] = 2
        refused(gs.InvalidArgument, lambda: comm.all_gather(array[:2], sizes=too_large))
    refused.meet()


@pytest.mark.ranks(2)
def test_errors_carry_the_advice(comm):
    array, booleans = np.zeros(2), np.zeros(2, bool)
    for kind, call, advice in (
        (gs.InvalidArgument, lambda: comm.all_reduce(array, array), "out="),
        (gs.UnsupportedDtype, lambda: comm.reduce(booleans), "max"),
        (gs.InvalidArgument, lambda: comm.all_gather({"a": 1}), r"comm\.objects"),
        (gs.InvalidArgument, lambda: comm.all_gather([array]), r"numpy\.asarray"),
        (gs.InvalidArgument, lambda: comm.all_reduce(0.5), "reduce_dict"),
        (gs.UnsupportedDtype, lambda: comm.all_reduce(np.zeros(2, ">f4")), "astype"),
    ):
        with pytest.raises(kind, match=advice):
            call()
