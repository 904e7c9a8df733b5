"""Programs in the shapes in which public codes use mpi4py, ported to gradsync.mpi, or to gradsync itself.

Each gives what one process computes.
"""

import numpy as np
import pytest

import gradsync as gs
from arrays import arrays_of
from gradsync.mpi import MPI, wrap

pytestmark = pytest.mark.slow


class Layer:
    """One linear layer, or a tree of them: parameters() gives qualified names, as in PyTorch."""

    def __init__(self, seed, **children):
        self.weight = np.random.default_rng(seed).normal(size=(3, 3))
        self.children = children

    def parameters(self, prefix=""):
        yield f"{prefix}weight", self.weight
        for name, child in self.children.items():
            yield from child.parameters(f"{prefix}{name}.")


def gradient_of(name, weight, batch):
    return np.outer(batch.mean(0), batch.sum(0)) * len(name) + 0.1 * weight


@pytest.mark.ranks(on={"shm": (2, 4), "fake": (2,)})
def test_a_hook_for_each_parameter(comm):
    """Before: one Allreduce in each hook. After: a callback with the parameter's qualified name."""
    n, rank, face, arrays = comm.world_size, comm.rank, wrap(comm), arrays_of(comm)
    batches = np.random.default_rng(3).normal(size=(5, n, 4, 3))

    def train(reduce_step):
        model = Layer(0, encoder=Layer(1, block=Layer(2)), head=Layer(3))
        for step in range(5):
            gradients = {name: arrays.put(gradient_of(name, w, batches[step, rank])) for name, w in model.parameters()}
            reduced = reduce_step(gradients)
            for name, weight in model.parameters():
                weight -= 0.1 * arrays.get(reduced[name])
        return dict(model.parameters())

    def before(gradients):
        for gradient in reversed(gradients.values()):
            face.Allreduce(MPI.IN_PLACE, gradient)
            gradient /= n
        return gradients

    sync = gs.AllreduceCallback("mean", comm, name="model")

    def after(gradients):
        with sync.backward():
            for name, gradient in reversed(gradients.items()):
                sync(name, gradient)
        return sync.results()

    old, new = train(before), train(after)
    assert list(old) == ["weight", "encoder.weight", "encoder.block.weight", "head.weight"]
    for name in old:
        np.testing.assert_allclose(old[name], new[name], rtol=1e-13)
        assert len({array.tobytes() for array in comm.objects.all_gather(new[name])}) == 1


@pytest.mark.ranks(on={"shm": (4,), "fake": (4,)})
def test_data_parallel_times_pipeline_parallel(comm):
    """Two stages, two replicas: messages with the number of the microbatch as tag, an Allreduce for each stage."""
    face, arrays = wrap(comm), arrays_of(comm)
    stage, replica = comm.rank % 2, comm.rank // 2
    replicas = face.Split(stage, replica)
    draw = np.random.default_rng(0)
    first, last = draw.normal(size=(4, 6)), draw.normal(size=(6, 2))
    inputs, targets = draw.normal(size=(2, 3, 5, 4)), draw.normal(size=(2, 3, 5, 2))  # replica, microbatch, sample

    def alone():
        gradients = [np.zeros_like(first), np.zeros_like(last)]
        for x, y in zip(inputs.reshape(6, 5, 4), targets.reshape(6, 5, 2), strict=True):
            error = x @ first @ last - y
            gradients[0] += x.T @ (error @ last.T)
            gradients[1] += (x @ first).T @ error
        return gradients

    weight = [first, last][stage]
    gradient = np.zeros_like(weight)
    peer = comm.rank + 1 if stage == 0 else comm.rank - 1
    if stage == 0:
        hidden = [arrays.put(x @ weight) for x in inputs[replica]]
        sending = [face.Isend(each, peer, tag) for tag, each in enumerate(hidden)]
        for tag in (1, 0, 2):  # in the order in which the last stage has computed them
            back = arrays.put(np.empty((5, 6)))
            face.Recv(back, peer, tag)
            gradient += inputs[replica][tag].T @ arrays.get(back)
        MPI.Request.Waitall(sending)
    else:
        for tag in (1, 0, 2):
            room = arrays.put(np.empty((5, 6)))
            face.Recv(room, peer, tag)
            h = arrays.get(room)
            error = h @ weight - targets[replica][tag]
            gradient += h.T @ error
            face.Send(arrays.put(error @ weight.T), peer, tag)
    total = arrays.put(gradient)
    replicas.Allreduce(MPI.IN_PLACE, total)
    np.testing.assert_allclose(arrays.get(total), alone()[stage], rtol=1e-12)
    replicas.Free()


@pytest.mark.ranks(on={"shm": (2, 3), "fake": (2,)})
def test_a_linear_operator_with_complex_data(comm):
    """Conjugate gradients: each rank has some columns of a Hermitian operator, and its part of the vectors."""
    n, rank, face, arrays = comm.world_size, comm.rank, wrap(comm), arrays_of(comm)
    draw = np.random.default_rng(1)
    size = 4 * n + 1  # uneven
    factor = draw.normal(size=(size, size)) + 1j * draw.normal(size=(size, size))
    matrix, rhs = factor @ factor.conj().T + size * np.eye(size), draw.normal(size=size) + 1j * draw.normal(size=size)
    counts = [size // n + (each < size % n) for each in range(n)]
    begin = sum(counts[:rank])
    mine = slice(begin, begin + counts[rank])

    def dot(x, y):
        total = arrays.put(np.zeros(1, np.complex128))
        face.Allreduce(arrays.put(np.vdot(x, y).reshape(1)), total, MPI.SUM)
        return complex(arrays.get(total)[0])

    def apply(x):
        result = arrays.put(np.zeros(counts[rank], np.complex128))
        face.Reduce_scatter([arrays.put(matrix[:, mine] @ x), MPI.C_DOUBLE_COMPLEX], result, counts, MPI.SUM)
        return arrays.get(result)

    x, residual = np.zeros_like(rhs[mine]), rhs[mine]
    direction = residual
    rho = dot(residual, residual)
    for _ in range(3 * size):
        image = apply(direction)
        alpha = rho / dot(direction, image)
        x, residual = x + alpha * direction, residual - alpha * image
        rho, old = dot(residual, residual), rho
        if abs(rho) < 1e-24:
            break
        direction = residual + (rho / old) * direction
    whole = arrays.put(np.zeros(size, np.complex128))
    face.Allgatherv(arrays.put(x), [whole, counts, MPI.C_DOUBLE_COMPLEX])
    np.testing.assert_allclose(arrays.get(whole), np.linalg.solve(matrix, rhs), rtol=1e-9)


@pytest.mark.ranks(on={"shm": (2, 3), "fake": (2,)})
def test_rank_weights(comm):
    """Before: the sums of n * g and of n. After: backward(weight=n). A rank may have no samples."""
    rank, face, arrays = comm.rank, wrap(comm), arrays_of(comm)
    sync = gs.AllreduceCallback("mean", comm, name="weighted")
    draw = np.random.default_rng(5)
    for step in range(4):
        sizes = [(3 * each + step) % 5 for each in range(comm.world_size)]
        batches = [draw.normal(size=(size, 7)) for size in sizes]
        gradient = batches[rank].mean(0) if sizes[rank] else np.zeros(7)
        total = arrays.put(sizes[rank] * gradient)
        face.Allreduce(MPI.IN_PLACE, total)
        before = arrays.get(total) / face.allreduce(sizes[rank])
        with sync.backward(weight=sizes[rank]):
            future = sync("w", arrays.put(gradient))
        wanted = np.concatenate(batches).mean(0)
        np.testing.assert_allclose(before, wanted, rtol=1e-12)
        np.testing.assert_allclose(arrays.get(future.result()), wanted, rtol=1e-12)


@pytest.mark.ranks(on={"shm": (2, 4)})
def test_workers_compute_until_they_are_told_to_exit(comm):
    """Rank 0 runs an optimiser, whose function all ranks compute; it does not know how often it is called."""
    face = wrap(comm)
    targets = np.random.default_rng(2).normal(size=(10, 3))
    mine = targets[comm.rank :: comm.world_size]

    def value_and_gradient(x):
        value = np.array([((x - mine) ** 2).sum()])
        gradient = 2 * (x - mine).sum(0)
        total, total_gradient = np.empty(1), np.empty(3)
        face.Reduce(value, total, MPI.SUM, 0)
        face.Reduce(gradient, total_gradient, MPI.SUM, 0)
        return total[0], total_gradient

    if comm.rank:
        calls = 0
        while face.bcast(None) == "compute":
            x = np.empty(3)
            face.Bcast(x, 0)
            value_and_gradient(x)
            calls += 1
    else:
        x, calls, gradient = np.zeros(3), 0, np.ones(3)
        while np.abs(gradient).max() > 1e-8:
            face.bcast("compute")
            face.Bcast(x, 0)
            _, gradient = value_and_gradient(x)
            x = x - 0.02 * gradient
            calls += 1
        face.bcast("exit")
        np.testing.assert_allclose(x, targets.mean(0), atol=1e-8)
    assert len(set(face.allgather(calls))) == 1


@pytest.mark.ranks(on={"shm": (2, 3, 4), "fake": (2, 3)})
@pytest.mark.parametrize("way", ["Sendrecv", "Waitall", "each Wait"])
def test_a_halo_exchange_with_open_ends(comm, way):
    """The heat equation on a rod; each rank has a part of it, and a cell of each neighbour. PROC_NULL at the ends."""
    n, rank, face, arrays = comm.world_size, comm.rank, wrap(comm), arrays_of(comm)
    left = rank - 1 if rank > 0 else MPI.PROC_NULL
    right = rank + 1 if rank < n - 1 else MPI.PROC_NULL
    whole = np.random.default_rng(4).normal(size=(8 * n + 2, 3))
    rod = arrays.put(whole[8 * rank : 8 * rank + 10])
    for _ in range(20):
        if way == "Sendrecv":
            face.Sendrecv(rod[-2], right, 1, rod[0], left, 1)
            face.Sendrecv(rod[1], left, 2, rod[-1], right, 2)
        else:
            requests = [face.Isend(rod[-2], right, 1), face.Isend(rod[1], left, 2)]
            requests += [face.Irecv(rod[-1], right, 2), face.Irecv(rod[0], left, 1)]
            if way == "Waitall":
                MPI.Request.Waitall(requests)
            else:
                for request in requests:
                    request.Wait()
        rod[1:-1] += 0.1 * (rod[2:] - 2 * rod[1:-1] + rod[:-2])
        whole[1:-1] += 0.1 * (whole[2:] - 2 * whole[1:-1] + whole[:-2])
    parts = arrays.put(np.zeros((8 * n, 3)))
    face.Allgather(rod[1:-1], parts)
    np.testing.assert_allclose(arrays.get(parts), whole[1:-1], rtol=1e-12)
