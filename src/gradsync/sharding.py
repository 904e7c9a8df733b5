"""Divides the samples of a data set among the ranks, without communication."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gradsync.arguments import integer_of
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.world import get_world, group_or_world
from gradsync.errors import InvalidArgument

_UNEVEN = ("pad", "drop", "keep")
_MAX_SAMPLES = 2**59  # an array cannot hold the order of more


def shard_indices(
    n: int,
    epoch: int = 0,
    seed: int = 0,
    *,
    shuffle: bool = True,
    uneven: str = "pad",
    communicator: Communicator | None = None,
) -> npt.NDArray[np.int64]:
    """Returns this rank's sample indices of an epoch. It does not communicate, and works before init_process_group().

    Rank r gets every world_size-th sample of a common order, from the r-th on; so the ranks together have every sample.
    The order depends only on `n`, `seed` and `epoch`: it is the same for any number of ranks and any version of NumPy.

    Args:
        n: number of samples in the data set; may be less than the number of ranks.
        epoch: the epoch, 0 or more; each epoch has its own order.
        seed: the training's seed, 0 or more; the same on all ranks.
        shuffle: False keeps the data set's own order.
        uneven: if `n` is not a multiple of the number of ranks: "pad" repeats samples from the beginning of the order;
            "drop" leaves out the last samples; "keep" gives the first ranks one sample more (see
            AllreduceCallback.join).
        communicator: None is the world's; before init_process_group() a world of one.

    Returns:
        The indices, 1-D int64, in the order of use. Ranks share no index, but for padding.

    Raises:
        InvalidArgument: not an integer of 0 or more, too large, or an unknown word for `uneven`.

    Source: the division of torch.utils.data.DistributedSampler.
    """
    n, epoch, seed = _natural("n", n), _natural("epoch", epoch), _natural("seed", seed)
    if n > _MAX_SAMPLES:
        raise InvalidArgument(f"shard_indices needs n of at most {_MAX_SAMPLES}, got {n}")
    if uneven not in _UNEVEN:
        raise InvalidArgument(f"shard_indices needs uneven to be one of {', '.join(_UNEVEN)}, got {uneven!r}")
    rank, world_size = _place(communicator)
    order = _shuffled(n, epoch, seed) if shuffle else np.arange(n, dtype=np.int64)
    if uneven == "pad":
        order = np.resize(order, -(-n // world_size) * world_size)
    elif uneven == "drop":
        order = order[: n // world_size * world_size]
    mine: npt.NDArray[np.int64] = order[rank::world_size].copy()  # the order of all samples need not stay in memory
    return mine


def _shuffled(n: int, epoch: int, seed: int) -> npt.NDArray[np.int64]:
    """Returns a permutation from random bits: NumPy never changes those, but may change Generator.permutation().

    Source: NumPy's NEP 19, "Random number generator policy".
    """
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(n)
    order: npt.NDArray[np.int64] = np.argsort(keys, kind="stable").astype(np.int64, copy=False)
    return order


def _natural(name: str, value: int) -> int:
    number = integer_of(value)
    if number is None or number < 0:
        raise InvalidArgument(f"shard_indices needs {name} to be an integer of 0 or more, got {value!r}")
    return number


def _place(communicator: Communicator | None) -> tuple[int, int]:
    """Returns this process's rank, and the number of ranks."""
    if communicator is None and get_world() is None:
        return 0, 1
    communicator = group_or_world(communicator, "shard_indices", "communicator")
    return communicator.rank, communicator.world_size
