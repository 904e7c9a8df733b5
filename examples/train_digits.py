"""Train a digit classifier: a whole training with data, network, optimiser and report, on NumPy or CuPy.

    gradsync run -n 2 examples/train_digits.py        # two ranks
    python examples/train_digits.py                   # the same script in one process
    mpiexec -n 2 python examples/train_digits.py      # under MPI: on one machine over shared memory, else over MPI

The data are scikit-learn's handwritten digits: 1,797 scans of 8 x 8 pixels, part of its installation. Comments number
the calls of gradsync from (1) to (6). The network is in digits_network.py. Arrays are CuPy's where each rank has a GPU,
and NumPy's elsewhere.
"""

import argparse
import importlib
import sys
import time
from dataclasses import dataclass, field

import numpy as np

import gradsync as gs
from digits_network import Network


@dataclass
class Settings:
    epochs: int = 30
    global_batch: int = 48  # images in a step, over all ranks: 1, 2, 3, 4, 6, 8, 12 or 16 ranks divide it
    learning_rate: float = 0.08  # falls linearly to zero
    momentum: float = 0.9
    threshold_bytes: int = 20 * 1024  # small, so that this small network fills three buckets
    dtype: str = "float32"
    seed: int = 0
    quiet: bool = False


@dataclass
class Result:
    """The same on all ranks, but for the times."""

    parameters: dict
    steps: int = 0
    accuracies: list = field(default_factory=list)  # on the test set, after each epoch
    seconds: float = 0.0
    statistics: object = None  # of the callback


# -- The data: images of shape (count, 8, 8, 1) with values from 0 to 1, and labels from 0 to 9 ------------------------


def load_data(settings):
    """Returns images and labels for training, and those for the test: of each digit one image in five."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("the digits are part of scikit-learn: pip install scikit-learn")
    digits = load_digits()
    images, labels = (digits.images[..., np.newaxis] / 16).astype(settings.dtype), digits.target
    rng = np.random.default_rng(settings.seed)
    is_test = np.zeros(len(labels), bool)
    for digit in range(10):
        members = rng.permutation(np.flatnonzero(labels == digit))
        is_test[members[: len(members) // 5]] = True
    return (images[~is_test], labels[~is_test]), (images[is_test], labels[is_test])


def batches(images, labels, size, rng):
    """Yields the batches of one epoch: shuffled, with each image shifted by at most one pixel in each direction.

    Every rank draws the same numbers, so all have the same batches, and each takes its share. The images of a last
    batch that is not full are left out.
    """
    padded = np.pad(images[..., 0], ((0, 0), (1, 1), (1, 1)))
    shifted = np.lib.stride_tricks.sliding_window_view(padded, (8, 8), axis=(1, 2))  # [image, down, right]
    order = rng.permutation(len(labels))
    down, right = rng.integers(0, 3, (2, len(order)))
    for begin in range(0, len(order) - size + 1, size):
        step = slice(begin, begin + size)
        yield shifted[order[step], down[step], right[step], :, :, np.newaxis], labels[order[step]]


def share_of(comm, xp, images, labels):
    """Returns this rank's part of what all ranks hold, on the rank's device."""
    mine = slice(comm.rank, None, comm.world_size)
    return xp.asarray(images[mine]), xp.asarray(labels[mine])


# -- The training ------------------------------------------------------------------------------------------------------


class MomentumSGD:
    """Stochastic gradient descent with momentum."""

    def __init__(self, parameters, momentum):
        self.parameters, self.momentum = parameters, momentum
        self.velocities = {name: parameter * 0 for name, parameter in parameters.items()}

    def step(self, gradients, learning_rate):
        for name, gradient in gradients.items():
            velocity = self.velocities[name]
            velocity *= self.momentum
            velocity += gradient
            self.parameters[name] -= learning_rate * velocity


def train(comm, settings, on_step=None):
    """Trains on this rank's share of every batch. Every rank must call it with the same settings.

    `on_step` is called in each step with the network, the whole batch and the reduced gradients.
    """
    xp = importlib.import_module("numpy" if comm.device == "cpu" else "cupy")
    train_set, test_set = load_data(settings)
    steps_per_epoch = len(train_set[0]) // settings.global_batch
    if settings.global_batch % comm.world_size:  # unequal shares would need backward(weight=)
        sys.exit(f"--global-batch needs a multiple of the {comm.world_size} ranks, got {settings.global_batch}")

    # (1) Each rank begins with other values, and takes those of rank 0.
    network = Network(xp, settings.dtype, seed=settings.seed + comm.rank)
    gs.bcast_list_(list(network.parameters.values()), root=0, communicator=comm)

    # (2) The callback averages all gradients over the ranks, in buckets. With the parameters, in the order of the
    # backward pass, a GPU reduces a bucket as soon as it is complete.
    in_backward_order = dict(reversed(network.parameters.items()))
    sync = gs.AllreduceCallback("mean", comm, parameters=in_backward_order, threshold_bytes=settings.threshold_bytes)

    optimiser = MomentumSGD(network.parameters, settings.momentum)
    rng = np.random.default_rng(settings.seed)
    result = Result(network.parameters)
    began = time.monotonic()
    for epoch in range(1, settings.epochs + 1):
        for batch in batches(*train_set, settings.global_batch, rng):
            images, labels = share_of(comm, xp, *batch)
            logits = network.forward(images)
            with sync.backward():  # (3) When this block ends, every gradient is reduced.
                for name, gradient in network.backward(logits, labels):
                    sync(name, gradient)
            if on_step is not None:
                on_step(network, batch, sync.results())
            progress = result.steps / (settings.epochs * steps_per_epoch)
            optimiser.step(sync.results(), settings.learning_rate * (1 - progress))
            result.steps += 1
        result.accuracies.append(accuracy_on(test_set, comm, network))
        if comm.rank == 0 and not settings.quiet and (epoch % 5 == 0 or epoch == settings.epochs):
            print(f"epoch {epoch:2} of {settings.epochs}: test accuracy {result.accuracies[-1]:.2%}", flush=True)
    result.seconds, result.statistics = time.monotonic() - began, sync.statistics
    gs.check_consistency(network.parameters, comm)  # (4) Raises an error if the ranks differ, even by one bit.
    return result


def accuracy_on(test_set, comm, network):
    """Returns the share of right answers. Each rank computes its part of the set."""
    images, labels = share_of(comm, network.xp, *test_set)
    right = (network.forward(images).argmax(axis=1) == labels).sum(keepdims=True)
    return int(comm.all_reduce(right, "sum")[0]) / len(test_set[1])  # (5) Any array can be all-reduced.


# -- The report, and the command line ----------------------------------------------------------------------------------


def print_summary(comm, result):
    statistics = result.statistics
    elements = sum(parameter.size for parameter in result.parameters.values())
    # On a GPU the reductions run beside the host, which only launches them.
    included = "waiting for other ranks included" if comm.device == "cpu" else "for launching only"
    rows = {
        "ranks": f"{comm.world_size}",
        "backend": f"{comm.backend}, on {comm.device}",
        "parameters": f"{elements:,} in {len(result.parameters)} arrays, identical on all ranks",
        "steps": f"{result.steps} in {result.seconds:.1f} s",
        "buckets": f"{statistics.all_reduces / result.steps:g} all-reduces a step",
        "bytes all-reduced": f"{statistics.bytes_all_reduced:,} on each rank",
        "time in communication": f"{statistics.communication_seconds / result.seconds:.1%}, {included}",
        "test accuracy": f"{result.accuracies[-1]:.2%}",
    }
    print(*[f"{label:21}  {value}" for label, value in rows.items()], sep="\n", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=Settings.epochs, help="passes over the data")
    parser.add_argument("--global-batch", type=int, default=Settings.global_batch, help="images in a step, in all")
    parser.add_argument("--backend", default="auto" if gs.is_launched() else "local", help="auto, nccl, shm or mpi")
    options = parser.parse_args()
    with gs.init_process_group(options.backend) as comm:  # (6) The launcher's variables tell which rank this is.
        result = train(comm, Settings(options.epochs, options.global_batch))
        if comm.rank == 0:
            print_summary(comm, result)
