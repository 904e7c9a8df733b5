"""send, recv and exchange: between two ranks, in the order of sending."""

from itertools import count, product

import numpy as np
import pytest

import gradsync as gs
from arrays import (
    LAYOUTS,
    HostArrays,
    arrays_for,
    arrays_of,
    assert_identical,
    contribution,
    dtype_of,
    in_layout,
    read_only,
)
from ranks import ALSO_ALONE, COMPARED, EVERYWHERE, ON_GPU, SEVERAL

SHAPES = [(), (0,), (7,), (5, 3), (2, 0, 3), (20_011,), (200_003,)]  # the last one in many pieces
LARGE_DTYPES = ("bool", "bfloat16", "complex128", "record")


@pytest.mark.ranks(on=ALSO_ALONE | ON_GPU)
def test_every_dtype_and_shape(comm):
    """Around a ring by exchange, and from one rank to the next by send and recv."""
    n, rank, turn = comm.world_size, comm.rank, count()
    after, before = (rank + 1) % n, (rank - 1) % n
    for arrays, shape in product(arrays_for(comm), SHAPES):
        is_staged = comm.device != "cpu" and isinstance(arrays, HostArrays)
        for dtype in LARGE_DTYPES if shape == SHAPES[-1] else arrays.dtypes[:: 3 if is_staged else 1]:
            if dtype not in arrays.dtypes:
                continue
            mine = read_only(arrays.put(contribution(rank, shape, dtype)))
            target = arrays.put(np.zeros(shape, dtype_of(dtype)))
            assert comm.exchange(mine, dest=after, out=target, source=before) is target
            assert_identical(arrays.get(target), contribution(before, shape, dtype))
            sender = next(turn) % n
            if n > 1 and rank == sender:
                assert comm.send(mine, after) is None
            elif n > 1 and before == sender:
                target = arrays.put(np.zeros(shape, dtype_of(dtype)))
                assert comm.recv(target, before) is target
                assert_identical(arrays.get(target), contribution(before, shape, dtype))


@pytest.mark.ranks(on=SEVERAL)
def test_messages_of_a_pair_keep_their_order(comm):
    arrays = arrays_of(comm)
    for sender, receiver in product(range(comm.world_size), repeat=2):
        for number in range(4 * (sender != receiver)):
            values = np.arange(number * 5_000, number * 5_000 + 10 ** (number + 1)) + sender
            if comm.rank == sender:
                comm.send(arrays.put(values), receiver)
            elif comm.rank == receiver:
                assert_identical(arrays.get(comm.recv(arrays.put(np.zeros_like(values)), sender)), values)


@pytest.mark.ranks(on=EVERYWHERE)
def test_layouts_of_sender_and_receiver_differ(comm):
    n, rank = comm.world_size, comm.rank
    for arrays, shape, (number, layout) in product(arrays_for(comm), [(3, 5), (150, 201)], enumerate(LAYOUTS)):
        source = read_only(in_layout(contribution(rank, shape, "float32"), arrays, layout))
        for step in range(n):
            target = in_layout(np.zeros(shape, np.float32), arrays, LAYOUTS[(number + rank + 1) % len(LAYOUTS)])
            dest, origin = (rank + step) % n, (rank - step) % n
            assert comm.exchange(source, dest=dest, out=target, source=origin) is target
            assert_identical(arrays.get(target), contribution(origin, shape, "float32"))
        assert_identical(arrays.get(source), contribution(rank, shape, "float32"))


@pytest.mark.ranks(on=EVERYWHERE)
def test_exchange_of_other_shapes_each_way_and_into_the_array_that_is_sent(comm):
    n, arrays = comm.world_size, arrays_of(comm)
    after, before = (comm.rank + 1) % n, (comm.rank - 1) % n
    target = arrays.put(np.zeros((100 * before, 3), np.int32))
    mine = contribution(comm.rank, (100 * comm.rank, 3), "int32")
    comm.exchange(arrays.put(mine), dest=after, out=target, source=before)
    assert_identical(arrays.get(target), contribution(before, (100 * before, 3), "int32"))
    memory = arrays.put(contribution(comm.rank, 70_001, "float64"))
    assert comm.exchange(memory, dest=after, out=memory, source=before) is memory
    assert_identical(arrays.get(memory), contribution(before, 70_001, "float64"))


@pytest.mark.ranks(on=SEVERAL)
def test_exchange_meets_send_and_recv(comm):
    last, arrays = comm.world_size - 1, arrays_of(comm)
    mine, other = arrays.put(contribution(comm.rank, 1000, "float64")), arrays.put(np.zeros(1000))
    if comm.rank == 0:
        comm.exchange(mine, dest=last, out=other, source=last)
        assert_identical(arrays.get(other), contribution(last, 1000, "float64"))
    elif comm.rank == last:
        comm.recv(other, 0)
        comm.send(mine, 0)
        assert_identical(arrays.get(other), contribution(0, 1000, "float64"))


@pytest.mark.ranks(on=COMPARED)
@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        (np.ones(5), np.zeros(4)),
        (np.ones(5), np.zeros(5, np.float32)),
        (np.ones(5), np.zeros((5, 1))),
        (np.ones(300_000), np.zeros(299_999)),
        (np.ones(0, np.float32), np.zeros(0, np.int32)),
        (np.ones(10**6, np.float32), np.zeros(0, np.float32)),
        (np.ones(0, np.float32), np.zeros(10**6, np.float32)),
    ],
    ids=lambda array: f"{array.dtype}{list(array.shape)}",
)
def test_both_ranks_hear_that_a_message_does_not_fit(comm, sent, wanted):
    sender, receiver, arrays = comm.world_size - 1, 0, arrays_of(comm)
    array = arrays.put(sent if comm.rank == sender else wanted)
    if comm.rank in (sender, receiver):
        with pytest.raises(gs.PlanMismatch) as raised:
            comm.send(array, receiver) if comm.rank == sender else comm.recv(array, sender)
        descriptions = raised.value.descriptions
        assert set(descriptions) == {sender, receiver}
        assert descriptions[sender] != descriptions[receiver]
        assert str(sent.dtype) in descriptions[sender]
        assert_identical(arrays.get(array), sent if comm.rank == sender else wanted)
    assert (arrays.get(comm.all_reduce(arrays.put(np.ones(3)))) == comm.world_size).all()
    if comm.rank == sender:
        comm.send(arrays.put(np.arange(9.0)), receiver)
    elif comm.rank == receiver:
        assert_identical(arrays.get(comm.recv(arrays.put(np.zeros(9)), sender)), np.arange(9.0))


@pytest.mark.ranks(3, on=("shm", "mpi"))
def test_the_half_of_an_exchange_that_fits_arrives(comm):
    """Rank 0 sends to 1, which expects less, and receives from 2, which has nothing to do with that."""
    large, error = np.arange(10**6), None
    got = np.zeros_like(large)
    try:
        if comm.rank == 0:
            comm.exchange(np.ones(100), dest=1, out=got, source=2)
        elif comm.rank == 1:
            comm.recv(np.zeros(99), 0)
        else:
            comm.send(large, 0)
    except gs.PlanMismatch as mismatch:
        error = mismatch
    assert (error is None) == (comm.rank == 2)
    assert comm.rank != 0 or (got == large).all()


@pytest.mark.ranks(on=SEVERAL)
def test_asynchronous_messages(comm):
    first, last, arrays = 0, comm.world_size - 1, arrays_of(comm)
    values = contribution(first, 70_001, "int32")
    if comm.rank == first:
        assert comm.asynchronous.send(arrays.put(values), last).result() is None
    elif comm.rank == last:
        target = arrays.put(np.zeros_like(values))
        assert comm.asynchronous.recv(target, first).result() is target
        assert_identical(arrays.get(target), values)
