"""communicator.objects: whatever pickles, and what does not is known to all ranks."""

import threading

import numpy as np
import pytest

import gradsync as gs
from arrays import arrays_of
from ranks import ALSO_ALONE, COMPARED, EVERYWHERE, ON_GPU, SEVERAL

PAIRS = {"shm": (2, 3), "pipes": (2,), "fake": (2,), "mpi": (2,)}


def object_of(rank):
    """Something of every kind, and of another size on every rank."""
    return {
        "rank": rank,
        "path": ("model", None, [1.5, float("inf")], {"é", "x" * rank}),
        "bytes": bytes(range(256)) * (1000 * rank),
        "values": np.arange(rank * 1000.0),
    }


@pytest.mark.ranks(on=ALSO_ALONE | ON_GPU)
def test_objects_of_every_kind(comm):
    n, objects = comm.world_size, comm.objects
    everything = [object_of(rank) for rank in range(n)]
    np.testing.assert_equal(objects.all_gather(everything[comm.rank]), everything)
    for root in range(n):
        mine = comm.rank == root
        np.testing.assert_equal(objects.gather(everything[comm.rank], root), everything if mine else None)
        np.testing.assert_equal(objects.broadcast(everything[root] if mine else None, root), everything[root])
        np.testing.assert_equal(objects.scatter(everything if mine else None, root), everything[comm.rank])
    for value in (None, (), "", 0, b"", False, [None]):
        assert objects.all_gather(value) == [value] * n
        assert objects.broadcast(value) == value
        assert objects.scatter([value] * n if comm.rank == 0 else None) == value


@pytest.mark.ranks(on={"shm": (2,), "fake": (2,), "mpi": (2,)})
def test_large_objects(comm):
    large = np.full(1_000_000, 7.0) if comm.rank == 0 else "small"
    gathered = comm.objects.all_gather(large)
    assert (gathered[0] == 7).all()
    assert gathered[1] == "small"
    part = comm.objects.scatter([None, large] if comm.rank == 0 else None)
    assert part is None if comm.rank == 0 else (part == 7).all()


@pytest.mark.ranks(on=EVERYWHERE)
def test_each_rank_gets_copies(comm):
    mine = [comm.rank]
    for theirs in comm.objects.all_gather(mine):
        theirs.append("changed")
    assert mine == [comm.rank]
    values = np.zeros(1000)
    comm.objects.all_gather(values)[comm.rank][0] = 1.0  # writeable
    assert values[0] == 0


class Stubborn:
    """Pickles, and comes back on all ranks but one."""

    def __init__(self, rank):
        self.rank = rank

    def __reduce__(self):
        return _come_back, (self.rank,)


def _come_back(rank):
    if gs.get_communicator().rank == rank:
        raise LookupError("no such class here")
    return "came back"


class Nameless(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Refusing:
    """Fails to pickle, with an error that has no text."""

    def __reduce__(self):
        raise Nameless


@pytest.mark.ranks(on=EVERYWHERE)
@pytest.mark.parametrize("wrong", [threading.Lock, Refusing])
def test_every_rank_hears_of_an_object_that_does_not_pickle(comm, wrong):
    n, culprit = comm.world_size, comm.world_size - 1
    value = wrong() if comm.rank == culprit else comm.rank
    for attempt in (
        lambda: comm.objects.all_gather(value),
        lambda: comm.objects.gather(value, 0),
        lambda: comm.objects.broadcast(value, culprit),
        lambda: comm.objects.scatter([value] * n, culprit),
    ):
        with pytest.raises(gs.InvalidArgument, match=f"rank {culprit}") as raised:
            attempt()
        assert (raised.value.__cause__ is not None) == (comm.rank == culprit)
        assert comm.objects.all_gather(comm.rank) == list(range(n))


@pytest.mark.ranks(on=EVERYWHERE)
def test_only_a_rank_that_cannot_unpickle_raises(comm):
    if comm.rank == 0:
        with pytest.raises(gs.InvalidArgument) as raised:
            comm.objects.all_gather(Stubborn(0))
        assert isinstance(raised.value.__cause__, LookupError)
    else:
        assert comm.objects.all_gather(Stubborn(0)) == ["came back"] * comm.world_size
    assert comm.objects.all_gather(comm.rank) == list(range(comm.world_size))


@pytest.mark.ranks(on=EVERYWHERE)
def test_refused_arguments(comm):
    n = comm.world_size
    for wrong in (-1, n, "0", None, 0.0, True):
        for method in (comm.objects.gather, comm.objects.broadcast, comm.objects.scatter):
            with pytest.raises(gs.InvalidArgument, match="root"):
                method([0] * n, wrong)
    for wrong in ([0] * (n + 1), [], None, 7):  # known to the root alone, and every rank raises it
        with pytest.raises(gs.InvalidArgument, match="rank 0"):
            comm.objects.scatter(wrong if comm.rank == 0 else None, 0)
    assert comm.objects.all_gather(comm.rank) == list(range(n))


@pytest.mark.ranks(on=SEVERAL | COMPARED)
def test_ranks_that_call_other_methods_disagree(comm):
    objects, odd = comm.objects, comm.rank == comm.world_size - 1
    for attempt in (
        lambda: objects.all_gather(1) if odd else objects.broadcast(1),
        lambda: objects.gather(1, 0) if odd else objects.gather(1, 1),
        lambda: objects.scatter([1] * comm.world_size) if odd else objects.broadcast(1),
    ):
        with pytest.raises(gs.PlanMismatch) as raised:
            attempt()
        assert set(raised.value.descriptions) == set(comm.ranks)
        assert objects.broadcast(comm.rank) == 0


@pytest.mark.ranks(3, on=("shm",))
def test_errors_of_a_group_name_ranks_of_the_world(comm):
    group = comm.new_group([0, 2])
    if group:
        assert group.objects.all_gather(comm.rank) == [0, 2]
        with pytest.raises(gs.InvalidArgument, match="rank 2: its object"):
            group.objects.all_gather(0 if comm.rank == 0 else (lambda: 0))
        group.close()


# -- Between two ranks ------------------------------------------------------------------------------------------------


@pytest.mark.ranks(on=SEVERAL | ON_GPU)
def test_objects_from_one_rank_to_another(comm):
    """In their order, beside messages of arrays, and copies."""
    n, objects, arrays = comm.world_size, comm.objects, arrays_of(comm)
    for sender in range(n if n > 1 else 0):
        receiver = (sender + 1) % n
        large, mine = np.arange(1_000_000.0), [sender]
        if comm.rank == sender:
            assert objects.send(object_of(sender), receiver) is None
            comm.send(arrays.put(np.arange(5)), receiver)
            future = comm.asynchronous.send(arrays.put(np.arange(7)), receiver)
            for value in (None, b"", large, mine):
                objects.send(value, receiver)
            future.result()
        elif comm.rank == receiver:
            np.testing.assert_equal(objects.recv(sender), object_of(sender))
            assert arrays.get(comm.recv(arrays.put(np.zeros(5, int)), sender))[4] == 4
            future = comm.asynchronous.recv(arrays.put(np.zeros(7, int)), sender)
            assert objects.recv(sender) is None
            assert objects.recv(sender) == b""
            np.testing.assert_equal(objects.recv(sender), large)
            assert objects.recv(sender) == mine
            assert arrays.get(future.result())[6] == 6
    for wrong in (comm.rank, n, -1, None, "0", 0.0, True):
        for call in (lambda: objects.send(1, wrong), lambda: objects.recv(wrong)):
            with pytest.raises(gs.InvalidArgument, match="dest|source"):
                call()


@pytest.mark.ranks(on=PAIRS)
@pytest.mark.parametrize("wrong", [threading.Lock, Refusing])
def test_both_ranks_hear_of_a_sent_object_that_does_not_pickle(comm, wrong):
    last = comm.world_size - 1
    for _ in range(2):
        if comm.rank in (0, last):
            with pytest.raises(gs.InvalidArgument, match=f"rank {last}: its object cannot be pickled") as raised:
                comm.objects.send(wrong(), 0) if comm.rank == last else comm.objects.recv(last)
            assert (raised.value.__cause__ is not None) == (comm.rank == last)
        if comm.rank == last:
            comm.objects.send("right", 0)
        elif comm.rank == 0:
            assert comm.objects.recv(last) == "right"
        comm.barrier()


@pytest.mark.ranks(on=PAIRS)
def test_only_the_receiver_raises_if_it_cannot_unpickle(comm):
    last = comm.world_size - 1
    if comm.rank == last:
        comm.objects.send(Stubborn(0), 0)
        comm.objects.send(Stubborn(1), 0)
    elif comm.rank == 0:
        with pytest.raises(gs.InvalidArgument, match=f"rank {last}") as raised:
            comm.objects.recv(last)
        assert isinstance(raised.value.__cause__, LookupError)
        assert comm.objects.recv(last) == "came back"
    comm.barrier()


@pytest.mark.ranks(on=COMPARED)
@pytest.mark.parametrize("size", [0, 1, 8, 500_000])
@pytest.mark.parametrize("who", ["sender", "receiver", "pending receiver"])
def test_an_object_against_an_array(comm, who, size):
    """Also one of eight bytes, which is what the length of an object takes. Both ranks raise, and go on."""
    last, array = comm.world_size - 1, arrays_of(comm).put(np.ones(size, np.uint8))
    calls = {
        "sender": (lambda: comm.send(array, last), lambda: comm.objects.recv(0)),
        "receiver": (lambda: comm.objects.send("x" * size, last), lambda: comm.recv(array, 0)),
        "pending receiver": (
            lambda: comm.objects.send("x" * size, last),
            lambda: comm.asynchronous.recv(array, 0).result(),
        ),
    }[who]
    if comm.rank in (0, last):
        with pytest.raises(gs.PlanMismatch) as raised:
            calls[comm.rank == last]()
        assert set(raised.value.descriptions) == {0, last}
        assert (arrays_of(comm).get(array) == 1).all()
    assert comm.objects.all_gather(comm.rank) == list(range(comm.world_size))
    if comm.rank == 0:
        comm.objects.send([1], last)
    elif comm.rank == last:
        assert comm.objects.recv(0) == [1]


class Interrupting:
    """Pickles for as long as a user bears it."""

    def __reduce__(self):
        raise KeyboardInterrupt


@pytest.mark.ranks(on={"shm": (2,), "fake": (2,)})
def test_ctrl_c_while_pickling_comes_before_the_collective(comm):
    if comm.rank == 0:
        with pytest.raises(KeyboardInterrupt):
            comm.objects.all_gather(Interrupting())
        with pytest.raises(KeyboardInterrupt):
            comm.objects.send(Interrupting(), 1)
    assert comm.objects.all_gather(comm.rank) == [0, 1]
