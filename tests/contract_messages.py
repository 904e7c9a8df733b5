"""The contract of what passes between two ranks: send, recv and exchange."""

from __future__ import annotations

from typing import Any

import numpy as np

import gradsync as gs
from contract import IS_EVERYWHERE, LAYOUTS, assert_identical, contribution, dtype_of, expect, in_layout, note, sealed

_LARGE = ("bool", "bfloat16", "complex128", "structured")  # dtypes of each size of word, and one of its own
_SHAPES = [(), (0,), (7,), (5, 3), (2, 0, 3), (20_011,)]


def check_messages_of_every_dtype(comm: Any, kit: Any) -> None:
    """Each rank sends to the next in turn; the others go on, and meet it in their own turn."""
    n = comm.world_size
    if n == 1:
        return
    for name in kit.dtypes:
        for number, shape in enumerate(_SHAPES):
            sender, receiver = number % n, (number + 1) % n
            if comm.rank == sender:
                assert comm.send(sealed(kit.put(contribution(sender, shape, name))), receiver) is None
            elif comm.rank == receiver:
                array = kit.put(np.zeros(shape, dtype_of(name)))
                assert comm.recv(array, sender) is array
                assert_identical(kit.get(array), contribution(sender, shape, name))
        note("send, recv", name)


def check_messages_between_all_pairs_keep_their_order(comm: Any, kit: Any) -> None:
    for sender in range(comm.world_size):
        for receiver in range(comm.world_size):
            for number in range(3 * (sender != receiver)):
                values = np.arange(number * 5_000, (number + 1) * 5_000) + sender
                if comm.rank == sender:
                    comm.send(kit.put(values), receiver)
                elif comm.rank == receiver:
                    assert_identical(kit.get(comm.recv(kit.put(np.zeros_like(values)), sender)), values)


def check_messages_of_memory_layouts(comm: Any, kit: Any) -> None:
    """Elements meet by index: the sender's layout says nothing about the receiver's."""
    n = comm.world_size
    for shape in ((3, 5), (150, 201)):
        for number, layout in enumerate(LAYOUTS):
            source = sealed(in_layout(contribution(comm.rank, shape, "float32"), kit, layout))
            for step in range(n):
                target = in_layout(np.zeros(shape, np.float32), kit, LAYOUTS[(number + comm.rank + 1) % len(LAYOUTS)])
                dest, origin = (comm.rank + step) % n, (comm.rank - step) % n
                assert comm.exchange(source, dest=dest, out=target, source=origin) is target
                assert_identical(kit.get(target), contribution(origin, shape, "float32"))
            assert_identical(kit.get(source), contribution(comm.rank, shape, "float32"))


def check_exchange_of_every_dtype_in_a_ring(comm: Any, kit: Any) -> None:
    after, before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    for name in kit.dtypes:
        # Many chunks: a message moves bytes, whatever their dtype.
        for shape in (*_SHAPES, *([(200_003,)] if IS_EVERYWHERE or name in _LARGE else [])):
            target = kit.put(np.zeros(shape, dtype_of(name)))
            mine = sealed(kit.put(contribution(comm.rank, shape, name)))
            assert comm.exchange(mine, dest=after, out=target, source=before) is target
            assert_identical(kit.get(target), contribution(before, shape, name))
        note("exchange", name)


def check_exchange_of_different_shapes_and_of_one_array(comm: Any, kit: Any) -> None:
    n = comm.world_size
    after, before = (comm.rank + 1) % n, (comm.rank - 1) % n
    source = kit.put(contribution(comm.rank, (100 * comm.rank, 3), "int32"))
    target = kit.put(np.zeros((100 * before, 3), np.int32))
    comm.exchange(source, dest=after, out=target, source=before)
    assert_identical(kit.get(target), contribution(before, (100 * before, 3), "int32"))
    memory = kit.put(contribution(comm.rank, (70_001,), "float64"))
    assert comm.exchange(memory, dest=after, out=memory, source=before) is memory
    assert_identical(kit.get(memory), contribution(before, (70_001,), "float64"))


def check_exchange_meets_send_and_recv(comm: Any, kit: Any) -> None:
    if comm.world_size == 1:
        return
    last = comm.world_size - 1
    mine = kit.put(contribution(comm.rank, (1000,), "float64"))
    other = kit.put(np.zeros(1000))
    if comm.rank == 0:
        comm.exchange(mine, dest=last, out=other, source=last)
        assert_identical(kit.get(other), contribution(last, (1000,), "float64"))
    elif comm.rank == last:
        comm.recv(other, 0)
        comm.send(mine, 0)
        assert_identical(kit.get(other), contribution(0, (1000,), "float64"))


def check_messages_that_do_not_fit(comm: Any, kit: Any) -> None:
    """Another shape or dtype is told to both ranks, moves nothing, and leaves the communicator usable."""
    if comm.world_size == 1:
        return
    sender, receiver = comm.world_size - 1, 0
    large = np.full(300_000, 1.0)
    for sent, wanted in [
        (np.ones(5), np.zeros(4)),
        (np.ones(5), np.zeros(5, np.float32)),
        (np.ones(5), np.zeros((5, 1))),
        (large, np.zeros(299_999)),
        (np.ones(0), np.zeros(1)),
    ]:
        if comm.rank == sender:
            array = kit.put(sent.copy())
            error = expect(gs.PlanMismatch, lambda a=array: comm.send(a, receiver))
            assert_identical(kit.get(array), sent)
        elif comm.rank == receiver:
            array = kit.put(wanted.copy())
            error = expect(gs.PlanMismatch, lambda a=array: comm.recv(a, sender))
            assert_identical(kit.get(array), wanted)
        if comm.rank in (sender, receiver):
            assert set(error.descriptions) == {sender, receiver}
            assert len(set(error.descriptions.values())) == 2
        again = comm.all_reduce(kit.put(np.ones(3)))
        assert (kit.get(again) == comm.world_size).all()
        if comm.rank == sender:
            comm.send(kit.put(np.arange(9.0)), receiver)
        elif comm.rank == receiver:
            assert_identical(kit.get(comm.recv(kit.put(np.zeros(9)), sender)), np.arange(9.0))
