"""shard_indices: every sample once, whatever the numbers, and the same order everywhere."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradsync as gs
from gradsync.communicators.local import LocalBackend
from places import SHM


class Place(gs.Communicator):
    """A communicator that only says where it is."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(LocalBackend())
        self.rank, self.world_size = rank, world_size


def shards(n: int, world_size: int, **options: Any) -> list[np.ndarray[Any, Any]]:
    return [gs.shard_indices(n, communicator=Place(rank, world_size), **options) for rank in range(world_size)]


@given(
    n=st.integers(0, 200),
    world_size=st.integers(1, 9),
    epoch=st.integers(0, 2**40),
    seed=st.integers(0, 2**70),
    shuffle=st.booleans(),
)
def test_every_sample_is_dealt_out(n: int, world_size: int, epoch: int, seed: int, shuffle: bool) -> None:
    options: dict[str, Any] = {"epoch": epoch, "seed": seed, "shuffle": shuffle}
    kept = shards(n, world_size, uneven="keep", **options)
    assert all(shard.dtype == np.int64 and shard.ndim == 1 for shard in kept)
    assert sorted(np.concatenate(kept)) == list(range(n))
    sizes = [len(shard) for shard in kept]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    dropped = shards(n, world_size, uneven="drop", **options)
    assert [shard.tolist() for shard in dropped] == [shard[: n // world_size].tolist() for shard in kept]
    padded = shards(n, world_size, **options)
    assert {len(shard) for shard in padded} == {-(-n // world_size)}
    assert set(np.concatenate(padded).tolist()) == set(range(n))
    for shard, whole in zip(kept, padded, strict=True):
        assert whole[: len(shard)].tolist() == shard.tolist()


def test_padding_repeats_the_order_from_its_beginning() -> None:
    assert [s.tolist() for s in shards(3, 8, shuffle=False)] == [[0], [1], [2], [0], [1], [2], [0], [1]]
    assert [s.tolist() for s in shards(5, 2, shuffle=False)] == [[0, 2, 4], [1, 3, 0]]
    assert [s.tolist() for s in shards(5, 2, shuffle=False, uneven="drop")] == [[0, 2], [1, 3]]
    assert [s.tolist() for s in shards(5, 2, shuffle=False, uneven="keep")] == [[0, 2, 4], [1, 3]]


def test_the_order_is_the_same_in_every_version() -> None:
    """What a training has seen must not depend on who takes it up again, and where."""
    assert shards(10, 1, seed=3, epoch=1)[0].tolist() == PINNED
    one, another = shards(10, 1, seed=3, epoch=2)[0], shards(10, 1, seed=4, epoch=1)[0]
    assert len({tuple(order) for order in (PINNED, one, another, range(10))}) == 4


PINNED = [0, 6, 2, 1, 3, 7, 4, 9, 8, 5]


def test_no_place_is_preferred() -> None:
    """Each sample comes first about as often as any other."""
    first = [gs.shard_indices(8, epoch)[0] for epoch in range(4000)]
    counts = np.bincount(first, minlength=8)
    assert (abs(counts - 500) < 110).all()  # five standard deviations


def test_without_a_process_group_one_rank_has_all() -> None:
    assert not gs.is_initialized()
    assert gs.shard_indices(4, shuffle=False).tolist() == [0, 1, 2, 3]


def of_this_rank(comm: Any) -> list[int]:
    return gs.shard_indices(7, 1, 2, uneven="keep").tolist()


def test_ranks_share_without_a_word() -> None:
    assert sorted(chain(*SHM.run(3, of_this_rank))) == list(range(7))


@pytest.mark.parametrize(
    ("arguments", "options", "match"),
    [
        ((-1,), {}, "n to be an integer of at least 0, got -1"),
        ((2.0,), {}, "n to be"),
        ((True,), {}, "n to be"),
        ((2**63,), {}, "n of at most"),
        ((2**62,), {"shuffle": False}, "n of at most"),
        ((4, -1), {}, "epoch to be"),
        ((4, 0, "x"), {}, "seed to be"),
        ((4,), {"uneven": "wrap"}, "uneven to be one of pad, drop, keep, got 'wrap'"),
        ((4,), {"communicator": 3}, "Communicator"),
    ],
)
def test_misuse_is_told(arguments: tuple[Any, ...], options: dict[str, Any], match: str) -> None:
    with pytest.raises(gs.InvalidArgument, match=match):
        gs.shard_indices(*arguments, **options)
