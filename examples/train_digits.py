"""Train a digit classifier on several ranks, with gradsync between the backward pass and the optimiser.

    gradsync run -n 2 examples/train_digits.py        # two ranks
    python examples/train_digits.py                   # the same script in one process
    mpiexec -n 2 python examples/train_digits.py      # under MPI: on one machine over shared memory, else over MPI

The data are the handwritten digits of scikit-learn: 1,797 scans of 8 x 8 pixels, part of its installation. Read
from the top: the data, the optimiser, the training loop, the report. Comments number the gradsync calls from (1) to
(5). The network is in digits_network.py. The script uses CuPy arrays if the communicator uses GPUs, and NumPy arrays
otherwise. gradsync uses GPUs if it finds one for each rank, or with --backend nccl.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

import gradsync as gs
from digits_network import Array, Network


@dataclass(frozen=True)
class Settings:
    """The settings of a training, without the number of ranks."""

    epochs: int = 30
    global_batch: int = 48  # images in a step, over all ranks: 1, 2, 3, 4, 6, 8, 12 or 16 ranks divide it
    learning_rate: float = 0.08  # falls linearly to zero
    momentum: float = 0.9
    threshold_bytes: int = 20 * 1024  # small, so that this small network fills three buckets
    dtype: str = "float32"
    seed: int = 0
    quiet: bool = False


# -- The data ------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """Images of shape (count, 8, 8, 1) with values 0 to 1, and their labels 0 to 9."""

    images: Array
    labels: Array


def load_data(seed: int, dtype: str) -> tuple[Batch, Batch]:
    """Returns the training and the test set: of each digit, one image in five is for the test."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("the digits are part of scikit-learn: pip install scikit-learn")
    digits = load_digits()
    images, labels = (digits.images[..., np.newaxis] / 16).astype(dtype), digits.target
    rng = np.random.default_rng(seed)
    is_test = np.zeros(len(labels), bool)
    for digit in range(10):
        members = rng.permutation(np.flatnonzero(labels == digit))
        is_test[members[: len(members) // 5]] = True
    return Batch(images[~is_test], labels[~is_test]), Batch(images[is_test], labels[is_test])


def global_batches(train_set: Batch, size: int, rng: np.random.Generator) -> Iterator[Batch]:
    """Yields the batches of one epoch: shuffled, with each image shifted by at most one pixel in each direction.

    Every rank draws the same numbers, so all ranks have the same batches. If the last batch is not full, the epoch
    leaves out its images.
    """
    padded = np.pad(train_set.images[..., 0], ((0, 0), (1, 1), (1, 1)))
    shifted = np.lib.stride_tricks.sliding_window_view(padded, (8, 8), axis=(1, 2))  # [image, down, right]
    order = rng.permutation(len(train_set.labels))
    down, right = rng.integers(0, 3, (2, len(order)))
    for begin in range(0, len(order) - size + 1, size):
        of_step = slice(begin, begin + size)
        images = shifted[order[of_step], down[of_step], right[of_step], :, :, np.newaxis]
        yield Batch(images, train_set.labels[order[of_step]])


def share_of(comm: gs.Communicator, xp: Any, batch: Batch) -> Batch:
    """Returns this rank's part of a batch that all ranks hold, on the rank's device."""
    mine = slice(comm.rank, None, comm.world_size)
    return Batch(xp.asarray(batch.images[mine]), xp.asarray(batch.labels[mine]))


# -- The optimiser -------------------------------------------------------------------------------------------


class MomentumSGD:
    """Stochastic gradient descent with momentum."""

    def __init__(self, parameters: dict[str, Array], momentum: float) -> None:
        self.parameters, self.momentum = parameters, momentum
        self.velocities = {name: parameter * 0 for name, parameter in parameters.items()}

    def step(self, gradients: dict[str, Array], learning_rate: float) -> None:
        """Updates every parameter in place."""
        for name, gradient in gradients.items():
            velocity = self.velocities[name]
            velocity *= self.momentum
            velocity += gradient
            self.parameters[name] -= learning_rate * velocity


# -- The training loop ---------------------------------------------------------------------------------------


@dataclass
class Result:
    """The result of a training on one rank. All values except the times are the same on all ranks."""

    parameters: dict[str, Array]
    identical: bool = False  # whether the parameters have the same bits on all ranks
    steps: int = 0
    accuracies: list[float] = field(default_factory=list)  # on the test set, after each epoch
    seconds: float = 0.0
    statistics: Any = None  # of the callback: all_reduces, bytes_all_reduced, communication_seconds


def train(
    comm: gs.Communicator,
    settings: Settings,
    on_step: Callable[[Network, Batch, dict[str, Array]], None] | None = None,
) -> Result:
    """Trains on this rank's share of every batch. Every rank must call it with the same settings.

    Args:
        comm: the ranks that train together.
        settings: the settings of the training.
        on_step: a function to call in each step with the network, the global batch and the reduced gradients.

    Raises:
        InvalidArgument: the ranks cannot share a global batch equally.
    """
    xp = importlib.import_module("numpy" if comm.device == "cpu" else "cupy")
    train_set, test_set = load_data(settings.seed, settings.dtype)
    steps_per_epoch = len(train_set.labels) // settings.global_batch
    if settings.global_batch % comm.world_size or not steps_per_epoch:
        # The mean over the ranks is the mean over the batch only if all ranks have equal shares.
        shares = max(1, min(settings.global_batch, len(train_set.labels)) // comm.world_size)
        raise gs.InvalidArgument(
            f"{comm.label}: the global batch must be a multiple of the {comm.world_size} ranks, and at most "
            f"{len(train_set.labels)} images, got {settings.global_batch}; "
            f"--global-batch {shares * comm.world_size} fits"
        )

    # (1) Each rank begins with different values. All ranks take the values of rank 0.
    network = Network(xp, settings.dtype, seed=settings.seed + comm.rank)
    gs.bcast_list_(list(network.parameters.values()), root=0, communicator=comm)

    # (2) The callback takes every gradient, and averages all of them over the ranks, in buckets. With the parameters,
    # in the order of the backward pass, a GPU reduces a bucket as soon as it is complete.
    in_backward_order = dict(reversed(network.parameters.items()))
    sync = gs.AllreduceCallback("mean", comm, parameters=in_backward_order, threshold_bytes=settings.threshold_bytes)

    optimiser = MomentumSGD(network.parameters, settings.momentum)
    rng = np.random.default_rng(settings.seed)
    result = Result(network.parameters)
    began = time.monotonic()
    for _ in range(settings.epochs):
        for batch in global_batches(train_set, settings.global_batch, rng):
            share = share_of(comm, xp, batch)
            logits = network.forward(share.images)
            with sync.backward():  # (3) When this block ends, every gradient is reduced.
                for name, gradient in network.backward(logits, share.labels):
                    sync(name, gradient)
            if on_step is not None:
                on_step(network, batch, sync.results())
            progress = result.steps / (settings.epochs * steps_per_epoch)
            optimiser.step(sync.results(), settings.learning_rate * (1 - progress))
            result.steps += 1
        result.accuracies.append(accuracy_on(test_set, comm, network))
        print_epoch(comm, settings, result.accuracies)
    result.seconds = time.monotonic() - began
    result.statistics = sync.statistics
    result.identical = same_bits_on_all_ranks(comm, network)
    return result


def accuracy_on(test_set: Batch, comm: gs.Communicator, network: Network) -> float:
    """Returns the share of right answers. Each rank computes its part of the set."""
    share = share_of(comm, network.xp, test_set)
    right = (network.forward(share.images).argmax(axis=1) == share.labels).sum(keepdims=True)
    return int(comm.all_reduce(right, "sum")[0]) / len(test_set.labels)  # (4) Any array can be all-reduced.


def same_bits_on_all_ranks(comm: gs.Communicator, network: Network) -> bool:
    """Compares the parameters of all ranks as integers, so that even the sign of a zero must be equal."""
    values = network.xp.concatenate([parameter.ravel() for parameter in network.parameters.values()])
    bits = values.view(f"uint{8 * values.itemsize}")
    lowest, highest = comm.all_reduce(bits.copy(), "min"), comm.all_reduce(bits.copy(), "max")
    return bool((lowest == highest).all())


# -- The report, and the command line ------------------------------------------------------------------------


def print_epoch(comm: gs.Communicator, settings: Settings, accuracies: list[float]) -> None:
    """Prints the test accuracy of every fifth epoch and of the last epoch, on rank 0 only."""
    done = len(accuracies)
    if comm.rank == 0 and not settings.quiet and (done % 5 == 0 or done == settings.epochs):
        print(f"epoch {done:2} of {settings.epochs}: test accuracy {accuracies[-1]:.2%}", flush=True)


def print_summary(comm: gs.Communicator, result: Result) -> None:
    """Prints the last table."""
    statistics = result.statistics
    elements = sum(parameter.size for parameter in result.parameters.values())
    # On a GPU the reductions run in parallel with the host, which only launches them.
    included = "waiting for other ranks included" if comm.device == "cpu" else "for launching only"
    rows = {
        "ranks": f"{comm.world_size}",
        "backend": f"{comm.backend}, on {comm.device}",
        "parameters": f"{elements:,} in {len(result.parameters)} arrays",
        "steps": f"{result.steps} in {result.seconds:.1f} s",
        "buckets": f"{statistics.all_reduces / result.steps:g} all-reduces a step",
        "bytes all-reduced": f"{statistics.bytes_all_reduced:,} on each rank",
        "time in communication": f"{statistics.communication_seconds / result.seconds:.1%}, {included}",
        "parameters on all ranks": "identical" if result.identical else "DIFFERENT",
        "test accuracy": f"{result.accuracies[-1]:.2%}",
    }
    width = max(map(len, rows))
    lines = [f"{label:{width}}  {value}" for label, value in rows.items()]
    print(*lines, sep="\n", flush=True)


def positive(text: str) -> int:
    """Reads an integer of at least 1."""
    try:
        if (number := int(text)) >= 1:
            return number
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"needs an integer of at least 1, got {text!r}")


def main() -> int:
    """Runs one rank. Returns its exit code: 1 if the ranks end with different parameters."""
    parser = argparse.ArgumentParser(
        description="Train a digit classifier with gradsync.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, backend = parser.add_argument, "auto" if gs.is_launched() else "local"
    add("--epochs", type=positive, default=Settings.epochs, help="passes over the data")
    add("--global-batch", type=positive, default=Settings.global_batch, help="images in each step, over all ranks")
    add("--threshold-bytes", type=positive, default=Settings.threshold_bytes, help="maximum size of a bucket")
    add("--dtype", choices=("float32", "float64"), default=Settings.dtype, help="dtype of all arrays")
    add("--seed", type=int, default=Settings.seed, help="seed of all random numbers")
    add("--backend", default=backend, help="auto, nccl, shm, mpi or local; in one process, local")
    add("--quiet", action="store_true", default=argparse.SUPPRESS, help="print only the last table")
    options = vars(parser.parse_args())
    with gs.init_process_group(options.pop("backend")) as comm:  # (5) Environment variables name the rank.
        result = train(comm, Settings(**options))
        if comm.rank == 0:
            print_summary(comm, result)
    return 0 if result.identical else 1


if __name__ == "__main__":
    sys.exit(main())
