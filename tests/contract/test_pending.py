"""Messages of `.asynchronous`: pending until this rank waits, right in any legal order, and how they end."""

import gc
import os
import random
import signal
import time
from itertools import product
from queue import SimpleQueue

import numpy as np
import pytest

import gradsync as gs
from arrays import LAYOUTS, arrays_of, assert_identical, contribution, in_layout
from bucketing.reference import Heard
from commands import wait_until
from gradsync.communicators.agreement import agreement_on
from gradsync.communicators.backend import Message
from ranks import COMPARED, SEVERAL

#: Rings and the like differ with the number of ranks.
RINGS = {"shm": (2, 3, 5), "pipes": (2, 4), "fake": (2,), "mpi": (2, 3, 5)}
PAIR = {"shm": (2,), "pipes": (2,), "fake": (2,), "mpi": (2,)}
BESIDE_HOST = {place: sizes for place, sizes in RINGS.items() if place != "fake"}
COMPARED_PAIR = dict.fromkeys(COMPARED, (2,))
SHORT = {"options": {"collective_timeout_seconds": 1.5}, "fresh": True}
SIZES = [0, 1, 1000, 300_000]  # the last one is larger than any buffer


class Ring:
    """Each rank sends to the next one, and receives from the one before it; each message has other values."""

    def __init__(self, comm, size):
        self.comm, self.arrays, self._size = comm, arrays_of(comm), size
        self.after, self.before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
        self._sent = self._received = 0
        self._rooms = []

    def mine(self):
        self._sent += 1
        return self.arrays.put(contribution(self.comm.rank, self._size, "int64", self._sent))

    def room(self):
        self._received += 1
        room = self.arrays.put(np.zeros(self._size, np.int64))
        self._rooms.append((room, contribution(self.before, self._size, "int64", self._received)))
        return room

    def isend(self):
        return self.comm.asynchronous.send(self.mine(), self.after)

    def irecv(self):
        return self.comm.asynchronous.recv(self.room(), self.before)

    def iexchange(self):
        return self.comm.asynchronous.exchange(self.mine(), dest=self.after, out=self.room(), source=self.before)

    def send(self):
        self.comm.send(self.mine(), self.after)

    def recv(self):
        self.comm.recv(self.room(), self.before)

    def exchange(self):
        self.comm.exchange(self.mine(), dest=self.after, out=self.room(), source=self.before)

    def check(self):
        for room, wanted in self._rooms:
            assert_identical(self.arrays.get(room), wanted)


def total(comm):
    arrays = arrays_of(comm)
    return float(arrays.get(comm.all_reduce(arrays.put(np.ones(3))))[0])


#: What each rank of a ring calls: what begins with i is asynchronous, and "wait 0" is for the first of these.
PROGRAMS = [
    "irecv, send, wait 0",
    "isend, recv, wait 0",
    "isend, irecv, wait 0, wait 1",
    "isend, irecv, wait 1, wait 0",
    "irecv, isend, wait 0, wait 1",
    "irecv, isend, wait 1, wait 0",
    "isend, irecv, isend, irecv, wait 3, wait 0, wait 2, wait 1",
    "irecv, irecv, isend, isend, wait 0, wait 1, wait 2, wait 3",
    "irecv, isend, exchange, isend, recv, wait 2, wait 0, wait 1",
    "isend, irecv, exchange, wait 1, wait 0",
    "iexchange, exchange, wait 0",
    "iexchange, iexchange, wait 1, wait 0",
    "iexchange, isend, recv, wait 1, wait 0",
    "isend, irecv, all_reduce, wait 1, wait 0",
    "irecv, isend, group, wait 1, wait 0",
]

#: Not over NCCL, which runs what this rank has called in order: a message waits for what comes after it.
OUT_OF_ORDER = [
    "irecv, irecv, send, send, wait 1, wait 0",
    "isend, isend, recv, recv, wait 0, wait 1",
    "irecv, barrier, isend, wait 0, wait 1",
    "irecv, barrier, send, wait 0",
    "isend, objects, recv, wait 0",
    "irecv, split, isend, objects, wait 1, wait 0",
]


def run(ring, program):
    """Makes the calls of a program, and returns the futures of the asynchronous ones."""
    comm, futures = ring.comm, []
    for call in program.split(", "):
        word, _, number = call.partition(" ")
        if word == "wait":
            futures[int(number)].result()
            assert futures[int(number)].done() or comm.device != "cpu"
        elif word == "all_reduce":
            assert total(comm) == comm.world_size
        elif word == "barrier":
            comm.barrier()
        elif word == "objects":
            assert comm.objects.all_gather(comm.rank) == list(range(comm.world_size))
        elif word in ("split", "group"):
            (comm.split(0) if word == "split" else comm.new_group(range(comm.world_size))).close()
        elif word.startswith("i"):
            futures.append(getattr(ring, word)())
        else:
            getattr(ring, word)()
    return futures


@pytest.mark.ranks(on=RINGS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_rings(comm, program):
    for size in SIZES:
        ring = Ring(comm, size)
        run(ring, program)
        ring.check()


@pytest.mark.ranks(on=BESIDE_HOST)
@pytest.mark.parametrize("program", OUT_OF_ORDER)
def test_rings_in_which_messages_wait_for_later_calls(comm, program):
    test_rings(comm, program)


@pytest.mark.ranks(2, on=("fake",), fresh=True)
@pytest.mark.parametrize(
    "programs",
    [
        ("send, recv", "irecv, isend, wait 0"),
        ("exchange", "recv, send"),
        ("isend, send, recv", "irecv, irecv, isend, wait 2"),
    ],
    ids=" | ".join,
)
def test_over_nccl_the_first_messages_of_two_ranks_may_be_launched_in_other_groups(comm, programs):
    """NCCL connects two ranks for the ways that a group has, and fails if the groups of both have others."""
    ring = Ring(comm, 1000)
    run(ring, programs[comm.rank])
    comm.barrier()
    ring.check()


@pytest.mark.ranks(2, on=("fake",), environment={"FAKE_CUPY_HANG": "1"}, **SHORT)
@pytest.mark.parametrize("program", OUT_OF_ORDER[::3])
def test_over_nccl_these_end_at_the_deadline(comm, program):
    with pytest.raises(gs.CollectiveTimeout):
        run(Ring(comm, 1000), program)
        comm.barrier()  # which waits for them
    assert comm.closed


#: What rank 0 calls, and what rank 1 calls.
PAIRS = [
    ("isend, all_reduce, wait 0", "recv, all_reduce"),
    ("isend, all_reduce, wait 0", "irecv, all_reduce, wait 0"),
    ("isend, barrier, wait 0", "irecv, barrier, wait 0"),
    ("irecv, barrier, wait 0", "send, barrier"),
    ("isend, group, wait 0", "recv, group"),
    ("irecv, group, wait 0", "send, group"),
    ("isend, objects, wait 0", "recv, objects"),
    ("isend, sobject, wait 0", "recv, robject"),
    ("sobject, isend, wait 0", "robject, recv"),
    ("irecv, sobject, wait 0", "isend, robject, wait 0"),
    ("isend, flush, wait 0", "recv, flush"),
    ("isend, bcast, wait 0", "recv, bcast"),
    ("isend, check, wait 0", "recv, check"),
]
#: Not over NCCL, as above.
OUT_OF_ORDER_PAIRS = [
    ("irecv, barrier, wait 0", "barrier, send"),
    ("barrier, isend, wait 0", "irecv, barrier, wait 0"),
    ("isend, barrier, barrier, wait 0", "barrier, irecv, barrier, wait 0"),
    ("isend, isend, isend, barrier, wait 2, wait 1, wait 0", "recv, recv, barrier, recv"),
    ("group, isend, wait 0", "irecv, group, wait 0"),
]


@pytest.mark.ranks(on=PAIR)
@pytest.mark.parametrize("programs", PAIRS, ids=" | ".join)
def test_two_ranks_that_call_different_things(comm, programs):
    sync = gs.AllreduceCallback("sum", comm)
    for size in SIZES:
        ring, futures, gradient = Ring(comm, size), [], arrays_of(comm).put(np.ones(4))
        for call in programs[comm.rank].split(", "):
            word, _, number = call.partition(" ")
            if word == "wait":
                futures[int(number)].result()
            elif word == "all_reduce":
                assert total(comm) == 2
            elif word == "barrier":
                comm.barrier()
            elif word == "objects":
                assert comm.objects.all_gather(comm.rank) == [0, 1]
            elif word == "group":
                comm.new_group([0, 1]).close()  # calls on the group would not move messages of the world
            elif word == "sobject":
                comm.objects.send({"size": size}, ring.after)
            elif word == "robject":
                assert comm.objects.recv(ring.before) == {"size": size}
            elif word == "flush":
                sync("w", gradient)
                sync.flush()
            elif word == "bcast":
                gs.bcast_list_([gradient], communicator=comm)
            elif word == "check":
                gs.check_consistency([np.ones(3)], comm)
            elif word.startswith("i"):
                futures.append(getattr(ring, word)())
            else:
                getattr(ring, word)()
        ring.check()


@pytest.mark.ranks(on=dict.fromkeys(BESIDE_HOST, (2,)))
@pytest.mark.parametrize("programs", OUT_OF_ORDER_PAIRS, ids=" | ".join)
def test_two_ranks_whose_messages_wait_for_later_calls(comm, programs):
    test_two_ranks_that_call_different_things(comm, programs)


@pytest.mark.ranks(on=RINGS)
def test_everybody_sends_to_everybody(comm):
    n, rank, arrays = comm.world_size, comm.rank, arrays_of(comm)
    others = [other for other in range(n) if other != rank]
    form = comm.asynchronous

    def values(sender, receiver, size):
        return contribution(sender, size, "int32", receiver)

    for size in (3, 200_000):
        sent = [form.send(arrays.put(values(rank, to, size)), to) for to in others]
        for source in reversed(others):
            room = comm.recv(arrays.put(np.zeros(size, np.int32)), source)
            assert_identical(arrays.get(room), values(source, rank, size))
        for future in reversed(sent):
            assert future.result() is None
        coming = [form.recv(arrays.put(np.zeros(size, np.int32)), source) for source in others]
        for to in others:
            comm.send(arrays.put(values(rank, to, size)), to)
        for source, future in reversed(list(zip(others, coming, strict=True))):
            assert_identical(arrays.get(future.result()), values(source, rank, size))


@pytest.mark.ranks(on=RINGS)
@pytest.mark.parametrize("seed", range(4))
def test_random_programs_of_messages(comm, seed):
    """In each round all ranks begin messages, then do what blocks: all that is waited for has been begun."""
    n, rank, arrays, form = comm.world_size, comm.rank, arrays_of(comm), comm.asynchronous
    common, own = random.Random(seed), random.Random(1000 * seed + rank)
    open_ones, count = [], 0

    def end(future, source, size, number):
        got = future.result()
        if source is not None:
            assert_identical(arrays.get(got), contribution(source, size, "int16", number))

    for _ in range(12):
        begun, blocking = {}, {}
        for sender, receiver in product(range(n), repeat=2):
            if sender == receiver:
                continue
            sizes = [common.choice((0, 5, 5, 700, 90_000)) for _ in range(common.choice((0, 1, 2, 4)))]
            # The last ones block on one of the two; over NCCL one at most, which cannot wait for one to come.
            last, who = common.randrange(3 if comm.device == "cpu" else 2), common.choice((sender, receiver))
            for at, size in enumerate(sizes):
                count += 1
                way = ("send", receiver) if rank == sender else ("recv", sender) if rank == receiver else None
                if way is not None:
                    calls = blocking if who == rank and at >= len(sizes) - last else begun
                    calls.setdefault(way, []).append((size, count))
        for calls in (begun, blocking):
            while calls:
                word, peer = own.choice(sorted(calls))
                size, number = calls[word, peer].pop(0)
                if not calls[word, peer]:
                    del calls[word, peer]
                array = arrays.put(
                    contribution(rank, size, "int16", number) if word == "send" else np.zeros(size, np.int16)
                )
                source = peer if word == "recv" else None
                if calls is begun:
                    open_ones.append((getattr(form, word)(array, peer), source, size, number))
                else:
                    getattr(comm, word)(array, peer)
                    if source is not None:
                        assert_identical(arrays.get(array), contribution(source, size, "int16", number))
        after = common.choice(("nothing", "barrier", "all_reduce", "objects"))
        if after == "barrier":
            comm.barrier()
        elif after == "all_reduce":
            assert total(comm) == n
        elif after == "objects":
            assert comm.objects.all_gather(rank) == list(range(n))
        own.shuffle(open_ones)
        for _ in range(own.randrange(len(open_ones) + 1)):  # the others wait for another round
            end(*open_ones.pop())
    for each in open_ones:
        end(*each)


@pytest.mark.ranks(on=PAIR)
def test_messages_to_one_rank_keep_their_order(comm):
    """Many small ones, and those of other sizes between them; some asynchronous, some not."""
    arrays, other = arrays_of(comm), 1 - comm.rank
    sizes = [1] * 100 + [0, 300_000, 2, 0, 0, 1_000_000, 7] * 3 + [8] * 50
    for sender in (0, 1):
        futures = []
        for number, size in enumerate(sizes):
            values = arrays.put(np.full(size, number if comm.rank == sender else 0))
            if comm.rank == sender:
                form = comm if number % 7 == 3 else comm.asynchronous
                future = form.send(values, other)
            elif number % 5 == 2:
                future = comm.recv(values, other)
                assert (arrays.get(values) == number).all()
            else:
                future = comm.asynchronous.recv(values, other)
            futures.append((future, number))
        for future, number in futures:
            if hasattr(future, "result"):
                got = future.result()
                assert comm.rank == sender or (arrays.get(got) == number).all()


@pytest.mark.ranks(on=PAIR)
def test_large_messages_both_ways_at_once(comm):
    ring = Ring(comm, 4_000_000)
    for future in [ring.isend(), ring.irecv(), ring.irecv(), ring.isend()]:
        future.result()
    ring.check()


@pytest.mark.ranks(on=SEVERAL)
def test_received_into_arrays_of_any_layout(comm):
    arrays, ring = arrays_of(comm), Ring(comm, 1)
    for shape, (sent, got) in product([(6, 4), (300, 200)], product(LAYOUTS, repeat=2)):
        mine = in_layout(contribution(comm.rank, shape, "float32"), arrays, sent)
        room = in_layout(np.zeros(shape, np.float32), arrays, got)
        future = comm.asynchronous.recv(room, ring.before)
        comm.send(mine, ring.after)
        assert future.result() is room
        assert_identical(arrays.get(room), contribution(ring.before, shape, "float32"))


@pytest.mark.ranks(on=PAIR)
def test_nothing_moves_before_the_next_call_and_done_moves_it(comm, tmp_path):
    ring = Ring(comm, 1_000_000)
    futures = [ring.irecv()]
    assert "pending" in repr(futures[0])  # and it moves nothing: over NCCL a receive that is launched alone hangs
    futures.append(ring.isend())  # which starts the first, and may even end it
    for future in futures:
        while not future.done():
            pass
        assert future.exception() is None
    ring.check()
    comm.barrier()


@pytest.mark.ranks(on=dict.fromkeys(BESIDE_HOST, (2,)))
@pytest.mark.parametrize("what", ["irecv", "isend"])
def test_the_wait_for_a_late_peer_may_be_short(comm, what, tmp_path):
    ring = Ring(comm, 1_000_000)
    if comm.rank == 0:
        future = getattr(ring, what)()
        with pytest.raises(gs.FutureNotReady):
            future.exception()
        for wait in (lambda: future.result(0.05), lambda: future.wait(timeout=0.01), lambda: future.result(0)):
            with pytest.raises(gs.CollectiveTimeout, match=what[1:]):
                wait()
            assert not future.done()
        (tmp_path / "enough").touch()
        future.result(60)
        wait_until(future.done)
        assert future.exception() is None
    else:
        wait_until((tmp_path / "enough").exists)
        ring.send() if what == "irecv" else ring.recv()
    ring.check()
    assert total(comm) == 2


@pytest.mark.ranks(2, on=("fake",))
def test_over_nccl_the_host_waits_for_a_late_peer_if_its_own_memory_is_written(comm, tmp_path):
    """On the device result() makes the stream wait."""
    ring, room = Ring(comm, 3), np.zeros(3, np.int64)
    ring.exchange()  # where two ranks meet for the first time, the call that launches waits as well
    if comm.rank == 0:
        future = comm.asynchronous.recv(room, 1)
        with pytest.raises(gs.CollectiveTimeout):
            future.result(0.05)
        assert not future.done()
        assert ring.irecv().result(0) is not None
        (tmp_path / "enough").touch()
        assert future.result(60) is room
        assert (room == 7).all()
    else:
        wait_until((tmp_path / "enough").exists)
        comm.send(np.full(3, 7), 0)
        ring.send()
    ring.check()


@pytest.mark.ranks(on=PAIR)
def test_a_future_that_nobody_keeps(comm):
    """Its array lives until it has been sent, and what is received is received."""
    ring = Ring(comm, 500_000)
    for _ in range(3):
        ring.isend()
        ring.irecv()
        gc.collect()
    over = [ring.arrays.put(np.full(500_000, -1)) for _ in range(3)]  # where freed arrays would have been
    comm.barrier()
    ring.exchange()
    ring.check()
    del over


@pytest.mark.ranks(on=PAIR)
def test_done_callbacks_of_messages(comm):
    ring, called = Ring(comm, 70_000), SimpleQueue()
    futures = [ring.isend(), ring.irecv(), ring.iexchange()]
    for future in futures:
        future.add_done_callback(called.put)
        future.add_done_callback(lambda future: called.put(future.done()))
    assert called.empty()
    for future in reversed(futures):
        future.result()
    comm.barrier()
    got = [called.get(timeout=60) for _ in range(6)]
    assert {id(each) for each in got if each is not True} == set(map(id, futures))
    assert got.count(True) == 3
    futures[0].add_done_callback(called.put)  # at once
    assert called.get(timeout=60) is futures[0]
    assert called.empty()


@pytest.mark.ranks(on=PAIR)
def test_a_done_callback_may_begin_no_message(comm):
    arrays, other, array = arrays_of(comm), 1 - comm.rank, arrays_of(comm).put(np.ones(3))
    outcomes = SimpleQueue()

    def attempt(_):
        for call in (
            lambda: comm.asynchronous.send(array, other),
            lambda: comm.asynchronous.recv(array, other),
            lambda: comm.asynchronous.exchange(array, dest=other, out=array, source=other),
            lambda: comm.send(array, other),
            lambda: comm.objects.send(1, other),
            lambda: comm.objects.recv(other),
            pending.result,
        ):
            try:
                outcomes.put(call())
            except gs.GradsyncError as error:
                outcomes.put(type(error))
        outcomes.put(pending.done())

    future = comm.asynchronous.all_reduce(arrays.put(np.ones(3)))
    pending = comm.asynchronous.recv(arrays.put(np.zeros(3)), other)
    future.add_done_callback(attempt)
    assert [outcomes.get(timeout=60) for _ in range(8)] == [gs.InvalidArgument] * 6 + [gs.FutureNotReady, False]
    comm.send(array, other)
    assert (arrays.get(pending.result()) == 1).all()


# -- Disagreement -----------------------------------------------------------------------------------------------------


@pytest.mark.ranks(on=COMPARED_PAIR)
@pytest.mark.parametrize("forms", [*product(["pending", "blocking"], repeat=2)], ids="-".join)
def test_both_ranks_hear_of_a_message_that_does_not_fit(comm, forms):
    """Also where another one is before it, and one after it; and whoever looks how: each is told."""
    arrays, form = arrays_of(comm), comm.asynchronous
    for sent, wanted in ((5, 4), (1_000_000, 999_999), (0, 3), (3, 0)):
        sizes = [10, sent, 20] if comm.rank == 0 else [10, wanted, 20]
        call = form.send if comm.rank == 0 else form.recv
        peer, rooms = 1 - comm.rank, [arrays.put(np.full(size, float(comm.rank == 0))) for size in sizes]
        before = call(rooms[0], peer)
        if forms[comm.rank] == "blocking":
            with pytest.raises(gs.PlanMismatch) as raised:
                comm.send(rooms[1], 1) if comm.rank == 0 else comm.recv(rooms[1], 0)
            error = raised.value
        else:
            wrong = call(rooms[1], peer)
            for ask in (wrong.result, wrong.wait):
                with pytest.raises(gs.PlanMismatch):
                    ask()
            assert wrong.done()
            assert "PlanMismatch" in repr(wrong)
            error = wrong.exception()
        after = call(rooms[2], peer)
        after.result()
        before.result()
        assert set(error.descriptions) == {0, 1}
        assert f"float64[{sent}]" in error.descriptions[0]
        assert f"float64[{wanted}]" in error.descriptions[1]
        assert all("test_pending.py" in place for place in error.places.values())
        for room, is_right in zip(rooms, (True, False, True), strict=True):
            assert (arrays.get(room) == float(comm.rank == 0 or is_right)).all()
        assert total(comm) == 2


@pytest.mark.ranks(on=COMPARED_PAIR)
def test_a_message_that_does_not_fit_ends_in_a_collective_too(comm):
    """It does not disturb that collective; nobody reads its future, and so it is logged, once."""
    arrays, form = arrays_of(comm), comm.asynchronous
    with Heard() as lines:
        for is_asked in (True, False):
            array = arrays.put(np.ones(3 + comm.rank))
            future = form.send(array, 1) if comm.rank == 0 else form.recv(array, 0)
            assert total(comm) == 2
            comm.barrier()
            wait_until(future.done)
            if is_asked:
                assert isinstance(future.exception(), gs.PlanMismatch)
            del future
            gc.collect()
            assert not (is_asked and lines)
        array = arrays.put(np.ones(3 + comm.rank))  # dropped before it ends
        form.send(array, 1) if comm.rank == 0 else form.recv(array, 0)
        gc.collect()
        room = arrays.put(np.zeros(1))
        comm.send(room, 1) if comm.rank == 0 else comm.recv(room, 0)  # once it has arrived, the one before it is over
    assert sum("PlanMismatch" in line for line in lines) == 2


@pytest.mark.ranks(on={"shm": (2, 3), "pipes": (2,), "fake": (2,)}, environment={"FAKE_CUPY_HANG": "1"}, **SHORT)
def test_a_message_against_a_collective_ends_at_the_deadline(comm):
    """Whoever waits where is in the error. (0.2 raised PlanMismatch.)"""
    with pytest.raises(gs.CollectiveTimeout) as raised:
        comm.recv(np.zeros(3), 1) if comm.rank == 0 else comm.all_reduce(np.ones(3))
    for text in ("all_reduce", "rank 1 to rank 0", "test_pending.py"):
        assert text in str(raised.value)
    with pytest.raises(gs.CommunicatorClosed):
        comm.barrier()


# -- The end ----------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(on=SEVERAL)
def test_close_waits_for_pending_messages(comm):
    for size in (10, 1_000_000):
        with comm.split(0) as group:
            ring = Ring(group, size)
            futures, called = [ring.irecv(), ring.isend()], []
            futures[0].add_done_callback(called.append)
        assert called == futures[:1]
        for future in futures:
            assert future.done()
            future.result(0)
        ring.check()


@pytest.mark.ranks(on=RINGS, fresh=True)
def test_the_end_of_the_process_group_waits_for_them_too(comm):
    """No rank waits in one group for another rank that waits in another group."""
    n = comm.world_size
    groups = [comm, comm.split(0), *filter(None, [comm.new_group({rank, (rank + 1) % n}) for rank in range(n)])]
    rings = [Ring(group, 300_000) for group in groups if group.world_size > 1]
    futures = []
    for ring in rings if comm.rank % 2 else reversed(rings):
        futures += [ring.isend(), ring.irecv()]
    comm.barrier()
    gs.destroy_process_group()
    for future in futures:
        future.result(0)
    for ring in rings:
        ring.check()


@pytest.mark.ranks(on={"shm": (2,), "pipes": (2,), "fake": (2,)}, **SHORT)
def test_close_gives_up_at_the_deadline(comm):
    """It logs a line and raises nothing; who reads the future hears why."""
    if comm.rank == 1:
        with pytest.raises((gs.CollectiveTimeout, gs.RankFailed)):
            while True:
                time.sleep(0.01)
                comm.new_group([1]).close()  # as if it trained on by itself
        return
    future, called = comm.asynchronous.recv(arrays_of(comm).put(np.zeros(3)), 1), []
    future.add_done_callback(called.append)
    with Heard() as lines:
        comm.close()
    assert called == [future]
    assert future.done()
    with pytest.raises(gs.CollectiveTimeout):
        future.result()
    assert any("CollectiveTimeout" in line or "1.5 s" in line for line in lines)


@pytest.mark.ranks(on={"shm": (2,), "pipes": (2,), "fake": (2,)}, fresh=True)
def test_abort_fails_them(comm):
    group, called = comm.split(0), []
    ring = Ring(group, 1_000_000)
    futures = [ring.irecv(), ring.isend(), ring.iexchange()]
    for future in futures:
        future.add_done_callback(called.append)
    if comm.rank == 1:
        group.abort("its loss is NaN")
        group.abort("again")
    else:
        with pytest.raises(gs.RankFailed, match="its loss is NaN"):
            futures[0].result()
    assert sorted(map(id, called)) == sorted(map(id, futures))
    for future in futures:
        assert future.done()
        assert isinstance(future.exception(), (gs.RankFailed, gs.CommunicatorClosed))
        with pytest.raises((gs.RankFailed, gs.CommunicatorClosed), match="its loss is NaN"):
            future.result()
    late = group.asynchronous.recv(ring.room(), ring.before)
    assert isinstance(late.exception(), gs.CommunicatorClosed)


@pytest.mark.ranks(on={"shm": (3,), "pipes": (3,), "fake": (2,)}, ends={1: -signal.SIGKILL})
@pytest.mark.parametrize("how", ["result", "done", "barrier"])
@pytest.mark.parametrize("what", ["irecv", "isend"])
def test_a_rank_that_dies_is_named(comm, how, what, tmp_path):
    arrays, called = arrays_of(comm), []
    comm.barrier()
    (tmp_path / str(comm.rank)).touch()
    if comm.rank == 1:
        wait_until(lambda: len(list(tmp_path.iterdir())) == comm.world_size)
        os.kill(os.getpid(), signal.SIGKILL)
    array = arrays.put(np.ones(1_000_000))
    future = comm.asynchronous.recv(array, 1) if what == "irecv" else comm.asynchronous.send(array, 1)
    future.add_done_callback(called.append)
    if how == "done":
        wait_until(lambda: future.done() or comm.closed)
    # On a GPU a thread may have found it first, and the call that began the message was told.
    with pytest.raises((gs.RankFailed, gs.CommunicatorClosed) if how == "barrier" else gs.RankFailed, match="rank 1/"):
        comm.barrier() if how == "barrier" else future.result()
    assert future.done()
    assert called == [future]
    assert isinstance(future.exception(), gs.RankFailed)
    assert future.exception().rank == 1
    with pytest.raises((gs.RankFailed, gs.CommunicatorClosed)):
        comm.barrier()


@pytest.mark.ranks(3, on=("shm", "pipes", "fake"), **SHORT)
def test_the_deadline_of_a_message_names_the_peer(comm, tmp_path):
    if comm.rank == 1:
        wait_until((tmp_path / "reached").exists)
        with pytest.raises(gs.CollectiveTimeout):
            comm.barrier()
        return
    future = comm.asynchronous.recv(np.zeros(3), 1)
    with pytest.raises(gs.CollectiveTimeout) as raised:
        future.result()
    (tmp_path / "reached").touch()
    assert raised.value.missing_ranks == (1,)


@pytest.mark.ranks(2, on=("shm", "pipes", "fake"), fresh=True)
def test_ctrl_c_in_the_wait_for_a_message(comm, tmp_path):
    if comm.rank == 1:
        wait_until((tmp_path / "interrupted").exists)
        with pytest.raises(gs.RankFailed, match="interrupted|KeyboardInterrupt"):
            comm.barrier()
        return
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    futures = [comm.asynchronous.recv(np.zeros(3), 1), comm.asynchronous.send(np.zeros(10**6), 1)]
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(KeyboardInterrupt):
        futures[0].result()
    (tmp_path / "interrupted").touch()
    for future in futures:
        assert future.done()
        with pytest.raises(gs.CommunicatorClosed):
            future.result()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.ranks(2, on=("shm", "pipes", "fake"), fresh=True)
def test_in_a_forked_child_they_have_failed(comm):
    ring = Ring(comm, 1000)
    futures = [ring.irecv(), ring.isend()]
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for future in futures:
                assert future.done()
                assert isinstance(future.exception(), gs.CommunicatorClosed)
            code = 7
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    for future in futures:
        future.result()
    ring.check()


def test_a_callback_that_is_added_while_another_thread_ends_the_message_is_called_once():
    class Calls(list):
        def append(self, call):
            message.end()  # as the other thread, just before
            super().append(call)

    array, calls = np.zeros(3), []
    message = Message(1, array, agreement_on("message", array.shape, array.dtype, "", is_message=True))
    message._when_over = Calls()
    message.when_over(lambda: calls.append("called"))
    assert calls == ["called"]
