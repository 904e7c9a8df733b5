"""gradsync.mpi: the calls of mpi4py over any communicator; run_suite.py runs mpi4py's own tests."""

import array
import operator
import pickle
import random
import time
from itertools import accumulate

import numpy as np
import pytest

import gradsync as gs
from arrays import OPERATORS_ON_GPU, TOLERANCE, arrays_of, contribution
from gradsync.mpi import _TYPES, MPI, Datatype, wrap
from ranks import EVERYWHERE, SEVERAL

#: Over NCCL a collective waits for all messages that were begun before it.
BESIDE_NCCL = {place: sizes for place, sizes in SEVERAL.items() if place != "fake"}
PAIR = dict.fromkeys(SEVERAL, (2,))
PAIR_BESIDE_NCCL = dict.fromkeys(BESIDE_NCCL, (2,))
SIZES = [0, 1, 509, 510, 300_000]  # 510 float64 do not fit beside a header; the last one is larger than any buffer
OPS = {
    "sum": (MPI.SUM, np.add),
    "prod": (MPI.PROD, np.multiply),
    "min": (MPI.MIN, np.minimum),
    "max": (MPI.MAX, np.maximum),
}


def value_of(rank, size=5, dtype="float64", seed=0):
    return contribution(rank, size, dtype, seed)


def filled(arrays, size, dtype="float64"):
    return arrays.put(np.zeros(size, dtype))


# -- Collectives of arrays --------------------------------------------------------------------------------------------


@pytest.mark.ranks(on=EVERYWHERE)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "complex128"])
def test_reductions(comm, dtype, op):
    if op not in OPERATORS_ON_GPU[dtype]:
        pytest.skip("not defined")
    n, rank, arrays, face = comm.world_size, comm.rank, arrays_of(comm), wrap(comm)
    by, ufunc = OPS[op]
    wide = "complex128" if dtype == "complex128" else "float64"
    size = 4 * n
    wanted = ufunc.reduce([value_of(each, size, dtype).astype(wide) for each in range(n)])

    def check(result, wanted=wanted):
        np.testing.assert_allclose(arrays.get(result), wanted, rtol=n * TOLERANCE.get(dtype, 0), atol=1e-30)

    def mine():
        return arrays.put(value_of(rank, size, dtype))

    out = filled(arrays, size, dtype)
    face.Allreduce(mine(), out, by)
    check(out)
    out = mine()
    face.Allreduce(MPI.IN_PLACE, out, op=by)
    check(out)
    out = filled(arrays, size, dtype)
    face.Iallreduce([mine(), MPI._typedict[np.dtype(dtype).char]], out, by).Wait()
    check(out)
    root = n - 1
    out = filled(arrays, size, dtype) if rank == root else None
    face.Reduce(mine(), out, by, root)
    if rank == root:
        check(out)
    out = mine()
    face.Reduce(MPI.IN_PLACE if rank == root else out, out if rank == root else None, op=by, root=root)
    check(out, wanted if rank == root else value_of(rank, size, dtype))
    out = filled(arrays, 4, dtype)
    face.Reduce_scatter_block(mine(), out, by)
    check(out, wanted[4 * rank : 4 * rank + 4])
    counts = [size - (n - 1), *[1] * (n - 1)]
    begin = sum(counts[:rank])
    out = filled(arrays, counts[rank], dtype)
    face.Reduce_scatter(mine(), out, counts, by)
    check(out, wanted[begin : begin + counts[rank]])
    face.Reduce_scatter(mine(), out, op=by)
    check(out, wanted[begin : begin + counts[rank]])


@pytest.mark.ranks(on=EVERYWHERE)
def test_movements(comm):
    n, rank, arrays, face = comm.world_size, comm.rank, arrays_of(comm), wrap(comm)
    root = n - 1
    parts = [value_of(each, 3) for each in range(n)]
    mine, whole = arrays.put(parts[rank]), np.concatenate(parts)

    def equal(result, wanted):
        np.testing.assert_array_equal(arrays.get(result).reshape(-1), wanted)

    buffer = arrays.put(parts[root] if rank == root else np.zeros(3))
    face.Bcast([buffer, 3, MPI.DOUBLE], root)
    equal(buffer, parts[root])
    out = filled(arrays, (n, 3))  # MPI counts elements: shapes may differ
    face.Allgather(mine, out)
    equal(out, whole)
    out = arrays.put(np.concatenate([part if each == rank else 0 * part for each, part in enumerate(parts)]))
    face.Allgather(MPI.IN_PLACE, out)
    equal(out, whole)
    out = filled(arrays, 3 * n) if rank == root else None
    face.Gather([mine, MPI.DOUBLE], [out, 3, MPI.DOUBLE] if rank == root else None, root)
    if rank == root:
        equal(out, whole)
    out = filled(arrays, 3)
    face.Scatter(arrays.put(whole) if rank == root else None, out, root=root)
    equal(out, parts[rank])
    matrix = np.arange(2.0 * n * n).reshape(n, 2 * n)  # of rank r: row r
    out = filled(arrays, 2 * n)
    face.Alltoall(arrays.put(matrix[rank]), out)
    equal(out, matrix.reshape(n, n, 2)[:, rank].reshape(-1))
    out = arrays.put(matrix[rank])
    face.Alltoall(MPI.IN_PLACE, out)
    equal(out, matrix.reshape(n, n, 2)[:, rank].reshape(-1))
    face.Barrier()


@pytest.mark.ranks(on=EVERYWHERE)
@pytest.mark.parametrize("gap", [0, 2], ids=["dense", "with gaps"])
def test_parts_of_different_sizes(comm, gap):
    n, rank, arrays, face = comm.world_size, comm.rank, arrays_of(comm), wrap(comm)
    root = n - 1
    counts = [each + 1 for each in range(n)]
    displs = [0, *accumulate(count + gap for count in counts)][:-1]
    parts = [value_of(each, counts[each]) for each in range(n)]
    whole = np.full(sum(counts) + n * gap, -1.0)
    for part, displ in zip(parts, displs, strict=True):
        whole[displ : displ + part.size] = part
    mine = arrays.put(parts[rank])

    def room():
        return arrays.put(np.full_like(whole, -1.0))

    out = room()
    face.Allgatherv(mine, [out, (counts, displs), MPI.DOUBLE])
    np.testing.assert_array_equal(arrays.get(out), whole)
    out = room()
    face.Gatherv([mine, MPI.DOUBLE], [out, (counts, displs)] if rank == root else None, root)
    np.testing.assert_array_equal(arrays.get(out), whole if rank == root else np.full_like(whole, -1.0))
    out = filled(arrays, counts[rank])
    face.Scatterv([arrays.put(whole), counts, displs, MPI.DOUBLE] if rank == root else None, out, root)
    np.testing.assert_array_equal(arrays.get(out), parts[rank])
    # Rank r sends r + 1 values to each; so it receives counts, and sends the same number to all.
    sent = arrays.put(np.arange(n * (rank + 1.0)))
    out = room()
    face.Alltoallv([sent, rank + 1], [out, (counts, displs)])
    wanted = np.full_like(whole, -1.0)
    for source, displ in enumerate(displs):
        wanted[displ : displ + counts[source]] = np.arange(n * (source + 1.0))[rank * (source + 1) :][: source + 1]
    np.testing.assert_array_equal(arrays.get(out), wanted)


@pytest.mark.ranks(on=SEVERAL)
def test_counts_that_differ_from_the_roots_are_told_on_all_ranks(comm):
    face = wrap(comm)
    with pytest.raises(
        gs.InvalidArgument, match=r"Gatherv has parts of \[2, 2.*\] elements on the ranks, but the root"
    ):
        face.Gatherv(np.ones(2), [np.ones(50), [1] * comm.world_size] if comm.rank == 0 else None)
    with pytest.raises(gs.InvalidArgument, match="Scatterv"):
        face.Scatterv([np.ones(50), [1] * comm.world_size] if comm.rank == 0 else None, np.ones(2))
    assert face.allreduce(1) == comm.world_size


@pytest.mark.ranks(on=EVERYWHERE)
def test_objects(comm):
    n, rank, face = comm.world_size, comm.rank, wrap(comm)
    mine, everything = {"rank": rank}, [{"rank": each} for each in range(n)]
    assert face.bcast(mine if rank == n - 1 else None, root=n - 1) == everything[-1]
    assert face.allgather(mine) == everything
    assert face.gather(mine, root=n - 1) == (everything if rank == n - 1 else None)
    assert face.scatter(everything if rank == 0 else None) == mine
    assert face.alltoall([f"{rank} to {to}" for to in range(n)]) == [f"{source} to {rank}" for source in range(n)]
    assert face.allreduce(rank + 1) == n * (n + 1) // 2
    assert face.reduce([rank], root=n - 1) == (list(range(n)) if rank == n - 1 else None)
    assert face.allreduce((rank % 2, rank), MPI.MAXLOC) == ((1, 1) if n > 1 else (0, 0))
    assert face.allreduce(rank, lambda x, y: max(x, y)) == n - 1
    logical = [face.allreduce(rank > 0, op) for op in (MPI.LAND, MPI.LOR, MPI.LXOR)]
    assert logical == [False, n > 1, n % 2 == 0]
    face.barrier()


@pytest.mark.ranks(on=EVERYWHERE)
def test_communicators(comm):
    n, rank, face = comm.world_size, comm.rank, wrap(comm)
    assert (face.Get_rank(), face.Get_size(), face.rank, face.size) == (rank, n, rank, n)
    half = face.Split(rank % 2, key=-rank)
    assert half.allgather(rank) == [each for each in reversed(range(n)) if each % 2 == rank % 2]
    half.Free()
    assert half == MPI.COMM_NULL
    none = face.Split(MPI.UNDEFINED if rank else 0)
    assert bool(none) == (rank == 0)
    if rank:
        with pytest.raises(gs.InvalidArgument, match="COMM_NULL"):
            none.Barrier()
    twin = face.Dup()
    assert twin != face
    assert twin.allreduce(1) == n
    turned = face.Create_group(face.Get_group().Incl(range(n - 1, -1, -1)))
    assert turned.allgather(rank) == list(range(n - 1, -1, -1))
    assert face.Split_type(MPI.COMM_TYPE_SHARED).size == n
    assert wrap(comm) == face


# -- Buffers ----------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "make",
    [
        lambda: np.arange(6.0),
        lambda: np.arange(6.0).reshape(2, 3),
        lambda: np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        lambda: [np.arange(6.0), MPI.DOUBLE],
        lambda: [np.arange(6.0), "d"],
        lambda: (np.arange(9.0), 6, MPI.DOUBLE),
        lambda: [np.arange(9.0), 6],
        lambda: [np.concatenate([np.ones(2), np.arange(6.0)]), (6, 2), MPI.DOUBLE],
        lambda: array.array("d", range(6)),
        lambda: [bytearray(np.arange(6.0).tobytes()), MPI.DOUBLE],
        lambda: memoryview(bytearray(np.arange(6.0).tobytes())),
        lambda: [np.arange(6.0), MPI.BYTE],
    ],
)
def test_buffers(comm, make):
    face, out = wrap(comm), np.zeros(6)
    if comm.rank == 0:
        face.Send(make(), 1)
        buffer = make()
        face.Recv(buffer, 1)
        array, *rest = buffer if isinstance(buffer, (list, tuple)) else (buffer,)
        begin = rest[0][1] if rest and isinstance(rest[0], tuple) else 0
        flat = np.frombuffer(array) if not isinstance(array, np.ndarray) else array.reshape(-1, order="A")
        np.testing.assert_array_equal(flat[begin : begin + 6], np.arange(6.0, 12.0))
    else:
        face.Recv(out, 0)
        assert sorted(out) == list(range(6))
        face.Send(np.arange(6.0, 12.0), 0)


@pytest.mark.ranks(1, on=("local",))
@pytest.mark.parametrize(
    ("buffer", "text"),
    [
        ([np.ones(3, np.float32), MPI.DOUBLE], "array of float32 with the type MPI.DOUBLE, which is float64"),
        ([np.ones(3, np.int64), MPI.INT], "MPI.INT"),
        ([np.ones(3), 4, MPI.DOUBLE], "needs 4 elements from 0, but its array has 3"),
        ([np.ones(3), (2, 2), MPI.DOUBLE], "needs 2 elements from 2"),
        (lambda: np.ones((4, 4))[:, ::2], "contiguous"),
        ("text", "needs an array or another buffer, got str"),
        ([np.ones(3), 1, 2, 3, MPI.DOUBLE], "2 to 4 items"),
        (np.array([object()]), "Python objects"),
    ],
)
def test_buffers_that_do_not_fit_are_refused(comm, buffer, text):
    with pytest.raises((gs.InvalidArgument, gs.UnsupportedDtype), match=text):
        wrap(comm).Bcast(buffer() if callable(buffer) else buffer)


# -- Messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(on=EVERYWHERE)
@pytest.mark.parametrize("first", ["Isend", "Irecv"])
def test_a_ring_of_isend_and_irecv(comm, first):
    n, rank, arrays, face = comm.world_size, comm.rank, arrays_of(comm), wrap(comm)
    after, before = (rank + 1) % n, (rank - 1) % n
    for size in SIZES:
        for order in (1, -1):
            sent, room = arrays.put(value_of(rank, size)), filled(arrays, size)
            begin = [lambda: face.Isend(sent, after, 3), lambda: face.Irecv(room, before, 3)]
            requests = [call() for call in (begin if first == "Isend" else begin[::-1])]
            for request in requests[::order]:
                request.Wait()
            np.testing.assert_array_equal(arrays.get(room), value_of(before, size))
        face.Sendrecv(arrays.put(value_of(rank, size, seed=1)), after, 0, room, before, MPI.ANY_TAG)
        np.testing.assert_array_equal(arrays.get(room), value_of(before, size, seed=1))
    assert face.sendrecv({"from": rank}, after, source=before) == {"from": before}


@pytest.mark.ranks(on=PAIR)
@pytest.mark.parametrize("size", SIZES)
def test_messages_match_by_tag_in_order(comm, size):
    arrays, face = arrays_of(comm), wrap(comm)
    tags = [7, 9, 7, 8, 9]
    if comm.rank == 0:
        requests = [face.Isend(arrays.put(value_of(0, size, seed=i)), 1, tag) for i, tag in enumerate(tags)]
        face.send("the last", 1, 1)
        MPI.Request.Waitall(requests)
        return
    status = MPI.Status()
    for wanted, tag, message in [(9, 9, 1), (8, 8, 3), (MPI.ANY_TAG, 7, 0), (9, 9, 4), (MPI.ANY_TAG, 7, 2)]:
        room = filled(arrays, size + 2)
        face.Recv(room, 0, wanted, status)
        np.testing.assert_array_equal(arrays.get(room)[:size], value_of(0, size, seed=message))
        assert (status.Get_source(), status.Get_tag(), status.Get_count(MPI.DOUBLE)) == (0, tag, size)
    assert face.recv(source=0) == "the last"


#: What rank 0 calls, and what rank 1 calls.
PROGRAMS = [
    ("Irecv 7, Barrier, Wait", "Send 7, Barrier"),
    ("Irecv 7, Irecv 8, Barrier, Waitall", "Send 8, Send 7, Barrier"),
    ("Irecv 7, Send 9, Wait", "Recv 9, Send 7"),
    ("Irecv 7, Split, Wait", "Send 7, Split"),
    ("Irecv 7, Allreduce, Isend 3, Barrier, Waitall", "Isend 7, Allreduce, Recv 3, Barrier, Wait"),
    ("Isend 0, Isend 1, Isend 2, Recv 8, Recv 9, Waitall", "Recv 1, Send 8, Recv 0, Send 9, Recv 2"),
    ("Send 1, Recv 2", "Recv 1, Send 2"),
    ("Irecv 1, Isend 2, Isend 3, Waitall", "Isend 1, Recv 3, Recv 2, Wait"),
]


#: Messages that wait for a later collective.
BEYOND_COLLECTIVES = [
    ("Irecv 7, Barrier, Wait", "Barrier, Send 7"),
    ("Isend 7, Barrier, Barrier, Wait", "Barrier, Irecv 7, Barrier, Wait"),
    ("Isend 5, Isend 6, Isend 5, Barrier, Waitall", "Irecv 6, Barrier, Recv 5, Recv 5, Wait"),
    ("Isend 5, Send 6, objects, Wait", "Irecv 6, objects, Recv 5, Wait"),
]


@pytest.mark.ranks(on=PAIR_BESIDE_NCCL)
@pytest.mark.parametrize("programs", BEYOND_COLLECTIVES, ids=" | ".join)
def test_messages_may_wait_for_what_comes_after_a_collective(comm, programs):
    test_programs_in_any_legal_order(comm, programs)


@pytest.mark.ranks(on=PAIR | {"debug": (2,)})
@pytest.mark.parametrize("programs", PROGRAMS, ids=" | ".join)
def test_programs_in_any_legal_order(comm, programs):
    face, other, arrays = wrap(comm), 1 - comm.rank, arrays_of(comm)
    for size in SIZES:
        requests, rooms = [], []
        for call in programs[comm.rank].split(", "):
            word, _, tag = call.partition(" ")
            if word in ("Isend", "Send"):
                begun = getattr(face, word)(arrays.put(np.full(size, float(tag))), other, int(tag))
            elif word in ("Irecv", "Recv"):
                rooms.append((filled(arrays, size), float(tag)))
                begun = getattr(face, word)(rooms[-1][0], other, int(tag))
                if word == "Recv":  # the host waits for the values
                    assert (arrays.get(rooms[-1][0]) == float(tag)).all()
            elif word in ("Wait", "Waitall"):
                begun = MPI.Request.Waitall(requests)
            elif word == "Allreduce":
                begun = face.Allreduce(MPI.IN_PLACE, arrays.put(np.ones(3)))
            elif word == "objects":
                begun = face.allgather(size)
            elif word == "Split":
                begun = face.Split(0).Free()
            else:
                begun = face.Barrier()
            if word in ("Isend", "Irecv"):
                requests.append(begun)
        for room, tag in rooms:
            np.testing.assert_array_equal(arrays.get(room), tag)


def random_messages(n, seed):
    """What all ranks send in a round: source, dest, tag and size; an object if the size is None."""
    draw = random.Random(seed)
    count = draw.randrange(1, 12)
    sizes = [0, 1, 17, 4000, 70_000, None]
    return [(draw.randrange(n), draw.randrange(n), draw.randrange(3), draw.choice(sizes)) for _ in range(count)]


@pytest.mark.ranks(on=SEVERAL | {"shm": (2, 3, 5), "fake": (2, 3)})
def test_random_messages(comm):
    """Each rank posts what it sends and receives in an order of its own, and waits in another."""
    n, rank, arrays, face = comm.world_size, comm.rank, arrays_of(comm), wrap(comm)
    for seed in range(40 if comm.device == "cpu" else 10):
        messages = random_messages(n, seed)
        kinds = {(source, dest, tag): size is None for source, dest, tag, size in messages}  # of one tag, one kind
        draw = random.Random(f"{seed}/{rank}")
        sends = {message for message, (source, *_) in enumerate(messages) if source == rank}
        receives = {message for message, (_, dest, *_) in enumerate(messages) if dest == rank}
        # Messages of one source and tag keep their order; apart from that any order is legal.
        order = sorted(receives, key=lambda message: (hash((seed, rank, messages[message][::2])), message))
        requests, found = [], {}

        def send(message):
            source, dest, tag, size = messages[message]
            if kinds[source, dest, tag]:
                requests.append((face.isend((message, size), dest, tag), None))
            else:
                requests.append((face.Isend(arrays.put(value_of(message, size or 0)), dest, tag), None))

        def receive(message):
            source, dest, tag, size = messages[message]
            if kinds[source, dest, tag]:
                requests.append((face.irecv(source=source, tag=tag), message))
            else:
                found[message] = filled(arrays, size or 0)
                requests.append((face.Irecv(found[message], source, tag), message))

        calls = [(send, message) for message in sorted(sends)]
        for message in order:
            calls.insert(draw.randrange(len(calls) + 1), (receive, message))
        ordered = {send: iter(sorted(sends)), receive: iter(order)}
        for call, _ in calls:
            call(next(ordered[call]))
        if comm.device == "cpu" and seed % 3 == 0:
            face.Barrier()
        draw.shuffle(requests)
        for request, message in requests:
            result = request.wait()
            if result is not None:
                assert result == (message, messages[message][3])
        for message, room in found.items():
            np.testing.assert_array_equal(arrays.get(room), value_of(message, messages[message][3] or 0))


@pytest.mark.ranks(on=EVERYWHERE)
def test_a_rank_sends_to_itself(comm):
    arrays, face, me = arrays_of(comm), wrap(comm), comm.rank
    face.Send(arrays.put(value_of(1)), me, 1)
    face.send("object", me, 2)
    assert face.recv(source=me, tag=2) == "object"
    room = filled(arrays, 5)
    face.Recv(room, me)
    np.testing.assert_array_equal(arrays.get(room), value_of(1))
    request = face.Irecv(room, me, 3)
    assert not request.Test()
    face.Send(arrays.put(value_of(2)), me, 3)
    assert request.Test()
    np.testing.assert_array_equal(arrays.get(room), value_of(2))
    with pytest.raises(gs.InvalidArgument, match="from itself that it has not sent"):
        face.Recv(room, me, 4)


@pytest.mark.ranks(1, on=("local",))
def test_nobody_is_a_peer_that_sends_nothing(comm):
    face, status, room = wrap(comm), MPI.Status(), np.zeros(3)
    face.Send(np.ones(3), MPI.PROC_NULL)
    face.Recv(room, MPI.PROC_NULL, status=status)
    assert (status.source, status.tag, status.Get_count()) == (MPI.PROC_NULL, MPI.ANY_TAG, 0)
    assert face.sendrecv("to nobody", MPI.PROC_NULL, source=MPI.PROC_NULL) is None
    MPI.Request.Waitall([face.Isend(room, MPI.PROC_NULL), face.Irecv(room, MPI.PROC_NULL)])
    assert not room.any()


@pytest.mark.ranks(on=PAIR)
def test_messages_that_do_not_fit(comm):
    """The receiver is told; the sender is done, and the next message comes."""
    arrays, face = arrays_of(comm), wrap(comm)
    if comm.rank == 0:
        face.Send(arrays.put(np.ones(10)), 1, 1)
        face.Send(arrays.put(np.ones(10, np.float32)), 1, 2)
        face.send("object", 1, 3)
        face.Send(arrays.put(np.full(10, 4.0)), 1, 4)
        return
    room = filled(arrays, 10)
    with pytest.raises(
        gs.InvalidArgument, match="tag 1 from rank 0 has 80 bytes, but the buffer of this rank has only 32"
    ):
        face.Recv([room, 4], 0, 1)
    with pytest.raises(gs.InvalidArgument, match="elements of float32, this rank receives float64"):
        face.Recv(room, 0, 2)
    with pytest.raises(MPI.Exception, match="Python objects"):
        face.Recv(room, 0, 3)
    assert not arrays.get(room).any()
    face.Recv(room, 0, 4)
    np.testing.assert_array_equal(arrays.get(room), 4.0)


@pytest.mark.ranks(on=PAIR_BESIDE_NCCL)
def test_tests_move_messages_on(comm):
    face, other = wrap(comm), 1 - comm.rank
    rooms = [np.zeros(300_000) for _ in range(3)]
    requests = [face.Irecv(room, other, tag) for tag, room in enumerate(rooms)]
    requests += [face.Isend(np.full(300_000, tag + 1.0), other, tag) for tag in reversed(range(3))]
    until = time.monotonic() + 60
    left = set(range(6))
    while len(left) > 3 and time.monotonic() < until:
        index, is_over = MPI.Request.Testany(requests)
        left -= {index} if is_over else set()
    index = MPI.Request.Waitany(requests)
    assert index in left
    while not MPI.Request.Testall(requests) and time.monotonic() < until:
        pass
    assert [room[-1] for room in rooms] == [1, 2, 3]
    assert requests[0] == MPI.REQUEST_NULL


@pytest.mark.ranks(on=PAIR_BESIDE_NCCL)
def test_waitall_moves_the_messages_of_several_communicators_on(comm):
    face, other = wrap(comm), 1 - comm.rank
    twin = face.Dup()
    rooms = [np.zeros(300_000), np.zeros(300_000)]
    communicators = [face, twin]
    requests = [each.Isend(np.ones(300_000), other) for each in communicators]
    requests += [each.Irecv(room, other) for each, room in zip(communicators, rooms, strict=True)]
    MPI.Request.Waitall(requests if comm.rank else requests[::-1])
    assert all(room.all() for room in rooms)
    twin.Free()


@pytest.mark.ranks(2, fresh=True, options={"collective_timeout_seconds": 1.5})
def test_a_message_that_never_comes_meets_the_deadline(comm):
    with pytest.raises((gs.CollectiveTimeout, gs.RankFailed, gs.CommunicatorClosed)):
        wrap(comm).Recv(np.zeros(3), 1 - comm.rank)


@pytest.mark.ranks(2, on=("fake",), fresh=True, options={"collective_timeout_seconds": 1.5})
def test_over_nccl_a_message_that_never_comes_meets_the_deadline(comm):
    with pytest.raises((gs.CollectiveTimeout, gs.RankFailed)):
        wrap(comm).Recv(np.zeros(3), 1 - comm.rank)


@pytest.mark.ranks(2, fresh=True)
def test_messages_of_the_communicator_itself_are_others(comm):
    with pytest.raises(gs.PlanMismatch):
        wrap(comm).Recv(np.zeros(3), 1) if comm.rank == 0 else comm.send(np.zeros(3), 0)
    assert wrap(comm).allreduce(1) == 2


# -- What is not there ------------------------------------------------------------------------------------------------


@pytest.mark.ranks(1, on=("local",))
@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda face: face.recv(), gs.InvalidArgument, "ANY_SOURCE; post an Irecv for each rank"),
        (lambda face: face.Recv(np.ones(1), 5), gs.InvalidArgument, "source to be a rank from 0 to 0"),
        (lambda face: face.Send(np.ones(1), 0, -1), gs.InvalidArgument, "needs a tag from 0"),
        (lambda face: face.Recv(np.ones(1), 0, "a"), gs.InvalidArgument, "or MPI.ANY_TAG, got 'a'"),
        (lambda face: face.Recv(b"abc", 0), gs.InvalidArgument, "read-only"),
        (lambda face: face.Allreduce(np.ones(1), np.ones(1), MPI.LAND), gs.UnsupportedDtype, "for bools MIN is LAND"),
        (lambda face: MPI.Op.Create(max), gs.InvalidArgument, "use allgather"),
        (lambda face: face.Create_cart([2, 2]), AttributeError, "no Comm.Create_cart: use Split, and neighbours"),
        (lambda face: face.Scan(1, 2), AttributeError, "use allgather, and add up"),
        (lambda face: face.Ibcast(np.ones(1)), AttributeError, "use Bcast"),
        (lambda face: face.Iprobe(), AttributeError, "use recv"),
        (lambda face: MPI.Win.Create(), AttributeError, "no MPI.Win: use Send and Recv"),
        (lambda face: MPI.File.Open(), AttributeError, "a file for each rank"),
        (lambda face: MPI.DOUBLE.Create_vector(1, 2, 3), AttributeError, "no Datatype.Create_vector"),
        (lambda face: MPI.Request.Waitsome([]), AttributeError, "no Request.Waitsome: use Waitany"),
        (lambda face: face.Set_errhandler(MPI.ERRORS_RETURN), AttributeError, "try and except"),
        (lambda face: face.Get_group().Translate_ranks([0]), AttributeError, "use allgather"),
        (lambda face: face.Get_topology(), AttributeError, "use Split, and neighbours"),
        (lambda face: face.Ireduce_scatter(), AttributeError, "or comm.communicator.asynchronous.reduce_scatter$"),
        (lambda face: face.Barrier_init(), AttributeError, "no Comm.Barrier_init: use Barrier in each round"),
        (lambda face: face.Revoke(), AttributeError, "no Comm.Revoke; for what only MPI has keep mpi4py"),
        (lambda face: MPI.DOUBLE_INT, AttributeError, "use allreduce of the pair"),
        (lambda face: MPI.LONG_DOUBLE, AttributeError, "use MPI.DOUBLE"),
        (lambda face: MPI.Compute_dims(4, 2), AttributeError, "use a shape of your own"),
        (lambda face: gs.from_mpi(face), gs.InvalidArgument, "of gradsync.mpi's pass group=comm.communicator"),
        (lambda face: gs.AllreduceCallback(group=face), gs.InvalidArgument, "got Comm: pass comm.communicator"),
        (lambda face: face.Split_type(5), gs.InvalidArgument, "COMM_TYPE_SHARED only"),
        (lambda face: face.all_reduce(np.ones(1)), AttributeError, "use comm.communicator.all_reduce"),
        (lambda face: wrap(face), gs.InvalidArgument, "got Comm: pass comm.communicator"),
        (lambda face: wrap(7), gs.InvalidArgument, "got int"),
        (lambda face: face.communicator.send(np.ones(1), MPI.PROC_NULL), gs.InvalidArgument, "no PROC_NULL"),
        (
            lambda face: face.communicator.exchange(np.ones(1), dest=0, out=np.ones(1), source=None),
            gs.InvalidArgument,
            "no PROC_NULL",
        ),
    ],
)
def test_what_is_not_there_says_what_to_use(comm, call, error, text):
    with pytest.raises(error, match=text):
        call(wrap(comm))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda face: face.Allreduce(np.ones(3), np.ones(2)),
            "Allreduce needs recvbuf with 3 elements of float64, got 2",
        ),
        (lambda face: face.Reduce(np.ones(3), np.ones(3, "f4"), root=face.rank), "recvbuf with 3 .* got 3 of float32"),
        (lambda face: face.Allgather(np.ones(3), np.ones((2, 2))), "Allgather needs recvbuf with 6 elements"),
        (lambda face: face.Gather(np.ones(3), np.ones(2), root=face.rank), "Gather needs recvbuf with 6 elements"),
        (lambda face: face.Alltoall(np.ones(4), np.ones(2)), "Alltoall needs recvbuf with 4 elements"),
        (lambda face: face.Allreduce(np.ones(3), MPI.IN_PLACE), "MPI.IN_PLACE in place of sendbuf, the first argument"),
        (
            lambda face: face.Scatter(MPI.IN_PLACE, np.ones(3), face.rank),
            "MPI.IN_PLACE in place of recvbuf on the root",
        ),
    ],
)
def test_a_buffer_for_the_result_that_does_not_fit_is_told_in_the_words_of_mpi(comm, call, text):
    with pytest.raises(gs.InvalidArgument, match=text):
        call(wrap(comm))
    comm.barrier()


@pytest.mark.ranks(2, 3)
def test_what_is_known_of_a_communicator(comm):
    face, turned = wrap(comm), wrap(comm).Split(0, -comm.rank)
    assert face.name == face.Get_name() == comm.recorder.group
    assert face.group.size == comm.world_size
    pairs = {MPI.IDENT: face, MPI.CONGRUENT: face.Dup(), MPI.SIMILAR: turned, MPI.UNEQUAL: MPI.COMM_SELF}
    assert [MPI.Comm.Compare(face, other) for other in pairs.values()] == [*pairs]
    assert MPI.Comm.Compare(face.Split(comm.rank), MPI.COMM_SELF) == MPI.CONGRUENT
    assert MPI.THREAD_SINGLE < MPI.Query_thread() < MPI.THREAD_MULTIPLE


@pytest.mark.ranks(on=EVERYWHERE)
def test_a_message_may_replace_what_was_sent(comm):
    n, rank, arrays, face = comm.world_size, comm.rank, arrays_of(comm), wrap(comm)
    for size in SIZES:
        buffer = arrays.put(value_of(rank, size))
        face.Sendrecv_replace(buffer, (rank + 1) % n, 3, (rank - 1) % n, 3)
        np.testing.assert_array_equal(arrays.get(buffer), value_of((rank - 1) % n, size))


def test_names():
    assert isinstance(MPI.DOUBLE, Datatype)
    assert MPI.DOUBLE.Get_size() == 8
    assert {"SUM", "INT", "COMM_WORLD"} <= set(dir(MPI))
    assert not hasattr(MPI, "Win")
    assert MPI.Get_processor_name()
    assert MPI.Wtime() <= MPI.Wtime()
    assert 0 < MPI.Wtick() < 1e-3
    assert MPI.Is_thread_main()
    assert MPI.Get_library_version() == f"gradsync {gs.__version__}"
    assert MPI.COMM_SELF.allreduce(2, MPI.SUM) == 2
    assert repr(MPI.SUM) == "<MPI.SUM>"


def test_every_hint_for_an_asynchronous_collective_is_true():
    for name in ("bcast", "barrier", "reduce", "reduce_scatter_block", "gatherv", "scatter", "allgather", "alltoallv"):
        with pytest.raises(AttributeError) as raised:
            getattr(MPI.COMM_SELF, f"I{name}")
        assert operator.attrgetter(str(raised.value).rpartition(" or comm.")[2])(MPI.COMM_SELF)


@pytest.mark.mpi
def test_types_are_those_of_mpi4py():
    from mpi4py import MPI as THEIRS

    for name in _TYPES:
        ours, theirs = getattr(MPI, name), getattr(THEIRS, name)
        sizes = (theirs.Get_size(), theirs.Get_extent(), theirs.extent)
        assert (ours.Get_size(), ours.Get_extent(), ours.extent) == sizes, name


# -- Programs ---------------------------------------------------------------------------------------------------------

PROGRAM = """
from gradsync.mpi import MPI
import numpy as np
assert not MPI.Is_initialized()
comm = MPI.COMM_WORLD
assert MPI.Is_initialized() and comm == MPI.COMM_WORLD
total = np.zeros(2)
comm.Allreduce(np.full(2, comm.rank + 1.0), total)
print("total", total[0], "of", comm.Get_size())
MPI.Finalize()
assert MPI.Is_finalized()
"""


def test_a_program_under_any_launcher(cli, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    alone = cli.python(str(program))
    assert (alone.code, alone.out) == (0, "total 1.0 of 1\n")
    run = cli("run", "-n", "3", str(program))
    assert run.code == 0, run.err
    assert run.out.count("total 6.0 of 3") == 3


def test_abort_ends_all_ranks(cli, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "from gradsync.mpi import MPI\ncomm = MPI.COMM_WORLD\nif comm.rank == 1: comm.Abort(3)\ncomm.Barrier()\n"
    )
    run = cli("run", "-n", "2", str(program))
    assert run.code == 3
    assert "Abort(3)" in run.out + run.err


# -- Beside mpi4py ----------------------------------------------------------------------------------------------------


@pytest.mark.ranks(on={"mpi": (1, 2, 3, 4)})
def test_random_calls_are_those_of_mpi4py(comm):
    """The same calls on both communicators, with the same buffers, give equal results."""
    from mpi4py import MPI as THEIRS

    theirs = THEIRS.COMM_WORLD.Split(0, comm.rank)
    n, rank = comm.world_size, comm.rank
    draw, ours = random.Random(7), wrap(comm)

    def call(face, mpi, name, seed, root, size, op):
        """Returns what has been received."""
        values = value_of(rank, size * n, "int64", seed)
        op, counts = getattr(mpi, op), [(seed + each) % 4 for each in range(n)]
        out, one = np.full(size * n, -1), np.full(size, -1)
        uneven, whole = np.full(counts[rank], -1), np.arange(sum(counts))
        buffers = {
            "Allreduce": ([values, out, op], out),
            "Reduce": ([values, out if rank == root else None, op, root], out),
            "Reduce_scatter_block": ([values, one, op], one),
            "Bcast": ([values, root], values),
            "Allgather": ([values[:size], [out, size, mpi.LONG]], out),
            "Gather": ([[values[:size], mpi.LONG], out if rank == root else None, root], out),
            "Scatter": ([values if rank == root else None, one, root], one),
            "Alltoall": ([values, out], out),
            "Scatterv": ([[whole, counts] if rank == root else None, uneven, root], uneven),
            "Gatherv": ([values[:0] if size == 0 else np.full(counts[rank], rank), [whole, counts], root], whole),
            "Allgatherv": ([np.full(counts[rank], rank), [whole, (counts, None), mpi.LONG]], whole),
            "Sendrecv": ([values, (rank + 1) % n, seed, out, (rank - 1) % n, seed], out),
            "allreduce": ([values.tolist()], None),
            "alltoall": ([[(rank, seed, to) for to in range(n)]], None),
        }
        if name == "Gatherv":
            buffers[name][0][0] = np.full(counts[rank], rank)
        arguments, result = buffers[name]
        returned = getattr(face, name)(*arguments)
        return pickle.dumps((returned, None if result is None else result.tolist()))

    names = "Allreduce Reduce Reduce_scatter_block Bcast Allgather Gather Scatter Alltoall Scatterv Gatherv Allgatherv"
    for seed in range(1000):
        name = draw.choice([*names.split(), "Sendrecv", "allreduce", "alltoall"])
        arguments = name, seed, draw.randrange(n), draw.choice([0, 1, 5, 1000]), draw.choice(["SUM", "MIN", "MAX"])
        assert call(ours, MPI, *arguments) == call(theirs, THEIRS, *arguments), arguments
    theirs.Free()


@pytest.mark.ranks(1, on=("local",))
def test_what_a_rank_sends_itself_is_not_lost(comm):
    face, first, second = wrap(comm), np.zeros(2), np.zeros(2)
    with pytest.raises(gs.InvalidArgument, match="for ever"):
        face.Recv(first, 0, 7)
    face.Send(np.full(2, 1.0), 0, 7)  # not for the receive that was refused
    face.Recv(second, 0, 7)
    assert (first.tolist(), second.tolist()) == ([0, 0], [1, 1])
    request = face.Irecv(first, 0, 8)
    face.Send(np.full(2, 3.0), 0, 8)
    request.Free()
    assert first.tolist() == [3, 3]


@pytest.mark.ranks(1, on=("local",))
def test_a_scalar_receives_nothing(comm):
    with pytest.raises(gs.InvalidArgument, match="read-only"):
        wrap(comm).Allreduce(np.float64(1), np.float64(0))
    wrap(comm).Allreduce(np.float64(1), out := np.zeros(1))
    assert out.tolist() == [1]


@pytest.mark.parametrize("code", [256, 0])
def test_abort_is_never_a_success(cli, script, code):
    path = script(f"from gradsync.mpi import MPI; MPI.COMM_WORLD.Abort({code})")
    assert cli("run", "-n", "1", path).code == 1
