"""Divides the samples of a data set among the ranks, without communication."""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import numpy.typing as npt

from gradsync.arguments import check_integer
from gradsync.communicators.communicator import Communicator
from gradsync.communicators.world import get_world, group_or_world, refuse_alone
from gradsync.errors import InvalidArgument
from gradsync.words import refuse_keywords

_UNEVEN = ("pad", "drop", "keep")
_MAX_SAMPLES = 2**59  # an array cannot hold the indices of more samples


def shard_indices(
    n: int,
    epoch: int = 0,
    seed: int = 0,
    *,
    shuffle: bool = True,
    uneven: str = "pad",
    shards: int | None = None,
    communicator: Communicator | None = None,
    **foreign: NoReturn,  # so that type checkers refuse misspelt arguments
) -> npt.NDArray[np.int64]:
    """Returns the indices of this rank's samples in an epoch, without communication.

    All ranks put the samples into the same order. Rank r gets the samples at positions r, r + world_size, r + 2 *
    world_size and so on. Together the ranks have every sample, except with uneven="drop". The order depends only on
    `n`, `seed`, `epoch` and `shuffle`: it is the same for any number of ranks and any version of NumPy.

    With shards=48 they are dealt to 48 shards, however many ranks there are, and the shards to the ranks. A loop that
    takes one sample of each shard in a step has the same samples in each step on any number of ranks:

        for batch in gs.shard_indices(n, epoch, shards=48, uneven="drop").reshape(n // 48, -1): ...

    If ranks die or come back in the middle of an epoch, call it again, and go on in the step in which the last world
    stopped (see examples/survive.py).

    Args:
        n: the number of samples in the data set. There may be fewer samples than ranks.
        epoch: the number of the epoch, 0 or more. With `shuffle`, each epoch has its own order.
        seed: the training's seed, 0 or more; the same on all ranks.
        shuffle: whether to shuffle the samples. False keeps the order of the data set.
        uneven: the rule for an `n` that is not a multiple of the number of shards, which without `shards` is the number
            of ranks. "pad" repeats samples from the beginning of the order, "drop" leaves out the last samples, and
            "keep" gives the first shards one sample more (see examples/uneven_batches.py).
        shards: a fixed number of shards, at least as many as ranks; rank r has the shards r, r + world_size and so on.
            If it is no multiple of the number of ranks, the first ranks have one shard more: pass weight=len(batch) to
            backward(). None makes one shard for each rank.
        communicator: the communicator of the ranks. None means the world communicator; without a launcher and before
            init_process_group() a world of one rank.

    Returns:
        The indices in the order of use, as a 1-D int64 array. Two ranks have the same index only because of padding.

    Raises:
        InvalidArgument: a number is not an integer of at least 0, `n` is too large, `uneven` is not one of its three
            values, there are fewer shards than ranks, or `communicator` is not a communicator.

    Source: torch.utils.data.DistributedSampler divides the samples in the same way.
    """
    if foreign:
        from inspect import signature  # imported here: only errors need it

        refuse_keywords("shard_indices", foreign, signature(shard_indices).parameters)
    given = {"n": n, "epoch": epoch, "seed": seed}
    n, epoch, seed = [check_integer("shard_indices", name, value, 0) for name, value in given.items()]
    if n > _MAX_SAMPLES:
        raise InvalidArgument(f"shard_indices needs n of at most {_MAX_SAMPLES}, got {n}")
    if uneven not in _UNEVEN:
        raise InvalidArgument(f"shard_indices needs uneven to be one of {', '.join(_UNEVEN)}, got {uneven!r}")
    rank, world_size = _place(communicator)
    if shards is None:
        shards = world_size
    else:
        shards = check_integer(f"shard_indices on {world_size} ranks", "shards", shards, world_size, _MAX_SAMPLES)
    order = _shuffled(n, epoch, seed) if shuffle else np.arange(n, dtype=np.int64)
    if uneven == "pad":
        order = np.resize(order, -(-n // shards) * shards)
    elif uneven == "drop":
        order = order[: n // shards * shards]
    mine: npt.NDArray[np.int64] = order[np.arange(len(order)) % shards % world_size == rank]
    return mine


def _shuffled(n: int, epoch: int, seed: int) -> npt.NDArray[np.int64]:
    """Returns a random permutation, made from the bits of PCG64, which NumPy never changes.

    Source: NumPy's NEP 19, "Random number generator policy".
    """
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(n)
    order: npt.NDArray[np.int64] = np.argsort(keys, kind="stable").astype(np.int64, copy=False)
    return order


def _place(communicator: Communicator | None) -> tuple[int, int]:
    """Returns this process's rank and the number of ranks."""
    if communicator is None and get_world() is None:
        refuse_alone("shard_indices", "give every rank all samples")
        return 0, 1
    communicator = group_or_world(communicator, "shard_indices", "communicator")
    return communicator.rank, communicator.world_size
