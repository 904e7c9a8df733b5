"""Which samples of a data set are whose: the same answer on every rank, without a word between them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gradsync.arguments import integer_of
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.world import get_world, group_or_world
from gradsync.errors import InvalidArgument

_UNEVEN = ("pad", "drop", "keep")
_MOST_SAMPLES = 2**59  # no array could hold the order of more


def shard_indices(
    n: int,
    epoch: int = 0,
    seed: int = 0,
    *,
    shuffle: bool = True,
    uneven: str = "pad",
    communicator: Communicator | None = None,
) -> npt.NDArray[np.int64]:
    """Returns which of `n` samples are this rank's in an epoch. Asks no other rank, and works before any is met.

    Together the ranks have every sample: rank r takes each world_size-th one of a common order, from the r-th on. The
    order depends on `n`, `seed` and `epoch` alone; it is the same for any number of ranks, and in any version of NumPy.

    Args:
        n: samples in the data set; may be less than the number of ranks.
        epoch: gives each epoch an order of its own; 0 or more.
        seed: gives each training an order of its own; 0 or more. The same on all ranks.
        shuffle: False keeps the data set's own order.
        uneven: where the ranks do not divide `n`: "pad" repeats samples from the beginning of the order until they
            do; "drop" leaves out the last of the order; "keep" gives the first ranks one more (see
            AllreduceCallback.join).
        communicator: None is the world's; a world of one where nothing is initialised.

    Returns:
        The indices, int64, in the order in which they are to be used. No two ranks share one, but for padding.

    Raises:
        InvalidArgument: a number below 0, too large or none at all, or another word for `uneven`.

    Source: dealt out as by torch.utils.data.DistributedSampler.
    """
    n, epoch, seed = _natural("n", n), _natural("epoch", epoch), _natural("seed", seed)
    if n > _MOST_SAMPLES:
        raise InvalidArgument(f"shard_indices: n must be at most {_MOST_SAMPLES}, got {n}")
    if uneven not in _UNEVEN:
        raise InvalidArgument(f"shard_indices: uneven must be one of {', '.join(_UNEVEN)}, got {uneven!r}")
    rank, world_size = _place(communicator)
    order = _shuffled(n, epoch, seed) if shuffle else np.arange(n, dtype=np.int64)
    if uneven == "pad":
        order = np.resize(order, -(-n // world_size) * world_size)
    elif uneven == "drop":
        order = order[: n // world_size * world_size]
    mine: npt.NDArray[np.int64] = order[rank::world_size].copy()  # the order of all samples need not stay in memory
    return mine


def _shuffled(n: int, epoch: int, seed: int) -> npt.NDArray[np.int64]:
    """Returns a permutation made from random bits: NumPy promises those for ever, Generator.permutation() it does not.

    Source: NumPy's NEP 19, "Random number generator policy".
    """
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(n)
    order: npt.NDArray[np.int64] = np.argsort(keys, kind="stable").astype(np.int64, copy=False)
    return order


def _natural(name: str, value: int) -> int:
    number = integer_of(value)
    if number is None or number < 0:
        raise InvalidArgument(f"shard_indices: {name} must be an integer of 0 or more, got {value!r}")
    return number


def _place(communicator: Communicator | None) -> tuple[int, int]:
    """Returns this process's rank, and the number of ranks."""
    if communicator is None and get_world() is None:
        return 0, 1
    communicator = group_or_world(communicator, "shard_indices", "communicator")
    return communicator.rank, communicator.world_size
